"""Updates in backward (update="backward"): a unit is updated as soon as backward has computed its
gradients, which are then freed.

    backward of unit k ends (the unit is not in use, and no further gradient is expected)
        -> UPDATE of unit k: gradients directly from autograd; parameters from the gathered unit,
           which gets the new parameters
    backward of unit k-1 continues meanwhile
    opt.step()   counts the step, and updates the parameters that backward did not update

All micro-batches except the last run in `handle.no_sync()`: they accumulate in gradient memory, and
the last one adds to it. The update's scalars are captured in backward, so they must be set before
backward, as schedulers do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from infinity._src.base.torch_compat import NO_TASK, graph_task_id
from infinity._src.kernels.update import all_finite
from infinity._src.memory.constants import LAG_UNITS, UNITS_AHEAD
from infinity._src.memory.device import Device
from infinity._src.memory.device_capacity import overlap_bytes
from infinity._src.optim.grad_windows import GradWindows
from infinity._src.optim.step import UpdatingOptimizer, guard
from infinity._src.optim.step_consensus import Grouped, first_anywhere, values_of
from infinity._src.optim.update_jobs import Work
from infinity._src.optim.update_mode import UpdateMode
from infinity._src.params.accumulator import AccumulatorState
from infinity._src.params.prefetch_schedule import PassTracker, Phase
from infinity._src.params.unit import Flat, Param, Unit
from infinity._src.params.update_hooks import OnGradient
from infinity.aio import Ticket
from infinity.errors import AioError, NonFiniteGradient, StateInvalid


@dataclasses.dataclass
class _Flight:
    """A pending update and the fresh gradients that it reads. size_bytes: of these gradients, 0 for
    gradients in windows."""

    ticket: Ticket
    gradients: list[torch.Tensor]
    size_bytes: int


class BackwardUpdate(UpdateMode):
    """Updates units as backward completes their gradients. Parameters without an optimizer
    accumulate as usual.

    dtype_of: returns the dtype of a flat's accumulated gradients.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        device: Device,
        passes: PassTracker,
        dtype_of: Callable[[Flat], torch.dtype],
        on_nonfinite: str,
    ) -> None:
        self._passes = passes
        self._on_nonfinite = on_nonfinite
        # Complete gradients; None for a gradient whose sum has spilled.
        self._ready: dict[Unit, dict[Param, torch.Tensor | None]] = {}
        # Bytes of gradients outside of accumulators and windows that wait for updates.
        self._fresh_bytes = 0
        # Backward waits for updates when more than these bytes of gradients are alive.
        self._bytes_max = overlap_bytes([unit.size_bytes for unit in units], UNITS_AHEAD)
        self._flights: deque[_Flight] = deque()
        self._updated: set[Param] = set()  # updated since the last step
        self._captured: weakref.WeakKeyDictionary[Grouped, list[dict[str, Any]]] = (
            weakref.WeakKeyDictionary()
        )
        self._windows = GradWindows(units, device, dtype_of) if device.copies else None
        self._accumulating = False  # inside no_sync
        # True once micro-batches were accumulated: gradients have memory from then on.
        self._accumulated = False
        self._fresh_bytes_peak = 0

    @property
    def stores_gradients(self) -> bool:
        """True once micro-batches were accumulated."""
        return self._accumulated

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        # If gradients are reduced later, their unreduced sums have separate memory.
        if not (self._accumulated or self._parts.grads.reduces_later):
            self._accumulated = True
            try:
                self._parts.make_gradients()
            except BaseException:
                self._accumulated = False
                raise
        # Contexts may be nested; the outermost ends the accumulation.
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def check_whole(self) -> None:
        if self._updated:
            raise RuntimeError(
                "between backward and opt.step(), with update='backward', some parameters are "
                "updated already: save and restore after opt.step()"
            )

    @property
    def fresh_bytes_peak(self) -> int:
        return self._fresh_bytes_peak

    def allocate(self, flats: Sequence[Flat], spilled: Sequence[Flat]) -> None:  # noqa: ARG002
        """Grow the windows to fit all parameters that are trainable now. No update may be pending.
        """
        if self._windows is not None:
            self._windows.grow()

    def close(self) -> None:
        """Free gradients and windows. No update may be pending."""
        self._ready.clear()
        self._flights.clear()
        if self._windows is not None:
            self._windows.close()

    # -- gradients ---------------------------------------------------------------------------------

    @property
    def on_gradient(self) -> OnGradient:
        return self.grad_ready

    def grad_ready(self, param: Param, grad: torch.Tensor) -> None:
        """Add a gradient to the unit's update, or, in `no_sync` and for a parameter without an
        optimizer, to its accumulator. Raises: RuntimeError if the parameter was already updated.
        """
        held = self._parts.optimizer_of(param) is not None
        if held and self._accumulating:
            self._check_not_updated(param)
        if not held or self._accumulating:
            self._parts.grads.accumulate(param, grad)
            return
        accumulator = self._parts.grads.accumulator(param)
        ready = self._ready.setdefault(param.unit, {})
        # Reentrant checkpointing delivers a gradient in several parts in one backward.
        if param in ready:
            if self._windows is not None and param.unit in self._windows:
                raise _second_gradient(param)
            # Earlier micro-batches have accumulated a sum; the update reads it in the accumulator.
            if accumulator.state is AccumulatorState.HELD:
                accumulator.accumulate(grad)
            elif (before := ready[param]) is not None:
                before.add_(grad.reshape(-1))
            return
        self._check_not_updated(param)
        state = accumulator.reconcile(param.at_rest.grad)
        if state is AccumulatorState.CONSUMED:
            raise RuntimeError(
                f"a new gradient of {param.name} arrived while p.grad still is the previous one, "
                "which was applied in backward: call zero_grad() after opt.step(); with "
                "update='backward' gradients cannot add up over steps"
            )
        # Add to the sum of earlier micro-batches; the update reads it in the accumulator.
        if state is AccumulatorState.HELD:
            accumulator.accumulate(grad)
            ready[param] = accumulator.storage if accumulator.backing is None else None
        else:
            # If it has the right dtype, this is autograd's tensor, not a copy.
            fresh = grad.detach().reshape(-1).to(accumulator.dtype).contiguous()
            ready[param] = fresh
            self._fresh_bytes += fresh.nbytes
            leaving = self._windows.leaving_bytes if self._windows is not None else 0
            self._fresh_bytes_peak = max(self._fresh_bytes_peak, self._fresh_bytes + leaving)
            accumulator.consume()
        # Clipping and logging in the loop expect a gradient in `p.grad`.
        param.at_rest.grad = accumulator.proxy

    def _check_not_updated(self, param: Param) -> None:
        if param in self._updated:
            raise _second_gradient(param)

    def before_assign(self, param: Param) -> None:
        if param in self._updated or param in self._ready.get(param.unit, ()):
            raise _late_gradient(param)

    # -- updates -----------------------------------------------------------------------------------

    def unit_released(self, unit: Unit) -> None:
        # Only during a backward: after an interrupted backward (in a state_dict, for example) the
        # gradients that wait here are incomplete.
        leaves = self._windows is not None and unit in self._windows
        if (
            self._ready.get(unit)
            and not leaves
            and graph_task_id() != NO_TASK
            and self._passes.all_ended(unit)
        ):
            self._complete(unit)

    def backward_begin(self) -> None:
        if not self._accumulating:
            self._parts.pipeline.prefetch_states(Phase.BACKWARD, in_memory=True)

    def backward_end(self) -> None:
        for unit in list(self._ready):
            if self._ready[unit] and (self._windows is None or unit not in self._windows):
                self._complete(unit)
        while self._windows is not None and (due := self._windows.next(0)) is not None:
            self._update(due)
        self._ready.clear()

    def _complete(self, unit: Unit) -> None:
        """Update a unit whose gradients are complete. If they are on a device with separate memory,
        start their copies to the windows instead, and update earlier units.
        """
        if self._windows is None:
            self._update(unit)
            return

        def fresh(param: Param) -> bool:
            # Only fresh gradients are on the device; sums lie in host memory.
            return _accumulator_state(param) is AccumulatorState.CONSUMED

        while (due := self._windows.in_the_way(self._ready[unit], fresh)) is not None:
            self._update(due)
        self._ready[unit], leaving_bytes = self._windows.copy_out(unit, self._ready[unit], fresh)
        self._fresh_bytes -= leaving_bytes
        while (due := self._windows.next(LAG_UNITS)) is not None:
            self._update(due)

    def _update(self, unit: Unit) -> None:
        ready = self._ready[unit]
        for param in ready:
            assert param.grad is not None
            param.grad.wait_d2h()
        # Check before counts advance and before the first write, so that a refused unit is
        # unchanged.
        self._check_finite(ready)
        self._capture(ready)
        del self._ready[unit]
        # A spilled sum must be on NVMe before the update reads it there.
        if None in ready.values():
            self._parts.grads.flush_spilled(unit)
        gradients = {param: grad for param, grad in ready.items() if grad is not None}
        # From here on an interrupted step is half done.
        self._updated.update(ready)
        work = {item.param: item for item in self._work(list(ready))}
        gradients = self._with_matrices(work, gradients)
        fresh = [
            grad
            for param, grad in gradients.items()
            if _accumulator_state(param) is AccumulatorState.CONSUMED
        ]
        # In place: the update reads the parameters in the gathered unit, and not from their tier.
        in_place = self._parts.unsharder.can_update_in_place(unit)
        targets = self._parts.unsharder.targets(unit) if in_place else ()
        ticket = self._parts.pipeline.start(unit, work, gradients, targets=targets)
        if self._windows is not None:
            self._windows.update_submitted(unit, ticket)
        # Holds the tensors until the update has read them; nothing else refers to them.
        held_bytes = sum(grad.nbytes for grad in fresh) if self._windows is None else 0
        self._flights.append(_Flight(ticket, fresh, held_bytes))
        for param in ready:
            assert param.grad is not None
            if param.grad.state is AccumulatorState.HELD:
                guard([param], ticket)
                param.grad.consume()
        self._parts.unsharder.updated(unit, ticket, in_place=in_place)
        # Call it last, after the hand-over of the unit, since it may block.
        self._make_room()

    def _capture(self, params: Iterable[Param]) -> None:
        """Capture the group values of each optimizer at its first update of a step. The whole step
        uses these values.

        Raises: ValueError, RanksDiverged if the values differ between ranks; then the optimizer has
        updated nothing in this step.
        """
        # A dict, not a set: every rank compares its optimizers in the same order.
        for holder in {self._parts.optimizer_of(param): None for param in params}:
            if holder is not None and holder not in self._captured:
                holder.refresh_groups()
                self._parts.pipeline.check_ranks_agree(holder, holder.params_with_states)
                self._captured[holder] = values_of(holder)

    def _by_holder(self, params: Iterable[Param]) -> dict[UpdatingOptimizer, list[Param]]:
        by_holder: dict[UpdatingOptimizer, list[Param]] = {}
        for param in params:
            holder = self._parts.optimizer_of(param)
            assert holder is not None
            by_holder.setdefault(holder, []).append(param)
        return by_holder

    def _with_matrices(
        self, work: Mapping[Param, Work], gradients: dict[Param, torch.Tensor]
    ) -> dict[Param, torch.Tensor]:
        """Do the first updates of optimizers of whole matrices. Returns the gradients, with the
        matrices in their places."""
        firsts = [param for param, item in work.items() if item.first is not None]
        # Without windows a fresh gradient is autograd's tensor, which other code may hold, too.
        owned = {
            param
            for param in firsts
            if self._windows is not None or _accumulator_state(param) is AccumulatorState.HELD
        }
        found = dict(gradients)
        for holder, params in self._by_holder(firsts).items():
            given = {param: gradients[param] for param in params if param in gradients}
            mine = {param: work[param] for param in params}
            found.update(holder.make_matrices(mine, given, owned=owned))
        return found

    def _work(self, params: list[Param]) -> list[Work]:
        work: list[Work] = []
        for holder, held in self._by_holder(params).items():
            work.extend(holder.work_of(held))
        return work

    def _make_room(self) -> None:
        """Free gradients that updates have read. While too many bytes are alive, block for the
        oldest update, unless it is the only one (a huge unit).
        """
        while self._flights and (
            self._flights[0].ticket.filled
            or (self._fresh_bytes > self._bytes_max and len(self._flights) > 1)
        ):
            flight = self._flights.popleft()
            wait_filled_quietly(flight.ticket)
            self._fresh_bytes -= flight.size_bytes

    def _check_finite(self, gradients: Mapping[Param, torch.Tensor | None]) -> None:
        """Raise NonFiniteGradient for a gradient that is not finite on some rank. Collective."""
        # The policy is the same on all ranks, so none enters the collective below.
        if self._on_nonfinite == "ignore":
            return
        flags = [not _is_finite(param, grad) for param, grad in gradients.items()]
        bad = first_anywhere(self._parts.pipeline.comm, list(gradients), flags)
        if bad is None:
            return
        # Other units are updated already, so the step can be neither taken nor skipped.
        if self._updated:
            self._parts.pipeline.set_fault(
                StateInvalid(
                    f"the gradient of {bad.name} is not finite, and other units of this step are "
                    "updated already (update='backward'); the step is half done: start again from "
                    "the last export, or use update='deferred', which checks all gradients first"
                )
            )
        raise NonFiniteGradient(
            f"the gradient of {bad.name} is not finite. Policy(on_nonfinite='ignore') applies it"
        )

    # -- the step ----------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Check the step. Raises: RuntimeError when the last backward was interrupted or still
        runs, and when a second gradient would be applied after the one that backward applied.
        """
        if not self._passes.in_backward:
            # This is the first check that sees a gradient which torch has put into `p.grad`
            # without the engine (a tensor of another class).
            late = next(
                (
                    param
                    for param in self._updated
                    if _accumulator_state(param) is AccumulatorState.HELD
                ),
                None,
            )
            if late is not None:
                raise _late_gradient(late)
            return
        lost = next(
            (
                param
                for ready in self._ready.values()
                for param in ready
                if param.at_rest.grad is not None
            ),
            None,
        )
        self.backward_aborted()
        self._parts.pipeline.raise_fault()
        if lost is not None:
            raise RuntimeError(
                "opt.step() after an interrupted backward, which lost the gradient of "
                f"{lost.name}: update='backward' does not keep gradients; call zero_grad() and run "
                "forward and backward again"
            )

    def submit(self, by_unit: dict[Unit, dict[Param, Work]], optimizer: UpdatingOptimizer) -> None:
        """Submit the updates that backward did not make, for example of gradients that the loop
        assigned."""
        # The next backward begins a new step, even if this one raises below.
        self._passes.step_taken()
        # Backward updated with the captured values. A scheduler that steps between backward and
        # opt.step() would silently take effect one step late.
        captured = self._captured.pop(optimizer, None)
        if captured is not None and captured != values_of(optimizer):
            self._parts.pipeline.set_fault(
                StateInvalid(
                    "lr, betas or another value of a parameter group changed between backward and "
                    "opt.step(), and with update='backward' the update has used the old value; "
                    "change such values before backward"
                )
            )
            self._parts.pipeline.raise_fault()
        # Parameters of other optimizers stay in the set until their optimizer steps; until then,
        # another gradient raises.
        self._updated = {
            param
            for param in self._updated
            if self._parts.optimizer_of(param) not in (None, optimizer)
        }
        super().submit(by_unit, optimizer)

    def backward_aborted(self) -> None:
        self._ready.clear()
        if self._windows is not None:
            self._windows.reset()
        # Gradients without an update are freed, and gradients in windows are not counted. Pending
        # updates still read their gradients.
        self._fresh_bytes = sum(flight.size_bytes for flight in self._flights)
        if self._updated:
            self._parts.pipeline.set_fault(
                StateInvalid(
                    "a backward with update='backward' was interrupted after it updated some "
                    "units; the step is half done: start again from the last export, or use "
                    "update='deferred'"
                )
            )


def wait_filled_quietly(ticket: Ticket) -> None:
    """Block until the update has read its gradients. The pipeline raises its errors."""
    while not ticket.filled:
        try:
            ticket.wait_filled()
        except AioError:
            return


def _is_finite(param: Param, grad: torch.Tensor | None) -> bool:
    if grad is None:
        return param.grad is None or param.grad.finite()
    return all_finite(grad)


def _second_gradient(param: Param) -> RuntimeError:
    return RuntimeError(
        f"a second gradient of {param.name} before opt.step(): with update='backward' the first "
        "was applied already. Run all micro-batches but the last inside `with "
        "inf.handle(model).no_sync():`, as a trainer does after "
        "infinity.integrations.transformers.embed(trainer) or "
        "infinity.integrations.accelerate.attach(accelerator); or use update='deferred'"
    )


def _late_gradient(param: Param) -> RuntimeError:
    return RuntimeError(
        f"a gradient was assigned to {param.name} after backward, but with update='backward' the "
        "update has already used backward's gradient; use update='deferred'"
    )


def _accumulator_state(param: Param) -> AccumulatorState:
    assert param.grad is not None
    return param.grad.state
