"""update_on="device": states stream through the device, which updates them; the same bits as on the CPU.

    opt.step()    chunk k + 3   NVMe or RAM --> window
                  chunk k       kernel: reads the gradient where it waits, in pinned memory
                  chunk k - 3   window --> RAM or NVMe

Returns when the last kernel is launched; what it left is written behind the next forward. All sections of a chunk go over the
link both ways (12 bytes per parameter of `exact`), and the next forward gathers what was written back. As many bytes go through
the CPU's memory as when the CPU updates, so it can pay only where the CPU's cores are slower than its memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from infinity._src.kernels.update import UpdatePlan
from infinity._src.memory.constants import AHEAD_CHUNKS
from infinity._src.memory.device import Device
from infinity._src.optim.step import guard, slot_gradients
from infinity._src.optim.update_jobs import Submission, Work
from infinity._src.optim.update_mode import DeferredUpdate
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Param, Unit
from infinity._src.sizes import round_up
from infinity.aio import JOB, MASK_DEVICE, Executor, GradDtype, JobKind, Priority, Ticket
from infinity.aio._records import GradSection

_ALIGNMENT_BYTES = 256


class _Chunk(NamedTuple):
    """A chunk that a step updates. place: in the plan; start, numel: elements of the shard."""

    flat: Flat
    plan: UpdatePlan
    place: int
    id: int
    start: int
    numel: int
    reads: int  # mask of sections


class _Window:
    """Device memory for one chunk. stored: the write that still reads it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.stored: Ticket | None = None

    def wait(self) -> None:
        """Block until it is free. A write that failed reads it no more; its fault is the pipeline's to raise."""
        if self.stored is not None and not self.stored.failed:
            self.stored.wait_filled()
        self.stored = None


