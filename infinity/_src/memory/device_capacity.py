"""Device memory of gathered units and of fresh gradients: its bounds in bytes, from sizes alone.

One unit is in use, and other units share the memory: prefetched units, or units whose gradients are
being copied to the host. All these bounds have one form:

    capacity  the unit in use, with the units whose modules contain it, and `others`
    others    min(`count` x the largest unit, OVERLAP_BYTES_MAX), and at least the unit's larger
              neighbour in the model

So several small units fit at a time, and a huge unit needs only its size and that of its small
neighbours. The engine keeps these bounds, and `infinity plan` uses them. They depend only on sizes,
so all ranks compute the same.

In a module that runs in slices (`inf.microbatched`) a gathered unit stays for the later slices, and
gradients add up until the last slice. So a block counts as one unit, with its gradients. If the
device lacks capacity for a block, only some of its units stay:

    spare     half of the device's memory that single units and gradients leave; the other half is
              for activations
    block     stays whole if the bound plus `spare` has capacity for it; else `spare` bytes stay

Sums of slices have the accumulation dtype of gradients, which may be wider than the parameter's.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from infinity._src.memory.constants import AHEAD, OFFLOAD_UNITS, REDUCING_UNITS, UNITS_AHEAD

OVERLAP_BYTES_MAX = 1 << 30
"""The most bytes of units in addition to the unit in use, unless a neighbour is larger.

