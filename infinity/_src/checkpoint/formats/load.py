"""Loads values and optimizer states of other formats into an offloaded model: matches all of them
by name, checks all of them, and then writes one tensor at a time.

For a parameter with optimizer states, a load writes the value into the fp32 master, in the
precision of the file; forward computes with the rounded master, as after an update. For other
parameters a load writes the value rounded to the parameter's dtype. A load of values does not
change moments, step counts and gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from infinity._src.base.dtypes import converts, copy_
from infinity._src.base.progress import ProgressLine
from infinity._src.base.wording import listed
from infinity._src.distributed.communicator import Comm
from infinity._src.memory.heap import Heap
from infinity._src.optim.state_access import OptimizerState, States
from infinity._src.params.materialize import NamedTensors, find_buffers
from infinity._src.params.unit import Param, Unit
from infinity._src.params.unshard import Unsharder
from infinity.aio import Format

_Match = TypeVar("_Match", bound=tuple[Any, ...])


class Engine(Protocol):
    """The part of the engine that loads and exports use."""

    units: list[Unit]
    states: States
    unsharder: Unsharder
    comm: Comm

    def read(self, param: Param) -> torch.Tensor:
        """Read the current value of one parameter to the CPU; collective on several ranks."""


class Loaded(NamedTuple):
    """Names that a load with strict=False skipped. missing: names that only the model has.
    unexpected: names that only the source has.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Matched:
    """Parameters and buffers, each with the name of its tensor in the source. left_out: names
    without a match.
    """

    params: list[tuple[Param, str]]
    buffers: list[tuple[torch.Tensor, str]]
    left_out: Loaded


def match(
    model: torch.nn.Module, units: Iterable[Unit], source: NamedTensors, *, strict: bool
) -> Matched:
    """Find the source's tensor for every parameter and persistent buffer. Reads and writes no
    tensor.

    A tied parameter has several names and takes the first that the source has. If the source has
    buffers that are not persistent, they are skipped.

    Raises: ValueError naming all tensors whose shape or kind of dtype differs and, with `strict`,
    all missing and unexpected names.
    """
    known = set(source.names())
    params: list[tuple[Param, str]] = []
    buffers: list[tuple[torch.Tensor, str]] = []
    missing: list[str] = []
    wrong: list[str] = []
    expected: set[str] = set()

    def found(names: Sequence[str], like: torch.Tensor | Param) -> str | None:
        expected.update(names)
        name = next((name for name in names if name in known), None)
        if name is None:
            missing.append(names[0])
            return None
        # The source has whole weights, so compare the shape of the whole weight, not of the tile.
        shape = like.whole_shape if isinstance(like, Param) else tuple(like.shape)
        if source.shape(name) != shape:
            wrong.append(f"{name} has shape {source.shape(name)} there and {shape} in the model")
        elif (there := source.dtype(name)) is not None and not converts(there, like.dtype):
            wrong.append(f"{name} is {there} in the source, {like.dtype} in the model")
        return name

    for param in (param for unit in units for param in unit.params):
        name = found(param.keys, param)
        if name is not None:
            params.append((param, name))
    # A model may register a buffer under several names; the source needs one of them.
    persistent: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for buffer in find_buffers(model):
        if buffer.persistent:
            persistent.setdefault(id(buffer.value), (buffer.value, []))[1].extend(buffer.names)
        else:
            expected.update(buffer.names)
    for value, names in persistent.values():
        name = found(names, value)
        if name is not None:
            buffers.append((value, name))
    left_out = _checked(source.label, missing, known - expected, wrong, strict=strict)
    return Matched(params, buffers, left_out)


def _checked(
    label: str, missing: Iterable[str], unexpected: Iterable[str], wrong: Iterable[str],
    *, strict: bool,
) -> Loaded:  # fmt: skip
    """Return the names without a match. Raises: ValueError if a shape or dtype differs or, with
    `strict`, if a name has no match.
    """
    # Remove duplicates: the tiles of a weight report the same names.
    missing, wrong = tuple(dict.fromkeys(missing)), tuple(dict.fromkeys(wrong))
    left_out = Loaded(missing, tuple(sorted(unexpected)))
    named = zip(Loaded._fields, left_out, strict=True) if strict else ()
    parts = [f"{kind}: {listed(names)}" for kind, names in (*named, ("different", wrong)) if names]
    if parts:
        partly = "strict=False loads what fits and returns the other names"
        way_out = "" if wrong else f"; {partly}"
        raise ValueError(
            f"{label} does not fit the model, and nothing was written. {'; '.join(parts)}{way_out}"
        )
    return left_out


def check_idle(units: Iterable[Unit]) -> None:
    """Raise RuntimeError if a unit is in use: a load cannot replace values during a forward, a
    backward or a gather().
    """
    for unit in units:
        if unit.refs:
            raise RuntimeError(
                f"{unit.name} is in use; load values outside of forward, backward and "
                "handle.gather()"
            )


