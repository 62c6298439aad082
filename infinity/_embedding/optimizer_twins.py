"""Replaces a torch optimizer by infinity's with the same update rule. Imports no trainer."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

import infinity as inf

# Infinity's optimizer with the same rule, and the settings that it supports. Any other setting that
# is not off needs `Elementwise`.
_TWINS: dict[type, tuple[Any, tuple[str, ...]]] = {
    torch.optim.AdamW: (inf.AdamW, ("lr", "betas", "eps", "weight_decay")),
    torch.optim.SGD: (inf.SGD, ("lr", "momentum", "dampening", "weight_decay", "nesterov")),
}
# Settings that select a kernel. They do not change the rule.
_KERNELS = ("foreach", "fused", "capturable", "decoupled_weight_decay")
_NONE: Mapping[type, Any] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Twin:
    """Builder of infinity's optimizer with the rule of a torch optimizer. make: builds it over
    parameter groups. drops: settings of the groups that it does not support.
    """

    make: Callable[[list[dict[str, Any]]], Any]
    drops: tuple[str, ...] = ()

    def rehearse(self, groups: list[dict[str, Any]]) -> Any:
        """Build it over these groups without their parameters. Raises: ValueError for settings that
        it refuses."""
        dropped = (*self.drops, "params")
        bare = [{key: group[key] for key in group if key not in dropped} for group in groups]
        return self.make([{"params": [], **group} for group in bare])

    def build(self, groups: list[dict[str, Any]]) -> Any:
        """Build it over these groups, shared with the old optimizer: schedulers of either set both.
        """
        for group in groups:
            for key in self.drops:
                # A checkpoint's manifest would record it.
                group.pop(key, None)
        return self.make(groups)


def twin_of(
    optimizer: torch.optim.Optimizer,
    *,
    kinds: Mapping[type, type] = _NONE,
    twins: Mapping[type, tuple[Any, tuple[str, ...]]] = _NONE,
) -> Twin:
    """Return the twin of a torch optimizer: AdamW or SGD of infinity, else `Elementwise`.

    kinds: maps a further class to the torch class whose rule it has. twins: maps a further class to
    infinity's, with the settings that this supports. Raises: ValueError if the optimizer has states
    of a step.
    """
    groups = optimizer.param_groups
    kind = kinds.get(type(optimizer), type(optimizer))
    # Some constructors allocate states, with step 0.
    if any(state.get("step", 1) != 0 for state in optimizer.state.values()):
        raise ValueError(
            f"{type(optimizer).__name__} has states already, which its replacement would not have; "
            "prepare first, and load states then"
        )
    made, named = {**_TWINS, **twins}.get(_rule(kind, groups), (None, ()))
    # Only the class's settings: other keys that schedulers and scripts store change no rule.
    others = [key for key in optimizer.defaults if key not in named]
    told = [key for group in groups for key in others if key not in _KERNELS and group.get(key)]
    if made is not None and not told:
        # Groups added later get the defaults of the replaced optimizer.
        defaults = {key: optimizer.defaults[key] for key in named if key in optimizer.defaults}
        return Twin(lambda given: made(given, **defaults), tuple(others))
    taken = inspect.signature(kind).parameters
    settings = {key: value for key, value in optimizer.defaults.items() if key in taken}
    return Twin(lambda given: inf.Elementwise(kind, given, **settings))


def _rule(kind: type, groups: list[dict[str, Any]]) -> type:
    """Return AdamW for Adam without decay or with decoupled decay: the same rule. Else `kind`."""
    if kind is not torch.optim.Adam:
        return kind
    coupled = any(
        group["weight_decay"] and not group.get("decoupled_weight_decay") for group in groups
    )
    return kind if coupled else torch.optim.AdamW


class _Noted(LRScheduler):
    """Wraps an optimizer's `step`, as any scheduler's constructor does. A scheduler that `rebind`
    moved expects the wrapper. Changes no rate."""

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]


def note_steps_as(before: torch.optim.Optimizer, now: torch.optim.Optimizer) -> None:
    """Wrap `now.step` as schedulers do, if a scheduler wrapped `before.step`."""
    if hasattr(before.step, "_wrapped_by_lr_sched"):
        _Noted(now)


def rebind(scheduler: Any, before: torch.optim.Optimizer, now: torch.optim.Optimizer) -> None:
    """Point a scheduler, and the schedulers that it chains, from `before` to `now`."""
    if getattr(scheduler, "optimizer", None) is before:
        scheduler.optimizer = now
    for inner in getattr(scheduler, "_schedulers", ()):
        rebind(inner, before, now)
