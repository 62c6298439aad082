"""A checkpoint, open to read: what it holds, and any chunk of it, checked against its checksums.

    with Checkpoint.open(directory) as checkpoint:
        checkpoint.step, checkpoint.params["model.norm.weight"]           no data is read for these
        checkpoint.states(4).get(ChunkRef(rank, flat, chunk))             all sections of a chunk
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from infinity._src.checkpoint.data_file import DataReader
from infinity._src.checkpoint.directory import (
    check_length,
    newest_generation,
    read_attachment,
    read_generation,
)
from infinity._src.checkpoint.manifest import FlatEntry, Manifest, OptimizerEntry, ParamEntry, section_bytes
from infinity._src.checkpoint.pieces import Chunks, Piece, pieces
from infinity.aio import Ticket
from infinity.errors import AioError

Bytes = npt.NDArray[np.uint8]

OPEN_MAX = 4
"""Data files that are open at once."""


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
    """A whole generation of a directory: all ranks' manifests, read and checked. Use it in a `with`. One thread uses it.

    params: by first name. Raises (`open`): AioError (ENOENT) where there is no whole checkpoint, ChecksumError for a damaged
    manifest, ValueError for one of a later release.
    """

    def __init__(self, directory: Path, manifests: Sequence[Manifest], *, backend: str = "auto") -> None:
        self.directory = directory
        self.manifests = list(manifests)
        self._backend = backend
        self._readers: OrderedDict[tuple[int, int], DataReader] = OrderedDict()
        self._rows: dict[int, _RankRows] = {}
        first = manifests[0]
        for other in manifests[1:]:
            if other.layout.flats != first.layout.flats:
                path = str(directory / other.name)
                raise AioError("the manifest describes another model than that of rank 0", path=path, op="read")
        self.flats = first.layout.flats
        self.params = {
            entry.name: SavedParam(entry, index, flat) for index, flat in enumerate(self.flats) for entry in flat.params
        }

    @classmethod
    def open(cls, directory: Path, generation: int | None = None, *, backend: str = "auto") -> Checkpoint:
        """The newest whole generation, or this one. backend: of the executors that read."""
        manifests = newest_generation(directory) if generation is None else read_generation(directory, generation)
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
        """What of the policy decided about numbers."""
        return self.manifests[0].layout.numerics

    @property
    def optimizers(self) -> tuple[OptimizerEntry, ...]:
        """What held its parameters."""
        return self.manifests[0].optimizers

    @property
    def size_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.size_bytes for manifest in self.manifests for file in manifest.files)

    def check_files(self) -> None:
        """Look at every data file, without reading it. Raises: AioError for one that is missing or was cut short, ValueError when
        nothing here takes their checksums."""
        for rank, manifest in enumerate(self.manifests):
            for file in manifest.files:
                check_length(self.directory / file.name, file)
            if rank == 0 and manifest.files:
                self._reader(0, 0)

    def pieces(self, param: SavedParam, element: int, numel: int) -> Iterator[Piece]:
        """The chunks that hold elements [element, element + numel) of a parameter."""
        low = param.entry.offset + element
        return pieces(low, numel, param.flat.shard_numel, lambda rank: self._of_rank(rank).chunks(param.flat_index))

    def attachment(self, kind: str, rank: int) -> bytes | None:
        """The "buffers" or the "extra" of a rank, or of rank 0 where there is no such rank; None: it had none.

        Raises: ChecksumError, AioError.
        """
        manifest = self.manifests[rank if rank < self.world else 0]
        file = manifest.buffers if kind == "buffers" else manifest.extra
        return read_attachment(self.directory, file) if file is not None else None

    def fetch(self, ref: ChunkRef, addresses: dict[int, int]) -> list[Ticket]:
        """Start reading sections of a chunk to addresses, where each has its bytes up to a multiple of 4096. Does not block.

        Raises: AioError for a file that is missing or was cut short; the tickets: ChecksumError and DeviceFailedError.
        """
        manifest, rows = self.manifests[ref.rank], self._of_rank(ref.rank)
        tickets = []
        for row in rows.rows(ref.flat, ref.chunk):
            here = {s: at for s, at in addresses.items() if manifest.rows[row]["section_at"][s] >= 0}
            if here:
                reader = self._reader(ref.rank, int(manifest.rows[row]["file"]))
                tickets.append(reader.fetch(rows.in_file[row], here))
        return tickets

    def chunk_bytes(self, ref: ChunkRef) -> npt.NDArray[np.int64]:
        """Bytes of each section of a chunk, padded to 4096."""
        row = self._of_rank(ref.rank).rows(ref.flat, ref.chunk)[0]
        sizes: npt.NDArray[np.int64] = section_bytes(self.manifests[ref.rank].rows[[row]], self.flats)[0]
        return sizes

    def _of_rank(self, rank: int) -> _RankRows:
        if rank not in self._rows:
            self._rows[rank] = _RankRows(self.manifests[rank], len(self.flats))
        return self._rows[rank]

    def _reader(self, rank: int, file: int) -> DataReader:
        key = (rank, file)
        if key not in self._readers:
            while len(self._readers) >= OPEN_MAX:
                self._readers.popitem(last=False)[1].close()
            manifest = self.manifests[rank]
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
    """The rows of one manifest by flat and chunk. `in_file`: the number of each row among those of its file."""

    def __init__(self, manifest: Manifest, flat_count: int) -> None:
        rows = manifest.rows
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
            starts, index = np.unique(self._table["start"][mine], return_index=True)
            numels = self._table["numel"][mine][index]
            groups = [each.tolist() for each in np.split(mine, index[1:])]
            self._of_flat[flat] = ((starts, numels), groups)
        return self._of_flat[flat]

    def chunks(self, flat: int) -> Chunks:
        """Where the flat's chunks start in the shard, and their lengths."""
        return self._flat(flat)[0]

    def rows(self, flat: int, chunk: int) -> list[int]:
        """The rows that hold a chunk."""
        return self._flat(flat)[1][chunk]


