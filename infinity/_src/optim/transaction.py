"""A step as a transaction (Policy.generations = 2): what it writes stands beside what was committed, until the next one begins.

    begin     the updates before have ended well -> what they wrote is committed; what is written now goes to the other places
    undo      one of them failed -> states, step counts and gathered parameters are those of the last commit again

Committing moves nothing: it says which of a chunk's two places is written next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Unit
from infinity._src.params.unshard import Unsharder
from infinity.aio import Executor
from infinity.errors import AioError, StepUndone


class Durable(Protocol):
    """What makes a commit outlive the process."""

    @property
    def waits(self) -> bool:
        """Whether nothing may be committed."""

    def check(self) -> None:
        """Raise ValueError if it waits."""

    def stepped(self) -> None:
        """A step was taken."""

    def undone(self) -> None:
        """The states are those of the last commit again."""

    def replaced(self) -> None:
        """States were given other places or formats, and what the last commit names is nobody's any more."""

    def make_way(self) -> None:
        """The commit is the executor's too: the places that are written next are made ready. Raises: SwapFullError."""

    def is_due(self) -> bool:
        """Whether what was captured last is to be committed."""

    def commit(self) -> None:
        """Commit. Blocks; collective. Raises: AioError, PeerFailed; then the last commit is still whole."""


class Transaction:
    """The versions of one model's states. One thread uses it at a time."""

    def __init__(self, units: Sequence[Unit], *, rest: StateStore, executor: Executor, unsharder: Unsharder) -> None:
        self._units = list(units)
        self._rest = rest
        self._executor = executor
        self._unsharder = unsharder
        self._durable: Durable | None = None
        self._forget_counts: list[Callable[[], None]] = []
        self._committing = False  # a commit has begun, and has not ended
        self.undone_steps = 0
        self.commit_s = 0.0

    def attach(self, durable: Durable) -> None:
        """From now on commits outlive the process. Called once, before the first step."""
        self._durable = durable

    def begin(self) -> None:
        """Commit what was written so far. No update may be pending. Blocks for drives only in a durable run; collective there.

        Raises: ValueError, AioError and PeerFailed of a durable run; then nothing changed.
        """
        if self._durable is not None:
            self._durable.check()
            if not (self._committing or self._durable.is_due()):
                return  # the step that comes overwrites the one before, and is undone together with it
        self._commit()

    def _commit(self) -> None:
        # Where this breaks off, a manifest may name what was just written, or a place may still be a checkpoint's: the next step
        # writes nothing before a commit has ended, due or not.
        self._committing = True
        if self._durable is not None:
            start = time.perf_counter()
            try:
                self._durable.commit()
            finally:
                self.commit_s += time.perf_counter() - start
        self._flip()

    def _flip(self) -> None:
        """What was written is what the executor calls committed."""
        self._executor.commit(self._ids(flat for unit in self._units for flat in unit.flats))
        self._forget_counts.clear()
        if self._durable is not None:
            self._durable.make_way()
        self._committing = False

    def settle(self) -> None:
        """Of a durable run: commit now, whether a commit is due or not, if anything may be committed. As `begin`."""
        if self._durable is not None and not self._durable.waits:
            self._commit()

    def replaced(self) -> None:
        """Flats have got other places or formats, with the values they had. As `begin`."""
        if self._durable is not None:
            self._committing = True
            self._durable.replaced()
            self._flip()

    def stepped(self) -> None:
        """A step was taken and counted."""
        if self._durable is not None:
            self._durable.stepped()

    def counted(self, forget: Callable[[], None]) -> None:
        """A step was counted: `forget` takes that back."""
        self._forget_counts.append(forget)

    def undo(self, cause: BaseException) -> StepUndone:
        """Go back to the last commit after an update has failed, and say so. Blocks until nothing is in flight.

        Drives that refused writes after the fault take them again. Raises: AioError when what was written before the commit can
        not be brought to them either.
        """
        self._unsharder.mark_stale(self._units)
        self._executor.wait_all()
        self._executor.rollback(self._ids(flat for unit in self._units for flat in unit.flats))
        recovery = self._executor.recover()
        for forget in reversed(self._forget_counts):
            forget()
        self._forget_counts.clear()
        self.undone_steps += 1
        if self._durable is not None:
            self._durable.undone()
        try:
            recovery.wait()
        except AioError as error:
            cause = error
        undone = StepUndone(
            f"an optimizer update failed ({cause}); the step was undone: parameters, optimizer states and step counts are those "
            "before it; its gradients are used up. Once the cause is mended, clear the gradients and take the step's batches "
            "again, or go on with the next"
        )
        undone.__cause__ = cause
        return undone

    def withdraw(self, units: Sequence[Unit]) -> None:
        """Take back what was written of these units since the last commit; no update of theirs may be pending. Blocks while
        others read them."""
        self._unsharder.mark_stale(units)
        ids = self._ids(flat for unit in units for flat in unit.flats)
        self._executor.wait_all()
        self._executor.rollback(ids)

    def _ids(self, flats: Iterable[Flat]) -> npt.NDArray[np.int32]:
        return self._rest.versioned_ids(flats)
