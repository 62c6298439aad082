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
from infinity._src.memory.swap_space import Place, SwapSpace
from infinity._src.sizes import round_up
from infinity.aio import CHUNK, JOB, Executor, JobKind, Priority, Slab, Ticket
from infinity.aio._records import ALIGNMENT_BYTES, CHUNK_NUMEL
from infinity.errors import AioError

CHUNK_BYTES = 2 * CHUNK_NUMEL
"""Bytes per chunk at most (768 KiB): what a slot for the parameters of one chunk holds, and drives like."""

_SUM_BYTES = 16 << 10
_FIRST_KEY = 1 << 62  # chunks of states count from 0


@dataclasses.dataclass(eq=False)
class StoredBytes:
    """`size_bytes` bytes at rest, or on their way there. `stored`: tells when their source may go."""

    size_bytes: int
    written: Ticket
    fetches: list[Ticket] = dataclasses.field(default_factory=list)

    @property
    def idle(self) -> bool:
        """Whether nothing moves from or to it."""
        return self.written.done and all(ticket.done for ticket in self.fetches)

    @property
    def broken(self) -> bool:
        """Whether something that moved from or to it failed."""
        return self.written.failed or any(ticket.failed for ticket in self.fetches)


@dataclasses.dataclass(eq=False, kw_only=True)
class StoredOnNvme(StoredBytes):
    """Shelved on NVMe."""

    ids: npt.NDArray[np.int32]  # [chunks]
    starts: npt.NDArray[np.uint64]  # [chunks] byte at which each chunk starts
    places: list[Place]
    sums: npt.NDArray[np.uint32]


@dataclasses.dataclass(eq=False, kw_only=True)
class StoredInHostMemory(StoredBytes):
    """Shelved in pinned CPU memory."""

    slab: Slab


class ActivationStore(Protocol):
    """Somewhere off the compute device where bytes can lie until backward. Calls do not block."""

    stored_bytes: int
    fetched_bytes: int
    rest_bytes_peak: int

    def store(self, address: int, size_bytes: int) -> Any:
        """Start taking `size_bytes` at `address`, which must live until `stored.filled`. Returns its `StoredBytes`."""

    def fetch(self, stored: Any, address: int, priority: Priority) -> Ticket:
        """Start bringing the bytes to `address`."""

    def free(self, stored: Any) -> None:
        """The bytes are wanted no more."""

    def recover(self) -> None:
        """After a fault: try whether the place can be written again. Blocks. Raises: the AioError when it cannot."""

    def wait_all(self) -> None:
        """Block until nothing moves, whatever becomes of it."""


class NvmeActivationStore:
    """A shelf on NVMe. Not safe from several threads at once. sums_on: keep checksums, which the executor then verifies.

    device: where the bytes come from and go to.
    """

    def __init__(self, executor: Executor, space: SwapSpace, *, sums_on: bool, device: Device | None = None) -> None:
        self._executor = executor
        self._device = device or Device(torch.device("cpu"))
        self._space = space
        self._sums_on = sums_on
        self._free: dict[int, list[StoredOnNvme]] = {}  # idle, by size, the size that was last used last
        self._freed: list[StoredOnNvme] = []  # given back while something still moved
        self._key = _FIRST_KEY
        self._rest_bytes = 0
        self.stored_bytes = 0
        self.fetched_bytes = 0
        self.rest_bytes_peak = 0

    def store(self, address: int, size_bytes: int) -> StoredOnNvme:
        """See `Shelf.put`. Raises: SwapFullError when the drives have no room."""
        self._collect()
        if size_bytes in self._free:
            stored = self._reuse(size_bytes)
            stored.fetches.clear()
            ids, starts = stored.ids, stored.starts
            stored.written = self._move(JobKind.STORE, ids, starts, address, Priority.WRITEBACK)
        else:
            self._drop_idle(size_bytes)
            ids, starts, places, sums = self._define(size_bytes)
            written = self._move(JobKind.STORE, ids, starts, address, Priority.WRITEBACK)
            stored = StoredOnNvme(size_bytes, written, ids=ids, starts=starts, places=places, sums=sums)
        self.stored_bytes += size_bytes
        return stored

    def fetch(self, stored: StoredOnNvme, address: int, priority: Priority) -> Ticket:
        """See `Shelf.fetch`. What is still being stored is read after that."""
        ticket = self._move(JobKind.FETCH, stored.ids, stored.starts, address, priority)
        stored.fetches.append(ticket)
        self.fetched_bytes += stored.size_bytes
        return ticket

    def free(self, stored: StoredOnNvme) -> None:
        """See `Shelf.give_back`."""
        self._freed.append(stored)

    def recover(self) -> None:
        """See `Shelf.mend`."""
        self._collect()
        self._executor.recover().wait()

    def wait_all(self) -> None:
        """See `Shelf.settle`."""
        self._executor.wait_all()

    def _collect(self) -> None:
        """Take what was given back and no longer moves: into the free list, or out of the books after a fault."""
        freed, self._freed = self._freed, []
        for stored in freed:
            if not stored.idle:
                self._freed.append(stored)
            elif stored.broken:
                self._drop(stored)
            else:
                # Newest size last: what is forgotten first is what was not wanted for longest.
                kept = self._free.pop(stored.size_bytes, [])
                self._free[stored.size_bytes] = [*kept, stored]

    def _drop_idle(self, size_bytes: int) -> None:
        """Forget idle ones of other sizes until `size_bytes` of them are given back: with lengths that change from step
        to step the files would else grow by all of them."""
        while size_bytes > 0 and self._free:
            stored = self._reuse(next(iter(self._free)))
            self._drop(stored)
            size_bytes -= stored.size_bytes

    def _reuse(self, size_bytes: int) -> StoredOnNvme:
        free = self._free[size_bytes]
        stored = free.pop()
        if not free:
            del self._free[size_bytes]
        return stored

    def _drop(self, stored: StoredOnNvme) -> None:
        self._executor.drop(stored.ids)
        for place in stored.places:
            self._space.free(place)
            self._rest_bytes -= place.size_bytes

    def _define(
        self, size_bytes: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64], list[Place], npt.NDArray[np.uint32]]:
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


