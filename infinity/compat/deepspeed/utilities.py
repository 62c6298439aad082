"""Small functions and classes that scripts import from `deepspeed.utils`,
`deepspeed.checkpoint.utils` and `deepspeed.moe`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from infinity.compat.deepspeed import comm
from infinity.compat.deepspeed.accelerator import get_accelerator
from infinity.compat.deepspeed.errors import DeepSpeedRefusal

logger = logging.getLogger("DeepSpeed")

ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
ADAGRAD_OPTIMIZER = "adagrad"
LION_OPTIMIZER = "lion"
SGD_OPTIMIZER = "sgd"


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these ranks; on all ranks if `ranks` is empty or contains -1."""
    here = comm.get_rank()
    if not ranks or -1 in ranks or here in ranks:
        logger.log(level, "[Rank %s] %s", here, message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log a message with the memory in use on rank 0, if `force`."""
    if force and comm.get_rank() == 0:
        used = get_accelerator().memory_allocated() / 2**30
        logger.info("%s: %.2f GiB in use on %s", message, used, get_accelerator().device_name())


def clone_tensors_for_torch_save(item: Any, device: Any = None) -> Any:
    """Copy a container and clone its tensors, so that torch.save writes no larger storages. device:
    of the clones; None: the CPU."""
    where = torch.device("cpu") if device is None else device
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(where)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(each, where) for each in item)
    if isinstance(item, dict):
        return type(item)(
            (key, clone_tensors_for_torch_save(value, where)) for key, value in item.items()
        )
    return item


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype
) -> Callable[..., torch.Tensor]:
    """Wrap a tensor constructor so that its floating-point results have `target_fp_dtype`.
    (`zero.Init` does not use it; transformers patches this name around `zero.Init`.)
    """

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = fn(*args, **kwargs)
        return made.to(target_fp_dtype) if made.is_floating_point() else made

    return wrapped


class OnDevice:
    """A context in which modules are built on a device ("meta", say) with a default dtype."""

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> None:
        self.dtype, self.enabled = dtype, enabled
        self._device = torch.device(device)
        self._before = torch.get_default_dtype()

    def __enter__(self) -> OnDevice:  # noqa: PYI034
        if self.enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self._device.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.enabled:
            self._device.__exit__(*exc)
            torch.set_default_dtype(self._before)


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
    """Return the parameter groups as a list; DeepSpeed's experts, which it splits, do not exist."""
    groups = [param_groups] if isinstance(param_groups, Mapping) else param_groups
    return [dict(group) for group in groups]
