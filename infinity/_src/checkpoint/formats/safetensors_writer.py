"""Safetensors: writes weights from a model or from a checkpoint.

    write_safetensors    a model's units           ->  model-00001-of-00003.safetensors, …, index
    ExportJob            chunks of a checkpoint    ->  the same files, without a model

`write_safetensors` has one file's tensors in memory at a time, `ExportJob` a few chunks. The bytes
of the files are the same as from the format's reference library. Both write the tiles of a weight
as one tensor; only infinity's checkpoints store tiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import torch

from infinity._src.base.atomic_file import (
    fsync_directory,
    fsync_file,
    write_durably,
    write_new,
)
from infinity._src.base.dtypes import bytes_of, check_kept, dtype_of, kind_of
from infinity._src.base.paths import check_link
from infinity._src.base.progress import ProgressLine
from infinity._src.base.sizes import format_size, parse_size
from infinity._src.cabi.records import Master
from infinity._src.checkpoint.formats.load import Engine, has_master
from infinity._src.checkpoint.formats.safetensors_reader import (
    FileTensor,
    check_dtypes,
    encode_header,
    file_order,
)
from infinity._src.checkpoint.metadata import buffers_of, persistent_buffers, read_buffers
from infinity._src.checkpoint.reader import Checkpoint, ChunkReader, Piece, SavedParam
from infinity._src.checkpoint.reshard import LOOK_AHEAD, slice_of
from infinity._src.distributed.communicator import Comm
from infinity._src.distributed.rendezvous import Rendezvous
from infinity._src.kernels.state_codec import decode_master
from infinity._src.kernels.tiling.tiled_module import (
    tile_index,
    tiled_module_name,
    whole_name,
)
from infinity._src.memory.heap import Heap
from infinity._src.memory.ledger import memory_left_bytes
from infinity._src.params.chunk_pipeline import Bytes
from infinity._src.params.unit import Param

INDEX = "model.safetensors.index.json"
_WAY_OUT = "inf.save keeps it; for an export give the model another dtype"
_LEAVE_OUT = "inf.export_safetensors of the restored model leaves out what its names= says"
# Names of an export's files. An export removes only files with these names.
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")



# -- tiles -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Whole:
    """A tensor of a state dict. params: one parameter, or all tiles of the tensor in order."""

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    params: tuple[Param, ...]

    @property
    def name(self) -> str:
        return self.keys[0]

    def merged(self, read: Callable[[Param], torch.Tensor]) -> torch.Tensor:
        """Assemble the tensor from the results of `read` for each parameter. Takes memory for one
        tile in addition to the result.
        """
        whole: torch.Tensor | None = None
        for param in self.params:
            value, place = read(param), param.place
            if place is None:
                return value
            if whole is None:
                whole = torch.empty(self.shape, dtype=value.dtype)
            # Some tiles may have fp32 masters and others not.
            elif whole.dtype != value.dtype:
                whole = whole.to(torch.promote_types(whole.dtype, value.dtype))
            place.of(whole).copy_(value)
        assert whole is not None
        return whole


def wholes_of(params: Iterable[Param]) -> list[Whole]:
    """Group parameters into the tensors of a state dict, in the order of their first parameters.
    The tiles of one weight form one tensor.
    """
    tiles: dict[object, list[Param]] = {}
    for param in params:
        # The tiles of one weight share the weight's names, `keys`.
        tiles.setdefault(param if param.place is None else param.keys, []).append(param)
    return [Whole(group[0].keys, group[0].whole_shape, tuple(group)) for group in tiles.values()]


# -- writing a file --------------------------------------------------------------------------------


def write_file(path: Path, tensors: Sequence[FileTensor], values: Iterable[torch.Tensor]) -> None:
    """Write one file. Blocks. Raises: OSError naming the path; any error of `values`.

    tensors: sorted by `file_order`. values: the elements of all tensors in that order, in parts of
    any length. Each part is written before the iterator computes the next.
    """
    try:
        with path.open("wb") as out:
            # Some releases of transformers refuse files without this metadata.
            out.write(encode_header(tensors, {"format": "pt"}))
            for value in values:
                _append(out, value)
    except OSError as error:
        # An error with a path, or of a subclass of OSError, is of reading `values`, and complete.
        # The error of a write does not name the path.
        if error.filename is not None or type(error) is not OSError:
            raise
        if error.errno == errno.ENOSPC:
            size = sum(tensor.size_bytes for tensor in tensors)
            raise OSError(errno.ENOSPC, f"no space for {format_size(size)}", str(path)) from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def _append(out: IO[bytes], value: torch.Tensor) -> None:
    if value.numel():
        out.write(bytes_of(value).numpy().data)


# -- the files of an export ------------------------------------------------------------------------


class WeightFiles:
    """The files of one export. `finish` renames all files when they are on the drive. If the
    context exits before `finish`, an earlier export in the directory stays unchanged.

    writes: False on ranks other than 0, which write nothing.
    """

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
                # An error here must not replace the one that ended the export.
                with contextlib.suppress(OSError):
                    self._partial(file).unlink(missing_ok=True)

    @property
    def files(self) -> tuple[str, ...]:
        """Final names of the files, in order."""
        return tuple(dict.fromkeys(self._names.values()))

    def begin(self) -> None:
        """Make the directory, and remove partial files of a killed export. Raises: OSError."""
        if not self._writes:
            return
        check_link(self._target)
        self._target.mkdir(parents=True, exist_ok=True)
        for path in self._target.glob("model*.partial"):
            # Remove only partial files of an export: the directory may have other files.
            if path.stem == INDEX or _OURS.fullmatch(path.stem):
                path.unlink()

    def put(
        self, file: str, names: Iterable[str], size_bytes: int, write: Callable[[Path], object]
    ) -> None:
        """Call `write` with the path of a partial file, and record `names`, the file's tensors.
        Blocks until the file is on the drive. Raises: OSError.
        """
        self._names.update(dict.fromkeys(names, file))
        self._size_bytes += size_bytes
        if self._writes:
            # Make a new file first: `write` would open a file or follow a link of this name.
            write_new(self._partial(file), b"")
            write(self._partial(file))
            # `finish` renames only files that are on the drive.
            fsync_file(self._partial(file))

    def finish(self) -> None:
        """Rename the files, write the index if there are several files, and remove other files of
        an earlier export. Blocks.

        After a crash during the call, files may lack an index, but no index names files of another
        export.

        Raises: OSError.
        """
        if not self._writes:
            return
        index = self._target / INDEX
        if len(self.files) > 1:
            whole = {"metadata": {"total_size": self._size_bytes}, "weight_map": self._names}
            text = json.dumps(whole, indent=2, sort_keys=True)
            # Remove the old index before the renames: it would join tensors of two exports.
            index.unlink(missing_ok=True)
            # The removal must be on the drive before the first new name.
            fsync_directory(self._target)
        for file in self.files:
            self._partial(file).replace(self._target / file)
        fsync_directory(self._target)
        if len(self.files) > 1:
            # Write the index after all files: an index on the drive promises that files are there.
            write_durably(index, f"{text}\n".encode())
        # Remove stale files only after the renames, so that the earlier export stays until then.
        _remove_stale(self._target, set(self.files))
        fsync_directory(self._target)
        # The directory may be new: its name must survive a crash, too.
        fsync_directory(self._target.absolute().parent)

    def _partial(self, file: str) -> Path:
        return self._target / (file + ".partial")


def _remove_stale(target: Path, written: set[str]) -> None:
    """Remove the files that only an earlier export has: readers would take them for parts of the
    new export."""
    stale = [path for path in target.glob("model*.safetensors") if _OURS.fullmatch(path.name)]
    for path in stale:
        if path.name not in written:
            path.unlink()
    if len(written) == 1:
        # A single file has no index, and an old index would name files that do not exist.
        (target / INDEX).unlink(missing_ok=True)


def group_units(sizes: Sequence[int], shard_bytes_max: int) -> list[list[int]]:
    """Group consecutive units, by index, into files of at most `shard_bytes_max`. sizes: bytes of
    each unit."""
    groups: list[list[int]] = [[]]
    size = 0
    for index, size_bytes in enumerate(sizes):
        # A unit larger than the limit gets a separate, larger file. A part of 0 bytes (buffers)
        # never begins a file: buffers are in the file of the first unit.
        if groups[-1] and size_bytes and size + size_bytes > shard_bytes_max:
            groups.append([])
            size = 0
        groups[-1].append(index)
        size += size_bytes
    return groups


def shard_name(index: int, count: int) -> str:
    """Name file `index` of `count`."""
    return (
        "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
    )


# -- from a model ----------------------------------------------------------------------------------


def read_value(of: Engine, param: Param, *, masters: bool) -> torch.Tensor:
    """Read a parameter to the CPU: with `masters` the fp32 master if there is one, otherwise the
    value for forward. Collective. Blocks.
    """
    return of.states.read(param, 0) if masters and has_master(of.states, param) else of.read(param)


@dataclasses.dataclass(frozen=True)
class ExportPart:
    """Tensors that an export reads together and writes into one file.

    size_bytes: bytes of the tensors. read: function that returns the tensors by name; collective;
    blocks. beside_bytes: RAM that `read` takes in addition to the tensors.
    """

    size_bytes: int
    read: Callable[[], dict[str, torch.Tensor]]
    beside_bytes: int = 0


def write_safetensors(
    parts: Sequence[ExportPart],
    comm: Comm,
    directory: Path,
    *,
    shard_bytes_max: int | str,
) -> None:
    """Write the parts of a model in the layout of Hugging Face, one file in memory at a time.
    Blocks.

    The files get their final names when all files are on the drive; until then an earlier export in
    the directory stays. Collective; rank 0 writes.

    Raises: MemoryError before the first read; OSError naming the path; ValueError for a dtype that
    the format lacks; PeerFailed if another rank failed.
    """
    files = WeightFiles(directory, writes=comm.rank == 0)
    sizes = [part.size_bytes for part in parts]
    groups = group_units(sizes, parse_size(shard_bytes_max))
    # The allocator's settings for training do not suit a stream of tensors.
    heap = Heap.for_stream()
    with files, ProgressLine("writing weights", sum(sizes), shown=comm.rank == 0) as line:
        # Only rank 0 writes. Here the other ranks receive an error of rank 0; else they would wait
        # for rank 0 in the next read.
        with Rendezvous(comm, f"making {directory}"):
            # Every rank has the tensors of a file in memory, though only rank 0 writes.
            _check_memory(held_bytes([parts[part] for part in group] for group in groups))
            files.begin()
        for index, group in enumerate(groups):
            tensors: dict[str, torch.Tensor] = {}
            for part in group:
                # Read outside of a rendezvous, since a read is a collective.
                tensors.update(parts[part].read())
                heap.freed()
                line.advance(sizes[part])
            file = shard_name(index, len(groups))
            with Rendezvous(comm, f"writing {file}"):
                if tensors:
                    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
                    files.put(file, tensors, size_bytes, functools.partial(_write_all, tensors))
            # Free the tensors before the first read for the next file.
            del tensors
            heap.freed()
        with Rendezvous(comm, f"finishing {directory}"):
            files.finish()


def held_bytes(files: Iterable[Sequence[ExportPart]]) -> int:
    """Return the peak of RAM of an export with these files, which holds one file's tensors."""
    return max(
        sum(part.size_bytes for part in file) + max((part.beside_bytes for part in file), default=0)
        for file in files
    )


