"""What the Python executor keeps of chunks, jobs, slots, tickets and gates. Records only; `python_engine.py` moves them."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity.aio import checks, plan
from infinity.aio.executor import MASK_GIVEN, MASK_MOVE_ONLY, PoolSpec, Priority
from infinity.aio.slab import Slab
from infinity.errors import AioError

GATE_CLOSED, GATE_OPEN, GATE_ESCAPED = 0, 1, 2
FAULT_BROKEN = -1
#: Of slots and workers' turns one in so many goes to who waited longest, whatever its priority: so that all progress.
FAIR_TURN = 8
#: The kind of a read ahead's own job, which nobody submits, and its place at a drive: after every priority.
AHEAD = 5
AHEAD_CLASS = len(Priority)
READ, WRITE = 0, 1


class State(IntEnum):
    """Where a job is. It stands in at most one `Lanes` at a time, beside the FIFO of its chunk."""

    WAITING = 0
    """Behind another job of its chunk, or behind a gate."""
    STARTING = 1
    SLOT = 2
    READING = 3
    COMPUTING = 4
    WRITING = 5
    DONE = 6


@dataclass(frozen=True)
class BrokenRecord(checks.FaultRecord):
    """A job that an exception ended: of the update kernel, or of our own making."""

    cause: BaseException | None = None

    def to_error(self, paths: Sequence[str]) -> AioError:
        """An AioError whose cause is the exception."""
        op = checks.OP_NAMES[self.op]
        where = (
            f" in the {op} of {self.length} bytes at offset {self.offset} of {paths[self.drive]!r}"
            if op
            else ""
        )
        earlier = " (in an earlier job)" if self.earlier else ""
        error = AioError(
            f"chunk {self.chunk} (key {self.key:#x}): {type(self.cause).__name__}: {self.cause}{where}{earlier}",
        )
        error.__cause__ = self.cause
        return error


@dataclass(eq=False)
class TicketState:
    """What a ticket tells; set under the engine's lock, read without it."""

    done: bool = False
    filled: bool = False
    failed: bool = False
    fault: checks.FaultRecord | None = None
    submission: Submission | None = None


@dataclass(eq=False)
class GateState:
    """A gate and the submissions that it holds."""

    state: int = GATE_CLOSED
    order: int = 0
    """Of the first submission that it held."""
    bases: list[int] = field(default_factory=list)
    submissions: list[Submission] = field(default_factory=list)


class Place:
    """A slot, and which bytes of a chunk's run it holds. Without `pool`: what it would hold.

    `mask`: the sections in it, of which some are read into it, some written from it. Ranges are (file offset, offset in the
    slot, bytes, file); of what is read, and of what is written, sections that lie together are one range. moves: written to the
    chunk's other place.
    """

    def __init__(self, record: Any, mask: int, reads: int, writes: int, *, moves: bool = False) -> None:
        self.pool: Pool | None = None
        self.index = -1
        self.at = [-1] * plan.SECTION_MAX
        self.bytes = 0
        self.writes = 0
        self._sizes = [0] * plan.SECTION_MAX
        self._record = record
        for section in range(int(record["section_count"])):
            if not mask >> section & 1 or int(record["section_at"][section]) < 0:
                continue
            self._sizes[section] = checks.align_up(checks.section_bytes(record, section))
            self.at[section] = self.bytes
            self.bytes += self._sizes[section]
            self.writes |= writes & 1 << section
        self.ranges = [self._ranges(reads), self._ranges(writes, other=moves)]

    def _ranges(self, mask: int, *, other: bool = False) -> list[tuple[int, int, int, int]]:
        ranges: list[tuple[int, int, int, int]] = []
        for section, slot_at in enumerate(self.at):
            if not mask >> section & 1 or slot_at < 0:
                continue
            file_at = checks.section_file_at(self._record, section, other=other)
            file = checks.section_file(self._record, section, other=other)
            last = ranges[-1] if ranges else (-1, -1, 0, -1)
            if last[0] + last[2] == file_at and last[1] + last[2] == slot_at and last[3] == file:
                ranges[-1] = (last[0], last[1], last[2] + self._sizes[section], file)
            else:
                ranges.append((file_at, slot_at, self._sizes[section], file))
        return ranges

    def read_only(self, mask: int) -> None:
        """What the next read brings into it."""
        self.ranges[READ] = self._ranges(mask)

    def moved_bytes(self, op: int) -> int:
        """Bytes that a read into it, or a write from it, moves."""
        return sum(size for _, _, size, _ in self.ranges[op])

    def memory(self) -> npt.NDArray[np.uint8]:
        """The memory of the slot."""
        assert self.pool is not None
        return self.pool.slot(self.index)

    def section(self, section: int) -> npt.NDArray[np.uint8] | None:
        """The slot's memory from a section on; None for a section that is not in it."""
        return self.memory()[self.at[section] :] if self.at[section] >= 0 else None

    def free(self) -> None:
        """Give the slot back. [locked]"""
        if self.pool is not None:
            self.pool.take_back(self.index)
            self.pool = None


