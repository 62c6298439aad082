"""What updates take from an optimizer's parameter groups, and names of its steps: by them ranks know that they take the same.

A scheduler that follows the loss of its own rank (ReduceLROnPlateau) gives every rank another lr; a norm of one rank's part
clips by another factor. Each would then update its shard of every parameter in its own way.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from infinity.comm.alike import digest_of_text, named
from infinity.params.unit import Param


class Grouped(Protocol):
    """An optimizer, of torch or ours."""

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]


def values_of(optimizer: Grouped) -> list[dict[str, Any]]:
    """The values that an update takes from the groups; not what others keep there (schedulers: `initial_lr`)."""
    used = optimizer.defaults
    return [
        {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in group.items() if key in used}
        for group in optimizer.param_groups
    ]


def step_name(optimizer: Grouped, params: Sequence[Param]) -> str:
    """Names a step that updates these parameters, with the values of all groups and what the loop did to the gradients."""
    values = values_of(optimizer)
    done = [(param.name, param.grad.log if param.grad is not None else []) for param in params]
    rates = sorted({group["lr"] for group in values if isinstance(group.get("lr"), float | int)})
    told = ", ".join(f"{rate:.10g}" for rate in rates[:3]) + (" ..." if len(rates) > 3 else "")
    return named(f"a step of {type(optimizer).__name__} with lr {told} for {len(params)} parameters", _digest([values, done]))


def holding_name(optimizer: Grouped, params: Sequence[Param]) -> str:
    """Names what an optimizer holds from now on: these parameters, with the values of its groups."""
    names = [param.name for param in params]
    told = ", ".join(names[:2]) + (" ..." if len(names) > 2 else "")
    return named(f"{type(optimizer).__name__} for {len(names)} parameters ({told})", _digest([values_of(optimizer), names]))


def _digest(values: Any) -> int:
    """Of what is no data, the type."""
    return digest_of_text(json.dumps(values, sort_keys=True, default=lambda value: type(value).__name__))
