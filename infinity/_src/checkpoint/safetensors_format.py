"""The format of safetensors: a header, and whole files in memory.

    8 bytes: the header's length  |  header, JSON: name -> dtype, shape, bytes  |  tensors

The buffers of a checkpoint are such a file. One whose dtype the format lacks (complex128, int4)
lies there as its bytes, U8, and `__metadata__` has dtype and shape.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from infinity._src.base.dtypes import (
    FROM_SAFETENSORS,
    SAFETENSORS,
    bytes_of,
    dtype_name,
    dtype_of,
    from_bytes,
    in_safetensors,
    shape_of_stored,
    stored_shape,
)
from infinity._src.base.sizes import round_up

_RANK_OF = {dtype: rank for rank, dtype in enumerate(SAFETENSORS)}

_METADATA, _DTYPES = "__metadata__", "infinity.dtypes"


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """One tensor of a file. shape: as torch counts."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class HeaderEntry:
    """One tensor as a header states it, of a dtype that torch may lack. shape: as torch counts, if
    it has the dtype. start: its first byte behind the header.
    """

    name: str
    stored_as: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int


def check_dtypes(tensors: Iterable[FileTensor], *, way_out: str) -> None:
    """Raise ValueError for a tensor that the format does not have."""
    for tensor in tensors:
        if not in_safetensors(tensor.dtype, tensor.shape):
            scalar = " scalar" if tensor.dtype in SAFETENSORS else ""
            raise ValueError(
                f"{tensor.name} is a {tensor.dtype}{scalar}, which safetensors does not have; "
                f"{way_out}"
            )


def file_order(tensor: FileTensor) -> tuple[int, str]:
    """Return the sort key of tensors in a file, which is that of the format's own library."""
    return _RANK_OF[tensor.dtype], tensor.name


def encode_header(tensors: Sequence[FileTensor], metadata: Mapping[str, str]) -> bytes:
    """Encode the header of a file, its length included. tensors: in `file_order`."""
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
    # Padded with blanks, so that the data is aligned.
    text = text.ljust(round_up(len(text), 8))
    return len(text).to_bytes(8, "little") + text


def decode_header(text: bytes) -> tuple[list[HeaderEntry], dict[str, Any]]:
    """Decode the JSON of a header: its tensors, and `__metadata__`. Raises: ValueError."""
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
    """Encode tensors on the CPU as a file, whatever their dtypes."""
    # What the format has lies there as its own library writes it.
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
    """Decode the bytes of `encode_tensors`, or a file of the format's own library. Raises:
    ValueError.
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