class Chunk:
    """A defined chunk, the FIFO of its jobs, what is kept and what is lost of it."""

    def __init__(self, index: int, record: Any) -> None:
        self.index = index
        self.record = record
        self.drive = int(record["drive"])
        self.fifo: deque[Run] = deque()
        self.kept: Place | None = None
        """Of a write that failed: the only copy of its sections."""
        self.rewrites = 0
        """REWRITE jobs in the FIFO."""
        self.invalid = 0
        self.fault = checks.FaultRecord(kind=0)
        """Why sections are invalid."""
        self.verified = 0
        """Counts runs that were verified: the phase of samples."""
        self.ahead: Ahead | None = None
        """What was, or will be, read for its next UPDATE."""
        self.live = 0
        """A `python_versions.Live`."""
        self.committed = (0, self.fault)
        """What was invalid when it was committed, and why."""


class Run:
    """A job in flight."""

    def __init__(self, submission: Submission, chunk: Chunk, job: Any, priority: int) -> None:
        self.submission = submission
        self.chunk = chunk
        self.kind = int(job["kind"])
        self.mask, self.reads, self.writes = _sections(chunk.record, job, submission.segs)
        self.given = self.kind == plan.JobKind.UPDATE and not self.reads & 1
        self.move_only = bool(int(job["mask"]) & MASK_MOVE_ONLY)
        self.base = int(job["base"])
        self.segs = slice(int(job["seg_first"]), int(job["seg_first"]) + int(job["seg_count"]))
        self.ptr = [int(address) for address in job["ptr"]]
        self.priority = priority
        self.state = State.WAITING
        self.lanes: Lanes | None = None
        self.arrival = 0
        """When it came to its lanes, counted there."""
        self.moves = False
        """It writes the chunk's other place."""
        self.filled = False
        self.reread = False
        self.phase = 0
        self.fault: checks.FaultRecord | None = None
        self.place = _NOWHERE
        self.number = 0
        """Counts jobs as they come."""
        self.hinted = False
        """It stands at a closed gate, and wants to be read ahead."""
        self.unlucky = False
        """Its read ahead failed: it reads for itself."""
        self.ahead: Ahead | None = None
        """Whose read it waits for."""

    def fail(self, record: checks.FaultRecord) -> None:
        """Keep the first fault: later ones are its consequences."""
        if self.fault is None:
            key, drive = int(self.chunk.record["key"]), self.chunk.drive
            self.fault = replace(record, key=key, drive=drive, chunk=self.chunk.index)


