"""A checkpoint, open for reading: its contents, and any of its chunks, verified by checksums.

    with Checkpoint.open(directory) as checkpoint:
        checkpoint.step, checkpoint.params["model.norm.weight"]        known without reading data
        ChunkReader(checkpoint).get(number)                            all sections of a chunk

One executor reads the data files of a rank. Every section of a padded row is a chunk of that
executor, as plain bytes, so that checksums also cover the padding up to 4096, and one section (such
as the parameters) can be read alone. A row of a durable run is one chunk, as in the run's executor.

A checkpoint may divide a weight into other tiles than the model, or not at all:

    saved    tile 0: experts 0-3    tile 1: experts 4-7           elements of the whole weight,
    model    tile 0: experts 0-2    tile 1: 3-5    tile 2: 6-7    first to last

A tile of whole rows is a range of the weight's elements, and an undivided weight is the range of
all elements. So a range of one tiling is composed of ranges of another. A tile along columns is not
a range: its values are read only from a saved tile at the same place.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import errno
import functools
import itertools
import logging
import math
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from infinity._src.cabi.records import PIECE_NUMEL, SECTION_MAX
from infinity._src.checkpoint.directory import (
    check_length,
    generations,
    newest_generation,
    read_attachment,
    read_generation,
)
from infinity._src.checkpoint.durable.copies import are_of_one_run, others_of
from infinity._src.checkpoint.manifest import (
    FOLDED,
    PADDED,
    PIECE_BYTES,
    FileEntry,
    FlatEntry,
    Manifest,
    OptimizerEntry,
    ParamEntry,
    pieces_of,
    section_bytes,
)
from infinity._src.kernels.tiling.tiled_module import TilePlace, tile_index, whole_name
from infinity._src.params.chunk_pipeline import Bytes
from infinity._src.params.unit import Param
from infinity.aio import (
    CHUNK,
    JOB,
    MASK_FOLDED,
    Executor,
    Format,
    JobKind,
    PoolSpec,
    Priority,
    SwapFile,
    Ticket,
    open_executor,
)
from infinity.errors import AioError

log = logging.getLogger("infinity")

Chunks = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""(starts, numels) of the chunks of one rank's shard of a flat, in order, without gaps."""
READERS_MAX = 16
"""Ranks whose data files are open at once."""
SLOTS = 8
"""Sections (of a durable run, chunks) in flight for the files of a rank; more with many files."""
BLOCK_ROWS = 256
BLOCKS_MAX = 8
"""Blocks of rows that are defined in an executor at once; more while blocks have pending jobs."""
ALGORITHM = "crc32c"
"""Name in manifests of the checksums that executors compute."""


@dataclasses.dataclass(frozen=True)
class SavedParam:
    """A parameter of a checkpoint, and its flat."""

    entry: ParamEntry
    flat_index: int
    flat: FlatEntry


