"""Update modes (`Policy.update`): when the update of a unit is submitted.

One interface, `UpdateMode`, which is the deferred mode, and four that override some of its calls:

    UpdateMode         "deferred"               at opt.step(), behind gates that forward opens
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
    undo_ahead()                  a caller waits for the states: undo updates ahead of their step
    undone()                      a fault undid the step (two generations)

A mode is made first and given by constructors to all callers. It gets its collaborators by the
one call of `attach`: they need the mode to be made.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from infinity._src.memory.device import Device
from infinity._src.optim.step import StepHooks, StepPipeline, accumulated_gradients, guard
from infinity._src.optim.step_consensus import Grouped
from infinity._src.optim.update_jobs import Work
from infinity._src.params.accumulator import AccumulatorState, GradAccumulator
from infinity._src.params.buffers import GradBuffers
from infinity._src.params.param_copies import DelayedParams
from infinity._src.params.prefetch_schedule import Phase
from infinity._src.params.reduce import GradReducer
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Param, Unit
from infinity._src.params.unshard import Unsharder


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


class UpdateMode(StepHooks):
    """Interface of the five modes, and the deferred one: `opt.step()` submits all updates, and they
    run beside the next forward. The other modes override the calls in which they differ. One thread
    uses it at a time."""

    _parts: ModeParts

    def attach(self, parts: ModeParts) -> None:
        """Take the collaborators. Called once, before anything else."""
        self._parts = parts

    # -- a step -----------------------------------------------------------------------------------

    @property
    def updates_pending(self) -> bool:
        return self._parts.pipeline.updates_pending

    def backward_begin(self) -> None:
        # The first updates after a backward are those that the next forward wants first.
        self._parts.pipeline.prefetch_states(Phase.TRAIN, in_memory=False)

    def before_read(self, unit: Unit) -> None:
        """Undo the updates that ran ahead of their step, before the unit is read. Gathers call it
        while `guards_reads`, or where an alarm was sounded.
        """

    @property
    def guards_reads(self) -> bool:
        """True while a gather must call `before_read`. The mode sounds the engine's alarm when this
        becomes True."""
        return False

    def submit(
        self,
        by_unit: dict[Unit, dict[Param, Work]],
        optimizer: Grouped,  # noqa: ARG002 - of the modes that update ahead
    ) -> None:
        pipeline = self._parts.pipeline
        # In the order in which the next forward opens the gates.
        for unit in pipeline.next_order(list(by_unit)):
            work = by_unit[unit]
            # States may be read ahead now. The update itself waits until the gate opens, when the
            # unit has memory, or escapes.
            gate = pipeline.gate()
            ticket = pipeline.start(unit, work, accumulated_gradients(work), gate=gate)
            # The loop may clear or refill gradients right after the step; the accumulators wait for
            # the update that reads them.
            guard(work, ticket)
            self._parts.unsharder.hand_over(unit, ticket, gate)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, micro-batches are not the last of a step. Raises: BudgetError where they need
        memory.
        """
        yield

    # -- between steps ----------------------------------------------------------------------------

    @property
    def stores_gradients(self) -> bool:
        """True if gradients wait in RAM for the step, and so need memory."""
        return True

    def allocate(self, flats: Sequence[Flat], spilled: Sequence[Flat]) -> None:
        """Make room for the mode's own memory for these flats, besides their states and gradients.
        Some gradients may spill.
        """

    @property
    def memory_bytes(self) -> int:
        """Bytes of the mode's own memory."""
        return 0

    @property
    def fresh_bytes_peak(self) -> int:
        """The most bytes of gradients that lay outside of the engine's memory at once."""
        return 0

    def check_whole(self) -> None:
        """Raise RuntimeError when some parameters of a step are updated and others are not: nothing
        can be saved or restored.
        """

    def restored(self, steps: int) -> None:
        """Note that the states are those after so many steps, of this run or another."""

    def close(self) -> None:
        """Free the memory that `allocate` made. Nothing may be pending."""


