"""Optimizers of torch, replaced by the engine's of the same rule. No trainer is imported here."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

import infinity as inf

# The engine's optimizers of the same rule, and the settings that they take. What another setting
# turns on, they do not have.
_TWINS: dict[type, tuple[Any, tuple[str, ...]]] = {
    torch.optim.AdamW: (inf.AdamW, ("lr", "betas", "eps", "weight_decay")),
    torch.optim.SGD: (inf.SGD, ("lr", "momentum", "dampening", "weight_decay", "nesterov")),
}
# They choose between kernels, and change no rule.
_KERNELS = ("foreach", "fused", "capturable", "decoupled_weight_decay")
_NONE: Mapping[type, Any] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Twin:
    """The engine's optimizer of the rule of another. make: builds it over parameter groups. drops:
    settings of the groups that it has not.
    """

    make: Callable[[list[dict[str, Any]]], Any]
    drops: tuple[str, ...] = ()

    def rehearse(self, groups: list[dict[str, Any]]) -> Any:
        """Build it over the settings of these groups, without their parameters. Raises: ValueError
        where it cannot have the settings."""
        dropped = (*self.drops, "params")
        bare = [{key: group[key] for key in group if key not in dropped} for group in groups]
        return self.make([{"params": [], **group} for group in bare])

    def build(self, groups: list[dict[str, Any]]) -> Any:
        """Build it over these groups, which it shares: schedulers of the one change the other."""
        for group in groups:
            for key in self.drops:
                # A manifest would name it.
                group.pop(key, None)
        return self.make(groups)


def twin_of(
    optimizer: torch.optim.Optimizer,
    *,
    kinds: Mapping[type, type] = _NONE,
    twins: Mapping[type, tuple[Any, tuple[str, ...]]] = _NONE,
) -> Twin:
    """Return the twin of an optimizer of torch, or of an elementwise class.

    kinds: further classes, and those of torch whose rule they have. twins: further classes, and the
    engine's with the settings that it takes. Raises: ValueError for states that were loaded.
    """
    groups = optimizer.param_groups
    kind = kinds.get(type(optimizer), type(optimizer))
    # Some make states in their constructor: of no step.
    if any(state.get("step", 1) != 0 for state in optimizer.state.values()):
        raise ValueError(
            f"{type(optimizer).__name__} has states already, which its replacement would not have; "
            "prepare first, and load states then"
        )
    made, named = {**_TWINS, **twins}.get(_rule(kind, groups), (None, ()))
    # Of the class: what schedulers and scripts keep in a group changes no rule.
    others = [key for key in optimizer.defaults if key not in named]
    told = [key for group in groups for key in others if key not in _KERNELS and group.get(key)]
    if made is not None and not told:
        # A group that is added later has the defaults of the optimizer that stood here.
        defaults = {key: optimizer.defaults[key] for key in named if key in optimizer.defaults}
        return Twin(lambda given: made(given, **defaults), tuple(others))
    taken = inspect.signature(kind).parameters
    settings = {key: value for key, value in optimizer.defaults.items() if key in taken}
    return Twin(lambda given: inf.Elementwise(kind, given, **settings))


def _rule(kind: type, groups: list[dict[str, Any]]) -> type:
    """The class that stands for the rule: Adam is AdamW without decay, and with a decoupled one."""
    if kind is not torch.optim.Adam:
        return kind
    coupled = any(
        group["weight_decay"] and not group.get("decoupled_weight_decay") for group in groups
    )
    return kind if coupled else torch.optim.AdamW


class _Noted(LRScheduler):
    """Makes an optimizer note its first step, as the constructor of any scheduler does: one that is
    rebound looks for that. Changes no rate."""

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]


def note_steps_as(before: torch.optim.Optimizer, now: torch.optim.Optimizer) -> None:
    """Make `now` note its first step where a scheduler has made `before` do so."""
    if hasattr(before.step, "_wrapped_by_lr_sched"):
        _Noted(now)


def rebind(scheduler: Any, before: torch.optim.Optimizer, now: torch.optim.Optimizer) -> None:
    """Make a scheduler, and those that it chains, one of the optimizer that was put in place."""
    if getattr(scheduler, "optimizer", None) is before:
        scheduler.optimizer = now
    for inner in getattr(scheduler, "_schedulers", ()):
        rebind(inner, before, now)
