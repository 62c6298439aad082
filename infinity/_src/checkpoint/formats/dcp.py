"""Reads and writes checkpoints of torch.distributed.checkpoint (FileSystemWriter), without running
pickles and with one tensor in memory at a time.

    .metadata     a pickle: names -> shapes, dtypes, boxes, and each box's range of a file
    *.distcp      boxes of tensors, one `torch.save` after another; read with weights_only=True

A box is a rectangular part of a tensor. torch's FileSystemReader calls `pickle.load` on
`.metadata`, which executes any code in the file. This module reads `.metadata` into inert records,
and checks them. torch's FileSystemWriter keeps every tensor in memory until its file is complete.
This module writes each value immediately, and `.metadata` last. Optimizer states have these names:

    optim.state.<parameter>.exp_avg        a tensor of the parameter's shape
    optim.state.<parameter>.step           a tensor of one number, fp32, as torch.optim keeps it
    optim.state.<parameter>.master only if model.<parameter> has no master
    optim.param_groups.<i>.lr              as torch.distributed.checkpoint.state_dict does
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from infinity._src.base.atomic_file import fsync_directory, open_new, publish, write_durably
from infinity._src.base.dtypes import BY_NAME, kind_of
from infinity._src.base.paths import check_link
from infinity._src.base.torch_compat import dcp_storage_info
from infinity._src.checkpoint.formats.load import MASTER, Held
from infinity._src.checkpoint.formats.safe_pickle import InertUnpickler, Record, load_tensors
from infinity._src.checkpoint.formats.safetensors_writer import Whole
from infinity._src.optim.base import Optimizer
from infinity._src.params.materialize import NamedTensors
from infinity._src.params.unit import Param

METADATA = ".metadata"

_META = "torch.distributed.checkpoint.metadata"
_TENSOR, _BYTES, _INDEX = (
    f"{_META}.TensorStorageMetadata",
    f"{_META}.BytesStorageMetadata",
    f"{_META}.MetadataIndex",
)
_STORAGE = "torch.distributed.checkpoint.filesystem._StorageInfo"
_RECORDS = (
    f"{_META}.Metadata", f"{_META}.ChunkStorageMetadata",
    f"{_META}.TensorProperties", f"{_META}.StorageMeta",
    _TENSOR, _BYTES, _INDEX, f"{_META}._MEM_FORMAT_ENCODING", _STORAGE,
    "torch.serialization._get_layout",
    # Some versions of Python pickle the members of an enum as a call of getattr. The unpickler
    # makes a record instead of the call.
    "builtins.getattr",
    "pathlib.PosixPath", "pathlib.WindowsPath",
    "pathlib._local.PosixPath", "pathlib._local.WindowsPath",
)  # fmt: skip
# Names that the unpickler replaces with harmless objects instead of records.
_VALUES: dict[str, Any] = {
    "torch.Size": tuple,
    "collections.OrderedDict": dict,
    **{f"torch.{name}": dtype for name, dtype in BY_NAME.items()},
}


@dataclasses.dataclass(frozen=True)
class FileRange:
    """A range of bytes in a file."""

    file: Path
    offset: int
    length: int


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor, and the range of a file with the part's bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    range: FileRange


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint, stored as boxes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]


class DCPFiles(NamedTensors):
    """A checkpoint of torch.distributed.checkpoint: `tensors` and `objects` (numbers, strings) by
    name.

    One file is open at a time.

    The constructor reads and checks `.metadata`.

    Raises: FileNotFoundError without `.metadata`; ValueError if `.metadata` names a class or
    function that the format does not need, names a file outside of the directory, or describes a
    tensor that is incomplete in the files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self.label = directory, str(directory)
        self._sizes: dict[str, int] = {}
        self._open: tuple[Path, BinaryIO] | None = None
        self.tensors: dict[str, Stored] = {}
        self.objects: dict[str, FileRange] = {}
        check_link(directory)
        path = directory / METADATA
        if not path.is_file():
            raise FileNotFoundError(
                f"{directory} has no {METADATA}: it is no checkpoint of "
                "torch.distributed.checkpoint, or incomplete"
            )
        try:
            # The unpickler runs no code: it makes a record for each known name, and refuses others.
            root = InertUnpickler(path.read_bytes(), records=_RECORDS, values=_VALUES).load()
            self._take(root)
        except OSError:
            raise
        # A damaged or hostile pickle can make the unpickler raise any exception.
        except Exception as error:
            raise ValueError(f"{path} is refused: {error}") from error

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, name: str) -> torch.Tensor:
        """Read the boxes of a tensor, and assemble the tensor. Takes memory for the tensor and one
        box. Blocks.

        Raises: OSError; ValueError for contents that differ from `.metadata`.
        """
        stored = self.tensors[name]
        whole: torch.Tensor | None = None
        for box in stored.boxes:
            part = self._load(box.range)
            if (
                not isinstance(part, torch.Tensor)
                or tuple(part.shape) != box.sizes
                or part.dtype != stored.dtype
            ):
                raise ValueError(
                    f"{box.range.file} has another {name} than {METADATA} says: {_kind(part)}"
                )
            # A box with the whole tensor is the result; a copy would take memory twice.
            if box.sizes == stored.shape:
                return part
            if whole is None:
                whole = torch.empty(stored.shape, dtype=stored.dtype)
            whole[
                tuple(
                    slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True)
                )
            ] = part
        # The constructor has checked that boxes cover the tensor, so at least one box exists.
        assert whole is not None, name
        return whole

    def read_object(self, name: str) -> Any:
        """Read a number or a string. Raises: OSError; ValueError for an object that only an
        unrestricted unpickler can read.
        """
        return self._load(self.objects[name])

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _load(self, part: FileRange) -> Any:
        if self._open is None or self._open[0] != part.file:
            self.close()
            self._open = (part.file, part.file.open("rb"))
        try:
            return load_tensors(io.BufferedReader(_Part(self._open[1], part)))
        except ValueError as error:
            raise ValueError(
                f"{part.length} bytes at {part.offset} of {part.file} are refused: {error}"
            ) from error

    # -- checking ----------------------------------------------------------------------------------

    def _take(self, root: Any) -> None:
        entries = _field(root, f"{_META}.Metadata", "state_dict_metadata", dict)
        ranges: dict[tuple[str, tuple[int, ...] | None], FileRange] = {}
        for index, info in _field(root, f"{_META}.Metadata", "storage_data", dict).items():
            offset = (
                index.state.get("offset")
                if isinstance(index, Record) and isinstance(index.state, dict)
                else None
            )
            ranges[
                _field(index, _INDEX, "fqn", str), None if offset is None else _numbers(offset)
            ] = self._range(info)
        for name, entry in entries.items():
            if not isinstance(name, str) or not isinstance(entry, Record):
                raise ValueError(f"{name!r} is no tensor name")
            if entry.kind == _BYTES:
                if (name, None) in ranges:
                    self.objects[name] = ranges[name, None]
            else:
                self.tensors[name] = _stored(name, entry, ranges)

    def _range(self, info: Any) -> FileRange:
        file = _field(info, _STORAGE, "relative_path", str)
        offset, length = (_field(info, _STORAGE, name, int) for name in ("offset", "length"))
        # A hostile `.metadata` must not lead to files outside of its directory.
        if Path(file).name != file or file in ("", ".."):
            raise ValueError(
                f"it points to {file!r}; files must lie beside {METADATA}"
            )
        if info.state.get("transform_descriptors"):
            raise ValueError(
                f"{file} is transformed by {info.state['transform_descriptors']}, which is not "
                "supported"
            )
        if file not in self._sizes:
            self._sizes[file] = (self._directory / file).stat().st_size
        if not 0 <= offset <= offset + length <= self._sizes[file]:
            raise ValueError(
                f"it points to bytes {offset} to {offset + length} of {file}, which has "
                f"{self._sizes[file]}"
            )
        return FileRange(self._directory / file, offset, length)


