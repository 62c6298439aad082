"""Writing one rank's part of a new generation.

    DataWriter     data-…                                              writes the states
    write_part     data-…  buffers-…  extra-…  manifest-….partial      writes and flushes all files
    commit_part    manifest-….partial -> manifest-…                    after all ranks' write_part

The manifest gets its final name last: a part without a manifest belongs to no checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity._src.cabi.records import SECTION_MAX
from infinity._src.checkpoint.directory import (
    file_name,
    files_of,
    is_of,
    remove,
    sync_directory,
    typed_errors,
    write_attachment,
)
from infinity._src.checkpoint.manifest import (
    PADDED,
    ROW,
    FileEntry,
    FlatEntry,
    Layout,
    Manifest,
    OptimizerEntry,
    manifest_name,
    pieces_of,
    section_bytes,
)
from infinity._src.checkpoint.reader import ALGORITHM, SLOTS, Chunks, RowChunks
from infinity.aio import JobKind, PoolSpec, SwapFile, Ticket, open_executor

_KINDS = ("data", "buffers", "extra")


def new_rows(shards: Sequence[Chunks], key: int) -> npt.NDArray[np.void]:
    """Return the chunks of a rank's shards, one shard of each flat, as rows without places.

    key: the first key. Row i has the SECTION_MAX keys from key + i * SECTION_MAX on.
    """
    whole = chunk_rows(shards, ROW)
    # Every section of every row has a separate key, which seeds the section's checksums.
    whole["key"] = np.uint64(key) + np.arange(len(whole), dtype=np.uint64) * np.uint64(SECTION_MAX)
    return whole


def chunk_rows(shards: Sequence[Chunks], dtype: npt.DTypeLike) -> npt.NDArray[np.void]:
    """Return the chunks of a rank's shards as records with the fields flat, start and numel."""
    counts = [len(starts) for starts, _ in shards]
    rows = np.zeros(sum(counts), dtype=dtype)
    rows["flat"] = np.repeat(np.arange(len(shards)), counts)
    for column, name in enumerate(("start", "numel")):
        rows[name] = np.concatenate([np.zeros(0, np.int64), *(shard[column] for shard in shards)])
    return rows


class DataWriter:
    """A new data file. Rows are written in any order, several at once; after `finish` they are on
    the drive. Threads may not share it.

    rows: ROW [n]; the constructor sets their places. flats: the flats that rows["flat"] indexes.
    The constructor preallocates the whole file, so that a full drive raises before any write.
    Raises: SwapFullError, AioError; an unusable file may then remain.
    """

    def __init__(
        self, path: Path, rows: npt.NDArray[np.void], flats: Sequence[FlatEntry], *, backend: str
    ) -> None:
        self.rows = rows
        sizes = section_bytes(rows, flats)
        before = np.cumsum(sizes, axis=1) - sizes
        # -1 marks sections without bytes, which the format lacks.
        rows["section_at"], rows["padded"] = np.where(sizes > 0, before, -1), PADDED
        rows["zeros"] = 0  # every section is written
        rows["run_bytes"] = sizes.sum(axis=1)
        rows["file_offset"] = np.cumsum(rows["run_bytes"]) - rows["run_bytes"]
        pieces = pieces_of(rows, flats).sum(axis=1)
        rows["sums_at"] = np.cumsum(pieces) - pieces
        self.sums: npt.NDArray[np.uint32] = np.zeros(int(pieces.sum()), dtype=np.uint32)
        self.entry = FileEntry(path.name, int(rows["run_bytes"].sum()))
        with contextlib.ExitStack() as undo:
            self._file = undo.enter_context(SwapFile.new(path))
            # The whole file, so that a full drive raises before the first write.
            self._file.grow(self.entry.size_bytes)
            # Padded rows are written section by section, so a staging buffer holds one section.
            pool = PoolSpec(SLOTS, int(sizes.max(initial=4096)))
            self._executor = open_executor(
                [self._file], small=PoolSpec(0, 0), large=pool, backend=backend
            )
            # `undo` closes the executor before the file, since its threads write to the file.
            undo.callback(self._executor.close, wait=False)
            self._chunks = RowChunks(self._executor, rows, flats, self.sums)
            self._undo = undo.pop_all()

    def store(self, rows: npt.NDArray[np.int64], addresses: npt.NDArray[np.uint64]) -> Ticket:
        """Start writing rows of one block (`RowChunks`) from `addresses`, [rows, SECTION_MAX]; each
        section there must be padded with zeros to a multiple of 4096. Does not block.
        """
        (ticket,) = self._chunks.submit(rows, JobKind.STORE, addresses)
        return ticket

    def check(self) -> None:
        """Raise the error of a failed write."""
        fault = self._executor.fault()
        if fault is not None:
            raise fault

    def finish(self) -> None:
        """Wait until all rows are on the drive. `rows` and `sums` then have their final values, for
        a manifest. Raises the error of a failed write.
        """
        self._executor.wait_all()
        # A write may have failed after the caller's last wait.
        self.check()
        # The manifest, which is written later, must not name bytes that are only in a cache.
        self._file.fsync()

    def close(self) -> None:
        self._undo.close()


