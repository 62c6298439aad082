"""The step's pipeline: one submission per unit, run to the end by the executor without Python.

    opt.step()                    native threads
    --------------------------    ------------------------------------------------------------
    check, take the gradients     .
    submit unit 0, 1, 2 ...  -->  read chunk | update | copy hi to the gathered unit | write chunk
    return                        (chunks of all units in flight up to the pools' size)
    next forward                  opens the gate of each unit with its buffers as targets

Units are submitted in the order in which the next forward uses them. A gradient's memory belongs to
the update until its ticket is done: a write to it before that waits (`GradAccumulator.guard`).

Clipping and unscaling come before the step: the loop calls torch's functions on `p.grad`, which
records the scalings (`infinity._src.params.accumulator`), and updates replay them.

If a gradient is not finite on some rank, all ranks raise, skip the step or take it, as
`Policy.on_nonfinite` says (infinity/_src/optim/step_consensus.py).

This is update="deferred". Other modes submit at other times (`infinity._src.optim.update_mode`).

A fault in the background is sticky: every later call to the engine raises it. The executor refuses
to read chunks that the fault left half written. With two generations the step is undone instead
(`infinity._src.optim.transaction`), and the next call raises once.

Several ranks with two generations undo a step together. A rank does not raise a fault until all
ranks are at the same point of the program, and know of it. There are two such points:

    the end of a step   before the next step begins, and in every call that waits for all updates
                        (flush, save, write, commit): each rank waits for its updates, then the
                        ranks combine one flag of each (`failed_anywhere`). No commit comes earlier
    a gather            the names that ranks exchange before every gather say whether a rank lacks
                        its shard, because its update failed. Then no rank runs the gather, and all
                        ranks raise CollectiveRefused in the forward that waits for it

Then ranks exchange what failed, and each rank undoes its part of the step, after the gathers in
flight have ended, which are the same on all ranks. All raise StepUndone. So no rank raises alone,
or computes with a mixture of updated and older units. Each loss is computed with one step's
parameters; if that step is undone, a later call reports it.

**No deadlock.** A rank sends its flag when its updates have ended, which depends on no other rank.
A missing shard counts as ready in the order of gathers (`distributed.order_agreement`). A refused
gather ends in its turn, so ranks continue with the same collectives after it.

**Cost.** One all_gather of a flag for each rank and step, in addition to the exchange of its name.
Flags of gathers are sent with the names; on several nodes with several ranks each they take one
more exchange of a byte, which overlaps with the collective before.

Some faults are not undone, and end all ranks, as with one generation: a fault that opt.step()
itself meets on one rank (update_on="device", an interrupt), since the other ranks are at other
points of the program; a fault in `close()` of a run that is not durable, which has no states to
continue from; and every fault that is not an update's.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.base.alarm import Alarm
from infinity._src.base.torch_compat import profiled
from infinity._src.cabi.records import MASK_FIRST, MASK_PARAM_IN_MEMORY, Algorithm
from infinity._src.distributed.comm_streams import PendingCollective
from infinity._src.distributed.communicator import Comm
from infinity._src.distributed.transport import Message
from infinity._src.memory.device import Device
from infinity._src.memory.heap import Heap
from infinity._src.optim.step_consensus import (
    Grouped,
    cause_of_undo,
    describe_step,
    failed_anywhere,
)
from infinity._src.optim.transaction import Transaction
from infinity._src.optim.update_jobs import (
    FlatJobs,
    Submission,
    Work,
    jobs_of_flat,
    jobs_of_unit,
    memory_of_matrix,
)
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
    StateInvalid,
    StepUndone,
)

PREFETCH_CHUNKS_MAX = 64
"""Most chunks that are named for prefetch; the executor reads as many as it has idle staging
buffers."""
PENDING_MIN = 16
"""Number of pending updates from which on the pipeline drops the done ones."""

Gradients = Mapping[Param, torch.Tensor]


class UpdatingOptimizer(Grouped, Protocol):
    """The part of an optimizer that update modes use."""

    @property
    def params_with_states(self) -> list[Param]:
        """Parameters that have states."""

    def refresh_groups(self) -> None:
        """Look up each parameter's group again, since a step begins."""

    def preview(self, params: Sequence[Param]) -> tuple[list[Work], list[dict[str, Any]]]:
        """Return the work of a step if it were taken now, and the states after it. Changes nothing.
        """

    def work_of(self, params: Sequence[Param]) -> list[Work]:
        """Return the work of the present step for these parameters, and advance their step counts.
        """

    def make_matrices(
        self,
        work: Mapping[Param, Work],
        gradients: Mapping[Param, torch.Tensor],
        *,
        owned: Container[Param],
    ) -> dict[Param, torch.Tensor]:
        """Do the first updates of an optimizer of whole matrices, and return this rank's parts of
        the matrices, 1-D, which the second updates read. Blocks. Collective. `Work.first` is set.

        gradients: this rank's parts, 1-D, in RAM; those of other parameters have spilled. owned:
        parameters whose gradient's memory gets the matrix. A spilled one among them gets it in the
        `grad` section of its chunks, and is not returned.

        Raises: AioError, StateInvalid, StepUndone.
        """


