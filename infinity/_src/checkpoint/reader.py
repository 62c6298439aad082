"""A checkpoint, open to read: its contents, and any chunk of it, checked against its checksums.

    with Checkpoint.open(directory) as checkpoint:
        checkpoint.step, checkpoint.params["model.norm.weight"]        no data is read for these
        ChunkReader(checkpoint, 4).get(ChunkRef(rank, flat, chunk))    all sections of a chunk

A data file is read by an executor of its own. Every section of a padded row is a chunk of that
executor, plain bytes, so that the padding up to 4096 has checksums as well, and one section (the
parameters, say) is read without the others. A row of a durable run is one chunk, as the run's
executor wrote it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from infinity._src.checkpoint.directory import (
    check_length,
    newest_generation,
    read_attachment,
    read_generation,
)
from infinity._src.checkpoint.manifest import (
    PIECE_BYTES,
    FileEntry,
    FlatEntry,
    Manifest,
    OptimizerEntry,
    ParamEntry,
    pieces_of,
    section_bytes,
)
from infinity._src.params.chunk_pipeline import Bytes
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
from infinity.errors import AioError

Chunks = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""(starts, numels) of the chunks of one rank's shard of a flat, in order, without gaps."""
# Each has an executor: threads, and slots for SLOTS sections.
OPEN_MAX = 4
"""Data files that are open at once."""
SLOTS = 8
"""Sections in flight for a file."""
ALGORITHM = "crc32c"
"""The checksums that executors take; manifests name them."""


class ChunkRef(NamedTuple):
    """One chunk of one rank's shard of a flat."""

    rank: int
    flat: int
    chunk: int


@dataclasses.dataclass(frozen=True)
class SavedParam:
    """A parameter of a checkpoint and the flat that it lies in."""

    entry: ParamEntry
    flat_index: int
    flat: FlatEntry


