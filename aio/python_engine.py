"""The Python executor's inside: its threads, and what goes when. The promises are those of `executor.py`.

    submit -> chunk FIFO -> [gate] -> slot -> ready -> a thread: read, compute, write -> done

One lock guards the records. Each thread takes a batch of ready jobs (neighbours in the file) and runs it to the end, with
the lock released while the drive or numpy works.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from infinity.aio import checks, plan
from infinity.aio.executor import TRACK_COPY, TRACK_READ, TRACK_UPDATE, TRACK_WRITE, PoolSpec, Priority, Seam
from infinity.aio.python_pass import checksum_fault, neighbours, run_pass, slot_of
from infinity.aio.python_records import (
    GATE_CLOSED,
    GATE_ESCAPED,
    Chunk,
    GateState,
    Pool,
    Run,
    Submission,
)
from infinity.aio.python_transfer import (
    DriveChannel,
    Kernel,
    RequestCounter,
    TransferError,
)
from infinity.aio.slab import Slab
from infinity.aio.swap_file import SwapFile

BATCH_BYTES = 16 << 20
SPANS_MAX = 65_536
_STORE, _FETCH, _UPDATE = plan.JobKind.STORE, plan.JobKind.FETCH, plan.JobKind.UPDATE


class Engine:
    """Threads that run jobs. Methods that say [locked] want `lock` held."""

    def __init__(
        self,
        drives: Sequence[SwapFile],
        small: PoolSpec,
        large: PoolSpec,
        *,
        verify: bool,
        workers: int,
        threads_per_drive: int,
        hold_s: float,
        seam: Seam | None,
        kernel: Kernel | None,
    ) -> None:
        counter = RequestCounter(seam)
        self.channels = [DriveChannel(index, drive, seam, counter) for index, drive in enumerate(drives)]
        small_bytes = small.count * small.bytes
        pool_bytes = small_bytes + large.count * large.bytes
        self.slab = Slab(pool_bytes) if pool_bytes else None
        self.pools = (Pool(small, self.slab, 0), Pool(large, self.slab, small_bytes))
        self.lock = threading.RLock()
        self.work = threading.Condition(self.lock)
        self.done = threading.Condition(self.lock)
        self.chunks: dict[int, Chunk] = {}
        self.gates: list[GateState] = []  # closed and holding a submission; oldest first
        self.counts = dict.fromkeys(
            ("submitted", "done", "failed", "updates", "opened", "escaped", "rereads", "checksums"), 0
        )
        self.compute_s = 0.0
        self.pending = 0
        self.order = 0
        self.first_fault: checks.FaultRecord | None = None
        self.spans: deque[tuple[int, ...]] | None = None
        self.spans_dropped = 0
        self.escaping = False
        self._held = False
        self.shut = self.cancelled = self.stopping = False
        self._verify = verify
        self._kernel = kernel
        self._hold_s = hold_s
        self._ready: list[deque[Run]] = [deque() for _ in Priority]
        self._active = 0
        self._idle_since = time.monotonic()
        self._computing = threading.Semaphore(workers)
        count = max(1, len(drives)) * threads_per_drive
        self.threads = [
            threading.Thread(target=self._main, name=f"infinity-aio-{index}", daemon=True)
            for index in range(count)
        ]
        for thread in self.threads:
            thread.start()

    # ---- what goes when [locked] ----

    def pool_for(self, size_bytes: int) -> Pool | None:
        """The pool whose slots hold that many bytes."""
        for pool in self.pools:
            if pool.spec.count and size_bytes <= pool.spec.bytes:
                return pool
        return None

    def enter(self, submission: Submission) -> None:
        """Put the jobs into the FIFOs of their chunks. [locked]"""
        self.order += 1
        submission.order = self.order
        submission.pending = submission.unfilled = len(submission.runs)
        self.pending += len(submission.runs)
        self.counts["submitted"] += len(submission.runs)
        for run in submission.runs:
            run.chunk.fifo.append(run)
        gate = submission.gate
        if gate is not None and gate.state == GATE_CLOSED:
            if not gate.submissions:
                self.gates.append(gate)
            gate.submissions.append(submission)
            self._idle_since = time.monotonic()
        submission.escaped = gate is not None and gate.state == GATE_ESCAPED
        for run in submission.runs:
            self._consider(run)
        self.pump()

    def _consider(self, run: Run) -> None:
        gate = run.submission.gate
        closed = gate is not None and gate.state == GATE_CLOSED
        if run.started or run.chunk.fifo[0] is not run or closed:
            return
        run.started = True
        self._active += 1
        if run.bytes:
            run.pool = self.pool_for(run.bytes)
            assert run.pool is not None
            run.pool.waiting[run.priority].append(run)
        else:
            self._ready[run.priority].append(run)

    def pump(self) -> None:
        """Give free slots away and wake threads; whoever changed something calls it. [locked]"""
        while True:
            for pool in self.pools:
                for queue in pool.waiting:
                    while queue and pool.free:
                        run = queue.popleft()
                        run.slot = pool.free.pop()
                        self._ready[run.priority].append(run)
            waiting = any(queue for pool in self.pools for queue in pool.waiting)
            if (
                self._held
                or not self.escaping
                or not self.gates
                or waiting
                or sum(map(len, self._ready)) >= 8
            ):
                break
            self.let_go(self.gates[0], GATE_ESCAPED)
        # One more than there is work for keeps the time of gates.
        self.work.notify(sum(map(len, self._ready)) + bool(self.gates))

    def let_go(self, gate: GateState, state: int) -> None:
        """The gate is closed no more. [locked]"""
        gate.state = state
        if gate in self.gates:
            self.gates.remove(gate)
        self.escaping = self.escaping and bool(self.gates)  # what comes next is held again
        self.counts["escaped" if state == GATE_ESCAPED else "opened"] += 1
        for submission in gate.submissions:
            submission.escaped = state == GATE_ESCAPED
            for run in submission.runs:
                if not run.done:
                    self._consider(run)
        gate.submissions = []

    def escape(self, order_max: int | None = None) -> None:
        """Make closed gates escape whose first submission is not later than `order_max`. [locked]"""
        while self.gates and (order_max is None or self.gates[0].submissions[0].order <= order_max):
            self.let_go(self.gates[0], GATE_ESCAPED)
        self.pump()

    def escape_for(self, submission: Submission) -> None:
        """Make all gates escape that keep the submission from running. [locked]"""
        order = 0
        for run in submission.runs:
            for before in run.chunk.fifo if not run.done else ():
                gate = before.submission.gate
                if gate is not None and gate.state == GATE_CLOSED:
                    order = max(order, before.submission.order)
                if before is run:
                    break
        if order:
            self.escape(order)

    def promote(self, submission: Submission) -> None:
        """Somebody waits for it: its jobs, and those before them on their chunks, are demands now. [locked]"""
        for run in submission.runs:
            for before in list(run.chunk.fifo) if not run.done else ():
                self._promote(before)
                if before is run:
                    break

    def _promote(self, run: Run) -> None:
        for pool_queues in (self._ready, *(pool.waiting for pool in self.pools)):
            if run in pool_queues[run.priority]:
                pool_queues[run.priority].remove(run)
                pool_queues[Priority.DEMAND].append(run)
                break
        run.priority = Priority.DEMAND

    # ---- threads ----

    def _main(self) -> None:
        with self.lock:
            while True:
                batch = self._take()
                if batch:
                    self._run_batch(batch)
                elif self.stopping:
                    return
                else:
                    self._sleep()

    def hold(self, held: bool) -> None:
        """Gates that are held do not escape for being idle."""
        with self.lock:
            self._held = held
            self._idle_since = time.monotonic()
            self.work.notify_all()
            self.pump()

    def _sleep(self) -> None:
        if not self.gates or self._active or self._held:
            self.work.wait()
            return
        left = self._idle_since + self._hold_s - time.monotonic()
        if left > 0:
            self.work.wait(left)
            return
        self.escaping = True
        self.let_go(self.gates[0], GATE_ESCAPED)
        self.pump()

    def _take(self) -> list[Run]:
        """The next ready jobs that one request can serve. [locked]"""
        for queue in self._ready:
            if not queue:
                continue
            batch = [queue.popleft()]
            size = batch[0].bytes
            while queue and neighbours(batch[-1], queue[0]) and size + queue[0].bytes <= BATCH_BYTES:
                batch.append(queue.popleft())
                size += batch[-1].bytes
            return batch
        return []

    def _run_batch(self, batch: list[Run]) -> None:
        """Runs jobs to the end. [locked], released while something works."""
        runs = [run for run in batch if self._begin(run)]
        if runs and runs[0].kind != _STORE:
            runs = self._move(0, runs)
            for run in runs:
                if run.kind == _FETCH and not self._computes(run):
                    self._finish(run)
            runs = [run for run in runs if not run.done]
        computed = [run for run in runs if run.move_only or self._compute(run)]
        runs = [run for run in computed if run.bytes and run.kind != _FETCH]
        if self.cancelled:
            for run in runs:
                run.fail(checks.FaultRecord(kind=checks.FAULT_CLOSED))
            runs = []
        runs = self._move(1, runs)
        for run in batch:
            if not run.done:
                self._finish(run)
        self.pump()

    def _begin(self, run: Run) -> bool:
        """Whether there is something to do; what ends here at once is finished."""
        submission = run.submission
        skipped = submission.escaped and run.kind == _FETCH
        if self.cancelled:
            run.fail(checks.FaultRecord(kind=checks.FAULT_CLOSED))
        elif submission.escaped:
            if run.kind == _UPDATE:
                run.ptr[0] = 0
        elif submission.gate is not None and run.base >= 0:
            run.ptr[0] += submission.gate.bases[run.base]
        if run.kind != _STORE and run.chunk.invalid & run.mask and not skipped and run.fault is None:
            run.fault = replace(run.chunk.fault, earlier=True)
        if run.fault is None and not skipped:
            return True
        self._finish(run)
        return False

    def _computes(self, run: Run) -> bool:
        targets = any(run.ptr[section] for section in range(plan.SECTION_MAX) if run.mask >> section & 1)
        return not run.move_only and (targets or bool(self._verify and run.chunk.record["sums_ptr"]))

    def _move(self, op: int, runs: list[Run]) -> list[Run]:
        """Transfer the runs of neighbours in one request, others range by range; returns those that went well."""
        moving = [run for run in runs if run.bytes]
        if not moving:
            return runs
        whole = len(moving) > 1
        pieces: list[tuple[int, list[Run], list[memoryview]]] = []
        if whole:
            views = [slot_of(run)[: run.bytes].data for run in moving]
            pieces.append((moving[0].ranges[0][0], moving, views))
        else:
            slot = slot_of(moving[0])
            for file_at, slot_at, size in moving[0].ranges:
                pieces.append((file_at, moving, [slot[slot_at : slot_at + size].data]))
        channel = self.channels[int(moving[0].chunk.record["drive"])]
        start = time.monotonic_ns()
        self.lock.release()
        failed: TransferError | None = None
        try:
            for offset, _, views in pieces:
                channel.transfer(op, views, offset)
        except TransferError as fault:
            failed = fault
        finally:
            self.lock.acquire()
        for run in moving:
            self._span(TRACK_WRITE if op else TRACK_READ, run, start, run.bytes)
        if failed is None:
            return runs
        if whole:  # find out which of them it was
            return [run for run in moving if self._move(op, [run])] + [run for run in runs if not run.bytes]
        moving[0].fail(failed.record)
        return []

    def _compute(self, run: Run) -> bool:
        """Verify, copy, update, seal; reads once more when a checksum does not match. False: it failed."""
        for again in (False, True):
            bad = self._compute_once(run)
            if bad == -1:
                self.counts["updates"] += run.kind == _UPDATE
                self._filled(run)
                return True
            if bad < 0 or again or self.cancelled:
                break
            self.counts["rereads"] += 1
            if not self._move(0, [run]):
                return False
        if bad < 0:
            run.fail(checks.FaultRecord(kind=checks.FAULT_PLAN, error=22))
        else:
            self.counts["checksums"] += 1
            run.fail(checksum_fault(run, bad))
        return False

    def _compute_once(self, run: Run) -> int:
        """-1, -2 (bad plan), or section * pieces + piece of the first mismatch. [locked], released while it works."""
        start = time.monotonic_ns()
        self.lock.release()
        try:
            with self._computing:
                return run_pass(run, self._kernel, verify=self._verify)
        finally:
            self.lock.acquire()
            end = time.monotonic_ns()
            self.compute_s += (end - start) / 1e9
            self._span(TRACK_UPDATE if run.kind == _UPDATE else TRACK_COPY, run, start, run.bytes)

    # ---- ends [locked] ----

    def _filled(self, run: Run) -> None:
        if run.filled:
            return
        run.filled = True
        run.submission.unfilled -= 1
        if run.submission.unfilled == 0:
            run.submission.ticket.filled = True
            self.done.notify_all()

    def _finish(self, run: Run) -> None:
        submission, chunk = run.submission, run.chunk
        run.done = True
        if run.slot >= 0 and run.pool is not None:
            run.pool.free.append(run.slot)
            run.slot = -1
        self._settle(run)
        assert chunk.fifo[0] is run
        chunk.fifo.popleft()
        if chunk.fifo:
            self._consider(chunk.fifo[0])
        self.counts["done"] += 1
        if run.fault is not None:
            self.counts["failed"] += 1
            if self.first_fault is None and run.fault.kind != checks.FAULT_CLOSED:
                self.first_fault = run.fault
            if submission.ticket.fault is None:
                submission.ticket.fault = run.fault
                submission.ticket.failed = True
        self._filled(run)
        self._active -= 1
        self.pending -= 1
        submission.pending -= 1
        if self._active == 0:
            self._idle_since = time.monotonic()
            self.work.notify()
        if submission.pending == 0:
            submission.ticket.submission = None
            submission.ticket.done = True
            self.done.notify_all()
        if self.pending == 0:
            self.done.notify_all()

    def _settle(self, run: Run) -> None:
        chunk, fault = run.chunk, run.fault
        if fault is None:
            if run.kind == _STORE:
                chunk.invalid &= ~run.mask
        elif run.kind != _FETCH and not fault.earlier and fault.kind != checks.FAULT_PLAN:
            chunk.invalid |= run.mask
            chunk.fault = fault

    def _span(self, track: int, run: Run, start: int, size: int) -> None:
        if self.spans is None:
            return
        drive = int(run.chunk.record["drive"]) if track in (TRACK_READ, TRACK_WRITE) else -1
        if len(self.spans) == SPANS_MAX:
            self.spans_dropped += 1
        self.spans.append((track, drive, run.chunk.index, run.priority, start, time.monotonic_ns(), size))
