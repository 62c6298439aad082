"""Layout of a unit's states in flats, shards and chunks, as plain arithmetic.

    flat    [ param 0 | pad | param 1 | pad | ...  | pad ]   parameters at multiples of 256 bytes
    shards  [ rank 0            | rank 1            | ...]   equal, multiples of GROUP_NUMEL
    chunks  [ chunk 0 | chunk 1 | chunk 0 | chunk 1 | ...]   of chunk_numel; a shard's last: shorter

A chunk holds all sections of its elements, each aligned to 4096 bytes, so one chunk is one
contiguous read and one contiguous write. Parameters start at multiples of QUANT_GROUP elements, so
that no quantization group holds two parameters.

Drive, file and offset of each chunk: `ShardRecords` (infinity/_src/params/state_store.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.base.sizes import round_up
from infinity._src.cabi.records import (
    ALIGNMENT_BYTES,
    CHUNK_NUMEL,
    GROUP_NUMEL,
    QUANT_GROUP,
    Master,
    Moments,
    NumelT,
    Section,
    chunk_numel,
)
from infinity.aio import Format

__all__ = [
    "ALIGN_BYTES",
    "ChunkSpan",
    "ChunkSpans",
    "FlatLayout",
    "Section",
    "Segments",
    "aligned_section_bytes",
    "chunk_numel_of",
    "plan_flat",
    "sections_of",
    "state_format",
]

ALIGN_BYTES = 256

_MASTERS = {torch.bfloat16: Master.SPLIT, torch.float32: Master.FP32, torch.float16: Master.FP16}
_MOMENTS = {"exact": Moments.FP32, "bf16": Moments.BF16, "compact": Moments.Q8}


@functools.lru_cache(maxsize=256)
def state_format(state: str, dtype: torch.dtype, moments: int = 2) -> Format | None:
    """Choose the format of states by `Policy.state`, dtype and number of moments; None for a dtype
    without state formats."""
    if dtype not in _MASTERS:
        return None
    # A 24-bit master is a bf16 parameter and one more byte.
    master = Master.SPLIT8 if state == "compact" and dtype is torch.bfloat16 else _MASTERS[dtype]
    # Without moments there is nothing to encode, and `Format` refuses Q8 without moments.
    return Format(master, _MOMENTS[state] if moments else Moments.FP32, moments)


def chunk_numel_of(state: str, dtype: torch.dtype) -> int:
    """Return the elements per chunk of flats of this dtype. The format with two moments counts,
    since no optimizer exists yet."""
    return chunk_numel(state_format(state, dtype) or Format.RAW)


def sections_of(state_format: Format, param_itemsize: int) -> tuple[Section, ...]:
    """Return the sections of a format, the section of the parameter that computes first.

    param_itemsize: of the parameter's dtype, for RAW; other formats determine it.
    """
    if state_format.master is Master.RAW:
        return (Section("param", param_itemsize),)
    return state_format.sections


def aligned_section_bytes(section: Section, numel: NumelT) -> NumelT:
    """Return the bytes of a section of `numel` elements on a drive or in a slot, where sections are
    4096-aligned. numel: one number, or one for each chunk."""
    return -(-section.size_bytes(numel) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclasses.dataclass(frozen=True)
class ChunkSpan:
    """Chunk of one rank's shard: elements [start, start + numel) of the shard."""

    start: int
    numel: int