def _sections(record: Any, job: Any, segs: npt.NDArray[np.void]) -> tuple[int, int, int]:
    """Masks of a job's sections: those in its slot, those it takes from the chunk, those it writes.

    An UPDATE does not look at a section that it is given (a resident one is as good), nor at spilled gradients when no
    segment of it has its there.
    """
    kind, count = int(job["kind"]), int(record["section_count"])
    everything = (1 << count) - 1
    mask = int(job["mask"])
    if kind == plan.JobKind.UPDATE:
        written = (1 << plan.Format.of(record["format"]).written_count) - 1
        reads = written
        if mask & MASK_GIVEN and record["section_at"][0] >= 0:
            reads &= ~1
        own = segs[int(job["seg_first"]) : int(job["seg_first"]) + int(job["seg_count"])]
        if (own["grad_dtype"] == plan.GradDtype.SECTION).any():
            reads = reads | (everything & ~written)
        return everything, reads, written
    mask &= everything
    return mask, mask if kind == plan.JobKind.FETCH else 0, mask if kind == plan.JobKind.STORE else 0


@dataclass(eq=False)
class Ahead:
    """A read ahead of an UPDATE: see `python_ahead.py`."""

    run: Run
    """What a drive moves. It is in no FIFO."""
    pool: Pool
    chunk: Chunk | None
    """None: nobody wants what is being read any more."""
    have: int
    """Sections that it reads, or has, as they are on the drive."""
    asked: bool
    """By `Executor.preread`, not for a job at a gate."""
    state: int = 0
    taker: Run | None = None
    """The UPDATE that waits for the read."""


class Submission:
    """One call of submit."""

    def __init__(self, ticket: TicketState, gate: GateState | None) -> None:
        self.ticket = ticket
        self.gate = gate
        self.order = 0
        self.runs: list[Run] = []
        self.segs: npt.NDArray[np.void] = np.zeros(0, dtype=plan.SEG)
        self.hypers: npt.NDArray[np.void] = np.zeros(0, dtype=plan.HYPER)
        self.pending = 0
        self.unfilled = 0
        self.escaped = False


class Lanes:
    """Jobs that wait for one thing: by priority, then in order."""

    def __init__(self, drive_count: int = 1) -> None:
        self._lanes: tuple[OrderedDict[Run, None], ...] = tuple(
            OrderedDict() for _ in range(AHEAD_CLASS + 1)
        )
        self._arrivals = 0
        self._passed = [0] * max(drive_count, 1)  # grants since each drive had its fair turn

    def __len__(self) -> int:
        return sum(map(len, self._lanes))

    def __iter__(self) -> Iterator[Run]:
        return itertools.chain.from_iterable(self._lanes)

    def push(self, run: Run, *, first: bool = False) -> None:
        """Put a job at the end of its lane, or back to its head as if it had never left."""
        assert run.lanes is None
        run.lanes = self
        if not first:
            self._arrivals += 1
            run.arrival = self._arrivals
        self._lanes[run.priority][run] = None
        if first:
            self._lanes[run.priority].move_to_end(run, last=False)

    def head(self, priority: int | None = None) -> Run | None:
        """The job whose turn it is, of all or of one priority."""
        for lane in self._lanes if priority is None else (self._lanes[priority],):
            for run in lane:
                return run
        return None

    def pop(self, priority: int | None = None) -> Run:
        """Take `head` out."""
        run = self.head(priority)
        assert run is not None
        self.remove(run)
        return run

    def grant(self, may: Callable[[Run], bool] = lambda _: True) -> Run | None:
        """Take out whose turn it is, of those that may: as `head`, but one time in FAIR_TURN who waited longest of all.

        Drives have their fair turns each for itself: of drives that take turns, one would else have all of them.
        """
        owed = FAIR_TURN * len(self._passed) - 1
        chosen: Run | None = None
        if max(self._passed) >= owed:
            fair = [
                next((run for run in lane if self._passed_by(run) >= owed and may(run)), None)
                for lane in self._lanes
            ]
            chosen = min(filter(None, fair), key=lambda run: run.arrival, default=None)
        if chosen is not None:
            self._passed[chosen.chunk.drive % len(self._passed)] = -1
        else:
            chosen = next((run for lane in self._lanes for run in lane if may(run)), None)
        if chosen is not None:
            self._passed = [count + 1 for count in self._passed]
            self.remove(chosen)
        return chosen

    def _passed_by(self, run: Run) -> int:
        return self._passed[run.chunk.drive % len(self._passed)]

    def remove(self, run: Run) -> None:
        """Take a job out that is in."""
        del self._lanes[run.priority][run]
        run.lanes = None