def _stored(
    name: str, entry: Record, ranges: dict[tuple[str, tuple[int, ...] | None], FileRange]
) -> Stored:
    shape = _numbers(_field(entry, _TENSOR, "size", tuple))
    properties = _field(entry, _TENSOR, "properties", Record)
    dtype = (
        properties.state[0] if isinstance(properties.state, tuple) and properties.state else None
    )
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has no dtype")
    boxes = []
    for chunk in _field(entry, _TENSOR, "chunks", list):
        offsets, sizes = (
            _numbers(_field(chunk, f"{_META}.ChunkStorageMetadata", which, tuple))
            for which in ("offsets", "sizes")
        )
        found = ranges.get((name, offsets)) or ranges.get((name, None))
        if found is None:
            raise ValueError(f"no file has the part of {name} at {offsets}")
        boxes.append(Box(offsets, sizes, found))
    if not _tile(boxes, shape):
        raise ValueError(f"the parts of {name} do not form a tensor of shape {shape}")
    return Stored(shape, dtype, tuple(boxes))


def _tile(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    if any(len(box.offsets) != len(shape) or len(box.sizes) != len(shape) for box in boxes):
        return False
    if any(
        low + size > whole
        for box in boxes
        for low, size, whole in zip(box.offsets, box.sizes, shape, strict=True)
    ):
        return False
    # Boxes that have the tensor's number of elements, and do not overlap (checked below), leave no
    # gap.
    if not boxes or sum(math.prod(box.sizes) for box in boxes) != math.prod(shape):
        return False
    low = np.array([box.offsets for box in boxes], dtype=np.int64)
    high = low + np.array([box.sizes for box in boxes], dtype=np.int64)
    return not any(
        ((low[index] < high[index + 1 :]) & (low[index + 1 :] < high[index])).all(axis=1).any()
        for index in range(len(boxes) - 1)
    )


def _field(record: Any, kind: str, name: str, wanted: type) -> Any:
    if not isinstance(record, Record) or record.kind != kind or not isinstance(record.state, dict):
        raise ValueError(f"expected a {kind}, not a {_kind(record)}")
    value = record.state.get(name)
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise ValueError(f"{name} of a {kind} is a {_kind(value)}")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or any(
        type(value) is not int or value < 0 for value in values
    ):
        raise ValueError(f"{values!r} is no shape or offset")
    return values


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} tensor of shape {tuple(value.shape)}"
    return value.kind if isinstance(value, Record) else type(value).__name__


