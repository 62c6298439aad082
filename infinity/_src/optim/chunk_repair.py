"""Repair of chunks that a drive cannot give back, when the step that met them was undone.

    undone write   what cannot be read belongs to the step that was undone, and nothing is lost. The
                   chunk gets another second place: the step, taken again, is written there
    passing        it can be read again by now, or the drive fails and may answer when the step is
                   taken again: nothing is lost yet
    older states   its second place still has the states before its last update, which
                   Policy(damaged="from-older") takes, with a warning
    lost           StatesLost names parameters, elements and file

There is no other copy. Parameters that the device, or another rank, has gathered are used where
they are and not read from the drive; masters and moments are in one place only. A save by links
has the same blocks as the run, and a save elsewhere is of an earlier step: `inf.restore` takes all
of it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from infinity._src.base.wording import listed
from infinity._src.params.state_store import ChunkAt, StateStore
from infinity._src.params.unit import Flat
from infinity.aio import Executor
from infinity.errors import (
    AioError,
    ChecksumError,
    DamagedRange,
    StateInvalid,
    StatesLost,
    SwapFullError,
)

log = logging.getLogger("infinity")

ROUNDS_MAX = 3
"""A chunk whose read fails in so many consecutive steps is lost."""


class Misread(NamedTuple):
    """A read of a chunk that failed, and the chunk's generation then. stays: it failed once more
    before its step was undone.
    """

    at: ChunkAt
    error: AioError
    generation: int
    stays: bool


@final
class ChunkRepair:
    """Repair of one model's chunks. One thread uses it at a time; `concerns` is for any.

    takes_older: take older states where the last are lost. reads: of a chunk that verify all of it.
    advice: the way to continue where states are lost.
    """

    def __init__(
        self,
        store: StateStore,
        executor: Executor,
        *,
        rank: int,
        takes_older: bool,
        reads: int,
        advice: str,
    ) -> None:
        self._store = store
        self._executor = executor
        self._rank = rank
        self._takes_older = takes_older
        self._reads = reads
        self._advice = advice
        self._rounds: Counter[int] = Counter()
        self.older_chunks = 0

    def concerns(self, error: BaseException) -> bool:
        """Return whether this is a read that failed of a chunk that has versions."""
        return self._at(error) is not None

    def _at(self, error: BaseException) -> ChunkAt | None:
        if not isinstance(error, AioError) or error.op != "read":
            return None
        at = self._store.chunk_at(error.chunk)
        return at if at is not None and self._store[at.flat].versioned else None

    def misread(self, faults: Iterable[BaseException]) -> dict[int, Misread]:
        """Return the chunks whose reads failed, by their ids, with all others of their flats that
        cannot be read: a ticket has one fault, and a bad area is larger than a chunk. Their step is
        not undone yet. Nothing may be in flight. Blocks.
        """
        met: dict[int, tuple[ChunkAt, AioError]] = {}
        for fault in faults:
            at = self._at(fault)
            if at is not None:
                assert isinstance(fault, AioError)
                met.setdefault(at.id, (at, fault))
        found = {
            at.id: Misread(at, error, self._generation(at), stays=True)
            for at, error in self._unreadable(at.flat for at, _ in met.values())
            # An update that failed left a chunk that refuses to be read: its fault is of a write.
            if error.op == "read"
        }
        for id_, (at, error) in met.items():
            stays = id_ in found
            found[id_] = Misread(at, error, self._generation(at), stays)
        return found

    def passed(self) -> None:
        """Note that faults so far have passed: a step has ended well, or all can be read."""
        self._rounds.clear()

    def mend(self, misread: Mapping[int, Misread], *, of_step: bool = True) -> bool:
        """Make every chunk of their flats readable; their step has been undone (of_step), or there
        is none. Returns False where one is not, and its drive may answer again later. Blocks.
        Raises: StatesLost; StateInvalid where states are whole, and their update cannot be made.
        """
        lost: list[DamagedRange] = []
        cause: AioError | None = None
        whole: Misread | None = None
        flats = (each.at.flat for each in misread.values())
        bad = {at.id: (at, error) for at, error in self._unreadable(flats)}
        for id_ in {**misread, **bad}:
            self._rounds[id_] += 1
        for id_, each in misread.items():
            if id_ in bad:
                continue
            # The states are whole: what fails lies beside them, such as spilled gradients.
            if of_step and self._rounds[id_] >= ROUNDS_MAX:
                whole = whole or each
            elif each.stays and self._generation(each.at) != each.generation:
                self._retire(each.at, each.error)
        # Bytes that are wrong stay so. A drive that fails may answer again a moment later.
        gone = [
            (at, error)
            for id_, (at, error) in bad.items()
            if isinstance(error, ChecksumError) or self._rounds[id_] >= ROUNDS_MAX
        ]
        ranges = self._ranges(gone)
        for at, error in gone:
            if not self._take_older(at, error, ranges[at.id]):
                lost += ranges[at.id]
                cause = cause or error
        # Not `if lost`: a rank's part of a small unit may be padding alone, which has no ranges,
        # and every gather of the unit reads it all the same.
        if cause is not None:
            raise StatesLost(
                f"the drive can no longer give back the states of {_listed(lost)}, and nothing "
                f"else has them ({cause}). The step was undone, and all other states are "
                f"those before it. {self._advice}",
                damaged=tuple(lost),
            ) from cause
        if whole is not None:
            ranges_of_whole = self._ranges([(whole.at, whole.error)])[whole.at.id]
            raise StateInvalid(
                f"updates of {_listed(ranges_of_whole)} failed in {ROUNDS_MAX} steps, one after "
                f"the other ({whole.error}). No states are lost: the step was undone, and they are "
                "those before it. Start again from the last save, or on another drive"
            ) from whole.error
        return len(gone) == len(bad)

    def _take_older(self, at: ChunkAt, error: AioError, ranges: Sequence[DamagedRange]) -> bool:
        """Take the states of before a chunk's last update. ranges: its parameters. Returns False
        where the drive has none.
        """
        if not self._takes_older or not self._store.has_older(at):
            return False
        try:
            self._store.exchange(at)
        except ValueError:
            # A part of it is in memory; or it was restored, or written to, since its last update.
            return False
        try:
            problems = self._store.verify([at], reads=self._reads)
        except BaseException:
            # Interrupted before a warning said that they are older: they are not taken.
            self._executor.wait_all()
            self._store.exchange(at)
            raise
        if problems:
            self._store.exchange(at)
            return False
        self._rounds.pop(at.id, None)
        self.older_chunks += 1
        log.warning(
            "the states of %s cannot be read any more (%s). They have the values and moments of "
            "before their last update, and so are older than all others",
            _listed(ranges),
            error,
        )
        self._retire(at, error)
        return True

    def _retire(self, at: ChunkAt, error: AioError) -> None:
        """Give a chunk another second place, since the present one cannot be read."""
        try:
            bad = self._store.renew_second_place(at)
        except (SwapFullError, OSError, ValueError) as problem:
            log.warning("no other place for what cannot be read (%s): %s", error, problem)
            return
        log.warning(
            "drive %d cannot give back %d bytes at offset %d (%s). The range is not used again; "
            "look at the drive's health",
            bad.drive,
            bad.size_bytes,
            bad.offset,
            error,
        )

    def _unreadable(self, flats: Iterable[Flat]) -> list[tuple[ChunkAt, AioError]]:
        chunks = [at for flat in dict.fromkeys(flats) for at in self._store.chunks_of(flat)]
        return self._store.verify(chunks, reads=self._reads)

    def _generation(self, at: ChunkAt) -> int:
        ids: npt.NDArray[np.int32] = np.array([at.id], dtype=np.int32)
        return int(self._executor.look(ids)["generation"][0])

    def _ranges(self, chunks: Sequence[tuple[ChunkAt, AioError]]) -> dict[int, list[DamagedRange]]:
        """Return the parameters of chunks, with their elements in them, by the chunks' ids."""
        by_flat: dict[Flat, dict[int, tuple[int, AioError]]] = {}
        for at, error in chunks:
            by_flat.setdefault(at.flat, {})[at.index] = (at.id, error)
        found: dict[int, list[DamagedRange]] = {at.id: [] for at, _ in chunks}
        # A flat's spans once: all of its chunks may be bad.
        for flat, bad in by_flat.items():
            for param in flat.params:
                for chunk, _, start, numel in flat.layout.spans(param.param_index, self._rank):
                    if chunk in bad:
                        id_, error = bad[chunk]
                        of_error = (error.path, error.offset, error.length, str(error))
                        found[id_].append(DamagedRange(param.name, start, start + numel, *of_error))
        return found


def _listed(ranges: Sequence[DamagedRange]) -> str:
    found = [f"{each.name} (elements {each.start} to {each.stop})" for each in ranges]
    return listed(found, most=3) if found else "padding between parameters"
