"""Copying what rests into a data file while training goes on: a few chunks at a time, each flat before it is written.

    executor of the run                          this thread                    executor of the data file
    FETCH all sections of a chunk -> stage  -->  pads with zeros           -->  STORE, checksum, write

Whoever wants to write states of a flat waits until the flat was read (`before_write`), and has it read next. So what is copied
is what rested when the copying began.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from infinity._src.checkpoint.data_file import DataWriter, new_rows
from infinity._src.checkpoint.manifest import FlatEntry, section_bytes
from infinity._src.params.state_store import ShardRecords
from infinity._src.params.unit import Flat
from infinity._src.sizes import round_up
from infinity.aio import JOB, Executor, JobKind, Priority, Slab, Ticket
from infinity.errors import AioError

STAGES = 4
"""Chunks in memory at once."""


def rows_of(rests: Sequence[ShardRecords], key: int) -> npt.NDArray[np.void]:
    """The chunks of these flats as rows, without places. key: the first of as many keys as there are sections."""
    return new_rows([(np.asarray(rest.starts), rest.records["numel"]) for rest in rests], key)


class Copy:
    """One copying of all flats of a rank. `run` in one thread; `before_write` in others.

    rests: as they are when it is made, with nothing pending. flats: the same as entries of the manifest.
    order: all of the flats, in the order in which they are read unless somebody waits. progress: told the bytes of each chunk
    that was read.
    """

    def __init__(
        self,
        executor: Executor,
        rests: Sequence[ShardRecords],
        flats: Sequence[FlatEntry],
        rows: npt.NDArray[np.void],
        *,
        order: Sequence[Flat],
        progress: Callable[[int], object],
    ) -> None:
        self._executor = executor
        self._progress = progress
        self._ids = np.concatenate([rest.ids for rest in rests]) if rests else np.zeros(0, np.int32)
        self._sizes = section_bytes(rows, flats)
        self._exact = [
            [section.size_bytes(int(row["numel"])) for section in flats[row["flat"]].sections] for row in rows
        ]
        self._flat_of = [rests[index].flat for index in rows["flat"]]
        self._changed = threading.Condition()
        self._queue: dict[Flat, deque[int]] = {flat: deque() for flat in order}  # rows to be read, in this order
        for row, flat in enumerate(self._flat_of):
            self._queue[flat].append(row)
        self._unread = {flat: len(waiting) for flat, waiting in self._queue.items()}
        self._ended = False

    def before_write(self, flats: Sequence[Flat]) -> None:
        """Block until these flats were read, or the copying has ended, well or not."""
        with self._changed:
            if self._ended or not any(self._unread.get(flat) for flat in flats):
                return
            first = {flat: self._queue.pop(flat) for flat in flats if flat in self._queue}
            self._queue = {**first, **self._queue}
            while not self._ended and any(self._unread.get(flat) for flat in flats):
                self._changed.wait(0.5)

    def end(self) -> None:
        """Nothing is read any more: nobody needs to wait."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def run(self, writer: DataWriter) -> None:
        """Copy all. Blocks. Raises what a read or a write met; then what was written is of no use."""
        size = round_up(int(self._sizes.sum(axis=1).max(initial=4096)), 4096)
        slab = Slab(STAGES * size)
        try:
            self._run(writer, [slab.array(np.uint8, offset=k * size, count=size) for k in range(STAGES)])
        finally:
            self.end()
            slab.close()

    def _run(self, writer: DataWriter, free: list[npt.NDArray[np.uint8]]) -> None:
        reading: deque[tuple[int, npt.NDArray[np.uint8], Ticket]] = deque()
        writing: deque[tuple[npt.NDArray[np.uint8], Ticket]] = deque()
        try:
            while True:
                while len(reading) < STAGES // 2 and (row := self._take()) is not None:
                    stage = free.pop() if free else _emptied(writing)
                    reading.append((row, stage, self._fetch(row, stage)))
                if not reading:
                    break
                row, stage, ticket = reading[0]
                ticket.wait()
                reading.popleft()
                self._was_read(row)
                writing.append((stage, writer.store(row, self._addresses(row, stage))))
                writer.check()
            while writing:
                _emptied(writing)
        finally:
            # Also after a fault: nothing may be on its way from or into memory that is freed.
            for ticket in [ticket for _, _, ticket in reading] + [ticket for _, ticket in writing]:
                _settle(ticket)

    def _take(self) -> int | None:
        with self._changed:
            for flat, rows in list(self._queue.items()):
                if rows:
                    return rows.popleft()
                del self._queue[flat]
        return None

    def _was_read(self, row: int) -> None:
        with self._changed:
            self._unread[self._flat_of[row]] -= 1
            self._changed.notify_all()
        self._progress(int(self._sizes[row].sum()))

    def _addresses(self, row: int, stage: npt.NDArray[np.uint8]) -> dict[int, int]:
        at = np.cumsum(self._sizes[row]) - self._sizes[row] + stage.ctypes.data
        return {s: int(at[s]) for s in range(len(self._exact[row]))}

    def _fetch(self, row: int, stage: npt.NDArray[np.uint8]) -> Ticket:
        start = 0
        for exact, padded in zip(self._exact[row], self._sizes[row], strict=False):
            stage[start + exact : start + padded] = 0
            start += int(padded)
        addresses = self._addresses(row, stage)
        job = np.zeros(1, dtype=JOB)
        job["chunk"], job["kind"], job["base"] = self._ids[row], JobKind.FETCH, -1
        job["mask"] = (1 << len(addresses)) - 1
        job["ptr"][0, : len(addresses)] = list(addresses.values())
        return self._executor.submit(job, priority=Priority.WRITEBACK)


def _emptied(writing: deque[tuple[npt.NDArray[np.uint8], Ticket]]) -> npt.NDArray[np.uint8]:
    """The stage whose store was begun first, when its bytes are taken."""
    stage, ticket = writing[0]
    ticket.wait_filled()
    writing.popleft()
    return stage


def _settle(ticket: Ticket) -> None:
    try:
        ticket.wait()
    except AioError:
        return  # the first of them is on its way to the caller already
