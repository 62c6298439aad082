"""Reads ahead of the Python executor: slots that are idle fill with what UPDATEs will need. All [locked].

    behind a closed gate    an UPDATE that is first in its FIFO is *hinted*: it only waits for its gate
    asked for               `Executor.preread` names chunks whose UPDATEs were not submitted yet

The rules are those of native/executor_ahead.c. What was read stays in the slot, of the chunk, until its UPDATE takes the slot
over: jobs have the quarter that is left to them, and no byte is read twice. Nothing is verified before the UPDATE does it, and
a read ahead that fails is as if it had never been: the UPDATE reads, and tells.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

import numpy as np

from infinity.aio import checks, plan
from infinity.aio.python_records import (
    AHEAD,
    AHEAD_CLASS,
    READ,
    Ahead,
    Chunk,
    Place,
    Pool,
    Run,
    State,
    Submission,
    TicketState,
)

if TYPE_CHECKING:
    from infinity.aio.python_engine import Engine

_WANTED, _READING, _HELD = 0, 1, 2


def _everything(chunk: Chunk) -> int:
    return (1 << int(chunk.record["section_count"])) - 1


def _on_drive(chunk: Chunk, mask: int) -> int:
    """Of sections, those that are not resident."""
    return sum(1 << s for s in range(plan.SECTION_MAX) if mask >> s & 1 and chunk.record["section_at"][s] >= 0)


def _gated(chunk: Chunk) -> Run | None:
    """The UPDATE that is first in the chunk's FIFO and waits at a gate."""
    head = chunk.fifo[0] if chunk.fifo else None
    waits = head is not None and head.kind == plan.JobKind.UPDATE and head.state == State.WAITING
    return head if waits else None


def _key(run: Run) -> tuple[int, int]:
    gate = run.submission.gate
    assert gate is not None
    return gate.order, run.number


