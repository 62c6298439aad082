"""What the Python executor keeps of chunks, jobs, slots, tickets and gates. Records only; `python_engine.py` moves them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity.aio import checks, plan
from infinity.aio.executor import MASK_MOVE_ONLY, PoolSpec, Priority
from infinity.aio.slab import Slab

GATE_CLOSED, GATE_OPEN, GATE_ESCAPED = 0, 1, 2


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
    bases: list[int] = field(default_factory=list)
    submissions: list[Submission] = field(default_factory=list)


class Chunk:
    """A defined chunk, the FIFO of its jobs, and what is lost of it."""

    def __init__(self, index: int, record: Any) -> None:
        self.index = index
        self.record = record
        self.fifo: deque[Run] = deque()
        self.invalid = 0
        self.fault = checks.FaultRecord(kind=0)


class Run:
    """A job in flight."""

    def __init__(self, submission: Submission, chunk: Chunk, job: Any, priority: int) -> None:
        self.submission = submission
        self.chunk = chunk
        self.kind = int(job["kind"])
        all_sections = (1 << int(chunk.record["section_count"])) - 1
        self.mask = all_sections if self.kind == plan.JobKind.UPDATE else int(job["mask"]) & all_sections
        self.move_only = bool(int(job["mask"]) & MASK_MOVE_ONLY)
        self.base = int(job["base"])
        self.segs = slice(int(job["seg_first"]), int(job["seg_first"]) + int(job["seg_count"]))
        self.ptr = [int(address) for address in job["ptr"]]
        self.priority = priority
        self.started = False
        self.done = False
        self.filled = False
        self.fault: checks.FaultRecord | None = None
        self.pool: Pool | None = None
        self.slot = -1
        self.slot_at = [-1] * plan.SECTION_MAX
        self.ranges: list[tuple[int, int, int]] = []  # file offset, offset in the slot, bytes
        self._lay_out()

    def _lay_out(self) -> None:
        record = self.chunk.record
        at = 0
        for section in range(int(record["section_count"])):
            section_at = int(record["section_at"][section])
            if not self.mask >> section & 1 or section_at < 0:
                continue
            size = checks.align_up(int(record["numel"]) * int(record["itemsize"][section]))
            file_at = int(record["file_offset"]) + section_at
            self.slot_at[section] = at
            if self.ranges and sum(self.ranges[-1][::2]) == file_at:
                first = self.ranges[-1]
                self.ranges[-1] = (first[0], first[1], first[2] + size)
            else:
                self.ranges.append((file_at, at, size))
            at += size
        self.bytes = at

    def fail(self, record: checks.FaultRecord) -> None:
        """Keep the first fault: later ones are its consequences."""
        if self.fault is None:
            key, drive = int(self.chunk.record["key"]), int(self.chunk.record["drive"])
            self.fault = replace(record, key=key, drive=drive, chunk=self.chunk.index)


class Submission:
    """One call of submit."""

    def __init__(self, ticket: TicketState, gate: GateState | None, order: int) -> None:
        self.ticket = ticket
        self.gate = gate
        self.order = order
        self.runs: list[Run] = []
        self.segs: npt.NDArray[np.void] = np.zeros(0, dtype=plan.SEG)
        self.hypers: npt.NDArray[np.void] = np.zeros(0, dtype=plan.HYPER)
        self.pending = 0
        self.unfilled = 0
        self.escaped = False


class Pool:
    """Slots of one size, and the jobs that wait for one."""

    def __init__(self, spec: PoolSpec, slab: Slab | None, offset: int) -> None:
        self.spec = spec
        self.free = list(range(spec.count))
        self.waiting: list[deque[Run]] = [deque() for _ in Priority]
        self._slab = slab
        self._offset = offset

    def slot(self, index: int) -> npt.NDArray[np.uint8]:
        """The memory of a slot."""
        assert self._slab is not None
        return self._slab.array(
            np.uint8, offset=self._offset + index * self.spec.bytes, count=self.spec.bytes
        )
