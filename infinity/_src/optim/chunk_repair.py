"""Repair of chunks that cannot be read from their drive, after the step that met the read error was
undone.

    undone write   the undone step wrote the unreadable bytes, so no states are lost. The chunk gets
                   another second place, and the repeated step writes its states there
    transient      the chunk can be read again, or its drive fails and may answer when the step is
                   repeated: no states are lost yet
    older states   the chunk's second place still holds the states before the chunk's last update.
                   Policy(damaged="from-older") takes these states, with a warning
    lost           StatesLost names parameters, elements and file

The repair has no other copy to read. Masters and moments exist only in the chunk. A save by links
shares blocks of the file system with the run. A save elsewhere is of an earlier step, so
`inf.restore` must restore all states of that save. (Parameters that the device or another rank
holds are gathered without a read of the drive.)
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
"""Consecutive steps in which reads of a chunk may fail; after the last of them it is lost."""


class Misread(NamedTuple):
    """A failed read of a chunk. generation: the chunk's generation at the time of the read. stays:
    a second read of the chunk failed, too, before the step was undone.
    """

    at: ChunkAt
    error: AioError
    generation: int
    stays: bool


@final
class ChunkRepair:
    """Repair of one model's chunks. One thread uses it at a time; any thread may call `concerns`.

    takes_older: whether to take a chunk's older states where its last states are lost. reads:
    number of reads that verify a whole chunk (more than 1 with sampled verification). advice: a
    sentence for the error message, which says how to continue after a loss of states.
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
        """Return whether the error is a failed read of a chunk that has two generations."""
        return self._at(error) is not None

    def _at(self, error: BaseException) -> ChunkAt | None:
        if not isinstance(error, AioError) or error.op != "read":
            return None
        at = self._store.chunk_at(error.chunk)
        return at if at is not None and self._store[at.flat].versioned else None

    def misread(self, faults: Iterable[BaseException]) -> dict[int, Misread]:
        """Return the failed reads by the ids of their chunks. The result includes all other
        unreadable chunks of the same flats: a ticket reports one fault only, and a bad area of a
        drive may span several chunks. The caller has not undone the step yet, and has no transfer
        in flight. Blocks.
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
            # A chunk whose update failed refuses reads with the error of the write: skip it.
            if error.op == "read"
        }
        for id_, (at, error) in met.items():
            stays = id_ in found
            found[id_] = Misread(at, error, self._generation(at), stays)
        return found

    def passed(self) -> None:
        """Reset the counts of failed steps: a step was committed, or all chunks can be read."""
        self._rounds.clear()

    def mend(self, misread: Mapping[int, Misread], *, of_step: bool = True) -> bool:
        """Make every chunk of the flats in `misread` readable. of_step: the reads were of a step,
        which the caller has undone. Returns False if a chunk is still unreadable, but its drive may
        answer later. Blocks. Raises: StatesLost; StateInvalid where no states are lost, but an
        update has failed in ROUNDS_MAX consecutive steps.
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
            # The states can be read, so another section of the chunk fails, such as spilled
            # gradients.
            if of_step and self._rounds[id_] >= ROUNDS_MAX:
                whole = whole or each
            elif each.stays and self._generation(each.at) != each.generation:
                self._retire(each.at, each.error)
        # A wrong checksum is permanent. A drive that reports an error may answer a moment later.
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
        # Not `if lost`: this rank's shard of a small unit may be padding alone. Padding has no
        # ranges, but every gather of the unit reads it.
        if cause is not None:
            raise StatesLost(
                f"the drive cannot read the states of {_listed(lost)} any more, and no other copy "
                f"exists ({cause}). The step was undone; all other states are those before it. "
                f"{self._advice}",
                damaged=tuple(lost),
            ) from cause
        if whole is not None:
            ranges_of_whole = self._ranges([(whole.at, whole.error)])[whole.at.id]
            raise StateInvalid(
                f"updates of {_listed(ranges_of_whole)} failed in {ROUNDS_MAX} consecutive steps "
                f"({whole.error}). No states are lost: the step was undone. Start again from the "
                "last save, or on another drive"
            ) from whole.error
        return len(gone) == len(bad)

    def _take_older(self, at: ChunkAt, error: AioError, ranges: Sequence[DamagedRange]) -> bool:
        """Take the states before a chunk's last update. ranges: the chunk's parameters, for the
        warning. Returns False where the policy forbids it, or no older states can be read.
        """
        if not self._takes_older or not self._store.has_older(at):
            return False
        try:
            self._store.exchange(at)
        except ValueError:
            # A part of the chunk is in memory; or a restore or a write has changed the chunk since
            # its last update.
            return False
        try:
            problems = self._store.verify([at], reads=self._reads)
        except BaseException:
            # An interrupt came before the warning: the run must not continue with older states
            # without a message.
            self._executor.wait_all()
            self._store.exchange(at)
            raise
        if problems:
            self._store.exchange(at)
            return False
        self._rounds.pop(at.id, None)
        self.older_chunks += 1
        log.warning(
            "the states of %s cannot be read any more (%s). They have the values and moments "
            "before their last update, and so are older than all others",
            _listed(ranges),
            error,
        )
        self._retire(at, error)
        return True

    def _retire(self, at: ChunkAt, error: AioError) -> None:
        """Give a chunk another second place, and retire the extent that cannot be read."""
        try:
            bad = self._store.renew_second_place(at)
        except (SwapFullError, OSError, ValueError) as problem:
            log.warning("no other place for an unreadable chunk (%s): %s", error, problem)
            return
        log.warning(
            "drive %d cannot read %d bytes at offset %d (%s). The range is not used again; check "
            "the drive's health",
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
        """Return by chunk id the parameters of each chunk, and their elements inside the chunk."""
        by_flat: dict[Flat, dict[int, tuple[int, AioError]]] = {}
        for at, error in chunks:
            by_flat.setdefault(at.flat, {})[at.index] = (at.id, error)
        found: dict[int, list[DamagedRange]] = {at.id: [] for at, _ in chunks}
        # One pass over the spans of each flat: all chunks of the flat may be bad.
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
