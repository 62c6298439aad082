"""Safetensors: encodes and decodes the format, and reads files tensor by tensor.

    8 bytes: the header's length  |  header, JSON: name -> dtype, shape, bytes  |  tensors

`encode_tensors` and `decode_tensors` convert the buffers of a checkpoint to such a file in memory
and back. If the format lacks a buffer's dtype (complex128, int4), the file has the buffer as bytes,
U8, and `__metadata__` has the dtype and shape.

`SafetensorsFiles` first reads all headers, and then single tensors or ranges of their elements.

    directory, index or file  ->  headers, checked against the sizes of the files  ->  tensors

This module reads files and never maps them. If a drive fails or a file is cut short, a read raises
an error, while access to mapped memory would kill the process. Tensors are ordinary memory, which
is freed with the last reference.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import json
import math
import os
import re
import resource
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infinity._src.base.dtypes import (
    FROM_SAFETENSORS,
    SAFETENSORS,
    bytes_of,
    copy_,
    dtype_name,
    dtype_of,
    from_bytes,
    in_safetensors,
    shape_of_stored,
    stored_shape,
)
from infinity._src.base.paths import check_link
from infinity._src.base.sizes import MIB, format_size, round_up
from infinity._src.base.wording import listed
from infinity._src.params.materialize import FileTensors, SourceFiles
from infinity.errors import AioError, ShortTransferError, WeightsError

_RANK_OF = {dtype: rank for rank, dtype in enumerate(SAFETENSORS)}

_METADATA, _DTYPES = "__metadata__", "infinity.dtypes"


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """One tensor of a file. shape: the shape in torch, also if the file packs the elements."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class HeaderEntry:
    """One tensor as a header describes it. stored_as: the format's name of the dtype, which torch
    may lack. shape: the shape in torch, or in the header if torch lacks the dtype. start: offset of
    the first byte from the end of the header.
    """

    name: str
    stored_as: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int


def check_dtypes(tensors: Iterable[FileTensor], *, way_out: str) -> None:
    """Raise ValueError for a tensor whose dtype the format lacks."""
    for tensor in tensors:
        if not in_safetensors(tensor.dtype, tensor.shape):
            scalar = " scalar" if tensor.dtype in SAFETENSORS else ""
            raise ValueError(
                f"{tensor.name} is a {tensor.dtype}{scalar}, which safetensors does not have; "
                f"{way_out}"
            )


def file_order(tensor: FileTensor) -> tuple[int, str]:
    """Return the key by which the format's reference library sorts the tensors of a file."""
    return _RANK_OF[tensor.dtype], tensor.name


