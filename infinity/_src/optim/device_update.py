"""Updates on the device (update_on="device"): the states stream through windows of device memory,
and the results are bit for bit those of an update on the CPU.

    opt.step()    chunk k + 3   NVMe or RAM --> window
                  chunk k       kernel: reads the gradient in pinned memory
                  chunk k - 3   window --> RAM or NVMe

`submit` returns when it has launched the last kernel; the last write-backs overlap the next
forward. All sections of a chunk cross the link in both directions (12 bytes per parameter of
`exact`), and the next forward gathers the new parameters again. The CPU's memory transfers as many
bytes as in an update on the CPU, so the mode is faster only if the CPU's cores are slower than its
memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from infinity._src.base.sizes import round_up
from infinity._src.cabi.records import GradSection
from infinity._src.kernels.update import UpdatePlan
from infinity._src.memory.constants import AHEAD_CHUNKS
from infinity._src.memory.device import Device
from infinity._src.optim.step import UpdatingOptimizer, accumulated_gradients, guard
from infinity._src.optim.update_jobs import Submission, Work
from infinity._src.optim.update_mode import UpdateMode
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Param, Unit
from infinity.aio import JOB, MASK_DEVICE, Executor, GradDtype, JobKind, Priority, Ticket

_ALIGNMENT_BYTES = 256


class _Chunk(NamedTuple):
    """A chunk that a step updates. position: the chunk's index in the plan. start, numel: its range
    of elements in the shard.
    """

    flat: Flat
    plan: UpdatePlan
    position: int
    id: int
    start: int
    numel: int
    reads: int  # bit mask of the sections that the update reads


class _DeviceBuffer:
    """Device memory for one chunk (a window). stored: ticket of the write-back that reads it."""

    def __init__(self, memory: torch.Tensor, device: Device) -> None:
        self.memory = memory
        self.stored: Ticket | None = None
        self._device = device

    def wait(self) -> None:
        """Block until the write-back no longer reads the buffer. A failed write-back reads nothing
        any more, and the pipeline raises its error.
        """
        if self.stored is not None and not self.stored.failed:
            self._device.wait_filled(self.stored)
        self.stored = None


class JointTicket:
    """Several tickets as one (`infinity.aio.Ticket`)."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._tickets = tuple(tickets)

    @property
    def done(self) -> bool:
        return all(ticket.done for ticket in self._tickets)

    @property
    def filled(self) -> bool:
        return all(ticket.filled for ticket in self._tickets)

    @property
    def failed(self) -> bool:
        return any(ticket.failed for ticket in self._tickets)

    def wait(
        self, timeout: float | None = None, *, check: Callable[[], None] | None = None
    ) -> None:
        """Block until all tickets are done. `timeout` (s) applies to each ticket."""
        for ticket in self._tickets:
            ticket.wait(timeout, check=check)

    def wait_filled(
        self, timeout: float | None = None, *, check: Callable[[], None] | None = None
    ) -> None:
        """Block until all tickets are filled. `timeout` (s) applies to each ticket."""
        for ticket in self._tickets:
            ticket.wait_filled(timeout, check=check)

    def cancel(self) -> None:
        """Do nothing: updates are never cancelled."""


