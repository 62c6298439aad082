"""Speculative updates (update="backward" with two generations): units update while backward runs,
for every loop.

    backward of unit k ends, in the last micro-batch (predicted from the step before)
        -> UPDATE of unit k to its second place, from gradients that stay in their accumulators
    opt.step()   asks for the same update                         -> the update becomes part of the
                                                                     step
                 asks for another update (clipped, another lr)    -> undo the update, and update
                                                                     from the old states
                 finds gradients that are not finite              -> undo the update
    a forward, another backward, a read of any state before opt.step() -> undo the update

The order of the program's calls and its numbers decide, never timing. The last steps decide whether
to speculate. A failure is an undone update, or an update without a step. After two failures within
`MEMORY` steps units wait for opt.step(), as with update="deferred", until the prediction would have
been right in `MEMORY` consecutive steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from infinity._src.base.alarm import Alarm
from infinity._src.base.torch_compat import NO_TASK, graph_task_id
from infinity._src.memory.constants import LAG_UNITS, UNITS_AHEAD
from infinity._src.memory.device import Device
from infinity._src.optim.backward_update import wait_filled_quietly
from infinity._src.optim.step import (
    UpdatingOptimizer,
    accumulated_gradients,
    gradients_in_ram,
    guard,
)
from infinity._src.optim.step_consensus import nonfinite_anywhere
from infinity._src.optim.transaction import Transaction
from infinity._src.optim.update_jobs import Work
from infinity._src.optim.update_mode import UpdateMode
from infinity._src.params.accumulator import (
    AccumulatorState,
    GradAccumulator,
    is_exact,
    wait_through,
)
from infinity._src.params.prefetch_schedule import PassTracker, Phase
from infinity._src.params.unit import Param, Unit
from infinity._src.params.update_hooks import OnGradient
from infinity.aio import Ticket

MEMORY = 4
"""Number of the last steps that `History` records."""


@dataclasses.dataclass
class _Ahead:
    """An update that ran ahead of its step.

    rows: the scalars of each parameter (`Work.rows`). ticket: None until the submission returns.
    age: the unit's generation before the update. An undo restores this generation, since a graph
    that saved the old values may still run backward.
    """

    rows: dict[Param, bytes]
    age: int
    ticket: Ticket | None = None


class History:
    """Record of the last steps, which decides whether to speculate. No side effects."""

    def __init__(self) -> None:
        self._right: deque[bool] = deque(maxlen=MEMORY)
        self.speculates = True

    def add(self, right: bool) -> None:
        """Add a step. right: the step asked for the update that backward made, or would have made.
        """
        self._right.append(right)
        # Two, not one: a single clipped step among many must not end speculation.
        wrong = self._right.count(False)
        if self.speculates and wrong >= 2:
            self.speculates = False
        elif not self.speculates and not wrong and len(self._right) == MEMORY:
            self.speculates = True


class SpeculativeUpdate(UpdateMode):
    """Update mode whose updates run ahead of their step. Gradients stay in accumulators, as with
    update="deferred".
    """

    def __init__(self, *, device: Device, passes: PassTracker, alarm: Alarm) -> None:
        self._alarm = alarm
        self._guards_reads = False
        # On a device with separate memory gradients reach their accumulators some units later.
        self._lag_units = LAG_UNITS if device.copies else 0
        self._passes = passes
        self._ready: set[Unit] = set()  # units that got gradients in this backward
        self._due: deque[Unit] = deque()  # units whose D2H copies of gradients are in flight
        self._ahead: dict[Unit, _Ahead] = {}
        self._backwards = 0  # since the last step
        self._expected = 0  # backwards of the step before; 0 before the first step
        self._marked = False  # True if handle.no_sync() marks the last backward of this step
        # False until the first gradient of this backward shows whether the loop cleared gradients.
        self._counted = True
        # Backwards since the last step that were expected to be the last before the next one.
        self._lasts = 0
        # Copies of gradients as matrices, which updates of whole matrices read.
        self._matrices: deque[tuple[Ticket, list[torch.Tensor]]] = deque()
        # Optimizers that have looked up their groups in this backward.
        self._refreshed: set[UpdatingOptimizer] = set()
        # True if a caller has looked at the states since the last backward began.
        self._states_seen = False
        self._accumulating = False  # inside no_sync
        self.history = History()

    @property
    def _transaction(self) -> Transaction:
        transaction = self._parts.pipeline.transaction
        assert transaction is not None, "Policy requires two generations"
        return transaction

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    # -- backward ----------------------------------------------------------------------------------

    @property
    def _is_last(self) -> bool:
        """True if this backward is predicted to be the last before opt.step()."""
        if self._accumulating:
            return False
        return self._marked or self._backwards == self._expected

    @property
    def on_gradient(self) -> OnGradient:
        return self.grad_ready

    def grad_ready(self, param: Param, grad: torch.Tensor) -> None:
        """Accumulate a gradient, and note that its unit may be updated in this backward."""
        if not self._counted:
            self._counted = True
            # The loop cleared the gradients without a step (GradScaler skipped the step), so this
            # backward is the first of the next step.
            if param.at_rest.grad is None:
                self._backwards = 1
        self._parts.grads.accumulate(param, grad)
        # Also in micro-batches before the last: `_speculate` checks `_is_last`.
        self._ready.add(param.unit)

    def backward_begin(self) -> None:
        self.undo_ahead()
        self._guard_reads()
        self._states_seen = False
        self._ready.clear()
        self._due.clear()
        self._refreshed.clear()
        self._backwards += 1
        self._counted = False
        self._marked = self._marked or self._accumulating
        goes = self._is_last and self.history.speculates
        # Another backward is expected before the step.
        later = self._accumulating or self._backwards < self._expected
        if goes:
            # The first updates run in this backward.
            self._parts.pipeline.prefetch_states(Phase.BACKWARD, in_memory=True)
        elif not (later and self.history.speculates):
            # Prefetch for opt.step(), in the order in which the next forward uses the units. If
            # another backward is expected and speculation is on, prefetch nothing: the updates of
            # that backward read states first.
            self._parts.pipeline.prefetch_states(Phase.TRAIN, in_memory=False)

    def backward_end(self) -> None:
        while self._due:
            self._speculate(self._due.popleft())
        # By index: the iteration order of a set may differ by rank, and ranks must agree.
        for unit in sorted(self._ready, key=lambda unit: unit.index):
            self._speculate(unit)
        self._ready.clear()
        self._lasts += self._is_last

    def unit_released(self, unit: Unit) -> None:
        if unit in self._ready and graph_task_id() != NO_TASK and self._passes.all_ended(unit):
            self._ready.discard(unit)
            self._due.append(unit)
            # A wait for the gradients of the last unit would leave the device idle.
            while len(self._due) > self._lag_units:
                self._speculate(self._due.popleft())

    def _speculate(self, unit: Unit) -> None:
        """Submit the unit's update ahead of the step, from the gradients in their accumulators."""
        if not (self._is_last and self.history.speculates) or unit in self._ahead:
            return
        params = [
            param
            for param in unit.params
            if param.grad is not None and param.grad.state is AccumulatorState.HELD
        ]
        holders = {id(holder): holder for holder in map(self._parts.optimizer_of, params)}
        holder = next(iter(holders.values()), None)
        # Two optimizers step at different times, so no single step could take the unit's update.
        if holder is None or len(holders) > 1:
            return
        # The step before is committed here, so that an undo goes back to it.
        self._parts.pipeline.begin()
        if any(param.grad is not None and param.grad.backing is not None for param in params):
            self._parts.grads.flush_spilled(unit)
        if holder not in self._refreshed:
            # `refresh_groups` takes time for each parameter, so call it once in a backward.
            holder.refresh_groups()
            self._refreshed.add(holder)
        # A preview: step counts advance only in opt.step().
        work = {item.param: item for item in holder.preview(params)[0]}
        firsts = {param: item for param, item in work.items() if item.first is not None}
        # A matrix that is not finite would be refused. The step applies `on_nonfinite` instead.
        if firsts and nonfinite_anywhere(self._parts.pipeline.comm, list(firsts)):
            return
        in_place = self._parts.unsharder.can_update_in_place(unit)
        # The gathered unit gets the new parameters; an undo marks it stale.
        targets = self._parts.unsharder.targets(unit) if in_place else ()
        ahead = _Ahead({param: item.rows for param, item in work.items()}, unit.generation)
        # Recorded before the update starts: after an interrupt each update has a record.
        self._ahead[unit] = ahead
        matrices = self._make_matrices(firsts, holder)
        gradients = {**accumulated_gradients(work), **matrices}
        ahead.ticket = self._parts.pipeline.start(unit, work, gradients, targets=targets)
        if matrices:
            self._matrices.append((ahead.ticket, list(matrices.values())))
        for param in params:
            assert param.grad is not None
            param.grad.guard(_UndoOnWrite(self, unit))
        self._parts.unsharder.updated(unit, ahead.ticket, in_place=in_place)

    def _make_matrices(
        self, firsts: dict[Param, Work], holder: UpdatingOptimizer
    ) -> dict[Param, torch.Tensor]:
        """Do the first updates of an optimizer of whole matrices, in copies of the gradients, which
        an undo needs again. Blocks while too many copies wait for their updates."""
        while self._matrices and (
            self._matrices[0][0].filled or len(self._matrices) >= UNITS_AHEAD
        ):
            wait_filled_quietly(self._matrices[0][0])
            self._matrices.popleft()
        if not firsts:
            return {}
        return holder.make_matrices(firsts, gradients_in_ram(firsts), owned=())

    # -- undo --------------------------------------------------------------------------------------

    def undo_unit(self, unit: Unit) -> None:
        """Undo the unit's update: its gradients are about to change, or a caller reads its
        values."""
        self._states_seen = True
        self._undo([unit])

    def undo_ahead(self) -> None:
        self._states_seen = True
        self._undo(list(self._ahead))
        # Writes between here and opt.step() are not part of that step.
        self._parts.pipeline.begun = False
        self._guards_reads = False

    def before_step(self) -> None:
        # The step changes which states a read must see.
        self._guard_reads()

    def _guard_reads(self) -> None:
        """Have gathers call `before_read`, until `undo_ahead` has undone all updates."""
        self._guards_reads = True
        self._alarm.sound()

    @property
    def guards_reads(self) -> bool:
        return self._guards_reads

    def before_read(self, unit: Unit) -> None:
        # During backward (a hook reads the unit) undo the update of this unit only. Outside of
        # backward the caller may read any state, so undo all updates.
        if not self._passes.in_backward:
            self.undo_ahead()
        elif unit in self._ahead:
            self.undo_unit(unit)

    def _undo(self, units: Sequence[Unit]) -> None:
        """Undo the updates of these units that ran ahead. Blocks until they are undone."""
        gone = {unit: self._ahead[unit] for unit in units if unit in self._ahead}
        if not gone:
            return
        for ahead in gone.values():
            if ahead.ticket is not None:
                # The update must have ended before the rollback below.
                wait_through(ahead.ticket)
            for param in ahead.rows:
                if param.grad is not None:
                    param.grad.guard(None)
        # On one rank a failed update raises here.
        self._parts.pipeline.raise_fault()
        unchanged = [unit for unit, ahead in gone.items() if unit.generation == ahead.age + 1]
        # The updates wrote only to second places: the committed places stay as they are.
        self._transaction.undo_units(list(gone))
        for unit in unchanged:
            unit.generation = gone[unit].age
        # Removed last: after an interrupt the next call undoes the remaining units.
        for unit in gone:
            del self._ahead[unit]
        self._parts.pipeline.updates_withdrawn += len(gone)

    def undone(self) -> None:
        self._ahead.clear()

    def backward_aborted(self) -> None:
        self._ready.clear()
        self._due.clear()
        self.undo_ahead()

    # -- the step ----------------------------------------------------------------------------------

    def submit(self, by_unit: dict[Unit, dict[Param, Work]], optimizer: UpdatingOptimizer) -> None:
        self._passes.step_taken()
        left, wrong = dict(by_unit), []
        for unit, ahead in self._ahead.items():
            items = by_unit.get(unit, {})
            wanted = {param: item.rows for param, item in items.items()}
            # A comparison of bytes: equal records have the same bits in every scalar, step counts
            # and clipping factors included.
            if ahead.ticket is not None and wanted == ahead.rows:
                del left[unit]
                guard(wanted, ahead.ticket)
                for param, item in items.items():
                    # As in a step whose updates did not run ahead.
                    if item.first is not None and param.grad is not None:
                        param.grad.consume()
            else:
                wrong.append(unit)
        self._parts.pipeline.updates_ahead += len(self._ahead) - len(wrong)
        # Before the submissions below: the undone units update from the committed states.
        self._undo(wrong)
        self._ahead.clear()
        if by_unit:
            # The prediction was right if exactly one backward since the last step was predicted to
            # be the last. Before the first step no prediction exists.
            foreseen = self._lasts == 1 or not (self._lasts or self._expected)
            self.history.add(
                foreseen
                and not wrong
                and not self._states_seen
                and all(map(_is_untouched, by_unit))
            )
        self._expected, self._backwards, self._marked, self._lasts = self._backwards, 0, False, 0
        # Units without an update ahead, also after an undo, are submitted as deferred.
        super().submit(left, optimizer)


@dataclasses.dataclass(frozen=True)
class _UndoOnWrite:
    """Guard of an accumulator: undoes the unit's update before the loop changes the gradient that
    the update has read.
    """

    updates: SpeculativeUpdate
    unit: Unit

    def before_write(self, _accumulator: GradAccumulator) -> None:
        self.updates.undo_unit(self.unit)


def _is_untouched(unit: Unit) -> bool:
    """Return True if the loop has not changed the unit's gradients since backward made them, so
    that an update in backward would have read the same gradients.
    """
    return all(
        is_exact(entry)
        for param in unit.params
        if param.grad is not None
        for entry in param.grad.log
    )
