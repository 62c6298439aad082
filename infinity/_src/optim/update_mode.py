"""Update modes (`Policy.update`): when the update of a unit is submitted.

One interface, `UpdateMode`, and five implementations of it:

    DeferredUpdate     "deferred"               at opt.step(), behind gates that forward opens
    BackwardUpdate     "backward"               in backward, when a unit's gradients are complete
    SpeculativeUpdate  the same, generations=2  in backward; undone where the step wants another
    DelayedUpdate      "delayed"                at opt.step(), beside the whole next step
    DeviceUpdate       update_on="device"       at opt.step(), by kernels of the device

Order of calls in a step (tests/data/call_order has it for each mode, to the line):

    before_read(unit) *           a gather, while `guards_reads`
    backward_begin()              no_sync() is entered around micro-batches that are not the last
        before_read(unit) *
        on_gradient(param, grad) *  a gradient is complete, and the mode takes gradients
        unit_released(unit) *
    backward_end()                backward_aborted() instead, when one that broke off is found
    before_step()                 opt.step() asks whether a step may be taken
    submit(work_by_unit)          opt.step() asks for these updates
    withdraw()                    a caller waits for the states: undo updates ahead of their step
    undone()                      a fault undid the step (two generations)

A mode is made first and given by constructors to all callers. It gets its own collaborators by the
one call of `attach`: they need the mode to be made.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from infinity._src.optim.step import StepPipeline, accumulated_gradients, guard
from infinity._src.optim.step_consensus import Grouped
from infinity._src.optim.update_jobs import Work
from infinity._src.params.prefetch_schedule import Phase
from infinity._src.params.reduce import GradReducer
from infinity._src.params.unit import Flat, Param, Unit
from infinity._src.params.unshard import Unsharder
from infinity._src.params.update_hooks import OnGradient, UpdateHooks


class UpdatingOptimizer(Grouped, Protocol):
    """The optimizer of a parameter, as updates in backward see it."""

    @property
    def params_with_states(self) -> list[Param]:
        """Parameters that have states."""

    def refresh_groups(self) -> None:
        """Find each parameter's group anew, since a step begins."""

    def preview(self, params: Sequence[Param]) -> tuple[list[Work], list[dict[str, Any]]]:
        """Return the work of a step that would be taken now, and the states it would leave. Changes
        nothing.
        """

    def work_of(self, params: Sequence[Param]) -> list[Work]:
        """Return the work of the step that is being taken for these parameters. Counts it in their
        step numbers.
        """


@dataclasses.dataclass(frozen=True)
class ModeParts:
    """A mode's collaborators.

    optimizer_of: the optimizer of a parameter, None without one. make_gradients: gives gradients
    memory, where the mode did without.
    """

    pipeline: StepPipeline
    unsharder: Unsharder
    grads: GradReducer
    optimizer_of: Callable[[Param], UpdatingOptimizer | None]
    make_gradients: Callable[[], None]


class UpdateMode(UpdateHooks):
    """Interface of the five modes; see the module's docstring. One thread uses it at a time."""

    @abc.abstractmethod
    def attach(self, parts: ModeParts) -> None:
        """Take the collaborators. Called once, before anything else."""

    # -- a step, besides what `UpdateHooks` has ---------------------------------------------------

    @abc.abstractmethod
    def before_read(self, unit: Unit) -> None:
        """Undo the updates that ran ahead of their step, before the unit is read. Gathers call it
        while `guards_reads`, or where an alarm was sounded.
        """

    @property
    @abc.abstractmethod
    def guards_reads(self) -> bool:
        """True while a gather must call `before_read`. The mode sounds the engine's alarm when this
        becomes True."""

    @abc.abstractmethod
    def before_step(self) -> None:
        """Check the step before `opt.step()` touches anything. Raises: RuntimeError where no step
        can be taken.
        """

    @abc.abstractmethod
    def submit(self, by_unit: dict[Unit, dict[Param, Work]], optimizer: Grouped) -> None:
        """Submit the updates of `opt.step()`. Updates of the step before have ended. Does not block
        on I/O.

        optimizer: takes this step. Called also without any update.
        """

    @abc.abstractmethod
    def withdraw(self) -> None:
        """Undo all updates that ran ahead of their step: the states are those of the step before.
        Blocks until they are.
        """

    @abc.abstractmethod
    def undone(self) -> None:
        """Note that the states are those of the last commit again. Updates ahead of their step are
        gone.
        """

    @abc.abstractmethod
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for micro-batches that are not the last of a step. Raises: BudgetError
        where they need memory.
        """

    # -- between steps ----------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def stores_gradients(self) -> bool:
        """True if gradients wait in RAM for the step, and so need memory."""

    @abc.abstractmethod
    def allocate(self, flats: Sequence[Flat], spilled: Sequence[Flat]) -> None:
        """Make room for the mode's own memory for these flats, besides their states and gradients.
        Some gradients may spill.
        """

    @property
    @abc.abstractmethod
    def memory_bytes(self) -> int:
        """Bytes of the mode's own memory."""

    @property
    @abc.abstractmethod
    def fresh_bytes_peak(self) -> int:
        """The most bytes of gradients that lay outside of the engine's memory at once."""

    @abc.abstractmethod
    def check_whole(self) -> None:
        """Raise RuntimeError when some parameters of a step are updated and others are not: nothing
        can be saved or restored.
        """

    @abc.abstractmethod
    def restored(self, steps: int) -> None:
        """Note that the states are those after so many steps, of this run or another."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free the memory that `allocate` made. Nothing may be pending."""


