"""Parameters as others know them: the tiles of a weight are one tensor in every format that is not infinity's own.

Leaving the engine: weights as safetensors files, streamed unit by unit.

Safetensors from a checkpoint, without a model: chunk by chunk, in the layout of `inf.export_safetensors`.

    header (names, dtypes, shapes, places)  ->  each parameter: read its chunks ahead, check them, cast, append  ->  fsync, name
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import torch
from safetensors.torch import save_file

from infinity._src.checkpoint.directory import fsync_directory, fsync_file, publish
from infinity._src.checkpoint.load import has_master
from infinity._src.checkpoint.manifest import dtype_of
from infinity._src.checkpoint.metadata import buffers_of, read_buffers
from infinity._src.checkpoint.reader import Bytes, Checkpoint, ChunkRef, SavedParam, StateReader
from infinity._src.checkpoint.reshard import CHUNKS_KEPT, LOOK_AHEAD, slice_of
from infinity._src.distributed.collectives import Comm
from infinity._src.distributed.rendezvous import Rendezvous
from infinity._src.kernels.codec import decode_sections
from infinity._src.kernels.tiles import tile_index, whole_name
from infinity._src.optim.state_access import States
from infinity._src.params.unit import Param, Unit
from infinity._src.sizes import format_size, parse_size, round_up
from infinity.aio.plan import Format, Master, Moments


@dataclasses.dataclass(frozen=True)
class Whole:
    """A tensor of a state dict. params: the one parameter that it is, or all tiles that it is cut into, in order."""

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    params: tuple[Param, ...]

    @property
    def name(self) -> str:
        """Its first key."""
        return self.keys[0]

    def merged(self, read: Callable[[Param], torch.Tensor]) -> torch.Tensor:
        """What `read` gives for its parameters (each of the parameter's shape), as one tensor. One tile is in memory besides."""
        whole: torch.Tensor | None = None
        for param in self.params:
            value, place = read(param), param.place
            if place is None:
                return value
            if whole is None:
                whole = torch.empty(self.shape, dtype=value.dtype)
            elif whole.dtype != value.dtype:  # masters of some tiles, and what others compute with
                whole = whole.to(torch.promote_types(whole.dtype, value.dtype))
            place.of(whole).copy_(value)
        assert whole is not None
        return whole


def wholes_of(params: Iterable[Param]) -> list[Whole]:
    """The tensors that these parameters are, in order of their first; tiles of one weight among them are put together."""
    tiles: dict[object, list[Param]] = {}
    for param in params:
        tiles.setdefault(param if param.place is None else param.keys, []).append(param)
    return [Whole(group[0].keys, group[0].whole_shape, tuple(group)) for group in tiles.values()]


INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


class Exporter(Protocol):
    """What writing a model out needs of its engine."""

    units: list[Unit]
    states: States
    comm: Comm

    def read(self, param: Param) -> torch.Tensor:
        """The current value of one parameter on the CPU; collective on several ranks."""


def read_value(of: Exporter, param: Param, *, masters: bool) -> torch.Tensor:
    """The parameter on the CPU: its fp32 master if that is wanted and there is one, else what computes. Collective. Blocks."""
    return of.states.read(param, 0) if masters and has_master(of.states, param) else of.read(param)


def write_safetensors(
    model: torch.nn.Module,
    of: Exporter,
    directory: str | os.PathLike[str],
    *,
    shard_bytes_max: int | str,
    masters: bool = False,
) -> None:
    """Write parameters and persistent buffers in the layout of Hugging Face, one shard in memory at a time. Blocks.

    Files appear under their names only when all are whole and on the drive, the index last; an earlier export in the directory
    stays until then. On several ranks all call it, and rank 0 writes. Raises: OSError naming the path, PeerFailed where another
    rank had one.
    """
    comm = of.comm
    files = WeightFiles(Path(directory), writes=comm.rank == 0)
    parts = _parts(of)
    groups = group_units([_part_bytes(of, part, masters=masters) for part in parts], parse_size(shard_bytes_max))

    def read(param: Param) -> torch.Tensor:
        return read_value(of, param, masters=masters)

    with files:
        with Rendezvous(comm, f"making {directory}"):
            files.begin()
        for index, group in enumerate(groups):
            tensors = {whole.name: whole.merged(read) for part in group for whole in parts[part]}
            if index == 0:
                tensors.update(buffers_of(model))
            file = shard_name(index, len(groups))
            with Rendezvous(comm, f"writing {file}"):
                if tensors:
                    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
                    files.put(file, tensors, size_bytes, functools.partial(_write, tensors))
        with Rendezvous(comm, f"finishing {directory}"):
            files.finish()


class WeightFiles:
    """The files of one export. They get their names together, when all are whole and on the drive; leaving the context before
    that leaves an earlier export in the directory as it was. writes: False does nothing (ranks that do not write)."""

    def __init__(self, target: Path, *, writes: bool = True) -> None:
        self._target = target
        self._writes = writes
        self._names: dict[str, str] = {}  # by tensor
        self._size_bytes = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for file in (*self.files, INDEX):
            if self._writes:
                with contextlib.suppress(OSError):  # what broke off is raised, not this
                    self._partial(file).unlink(missing_ok=True)

    @property
    def files(self) -> tuple[str, ...]:
        """The names that they get, in order."""
        return tuple(dict.fromkeys(self._names.values()))

    def begin(self) -> None:
        """Make the directory; remove what an export that was killed left. Raises: OSError."""
        if not self._writes:
            return
        self._target.mkdir(parents=True, exist_ok=True)
        for path in self._target.glob("model*.partial"):
            if path.stem == INDEX or _OURS.fullmatch(path.stem):
                path.unlink()

    def put(self, file: str, names: Iterable[str], size_bytes: int, write: Callable[[Path], object]) -> None:
        """Have `write` write the tensors of these names to a path. Blocks until it is on the drive. Raises: OSError."""
        self._names.update(dict.fromkeys(names, file))
        self._size_bytes += size_bytes
        if self._writes:
            write(self._partial(file))
            fsync_file(self._partial(file))

    def finish(self) -> None:
        """Name the files, and the index last if there are several; remove what an earlier export left. Blocks. Raises: OSError.

        A crash in here may leave files without an index, never an index of other files.
        """
        if not self._writes:
            return
        index = self._target / INDEX
        if len(self.files) > 1:
            text = json.dumps({"metadata": {"total_size": self._size_bytes}, "weight_map": self._names}, indent=2, sort_keys=True)
            index.unlink(missing_ok=True)
            fsync_directory(self._target)
        for file in self.files:
            self._partial(file).replace(self._target / file)
        fsync_directory(self._target)
        if len(self.files) > 1:
            partial = self._partial(INDEX)
            partial.write_text(text + "\n")
            publish(partial, index)
            fsync_directory(self._target)
        _remove_stale(self._target, set(self.files))
        fsync_directory(self._target)
        fsync_directory(self._target.absolute().parent)

    def _partial(self, file: str) -> Path:
        return self._target / (file + ".partial")


def _remove_stale(target: Path, written: set[str]) -> None:
    """Remove what an earlier export into this directory left: readers would take it for a part of this one."""
    stale = [path for path in target.glob("model*.safetensors") if _OURS.fullmatch(path.name)]
    for path in stale:
        if path.name not in written:
            path.unlink()
    if len(written) == 1:
        (target / INDEX).unlink(missing_ok=True)


def group_units(sizes: Sequence[int], shard_bytes_max: int) -> list[list[int]]:
    """Consecutive units, by number, as many as fit one shard. sizes: bytes of each."""
    groups: list[list[int]] = [[]]
    size = 0
    for index, size_bytes in enumerate(sizes):
        if groups[-1] and size + size_bytes > shard_bytes_max:
            groups.append([])
            size = 0
        groups[-1].append(index)
        size += size_bytes
    return groups


def shard_name(index: int, count: int) -> str:
    """The name of file `index` of `count`."""
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _parts(of: Exporter) -> list[list[Whole]]:
    """The tensors of each unit; the tiles of a weight, units of their own, are one part together."""
    wholes = {whole.params[0]: whole for whole in wholes_of(param for unit in of.units for param in unit.params)}
    parts = [[wholes[param] for param in unit.params if param in wholes] for unit in of.units]
    return [part for part in parts if part] or [[]]


def _part_bytes(of: Exporter, part: Sequence[Whole], *, masters: bool) -> int:
    return sum(
        param.numel * (4 if masters and has_master(of.states, param) else param.dtype.itemsize)
        for whole in part
        for param in whole.params
    )


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, str(path), metadata={"format": "pt"})
    except Exception as error:
        if not isinstance(error, OSError) and "No space" in str(error):
            size = sum(tensor.nbytes for tensor in tensors.values())
            raise OSError(errno.ENOSPC, f"no room for {format_size(size)}", str(path)) from error
        raise


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
            reader.close()

    def _append_all(self, out: IO[bytes], tensors: list[_Tensor], reader: StateReader) -> None:
        ahead = self._ahead(tensors)
        upcoming = list(itertools.islice(ahead, LOOK_AHEAD))
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
            given = [slice_of(flat.sections[s], arrays[s], start, numel) for s in range(held.master_count)]
            found = torch.from_numpy(decode_sections(Format(held.master, Moments.FP32, 0), given)[0])
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
