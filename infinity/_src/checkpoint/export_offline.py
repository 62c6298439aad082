"""Safetensors from a checkpoint, without a model: chunk by chunk, in the layout of `inf.export_safetensors`.

    header (names, dtypes, shapes, places)  ->  each parameter: read its chunks ahead, check them, cast, append  ->  fsync, name
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import torch

from infinity._src.checkpoint.json_values import dtype_of
from infinity._src.checkpoint.metadata import read_buffers
from infinity._src.checkpoint.reader import Bytes, Checkpoint, ChunkRef, SavedParam, StateReader
from infinity._src.checkpoint.reshard import CHUNKS_KEPT, STAGES, slice_of
from infinity._src.checkpoint.safetensors import WeightFiles, group_units, shard_name
from infinity._src.kernels.state_codec import decode_sections
from infinity._src.kernels.tiling.tiled_module import tile_index, whole_name
from infinity._src.sizes import round_up
from infinity.aio import Format
from infinity.aio._records import Master, Moments

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Exported:
    """What an export wrote. size_bytes: of all tensors."""

    files: tuple[str, ...]
    tensors: int
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """One tensor of a file: a parameter of the checkpoint, the tiles of a weight (rows of tiles), or a buffer in memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    saved: tuple[tuple[SavedParam, ...], ...]
    value: torch.Tensor | None = None

    @property
    def parts(self) -> Iterator[SavedParam]:
        """The parameters of the checkpoint that it is made of, in order."""
        return itertools.chain.from_iterable(self.saved)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Exporting:
    """One export. masters: fp32 masters where there are such, else what computes. dtype: to which parameters of a floating
    dtype are rounded (None: none is); buffers stay.

    Raises: ValueError for what safetensors does not know.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        masters: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._masters = masters
        self._dtype = dtype
        self._progress: Callable[[int], object] = lambda _size: None
        data = checkpoint.attachment("buffers", 0)
        buffers = read_buffers(data) if data is not None else {}
        self._buffers = [_Tensor(name, value.dtype, tuple(value.shape), (), value) for name, value in buffers.items()]
        saved = [SavedParam(entry, index, flat) for index, flat in enumerate(checkpoint.flats) for entry in flat.params]
        units = itertools.groupby(saved, key=lambda each: whole_name(each.entry.name) or each.flat.unit)
        self._units = [self._tensors_of(list(unit)) for _, unit in units]
        everything = [*self._buffers, *itertools.chain.from_iterable(self._units)]
        wrong = next((tensor for tensor in everything if tensor.dtype not in _DTYPES), None)
        if wrong is not None:
            raise ValueError(f"{wrong.name} is {wrong.dtype}, which safetensors does not have; export with --dtype")
        self.size_bytes = sum(tensor.size_bytes for tensor in everything)
        """Bytes of all tensors."""

    def run(
        self, target: Path, *, shard_bytes_max: int, progress: Callable[[int], object] = lambda _size: None
    ) -> Exported:
        """Write all; `progress` is told the bytes of each part. Blocks.

        Files get their names when they are on the drive, the index last; what an earlier export left is removed then.
        Raises: OSError naming the path; ChecksumError naming what is damaged.
        """
        self._progress = progress
        self._checkpoint.check_files()
        groups = group_units([sum(tensor.size_bytes for tensor in unit) for unit in self._units], shard_bytes_max)
        count = 0
        files = WeightFiles(target)
        with files:
            files.begin()
            for index, group in enumerate(groups):
                tensors = [tensor for unit in group for tensor in (self._units[unit] if self._units else ())]
                if index == 0:
                    tensors += self._buffers
                count += len(tensors)
                if tensors:
                    size_bytes = sum(tensor.size_bytes for tensor in tensors)
                    write = functools.partial(self._write, tensors)
                    files.put(shard_name(index, len(groups)), [tensor.name for tensor in tensors], size_bytes, write)
            files.finish()
        return Exported(files.files, count, self.size_bytes)

    def _tensors_of(self, unit: Sequence[SavedParam]) -> list[_Tensor]:
        """The tensors of the parameters of a unit; of all tiles of a weight, that weight."""
        name = whole_name(unit[0].entry.name)
        if name is None:
            return [_Tensor(each.entry.name, self._dtype_of(each), each.entry.shape, ((each,),)) for each in unit]
        rows: dict[int, list[SavedParam]] = {}
        for each in unit:
            rows.setdefault(tile_index(each.entry.name)[0], []).append(each)
        grid = tuple(tuple(row) for row in rows.values())
        shape = (sum(row[0].entry.shape[0] for row in grid), sum(each.entry.shape[1] for each in grid[0]))
        dtypes = [self._dtype_of(each) for each in unit]
        return [_Tensor(name, functools.reduce(torch.promote_types, dtypes), shape, grid)]

    def _dtype_of(self, saved: SavedParam) -> torch.dtype:
        own = torch.float32 if self._has_master(saved) else dtype_of(saved.flat.dtype)
        return self._dtype if self._dtype is not None and own.is_floating_point else own

    def _has_master(self, saved: SavedParam) -> bool:
        return self._masters and saved.flat.state_format.master is not Master.RAW

    def _write(self, tensors: list[_Tensor], path: Path) -> None:
        # The largest items first, as the format's own writer has them: every tensor starts at a multiple of its item.
        tensors = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
        reader = StateReader(self._checkpoint, CHUNKS_KEPT, self._sections())
        try:
            with path.open("wb") as out:
                out.write(_header(tensors))
                self._append_all(out, tensors, reader)
        except OSError as error:
            if error.filename is None and type(error) is OSError:
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise
        finally:
            reader.settle()

    def _append_all(self, out: IO[bytes], tensors: list[_Tensor], reader: StateReader) -> None:
        ahead = self._ahead(tensors)
        upcoming = list(itertools.islice(ahead, STAGES))
        for tensor in tensors:
            if tensor.value is not None:
                _append(out, tensor.value)
                self._progress(tensor.size_bytes)
                continue
            for row in tensor.saved:
                tiles = []
                for saved in row:
                    values = self._values(saved, tensor.dtype, reader, upcoming, ahead)
                    if len(row) == 1:
                        for value in values:
                            _append(out, value)
                    else:  # tiles beside each other: their rows alternate in the file
                        tiles.append(torch.cat(list(values)).view(saved.entry.shape))
                if tiles:
                    _append(out, torch.cat(tiles, dim=1))

    def _values(
        self,
        saved: SavedParam,
        dtype: torch.dtype,
        reader: StateReader,
        upcoming: list[ChunkRef],
        ahead: Iterator[ChunkRef],
    ) -> Iterator[torch.Tensor]:
        """The elements of a parameter as they are written, a chunk's at a time."""
        for piece in self._checkpoint.pieces(saved, 0, saved.entry.numel):
            reader.start(upcoming)
            arrays = reader.get(upcoming.pop(0))
            upcoming += itertools.islice(ahead, 1)
            value = self._value(saved, dtype, arrays, piece.start, piece.numel)
            yield value
            self._progress(value.nbytes)

    def _ahead(self, tensors: Sequence[_Tensor]) -> Iterator[ChunkRef]:
        for saved in itertools.chain.from_iterable(tensor.parts for tensor in tensors):
            for piece in self._checkpoint.pieces(saved, 0, saved.entry.numel):
                yield ChunkRef(piece.rank, saved.flat_index, piece.chunk)

    def _value(self, saved: SavedParam, dtype: torch.dtype, arrays: Sequence[Bytes], start: int, numel: int) -> torch.Tensor:
        """Elements of a chunk as they are written."""
        flat = saved.flat
        held = flat.state_format
        if self._has_master(saved):
            sections = range(held.master_count)
            given = [torch.from_numpy(slice_of(flat.sections[s], arrays[s], start, numel)) for s in sections]
            found = decode_sections(Format(held.master, Moments.FP32, 0), given)[0]
        else:
            found = torch.from_numpy(slice_of(flat.sections[0], arrays[0], start, numel)).view(dtype_of(flat.dtype))
        return found.to(dtype)

    def _sections(self) -> range:
        """The sections that are read."""
        counts = [flat.state_format.master_count for flat in self._checkpoint.flats] if self._masters else []
        return range(max(counts, default=1))


def _header(tensors: Sequence[_Tensor]) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        end = at + tensor.size_bytes
        described[tensor.name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(round_up(len(text), 8))
    return len(text).to_bytes(8, "little") + text


def _append(out: IO[bytes], value: torch.Tensor) -> None:
    if value.numel():
        data: Bytes = np.ascontiguousarray(value.contiguous().reshape(-1).view(torch.uint8).numpy())
        out.write(data.data)
