"""The update mode's interface for gathers and gradients: one method for each event.

    Unsharder     a training backward begins          backward_begin()
    Unsharder     nothing uses a unit any more        unit_released(unit)
    Unsharder     that backward has ended             backward_end(), or backward_aborted()
    GradReducer   the loop assigns a gradient         before_assign(param)

`infinity._src.optim.update_mode` has the whole interface, and the modes, which import the
optimizer's step, a layer above this one. This half of the interface is declared here so that no
import points up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from infinity._src.params.param_copies import DelayedParams
from infinity._src.params.unit import Param, Unit
from infinity.errors import AioError

OnGradient = Callable[[Param, torch.Tensor], None]
"""Receives a parameter and its gradient: this rank's part, reduced on several ranks."""


class UpdateHooks:
    """The update mode as `Unsharder` and `GradReducer` see it. All calls come from the thread that
    trains. A mode overrides some methods; by default they do nothing."""

    delayed_params: DelayedParams | None = None
    """Parameters before the pending update, with which update="delayed" computes; None in other
    modes."""

    @property
    def updates_pending(self) -> bool:
        """True when an update that was submitted is not done yet. Never blocks."""
        return False

    @property
    def on_gradient(self) -> OnGradient | None:
        """Receiver of each complete gradient of a backward; None: gradients stay in their
        accumulators until the step. Read once, when the reducer is built."""
        return None

    def backward_begin(self) -> None:
        """A backward begins."""

    def unit_released(self, unit: Unit) -> None:
        """No forward, backward or window uses the unit any more. Also called outside of backward.
        """

    def backward_end(self) -> None:
        """A backward has ended, with all its gradients. Not called after an exception."""

    def backward_aborted(self) -> None:
        """A backward was aborted: its gradients are incomplete, and the loop clears them."""

    def before_assign(self, param: Param) -> None:
        """The loop assigns a gradient. Raises: RuntimeError if it is too late."""


class Access(Protocol):
    """Checks before values are read or written (`infinity._src.engine.access_checks`)."""

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
        """Return whether undoing the step on all ranks can handle this fault of a gather. Any
        thread may call it."""

    def undo_together(self, read: BaseException | None) -> None:
        """Undo the step on all ranks, because an update or a gather's read has failed on one. read:
        the fault of this rank's gather. Collective. Raises: StepUndone, always."""

    def read_failed(self, error: AioError) -> None:
        """After a gather's repeated read fault undo the uncommitted step, or repair the chunk if
        this rank may do so alone. Blocks. Raises: StepUndone, StateInvalid."""