@final
class Checkpoint:
    """A whole generation of a directory: all ranks' manifests, read and checked. Use it in a
    `with`. One thread uses it.

    params: by first name. Raises (`open`): AioError (ENOENT) where there is no whole checkpoint,
    ChecksumError for a damaged manifest, ValueError for one of a later release.
    """

    def __init__(
        self, directory: Path, manifests: Sequence[Manifest], *, backend: str = "auto"
    ) -> None:
        self.directory = directory
        self.manifests = list(manifests)
        self._backend = backend
        self._readers: OrderedDict[tuple[int, int], DataReader] = OrderedDict()
        self._rows: dict[int, _RankRows] = {}
        first = manifests[0]
        for other in manifests[1:]:
            # Places of elements are computed from one layout for all ranks.
            if other.layout.flats != first.layout.flats:
                path = str(directory / other.name)
                raise AioError(
                    "the manifest describes another model than that of rank 0", path=path, op="read"
                )
        self.flats = first.layout.flats
        self.params = {
            entry.name: SavedParam(entry, index, flat)
            for index, flat in enumerate(self.flats)
            for entry in flat.params
        }

    @classmethod
    def open(
        cls, directory: Path, generation: int | None = None, *, backend: str = "auto"
    ) -> Checkpoint:
        """Open the newest whole generation, or this one. backend: of the executors that read."""
        manifests = (
            newest_generation(directory)
            if generation is None
            else read_generation(directory, generation)
        )
        return cls(directory, manifests, backend=backend)

    @property
    def step(self) -> int:
        """Steps completed."""
        return self.manifests[0].step

    @property
    def world(self) -> int:
        """Ranks that saved it."""
        return self.manifests[0].world

    @property
    def generation(self) -> int:
        """Its number in the directory."""
        return self.manifests[0].generation

    @property
    def numerics(self) -> dict[str, Any]:
        """The fields of the policy that decided about numbers."""
        return self.manifests[0].layout.numerics

    @property
    def optimizers(self) -> tuple[OptimizerEntry, ...]:
        """The optimizers that held its parameters."""
        return self.manifests[0].optimizers

    @property
    def size_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.size_bytes for manifest in self.manifests for file in manifest.files)

    def check_files(self) -> None:
        """Check the length of every data file, and that its checksums can be taken, without reading
        states.

        Raises: AioError for a file that is missing or was cut short, ValueError for checksums that
        nothing here takes.
        """
        for rank, manifest in enumerate(self.manifests):
            for file in manifest.files:
                check_length(self.directory / file.name, file)
            if rank == 0 and manifest.files:
                # Opening one checks the algorithm of the checksums.
                self._reader(0, 0)

    def pieces(self, param: SavedParam, element: int, numel: int) -> Iterator[Piece]:
        """Yield the chunks that hold elements [element, element + numel) of a parameter."""
        low = param.entry.offset + element
        return pieces(
            low,
            numel,
            param.flat.shard_numel,
            lambda rank: self._of_rank(rank).chunks(param.flat_index),
        )

    def attachment(self, kind: str, rank: int) -> bytes | None:
        """Read the "buffers" or the "extra" of a rank, or of rank 0 where there is no such rank;
        None where that rank had none.

        Raises: ChecksumError, AioError.
        """
        # A run that goes on with more ranks: the new ones begin as rank 0.
        manifest = self.manifests[rank if rank < self.world else 0]
        file = manifest.buffers if kind == "buffers" else manifest.extra
        return read_attachment(self.directory, file) if file is not None else None

    def fetch(self, ref: ChunkRef, addresses: dict[int, int]) -> list[Ticket]:
        """Start reading sections of a chunk to addresses, where each has its bytes up to a multiple
        of 4096. Does not block.

        Raises: AioError for a file that is missing or was cut short; the tickets: ChecksumError and
        DeviceFailedError.
        """
        manifest, rows = self.manifests[ref.rank], self._of_rank(ref.rank)
        tickets: list[Ticket] = []
        try:
            # In a linked checkpoint the sections of one chunk may lie in several files.
            for row in rows.rows(ref.flat, ref.chunk):
                here = {
                    s: at for s, at in addresses.items() if manifest.rows[row]["section_at"][s] >= 0
                }
                if here:
                    reader = self._reader(ref.rank, int(manifest.rows[row]["file"]))
                    tickets.append(reader.fetch(rows.in_file[row], here))
        except BaseException:
            # The caller gets no ticket, and gives up the memory that the first reads still fill.
            _wait_out(tickets)
            raise
        return tickets

    def chunk_bytes(self, ref: ChunkRef) -> npt.NDArray[np.int64]:
        """Return the bytes of each section of a chunk, padded to 4096."""
        row = self._of_rank(ref.rank).rows(ref.flat, ref.chunk)[0]
        sizes: npt.NDArray[np.int64] = section_bytes(
            self.manifests[ref.rank].rows[[row]], self.flats
        )[0]
        return sizes

    def _of_rank(self, rank: int) -> _RankRows:
        if rank not in self._rows:
            self._rows[rank] = _RankRows(self.manifests[rank], len(self.flats))
        return self._rows[rank]

    def _reader(self, rank: int, file: int) -> DataReader:
        key = (rank, file)
        if key not in self._readers:
            # Resharding reads the files of many ranks in turn: each has threads and buffers.
            while len(self._readers) >= OPEN_MAX:
                # The one used longest ago; closing waits for what it still reads.
                self._readers.popitem(last=False)[1].close()
            manifest = self.manifests[rank]
            # In the manifest's order: `in_file` counts rows of one file in the same way.
            mine = manifest.rows[manifest.rows["file"] == file]
            self._readers[key] = DataReader(
                self.directory,
                manifest.files[file],
                mine,
                self.flats,
                manifest.sums,
                algorithm=manifest.algorithm,
                backend=self._backend,
            )
        self._readers.move_to_end(key)
        return self._readers[key]

    def close(self) -> None:
        """Close its files. Idempotent."""
        while self._readers:
            self._readers.popitem()[1].close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _RankRows:
    """The rows of one manifest by flat and chunk. in_file: the number of each row among those of
    its file.
    """

    def __init__(self, manifest: Manifest, flat_count: int) -> None:
        rows = manifest.rows
        # Sorted once; a binary search then finds a flat's rows.
        self._order = np.lexsort((rows["start"], rows["flat"]))
        self._first = np.searchsorted(rows["flat"][self._order], np.arange(flat_count + 1))
        self._table = rows
        self._of_flat: dict[int, tuple[Chunks, list[list[int]]]] = {}
        self.in_file = np.zeros(len(rows), dtype=np.int64)
        for file in np.unique(rows["file"]):
            here = rows["file"] == file
            self.in_file[here] = np.arange(int(here.sum()))

    def _flat(self, flat: int) -> tuple[Chunks, list[list[int]]]:
        if flat not in self._of_flat:
            mine = self._order[self._first[flat] : self._first[flat + 1]]
            # Several rows may share a chunk, each with some of its sections.
            starts, index = np.unique(self._table["start"][mine], return_index=True)
            numels = self._table["numel"][mine][index]
            groups = [each.tolist() for each in np.split(mine, index[1:])]
            self._of_flat[flat] = ((starts, numels), groups)
        return self._of_flat[flat]

    def chunks(self, flat: int) -> Chunks:
        """Return the starts of the flat's chunks in the shard, and their lengths."""
        return self._flat(flat)[0]

    def rows(self, flat: int, chunk: int) -> list[int]:
        """Return the rows that hold a chunk."""
        return self._flat(flat)[1][chunk]