@final
class Checkpoint:
    """A whole generation of a directory: all ranks' manifests, read and checked. A context manager.
    Threads may not share it.

    params: the parameters, by first name. left_out: frozen parameters that were not saved. Raises
    (`open`): AioError (ENOENT) if there is no whole checkpoint, ChecksumError for a damaged
    manifest, ValueError for a manifest of a later release.
    """

    def __init__(
        self,
        directory: Path,
        manifests: Sequence[Manifest],
        *,
        backend: str = "auto",
        partial: bool = False,
        copies: Sequence[Path] = (),
    ) -> None:
        self.directory = directory
        self._copies = copies
        self.manifests = list(manifests)
        self._backend, self._partial = backend, partial
        self._readers: OrderedDict[int, DataReader] = OrderedDict()  # by rank
        first = manifests[0]
        for other in manifests[1:]:
            # Places of elements are computed from one layout for all ranks.
            if (other.layout.flats, other.layout.left_out) != (
                first.layout.flats,
                first.layout.left_out,
            ):
                path = str(directory / other.name)
                raise AioError(
                    "the manifest describes another model than rank 0's", path=path, op="read"
                )
        self.flats = first.layout.flats
        self.left_out = first.layout.left_out
        self.params = {
            entry.name: SavedParam(entry, index, flat)
            for index, flat in enumerate(self.flats)
            for entry in flat.params
        }

    @classmethod
    def open(
        cls,
        directory: Path,
        generation: int | None = None,
        *,
        backend: str = "auto",
        partial: bool = False,
    ) -> Checkpoint:
        """Open the newest whole generation, or the given one. backend: I/O backend of the executors
        that read. partial: as in `DataReader`. If manifests of a durable run are damaged, a copy on
        another drive of the run is read instead.
        """
        copies = others_of(directory)
        place, manifests = _manifests_of(directory, generation, copies)
        others = [each for each in (directory, *copies) if each != place]
        return cls(place, manifests, backend=backend, partial=partial, copies=others)

    @property
    def step(self) -> int:
        return self.manifests[0].step

    @property
    def world(self) -> int:
        return self.manifests[0].world

    @property
    def generation(self) -> int:
        return self.manifests[0].generation

    @property
    def numerics(self) -> dict[str, Any]:
        return self.manifests[0].layout.numerics

    @property
    def optimizers(self) -> tuple[OptimizerEntry, ...]:
        return self.manifests[0].optimizers

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for manifest in self.manifests for file in manifest.files)

    def check_files(self) -> None:
        """Check the length of every data file, and that executors can compute its checksums,
        without reading states.

        Raises: AioError for a file that is missing or was cut short, ValueError for checksums that
        no executor computes.
        """
        for manifest in self.manifests:
            for file in manifest.files:
                check_length(self.directory / file.name, file)
                # The file may exist but not be readable.
                SwapFile.existing(self.directory / file.name).close()
        check_algorithm(self.manifests[0].algorithm)

    @functools.cached_property
    def chunks(self) -> SavedChunks:
        """All chunks of all ranks."""
        return SavedChunks(self.manifests, self.flats)

    def pieces(self, param: SavedParam, element: int, numel: int) -> Iterator[Piece]:
        """Yield the chunks that hold elements [element, element + numel) of a parameter."""
        low = int(self.chunks.flat_at[param.flat_index]) + param.entry.offset + element
        found = self.chunks.cut(np.array([low]), np.array([numel]))
        starts = found.first - self.chunks.positions[found.chunk]
        columns = (found.chunk, starts, found.numel, found.first - low)
        yield from map(Piece, *(column.tolist() for column in columns))

    def file_of(self, param: SavedParam) -> str:
        """Return the name of the file with the first element of a parameter; "" for a parameter
        without elements.
        """
        if not param.entry.numel:
            return ""
        piece = next(self.pieces(param, 0, 1))
        _, ranks, rows = self.chunks.rows(np.array([piece.chunk]))
        manifest = self.manifests[int(ranks[0])]
        file: FileEntry = manifest.files[int(manifest.rows["file"][rows[0]])]
        return file.name

    def attachment(self, kind: str, rank: int) -> bytes | None:
        """Read the "buffers" or the "extra" of a rank, or of rank 0 if the checkpoint lacks the
        rank; None if that rank saved none.

        Raises: ChecksumError, AioError.
        """
        # If a run continues with more ranks, the new ranks begin with rank 0's state.
        manifest = self.manifests[rank if rank < self.world else 0]
        file = manifest.buffers if kind == "buffers" else manifest.extra
        if file is None:
            return None
        try:
            return read_attachment(self.directory, file)
        except AioError as error:
            for copy in self._copies:
                # The manifest's digest proves that the copy has the same bytes.
                with contextlib.suppress(AioError):
                    data = read_attachment(copy, file)
                    log.warning("%s; using the copy in %s", error, copy)
                    return data
            raise

    def fetch(
        self, chunks: npt.NDArray[np.int64], addresses: npt.NDArray[np.uint64]
    ) -> list[Ticket]:
        """Start reading sections of chunks to `addresses`, [chunks, SECTION_MAX]; 0 skips a
        section. Each address must have memory for its section, rounded up to a multiple of 4096
        bytes. Does not block.

        Raises: AioError for a file that is missing or too short. The tickets raise ChecksumError
        and DeviceFailedError.
        """
        of_row, ranks, rows = self.chunks.rows(chunks)
        tickets: list[Ticket] = []
        try:
            for rank in np.unique(ranks).tolist():
                mine = ranks == rank
                # In a linked checkpoint several files may hold the sections of one chunk.
                here = self.manifests[rank].rows["section_at"][rows[mine]] >= 0
                wanted = np.where(here, addresses[of_row[mine]], np.uint64(0))
                some = wanted.any(axis=1)
                tickets.extend(self._reader(rank).fetch(rows[mine][some], wanted[some]))
        except BaseException:
            # The caller gets no tickets and will release the memory: wait for the reads that began.
            _wait_out(tickets)
            raise
        return tickets

    def _reader(self, rank: int) -> DataReader:
        if rank not in self._readers:
            # A restore reads from all ranks, and each reader has threads and buffers: limit them.
            while len(self._readers) >= READERS_MAX:
                # Close the least recently used reader. `close` waits for its pending reads.
                self._readers.popitem(last=False)[1].close()
            manifest = self.manifests[rank]
            self._readers[rank] = DataReader(
                self.directory,
                manifest.files,
                manifest.rows,
                self.flats,
                manifest.sums,
                algorithm=manifest.algorithm,
                backend=self._backend,
                partial=self._partial,
            )
        self._readers.move_to_end(rank)
        return self._readers[rank]

    def close(self) -> None:
        while self._readers:
            self._readers.popitem()[1].close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _manifests_of(
    directory: Path, generation: int | None, copies: Sequence[Path]
) -> tuple[Path, list[Manifest]]:
    """Read the manifests of the newest whole generation, or of the given one; if they are damaged,
    the manifests of a copy. Returns their place, and the manifests. Raises: as `Checkpoint.open`.
    """
    try:
        return directory, _read(directory, generation)
    except (AioError, ValueError) as error:
        # A missing generation was never committed, so no copy has it.
        if isinstance(error, AioError) and error.errno == errno.ENOENT:
            raise
        for copy in copies:
            with contextlib.suppress(AioError, ValueError):
                found = _read(copy, generation)
                # An older commit must never replace a damaged one.
                newer = found[0].generation >= (generation or max(generations(directory)))
                if newer and are_of_one_run(directory, copy):
                    log.warning("%s; using the copy of the manifests in %s", error, copy)
                    return copy, found
        raise


