"""Several slabs in place of one, so that each can be pinned by one call of the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from infinity._src.base.progress import ProgressLine
from infinity.aio import Slab

ItemT = TypeVar("ItemT")


def split_by_size(
    items: Sequence[ItemT], bytes_of: Callable[[ItemT], int], bytes_max: int
) -> list[list[ItemT]]:
    """Split items, in order, into runs of `bytes_max` at most; a larger item has a run to itself,
    but for items of no bytes. No run is of no bytes unless all items are.
    """
    runs: list[list[ItemT]] = []
    used = 0
    for item in items:
        size = bytes_of(item)
        if not runs or (size and used and used + size > bytes_max):
            runs.append([])
            used = 0
        runs[-1].append(item)
        used += size
    return runs


def make_slabs(sizes: Sequence[int], *, shown: bool) -> list[Slab]:
    """Make slabs of these bytes; shown: with progress, since their pages are touched. Blocks.

    Raises: MemoryError; then none is made.
    """
    made: list[Slab] = []
    with ProgressLine("taking memory", sum(sizes), shown=shown) as line:
        try:
            # One by one, so that an error finds those that were made.
            made.extend(Slab(size, progress=line.advance) for size in sizes)
        except BaseException:
            for slab in made:
                slab.close()
            raise
    return made
