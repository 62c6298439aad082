"""The chunks of a durable run as its commits describe them: what each commit says (`rows.Marks`),
whether the table of places must be written anew, and the rows of a checkpoint that links its files.

All are made from the executor's records. Files are numbers there, of layer and drive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from infinity._src.cabi.records import PIECE_NUMEL
from infinity._src.checkpoint.manifest import FileEntry
from infinity._src.checkpoint.rows import ROW, TABLE, Marks, marks_of
from infinity._src.params.state_store import ShardRecords, StateStore
from infinity._src.params.unit import Flat
from infinity.aio import Executor

_DRIVES_MAX = 1 << 16
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


def layer_and_drive(number: int) -> tuple[int, int]:
    """Return the layer and the drive of a file, of its number in tables and rows."""
    return divmod(number, _DRIVES_MAX)


class RunTable:
    """The table of one rank's chunks. One thread uses it."""

    def __init__(self, executor: Executor, store: StateStore, flats: Sequence[Flat]) -> None:
        self._executor = executor
        self._store = store
        self._flats = list(flats)
        # The file, with the places and the records that it is of.
        self._committed: tuple[FileEntry, bytes, tuple[ShardRecords, ...]] | None = None

    @property
    def file(self) -> FileEntry | None:
        return self._committed[0] if self._committed is not None else None

    def describe(self) -> Described:
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
        if self._committed is None:
            return None
        file, digest, shards = self._committed
        alike = digest == found.digest and all(
            mine is other for mine, other in zip(shards, found.shards, strict=True)
        )
        return file if alike else None

    def rows(self) -> npt.NDArray[np.void]:
        """Return the table as it is: TABLE [chunks]."""
        parts = []
        for index, flat in enumerate(self._flats):
            shard = self._store[flat]
            now = self._executor.look(shard.ids)
            table = _of_chunks(TABLE, index, shard, now)
            table["file"], table["file_offset"] = _places(now, now["sums_ptr"] != shard.first_sums)
            parts.append(table)
        return np.concatenate(parts)

    def live_rows(self) -> tuple[npt.NDArray[np.void], npt.NDArray[np.uint32]]:
        """Return the live places as they are, ROW [chunks], and the checksums of their pieces.
        rows["file"] are numbers (`layer_and_drive`).
        """
        parts, sums, count = [], [], 0
        for index, flat in enumerate(self._flats):
            shard = self._store[flat]
            now = self._executor.look(shard.ids)
            rows = _of_chunks(ROW, index, shard, now)
            rows["generation"], rows["file_offset"] = now["generation"], now["file_offset"]
            rows["zeros"] = now["zeros"] & ((1 << shard.format.written_count) - 1)
            rows["file"] = _numbers(now, "file")
            pieces = shard.format.written_count * -(-now["numel"] // PIECE_NUMEL)
            rows["sums_at"] = count + np.cumsum(pieces) - pieces
            # Each place has its own table of checksums; the live one's is taken.
            second = (now["sums_ptr"] != shard.first_sums).astype(np.int64)
            taken = shard.sums[second, np.arange(len(now))]
            # Chunk after chunk: those of a shorter one, and of gradients, end before the table's
            # row does.
            sums.append(taken[np.arange(taken.shape[1]) < pieces[:, None]])
            count += len(sums[-1])
            parts.append(rows)
        return np.concatenate(parts), np.concatenate(sums)

    def committed(self, file: FileEntry, found: Described) -> None:
        # Without the marks, which are most of it.
        self._committed = file, found.digest, found.shards


def _of_chunks(
    dtype: np.dtype[np.void], index: int, shard: ShardRecords, now: npt.NDArray[np.void]
) -> npt.NDArray[np.void]:
    rows = np.zeros(len(now), dtype=dtype)
    rows["flat"], rows["start"] = index, shard.starts
    # `other_bytes` counts the states alone; `run_bytes` of a chunk may hold gradients too.
    rows["run_bytes"] = now["other_bytes"]
    for name in ("numel", "key", "section_at"):
        rows[name] = now[name]
    # Gradients are no part of a run.
    rows["section_at"][:, shard.format.written_count :] = -1
    return rows


def _numbers(now: npt.NDArray[np.void], field: str) -> npt.NDArray[np.int32]:
    drive = {"file": "drive", "other_file": "other_drive"}[field]
    numbers: npt.NDArray[np.int32] = now[field] * np.int32(_DRIVES_MAX) + now[drive]
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
