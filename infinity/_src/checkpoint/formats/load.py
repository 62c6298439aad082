"""Loading values of other formats into an offloaded model: matched by name, checked as a whole,
then written one by one.

After a load the model holds what the file says: a parameter with optimizer states gets its fp32
master from the value in the precision of the file (and computes with the master, rounded as every
update rounds it), even where the rounded value was equal before. One without gets the value rounded
to its own dtype. Moments, step counts and gradients stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from infinity._src.base.dtypes import converts, copy_
from infinity._src.base.progress import ProgressLine
from infinity._src.base.wording import listed
from infinity._src.distributed.communicator import Comm
from infinity._src.memory.heap import Heap
from infinity._src.optim.state_access import States
from infinity._src.params.materialize import NamedTensors, find_buffers
from infinity._src.params.unit import Param, Unit
from infinity._src.params.unshard import Unsharder
from infinity.aio import Format


class Receiver(Protocol):
    """The engine, as far as taking values in needs it."""

    units: list[Unit]
    states: States
    unsharder: Unsharder
    comm: Comm


class Loaded(NamedTuple):
    """Names that a load with strict=False left out: names of the model alone, and of the source
    alone.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Matched:
    """The name of each parameter's and each buffer's tensor."""

    params: list[tuple[Param, str]]
    buffers: list[tuple[torch.Tensor, str]]
    left_out: Loaded


def match(
    model: torch.nn.Module, units: Iterable[Unit], source: NamedTensors, *, strict: bool
) -> Matched:
    """Find the tensor of every parameter and persistent buffer. Nothing is read or written.

    A tied parameter takes the first of its names that the source has. Buffers that are not
    persistent may be in the source and are left as they are. Raises: ValueError naming all that is
    missing or unexpected (with `strict`), and what has another shape or is of another kind of dtype
    (always).
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
        # A tile is matched as the weight that it is cut from.
        shape = like.whole_shape if isinstance(like, Param) else tuple(like.shape)
        if source.shape(name) != shape:
            wrong.append(f"{name} has shape {source.shape(name)} there and {shape} here")
        elif (there := source.dtype(name)) is not None and not converts(there, like.dtype):
            wrong.append(f"{name} is {there} there, {like.dtype} here")
        return name

    for param in (param for unit in units for param in unit.params):
        name = found(param.keys, param)
        if name is not None:
            params.append((param, name))
    # One buffer may be registered under several names; any of them is enough.
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
    unexpected = sorted(known - expected)
    # Each once: the tiles of a weight say the same.
    missing, wrong = list(dict.fromkeys(missing)), list(dict.fromkeys(wrong))
    if wrong or (strict and (missing or unexpected)):
        raise ValueError(
            explain(source.label, missing if strict else [], unexpected if strict else [], wrong)
        )
    return Matched(params, buffers, Loaded(tuple(missing), tuple(unexpected)))


def explain(
    label: str, missing: Sequence[str], unexpected: Sequence[str], wrong: Sequence[str]
) -> str:
    """Compose the message for names, shapes and dtypes that do not fit."""
    parts = [f"missing: {listed(missing)}"] if missing else []
    parts += [f"unexpected: {listed(unexpected)}"] if unexpected else []
    parts += [f"different: {listed(wrong)}"] if wrong else []
    way_out = "" if wrong else "; strict=False takes what fits and returns the names of the rest"
    return f"{label} does not fit the model, and nothing was written. {'; '.join(parts)}{way_out}"


def check_idle(units: Iterable[Unit]) -> None:
    """Raise RuntimeError while a unit is in use: its values cannot be replaced under a forward, a
    backward or a gather().
    """
    for unit in units:
        if unit.refs:
            raise RuntimeError(
                f"{unit.name} is in use; load values outside of forward, backward and "
                "handle.gather()"
            )


def has_master(states: States, param: Param) -> bool:
    """Return whether the parameter is stored with an optimizer's states, its fp32 master among
    them.
    """
    return states.store[param.flat].format is not Format.RAW


def write_param(of: Receiver, param: Param, value: torch.Tensor) -> None:
    """Set a parameter, and its fp32 master if it has one. Calls no collective. Blocks."""
    # Through the master: the value in the file's precision is kept, and rounded as an update
    # rounds.
    if has_master(of.states, param):
        of.states.write(param, 0, value)
    else:
        of.unsharder.write(param, value)


class LastRead:
    """A reader of named tensors that keeps the last one: the tiles of a weight come one after the
    other.
    """

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        self._read = read
        self._last: tuple[str, torch.Tensor] | None = None

    def __call__(self, name: str) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            # The one before goes first, so that two are never in memory.
            self._last = None
            self._last = name, self._read(name)
        return self._last[1]


def take_in(of: Receiver, source: NamedTensors, matched: Matched) -> None:
    """Write what was matched, one tensor in memory at a time. Calls no collective. Blocks.

    Raises: any error of reading or writing; then some tensors have been written and others not.
    """
    sizes = {param: param.numel * param.dtype.itemsize for param, _ in matched.params}
    line = ProgressLine("loading weights", sum(sizes.values()), shown=of.comm.rank == 0)
    # Tensors are of many sizes, and so are the holes that they leave.
    heap = Heap.for_stream()
    with torch.inference_mode(False), torch.no_grad(), line:
        read = LastRead(source.read)
        # By names: the tiles of a weight take their parts of one tensor, which is read once.
        order = {name: at for at, (_, name) in reversed(list(enumerate(matched.params)))}
        for param, name in sorted(matched.params, key=lambda match: order[match[1]]):
            place, value = param.place, read(name)
            write_param(of, param, value if place is None else place.of(value))
            heap.freed()
            line.advance(sizes[param])
        for buffer, name in matched.buffers:
            copy_(buffer, source.read(name))
