"""Update mode, as gathering and gradients call it: one method for each event.

    Unsharder     a training backward begins          backward_begin()
    Unsharder     nothing uses a unit any more        unit_released(unit)
    Unsharder     that backward has ended             backward_end(), or backward_aborted()
    GradReducer   the loop assigns a gradient         before_assign(param)

`infinity._src.optim.update_mode` has the whole interface, and the modes. The modes need the
optimizer's step, a layer above this one. So this half of the interface is declared here, and calls
follow the imports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from infinity._src.params.param_copies import DelayedParams
from infinity._src.params.unit import Param, Unit
from infinity.errors import AioError

OnGradient = Callable[[Param, torch.Tensor], None]
"""Takes a parameter and its gradient: this rank's part, reduced if there are several ranks."""


class UpdateHooks:
    """The update mode as `Unsharder` and `GradReducer` see it. All calls come from the thread that
    trains. A mode overrides the calls that concern it; by default a call does nothing."""

    delayed_params: DelayedParams | None = None
    """Parameters of before the pending update, with which update="delayed" computes; None in all
    other modes."""

    @property
    def updates_pending(self) -> bool:
        """True when an update that was submitted is not done yet. Never blocks."""
        return False

    @property
    def on_gradient(self) -> OnGradient | None:
        """Taker of each complete gradient of a backward; None: its accumulator, where it waits for
        the step. Asked once, when the reducer is built."""
        return None

    def backward_begin(self) -> None:
        """A backward begins."""

    def unit_released(self, unit: Unit) -> None:
        """Nothing uses the unit any more: no forward, no backward, no window. Also outside of
        backward."""

    def backward_end(self) -> None:
        """A backward has ended, and all its gradients were ready. An exception breaks it off."""

    def backward_aborted(self) -> None:
        """A backward broke off: its gradients are not complete, and the loop clears them."""

    def before_assign(self, param: Param) -> None:
        """The loop assigns a gradient. Raises: RuntimeError where it would come too late."""


class Access(Protocol):
    """Checks before values are read or written (`infinity._src.engine.access`)."""

    def before_pass(self) -> None:
        """An outermost forward is about to begin. Raises: ProcessGroupChanged."""

    def unfrozen(self, param: Param) -> None:
        """A parameter requires a gradient from now on. Does not block."""

    def before_training(self) -> None:
        """An outermost forward with gradients is about to begin. Blocks while parameters that were
        unfrozen get their states. Raises: BudgetError."""

    def before_read(self, unit: Unit) -> None:
        """The unit's values are about to be read. Raises: EngineClosed; the fault of an update."""

    def before_write(self) -> None:
        """Values are about to be written. Blocks until no update is pending. Raises as
        `before_read`."""

    @property
    def undoes_together(self) -> bool:
        """True where a fault of one rank's update undoes the step on all ranks."""

    def may_undo(self, error: AioError) -> bool:
        """Return whether undoing the step on all ranks is an answer to this fault of a gather. Any
        thread may ask."""

    def undo_together(self, read: BaseException | None) -> None:
        """Undo the step on all ranks, since an update, or the read of a gather, has failed on one.
        read: the fault of this rank's gather. Collective. Raises: StepUndone, always."""

    def read_failed(self, error: AioError) -> None:
        """Undo the step that is not committed if a gather's read failed again, or mend the chunk,
        where this rank may do so alone. Blocks. Raises: StepUndone, StateInvalid."""
