"""The header of a GGUF file: its metadata, and the type and place of each tensor.

    "GGUF", version, counts | key, value, … | name, shape, type, offset, … | tensors

The header is read, not mapped: a file that is cut short is an error that says so.
"""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import IO, Any

from infinity.errors import WeightsError

_VERSIONS = (2, 3)
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_DIMS_MAX = 8
_REMEDY = "copy or download it again, or use the model's safetensors"


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """One tensor as the header states it. shape: as torch has it. kind: the number of its type.
    start: its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """Metadata of a file (numbers and strings; arrays are left out), and its tensors."""

    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        """The kind of model, as llama.cpp names it."""
        return str(self.metadata["general.architecture"])


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a file. Raises: WeightsError for what is no GGUF file that transformers
    reads: of another version or byte order, cut short, or a part of several; OSError.
    """
    with path.open("rb") as file:
        try:
            found = _read(path, file)
        except (struct.error, UnicodeDecodeError, EOFError, OverflowError) as error:
            raise WeightsError(
                f"{path} is no GGUF file that can be read (its header ends or breaks at byte "
                f"{file.tell():,}: {error}); {_REMEDY}",
                path=str(path),
            ) from error
    if "general.architecture" not in found.metadata:
        raise _unreadable(path, "it has no general.architecture")
    parts = found.metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise WeightsError(
            f"{path} is one of {parts} parts of a model (split.count), and from_pretrained reads "
            "one file; join them (llama-gguf-split --merge) and load the whole",
            path=str(path),
        )
    return found


def _read(path: Path, file: IO[bytes]) -> GgufHeader:
    if file.read(4) != b"GGUF":
        raise _unreadable(path, "it does not begin with GGUF")
    (version,) = _take(file, "I")
    if version not in _VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            raise WeightsError(
                f"{path} is a big-endian GGUF file, and transformers reads little-endian ones; "
                "convert it (gguf-convert-endian, of the package gguf), or use the model's "
                "safetensors",
                path=str(path),
            )
        raise _unreadable(path, f"it is of version {version}, and transformers reads 2 and 3")
    tensor_count, value_count = _take(file, "QQ")
    metadata = {}
    for _ in range(value_count):
        key, (kind,) = _string(file), _take(file, "I")
        value = _value(path, file, key, kind)
        if value is not None:
            metadata[key] = value
    rows = [_tensor_row(path, file) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise _unreadable(path, f"its general.alignment is {alignment!r}")
    data = -(-file.tell() // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in rows:
        if name in tensors:
            raise _unreadable(path, f"it has {name} twice")
        tensors[name] = GgufTensor(name, shape, kind, data + offset)
    return GgufHeader(metadata, tuple(tensors.values()))


def _tensor_row(path: Path, file: IO[bytes]) -> tuple[str, tuple[int, ...], int, int]:
    name, (dims,) = _string(file), _take(file, "I")
    if dims > _DIMS_MAX:
        raise _unreadable(path, f"{name} has {dims} dimensions")
    shape = _take(file, f"{dims}Q")
    kind, offset = _take(file, "IQ")
    # GGUF names the dimension whose values are side by side first.
    return name, tuple(reversed(shape)), kind, offset


def _value(path: Path, file: IO[bytes], key: str, kind: int) -> Any:
    """Read a value; None for an array, which is passed over."""
    if kind in _SCALARS:
        return _take(file, _SCALARS[kind])[0]
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        raise _unreadable(path, f"{key} is of the unknown type {kind}")
    of, count = _take(file, "IQ")
    if of in _SCALARS:
        file.seek(count * struct.calcsize(f"<{_SCALARS[of]}"), 1)
    elif of in (_STRING, _ARRAY):
        for _ in range(count):
            if of == _ARRAY:
                _value(path, file, key, of)
            else:
                file.seek(_take(file, "Q")[0], 1)
    else:
        raise _unreadable(path, f"{key} has values of the unknown type {of}")
    return None


def _string(file: IO[bytes]) -> str:
    (length,) = _take(file, "Q")
    return _bytes(file, length).decode("utf-8")


def _take(file: IO[bytes], layout: str) -> tuple[Any, ...]:
    layout = f"<{layout}"
    return struct.unpack(layout, _bytes(file, struct.calcsize(layout)))


def _bytes(file: IO[bytes], length: int) -> bytes:
    # A length that is damaged may be larger than what memory holds.
    found = file.read(min(length, 1 << 24))
    if len(found) != length:
        raise EOFError(f"{length:,} bytes are stated, {len(found):,} are there")
    return found


def _unreadable(path: Path, reason: str) -> WeightsError:
    return WeightsError(
        f"{path} is no GGUF file that can be read ({reason}); {_REMEDY}", path=str(path)
    )
