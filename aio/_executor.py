"""Runs jobs on chunks: reads, verifies, updates and writes them on native threads, without the GIL.

An executor moves chunks between a drive, a slot of its own slab and the caller's memory, and
updates them on the way. The caller describes the work of a whole unit as arrays of records
(CHUNK, JOB, SEG, HYPER of infinity/_src/cabi/records.py), submits them in one call, and gets a
`Ticket`. Only `Ticket.wait`, `wait_all` and `close` block.

    define(chunks) -> ids      submit(jobs, segs, hypers, priority=, gate=) -> Ticket      drop(ids)

        FETCH   read --> verify --> copy to ptr
        STORE   copy from ptr --> checksum --> write
        UPDATE  read --> verify, update, checksum (one pass) --> copy section 0 to ptr[0] --> write
        COPY    copy ptr[2] bytes from ptr[1] to ptr[0]; one of them is on the device; no chunk

An UPDATE reads all sections, except section 0 when the caller has it in memory
(MASK_PARAM_IN_MEMORY), and spilled gradients (`grad`) only when a segment wants them. All sections
except `grad` are written.

Words: a *slot* is a buffer of the slab that holds one chunk. A *gate* holds a submission back until
the caller has a place for its result. A *marked* drive takes no writes. An *invalid* section has no
value anywhere.

Promises, the same for both backends:

- Order. Jobs on one chunk run in the order of submission; jobs on different chunks run at once.
- Slots. A job takes one slot: small if its non-resident bytes fit, else large; none if the chunk
  is wholly resident. Slots go by priority, then by arrival. One turn in eight goes to the job that
  has waited longest, so write-back progresses beside endless demands. No drive may hold so many
  slots that another finds none.
- Prefetch. Idle slots read ahead, for UPDATEs at closed gates (oldest gate first) and for chunks
  named in `prefetch`. These reads have the least priority and leave a quarter of each pool free. A
  job that finds no slot gets one of these: the youngest prefetch is given up and read again later.
  A prefetch shows in `stats` only: when it fails, or a write of its chunk overtakes it, the UPDATE
  reads again.
- Faults. Every transfer's result is checked. Short ones are resumed, EAGAIN and EINTR retried, and
  reads verified. A fault that remains is a typed `AioError`; `Ticket.wait` raises it every time.
- Reserved extents. A write that fails goes to a reserved extent that `add_spares` gave: of its
  drive first, then of another drive. The whole chunk lies there from then on: sections that the
  job does not write are read from the old place. The job succeeds; `take_moved_writes` reports it.
- Failed writes. Any other write that fails keeps its slot, which has the only copy; a FETCH reads
  the chunk's sections there. The failure also marks the drive: later STORE and UPDATE jobs on it
  are refused with the same fault, until `recover`.
- Invalid chunks. A STORE or UPDATE that failed otherwise, or was refused, leaves its chunk invalid:
  the value it should hold exists nowhere. Later FETCH and UPDATE jobs on it fail with the same
  fault until its sections are STOREd again.
- Versions. A *versioned* chunk has two places. After `commit` a STORE or UPDATE reads the live
  place and writes the other one, whole, which then is the live one; later jobs work there in place.
  `rollback` returns to the committed place. The committed place is never written, so any failure in
  between can be undone. Spilled gradients have one place.
- Devices. With MASK_DEVICE a copy runs behind the kernels that the compute stream had when the job
  was submitted, or its gate opened. `filled` says that the copy has ended on the device; kernels
  submitted after that see it.
- Bounds. Depth and block size bound the requests in flight per drive. Writes get half of the depth
  whenever they want it, and demands a quarter of the reads' share, so neither starves.
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

# One request of a ring. Longer ones gain nothing: 8 to 16 of these in flight fill a drive.
RING_BLOCK_BYTES = 1 << 20
# A thread has one request in flight, so it sends whole runs to leave no gaps between requests.
THREAD_BLOCK_BYTES = 16 << 20
# Spans that C keeps in its ring: INF_SPAN_COUNT of native/executor/executor.h.
_SPANS_MAX = 65_536
# Spares and moves that one call of C hands over.
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
    """Fill an inf_exec_config."""
    config = ffi.new("inf_exec_config *")
    config.uring = uring
    config.verify = {"off": 0, "full": 1, "sample": 2}[verify]
    config.workers = workers
    config.threads_per_drive = threads_per_drive
    config.small_count, config.small_bytes = small.count, small.bytes
    config.large_count, config.large_bytes = large.count, large.bytes
    config.drive_count = drive_count
    # Idle for so long, closed gates escape: their updates run without a target.
    config.hold_ns = int(hold_s * 1e9)
    if (place := _numa_node.chosen()) is not None:
        # 0 stands for no choice.
        config.numa = 1 + place.node
        for cpu in place.cpus:
            config.cpus[cpu // 64] |= 1 << cpu % 64
    _fill_seam(config.seam, seam)
    return config


def _fill_seam(record: Any, seam: Seam) -> None:
    # A Python seed may be negative or larger than C's uint64_t.
    record.seed = seam.seed & (2**64 - 1)
    record.delay_us_max = seam.delay_us_max
    record.null_batch, record.null_computes = seam.null, seam.null_computes
    if seam.fault is not None:
        _fill_fault(record.fault, seam.fault)


def _fill_fault(record: Any, fault: Fault) -> None:
    """Fill an inf_seam_fault."""
    record.nth, record.late_us = fault.nth, int(fault.late_s * 1e6)
    record.kind = 1 + KINDS.index(fault.kind)
    record.op = 0 if fault.op == "read" else 1
    record.error, record.persistent = fault.errno, fault.persistent
    # 0 stands for any.
    record.drive = 0 if fault.drive is None else 1 + fault.drive
    record.lasting, record.start = fault.lasting, fault.start
    record.stop = fault.stop or 0


def _drive_configs(
    ffi: Any, drives: Sequence[SwapFile], block_bytes: int, depths: Sequence[int], seam: Seam
) -> Any:
    # An executor may have no drive at all, and C still wants a pointer.
    configs = ffi.new("inf_drive_config[]", max(1, len(drives)))
    for index, drive in enumerate(drives):
        configs[index].fd = drive.fd
        fitted = block_bytes, depths[index]
        if not seam.null:
            # Beyond the device's tags a thread that submits would sleep inside the kernel.
            fitted = _file_system.fit(drive, *fitted)
        configs[index].block_bytes, configs[index].depth = fitted
        configs[index].read_bytes_per_s, configs[index].write_bytes_per_s = seam.throttle(index)
    return configs


def _depth_of_each(depth: int | Sequence[int], drives: int) -> list[int]:
    """Return the depth of each drive. Raises: ValueError for fewer numbers than drives."""
    if isinstance(depth, int):
        # At least one, so that the options are checked without a drive, too.
        return [depth] * max(drives, 1)
    if len(depth) < drives:
        raise ValueError(f"depth={list(depth)}: one number for each of {drives} drives")
    return list(depth)


def _open(ffi: Any, lib: Any, config: Any, drives: Any, backend: str) -> Any:
    """Open the native executor. Raises: OSError; MemoryError where its pools find no memory."""
    why = ffi.new("char[512]")
    error = ffi.new("int32_t *")
    pointer = lib.inf_executor_open(config, drives, error, why, 512)
    if pointer == ffi.NULL:
        text = ffi.string(why).decode(errors="replace")
        # A MemoryError must not make "auto" step down: threads need the same pools.
        if text.startswith("no memory"):
            raise MemoryError(text)
        raise OSError(-error[0], f"cannot open an executor with backend {backend!r}: {text}")
    return pointer


@final
class Executor:
    """Runs jobs on chunks; the module lists its promises. Any thread of its process may call it.

    backend: "io_uring" (one ring and thread per drive) or "threads" (`threads_per_drive` of them
        with pread and pwrite).
    block_bytes: the longest request. None: 1 MiB for rings, whole runs (up to 16 MiB) for threads,
        which have one request each. The executor fits it and `depth` to each drive.
    check, examine, alarm: as in `infinity.aio.open_executor`. A device whose kernels never end is
        not seen from here, and copies that are behind them would be waited for without a limit.

    Raises OSError when the backend cannot be had here, ImportError when the extension
    is missing, MemoryError when the pools do not fit what the machine or its cgroup leaves. Use
    `infinity.aio.open_executor`, which steps down.
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
            # A ring fills gaps with other requests; a thread has only its own one.
            block_bytes = RING_BLOCK_BYTES if uring or seam.null else THREAD_BLOCK_BYTES
        depths = _depth_of_each(depth, len(drives))
        # Checked before C sees anything, so that a mistake is a ValueError and not a step down.
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
        # Loading comes first: without liburing there is nothing to allocate pools for.
        if uring:
            load_uring(ffi, lib)
        # The pools are touched on creation; past the limit the kernel would kill the process.
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
        # A refused binding costs speed only, so it is logged and not raised.
        _numa_node.report(int(lib.inf_executor_numa_error(pointer)))

    def resize_pools(self, small: PoolSpec, large: PoolSpec) -> None:
        """Give the pools other sizes. Blocks while jobs are pending.

        Raises: MemoryError; MemoryLimitError; ValueError for sizes that the constructor refuses;
        the AioError of a write that failed and is in memory only; DeviceFailedError where a drive
        that failed may still write to a slot; DeviceCopyError. The pools are as they were then.
        """
        core = self._core
        core.check()
        _validate.check_pools(small, large)
        _memory_limits.check_slab(small.count * small.bytes + large.count * large.bytes)
        error = -errno.EBUSY
        while error == -errno.EBUSY:
            self.wait_all()
            # A slot may have the only copy of a chunk: it is written again, or raises.
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
        """Make chunks known (CHUNK records) and return their ids.

        Memory that they point to (resident sections, sums) stays the caller's and must live until
        `drop`. Raises ValueError for misaligned or overlapping sections, unknown drives, runs
        larger than the slots.
        """
        core = self._core
        core.check()
        chunk_records = _validate.as_records(chunks, records.CHUNK, "chunk")
        # C trusts offsets and sizes, which become addresses and places in files.
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
        # C alone knows the files of a drive, so `check_chunks` could not see this.
        if error == -errno.ENOENT:
            raise ValueError(_validate.FILE_UNKNOWN)
        if error:
            raise ValueError(
                "the native executor refuses a chunk: its itemsizes do not match its format"
            )
        return ids

    def drop(self, ids: npt.NDArray[np.int32], *, unless_pending: bool = False) -> bool:
        """Forget chunks; ids may be reused. Raises ValueError if jobs on them are pending.

        unless_pending: do nothing then, and return False.
        """
        core = self._core
        core.check()
        # Here and below: C reads the array in place, as a plain run of int32.
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
    ) -> Ticket:
        """Queue the jobs (JOB records) of one unit; the arrays are copied. Never blocks on I/O.

        Memory behind ptr and grad must live until the ticket is done. Raises ValueError for a plan
        that cannot run, AioClosedError after close or in a forked child.
        """
        core = self._core
        core.check()
        job_records = _validate.as_records(jobs, records.JOB, "job")
        seg_records = _validate.as_records(segs, records.SEG, "seg")
        hyper_records = _validate.as_records(hypers, records.HYPER, "hyper")
        # C takes its address as it is; another executor's gate has another lock.
        if gate is not None and (not isinstance(gate, Gate) or gate._core is not core):
            raise ValueError("the gate is of another executor")
        # QuickCalls keep the GIL: a submission is a few microseconds, and re-taking the GIL beside
        # a busy thread would cost up to 5 ms.
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

    def gate(self) -> Gate:
        """Make a closed gate for `submit`."""
        self._core.check()
        address = self._core.quick.gate_new(self._core.address)
        if not address:
            raise MemoryError("no memory for a gate")
        return Gate(self._core, address)

    def attach_device(self, driver: DeviceDriver) -> None:
        """Attach the device that MASK_DEVICE stands for, once, and pin the slab. Blocks.

        Raises: DeviceCopyError when the driver refuses; ValueError where this executor cannot copy
        to devices.
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
        # Native threads call its functions until the executor is closed.
        core.driver = driver

    def compute_stream(self, stream: int) -> None:
        """Set the stream (0: the default one) that later copies run behind. Never blocks."""
        # Not checked for close: it only notes a number.
        self._core.quick.executor_compute_stream(self._core.address, stream)

    def hold_gates(self, held: bool) -> None:
        """Keep idle gates closed while `held`: a forward runs and will open them. `wait` still lets
        them escape.
        """
        self._core.check()
        self._core.quick.executor_hold_gates(self._core.address, held)

    def release_gates(self) -> None:
        """Make all closed gates escape now, for a caller who will not open them and does not wait
        yet: a wait makes those that its ticket depends on escape. Never blocks.
        """
        self._core.check()
        self._core.lib.inf_executor_release_gates(self._core.pointer)

    def prefetch(self, ids: npt.NDArray[np.int32], *, param_in_memory: bool = False) -> int:
        """Read chunks into idle slots, before their UPDATEs are submitted. Returns how many were
        accepted, from the first on.

        param_in_memory: these UPDATEs will have MASK_PARAM_IN_MEMORY, so section 0 is not read.
        Spilled gradients are never read here. An accepted chunk is read as soon as slots are idle,
        also after its slot was given up once; a STORE of its sections drops it. A prefetch that
        fails has no effect: the UPDATE reads. Never blocks. Raises ValueError for an unknown id.
        """
        core = self._core
        core.check()
        wanted = np.ascontiguousarray(ids, dtype=np.int32)
        # A quick call: it queues reads and waits for none.
        accepted = core.quick.executor_prefetch(
            core.address, wanted.ctypes.data, len(wanted), param_in_memory
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
        """Commit the present contents of versioned chunks: the next write goes to their other
        places. Never blocks.

        Chunks that are not versioned are left alone. Raises ValueError, and commits nothing, while
        jobs that write states of one are pending or when one is not defined.
        """
        self._versions("commit", ids)

    def rollback(self, ids: npt.NDArray[np.int32]) -> None:
        """Return versioned chunks to their committed contents, however often they were written
        since.

        Their failed writes and prefetches are dropped. Chunks without committed contents are left
        alone. Never blocks. Raises ValueError if jobs on one are pending, or one is not defined,
        and if a resident section without another version was changed.
        """
        self._versions("rollback", ids)

    def exchange(self, ids: npt.NDArray[np.int32]) -> None:
        """Make what lies in the second places of committed chunks their committed contents, read or
        not: the states before their last UPDATE. The second places have the contents before the
        call then, and another call goes back to them. Never blocks.

        Raises ValueError, and changes nothing, if jobs on one are pending, or one is not defined,
        is not committed, has no second place, has states in memory, or was STOREd since its last
        UPDATE.
        """
        self._versions("exchange", ids)

    def _versions(self, what: str, ids: npt.NDArray[np.int32]) -> None:
        core = self._core
        core.check()
        wanted = np.ascontiguousarray(ids, dtype=np.int32)
        # All have one signature, and refuse for the same reasons.
        call = getattr(core.lib, f"inf_executor_{what}")
        error = call(core.pointer, core.ffi.from_buffer("int32_t[]", wanted), len(wanted))
        if error:
            # C has changed nothing: all chunks commit, or none does.
            raise ValueError(_validate.versions_refused(what, irrevocable=error == -errno.EPERM))

    def add_file(self, drive: int, file: SwapFile) -> int:
        """Give a drive another file, in which chunks may have places (CHUNK["file"]). Returns its
        index, from 1 on.

        The file stays the caller's, open until `remove_file` or the end. Raises ValueError when
        there are too many.
        """
        core = self._core
        core.check()
        index = int(core.lib.inf_executor_file_add(core.pointer, drive, file.fd))
        if index < 0:
            raise ValueError(_validate.TOO_MANY_FILES)
        # Keeps the descriptor open while native threads use it.
        core.files[drive, index] = file
        return index

    def remove_file(self, drive: int, index: int) -> None:
        """Take a file back. Raises ValueError while a chunk has a place in it."""
        self._core.check()
        # While a chunk has a place in it, a job would use a descriptor that is closed.
        if self._core.lib.inf_executor_file_remove(self._core.pointer, drive, index):
            raise ValueError(_validate.FILE_STAYS)
        # Only after C has let go: the descriptor may be closed from here on.
        del self._core.files[drive, index]

    def relocate(
        self,
        ids: npt.NDArray[np.int32],
        drives: npt.NDArray[np.int32],
        files: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
    ) -> None:
        """Give versioned chunks other second places. The old places are free from then on. Chunks
        with spilled gradients stay on their drive.

        Raises ValueError as `commit`, for a file that is not known, and where the second place is
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
        # The committed place is what a rollback returns to, so it must stay what it is.
        if error == -errno.EPERM:
            raise ValueError(_validate.RELOCATES_COMMITTED)
        if error:
            raise ValueError(_validate.versions_refused("relocate", irrevocable=False))

    @property
    def closed(self) -> bool:
        """True once the executor was closed."""
        return self._core.stopped

    def add_spares(self, spares: npt.NDArray[np.void]) -> None:
        """Give ranges (SPARE records) to which writes may go that fail; they have no other use.

        Raises: ValueError for one that is misaligned, or in a file that is not known; none is
        given then.
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
        """Take back the reserved extents that no write has used: SPARE records."""
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
        """Return the writes that went to reserved extents since the last call, oldest first. Never
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
        """Return the CHUNK records as they are now: which place is live, and its generation."""
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
        """Unmark all drives and repeat their failed writes, once the cause is mended. Never blocks.

        If the cause remains, the ticket fails and the drive is marked again; no data is lost by
        trying.
        """
        core = self._core
        core.check()
        error = core.ffi.new("int64_t *")
        pointer = core.lib.inf_executor_recover(core.pointer, error)
        if pointer == core.ffi.NULL:
            raise _submit_error(int(error[0]))
        return JobTicket(core, int(core.ffi.cast("uintptr_t", pointer)))

    def set_seam(self, seam: Seam) -> int:
        """Take another seam from now on (tests). Never blocks.

        Requests are counted from 0 anew, and its speeds are those of the drives. A bare `Seam()`
        leaves everything as it is. Returns how many requests met the fault of the seam before.

        Raises: ValueError for null drives, which are chosen when an executor is opened; OSError
        where no thread can be made.
        """
        core = self._core
        core.check()
        if seam.null:
            raise ValueError("Seam(null=): drives are null from the beginning, or never")
        record = core.ffi.new("inf_seam *")
        _fill_seam(record, seam)
        each = [speed for index in range(len(core.drives)) for speed in seam.throttle(index)]
        # C wants a pointer, also where there is no drive.
        speeds = core.ffi.new("double[]", each or [0.0])
        met = int(core.lib.inf_executor_set_seam(core.pointer, record, speeds))
        if met < 0:
            raise OSError(-met, f"no thread for the seam can be made: {os.strerror(-met)}")
        return met

    def fault(self) -> AioError | None:
        """Return the first fault of any job since opening, also of one that was not waited for."""
        # The lock that C would take may be held by a thread of the parent.
        if self._core.forked:
            return None
        record = self._core.ffi.new("inf_fault *")
        if not self._core.lib.inf_executor_fault(self._core.pointer, record):
            return None
        return self._core.fault(record)

    def stats(self) -> ExecutorStats:
        """Return the counters so far. Works after `close` too."""
        core = self._core
        if core.forked:
            core.check()
        counters = core.ffi.new("inf_exec_stats *")
        # C wants a pointer, also where there is no drive.
        per_drive = core.ffi.new("inf_drive_stats[]", max(1, len(core.drives)))
        core.lib.inf_executor_stats(core.pointer, counters, per_drive)
        drives = tuple(
            drive_stats(
                record, drive, block, core.fault_record(record.mark) if record.marked else None
            )
            # Not strict: without a drive there is one record all the same.
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
        """Return the spans (SPAN) recorded since the last call; at most the newest 65,536."""
        core = self._core
        if core.forked:
            return np.zeros(0, dtype=SPAN)
        # C keeps this many in a ring and overwrites the oldest.
        spans = np.zeros(_SPANS_MAX, dtype=SPAN)
        count = core.lib.inf_executor_take_spans(
            core.pointer, core.ffi.cast("inf_span *", spans.ctypes.data), _SPANS_MAX
        )
        # A copy: a view would keep the whole buffer alive.
        taken: npt.NDArray[np.void] = spans[:count].copy()
        return taken

    def wait_all(self, timeout: float | None = None) -> None:
        """Make all gates escape and block until no job is pending. Raises TimeoutError, and what
        the executor's `check` raises; faults stay on their tickets.
        """
        self._core.check()
        # A closed gate that is not opened would never become idle by itself.
        self._core.lib.inf_executor_release_gates(self._core.pointer)
        if not self._core.wait_idle(timeout, check=self._core.check_waits):
            raise TimeoutError(f"jobs are pending after {timeout} s")

    def close(self, *, wait: bool = True) -> None:
        """End the executor: run what is pending (or cancel what has not started), join its threads,
        free its pools.

        Cancelled jobs fail their tickets with AioClosedError. Idempotent.
        """
        self._core.stop(wait=wait)

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        # After an exception what is pending is not wanted.
        self.close(wait=kind is None)


def _submit_error(error: int) -> Exception:
    if error > 0:
        # C packs both into one positive number: 1 + (index << 4 | what).
        index, what = (error - 1) >> 4, (error - 1) & 15
        return ValueError(f"job {index} {_validate.JOB_WRONG[what]}")
    if error == -errno.ENOMEM:
        return MemoryError("no memory for a submission")
    if error == -errno.EREMOTEIO:
        return DeviceCopyError("the device's driver refuses an event")
    return AioClosedError("the executor is being closed")
