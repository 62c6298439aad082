"""The executor without a compiler: Python threads that interpret the same arrays, with the same promises.

preadv and pwritev release the GIL while the drive works; beside a busy Python loop this executor is still 2 to 7 times
slower than the native one.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import final

import numpy as np
import numpy.typing as npt

from infinity.aio import checks, plan, python_versions
from infinity.aio.device import DeviceDriver
from infinity.aio.executor import SPAN, Gate, PoolSpec, Priority, Seam, spans_empty
from infinity.aio.python_engine import SPANS_MAX, Engine
from infinity.aio.python_handles import PythonGate, PythonTicket
from infinity.aio.python_promote import cancel, promote
from infinity.aio.python_records import (
    GATE_CLOSED,
    GATE_ESCAPED,
    GATE_OPEN,
    Chunk,
    GateState,
    Run,
    Submission,
    TicketState,
)
from infinity.aio.python_sections import Kernel
from infinity.aio.python_threads import Threads
from infinity.aio.python_transfer import BLOCK_BYTES
from infinity.aio.stats import ExecutorStats
from infinity.aio.swap_file import SwapFile
from infinity.errors import AioClosedError, AioError

__all__ = ["Kernel", "PythonExecutor"]


@final
class PythonExecutor:
    """`executor.Executor` in Python. `kernel` does the updates; without it a submission that has one is a ValueError."""

    backend = "python"

    def __init__(
        self,
        drives: Sequence[SwapFile],
        *,
        small: PoolSpec,
        large: PoolSpec,
        verify: str = "full",
        workers: int = 1,
        threads_per_drive: int = 8,
        hold_s: float = 0.02,
        seam: Seam | None = None,
        kernel: Kernel | None = None,
        backend_reason: str = "",
    ) -> None:
        checks.check_options(
            small,
            large,
            verify=verify,
            workers=workers,
            block_bytes=BLOCK_BYTES,
            depth=2,
            threads_per_drive=threads_per_drive,
        )
        self.backend_reason = backend_reason
        self.pool_bytes = small.count * small.bytes + large.count * large.bytes
        self._paths = [drive.path for drive in drives]
        self._drives = tuple(drives)
        self._kernel = kernel
        self._closed = False
        self._forked = False
        self._wait_s = 0.0
        self._opened_s = time.monotonic()
        self._chunk_next = 0
        self._engine = Engine(
            drives,
            small,
            large,
            verify=verify,
            threads_per_drive=threads_per_drive,
            hold_s=hold_s,
            seam=seam,
            kernel=kernel,
        )
        self._threads = Threads(self._engine, workers=workers, per_drive=threads_per_drive)
        self._huge_bytes = self._engine.slab.huge_bytes() if self._engine.slab else 0
        _EXECUTORS.add(self)

    def _check(self) -> None:
        if self._forked:
            raise AioClosedError(
                "the executor belongs to the parent of this process; open one after the fork"
            )
        if self._closed:
            raise AioClosedError("the executor is closed")

    def define(self, chunks: npt.NDArray[np.void]) -> npt.NDArray[np.int32]:
        """See `Executor.define`."""
        self._check()
        records = checks.as_records(chunks, plan.CHUNK, "chunk")
        checks.check_chunks(records, len(self._drives))
        engine = self._engine
        with engine.lock:
            for record in records:
                if record["drive"] >= 0 and not checks.files_of(record) <= engine.channels[record["drive"]].files.keys():
                    raise ValueError(checks.FILE_UNKNOWN)
            first = self._chunk_next
            self._chunk_next += len(records)
            for index, record in enumerate(records):
                engine.chunks[first + index] = Chunk(first + index, record.copy())
        return np.arange(first, first + len(records), dtype=np.int32)

    def drop(self, ids: npt.NDArray[np.int32]) -> None:
        """See `Executor.drop`."""
        self._check()
        engine = self._engine
        with engine.lock:
            for index in ids:
                chunk = engine.chunks.get(int(index))
                if chunk is None or chunk.fifo:
                    raise ValueError("cannot drop: a chunk has pending jobs, or is not defined")
            for index in ids:
                chunk = engine.chunks.pop(int(index), None)
                if chunk is not None:
                    engine.ahead.drop(chunk)
                    engine.kept.drop(chunk)
            engine.pump()

    def submit(
        self,
        jobs: npt.NDArray[np.void],
        segs: npt.NDArray[np.void] | None = None,
        hypers: npt.NDArray[np.void] | None = None,
        *,
        priority: Priority,
        gate: Gate | None = None,
    ) -> PythonTicket:
        """See `Executor.submit`."""
        self._check()
        job_records = checks.as_records(jobs, plan.JOB, "job")
        if gate is not None and (not isinstance(gate, PythonGate) or gate._executor is not self):
            raise ValueError("the gate is of another executor")
        state = TicketState()
        submission = Submission(state, gate._state if gate is not None else None)
        submission.segs = checks.as_records(segs, plan.SEG, "seg").copy()
        submission.hypers = checks.as_records(hypers, plan.HYPER, "hyper").copy()
        engine = self._engine
        with engine.lock:
            if engine.shut:
                raise AioClosedError("the executor is being closed")
            for index, job in enumerate(job_records):
                self._check_job(index, job, submission)
                chunk = engine.chunks[int(job["chunk"])]
                submission.runs.append(Run(submission, chunk, job, int(priority)))
            if submission.runs:
                engine.enter(submission)
            else:
                state.done = state.filled = True
        return PythonTicket(self, state)

    def _check_job(self, index: int, job: np.void, submission: Submission) -> None:
        chunk = self._engine.chunks.get(int(job["chunk"]))
        bases = None
        if submission.gate is not None:
            bases = len(submission.gate.bases) if submission.gate.state == GATE_OPEN else 1 << 31
        pools = [pool.spec.bytes for pool in self._engine.pools if pool.spec.count]
        wrong = checks.job_wrong(
            job, chunk and chunk.record, len(submission.segs), bases, max(pools, default=0)
        )
        if wrong:
            raise ValueError(f"job {index} {checks.JOB_WRONG[wrong]}")
        if job["kind"] == plan.JobKind.UPDATE and self._kernel is None:
            raise ValueError(
                f"job {index} is an UPDATE, and this Python executor was opened without a kernel"
            )

    def gate(self) -> PythonGate:
        """See `Executor.gate`."""
        self._check()
        return PythonGate(self, GateState(GATE_ESCAPED if self._engine.shut else GATE_CLOSED))

    def attach_device(self, driver: DeviceDriver) -> None:
        """See `Executor.attach_device`. Raises: ValueError, always."""
        raise ValueError(
            f"copies to a device ({driver.context:#x}) need the native extension, and this executor is Python's: build it "
            "(`make native`), or `infinity doctor` says why it is not used"
        )

    def compute_stream(self, stream: int) -> None:
        """See `Executor.compute_stream`. There is no device."""

    def hold_gates(self, held: bool) -> None:
        """See `Executor.hold_gates`."""
        self._check()
        engine = self._engine
        with engine.lock:
            engine.gates.held = held
            engine.gates.idle_since = time.monotonic()
            engine.work.notify_all()
            engine.pump()

    def release_gates(self) -> None:
        """See `Executor.release_gates`."""
        self._check()
        with self._engine.lock:
            self._engine.escape()

    def preread(self, ids: npt.NDArray[np.int32], *, given: bool = False) -> int:
        """See `Executor.preread`."""
        self._check()
        engine = self._engine
        with engine.lock:
            chunks = [engine.chunks.get(int(index)) for index in ids]
            if None in chunks:
                raise ValueError("a chunk is not defined")
            accepted = 0
            while accepted < len(chunks) and not engine.shut:
                chunk = chunks[accepted]
                if chunk is None or not engine.ahead.want(chunk, given=given):
                    break
                accepted += 1
            engine.pump()
        return accepted

    def invalid(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint32]:
        """See `Executor.invalid`."""
        self._check()
        with self._engine.lock:
            chunks = [self._engine.chunks.get(int(index)) for index in ids]
            if None in chunks:
                raise ValueError("a chunk is not defined")
            return np.array([chunk.invalid for chunk in chunks if chunk is not None], dtype=np.uint32)

    def commit(self, ids: npt.NDArray[np.int32]) -> None:
        """See `Executor.commit`."""
        self._check()
        with self._engine.lock:
            python_versions.commit(self._engine, ids.tolist())

    def rollback(self, ids: npt.NDArray[np.int32]) -> None:
        """See `Executor.rollback`."""
        self._check()
        with self._engine.lock:
            python_versions.rollback(self._engine, ids.tolist())

    def add_file(self, drive: int, file: SwapFile) -> int:
        """See `Executor.add_file`."""
        self._check()
        with self._engine.lock:
            return python_versions.add_file(self._engine, drive, file)

    def remove_file(self, drive: int, index: int) -> None:
        """See `Executor.remove_file`."""
        self._check()
        with self._engine.lock:
            python_versions.remove_file(self._engine, drive, index)

    def relocate(
        self, ids: npt.NDArray[np.int32], files: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]
    ) -> None:
        """See `Executor.relocate`."""
        self._check()
        with self._engine.lock:
            python_versions.relocate(self._engine, ids.tolist(), files.tolist(), offsets.tolist())

    def look(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.void]:
        """See `Executor.look`."""
        self._check()
        with self._engine.lock:
            chunks = [self._engine.chunks.get(int(index)) for index in ids]
            if None in chunks:
                raise ValueError("a chunk is not defined")
            return np.array([chunk.record for chunk in chunks if chunk is not None], dtype=plan.CHUNK)

    def recover(self) -> PythonTicket:
        """See `Executor.recover`."""
        self._check()
        state = TicketState()
        engine = self._engine
        with engine.lock:
            if engine.shut:
                raise AioClosedError("the executor is being closed")
            engine.recover(state)
        return PythonTicket(self, state)

    def _cancel(self, state: TicketState) -> None:
        self._check()
        engine = self._engine
        with engine.lock:
            if state.submission is not None:
                cancel(engine, state.submission)

    def fault(self) -> AioError | None:
        """See `Executor.fault`."""
        record = self._engine.first_fault
        return record.to_error(self._paths) if record is not None else None

    def stats(self) -> ExecutorStats:
        """See `Executor.stats`. Also after `close`."""
        if self._forked:
            self._check()
        engine = self._engine
        with engine.lock:
            counts = dict(engine.counts)
            gates_opened, gates_escaped = engine.gates.opened, engine.gates.escaped
            kept_chunks, compute_s = len(engine.kept.chunks), engine.compute_s
            marks = tuple(engine.kept.marks)
            reads_ahead, dropped, live = engine.ahead.begun, engine.ahead.dropped, engine.ahead.live
        drives = tuple(
            channel.meter.stats(
                channel.file,
                block_bytes=BLOCK_BYTES,
                depth=lanes.depth,
                failed="" if mark is None else str(mark.to_error(self._paths)),
            )
            for channel, lanes, mark in zip(engine.channels, engine.lanes, marks, strict=True)
        )
        return ExecutorStats(
            backend=self.backend,
            drives=drives,
            jobs_submitted=counts["submitted"],
            jobs_done=counts["done"],
            jobs_failed=counts["failed"],
            updates=counts["updates"],
            gates_opened=gates_opened,
            gates_escaped=gates_escaped,
            rereads=counts["rereads"],
            checksum_failures=counts["checksums"],
            wait_s=self._wait_s,
            compute_s=compute_s,
            pool_bytes=self.pool_bytes,
            huge_bytes=self._huge_bytes,
            registered=False,
            spans_dropped=engine.spans_dropped,
            backend_reason=self.backend_reason,
            registered_reason="the python backend has nothing to register with",
            kept_chunks=kept_chunks,
            jobs_cancelled=counts["cancelled"],
            opened_s=self._opened_s,
            reads_ahead=reads_ahead,
            reads_ahead_dropped=dropped,
            extra={"chunks_live": len(engine.chunks), "reads_ahead_live": live},
        )

    def spans(self, enable: bool) -> None:
        """See `Executor.spans`."""
        self._check()
        with self._engine.lock:
            self._engine.spans = deque(maxlen=SPANS_MAX) if enable else None

    def take_spans(self) -> npt.NDArray[np.void]:
        """See `Executor.take_spans`."""
        if self._forked:
            return spans_empty()
        with self._engine.lock:
            taken = list(self._engine.spans or ())
            if self._engine.spans is not None:
                self._engine.spans.clear()
        return np.array(taken, dtype=SPAN)

    def _block(self, state: TicketState, word: str, timeout: float | None) -> None:
        self._check()
        start = time.monotonic()
        engine = self._engine
        with engine.lock:
            if state.submission is not None:
                engine.gates.escape_for(state.submission)
                promote(engine, state.submission)
                engine.pump()
            try:
                ended = engine.done.wait_for(lambda: getattr(state, word), timeout)
            finally:
                self._wait_s += time.monotonic() - start
        if not ended:
            raise TimeoutError(f"the ticket is not {word} after {timeout} s")

    def drain(self, timeout: float | None = None) -> None:
        """See `Executor.drain`."""
        self._check()
        engine = self._engine
        with engine.lock:
            engine.escape()
            if not engine.done.wait_for(lambda: engine.idle, timeout):
                raise TimeoutError(f"jobs are pending after {timeout} s")

    def close(self, *, drain: bool = True) -> None:
        """See `Executor.close`."""
        if self._closed or self._forked:
            return
        self._closed = self._threads.end(drain=drain)

    def __enter__(self) -> PythonExecutor:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self.close(drain=kind is None)

    def __del__(self) -> None:
        if hasattr(self, "_threads") and not self._closed and not self._forked:
            self._threads.end_from_anywhere()


_EXECUTORS: weakref.WeakSet[PythonExecutor] = weakref.WeakSet()


def _close_all() -> None:
    for executor in list(_EXECUTORS):
        executor.close(drain=False)


def _mark_forked() -> None:
    for executor in _EXECUTORS:
        executor._forked = True


atexit.register(_close_all)
os.register_at_fork(after_in_child=_mark_forked)
