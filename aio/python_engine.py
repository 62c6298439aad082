"""The Python executor's inside: what becomes of a job. The promises are those of `executor.py`.

    submit -> chunk FIFO -> [gate] -> slot -> read -> compute -> write -> done
                                             drive    workers    drive

One lock guards all records. It is never held while a drive, a copy or a kernel works, and whoever holds it takes no other
lock and logs nothing: a garbage collection may close gates and executors anywhere. `python_threads.py` has the threads.
All methods want the lock held.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from infinity.aio import checks, plan, python_versions
from infinity.aio.executor import TRACK_COPY, TRACK_READ, TRACK_UPDATE, TRACK_WRITE, PoolSpec, Priority, Seam
from infinity.aio.python_ahead import ReadsAhead
from infinity.aio.python_gates import Gates
from infinity.aio.python_kept import EARLIER_JOB, EARLIER_MARK, Kept
from infinity.aio.python_lanes import DriveLanes
from infinity.aio.python_pass import BAD_PLAN, PASSED, checksum_fault, section_of
from infinity.aio.python_records import (
    AHEAD,
    GATE_CLOSED,
    READ,
    WRITE,
    Chunk,
    GateState,
    Lanes,
    Place,
    Pool,
    Run,
    State,
    Submission,
    TicketState,
)
from infinity.aio.python_sections import Kernel
from infinity.aio.python_transfer import BLOCK_BYTES, DriveChannel, RequestCounter, neighbours
from infinity.aio.slab import Slab
from infinity.aio.swap_file import SwapFile

SPANS_MAX = 65_536
_COMPUTE_FEW = 8
_STORE, _FETCH, _UPDATE, _REWRITE = (
    plan.JobKind.STORE,
    plan.JobKind.FETCH,
    plan.JobKind.UPDATE,
    plan.JobKind.REWRITE,
)
_CLOSED = checks.FaultRecord(kind=checks.FAULT_CLOSED)
_COUNTED = ("submitted", "done", "failed", "cancelled", "updates", "rereads", "checksums")


class Engine:
    """The jobs of an executor and what they hold."""

    def __init__(
        self,
        drives: Sequence[SwapFile],
        small: PoolSpec,
        large: PoolSpec,
        *,
        verify: str,
        threads_per_drive: int,
        hold_s: float,
        seam: Seam | None,
        kernel: Kernel | None,
    ) -> None:
        self.lock = threading.RLock()
        self.work = threading.Condition(self.lock)  # for workers
        self.done = threading.Condition(self.lock)  # a word of a ticket was set, or nothing is pending
        counter = RequestCounter(seam)
        self.channels = [DriveChannel(index, drive, seam, counter) for index, drive in enumerate(drives)]
        self.lanes = [DriveLanes(threads_per_drive, self.lock) for _ in drives]
        self.computing = Lanes()
        small_bytes = small.count * small.bytes
        pool_bytes = small_bytes + large.count * large.bytes
        self.slab = Slab(pool_bytes) if pool_bytes else None
        self.pools = tuple(
            Pool(spec, self.slab, offset, len(drives)) for spec, offset in ((small, 0), (large, small_bytes))
        )
        self.gates = Gates(self._consider, hold_s)
        self.kept = Kept(len(drives))
        self.ahead = ReadsAhead(self)
        self.chunks: dict[int, Chunk] = {}
        self.verify = verify
        self.kernel = kernel
        self.counts = dict.fromkeys(_COUNTED, 0)
        self.compute_s = 0.0
        self.pending = 0
        self.active = 0  # jobs past their FIFO and gate, not done
        self.first_fault: checks.FaultRecord | None = None
        self.spans: deque[tuple[int, ...]] | None = None
        self.spans_dropped = 0
        self.shut = self.cancelled = self.stopping = False
        self._order = self._numbers = 0
        self.starting: deque[Run] = deque()

    @property
    def idle(self) -> bool:
        """Whether no job is pending, and no drive reads ahead."""
        return not self.pending and not self.ahead.reading

    # ---- from submission to slot ----

    def pool_for(self, size_bytes: int) -> Pool:
        """The pool whose slots hold that many bytes."""
        return next(pool for pool in self.pools if pool.spec.count and size_bytes <= pool.spec.bytes)

    def enter(self, submission: Submission) -> None:
        """Put the jobs into the FIFOs of their chunks."""
        for run in submission.runs:
            self._numbers += 1
            run.number = self._numbers
            run.chunk.fifo.append(run)
        self._enter(submission)

    def recover(self, ticket: TicketState) -> None:
        """See `Executor.recover`."""
        self.pump()  # what has started but was not looked at yet is refused: it must not write before what is kept
        submission = self.kept.unmark(ticket)
        if submission.runs:
            self._enter(submission)
        else:
            ticket.done = ticket.filled = True

    def _enter(self, submission: Submission) -> None:
        self._order += 1
        submission.order = self._order
        submission.pending = submission.unfilled = len(submission.runs)
        submission.ticket.submission = submission
        self.pending += len(submission.runs)
        self.counts["submitted"] += len(submission.runs)
        self.gates.attach(submission)
        for run in submission.runs:
            self._consider(run)
        self.pump()

    def _consider(self, run: Run) -> None:
        """Start the job if the FIFO of its chunk and its gate allow."""
        gate = run.submission.gate
        if run.state != State.WAITING or run.chunk.fifo[0] is not run:
            return
        if gate is not None and gate.state == GATE_CLOSED:
            if run.kind == _UPDATE:
                self.ahead.hint(run)
        else:
            self.ahead.unhint(run)
            run.state = State.STARTING
            self.active += 1
            self.starting.append(run)

    def pump(self) -> None:
        """Go on with all that can; whoever changed something calls it."""
        while True:
            while self.starting:
                self._start(self.starting.popleft())
            for pool in self.pools:
                self._give_slots(pool)
            if self.starting:
                continue
            gates = self.gates
            if (
                not gates.flowing
                or gates.held
                or not gates.closed
                or any(pool.waiting for pool in self.pools)
            ):
                break
            if len(self.computing) >= _COMPUTE_FEW:
                break
            gates.escape_oldest()
        self.ahead.begin()
        if self.gates.closed and not self.active:
            self.work.notify()  # a worker keeps the time of gates

    def _start(self, run: Run) -> None:
        submission, chunk = run.submission, run.chunk
        if self.cancelled:
            run.fail(_CLOSED)
        elif run.kind == _REWRITE:
            if chunk.kept is not None:
                self.ahead.written(chunk, chunk.kept.writes)
                run.place = chunk.kept
                self.kept.take(chunk)
                self.queue(run, WRITE)
                return
        elif not (submission.escaped and run.kind == _FETCH):
            self._aim(run)
            run.moves = python_versions.moves(run)
            if run.moves and run.kind == _STORE:
                run.writes |= python_versions.states_of(chunk.record)  # a new version is whole
                run.reads = run.writes & ~run.mask
            if chunk.invalid & run.reads:
                run.fault = replace(chunk.fault, earlier=EARLIER_JOB)
            else:
                kept = chunk.kept.writes if chunk.kept is not None and run.kind == _FETCH else 0
                used = run.mask if run.kind == _FETCH else run.mask | run.writes
                run.place = Place(chunk.record, used & ~kept, run.reads, run.writes, moves=run.moves)
                if not self.kept.refuses(run):
                    if run.kind != _UPDATE or not self.ahead.take(run):
                        self.ahead.written(chunk, run.writes)
                        self.want_slot(run)
                    return
        self.finish(run)

    def _aim(self, run: Run) -> None:
        """Where the job copies to, now that its gate is closed no more."""
        submission = run.submission
        if submission.escaped:
            if run.kind == _UPDATE:
                run.ptr[0] = 0
        elif submission.gate is not None and run.base >= 0:
            run.ptr[0] += submission.gate.bases[run.base]

    def want_slot(self, run: Run) -> None:
        """Get the job a slot if it needs one; then it goes on."""
        if run.place.bytes:
            run.state = State.SLOT
            self.pool_for(run.place.bytes).waiting.push(run)
        else:
            self._queue_compute(run)

    def _give_slots(self, pool: Pool) -> None:
        while pool.waiting:
            ready = pool.next_run()
            if ready is not None:
                self.go_on(ready)
            elif self.ahead.give_up(pool):
                continue
            elif self.kept.is_stuck(pool):
                assert self.first_fault is not None, "what is kept was kept after a fault"
                run = pool.waiting.pop()
                run.fault = replace(self.first_fault, earlier=EARLIER_MARK)
                self.finish(run)
            else:
                return

    def go_on(self, run: Run) -> None:
        """The job has its slot."""
        if run.place.ranges[READ]:
            self.queue(run, READ)
        elif run.kind == _STORE and run.move_only:
            self.queue(run, WRITE)
        else:
            self._queue_compute(run)

    # ---- through drive and workers ----

    def queue(self, run: Run, op: int) -> None:
        """The job's slot is to be read or written."""
        run.state = State.WRITING if op == WRITE else State.READING
        self.lanes[run.chunk.drive].push(op, run)

    def _queue_compute(self, run: Run, *, first: bool = False) -> None:
        run.state = State.COMPUTING
        self.computing.push(run, first=first)
        self.work.notify()

    def moved(
        self, op: int, batch: Sequence[Run], failed: dict[Run, checks.FaultRecord], start_ns: int
    ) -> None:
        """A drive is through with the jobs that `DriveLanes.take` gave out."""
        for run in batch:
            self._span(TRACK_WRITE if op == WRITE else TRACK_READ, run, start_ns)
            if run in failed:
                run.fail(failed[run])
            elif op == READ and self.cancelled:
                run.fail(_CLOSED)
            if run.kind == AHEAD:
                self.ahead.moved(run)
            elif run.fault is None and op == READ and not self.kept.refuses(run) and self._computes(run):
                self._queue_compute(run)
            else:
                self.finish(run)

    def _computes(self, run: Run) -> bool:
        if run.kind != _FETCH:
            return True
        targets = any(run.ptr[section] for section in range(plan.SECTION_MAX) if run.mask >> section & 1)
        return not run.move_only and (targets or bool(self.verify != "off" and run.chunk.record["sums_ptr"]))

    def take_compute(self) -> list[Run]:
        """The next jobs for a worker; those that will be written come together if the drive takes them as one."""
        batch: list[Run] = []
        size = 0
        run = self.computing.grant()
        while run is not None:
            batch.append(run)
            size += run.place.bytes
            alone = not run.place.ranges[WRITE]
            after = None if alone else self.computing.head(run.priority)
            if after is None or after.kind == _FETCH or size + after.place.bytes > BLOCK_BYTES:
                break
            if not neighbours(run, after, WRITE):
                break
            self.computing.remove(after)
            run = after
        return batch

    def may_compute(self, run: Run) -> bool:
        """Asked right before the pass: False, and the job is over, if the world has changed since it was queued."""
        if self.cancelled:
            run.fail(_CLOSED)
        elif not self.kept.refuses(run):
            run.phase = run.chunk.verified
            run.chunk.verified += run.kind != _STORE and not run.reread
            return True
        self.finish(run)
        return False

    def put_back(self, batch: Sequence[Run]) -> None:
        """A worker has something more urgent to do than these."""
        for run in reversed(batch):
            self._queue_compute(run, first=True)

    def urgent(self, run: Run) -> bool:
        """Whether a demand waits for a worker, and the job is none."""
        return run.priority != Priority.DEMAND and self.computing.head(Priority.DEMAND) is not None

    def computed(self, run: Run, bad: int, start_ns: int) -> bool:
        """A worker is through with the pass. True: what it made must be written."""
        now = time.monotonic_ns()
        self.compute_s += (now - start_ns) / 1e9
        self._span(TRACK_UPDATE if run.kind == _UPDATE else TRACK_COPY, run, start_ns)
        if bad == PASSED:
            self.counts["updates"] += run.kind == _UPDATE
            self._filled(run)
            if run.place.ranges[WRITE] and self.cancelled:
                run.fail(_CLOSED)
            elif run.place.ranges[WRITE]:
                return True
        elif bad == BAD_PLAN:
            run.fail(checks.FaultRecord(kind=checks.FAULT_PLAN, error=22))
        elif not run.reread and run.place.at[section_of(run, bad)] >= 0 and not self.cancelled:
            # A transfer gone wrong is mended by another one; what lies wrong on the drive is not.
            run.reread = True
            self.counts["rereads"] += 1
            run.place.read_only(run.reads)  # also what was read ahead
            self.queue(run, READ)
            return False
        else:
            self.counts["checksums"] += 1
            run.fail(checksum_fault(run, bad))
        self.finish(run)
        return False

    def write(self, batch: Sequence[Run]) -> None:
        """What workers made goes to the drive."""
        for run in batch:
            self.queue(run, WRITE)

    # ---- ends ----

    def _filled(self, run: Run) -> None:
        if run.filled:
            return
        run.filled = True
        run.submission.unfilled -= 1
        if run.submission.unfilled == 0:
            run.submission.ticket.filled = True
            self.done.notify_all()

    def finish(self, run: Run) -> None:
        """End a job, well or with its fault."""
        if run.kind == AHEAD:
            self.ahead.moved(run)
            return
        submission, chunk = run.submission, run.chunk
        assert run.state != State.DONE
        assert run.lanes is None
        self.active -= run.state != State.WAITING
        self.ahead.unhint(run)
        if run.kind == _UPDATE and run.state == State.STARTING:
            self.ahead.drop(chunk)  # it ends before it takes what was read for it
        self._settle(run)
        run.state = State.DONE
        chunk.rewrites -= run.kind == _REWRITE
        chunk.fifo.remove(run)
        if chunk.fifo:
            self._consider(chunk.fifo[0])
        self.counts["done"] += 1
        if run.fault is not None:
            self._count_fault(run.fault)
            if submission.ticket.fault is None:
                submission.ticket.fault = run.fault
                submission.ticket.failed = True
        self._filled(run)
        self.pending -= 1
        submission.pending -= 1
        if self.active == 0:
            self.gates.idle_since = time.monotonic()
        if submission.pending == 0:
            self.gates.detach(submission)
            submission.ticket.submission = None
            submission.ticket.done = True
        if submission.pending == 0 or self.idle:
            self.done.notify_all()

    def _count_fault(self, fault: checks.FaultRecord) -> None:
        given_up = fault.kind == checks.FAULT_CANCELLED
        self.counts["cancelled" if given_up else "failed"] += 1
        if self.first_fault is None and not given_up and fault.kind != checks.FAULT_CLOSED:
            self.first_fault = fault

    def _settle(self, run: Run) -> None:
        """What the job's end means for its chunk and its slot."""
        chunk, fault = run.chunk, run.fault
        if fault is None:
            chunk.invalid &= ~run.writes  # of an UPDATE only what it was given
            if run.moves:
                python_versions.flip(chunk)
        elif self.kept.keep(run):
            chunk.invalid &= ~run.writes  # nothing of a REWRITE
            return
        elif run.kind in (_STORE, _UPDATE) and fault.kind != checks.FAULT_PLAN:
            # An update that was not done leaves old values, also in sections that were valid.
            chunk.invalid |= run.writes
            if fault.earlier != EARLIER_JOB:
                chunk.fault = fault
        run.place.free()

    # ---- gates, and the end ----

    def open_gate(self, gate: GateState, state: int) -> None:
        """Let a gate's submissions go."""
        self.gates.let_go(gate, state)
        self.pump()

    def escape(self) -> None:
        """All gates escape."""
        self.gates.escape()
        self.pump()

    def _span(self, track: int, run: Run, start_ns: int) -> None:
        if self.spans is None:
            return
        drive = run.chunk.drive if track in (TRACK_READ, TRACK_WRITE) else -1
        if len(self.spans) == SPANS_MAX:
            self.spans_dropped += 1
        self.spans.append(
            (track, drive, run.chunk.index, run.priority, start_ns, time.monotonic_ns(), run.place.bytes)
        )