def encode_header(tensors: Sequence[FileTensor], metadata: Mapping[str, str]) -> bytes:
    """Encode the header of a file, including the header's length. tensors: sorted by `file_order`.
    """
    described: dict[str, object] = {_METADATA: metadata} if metadata else {}
    at = 0
    for tensor in tensors:
        end = at + tensor.size_bytes
        described[tensor.name] = {
            "dtype": SAFETENSORS[tensor.dtype],
            "shape": list(stored_shape(tensor.dtype, tensor.shape)),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    # Pad the header with blanks to align the data.
    text = text.ljust(round_up(len(text), 8))
    return len(text).to_bytes(8, "little") + text


def decode_header(text: bytes) -> tuple[list[HeaderEntry], dict[str, Any]]:
    """Decode the JSON of a header to (tensors, `__metadata__`). Raises: ValueError."""
    try:
        described: dict[str, Any] = dict(json.loads(text))
        metadata = dict(described.pop(_METADATA, None) or {})
        return [_entry(name, entry) for name, entry in described.items()], metadata
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _entry(name: str, entry: dict[str, Any]) -> HeaderEntry:
    first, last = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    stored_as = str(entry["dtype"])
    dtype = FROM_SAFETENSORS.get(stored_as)
    wanted = last - first
    if dtype is not None:
        shape = shape_of_stored(dtype, shape)
        wanted = math.prod(shape) * dtype.itemsize
    if not 0 <= first <= last or any(size < 0 for size in shape) or last - first != wanted:
        raise ValueError(
            f"{name} of shape {shape}, {stored_as}, takes {wanted:,} bytes, not {last - first:,}"
        )
    return HeaderEntry(name, stored_as, shape, first, last - first)


# -- a whole file in memory ------------------------------------------------------------------------


def encode_tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Encode tensors on the CPU, of any dtypes, as the bytes of a file."""
    # If the format lacks a dtype, store the tensor's bytes, and its dtype and shape as metadata.
    lacking = {
        name: [dtype_name(value.dtype), list(value.shape)]
        for name, value in tensors.items()
        if not in_safetensors(value.dtype, tuple(value.shape))
    }
    values = {
        name: bytes_of(value) if name in lacking else value for name, value in tensors.items()
    }
    described = sorted(
        (FileTensor(name, value.dtype, tuple(value.shape)) for name, value in values.items()),
        key=file_order,
    )
    metadata = {_DTYPES: json.dumps(lacking)} if lacking else {}
    parts = [bytes_of(values[each.name]).numpy().data for each in described]
    return b"".join([encode_header(described, metadata), *parts])


def decode_tensors(data: bytes) -> dict[str, torch.Tensor]:
    """Decode the bytes of a file from `encode_tensors` or from the format's reference library.

    Raises: ValueError.
    """
    size = int.from_bytes(data[:8], "little")
    entries, metadata = decode_header(data[8 : 8 + size])
    body, found = memoryview(data)[8 + size :], {}
    try:
        lacking = dict(json.loads(metadata.get(_DTYPES, "{}")))
        for entry in entries:
            dtype, shape = entry.stored_as, entry.shape
            if entry.name in lacking:
                name, sizes = lacking[entry.name]
                kind, shape = dtype_of(name), tuple(int(each) for each in sizes)
            elif dtype in FROM_SAFETENSORS:
                kind = FROM_SAFETENSORS[dtype]
            else:
                raise ValueError(f"{entry.name} is of dtype {dtype}, which torch does not have")
            part = body[entry.start : entry.start + entry.size_bytes]
            found[entry.name] = from_bytes(part, kind, shape)
    except (KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise ValueError(str(error)) from error
    return found


_INDEX_NAME = re.compile(r".*\.safetensors\.index(\.[^.]+)?\.json")

READ_BYTES_MAX = 1 << 30
"""Largest number of bytes in one system call; Linux transfers less than 2 GiB in a call."""

PIECE_BYTES = 64 * MIB
"""Bytes that `read_into` reads and converts at a time."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file. start: offset of the first byte in the file."""

    path: Path
    name: str
    stored_as: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in torch. Raises: WeightsError for a dtype that torch lacks, such as F6_E2M3.
        """
        found = FROM_SAFETENSORS.get(self.stored_as)
        if found is None:
            raise WeightsError(
                f"{self.name} in {self.path} ({self.size_bytes:,} bytes) is of dtype "
                f"{self.stored_as}, which cannot be read; take a checkpoint with its weights in "
                "BF16",
                path=str(self.path),
                tensors=(self.name,),
            )
        return found


class StoredTensors(FileTensors):
    """Tensors in files, by name. One file is open at a time."""

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self.label = str(path)
        self._tensors = tensors
        # Keep only one file open: a large model may have more files than a process may open.
        self._open: _OpenFile | None = None

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that the file's header states. Raises: WeightsError."""
        return self._tensors[name].dtype

    def origin(self, name: str) -> str:
        stored = self._tensors[name]
        return f"{stored.path.name}, {stored.size_bytes:,} bytes"

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor. Raises: AioError with path, offset and length."""
        stored = self._tensors[name]
        out = torch.empty(stored.shape, dtype=stored.dtype)
        self._fill(stored, stored.start, out.view(-1))
        return out

    @functools.cached_property
    def files(self) -> SourceFiles:
        return SourceFiles(tuple(dict.fromkeys(each.path for each in self._tensors.values())))

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Read `out.numel()` elements of one tensor, from element `start` on, and convert them to
        the dtype of `out`. Raises: as `read`."""
        stored = self._tensors[name]
        dtype = stored.dtype
        step = max(PIECE_BYTES // dtype.itemsize, 1)
        # Read and convert in pieces: a conversion takes additional memory for one piece.
        for at in range(0, out.numel(), step):
            part = out[at : at + step]
            is_same = part.dtype == dtype and part.is_contiguous()
            piece = part if is_same else torch.empty(part.shape, dtype=dtype)
            self._fill(stored, stored.start + (start + at) * dtype.itemsize, piece)
            if not is_same:
                copy_(part, piece)

    def _fill(self, stored: StoredTensor, start: int, out: torch.Tensor) -> None:
        if self._open is None or self._open.path != stored.path:
            self._open = _OpenFile(stored.path)
        if out.numel():
            self._open.read(bytes_of(out).numpy().data, start, stored.name)


class SafetensorsFiles(StoredTensors):
    """Tensors of a directory, of an index, or of a single file. In a directory these are the files
    that the index names; without an index, model.safetensors; without that file, all safetensors.

    Raises: FileNotFoundError; WeightsError if a directory has several indices, or an index and a
    model.safetensors that the index does not name; if an index names a file outside of the
    directory, or a tensor that the file lacks; if several files have the same tensor and no index
    decides; if a file is damaged or cut short.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, _stored(path))


class _OpenFile:
    """A file that is open for reading until the last reference to this object ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _open(path)
        weakref.finalize(self, os.close, self._fd)

    def read(self, out: memoryview, start: int, name: str) -> None:
        """Fill `out` with the file's bytes from `start` on. Blocks. Raises: AioError;
        ShortTransferError if the file ends before `out` is full."""
        done = 0
        while done < len(out):
            try:
                count = os.preadv(self._fd, [out[done : done + READ_BYTES_MAX]], start + done)
            except OSError as error:
                raise AioError(
                    f"{name} cannot be read",
                    errno=error.errno or 0,
                    path=str(self.path),
                    op="read",
                    offset=start + done,
                    length=len(out) - done,
                ) from error
            if count == 0:
                raise ShortTransferError(
                    f"{name} cannot be read: the file has become shorter since it was opened; copy "
                    "or download it again",
                    path=str(self.path),
                    op="read",
                    offset=start + done,
                    length=len(out) - done,
                )
            done += count


def _open(path: Path) -> int:
    """Open a file for reading. Raises: OSError; AioError if the process has too many files open."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise AioError(
            f"this process has {limit} files open, its limit (RLIMIT_NOFILE), and needs one more; "
            "raise the limit (ulimit -n)",
            errno=errno.EMFILE,
            path=str(path),
            op="open",
        ) from error


# -- headers ---------------------------------------------------------------------------------------


_HEADER_BYTES_MAX = 100_000_000
"""Largest header that the format allows."""


_TORCH_MAGIC = (b"PK\x03\x04", b"\x80\x02", b"\x80\x04")
"""First bytes of files of torch.save: a zip or, before torch 1.6, a pickle."""


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the header of one file, and return the file's tensors by name.

    Raises: WeightsError if the file is not safetensors, or is cut short; OSError.
    """
    check_link(path)
    size = path.stat().st_size
    with os.fdopen(_open(path), "rb") as file:
        file_start = file.read(8)
        length = int.from_bytes(file_start, "little")
        whole = size >= 8 and length <= min(size - 8, _HEADER_BYTES_MAX)
        text = file.read(length) if whole else b""
    try:
        entries, _ = decode_header(text)
    except ValueError as error:
        if file_start.startswith(_TORCH_MAGIC):
            raise WeightsError(
                f"{path} is a file of torch.save, not of safetensors: pass "
                "load=torch.load(path, weights_only=True), or convert it by "
                "safetensors.torch.save_file",
                path=str(path),
            ) from error
        raise WeightsError(
            f"{path} is not a whole safetensors file: it has {size:,} bytes and no header that can "
            f"be read ({error}); copy or download it again",
            path=str(path),
        ) from error
    found = [
        StoredTensor(
            path, each.name, each.stored_as, each.shape, 8 + length + each.start, each.size_bytes
        )
        for each in entries
    ]
    check_whole(path, size, found, "safetensors")
    return {tensor.name: tensor for tensor in found}


def check_whole(path: Path, size: int, tensors: Iterable[StoredTensor], kind: str) -> None:
    """Raise WeightsError if a tensor ends after the end of the file. size: bytes of the file."""
    lost = sorted(
        (tensor for tensor in tensors if tensor.start + tensor.size_bytes > size),
        key=lambda tensor: tensor.start,
    )
    if lost:
        first, last = lost[0], lost[-1]
        raise WeightsError(
            f"{path} is not a whole {kind} file: it ends at byte {size:,}, and "
            f"{first.name} lies at bytes {first.start:,} to {first.start + first.size_bytes:,}"
            f"{f', {len(lost) - 1} more behind it' if len(lost) > 1 else ''}; "
            f"{format_size(last.start + last.size_bytes - size)} are missing: copy or download it "
            "again",
            path=str(path),
            tensors=tuple(tensor.name for tensor in lost),
        )


def _stored(path: Path) -> dict[str, StoredTensor]:
    """Find all tensors of a directory, an index or a file."""
    if path.is_file():
        return _indexed(path) if is_index(path) else read_header(path)
    check_link(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such directory or file")
    # Several indices are ambiguous; the user can give the path of one.
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise WeightsError(
            f"{path} has several indices: {', '.join(found.name for found in indices)}; name one "
            "file",
            path=str(path),
        )
    single = path / "model.safetensors"
    if indices:
        check_link(indices[0])
        if single.is_file() and single.name not in _weight_map(indices[0]).values():
            raise WeightsError(
                f"{path} has {indices[0].name} and {single.name}, which the index does not name: "
                "the choice is ambiguous; give the path of one of them, or move one away",
                path=str(path),
            )
        return _indexed(indices[0])
    # transformers does the same: other files are copies of the weights (consolidated, fp16).
    if single.is_file():
        return read_header(single)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{path} has no *.safetensors; convert the checkpoint, or pass a mapping"
        )
    found: dict[str, list[StoredTensor]] = {}
    for tensor in itertools.chain.from_iterable(read_header(file).values() for file in files):
        found.setdefault(tensor.name, []).append(tensor)
    # Without an index, a tensor in several files is ambiguous.
    several = {name: tensors for name, tensors in found.items() if len(tensors) > 1}
    if several:
        raise WeightsError(
            f"{path} has tensors in several files, and no index to decide: "
            f"{listed(map(_places, several.values()))}; name one file, move the files that do not "
            "count out of the directory, or add their model.safetensors.index.json",
            path=str(path),
            tensors=tuple(several),
        )
    return {name: tensor for name, (tensor,) in found.items()}


def _places(tensors: Sequence[StoredTensor]) -> str:
    places = (f"{each.size_bytes:,} bytes in {each.path.name}" for each in tensors)
    return f"{tensors[0].name} ({listed(places)})"


def is_index(path: Path) -> bool:
    """Return whether a path has the name of an index, possibly with a variant (".fp16")."""
    return bool(_INDEX_NAME.fullmatch(path.name))


def read_index(
    index: Path, directory: Path
) -> tuple[dict[str, str], dict[str, dict[str, StoredTensor]]]:
    """Return (file name of each tensor, header of each file sorted by file name).

    Raises: FileNotFoundError; WeightsError.
    """
    weight_map = _weight_map(index)
    files = sorted(set(weight_map.values()))
    # Check all files before the first read, so that the error names all missing files.
    for name in files:
        check_link(directory / name)
    gone = [name for name in files if not (directory / name).is_file()]
    if gone:
        away = set(gone)
        lost = sorted(name for name, file in weight_map.items() if file in away)
        place = "beside the index" if directory == index.parent else str(directory)
        raise FileNotFoundError(
            f"{index} names missing files: {listed(gone)}, with {listed(lost)}; copy or download "
            f"them to {place}"
        )
    return weight_map, {file: read_header(directory / file) for file in files}


def _indexed(index: Path) -> dict[str, StoredTensor]:
    weight_map, headers = read_index(index, index.parent)
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise WeightsError(
                f"{index.parent / file} does not have {name}, though the index says so; copy or "
                "download it again",
                path=str(index.parent / file),
                tensors=(name,),
            )
    return {name: headers[file][name] for name, file in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file name of each tensor.

    Raises: WeightsError if the index is damaged or names a file in another directory.
    """
    try:
        found = json.loads(index.read_text(encoding="utf-8"))
        weight_map: dict[str, str] = dict(found["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WeightsError(
            f"{index} is no index of safetensors: it has no readable weight_map ({error!r})",
            path=str(index),
        ) from error
    for name, file in weight_map.items():
        # A hostile index must not cause reads of files outside of the directory.
        if not isinstance(file, str) or Path(file).name != file or file == "..":
            raise WeightsError(
                f"{index} says that {name} is in {file!r}; files must lie beside their index: move "
                "the file there and write only its name",
                path=str(index),
                tensors=(name,),
            )
    return weight_map
