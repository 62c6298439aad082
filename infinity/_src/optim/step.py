"""The step's pipeline: one submission per unit, run to the end by the executor without Python.

    opt.step()                    native threads
    --------------------------    ------------------------------------------------------------
    check, take the gradients     .
    submit unit 0, 1, 2 ...  -->  read chunk | update | copy hi to the gathered unit | write chunk
    return                        (chunks of all units in flight up to the pools' size)
    next forward                  opens the gate of each unit with its buffers as targets

Units are submitted in the order in which the next forward wants them. A gradient's memory belongs
to the update until its ticket is done: whoever wants to change it earlier waits
(`GradAccumulator.guard`).

Clipping and unscaling come before the step: the loop calls torch's own functions, `p.grad` answers
them (`infinity._src.params.accumulator`), and updates replay the scalings.

If a gradient is not finite on some rank, all ranks raise, skip the step or take it, as
`Policy.on_nonfinite` says: `check_finite` and `refuse_nonfinite`, called by
infinity/_src/optim/base.py.

That is update="deferred". Other modes submit at other times (`infinity._src.optim.update_mode`).

A fault in the background is sticky: it is raised by the next call that meets the engine. The
executor knows which chunks the fault left half written, and refuses to read them. With two
generations the step is undone instead (`infinity._src.optim.transaction`), and the next call raises
once.

Several ranks with two generations undo a step together. A rank keeps a fault to itself until all
ranks are at the same point of the program, and know of it. There are two such points:

    the end of a step   before the next one begins, and in whatever waits for all updates (flush,
                        save, write, commit): each rank waits for its own, then one flag of each is
                        united (`failed_anywhere`). Nothing is committed before
    a gather            the names that ranks exchange before every gather say whether one lacks its
                        shard, because its update failed. Then no rank runs it, and it raises
                        CollectiveRefused on all, in the forward that waits for it

Then ranks exchange what failed, and each undoes the step on its own: gathers under way end first,
on all ranks the same ones. All raise StepUndone. So no rank raises alone, or computes with units of
which one is updated and another is not; a loss is of whole parameters, of a step that stays or of
one that a later call says is undone.

**No deadlock.** A flag is sent when this rank's updates have ended, which depends on no other rank.
A shard that is lacking counts as ready in the order of gathers (`distributed.order_agreement`). A
refused gather ends in its place, so ranks continue with the same collectives behind it.

**Cost.** One all_gather of a flag for each rank and step, besides the exchange of its name. Flags
of gathers ride on the names; on several nodes of several ranks they take one exchange of a byte
more, beside the collective before. Not undone, but the end of all ranks as with one generation: a
fault that opt.step() itself meets on one rank (update_on="device", an interrupt), since the others
are not where it is; one that `close()` meets in a run that is not durable, which leaves no
states to read; and all that is no fault of an update.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, Protocol

import numpy as np
import torch

from infinity._src.base.alarm import Alarm
from infinity._src.base.torch_compat import profiled
from infinity._src.base.wording import listed
from infinity._src.cabi.records import MASK_PARAM_IN_MEMORY
from infinity._src.distributed.communicator import Comm
from infinity._src.memory.device import Device
from infinity._src.memory.heap import Heap
from infinity._src.optim.step_consensus import (
    Grouped,
    cause_of_undo,
    describe_step,
    failed_anywhere,
)
from infinity._src.optim.transaction import Transaction
from infinity._src.optim.update_jobs import FlatJobs, Submission, Work, jobs_of_flat, jobs_of_unit
from infinity._src.params.accumulator import ReadByUpdate, wait_through
from infinity._src.params.prefetch_schedule import Phase, Progress
from infinity._src.params.reduce import GradReducer
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Param, Unit
from infinity._src.params.unshard import Unsharder
from infinity._src.params.update_hooks import UpdateHooks
from infinity.aio import Executor, Gate, JobKind, Priority, Ticket
from infinity.errors import (
    AioError,
    DriveLostError,
    NonFiniteGradient,
    StateInvalid,
    StepUndone,
)

PREFETCH_CHUNKS_MAX = 64
"""Chunks named for reading ahead; the executor takes as many as it has idle slots."""
PENDING_MIN = 16
"""With so many pending updates the pipeline looks for the done ones."""

Gradients = Mapping[Param, torch.Tensor]


class StepHooks(UpdateHooks, abc.ABC):
    """The update mode as the pipeline sees it. By default a call does nothing, but for `submit`."""

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

    def undo_ahead(self) -> None:
        """Undo all updates that ran ahead of their step: the states are those of the step before.
        Blocks until they are.
        """

    def undone(self) -> None:
        """Note that the states are those of the last commit again. Updates ahead of their step are
        gone.
        """


class StepWatch(Protocol):
    """The watch over drives and activations (`infinity._src.engine.storage`)."""

    def step_begins(self, steps: int) -> None:
        """Note that forwards and backwards of a step are done. steps: those before it."""


class StepPipeline:
    """Submits updates and waits for them. One thread uses it at a time.

    in_any_order: each rank may use other units than the others.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        store: StateStore,
        executor: Executor,
        unsharder: Unsharder,
        gradients: GradReducer,
        progress: Progress,
        device: Device,
        comm: Comm,
        mode: StepHooks,
        transaction: Transaction | None,
        alarm: Alarm,
        heap: Heap,
        watch: StepWatch,
        in_any_order: bool = False,
    ) -> None:
        self._units = list(units)
        self._in_any_order = in_any_order
        self._store = store
        self._executor = executor
        self._unsharder = unsharder
        self._gradients = gradients
        self._passes, self._schedule = progress.passes, progress.schedule
        self._clock, self._waits = progress.clock, progress.waits
        self._device = device
        self._comm = comm
        self._mode = mode
        self._alarm = alarm
        self._heap = heap
        self._watch = watch
        self._jobs: dict[Flat, FlatJobs] = {}
        self._pending: list[Ticket] = []
        self._pending_max = PENDING_MIN
        self._fault: Exception | None = None
        # True: the fault stays, since no rollback mends it.
        self._final = False
        # True while ranks have to agree whether updates have ended well; the same on all ranks.
        self._unagreed = False
        self._counts = {"steps": 0}
        self.transaction = transaction
        # Units that were updated ahead of their step: those whose update the step kept, and those
        # whose update was undone.
        self.updates_ahead = self.updates_withdrawn = 0
        # True once updates of the coming step were submitted.
        self.begun = False

    def prepare_jobs(self, flats: Sequence[Flat]) -> None:
        """Prepare the jobs of every flat. Call it again when formats or places changed."""
        self._jobs = {flat: jobs_of_flat(self._store, flat, self._comm.rank) for flat in flats}

    # -- faults and waiting ------------------------------------------------------------------------

    @property
    def undoes_together(self) -> bool:
        """True where a fault of one rank's update undoes the step on all ranks."""
        return self.transaction is not None and self._comm.world > 1

    @property
    def update_failed(self) -> bool:
        """True once a pending update has failed on this rank. Any thread may ask."""
        # A copy: the thread that trains adds to the list meanwhile.
        return any(ticket.failed for ticket in list(self._pending))

    def raise_fault(self) -> None:
        """Raise the fault of a background update, now and in every later call. Two generations on
        one rank undo the step instead and raise once; on several ranks they keep it until the ranks
        agree, and only other faults are raised here.
        """
        if self._fault is None and not self.undoes_together:
            self._fault = self._fault_of_update()
        fault = self._fault
        if fault is None:
            return
        if isinstance(fault.__cause__, DriveLostError):
            # No step is undone on a drive that is gone, and no other error hides it.
            self._comm.report_failure(fault.__cause__)
            raise fault.__cause__.with_traceback(None)
        if self.transaction is not None and not (self.undoes_together or self._final):
            # The fault is spent: training may continue.
            self._fault = None
            raise self._undo(self.transaction, fault.__cause__ or fault)
        # Peers wait in collectives for this rank; without a word they would run into their timeout.
        self._comm.report_failure(fault)
        raise fault

    def _undo(
        self, transaction: Transaction, cause: BaseException, read: BaseException | None = None
    ) -> StepUndone:
        """Go back to the states of the last commit on this rank. read: the fault of a gather beside
        `cause`. Returns the error to raise.
        """
        try:
            undone = transaction.undo(cause, self._faults_of_updates, read)
            # Not before: a commit would take updates that ran ahead and are not recorded here.
            self.begun = self._unagreed = False
            self._mode.undone()
        except StateInvalid as lost:
            self.begun = self._unagreed = False
            self._mode.undone()
            self.set_fault(lost, final=True)
            self._forget_updates()
            raise
        except BaseException:
            # Interrupted, before the states went back or after: the next call undoes, and tells.
            self.set_fault(half_done(cause))
            raise
        # Not before: gathers that end meanwhile are excused by the updates that failed.
        self._forget_updates()
        return undone

    def _forget_updates(self) -> None:
        self._pending.clear()
        self._unsharder.updates_ended()

    def undo_together(self, read: BaseException | None = None) -> NoReturn:
        """Undo the step on all ranks, since an update, or the read of a gather, has failed on one.
        read: the fault of this rank's gather, if it has one. Collective. Raises: StepUndone,
        always.
        """
        fault = self._fault_of_update()
        self._undo_for(read if fault is None else fault.__cause__, read)

    def may_undo(self, error: AioError) -> bool:
        """Return whether undoing the step on all ranks is an answer to this fault of a gather. Any
        thread may ask.
        """
        repair = self.transaction.repair if self.transaction is not None else None
        return self.update_failed or (repair is not None and repair.concerns(error))

    def read_failed(self, error: AioError) -> None:
        """Undo the step that is not committed if a gather's read failed again, or mend the chunk
        where there is none. Ranks that undo together do so in the gather's turn. Blocks. Raises:
        StepUndone, StateInvalid.
        """
        transaction = self.transaction
        if transaction is None or self.undoes_together or not transaction.repair.concerns(error):
            return
        if self.begun or transaction.has_steps:
            raise self._undo(transaction, error)
        try:
            transaction.mend(error)
        except StateInvalid as lost:
            self.set_fault(lost, final=True)
            raise

    def end_updates(self, error: AioError | None) -> None:
        """Note that updates that the calling thread made itself have ended; error: of the one that
        failed. Raises the sticky fault. Collective where ranks undo steps together.
        """
        if self.undoes_together:
            if failed_anywhere(self._comm, error):
                self._undo_for(error)
        elif error is not None:
            self.set_fault(half_done(error))
            self.raise_fault()

    def _undo_for(self, error: BaseException | None, read: BaseException | None = None) -> NoReturn:
        """Undo the step on all ranks, and raise StepUndone. error: this rank's, if it has one;
        read: that of its gather. Collective.
        """
        assert self.transaction is not None, "one generation undoes nothing"
        cause = cause_of_undo(self._comm, error)
        try:
            undone = self._undo(self.transaction, cause, read)
        except BaseException as error:
            # The others resume from the last commit, and this rank cannot.
            self._comm.report_failure(error)
            raise
        raise undone

    def _agree(self) -> None:
        """Return when the updates of all ranks have ended well. None of this rank's is pending.
        Collective. Raises: StepUndone on all ranks where one has failed.
        """
        fault = self._fault_of_update()
        if failed_anywhere(self._comm, fault):
            self.undo_together()
        self._unagreed = False

    def set_fault(self, fault: StateInvalid, *, final: bool = False) -> None:
        """Make `fault` the error of every later call. With two generations the next call undoes the
        step instead, unless the fault is `final`.
        """
        # The first fault is the cause; later ones follow from it.
        self._fault = self._fault or fault
        self._final = self._final or final
        self._alarm.sound()

    def _fault_of_update(self) -> StateInvalid | None:
        """Return the fault that the first failed update leaves; None while none has failed."""
        failed = next((ticket for ticket in self._pending if ticket.failed), None)
        if failed is None:
            return None
        try:
            failed.wait()
        except AioError as error:
            fault = StateInvalid(
                f"an optimizer update failed in the background ({error}); the step is incomplete "
                "and the states cannot be trusted; close this engine and start again from the last "
                "export"
            )
            fault.__cause__ = error
            return fault
        raise AssertionError("a ticket has failed without an error")

    def _faults_of_updates(self) -> list[AioError]:
        found = []
        for ticket in self._pending:
            if ticket.failed:
                try:
                    ticket.wait()
                except AioError as error:
                    found.append(error)
        return found

    def wait(self, *, together: bool = True) -> None:
        """Block until no update is pending, and none has run ahead of its step. Raises the sticky
        fault. Collective where ranks undo steps together.

        together: False asks no other rank; a fault of this one is sticky then.
        """
        self._mode.undo_ahead()
        self._finish(together=together)

    def settle(self) -> None:
        """Wait for the updates of the step before, and agree on them, if ranks undo steps together.
        Collective. Raises as `begin`.
        """
        # A drive that refused a write of them takes no gradients either: that rank would raise
        # alone.
        if self.undoes_together and not self.begun:
            self._finish()

    def begin(self) -> None:
        """Begin the updates of a step. Blocks until those of the step before are done. Raises the
        sticky fault. Collective as `wait`.
        """
        # An update of this step ran in backward already. Waiting here would wait for that one.
        if self.begun:
            self.raise_fault()
            return
        self._finish()
        if self.transaction is not None:
            # From here on writes go to the other place of each chunk.
            self.transaction.begin()
            self.begun = True

    def commit(self) -> None:
        """Commit the last step of a durable run now. Nothing may be pending, or ahead. Blocks;
        collective.
        """
        if self.transaction is not None:
            self.transaction.commit()

    def cancel_step(self) -> None:
        """Undo the updates that ran ahead of a step that is not taken."""
        self._mode.undo_ahead()
        self.begun = False

    def _finish(self, *, together: bool = True) -> None:
        """Wait for all pending updates. Raises the sticky fault."""
        start = time.perf_counter()
        # Every ticket is waited for, also after a failure: threads still write into memory of
        # theirs.
        for ticket in self._pending:
            wait_through(ticket)
        self._waits.updates_s += time.perf_counter() - start
        if self.undoes_together and together:
            # A fault that the others cannot undo ends them first.
            self.raise_fault()
            if self._unagreed:
                self._agree()
        else:
            self._fault = self._fault or self._fault_of_update()
        if self._pending:
            self._pending.clear()
            self._unsharder.updates_ended()
        self.raise_fault()
        self._store.settle_moves()

    # -- the step ----------------------------------------------------------------------------------

    def check_ranks_agree(self, optimizer: Grouped, params: Sequence[Param]) -> None:
        """Return when all ranks are about to update these parameters in the same way. Collective.

        Raises: RanksDiverged; ValueError for an lr, or another number, of one rank's own.
        """
        # One rank agrees with itself, and describing a step costs a pass over the groups.
        if self._comm.world > 1:
            description = describe_step(optimizer, params)
            self._comm.check_same_numbers(description.what, description.numbers, description.names)

    def check_finite(self, params: Sequence[Param]) -> list[Param]:
        """Return the parameters whose gradient is not finite on some rank. Collective: all ranks
        pass the same parameters.
        """
        # Every rank holds a shard, so one rank alone may see the inf.
        bad = self._comm.all_reduce_any(
            [param.grad is not None and not param.grad.finite() for param in params]
        )
        return [param for param, is_bad in zip(params, bad, strict=True) if is_bad]

    def first_on_any_rank(self, params: Sequence[Param], flags: Sequence[bool]) -> Param | None:
        """Return the first of these parameters whose flag is set on some rank. Collective."""
        found = self._comm.all_reduce_any(flags)
        return next((param for param, flag in zip(params, found, strict=True) if flag), None)

    def check_idle(self, params: Sequence[Param]) -> None:
        """Raise RuntimeError if a forward, a backward or `gather()` uses the unit of one of these
        parameters.

        Blocks until spilled gradients are written. Raises: AioError of a write that failed; no
        state was touched then.
        """
        # The mode first: a backward that broke off explains a busy unit better than the check
        # below.
        self._mode.before_step()
        self._gradients.check_reduced()
        busy = next((param.unit for param in params if param.unit.refs), None)
        if busy is not None:
            raise RuntimeError(
                f"opt.step() while unit {busy.name} is in use: call it after forward and backward "
                "have ended, and outside handle.gather()"
            )
        # A failed write of a gradient must surface before the first state changes.
        self._gradients.flush_spilled()

    def submit(self, work: Sequence[Work], *, optimizer: Grouped) -> None:
        """Start the update of these parameters, and count a step of `optimizer`.

        The logs of their gradients are in the hyper records. Does not block on I/O; waits for the
        previous step's updates if there is something to do.

        Raises: RuntimeError while a forward or backward is running; the sticky fault of an earlier
        step.
        """
        # The unit is what executor, gates and schedule work on.
        by_unit: dict[Unit, dict[Param, Work]] = {}
        for item in work:
            by_unit.setdefault(item.param.unit, {})[item.param] = item
        self.check_idle([item.param for item in work])
        self._clock.enter("step")
        # An empty step waits for nothing: GradScaler skips steps, and a skipped one should cost no
        # stall.
        if by_unit:
            self.begin()
        else:
            self.raise_fault()
        self.step_begins()
        # Also where this rank has no part of what is updated.
        self._unagreed = self._unagreed or (self.undoes_together and bool(by_unit))
        try:
            with profiled("infinity: step"):
                self._mode.submit(by_unit, optimizer)
        except BaseException as error:
            # Some units are submitted and others are not. StepUndone has restored the states
            # already.
            if by_unit and not isinstance(error, StepUndone):
                self.set_fault(half_done(error))
            raise
        self.count_step()
        # The next forward starts with reads, and Python has time between the steps.
        self._unsharder.prefetch_ahead()
        self._clock.enter("idle")

    def step_begins(self) -> None:
        """Note the end of the step's forwards and backwards; its update begins."""
        self._heap.step_begins()
        self._watch.step_begins(self.steps)

    def count_step(self) -> None:
        self.begun = False
        self._passes.step_taken()
        if self.transaction is not None:
            # Remembered before the count changes, so that an interrupt between the two is undone
            # right.
            self.transaction.remember(self._counts, dict(self._counts))
        self.steps += 1
        if self.transaction is not None:
            self.transaction.count_step()

    @property
    def steps_undone(self) -> int:
        return self.transaction.undone_steps if self.transaction is not None else 0

    @property
    def older_chunks(self) -> int:
        return self.transaction.repair.older_chunks if self.transaction is not None else 0

    @property
    def steps(self) -> int:
        """Steps that were taken, less those that a fault undid."""
        return self._counts["steps"]

    @steps.setter
    def steps(self, steps: int) -> None:
        self._counts["steps"] = steps

    def next_order(self, units: Sequence[Unit]) -> list[Unit]:
        """Return units in the order of the next training forward, then units that it does not use.
        """
        # The units are gathered in this order, which each rank would learn another of.
        if self._in_any_order:
            return sorted(units, key=lambda unit: unit.index)
        # The first use of a unit that runs twice in a forward decides.
        place: dict[int, int] = {}
        for index in self._schedule.order(Phase.TRAIN):
            place.setdefault(index, len(place))
        return sorted(units, key=lambda unit: (place.get(unit.index, len(self._units)), unit.index))

    @property
    def updates_pending(self) -> bool:
        """True while a submitted update is not done. Never blocks."""
        return any(not ticket.done for ticket in self._pending)

    def gate(self) -> Gate:
        return self._executor.gate()

    def prefetch_states(self, phase: Phase, *, in_memory: bool) -> None:
        """Let idle slots of the executor read the states of the first units of `phase`. Never
        blocks.

        in_memory: the updates will have the parameters in memory. The executor gives the slots up
        when another job wants them.
        """
        # Only the executor's idle slots read ahead. A byte of budget that keeps a section resident
        # saves its read and its write in every step; a byte of read-ahead only hides a read.
        ids: list[int] = []
        for index in self._schedule.order(phase):
            for flat in self._units[index].flats:
                plan = self._jobs[flat]
                ids.extend(plan.jobs["chunk"][np.unique(plan.chunk)].tolist())
            if len(ids) >= PREFETCH_CHUNKS_MAX:
                break
        if ids:
            self._executor.prefetch(
                np.array(ids[:PREFETCH_CHUNKS_MAX], dtype=np.int32), param_in_memory=in_memory
            )

    def jobs_of(self, unit: Unit, work: Mapping[Param, Work], gradients: Gradients) -> Submission:
        return jobs_of_unit(unit, self._jobs, work, gradients)

    def add_pending(self, ticket: Ticket) -> None:
        """Add an update that was submitted without `start`: the pipeline waits for it and raises
        its fault.
        """
        self._pending.append(ticket)

    def _forget_done(self) -> None:
        """Forget done updates whenever the list has doubled: a constant cost per update. Raises the
        sticky fault.
        """
        if len(self._pending) >= self._pending_max:
            self.raise_fault()
            # `done` is asked first: a ticket that fails between the two questions is retained.
            self._pending = [
                ticket for ticket in self._pending if not ticket.done or ticket.failed
            ]
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
        """Submit the update of one unit. Does not block, except while a save has yet to read its
        states.

        gate: delays the update until forward gathers the unit, and gives the addresses of the
        unit's flats.
        targets: those addresses, without a gate. The flats hold the unit's parameters; the update
        reads them there and replaces them.

        Raises: the sticky fault of an earlier update; nothing is submitted then.
        """
        # A save may still read these chunks; it copies them, or this blocks until it has.
        self._store.will_write(unit.flats)
        plan = jobs_of_unit(unit, self._jobs, work, gradients)
        jobs = plan.jobs
        # Behind a gate the whole unit is handed over, so its other chunks are fetched too. The gate
        # knows the addresses once the unit has memory.
        if gate is not None:
            jobs["mask"] |= self._device.mask
        else:
            # Without a hand-over no gather waits for the chunks that have no work.
            jobs = jobs[jobs["kind"] == JobKind.UPDATE]
            if targets:
                jobs["ptr"][:, 0] += np.array(targets, dtype=np.uint64)[jobs["base"]]
                # In and out are the same memory: the update reads the gathered parameters and
                # replaces them, which saves their read from NVMe.
                jobs["ptr"][:, 1] = jobs["ptr"][:, 0]
                jobs["mask"] |= MASK_PARAM_IN_MEMORY | self._device.mask
            else:
                jobs["ptr"][:, 0] = 0
            jobs["base"] = -1
        # The device may still use the unit's memory or write gradients; the update comes behind it.
        self._device.behind()
        # Nothing may raise once it is submitted: only the caller keeps what threads then read and
        # write.
        self._forget_done()
        self._unagreed = self.undoes_together
        ticket = self._executor.submit(
            jobs, plan.segs, plan.hypers, priority=Priority.WRITEBACK, gate=gate
        )
        self._pending.append(ticket)
        return ticket


