"""`GatheredParameters`, attributes that scripts read from a parameter under ZeRO-3 (`ds_id`,
`ds_status`, ...), and the lookup of the engine that holds a parameter.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

import infinity as inf
from infinity.compat.deepspeed import comm


class ZeroParamStatus(enum.Enum):
    """States of a parameter's values: readable or not."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(enum.Enum):
    """Kinds of parameters. All of infinity's are PARTITIONED."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


_IDS = itertools.count()


def note_zero_param(param: torch.nn.Parameter) -> None:
    """Set the attributes of ZeRO-3 on a parameter, unless it has them."""
    if hasattr(param, "ds_id"):
        return
    # DeepSpeed's names, which scripts read from the parameter itself.
    param.ds_id = next(_IDS)  # type: ignore[attr-defined]
    param.ds_shape = param.shape  # type: ignore[attr-defined]
    param.ds_numel = param.numel()  # type: ignore[attr-defined]
    param.ds_persist = False  # type: ignore[attr-defined]
    param.ds_param_type = ZeroParamType.PARTITIONED  # type: ignore[attr-defined]
    set_status(param, ZeroParamStatus.NOT_AVAILABLE)


def set_status(param: torch.nn.Parameter, status: ZeroParamStatus) -> None:
    """Set a parameter's `ds_status`."""
    param.ds_status = status  # type: ignore[attr-defined]


def is_zero_param(param: object) -> bool:
    """Return whether a parameter has the attributes of ZeRO-3."""
    return isinstance(param, torch.Tensor) and hasattr(param, "ds_id")


def note_module(module: torch.nn.Module) -> None:
    """Link each parameter of an offloaded module to that module, for `handle_of`."""
    # Weak: a parameter that a script still references must not keep the model alive.
    reference = weakref.ref(module)
    for param in module.parameters():
        param.infinity_module = reference  # type: ignore[attr-defined]


def handle_of(param: torch.Tensor) -> inf.Handle | None:
    """Return the open handle of the engine that holds a parameter; None for any other tensor."""
    reference = getattr(param, "infinity_module", None)
    module = reference() if reference is not None else None
    if module is None:
        return None
    found = inf.handle(module)
    return None if found.closed else found


def by_handle(
    params: Iterable[torch.nn.Parameter],
) -> list[tuple[inf.Handle, list[torch.nn.Parameter]]]:
    """Group offloaded parameters by engine, in the order given. Other parameters are dropped."""
    found: dict[int, tuple[inf.Handle, list[torch.nn.Parameter]]] = {}
    for param in params:
        handle = handle_of(param)
        if handle is not None:
            found.setdefault(id(handle), (handle, []))[1].append(param)
    return list(found.values())


# -- Gathering -------------------------------------------------------------------------------------


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