class ReadsAhead:
    """The reads ahead of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._hints: list[Run] = []  # by gate, then in order
        self._wanted: list[Ahead] = []  # asked for, without a slot
        self._with_slot: list[Ahead] = []  # oldest first
        self.reading = 0  # of these, how many a drive works on
        self.begun = self.dropped = 0

    @property
    def live(self) -> int:
        """Slots that hold a read ahead which no job has taken over."""
        return len(self._with_slot)

    # ---- what may be read next ----

    def hint(self, run: Run) -> None:
        """An UPDATE, first in its FIFO, waits at a closed gate."""
        chunk = run.chunk
        if run.hinted or run.unlucky or self._engine.shut or chunk.kept is not None:
            return
        if chunk.ahead is not None and chunk.ahead.state != _WANTED:
            return  # that is for it
        if not _on_drive(chunk, run.reads):
            return
        if chunk.ahead is not None:
            self._free(chunk.ahead)
        self._insert(run)

    def _insert(self, run: Run) -> None:
        run.hinted = True
        bisect.insort(self._hints, run, key=_key)

    def unhint(self, run: Run) -> None:
        """Its gate is closed no more, or it is no more the first."""
        if run.hinted:
            run.hinted = False
            del self._hints[bisect.bisect_left(self._hints, _key(run), key=_key)]

    def want(self, chunk: Chunk, *, given: bool) -> bool:
        """Somebody asks for a chunk. False: it is one too many."""
        everything = _everything(chunk)
        written = (1 << plan.Format.of(chunk.record["format"]).written_count) - 1
        have = _on_drive(chunk, everything & written & ~int(given))
        if chunk.ahead is not None or _gated(chunk) is not None or not have:
            return True
        size = checks.slot_bytes(chunk.record, plan.JobKind.UPDATE, 0)
        fitting = [pool for pool in self._engine.pools if pool.spec.count and size <= pool.spec.bytes]
        if not fitting or fitting[0].asked >= fitting[0].ahead_max:
            return False
        self._wanted.append(self._new(chunk, fitting[0], have, asked=True))
        return True

    def _new(self, chunk: Chunk, pool: Pool, have: int, *, asked: bool) -> Ahead:
        job = np.zeros(1, dtype=plan.JOB)[0]
        job["kind"], job["base"] = AHEAD, -1
        run = Run(Submission(TicketState(), None), chunk, job, AHEAD_CLASS)
        ahead = Ahead(run, pool, chunk, have, asked)
        run.ahead = ahead
        pool.asked += asked
        chunk.ahead = ahead
        return ahead

    def _free(self, ahead: Ahead) -> None:
        (self._wanted if ahead.state == _WANTED else self._with_slot).remove(ahead)
        ahead.pool.asked -= ahead.asked
        if ahead.chunk is not None:
            ahead.chunk.ahead = None
        ahead.run.ahead = None

    # ---- reading ----

    def begin(self) -> None:
        """Read ahead as far as slots are idle."""
        if self._engine.shut:
            return
        while self._hints and self._begin_hinted(self._hints[0]):
            continue
        if self._hints:
            return  # the order of gates is kept, whatever pool or drive a job wants
        for ahead in list(self._wanted):
            chunk = ahead.chunk
            assert chunk is not None
            if not chunk.fifo and chunk.kept is None and ahead.pool.may_read_ahead(chunk.drive):
                self._wanted.remove(ahead)
                self._begin(ahead)

    def _begin_hinted(self, run: Run) -> bool:
        chunk = run.chunk
        if chunk.fifo[0] is not run or chunk.kept is not None:
            self.unhint(run)  # what goes before it will consider it again
            return True
        pool = self._engine.pool_for(Place(chunk.record, run.mask, 0, 0).bytes)
        if not pool.may_read_ahead(chunk.drive):
            return False
        self.unhint(run)
        self._begin(self._new(chunk, pool, _on_drive(chunk, run.reads), asked=False))
        return True

    def _begin(self, ahead: Ahead) -> None:
        run = ahead.run
        run.place = Place(run.chunk.record, _everything(run.chunk), ahead.have, 0)
        run.priority, run.fault = AHEAD_CLASS, None
        ahead.pool.take(run.place, run.chunk.drive)
        ahead.state = _READING
        self._with_slot.append(ahead)
        self.reading += 1
        self.begun += 1
        self._engine.queue(run, READ)

    def promote(self, ahead: Ahead, priority: int) -> None:
        """Somebody waits for it."""
        run = ahead.run
        if ahead.state == _READING and run.priority > priority:
            lanes = run.lanes
            if lanes is not None:
                lanes.remove(run)
            run.priority = priority
            if lanes is not None:
                self._engine.lanes[run.chunk.drive].push(READ, run)

    def _read_ended(self) -> None:
        self.reading -= 1
        if self._engine.idle:
            self._engine.done.notify_all()

    def _unread(self, ahead: Ahead) -> bool:
        """Take a read back that the drive has not begun."""
        run = ahead.run
        if ahead.state != _READING or run.lanes is None:
            return False
        run.lanes.remove(run)
        self._read_ended()
        return True

    def _let_slot_go(self, ahead: Ahead) -> None:
        ahead.run.place.free()
        self.dropped += 1

    # ---- ends ----

    def give_up(self, pool: Pool) -> bool:
        """A job waits for a slot: give up the youngest that would help. False: there is none."""
        for ahead in reversed(self._with_slot):
            chunk = ahead.chunk
            if ahead.pool is not pool or chunk is None or ahead.taker is not None or not pool.lacks(chunk.drive):
                continue
            if ahead.state == _READING and not self._unread(ahead):
                continue
            if ahead.state == _HELD and self._jobs_go_on(pool, chunk.drive):
                continue
            self._let_slot_go(ahead)
            head = _gated(chunk)
            if ahead.asked and head is None:
                self._with_slot.remove(ahead)
                ahead.state = _WANTED
                self._wanted.insert(0, ahead)
            else:
                self._free(ahead)
                if head is not None and not head.unlucky:
                    self._insert(head)
            return True
        return False

    def _jobs_go_on(self, pool: Pool, drive: int) -> bool:
        """Whether jobs hold the slots that are left to them, of all or, while only this drive has its share, of the drive: then
        they go on with those, and nothing is read twice."""
        here = [ahead for ahead in self._with_slot if ahead.pool is pool and (not pool.free or ahead.run.chunk.drive == drive)]
        return pool.taken(drive if pool.free else None) - len(here) >= pool.spared

    def _give_over(self, ahead: Ahead, run: Run) -> None:
        """The UPDATE has the slot from now on, and reads what is not in it."""
        place = ahead.run.place
        assert place.at == run.place.at
        run.place.read_only(run.reads & ~ahead.have)
        run.place.pool, run.place.index = place.pool, place.index
        place.pool = None
        self._free(ahead)
        self._engine.go_on(run)

    def take(self, run: Run) -> bool:
        """An UPDATE begins. True: it goes on with what was read for it."""
        ahead = run.chunk.ahead
        if ahead is None:
            return False
        if ahead.state == _WANTED:
            self._free(ahead)
            return False
        if self._unread(ahead):
            ahead.have = 0
            self._give_over(ahead, run)
        elif ahead.state == _HELD:
            self._give_over(ahead, run)
        else:
            ahead.taker = run
            run.ahead = ahead
            run.state = State.READING
            self.promote(ahead, run.priority)
        return True

    def moved(self, run: Run) -> None:
        """A drive is through with a read ahead, or the executor is."""
        ahead = run.ahead
        assert ahead is not None
        self._read_ended()
        if ahead.taker is not None:
            self._taker_goes_on(ahead, ahead.taker)
        elif run.fault is not None or ahead.chunk is None:
            head = _gated(ahead.chunk) if ahead.chunk is not None else None
            if head is not None:
                head.unlucky = True
            self._let_slot_go(ahead)
            self._free(ahead)
        else:
            ahead.state = _HELD

    def _taker_goes_on(self, ahead: Ahead, taker: Run) -> None:
        ahead.taker = taker.ahead = None
        engine = self._engine
        if engine.cancelled:
            taker.fail(checks.FaultRecord(kind=checks.FAULT_CLOSED))
        if taker.fault is None and ahead.run.fault is None and not engine.kept.refuses(taker):
            self._give_over(ahead, taker)
            return
        self._let_slot_go(ahead)
        self._free(ahead)
        if taker.fault is not None:
            engine.finish(taker)
        else:
            engine.want_slot(taker)

    def written(self, chunk: Chunk, mask: int) -> None:
        """These sections will be other than what was read."""
        if chunk.ahead is not None and mask:
            chunk.ahead.have &= ~mask
            if not chunk.ahead.have:
                self.drop(chunk)

    def drop(self, chunk: Chunk) -> None:
        """Nobody wants it any more."""
        ahead = chunk.ahead
        if ahead is None:
            return
        assert ahead.taker is None
        if ahead.state == _READING and not self._unread(ahead):
            ahead.chunk = chunk.ahead = None  # its slot is free when the drive is through
            return
        if ahead.state != _WANTED:
            self._let_slot_go(ahead)
        self._free(ahead)

    def drop_all(self) -> None:
        """What no job has taken over yet, none will."""
        for ahead in [*self._wanted, *self._with_slot]:
            if ahead.chunk is not None and ahead.taker is None:
                self.drop(ahead.chunk)