def _read(directory: Path, generation: int | None) -> list[Manifest]:
    if generation is None:
        return newest_generation(directory)
    return read_generation(directory, generation)


class Cuts(NamedTuple):
    """Parts of ranges in chunks, int64 [parts] each, in the order of the ranges. owner: index of
    the range. first: position of the part's first element.
    """

    owner: npt.NDArray[np.int64]
    chunk: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    numel: npt.NDArray[np.int64]


def cut_at_chunks(
    low: npt.NDArray[np.int64],
    numel: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    numels: npt.NDArray[np.int64],
) -> Cuts:
    """Cut ranges [low, low + numel) of positions at the starts of chunks. starts, numels: chunks in
    order, which must cover the ranges.
    """
    begin = np.searchsorted(starts, low, side="right") - 1
    counts = np.where(numel > 0, np.searchsorted(starts, low + numel) - begin, 0)
    owner = np.repeat(np.arange(len(low)), counts)
    chunk = _numbers(begin, counts)
    first = np.maximum(starts[chunk], low[owner])
    found = np.minimum(starts[chunk] + numels[chunk], (low + numel)[owner]) - first
    assert found.sum() == numel.sum(), "chunks have no gaps"
    return Cuts(owner, chunk, first, found)


def _numbers(
    first: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Concatenate the numbers [first, first + count) of all pairs (first, count)."""
    found: npt.NDArray[np.int64] = np.repeat(first - np.cumsum(counts) + counts, counts)
    return found + np.arange(len(found))


@final
class SavedChunks:
    """The chunks of all ranks, numbered in the order of their elements.

    Positions count the elements of all flats, one flat after another. positions: positions of the
    chunks' first elements. flat_at: positions of the flats' first elements.
    """

    def __init__(self, manifests: Sequence[Manifest], flats: Sequence[FlatEntry]) -> None:
        shards = np.array([flat.shard_numel for flat in flats], dtype=np.int64)
        whole = shards * len(manifests)
        self.flat_at: npt.NDArray[np.int64] = np.cumsum(whole) - whole
        self._flats = flats
        tables = [manifest.rows for manifest in manifests]
        flat_of = [rows["flat"] for rows in tables]
        at = np.concatenate(
            [
                self.flat_at[flat] + rank * shards[flat] + rows["start"]
                for rank, (rows, flat) in enumerate(zip(tables, flat_of, strict=True))
            ]
        )
        order = np.argsort(at, kind="stable")
        # Several rows may share a chunk, each with some of its sections.
        first = np.flatnonzero(np.diff(at[order], prepend=-1))
        self.positions: npt.NDArray[np.int64] = at[order][first]
        self._numels = np.concatenate([rows["numel"] for rows in tables])[order][first]
        self._first = np.append(first, len(at))
        counts = np.array([len(rows) for rows in tables])
        self._ranks = np.repeat(np.arange(len(tables), dtype=np.int32), counts)[order]
        self._rows = order - (np.cumsum(counts) - counts)[self._ranks]

    def cut(self, low: npt.NDArray[np.int64], numel: npt.NDArray[np.int64]) -> Cuts:
        """Cut ranges of positions at the starts of chunks."""
        return cut_at_chunks(low, numel, self.positions, self._numels)

    def rows(
        self, chunks: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return (index in `chunks`, rank, index in the rank's rows) of each row of the chunks."""
        counts = self._first[chunks + 1] - self._first[chunks]
        at = _numbers(self._first[chunks], counts)
        return np.repeat(np.arange(len(chunks)), counts), self._ranks[at], self._rows[at]

    def section_bytes(self, chunks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the bytes of each section of chunks, padded to 4096: [chunks, SECTION_MAX]."""
        rows = np.zeros(len(chunks), dtype=[("flat", "<i8"), ("numel", "<i8")])
        rows["numel"] = self._numels[chunks]
        # side="right" skips flats without elements, which share the position of the next flat.
        rows["flat"] = np.searchsorted(self.flat_at, self.positions[chunks], side="right") - 1
        return section_bytes(rows, self._flats)


CACHE_BYTES = 24 << 20
"""Memory for saved chunks: chunks that were read ahead, and chunks that are needed again, since the
boundaries of saved and composed chunks differ."""


@dataclasses.dataclass(eq=False)
class _Read:
    """One submission. alone: the submission reads a single chunk."""

    tickets: list[Ticket]
    alone: bool
    ended: bool = False

    def wait(self) -> None:
        if not self.ended:
            for ticket in self.tickets:
                ticket.wait()
            self.ended = True


class ChunkReader:
    """Reads chunks of a checkpoint by their numbers (`SavedChunks`), ahead of their use, and caches
    the last ones. capacity: bytes of the cache, unless chunks that are read together need more.
    sections: indices of the sections to read (None: all).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        sections: Sequence[int] | None = None,
        *,
        capacity: int = CACHE_BYTES,
    ) -> None:
        self._checkpoint = checkpoint
        self._capacity = capacity
        every = np.arange(SECTION_MAX)
        self._wanted = np.isin(every, every if sections is None else sections)
        self._held: OrderedDict[int, tuple[list[Bytes], _Read, int]] = OrderedDict()
        self._held_bytes = 0

    def start(self, batches: Iterable[Sequence[int]]) -> None:
        """Start reading the first batches of chunks that fit, each batch by one submission."""
        kept: dict[int, None] = {}
        missing: list[tuple[list[int], npt.NDArray[np.int64]]] = []
        total = 0
        for batch in batches:
            new = [chunk for chunk in batch if chunk not in kept]
            fresh = [chunk for chunk in new if chunk not in self._held]
            if fresh:
                sizes = self._checkpoint.chunks.section_bytes(np.array(fresh, dtype=np.int64))
                total += int(sizes.sum())
            total += sum([self._held[chunk][2] for chunk in new if chunk in self._held])
            # Stop here: otherwise chunks would be evicted before their use.
            if kept and total > self._capacity:
                break
            kept.update(dict.fromkeys(new))
            if fresh:
                missing.append((fresh, sizes))
        for chunk in kept:
            if chunk in self._held:
                self._held.move_to_end(chunk)
        for fresh, sizes in missing:
            self._make_room(int(sizes.sum()), kept)
            self._fetch(fresh, sizes)

    def get(self, chunk: int) -> list[Bytes]:
        """Return the sections of a chunk, uint8 each, padded, valid until the next `start` or
        `get`. Blocks.

        Raises: ChecksumError naming file, offset and length; DeviceFailedError; AioError.
        """
        if chunk not in self._held:
            self.start([[chunk]])
        # The chunk stays cached: the next composed chunk often needs its other elements.
        arrays, read, _ = self._held[chunk]
        try:
            read.wait()
        except AioError:
            if read.alone:
                raise
            # Another chunk of the same submission may have caused the fault: read this one alone.
            self._evict(chunk)
            self.start([[chunk]])
            arrays, read, _ = self._held[chunk]
            read.wait()
        return arrays

    def read(
        self, wanted: Iterable[tuple[SavedParam, Piece]], ahead: int
    ) -> Iterator[tuple[Piece, list[Bytes]]]:
        """Yield each piece with the sections of its chunk, in order, and read the chunks of up to
        `ahead` pieces ahead. The arrays are valid as long as those of `get`. Raises: as `get`.
        """
        pieces = (piece for _, piece in wanted)
        upcoming = list(itertools.islice(pieces, ahead))
        while upcoming:
            self.start([piece.chunk] for piece in upcoming)
            piece = upcoming.pop(0)
            arrays = self.get(piece.chunk)
            upcoming += itertools.islice(pieces, 1)
            yield piece, arrays

    def close(self) -> None:
        """Wait for all pending reads, also for failing ones, and release all memory."""
        for _, read, _ in self._held.values():
            # Errors are ignored, since these chunks are not needed any more.
            _wait_out(read.tickets)
        self._held.clear()

    def _make_room(self, size_bytes: int, kept: Container[int]) -> None:
        """Evict the oldest chunks, except `kept`."""
        while self._held_bytes + size_bytes > self._capacity:
            oldest = next(iter(self._held), None)
            if oldest is None or oldest in kept:
                break
            self._evict(oldest)

    def _evict(self, chunk: int) -> None:
        # Removed after the wait, since a read may still write to the memory, also if Ctrl-C
        # interrupts the wait. An error is ignored: a later `get` reads the chunk again.
        read = self._held[chunk][1]
        if not read.ended:
            _wait_out(read.tickets)
        self._held_bytes -= self._held.pop(chunk)[2]

    def _fetch(self, chunks: list[int], sizes: npt.NDArray[np.int64]) -> None:
        # One allocation for all sections; pages of sections that are not read stay unmapped.
        memory = np.zeros(int(sizes.sum()), dtype=np.uint8)
        ends = np.cumsum(sizes).reshape(sizes.shape)
        wanted = self._wanted & (sizes > 0)
        addresses = np.where(wanted, ends - sizes + memory.ctypes.data, 0).astype(np.uint64)
        tickets = self._checkpoint.fetch(np.array(chunks, dtype=np.int64), addresses)
        read = _Read(tickets, alone=len(chunks) == 1)
        bounds = np.stack([ends - sizes, ends], axis=-1).tolist()
        for chunk, sections in zip(chunks, bounds, strict=True):
            arrays = [memory[begin:stop] for begin, stop in sections if begin < stop]
            self._held[chunk] = (arrays, read, sections[-1][1] - sections[0][0])
        self._held_bytes += memory.nbytes


def _wait_out(tickets: Iterable[Ticket]) -> None:
    """Wait for reads and ignore their errors, so that their memory can be released."""
    for ticket in tickets:
        with contextlib.suppress(AioError):
            ticket.wait()


# -- places of elements ----------------------------------------------------------------------------


class Piece(NamedTuple):
    """Elements [start, start + numel) of a saved chunk. at: index of the first one in the requested
    range.
    """

    chunk: int
    start: int
    numel: int
    at: int


# -- data files ------------------------------------------------------------------------------------


def check_algorithm(algorithm: str) -> None:
    """Raise ValueError for checksums that executors do not compute."""
    if algorithm == "xxh3":
        raise ValueError(
            "the checkpoint's checksums are 'xxh3': an earlier release without its C extension "
            "wrote them, and this release cannot check them; export the weights with that release "
            "(infinity checkpoint export), and load the export"
        )
    if algorithm != ALGORITHM:
        raise ValueError(
            f"the checkpoint's checksums are {algorithm!r}, which this release does not know; use "
            "a later release"
        )


class DataReader:
    """All data files of a rank, open for reading by one executor, which has each file as a drive.
    Threads may not share it.

    rows, sums, flats: from a manifest; `rows["file"]` is an index into `files`. partial: files may
    be missing or too short; only a read of missing data raises. Raises: AioError for a file that is
    missing or too short; ValueError for checksums that executors do not compute.
    """

    def __init__(
        self,
        directory: Path,
        files: Sequence[FileEntry],
        rows: npt.NDArray[np.void],
        flats: Sequence[FlatEntry],
        sums: npt.NDArray[np.uint32],
        *,
        algorithm: str,
        backend: str = "auto",
        partial: bool = False,
    ) -> None:
        check_algorithm(algorithm)
        self._missing: dict[int, Path] = {}  # paths of missing files, by their index
        self._file_of = rows["file"]
        with contextlib.ExitStack() as undo:
            opened: list[SwapFile] = []
            drives = np.zeros(len(files), dtype=rows["file"].dtype)
            for index, file in enumerate(files):
                path = directory / file.name
                # Checked first, since a later read error would blame the drive instead of the file.
                if not partial:
                    check_length(path, file)
                try:
                    opened.append(undo.enter_context(SwapFile.existing(path)))
                except AioError:
                    if not partial:
                        raise
                    self._missing[index] = path
                    continue
                drives[index] = len(opened) - 1
            if self._missing:
                rows = rows.copy()
                rows["file"] = drives[rows["file"]]
            sizes = section_bytes(rows, flats)
            # A padded row is read section by section, a row of a durable run as a whole.
            largest = np.where(rows["padded"] == PADDED, sizes.max(axis=1), rows["run_bytes"])
            pool = PoolSpec(max(SLOTS, 2 * len(files)), int(largest.max(initial=4096)))
            self._executor = open_executor(
                opened, small=PoolSpec(0, 0), large=pool, backend=backend
            )
            # `undo` closes the executor before the files, whose descriptors its threads use.
            undo.callback(self._executor.close, wait=False)
            self._chunks = RowChunks(self._executor, rows, flats, sums)
            self._undo = undo.pop_all()

    def fetch(
        self, rows: npt.NDArray[np.int64], addresses: npt.NDArray[np.uint64]
    ) -> Iterator[Ticket]:
        """Start reading sections of rows to `addresses`, [rows, SECTION_MAX]; 0 skips a section.
        Sections of padded rows are read up to a multiple of 4096 bytes. Does not block. Yields each
        ticket when its submission has begun.

        A ticket raises ChecksumError naming file, offset and length of the damage. Raises: AioError
        for a row of a missing file.
        """
        for file in np.unique(self._file_of[rows]).tolist() if self._missing else ():
            if file in self._missing:
                path = str(self._missing[file])
                raise AioError("a file of a checkpoint is missing", path=path, op="open")
        yield from self._chunks.submit(rows, JobKind.FETCH, addresses)

    def close(self) -> None:
        # Wait first, since pending reads write to the caller's memory.
        self._executor.wait_all()
        self._undo.close()


class RowChunks:
    """The rows of data files, as chunks of an executor that has these files as drives.

    A block of BLOCK_ROWS rows is defined in the executor when one of its rows is needed, and
    dropped when other blocks are needed: a checkpoint may have a million rows, and each takes
    kilobytes in the executor. A block that is defined again has the same seeds of checksums, since
    the executor does not change the generation of a chunk with only one place.
    """

    def __init__(
        self,
        executor: Executor,
        rows: npt.NDArray[np.void],
        flats: Sequence[FlatEntry],
        sums: npt.NDArray[np.uint32],
    ) -> None:
        self._executor = executor
        self._rows = rows
        self._flats = flats
        # Keeps the checksums alive, since the executor has only their address.
        self._sums = sums
        # Address of sections that are in other rows; the executor never reads this memory.
        self._absent = np.zeros(64, dtype=np.uint8)
        # Ids of the sections of rows, [rows, SECTION_MAX], by number of the block. The least
        # recently used block comes first.
        self._blocks: OrderedDict[int, npt.NDArray[np.int32]] = OrderedDict()

    def _block(self, number: int) -> npt.NDArray[np.int32]:
        if number not in self._blocks:
            for other in list(self._blocks)[: max(len(self._blocks) + 1 - BLOCKS_MAX, 0)]:
                self._forget(other)
            self._blocks[number] = self._define(number)
        self._blocks.move_to_end(number)
        return self._blocks[number]

    def _define(self, number: int) -> npt.NDArray[np.int32]:
        """Define the rows of a block in the executor. Returns the ids of their sections, -1 for a
        section that is not in the row.
        """
        rows = self._rows[number * BLOCK_ROWS :][:BLOCK_ROWS]
        ids: npt.NDArray[np.int32] = np.full((len(rows), SECTION_MAX), -1, dtype=np.int32)
        sizes = section_bytes(rows, self._flats)
        pieces = pieces_of(rows, self._flats)
        sums_at = rows["sums_at"][:, None] + np.cumsum(pieces, axis=1) - pieces
        padded = rows["padded"] == PADDED
        for s in range(SECTION_MAX):
            here = np.flatnonzero(padded & (rows["section_at"][:, s] >= 0))
            if len(here):
                address = self._sums.ctypes.data + 4 * sums_at[here, s]
                ids[here, s] = self._executor.define(
                    _section_records(rows[here], s, sizes[here, s], address)
                )
        whole = np.flatnonzero(~padded & (rows["section_at"] >= 0).any(axis=1))
        if len(whole):
            # Defined as in the run, since chunk and section seed the checksums.
            made = self._executor.define(self._chunk_records(rows[whole]))
            ids[whole] = np.where(rows[whole]["section_at"] >= 0, made[:, None], -1)
        return ids

    def _forget(self, number: int) -> None:
        """Drop a block from the executor, unless one of its jobs is pending."""
        ids = self._blocks[number]
        # Sections of a whole row share an id.
        if self._executor.drop(np.unique(ids[ids >= 0]), unless_pending=True):
            del self._blocks[number]

    def _chunk_records(self, rows: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Make the records of chunks as in the run's executor. Sections that are in other rows get
        the address of memory that the executor never reads.
        """
        records = np.zeros(len(rows), dtype=CHUNK)
        for name in ("key", "generation", "numel", "file_offset", "run_bytes", "section_at"):
            records[name] = rows[name]
        records["drive"], records["piece_numel"] = rows["file"], PIECE_NUMEL
        records["zeros"] = rows["zeros"]
        records["sums_ptr"] = self._sums.ctypes.data + 4 * rows["sums_at"]
        # Fields that are equal for all chunks of a flat are computed once for each flat.
        numbers, of_row = np.unique(rows["flat"], return_inverse=True)
        table = np.zeros(len(numbers), dtype=CHUNK)
        for common, number in zip(table, numbers.tolist(), strict=True):
            entry = self._flats[number]
            common["format"], common["section_count"] = entry.format, len(entry.sections)
            for s, section in enumerate(entry.sections):
                common["itemsize"][s], common["group_numel"][s] = (
                    section.itemsize,
                    section.group_numel,
                )
        for name in ("format", "section_count", "itemsize", "group_numel"):
            records[name] = table[name][of_row]
        for s in range(SECTION_MAX):
            # The executor requires an address, but never reads a section that is not in the row.
            elsewhere = (s < records["section_count"]) & (records["section_at"][:, s] < 0)
            records["section_ptr"][elsewhere, s] = self._absent.ctypes.data
        return records

    def submit(
        self, rows: npt.NDArray[np.int64], kind: JobKind, addresses: npt.NDArray[np.uint64]
    ) -> Iterator[Ticket]:
        """Submit jobs on rows: one submission for all rows of a block with equal `padded`.
        addresses: [rows, SECTION_MAX]; 0 skips a section. Does not block. Yields each ticket when
        its submission has begun.
        """
        kinds = rows // BLOCK_ROWS * (FOLDED + 1) + self._rows["padded"][rows]
        for kind_of in dict.fromkeys(kinds.tolist()):
            mine = kinds == kind_of
            number, how = divmod(kind_of, FOLDED + 1)
            jobs = self._jobs(number, how, rows[mine] % BLOCK_ROWS, addresses[mine])
            jobs["kind"], jobs["base"] = kind, -1
            yield self._executor.submit(jobs, priority=Priority.DEMAND)

    def _jobs(
        self,
        number: int,
        how: int,
        rows: npt.NDArray[np.int64],
        addresses: npt.NDArray[np.uint64],
    ) -> npt.NDArray[np.void]:
        ids = self._block(number)[rows]
        wanted = addresses != 0
        assert (ids[wanted] >= 0).all(), f"a row of {rows} lacks a section"
        if how == PADDED:
            # Every section is a separate chunk, so a job for each.
            jobs = np.zeros(np.count_nonzero(wanted), dtype=JOB)
            jobs["chunk"], jobs["mask"], jobs["ptr"][:, 0] = ids[wanted], 1, addresses[wanted]
        else:
            jobs = np.zeros(len(rows), dtype=JOB)
            jobs["chunk"], jobs["ptr"][:] = ids.max(axis=1), addresses
            jobs["mask"] = wanted @ (1 << np.arange(SECTION_MAX))
            jobs["mask"] |= MASK_FOLDED if how == FOLDED else 0
        return jobs


def _section_records(
    rows: npt.NDArray[np.void], s: int, sizes: npt.NDArray[np.int64], sums: npt.NDArray[np.int64]
) -> npt.NDArray[np.void]:
    """Make the records of section `s` of padded rows. sizes: the section's bytes in each row."""
    records = np.zeros(len(rows), dtype=CHUNK)
    # A separate key for each section seeds the section's checksums.
    records["key"], records["generation"] = rows["key"] + np.uint64(s), rows["generation"]
    records["drive"] = rows["file"]
    records["numel"] = records["run_bytes"] = sizes
    records["file_offset"] = rows["file_offset"] + rows["section_at"][:, s]
    records["format"], records["section_count"], records["piece_numel"] = Format.RAW, 1, PIECE_BYTES
    records["section_at"] = -1
    records["section_at"][:, 0] = 0
    records["itemsize"][:, 0] = records["group_numel"][:, 0] = 1
    records["sums_ptr"] = sums
    return records


@dataclasses.dataclass(frozen=True)
class SavedRange:
    """Elements [at, at + numel) of a parameter, or of a part of a parameter. In the checkpoint they
    are elements [start, start + numel) of `saved`.
    """

    saved: SavedParam
    start: int
    at: int
    numel: int


class SavedRanges:
    """All elements of a parameter, as ranges in order and without gaps."""

    def __init__(self, ranges: Iterable[SavedRange]) -> None:
        self.ranges = tuple(ranges)
        self._at = [each.at for each in self.ranges]

    @property
    def saved(self) -> list[SavedParam]:
        return [each.saved for each in self.ranges]

    def within(self, element: int, numel: int) -> Iterator[SavedRange]:
        """Yield the ranges of elements [element, element + numel). Their `at` counts from
        `element`.
        """
        index = bisect.bisect_right(self._at, element) - 1
        done = 0
        while done < numel:
            each = self.ranges[index]
            skipped = element + done - each.at
            count = min(each.numel - skipped, numel - done)
            yield SavedRange(each.saved, each.start + skipped, done, count)
            done += count
            index += 1


class SavedWeight:
    """A weight of a checkpoint.

    shape: shape of the whole weight. tiles: the saved parameters of the weight with their places,
    in order; the place of an undivided weight is None.
    """

    def __init__(
        self, shape: tuple[int, ...], tiles: Sequence[tuple[SavedParam, TilePlace | None]]
    ) -> None:
        self.shape = shape
        self.tiles = list(tiles)
        self.saved = [saved for saved, _ in tiles]
        self._at_place = {place: saved for saved, place in tiles}
        # None if some tiles have parts of rows, and so are not ranges.
        self._ranges: SavedRanges | None = None
        starts = [_start(place) for _, place in tiles]
        if None not in starts:
            self._ranges = SavedRanges(
                SavedRange(saved, 0, start, saved.entry.numel)
                for saved, start in zip(self.saved, starts, strict=True)
                if start is not None
            )

    def ranges_of(self, param: Param) -> SavedRanges | None:
        """Return the saved ranges of a parameter that is this weight or a tile of this weight. None
        if no saved tile has the parameter's place, and the parameter or a saved tile has parts of
        rows.
        """
        place = param.place
        if place in self._at_place:
            return SavedRanges([SavedRange(self._at_place[place], 0, 0, param.numel)])
        start = _start(place)
        if start is None or self._ranges is None:
            return None
        return SavedRanges(self._ranges.within(start, param.numel))


def weights_by_name(params: Iterable[SavedParam]) -> dict[str, SavedWeight]:
    """Join saved parameters to weights. Returns the weights by all their names in state dicts."""
    found: dict[str, SavedWeight] = {}
    grids: dict[str, dict[tuple[int, int], SavedParam]] = {}
    for saved in params:
        uncut = SavedWeight(saved.entry.shape, [(saved, None)])
        for name in saved.entry.names:
            # Also under the name of a tile: a user's module may have such a name without being a
            # tile.
            found[name] = uncut
            whole = whole_name(name)
            if whole is not None:
                grids.setdefault(whole, {})[tile_index(name)] = saved
    for name, grid in grids.items():
        weight = _joined(grid)
        if weight is not None:
            # A parameter with exactly this name takes precedence: the grid then has no tiles.
            found.setdefault(name, weight)
    return found


def _joined(grid: dict[tuple[int, int], SavedParam]) -> SavedWeight | None:
    """Join tiles, given by (row, column), to a weight. None if tiles are missing or their shapes do
    not match: then a user's modules have names like tiles.
    """
    height, width = (1 + max(index[axis] for index in grid) for axis in (0, 1))
    shapes = {index: saved.entry.shape for index, saved in grid.items()}
    if len(grid) != height * width or any(len(shape) < 2 for shape in shapes.values()):
        return None
    rest = shapes[0, 0][2:]
    for (row, column), shape in shapes.items():
        if shape != (shapes[row, 0][0], shapes[0, column][1], *rest):
            return None
    rows, columns = [0], [0]
    for row in range(height):
        rows.append(rows[-1] + shapes[row, 0][0])
    for column in range(width):
        columns.append(columns[-1] + shapes[0, column][1])
    whole = (rows[-1], columns[-1], *rest)
    tiles = []
    for row, column in sorted(grid):
        place = TilePlace((rows[row], rows[row + 1]), (columns[column], columns[column + 1]), whole)
        tiles.append((grid[row, column], place))
    return SavedWeight(whole, tiles)


def _start(place: TilePlace | None) -> int | None:
    """Return the index in the weight of the first element of a tile of whole rows; 0 for an
    undivided weight; None for a tile with parts of rows.
    """
    if place is None:
        return 0
    if place.columns != (0, place.whole_shape[1]):
        return None
    return place.rows[0] * math.prod(place.whole_shape[1:])
