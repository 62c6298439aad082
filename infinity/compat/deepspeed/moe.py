"""`deepspeed.moe`: its layers are refused, and models without them pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from infinity.compat.deepspeed.errors import DeepSpeedRefusal


class MoE:
    """Refused: DeepSpeed's layer splits experts over ranks."""

    def __init__(self, *_args: Any, **_settings: Any) -> None:
        raise DeepSpeedRefusal(
            "deepspeed.moe.layer.MoE: the engine splits all states over all ranks, experts too; "
            "build the experts as ordinary modules (those of transformers, say)"
        )


def is_moe_param(param: torch.Tensor) -> bool:  # noqa: ARG001 - there are no such layers
    """Return False: no parameter is one of DeepSpeed's experts."""
    return False


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    max_group_size: int | None = None,  # noqa: ARG001
) -> list[dict[str, Any]]:
    """Return the parameter groups as a list: there are no experts of DeepSpeed to split off."""
    groups = [param_groups] if isinstance(param_groups, Mapping) else param_groups
    return [dict(group) for group in groups]
