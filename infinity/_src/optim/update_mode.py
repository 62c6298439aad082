"""`Policy.update`: when the update of a unit is submitted, and what that needs of the engine.

One interface, `UpdateMode`, and five implementations of it:

    DeferredUpdate     "deferred"               at opt.step(), behind gates that forward opens
    BackwardUpdate     "backward"               in backward, when a unit's gradients are complete
    SpeculativeUpdate  the same, generations=2  in backward; undone where the step wants another
    DelayedUpdate      "delayed"                at opt.step(), beside the whole next step
    DeviceUpdate       update_on="device"       at opt.step(), by kernels of the device

Order of calls in a step (tests/data/call_order has it for each mode, to the line):

    before_read(unit) *           forward gathers a unit
    backward_begin()              no_sync() is entered around micro-batches that are not the last
        before_read(unit) *
        grad_ready(param, grad) *
        unit_released(unit) *
    backward_end()                backward_aborted() instead, when one that broke off is found
    before_step()                 opt.step() asks whether a step may be taken
    submit(work_by_unit)          opt.step() asks for these updates
    withdraw()                    somebody waits for the states: undo what ran ahead of its step
    undone()                      a fault undid the step (two generations)

A mode is made first and given to all who call it by their constructors; it gets its own
collaborators, which need the mode to be made, by the one call of `attach`.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from infinity._src.grads.reduce import GradReducer
from infinity._src.optim.step import StepPipeline, guard, slot_gradients
from infinity._src.optim.step_consensus import Grouped
from infinity._src.optim.update_jobs import Work
from infinity._src.params.prefetch_schedule import Phase
from infinity._src.params.unit import Flat, Param, Unit
from infinity._src.params.unshard import Unsharder
from infinity._src.params.update_hooks import UpdateHooks


class Holder(Grouped, Protocol):
    """What updates in backward need of the optimizer that holds a parameter."""

    @property
    def held(self) -> list[Param]:
        """The parameters that it keeps states for."""

    def take_groups(self) -> None:
        """A step begins: find each parameter's group anew."""

    def preview(self, params: Sequence[Param]) -> tuple[list[Work], list[dict[str, Any]]]:
        """The work of a step that would be taken now, and the states it would leave. Changes
        nothing."""

    def work_of(self, params: Sequence[Param]) -> list[Work]:
        """The work of the step that is being taken for these parameters; counts it in their step
        numbers."""


@dataclasses.dataclass(frozen=True)
class ModeParts:
    """A mode's collaborators.

    holder_of: the optimizer of a parameter, None without one. make_gradients: gives gradients
    memory, where the mode did without.
    """

    pipeline: StepPipeline
    unsharder: Unsharder
    grads: GradReducer
    holder_of: Callable[[Param], Holder | None]
    make_gradients: Callable[[], None]


class UpdateMode(UpdateHooks):
    """When updates happen; see the module's docstring. One thread uses it at a time."""

    @abc.abstractmethod
    def attach(self, parts: ModeParts) -> None:
        """Take the collaborators. Called once, before anything else."""

    # -- a step, besides what `UpdateHooks` has ---------------------------------------------------

    @abc.abstractmethod
    def before_read(self, unit: Unit) -> None:
        """Somebody wants the unit's values: roll back an update that ran ahead of its step."""

    @abc.abstractmethod
    def before_step(self) -> None:
        """`opt.step()` has touched nothing yet. Raises: RuntimeError where no step can be taken."""

    @abc.abstractmethod
    def submit(self, by_unit: dict[Unit, dict[Param, Work]]) -> None:
        """Do what `opt.step()` asks for. The updates of the step before have ended. Does not block
        on I/O.

        Called within the step of `StepPipeline.stepping`, also when nothing is asked for.
        """

    @abc.abstractmethod
    def withdraw(self) -> None:
        """Take back all that ran ahead of its step: the states are those of the step before. Blocks
        until it has ended."""

    @abc.abstractmethod
    def undone(self) -> None:
        """The states are those of the last commit again: what ran ahead of its step is gone."""

    @abc.abstractmethod
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside are micro-batches that are not the last of a step. Raises: BudgetError where they
        need memory."""

    # -- between steps ----------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def stores_gradients(self) -> bool:
        """Whether gradients wait in RAM for the step, and so need memory."""

    @abc.abstractmethod
    def allocate(self, flats: Sequence[Flat], spilled: Sequence[Flat]) -> None:
        """Make room for what the mode holds of these flats besides their states and gradients, of
        which some may spill."""

    @property
    @abc.abstractmethod
    def memory_bytes(self) -> int:
        """Bytes of that room."""

    @property
    @abc.abstractmethod
    def fresh_bytes_peak(self) -> int:
        """The most bytes of gradients that lay outside of the engine's memory at once."""

    @abc.abstractmethod
    def check_whole(self) -> None:
        """Raise RuntimeError when some parameters of a step are updated and others are not: nothing
        can be saved or restored."""

    @abc.abstractmethod
    def restored(self, steps: int) -> None:
        """The states are those after so many steps, of this run or another."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free what `allocate` made. Nothing may be pending."""


class DeferredUpdate(UpdateMode):
    """update="deferred": all of a step is submitted by `opt.step()`, and runs beside the next
    forward.

    Base of the other modes, which say in what they differ.
    """

    _pipeline: StepPipeline
    _unsharder: Unsharder
    _grads: GradReducer
    _holder_of: Callable[[Param], Holder | None]
    _make_gradients: Callable[[], None]

    def __init__(self) -> None:
        self.delayed_params = None

    def attach(self, parts: ModeParts) -> None:
        self._pipeline = parts.pipeline
        self._unsharder = parts.unsharder
        self._grads = parts.grads
        self._holder_of = parts.holder_of
        self._make_gradients = parts.make_gradients

    # -- backward ---------------------------------------------------------------------------------

    @property
    def updates_pending(self) -> bool:
        return self._pipeline.updates_pending

    def backward_begin(self) -> None:
        # The first updates after a backward are those that the next forward wants first.
        self._pipeline.read_ahead(Phase.TRAIN, given=False)

    def grad_ready(self, param: Param, grad: torch.Tensor) -> None:
        self._grads.accumulate(param, grad)

    def unit_released(self, unit: Unit) -> None:
        """Nothing: the update comes with the step."""

    def backward_end(self) -> None:
        """Nothing: gradients wait in their slots."""

    def backward_aborted(self) -> None:
        """Nothing: gradients that came are in their slots, and the loop clears them."""

    def before_assign(self, param: Param) -> None:
        """Nothing: gradients may be replaced until the step."""

    # -- the step ---------------------------------------------------------------------------------

    def before_read(self, unit: Unit) -> None:
        """Nothing: no update runs ahead of its step."""

    def before_step(self) -> None:
        """Nothing: a step may be taken whenever the loop asks for one."""

    def submit(self, by_unit: dict[Unit, dict[Param, Work]]) -> None:
        # In the order in which the next forward opens the gates.
        for unit in self._pipeline.next_order(list(by_unit)):
            work = by_unit[unit]
            gate = self._pipeline.gate()
            ticket = self._pipeline.start(unit, work, slot_gradients(work), gate=gate)
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


__all__ = ["DeferredUpdate", "Holder", "ModeParts", "UpdateMode"]
