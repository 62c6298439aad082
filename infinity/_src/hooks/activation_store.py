"""Storage of boundary activations: bytes in chunks of the swap files, or in pinned CPU memory.

    store(address, bytes) -> StoredBytes     fetch(stored, address) -> Ticket     free(stored)

On NVMe the executor moves them, with its checksums, priorities, fault handling and statistics, as
it moves states. Extents are reused: a freed extent waits for the next store of the same size, and
is released when stores of other sizes need capacity.
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
"""Bytes per chunk at most (768 KiB): a staging buffer for the parameters of one chunk holds them,
and drives reach their bandwidth with requests of this size."""

_SUM_BYTES = 16 << 10
_FIRST_KEY = 1 << 62  # keys are unique, and chunks of states have the keys from 0 on


@dataclasses.dataclass(eq=False)
class StoredBytes:
    """Copy of `size_bytes` bytes that is stored, or is being stored. written: ticket of the store;
    once it is filled, the source may be freed."""

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
    """Bytes stored on NVMe, in chunks."""

    ids: npt.NDArray[np.int32]  # [chunks]
    starts: npt.NDArray[np.uint64]  # [chunks] byte at which each chunk starts
    places: list[SwapExtent]
    sums: npt.NDArray[np.uint32]


@dataclasses.dataclass(eq=False, kw_only=True)
class StoredInHostMemory(StoredBytes):
    """Bytes stored in pinned CPU memory."""

    slab: Slab  # pinned


class ActivationStore(Protocol):
    """Storage off the compute device, for bytes that backward needs again. `store`, `fetch` and
    `free` start transfers and do not wait for them, with one exception: a fetch from CPU memory
    waits until the bytes are stored. Not safe from several threads at once."""

    stored_bytes: int
    fetched_bytes: int
    rest_bytes_peak: int

    def store(self, address: int, size_bytes: int) -> Any:
        """Start copying `size_bytes` bytes from `address`, memory that must live until
        `written.filled`. Returns the `StoredBytes`."""

    def fetch(self, stored: Any, address: int, priority: Priority) -> Ticket:
        """Start copying the bytes to `address`."""

    def free(self, stored: Any) -> None:
        """Free the bytes, as soon as no transfer uses them."""

    def recover(self) -> None:
        """Try after a fault whether the store can be written again. Blocks. Raises: AioError when
        it cannot."""

    def wait_all(self) -> None:
        """Block until all transfers have ended, failed or not."""


class NvmeActivationStore:
    """Activation store on NVMe. sums_on: the executor computes checksums and verifies them at every
    fetch. device: the device that computes.
    """

    def __init__(
        self, executor: Executor, space: SwapSpace, *, sums_on: bool, device: Device | None = None
    ) -> None:
        self._executor = executor
        self._device = device or Device(torch.device("cpu"))
        self._space = space
        self._sums_on = sums_on
        # Free extents by size, in the order in which sizes became free.
        self._free: dict[int, list[StoredOnNvme]] = {}
        self._freed: list[StoredOnNvme] = []  # freed; `_collect` files those that are idle
        # Extents of dropped chunks, each with the (layer, drive, offset) where its chunk was.
        self._given_up: list[tuple[SwapExtent, tuple[int, int, int]]] = []
        self._key = _FIRST_KEY
        self._rest_bytes = 0
        self.stored_bytes = 0
        self.fetched_bytes = 0
        self.rest_bytes_peak = 0

    def store(self, address: int, size_bytes: int) -> StoredOnNvme:
        """Start copying; see `ActivationStore.store`. Raises: SwapFullError when the drives are
        full."""
        # Collect first, so that extents that have become free are reused before files grow.
        self._collect()
        if size_bytes in self._free:
            stored = self._reuse(size_bytes)
            stored.fetches.clear()
            ids, starts = stored.ids, stored.starts
            stored.written = self._move(JobKind.STORE, ids, starts, address, Priority.WRITEBACK)
        else:
            self._drop_idle(size_bytes)
            # Define them after `_drop_idle`: the new extents take the space that it freed.
            ids, starts, places, sums = self._define(size_bytes)
            written = self._move(JobKind.STORE, ids, starts, address, Priority.WRITEBACK)
            stored = StoredOnNvme(
                size_bytes, written, ids=ids, starts=starts, places=places, sums=sums
            )
        self.stored_bytes += size_bytes
        return stored

    def fetch(self, stored: StoredOnNvme, address: int, priority: Priority) -> Ticket:
        """Start copying back; see `ActivationStore.fetch`. The executor orders the read after a
        store of the same bytes that is still in flight."""
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
                # An extent with a failed transfer is not reused.
                self._drop(stored)
            else:
                # Keep the newest size last: `_drop_idle` begins with the size unused for longest.
                kept = self._free.pop(stored.size_bytes, [])
                self._free[stored.size_bytes] = [*kept, stored]

    def _drop_idle(self, size_bytes: int) -> None:
        """Drop free extents of other sizes until `size_bytes` bytes are dropped. Otherwise sequence
        lengths that vary from step to step would reserve extents for every length."""
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
        # Look before the drop: afterwards the executor no longer knows where the chunks were.
        now = self._executor.look(stored.ids)
        self._executor.drop(stored.ids)
        columns = (now[name].tolist() for name in ("file", "drive", "file_offset"))
        places = zip(*columns, strict=True)
        self._given_up += zip(stored.places, places, strict=True)
        self._rest_bytes -= sum(place.size_bytes for place in stored.places)
        self._free_settled()

    def _free_settled(self) -> None:
        """Free the extents of dropped chunks, unless the swap space has an extent at another place
        than its chunk was: then the executor has redirected a write from a bad range, and the swap
        space records that later. If the extent were freed before that, the bad range would be
        reserved again."""
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
        """Define chunks for `size_bytes` bytes. Returns their ids, start bytes, extents and
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
        # Order the transfer after kernels that still write the source or read the target.
        self._device.behind()
        return self._executor.submit(jobs, priority=priority)