def accumulated_gradients(work: Mapping[Param, Work]) -> dict[Param, torch.Tensor]:
    """Return the gradients of these parameters that lie in slots; spilled ones are left out."""
    gradients = {}
    for param in work:
        assert param.grad is not None
        if param.grad.backing is None:
            gradients[param] = param.grad.tensor
    return gradients


def guard(params: Iterable[Param], ticket: Ticket) -> None:
    """Block writes to these gradients until the update has read them. The update reads spilled
    gradients from NVMe, so they need no guard.
    """
    reader = ReadByUpdate(ticket)
    for param in params:
        assert param.grad is not None
        param.grad.guard(reader if param.grad.backing is None else None)


def half_done(error: BaseException) -> StateInvalid:
    """Return the sticky fault of a step that broke off when some parameters were updated, or may
    have been.
    """
    fault = StateInvalid(
        f"opt.step() broke off ({type(error).__name__}: {error}); some parameters are updated and "
        "others are not, so the states cannot be trusted; close this engine and start again from "
        "the last export"
    )
    fault.__cause__ = error
    return fault


def refuse_nonfinite(bad: Sequence[Param], mode: str) -> bool:
    """Apply `on_nonfinite` to the parameters found by `check_finite`. Returns whether the step goes
    on.

    Raises: NonFiniteGradient when mode is "raise".
    """
    if not bad or mode == "ignore":
        return True
    if mode == "skip":
        return False
    names = listed((param.name for param in bad), most=3)
    raise NonFiniteGradient(
        f"gradients of {names} are not finite; no state was touched. Policy(on_nonfinite='skip') "
        "skips such steps, 'ignore' applies them"
    )