def _check_memory(held: int) -> None:
    left = memory_left_bytes()
    if held > left:
        raise MemoryError(
            f"an export would hold {format_size(held)} of tensors in memory (one file's), and "
            f"{format_size(left)} are free; give a smaller shard_bytes_max, or inf.save the model "
            "and write it by `infinity checkpoint export`, which streams"
        )


Rename = Callable[[str], "str | None"]
"""Function from a state dict's name to the name in the file; None leaves the tensor out."""


def module_parts(
    model: torch.nn.Module, of: Engine, *, masters: bool, rename: Rename = str
) -> list[ExportPart]:
    """Return one part for each unit, with names from the modules. A weight whose tiles are separate
    units belongs to the unit of the first tile. Persistent buffers form a part after the first
    part, and are in the same file.

    A tensor with several names gets the first name that `rename` does not leave out.

    Raises: ValueError if two tensors would get the same name, or for a dtype that safetensors
    lacks.
    """
    params = [param for unit in of.units for param in unit.params]
    wholes = wholes_of(params)
    names = {whole.params[0]: _renamed(whole.keys, rename) for whole in wholes}
    buffers = {name: rename(name) for name in persistent_buffers(model)}
    _check_names([*names.values(), *buffers.values()])
    check_written(
        of,
        [whole for whole in wholes if names[whole.params[0]] is not None],
        {name: held for name, held in persistent_buffers(model).items() if buffers[name]},
        masters=masters,
    )
    kept = {whole.params[0]: whole for whole in wholes if names[whole.params[0]] is not None}
    units = [
        {str(names[param]): kept[param] for param in unit.params if param in kept}
        for unit in of.units
    ]
    parts = [
        ExportPart(
            sum(whole_bytes(of, whole, masters=masters) for whole in unit.values()),
            functools.partial(_read_wholes, of, unit, masters=masters),
        )
        for unit in units
        if unit
    ]
    # Count buffers as 0 bytes, so that files are split at the same units as in earlier releases.
    beside = ExportPart(0, functools.partial(_read_buffers, model, buffers))
    return [*parts[:1], beside, *parts[1:]]


