"""Reserved extents of the swap files: the executor redirects failed writes to them.

    fill       reserve some extents on each drive before a write fails: later it may be full
    settle     after redirected writes: record the reserved extents as the chunks', retire the bad
               extents, log a warning, and reserve other extents
    rehome     reserve extents in new files, because a checkpoint has links to the present files

The executor redirects writes by itself (native/executor/failed_writes.c), during a step. This
module settles them between steps.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from infinity._src.base.sizes import format_size
from infinity._src.memory.constants import SPARES_PER_DRIVE
from infinity._src.memory.swap_space import ExtentRequest, SwapExtent, SwapSpace
from infinity.aio import Executor
from infinity.aio._spares import SPARE, MovedWrite
from infinity.errors import AioError

log = logging.getLogger("infinity.memory")

Adopt = Callable[[MovedWrite, SwapExtent, SwapExtent], bool]
"""Replaces the first extent by the second in the chunk that has it. Returns False if no chunk does.
"""


class ReservedExtents:
    """The reserved extents of one executor. One thread uses them at a time.

    layer: their initial layer of the swap space. remember: records a bad range for later processes;
    None: nothing outlives the process.
    """

    def __init__(
        self,
        executor: Executor,
        space: SwapSpace,
        *,
        layer: int,
        remember: Callable[[SwapExtent], None] | None,
    ) -> None:
        self._executor = executor
        self._space = space
        self._layer = layer
        self._remember = remember
        self._size_bytes = 0
        self._held: dict[tuple[int, int, int], SwapExtent] = {}
        # Extents with a failed write. They stay reserved, and are never used again.
        self._bad: list[SwapExtent] = []
        self._refused: set[tuple[int, int, int]] = set()
        self._told_full = False
        self.moved_writes = 0

    @property
    def bad_bytes(self) -> int:
        """Bytes of the ranges with a failed write, in existing files."""
        return sum(place.size_bytes for place in self._bad)

    @property
    def held_bytes(self) -> int:
        """Bytes of the unused ranges."""
        return sum(place.size_bytes for place in self._held.values())

    def refused(self, place: SwapExtent) -> bool:
        """Return whether a write to this place failed since the last `rehome`; such a place is
        never used again."""
        return (place.layer, place.drive, place.offset) in self._refused

    @property
    def wanted_bytes(self) -> int:
        """Bytes to reserve on each drive."""
        return SPARES_PER_DRIVE * self._size_bytes

    def fill(self, size_bytes: int = 0) -> None:
        """Reserve SPARES_PER_DRIVE ranges on each drive, each of `size_bytes` or as large as
        before.

        A full drive gets fewer, with a warning.
        """
        if size_bytes > self._size_bytes:
            # The existing ranges are too small.
            self._release()
            self._size_bytes = size_bytes
        if not self._size_bytes:
            return
        there = Counter(place.drive for place in self._held.values())
        wanted = [
            drive
            for drive in range(len(self._space.files))
            for _ in range(SPARES_PER_DRIVE - there[drive])
        ]
        fresh: list[SwapExtent] = []
        for drive in wanted:
            try:
                fresh += self._space.reserve_on(
                    [drive], [ExtentRequest(self._size_bytes, self._layer)]
                )
            # OSError: a lost drive cannot report its free space.
            except (AioError, OSError) as error:
                self._tell_full(error)
        self._give(fresh)

    def rehome(self, layer: int) -> None:
        """Reserve ranges in files of this layer from now on."""
        # Removed layers' numbers are reused, so forget their bad ranges.
        self._refused.clear()
        self._bad = [place for place in self._bad if self._space.layers[place.layer]]
        if layer != self._layer:
            self._release()
            self._layer = layer
            self.fill()

    def settle(self, adopt: Adopt) -> None:
        """Settle the writes that went to reserved extents. `adopt` updates the chunks' extents."""
        moves = self._executor.take_moved_writes() if not self._executor.closed else []
        for move in moves:
            spare = self._held.pop((move.to_file, move.to_drive, move.to_offset))
            bad = SwapExtent(move.drive, move.offset, move.size_bytes, move.file)
            if not adopt(move, bad, spare):
                # The extent has another owner, who will free it by its old place.
                self._space.exchange(bad, spare)
            self.retire(bad)
        if moves:
            self.moved_writes += len(moves)
            self.fill()
            self._tell(moves)

    def retire(self, bad: SwapExtent) -> None:
        """Never use this extent again: a write to it failed, or it cannot be read."""
        self._bad.append(bad)
        self._refused.add((bad.layer, bad.drive, bad.offset))
        if self._remember is not None:
            self._remember(bad)

    def _tell(self, moves: Sequence[MovedWrite]) -> None:
        there = Counter(place.drive for place in self._held.values())
        for drive in sorted({move.drive for move in moves}):
            here = [move for move in moves if move.drive == drive]
            first, path = here[0], self._space.files[drive].path
            others = f", and {len(here) - 1} more" if len(here) > 1 else ""
            log.warning(
                "%s refused a write of %s at offset %d%s (%s). It was written to %s at offset %d; "
                "no byte is lost. The range is not used again: %s are out of use on all drives, "
                "and %d reserved ranges remain on this one. Check the drive's health",
                path,
                format_size(first.size_bytes),
                first.offset,
                others,
                first.error,
                self._space.files[first.to_drive].path,
                first.to_offset,
                format_size(self.bad_bytes),
                there[drive],
            )

    def _tell_full(self, error: AioError | OSError) -> None:
        # Once: a full drive would otherwise cause a warning in each step.
        if not self._told_full:
            self._told_full = True
            log.warning(
                "no space for more reserved ranges, so a failed write may end the run: %s", error
            )

    def _give(self, places: Sequence[SwapExtent]) -> None:
        records = np.zeros(len(places), dtype=SPARE)
        for record, place in zip(records, places, strict=True):
            record["drive"], record["file"] = place.drive, place.layer
            record["offset"], record["bytes"] = place.offset, place.size_bytes
            self._held[place.layer, place.drive, place.offset] = place
        self._executor.add_spares(records)

    def _release(self) -> None:
        for spare in self._executor.take_spares():
            key = (int(spare["file"]), int(spare["drive"]), int(spare["offset"]))
            self._space.free(self._held.pop(key))
