"""Code shared by `infinity.integrations` and `infinity.compat`. It uses infinity's public names and
imports no trainer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import infinity as inf

STATES = "infinity"
"""Directory of the engine's states inside a trainer's checkpoint."""

_OPTIMIZERS = (inf.AdamW, inf.SGD, inf.Lion, inf.Elementwise)
# Attributes under which wrappers of trainers keep the optimizer.
_WRAPPED = ("optimizer", "_optimizer")


def engine_optimizer(optimizer: Any) -> Any:
    """Return infinity's optimizer inside a trainer's wrappers; None if there is none."""
    seen: set[int] = set()
    while not isinstance(optimizer, _OPTIMIZERS):
        # A wrapper that forwards unknown attributes may return itself.
        if optimizer is None or id(optimizer) in seen:
            return None
        seen.add(id(optimizer))
        optimizer = next(
            (getattr(optimizer, name) for name in _WRAPPED if hasattr(optimizer, name)), None
        )
    return optimizer


def optimizers_of(model: torch.nn.Module, optimizers: Iterable[Any]) -> list[Any]:
    """Unwrap optimizers, and return infinity's that have parameters of this offloaded model."""
    own = {id(param) for param in model.parameters()}
    found = [engine_optimizer(optimizer) for optimizer in optimizers]
    return [
        optimizer
        for optimizer in found
        if optimizer is not None
        and any(id(param) in own for group in optimizer.param_groups for param in group["params"])
    ]


def only_engine(model: torch.nn.Module, call: str) -> torch.nn.Module:
    """Return the one offloaded module in `model`, which may be a wrapper around it (PEFT, compile).

    call: the integration's call, for messages. Raises: ValueError if there is none, or several.
    """
    found = inf.offloaded_modules(model)
    if len(found) != 1:
        raise ValueError(
            f"{call} wants one offloaded module in {type(model).__name__}, and there are "
            f"{len(found)}: call inf.offload(model, policy) on the model, once"
        )
    return found[0]


def check_all_offloaded(model: torch.nn.Module, call: str) -> None:
    """Check that `model` itself and all its parameters are offloaded: the engine saves no other
    parameter, and on several ranks reduces no other gradient.

    call: the integration's call, for messages. Raises: ValueError naming the other parameters.
    """
    plain = [name for name, param in model.named_parameters() if not inf.is_offloaded(param)]
    engines = inf.offloaded_modules(model)
    if not plain and engines[:1] == [model]:
        return
    adapted = has_adapters(model)
    when = "after get_peft_model" if adapted else "on it, when it has all its parameters"
    if plain:
        shown = ", ".join(plain[:3]) + (f" and {len(plain) - 3} more" if len(plain) > 3 else "")
        what = f"{shown} of {type(model).__name__} are not offloaded"
    else:
        inner = type(engines[0]).__name__ if engines else "no module"
        what = f"{inner} in {type(model).__name__} is offloaded, not {type(model).__name__} itself"
    raise ValueError(f"{call}: {what}; call inf.offload(model, policy) {when}")


def share_values(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Broadcast rank 0's values, as DDP does. Tensors on meta are skipped. Collective.

    device: the device on which the process group communicates.
    """
    for tensor in tensors:
        if not tensor.is_meta:
            # Staged on the device: NCCL cannot send CPU memory. As bytes: gloo supports few dtypes.
            moved = tensor.detach().to(device).contiguous()
            dist.broadcast(moved.reshape(-1).view(torch.uint8), 0)
            with torch.no_grad():
                tensor.copy_(moved)


def has_states(directory: Path) -> bool:
    """Return whether a trainer's checkpoint contains the engine's states."""
    return (directory / STATES).is_dir()


def check_methods(owner: type, names: Sequence[str], package: str, tested: str) -> None:
    """Check that the methods that an integration overrides or calls exist. A new release of the
    trainer may have renamed one; an override would then silently do nothing.

    Raises: ImportError naming the methods and the version.
    """
    missing = [name for name in names if not callable(inspect.getattr_static(owner, name, None))]
    if missing:
        raise ImportError(
            f"{package} {version(package)} has no {owner.__name__}.{', '.join(missing)}, which "
            f"infinity's integration builds on; it is tested with {package} {tested}: install that"
        )


def has_adapters(model: torch.nn.Module) -> bool:
    """Return whether a model has PEFT adapters. PEFT need not be installed."""
    return any(map(_is_peft, model.modules()))


def _is_peft(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("peft.")
