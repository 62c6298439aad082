"""Code shared by `infinity.integrations` and `infinity.compat`. It uses infinity's public names and
imports no trainer."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

import infinity as inf

STATES = "infinity"
"""Directory of the engine's states inside a trainer's checkpoint."""

_OPTIMIZERS = (inf.AdamW, inf.SGD, inf.Lion, inf.Elementwise, inf.Matrixwise)
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


# -- Optimizers of torch, replaced by the engine's -------------------------------------------------


def _muon(groups: list[dict[str, Any]], **settings: Any) -> inf.Muon:
    # torch.optim.Muon updates embeddings and heads as matrices, too.
    for group in groups:
        group["matrixwise"] = True
    made = inf.Muon(groups, **settings)
    made.defaults["matrixwise"] = True
    return made


# Infinity's optimizer with the same rule, and the settings that it supports. Any other setting that
# is not off needs `Elementwise`.
_TWINS: dict[type, tuple[Any, tuple[str, ...]]] = {
    torch.optim.AdamW: (inf.AdamW, ("lr", "betas", "eps", "weight_decay")),
    torch.optim.SGD: (inf.SGD, ("lr", "momentum", "dampening", "weight_decay", "nesterov")),
    torch.optim.Muon: (_muon, tuple(inspect.signature(torch.optim.Muon).parameters)[1:]),
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
    """Return the twin of a torch optimizer: AdamW, SGD or Muon of infinity, else `Elementwise`.

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
