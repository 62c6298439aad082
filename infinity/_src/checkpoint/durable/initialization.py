"""Initialization of a durable run's states files, with a journal from which the next process
resumes an interrupted initialization.

A process resumes only if source files, conversion, layout, places of chunks, states files, shares
of the drives and the way of reading equal those in the journal. Otherwise it loads all values
again, and a warning gives the reason.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence

import numpy as np
import xxhash

from infinity._src.checkpoint.durable.files import RunFiles
from infinity._src.checkpoint.durable.initialization_journal import InitializedFlat
from infinity._src.params.materialize import SourceFiles, identity_of
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat
from infinity.errors import AioError

log = logging.getLogger("infinity")

NOTE_EVERY_S = 1.0
"""Minimum time between two entries of the journal, since each first syncs the states files."""

_PLACE = (
    "key", "generation", "numel", "drive", "format", "section_count", "run_bytes", "section_at",
    "file", "file_offset", "other_file", "other_offset",
)  # fmt: skip
"""Fields of a record that determine a chunk's place, and the seeds of its checksums."""


class Initialization:
    """One initialization of a durable run. One thread uses it.

    sources: the files of all values; if empty, they are unknown, and nothing is resumed. shares:
    each drive's share of the bytes. way: how values are read ("parts", "rank 0" or "parameters",
    engine/build.py); it determines what a digest covers.
    """

    def __init__(
        self,
        files: RunFiles,
        store: StateStore,
        flats: Sequence[Flat],
        *,
        sources: SourceFiles,
        shares: Sequence[float],
        way: str,
    ) -> None:
        self._files, self._journal, self._store = files, files.journal, store
        self._index = {flat: index for index, flat in enumerate(flats)}
        self._written: list[tuple[Flat, int]] = []
        self._noted_s = time.monotonic()
        different = self._journal.start(
            {
                "source": identity_of(sources),
                # Another version of transformers, or another config.json, may convert the same
                # files to other values.
                "conversion": sources.conversion,
                "layout": self._layout(flats),
                "way": way,
                "shares": list(shares),
                "states": [list(each) for each in files.states()],
            },
            known=bool(sources),
        )
        if different:
            log.warning(
                "%s: an interrupted initialization cannot be resumed, and all values are loaded "
                "again: it differs in its %s",
                files.home,
                ", its ".join(different),
            )
        elif self._journal.resumes:
            log.info("%s: resuming an interrupted initialization", files.home)

    def resumed(self, flat: Flat) -> int | None:
        """If an earlier process wrote this flat, set the checksums of its chunks from the journal
        and return the digest of its values. Otherwise return None.
        """
        found = self._journal.take(self._index[flat])
        if found is None:
            return None
        sums = self._store[flat].sums
        if len(found.sums) != sums[0].nbytes:
            log.warning(
                "%s: %s is loaded again: its checksums in the journal are cut short",
                self._files.home,
                flat,
            )
            return None
        sums[0] = np.frombuffer(found.sums, dtype=sums.dtype).reshape(sums.shape[1:])
        return found.digest

    def wrote(self, flat: Flat, digest: int) -> None:
        """Record that a flat was written. Blocks at most once in NOTE_EVERY_S. Raises: AioError."""
        self._written.append((flat, digest))
        if time.monotonic() - self._noted_s >= NOTE_EVERY_S:
            self._note()

    def end(self) -> None:
        """Record that all flats were written: if the process is killed before the first commit, the
        next process loads no flat again. Blocks. Raises: AioError."""
        self._note()
        self._journal.end()

    def close(self) -> None:
        # An error of the journal must not replace the error that ended the initialization.
        with contextlib.suppress(AioError):
            self._note()

    def _note(self) -> None:
        self._store.settle_moves()
        if self._written:
            # Sync before the journal is written: after a power cut, every listed flat must be on
            # the drives.
            self._files.sync()
            for flat, digest in self._written:
                # The journal lacks the new place of a chunk whose write failed. So a flat with such
                # a chunk is not listed, and a resume loads it again.
                if not self._store.in_its_places(flat):
                    continue
                sums = self._store[flat].sums[0].tobytes()
                self._journal.add(self._index[flat], InitializedFlat(digest, sums))
            self._written.clear()
        self._journal.flush()
        self._noted_s = time.monotonic()

    def _layout(self, flats: Sequence[Flat]) -> str:
        found = xxhash.xxh3_128()
        for flat in flats:
            names = [(param.name, tuple(param.shape), param.offset) for param in flat.params]
            found.update(repr((names, str(flat.dtype), flat.layout)).encode())
            for field in _PLACE:
                found.update(np.ascontiguousarray(self._store[flat].records[field]).tobytes())
        return found.hexdigest()
