"""The states of a checkpoint as an executor's chunks: writing a data file at drive speed, and reading any row of one.

Every section of a row is a chunk of the executor of its own, plain bytes, so that the padding up to 4096 has checksums as well,
and one section (the parameters, say) is read without the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from infinity._src.checkpoint.directory import check_length
from infinity._src.checkpoint.manifest import PIECE_BYTES, ROW, FileEntry, FlatEntry, pieces_of, section_bytes
from infinity._src.checkpoint.pieces import Chunks
from infinity.aio import (
    CHUNK,
    JOB,
    Executor,
    Format,
    JobKind,
    PoolSpec,
    Priority,
    SwapFile,
    Ticket,
    open_executor,
)
from infinity.aio._records import PIECE_NUMEL, SECTION_MAX

SLOTS = 8
"""Sections in flight for a file."""


ALGORITHM = "crc32c"
"""The checksums that executors take; manifests name them."""


def check_algorithm(algorithm: str) -> None:
    """Refuse checksums that no executor takes. Raises: ValueError."""
    if algorithm == "xxh3":
        raise ValueError(
            "the checkpoint's checksums are 'xxh3': an earlier infinity wrote it without its C extension, and nothing here "
            "can check them; export its weights with that release (infinity checkpoint export), and load these"
        )
    if algorithm != ALGORITHM:
        raise ValueError(f"the checkpoint's checksums are {algorithm!r}, which this release does not know; use a later one")


def new_rows(shards: Sequence[Chunks], key: int) -> npt.NDArray[np.void]:
    """The chunks of a rank's shards, one of each flat, as rows without places. key: the first of as many keys as there are
    sections."""
    parts = []
    for index, (starts, numels) in enumerate(shards):
        rows = np.zeros(len(starts), dtype=ROW)
        rows["flat"], rows["start"], rows["numel"] = index, starts, numels
        parts.append(rows)
    whole = np.concatenate(parts) if parts else np.zeros(0, dtype=ROW)
    whole["key"] = np.uint64(key) + np.arange(len(whole), dtype=np.uint64) * np.uint64(SECTION_MAX)
    return whole


class DataWriter:
    """A new data file: rows are written in any order, several at once, and are there after `finish`. One thread uses it.

    rows: ROW [n], whose places are set here. flats: those that rows["flat"] counts. Preallocates all, so that a full drive is
    told first. Raises: SwapFullError, AioError; then the file may be there, of no use.
    """

    def __init__(
        self, path: Path, rows: npt.NDArray[np.void], flats: Sequence[FlatEntry], *, backend: str
    ) -> None:
        self.rows = rows
        sizes = section_bytes(rows, flats)
        before = np.cumsum(sizes, axis=1) - sizes
        rows["section_at"], rows["padded"] = np.where(sizes > 0, before, -1), 1
        rows["run_bytes"] = sizes.sum(axis=1)
        rows["file_offset"] = np.cumsum(rows["run_bytes"]) - rows["run_bytes"]
        pieces = pieces_of(rows, flats).sum(axis=1)
        rows["sums_at"] = np.cumsum(pieces) - pieces
        self.sums: npt.NDArray[np.uint32] = np.zeros(int(pieces.sum()), dtype=np.uint32)
        self.entry = FileEntry(path.name, int(rows["run_bytes"].sum()))
        with contextlib.ExitStack() as undo:
            self._file = undo.enter_context(SwapFile.new(path))
            self._file.grow(self.entry.size_bytes)
            pool = PoolSpec(SLOTS, int(sizes.max(initial=4096)))
            self._executor = open_executor([self._file], small=PoolSpec(0, 0), large=pool, backend=backend)
            undo.callback(self._executor.close, wait=False)
            self._chunks = _Chunks(self._executor, rows, flats, self.sums)
            self._undo = undo.pop_all()

    def store(self, row: int, addresses: Mapping[int, int]) -> Ticket:
        """Start writing sections of a row from these addresses, each padded with zeros to a multiple of 4096. Does not block."""
        return self._chunks.submit(row, JobKind.STORE, addresses)

    def check(self) -> None:
        """Raise what a write met."""
        fault = self._executor.fault()
        if fault is not None:
            raise fault

    def finish(self) -> None:
        """Return when all is on the drive; then `rows` and `sums` are what a manifest says. Raises what a write met."""
        self._executor.wait_all()
        self.check()
        self._file.fsync()
        for s in range(SECTION_MAX):
            here = self._chunks.ids[:, s] >= 0
            self.rows["generation"][here] = self._executor.look(self._chunks.ids[here, s])["generation"]

    def close(self) -> None:
        """Give up what is not written, and close the file."""
        self._undo.close()


class DataReader:
    """One data file, open to read. One thread uses it.

    rows, sums: a manifest's; only rows of this file are asked for. flats: the manifest's.
    Raises: AioError for a file that is missing or was cut short; ValueError for checksums that cannot be checked here.
    """

    def __init__(
        self,
        directory: Path,
        file: FileEntry,
        rows: npt.NDArray[np.void],
        flats: Sequence[FlatEntry],
        sums: npt.NDArray[np.uint32],
        *,
        algorithm: str,
        backend: str = "auto",
    ) -> None:
        check_algorithm(algorithm)
        with contextlib.ExitStack() as undo:
            check_length(directory / file.name, file)
            opened = undo.enter_context(SwapFile.existing(directory / file.name))
            sizes = section_bytes(rows, flats)
            largest = np.where(rows["padded"] != 0, sizes.max(axis=1), rows["run_bytes"])
            pool = PoolSpec(SLOTS, int(largest.max(initial=4096)))
            self._executor = open_executor([opened], small=PoolSpec(0, 0), large=pool, backend=backend)
            undo.callback(self._executor.close, wait=False)
            self._chunks = _Chunks(self._executor, rows, flats, sums)
            self._undo = undo.pop_all()

    def fetch(self, row: int, addresses: Mapping[int, int]) -> Ticket:
        """Start reading sections of a row to these addresses (of a padded row: up to a multiple of 4096). Does not block.

        The ticket raises ChecksumError naming file, offset and length of what is not as it was written.
        """
        return self._chunks.submit(row, JobKind.FETCH, addresses)

    def close(self) -> None:
        """Wait for what is in flight, and close the file."""
        self._executor.wait_all()
        self._undo.close()


class _Chunks:
    """The rows of a file as an executor's chunks. `ids`: of each row's sections, [rows, SECTION_MAX], -1 where there is none."""

    def __init__(
        self,
        executor: Executor,
        rows: npt.NDArray[np.void],
        flats: Sequence[FlatEntry],
        sums: npt.NDArray[np.uint32],
    ) -> None:
        self._executor = executor
        self._sums = sums  # the executor has their address
        self._absent = np.zeros(64, dtype=np.uint8)
        self._padded = rows["padded"] != 0
        self.ids: npt.NDArray[np.int32] = np.full((len(rows), SECTION_MAX), -1, dtype=np.int32)
        sizes = section_bytes(rows, flats)
        pieces = pieces_of(rows, flats)
        sums_at = rows["sums_at"][:, None] + np.cumsum(pieces, axis=1) - pieces
        for s in range(SECTION_MAX):
            here = np.flatnonzero(self._padded & (rows["section_at"][:, s] >= 0))
            if len(here):
                address = sums.ctypes.data + 4 * sums_at[here, s]
                self.ids[here, s] = executor.define(_section_records(rows[here], s, sizes[here, s], address))
        whole = np.flatnonzero(~self._padded)
        if len(whole):
            ids = executor.define(self._chunk_records(rows[whole], flats))
            self.ids[whole] = np.where(rows[whole]["section_at"] >= 0, ids[:, None], -1)

    def _chunk_records(self, rows: npt.NDArray[np.void], flats: Sequence[FlatEntry]) -> npt.NDArray[np.void]:
        """Chunks as the executor of a run wrote them. Sections that lie elsewhere are named at memory that nothing reads."""
        records = np.zeros(len(rows), dtype=CHUNK)
        for name in ("key", "generation", "numel", "file_offset", "run_bytes", "section_at"):
            records[name] = rows[name]
        records["piece_numel"] = PIECE_NUMEL
        records["sums_ptr"] = self._sums.ctypes.data + 4 * rows["sums_at"]
        for record, flat in zip(records, rows["flat"], strict=True):
            entry = flats[flat]
            record["format"], record["section_count"] = entry.format, len(entry.sections)
            for s, section in enumerate(entry.sections):
                record["itemsize"][s], record["group_numel"][s] = section.itemsize, section.group_numel
                if record["section_at"][s] < 0:
                    record["section_ptr"][s] = self._absent.ctypes.data
        return records

    def submit(self, row: int, kind: JobKind, addresses: Mapping[int, int]) -> Ticket:
        """One submission for these sections of a row."""
        padded = bool(self._padded[row])
        jobs = np.zeros(len(addresses) if padded else 1, dtype=JOB)
        jobs["kind"], jobs["base"] = kind, -1
        for index, (section, address) in enumerate(addresses.items()):
            chunk = int(self.ids[row, section])
            assert chunk >= 0, f"row {row} has no section {section}"
            job = jobs[index if padded else 0]
            job["chunk"] = chunk
            place = 0 if padded else section
            job["mask"] |= np.uint32(1 << place)
            job["ptr"][place] = address
        return self._executor.submit(jobs, priority=Priority.DEMAND)


def _section_records(
    rows: npt.NDArray[np.void], s: int, sizes: npt.NDArray[np.int64], sums: npt.NDArray[np.int64]
) -> npt.NDArray[np.void]:
    """Section `s` of padded rows: `sizes` bytes each."""
    records = np.zeros(len(rows), dtype=CHUNK)
    records["key"], records["generation"] = rows["key"] + np.uint64(s), rows["generation"]
    records["numel"] = records["run_bytes"] = sizes
    records["file_offset"] = rows["file_offset"] + rows["section_at"][:, s]
    records["format"], records["section_count"], records["piece_numel"] = Format.RAW, 1, PIECE_BYTES
    records["section_at"] = -1
    records["section_at"][:, 0] = 0
    records["itemsize"][:, 0] = records["group_numel"][:, 0] = 1
    records["sums_ptr"] = sums
    return records