A drive or link of 25 GB/s transfers them in 40 ms, many times its latency.
"""


@dataclasses.dataclass(frozen=True)
class UnitBytes:
    """Bytes of one unit on the device.

    gathered: its parameters. grads: the gradient of each trained parameter. around: indices of the
    units whose modules contain this unit's modules, and which are in use with it. repeat: number of
    equal consecutive units. block: number of the enclosing module that runs in slices, if any.
    """

    gathered: int
    grads: tuple[int, ...] = ()
    around: tuple[int, ...] = ()
    repeat: int = 1
    block: int | None = None


@dataclasses.dataclass(frozen=True)
class Passes:
    """Use of a device by forward and backward.

    copies: gradients are copied from separate device memory. several: ranks reduce gradients.
    in_backward: updates consume gradients during backward. whole: all parameters stay gathered.
    device_bytes: total device memory, the same on every rank; None: unlimited.
    """

    copies: bool = False
    several: bool = False
    in_backward: bool = False
    whole: bool = False
    device_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class SliceGrads:
    """Gradients that slices of a batch add up (`inf.microbatched`).

    blocks: modules that run all slices before the next module runs, each with the bytes of its
    gradients in the accumulation dtype. one_bytes: the largest gradient of one slice
    (`slice_grad_bytes`).
    """

    blocks: tuple[UnitBytes, ...]
    one_bytes: int

    def capacity_bytes(self, passes: Passes) -> int:
        return self.one_bytes + sums_capacity(self.blocks, passes)


def overlap_bytes(sizes: Sequence[int], count: int) -> int:
    """Return the bytes of `count` units as large as the largest, OVERLAP_BYTES_MAX at most."""
    return min(count * max(sizes, default=0), OVERLAP_BYTES_MAX)


def capacity_bytes(
    sizes: Sequence[int],
    count: int,
    around: Sequence[Sequence[int]] | None = None,
    repeats: Sequence[int] | None = None,
) -> int:
    """Return the capacity (see the module's docstring) for the unit that needs most.

    sizes: bytes of the units, in the order of the model. around, repeats: of each unit, as in
    `UnitBytes`.
    """
    outer = around or [()] * len(sizes)
    times = repeats or [1] * len(sizes)
    held = [size + sum(sizes[i] for i in inside) for size, inside in zip(sizes, outer, strict=True)]
    capacity = max(held, default=0) + overlap_bytes(sizes, count)
    # In both orders: backward runs in reverse.
    for here, there in itertools.pairwise(range(len(sizes))):
        capacity = max(capacity, held[here] + sizes[there], held[there] + sizes[here])
    for size, whole, repeat in zip(sizes, held, times, strict=True):
        capacity = max(capacity, whole + size) if repeat > 1 else capacity
    return min(capacity, sum(size * repeat for size, repeat in zip(sizes, times, strict=True)))


def gathered_capacity(units: Sequence[UnitBytes], passes: Passes) -> int:
    """Return the most bytes of gathered parameters; the units in use may exceed them."""
    return sum(_capacity_and_spare(units, passes))


def retained_capacity(units: Sequence[UnitBytes], passes: Passes) -> dict[int, int]:
    """Return for each block the most bytes of its units that stay gathered from slice to slice."""
    blocks, found = blocks_of(units), {}
    capacity, spare = _capacity_and_spare(units, passes)
    for block in blocks:
        if block.block is not None:
            held = block.gathered + sum(blocks[outer].gathered for outer in block.around)
            found[block.block] = block.gathered if held <= capacity + spare else spare
    return found


def regathered_bytes(units: Sequence[UnitBytes], passes: Passes) -> int:
    """Return the bytes of units that are gathered again for each slice."""
    left, again = retained_capacity(units, passes), 0
    # The first units in the order of use stay, as many as fit.
    for unit in units:
        if unit.block is not None and unit.gathered:
            stay = min(unit.repeat, left[unit.block] // unit.gathered)
            left[unit.block] -= stay * unit.gathered
            again += (unit.repeat - stay) * unit.gathered
    return again


def blocks_of(units: Sequence[UnitBytes]) -> list[UnitBytes]:
    """Return the units, with the units of each block merged into one, at the place of the first."""
    keys = [
        ("unit", index) if unit.block is None else ("block", unit.block)
        for index, unit in enumerate(units)
    ]
    place = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    parts: list[list[UnitBytes]] = [[] for _ in place]
    for unit, key in zip(units, keys, strict=True):
        parts[place[key]].append(unit)
    found = []
    for index, inside in enumerate(parts):
        outer = {place[keys[each]] for unit in inside for each in unit.around} - {index}
        around = tuple(sorted(outer))
        if inside[0].block is None:
            found.append(dataclasses.replace(inside[0], around=around))
            continue
        gathered = sum(unit.gathered * unit.repeat for unit in inside)
        grads = tuple(size for unit in inside for size in unit.grads * unit.repeat)
        found.append(UnitBytes(gathered, grads, around, block=inside[0].block))
    return found


def _in_slices(units: Sequence[UnitBytes]) -> bool:
    return any(unit.block is not None for unit in units)


def _single_capacity(units: Sequence[UnitBytes]) -> int:
    return capacity_bytes(
        [unit.gathered for unit in units],
        AHEAD,
        [unit.around for unit in units],
        [unit.repeat for unit in units],
    )


def _capacity_and_spare(units: Sequence[UnitBytes], passes: Passes) -> tuple[int, int]:
    """Return the capacity for single units, and the additional bytes for units that stay gathered
    from slice to slice."""
    if passes.whole:
        return sum(unit.gathered * unit.repeat for unit in units), 0
    capacity = _single_capacity(units)
    if not _in_slices(units):
        return capacity, 0
    blocks = blocks_of(units)
    spare = max(_single_capacity(blocks) - capacity, 0)
    if passes.device_bytes is not None:
        left = passes.device_bytes - capacity - _fresh_in_slices(units, blocks, passes)
        spare = min(spare, max(left, 0) // 2)
    return capacity, spare


def _fresh_in_slices(
    units: Sequence[UnitBytes], blocks: Sequence[UnitBytes], passes: Passes
) -> int:
    largest = max((size for unit in units for size in unit.grads), default=0)
    return largest + sums_capacity(blocks, passes)


def fresh_capacity(units: Sequence[UnitBytes], passes: Passes) -> int:
    """Return the most bytes of fresh gradients: in backward, and in flight to the host."""
    if _in_slices(units):
        return _fresh_in_slices(units, blocks_of(units), passes)
    if passes.in_backward and not passes.copies:
        return gradients_capacity(units, UNITS_AHEAD)
    if passes.several:
        return gradients_capacity(units, REDUCING_UNITS)
    if passes.in_backward:
        return gradients_capacity(units, OFFLOAD_UNITS)
    # In order of use. Of repeated units two are enough: they have every pair of neighbours.
    sizes = [size for unit in units for size in unit.grads * min(unit.repeat, 2)]
    largest = max(sizes, default=0)
    # Without copies each gradient is accumulated at once.
    if not passes.copies:
        return largest
    leaving = overlap_bytes([unit.gathered for unit in units], OFFLOAD_UNITS)
    capacity = max(largest + leaving, capacity_bytes(sizes, 0))
    return min(capacity, sum(size * unit.repeat for unit in units for size in unit.grads))


def sums_capacity(blocks: Sequence[UnitBytes], passes: Passes) -> int:
    """Return the most bytes of gradients summed over slices: of the block in backward, and of
    blocks whose sums are in flight. blocks: as in `SliceGrads`."""
    if passes.in_backward and not passes.copies:
        return gradients_capacity(blocks, UNITS_AHEAD)
    if passes.several:
        return gradients_capacity(blocks, REDUCING_UNITS)
    if passes.copies:
        return gradients_capacity(blocks, OFFLOAD_UNITS)
    # Without copies only the sums of the block in backward exist.
    return max((sum(block.grads) for block in blocks), default=0)


def slice_grad_bytes(size_bytes: int, itemsize: int, sum_itemsize: int) -> int:
    """Return the bytes of one parameter's gradient of one slice, plus its cast if the sum has
    another dtype.
    """
    cast = 0 if itemsize == sum_itemsize else size_bytes // itemsize * sum_itemsize
    return size_bytes + cast


def gradients_capacity(units: Sequence[UnitBytes], count: int) -> int:
    """Return the bytes of the gradients of a unit and of `count` other units."""
    return capacity_bytes(
        [sum(unit.grads) for unit in units], count, repeats=[unit.repeat for unit in units]
    )
