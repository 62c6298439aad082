"""What updates take from an optimizer's parameter groups, and what ranks compare of it before they take the same step.

A scheduler that follows the loss of its own rank (ReduceLROnPlateau) gives every rank another lr; a norm of one rank's part
clips by another factor. Each would then update its shard of every parameter in its own way, and no loss would tell.

Names and kinds must be the same, in whatever order the ranks have them; numbers but for rounding, since processors differ in
the last bits of what a scheduler or a norm computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from infinity._src.distributed.collectives import digest_of_text, fingerprinted
from infinity._src.params.unit import Param


class Grouped(Protocol):
    """An optimizer over states at rest."""

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def group_of(self, param: Param) -> dict[str, Any]:
        """The parameter's group as it is now."""


class Told(NamedTuple):
    """A step, as ranks tell each other of it. names: one for each of `numbers`, for messages."""

    what: str
    numbers: list[float]
    names: list[str]


def values_of(optimizer: Grouped) -> list[dict[str, Any]]:
    """The values that an update takes from the groups; not what others keep there (schedulers: `initial_lr`)."""
    used = optimizer.defaults
    return [
        {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in group.items() if key in used}
        for group in optimizer.param_groups
    ]


def told_of_step(optimizer: Grouped, params: Sequence[Param]) -> Told:
    """A step that updates these parameters, with the values of their groups and what the loop did to their gradients."""
    numbers: list[float] = []
    names: list[str] = []

    def number(name: str, value: float) -> str:
        numbers.append(float(value))
        names.append(name)
        return "#"

    held = _held(optimizer, params, number)
    done = []
    for param in sorted(params, key=lambda param: param.name):
        for kind, factor in param.grad.log if param.grad is not None else ():
            done.append((param.name, kind))
            number(f"the gradient of {param.name} times", factor)
    return Told(fingerprinted(f"a step of {_title(optimizer, params)}", _digest([held, done])), numbers, names)


def told_of_holding(optimizer: Grouped, params: Sequence[Param]) -> list[str]:
    """What an optimizer holds from now on: these parameters, by name, each with the values of its group."""
    groups, found = _held(optimizer, params, lambda _name, value: f"{value:.6g}")
    rules = [json.dumps(group) for group in groups]
    return [_title(optimizer, params), *(f"{name} with {rules[place]}" for name, place in found)]


def _title(optimizer: Grouped, params: Sequence[Param]) -> str:
    return f"{type(optimizer).__name__} for {len(params)} parameter{'s' if len(params) != 1 else ''}"


def _held(
    optimizer: Grouped, params: Sequence[Param], number: Callable[[str, float], str]
) -> tuple[list[dict[str, Any]], list[tuple[str, int]]]:
    """The values of groups, and each parameter's name with the place of its group among them."""
    places: dict[int, int] = {}
    groups: list[dict[str, Any]] = []
    found: list[tuple[str, int]] = []
    for param in sorted(params, key=lambda param: param.name):
        group = optimizer.group_of(param)
        if id(group) not in places:
            places[id(group)] = len(groups)
            used = sorted(key for key in group if key in optimizer.defaults)
            groups.append({key: _plain(key, group[key], number) for key in used})
        found.append((param.name, places[id(group)]))
    return groups, found


def _plain(name: str, value: Any, number: Callable[[str, float], str]) -> Any:
    """What is data, its numbers as `number` has them; of anything else the type: an address is another one in every process."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int | float):
        return number(name, value)
    if isinstance(value, list | tuple):
        return [_plain(name, item, number) for item in value]
    return type(value).__name__


def _digest(values: Any) -> int:
    return digest_of_text(json.dumps(values))
