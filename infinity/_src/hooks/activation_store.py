"""Where boundary activations rest: plain bytes in chunks of the swap files, or in pinned CPU memory, moved by the executor.

    put(address, bytes) -> Shelved      fetch(shelved, address) -> Ticket      give_back(shelved)

Checksums, priorities, faults and statistics are the executor's, as for states. Places are used again: what is given back
waits, by size, for the next of the same size, and goes back to the swap files when others are wanted.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.memory.device import Device
from infinity._src.memory.swap_space import SwapExtent, SwapSpace
from infinity._src.sizes import round_up
from infinity.aio import CHUNK, JOB, Executor, JobKind, Priority, Slab, Ticket
from infinity.aio._records import ALIGNMENT_BYTES, CHUNK_NUMEL
from infinity.errors import AioError

CHUNK_BYTES = 2 * CHUNK_NUMEL
"""Bytes per chunk at most (768 KiB): what a slot for the parameters of one chunk holds, and drives like."""

_SUM_BYTES = 16 << 10
_FIRST_KEY = 1 << 62  # chunks of states count from 0


@dataclasses.dataclass(eq=False)
class Shelved:
    """`size_bytes` bytes at rest, or on their way there. `stored`: tells when their source may go."""

    size_bytes: int
    stored: Ticket
    fetches: list[Ticket] = dataclasses.field(default_factory=list)

    @property
    def idle(self) -> bool:
        """Whether nothing moves from or to it."""
        return self.stored.done and all(ticket.done for ticket in self.fetches)

    @property
    def broken(self) -> bool:
        """Whether something that moved from or to it failed."""
        return self.stored.failed or any(ticket.failed for ticket in self.fetches)


@dataclasses.dataclass(eq=False, kw_only=True)
class OnDrives(Shelved):
    """Shelved on NVMe."""

    ids: npt.NDArray[np.int32]  # [chunks]
    starts: npt.NDArray[np.uint64]  # [chunks] byte at which each chunk starts
    places: list[SwapExtent]
    sums: npt.NDArray[np.uint32]


@dataclasses.dataclass(eq=False, kw_only=True)
class InMemory(Shelved):
    """Shelved in pinned CPU memory."""

    slab: Slab


class Shelf(Protocol):
    """Somewhere off the compute device where bytes can lie until backward. Calls do not block."""

    stored_bytes: int
    fetched_bytes: int
    rest_bytes_peak: int

    def put(self, address: int, size_bytes: int) -> Any:
        """Start taking `size_bytes` at `address`, which must live until `stored.filled`. Returns its `Shelved`."""

    def fetch(self, shelved: Any, address: int, priority: Priority) -> Ticket:
        """Start bringing the bytes to `address`."""

    def give_back(self, shelved: Any) -> None:
        """The bytes are wanted no more."""

    def mend(self) -> None:
        """After a fault: try whether the place can be written again. Blocks. Raises: the AioError when it cannot."""

    def settle(self) -> None:
        """Block until nothing moves, whatever becomes of it."""


class DriveShelf:
    """A shelf on NVMe. Not safe from several threads at once. sums_on: keep checksums, which the executor then verifies.

    device: where the bytes come from and go to.
    """

    def __init__(self, executor: Executor, space: SwapSpace, *, sums_on: bool, device: Device | None = None) -> None:
        self._executor = executor
        self._device = device or Device(torch.device("cpu"))
        self._space = space
        self._sums_on = sums_on
        self._free: dict[int, list[OnDrives]] = {}  # idle, by size, the size that was last used last
        self._leaving: list[OnDrives] = []  # given back while something still moved
        self._key = _FIRST_KEY
        self._rest_bytes = 0
        self.stored_bytes = 0
        self.fetched_bytes = 0
        self.rest_bytes_peak = 0

    def put(self, address: int, size_bytes: int) -> OnDrives:
        """See `Shelf.put`. Raises: SwapFullError when the drives have no room."""
        self._collect()
        if size_bytes in self._free:
            shelved = self._take_free(size_bytes)
            shelved.fetches.clear()
            ids, starts = shelved.ids, shelved.starts
            shelved.stored = self._move(JobKind.STORE, ids, starts, address, Priority.WRITEBACK)
        else:
            self._make_room(size_bytes)
            ids, starts, places, sums = self._define(size_bytes)
            stored = self._move(JobKind.STORE, ids, starts, address, Priority.WRITEBACK)
            shelved = OnDrives(size_bytes, stored, ids=ids, starts=starts, places=places, sums=sums)
        self.stored_bytes += size_bytes
        return shelved

    def fetch(self, shelved: OnDrives, address: int, priority: Priority) -> Ticket:
        """See `Shelf.fetch`. What is still being stored is read after that."""
        ticket = self._move(JobKind.FETCH, shelved.ids, shelved.starts, address, priority)
        shelved.fetches.append(ticket)
        self.fetched_bytes += shelved.size_bytes
        return ticket

    def give_back(self, shelved: OnDrives) -> None:
        """See `Shelf.give_back`."""
        self._leaving.append(shelved)

    def mend(self) -> None:
        """See `Shelf.mend`."""
        self._collect()
        self._executor.recover().wait()

    def settle(self) -> None:
        """See `Shelf.settle`."""
        self._executor.wait_all()

    def _collect(self) -> None:
        """Take what was given back and no longer moves: into the free list, or out of the books after a fault."""
        leaving, self._leaving = self._leaving, []
        for shelved in leaving:
            if not shelved.idle:
                self._leaving.append(shelved)
            elif shelved.broken:
                self._forget(shelved)
            else:
                # Newest size last: what is forgotten first is what was not wanted for longest.
                kept = self._free.pop(shelved.size_bytes, [])
                self._free[shelved.size_bytes] = [*kept, shelved]

    def _make_room(self, size_bytes: int) -> None:
        """Forget idle ones of other sizes until `size_bytes` of them are given back: with lengths that change from step
        to step the files would else grow by all of them."""
        while size_bytes > 0 and self._free:
            shelved = self._take_free(next(iter(self._free)))
            self._forget(shelved)
            size_bytes -= shelved.size_bytes

    def _take_free(self, size_bytes: int) -> OnDrives:
        free = self._free[size_bytes]
        shelved = free.pop()
        if not free:
            del self._free[size_bytes]
        return shelved

    def _forget(self, shelved: OnDrives) -> None:
        self._executor.drop(shelved.ids)
        for place in shelved.places:
            self._space.free(place)
            self._rest_bytes -= place.size_bytes

    def _define(
        self, size_bytes: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64], list[SwapExtent], npt.NDArray[np.uint32]]:
        """Chunks for `size_bytes` bytes: their ids, where each starts, their places and their checksums."""
        starts = range(0, size_bytes, CHUNK_BYTES)
        sizes = [min(CHUNK_BYTES, size_bytes - start) for start in starts]
        records = _records(sizes, self._key)
        self._key += len(sizes)
        sums: npt.NDArray[np.uint32] = np.zeros((len(sizes), -(-sizes[0] // _SUM_BYTES)), dtype=np.uint32)
        if self._sums_on:
            records["sums_ptr"] = sums.ctypes.data + np.arange(len(sizes), dtype=np.uint64) * np.uint64(sums.strides[0])
        places = self._space.reserve([int(run) for run in records["run_bytes"]])
        try:
            for record, place in zip(records, places, strict=True):
                record["drive"], record["file_offset"] = place.drive, place.offset
            ids = self._executor.define(records)
        except BaseException:
            for place in places:
                self._space.free(place)
            raise
        self._rest_bytes += sum(place.size_bytes for place in places)
        self.rest_bytes_peak = max(self.rest_bytes_peak, self._rest_bytes)
        return ids, np.array(starts, dtype=np.uint64), places, sums

    def _move(
        self,
        kind: JobKind,
        ids: npt.NDArray[np.int32],
        starts: npt.NDArray[np.uint64],
        address: int,
        priority: Priority,
    ) -> Ticket:
        jobs = np.zeros(len(ids), dtype=JOB)
        jobs["chunk"] = ids
        jobs["kind"] = kind
        jobs["mask"] = 1 | self._device.mask
        jobs["base"] = -1
        jobs["ptr"][:, 0] = starts + np.uint64(address)
        self._device.behind()
        return self._executor.submit(jobs, priority=priority)


class HostShelf:
    """A shelf in pinned CPU memory, for a device with memory of its own. Not safe from several threads at once.

    It grows in the first steps, to what they need: how much that is depends on the batch. Places are used again, by size; those
    of sizes that are not wanted any more go when others are.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[int, list[InMemory]] = {}  # idle, by size, the size that was last used last
        self._used: set[InMemory] = set()
        self._leaving: list[InMemory] = []
        self._rest_bytes = 0
        self.stored_bytes = 0
        self.fetched_bytes = 0
        self.rest_bytes_peak = 0

    def put(self, address: int, size_bytes: int) -> InMemory:
        """See `Shelf.put`. Raises: MemoryError when the machine has no room, DeviceCopyError when it cannot be pinned."""
        self._collect()
        slab = self._place(size_bytes)
        stored = self._device.copy(slab.address, address, size_bytes, out=False)
        shelved = InMemory(size_bytes, stored, slab=slab)
        self._used.add(shelved)
        self.stored_bytes += size_bytes
        return shelved

    def fetch(self, shelved: InMemory, address: int, priority: Priority) -> Ticket:  # noqa: ARG002 - there is no queue
        """See `Shelf.fetch`."""
        while not shelved.stored.filled:  # the two directions do not wait for each other
            shelved.stored.wait_filled()
        ticket = self._device.copy(address, shelved.slab.address, shelved.size_bytes, out=True)
        shelved.fetches.append(ticket)
        self.fetched_bytes += shelved.size_bytes
        return ticket

    def give_back(self, shelved: InMemory) -> None:
        """See `Shelf.give_back`."""
        self._used.discard(shelved)
        self._leaving.append(shelved)

    def mend(self) -> None:
        """See `Shelf.mend`. There is nothing to try: the next copy tells."""

    def settle(self) -> None:
        """See `Shelf.settle`."""
        for shelved in (*self._used, *self._leaving):
            for ticket in (shelved.stored, *shelved.fetches):
                with contextlib.suppress(AioError):
                    ticket.wait()

    def close(self) -> None:
        """Free all of it. Nothing may be under way."""
        for shelved in (*self._used, *self._leaving, *(one for kept in self._free.values() for one in kept)):
            self._drop(shelved)
        self._used.clear()
        self._leaving.clear()
        self._free.clear()

    def _place(self, size_bytes: int) -> Slab:
        free = self._free.get(size_bytes)
        if free:
            found = free.pop()
            if not free:
                del self._free[size_bytes]
            return found.slab
        while self._free:
            for shelved in self._free.pop(next(iter(self._free))):
                self._drop(shelved)
        slab = Slab(size_bytes)
        try:
            self._device.pin(slab)
        except BaseException:
            slab.close()
            raise
        self._rest_bytes += slab.size_bytes
        self.rest_bytes_peak = max(self.rest_bytes_peak, self._rest_bytes)
        return slab

    def _collect(self) -> None:
        leaving, self._leaving = self._leaving, []
        for shelved in leaving:
            if not shelved.idle:
                self._leaving.append(shelved)
                continue
            kept = self._free.pop(shelved.size_bytes, [])
            self._free[shelved.size_bytes] = [*kept, shelved]

    def _drop(self, shelved: InMemory) -> None:
        self._device.unpin(shelved.slab)
        shelved.slab.close()
        self._rest_bytes -= shelved.slab.size_bytes


def _records(sizes: Sequence[int], key: int) -> npt.NDArray[Any]:
    """CHUNK records of one section of bytes each, without their places."""
    records = np.zeros(len(sizes), dtype=CHUNK)
    records["key"] = np.arange(key, key + len(sizes), dtype=np.uint64)
    records["numel"] = sizes
    records["run_bytes"] = [round_up(size, ALIGNMENT_BYTES) for size in sizes]
    records["section_count"] = 1
    records["itemsize"][:, 0] = 1
    records["piece_numel"] = _SUM_BYTES
    records["section_at"] = -1
    records["section_at"][:, 0] = 0
    return records
