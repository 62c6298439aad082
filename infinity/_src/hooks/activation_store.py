"""Storage of boundary activations: bytes in chunks of the swap files, or in pinned CPU memory.

    store(address, bytes) -> StoredBytes     fetch(stored, address) -> Ticket     free(stored)

The executor moves them, with its checksums, priorities, faults and statistics, as it moves states.
Places are used again: a place that was freed waits, by size, for the next store of the same size,
and is dropped when other sizes need room.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.base.sizes import round_up
from infinity._src.cabi.records import ALIGNMENT_BYTES, CHUNK_NUMEL
from infinity._src.memory.device import Device
from infinity._src.memory.swap_space import SwapExtent, SwapSpace
from infinity.aio import CHUNK, JOB, Executor, JobKind, Priority, Slab, Ticket
from infinity.aio._slab import HUGE_PAGE_BYTES
from infinity.errors import AioError

CHUNK_BYTES = 2 * CHUNK_NUMEL
"""Bytes per chunk at most (768 KiB): what a slot for the parameters of one chunk holds, and drives
like."""

_SUM_BYTES = 16 << 10
_FIRST_KEY = 1 << 62  # keys are unique: chunks of states count from 0


@dataclasses.dataclass(eq=False)
class StoredBytes:
    """Stored copy of `size_bytes` bytes, or one under way. written: once it is filled, the source
    may be freed."""

    size_bytes: int
    written: Ticket
    fetches: list[Ticket] = dataclasses.field(default_factory=list)

    @property
    def idle(self) -> bool:
        """True when no transfer reads or writes the copy."""
        return self.written.done and all(ticket.done for ticket in self.fetches)

    @property
    def broken(self) -> bool:
        return self.written.failed or any(ticket.failed for ticket in self.fetches)


@dataclasses.dataclass(eq=False, kw_only=True)
class StoredOnNvme(StoredBytes):
    """Bytes stored on NVMe."""

    ids: npt.NDArray[np.int32]  # [chunks]
    starts: npt.NDArray[np.uint64]  # [chunks] byte at which each chunk starts
    places: list[SwapExtent]
    sums: npt.NDArray[np.uint32]


@dataclasses.dataclass(eq=False, kw_only=True)
class StoredInHostMemory(StoredBytes):
    """Bytes stored in pinned CPU memory."""

    slab: Slab


class ActivationStore(Protocol):
    """Storage off the compute device, for bytes that backward needs again. Calls do not block."""

    stored_bytes: int
    fetched_bytes: int
    rest_bytes_peak: int

    def store(self, address: int, size_bytes: int) -> Any:
        """Start copying `size_bytes` from `address`, which must live until `written.filled`.
        Returns the `StoredBytes`."""

    def fetch(self, stored: Any, address: int, priority: Priority) -> Ticket:
        """Start copying the bytes to `address`."""

    def free(self, stored: Any) -> None:
        """Free the bytes, as soon as no transfer uses them."""

    def recover(self) -> None:
        """Try after a fault whether the place can be written again. Blocks. Raises: the AioError
        when it cannot."""

    def wait_all(self) -> None:
        """Block until all transfers have ended, failed or not."""


class NvmeActivationStore:
    """Activation store on NVMe. Not safe from several threads at once. sums_on: keep checksums,
    which the executor then verifies.

    device: the device that computes.
    """

    def __init__(
        self, executor: Executor, space: SwapSpace, *, sums_on: bool, device: Device | None = None
    ) -> None:
        self._executor = executor
        self._device = device or Device(torch.device("cpu"))
        self._space = space
        self._sums_on = sums_on
        # Free places by size. The size that became free last comes last.
        self._free: dict[int, list[StoredOnNvme]] = {}
        self._freed: list[StoredOnNvme] = []  # freed while a transfer still used them
        # Places that no chunk has any more: (layer, drive, offset) is where the last one was.
        self._given_up: list[tuple[SwapExtent, tuple[int, int, int]]] = []
        self._key = _FIRST_KEY
        self._rest_bytes = 0
        self.stored_bytes = 0
        self.fetched_bytes = 0
        self.rest_bytes_peak = 0

    def store(self, address: int, size_bytes: int) -> StoredOnNvme:
        """Start copying; see `ActivationStore.store`. Raises: SwapFullError when the drives have no
        room."""
        # First: places that have become free are used again before files grow.
        self._collect()
        if size_bytes in self._free:
            stored = self._reuse(size_bytes)
            stored.fetches.clear()
            ids, starts = stored.ids, stored.starts
            stored.written = self._move(JobKind.STORE, ids, starts, address, Priority.WRITEBACK)
        else:
            self._drop_idle(size_bytes)
            # Room was given back first, so that the files stay about as large as they are.
            ids, starts, places, sums = self._define(size_bytes)
            written = self._move(JobKind.STORE, ids, starts, address, Priority.WRITEBACK)
            stored = StoredOnNvme(
                size_bytes, written, ids=ids, starts=starts, places=places, sums=sums
            )
        self.stored_bytes += size_bytes
        return stored

    def fetch(self, stored: StoredOnNvme, address: int, priority: Priority) -> Ticket:
        """Start copying back; see `ActivationStore.fetch`. The read of bytes that are still being
        stored waits for that."""
        ticket = self._move(JobKind.FETCH, stored.ids, stored.starts, address, priority)
        stored.fetches.append(ticket)
        self.fetched_bytes += stored.size_bytes
        return ticket

    def free(self, stored: StoredOnNvme) -> None:
        self._freed.append(stored)

    def recover(self) -> None:
        self._collect()
        self._executor.recover().wait()

    def wait_all(self) -> None:
        self._executor.wait_all()

    def _collect(self) -> None:
        self._free_settled()
        freed, self._freed = self._freed, []
        for stored in freed:
            if not stored.idle:
                self._freed.append(stored)
            elif stored.broken:
                # A place with a failed transfer is not used again.
                self._drop(stored)
            else:
                # Newest size last: `_drop_idle` begins with the size unused for longest.
                kept = self._free.pop(stored.size_bytes, [])
                self._free[stored.size_bytes] = [*kept, stored]

    def _drop_idle(self, size_bytes: int) -> None:
        """Drop free places of other sizes until `size_bytes` are given back. Sequence lengths that
        change from step to step would else grow the files by all of them."""
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
        # The executor knows where its chunks are until it has dropped them.
        now = self._executor.look(stored.ids)
        self._executor.drop(stored.ids)
        columns = (now[name].tolist() for name in ("file", "drive", "file_offset"))
        places = zip(*columns, strict=True)
        self._given_up += zip(stored.places, places, strict=True)
        self._rest_bytes -= sum(place.size_bytes for place in stored.places)
        self._free_settled()

    def _free_settled(self) -> None:
        """Free the released places, except for those of writes that went elsewhere and are not
        settled yet: the range that refused a write would be given out again."""
        waiting = []
        for place, at in self._given_up:
            now = self._space.place_of(place)
            if (now.layer, now.drive, now.offset) == at:
                self._space.free(place)
            else:
                waiting.append((place, at))
        self._given_up = waiting

    def _define(
        self, size_bytes: int
    ) -> tuple[
        npt.NDArray[np.int32], npt.NDArray[np.uint64], list[SwapExtent], npt.NDArray[np.uint32]
    ]:
        """Define chunks for `size_bytes` bytes. Returns their ids, start bytes, places and
        checksums."""
        starts = range(0, size_bytes, CHUNK_BYTES)
        sizes = [min(CHUNK_BYTES, size_bytes - start) for start in starts]
        records = _records(sizes, self._key)
        self._key += len(sizes)
        sums: npt.NDArray[np.uint32] = np.zeros(
            (len(sizes), -(-sizes[0] // _SUM_BYTES)), dtype=np.uint32
        )
        if self._sums_on:
            records["sums_ptr"] = sums.ctypes.data + np.arange(
                len(sizes), dtype=np.uint64
            ) * np.uint64(sums.strides[0])
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
        # Kernels that still write the source, or read the target, come first.
        self._device.behind()
        return self._executor.submit(jobs, priority=priority)


class HostActivationStore:
    """Activation store in pinned CPU memory, for a device with separate memory. Not safe from
    several threads at once.

    It grows in the first steps to the size that they need, which depends on the batch. Slabs are
    used again, also for less than they hold: pinning stops the device, and batches that are padded
    to their longest row have other sizes each time. Sizes are rounded up (`slab_bytes`). If no
    free slab is large enough, smaller ones make room for a new one.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[Slab] = []  # by size
        self._used: set[StoredInHostMemory] = set()
        self._freed: list[StoredInHostMemory] = []
        self._rest_bytes = 0
        self.stored_bytes = 0
        self.fetched_bytes = 0
        self.rest_bytes_peak = 0

    def store(self, address: int, size_bytes: int) -> StoredInHostMemory:
        """Start copying; see `ActivationStore.store`. Raises: MemoryError when the machine has no
        room, DeviceCopyError when it cannot be pinned."""
        self._collect()
        slab = self._slab_of(size_bytes)
        written = self._device.copy(slab.address, address, size_bytes, out=False)
        stored = StoredInHostMemory(size_bytes, written, slab=slab)
        self._used.add(stored)
        self.stored_bytes += size_bytes
        return stored

    def fetch(self, stored: StoredInHostMemory, address: int, priority: Priority) -> Ticket:
        """Start copying back; see `ActivationStore.fetch`. There is no queue with priorities."""
        del priority
        # D2H and H2D have streams of their own, which do not wait for each other.
        while not stored.written.filled:
            self._device.wait_filled(stored.written)
        ticket = self._device.copy(address, stored.slab.address, stored.size_bytes, out=True)
        stored.fetches.append(ticket)
        self.fetched_bytes += stored.size_bytes
        return ticket

    def free(self, stored: StoredInHostMemory) -> None:
        self._used.discard(stored)
        self._freed.append(stored)

    def recover(self) -> None:
        """Nothing to do: the next copy fails if the device still does."""

    def wait_all(self) -> None:
        for stored in (*self._used, *self._freed):
            for ticket in (stored.written, *stored.fetches):
                with contextlib.suppress(AioError):
                    ticket.wait()

    def close(self) -> None:
        """Free all slabs. Nothing may be under way."""
        for slab in (*(stored.slab for stored in (*self._used, *self._freed)), *self._free):
            self._drop(slab)
        self._used.clear()
        self._freed.clear()
        self._free.clear()

    def _slab_of(self, size_bytes: int) -> Slab:
        # The smallest that is large enough: larger ones may be wanted next.
        at = bisect.bisect_left(self._free, size_bytes, key=lambda slab: slab.size_bytes)
        if at < len(self._free):
            return self._free.pop(at)
        wanted = slab_bytes(size_bytes)
        # Pinned memory of shorter batches makes room, the largest first: so no more is pinned than
        # the longest batch needs.
        given = 0
        while self._free and given < wanted:
            slab = self._free.pop()
            given += slab.size_bytes
            self._drop(slab)
        slab = Slab(wanted)
        try:
            self._device.pin(slab)
        except BaseException:
            # No other thread has the slab yet.
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
            else:
                bisect.insort(self._free, stored.slab, key=lambda slab: slab.size_bytes)

    def _drop(self, slab: Slab) -> None:
        self._device.unpin(slab)
        slab.close()
        self._rest_bytes -= slab.size_bytes


def slab_bytes(size_bytes: int) -> int:
    """Return the bytes of a slab for so many: rounded up by an eighth at most, or by 2 MiB, so that
    sizes that are nearly the same are the same.
    """
    step = max(HUGE_PAGE_BYTES, 1 << max(size_bytes.bit_length() - 4, 0))
    return round_up(size_bytes, step)


def _records(sizes: Sequence[int], key: int) -> npt.NDArray[Any]:
    """Make CHUNK records of one section of bytes each, without their places."""
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
