"""The step's pipeline: one submission per unit, run to the end by the executor without Python.

    opt.step()                    native threads
    --------------------------    ------------------------------------------------------------
    check, take the gradients     .
    submit unit 0, 1, 2 ...  -->  read chunk | update | copy hi to the gathered unit | write chunk
    return                        (chunks of all units in flight up to the pools' size)
    next forward                  opens the gate of each unit with its buffers as targets

Units are submitted in the order in which the next forward wants them. A gradient's memory belongs to the update until
its ticket is done: whoever wants to change it earlier waits (`GradSlot.guard`).

That is update="deferred". Other modes submit at other times (`infinity._src.optim.update_mode`).

A fault in the background is sticky: it is raised by the next call that meets the engine. Which parameters it left
half written the executor knows per chunk, and refuses to read them. With two generations the step is undone instead
(`infinity._src.optim.transaction`), and the next call raises once; but not on several ranks, of which the others do not know.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from infinity._src._torch_compat import profiled
from infinity._src.distributed.collectives import Comm
from infinity._src.grads.slot import ReadByUpdate
from infinity._src.memory.heap import Heap
from infinity._src.optim.step_consensus import Grouped, told_of_step
from infinity._src.optim.transaction import Transaction
from infinity._src.optim.update_jobs import FlatJobs, Submission, Work, plan_flat, plan_unit
from infinity._src.params.prefetch_schedule import Phase
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Param, Unit
from infinity._src.params.unshard import Unsharder
from infinity.aio import Executor, Gate, JobKind, Priority, Ticket
from infinity.aio._records import MASK_PARAM_IN_MEMORY
from infinity.errors import AioError, NonFiniteGradient, StateInvalid, StepUndone

READ_AHEAD_MAX = 64
"""Chunks named for reading ahead; the executor takes as many as it has idle slots."""
PENDING_MIN = 16
"""From so many updates on, those that are done are looked for."""

Gradients = Mapping[Param, torch.Tensor]


class StepHooks(Protocol):
    """The update mode as the pipeline sees it (`infinity._src.optim.update_mode.UpdateMode`)."""

    def before_step(self) -> None:
        """`opt.step()` has touched nothing yet. Raises: RuntimeError where no step can be taken."""

    def submit(self, by_unit: dict[Unit, dict[Param, Work]]) -> None:
        """Do what `opt.step()` asks for."""

    def withdraw(self) -> None:
        """Take back all that ran ahead of its step."""

    def undone(self) -> None:
        """A fault undid all that was written since the last commit."""


class StepWatch(Protocol):
    """The watch over drives and activations (`infinity._src.storage`)."""

    def step_begins(self, steps: int) -> None:
        """Forwards and backwards of a step are done. steps: those before it."""


class StepPipeline:
    """Submits updates and waits for them. One thread uses it at a time."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        rest: StateStore,
        executor: Executor,
        unsharder: Unsharder,
        comm: Comm,
        mode: StepHooks,
        transaction: Transaction | None,
        heap: Heap,
        watch: StepWatch,
    ) -> None:
        self._units = list(units)
        self._rest = rest
        self._executor = executor
        self._unsharder = unsharder
        self._comm = comm
        self._mode = mode
        self._heap = heap
        self._watch = watch
        self._plans: dict[Flat, FlatJobs] = {}
        self._pending: list[Ticket] = []
        self._pending_max = PENDING_MIN
        self._fault: Exception | None = None
        self._final = False  # and no rollback mends it
        self.update_wait_s = 0.0
        self.steps = 0
        self.stepping: Any = None  # the optimizer whose step is being submitted
        self.transaction = transaction
        self.updates_ahead = self.updates_withdrawn = 0  # units updated ahead of their step, and kept or not
        self.begun = False  # updates of the step that comes were submitted

    def plan(self, flats: Sequence[Flat]) -> None:
        """Prepare the jobs of every flat; call it again when formats or places changed."""
        self._plans = {flat: plan_flat(self._rest, flat, self._comm.rank) for flat in flats}

    # -- faults and waiting ------------------------------------------------------------------------------------------------

    def raise_fault(self) -> None:
        """Raise what an update met in the background, now and ever after."""
        if self._fault is None:
            for ticket in self._pending:
                if ticket.failed:
                    self._record_fault(ticket)
                    break
        fault = self._fault
        if fault is not None and self.transaction is not None and self._comm.world == 1 and not self._final:
            self._fault, self.begun = None, False
            self._pending.clear()
            self._mode.undone()
            fault = self.transaction.undo(fault.__cause__ or fault)
            self._unsharder.updates_ended()
        if fault is not None:
            self._comm.report_failure(fault)
            raise fault

    def fail(self, fault: StateInvalid, *, final: bool = False) -> None:
        """Make `fault` what every later call raises; with two generations, unless it is `final`, what the next one undoes."""
        self._fault = self._fault or fault
        self._final = self._final or final

    def _record_fault(self, ticket: Ticket) -> None:
        try:
            ticket.wait()
        except AioError as error:
            fault = StateInvalid(
                f"an optimizer update failed in the background ({error}); the step is incomplete and "
                "the states cannot be trusted; close this engine and start again from the last export"
            )
            fault.__cause__ = error
            self._fault = fault

    def wait(self) -> None:
        """Block until no update is pending, and none has run ahead of its step. Raises the sticky fault."""
        self._mode.withdraw()
        self._finish()

    def begin(self) -> None:
        """The updates of a step come now, and none before it is pending any more. Blocks for those. Raises the sticky fault."""
        if self.begun:
            self.raise_fault()
            return
        self._finish()
        if self.transaction is not None:
            self.transaction.begin()
            self.begun = True

    def settle(self) -> None:
        """Of a durable run: commit the last step now. Nothing may be pending, or ahead. Blocks; collective."""
        if self.transaction is not None:
            self.transaction.settle()

    def drop(self) -> None:
        """The step that would have come is not taken: what ran ahead of it is taken back."""
        self._mode.withdraw()
        self.begun = False

    def _finish(self) -> None:
        start = time.perf_counter()
        for ticket in self._pending:
            try:
                ticket.wait()
            except AioError:
                self._record_fault(ticket)
        self.update_wait_s += time.perf_counter() - start
        self._unsharder.update_wait_s = self.update_wait_s
        if self._pending:
            self._pending.clear()
            self._unsharder.updates_ended()
        self.raise_fault()

    # -- the step ------------------------------------------------------------------------------------------------------------

    def meet(self, optimizer: Grouped, params: Sequence[Param]) -> None:
        """Return when all ranks are about to update these parameters in the same way. Collective. Raises: RanksDiverged,
        ValueError for an lr, or another number, of one rank's own."""
        if self._comm.world > 1:
            told = told_of_step(optimizer, params)
            self._comm.check_same_numbers(told.what, told.numbers, told.names)

    def check_finite(self, params: Sequence[Param]) -> list[Param]:
        """The parameters whose gradient is not finite on some rank. Collective: all ranks pass the same parameters."""
        bad = self._comm.all_reduce_any([param.grad is not None and not param.grad.finite() for param in params])
        return [param for param, is_bad in zip(params, bad, strict=True) if is_bad]

    def first_on_any_rank(self, params: Sequence[Param], flags: Sequence[bool]) -> Param | None:
        """The first of these parameters whose flag is set on some rank. Collective."""
        found = self._comm.all_reduce_any(flags)
        return next((param for param, flag in zip(params, found, strict=True) if flag), None)

    def check_idle(self, params: Sequence[Param]) -> None:
        """Raise RuntimeError if a forward, a backward or `gather()` uses the unit of one of these parameters.

        Blocks until gradients that spill are written. Raises: AioError of a write that failed; no state was touched then.
        """
        self._mode.before_step()
        self._unsharder.gradients.check_reduced()
        busy = next((param.unit for param in params if param.unit.refs), None)
        if busy is not None:
            raise RuntimeError(
                f"opt.step() while unit {busy.name} is in use: call it after forward and backward have ended, and "
                "outside handle.gather()"
            )
        self._unsharder.gradients.flush_spilled()

    def submit(self, work: Sequence[Work], *, optimizer: Any) -> None:
        """Start the update of these parameters, and count a step of `optimizer`. Their gradients' logs are in the hyper records.
        Does not block on I/O; waits for the previous step's updates if there is something to do.

        Raises: RuntimeError while a forward or backward is running; the sticky fault of an earlier step.
        """
        by_unit: dict[Unit, dict[Param, Work]] = {}
        for item in work:
            by_unit.setdefault(item.param.unit, {})[item.param] = item
        self.check_idle([item.param for item in work])
        self._unsharder.clock.enter("step")
        if by_unit:
            self.begin()
        else:
            self.raise_fault()
        self.step_begins()
        self.stepping = optimizer
        try:
            with profiled("infinity: step"):
                self._mode.submit(by_unit)
        except BaseException as error:
            if by_unit and not isinstance(error, StepUndone):
                self.fail(half_done(error))
            raise
        finally:
            self.stepping = None
        self.stepped()
        self._unsharder.prefetch_ahead()
        self._unsharder.clock.enter("idle")

    def step_begins(self) -> None:
        """Forwards and backwards of a step are done, and its update begins."""
        self._heap.restart()
        self._watch.step_begins(self.steps)

    def stepped(self) -> None:
        """A step was taken: count it."""
        self.begun = False
        self._unsharder.passes.step_taken()
        if self.transaction is not None:
            self.transaction.counted(self._uncount)
        self.steps += 1
        if self.transaction is not None:
            self.transaction.stepped()

    @property
    def steps_undone(self) -> int:
        """Steps that a fault undid."""
        return self.transaction.undone_steps if self.transaction is not None else 0

    def _uncount(self) -> None:
        self.steps -= 1

    def next_order(self, units: Sequence[Unit]) -> list[Unit]:
        """Units in the order of the next training forward, then those that it does not use."""
        place: dict[int, int] = {}
        for index in self._unsharder.schedule.order(Phase.TRAIN):
            place.setdefault(index, len(place))
        return sorted(units, key=lambda unit: (place.get(unit.index, len(self._units)), unit.index))

    @property
    def updates_pending(self) -> bool:
        """Whether an update that was submitted is not done yet. Never blocks."""
        return any(not ticket.done for ticket in self._pending)

    def gate(self) -> Gate:
        """A gate for `start`: closed until the unit is gathered."""
        return self._executor.gate()

    def read_ahead(self, phase: Phase, *, given: bool) -> None:
        """Let idle slots read the states that the first updates will want: those of the first units of `phase`. given: these
        updates will have the parameters. Never blocks; the executor gives the slots up when somebody else wants them.

        Nothing but the slots reads ahead: a byte of budget that keeps a section resident saves its read and its write in every
        step, where a byte of read-ahead only hides a read.
        """
        ids: list[int] = []
        for index in self._unsharder.schedule.order(phase):
            for flat in self._units[index].flats:
                plan = self._plans[flat]
                ids.extend(plan.jobs["chunk"][np.unique(plan.chunk)].tolist())
            if len(ids) >= READ_AHEAD_MAX:
                break
        if ids:
            self._executor.prefetch(np.array(ids[:READ_AHEAD_MAX], dtype=np.int32), param_in_memory=given)

    def plan_of(self, unit: Unit, work: Mapping[Param, Work], gradients: Gradients) -> Submission:
        """The jobs that do `work` in a unit; see `plan_unit`."""
        return plan_unit(unit, self._plans, work, gradients)

    def pend(self, ticket: Ticket) -> None:
        """An update was submitted past `start`: wait for it, and raise its fault, like the others."""
        self._pending.append(ticket)

    def _prune(self) -> None:
        """Forget updates that are done, whenever there are twice as many: a constant cost per update. Raises the sticky fault."""
        if len(self._pending) >= self._pending_max:
            self.raise_fault()
            self._pending = [ticket for ticket in self._pending if not ticket.done or ticket.failed]  # in this order
            self._pending_max = max(2 * len(self._pending), PENDING_MIN)

    def start(
        self,
        unit: Unit,
        work: Mapping[Param, Work],
        gradients: Gradients,
        *,
        gate: Gate | None = None,
        targets: Sequence[int] = (),
    ) -> Ticket:
        """Submit the update of one unit. Does not block, except while a save has yet to read its states. May raise the sticky
        fault of an earlier one, and then submits nothing.

        gate: holds it back, and gives the addresses of the unit's flats. Without a gate, `targets` may give them: the flats
        hold the unit's parameters, which are taken from there and replaced.
        """
        self._rest.will_write(unit.flats)
        plan = plan_unit(unit, self._plans, work, gradients)
        jobs = plan.jobs
        if gate is not None:
            jobs["mask"] |= self._unsharder.device.mask
        else:
            jobs = jobs[jobs["kind"] == JobKind.UPDATE]
            if targets:
                jobs["ptr"][:, 0] += np.array(targets, dtype=np.uint64)[jobs["base"]]
                jobs["ptr"][:, 1] = jobs["ptr"][:, 0]
                jobs["mask"] |= MASK_PARAM_IN_MEMORY | self._unsharder.device.mask
            else:
                jobs["ptr"][:, 0] = 0
            jobs["base"] = -1
        self._unsharder.device.behind()
        # Nothing may raise once it is submitted: only the caller keeps what threads then read and write.
        self._prune()
        ticket = self._executor.submit(jobs, plan.segs, plan.hypers, priority=Priority.WRITEBACK, gate=gate)
        self._pending.append(ticket)
        return ticket