class StepHooks(UpdateHooks, abc.ABC):
    """The calls of the pipeline to the update mode. By default all but `submit` do nothing."""

    def before_step(self) -> None:
        """Check the step before `opt.step()` changes anything. Raises: RuntimeError if no step can
        be taken.
        """

    @abc.abstractmethod
    def submit(self, by_unit: dict[Unit, dict[Param, Work]], optimizer: UpdatingOptimizer) -> None:
        """Submit the updates of `opt.step()`; `by_unit` may be empty. Updates of the step before
        have ended. Does not block on I/O.

        optimizer: the one whose `step()` runs.
        """

    def undo_ahead(self) -> None:
        """Undo all updates that ran ahead of their step. Blocks until the states are those of the
        step before.
        """

    def undone(self) -> None:
        """Note that an undo has restored the states of the last commit, without the updates that
        ran ahead of their step.
        """


class StepWatch(Protocol):
    """The watch over drives and activations (`infinity._src.engine.storage`)."""

    def step_begins(self, steps: int) -> None:
        """Note that forwards and backwards of a step are done. steps: number of steps before it."""


class StepPipeline:
    """Submits updates and waits for them. One thread uses it at a time.

    in_any_order: ranks may use different units.
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
        self.comm = comm
        self._mode = mode
        self._alarm = alarm
        self._heap = heap
        self._watch = watch
        self._jobs: dict[Flat, FlatJobs] = {}
        # Masks of a step's first updates of these flats, if a step has two.
        self._first_masks: dict[Flat, npt.NDArray[np.uint32]] = {}
        self._pending: list[Ticket] = []
        self._retained: list[torch.Tensor] = []
        self._pending_max = PENDING_MIN
        self._fault: Exception | None = None
        # True: every call raises the fault, since no undo repairs it.
        self._final = False
        # True while ranks have to agree whether an update failed; the same on all ranks.
        self._unagreed = False
        self._counts = {"steps": 0}
        self.transaction = transaction
        # Units updated ahead of their step: number whose update stayed, and whose was undone.
        self.updates_ahead = self.updates_withdrawn = 0
        self.matrices_s = 0.0  # time in which the calling thread transformed whole matrices
        # True once updates of the coming step were submitted.
        self.begun = False

    def prepare_jobs(self, flats: Sequence[Flat]) -> None:
        """Prepare the jobs of these flats. Call it again when formats or places have changed."""
        self._jobs = {flat: jobs_of_flat(self._store, flat, self.comm.rank) for flat in flats}
        self._first_masks.clear()

    # -- faults and waiting ------------------------------------------------------------------------

    @property
    def undoes_together(self) -> bool:
        """True where a fault of one rank's update undoes the step on all ranks."""
        return self.transaction is not None and self.comm.world > 1

    @property
    def update_failed(self) -> bool:
        """True once a pending update has failed on this rank. Safe in any thread."""
        # A copy: the training thread may append meanwhile.
        return any(ticket.failed for ticket in list(self._pending))

    def raise_fault(self) -> None:
        """Raise the fault of a background update, now and in every later call. With two generations
        one rank undoes the step instead, and raises once. Several ranks with two generations defer
        faults of updates until they agree; only other faults are raised here.
        """
        if self._fault is None and not self.undoes_together:
            self._fault = self._fault_of_update()
        fault = self._fault
        if fault is None:
            return
        if isinstance(fault.__cause__, DriveLostError):
            # A step cannot be undone on a lost drive: raise the drive's error.
            self.comm.report_failure(fault.__cause__)
            raise fault.__cause__.with_traceback(None)
        if self.transaction is not None and not (self.undoes_together or self._final):
            # Raised once: training may continue after the undo.
            self._fault = None
            raise self._undo(self.transaction, fault.__cause__ or fault)
        # Peers wait in collectives for this rank; without a report they would time out.
        self.comm.report_failure(fault)
        raise fault

    def _undo(
        self, transaction: Transaction, cause: BaseException, read: BaseException | None = None
    ) -> StepUndone:
        """Restore the states of the last commit on this rank. read: the fault of a gather, if one
        failed in addition to `cause`. Returns the error to raise.
        """
        try:
            undone = transaction.undo(cause, self._faults_of_updates, read)
            # After the undo: a commit before it would include updates that ran ahead.
            self.begun = self._unagreed = False
            self._mode.undone()
        except StateInvalid as lost:
            self.begun = self._unagreed = False
            self._mode.undone()
            self.set_fault(lost, final=True)
            self._forget_updates()
            raise
        except BaseException:
            # Interrupted before or after the states were restored: the next call undoes and raises.
            self.set_fault(half_done(cause))
            raise
        # After the undo: until then failing gathers are attributed to the failed updates.
        self._forget_updates()
        return undone

    def retain(self, memory: Iterable[torch.Tensor]) -> None:
        """Keep memory that updates of an interrupted call may still use, until none is pending."""
        self._retained += memory

    def _forget_updates(self) -> None:
        self._pending.clear()
        self._retained.clear()
        self._unsharder.updates_ended()

    def undo_together(self, read: BaseException | None = None) -> NoReturn:
        """Undo the step on all ranks, after an update or the read of a gather has failed on one.
        read: the fault of this rank's gather, if it has one. Collective. Always raises StepUndone.
        """
        fault = self._fault_of_update()
        self._undo_for(read if fault is None else fault.__cause__, read)

    def may_undo(self, error: AioError) -> bool:
        """Return whether an undo of the step on all ranks may repair this fault of a gather. Safe
        in any thread."""
        repair = self.transaction.repair if self.transaction is not None else None
        return self.update_failed or (repair is not None and repair.concerns(error))

    def read_failed(self, error: AioError) -> None:
        """Handle the read of a gather that has failed repeatedly: undo the step that is not
        committed, or repair the chunk if there is no such step. Ranks that undo together do this in
        the gather's turn instead. Blocks. Raises: StepUndone, StateInvalid.
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

    def end_updates(self, error: AioError | StateInvalid | None) -> None:
        """End updates that the calling thread made. error: of a failed update. Raises the sticky
        fault. Collective where ranks undo steps together.
        """
        if self.undoes_together:
            if failed_anywhere(self.comm, error):
                self._undo_for(error)
        elif error is not None:
            self.set_fault(half_done(error))
            self.raise_fault()

    def _undo_for(self, error: BaseException | None, read: BaseException | None = None) -> NoReturn:
        """Undo the step on all ranks, and raise StepUndone. error: this rank's fault, if any; read:
        the fault of its gather, if any. Collective.
        """
        assert self.transaction is not None, "one generation undoes nothing"
        cause = cause_of_undo(self.comm, error)
        try:
            undone = self._undo(self.transaction, cause, read)
        except BaseException as error:
            # The other ranks restore the last commit, and this rank cannot.
            self.comm.report_failure(error)
            raise
        raise undone

    def _agree(self) -> None:
        """Agree that the updates of all ranks have succeeded. None of this rank's is pending.
        Collective. Raises: StepUndone on all ranks if an update of one has failed.
        """
        fault = self._fault_of_update()
        if failed_anywhere(self.comm, fault):
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
        """Return the fault of the first failed update; None if no update has failed."""
        failed = next((ticket for ticket in self._pending if ticket.failed), None)
        if failed is None:
            return None
        try:
            failed.wait()
        except AioError as error:
            fault = StateInvalid(
                f"an optimizer update failed in the background ({error}); the step is incomplete, "
                "and the states are inconsistent; close this engine and start again from the last "
                "export"
            )
            fault.__cause__ = error
            return fault
        raise AssertionError("a ticket failed without an error")

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
        """Undo updates that ran ahead of their step, and block until no update is pending. Raises
        the sticky fault. Collective where ranks undo steps together.

        together: False communicates with no other rank; then a fault of this rank is sticky.
        """
        self._mode.undo_ahead()
        self._finish(together=together)

    def settle(self) -> None:
        """If ranks undo steps together, wait for the updates of the step before, and agree on them.
        Blocks. Collective. Raises as `begin`.
        """
        # Before spilled gradients are written: a drive that failed an update also refuses these
        # writes, and its rank would raise alone.
        if self.undoes_together and not self.begun:
            self._finish()

    def begin(self) -> None:
        """Begin the updates of a step. Blocks until those of the step before are done. Raises the
        sticky fault. Collective as `wait`.
        """
        # Updates of this step have run in backward already: a wait here would wait for them.
        if self.begun:
            self.raise_fault()
            return
        self._finish()
        if self.transaction is not None:
            # From here on writes go to the other place of each chunk.
            self.transaction.begin()
            self.begun = True

    def commit(self) -> None:
        """Commit the last step of a durable run. No update may be pending, or ahead of its step.
        Blocks. Collective.
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
        # Every ticket is waited for, even after a failure: threads may still use its memory.
        for ticket in self._pending:
            wait_through(ticket)
        self._waits.updates_s += time.perf_counter() - start
        if self.undoes_together and together:
            # A fault that cannot be undone is raised first, and ends all ranks.
            self.raise_fault()
            if self._unagreed:
                self._agree()
        else:
            self._fault = self._fault or self._fault_of_update()
        if self._pending:
            self._forget_updates()
        self.raise_fault()
        self._store.settle_moves()

    # -- the step ----------------------------------------------------------------------------------

    def check_ranks_agree(self, optimizer: Grouped, params: Sequence[Param]) -> None:
        """Check that all ranks update these parameters in the same way. Collective.

        Raises: RanksDiverged; ValueError for an lr, or another number, that differs on a rank.
        """
        # Not with one rank: a description costs a pass over the groups.
        if self.comm.world > 1:
            description = describe_step(optimizer, params)
            self.comm.check_same_numbers(description.what, description.numbers, description.names)

    def check_idle(self, params: Sequence[Param]) -> None:
        """Raise RuntimeError if a forward, a backward or `gather()` uses the unit of one of these
        parameters.

        Blocks until spilled gradients are written. Raises: AioError of a write that failed; then no
        state has changed.
        """
        # The mode first: an interrupted backward explains a busy unit better than the check below.
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

    def submit(self, work: Sequence[Work], *, optimizer: UpdatingOptimizer) -> None:
        """Start the update of these parameters, and count a step of `optimizer`.

        The logs of their gradients are in the hyper records. Does not block on I/O; waits for the
        previous step's updates if there is something to do.

        Raises: RuntimeError while a forward or backward is running; the sticky fault of an earlier
        step.
        """
        # Executor, gates and schedule work on units.
        by_unit: dict[Unit, dict[Param, Work]] = {}
        for item in work:
            by_unit.setdefault(item.param.unit, {})[item.param] = item
        self.check_idle([item.param for item in work])
        self._clock.enter("step")
        # An empty step does not wait: GradScaler skips steps, and a skipped step must not stall.
        if by_unit:
            self.begin()
        else:
            self.raise_fault()
        self.step_begins()
        # Also on a rank without a part of the updated parameters: the agreement is collective.
        self._unagreed = self._unagreed or (self.undoes_together and bool(by_unit))
        try:
            with profiled("infinity: step"):
                self._mode.submit(by_unit, optimizer)
        except BaseException as error:
            # Some units may be submitted and others not. After StepUndone the states are restored.
            if by_unit and not isinstance(error, StepUndone):
                self.set_fault(half_done(error))
            raise
        self.count_step()
        # Prefetch the reads with which the next forward starts.
        self._unsharder.prefetch_ahead()
        self._clock.enter("idle")

    def step_begins(self) -> None:
        """Note that the step's forwards and backwards have ended, and its update begins."""
        self._heap.step_begins()
        self._watch.step_begins(self.steps)

    def count_step(self) -> None:
        self.begun = False
        self._passes.step_taken()
        if self.transaction is not None:
            # Before the count changes, so that an undo is right after an interrupt between the two.
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
        """Number of steps taken, without undone ones."""
        return self._counts["steps"]

    @steps.setter
    def steps(self, steps: int) -> None:
        self._counts["steps"] = steps

    def next_order(self, units: Sequence[Unit]) -> list[Unit]:
        """Return units in the order of the next training forward, then units that it does not use.
        """
        # Units are gathered in the order of the model; the learned order would differ between
        # ranks.
        if self._in_any_order:
            return sorted(units, key=lambda unit: unit.index)
        # The first use counts for a unit that runs several times in a forward.
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

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def world(self) -> int:
        return self.comm.world

    @property
    def device(self) -> Device:
        """Device of the model."""
        return self._device

    def exchange(
        self,
        what: str,
        sends: Sequence[Message],
        receives: Sequence[Message],
    ) -> PendingCollective:
        """Start an exchange of tensors with the other ranks. Never blocks. Collective. what: its
        name, the same on all ranks.
        """
        return self.comm.submit_all_gather(
            what, lambda collectives: collectives.exchange(sends, receives)
        )

    def prefetch_states(self, phase: Phase, *, in_memory: bool) -> None:
        """Prefetch the states of the first units of `phase` into idle staging buffers of the
        executor. Never blocks.

        in_memory: the updates will have the parameters in memory. The executor releases the buffers
        when another job needs them.
        """
        # Only into idle buffers: a byte of the budget that keeps a section resident saves its read
        # and its write in every step, while a byte of prefetch only hides a read.
        ids: list[int] = []
        masks: list[int] = []
        flags = MASK_PARAM_IN_MEMORY if in_memory else 0
        for index in self._schedule.order(phase):
            for flat in self._units[index].flats:
                plan = self._jobs[flat]
                chunks = np.unique(plan.chunk)
                ids.extend(plan.jobs["chunk"][chunks].tolist())
                first = self._first_masks.get(flat)
                of_chunks = first[chunks] if first is not None else np.zeros_like(chunks)
                masks.extend((of_chunks | flags).tolist())
            if len(ids) >= PREFETCH_CHUNKS_MAX:
                break
        if ids:
            self._executor.prefetch(
                np.array(ids[:PREFETCH_CHUNKS_MAX], dtype=np.int32),
                np.array(masks[:PREFETCH_CHUNKS_MAX], dtype=np.uint32),
            )

    def jobs_of(self, unit: Unit, work: Mapping[Param, Work], gradients: Gradients) -> Submission:
        return jobs_of_unit(unit, self._jobs, work, gradients)

    def add_pending(self, ticket: Ticket) -> None:
        """Add an update that was submitted without `start`, so that the pipeline waits for it and
        raises its fault.
        """
        self._pending.append(ticket)

    def _forget_done(self) -> None:
        """Drop done updates whenever the list has doubled, at a constant cost per update. Raises
        the sticky fault.
        """
        if len(self._pending) >= self._pending_max:
            self.raise_fault()
            # `done` is read first, so that a ticket that fails between the two reads is retained.
            self._pending = [ticket for ticket in self._pending if not ticket.done or ticket.failed]
            self._pending_max = max(2 * len(self._pending), PENDING_MIN)

    def start(
        self,
        unit: Unit,
        work: Mapping[Param, Work],
        gradients: Gradients,
        *,
        gate: Gate | None = None,
        targets: Sequence[int] = (),
        first: bool = False,
    ) -> Ticket:
        """Submit the update of one unit. Does not block.

        gate: delays the update until forward gathers the unit, and supplies the addresses of the
        unit's flats.
        targets: without a gate, addresses of flats with the gathered parameters, which the update
        reads and replaces there.
        first: the step has a second update of the unit.

        Raises: the sticky fault of an earlier update; then nothing is submitted.
        """
        self._store.will_write(unit.flats)
        plan = jobs_of_unit(unit, self._jobs, work, gradients)
        jobs = plan.jobs
        if first:
            jobs["mask"] |= MASK_FIRST
            for flat in {param.flat for param in work}:
                leaves = jobs["mask"][jobs["base"] == unit.flats.index(flat)] & ~np.uint32(1)
                self._first_masks[flat] = leaves
        # With a gate the whole unit is handed over, so chunks without work are fetched, too. The
        # gate gets the addresses once the unit has memory.
        if gate is not None:
            jobs["mask"] |= self._device.mask
        else:
            # Without a hand-over no gather waits for chunks without work.
            jobs = jobs[jobs["kind"] == JobKind.UPDATE]
            if targets:
                jobs["ptr"][:, 0] += np.array(targets, dtype=np.uint64)[jobs["base"]]
                # Input and output are the same memory: the update replaces the gathered parameters
                # in place, which saves their read from NVMe.
                jobs["ptr"][:, 1] = jobs["ptr"][:, 0]
                jobs["mask"] |= MASK_PARAM_IN_MEMORY | self._device.mask
            else:
                jobs["ptr"][:, 0] = 0
            jobs["base"] = -1
        # Order the update after kernels that still use the unit's memory or write gradients.
        self._device.behind()
        # After the submission nothing may raise: the caller retains the memory that threads use.
        self._forget_done()
        self._unagreed = self.undoes_together
        ticket = self._executor.submit(
            jobs, plan.segs, plan.hypers, priority=Priority.WRITEBACK, gate=gate
        )
        self._pending.append(ticket)
        return ticket


