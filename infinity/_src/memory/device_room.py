"""Device memory of gathered units and of fresh gradients: its bounds in bytes, from sizes alone.

One unit is worked on, and others have room beside it: those that are gathered ahead, or those whose
gradients are leaving. All these bounds have one shape:

    room     the unit that is worked on, with the units around it, and others beside it
    others   `count` of the largest unit, BESIDE_BYTES at most; and always the neighbour in the
             model, of any size

So small units go several at a time. A huge one goes beside its neighbours, which in a model are
small, and costs no multiple of its size. The engine keeps these bounds, and `infinity plan` counts
with them. No tensors, no times: all ranks find the same.

Slices of a batch (`inf.microbatched`) add up the gradients of a whole block on the device, in the
dtype in which gradients wait: the sums take the place of the unit's gradients, and the gradient of
one slice comes besides.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from infinity._src.memory.constants import AHEAD, OFFLOAD_UNITS, REDUCING_UNITS, UNITS_AHEAD

BESIDE_BYTES = 1 << 30
"""Bytes of other units beside the one that is worked on; a neighbour that is larger has room, too.

A drive or link of 25 GB/s fills them in 40 ms, which is longer than any of its latencies.
"""


@dataclasses.dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit on the device.

    gathered: its parameters. grads: the gradient of each that is trained. around: indices of units
    that are in use whenever it is, since modules of theirs have modules of this one inside.
    repeat: so many like it follow each other.
    """

    gathered: int
    grads: tuple[int, ...] = ()
    around: tuple[int, ...] = ()
    repeat: int = 1


@dataclasses.dataclass(frozen=True)
class Passes:
    """Use of a device by forward and backward.

    copies: it has memory of its own, from which gradients are copied. several: ranks reduce them.
    in_backward: updates take them during backward. whole: all parameters stay gathered.
    """

    copies: bool = False
    several: bool = False
    in_backward: bool = False
    whole: bool = False


@dataclasses.dataclass(frozen=True)
class SliceGrads:
    """Gradients that slices of a batch add up (`inf.microbatched`).

    blocks: what all slices pass before the next, each with the bytes of its gradients as they wait.
    one_bytes: the most that one slice makes of a parameter (`slice_grad_bytes`).
    """

    blocks: tuple[UnitBytes, ...]
    one_bytes: int

    def room_bytes(self, passes: Passes) -> int:
        """Bytes on the device at most."""
        return self.one_bytes + sums_room(self.blocks, passes)


def beside_bytes(sizes: Sequence[int], count: int) -> int:
    """Bytes of others beside the one that is worked on: `count` of the largest, within limits."""
    return min(count * max(sizes, default=0), BESIDE_BYTES)


def room_bytes(
    sizes: Sequence[int],
    count: int,
    around: Sequence[Sequence[int]] | None = None,
    repeats: Sequence[int] | None = None,
) -> int:
    """Bytes for one of `sizes` and others beside it (see the module's docstring).

    sizes: in the order of the model. around: for each the indices of those it lies inside of.
    repeats: for each how many like it there are.
    """
    outer = around or [()] * len(sizes)
    times = repeats or [1] * len(sizes)
    held = [size + sum(sizes[i] for i in inside) for size, inside in zip(sizes, outer, strict=True)]
    room = max(held, default=0) + beside_bytes(sizes, count)
    # Backward meets neighbours in the other order.
    for here, there in itertools.pairwise(range(len(sizes))):
        room = max(room, held[here] + sizes[there], held[there] + sizes[here])
    for size, whole, repeat in zip(sizes, held, times, strict=True):
        room = max(room, whole + size) if repeat > 1 else room
    return min(room, sum(size * repeat for size, repeat in zip(sizes, times, strict=True)))


def gathered_room(units: Sequence[UnitBytes], passes: Passes) -> int:
    """Bytes of gathered parameters at most, as far as units in use allow."""
    sizes, repeats = [unit.gathered for unit in units], [unit.repeat for unit in units]
    if passes.whole:
        return sum(size * repeat for size, repeat in zip(sizes, repeats, strict=True))
    return room_bytes(sizes, AHEAD, [unit.around for unit in units], repeats)


def fresh_room(units: Sequence[UnitBytes], passes: Passes) -> int:
    """Bytes of fresh gradients at most: those that backward makes, and those that are leaving."""
    if passes.in_backward and not passes.copies:
        return gradients_room(units, UNITS_AHEAD)
    if passes.several:
        return gradients_room(units, REDUCING_UNITS)
    if passes.in_backward:
        return gradients_room(units, OFFLOAD_UNITS)
    # One by one, as they come. Where they are accumulated in place, none is leaving.
    ones = [(size, unit.repeat) for unit in units for size in unit.grads]
    sizes, repeats = [size for size, _ in ones], [repeat for _, repeat in ones]
    largest = max(sizes, default=0)
    if not passes.copies:
        return largest
    leaving = beside_bytes([unit.gathered for unit in units], OFFLOAD_UNITS)
    room = max(largest + leaving, room_bytes(sizes, 0, repeats=repeats))
    return min(room, sum(size * repeat for size, repeat in ones))


def sums_room(blocks: Sequence[UnitBytes], passes: Passes) -> int:
    """Bytes of the gradients that slices have added up, at most: of the block in backward, and of
    those that are leaving.

    blocks: what all slices pass before the next, with the bytes of its gradients as they wait.
    """
    if passes.in_backward and not passes.copies:
        return gradients_room(blocks, UNITS_AHEAD)
    if passes.several:
        return gradients_room(blocks, REDUCING_UNITS)
    if passes.copies:
        return gradients_room(blocks, OFFLOAD_UNITS)
    # Autograd hands each sum over when it is complete, and none is leaving.
    return max((sum(block.grads) for block in blocks), default=0)


def slice_grad_bytes(size_bytes: int, itemsize: int, sum_itemsize: int) -> int:
    """Bytes of one parameter's gradient of one slice: as backward makes it, and cast to the dtype
    of the sum where that is another.
    """
    cast = 0 if itemsize == sum_itemsize else size_bytes // itemsize * sum_itemsize
    return size_bytes + cast


def gradients_room(units: Sequence[UnitBytes], count: int) -> int:
    """Bytes of the gradients of a unit, and of `count` others beside it."""
    return room_bytes(
        [sum(unit.grads) for unit in units], count, repeats=[unit.repeat for unit in units]
    )
