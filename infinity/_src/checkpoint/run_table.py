"""The chunks of a durable run as its commits describe them: what each commit says (`rows.Marks`),
and whether the table of places must be written anew.

Both are made from the executor's records, a few thousand chunks at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from infinity._src.checkpoint.manifest import FileEntry
from infinity._src.checkpoint.rows import TABLE, Marks, marks_of
from infinity._src.params.state_store import ShardRecords, StateStore
from infinity._src.params.unit import Flat
from infinity.aio import Executor
from infinity.aio._records import PIECE_NUMEL

DRIVES_MAX = 1 << 16
"""Layer and drive are one number in tables: layer * DRIVES_MAX + drive."""
BLOCK_CHUNKS = 4096


@dataclasses.dataclass(frozen=True)
class Described:
    """The chunks at one moment. files: numbers of those in which live places lie, ascending.
    digest: of all places, and shards: the records that they are of.
    """

    marks: Marks
    files: tuple[int, ...]
    digest: bytes
    shards: tuple[ShardRecords, ...]


class RunTable:
    """The table of one rank's chunks. One thread uses it."""

    def __init__(self, executor: Executor, store: StateStore, flats: Sequence[Flat]) -> None:
        self._executor = executor
        self._store = store
        self._flats = list(flats)
        self._committed: tuple[FileEntry, Described] | None = None

    @property
    def file(self) -> FileEntry | None:
        """The table that the last commit names."""
        return self._committed[0] if self._committed is not None else None

    def describe(self) -> Described:
        """Describe the chunks as they are. Nothing may be pending."""
        digest = xxhash.xxh3_128()
        parts, used = [], set()
        shards = tuple(self._store[flat] for flat in self._flats)
        for shard in shards:
            first = shard.first_sums
            for begin in range(0, len(shard.ids), BLOCK_CHUNKS):
                part = slice(begin, begin + BLOCK_CHUNKS)
                now = self._executor.look(shard.ids[part])
                second = now["sums_ptr"] != first[part]
                for array in _places(now, second):
                    digest.update(array.data)
                used.update(np.unique(_numbers(now, "file")).tolist())
                pieces = -(-now["numel"] // PIECE_NUMEL)
                parts.append(marks_of(now, second, pieces, shard.format.written_count))
        return Described(Marks.join(parts), tuple(sorted(used)), digest.digest(), shards)

    def known(self, found: Described) -> FileEntry | None:
        """Return the file whose table has these places, if the last commit names one."""
        if self._committed is None:
            return None
        file, before = self._committed
        alike = before.digest == found.digest and all(
            mine is other for mine, other in zip(before.shards, found.shards, strict=True)
        )
        return file if alike else None

    def rows(self) -> npt.NDArray[np.void]:
        """Return the table as it is: TABLE [chunks]."""
        parts = []
        for index, flat in enumerate(self._flats):
            shard = self._store[flat]
            now = self._executor.look(shard.ids)
            table = np.zeros(len(now), dtype=TABLE)
            table["flat"], table["start"] = index, shard.starts
            # `other_bytes` counts the states alone; `run_bytes` may hold gradients too.
            table["run_bytes"] = now["other_bytes"]
            for name in ("numel", "key", "section_at"):
                table[name] = now[name]
            # Gradients are no part of a run.
            table["section_at"][:, shard.format.written_count :] = -1
            files, offsets = _places(now, now["sums_ptr"] != shard.first_sums)
            table["file"], table["file_offset"] = files, offsets
            parts.append(table)
        return np.concatenate(parts)

    def committed(self, file: FileEntry, found: Described) -> None:
        """Note that a commit of all ranks names this table, with these places in it."""
        # Without the marks, which are most of it.
        nothing = Marks(*(each[:0].copy() for each in dataclasses.astuple(found.marks)))
        self._committed = file, dataclasses.replace(found, marks=nothing)


def _numbers(now: npt.NDArray[np.void], field: str) -> npt.NDArray[np.int32]:
    numbers: npt.NDArray[np.int32] = now[field] * np.int32(DRIVES_MAX) + now["drive"]
    return numbers


def _places(
    now: npt.NDArray[np.void], second: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Return the numbers of the files of both places, first and second, and the offsets there:
    [chunks, 2] each.
    """
    files = np.stack([_numbers(now, "file"), _numbers(now, "other_file")], axis=1)
    offsets = np.stack([now["file_offset"], now["other_offset"]], axis=1)
    files[second], offsets[second] = files[second, ::-1], offsets[second, ::-1]
    return files, offsets