class ChunkReader:
    """Chunks of a checkpoint in memory, read ahead; the last `capacity` are cached. sections: the
    indices to read (None: all).
    """

    def __init__(
        self, checkpoint: Checkpoint, capacity: int, sections: Sequence[int] | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._capacity = capacity
        self._sections = sections
        self._held: OrderedDict[ChunkRef, tuple[list[Bytes], list[Ticket]]] = OrderedDict()

    def start(self, refs: Iterable[ChunkRef]) -> None:
        """Start reading these, as many as there is room for beside each other."""
        # Without repeats, and no more than fit: later ones would push earlier ones out unread.
        wanted = list(dict.fromkeys(refs))[: self._capacity]
        for ref in wanted:
            # All that are wanted are made the youngest before one goes to make room.
            if ref in self._held:
                self._held.move_to_end(ref)
        for ref in wanted:
            if ref not in self._held:
                # The oldest goes, whose memory a read may still be filling.
                while len(self._held) >= self._capacity:
                    oldest = next(iter(self._held))
                    # Taken out after the wait: Ctrl-C in it must leave the memory held. A fault is
                    # nobody's here: whoever asks for the chunk has it read again.
                    _wait_out(self._held[oldest][1])
                    del self._held[oldest]
                self._held[ref] = self._fetch(ref)

    def get(self, ref: ChunkRef) -> list[Bytes]:
        """Return the sections of a chunk, uint8 each, padded, valid until the next `start` or
        `get`. Blocks.

        Raises: ChecksumError naming file, offset and length; DeviceFailedError; AioError.
        """
        self.start([ref])
        # Kept after it is read: the next chunk to be composed often needs its rest.
        arrays, tickets = self._held[ref]
        for ticket in tickets:
            ticket.wait()
        return arrays

    def close(self) -> None:
        """Wait for what is in flight, however it ends, and give up all."""
        for _, tickets in self._held.values():
            # Nobody asks for these chunks any more.
            _wait_out(tickets)
        self._held.clear()

    def _fetch(self, ref: ChunkRef) -> tuple[list[Bytes], list[Ticket]]:
        sizes = self._checkpoint.chunk_bytes(ref)
        count = len(self._checkpoint.flats[ref.flat].sections)
        wanted = (
            range(count) if self._sections is None else [s for s in self._sections if s < count]
        )
        # One piece for all sections; pages of those that are not wanted are never touched.
        memory = np.zeros(int(sizes.sum()), dtype=np.uint8)
        at = np.cumsum(sizes) - sizes
        arrays = [memory[at[s] : at[s] + sizes[s]] for s in range(count)]
        return arrays, self._checkpoint.fetch(ref, {s: arrays[s].ctypes.data for s in wanted})


def _wait_out(tickets: Iterable[Ticket]) -> None:
    """Wait for reads however they end, so that their memory may go."""
    for ticket in tickets:
        with contextlib.suppress(AioError):
            ticket.wait()


# -- places of elements ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements [start, start + numel) of one chunk of a rank's shard. at: their index in the range
    that was asked for.
    """

    rank: int
    chunk: int
    start: int
    numel: int
    at: int


def pieces(
    low: int, numel: int, shard_numel: int, chunks_of: Callable[[int], Chunks]
) -> Iterator[Piece]:
    """Yield the chunks that hold elements [low, low + numel) of a flat, in order. chunks_of: the
    chunks of a rank.
    """
    at, end = low, low + numel
    while at < end:
        rank = at // shard_numel
        starts, numels = chunks_of(rank)
        local = at - rank * shard_numel
        # The last chunk that begins at or before it; chunks of a shard have no gaps.
        chunk = int(np.searchsorted(starts, local, side="right")) - 1
        start = local - int(starts[chunk])
        count = min(int(numels[chunk]) - start, end - at)
        assert count > 0, (at, rank, chunk)
        yield Piece(rank, chunk, start, count, at - low)
        at += count


# -- data files ------------------------------------------------------------------------------------


def check_algorithm(algorithm: str) -> None:
    """Refuse checksums that no executor takes. Raises: ValueError."""
    if algorithm == "xxh3":
        raise ValueError(
            "the checkpoint's checksums are 'xxh3': an earlier infinity wrote it without its C "
            "extension, and nothing here can check them; export its weights with that release "
            "(infinity checkpoint export), and load these"
        )
    if algorithm != ALGORITHM:
        raise ValueError(
            f"the checkpoint's checksums are {algorithm!r}, which this release does not know; use "
            "a later one"
        )


class DataReader:
    """One data file, open to read. One thread uses it.

    rows, sums: a manifest's; only rows of this file are asked for. flats: the manifest's. Raises:
    AioError for a file that is missing or was cut short; ValueError for checksums that cannot be
    checked here.
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
            # Before it is opened: a fault while reading would tell of a drive, not of a file cut
            # short.
            check_length(directory / file.name, file)
            opened = undo.enter_context(SwapFile.existing(directory / file.name))
            sizes = section_bytes(rows, flats)
            # A padded row is read section by section, one of a run as a whole.
            largest = np.where(rows["padded"] != 0, sizes.max(axis=1), rows["run_bytes"])
            pool = PoolSpec(SLOTS, int(largest.max(initial=4096)))
            self._executor = open_executor(
                [opened], small=PoolSpec(0, 0), large=pool, backend=backend
            )
            # On the way out the file goes after the executor, whose threads use its descriptor.
            undo.callback(self._executor.close, wait=False)
            self._chunks = RowChunks(self._executor, rows, flats, sums)
            self._undo = undo.pop_all()

    def fetch(self, row: int, addresses: Mapping[int, int]) -> Ticket:
        """Start reading sections of a row to these addresses (of a padded row: up to a multiple of
        4096). Does not block.

        The ticket raises ChecksumError naming file, offset and length of what is not as it was
        written.
        """
        return self._chunks.submit(row, JobKind.FETCH, addresses)

    def close(self) -> None:
        """Wait for what is in flight, and close the file."""
        # Targets are the caller's memory: no read may still be filling it.
        self._executor.wait_all()
        self._undo.close()


class RowChunks:
    """The rows of a file as an executor's chunks. `ids`: of each row's sections, [rows,
    SECTION_MAX], -1 where there is none.
    """

    def __init__(
        self,
        executor: Executor,
        rows: npt.NDArray[np.void],
        flats: Sequence[FlatEntry],
        sums: npt.NDArray[np.uint32],
    ) -> None:
        self._executor = executor
        # Kept, since the executor has their address.
        self._sums = sums
        # An address for sections that lie elsewhere; nothing reads it.
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
                self.ids[here, s] = executor.define(
                    _section_records(rows[here], s, sizes[here, s], address)
                )
        whole = np.flatnonzero(~self._padded)
        if len(whole):
            # As the run wrote them, or its checksums, which are seeded by chunk and section, would
            # not match.
            ids = executor.define(self._chunk_records(rows[whole], flats))
            self.ids[whole] = np.where(rows[whole]["section_at"] >= 0, ids[:, None], -1)

    def _chunk_records(
        self, rows: npt.NDArray[np.void], flats: Sequence[FlatEntry]
    ) -> npt.NDArray[np.void]:
        """Chunks as the executor of a run wrote them. Sections that lie elsewhere are named at
        memory that nothing reads.
        """
        records = np.zeros(len(rows), dtype=CHUNK)
        for name in ("key", "generation", "numel", "file_offset", "run_bytes", "section_at"):
            records[name] = rows[name]
        records["piece_numel"] = PIECE_NUMEL
        records["sums_ptr"] = self._sums.ctypes.data + 4 * rows["sums_at"]
        for record, flat in zip(records, rows["flat"], strict=True):
            entry = flats[flat]
            record["format"], record["section_count"] = entry.format, len(entry.sections)
            for s, section in enumerate(entry.sections):
                record["itemsize"][s], record["group_numel"][s] = (
                    section.itemsize,
                    section.group_numel,
                )
                # Not in this file: the executor wants an address, and nothing is read there.
                if record["section_at"][s] < 0:
                    record["section_ptr"][s] = self._absent.ctypes.data
        return records

    def submit(self, row: int, kind: JobKind, addresses: Mapping[int, int]) -> Ticket:
        """Submit the jobs of these sections of a row at once."""
        padded = bool(self._padded[row])
        # Padded: every section is a chunk of its own, so a job for each.
        jobs = np.zeros(len(addresses) if padded else 1, dtype=JOB)
        jobs["kind"], jobs["base"] = kind, -1
        for index, (section, address) in enumerate(addresses.items()):
            chunk = int(self.ids[row, section])
            assert chunk >= 0, f"row {row} has no section {section}"
            job = jobs[index if padded else 0]
            job["chunk"] = chunk
            position = 0 if padded else section
            job["mask"] |= np.uint32(1 << position)
            job["ptr"][position] = address
        return self._executor.submit(jobs, priority=Priority.DEMAND)


def _section_records(
    rows: npt.NDArray[np.void], s: int, sizes: npt.NDArray[np.int64], sums: npt.NDArray[np.int64]
) -> npt.NDArray[np.void]:
    """Section `s` of padded rows: `sizes` bytes each."""
    records = np.zeros(len(rows), dtype=CHUNK)
    # A key of its own for each section: checksums are seeded with it.
    records["key"], records["generation"] = rows["key"] + np.uint64(s), rows["generation"]
    records["numel"] = records["run_bytes"] = sizes
    records["file_offset"] = rows["file_offset"] + rows["section_at"][:, s]
    records["format"], records["section_count"], records["piece_numel"] = Format.RAW, 1, PIECE_BYTES
    records["section_at"] = -1
    records["section_at"][:, 0] = 0
    records["itemsize"][:, 0] = records["group_numel"][:, 0] = 1
    records["sums_ptr"] = sums
    return records
