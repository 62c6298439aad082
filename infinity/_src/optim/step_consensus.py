"""Agreement of ranks on a step: the values of parameter groups, described so that ranks can compare
them.

A scheduler that follows the loss of one rank (ReduceLROnPlateau) gives each rank a different lr. A
norm over one rank's gradients gives each rank a different clipping factor. Each rank would then
update its shard of every parameter by a different rule, and no loss would show it.

All ranks must have the same names and kinds of values, in any order. Numbers may differ by
rounding: processors differ in the last bits of a scheduler's or a norm's result.

With two generations ranks also agree on the outcome of a step: whether an update failed on any rank
(`failed_anywhere`), and with which errors (`cause_of_undo`).

Before a step ranks agree whether a gradient is not finite on any of them (`nonfinite_anywhere`).
All raise, skip the step or take it, as `Policy.on_nonfinite` says (`refuse_nonfinite`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from infinity._src.base.wording import listed
from infinity._src.distributed.communicator import Comm, digest_of_text, fingerprinted
from infinity._src.params.unit import Param
from infinity.errors import NonFiniteGradient, PeerFailed

_TEXT_MAX = 500
"""Characters of an error message that a rank sends to the other ranks."""


class Grouped(Protocol):
    """An optimizer over states at rest."""

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def group_of(self, param: Param) -> dict[str, Any]:
        """Return the parameter's group as it is now."""


class StepDescription(NamedTuple):
    """Description of a step, which ranks exchange. what: title and digest of the values that must
    be equal. numbers: the values that are compared with a tolerance. names: a name for each of
    `numbers`, for messages.
    """

    what: str
    numbers: list[float]
    names: list[str]


def values_of(optimizer: Grouped) -> list[dict[str, Any]]:
    """Return for each group the values that an update uses, without entries that other code adds
    (a scheduler adds `initial_lr`).
    """
    used = optimizer.defaults
    return [
        {
            key: value.item() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key in used
        }
        for group in optimizer.param_groups
    ]


def describe_step(optimizer: Grouped, params: Sequence[Param]) -> StepDescription:
    """Describe a step that updates these parameters: the values of their groups, and the factors
    and bounds that the loop applied to their gradients.
    """
    numbers: list[float] = []
    names: list[str] = []

    # Ranks compare numbers with a tolerance, and all other values by a digest.
    def number(name: str, value: float) -> str:
        numbers.append(float(value))
        names.append(name)
        return "#"

    held = _values_by_group(optimizer, params, number)
    done = []
    # By name: ranks may have added groups and parameters in another order.
    for param in sorted(params, key=lambda param: param.name):
        for kind, factor in param.grad.log if param.grad is not None else ():
            done.append((param.name, kind))
            how = "clamped at" if kind.startswith("clamp") else "times"
            number(f"the gradient of {param.name} {how}", factor)
    return StepDescription(
        fingerprinted(f"a step of {_title(optimizer, params)}", _digest([held, done])),
        numbers,
        names,
    )


def describe_registration(optimizer: Grouped, params: Sequence[Param]) -> list[str]:
    """Describe the registration of an optimizer: these parameters, by name, each with the values of
    its group.
    """
    groups, found = _values_by_group(optimizer, params, lambda _name, value: f"{value:.6g}")
    rules = [json.dumps(group) for group in groups]
    return [_title(optimizer, params), *(f"{name} with {rules[place]}" for name, place in found)]


def nonfinite_anywhere(comm: Comm, params: Sequence[Param]) -> list[Param]:
    """Return the parameters whose gradient is not finite on some rank. Collective: all ranks pass
    the same parameters.
    """
    # Each rank has a shard of the gradient, so an inf may be on one rank only.
    bad = comm.all_reduce_any(
        [param.grad is not None and not param.grad.finite() for param in params]
    )
    return [param for param, is_bad in zip(params, bad, strict=True) if is_bad]


def first_anywhere(comm: Comm, params: Sequence[Param], flags: Sequence[bool]) -> Param | None:
    """Return the first of these parameters whose flag is set on some rank. Collective."""
    found = comm.all_reduce_any(flags)
    return next((param for param, flag in zip(params, found, strict=True) if flag), None)


def refuse_nonfinite(bad: Sequence[Param], mode: str) -> bool:
    """Apply `on_nonfinite` to the parameters that `nonfinite_anywhere` found. Returns whether the
    step is taken.

    Raises: NonFiniteGradient when mode is "raise".
    """
    if not bad or mode == "ignore":
        return True
    if mode == "skip":
        return False
    names = listed((param.name for param in bad), most=3)
    raise NonFiniteGradient(
        f"gradients of {names} are not finite; no state was changed. Policy(on_nonfinite='skip') "
        "skips such steps, 'ignore' applies them"
    )


def failed_anywhere(comm: Comm, fault: BaseException | None) -> bool:
    """Return whether an update failed on any rank. fault: the error on this rank. Collective."""
    return comm.all_reduce_any([fault is not None])[0]


def cause_of_undo(comm: Comm, fault: BaseException | None) -> BaseException:
    """Return the error for which all ranks undo the step: this rank's error, or PeerFailed with the
    messages of the other ranks. Collective.
    """
    mine = "" if fault is None else str(fault)[:_TEXT_MAX]
    # The colon, because `all_gather_bytes` takes no empty message.
    texts = [each[1:].decode() for each in comm.all_gather_bytes(f":{mine}".encode())]
    faults = [f"on rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    return fault or PeerFailed("; ".join(faults))


def _title(optimizer: Grouped, params: Sequence[Param]) -> str:
    return (
        f"{type(optimizer).__name__} for {len(params)} parameter{'s' if len(params) != 1 else ''}"
    )


def _values_by_group(
    optimizer: Grouped, params: Sequence[Param], number: Callable[[str, float], str]
) -> tuple[list[dict[str, Any]], list[tuple[str, int]]]:
    """Return the values of groups, and each parameter's name with the position of its group among
    them.
    """
    places: dict[int, int] = {}
    groups: list[dict[str, Any]] = []
    found: list[tuple[str, int]] = []
    for param in sorted(params, key=lambda param: param.name):
        group = optimizer.group_of(param)
        if id(group) not in places:
            places[id(group)] = len(groups)
            # Only hyper-parameters of the class: a logger's note in a group is no difference.
            used = sorted(key for key in group if key in optimizer.defaults)
            groups.append({key: _plain(key, group[key], number) for key in used})
        found.append((param.name, places[id(group)]))
    return groups, found


def _plain(name: str, value: Any, number: Callable[[str, float], str]) -> Any:
    """Return plain data in which `number` has replaced each number. Any other object becomes the
    name of its type, since its repr has an address, which differs by process.
    """
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