def accumulated_gradients(work: Mapping[Param, Work]) -> dict[Param, torch.Tensor]:
    """Return the tensors in RAM that the updates read, 1-D: gradients, or matrices in the memory of
    gradients. Spilled ones are left out."""
    gradients = gradients_in_ram(work)
    for param, tensor in gradients.items():
        # Test the dtype first: `algorithm` is slow over thousands of parameters.
        if tensor.dtype is torch.float16 and work[param].algorithm is Algorithm.MUON:
            gradients[param] = memory_of_matrix(tensor)
    return gradients


def first_updates(
    by_unit: Mapping[Unit, Mapping[Param, Work]], optimizer: UpdatingOptimizer
) -> None:
    """Do the first updates of an optimizer of whole matrices in the memory of the gradients, which
    are consumed. Blocks. Collective. Raises as `UpdatingOptimizer.make_matrices`.
    """
    work = {
        param: item
        for items in by_unit.values()
        for param, item in items.items()
        if item.first is not None
    }
    if not work:
        return
    try:
        optimizer.make_matrices(work, gradients_in_ram(work), owned=work)
    finally:
        for param in work:
            assert param.grad is not None
            param.grad.consume()


def gradients_in_ram(params: Iterable[Param]) -> dict[Param, torch.Tensor]:
    """Return this rank's part of each accumulated gradient, 1-D; spilled ones are left out."""
    gradients = {}
    for param in params:
        assert param.grad is not None
        if param.grad.backing is None:
            gradients[param] = param.grad.tensor
    return gradients


def guard(params: Iterable[Param], ticket: Ticket) -> None:
    """Make later writes to these gradients wait until the update has read them. Spilled gradients
    need no guard: the update reads them from NVMe."""
    reader = ReadByUpdate(ticket)
    for param in params:
        assert param.grad is not None
        param.grad.guard(reader if param.grad.backing is None else None)


def half_done(error: BaseException) -> StateInvalid:
    """Return the sticky fault of a step that was interrupted after some parameters were, or may
    have been, updated."""
    fault = StateInvalid(
        f"opt.step() was interrupted ({type(error).__name__}: {error}) after it updated some "
        "parameters, so the states are inconsistent; close this engine and start again from the "
        "last export"
    )
    fault.__cause__ = error
    return fault
