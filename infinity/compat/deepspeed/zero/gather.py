"""`GatheredParameters`: parameters that are readable and writable for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

import infinity as inf
from infinity.compat.deepspeed import comm
from infinity.compat.deepspeed.parameters import (
    ZeroParamStatus,
    by_handle,
    handle_of,
    is_zero_param,
    set_status,
)


def gather_whole(module: torch.nn.Module) -> None:
    """Gather the parameters that each rank keeps whole (stages 0 to 2): from here on a script reads
    them outside of forward, as with DeepSpeed, by one rank alone, too. Collective.
    """
    handle = inf.handle(module)
    if handle.policy.zero < 3:
        with handle.gather(module.parameters()):
            pass


class GatheredParameters:
    """A context inside which parameters can be read and written.

    params: a parameter, or an iterable of them; those that no engine holds, and that were not built
    under `zero.Init`, are left alone. modifier_rank: the rank whose values all ranks have at the
    end; None: values stay as they were written, and all ranks must have written the same.
    fwd_module: nothing depends on it. enabled: False makes it a context that does nothing.

    Blocks; all ranks enter and leave it together. Raises: what `inf.handle(model).gather` raises.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[Any],
        modifier_rank: int | None = None,
        fwd_module: torch.nn.Module | None = None,  # noqa: ARG002 - hooks find every use
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        self.src_rank = modifier_rank
        given: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
        # Each once, in the order given, which is the same on all ranks.
        self.params: list[Any] = list(
            {
                id(param): param
                for param in given
                if is_zero_param(param) or handle_of(param) is not None
            }.values()
        )
        self._windows = contextlib.ExitStack()
        self._before: list[tuple[Any, ZeroParamStatus]] = []

    def __enter__(self) -> None:
        if not self.enabled:
            return
        for handle, params in by_handle(self.params):
            self._windows.enter_context(handle.gather(params))
        # A context around this one may have them open.
        self._before = [(param, param.ds_status) for param in self.params if is_zero_param(param)]
        for param, _ in self._before:
            set_status(param, ZeroParamStatus.AVAILABLE)

    def __exit__(self, *exc: object) -> None:
        if not self.enabled:
            return
        with self._windows:
            for param, status in self._before:
                set_status(param, status)
            # After an exception the other ranks may not come.
            if self.src_rank is not None and exc[0] is None:
                for param in self.params:
                    comm.broadcast_values(param.data, self.src_rank)
