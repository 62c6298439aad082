"""Reading checkpoints of torch.distributed.checkpoint (FileSystemWriter), without unpickling what their `.metadata` says.

    .metadata     a pickle: names -> shapes, dtypes, boxes, and where each box lies. Read into inert records, then checked
    *.distcp      boxes of tensors, one `torch.save` after another. Read with torch.load(weights_only=True)

torch's own FileSystemReader calls `pickle.load` on `.metadata`, which runs whatever a file says.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from infinity._src.checkpoint.safe_pickle import InertUnpickler, Record, load_tensors

METADATA = ".metadata"

_META = "torch.distributed.checkpoint.metadata"
_TENSOR, _BYTES, _INDEX = f"{_META}.TensorStorageMetadata", f"{_META}.BytesStorageMetadata", f"{_META}.MetadataIndex"
_STORAGE = "torch.distributed.checkpoint.filesystem._StorageInfo"
_RECORDS = (
    *(f"{_META}.{name}" for name in ("Metadata", "ChunkStorageMetadata", "TensorProperties", "StorageMeta")),
    _TENSOR, _BYTES, _INDEX, f"{_META}._MEM_FORMAT_ENCODING", _STORAGE,
    "torch.serialization._get_layout",
    "builtins.getattr",  # how some Pythons pickle the members of an enum; it stays a record, as all of these
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
)  # fmt: skip
_VALUES: dict[str, Any] = {
    "torch.Size": tuple,
    "collections.OrderedDict": dict,
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Bytes of a file."""

    file: Path
    offset: int
    length: int


@dataclasses.dataclass(frozen=True)
class Box:
    """A part of a tensor, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]


class DCPFiles:
    """A checkpoint of torch.distributed.checkpoint: `tensors` and `objects` (numbers, strings) by name.

    One file is open at a time.

    Opening reads and checks `.metadata`. Raises: FileNotFoundError without one; ValueError for one that names what it has no
    need of, points out of its directory, or describes tensors that its files do not hold whole.
    """

    def __init__(self, directory: Path) -> None:
        self.label = str(directory)
        self._directory = directory
        self._sizes: dict[str, int] = {}
        self._open: tuple[Path, BinaryIO] | None = None
        self.tensors: dict[str, Stored] = {}
        self.objects: dict[str, Place] = {}
        path = directory / METADATA
        if not path.is_file():
            raise FileNotFoundError(
                f"{directory} has no {METADATA}: it is no checkpoint of torch.distributed.checkpoint, or not whole"
            )
        try:
            root = InertUnpickler(path.read_bytes(), records=_RECORDS, values=_VALUES).load()
            self._take(root)
        except OSError:
            raise
        except Exception as error:  # whatever a damaged or hostile pickle makes the unpickler raise
            raise ValueError(f"{path} is refused: {error}") from error

    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self.tensors[name].shape

    def is_floating_point(self, name: str) -> bool:
        """Whether a tensor is of a floating dtype."""
        return self.tensors[name].dtype.is_floating_point

    def read(self, name: str) -> torch.Tensor:
        """A tensor, put together from its boxes; those are in memory one at a time besides. Blocks.

        Raises: OSError; ValueError for contents that are not what `.metadata` says.
        """
        stored = self.tensors[name]
        whole: torch.Tensor | None = None
        for box in stored.boxes:
            part = self._load(box.place)
            if not isinstance(part, torch.Tensor) or tuple(part.shape) != box.sizes or part.dtype != stored.dtype:
                raise ValueError(f"{box.place.file} does not hold {name} as {METADATA} says: {_kind(part)}")
            if box.sizes == stored.shape:
                return part
            if whole is None:
                whole = torch.empty(stored.shape, dtype=stored.dtype)
            whole[tuple(slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True))] = part
        assert whole is not None, name  # boxes cover the tensor
        return whole

    def read_object(self, name: str) -> Any:
        """A number or a string. Raises: OSError; ValueError for anything that would have to be unpickled freely."""
        return self._load(self.objects[name])

    def close(self) -> None:
        """Close the file that is open. Idempotent."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _load(self, place: Place) -> Any:
        if self._open is None or self._open[0] != place.file:
            self.close()
            self._open = (place.file, place.file.open("rb"))
        try:
            return load_tensors(io.BufferedReader(_Part(self._open[1], place)))
        except ValueError as error:
            raise ValueError(f"{place.length} bytes at {place.offset} of {place.file} are refused: {error}") from error

    # -- checking ----------------------------------------------------------------------------------------------------------

    def _take(self, root: Any) -> None:
        entries = _field(root, f"{_META}.Metadata", "state_dict_metadata", dict)
        places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
        for index, info in _field(root, f"{_META}.Metadata", "storage_data", dict).items():
            offset = index.state.get("offset") if isinstance(index, Record) and isinstance(index.state, dict) else None
            places[_field(index, _INDEX, "fqn", str), None if offset is None else _numbers(offset)] = self._place(info)
        for name, entry in entries.items():
            if not isinstance(name, str) or not isinstance(entry, Record):
                raise ValueError(f"{name!r} is no name of a tensor")
            if entry.kind == _BYTES:
                if (name, None) in places:
                    self.objects[name] = places[name, None]
            else:
                self.tensors[name] = _stored(name, entry, places)

    def _place(self, info: Any) -> Place:
        file = _field(info, _STORAGE, "relative_path", str)
        offset, length = (_field(info, _STORAGE, name, int) for name in ("offset", "length"))
        if Path(file).name != file or file in ("", ".."):
            raise ValueError(f"it points to {file!r}; files lie beside {METADATA}, so a path is refused")
        if info.state.get("transform_descriptors"):
            raise ValueError(f"{file} is transformed by {info.state['transform_descriptors']}, which is not read here")
        if file not in self._sizes:
            self._sizes[file] = (self._directory / file).stat().st_size
        if not 0 <= offset <= offset + length <= self._sizes[file]:
            raise ValueError(f"it points to bytes {offset} to {offset + length} of {file}, which has {self._sizes[file]}")
        return Place(self._directory / file, offset, length)