class Pool:
    """Slots of one size, and the jobs that wait for one.

    No drive may hold so many that another finds none: a slow one, whose jobs hold theirs for long, would in the end hold
    all of them and stop the fast ones.
    """

    def __init__(self, spec: PoolSpec, slab: Slab | None, offset: int, drive_count: int) -> None:
        self.spec = spec
        self.free = list(range(spec.count))
        self.waiting = Lanes(drive_count)
        self._drives: dict[int, int] = {}  # slot -> drive, of those that go round
        self._held = [0] * max(drive_count, 1)
        self._kept = 0
        self.asked = 0
        """Reads ahead that somebody asked for."""
        self._slab = slab
        self._offset = offset

    def _held_max(self) -> int:
        count, drives = self.spec.count - self._kept, len(self._held)
        if drives < 2 or count < drives:
            return count
        return count - max(count // (2 * drives), 1) * (drives - 1)

    def next_run(self) -> Run | None:
        """Whose turn it is (`Lanes.grant`). It has its slot; None: nobody's turn."""
        if not self.free:
            return None
        held_max = self._held_max()
        run = self.waiting.grant(lambda run: self._held[run.chunk.drive] < held_max)
        if run is None:
            return None
        self.take(run.place, run.chunk.drive)
        return run

    def take(self, place: Place, drive: int) -> None:
        """Take a free slot."""
        place.pool, place.index = self, self.free.pop()
        self._hold(place.index, drive)

    def taken(self, drive: int | None) -> int:
        """How many slots somebody has, those of a drive or of all."""
        return sum(self._held) if drive is None else self._held[drive]

    @property
    def spared(self) -> int:
        """How many slots no read ahead takes: a quarter, which is left to others."""
        return max(1, -(-(self.spec.count - self._kept) // 4))

    @property
    def ahead_max(self) -> int:
        """How many slots may read ahead."""
        return self.spec.count - self._kept - self.spared

    def may_read_ahead(self, drive: int) -> bool:
        """Whether a slot is idle: nobody waits for one, and enough are left for who comes."""
        return not self.waiting and len(self.free) > self.spared and self._held[drive] < self._held_max()

    def lacks(self, drive: int) -> bool:
        """Whether a slot of that drive is one that somebody who waits could have."""
        return not self.free or any(run.chunk.drive == drive for run in self.waiting)

    def _hold(self, index: int, drive: int) -> None:
        self._drives[index] = drive
        self._held[drive] += 1

    def take_back(self, index: int) -> None:
        """A slot is free again."""
        self._held[self._drives.pop(index)] -= 1
        self.free.append(index)

    def put_by(self, index: int) -> None:
        """A chunk keeps the slot: it goes round no more ..."""
        self._held[self._drives.pop(index)] -= 1
        self._kept += 1

    def put_back(self, index: int, drive: int) -> None:
        """... and again."""
        self._kept -= 1
        self._hold(index, drive)

    def slot(self, index: int) -> npt.NDArray[np.uint8]:
        """The memory of a slot."""
        assert self._slab is not None
        return self._slab.array(
            np.uint8, offset=self._offset + index * self.spec.bytes, count=self.spec.bytes
        )


_NOWHERE = Place(np.zeros(1, dtype=plan.CHUNK)[0], 0, 0, 0)