def _renamed(keys: Iterable[str], rename: Rename) -> str | None:
    return next((name for name in map(rename, keys) if name is not None), None)


def _check_names(names: Iterable[str | None]) -> None:
    counts = Counter(name for name in names if name is not None)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(f"two tensors would get the name {twice[0]} in an export's files")


def _read_buffers(
    model: torch.nn.Module, names: Mapping[str, str | None]
) -> dict[str, torch.Tensor]:
    found = buffers_of(model)
    return {name: found[key] for key, name in names.items() if name is not None}


def _read_wholes(
    of: Engine, unit: Mapping[str, Whole], *, masters: bool
) -> dict[str, torch.Tensor]:
    read = functools.partial(read_value, of, masters=masters)
    return {name: whole.merged(read) for name, whole in unit.items()}


def check_written(
    of: Engine, wholes: Iterable[Whole], buffers: Mapping[str, torch.Tensor], *, masters: bool
) -> None:
    """Raise ValueError naming the first of these tensors that safetensors cannot represent."""
    check_kept(buffers.items(), "safetensors")
    params = {param: whole for whole in wholes for param in whole.params}
    tensors = [
        FileTensor(whole.name, param.dtype, whole.shape)
        for param, whole in params.items()
        if not (masters and has_master(of.states, param))
    ]
    tensors += [FileTensor(name, held.dtype, tuple(held.shape)) for name, held in buffers.items()]
    check_dtypes(tensors, way_out=f"{_WAY_OUT}, or give names= a function that omits it")


