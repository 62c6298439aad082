"""Runs jobs on chunks: reads, verifies, updates and writes them on native threads, without the GIL.

An executor moves chunks between a drive, a slot (a buffer in its slab) and the caller's memory, and
runs optimizer kernels on them in the slot. The caller describes the work of a whole unit as arrays
of records (CHUNK, JOB, SEG, HYPER of infinity/_src/cabi/records.py), submits them in one call, and
gets a `Ticket`. Only `Ticket.wait`, `wait_all`, `resize_pools`, `attach_device` and `close` block.

    define(chunks) -> ids      submit(jobs, segs, hypers, priority=, gate=) -> Ticket      drop(ids)

        FETCH   read --> verify --> copy to ptr
        STORE   copy from ptr --> checksum --> write
        UPDATE  read --> verify, update, checksum (one pass) --> copy section 0 to ptr[0] --> write
        COPY    copy ptr[2] bytes from ptr[1] to ptr[0]; one address is on the device; no chunk

An UPDATE reads all sections, except those that its algorithm does not need (LEAVES_SHIFT), section
0 when the caller has it in memory (MASK_PARAM_IN_MEMORY), and spilled gradients (`grad`) unless a
segment uses them. It writes the sections that its algorithm needs, except `grad`.

Terms: a *slot* is a buffer of the slab that holds one chunk. A *gate* holds a submission back until
the caller has allocated its targets; a gate *escapes* when its UPDATEs run without targets and its
FETCHes are skipped. A *demand* is a job of priority DEMAND. The executor sends a *marked* drive no
writes. An *invalid* section has no valid copy anywhere.

Guarantees, the same for both backends:

- Order. Jobs on one chunk run in the order of submission; jobs on different chunks run at once.
- Slots. A job takes one slot: small if its non-resident bytes fit, else large; none if the chunk
  is wholly resident. Slots are granted by priority, then by arrival. One grant in eight is to the
  job that has waited longest, so write-back progresses under endless demands. The slots per drive
  are limited, so one drive cannot exhaust them.
- Prefetch. Idle slots read ahead, for UPDATEs at closed gates (oldest gate first) and for chunks
  named in `prefetch`. These reads have the lowest priority and leave a quarter of each pool free.
  If a job finds no free slot, the executor drops the newest prefetch, gives its slot to the job,
  and reads the chunk again later. A prefetch is visible only in `stats`: when it fails, or a later
  write of its chunk makes it stale, the UPDATE reads again.
- Faults. Every transfer's result is checked: short transfers are resumed, EAGAIN and EINTR retried,
  reads verified. Any other fault becomes a typed `AioError`, which every `Ticket.wait` raises.
- Reserved extents. A failed write is moved to an extent that `add_spares` has reserved: on the same
  drive, or else on another drive. The extent becomes the place of the whole chunk: sections that
  the job does not write are first read from the old place. The job succeeds; `take_moved_writes`
  reports the move.
- Failed writes. A failed write that cannot be moved keeps its slot, which has the only copy; a
  FETCH reads the chunk's sections from the slot. The failure also marks the drive: later STORE and
  UPDATE jobs on it are refused with the same fault, until `recover`.
- Invalid chunks. A STORE or UPDATE that failed otherwise, or was refused, leaves its chunk invalid:
  no copy of the intended value exists. Later FETCH and UPDATE jobs on it fail with the same fault
  until its sections are STOREd again.
- Versions. A *versioned* chunk has two places. After `commit`, the next STORE or UPDATE reads the
  live place and writes the whole chunk to the second place, which becomes the live one; later jobs
  read and write it in place. An UPDATE with MASK_FIRST writes its own sections alone: until the
  next UPDATE without it, the others are read from the committed place. `rollback` makes the
  committed place live again. The committed place is never written, so any later failure can be
  undone. Spilled gradients have one place.
- Devices. With MASK_DEVICE a copy waits for all kernels that were on the compute stream when the
  job was submitted or its gate opened. `filled` means that the copy has ended on the device;
  kernels launched afterwards see its data.
- Bounds. Depth and block size bound the requests in flight per drive. While both reads and writes
  are pending, each kind has half of the depth, and a quarter of the reads' half is reserved for
  demands, so that no kind starves.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from infinity._src.base.alarm import Alarm
from infinity._src.cabi import native, records
from infinity._src.cabi.records import SPAN, PoolSpec, Priority
from infinity.aio import _file_system, _memory_limits, _numa_node, _validate
from infinity.aio._cuda_driver import DeviceDriver
from infinity.aio._handles import Core, Gate, JobTicket, Ticket, load_uring
from infinity.aio._spares import SPARE, MovedWrite
from infinity.aio._stats import ExecutorStats, drive_stats, registered_reason
from infinity.aio._swap_file import SwapFile
from infinity.aio.testing import KINDS, Fault, Seam
from infinity.errors import AioClosedError, AioError, DeviceCopyError, DeviceFailedError

# Request size of a ring. Longer requests are not faster: 8 to 16 of 1 MiB saturate a drive.
RING_BLOCK_BYTES = 1 << 20
# Request size of a thread, which has one request in flight: long requests avoid gaps.
THREAD_BLOCK_BYTES = 16 << 20
# Capacity of the ring of spans in C: INF_SPAN_COUNT of native/executor/executor.h.
_SPANS_MAX = 65_536
# Reserved extents and moved writes that one C call returns.
_SPARES_AT_ONCE = 64


def _config(
    ffi: Any,
    small: PoolSpec,
    large: PoolSpec,
    *,
    uring: bool,
    verify: str,
    workers: int,
    threads_per_drive: int,
    hold_s: float,
    seam: Seam,
    drive_count: int,
) -> Any:
    config = ffi.new("inf_exec_config *")
    config.uring = uring
    config.verify = {"off": 0, "full": 1, "sample": 2}[verify]
    config.workers = workers
    config.threads_per_drive = threads_per_drive
    config.small_count, config.small_bytes = small.count, small.bytes
    config.large_count, config.large_bytes = large.count, large.bytes
    config.drive_count = drive_count
    # Idle time after which closed gates escape.
    config.hold_ns = int(hold_s * 1e9)
    if (place := _numa_node.chosen()) is not None:
        # 0: no node was chosen.
        config.numa = 1 + place.node
        for cpu in place.cpus:
            config.cpus[cpu // 64] |= 1 << cpu % 64
    _fill_seam(config.seam, seam)
    return config


def _fill_seam(record: Any, seam: Seam) -> None:
    # A Python seed may be negative or exceed C's uint64_t.
    record.seed = seam.seed & (2**64 - 1)
    record.delay_us_max = seam.delay_us_max
    record.null_batch, record.null_computes = seam.null, seam.null_computes
    if seam.fault is not None:
        _fill_fault(record.fault, seam.fault)


def _fill_fault(record: Any, fault: Fault) -> None:
    record.nth, record.late_us = fault.nth, int(fault.late_s * 1e6)
    record.kind = 1 + KINDS.index(fault.kind)
    record.op = 0 if fault.op == "read" else 1
    record.error, record.persistent = fault.errno, fault.persistent
    # 0: any drive.
    record.drive = 0 if fault.drive is None else 1 + fault.drive
    record.lasting, record.start = fault.lasting, fault.start
    record.stop = fault.stop or 0


def _drive_configs(
    ffi: Any, drives: Sequence[SwapFile], block_bytes: int, depths: Sequence[int], seam: Seam
) -> Any:
    # At least one record: C needs a valid pointer, also without drives.
    configs = ffi.new("inf_drive_config[]", max(1, len(drives)))
    for index, drive in enumerate(drives):
        configs[index].fd = drive.fd
        fitted = block_bytes, depths[index]
        if not seam.null:
            # With more requests than the device has tags, the submitting thread sleeps in the
            # kernel.
            fitted = _file_system.fit(drive, *fitted)
        configs[index].block_bytes, configs[index].depth = fitted
        configs[index].read_bytes_per_s, configs[index].write_bytes_per_s = seam.throttle(index)
    return configs


def _depth_of_each(depth: int | Sequence[int], drives: int) -> list[int]:
    """Return the depth of each drive. Raises: ValueError for fewer numbers than drives."""
    if isinstance(depth, int):
        # At least one number, so that depth is validated without drives, too.
        return [depth] * max(drives, 1)
    if len(depth) < drives:
        raise ValueError(f"depth={list(depth)}: one number for each of {drives} drives")
    return list(depth)


def _open(ffi: Any, lib: Any, config: Any, drives: Any, backend: str) -> Any:
    """Open the C executor. Raises: OSError; MemoryError when the pools cannot be allocated."""
    why = ffi.new("char[512]")
    error = ffi.new("int32_t *")
    pointer = lib.inf_executor_open(config, drives, error, why, 512)
    if pointer == ffi.NULL:
        text = ffi.string(why).decode(errors="replace")
        # MemoryError, not OSError: "auto" must not fall back to threads, which need the same pools.
        if text.startswith("no memory"):
            raise MemoryError(text)
        raise OSError(-error[0], f"cannot open an executor with backend {backend!r}: {text}")
    return pointer


@final
class Executor:
    """Runs jobs on chunks, with the guarantees in the module's docstring. Thread-safe; not usable
    in a forked child.

    backend: "io_uring" (one ring and one thread per drive) or "threads" (`threads_per_drive`
        threads per drive, with pread and pwrite).
    block_bytes: bytes of the longest request. None: 1 MiB for rings, up to 16 MiB for threads,
        which have one request in flight each. block_bytes and `depth` are reduced to each drive's
        limits.
    check, examine, alarm: as in `infinity.aio.open_executor`. The executor cannot detect a hung
        device: unless `check` raises, a wait for a copy queued behind a hung kernel never returns.

    Raises OSError when the backend does not work here, ImportError when the extension is missing,
    MemoryError when the pools exceed the available memory of the machine or its cgroup.
    `infinity.aio.open_executor` falls back to threads.
    """

    def __init__(
        self,
        drives: Sequence[SwapFile],
        *,
        small: PoolSpec,
        large: PoolSpec,
        backend: str = "io_uring",
        verify: str = "full",
        workers: int = 1,
        block_bytes: int | None = None,
        depth: int | Sequence[int] = 32,
        threads_per_drive: int = 8,
        hold_s: float = 0.02,
        seam: Seam | None = None,
        check: Callable[[], None] | None = None,
        examine: Callable[[AioError], AioError] | None = None,
        alarm: Alarm | None = None,
        backend_reason: str = "",
    ) -> None:
        seam = seam or Seam()
        uring = backend == "io_uring" and not seam.null
        if block_bytes is None:
            block_bytes = RING_BLOCK_BYTES if uring or seam.null else THREAD_BLOCK_BYTES
        depths = _depth_of_each(depth, len(drives))
        # Checked before the C call, so that a mistake raises ValueError and causes no fallback.
        for each in depths:
            _validate.check_options(
                small,
                large,
                verify=verify,
                workers=workers,
                block_bytes=block_bytes,
                depth=each,
                threads_per_drive=threads_per_drive,
                null=seam.null,
            )
        ffi, lib = native.load()
        self.backend = "null" if seam.null else backend
        self.backend_reason = backend_reason
        # Before the pools are allocated, since it may fail.
        if uring:
            load_uring(ffi, lib)
        # Creation touches the pools' pages; beyond the limit the kernel would kill the process.
        _memory_limits.check_slab(small.count * small.bytes + large.count * large.bytes)
        config = _config(
            ffi,
            small,
            large,
            uring=uring,
            verify=verify,
            workers=workers,
            threads_per_drive=threads_per_drive,
            hold_s=hold_s,
            seam=seam,
            drive_count=len(drives),
        )
        configs = _drive_configs(ffi, drives, block_bytes, depths, seam)
        self._block_bytes = [configs[index].block_bytes for index in range(len(drives))]
        opened_s = time.monotonic()
        pointer = _open(ffi, lib, config, configs, backend)
        self._core = Core(
            ffi, lib, pointer, drives, check_waits=check, examine=examine, alarm=alarm
        )
        self._opened_s = opened_s
        self.pool_bytes = int(lib.inf_executor_pool_bytes(pointer))
        # Logged, not raised: without the binding the executor is only slower.
        _numa_node.report(int(lib.inf_executor_numa_error(pointer)))

    def resize_pools(self, small: PoolSpec, large: PoolSpec) -> None:
        """Replace the pools. Blocks until no job is pending.

        Raises: MemoryError; ValueError for sizes that the constructor refuses; the AioError of a
        failed write whose data is in a slot only, if repeating it fails; DeviceFailedError if a
        failed drive may still write to a slot; DeviceCopyError. The pools are then unchanged.
        """
        core = self._core
        core.check()
        _validate.check_pools(small, large)
        _memory_limits.check_slab(small.count * small.bytes + large.count * large.bytes)
        error = -errno.EBUSY
        while error == -errno.EBUSY:
            self.wait_all()
            # A slot may have the only copy of a chunk: repeat its write, or raise.
            if self.stats().kept_chunks:
                self.recover().wait()
            error = core.lib.inf_executor_resize_pools(
                core.pointer, small.count, small.bytes, large.count, large.bytes
            )
        if error == -errno.ENOMEM:
            raise MemoryError(
                f"no memory for pools of {small.count} * {small.bytes} and {large.count} * "
                f"{large.bytes} bytes"
            )
        if error == -errno.EIO:
            raise DeviceFailedError(
                "a drive that failed may still write to the pools, so they cannot be replaced"
            )
        if error:
            raise DeviceCopyError(f"the device's driver does not pin the pools ({error})")
        self.pool_bytes = int(core.lib.inf_executor_pool_bytes(core.pointer))

    def define(self, chunks: npt.NDArray[np.void]) -> npt.NDArray[np.int32]:
        """Register chunks (CHUNK records) and return their ids.

        The caller owns the memory that they point to (resident sections, sums) and keeps it until
        `drop`. Raises ValueError for misaligned or overlapping sections and unknown drives or
        files.
        """
        core = self._core
        core.check()
        chunk_records = _validate.as_records(chunks, records.CHUNK, "chunk")
        # C does not check offsets and sizes, from which it computes addresses and file offsets.
        _validate.check_chunks(chunk_records, len(core.drives))
        ids = np.full(len(chunk_records), -1, dtype=np.int32)
        error = core.lib.inf_executor_define(
            core.pointer,
            core.ffi.from_buffer(chunk_records),
            len(chunk_records),
            core.ffi.cast("int32_t *", ids.ctypes.data),
        )
        if error == -errno.ENOMEM:
            raise MemoryError(f"no memory for {len(chunk_records)} chunks")
        # Only C knows the files of a drive, so `check_chunks` cannot check this.
        if error == -errno.ENOENT:
            raise ValueError(_validate.FILE_UNKNOWN)
        if error:
            raise ValueError(
                "the native executor refuses a chunk: its itemsizes do not match its format"
            )
        return ids

    def drop(self, ids: npt.NDArray[np.int32], *, unless_pending: bool = False) -> bool:
        """Unregister chunks; their ids may be reused. Raises ValueError if jobs on them are
        pending.

        unless_pending: if jobs are pending, return False instead, and drop no chunk.
        """
        core = self._core
        core.check()
        # Here and in later methods: C reads the ids in place, as contiguous int32.
        wanted = np.ascontiguousarray(ids, dtype=np.int32)
        error = core.lib.inf_executor_drop(
            core.pointer, core.ffi.from_buffer("int32_t[]", wanted), len(wanted)
        )
        if error == -errno.EBUSY and unless_pending:
            return False
        if error:
            raise ValueError("cannot drop: a chunk has pending jobs, or is not defined")
        return True

    def submit(
        self,
        jobs: npt.NDArray[np.void],
        segs: npt.NDArray[np.void] | None = None,
        hypers: npt.NDArray[np.void] | None = None,
        *,
        priority: Priority,
        gate: Gate | None = None,
    ) -> JobTicket:
        """Queue the jobs (JOB records) of one unit; the arrays are copied. Never blocks on I/O.

        Memory behind ptr and grad must live until the ticket is done. Raises ValueError for an
        invalid job, AioClosedError after close or in a forked child.
        """
        core = self._core
        core.check()
        job_records = _validate.as_records(jobs, records.JOB, "job")
        seg_records = _validate.as_records(segs, records.SEG, "seg")
        hyper_records = _validate.as_records(hypers, records.HYPER, "hyper")
        # C does not check the gate's address; the lock of its executor guards a gate.
        if gate is not None and (not isinstance(gate, Gate) or gate._core is not core):
            raise ValueError("the gate is of another executor")
        if gate is not None and not gate._address:
            raise ValueError("the gate was released")
        # A quick call keeps the GIL: a submission takes microseconds, and regaining the GIL from a
        # busy thread up to 5 ms.
        error = ctypes.c_int64()
        address = core.quick.executor_submit(
            core.address,
            job_records.ctypes.data,
            len(job_records),
            seg_records.ctypes.data,
            len(seg_records),
            hyper_records.ctypes.data,
            len(hyper_records),
            int(priority),
            None if gate is None else gate._address,
            ctypes.byref(error),
        )
        if not address:
            raise _submit_error(error.value)
        return JobTicket(core, address)

    def gate(self, *, escapes: bool = True) -> Gate:
        """Make a closed gate for `submit`. escapes=False: it escapes only when it is released, or
        the executor closes.
        """
        self._core.check()
        address = self._core.quick.gate_new(self._core.address, int(not escapes))
        if not address:
            raise MemoryError("no memory for a gate")
        return Gate(self._core, address)

    def attach_device(self, driver: DeviceDriver) -> None:
        """Attach the device for MASK_DEVICE jobs, once per executor, and pin the slab. Blocks.

        Raises: DeviceCopyError when a call of the driver fails; MemoryError; ValueError when a
        device is already attached.
        """
        core = self._core
        core.check()
        api = core.ffi.new("inf_device_api *", {"context": driver.context, **driver.functions})
        code = int(core.lib.inf_executor_attach_device(core.pointer, api))
        if code == -errno.EALREADY:
            raise ValueError("a device is attached to this executor already; it takes one")
        if code == -errno.ENOMEM:
            raise MemoryError("no memory for the copies of a device")
        if code:
            raise DeviceCopyError(
                f"the device cannot be attached: its driver says {driver.name_of(code)} ({code})"
            )
        # Referenced here: native threads call its functions until the executor is closed.
        core.driver = driver

    def compute_stream(self, stream: int) -> None:
        """Set the compute stream (0: the default stream), whose kernels later copies wait for.
        Never blocks.
        """
        # No check for close: the call only stores a number.
        self._core.quick.executor_compute_stream(self._core.address, stream)

    def hold_gates(self, held: bool) -> None:
        """Keep idle gates closed (held=True) or let them escape (False). A running forward holds
        them, because it will open them. `wait` makes gates escape even while they are held.
        """
        self._core.check()
        self._core.quick.executor_hold_gates(self._core.address, held)

    def release_gates(self) -> None:
        """Make all closed gates escape now. For callers that neither open them nor wait: `wait`
        makes the gates of its ticket escape. Never blocks.
        """
        self._core.check()
        self._core.lib.inf_executor_release_gates(self._core.pointer)

    def prefetch(self, ids: npt.NDArray[np.int32], masks: npt.NDArray[np.uint32] | int = 0) -> int:
        """Read chunks into idle slots before their UPDATEs are submitted. Returns the number of
        accepted chunks, the first ones of `ids`.

        masks: the masks of these UPDATEs, one for all or one for each. Only sections that the
        UPDATEs read are prefetched, and spilled gradients never. An accepted chunk is read as soon
        as slots are idle, and again if a job has taken its slot; a STORE of its sections cancels
        the prefetch. A failed prefetch has no effect: the UPDATE reads the chunk. Never blocks.
        Raises ValueError for an unknown id.
        """
        core = self._core
        core.check()
        wanted = np.ascontiguousarray(ids, dtype=np.int32)
        given = np.broadcast_to(np.asarray(masks, dtype=np.uint32), len(wanted)).copy()
        # A quick call: it only queues reads.
        accepted = core.quick.executor_prefetch(
            core.address, wanted.ctypes.data, len(wanted), given.ctypes.data
        )
        if accepted < 0:
            raise ValueError("a chunk is not defined")
        return int(accepted)

    def invalid(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint32]:
        """Return for each chunk the mask of its invalid sections (0: valid)."""
        core = self._core
        core.check()
        wanted = np.ascontiguousarray(ids, dtype=np.int32)
        masks = np.zeros(len(wanted), dtype=np.uint32)
        error = core.lib.inf_executor_invalid(
            core.pointer,
            core.ffi.from_buffer("int32_t[]", wanted),
            len(wanted),
            core.ffi.cast("uint32_t *", masks.ctypes.data),
        )
        if error:
            raise ValueError("a chunk is not defined")
        return masks

    def commit(self, ids: npt.NDArray[np.int32]) -> None:
        """Commit the current contents of versioned chunks: their next writes go to the second
        place. Never blocks.

        Other chunks are ignored. Raises ValueError, and commits nothing, if a job that writes
        states of a chunk is pending, a chunk is not defined, or no UPDATE has followed one with
        MASK_FIRST.
        """
        self._versions("commit", ids)

    def rollback(self, ids: npt.NDArray[np.int32]) -> None:
        """Restore the committed contents of versioned chunks.

        Drops their failed writes and prefetches, and ignores chunks without committed contents.
        Never blocks. Raises ValueError, and changes nothing, if a job on a chunk is pending, a
        chunk is not defined, or a resident section without a second version was changed.
        """
        self._versions("rollback", ids)

    def exchange(self, ids: npt.NDArray[np.int32]) -> None:
        """Swap the two places of committed chunks: the states before their last UPDATE become the
        committed contents, without being read. A second call swaps back. Never blocks.

        Raises ValueError, and changes nothing, if jobs on a chunk are pending, or a chunk is not
        defined, is not committed, has no second place, has states in memory, or was STOREd since
        its last UPDATE.
        """
        self._versions("exchange", ids)

    def _versions(self, what: str, ids: npt.NDArray[np.int32]) -> None:
        core = self._core
        core.check()
        wanted = np.ascontiguousarray(ids, dtype=np.int32)
        # The three C functions have one signature and the same errors.
        call = getattr(core.lib, f"inf_executor_{what}")
        error = call(core.pointer, core.ffi.from_buffer("int32_t[]", wanted), len(wanted))
        if error:
            # C processes all chunks or none, so no chunk has changed.
            raise ValueError(_validate.versions_refused(what, irrevocable=error == -errno.EPERM))

    def add_file(self, drive: int, file: SwapFile) -> int:
        """Add a file to a drive, for chunks to be placed in (CHUNK["file"]). Returns its index,
        from 1 on.

        The caller keeps the file open until `remove_file` or `close`. Raises ValueError when the
        drive has too many files.
        """
        core = self._core
        core.check()
        index = int(core.lib.inf_executor_file_add(core.pointer, drive, file.fd))
        if index < 0:
            raise ValueError(_validate.TOO_MANY_FILES)
        # Referenced, so that the descriptor stays open while native threads use it.
        core.files[drive, index] = file
        return index

    def remove_file(self, drive: int, index: int) -> None:
        """Remove a file from a drive. Raises ValueError while a chunk has a place in it."""
        self._core.check()
        # C refuses while a chunk has a place in the file: a job would use a closed descriptor.
        if self._core.lib.inf_executor_file_remove(self._core.pointer, drive, index):
            raise ValueError(_validate.FILE_STAYS)
        # After C has removed the file: the descriptor may be closed from here on.
        del self._core.files[drive, index]

    def relocate(
        self,
        ids: npt.NDArray[np.int32],
        drives: npt.NDArray[np.int32],
        files: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
    ) -> None:
        """Replace the second places of versioned chunks; the old second places are free afterwards.
        Chunks with spilled gradients must stay on their drive.

        Raises ValueError as `commit` does, and for an unknown file, or if a chunk's second place is
        the committed one.
        """
        core = self._core
        core.check()
        wanted = np.ascontiguousarray(ids, dtype=np.int32)
        there = (
            np.ascontiguousarray(drives, dtype=np.int32),
            np.ascontiguousarray(files, dtype=np.int32),
            np.ascontiguousarray(offsets, dtype=np.int64),
        )
        error = core.lib.inf_executor_relocate(
            core.pointer,
            core.ffi.from_buffer("int32_t[]", wanted),
            len(wanted),
            core.ffi.from_buffer("int32_t[]", there[0]),
            core.ffi.from_buffer("int32_t[]", there[1]),
            core.ffi.from_buffer("int64_t[]", there[2]),
        )
        # A rollback needs the committed place.
        if error == -errno.EPERM:
            raise ValueError(_validate.RELOCATES_COMMITTED)
        if error:
            raise ValueError(_validate.versions_refused("relocate", irrevocable=False))

    @property
    def closed(self) -> bool:
        """True once the executor is closed."""
        return self._core.stopped

    def add_spares(self, spares: npt.NDArray[np.void]) -> None:
        """Reserve extents (SPARE records) for failed writes. The caller must not use them
        otherwise.

        Raises: ValueError for a misaligned extent or an unknown file, MemoryError; then none is
        added.
        """
        core = self._core
        core.check()
        given = _validate.as_records(spares, SPARE, "spare")
        error = core.lib.inf_executor_spares_add(
            core.pointer, core.ffi.from_buffer(given), len(given)
        )
        if error == -errno.ENOMEM:
            raise MemoryError(f"no memory for {len(given)} reserved extents")
        if error:
            raise ValueError(_validate.SPARE_WRONG)

    def take_spares(self) -> npt.NDArray[np.void]:
        """Remove the unused reserved extents from the executor and return them (SPARE records)."""
        core = self._core
        core.check()
        taken = []
        spares = np.zeros(_SPARES_AT_ONCE, dtype=SPARE)
        while count := core.lib.inf_executor_spares_take(
            core.pointer, core.ffi.from_buffer(spares), len(spares)
        ):
            taken.append(spares[:count].copy())
        return np.concatenate(taken) if taken else np.zeros(0, dtype=SPARE)

    def take_moved_writes(self) -> list[MovedWrite]:
        """Return the writes moved to reserved extents since the last call, oldest first. Never
        blocks.
        """
        core = self._core
        core.check()
        moves = core.ffi.new("inf_moved_write[]", _SPARES_AT_ONCE)
        found: list[MovedWrite] = []
        while count := core.lib.inf_executor_moves_take(core.pointer, moves, _SPARES_AT_ONCE):
            found.extend(
                MovedWrite(
                    chunk=move.chunk,
                    key=move.key,
                    drive=move.drive,
                    file=move.file,
                    offset=move.offset,
                    to_drive=move.to_drive,
                    to_file=move.to_file,
                    to_offset=move.to_offset,
                    size_bytes=move.bytes,
                    error=core.fault(move.fault),
                )
                for move in moves[0:count]
            )
        return found

    def look(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.void]:
        """Return the chunks' current CHUNK records, with the live place and its generation."""
        core = self._core
        core.check()
        wanted = np.ascontiguousarray(ids, dtype=np.int32)
        chunks = np.zeros(len(wanted), dtype=records.CHUNK)
        error = core.lib.inf_executor_look(
            core.pointer,
            core.ffi.from_buffer("int32_t[]", wanted),
            len(wanted),
            core.ffi.from_buffer(chunks),
        )
        if error:
            raise ValueError("a chunk is not defined")
        return chunks

    def recover(self) -> Ticket:
        """Unmark all drives and repeat their failed writes, after the cause was removed. Never
        blocks.

        If a write fails again, the ticket fails and the drive is marked again; no data is lost.
        """
        core = self._core
        core.check()
        error = core.ffi.new("int64_t *")
        pointer = core.lib.inf_executor_recover(core.pointer, error)
        if pointer == core.ffi.NULL:
            raise _submit_error(int(error[0]))
        return JobTicket(core, int(core.ffi.cast("uintptr_t", pointer)))

    def set_seam(self, seam: Seam) -> int:
        """Replace the fault injector's settings (for tests). Never blocks.

        Requests are counted from 0 again, and the drives get the speeds of `seam`. `Seam()` injects
        no fault. Returns the number of requests that got the fault of the former settings.

        Raises: ValueError for null drives, which only the constructor accepts; OSError when no
        thread can be created.
        """
        core = self._core
        core.check()
        if seam.null:
            raise ValueError("Seam(null=): drives are null from the beginning, or never")
        record = core.ffi.new("inf_seam *")
        _fill_seam(record, seam)
        each = [speed for index in range(len(core.drives)) for speed in seam.throttle(index)]
        # C needs a valid pointer, also without drives.
        speeds = core.ffi.new("double[]", each or [0.0])
        met = int(core.lib.inf_executor_set_seam(core.pointer, record, speeds))
        if met < 0:
            raise OSError(-met, f"no thread for the seam can be made: {os.strerror(-met)}")
        return met

    def fault(self) -> AioError | None:
        """Return the first fault of any job since opening, whether or not a caller waited for
        it.
        """
        # In a forked child, C's lock may be held by a thread of the parent.
        if self._core.forked:
            return None
        record = self._core.ffi.new("inf_fault *")
        if not self._core.lib.inf_executor_fault(self._core.pointer, record):
            return None
        return self._core.fault(record)

    def stats(self) -> ExecutorStats:
        """Return the counters since opening. Also works after `close`."""
        core = self._core
        if core.forked:
            core.check()
        counters = core.ffi.new("inf_exec_stats *")
        # C needs a valid pointer, also without drives.
        per_drive = core.ffi.new("inf_drive_stats[]", max(1, len(core.drives)))
        core.lib.inf_executor_stats(core.pointer, counters, per_drive)
        drives = tuple(
            drive_stats(
                record, drive, block, core.fault_record(record.mark) if record.marked else None
            )
            # Not strict: without drives there is still one record.
            for record, drive, block in zip(per_drive, core.drives, self._block_bytes, strict=False)
        )
        registered = int(core.lib.inf_executor_registered(core.pointer))
        return ExecutorStats(
            backend=self.backend,
            drives=drives,
            jobs_submitted=counters.jobs_submitted,
            jobs_done=counters.jobs_done,
            jobs_failed=counters.jobs_failed,
            updates=counters.updates,
            gates_opened=counters.gates_opened,
            gates_escaped=counters.gates_escaped,
            rereads=counters.rereads,
            checksum_failures=counters.checksum_failures,
            wait_s=counters.wait_ns / 1e9,
            compute_s=counters.compute_ns / 1e9,
            pool_bytes=self.pool_bytes,
            huge_bytes=int(core.lib.inf_executor_huge_bytes(core.pointer)),
            registered=registered == 1,
            spans_dropped=counters.spans_dropped,
            to_device_bytes=counters.copied_bytes[0],
            from_device_bytes=counters.copied_bytes[1],
            to_device_s=counters.copied_ns[0] / 1e9,
            from_device_s=counters.copied_ns[1] / 1e9,
            backend_reason=self.backend_reason,
            registered_reason=registered_reason(registered, self.backend),
            kept_chunks=counters.kept_chunks,
            moved_writes=counters.moved_writes,
            jobs_cancelled=counters.jobs_cancelled,
            opened_s=self._opened_s,
            reads_ahead=counters.reads_ahead,
            reads_ahead_dropped=counters.reads_ahead_dropped,
            extra={
                name: int(getattr(counters, name))
                for name in ("submissions_live", "chunks_live", "reads_ahead_live")
            },
        )

    def spans(self, enable: bool) -> None:
        """Start or stop recording spans."""
        self._core.check()
        if self._core.lib.inf_executor_spans(self._core.pointer, enable):
            raise MemoryError("no memory for spans")

    def take_spans(self) -> npt.NDArray[np.void]:
        """Return and clear the recorded spans (SPAN); at most the newest 65,536."""
        core = self._core
        if core.forked:
            return np.zeros(0, dtype=SPAN)
        # C overwrites the oldest spans of its ring.
        spans = np.zeros(_SPANS_MAX, dtype=SPAN)
        count = core.lib.inf_executor_take_spans(
            core.pointer, core.ffi.cast("inf_span *", spans.ctypes.data), _SPANS_MAX
        )
        # Copied: a view would keep the whole buffer alive.
        taken: npt.NDArray[np.void] = spans[:count].copy()
        return taken

    def wait_all(self, timeout: float | None = None) -> None:
        """Make all gates escape and block until no job is pending. Raises TimeoutError, and any
        exception of the executor's `check`; faults of jobs are raised by their tickets only.
        """
        self._core.check()
        # Held gates never escape by themselves.
        self._core.lib.inf_executor_release_gates(self._core.pointer)
        if not self._core.wait_idle(timeout, check=self._core.check_waits):
            raise TimeoutError(f"jobs are pending after {timeout} s")

    def close(self, *, wait: bool = True) -> None:
        """Close the executor: finish pending jobs (wait=False: cancel those not started), join its
        threads, free its pools. Blocks.

        The tickets of cancelled jobs fail with AioClosedError. Idempotent.
        """
        self._core.stop(wait=wait)

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        # After an exception, pending jobs are cancelled.
        self.close(wait=kind is None)


def _submit_error(error: int) -> Exception:
    if error > 0:
        # C encodes both in one positive number: 1 + (index << 4 | what).
        index, what = (error - 1) >> 4, (error - 1) & 15
        return ValueError(f"job {index} {_validate.JOB_WRONG[what]}")
    if error == -errno.ENOMEM:
        return MemoryError("no memory for a submission")
    if error == -errno.EREMOTEIO:
        return DeviceCopyError("the device's driver refuses an event")
    return AioClosedError("the executor is being closed")