class DeferredUpdate(UpdateMode):
    """Deferred updates (update="deferred"): `opt.step()` submits them all, and they run beside the
    next forward.

    Base of the other modes, which override the calls in which they differ.
    """

    _parts: ModeParts

    def __init__(self) -> None:
        self.delayed_params = None

    def attach(self, parts: ModeParts) -> None:
        self._parts = parts

    @property
    def _pipeline(self) -> StepPipeline:
        return self._parts.pipeline

    @property
    def _unsharder(self) -> Unsharder:
        return self._parts.unsharder

    @property
    def _grads(self) -> GradReducer:
        return self._parts.grads

    def _optimizer_of(self, param: Param) -> UpdatingOptimizer | None:
        return self._parts.optimizer_of(param)

    def _make_gradients(self) -> None:
        self._parts.make_gradients()

    # -- backward ---------------------------------------------------------------------------------

    @property
    def updates_pending(self) -> bool:
        return self._pipeline.updates_pending

    def backward_begin(self) -> None:
        # The first updates after a backward are those that the next forward wants first.
        self._pipeline.prefetch_states(Phase.TRAIN, in_memory=False)

    @property
    def on_gradient(self) -> OnGradient | None:
        return None

    def unit_released(self, unit: Unit) -> None:
        """Nothing: the update comes with the step."""

    def backward_end(self) -> None:
        """Nothing: gradients wait in their accumulators."""

    def backward_aborted(self) -> None:
        """Nothing: gradients that came are in their accumulators, and the loop clears them."""

    def before_assign(self, param: Param) -> None:
        """Nothing: gradients may be replaced until the step."""

    # -- the step ---------------------------------------------------------------------------------

    def before_read(self, unit: Unit) -> None:
        """Nothing: no update runs ahead of its step."""

    @property
    def guards_reads(self) -> bool:
        return False

    def before_step(self) -> None:
        """Nothing: a step may be taken whenever the loop asks for one."""

    def submit(self, by_unit: dict[Unit, dict[Param, Work]], _optimizer: Grouped) -> None:
        # In the order in which the next forward opens the gates.
        for unit in self._pipeline.next_order(list(by_unit)):
            work = by_unit[unit]
            # States may be read ahead now. The update itself waits until the gate opens, when the
            # unit has memory, or escapes.
            gate = self._pipeline.gate()
            ticket = self._pipeline.start(unit, work, accumulated_gradients(work), gate=gate)
            # The loop may clear or refill gradients right after the step; the accumulators wait for
            # the update that reads them.
            guard(work, ticket)
            self._unsharder.hand_over(unit, ticket, gate)

    def withdraw(self) -> None:
        """Nothing ran ahead."""

    def undone(self) -> None:
        """Nothing ran ahead."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    # -- between steps ----------------------------------------------------------------------------

    @property
    def stores_gradients(self) -> bool:
        return True

    def allocate(self, flats: Sequence[Flat], spilled: Sequence[Flat]) -> None:
        """Nothing is held besides states and gradients."""

    @property
    def memory_bytes(self) -> int:
        return 0

    @property
    def fresh_bytes_peak(self) -> int:
        return 0

    def check_whole(self) -> None:
        """A step is whole as soon as `opt.step()` returns."""

    def restored(self, steps: int) -> None:
        """Nothing here counts steps."""

    def close(self) -> None:
        """Nothing was made."""


__all__ = ["DeferredUpdate", "ModeParts", "UpdateMode", "UpdatingOptimizer"]