@dataclasses.dataclass(frozen=True)
class StoredStates:
    """The states of a part, written or hard-linked: files, rows and checksums."""

    files: tuple[FileEntry, ...]
    rows: npt.NDArray[np.void]
    sums: npt.NDArray[np.uint32]


def new_part(
    layout: Layout,
    optimizers: tuple[OptimizerEntry, ...],
    rows: npt.NDArray[np.void],
    *,
    generation: int,
    save: int,
    rank: int,
    world: int,
    step: int,
) -> Manifest:
    """Make the manifest of a rank's part before the part is written: it has no files yet, and its
    rows have no places.
    """
    return Manifest(
        layout=layout, optimizers=optimizers, rows=rows, sums=np.zeros(0, np.uint32),
        algorithm=ALGORITHM, files=(), buffers=None, extra=None,
        generation=generation, save=save, rank=rank, world=world, step=step,
    )  # fmt: skip


def write_part(
    directory: Path,
    part: Manifest,
    fill: Callable[[DataWriter], None] | None,
    *,
    buffers: bytes | None,
    extra: bytes | None,
    backend: str,
    stored: StoredStates | None = None,
) -> None:
    """Write all files of a part (`new_part`). `fill` stores every row, unless `stored` has the
    states. Blocks. buffers, extra: bytes of these files.

    Raises: SwapFullError, AioError, and the errors of `fill`; the caller then removes the files
    with `remove_part`.
    """
    names = {kind: file_name(kind, part.generation, part.rank) for kind in _KINDS}
    # Data first, manifest last: a crash in between leaves files that no manifest names.
    if stored is None:
        assert fill is not None, "either `stored` or `fill` is given"
        stored = _written(directory / names["data"], part, fill, backend)
    attached: dict[str, Any] = {
        kind: write_attachment(directory, names[kind], data) if data is not None else None
        for kind, data in (("buffers", buffers), ("extra", extra))
    }
    manifest = dataclasses.replace(part, **vars(stored), **attached)
    # Under the name .partial: `commit_part` gives the manifest its name when all ranks have
    # written.
    write_attachment(directory, _partial(manifest.name), *manifest.parts())


def _written(
    path: Path, part: Manifest, fill: Callable[[DataWriter], None], backend: str
) -> StoredStates:
    writer = DataWriter(path, part.rows, part.layout.flats, backend=backend)
    try:
        fill(writer)
        writer.finish()
    finally:
        # Also after a fault: `remove_part` then removes the file.
        writer.close()
    return StoredStates((writer.entry,), writer.rows, writer.sums)


def commit_part(directory: Path, generation: int, rank: int) -> None:
    """Give a part's manifest its final name, durably. Raises: AioError."""
    manifest = directory / manifest_name(generation, rank)
    # The rename commits; the flush of the directory makes the rename durable.
    with typed_errors(manifest, "open", 0):
        (directory / _partial(manifest.name)).rename(manifest)
    sync_directory(directory)


def remove_part(directory: Path, generation: int, rank: int) -> None:
    """Remove a part after a fault. Files that cannot be removed stay, without an error: the caller
    reports the fault.
    """
    manifest = directory / manifest_name(generation, rank)
    # An error of the removal must not replace the fault.
    with contextlib.suppress(OSError):
        mine = [
            path
            for path, number in files_of(directory)
            if number == generation and is_of(path, rank)
        ]
        remove([manifest, *mine])


def remove_others(directory: Path, generation: int) -> None:
    """Remove the files of all other generations. Raises: OSError."""
    # Manifests first: data without a manifest are ignored, but a manifest without data is a damaged
    # checkpoint.
    older = [path for path, number in files_of(directory) if number != generation]
    remove(sorted(older, key=lambda path: not path.name.startswith("manifest-")))


def _partial(name: str) -> str:
    return name + ".partial"
