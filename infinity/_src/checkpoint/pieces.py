"""Where the elements of a flat lie in the chunks of its ranks: plain arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

Chunks = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""(starts, numels) of the chunks of one rank's shard of a flat, in order, without gaps."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements [start, start + numel) of one chunk of a rank's shard; `at`: where they are in the range that was asked for."""

    rank: int
    chunk: int
    start: int
    numel: int
    at: int


def pieces(low: int, numel: int, shard_numel: int, chunks_of: Callable[[int], Chunks]) -> Iterator[Piece]:
    """The chunks that hold elements [low, low + numel) of a flat, in order. chunks_of: those of a rank."""
    at, end = low, low + numel
    while at < end:
        rank = at // shard_numel
        starts, numels = chunks_of(rank)
        local = at - rank * shard_numel
        chunk = int(np.searchsorted(starts, local, side="right")) - 1
        start = local - int(starts[chunk])
        count = min(int(numels[chunk]) - start, end - at)
        assert count > 0, (at, rank, chunk)
        yield Piece(rank, chunk, start, count, at - low)
        at += count
