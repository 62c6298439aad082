"""Update modes (`Policy.update`): when the update of a unit is submitted.

`UpdateMode` is the interface and the deferred mode; four other modes override some of its calls:

    UpdateMode         "deferred"               at opt.step(), behind gates that forward opens
    BackwardUpdate     "backward"               in backward, when a unit's gradients are complete
    SpeculativeUpdate  the same, generations=2  in backward; undone if the step needs another update
    DelayedUpdate      "delayed"                at opt.step(), overlapping the whole next step
    DeviceUpdate       update_on="device"       at opt.step(), by kernels of the device

Order of calls in a step (tests/data/call_order has the order for each mode):

    before_read(unit) *           a gather, while `guards_reads`
    backward_begin()              no_sync() is entered around micro-batches that are not the last
        before_read(unit) *
        on_gradient(param, grad) *  a gradient is complete, and the mode takes gradients
        unit_released(unit) *
    backward_end()                or backward_aborted(), when an interrupted backward is found
    before_step()                 opt.step() asks whether a step may be taken
    submit(work_by_unit)          opt.step() asks for these updates
    undo_ahead()                  a caller waits for the states: undo updates ahead of their step
    undone()                      a fault undid the step (two generations)

A mode is made first, and passed to the constructors of its callers. `attach` then gives it its
collaborators, whose constructors need the mode.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from infinity._src.memory.device import Device
from infinity._src.optim.step import (
    StepHooks,
    StepPipeline,
    UpdatingOptimizer,
    accumulated_gradients,
    first_updates,
    guard,
)
from infinity._src.optim.update_jobs import Work
from infinity._src.params.accumulator import AccumulatorState, GradAccumulator
from infinity._src.params.buffers import GradBuffers
from infinity._src.params.param_copies import DelayedParams
from infinity._src.params.prefetch_schedule import Phase
from infinity._src.params.reduce import GradReducer
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Param, Unit
from infinity._src.params.unshard import Unsharder


@dataclasses.dataclass(frozen=True)
class ModeParts:
    """A mode's collaborators.

    optimizer_of: returns the optimizer of a parameter, or None. make_gradients: allocates memory
    for gradients, if the mode had none so far.
    """

    pipeline: StepPipeline
    unsharder: Unsharder
    grads: GradReducer
    optimizer_of: Callable[[Param], UpdatingOptimizer | None]
    make_gradients: Callable[[], None]


class UpdateMode(StepHooks):
    """Interface of the five modes, and the deferred mode: `opt.step()` submits all updates, and
    they overlap with the next forward. Other modes override the calls in which they differ. One
    thread uses it at a time."""

    _parts: ModeParts

    def attach(self, parts: ModeParts) -> None:
        """Set the collaborators. Called once, before all other calls."""
        self._parts = parts

    # -- a step -----------------------------------------------------------------------------------

    @property
    def updates_pending(self) -> bool:
        return self._parts.pipeline.updates_pending

    def backward_begin(self) -> None:
        # The first updates after backward are those of the units that the next forward uses first.
        self._parts.pipeline.prefetch_states(Phase.TRAIN, in_memory=False)

    def before_read(self, unit: Unit) -> None:
        """Undo the updates that ran ahead of their step, before the unit is read. Gathers call this
        while `guards_reads`, or after an alarm was sounded.
        """

    @property
    def guards_reads(self) -> bool:
        """True while a gather must call `before_read`. The mode sounds the engine's alarm when this
        becomes True."""
        return False

    def submit(
        self,
        by_unit: dict[Unit, dict[Param, Work]],
        optimizer: UpdatingOptimizer,
    ) -> None:
        pipeline = self._parts.pipeline
        first_updates(by_unit, optimizer)
        # In the order in which the next forward opens the gates.
        for unit in pipeline.next_order(list(by_unit)):
            work = by_unit[unit]
            # States may be read now. The update waits until the gate opens, when the unit has
            # memory, or escapes.
            gate = pipeline.gate()
            ticket = pipeline.start(unit, work, accumulated_gradients(work), gate=gate)
            # The loop may clear or refill gradients right after the step; its writes wait until the
            # update has read them.
            guard(work, ticket)
            self._parts.unsharder.hand_over(unit, ticket, gate)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context for micro-batches that are not the last of a step. Raises: BudgetError if their
        gradients need memory that does not fit.
        """
        yield

    # -- between steps ----------------------------------------------------------------------------

    @property
    def stores_gradients(self) -> bool:
        """True if gradients wait for the step, and so need memory."""
        return True

    def allocate(self, flats: Sequence[Flat], spilled: Sequence[Flat]) -> None:
        """Allocate the mode's memory for these flats, in addition to their states and gradients.
        spilled: flats whose gradients rest on NVMe.
        """

    @property
    def memory_bytes(self) -> int:
        """Bytes of the memory that the mode has allocated."""
        return 0

    @property
    def fresh_bytes_peak(self) -> int:
        """Most bytes of gradients that lay outside of the engine's memory at once."""
        return 0

    def check_whole(self) -> None:
        """Raise RuntimeError when some parameters of a step are updated and others are not: then
        states can be neither saved nor restored.
        """

    def restored(self, steps: int) -> None:
        """Note that the restored states are those after `steps` steps, of this run or another."""

    def close(self) -> None:
        """Free the memory of `allocate`. No update may be pending."""


