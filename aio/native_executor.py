"""The native executor: threads of native/executor*.c, which never take the GIL, behind the protocol of `executor.py`."""

from __future__ import annotations

import ctypes
import errno
import time
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from infinity._src import native
from infinity.aio import checks, drive_limits, memory_limits, numa_node, plan
from infinity.aio.device import DeviceDriver
from infinity.aio.executor import SPAN, Gate, PoolSpec, Priority, Seam, spans_empty
from infinity.aio.native_core import Core, NativeGate, NativeTicket, load_uring
from infinity.aio.native_stats import drive_stats, registered_reason
from infinity.aio.stats import ExecutorStats
from infinity.aio.swap_file import SwapFile
from infinity.errors import AioClosedError, AioError, DeviceCopyError

RING_BLOCK_BYTES = 1 << 20
THREAD_BLOCK_BYTES = 16 << 20
_SPANS_MAX = 65_536
_SEAM_KINDS = {"errno": 1, "short": 2, "zero": 3, "bitflip": 4}


def _config(
    ffi: Any, small: PoolSpec, large: PoolSpec, *, uring: bool, verify: str, workers: int, threads_per_drive: int,
    hold_s: float, seam: Seam, drive_count: int,
) -> Any:  # fmt: skip
    config = ffi.new("inf_exec_config *")
    config.uring = uring
    config.verify = {"off": 0, "full": 1, "sample": 2}[verify]
    config.workers = workers
    config.threads_per_drive = threads_per_drive
    config.small_count, config.small_bytes = small.count, small.bytes
    config.large_count, config.large_bytes = large.count, large.bytes
    config.drive_count = drive_count
    config.hold_ns = int(hold_s * 1e9)
    if (place := numa_node.chosen()) is not None:
        config.numa = 1 + place.node
        for cpu in place.cpus:
            config.cpus[cpu // 64] |= 1 << cpu % 64
    config.seam.seed = seam.seed & (2**64 - 1)
    config.seam.delay_us_max = seam.delay_us_max
    if seam.fault is not None:
        config.seam.fault_nth = seam.fault.nth
        config.seam.fault_kind = _SEAM_KINDS[seam.fault.kind]
        config.seam.fault_op = 0 if seam.fault.op == "read" else 1
        config.seam.fault_errno = seam.fault.errno
        config.seam.fault_persistent = seam.fault.persistent
    return config


def _drive_configs(ffi: Any, drives: Sequence[SwapFile], block_bytes: int, depths: Sequence[int], seam: Seam) -> Any:
    configs = ffi.new("inf_drive_config[]", max(1, len(drives)))
    for index, drive in enumerate(drives):
        configs[index].fd = drive.fd
        configs[index].block_bytes, configs[index].depth = drive_limits.fit(drive, block_bytes, depths[index])
        configs[index].read_bytes_per_s, configs[index].write_bytes_per_s = seam.throttle(index)
    return configs


@final
class NativeExecutor:
    """`executor.Executor` on native threads.

    backend: "io_uring" (one ring and thread per drive) or "threads" (`threads_per_drive` of them with pread and pwrite).
    block_bytes: the longest request; None: 1 MiB for rings, whole runs (up to 16 MiB) for threads, which have one request
    each. It and `depth` are fitted to what each drive takes.
    Raises OSError when the backend cannot be had here, ImportError when the extension is missing, MemoryError when the
    pools do not fit what the machine or its cgroup leaves. Use `infinity.aio.open_executor`, which steps down.
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
        backend_reason: str = "",
    ) -> None:
        uring = backend == "io_uring"
        if block_bytes is None:
            block_bytes = RING_BLOCK_BYTES if uring else THREAD_BLOCK_BYTES
        depths = [depth] * max(len(drives), 1) if isinstance(depth, int) else list(depth)
        for each in depths:
            checks.check_options(
                small,
                large,
                verify=verify,
                workers=workers,
                block_bytes=block_bytes,
                depth=each,
                threads_per_drive=threads_per_drive,
            )
        if len(depths) < len(drives):
            raise ValueError(f"depth={depths}: one number for each of {len(drives)} drives")
        ffi, lib = native.load()
        self.backend = backend
        self.backend_reason = backend_reason
        if uring:
            load_uring(ffi, lib)
        memory_limits.check_slab(small.count * small.bytes + large.count * large.bytes)
        seam = seam or Seam()
        config = _config(
            ffi, small, large, uring=uring, verify=verify, workers=workers, threads_per_drive=threads_per_drive,
            hold_s=hold_s, seam=seam, drive_count=len(drives),
        )  # fmt: skip
        configs = _drive_configs(ffi, drives, block_bytes, depths, seam)
        self._block_bytes = [configs[index].block_bytes for index in range(len(drives))]
        why = ffi.new("char[512]")
        error = ffi.new("int32_t *")
        opened_s = time.monotonic()
        pointer = lib.inf_executor_open(config, configs, error, why, 512)
        if pointer == ffi.NULL:
            text = ffi.string(why).decode(errors="replace")
            if text.startswith("no memory"):
                raise MemoryError(text)
            raise OSError(-error[0], f"cannot open an executor with backend {backend!r}: {text}")
        self._core = Core(ffi, lib, pointer, drives)
        self._opened_s = opened_s
        self.pool_bytes = int(lib.inf_executor_pool_bytes(pointer))
        numa_node.report(int(lib.inf_executor_numa_error(pointer)))

    def define(self, chunks: npt.NDArray[np.void]) -> npt.NDArray[np.int32]:
        """See `Executor.define`."""
        core = self._core
        core.check()
        records = checks.as_records(chunks, plan.CHUNK, "chunk")
        checks.check_chunks(records, len(core.drives))
        ids = np.full(len(records), -1, dtype=np.int32)
        error = core.lib.inf_executor_define(
            core.pointer,
            core.ffi.from_buffer(records),
            len(records),
            core.ffi.cast("int32_t *", ids.ctypes.data),
        )
        if error == -errno.ENOMEM:
            raise MemoryError(f"no memory for {len(records)} chunks")
        if error == -errno.ENOENT:
            raise ValueError(checks.FILE_UNKNOWN)
        if error:
            raise ValueError("the native executor refuses a chunk: its itemsizes do not match its format")
        return ids

    def drop(self, ids: npt.NDArray[np.int32]) -> None:
        """See `Executor.drop`."""
        core = self._core
        core.check()
        wanted = np.ascontiguousarray(ids, dtype=np.int32)
        error = core.lib.inf_executor_drop(
            core.pointer, core.ffi.from_buffer("int32_t[]", wanted), len(wanted)
        )
        if error:
            raise ValueError("cannot drop: a chunk has pending jobs, or is not defined")

    def submit(
        self,
        jobs: npt.NDArray[np.void],
        segs: npt.NDArray[np.void] | None = None,
        hypers: npt.NDArray[np.void] | None = None,
        *,
        priority: Priority,
        gate: Gate | None = None,
    ) -> NativeTicket:
        """See `Executor.submit`."""
        core = self._core
        core.check()
        job_records = checks.as_records(jobs, plan.JOB, "job")
        seg_records = checks.as_records(segs, plan.SEG, "seg")
        hyper_records = checks.as_records(hypers, plan.HYPER, "hyper")
        if gate is not None and (not isinstance(gate, NativeGate) or gate._core is not core):
            raise ValueError("the gate is of another executor")
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
        return NativeTicket(core, address)

    def gate(self) -> NativeGate:
        """See `Executor.gate`."""
        self._core.check()
        address = self._core.quick.gate_new(self._core.address)
        if not address:
            raise MemoryError("no memory for a gate")
        return NativeGate(self._core, address)

    def attach_device(self, driver: DeviceDriver) -> None:
        """See `Executor.attach_device`."""
        core = self._core
        core.check()
        api = core.ffi.new("inf_device_api *", {"context": driver.context, **driver.functions})
        code = int(core.lib.inf_executor_attach_device(core.pointer, api))
        if code == -errno.EALREADY:
            raise ValueError("a device is attached to this executor already; it takes one")
        if code == -errno.ENOMEM:
            raise MemoryError("no memory for the copies of a device")
        if code:
            raise DeviceCopyError(f"the device cannot be attached: its driver says {driver.name_of(code)} ({code})")
        core.driver = driver  # its functions are called until the executor is closed

    def compute_stream(self, stream: int) -> None:
        """See `Executor.compute_stream`."""
        self._core.quick.executor_compute_stream(self._core.address, stream)

    def hold_gates(self, held: bool) -> None:
        """See `Executor.hold_gates`."""
        self._core.check()
        self._core.quick.executor_hold_gates(self._core.address, held)

    def release_gates(self) -> None:
        """See `Executor.release_gates`."""
        self._core.check()
        self._core.lib.inf_executor_release_gates(self._core.pointer)

    def preread(self, ids: npt.NDArray[np.int32], *, given: bool = False) -> int:
        """See `Executor.preread`."""
        core = self._core
        core.check()
        wanted = np.ascontiguousarray(ids, dtype=np.int32)
        accepted = core.quick.executor_preread(core.address, wanted.ctypes.data, len(wanted), given)
        if accepted < 0:
            raise ValueError("a chunk is not defined")
        return int(accepted)

    def invalid(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint32]:
        """See `Executor.invalid`."""
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
        """See `Executor.commit`."""
        self._versions("commit", ids)

    def rollback(self, ids: npt.NDArray[np.int32]) -> None:
        """See `Executor.rollback`."""
        self._versions("rollback", ids)

    def _versions(self, what: str, ids: npt.NDArray[np.int32]) -> None:
        core = self._core
        core.check()
        wanted = np.ascontiguousarray(ids, dtype=np.int32)
        call = getattr(core.lib, f"inf_executor_{what}")
        error = call(core.pointer, core.ffi.from_buffer("int32_t[]", wanted), len(wanted))
        if error:
            raise ValueError(checks.versions_refused(what, irrevocable=error == -errno.EPERM))

    def add_file(self, drive: int, file: SwapFile) -> int:
        """See `Executor.add_file`."""
        core = self._core
        core.check()
        index = int(core.lib.inf_executor_file_add(core.pointer, drive, file.fd))
        if index < 0:
            raise ValueError(checks.TOO_MANY_FILES)
        core.files[drive, index] = file
        return index

    def remove_file(self, drive: int, index: int) -> None:
        """See `Executor.remove_file`."""
        self._core.check()
        if self._core.lib.inf_executor_file_remove(self._core.pointer, drive, index):
            raise ValueError(checks.FILE_STAYS)
        del self._core.files[drive, index]

    def relocate(
        self, ids: npt.NDArray[np.int32], files: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]
    ) -> None:
        """See `Executor.relocate`."""
        core = self._core
        core.check()
        wanted = np.ascontiguousarray(ids, dtype=np.int32)
        there = (np.ascontiguousarray(files, dtype=np.int32), np.ascontiguousarray(offsets, dtype=np.int64))
        error = core.lib.inf_executor_relocate(
            core.pointer,
            core.ffi.from_buffer("int32_t[]", wanted),
            len(wanted),
            core.ffi.from_buffer("int32_t[]", there[0]),
            core.ffi.from_buffer("int64_t[]", there[1]),
        )
        if error == -errno.EPERM:
            raise ValueError(checks.RELOCATES_COMMITTED)
        if error:
            raise ValueError(checks.versions_refused("relocate", irrevocable=False))

    def look(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.void]:
        """See `Executor.look`."""
        core = self._core
        core.check()
        wanted = np.ascontiguousarray(ids, dtype=np.int32)
        chunks = np.zeros(len(wanted), dtype=plan.CHUNK)
        error = core.lib.inf_executor_look(
            core.pointer, core.ffi.from_buffer("int32_t[]", wanted), len(wanted), core.ffi.from_buffer(chunks)
        )
        if error:
            raise ValueError("a chunk is not defined")
        return chunks

    def recover(self) -> NativeTicket:
        """See `Executor.recover`."""
        core = self._core
        core.check()
        error = core.ffi.new("int64_t *")
        pointer = core.lib.inf_executor_recover(core.pointer, error)
        if pointer == core.ffi.NULL:
            raise _submit_error(int(error[0]))
        return NativeTicket(core, int(core.ffi.cast("uintptr_t", pointer)))

    def fault(self) -> AioError | None:
        """See `Executor.fault`."""
        if self._core.forked:
            return None
        record = self._core.ffi.new("inf_fault *")
        if not self._core.lib.inf_executor_fault(self._core.pointer, record):
            return None
        return self._core.fault(record)

    def stats(self) -> ExecutorStats:
        """See `Executor.stats`. Also after `close`."""
        core = self._core
        if core.forked:
            core.check()
        counters = core.ffi.new("inf_exec_stats *")
        per_drive = core.ffi.new("inf_drive_stats[]", max(1, len(core.drives)))
        core.lib.inf_executor_stats(core.pointer, counters, per_drive)
        drives = tuple(
            drive_stats(record, drive, block, core.fault_record(record.mark) if record.marked else None)
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
            jobs_cancelled=counters.jobs_cancelled,
            opened_s=self._opened_s,
            reads_ahead=counters.reads_ahead,
            reads_ahead_dropped=counters.reads_ahead_dropped,
            extra={
                name: int(getattr(counters, name)) for name in ("submissions_live", "chunks_live", "reads_ahead_live")
            },
        )

    def spans(self, enable: bool) -> None:
        """See `Executor.spans`."""
        self._core.check()
        if self._core.lib.inf_executor_spans(self._core.pointer, enable):
            raise MemoryError("no memory for spans")

    def take_spans(self) -> npt.NDArray[np.void]:
        """See `Executor.take_spans`."""
        core = self._core
        if core.forked:
            return spans_empty()
        spans = np.zeros(_SPANS_MAX, dtype=SPAN)
        count = core.lib.inf_executor_take_spans(
            core.pointer, core.ffi.cast("inf_span *", spans.ctypes.data), _SPANS_MAX
        )
        taken: npt.NDArray[np.void] = spans[:count].copy()
        return taken

    def drain(self, timeout: float | None = None) -> None:
        """See `Executor.drain`."""
        self._core.check()
        self._core.lib.inf_executor_release_gates(self._core.pointer)
        if not self._core.wait_idle(timeout):
            raise TimeoutError(f"jobs are pending after {timeout} s")

    def close(self, *, drain: bool = True) -> None:
        """See `Executor.close`."""
        self._core.stop(drain=drain)

    def __enter__(self) -> NativeExecutor:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self.close(drain=kind is None)


def _submit_error(error: int) -> Exception:
    if error > 0:
        index, what = (error - 1) >> 4, (error - 1) & 15
        return ValueError(f"job {index} {checks.JOB_WRONG[what]}")
    if error == -errno.ENOMEM:
        return MemoryError("no memory for a submission")
    if error == -errno.EREMOTEIO:
        return DeviceCopyError("the device's driver refuses an event")
    return AioClosedError("the executor is being closed")