class Together:
    """Several tickets as one (`infinity.aio.Ticket`)."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._tickets = tuple(tickets)

    @property
    def done(self) -> bool:
        """Whether all are."""
        return all(ticket.done for ticket in self._tickets)

    @property
    def filled(self) -> bool:
        """Whether all are."""
        return all(ticket.filled for ticket in self._tickets)

    @property
    def failed(self) -> bool:
        """Whether one is."""
        return any(ticket.failed for ticket in self._tickets)

    def wait(self, timeout: float | None = None) -> None:
        """Block until all are done; `timeout` is for each."""
        for ticket in self._tickets:
            ticket.wait(timeout)

    def wait_filled(self, timeout: float | None = None) -> None:
        """Block until all are filled; `timeout` is for each."""
        for ticket in self._tickets:
            ticket.wait_filled(timeout)

    def cancel(self) -> None:
        """Nothing: updates are never given up."""


class DeviceUpdate(DeferredUpdate):
    """Updates units on the device, in `opt.step()`."""

    def __init__(self, *, rest: StateStore, executor: Executor, device: Device) -> None:
        super().__init__()
        self._rest = rest
        self._executor = executor
        self._device = device
        self._windows: deque[_Window] = deque()

    def backward_begin(self) -> None:
        """Nothing is read ahead: what slots read ahead of an update, windows would read again."""

    def close(self) -> None:
        """Free the windows. Nothing may be pending."""
        self._windows.clear()

    def submit(self, by_unit: dict[Unit, dict[Param, Work]]) -> None:
        self._make_windows([flat for unit in by_unit for flat in unit.flats])
        for unit in self._pipeline.next_order(list(by_unit)):
            work = by_unit[unit]
            self._rest.will_write(unit.flats)
            in_place = self._unsharder.can_update_in_place(unit)
            submission = self._pipeline.plan_of(unit, work, slot_gradients(work))
            stored = list(self._update(self._chunks(unit, submission), in_place=in_place))
            if stored:
                together = Together(stored)
                self._pipeline.pend(together)
                guard(work, together)
            self._unsharder.rewritten(unit, in_place=in_place)

    def _chunks(self, unit: Unit, submission: Submission) -> Iterator[_Chunk]:
        """The chunks of a unit in which a parameter has work, in the order of the shard."""
        for base, flat in enumerate(unit.flats):
            rest = self._rest[flat]
            jobs = submission.jobs[submission.jobs["base"] == base]
            which = np.flatnonzero(jobs["kind"] == JobKind.UPDATE)
            segs = [submission.segs[first : first + count] for first, count in jobs[["seg_first", "seg_count"]][which].tolist()]
            if not segs:
                continue
            plan = UpdatePlan(rest.format, segs, submission.hypers, device=self._device.torch_device)
            states = (1 << rest.format.written_count) - 1
            for index, at in enumerate(which.tolist()):
                spilled = rest.format.grad is not GradSection.NONE and (segs[index]["grad_dtype"] == GradDtype.SECTION).any()
                reads = states | (1 << rest.format.written_count if spilled else 0)
                span = flat.layout.chunks[at]
                yield _Chunk(flat, plan, index, int(rest.ids[at]), span.start, span.numel, reads)

    def _update(self, chunks: Iterator[_Chunk], *, in_place: bool) -> Iterator[Ticket]:
        """Stream chunks through the windows. Yields the tickets of what is written back."""
        coming: deque[tuple[_Chunk, _Window, Ticket]] = deque()
        for chunk in chunks:
            window = self._windows.popleft()
            self._windows.append(window)
            window.wait()
            coming.append((chunk, window, self._move(JobKind.FETCH, chunk, window, chunk.reads)))
            if len(coming) >= AHEAD_CHUNKS:
                yield self._run(*coming.popleft(), in_place=in_place)
        while coming:
            yield self._run(*coming.popleft(), in_place=in_place)

    def _run(self, chunk: _Chunk, window: _Window, fetched: Ticket, *, in_place: bool) -> Ticket:
        """Update a chunk that is there, or will be, and start writing it back. Blocks until it is there."""
        fetched.wait_filled()
        sections = [window.memory[low:high] for low, high in self._bounds(chunk)]
        chunk.plan.run(chunk.place, sections)
        if in_place:
            with torch.no_grad():
                values = sections[0].view(chunk.flat.dtype)
                self._unsharder.shard_of(chunk.flat)[chunk.start : chunk.start + chunk.numel].copy_(values)
        states = (1 << self._rest[chunk.flat].format.written_count) - 1
        window.stored = self._move(JobKind.STORE, chunk, window, states)
        return window.stored

    def _bounds(self, chunk: _Chunk) -> list[tuple[int, int]]:
        """Where each section lies in a window: its first byte, and the one after its last."""
        found, at = [], 0
        for section in self._rest[chunk.flat].sections:
            size_bytes = section.size_bytes(chunk.numel)
            found.append((at, at + size_bytes))
            at += round_up(size_bytes, _ALIGNMENT_BYTES)
        return found

    def _move(self, kind: JobKind, chunk: _Chunk, window: _Window, mask: int) -> Ticket:
        job: Any = np.zeros(1, dtype=JOB)
        job["chunk"], job["kind"], job["base"], job["mask"] = chunk.id, kind, -1, mask | MASK_DEVICE
        for section, (low, _) in enumerate(self._bounds(chunk)):
            if mask >> section & 1:
                job["ptr"][0, section] = window.memory.data_ptr() + low
        self._device.behind()
        priority = Priority.WRITEBACK if kind is JobKind.STORE else Priority.DEMAND
        return self._executor.submit(job, priority=priority)

    def _make_windows(self, flats: Sequence[Flat]) -> None:
        """Windows large enough for a chunk of each of these flats."""
        size_bytes = max((self._window_bytes(flat) for flat in flats), default=0)
        if self._windows and self._windows[0].memory.numel() >= size_bytes:
            return
        for window in self._windows:
            window.wait()
        self._windows = deque(
            _Window(torch.empty(size_bytes, dtype=torch.uint8, device=self._device.torch_device))
            for _ in range(2 * AHEAD_CHUNKS)
        )

    def _window_bytes(self, flat: Flat) -> int:
        numel = max(span.numel for span in flat.layout.chunks)
        return sum(round_up(section.size_bytes(numel), _ALIGNMENT_BYTES) for section in self._rest[flat].sections)