def has_master(states: States, param: Param) -> bool:
    """Return whether the parameter has optimizer states, which include an fp32 master."""
    return states.store[param.flat].format is not Format.RAW


def write_param(of: Engine, param: Param, value: torch.Tensor) -> None:
    """Write a parameter's value, into the fp32 master if there is one. Calls no collective. Blocks.
    """
    # The write rounds the parameter from the master, as an update does.
    if has_master(of.states, param):
        of.states.write(param, 0, value)
    else:
        of.unsharder.write(param, value)


class LastRead:
    """Reader of named tensors that caches the last tensor: consecutive tiles of a weight need the
    same tensor.
    """

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        self._read = read
        self._last: tuple[str, torch.Tensor] | None = None

    def __call__(self, name: str) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            # Free the last tensor before the read, so that memory never holds two tensors.
            self._last = None
            self._last = name, self._read(name)
        return self._last[1]


def _by_name(matches: Sequence[_Match]) -> list[_Match]:
    """Sort matches so that equal names (the last element of a match) are adjacent, in the order of
    first appearance. `LastRead` then reads the tensor of a weight once for all tiles.
    """
    order = {match[-1]: at for at, match in reversed(list(enumerate(matches)))}
    return sorted(matches, key=lambda match: order[match[-1]])


def take_in(of: Engine, source: NamedTensors, matched: Matched) -> None:
    """Read and write the matched tensors, with one tensor in memory at a time. Calls no collective.
    Blocks.

    Raises: any error of reading or writing; some tensors have then been written, others not.
    """
    sizes = {param: param.numel * param.dtype.itemsize for param, _ in matched.params}
    line = ProgressLine("loading weights", sum(sizes.values()), shown=of.comm.rank == 0)
    # Tensors of many sizes fragment the heap.
    heap = Heap.for_stream()
    with torch.inference_mode(False), torch.no_grad(), line:
        read = LastRead(source.read)
        for param, name in _by_name(matched.params):
            place, value = param.place, read(name)
            write_param(of, param, value if place is None else place.of(value))
            heap.freed()
            line.advance(sizes[param])
        for buffer, name in matched.buffers:
            copy_(buffer, source.read(name))


MASTER = "master"


@dataclasses.dataclass(frozen=True)
class Held:
    """A parameter that an optimizer holds. tensors: names of the states with the parameter's shape.
    numbers: names of the states that are numbers. optional: names of states that a checkpoint may
    lack.
    """

    param: Param
    state: OptimizerState
    tensors: tuple[str, ...]
    numbers: tuple[str, ...]
    optional: tuple[str, ...]


class StateSource(Protocol):
    """The optimizer states of a checkpoint, each with a unique name."""

    label: str
    """Name of the checkpoint in messages."""

    @property
    def names(self) -> Collection[str]:
        """All names."""

    def name_of(self, param: str, state: str) -> str:
        """Return the name of a parameter's state."""

    def fault(self, name: str, shape: tuple[int, ...] | None) -> str:
        """Return why a state is not a tensor of this shape (None: not a number); "" if it is."""

    def read(self, name: str) -> Any:
        """Read a state. Blocks."""


@dataclasses.dataclass(frozen=True)
class MatchedStates:
    """States with a match in the checkpoint, in the order of writing. left_out: names without one.
    """

    names: list[tuple[Held, str, str]]  # (parameter, state, name in the checkpoint)
    left_out: Loaded


def match_states(source: StateSource, every: Sequence[Held], *, strict: bool) -> MatchedStates:
    """Find the checkpoint's states for every parameter in `every`. Reads and writes no state.

    Raises: ValueError naming all states whose shape differs and, with `strict`, all missing and
    unexpected names.
    """
    there = set(source.names)
    found: list[tuple[Held, str, str]] = []
    missing: list[str] = []
    wrong: list[str] = []
    for held in every:
        wanted = (*held.tensors, *held.numbers)
        keys = held.param.keys
        # The file may have a tied parameter under any of the parameter's names.
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
            elif state not in held.optional:
                missing.append(name)
    unexpected = there - {name for _, _, name in found}
    return MatchedStates(found, _checked(source.label, missing, unexpected, wrong, strict=strict))


def take_in_states(source: StateSource, matched: MatchedStates) -> None:
    """Read and write the matched states, with one tensor in memory at a time. Calls no collective.
    Blocks.

    Raises: any error of reading or writing, ValueError for an impossible number; some states have
    then been written, others not.
    """
    read = LastRead(source.read)
    for held, state, name in _by_name(matched.names):
        value: Any = read(name)
        if state in held.numbers:
            value = value.item() if hasattr(value, "item") else value
            # torch.optim stores the step count as an fp32 tensor; the engine needs an int.
            if state == "step" and isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{name} of {source.label} is {value!r}, which is no number")
        place = held.param.place
        held.state[state] = (
            place.of(value) if place is not None and state in held.tensors else value
        )
