"""Optimizer states of foreign checkpoints: matched by name with those that an optimizer holds, then
written one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from infinity._src.checkpoint.formats.load import LastRead, Loaded, explain
from infinity._src.optim.state_access import OptimizerState
from infinity._src.params.unit import Param

MASTER = "master"


@dataclasses.dataclass(frozen=True)
class Held:
    """A parameter with its optimizer states, and the names of those: tensors of its shape, and
    numbers.
    """

    param: Param
    state: OptimizerState
    tensors: tuple[str, ...]
    numbers: tuple[str, ...]


class StateSource(Protocol):
    """The optimizer states of a checkpoint, each with a name of its own."""

    @property
    def label(self) -> str:
        """The checkpoint, in messages."""

    @property
    def names(self) -> Collection[str]:
        """All names."""

    def name_of(self, param: str, state: str) -> str:
        """Return the name that a state of a parameter has."""

    def fault(self, name: str, shape: tuple[int, ...] | None) -> str:
        """Say why a state is no tensor of this shape (None: no number); "" if it is one."""

    def read(self, name: str) -> Any:
        """Read one. Blocks."""


@dataclasses.dataclass(frozen=True)
class MatchedStates:
    """The states that were found, in the order in which they are written."""

    names: list[tuple[Held, str, str]]  # (parameter, state, name in the checkpoint)
    left_out: Loaded


def match_states(source: StateSource, every: Sequence[Held], *, strict: bool) -> MatchedStates:
    """Find the states of every parameter that is held. Nothing is read or written.

    A master is optional: without one the parameter's own value is it. Raises: ValueError naming
    what is missing or unexpected (with `strict`), and what has another shape (always).
    """
    there = set(source.names)
    found: list[tuple[Held, str, str]] = []
    missing: list[str] = []
    wrong: list[str] = []
    for held in every:
        wanted = (*held.tensors, *held.numbers)
        keys = held.param.keys
        # Any of a tied parameter's names may be the one that the file has.
        key = next(
            (key for key in keys if any(source.name_of(key, state) in there for state in wanted)),
            keys[0],
        )
        for state in wanted:
            name = source.name_of(key, state)
            if name in there:
                found.append((held, state, name))
                fault = source.fault(
                    name, held.param.whole_shape if state in held.tensors else None
                )
                wrong += [fault] if fault else []
            # A checkpoint of a plain loop has none: the parameter's own value is the master then.
            elif state != MASTER:
                missing.append(name)
    unexpected = sorted(there - {name for _, _, name in found})
    # Each once: the tiles of a weight say the same.
    missing, wrong = list(dict.fromkeys(missing)), list(dict.fromkeys(wrong))
    if wrong or (strict and (missing or unexpected)):
        raise ValueError(
            explain(source.label, missing if strict else [], unexpected if strict else [], wrong)
        )
    return MatchedStates(found, Loaded(tuple(missing), tuple(unexpected)))


def take_in_states(source: StateSource, matched: MatchedStates) -> None:
    """Write the states that were matched, one tensor in memory at a time. Calls no collective.
    Blocks.

    Raises: any error of reading or writing, ValueError for an impossible number; then some states
    have been written.
    """
    # By the names in the file: the tiles of a weight take their parts of one tensor, which is read
    # once.
    read = LastRead(source.read)
    order = {name: index for index, (_, _, name) in reversed(list(enumerate(matched.names)))}
    for held, state, name in sorted(matched.names, key=lambda match: order[match[2]]):
        value: Any = read(name)
        if state in held.numbers:
            value = value.item() if hasattr(value, "item") else value
            # torch.optim keeps it as a tensor of fp32; here it counts in whole numbers.
            if state == "step" and isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{name} of {source.label} is {value!r}, which is no number")
        place = held.param.place
        held.state[state] = (
            place.of(value) if place is not None and state in held.tensors else value
        )