class _Part(io.RawIOBase):
    """File object for a range of an open file, since torch.load reads to the end of a file."""

    def __init__(self, file: BinaryIO, part: FileRange) -> None:
        self._file, self._start, self._length, self._at = file, part.offset, part.length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        # Stop at the end of the range, which torch.load takes for the end of the file.
        target = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(target)  # type: ignore[attr-defined]
        self._at += count
        return int(count)


FILE = "__0_0.distcp"
_FORMAT_VERSION = "1.0.0"

Key = tuple[str | int, ...]
"""Path of a value in the checkpoint's nested dict: ("model", "layers.0.weight"). An int is an index
in a list.
"""


# -- writing ---------------------------------------------------------------------------------------


class DCPWriter:
    """Writer of one checkpoint. No reader can open the checkpoint before `finish`.

    Raises: ValueError if the directory has a checkpoint already; OSError naming the path.
    """

    def __init__(self, directory: Path) -> None:
        check_link(directory)
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / METADATA).exists():
            raise ValueError(
                f"{directory} has a checkpoint already ({METADATA}); choose another directory, or "
                "move it away"
            )
        self._directory = directory
        self._partial = directory / (FILE + ".partial")
        # The data file has a temporary name until `finish` renames it and writes `.metadata`.
        self._stream = open_new(self._partial)
        self._entries: dict[str, Any] = {}
        self._ranges: dict[Any, Any] = {}
        self._paths: dict[str, Key] = {}

    def put(self, key: Key, value: Any) -> None:
        """Append a CPU tensor, or another object. Blocks.

        Raises: OSError; ValueError if an earlier value has the same name.
        """
        from torch.distributed.checkpoint import metadata as dcp

        name = ".".join(map(str, key))
        if name in self._entries:
            raise ValueError(
                f"two values would both be called {name} in {self._directory}; give other `keys`"
            )
        offset: torch.Size | None = None
        if isinstance(value, torch.Tensor):
            offset = torch.Size([0] * value.ndim)
            chunk = dcp.ChunkStorageMetadata(offset, value.shape)
            self._entries[name] = dcp.TensorStorageMetadata(
                dcp.TensorProperties(value.dtype), value.shape, [chunk]
            )
        else:
            self._entries[name] = dcp.BytesStorageMetadata()
        # Write each value immediately; torch's writer keeps all tensors until the file is complete.
        start = self._stream.tell()
        torch.save(value, self._stream)
        index = dcp.MetadataIndex(name, offset, 0 if offset is not None else None)
        self._ranges[index] = dcp_storage_info(FILE, start, self._stream.tell() - start)
        self._paths[name] = key

    def finish(self) -> None:
        """Publish the checkpoint. When the call returns, the checkpoint is on the drive and
        survives a crash. Blocks. Raises: OSError.
        """
        from torch.distributed.checkpoint import metadata as dcp

        self._stream.close()
        # Publish the data file before `.metadata`: a directory with `.metadata` is a checkpoint.
        publish(self._partial, self._directory / FILE)
        fsync_directory(self._directory)
        whole = dcp.Metadata(
            self._entries,
            planner_data=self._paths,
            storage_data=self._ranges,
            storage_meta=dcp.StorageMeta(checkpoint_id=os.fspath(self._directory)),
            version=_FORMAT_VERSION,
        )
        write_durably(self._directory / METADATA, pickle.dumps(whole))
        fsync_directory(self._directory.absolute().parent)

    def abandon(self) -> None:
        """Remove the partial files. Idempotent; does nothing after `finish`. Raises: OSError."""
        self._stream.close()
        for name in (FILE, METADATA):
            (self._directory / (name + ".partial")).unlink(missing_ok=True)


