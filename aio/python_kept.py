"""After a write of the Python executor failed: its slot is kept, its drive marked. All [locked].

The slot of a write that failed holds the only copy of what it should have written: an update has no way back, and the
range on the drive may be torn. So the chunk keeps the slot, fetches are served from it, and the drive takes no further
writes until somebody says that the cause is mended (`Executor.recover`).

While a chunk keeps something its drive is marked, or a REWRITE goes before all that writes it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from infinity.aio import checks, plan, python_versions
from infinity.aio.executor import Priority
from infinity.aio.python_records import WRITE, Chunk, Pool, Run, State, Submission, TicketState

JOB_OWN, EARLIER_JOB, EARLIER_MARK = 0, 1, 2


class Kept:
    """The chunks that keep a slot, and the marks of the drives (what failed there first)."""

    def __init__(self, drive_count: int) -> None:
        self.chunks: dict[int, Chunk] = {}
        self.marks: list[checks.FaultRecord | None] = [None] * drive_count

    def keep(self, run: Run) -> bool:
        """After a job has failed: keep its slot and mark its drive if it was the write that failed."""
        assert run.fault is not None
        rewrite = run.kind == plan.JobKind.REWRITE
        closed = run.fault.kind == checks.FAULT_CLOSED
        if run.state != State.WRITING or run.place.pool is None or (closed and not rewrite):
            return False
        if run.move_only:
            return False  # a measurement: the slot holds nothing that is missed
        chunk = run.chunk
        assert chunk.kept is None
        if run.moves:
            python_versions.flip(chunk)
        chunk.kept = run.place
        run.place.pool.put_by(run.place.index)
        self.chunks[chunk.index] = chunk
        if not closed and self.marks[chunk.drive] is None:
            self.marks[chunk.drive] = run.fault
        return True

    def take(self, chunk: Chunk) -> None:
        """The chunk keeps its slot no more; who calls has it now."""
        assert chunk.kept is not None
        assert chunk.kept.pool is not None
        chunk.kept.pool.put_back(chunk.kept.index, chunk.drive)
        chunk.kept = None
        del self.chunks[chunk.index]

    def drop(self, chunk: Chunk) -> None:
        """The chunk is forgotten, and what it keeps."""
        if chunk.kept is not None:
            place = chunk.kept
            self.take(chunk)
            place.free()

    def refuses(self, run: Run) -> bool:
        """Whether the job may not write, because its drive is marked; then it has failed."""
        if run.kind not in (plan.JobKind.STORE, plan.JobKind.UPDATE) or not run.place.ranges[WRITE]:
            return False
        mark = self.marks[run.chunk.drive]
        if mark is None:
            return False
        run.fault = replace(mark, earlier=EARLIER_MARK)
        return True

    def is_stuck(self, pool: Pool) -> bool:
        """Whether chunks keep all of the pool's slots, and no REWRITE is about to free one."""
        if len(self.chunks) < pool.spec.count:
            return False
        stuck = 0
        for chunk in self.chunks.values():
            # A REWRITE behind a job that waits for a slot itself will not help.
            helped = chunk.rewrites and chunk.fifo[0].state != State.SLOT
            stuck += chunk.kept is not None and chunk.kept.pool is pool and not helped
        return stuck >= pool.spec.count

    def unmark(self, ticket: TicketState) -> Submission:
        """Take the marks off all drives; returns the jobs that write again what is kept, entered into their FIFOs.

        They go before jobs that have not started: those may depend on gates, and none of them may write first.
        """
        self.marks = [None] * len(self.marks)
        submission = Submission(ticket, None)
        for chunk in self.chunks.values():
            job = np.zeros(1, dtype=plan.JOB)[0]
            job["chunk"], job["kind"], job["base"] = chunk.index, plan.JobKind.REWRITE, -1
            run = Run(submission, chunk, job, Priority.DEMAND)
            started = bool(chunk.fifo) and chunk.fifo[0].state != State.WAITING
            chunk.fifo.insert(int(started), run)
            chunk.rewrites += 1
            submission.runs.append(run)
        return submission