# -- delayed updates -------------------------------------------------------------------------------
# Source: ZeRO-Offload (arXiv 2101.06840), section 5.2. Forward computes with a second copy of the
# parameters in RAM (`params.param_copies`). Gradients have two sets of memory: the update reads one
# while backward fills the other. Numbers differ from those of the plain loop only by one step of
# delay, and do not depend on timing.
#
#     opt.step() t       starts update t; forwards compute with the parameters before update t
#     opt.step() t + 1   waits for update t; forwards compute with its result
#
# A skipped step (GradScaler found an inf, on_nonfinite="skip", no gradient at all) does not count.
# Update t stays the last one, the next forward computes with the same parameters as the forward of
# the skipped step, and `delayed_warmup` does not count it.
#
# A write to a parameter (in `gather()`, by `load_state_dict()`, as "master") goes to both copies.
# The next forward computes with the written value, and the next update changes it. `gather()` shows
# the newest parameters, with which training computes one step later. A training forward or backward
# inside of `gather()` is refused.


class DelayedUpdate(UpdateMode):
    """Submits updates whose results forward uses one step later. The first `warmup` steps are
    deferred updates."""

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
        # No prefetch while an update overlaps with the next step: the update keeps the drives busy.
        if not self._delayed.active:
            super().backward_begin()

    def allocate(self, flats: Sequence[Flat], spilled: Sequence[Flat]) -> None:
        """Allocate second copies of the parameters and a second set of gradients for these flats.
        Gradients of `spilled` rest on NVMe, and have no second set.
        """
        self._delayed.allocate(flats)
        self._gradients.allocate([flat for flat in flats if flat not in spilled])

    def close(self) -> None:
        """Free the second copies. The memory of gradients is freed with the last accumulator that
        refers to it. No update may be pending.
        """
        self._spare.clear()
        self._delayed.close()
        self._gradients.close()

    def submit(self, by_unit: dict[Unit, dict[Param, Work]], optimizer: UpdatingOptimizer) -> None:
        # A skipped step does not count: the delay does not advance.
        if not by_unit:
            return
        # Counted here and not in `count_step`: only steps that update something end the warm-up.
        self._taken += 1
        if self._taken <= self._warmup:
            super().submit(by_unit, optimizer)
            return
        first_updates(by_unit, optimizer)
        self._delayed.active = True
        # All units, also those without work: the copy of each gets the result of the last update.
        for unit in self._parts.pipeline.next_order(self._units):
            work = by_unit.get(unit)
            # A device may still be reading the old values from the copy.
            self._parts.unsharder.end_copies(unit)
            if self._delayed.refresh(unit) or (
                work is not None and self._parts.unsharder.shows_newest(unit)
            ):
                # The gathered unit has outdated parameters, and a graph that saved them may no
                # longer run backward.
                unit.generation += 1
                self._parts.unsharder.renew(unit)
            if work is None:
                continue
            self._parts.pipeline.start(unit, work, accumulated_gradients(work))
            # The next step refreshes the copy from the states that this update writes.
            self._delayed.outdated(unit)
            for param in work:
                assert param.grad is not None
                param.grad.guard(_Swap(self, param) if param.grad.backing is None else None)

    def swap(self, param: Param, accumulator: GradAccumulator) -> None:
        """Give the parameter's accumulator the other set's memory, since the update reads the
        present one."""
        accumulator.guard(None)
        read = accumulator.tensor
        # The first swap of an accumulator takes memory of the second set; a later swap takes the
        # memory that the swap before has replaced.
        spare = param in self._spare
        written = self._spare.pop(param) if spare else self._gradients.shard_of(param)
        # If the loop did not clear the gradient, it adds to it: copy the sum to the other memory.
        if accumulator.state is AccumulatorState.HELD:
            written.copy_(read)
        accumulator.tensor = written
        self._spare[param] = read


class _Swap(NamedTuple):
    """Reader that gives writers of an accumulator's storage other memory
    (`infinity._src.params.accumulator.AccumulatorReader`).
    """

    updates: DelayedUpdate
    param: Param

    def before_write(self, accumulator: GradAccumulator) -> None:
        self.updates.swap(self.param, accumulator)