# -- optimizer states ------------------------------------------------------------------------------


class ModelPart(NamedTensors):
    """Tensors of a checkpoint under one key. Names are the model's, without the key."""

    def __init__(self, files: DCPFiles, key: str) -> None:
        self._files = files
        self._prefix = f"{key}." if key else ""
        self.label = f"{files.label} ({key})" if key else files.label

    def names(self) -> Iterable[str]:
        return [
            name.removeprefix(self._prefix)
            for name in self._files.names()
            if name.startswith(self._prefix)
        ]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.shape(self._prefix + name)

    def dtype(self, name: str) -> torch.dtype:
        return self._files.dtype(self._prefix + name)

    def read(self, name: str) -> torch.Tensor:
        return self._files.read(self._prefix + name)


class StatePart:
    """Optimizer states of a checkpoint under one key: a `StateSource`."""

    def __init__(self, files: DCPFiles, key: str) -> None:
        self._files = files
        self._prefix = f"{key}.state."
        self.label = files.label

    @property
    def names(self) -> list[str]:
        return [
            name
            for name in (*self._files.tensors, *self._files.objects)
            if name.startswith(self._prefix)
        ]

    def name_of(self, param: str, state: str) -> str:
        return f"{self._prefix}{param}.{state}"

    def fault(self, name: str, shape: tuple[int, ...] | None) -> str:
        files = self._files
        if name in files.objects:
            return f"{name} is no tensor in the file" if shape is not None else ""
        if shape is None:
            return "" if files.shape(name) in ((), (1,)) else f"{name} is no number in the file"
        there = files.dtype(name)
        if files.shape(name) == shape and kind_of(there) == "floating":
            return ""
        found = f"{name} is a {there} tensor of shape {files.shape(name)} in the file"
        return f"{found}, and of {shape} in the model"

    def read(self, name: str) -> Any:
        files = self._files
        return files.read(name) if name in files.tensors else files.read_object(name)


def _state_of(every: Mapping[Param, Held], state: str, param: Param) -> torch.Tensor:
    value: torch.Tensor = every[param].state[state]
    return value


def tensors_of(
    whole: Whole, every: Mapping[Param, Held], keys: tuple[str, str], *, with_master: bool
) -> Iterator[tuple[Key, torch.Tensor]]:
    """Yield the states of a parameter, or of a tiled weight, each with its key in the checkpoint.
    Collective. Blocks.

    every: the parameters that an optimizer holds, with their states. For a tiled weight, states
    that are numbers are taken from the first tile.

    Raises: ValueError if an optimizer holds some tiles of a weight but not all.
    """
    held = [every[param] for param in whole.params if param in every]
    if not held:
        return
    if len(held) < len(whole.params):
        raise ValueError(
            f"the optimizer holds some tiles of {whole.name}, not all; give it all tiles, or "
            "export with opt=None"
        )
    for state in (*held[0].tensors, *held[0].numbers):
        if state == MASTER and not with_master:
            continue
        if state in held[0].tensors:
            tensor = whole.merged(functools.partial(_state_of, every, state))
        else:
            value = held[0].state[state]
            # torch.optim keeps step counts as fp32 tensors, which are exact up to 2^24.
            tensor = (
                value
                if isinstance(value, torch.Tensor)
                else torch.tensor(value, dtype=torch.float32)
            )
        yield (keys[1], "state", whole.name, state), tensor


def groups_of(optimizer: Optimizer, key: str) -> Iterator[tuple[Key, Any]]:
    """Yield the hyper-parameters of each group, with tensors converted to numbers."""
    for index, group in enumerate(optimizer.torch_groups()):
        for name, value in group.items():
            # Parameters are objects of this process, so write their names.
            if name == "params":
                value = list(dict.fromkeys(param.infinity_link.param.keys[0] for param in value))
            elif isinstance(value, torch.Tensor):
                value = value.item()
            yield (key, "param_groups", index, name), value
