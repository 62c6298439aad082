"""Transaction of a step (Policy.generations = 2): a step writes beside the committed states, until
the next one begins.

    begin     the updates before have ended well -> commit them; new writes go to the other places
    undo      one of them failed -> states, step counts and gathered parameters of the last commit

A commit moves nothing: it says which of a chunk's two places is written next.
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
"""Seconds after which a drive that fails is asked again outside of steps."""


class Durable(Protocol):
    """A durable run, as a transaction sees it: its commits outlive the process."""

    @property
    def waits(self) -> bool:
        """True while nothing may be committed."""

    def check(self) -> None:
        """Raise ValueError while nothing may be committed."""

    def count_step(self) -> None:
        """Note that a step was taken."""

    def undone(self) -> None:
        """Note that the states are those of the last commit again."""

    def states_moved(self, *, complete: bool) -> None:
        """Note that states got other places or formats. The last commit names places that are out
        of use. complete: every parameter that learns has states now.
        """

    def prepare_next(self) -> None:
        """Prepare the places that are written next; the executor has committed too. Raises:
        SwapFullError.
        """

    def is_due(self) -> bool:
        """Return True if the last captured step is to be committed."""

    def commit(self) -> None:
        """Commit. Blocks; collective. Raises: AioError, PeerFailed; the last commit is still whole
        then.
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
        # Tables of counts, and entries of them as they were, in the order of the counts; an undo
        # puts them back from the last to the first.
        self._counts_before: list[tuple[MutableMapping[Any, Any], Mapping[Any, Any]]] = []
        # True while a commit has begun and not ended, also after it broke off.
        self._committing = False
        self.undone_steps = 0
        self.commit_s = 0.0

    def attach(self, durable: Durable) -> None:
        """Make commits outlive the process from now on. Called once, before the first step."""
        self._durable = durable

    def begin(self) -> None:
        """Commit all writes so far. No update may be pending. Blocks for drives only in a durable
        run; collective there.

        Raises: ValueError, AioError and PeerFailed of a durable run; nothing changed then.
        """
        if self._durable is not None:
            # Before anything is written: a run that waits for its restore must not be overwritten.
            self._durable.check()
            if not (self._committing or self._durable.is_due()):
                # The coming step overwrites the one before, and is undone together with it.
                return
        self._commit_now()

    def _commit_now(self) -> None:
        # Where this breaks off, a manifest may name what was just written, or a place may still be
        # a checkpoint's: the next step writes nothing before a commit has ended, due or not.
        self._committing = True
        if self._durable is not None:
            # The flush to the drives is the price of durability, and the statistics show it.
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
        """Commit flats that got other places or formats, with the values they had; the first time
        when set-up is `complete`: every parameter that learns has states. As `begin`.
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
        """Remember entries of a table of counts as they are `before` a step. An undo of it puts
        them back.
        """
        # One entry of the list, so that an interrupt leaves all of them or none.
        self._counts_before.append((table, before))

    def undo(
        self,
        cause: BaseException,
        faults: Callable[[], Sequence[BaseException]] = tuple,
        read: BaseException | None = None,
    ) -> StepUndone:
        """Go back to the last commit after an update, or a read, has failed. faults: returns those
        of all updates that failed; read: that of a gather, where `cause` is another. Returns the
        error to raise. Blocks until nothing is in flight.

        Drives that refused writes after the fault take them again. Chunks that cannot be read are
        mended as far as can be. Raises: StateInvalid, StatesLost; the step is undone then, too.
        """
        # Gathered units may hold parameters of the undone step. They are read anew.
        self._unsharder.mark_stale(self._units)
        # A save under way would take the rest of its states from the step before.
        self._store.wait_for_reader([flat for unit in self._units for flat in unit.flats])
        # A write that is still in flight would land in a place that is written next.
        self._executor.wait_all()
        failed = faults()
        misread = self.repair.misread((cause, *failed, *([] if read is None else [read])))
        self._executor.rollback(self._ids(flat for unit in self._units for flat in unit.flats))
        # Started before the counts go back, waited for after: both must happen, whatever the drives
        # say.
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
        # A read outside of an update is one of a gather. Returned instead of raised: the pipeline
        # first tells the other ranks.
        return _undone(cause, of_gather=bool(misread) and not failed)

    @property
    def has_steps(self) -> bool:
        """True while a step was taken that is not committed."""
        return bool(self._counts_before)

    def mend(self, error: AioError) -> None:
        """Mend a chunk that cannot be read, while no step is to be undone: it can be read then.
        Blocks until nothing is in flight. Raises: StateInvalid where it cannot.
        """
        self._executor.wait_all()
        older = self.repair.older_chunks
        misread = self.repair.misread([error])
        try:
            # No step comes between, after which the drive would be asked again.
            while not self.repair.mend(misread, of_step=False):
                time.sleep(ASKED_AGAIN_S)
        finally:
            # Not where values are as they were: units in use would be filled anew under autograd.
            if self.repair.older_chunks > older:
                self._unsharder.mark_stale(self._units)
        # It can be read: no later fault is one more of these.
        self.repair.passed()

    def states_replaced(self) -> None:
        """Note that a restore has replaced all states: no undo goes back to those before. No update
        may be pending. A durable run commits by itself.
        """
        if self._durable is None:
            self._flip()

    def undo_units(self, units: Sequence[Unit]) -> None:
        """Undo the writes to these units since the last commit. None of their updates may be
        pending. Blocks while others read the units.
        """
        self._unsharder.mark_stale(units)
        ids = self._ids(flat for unit in units for flat in unit.flats)
        self._executor.wait_all()
        self._executor.rollback(ids)

    def _ids(self, flats: Iterable[Flat]) -> npt.NDArray[np.int32]:
        return self._store.versioned_ids(flats)


def _undone(cause: BaseException, *, of_gather: bool) -> StepUndone:
    """Return the error of a step that was undone. of_gather: for the read of a gather."""
    met, since = "an optimizer update failed", ""
    if of_gather:
        met, since = "a unit cannot be read", ", with what was written to parameters since,"
    undone = StepUndone(
        f"{met} ({cause}); the step was undone: parameters, optimizer states and step counts"
        f"{since} are those before it; its gradients are used up. Once the cause is mended, clear "
        "the gradients and take the step's batches again, or go on with the next"
    )
    undone.__cause__ = cause
    return undone
