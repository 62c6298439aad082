"""Gradients spilled to NVMe: a section of their chunks, accessed through staging memory in RAM.

    backward reaches a unit   read its gradients of earlier micro-batches into a window
    a gradient arrives        copy or add it in the window; take its norm there, and cache it
    the unit is done          write the window to the chunks' `grad` section
    opt.step()                write the windows that remain; then updates read the sections

A window is a flat's part of the staging memory, as large as the gradients of the flat. A
micro-batch writes each gradient once; all but the first read it back. A window stays until another
flat needs its memory, and at least until its write has succeeded: a failed write loses no values.

Reads outside of a backward (materialize, uncached norms, zero_) also use a window.
"""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import torch

from infinity._src.cabi.records import ALIGNMENT_BYTES
from infinity._src.memory.device import Device
from infinity._src.params.accumulator import AccumulatorState, GradAccumulator
from infinity._src.params.ram_buffers import flat_bytes
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Param, Unit
from infinity.aio import Priority, Slab, Ticket
from infinity.errors import AioError


@dataclasses.dataclass(eq=False)
class _StagingWindow:
    """A flat's part of the staging memory, from `start` on. dirty: gradients are newer than on
    NVMe."""

    flat: Flat
    start: int
    memory: torch.Tensor  # uint8
    dirty: bool = False
    ahead: bool = False  # prefetched for a gradient that is still expected
    reading: Ticket | None = None
    writing: Ticket | None = None
    turn: int = 0  # sequence number of the last use