class DeviceUpdate(UpdateMode):
    """Update mode that updates units on the device, in `opt.step()`."""

    def __init__(self, *, store: StateStore, executor: Executor, device: Device) -> None:
        self._store = store
        self._executor = executor
        self._device = device
        self._windows: deque[_DeviceBuffer] = deque()

    def backward_begin(self) -> None:
        """Prefetch nothing: a prefetch reads states to the executor's slots, and the windows would
        read the same states again.
        """

    def close(self) -> None:
        """Free the windows. No update may be pending."""
        self._windows.clear()

    def submit(self, by_unit: dict[Unit, dict[Param, Work]], _optimizer: UpdatingOptimizer) -> None:
        self._make_windows([flat for unit in by_unit for flat in unit.flats])
        for unit in self._parts.pipeline.next_order(list(by_unit)):
            work = by_unit[unit]
            # A running save reads these chunks first.
            self._store.will_write(unit.flats)
            in_place = self._parts.unsharder.can_update_in_place(unit)
            submission = self._parts.pipeline.jobs_of(unit, work, accumulated_gradients(work))
            stored = list(self._update(self._chunks(unit, submission), in_place=in_place))
            # A unit without work on this rank has nothing to wait for.
            if stored:
                ticket = JointTicket(stored)
                self._parts.pipeline.add_pending(ticket)
                guard(work, ticket)
            self._parts.unsharder.rewritten(unit, in_place=in_place)

    def _chunks(self, unit: Unit, submission: Submission) -> Iterator[_Chunk]:
        """Yield the chunks of a unit in which a parameter has work, in the order of the shard."""
        for base, flat in enumerate(unit.flats):
            shard = self._store[flat]
            jobs = submission.jobs[submission.jobs["base"] == base]
            which = np.flatnonzero(jobs["kind"] == JobKind.UPDATE)
            segs = [
                submission.segs[first : first + count]
                for first, count in jobs[["seg_first", "seg_count"]][which].tolist()
            ]
            if not segs:
                continue
            plan = UpdatePlan(
                shard.format, segs, submission.hypers, device=self._device.torch_device
            )
            states = (1 << shard.format.written_count) - 1
            for index, at in enumerate(which.tolist()):
                spilled = (
                    shard.format.grad is not GradSection.NONE
                    and (segs[index]["grad_dtype"] == GradDtype.SECTION).any()
                )
                # A spilled gradient is the section after the states: fetched, but not written back.
                reads = states | (1 << shard.format.written_count if spilled else 0)
                span = flat.layout.chunks[at]
                yield _Chunk(flat, plan, index, int(shard.ids[at]), span.start, span.numel, reads)

    def _update(self, chunks: Iterator[_Chunk], *, in_place: bool) -> Iterator[Ticket]:
        """Stream chunks through the windows. Yields the tickets of the write-backs."""
        fetching: deque[tuple[_Chunk, _DeviceBuffer, Ticket]] = deque()
        for chunk in chunks:
            window = self._windows.popleft()
            # Windows rotate: this window has the oldest write-back.
            self._windows.append(window)
            window.wait()
            fetching.append(
                (chunk, window, self._submit(JobKind.FETCH, chunk, window, chunk.reads))
            )
            # AHEAD_CHUNKS fetches run ahead of the kernels, and as many write-backs behind them.
            if len(fetching) >= AHEAD_CHUNKS:
                yield self._update_chunk(*fetching.popleft(), in_place=in_place)
        while fetching:
            yield self._update_chunk(*fetching.popleft(), in_place=in_place)

    def _update_chunk(
        self, chunk: _Chunk, window: _DeviceBuffer, fetched: Ticket, *, in_place: bool
    ) -> Ticket:
        """Launch the kernel that updates a chunk, and start the chunk's write-back. Blocks until
        the fetch to the window is done.
        """
        self._device.wait_filled(fetched)
        sections = [window.memory[low:high] for low, high in self._bounds(chunk)]
        chunk.plan.run(chunk.position, sections)
        # The unit is gathered on this device: the device copies the new parameters, without a read
        # from the tier.
        if in_place:
            with torch.no_grad():
                values = sections[0].view(chunk.flat.dtype)
                shard = self._parts.unsharder.shard_of(chunk.flat)
                shard[chunk.start : chunk.start + chunk.numel].copy_(values)
        states = (1 << self._store[chunk.flat].format.written_count) - 1
        window.stored = self._submit(JobKind.STORE, chunk, window, states)
        return window.stored

    def _bounds(self, chunk: _Chunk) -> list[tuple[int, int]]:
        """Return for each section its bounds in a window: the first byte, and the byte after the
        last.
        """
        found, at = [], 0
        for section in self._store[chunk.flat].sections:
            size_bytes = section.size_bytes(chunk.numel)
            found.append((at, at + size_bytes))
            at += round_up(size_bytes, _ALIGNMENT_BYTES)
        return found

    def _submit(self, kind: JobKind, chunk: _Chunk, window: _DeviceBuffer, mask: int) -> Ticket:
        """Start a copy between a window and the chunk's tier, of the sections in `mask`."""
        job: Any = np.zeros(1, dtype=JOB)
        job["chunk"], job["kind"], job["base"], job["mask"] = chunk.id, kind, -1, mask | MASK_DEVICE
        for section, (low, _) in enumerate(self._bounds(chunk)):
            if mask >> section & 1:
                job["ptr"][0, section] = window.memory.data_ptr() + low
        # The copy starts after the kernels that use the window.
        self._device.behind()
        priority = Priority.WRITEBACK if kind is JobKind.STORE else Priority.DEMAND
        return self._executor.submit(job, priority=priority)

    def _make_windows(self, flats: Sequence[Flat]) -> None:
        """Allocate windows that are large enough for the largest chunk of these flats."""
        size_bytes = max((self._window_bytes(flat) for flat in flats), default=0)
        if self._windows and self._windows[0].memory.numel() >= size_bytes:
            return
        # No write-back may read an old window when its memory is freed.
        for window in self._windows:
            window.wait()
        self._windows = deque(
            _DeviceBuffer(
                torch.empty(size_bytes, dtype=torch.uint8, device=self._device.torch_device),
                self._device,
            )
            for _ in range(2 * AHEAD_CHUNKS)
        )

    def _window_bytes(self, flat: Flat) -> int:
        numel = flat.layout.chunks.numel_max
        return sum(
            round_up(section.size_bytes(numel), _ALIGNMENT_BYTES)
            for section in self._store[flat].sections
        )