# -- delayed updates -------------------------------------------------------------------------------
# Source: ZeRO-Offload (arXiv 2101.06840), section 5.2. Parameters that compute are a second copy in
# RAM (`params.param_copies`). Gradients have two sets of memory: the update reads one while
# backward fills the other. Numbers differ from those of the plain loop by one step of delay and
# nothing else, and depend on no timing.
#
#     opt.step() t       starts update t; forwards compute with the parameters before update t
#     opt.step() t + 1   waits for update t; forwards compute with its result
#
# A skipped step (GradScaler found an inf, on_nonfinite="skip", no gradient at all) is no step.
# Update t stays the last one, the next forward computes with the same parameters as the skipped one
# did, and `delayed_warmup` does not count it.
#
# A write to a parameter (in `gather()`, by `load_state_dict()`, as "master") goes to both copies,
# whole. The next forward computes with the written value, and the next update changes it.
# `gather()` shows the newest parameters, with which training computes one step later. A training
# forward or backward of them inside is refused.


class DelayedUpdate(UpdateMode):
    """Submits updates whose result computes after the next step. The first `warmup` steps are
    deferred updates.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        store: StateStore,
        rank: int,
        grad_dtype: torch.dtype | None,
        device: Device,
        warmup: int,
    ) -> None:
        self._units = list(units)
        self._delayed = self.delayed_params = DelayedParams(store, device)
        self._gradients = GradBuffers(rank, grad_dtype, device)  # the second set
        self._warmup = warmup
        self._taken = 0  # steps that updated something
        self._spare: dict[Param, torch.Tensor] = {}

    @property
    def memory_bytes(self) -> int:
        return self._delayed.memory_bytes + self._gradients.size_bytes

    def restored(self, steps: int) -> None:
        self._taken = steps

    def backward_begin(self) -> None:
        # While an update overlaps with the step after it, the drives are busy with that.
        if not self._delayed.active:
            super().backward_begin()

    def allocate(self, flats: Sequence[Flat], spilled: Sequence[Flat]) -> None:
        """Make room for these flats' second copies and second gradients. Gradients of `spilled`
        rest on NVMe, once.
        """
        self._delayed.allocate(flats)
        self._gradients.allocate([flat for flat in flats if flat not in spilled])

    def close(self) -> None:
        """Free the second copies. The memory of gradients goes with the last accumulator that has
        it. Nothing may be pending.
        """
        self._spare.clear()
        self._delayed.close()
        self._gradients.close()

    def submit(self, by_unit: dict[Unit, dict[Param, Work]], optimizer: Grouped) -> None:
        # A skipped step is no step: the delay does not advance.
        if not by_unit:
            return
        # Counted here and not in `count_step`: only steps that update something end the warm-up.
        self._taken += 1
        if self._taken <= self._warmup:
            super().submit(by_unit, optimizer)
            return
        self._delayed.active = True
        # All units, also those without work: each takes over the result of the update before.
        for unit in self._parts.pipeline.next_order(self._units):
            work = by_unit.get(unit)
            # A device may still be copying the values before from there.
            self._parts.unsharder.end_copies(unit)
            if self._delayed.refresh(unit) or (
                work is not None and self._parts.unsharder.shows_newest(unit)
            ):
                # What is gathered shows the parameters before; a graph that saved them may no
                # longer run backward.
                unit.generation += 1
                self._parts.unsharder.renew(unit)
            if work is None:
                continue
            self._parts.pipeline.start(unit, work, accumulated_gradients(work))
            # From the next step on, the copy is refreshed from the states that this update writes.
            self._delayed.outdated(unit)
            for param in work:
                assert param.grad is not None
                param.grad.guard(_Swap(self, param) if param.grad.backing is None else None)

    def swap(self, param: Param, accumulator: GradAccumulator) -> None:
        """Give the parameter's accumulator the other memory: the update reads the present one."""
        accumulator.guard(None)
        read = accumulator.tensor
        # The first swap of an accumulator takes memory of the second set; later ones take back the
        # memory of the swap before.
        spare = param in self._spare
        written = self._spare.pop(param) if spare else self._gradients.shard_of(param)
        # The loop adds to a gradient that it has kept: the sum continues in the other memory.
        if accumulator.state is AccumulatorState.HELD:
            written.copy_(read)
        accumulator.tensor = written
        self._spare[param] = read


class _Swap(NamedTuple):
    """Reader of an accumulator's storage, while the next step writes elsewhere
    (`infinity._src.params.accumulator.AccumulatorReader`).
    """

    updates: DelayedUpdate
    param: Param

    def before_write(self, accumulator: GradAccumulator) -> None:
        self.updates.swap(self.param, accumulator)