def slot_gradients(work: Mapping[Param, Work]) -> dict[Param, torch.Tensor]:
    """The gradients of these parameters as they lie in their slots; without those that spilled."""
    gradients = {}
    for param in work:
        assert param.grad is not None
        if param.grad.backing is None:
            gradients[param] = param.grad.tensor
    return gradients


def guard(params: Iterable[Param], ticket: Ticket) -> None:
    """Let whoever changes gradients of these parameters wait for the update that reads them; not for spilled ones, which it
    reads elsewhere."""
    reader = ReadByUpdate(ticket)
    for param in params:
        assert param.grad is not None
        param.grad.guard(reader if param.grad.backing is None else None)


def half_done(error: BaseException) -> StateInvalid:
    """The sticky fault of a step that broke off when some parameters were updated, or may have been."""
    fault = StateInvalid(
        f"opt.step() broke off ({type(error).__name__}: {error}); some parameters are updated and others are not, so the states "
        "cannot be trusted; close this engine and start again from the last export"
    )
    fault.__cause__ = error
    return fault


def refuse_nonfinite(bad: Sequence[Param], mode: str) -> bool:
    """Apply `on_nonfinite` to the parameters found by `check_finite`. Returns whether the step goes on.

    Raises: NonFiniteGradient when mode is "raise".
    """
    if not bad or mode == "ignore":
        return True
    if mode == "skip":
        return False
    names = ", ".join(param.name for param in bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
    raise NonFiniteGradient(
        f"gradients of {names} are not finite; no state was touched. Policy(on_nonfinite='skip') skips such steps, "
        "'ignore' applies them"
    )