class HostActivationStore:
    """Activation store in pinned CPU memory, for a device with separate memory.

    The store grows in the first steps to the size that the batches need. Slabs are reused, also for
    fewer bytes than they hold: pinning memory stops the device, and batches that are padded to
    their longest row differ in size. Sizes are rounded up (`slab_bytes`). If no free slab is large
    enough, free slabs are unpinned before a new one is made.
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
        memory left, DeviceCopyError when the memory cannot be pinned."""
        self._collect()
        slab = self._slab_of(size_bytes)
        written = self._device.copy(slab.address, address, size_bytes, out=False)
        stored = StoredInHostMemory(size_bytes, written, slab=slab)
        self._used.add(stored)
        self.stored_bytes += size_bytes
        return stored

    def fetch(self, stored: StoredInHostMemory, address: int, priority: Priority) -> Ticket:
        """Start copying back; see `ActivationStore.fetch`. Blocks until the bytes are stored.
        Copies run in the order of the calls: `priority` has no effect."""
        del priority
        # D2H and H2D run on separate streams, which do not wait for each other.
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
        """Free all slabs. No copy may be in flight."""
        for slab in (*(stored.slab for stored in (*self._used, *self._freed)), *self._free):
            self._drop(slab)
        self._used.clear()
        self._freed.clear()
        self._free.clear()

    def _slab_of(self, size_bytes: int) -> Slab:
        # Take the smallest slab that is large enough: the next store may need a larger one.
        at = bisect.bisect_left(self._free, size_bytes, key=lambda slab: slab.size_bytes)
        if at < len(self._free):
            return self._free.pop(at)
        wanted = slab_bytes(size_bytes)
        # Unpin slabs of shorter batches, the largest first, so that no more memory is pinned than
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
            # Nothing else refers to the slab yet.
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
    """Return the size of the slab for `size_bytes` bytes: rounded up by less than an eighth, or
    less than 2 MiB, so that stores of nearly the same size share a slab size.
    """
    step = max(HUGE_PAGE_BYTES, 1 << max(size_bytes.bit_length() - 4, 0))
    return round_up(size_bytes, step)


def _records(sizes: Sequence[int], key: int) -> npt.NDArray[Any]:
    """Make CHUNK records with one section of bytes each, without drive and offset."""
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
