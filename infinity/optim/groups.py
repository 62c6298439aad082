"""What updates take from an optimizer's parameter groups, and its name: by that ranks know that they take the same step.

A scheduler that follows the loss of its own rank (ReduceLROnPlateau) gives every rank another lr. Each would then update its
shard of every parameter with it, and no loss would tell.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Protocol

import torch


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


def step_name(optimizer: Grouped) -> str:
    """Names the optimizer's step: the same on all ranks whose values are the same. Of what is not data it takes the type."""
    values = values_of(optimizer)
    text = json.dumps(values, sort_keys=True, default=lambda value: type(value).__name__)
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    rates = sorted({group["lr"] for group in values if isinstance(group.get("lr"), float | int)})
    told = ", ".join(f"{rate:.10g}" for rate in rates[:3]) + (" ..." if len(rates) > 3 else "")
    return f"a step of {type(optimizer).__name__} with lr {told} (digest of its groups: {digest})"
