"""Reads files of torch.save piece by piece, and neither runs nor imports anything in them.

    file = TorchFile(path, descriptors)
    stored = file.tensor(file.root["weight"])     checks dtype, shape and position
    stored.read_into(target, start)               reads elements

A file is a zip with uncompressed members: `data.pkl`, and one member for each storage. This module
unpickles `data.pkl` into plain data with an inert record for each tensor. `TorchFile.tensor`
accepts a tensor only if the storage has the size of the member, and the elements are inside the
storage; so no record in a file causes a read larger than the file. The zip has a CRC-32 of each
member. `TorchFile.check` compares these checksums; torch.load does not.

This module reads files with pread and never maps them. If a drive fails or a file is cut short,
pread raises an error, while access to mapped memory would end the process by a signal.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import stat
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import torch

from infinity._src.base.dtypes import BY_NAME
from infinity._src.checkpoint.formats.safe_pickle import InertUnpickler, Record

DESCRIPTORS_MAX = 256
"""Largest number of open files: a checkpoint of many ranks has more files than a process may open.
"""
CHECK_BYTES = 4 << 20
_DIMENSIONS_MAX = 64
_LOCAL_HEADER_BYTES = 30

_REBUILD, _REBUILD_UNTYPED = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_PARAMETERS = (
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
)
# Function that rebuilds a tensor with attributes. Arguments: (function, class, arguments of the
# function, attributes).
_WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"
_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter")
_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.BoolStorage": torch.bool,
    "torch.storage.UntypedStorage": torch.uint8,
}


class _Dict(dict[Any, Any]):
    """Stand-in for OrderedDict that ignores attributes (in a state dict the versions of modules).
    """

    def __setstate__(self, state: Any) -> None:
        pass


def _latin1(text: str, codec: str) -> bytes:
    """Decode bytes, which pickles of protocol 2 store as text. Raises: pickle.UnpicklingError."""
    if not isinstance(text, str) or codec != "latin1":
        raise pickle.UnpicklingError("its bytes are not written as torch.save writes them")
    return text.encode(codec)


_TENSORS = (_REBUILD, _REBUILD_UNTYPED, *_PARAMETERS, _WITH_ATTRIBUTES)
_RECORDS = (*_TENSORS, *_CLASSES, *_STORAGES)
_VALUES: dict[str, Any] = {
    "torch.Size": tuple,
    "collections.OrderedDict": _Dict,
    "_codecs.encode": _latin1,
    **{f"torch.{name}": dtype for name, dtype in BY_NAME.items()},
    # Pickles of protocol 2 name the module as Python 2 did, `__builtin__`.
    **{
        f"{module}.{kind.__name__}": kind
        for module in ("builtins", "__builtin__")
        for kind in (set, frozenset, complex)
    },
}


class _StorageId(tuple[Any, ...]):
    """The persistent id of a storage: ("storage", type, member, device, elements)."""

    __slots__ = ()


class _Unpickler(InertUnpickler):
    """Reads `data.pkl`, in which tensors refer to their storages."""

    def __init__(self, data: bytes, prefix: str) -> None:
        super().__init__(data, records=_RECORDS, values=_VALUES, prefix=prefix)

    def persistent_load(self, pid: Any, /) -> _StorageId:
        if not isinstance(pid, tuple):
            raise pickle.UnpicklingError("it refers to an object that is no storage")
        return _StorageId(pid)


class _Member(NamedTuple):
    """A member of the zip. offset: offset of the first byte in the file. size: number of bytes.
    crc: CRC-32 of the bytes; 0: the writer computed none.
    """

    offset: int
    size: int
    crc: int


@final
class Descriptors:
    """Cache of open files, least recently used first out. A context manager that closes all."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()

    def read_into(self, path: Path, offset: int, target: memoryview) -> None:
        """Fill `target` with the file's bytes from `offset` on. Blocks.

        Raises: OSError naming the path; ValueError if the file ends before `target` is full.
        """
        # The zip's directory in a hostile file may contain any offset.
        if offset < 0:
            raise ValueError(f"{path} is refused: it has a member at byte {offset}")
        done = 0
        try:
            descriptor = self._descriptor(path)
            while done < len(target):
                count = os.preadv(descriptor, [target[done:]], offset + done)
                if count == 0:
                    raise ValueError(
                        f"{path} ends at byte {offset + done}, before byte {offset + len(target)}: "
                        "it was cut short"
                    )
                done += count
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error

    def _descriptor(self, path: Path) -> int:
        if path not in self._open:
            while len(self._open) >= DESCRIPTORS_MAX:
                os.close(self._open.popitem(last=False)[1])
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._open.move_to_end(path)
        return self._open[path]

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Descriptors:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@final
class StoredTensor:
    """A tensor in a file: dtype, shape, and position of the elements in a member of the zip."""

    def __init__(
        self,
        file: TorchFile,
        member: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        first: int,
    ) -> None:
        self.file = file
        self.member = member
        self.dtype = dtype
        self.shape = shape
        self._strides = strides
        self._first = first

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def _is_contiguous(self) -> bool:
        return self.numel < 2 or self._strides == _contiguous(self.shape, like=self._strides)

    def read(self) -> torch.Tensor:
        """Read the whole tensor. Blocks. Raises: OSError, ValueError."""
        out = torch.empty(self.shape, dtype=self.dtype)
        if self._is_contiguous:
            self.read_into(out.view(-1), 0)
            return out
        span = torch.empty(_span(self.shape, self._strides), dtype=self.dtype)
        self._read(span, 0)
        return out.copy_(span.as_strided(self.shape, self._strides))

    def read_into(self, target: torch.Tensor, start: int) -> None:
        """Fill a contiguous vector with the elements from `start` on. Blocks.

        Raises: OSError; ValueError if the tensor is not contiguous in the file.
        """
        if not self._is_contiguous:
            raise ValueError(f"{self.file.path}: a vector has the strides {self._strides}")
        assert 0 <= start <= start + target.numel() <= self.numel
        if target.dtype is self.dtype:
            self._read(target, start)
        elif target.numel():
            same = torch.empty(target.numel(), dtype=self.dtype)
            self._read(same, start)
            target.copy_(same)

    def _read(self, target: torch.Tensor, start: int) -> None:
        if target.numel():
            data = target.view(torch.uint8).numpy().data
            self.file.read_into(self.member, (self._first + start) * self.dtype.itemsize, data)