def _stored(name: str, entry: Record, places: dict[tuple[str, tuple[int, ...] | None], Place]) -> Stored:
    shape = _numbers(_field(entry, _TENSOR, "size", tuple))
    properties = _field(entry, _TENSOR, "properties", Record)
    dtype = properties.state[0] if isinstance(properties.state, tuple) and properties.state else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has no dtype")
    boxes = []
    for chunk in _field(entry, _TENSOR, "chunks", list):
        offsets, sizes = (
            _numbers(_field(chunk, f"{_META}.ChunkStorageMetadata", which, tuple)) for which in ("offsets", "sizes")
        )
        place = places.get((name, offsets)) or places.get((name, None))
        if place is None:
            raise ValueError(f"the part of {name} at {offsets} lies nowhere")
        boxes.append(Box(offsets, sizes, place))
    if not _tile(boxes, shape):
        raise ValueError(f"the parts of {name} do not make up a tensor of shape {shape}")
    return Stored(shape, dtype, tuple(boxes))


def _tile(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes cover a tensor without a gap or an overlap."""
    if any(len(box.offsets) != len(shape) or len(box.sizes) != len(shape) for box in boxes):
        return False
    if any(low + size > whole for box in boxes for low, size, whole in zip(box.offsets, box.sizes, shape, strict=True)):
        return False
    if not boxes or sum(math.prod(box.sizes) for box in boxes) != math.prod(shape):
        return False
    low = np.array([box.offsets for box in boxes], dtype=np.int64)
    high = low + np.array([box.sizes for box in boxes], dtype=np.int64)
    return not any(
        ((low[index] < high[index + 1 :]) & (low[index + 1 :] < high[index])).all(axis=1).any() for index in range(len(boxes) - 1)
    )


def _field(record: Any, kind: str, name: str, wanted: type) -> Any:
    """A field of a record, of the type that it must have."""
    if not isinstance(record, Record) or record.kind != kind or not isinstance(record.state, dict):
        raise ValueError(f"where a {kind} should be there is a {_kind(record)}")
    value = record.state.get(name)
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise ValueError(f"{name} of a {kind} is a {_kind(value)}")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r} is no shape or place in a tensor")
    return values


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} tensor of shape {tuple(value.shape)}"
    return value.kind if isinstance(value, Record) else type(value).__name__


class _Part(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, file: BinaryIO, place: Place) -> None:
        self._file, self._start, self._length, self._at = file, place.offset, place.length, 0

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
        target = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(target)  # type: ignore[attr-defined]
        self._at += count
        return int(count)


