"""Spilled gradients: on NVMe, in a section of their chunks, through a few staging windows in RAM.

    backward reaches a unit   read its gradients of earlier micro-batches into a window
    a gradient comes          copy or add it in the window; take its norm there, and cache it
    the unit is done          write the window to the chunks' `grad` section
    opt.step()                write the windows that are left; then updates read the sections

A micro-batch writes each gradient once, and reads it back unless it is the first. A window stays
readable until another flat needs it. It is not given away before its write has succeeded, so a
failed write loses no values.

Reads of values outside of a backward (materialize, norms that are not cached, zero_) go through a
window, too.
"""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import torch

from infinity._src.grads.accumulator import AccumulatorState, GradAccumulator
from infinity._src.memory.device import Device
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Param, Unit
from infinity.aio import Priority, Slab, Ticket
from infinity.aio._records import ALIGNMENT_BYTES
from infinity.errors import AioError


@dataclasses.dataclass(eq=False)
class _StagingWindow:
    """Staging buffer, and the flat whose gradients it holds. dirty: they are newer than on NVMe."""

    memory: torch.Tensor  # uint8
    flat: Flat | None = None
    dirty: bool = False
    ahead: bool = False  # prefetched for a gradient that has not come yet
    reading: Ticket | None = None
    writing: Ticket | None = None
    turn: int = 0  # when it was last used