@dataclasses.dataclass(frozen=True)
class ChunkSpans(Sequence[ChunkSpan]):
    """Chunks of one rank's shard, in order. Indexing makes a span on demand, since a large model
    has a million.
    """

    shard_numel: int
    chunk_numel: int

    def __len__(self) -> int:
        return len(range(0, self.shard_numel, self.chunk_numel))

    @overload
    def __getitem__(self, index: int) -> ChunkSpan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ChunkSpan, ...]: ...
    def __getitem__(self, index: int | slice) -> ChunkSpan | tuple[ChunkSpan, ...]:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(len(self))))
        start = range(0, self.shard_numel, self.chunk_numel)[index]
        return ChunkSpan(start, min(self.chunk_numel, self.shard_numel - start))

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        return np.arange(0, self.shard_numel, self.chunk_numel, dtype=np.int64)

    @property
    def numels(self) -> npt.NDArray[np.int64]:
        return np.minimum(self.chunk_numel, self.shard_numel - self.starts)

    @property
    def numel_max(self) -> int:
        return min(self.chunk_numel, self.shard_numel)

    def touched(self, start: int, numel: int) -> range:
        """Return the indices of the chunks that hold elements [start, start + numel) of the shard.
        """
        if numel <= 0:
            return range(0)
        return range(start // self.chunk_numel, (start + numel - 1) // self.chunk_numel + 1)


class Segments(NamedTuple):
    """Parts of parameters in chunks of one rank's shard, int64 [segments] each.

    owner: index of the parameter. Index of the segment's first element: in the chunk (start), in
    this rank's part of the parameter (within), and in the parameter (element).
    """

    owner: npt.NDArray[np.int64]
    chunk: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    numel: npt.NDArray[np.int64]
    within: npt.NDArray[np.int64]
    element: npt.NDArray[np.int64]

    def nothing(self) -> Segments:
        return Segments(*(column[:0] for column in self))


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """Layout of one flat: offsets of its parameters, split over `world` ranks and into chunks.

    chunk_numel: elements per chunk, a multiple of GROUP_NUMEL: `records.chunk_numel` of the format
    that the flat may get.
    """

    itemsize: int
    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    world: int
    shard_numel: int
    chunk_numel: int = CHUNK_NUMEL

    @property
    def numel(self) -> int:
        return self.shard_numel * self.world

    @functools.cached_property
    def size_bytes(self) -> int:
        """Bytes of the whole flat, padding included."""
        return self.numel * self.itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's shard, padding included."""
        return self.shard_numel * self.itemsize

    @property
    def chunks(self) -> ChunkSpans:
        return ChunkSpans(self.shard_numel, self.chunk_numel)

    def shard_range(self, index: int, rank: int) -> tuple[int, int, int]:
        """Intersect parameter `index` with the shard of `rank`.

        Returns (start in the shard, start in the parameter, elements); zeros where they do not
        overlap.
        """
        # A parameter may extend over several ranks' shards.
        low = max(self.offsets[index], rank * self.shard_numel)
        high = min(self.offsets[index] + self.numels[index], (rank + 1) * self.shard_numel)
        if high <= low:
            return (0, 0, 0)
        return (low - rank * self.shard_numel, low - self.offsets[index], high - low)

    def spans(self, index: int, rank: int) -> Iterator[tuple[int, int, int, int]]:
        """Intersect parameter `index` with the chunks of a rank's shard, in order.

        Yields (chunk, start in the chunk, start in the parameter, elements).
        """
        start, element, numel = self.shard_range(index, rank)
        at, end = start, start + numel
        while at < end:
            chunk = at // self.chunk_numel
            count = min((chunk + 1) * self.chunk_numel, end) - at
            yield chunk, at - chunk * self.chunk_numel, element + at - start, count
            at += count

    def segments(self, rank: int) -> Segments:
        """Intersect all parameters with the chunks of a rank's shard, in order."""
        indices = range(len(self.offsets))
        parts = np.array([self.shard_range(index, rank) for index in indices], dtype=np.int64)
        begins, elements, numels = parts.reshape(-1, 3).T
        ends, size = begins + numels, self.chunk_numel
        counts = np.where(numels > 0, -(-ends // size) - begins // size, 0)
        owner = np.repeat(np.arange(len(counts)), counts)
        # The number of segments before each parameter's first one.
        before = np.cumsum(counts) - counts
        chunk = np.arange(len(owner)) + np.repeat(begins // size - before, counts)
        first = np.maximum(chunk * size, begins[owner])
        within = first - begins[owner]
        return Segments(
            owner=owner,
            chunk=chunk,
            start=first - chunk * size,
            numel=np.minimum((chunk + 1) * size, ends[owner]) - first,
            within=within,
            element=elements[owner] + within,
        )


def plan_flat(
    numels: tuple[int, ...], itemsize: int, world: int = 1, chunk_numel: int = CHUNK_NUMEL
) -> FlatLayout:
    """Lay out parameters of `numels` elements, in order, and split them evenly over `world` ranks.
    """
    align = max(QUANT_GROUP, ALIGN_BYTES // itemsize)
    offsets = []
    end = 0
    for numel in numels:
        start = round_up(end, align)
        offsets.append(start)
        end = start + numel
    assert chunk_numel % GROUP_NUMEL == 0, chunk_numel
    # Shards of one-byte elements must have a multiple of 4096 bytes, too, for O_DIRECT.
    shard_numel = round_up(max(-(-end // world), 1), max(GROUP_NUMEL, ALIGNMENT_BYTES // itemsize))
    return FlatLayout(itemsize, tuple(offsets), tuple(numels), world, shard_numel, chunk_numel)
