"""GGUF files as a source of weights, which this module reads and dequantizes a few rows at a time.
The values are the same as from `from_pretrained(gguf_file=)`.

transformers loads GGUF files in one of two ways, depending on the architecture. If transformers has
conversions, as for checkpoints of the hub, this module returns tensors as they are stored.
Otherwise this module dequantizes tensors with the package gguf and operations of transformers, and
returns the tensors under the model's names.

This module reads the header and does not map it, so that a truncated file raises a clear error.

    "GGUF", version, counts | key, value, … | name, shape, type, offset, … | tensors
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from infinity._src.checkpoint.formats.hub_conversion import conversions_of, transformers_loading
from infinity._src.checkpoint.formats.safetensors_reader import (
    StoredTensor,
    StoredTensors,
    check_whole,
)
from infinity._src.params.materialize import LastRows
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
    """One tensor as the header describes it. shape: sizes in torch's order of dimensions. kind:
    number of the GGUF type. start: offset of the first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """Header of a file: metadata (numbers and strings, no arrays), and descriptions of tensors."""

    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the kind of model."""
        return str(self.metadata["general.architecture"])


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of a file.

    Raises: WeightsError for a file that transformers cannot read: another format, version or byte
    order, a truncated header, one part of a split model; OSError.
    """
    with path.open("rb") as file:
        try:
            found = _read(path, file)
        except (struct.error, UnicodeDecodeError, EOFError, OverflowError) as error:
            raise WeightsError(
                f"{path} is no readable GGUF file (its header ends or breaks at byte "
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
    # GGUF lists the contiguous dimension first, torch lists it last.
    return name, tuple(reversed(shape)), kind, offset


def _value(path: Path, file: IO[bytes], key: str, kind: int) -> Any:
    """Read a value of the metadata; skip an array and return None."""
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
    # Limit the read: a damaged length may exceed the memory of the machine.
    found = file.read(min(length, 1 << 24))
    if len(found) != length:
        raise EOFError(f"{length:,} bytes are stated, {len(found):,} exist")
    return found


def _unreadable(path: Path, reason: str) -> WeightsError:
    return WeightsError(
        f"{path} is no readable GGUF file ({reason}); {_REMEDY}", path=str(path)
    )


_PLAIN = {0: "F32", 1: "F16", 30: "BF16"}
"""GGUF's types of plain values. This module reads all other types as bytes: quantized blocks."""

UNPACKED_BYTES = 4 << 20
"""Bytes of fp32 values that a read dequantizes at a time, if rows are independent."""

_Blocks = Callable[[int], tuple[int, int] | None]
"""Function from a type to (values, bytes) of a block; None for a type that the package gguf cannot
dequantize."""


def open_gguf(model: Any, path: Path, dtype: torch.dtype) -> tuple[StoredTensors, list[Any]]:
    """Open a file for a model that computes in `dtype`. Return (the file's tensors, the conversions
    that the tensors need).

    Raises: FileNotFoundError; WeightsError for a file that is damaged, or that transformers cannot
    read.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    transformers_loading()
    from transformers.integrations.gguf.utils import is_gguf_arch_supported

    header = read_gguf_header(path)
    if not is_gguf_arch_supported(header.architecture):
        return UnpackedGguf(model, path, header, dtype), conversions_of(model)
    return _in_blocks(model, path, header, dtype)


def _in_blocks(
    model: Any, path: Path, header: GgufHeader, dtype: torch.dtype
) -> tuple[StoredTensors, list[Any]]:
    from transformers import GgufConfig
    from transformers.integrations.gguf.dequant import GGML_BLOCK
    from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

    stored = _stored(path, header, GGML_BLOCK.get)
    quantizer: Any = GgufHfQuantizer(GgufConfig(dequantize=True))
    quantizer.read_header(str(path))
    quantizer.update_dtype(dtype)
    quantizer._process_model_before_weight_loading(model)
    return StoredTensors(path, stored), list(quantizer.update_weight_conversions([], model))


def _stored(path: Path, header: GgufHeader, blocks: _Blocks) -> dict[str, StoredTensor]:
    """Return the tensors as the file stores them, with quantized blocks as bytes (uint8).

    Raises: WeightsError naming tensors of a type that the package gguf cannot dequantize.
    """
    found: dict[str, StoredTensor] = {}
    refused: dict[str, list[str]] = {}
    for info in header.tensors:
        stored_as, shape, size_bytes = _PLAIN.get(info.kind, "U8"), info.shape, 1
        block = (1, 4 if info.kind == 0 else 2) if info.kind in _PLAIN else blocks(info.kind)
        if block is None or (info.shape and info.shape[-1] % block[0]):
            refused.setdefault(_type_name(info.kind), []).append(info.name)
            continue
        if info.kind not in _PLAIN:
            shape = (*shape[:-1], shape[-1] // block[0] * block[1])
            size_bytes = math.prod(shape)
        else:
            size_bytes = math.prod(shape) * block[1]
        found[info.name] = StoredTensor(path, info.name, stored_as, shape, info.start, size_bytes)
    if refused:
        raise _refused_types(path, header, refused)
    check_whole(path, path.stat().st_size, found.values(), "GGUF")
    return found


def _refused_types(path: Path, header: GgufHeader, refused: dict[str, list[str]]) -> WeightsError:
    import transformers

    each = "; ".join(
        f"{kind}: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for kind, names in refused.items()
    )
    return WeightsError(
        f"{path} has tensors of types that transformers {transformers.__version__} does not unpack "
        f"for the architecture {header.architecture} ({each}); take a file of other types (such as "
        "Q8_0 or BF16), or the model's safetensors",
        path=str(path),
        tensors=tuple(name for names in refused.values() for name in names),
    )


def _type_name(kind: int) -> str:
    try:
        from gguf import GGMLQuantizationType

        return str(GGMLQuantizationType(kind).name)
    except (ImportError, ValueError):
        return f"type {kind}"


@functools.cache
def _unpacked_blocks(kind: int) -> tuple[int, int] | None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    try:
        of = GGMLQuantizationType(kind)
        values, size_bytes = GGML_QUANT_SIZES[of]
        dequantize(np.zeros((1, size_bytes), np.uint8), of)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return values, size_bytes


@dataclasses.dataclass(frozen=True)
class _Target:
    """Recipe of a tensor of the model. sources: names in the file. joined: True if transformers
    joins several sources to one tensor. by_rows: True if row i depends only on row i of each
    source.
    """

    sources: list[str]
    shape: tuple[int, ...]
    joined: bool
    by_rows: bool


class UnpackedGguf(StoredTensors):
    """Tensors of a file under the names of the model. A read dequantizes to `dtype`; joined tensors
    (experts) become fp32, as in transformers.
    """

    def __init__(self, model: Any, path: Path, header: GgufHeader, dtype: torch.dtype) -> None:
        stored = _stored(path, header, _unpacked_blocks)
        self._processor, self._model_names = _processor(model, path, header)
        self._unpacked_to = dtype
        self._raw = StoredTensors(path, stored)
        self._kinds = {info.name: info.kind for info in header.tensors}
        # These are the shapes of the values, not of the stored bytes.
        self._shapes = {info.name: info.shape for info in header.tensors}
        self._targets: dict[str, _Target] = {}
        for info in header.tensors:
            try:
                self._plan(info)
            except Exception as error:  # code of transformers
                raise WeightsError(
                    f"transformers cannot convert {info.name} {info.shape} of {path}: "
                    f"{type(error).__name__}: {error}; use the model's safetensors",
                    path=str(path),
                    tensors=(info.name,),
                ) from error
        tensors = {
            name: dataclasses.replace(stored[target.sources[0]], shape=target.shape)
            for name, target in self._targets.items()
        }
        super().__init__(path, tensors)
        self._last = LastRows()

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32 if self._targets[name].joined else self._unpacked_to

    @property
    def unpacking_bytes(self) -> int:
        """Upper bound of the memory that a read takes to dequantize: blocks, values in fp32, and a
        copy of the values in the model's order.
        """
        found = [0]
        for name, target in self._targets.items():
            row = math.prod(target.shape[1:])
            values = math.prod(target.shape)
            if target.by_rows:
                values = min(values, row * _rows_together(row))
            found.append(values * (3 * torch.float32.itemsize + self.dtype(name).itemsize))
        return max(found)

    def read(self, name: str) -> torch.Tensor:
        target = self._targets[name]
        if not target.by_rows:
            return self._rows(name, 0, target.shape[0] if target.shape else 1)
        out = torch.empty(target.shape, dtype=self.dtype(name))
        self.read_into(name, 0, out.view(-1))
        return out

    def read_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Read the elements of one tensor from `start` on. If rows are independent, the read
        dequantizes a few rows at a time, else the whole tensor. Dequantized rows stay in memory for
        the next call, until a call reads their last element or other rows.
        """
        target = self._targets[name]
        rows, row = target.shape[0] if target.shape else 1, math.prod(target.shape[1:])
        whole = not target.by_rows
        self._last.read_into(
            name,
            start,
            out,
            # If rows depend on each other, treat the tensor as one row.
            row=row * rows if whole else row,
            step=1 if whole else _rows_together(row),
            convert=lambda first, last: self._rows(name, first, rows if whole else last),
        )

    def _rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Return the rows [first, last) of a tensor of the model. The caller asks for all rows if
        rows depend on each other."""
        target = self._targets[name]
        others: dict[str, torch.Tensor] = {}
        for source in target.sources:
            made = self._processed(source, self._unpacked(source, target, first, last), others)
        if target.joined:
            return others[name]
        return torch.from_numpy(np.ascontiguousarray(made.weights)).to(self._unpacked_to)

    def _unpacked(self, source: str, target: _Target, first: int, last: int) -> Any:
        """Return the values of a tensor of the file in fp32: the rows [first, last) if the target's
        rows are independent, otherwise all rows."""
        from gguf import GGMLQuantizationType, dequantize

        shape, raw_shape = self._shapes[source], self._raw.shape(source)
        if target.by_rows:
            shape, raw_shape = (last - first, *shape[1:]), (last - first, *raw_shape[1:])
        raw = torch.empty(raw_shape, dtype=self._raw.dtype(source))
        start = first * math.prod(raw_shape[1:]) if target.by_rows else 0
        self._raw.read_into(source, start, raw.view(-1))
        if raw.is_floating_point():
            return raw.float().numpy()
        return dequantize(raw.numpy(), GGMLQuantizationType(self._kinds[source])).reshape(shape)

    def _plan(self, info: GgufTensor) -> None:
        """Find the tensor of the model to which a tensor of the file belongs: run transformers'
        operation on placeholder values, and use the names and shapes of the result.
        """
        others: dict[str, torch.Tensor] = {}
        # The placeholder is a broadcast number, which takes no memory. transformers copies joined
        # experts, so the placeholder of a 3-dimensional tensor has only one expert.
        like = np.broadcast_to(np.float32(-1), info.shape)
        of_one = like[:1] if like.ndim == 3 else like
        made = self._processed(info.name, of_one, others)
        if not others and of_one is not like:
            made = self._processed(info.name, like, others)
        for name, value in others.items():
            by_rows = like.ndim == 3
            shape = (info.shape[0], *value.shape[1:]) if by_rows else tuple(value.shape)
            before = self._targets.setdefault(name, _Target([], shape, True, by_rows))
            if before.shape != shape:
                raise ValueError(f"it is joined with {before.sources[0]} to {before.shape}")
            before.sources.append(info.name)
        target = None if others else self._model_names.get(made.name)
        # Skip tensors that the model does not have, as transformers does.
        if target is not None:
            by_rows = made.weights is like and like.ndim > 1
            self._targets[target] = _Target([info.name], made.weights.shape, False, by_rows)

    def _processed(self, name: str, values: Any, others: dict[str, torch.Tensor]) -> Any:
        """Return transformers' result for one tensor: the model's name, and the values in the
        model's order. transformers puts joined tensors into `others`, by the model's names.
        """
        return self._processor.process(
            weights=values,
            name=name,
            tensor_key_mapping=self._model_names,
            parsed_parameters={"tensors": others},
        )


def _rows_together(row: int) -> int:
    """Return the number of rows to dequantize at a time. row: number of values in a row."""
    return max(1, UNPACKED_BYTES // max(1, row * torch.float32.itemsize))


def _processor(model: Any, path: Path, header: GgufHeader) -> tuple[Any, dict[str, str]]:
    """Return (transformers' operation for the tensors of a file, the model's names by the names in
    the file).

    Raises: WeightsError for an architecture or a model that transformers does not know.
    """
    import transformers
    from transformers import modeling_gguf_pytorch_utils as legacy

    try:
        # The operation needs hyper-parameters (such as head counts) from the file, not from the
        # model.
        config = legacy.load_gguf_checkpoint(str(path), return_tensors=False)["config"]
        kind = legacy.TENSOR_PROCESSORS.get(header.architecture, legacy.TensorProcessor)
        processor = kind(config=config)
        return processor, legacy.get_gguf_hf_weights_map(model, processor)
    except Exception as error:  # code of transformers
        raise WeightsError(
            f"transformers {transformers.__version__} does not take {path}, of the architecture "
            f"{header.architecture}, into a model of the type {model.config.model_type} "
            f"({type(error).__name__}: {error}); build the model from "
            f"AutoConfig.from_pretrained({str(path.parent)!r}, gguf_file={path.name!r}), or use "
            "the model's safetensors",
            path=str(path),
        ) from error
