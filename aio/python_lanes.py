"""Which requests go to a drive of the Python executor next: the shares of reads, writes and demands. All [locked]."""

from __future__ import annotations

import threading

from infinity.aio.executor import Priority
from infinity.aio.python_records import FAIR_TURN, READ, WRITE, Lanes, Run
from infinity.aio.python_transfer import BLOCK_BYTES, PARTS_MAX, neighbours


class DriveLanes:
    """Jobs that wait for a drive, and the requests in flight there: at most one for each of its `depth` threads.

    - Reads and writes have half of the threads each while both want them, so both always progress.
    - A quarter of the threads takes nothing but demands: a demand finds one free, however much else is queued.
    - Of the reads, and of the writes, one request in FAIR_TURN is for the job that came first of all priorities.
    """

    def __init__(self, depth: int, lock: threading.RLock) -> None:
        self.wake = threading.Condition(lock)
        self.depth = depth
        self.waiting = (Lanes(), Lanes())
        self._others_max = depth - -(-depth // 4) if depth > 1 else 1
        self._in_flight = [0, 0]
        self._demands = 0
        self._last = WRITE
        self._turns = [0, 0]

    def push(self, op: int, run: Run) -> None:
        """A job wants to be read or written."""
        self.waiting[op].push(run)
        if self._choose() is not None:
            self.wake.notify()

    def _share(self, op: int) -> int:
        """How many requests of a kind may be in flight."""
        if not self.waiting[1 - op] and not self._in_flight[1 - op]:
            return self.depth
        writes = max(1, self.depth // 2)
        return writes if op == WRITE else max(1, self.depth - writes)

    def _next(self, op: int) -> tuple[Run | None, bool]:
        """The job whose turn it is, and whether that is a fair turn."""
        lanes = self.waiting[op]
        if (self._turns[op] + 1) % FAIR_TURN:
            return lanes.head(), False
        heads = [head for priority in Priority if (head := lanes.head(priority)) is not None]
        if not heads:
            return lanes.head(), False  # reads ahead have no fair turns
        return min(heads, key=lambda run: run.arrival), True

    def _may_send(self, op: int) -> bool:
        head, fair = self._next(op)
        if head is None or sum(self._in_flight) >= self.depth:
            return False
        if op == READ and head.priority == Priority.DEMAND:
            return self._demands < self._share(READ)  # not held up by reads that are less urgent
        others = sum(self._in_flight) - self._demands
        return self._in_flight[op] < self._share(op) and (fair or others < self._others_max)

    def _choose(self) -> int | None:
        """The operation whose turn it is."""
        read, write = self._may_send(READ), self._may_send(WRITE)
        if not (read and write):
            return READ if read else WRITE if write else None
        head, _ = self._next(READ)
        if self.depth > 1 and head is not None and head.priority == Priority.DEMAND:
            return READ  # writes have their half all the same
        if self._in_flight[READ] != self._in_flight[WRITE]:
            return READ if self._in_flight[READ] < self._in_flight[WRITE] else WRITE
        return 1 - self._last

    def take(self) -> tuple[int, int, list[Run]] | None:
        """The next jobs that one request can serve: operation, priority, jobs. `end` must follow."""
        op = self._choose()
        if op is None:
            return None
        lanes = self.waiting[op]
        first, _ = self._next(op)
        assert first is not None
        self._turns[op] += 1
        batch = [lanes.pop(first.priority)]
        priority, size = batch[0].priority, batch[0].place.moved_bytes(op)
        while (run := lanes.head(priority)) is not None and len(batch) < PARTS_MAX:
            size += run.place.moved_bytes(op)
            if size > BLOCK_BYTES or not neighbours(batch[-1], run, op):
                break
            batch.append(lanes.pop(priority))
        self._last = op
        self._in_flight[op] += 1
        self._demands += self._is_demand(op, priority)
        if self._choose() is not None:
            self.wake.notify()
        return op, priority, batch

    def end(self, op: int, priority: int) -> None:
        """A batch of `take` is through; its jobs may have another priority by now."""
        self._in_flight[op] -= 1
        self._demands -= self._is_demand(op, priority)
        if self._choose() is not None:
            self.wake.notify()

    @staticmethod
    def _is_demand(op: int, priority: int) -> int:
        return int(op == READ and priority == Priority.DEMAND)
