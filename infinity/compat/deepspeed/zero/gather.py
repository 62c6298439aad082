"""`GatheredParameters`: a context in which parameters are readable and writable."""

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
    """With stages 0 to 2, gather all parameters once, since each rank keeps them whole: afterwards
    a script can read them outside forward, even on one rank alone, as with DeepSpeed. Collective.
    """
    handle = inf.handle(module)
    if handle.policy.zero < 3:
        with handle.gather(module.parameters()):
            pass


class GatheredParameters:
    """A context inside which parameters can be read and written.

    params: a parameter, or an iterable of parameters; ignores any that is neither offloaded nor
    built under `zero.Init`. modifier_rank: at the end of the context this rank's values are
    broadcast; None: all ranks must have written the same values. fwd_module: ignored. enabled:
    False: the context does nothing.

    Blocks; collective on entry and exit. Raises: what `inf.handle(model).gather` raises.
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
        # Without duplicates, in the order given, which must be the same on all ranks.
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
        # An enclosing context may have set the status to AVAILABLE.
        self._before = [(param, param.ds_status) for param in self.params if is_zero_param(param)]
        for param, _ in self._before:
            set_status(param, ZeroParamStatus.AVAILABLE)

    def __exit__(self, *exc: object) -> None:
        if not self.enabled:
            return
        with self._windows:
            for param, status in self._before:
                set_status(param, status)
            # After an exception the other ranks may never join the broadcast.
            if self.src_rank is not None and exc[0] is None:
                for param in self.params:
                    comm.broadcast_values(param.data, self.src_rank)
