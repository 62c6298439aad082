"""Transaction of a step (Policy.generations of 2 and more): a step does not overwrite the committed
states, until the next step begins.

    begin     earlier updates have succeeded -> commit them; new writes go to the other places
    undo      an update failed -> states, step counts and gathered parameters of the last commit

A commit moves nothing: it determines which of a chunk's two places is written next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from infinity._src.optim.chunk_repair import ChunkRepair
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Unit
from infinity._src.params.unshard import Unsharder
from infinity.aio import Executor
from infinity.errors import AioError, StepUndone

ASKED_AGAIN_S = 0.5
"""Seconds between two attempts to read from a failing drive, outside of steps."""


class Durable(Protocol):
    """The part of a durable run that a transaction uses. Its commits outlive the process."""

    @property
    def waits(self) -> bool:
        """True while no commit is allowed: the run waits for its restore."""

    def check(self) -> None:
        """Raise ValueError while no commit is allowed."""

    def count_step(self) -> None:
        """Note that a step was taken."""

    def undone(self) -> None:
        """Note that an undo has restored the states of the last commit."""

    def states_moved(self, *, complete: bool) -> None:
        """Commit states that have other places or formats, since the last commit names old places.
        complete: every trainable parameter has states now.
        """

    def prepare_next(self) -> None:
        """Prepare the places that are written next, after the executor has committed. Raises:
        SwapFullError.
        """

    def is_due(self) -> bool:
        """Return True if the last captured step is to be committed."""

    def commit(self) -> None:
        """Commit. Blocks. Collective. Raises: AioError, PeerFailed; then the last commit is intact.
        """


class Transaction:
    """The versions of one model's states. One thread uses it at a time."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        store: StateStore,
        executor: Executor,
        unsharder: Unsharder,
        repair: ChunkRepair,
    ) -> None:
        self.repair = repair
        self._units = list(units)
        self._store = store
        self._executor = executor
        self._unsharder = unsharder
        self._durable: Durable | None = None
        # Tables of counts, each with former entries, oldest first. An undo restores the entries,
        # newest first.
        self._counts_before: list[tuple[MutableMapping[Any, Any], Mapping[Any, Any]]] = []
        # True while a commit has begun and not ended, also after an interruption.
        self._committing = False
        self.undone_steps = 0
        self.commit_s = 0.0

    def attach(self, durable: Durable) -> None:
        """Make commits outlive the process from now on. Called once, before the first step."""
        self._durable = durable

    def begin(self) -> None:
        """Commit all writes so far. No update may be pending. Blocks for drives only in a durable
        run; collective there.

        Raises: ValueError, AioError and PeerFailed of a durable run; then nothing has changed.
        """
        if self._durable is not None:
            # Before anything is written: a run that waits for its restore must not be overwritten.
            self._durable.check()
            if not (self._committing or self._durable.is_due()):
                # The coming step overwrites the one before, and is undone together with it.
                return
        self._commit_now()

    def _commit_now(self) -> None:
        # After an interruption here a manifest may name the places just written, or a place may
        # still belong to a checkpoint: no step writes before a commit has ended, due or not.
        self._committing = True
        if self._durable is not None:
            # `commit_s` in the statistics shows the cost of durability.
            start = time.perf_counter()
            try:
                self._durable.commit()
            finally:
                self.commit_s += time.perf_counter() - start
        self._flip()

    def _flip(self) -> None:
        """Make the new places the committed ones in the executor."""
        # The manifest names the new places by now, so the executor may write to the old ones.
        self._executor.commit(self._ids(flat for unit in self._units for flat in unit.flats))
        if self._counts_before:
            self.repair.passed()
        # Committed counts are never undone.
        self._counts_before.clear()
        if self._durable is not None:
            self._durable.prepare_next()
        self._committing = False

    def commit(self) -> None:
        """Commit a durable run now, due or not, if anything may be committed. As `begin`."""
        if self._durable is not None and not self._durable.waits:
            self._commit_now()

    def states_moved(self, *, complete: bool) -> None:
        """Commit flats with new places or formats, and the same values. The first commit of a run
        comes when set-up is `complete`: every trainable parameter has states. As `begin`.
        """
        if self._durable is not None:
            self._committing = True
            self._durable.states_moved(complete=complete)
            self._flip()

    def count_step(self) -> None:
        """Note that a step was taken and counted."""
        if self._durable is not None:
            self._durable.count_step()

    def remember(self, table: MutableMapping[Any, Any], before: Mapping[Any, Any]) -> None:
        """Remember entries of a table of counts `before` a step, for an undo to restore them."""
        # One entry of the list, so that an interrupt leaves all of them or none.
        self._counts_before.append((table, before))

    def undo(
        self,
        cause: BaseException,
        faults: Callable[[], Sequence[BaseException]] = tuple,
        read: BaseException | None = None,
    ) -> StepUndone:
        """Restore the last commit after an update, or a read, has failed. faults: returns the
        faults of all failed updates. read: the fault of a gather, if `cause` is another. Returns
        the error to raise. Blocks until nothing is in flight.

        Drives that refused writes after the fault accept them again. Chunks that cannot be read are
        repaired where possible. Raises: StateInvalid, StatesLost; the step is undone nevertheless.
        """
        # Gathered units may have parameters of the undone step: they are read anew.
        self._unsharder.mark_stale(self._units)
        # A running save must end its reads first: after the rollback it would read older states.
        self._store.wait_for_reader([flat for unit in self._units for flat in unit.flats])
        # A write in flight would reach a place that is written next.
        self._executor.wait_all()
        failed = faults()
        misread = self.repair.misread((cause, *failed, *([] if read is None else [read])))
        self._executor.rollback(self._ids(flat for unit in self._units for flat in unit.flats))
        # Started before the counts are restored, and awaited afterwards: counts must be restored
        # even if a drive fails again.
        recovery = self._executor.recover()
        for table, before in reversed(self._counts_before):
            table.update(before)
        self._counts_before.clear()
        self.undone_steps += 1
        if self._durable is not None:
            self._durable.undone()
        try:
            recovery.wait()
        except AioError as error:
            cause = error
        self.repair.mend(misread)
        # A failed read without a failed update belongs to a gather. The error is returned, not
        # raised: the pipeline first resets its own state.
        return _undone(cause, of_gather=bool(misread) and not failed)

    @property
    def has_steps(self) -> bool:
        """True while a step has been taken that is not committed."""
        return bool(self._counts_before)

    def mend(self, error: AioError) -> None:
        """Repair a chunk that cannot be read, while there is no step to undo. Blocks until nothing
        is in flight, and the chunk can be read. Raises: StateInvalid if it cannot be repaired.
        """
        self._executor.wait_all()
        older = self.repair.older_chunks
        misread = self.repair.misread([error])
        try:
            # No step runs that would try the drive again, so try it in this loop.
            while not self.repair.mend(misread, of_step=False):
                time.sleep(ASKED_AGAIN_S)
        finally:
            # Only if values have changed: reloading units in use would overwrite tensors that
            # autograd saved.
            if self.repair.older_chunks > older:
                self._unsharder.mark_stale(self._units)
        # The chunk can be read: the repair counts later faults anew.
        self.repair.passed()

    def states_replaced(self) -> None:
        """Note that a restore has replaced all states, so that no undo returns to the states before
        it. No update may be pending. A durable run makes a separate commit instead.
        """
        if self._durable is None:
            self._flip()

    def undo_units(self, units: Sequence[Unit]) -> None:
        """Undo the writes to these units since the last commit. None of their updates may be
        pending. Blocks until nothing is in flight.
        """
        self._unsharder.mark_stale(units)
        ids = self._ids(flat for unit in units for flat in unit.flats)
        self._executor.wait_all()
        self._executor.rollback(ids)

    def _ids(self, flats: Iterable[Flat]) -> npt.NDArray[np.int32]:
        return self._store.versioned_ids(flats)


def _undone(cause: BaseException, *, of_gather: bool) -> StepUndone:
    """Return the error of an undone step. of_gather: the cause is the read of a gather."""
    met, since = "an optimizer update failed", ""
    if of_gather:
        met, since = "a unit cannot be read", ", and later writes to parameters,"
    # An interrupt has no text.
    text = str(cause) or type(cause).__name__
    undone = StepUndone(
        f"{met} ({text}); the step was undone: parameters, optimizer states and step counts"
        f"{since} are those before it; its gradients are consumed. After fixing the cause clear "
        "the gradients, and repeat the step's batches or continue with the next"
    )
    undone.__cause__ = cause
    return undone
