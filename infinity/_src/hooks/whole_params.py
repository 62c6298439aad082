"""Reads and writes of parameters between passes, where each rank has whole parameters on its
device.

    read     waits for the update of the parameter's unit, and returns its values in place
    write    changes the version counter of the tensor that was read; so the engine detects the
             write, and stores it before the next pass, step, save or call of the handle. A write
             through an array of numpy or by a collective (`dist.all_reduce(parameter.data)`) does
             not change the counter: it needs `gather()`
    later    a tensor that the user keeps over a step shows the values of the step; a write through
             it raises. After `close()` it has no memory

Parameters in CPU memory or on NVMe can only be read with `gather()`: a plain read would hide the
transfer. Whole parameters on the device need no transfer.
"""

from __future__ import annotations

import torch

from infinity._src.base.wording import listed
from infinity._src.hooks.unit_refs import WeightWindow
from infinity._src.params.unit import SHARDED, STALE, Param, Unit
from infinity._src.params.unshard import Unsharder
from infinity.errors import StepUndone, WeightWritten


class ShownWindow(WeightWindow):
    """Window on a parameter between passes. generation: `Unit.generation` at the last read. hooked:
    whether hooks accumulate the window's gradients.
    """

    def __init__(self, param: Param) -> None:
        super().__init__(param)
        self.generation = param.unit.generation
        self.hooked = False

    @property
    def current(self) -> bool:
        """True until a step or a write changes the values of the parameter's unit."""
        return self.generation == self.param.unit.generation

    def check_current(self, _grad: torch.Tensor) -> None:
        """Raise in a backward through the window after its values have changed."""
        if not self.current:
            raise RuntimeError(
                f"backward through {self.param.name} as it was read before its values changed (by "
                "a step or a write); read it, and compute with it, after the step"
            )


class WholeParams:
    """The parameters of one model between passes. One thread uses it at a time.

    shown: parameters can be read: they lie on the device, and no update begins before `opt.step()`.
    alone: there is only one rank.
    """

    def __init__(self, unsharder: Unsharder, *, shown: bool, alone: bool) -> None:
        self._unsharder = unsharder
        self._shown, self._alone = shown, alone
        self._windows: dict[Param, ShownWindow] = {}

    def find(self, param: Param) -> ShownWindow | None:
        return self._windows.get(param)

    def show(self, param: Param) -> ShownWindow | None:
        """Return a window with the parameter's current values; None where it cannot be read.

        Blocks until the update of its unit is done. No collective: a rank may read alone. Raises:
        what a gather raises; WeightWritten as `keep_writes`.
        """
        unit = param.unit
        if not self._shown or self._wants_other_ranks(unit):
            return None
        window = self._windows.get(param)
        # Refuse a late write before the unit is in use: that fills the unit's memory again.
        if window is not None and not window.current:
            window.poll_write()
            if window.written:
                self._refuse_late_writes([window])
        with self._unsharder.borrowed(unit):
            if window is None:
                window = self._windows[param] = ShownWindow(param)
            window.generation = unit.generation
            return window

    def _wants_other_ranks(self, unit: Unit) -> bool:
        """Return whether only a gather with all ranks would fill the unit's memory: before the
        first pass, and after its values at rest were replaced."""
        return not self._alone and unit.state in (SHARDED, STALE)

    def keep_writes(self) -> None:
        """Store the writes through windows since the last call. If there are any, blocks for
        pending updates, and is collective: all ranks have written the same.

        Raises: WeightWritten for a write to outdated values, which is lost; what
        `Unsharder.write_alike` raises. After StepUndone nothing is stored.
        """
        for window in self._windows.values():
            window.poll_write()
        written = [window for window in self._windows.values() if window.written]
        if not written:
            return
        late = [window for window in written if not window.current]
        if late:
            self._refuse_late_writes(late)
        # Store in one order on all ranks: a store is a collective, and ranks may have read the
        # parameters in different orders.
        written.sort(key=lambda each: each.param.index)
        current = [window for window in self._windows.values() if window.current]
        try:
            for window in written:
                # Clear it before the store: the store's checks call `keep_writes` again.
                window.written = False
                try:
                    self._unsharder.write_alike(window.param, window.tensor.detach())
                except BaseException:
                    window.written = True
                    raise
        except StepUndone:
            # The write was made to values of the step that is undone.
            for window in written:
                window.written = False
            raise
        finally:
            # A write to one parameter counts for its whole unit.
            for window in current:
                window.generation = window.param.unit.generation

    def _refuse_late_writes(self, late: list[ShownWindow]) -> None:
        """Raise WeightWritten for writes through windows on outdated values. They have spoiled the
        newer values in the units' memory, so fill that memory again.
        """
        for window in late:
            window.written = False
            if window.param.unit.refs == 0:
                self._unsharder.invalidate(window.param.unit)
        names = listed(window.param.name for window in late)
        raise WeightWritten(
            f"{names} was written to through a tensor that was taken before its values changed (by "
            "a step, a restore or a write): the write is lost. Take `parameter.data`, or the "
            "parameter itself, again after each step"
        )
