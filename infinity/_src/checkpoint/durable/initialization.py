"""Initialization of a durable run with its first values, so that an interrupted one is resumed.

Nothing is resumed with another source, conversion, layout, place or way of reading: all values are
loaded anew then, and a warning says why.
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
from infinity._src.params.source_files import SourceFiles, identity_of
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat
from infinity.errors import AioError

log = logging.getLogger("infinity")

NOTE_EVERY_S = 1.0
"""Seconds between two notes of what is on the drives: each flushes them."""

_PLACE = (
    "key", "generation", "numel", "drive", "format", "section_count", "run_bytes", "section_at",
    "file", "file_offset", "other_file", "other_offset",
)  # fmt: skip
"""Fields of a record that say where a chunk lies, and how its checksums are seeded."""


class Initialization:
    """One initialization of a durable run. One thread uses it.

    sources: the files of all values; empty where they are not known, and then nothing is resumed.
    shares: of the drives. way: how values are read; digests depend on it.
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
        self._files, self._journal, self._store = files, files.fill, store
        self._index = {flat: index for index, flat in enumerate(flats)}
        self._written: list[tuple[Flat, int]] = []
        self._noted_s = time.monotonic()
        different = self._journal.start(
            {
                "source": identity_of(sources),
                # Another release, or another config.json, may make other values of the same files.
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
                "%s: a fill that broke off cannot go on, and all values are loaded anew: its %s "
                "is not that of this one",
                files.home,
                ", its ".join(different),
            )
        elif self._journal.resumes:
            log.info("%s: going on with a fill that broke off", files.home)

    def resumed(self, flat: Flat) -> int | None:
        """Resume with a flat that an earlier process has written: its chunks get their checksums.
        Returns the digest of its values; None for a flat that is still to be written.
        """
        found = self._journal.take(self._index[flat])
        if found is None:
            return None
        sums = self._store[flat].sums
        if len(found.sums) != sums[0].nbytes:
            log.warning("%s: %s is loaded anew: its checksums are cut", self._files.home, flat)
            return None
        sums[0] = np.frombuffer(found.sums, dtype=sums.dtype).reshape(sums.shape[1:])
        return found.digest

    def wrote(self, flat: Flat, digest: int) -> None:
        """Note that a flat was written. Blocks from time to time. Raises: AioError."""
        self._written.append((flat, digest))
        if time.monotonic() - self._noted_s >= NOTE_EVERY_S:
            self._note()

    def end(self) -> None:
        """Note that all flats were written: after a kill before the first commit nothing is loaded
        anew. Blocks. Raises: AioError."""
        self._note()
        self._journal.end()

    def close(self) -> None:
        # The error that ends the fill is the one to raise.
        with contextlib.suppress(AioError):
            self._note()

    def _note(self) -> None:
        self._store.settle_moves()
        if self._written:
            # What the journal says must be on the drives, also after a power cut.
            self._files.sync()
            for flat, digest in self._written:
                # The next process knows of no move: it looks where the chunks were to lie.
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