class HostActivationStore:
    """A shelf in pinned CPU memory, for a device with memory of its own. Not safe from several threads at once.

    It grows in the first steps, to what they need: how much that is depends on the batch. Places are used again, by size; those
    of sizes that are not wanted any more go when others are.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[int, list[StoredInHostMemory]] = {}  # idle, by size, the size that was last used last
        self._used: set[StoredInHostMemory] = set()
        self._freed: list[StoredInHostMemory] = []
        self._rest_bytes = 0
        self.stored_bytes = 0
        self.fetched_bytes = 0
        self.rest_bytes_peak = 0

    def store(self, address: int, size_bytes: int) -> StoredInHostMemory:
        """See `Shelf.put`. Raises: MemoryError when the machine has no room, DeviceCopyError when it cannot be pinned."""
        self._collect()
        slab = self._slab_of(size_bytes)
        written = self._device.copy(slab.address, address, size_bytes, out=False)
        stored = StoredInHostMemory(size_bytes, written, slab=slab)
        self._used.add(stored)
        self.stored_bytes += size_bytes
        return stored

    def fetch(self, stored: StoredInHostMemory, address: int, priority: Priority) -> Ticket:  # noqa: ARG002 - there is no queue
        """See `Shelf.fetch`."""
        while not stored.written.filled:  # the two directions do not wait for each other
            stored.written.wait_filled()
        ticket = self._device.copy(address, stored.slab.address, stored.size_bytes, out=True)
        stored.fetches.append(ticket)
        self.fetched_bytes += stored.size_bytes
        return ticket

    def free(self, stored: StoredInHostMemory) -> None:
        """See `Shelf.give_back`."""
        self._used.discard(stored)
        self._freed.append(stored)

    def recover(self) -> None:
        """See `Shelf.mend`. There is nothing to try: the next copy tells."""

    def wait_all(self) -> None:
        """See `Shelf.settle`."""
        for stored in (*self._used, *self._freed):
            for ticket in (stored.written, *stored.fetches):
                with contextlib.suppress(AioError):
                    ticket.wait()

    def close(self) -> None:
        """Free all of it. Nothing may be under way."""
        for stored in (*self._used, *self._freed, *(one for kept in self._free.values() for one in kept)):
            self._drop(stored)
        self._used.clear()
        self._freed.clear()
        self._free.clear()

    def _slab_of(self, size_bytes: int) -> Slab:
        free = self._free.get(size_bytes)
        if free:
            found = free.pop()
            if not free:
                del self._free[size_bytes]
            return found.slab
        while self._free:
            for stored in self._free.pop(next(iter(self._free))):
                self._drop(stored)
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
        freed, self._freed = self._freed, []
        for stored in freed:
            if not stored.idle:
                self._freed.append(stored)
                continue
            kept = self._free.pop(stored.size_bytes, [])
            self._free[stored.size_bytes] = [*kept, stored]

    def _drop(self, stored: StoredInHostMemory) -> None:
        self._device.unpin(stored.slab)
        stored.slab.close()
        self._rest_bytes -= stored.slab.size_bytes


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
