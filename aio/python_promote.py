"""What somebody who waits, or no longer wants to, changes about jobs of the Python executor under way. All [locked]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infinity.aio import checks, plan
from infinity.aio.executor import Priority
from infinity.aio.python_records import State, Submission

if TYPE_CHECKING:
    from infinity.aio.python_engine import Engine


def promote(engine: Engine, submission: Submission) -> None:
    """Somebody waits for it: its jobs, and those before them on their chunks, are demands now."""
    for run in submission.runs:
        for before in run.chunk.fifo if run.state != State.DONE else ():
            if before.ahead is not None:
                engine.ahead.promote(before.ahead, Priority.DEMAND)
            lanes = before.lanes
            if lanes is not None and before.priority != Priority.DEMAND:
                lanes.remove(before)
                before.priority = Priority.DEMAND
                lanes.push(before)
            before.priority = Priority.DEMAND
            if before is run:
                break
    for drive in engine.lanes:
        drive.wake.notify()  # what was too many may go now


def cancel(engine: Engine, submission: Submission) -> None:
    """Give up its fetches that no drive has begun."""
    for run in submission.runs:
        queued = run.state == State.READING and run.lanes is not None
        untouched = queued or run.state in (State.WAITING, State.STARTING, State.SLOT)
        if run.kind == plan.JobKind.FETCH and untouched and not run.reread:
            if run.lanes is not None:
                run.lanes.remove(run)
            if run.state == State.STARTING:
                engine.starting.remove(run)
            run.fail(checks.FaultRecord(kind=checks.FAULT_CANCELLED))
            engine.finish(run)
    engine.pump()


def shut_down(engine: Engine, *, cancel: bool) -> None:
    """No more submissions; all gates escape. `cancel`: what has not started fails."""
    engine.shut = True
    engine.cancelled = engine.cancelled or cancel
    engine.escape()
    engine.ahead.drop_all()
    waiting = [engine.computing, *(pool.waiting for pool in engine.pools)]
    waiting += [lanes for drive in engine.lanes for lanes in drive.waiting]
    for lanes in waiting if engine.cancelled else ():
        while lanes:
            run = lanes.pop()
            run.fail(checks.FaultRecord(kind=checks.FAULT_CLOSED))
            engine.finish(run)
    engine.pump()