class StateReader:
    """Chunks of a checkpoint in memory, read ahead, the last few kept. sections: those that are read (None: all)."""

    def __init__(self, checkpoint: Checkpoint, capacity: int, sections: Sequence[int] | None = None) -> None:
        self._checkpoint = checkpoint
        self._capacity = capacity
        self._sections = sections
        self._held: OrderedDict[ChunkRef, tuple[list[Bytes], list[Ticket]]] = OrderedDict()

    def start(self, refs: Iterable[ChunkRef]) -> None:
        """Start reading these, as many as there is room for beside each other."""
        wanted = list(dict.fromkeys(refs))[: self._capacity]
        for ref in wanted:
            if ref in self._held:
                self._held.move_to_end(ref)
        for ref in wanted:
            if ref not in self._held:
                while len(self._held) >= self._capacity:
                    for ticket in self._held.popitem(last=False)[1][1]:
                        ticket.wait()
                self._held[ref] = self._fetch(ref)

    def get(self, ref: ChunkRef) -> list[Bytes]:
        """The sections of a chunk, uint8 each, with padding after the end. Until the next `start` or `get`. Blocks.

        Raises: ChecksumError naming file, offset and length; DeviceFailedError; AioError.
        """
        self.start([ref])
        arrays, tickets = self._held[ref]
        for ticket in tickets:
            ticket.wait()
        return arrays

    def settle(self) -> None:
        """Wait for what is in flight, however it ends, and forget all."""
        for _, tickets in self._held.values():
            for ticket in tickets:
                try:
                    ticket.wait()
                except AioError:
                    continue  # nobody asked for this chunk any more
        self._held.clear()

    def _fetch(self, ref: ChunkRef) -> tuple[list[Bytes], list[Ticket]]:
        sizes = self._checkpoint.chunk_bytes(ref)
        count = len(self._checkpoint.flats[ref.flat].sections)
        wanted = range(count) if self._sections is None else [s for s in self._sections if s < count]
        memory = np.zeros(int(sizes.sum()), dtype=np.uint8)
        at = np.cumsum(sizes) - sizes
        arrays = [memory[at[s] : at[s] + sizes[s]] for s in range(count)]
        return arrays, self._checkpoint.fetch(ref, {s: arrays[s].ctypes.data for s in wanted})
