"""Speculative updates (update="backward" with two generations): units update while backward runs,
for every loop.

    backward of unit k ends, and it is the last micro-batch as far as steps before tell
        -> UPDATE of unit k to its other place, from the gradients in their accumulators, which stay
    opt.step()   it asks for the update that was made          -> the update is part of the step
                 it asks for another one (clipped, another lr) -> undo it; update from the old
                 states
                 gradients that are not finite                 -> undo it
    a forward, another backward, a read of any state before opt.step() -> undo it

The program's order and its numbers decide, never timing. The last steps decide whether to
speculate. After two failures within `MEMORY` steps (a failure is an undone update, or one that no
step came for) units wait for opt.step(), as with update="deferred", until `MEMORY` steps in a row
would have been right.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from infinity._src.base.alarm import Alarm
from infinity._src.base.torch_compat import NO_TASK, graph_task_id
from infinity._src.memory.constants import LAG_UNITS
from infinity._src.memory.device import Device
from infinity._src.optim.step import accumulated_gradients, guard
from infinity._src.optim.step_consensus import Grouped
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
"""Steps that are remembered."""


@dataclasses.dataclass
class _Ahead:
    """An update that ran ahead of its step, with its HYPER record (as bytes) for each parameter.

    ticket: None while it is submitted. age: the unit's generation before it. Undoing it restores
    that generation: a graph that saved those values may still run backward.
    """

    rows: dict[Param, bytes]
    age: int
    ticket: Ticket | None = None


class History:
    """Record of the last steps: decides if speculating pays. Pure."""

    def __init__(self) -> None:
        self._right: deque[bool] = deque(maxlen=MEMORY)
        self.speculates = True

    def add(self, right: bool) -> None:
        """Add a step. right: the step asked for the update that was, or would have been, made in
        backward.
        """
        self._right.append(right)
        # Two, not one: a single clipped step among many is no pattern.
        wrong = self._right.count(False)
        if self.speculates and wrong >= 2:
            self.speculates = False
        elif not self.speculates and not wrong and len(self._right) == MEMORY:
            self.speculates = True


class SpeculativeUpdate(UpdateMode):
    """Updates that run ahead of their step. Gradients wait, as with update="deferred"."""

    def __init__(self, *, device: Device, passes: PassTracker, alarm: Alarm) -> None:
        self._alarm = alarm
        self._guards_reads = False
        # Behind a device that copies, gradients come some units later.
        self._lag_units = LAG_UNITS if device.copies else 0
        self._passes = passes
        self._ready: set[Unit] = set()  # units that got gradients in this backward
        self._due: deque[Unit] = deque()  # whose gradients are on their way from the device
        self._ahead: dict[Unit, _Ahead] = {}
        self._backwards = 0  # since the last step
        self._expected = 0  # backwards of the step before; 0: none was taken yet
        self._marked = False  # handle.no_sync() says which backward is the last
        # False until this backward's first gradient shows if gradients were cleared before it.
        self._counted = True
        # Backwards since the last step that were expected to be the last before the next one.
        self._lasts = 0
        # True if a caller has looked at the states since the last backward began.
        self._states_seen = False
        self._accumulating = False  # inside no_sync
        self.history = History()

    @property
    def _transaction(self) -> Transaction:
        transaction = self._parts.pipeline.transaction
        assert transaction is not None, "Policy sees to it that there are two generations"
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
        """True if this backward is the last before opt.step(), as far as can be told."""
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
            # A step that was left out (GradScaler) has cleared the gradients, so this backward is
            # the first of the next step.
            if param.at_rest.grad is None:
                self._backwards = 1
        self._parts.grads.accumulate(param, grad)
        # Also in micro-batches before the last: `_is_last` is asked when the unit is done.
        self._ready.add(param.unit)

    def backward_begin(self) -> None:
        self.undo_ahead()
        self._guard_reads()
        self._states_seen = False
        self._ready.clear()
        self._due.clear()
        self._backwards += 1
        self._counted = False
        self._marked = self._marked or self._accumulating
        goes = self._is_last and self.history.speculates
        # Another backward comes before the step, so nothing is worth reading ahead yet.
        later = self._accumulating or self._backwards < self._expected
        if goes:
            # The first updates come in this backward.
            self._parts.pipeline.prefetch_states(Phase.BACKWARD, in_memory=True)
        elif not (later and self.history.speculates):
            # The updates that the next forward wants first. With another backward to come and
            # speculation on, that backward's updates are the first to read.
            self._parts.pipeline.prefetch_states(Phase.TRAIN, in_memory=False)

    def backward_end(self) -> None:
        while self._due:
            self._speculate(self._due.popleft())
        # By index: a set's order follows memory addresses, and ranks must agree.
        for unit in sorted(self._ready, key=lambda unit: unit.index):
            self._speculate(unit)
        self._ready.clear()
        self._lasts += self._is_last

    def unit_released(self, unit: Unit) -> None:
        if unit in self._ready and graph_task_id() != NO_TASK and self._passes.all_ended(unit):
            self._ready.discard(unit)
            self._due.append(unit)
            # Waiting for the last one's gradients would let the device run dry.
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
        # Two optimizers step at two times, so neither step can take the whole unit.
        if holder is None or len(holders) > 1:
            return
        # The step before is committed here, so that an undo goes back to it.
        self._parts.pipeline.begin()
        if any(param.grad is not None and param.grad.backing is not None for param in params):
            self._parts.grads.flush_spilled(unit)
        holder.refresh_groups()
        # A preview: counts advance only when the step asks for this update.
        work = {item.param: item for item in holder.preview(params)[0]}
        in_place = self._parts.unsharder.can_update_in_place(unit)
        # The gathered unit gets the new parameters; an undo marks it stale.
        targets = self._parts.unsharder.targets(unit) if in_place else ()
        ahead = _Ahead(
            {param: item.hyper.tobytes() for param, item in work.items()}, unit.generation
        )
        # Before the start: an interrupt must not leave an update without a record.
        self._ahead[unit] = ahead
        ahead.ticket = self._parts.pipeline.start(
            unit, work, accumulated_gradients(work), targets=targets
        )
        for param in params:
            assert param.grad is not None
            param.grad.guard(_UndoOnWrite(self, unit))
        self._parts.unsharder.updated(unit, ahead.ticket, in_place=in_place)

    # -- back --------------------------------------------------------------------------------------

    def undo_unit(self, unit: Unit) -> None:
        """Undo the unit's update: its gradients are about to change, or a caller reads its
        values."""
        self._states_seen = True
        self._undo([unit])

    def undo_ahead(self) -> None:
        self._states_seen = True
        self._undo(list(self._ahead))
        # No write until the step comes is a part of it.
        self._parts.pipeline.begun = False
        self._guards_reads = False

    def before_step(self) -> None:
        # The step makes reads see other states.
        self._guard_reads()

    def _guard_reads(self) -> None:
        """Have gathers call `before_read`, until `undo_ahead` has undone all updates."""
        self._guards_reads = True
        self._alarm.sound()

    @property
    def guards_reads(self) -> bool:
        return self._guards_reads

    def before_read(self, unit: Unit) -> None:
        # Not this backward, if one runs, where the unit's update ran ahead: a hook inside.
        # Outside of backward a caller sees all states, so all updates go.
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
                # The rollback follows, and the update must not write after it.
                wait_through(ahead.ticket)
            for param in ahead.rows:
                if param.grad is not None:
                    param.grad.guard(None)
        # A failed update has undone all of them.
        self._parts.pipeline.raise_fault()
        unchanged = [unit for unit, ahead in gone.items() if unit.generation == ahead.age + 1]
        # Flips nothing: the committed places were never written.
        self._transaction.undo_units(list(gone))
        for unit in unchanged:
            unit.generation = gone[unit].age
        # Last: after an interrupt the next call undoes the units that remain.
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

    def submit(self, by_unit: dict[Unit, dict[Param, Work]], optimizer: Grouped) -> None:
        self._passes.step_taken()
        left, wrong = dict(by_unit), []
        for unit, ahead in self._ahead.items():
            wanted = {param: item.hyper.tobytes() for param, item in by_unit.get(unit, {}).items()}
            # Compared as bytes, so that equal means the same bits of every scalar, step counts and
            # clipping factors included.
            if ahead.ticket is not None and wanted == ahead.rows:
                del left[unit]
                guard(wanted, ahead.ticket)
            else:
                wrong.append(unit)
        self._parts.pipeline.updates_ahead += len(self._ahead) - len(wrong)
        # Before the submissions below: those units start from the committed states again.
        self._undo(wrong)
        self._ahead.clear()
        if by_unit:
            # Right is exactly one backward taken for the last: an update that no step came for was
            # in vain, too. Before the first step nothing is expected.
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
    """Reader of an accumulator's storage. When the loop changes the gradient, the update was of
    another one, and is undone.
    """

    updates: SpeculativeUpdate
    unit: Unit

    def before_write(self, _accumulator: GradAccumulator) -> None:
        self.updates.undo_unit(self.unit)


def _is_untouched(unit: Unit) -> bool:
    """Return True if the loop left the unit's gradients as backward made them: an update in
    backward would have read the same.
    """
    return all(
        is_exact(entry)
        for param in unit.params
        if param.grad is not None
        for entry in param.grad.log
    )