class SpilledGradients:
    """Gradients of the flats that spill. One thread uses it at a time; calls that need a window or
    values block.

    Bytes moved over the drives are added to `store.grads_read_bytes` and `grads_written_bytes`,
    reads by updates included.
    """

    def __init__(
        self,
        store: StateStore,
        rank: int,
        dtypes: dict[Flat, torch.dtype],
        *,
        count: int,
        size_bytes: int,
        device: Device,
    ):
        """dtypes: of the gradients of each flat that spills. count, size_bytes: of the windows, as
        planned."""
        self._store = store
        self._device = device
        self._rank = rank
        self._dtypes = dict(dtypes)
        self._params: dict[GradAccumulator, Param] = {}
        self._slab, self._windows = _make_windows(count, size_bytes)
        device.pin(self._slab)
        self._windows_of: dict[Flat, _StagingWindow] = {}
        self._turn = 0
        # Flats whose unit was done before all of their gradients came: written at the next call.
        self._due: list[Flat] = []
        self._accumulated: dict[Flat, set[Param]] = {}  # in this backward
        self._expected: dict[Flat, int] = {}  # count of gradients in the last backward
        self._fresh: set[Flat] = set()  # written since an update last read them

    def __contains__(self, flat: Flat) -> bool:
        return flat in self._dtypes

    @property
    def staging_bytes(self) -> int:
        """Bytes of the windows."""
        return self._slab.size_bytes

    def extend(self, dtypes: dict[Flat, torch.dtype], *, count: int, size_bytes: int) -> None:
        """Add flats that spill, and grow to the windows that are planned now. If these are more or
        larger, the old and the new ones both exist for a moment.

        Raises: AioError of a write, MemoryError; before anything has changed.
        """
        # The old windows may go, so the gradients in them must be on NVMe.
        self.flush()
        if count > len(self._windows) or size_bytes > len(self._windows[0].memory):
            made = _make_windows(count, size_bytes)
            for window in self._windows:
                self._free(window)
            self._device.pin(made[0])
            before, (self._slab, self._windows) = self._slab, made
            self._device.unpin(before)
            before.close()
        self._dtypes.update(dtypes)

    def add_accumulator(self, param: Param, accumulator: GradAccumulator) -> None:
        """Serve the accumulator of a parameter of a spilled flat."""
        self._params[accumulator] = param

    # -- GradBacking: calls of accumulators --------------------------------------------------------

    def read(self, accumulator: GradAccumulator) -> torch.Tensor:
        """Return the accumulator's values, in a window: valid until the next call. Blocks while
        they are read."""
        param = self._params[accumulator]
        window = self._window_of(param.flat, accumulator)
        # The gradient that it was prefetched for has come: the window may be given away again.
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
        # The drive still reads this memory.
        self._end_write(window)
        window.dirty = True
        self._accumulated.setdefault(param.flat, set()).add(param)
        return tensor

    # -- calls of backward and step ----------------------------------------------------------------

    def prefetch(self, unit: Unit) -> None:
        """Start reading the unit's gradients of earlier micro-batches, if a window is free. Does
        not block."""
        for flat in unit.flats:
            if flat in self._dtypes and flat not in self._windows_of and self._on_nvme(flat, None):
                window = self._free_window()
                if window is not None:
                    self._assign(window, flat, read=True, priority=Priority.PREFETCH)
                    window.ahead = True

    def unit_done(self, unit: Unit) -> None:
        """Start writing the gradients of a unit whose use has ended; if some are missing, at the
        next such call."""
        due, self._due = self._due, []
        # The last gradients of a unit may come a little after its use has ended. By the end of the
        # next use they are here, or there are none.
        for flat in due:
            self._start_write(flat)
        for flat in unit.flats:
            if flat in self._windows_of:
                missing = len(self._accumulated.get(flat, ())) < self._expected.get(
                    flat, len(flat.params)
                )
                self._due.append(flat) if missing else self._start_write(flat)

    def backward_end(self) -> None:
        """Start writing what is left in windows."""
        for window in self._windows:
            if window.flat is not None:
                self._start_write(window.flat)
        self._due.clear()
        self._expected.update((flat, len(params)) for flat, params in self._accumulated.items())
        self._accumulated.clear()

    def reset(self) -> None:
        """Forget the progress of a backward that broke off. Gradients in windows stay there."""
        self._due.clear()
        self._accumulated.clear()

    def flush(self, unit: Unit | None = None) -> None:
        """Write windows (of a unit; None: of all) to NVMe and wait for it, so that updates may read
        there. Gradients written since the last call are counted as read by the update: once,
        however often a step calls.

        Raises: AioError of a write that failed; its window keeps the values.
        """
        windows = [
            each
            for each in self._windows
            if each.flat is not None and unit in (None, each.flat.unit)
        ]
        # All writes begin before the first one is waited for.
        for window in windows:
            assert window.flat is not None
            self._start_write(window.flat)
        for window in windows:
            self._end_write(window)
        for flat in [each for each in self._fresh if unit in (None, each.unit)]:
            self._fresh.remove(flat)
            # Updates do not read gradients that the loop has cleared.
            if self._is_wanted(flat):
                self._store.grads_read_bytes += self._moved_bytes(flat)

    def close(self) -> None:
        """Free the windows. Nothing may be pending."""
        self._params.clear()
        self._windows_of.clear()
        self._windows.clear()
        self._device.unpin(self._slab)
        self._slab.close()

    # -- windows -----------------------------------------------------------------------------------

    def _window_of(self, flat: Flat, accumulator: GradAccumulator) -> _StagingWindow:
        """Return the window of a flat, filled with the values of `accumulator` if it has any.
        Blocks."""
        window = self._windows_of.get(flat)
        if window is None:
            window = self._claim_window()
            self._assign(
                window, flat, read=self._on_nvme(flat, accumulator), priority=Priority.DEMAND
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

    def _assign(
        self, window: _StagingWindow, flat: Flat, *, read: bool, priority: Priority
    ) -> None:
        """Give a free window to a flat, and start reading its gradients into it."""
        window.flat = flat
        self._windows_of[flat] = window
        if read:
            window.reading = self._store.fetch(
                flat, self._section(flat), window.memory.data_ptr(), priority=priority
            )
            self._store.grads_read_bytes += self._moved_bytes(flat)
            return
        for param in flat.params:
            # Held, but in no `p.grad` any more: writing this window will overwrite its values.
            if param.grad is not None and param.grad.state is AccumulatorState.HELD:
                param.grad.mark_overwritten()

    def _free_window(self) -> _StagingWindow | None:
        """Return a window that can be had without waiting, or None."""
        # A failed write keeps its window: its values are nowhere else, and `_end_write` raises.
        for window in self._windows:
            if window.writing is not None and window.writing.done and not window.writing.failed:
                window.writing = None
        free = [each for each in self._windows if each.flat is None]
        idle = [
            each
            for each in self._windows
            if not (each.dirty or each.ahead) and each.writing is None and each.reading is None
        ]
        found = min(free or idle, key=lambda each: each.turn, default=None)
        if found is not None:
            self._free(found)
        return found

    def _claim_window(self) -> _StagingWindow:
        """Return a window, and wait for it if need be: for a write, or by writing gradients that
        another flat still accumulates."""
        free = self._free_window()
        if free is not None:
            return free
        # Cheapest first: a window that no gradient is still coming to, then a clean one, then one
        # that was not prefetched, then one without a read under way, then the oldest.
        window = min(
            self._windows,
            key=lambda each: (
                each.dirty and each.flat not in self._due,
                each.dirty,
                each.ahead,
                each.reading is not None,
                each.turn,
            ),
        )
        if window.dirty:
            assert window.flat is not None
            self._start_write(window.flat)
        self._end_write(window)
        if window.reading is not None:
            # The memory goes to another flat, so the read must have ended. Its error does not
            # matter: the values are still on NVMe, and are read again when they are wanted.
            with contextlib.suppress(AioError):
                window.reading.wait()
        self._free(window)
        return window

    def _free(self, window: _StagingWindow) -> None:
        if window.flat is not None:
            del self._windows_of[window.flat]
        window.flat = window.reading = None
        window.dirty = window.ahead = False

    def _start_write(self, flat: Flat) -> None:
        """Start writing the window of a flat, if it holds new values that are in some `p.grad`.
        Does not block."""
        window = self._windows_of.get(flat)
        if window is None or not window.dirty or window.writing is not None:
            return
        for param in flat.params:
            if param.grad is not None:
                # Also for a gradient that was cleared: its copy from the device writes into this
                # window, which may be another flat's next.
                param.grad.wait_d2h()
        window.dirty = False
        # Gradients that the loop has cleared are not written.
        if self._is_wanted(flat):
            window.writing = self._store.store(flat, self._section(flat), window.memory.data_ptr())
            self._store.grads_written_bytes += self._moved_bytes(flat)
            self._fresh.add(flat)

    def _end_write(self, window: _StagingWindow) -> None:
        """Wait for a window's write. Raises: AioError; the window then keeps what could not be
        written."""
        if window.writing is None:
            return
        try:
            window.writing.wait()
        except AioError as error:
            self._mark_failed_dirty()
            self._store.recover()
            assert window.flat is not None
            name = window.flat.unit.name
            message = (
                f"the spilled gradients of {name} cannot be written; parameters and states are"
            )
            error.args = (f"{message} sound: {error}",)
            raise
        window.writing = None

    def _mark_failed_dirty(self) -> None:
        """After a failed write, mark every window whose write also failed as dirty. The first error
        is enough: the drive refused the others because of it."""
        for window in self._windows:
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
        """Bytes that drives move for the gradients of a flat, in one direction: whole blocks of
        each chunk."""
        itemsize = self._dtypes[flat].itemsize
        sizes = flat.layout.chunks.numels * itemsize
        return int((-(-sizes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES).sum())

    @staticmethod
    def _is_wanted(flat: Flat) -> bool:
        """True when a gradient of this flat is in some `p.grad`."""
        return any(
            param.grad is not None
            and param.grad.state is AccumulatorState.HELD
            and param.at_rest.grad is not None
            for param in flat.params
        )

    def _on_nvme(self, flat: Flat, accumulator: GradAccumulator | None) -> bool:
        """True when NVMe holds values of the flat that are wanted: by some `p.grad`, or by
        `accumulator`, which asks for its own."""
        return self._is_wanted(flat) or (
            accumulator is not None and accumulator.state is AccumulatorState.HELD
        )


def _make_windows(count: int, size_bytes: int) -> tuple[Slab, list[_StagingWindow]]:
    slab = Slab(count * size_bytes)
    # Numpy arrays keep the slab mapped while a view lives; torch.frombuffer's do not.
    memory = torch.from_numpy(slab.array(np.uint8))
    return slab, [
        _StagingWindow(memory[at * size_bytes : (at + 1) * size_bytes]) for at in range(count)
    ]