def whole_bytes(of: Engine, whole: Whole, *, masters: bool) -> int:
    """Return the bytes that a tensor takes in the file."""
    return sum(
        param.numel * (4 if masters and has_master(of.states, param) else param.dtype.itemsize)
        for param in whole.params
    )


def _write_all(tensors: dict[str, torch.Tensor], path: Path) -> None:
    described = [
        FileTensor(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()
    ]
    # Use the order of the format's reference library, so that files are identical byte for byte.
    described.sort(key=file_order)
    write_file(path, described, (tensors[each.name] for each in described))


# -- from a checkpoint -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Exported:
    """Result of an export. files: names of the files. size_bytes: bytes of all tensors."""

    files: tuple[str, ...]
    tensors: int
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class _SavedTensor(FileTensor):
    """A tensor of a checkpoint. saved: a parameter, or the tiles of a weight as rows of tiles; or
    empty for a buffer, whose value is in memory.
    """

    saved: tuple[tuple[SavedParam, ...], ...]
    value: torch.Tensor | None = None

    @property
    def parts(self) -> Iterator[SavedParam]:
        return itertools.chain.from_iterable(self.saved)


class ExportJob:
    """An export of a checkpoint without a model, chunk by chunk, in the layout of
    `inf.export_safetensors`.

        header  ->  each parameter: read its chunks ahead, check them, cast, append

    masters: write the fp32 master of a parameter if the checkpoint has one, otherwise the value for
    forward. dtype: dtype to which the export rounds floating parameters, but no buffers; None: no
    rounding.

    Raises: ValueError for a dtype that safetensors lacks.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, masters: bool = False, dtype: torch.dtype | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._masters = masters
        self._dtype = dtype
        data = checkpoint.attachment("buffers", 0)
        # Write rank 0's buffers, as an export from a model does.
        buffers = read_buffers(data) if data is not None else {}
        self._buffers = [
            _SavedTensor(name, value.dtype, tuple(value.shape), (), value)
            for name, value in buffers.items()
        ]
        flats = enumerate(checkpoint.flats)
        saved = [SavedParam(entry, index, flat) for index, flat in flats for entry in flat.params]
        # Tiles are separate units; export the tiles of a module together.
        units = itertools.groupby(
            saved, key=lambda each: tiled_module_name(each.entry.name) or each.flat.unit
        )
        self._units = [self._tensors_of(list(unit)) for _, unit in units]
        everything = [*self._buffers, *itertools.chain.from_iterable(self._units)]
        check_dtypes(everything, way_out=f"{_WAY_OUT}; {_LEAVE_OUT}")
        self.size_bytes = sum(tensor.size_bytes for tensor in everything)
        """Bytes of all tensors."""

    def export(
        self,
        target: Path,
        *,
        shard_bytes_max: int,
        progress: Callable[[int], object] = lambda _size: None,
    ) -> Exported:
        """Write all tensors. progress: called with the bytes of each written part. Blocks.

        When all files are on the drive, the files get their final names, and other files of an
        earlier export are removed.

        Raises: OSError naming the path; ChecksumError naming the damage.
        """
        # Check before the first write, so that a missing file raises immediately.
        self._checkpoint.check_files()
        sizes = [sum(tensor.size_bytes for tensor in unit) for unit in self._units]
        groups = group_units(sizes, shard_bytes_max)
        count = 0
        files = WeightFiles(target)
        with files:
            files.begin()
            for index, group in enumerate(groups):
                units = [self._units[unit] for unit in group] if self._units else []
                tensors = [tensor for unit in units for tensor in unit]
                if index == 0:
                    tensors += self._buffers
                count += len(tensors)
                if tensors:
                    size_bytes = sum(tensor.size_bytes for tensor in tensors)
                    write = functools.partial(
                        self._write, sorted(tensors, key=file_order), progress
                    )
                    names = [tensor.name for tensor in tensors]
                    files.put(shard_name(index, len(groups)), names, size_bytes, write)
            files.finish()
        return Exported(files.files, count, self.size_bytes)

    @property
    def described(self) -> list[FileTensor]:
        """All tensors, in the order of `tensors`."""
        return [*self._buffers, *itertools.chain.from_iterable(self._units)]

    def tensors(
        self, progress: Callable[[int], object] = lambda _size: None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor with its name, and read chunks ahead. One tensor is in memory at a
        time.

        Raises: OSError naming the path; ChecksumError naming the damage.
        """
        self._checkpoint.check_files()
        reader = ChunkReader(self._checkpoint, self._sections())
        try:
            for tensor in [*self._buffers, *itertools.chain.from_iterable(self._units)]:
                parts = self._values_of([tensor], reader, progress)
                # A tensor without elements has no parts.
                values = [torch.empty(0, dtype=tensor.dtype), *(p.reshape(-1) for p in parts)]
                yield tensor.name, torch.cat(values).view(tensor.shape)
        finally:
            reader.close()

    def _tensors_of(self, unit: Sequence[SavedParam]) -> list[_SavedTensor]:
        """Return the tensors of a unit's parameters; for the tiles of a module, the whole weights.
        """
        weights: dict[str, list[SavedParam]] = {}
        for each in unit:
            weights.setdefault(whole_name(each.entry.name) or each.entry.name, []).append(each)
        return [self._tensor_of(name, saved) for name, saved in weights.items()]

    def _tensor_of(self, name: str, parts: Sequence[SavedParam]) -> _SavedTensor:
        first = parts[0].entry
        if name == first.name:
            return _SavedTensor(name, self._dtype_of(parts[0]), first.shape, ((parts[0],),))
        rows: dict[int, list[SavedParam]] = {}
        for each in parts:
            rows.setdefault(tile_index(each.entry.name)[0], []).append(each)
        grid = tuple(tuple(row) for row in rows.values())
        shape = (
            sum(row[0].entry.shape[0] for row in grid),
            sum(each.entry.shape[1] for each in grid[0]),
            *first.shape[2:],
        )
        dtypes = [self._dtype_of(each) for each in parts]
        # Some tiles may have masters and others not; the wider dtype represents both exactly.
        return _SavedTensor(name, functools.reduce(torch.promote_types, dtypes), shape, grid)

    def _dtype_of(self, saved: SavedParam) -> torch.dtype:
        own = torch.float32 if self._has_master(saved) else dtype_of(saved.flat.dtype)
        # Never round whole numbers (token ids, counts) to a floating dtype.
        rounds = self._dtype is not None and kind_of(own) == "floating"
        return self._dtype if self._dtype is not None and rounds else own

    def _has_master(self, saved: SavedParam) -> bool:
        return self._masters and saved.flat.state_format.master is not Master.RAW

    def _write(
        self, tensors: Sequence[_SavedTensor], progress: Callable[[int], object], path: Path
    ) -> None:
        # Without masters only section 0 is read: 2 of 12 bytes.
        reader = ChunkReader(self._checkpoint, self._sections())
        try:
            write_file(path, tensors, self._values_of(tensors, reader, progress))
        finally:
            reader.close()

    def _values_of(
        self,
        tensors: Sequence[_SavedTensor],
        reader: ChunkReader,
        progress: Callable[[int], object],
    ) -> Iterator[torch.Tensor]:
        # Request chunks in the order in which the loop below takes them.
        chunks = reader.read(
            (
                (saved, piece)
                for saved in itertools.chain.from_iterable(tensor.parts for tensor in tensors)
                for piece in self._checkpoint.pieces(saved, 0, saved.entry.numel)
            ),
            LOOK_AHEAD,
        )
        for tensor in tensors:
            if tensor.value is not None:
                yield tensor.value
                progress(tensor.size_bytes)
                continue
            for row in tensor.saved:
                tiles = []
                for saved in row:
                    values = self._values(saved, tensor.dtype, chunks, progress)
                    if len(row) == 1:
                        yield from values
                    else:
                        # These tiles cut the inputs, so each row of the file has a part of each.
                        tiles.append(torch.cat(list(values)).view(saved.entry.shape))
                if tiles:
                    yield torch.cat(tiles, dim=1)

    def _values(
        self,
        saved: SavedParam,
        dtype: torch.dtype,
        chunks: Iterator[tuple[Piece, list[Bytes]]],
        progress: Callable[[int], object],
    ) -> Iterator[torch.Tensor]:
        remaining = saved.entry.numel
        while remaining:
            piece, arrays = next(chunks)
            value = self._value(saved, dtype, arrays, piece.start, piece.numel)
            yield value
            progress(value.nbytes)
            remaining -= piece.numel

    def _value(
        self, saved: SavedParam, dtype: torch.dtype, arrays: Sequence[Bytes], start: int, numel: int
    ) -> torch.Tensor:
        flat = saved.flat
        form = flat.state_format
        if self._has_master(saved):
            given = [
                torch.from_numpy(slice_of(flat.sections[s], arrays[s], start, numel))
                for s in form.master_sections
            ]
            found = decode_master(form, given)
        else:
            given = [torch.from_numpy(slice_of(flat.sections[0], arrays[0], start, numel))]
            found = given[0].view(dtype_of(flat.dtype))
        return found.to(dtype)

    def _sections(self) -> list[int]:
        wanted = {0}
        for flat in self._checkpoint.flats if self._masters else ():
            wanted.update(flat.state_format.master_sections)
        return sorted(wanted)