@final
class TorchFile:
    """A file of torch.save, open for reading. root: the saved object as plain data and inert
    records; `tensor` and `plain` convert parts of it to values.

    prefix: beginning of further names ("package.") that the unpickler replaces with inert records.

    Raises: OSError; ValueError naming the path, for a damaged file and for refused names.
    """

    def __init__(self, path: Path, descriptors: Descriptors, *, prefix: str = "") -> None:
        self.path = path
        self._descriptors = descriptors
        try:
            found = _members(path, descriptors)
            self._top = _top_of(found)
            self._members = found
            data = self._bytes("data.pkl")
            if self._top + "byteorder" in found and self._bytes("byteorder") != b"little":
                raise ValueError("it was written with the other byte order")
            self.root = _Unpickler(data, prefix).load()
        except (OSError, MemoryError):
            raise
        # Damaged bytes can make zipfile and pickle raise any exception.
        except Exception as error:
            raise ValueError(f"{path} is refused: {_reason(error)}") from error

    def tensor(self, value: Any) -> StoredTensor:
        """Check a tensor in `root`, without reading elements. Raises: ValueError naming the path.
        """
        try:
            return self._tensor(value)
        except (TypeError, IndexError, KeyError, ValueError) as error:
            raise ValueError(f"{self.path} is refused: {_reason(error)}") from error

    def plain(self, value: Any) -> Any:
        """Convert a value in `root` to plain data, and read the tensors in it. Blocks.

        Raises: OSError; ValueError naming an object that is no plain data.
        """
        try:
            return self._plain(value, {}, set())
        except RecursionError:
            raise ValueError(f"{self.path} is refused: it is nested too deeply") from None

    def check(self, members: Iterable[str] | None = None) -> None:
        """Read members (None: all) and compare their checksums, if the file has any. Blocks.

        Raises: OSError; ValueError naming the file and the damaged member.
        """
        chosen = (
            self._members if members is None else {name: self._members[name] for name in members}
        )
        buffer = bytearray(min(CHECK_BYTES, max((m.size for m in chosen.values()), default=0)))
        for name, member in chosen.items():
            # torch's option `compute_crc32=False` writes no checksums.
            if not member.crc:
                continue
            crc = 0
            for at in range(0, member.size, len(buffer)):
                piece = memoryview(buffer)[: min(len(buffer), member.size - at)]
                self._descriptors.read_into(self.path, member.offset + at, piece)
                crc = zlib.crc32(piece, crc)
            if crc != member.crc:
                raise ValueError(
                    f"{self.path} is damaged: {name}, {member.size} bytes from {member.offset} on, "
                    f"has the CRC-32 {crc:08x}, not {member.crc:08x}; copy the file again"
                )

    def read_into(self, member: str, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes of a member from `offset` on. Blocks."""
        place = self._members[member]
        assert offset + len(target) <= place.size, (self.path, member, offset, len(target))
        self._descriptors.read_into(self.path, place.offset + offset, target)

    def _bytes(self, name: str) -> bytes:
        member = self._top + name
        data = bytearray(self._members[member].size)
        self.read_into(member, 0, memoryview(data))
        self.check([member])
        return bytes(data)

    def _tensor(self, value: Any) -> StoredTensor:
        kind, arguments = _call_of(value)
        storage, first, shape, strides = arguments[:4]
        if not isinstance(storage, _StorageId):
            raise ValueError("a tensor has no storage")
        what, storage_type, key, _, count = storage
        if what != "storage" or not isinstance(key, str):
            raise ValueError("a tensor has no storage")
        dtype = _STORAGES[getattr(storage_type, "kind", "")]
        shape, strides = _numbers(shape), _numbers(strides)
        first, count = _numbers((first, count))
        size = count * dtype.itemsize
        if kind == _REBUILD_UNTYPED:
            dtype = arguments[6]
            if not isinstance(dtype, torch.dtype):
                raise ValueError("a tensor has no dtype")
        member = f"{self._top}data/{key}"
        if member not in self._members or not (
            0 <= self._members[member].size - size < dtype.itemsize
        ):
            there = self._members[member].size if member in self._members else 0
            raise ValueError(f"a tensor has {size} bytes in {member}, which has {there}")
        if len(shape) != len(strides) or len(shape) > _DIMENSIONS_MAX:
            raise ValueError(f"a tensor has the shape {shape}, and the strides {strides}")
        span = _span(shape, strides)
        if math.prod(shape) > span:
            raise ValueError(f"a tensor of shape {shape} has {span} elements in the file")
        if (first + span) * dtype.itemsize > size:
            raise ValueError(f"elements {first} to {first + span} of a tensor lie beyond {member}")
        return StoredTensor(self, member, dtype, shape, strides, first)

    def _plain(self, value: Any, made: dict[int, Any], within: set[int]) -> Any:
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
            return value
        # Convert each object only once. A few bytes of a pickle can describe nested lists that each
        # contain the next list twice, and repeated conversions would take exponential time.
        if id(value) in made:
            return made[id(value)]
        if id(value) in within:
            raise ValueError(f"{self.path} is refused: a list contains itself")
        within.add(id(value))
        made[id(value)] = self._converted(value, made, within)
        within.remove(id(value))
        return made[id(value)]

    def _converted(self, value: Any, made: dict[int, Any], within: set[int]) -> Any:
        if isinstance(value, Record) and value.kind in _TENSORS:
            return self.tensor(value).read()
        if isinstance(value, dict):
            return {
                self._plain(key, made, within): self._plain(each, made, within)
                for key, each in value.items()
            }
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(self._plain(each, made, within) for each in value)
        raise ValueError(f"{self.path} has a {kind_of(value)}, which is no plain data")


def kind_of(value: Any) -> str:
    """Name the kind of a value, for messages."""
    return value.kind if isinstance(value, Record) else type(value).__name__


def _call_of(value: Any) -> tuple[str, Any]:
    if isinstance(value, Record) and value.kind in _PARAMETERS:
        value = value.args[0]
    kind, arguments = (value.kind, value.args) if isinstance(value, Record) else ("", ())
    if kind == _WITH_ATTRIBUTES:
        kind, arguments = getattr(arguments[0], "kind", ""), arguments[2]
    if kind not in (_REBUILD, _REBUILD_UNTYPED) or not isinstance(arguments, tuple):
        raise ValueError(f"expected a tensor, not a {kind_of(value)}")
    return kind, arguments


def _members(path: Path, descriptors: Descriptors) -> dict[str, _Member]:
    """Find the members of a zip, and check that each is uncompressed and inside the file."""
    found: dict[str, _Member] = {}
    status = path.stat()
    size = status.st_size
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no file")
    with contextlib.ExitStack() as undo:
        try:
            archive = undo.enter_context(zipfile.ZipFile(path))
        except zipfile.BadZipFile as error:
            raise ValueError(
                "it is no zip as torch.save writes it: it was cut short, or is of torch before 1.6"
            ) from error
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise ValueError(f"{info.filename} is compressed, which torch.save never does")
            if info.filename in found:
                raise ValueError(f"it has {info.filename} twice")
            header = bytearray(_LOCAL_HEADER_BYTES)
            descriptors.read_into(path, info.header_offset, memoryview(header))
            if header[:4] != b"PK\3\4":
                raise ValueError(f"{info.filename} is not at the offset in the zip's directory")
            names = int.from_bytes(header[26:28], "little") + int.from_bytes(
                header[28:30], "little"
            )
            offset = info.header_offset + _LOCAL_HEADER_BYTES + names
            if offset + info.file_size > size:
                raise ValueError(f"{info.filename} goes beyond the end of the file")
            found[info.filename] = _Member(offset, info.file_size, info.CRC)
    return found


def _top_of(members: Iterable[str]) -> str:
    """Return the folder in the zip that contains all members, for example "archive/"."""
    found = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(found) != 1:
        raise ValueError(f"it has data.pkl {len(found)} times, so it is no file of torch.save")
    return found[0].removesuffix("data.pkl")


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or any(
        type(value) is not int or value < 0 for value in values
    ):
        raise ValueError("a tensor has an invalid shape or offset")
    return tuple(values)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of the storage's elements from the tensor's first element to the last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _contiguous(shape: Sequence[int], *, like: Sequence[int]) -> tuple[int, ...]:
    strides, below = [], 1
    for size, given in zip(reversed(shape), reversed(like), strict=True):
        strides.append(given if size == 1 else below)
        below *= size
    return tuple(reversed(strides))


def _reason(error: BaseException) -> str:
    text = str(error).split("\n")[0]
    return (
        text
        if isinstance(error, (ValueError, pickle.UnpicklingError)) and text
        else (f"{type(error).__name__}: {text}")
    )