class SpilledGradients:
    """Gradients of the flats that spill. One thread uses it at a time; calls that need a window or
    values block.

    Bytes moved over the drives are added to `store.grads_read_bytes` and `grads_written_bytes`,
    including reads by updates.
    """

    def __init__(
        self,
        store: StateStore,
        rank: int,
        dtypes: dict[Flat, torch.dtype],
        *,
        size_bytes: int,
        device: Device,
    ):
        """dtypes: of the gradients of each flat that spills. size_bytes: planned size of the
        staging memory, at least that of the largest flat."""
        self._store = store
        self._device = device
        self._rank = rank
        self._dtypes = dict(dtypes)
        self._params: dict[GradAccumulator, Param] = {}
        self._slab = Slab(size_bytes)
        device.pin(self._slab)
        self._windows_of: dict[Flat, _StagingWindow] = {}
        self._turn = 0
        # Flats whose unit was done while gradients were missing: the next `unit_done` writes them.
        self._due: list[Flat] = []
        self._accumulated: dict[Flat, set[Param]] = {}  # in this backward
        self._expected: dict[Flat, int] = {}  # count of gradients in the last backward
        self._fresh: set[Flat] = set()  # written since an update last read them

    def __contains__(self, flat: Flat) -> bool:
        return flat in self._dtypes

    @property
    def staging_bytes(self) -> int:
        return self._slab.size_bytes

    def extend(self, dtypes: dict[Flat, torch.dtype], *, size_bytes: int) -> None:
        """Add flats that spill, and grow to the newly planned staging memory. While it grows, the
        old and the new memory both exist.

        Raises: AioError of a write, MemoryError; before anything has changed.
        """
        # The old windows may be freed, so write their gradients to NVMe.
        self.flush()
        if size_bytes > self._slab.size_bytes:
            made = Slab(size_bytes)
            self._windows_of.clear()
            self._device.pin(made)
            before, self._slab = self._slab, made
            self._device.unpin(before)
            before.close()
        self._dtypes.update(dtypes)

    def add_accumulator(self, param: Param, accumulator: GradAccumulator) -> None:
        self._params[accumulator] = param

    # -- GradBacking: calls of accumulators --------------------------------------------------------

    def read(self, accumulator: GradAccumulator) -> torch.Tensor:
        """Return the accumulator's values, in a window: valid until the next call. Blocks while
        they are read."""
        param = self._params[accumulator]
        window = self._window_of(param.flat, accumulator)
        # The expected gradient has arrived: another flat may take the window.
        window.ahead = False
        start, _, numel = param.flat.layout.shard_range(param.param_index, self._rank)
        itemsize = self._dtypes[param.flat].itemsize
        part = window.memory[start * itemsize : (start + numel) * itemsize]
        return part.view(self._dtypes[param.flat])

    def read_for_write(self, accumulator: GradAccumulator) -> torch.Tensor:
        """Return the accumulator's values for writing. Waits for a write of the window to NVMe."""
        tensor = self.read(accumulator)
        param = self._params[accumulator]
        window = self._windows_of[param.flat]
        # A write of the window still reads this memory.
        self._end_write(window)
        window.dirty = True
        self._accumulated.setdefault(param.flat, set()).add(param)
        return tensor

    def to_replace(self, accumulator: GradAccumulator) -> torch.Tensor:
        """Return the accumulator's values, which the caller replaces with others for an update to
        read. Waits for a write of the window to NVMe."""
        tensor = self.read(accumulator)
        flat = self._params[accumulator].flat
        window = self._windows_of[flat]
        self._end_write(window)
        if not window.dirty:
            window.dirty = True
            # The last `flush` counted a read of the old values, which no update reads any more.
            self._store.grads_read_bytes -= self._moved_bytes(flat)
        return tensor

    # -- calls of backward and step ----------------------------------------------------------------

    def prefetch(self, unit: Unit) -> None:
        """Start reading the unit's gradients of earlier micro-batches, if a window is free. Does
        not block."""
        for flat in unit.flats:
            if flat in self._dtypes and flat not in self._windows_of and self._on_nvme(flat, None):
                start = self._find_room(flat)
                if start is not None:
                    window = self._assign(start, flat, read=True, priority=Priority.PREFETCH)
                    window.ahead = True

    def unit_done(self, unit: Unit) -> None:
        """Start writing a unit's gradients after its use; if some are missing, at the next call."""
        due, self._due = self._due, []
        # A unit's last gradients may arrive after its use has ended, but before the next use ends.
        for flat in due:
            self._start_write(flat)
        for flat in unit.flats:
            if flat in self._windows_of:
                missing = len(self._accumulated.get(flat, ())) < self._expected.get(
                    flat, len(flat.params)
                )
                self._due.append(flat) if missing else self._start_write(flat)

    def backward_end(self) -> None:
        """Start writing the remaining windows."""
        for flat in self._windows_of:
            self._start_write(flat)
        self._due.clear()
        self._expected.update((flat, len(params)) for flat, params in self._accumulated.items())
        self._accumulated.clear()

    def reset(self) -> None:
        """Forget the progress of an aborted backward. Gradients stay in their windows."""
        self._due.clear()
        self._accumulated.clear()

    def flush(self, unit: Unit | None = None) -> None:
        """Write windows (of a unit; None: all) to NVMe and wait, so that updates can read them.
        Counts gradients written since the last call as read by the update, once.

        Raises: AioError of a failed write; its window keeps the values.
        """
        windows = [each for each in self._windows_of.values() if unit in (None, each.flat.unit)]
        # All writes begin before the first one is waited for.
        for window in windows:
            self._start_write(window.flat)
        for window in windows:
            self._end_write(window)
        for flat in [each for each in self._fresh if unit in (None, each.unit)]:
            self._fresh.remove(flat)
            # Updates do not read cleared gradients.
            if self._is_wanted(flat):
                self._store.grads_read_bytes += self._moved_bytes(flat)

    def close(self) -> None:
        """Free the windows. Nothing may be pending."""
        self._params.clear()
        self._windows_of.clear()
        self._device.unpin(self._slab)
        self._slab.close()

    # -- windows -----------------------------------------------------------------------------------

    def _window_of(self, flat: Flat, accumulator: GradAccumulator) -> _StagingWindow:
        """Return a flat's window with the values of `accumulator`, if any. Blocks."""
        window = self._windows_of.get(flat)
        if window is None:
            start = self._make_room(flat)
            window = self._assign(
                start, flat, read=self._on_nvme(flat, accumulator), priority=Priority.DEMAND
            )
        if window.reading is not None:
            try:
                window.reading.wait_filled()
            except AioError as error:
                self._free(window)
                error.args = (f"the gradients of {flat.unit.name} cannot be read back: {error}",)
                raise
            window.reading = None
        self._turn += 1
        window.turn = self._turn
        return window

    def _assign(self, start: int, flat: Flat, *, read: bool, priority: Priority) -> _StagingWindow:
        """Make a window for a flat in free memory, and start reading its gradients into it."""
        # Numpy arrays keep the slab mapped while a view lives; torch.frombuffer's do not.
        memory = torch.from_numpy(self._slab.array(np.uint8))[start : start + self._size(flat)]
        window = self._windows_of[flat] = _StagingWindow(flat, start, memory)
        if read:
            window.reading = self._store.fetch(
                flat, self._section(flat), window.memory.data_ptr(), priority=priority
            )
            self._store.grads_read_bytes += self._moved_bytes(flat)
            return window
        for param in flat.params:
            # The accumulator has values on NVMe, but no `p.grad` refers to them: the next write of
            # this window overwrites them.
            if param.grad is not None and param.grad.state is AccumulatorState.HELD:
                param.grad.mark_overwritten()
        return window

    def _size(self, flat: Flat) -> int:
        return flat_bytes(flat.layout.shard_numel, self._dtypes[flat])

    def _gap(self, size_bytes: int) -> int | None:
        start = 0
        for window in sorted(self._windows_of.values(), key=lambda each: each.start):
            if window.start - start >= size_bytes:
                break
            start = window.start + len(window.memory)
        return start if self._slab.size_bytes - start >= size_bytes else None

    def _find_room(self, flat: Flat) -> int | None:
        """Return the start of memory for a flat that is available without waiting, or None."""
        # A failed write keeps its window, the only copy of the values; `_end_write` raises.
        for window in self._windows_of.values():
            if window.writing is not None and window.writing.done and not window.writing.failed:
                window.writing = None
        idle = [
            each
            for each in self._windows_of.values()
            if not (each.dirty or each.ahead) and each.writing is None and each.reading is None
        ]
        idle.sort(key=lambda each: each.turn, reverse=True)
        while (start := self._gap(self._size(flat))) is None and idle:
            self._free(idle.pop())
        return start

    def _make_room(self, flat: Flat) -> int:
        """Return the start of memory for a flat. Waits if necessary: for a write, or by writing
        gradients that another flat still accumulates."""
        while (start := self._find_room(flat)) is None:
            self._reclaim(
                # Cheapest first: a window that expects no gradient, then a clean one, then one that
                # was not prefetched, then one without a read in flight, then the oldest.
                min(
                    self._windows_of.values(),
                    key=lambda each: (
                        each.dirty and each.flat not in self._due,
                        each.dirty,
                        each.ahead,
                        each.reading is not None,
                        each.turn,
                    ),
                )
            )
        return start

    def _reclaim(self, window: _StagingWindow) -> None:
        """Free a window, after its gradients are on NVMe and its transfers have ended."""
        if window.dirty:
            self._start_write(window.flat)
        self._end_write(window)
        if window.reading is not None:
            # Another flat gets the memory, so the read must have ended. Its error does not matter:
            # the values are still on NVMe, and will be read again.
            with contextlib.suppress(AioError):
                window.reading.wait()
        self._free(window)

    def _free(self, window: _StagingWindow) -> None:
        del self._windows_of[window.flat]

    def _start_write(self, flat: Flat) -> None:
        """Start writing the window of a flat, if it holds new values that are in some `p.grad`.
        Does not block."""
        window = self._windows_of.get(flat)
        if window is None or not window.dirty or window.writing is not None:
            return
        for param in flat.params:
            if param.grad is not None:
                # Also for a cleared gradient: its copy from the device writes into this window,
                # which another flat may get next.
                param.grad.wait_d2h()
        window.dirty = False
        # Cleared gradients are not written.
        if self._is_wanted(flat):
            window.writing = self._store.store(flat, self._section(flat), window.memory.data_ptr())
            self._store.grads_written_bytes += self._moved_bytes(flat)
            self._fresh.add(flat)

    def _end_write(self, window: _StagingWindow) -> None:
        """Wait for a window's write. Raises: AioError; then the window keeps the values."""
        if window.writing is None:
            return
        try:
            window.writing.wait()
        except AioError as error:
            self._mark_failed_dirty()
            self._store.recover()
            name = window.flat.unit.name
            reason = f"cannot be written; parameters and states are sound: {error}"
            error.args = (f"the spilled gradients of {name} {reason}",)
            raise
        window.writing = None

    def _mark_failed_dirty(self) -> None:
        """After a failed write, mark every window whose write failed as dirty. Drops the further
        errors: the drive refused these writes because of the first fault."""
        for window in self._windows_of.values():
            if window.writing is None:
                continue
            try:
                window.writing.wait()
            except AioError:
                window.dirty = True
            window.writing = None

    # -- sections ----------------------------------------------------------------------------------

    def _section(self, flat: Flat) -> int:
        return len(self._store[flat].sections) - 1

    def _moved_bytes(self, flat: Flat) -> int:
        """Bytes of I/O for a flat's gradients, in one direction: whole blocks of each chunk."""
        itemsize = self._dtypes[flat].itemsize
        sizes = flat.layout.chunks.numels * itemsize
        return int((-(-sizes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES).sum())

    @staticmethod
    def _is_wanted(flat: Flat) -> bool:
        return any(
            param.grad is not None
            and param.grad.state is AccumulatorState.HELD
            and param.at_rest.grad is not None
            for param in flat.params
        )

    def _on_nvme(self, flat: Flat, accumulator: GradAccumulator | None) -> bool:
        """True when NVMe holds needed values of the flat: of some `p.grad`, or of `accumulator`."""
        return self._is_wanted(flat) or (
            accumulator is not None and accumulator.state is AccumulatorState.HELD
        )
