"""The layout of a unit's states: flats, shards and chunks, as plain arithmetic.

    flat    [ param 0 | pad | param 1 | pad | ...            | pad ]   every parameter at a multiple of 256 bytes
    shards  [ rank 0            | rank 1            | ...          ]   equal, multiples of GROUP_NUMEL
    chunks  [ chunk 0 | chunk 1 | chunk 0 | chunk 1 | ...          ]   CHUNK_NUMEL, the last of a shard shorter

A chunk holds all sections of its elements, so one chunk is one contiguous read and one contiguous write. GROUP_NUMEL
elements of the narrowest section (2 bytes) are 4096 bytes, so every section starts where O_DIRECT wants it.
"""

from __future__ import annotations

import dataclasses

from infinity.aio.plan import (
    ALIGNMENT_BYTES,
    CHUNK_NUMEL,
    GROUP_NUMEL,
    SECTION_ITEMSIZES,
    SECTION_NAMES,
    Format,
)
from infinity.sizes import round_up

ALIGN_BYTES = 256


@dataclasses.dataclass(frozen=True)
class Section:
    """One state inside an extent: its name and bytes per element."""

    name: str
    itemsize: int


def sections_of(state_format: Format, param_itemsize: int) -> tuple[Section, ...]:
    """The sections of a format, the parameter that computes first. `param_itemsize` counts for RAW only."""
    itemsizes = SECTION_ITEMSIZES.get(state_format, (param_itemsize,))
    return tuple(Section(*pair) for pair in zip(SECTION_NAMES[state_format], itemsizes, strict=True))


@dataclasses.dataclass(frozen=True)
class ChunkSpan:
    """A chunk of one rank's shard: elements [start, start + numel) of the shard."""

    start: int
    numel: int


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """Where the parameters of one flat lie, and how it is split over `world` ranks."""

    itemsize: int
    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    world: int
    shard_numel: int

    @property
    def numel(self) -> int:
        """Elements of the whole flat, padding included."""
        return self.shard_numel * self.world

    @property
    def chunks(self) -> tuple[ChunkSpan, ...]:
        """The chunks of one shard, in order."""
        return tuple(
            ChunkSpan(start, min(CHUNK_NUMEL, self.shard_numel - start))
            for start in range(0, self.shard_numel, CHUNK_NUMEL)
        )

    def shard_range(self, index: int, rank: int) -> tuple[int, int, int]:
        """The part of parameter `index` in the shard of `rank`: (start in shard, start in parameter, elements)."""
        low = max(self.offsets[index], rank * self.shard_numel)
        high = min(self.offsets[index] + self.numels[index], (rank + 1) * self.shard_numel)
        if high <= low:
            return (0, 0, 0)
        return (low - rank * self.shard_numel, low - self.offsets[index], high - low)


def plan_flat(numels: tuple[int, ...], itemsize: int, world: int = 1) -> FlatLayout:
    """Lay out parameters of `numels` elements, in order, and split them evenly over `world` ranks."""
    align = max(1, ALIGN_BYTES // itemsize)
    offsets = []
    end = 0
    for numel in numels:
        start = round_up(end, align)
        offsets.append(start)
        end = start + numel
    # One-byte elements need more of them for the 4096 bytes that O_DIRECT wants.
    shard_numel = round_up(max(-(-end // world), 1), max(GROUP_NUMEL, ALIGNMENT_BYTES // itemsize))
    return FlatLayout(itemsize, tuple(offsets), tuple(numels), world, shard_numel)
