"""Probe of a class of torch.optim: its states, learnt by running it on a small parameter, and
whether it is elementwise.

An update is elementwise if an element's new values depend on that element alone (its value,
gradient and states) and on numbers that all elements share (step count, rate). Then a parameter may
be updated slice by slice. The probe checks this: STEPS steps on NUMEL elements, on their two halves
and on the same in two dimensions must leave the same bits. It cannot see behaviour that begins
later, or only with larger parameters.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import torch

# Halves are whole vectors of every CPU.
NUMEL = 256
SIDE = 16
# RAdam, for one, becomes another update in its sixth step.
STEPS = 8
MOMENTS_MAX = 3


@dataclasses.dataclass(frozen=True)
class Traits:
    """The states of a class for each parameter.

    moments: names of states of the parameter's shape. scalars: the other entries, with values of
    the right types.
    """

    moments: tuple[str, ...]
    scalars: dict[str, Any]


def defaults_of(torch_class: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a group without settings of its own. Raises: ValueError for
    anything but a class of torch.optim.
    """
    if not (isinstance(torch_class, type) and issubclass(torch_class, torch.optim.Optimizer)):
        raise ValueError(
            f"{torch_class!r} is no torch.optim.Optimizer class; write "
            "inf.Elementwise(torch.optim.Adagrad, params, lr=...)"
        )
    try:
        made = _make(torch_class, torch.zeros(NUMEL), {}, settings)
    except (RuntimeError, AssertionError) as error:
        _refuse(torch_class, str(error), error)
    return dict(made.defaults)


def probe(torch_class: Any, group: dict[str, Any], settings: dict[str, Any]) -> Traits:
    """Run the class on a small parameter, under the group's hyper-parameters.

    settings: the arguments that the class was given. Raises: ValueError, with the reason, for a
    class that is not elementwise or keeps more states than a chunk has room for.
    """
    whole, states = _run(torch_class, torch.arange(NUMEL), group, settings)
    moments = tuple(name for name, value in states[-1].items() if _per_element(value, whole))
    # The format is fixed when the optimizer is built, so a state that comes or goes later has no
    # section.
    for state in states[:-1]:
        if {name for name, value in state.items() if _per_element(value, whole)} != set(moments):
            _refuse(torch_class, "its states are not the same in every step")
    # Sections hold fp32, bf16 or fp16 of fp32 values; others would be rounded twice.
    odd = [name for name in moments if states[-1][name].dtype is not torch.float32]
    if odd:
        _refuse(torch_class, f"its state {odd[0]} is {states[-1][odd[0]].dtype}, not float32")
    if len(moments) > MOMENTS_MAX:
        _refuse(
            torch_class,
            f"it keeps {len(moments)} states for each element; at most {MOMENTS_MAX} have room",
        )
    scalars = {name: value for name, value in states[-1].items() if name not in moments}
    for name, value in scalars.items():
        if not (value is None or isinstance(value, (bool, int, float))) and not (
            isinstance(value, torch.Tensor) and value.numel() == 1
        ):
            _refuse(
                torch_class, f"its state {name} is neither a number nor of the parameter's shape"
            )
    # Halves show a look at other elements or at the size; two dimensions show a look at the shape.
    half = NUMEL // 2
    for index in (
        torch.arange(half),
        torch.arange(half, NUMEL),
        torch.arange(NUMEL).view(SIDE, SIDE),
    ):
        part, part_states = _run(torch_class, index, group, settings)
        flat = index.reshape(-1)
        same = torch.equal(part.view(-1), whole[flat]) and all(
            torch.equal(part_states[-1][name].view(-1), states[-1][name][flat]) for name in moments
        )
        if not same:
            _refuse(
                torch_class,
                "its step on a part of a parameter is not that part of its step on the whole: it "
                "looks at more than one element at a time, or at the shape",
            )
        # A number that follows the values would differ from slice to slice.
        if any(part_states[-1].get(name) != value for name, value in scalars.items()):
            _refuse(torch_class, "numbers that it keeps depend on the parameter's values")
    return Traits(moments, scalars)


def make_group(group: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return a group with the hyper-parameters of `group` and one parameter."""
    return {**{key: value for key, value in group.items() if key != "params"}, "params": [param]}


def _make(
    torch_class: Any, param: torch.Tensor, group: dict[str, Any], settings: dict[str, Any]
) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = torch_class([make_group(group, param)], **settings)
    return made


def _run(
    torch_class: Any, index: torch.Tensor, group: dict[str, Any], settings: dict[str, Any]
) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Run STEPS steps on the elements `index` of the probe. Returns the parameter afterwards, and
    its state after every step.
    """
    # Values of many sizes, the same for an element in every slice.
    position = index.to(torch.float32)
    param = torch.cos(position * 0.7) * (0.1 + position / 50)
    states = []
    try:
        made = _make(torch_class, param, group, settings)
        for step in range(STEPS):
            # Gradients that differ in size, sign and order from step to step.
            param.grad = torch.sin(position * (1.3 + step)) * (1e-3 + position / 100)
            made.step()  # type: ignore[call-arg]
            state = made.state[param]
            states.append(
                {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in state.items()}
            )
    except TypeError as error:
        _refuse(
            torch_class,
            "its step() wants a closure" if "closure" in str(error) else str(error),
            error,
        )
    except (RuntimeError, ValueError, AssertionError, IndexError, NotImplementedError) as error:
        _refuse(torch_class, str(error), error)
    return param.detach(), states


def _per_element(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape


def _refuse(torch_class: Any, reason: str, cause: Exception | None = None) -> NoReturn:
    raise ValueError(
        f"{torch_class.__name__} cannot be computed chunk by chunk: {reason}. Elementwise takes "
        "classes like torch.optim's Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop "
        "and Adam"
    ) from cause
