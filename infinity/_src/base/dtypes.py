"""Dtypes of torch: their names, their kinds, the names that safetensors has for them, and copies of
tensors of every kind, bit for bit.

    floating, complex, whole    torch converts them into each other
    packed                      containers of bits (float4_e2m1fn_x2, bits8, int4, …), which torch
                                does not convert, and some of which it does not copy
    quantized                   their scales lie beside their bits: nothing here keeps them
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from typing import Literal

import torch

BY_NAME: dict[str, torch.dtype] = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
"""Every dtype of this torch by its names: "bfloat16", "half", "float16"."""

SAFETENSORS = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64",
    torch.float32: "F32", torch.uint32: "U32", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16", torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8", torch.uint8: "U8", torch.float4_e2m1fn_x2: "F4", torch.bool: "BOOL",
}  # fmt: skip
"""Dtypes of safetensors, in the order in which a file has their tensors: large items first, so that
all are aligned.
"""

FROM_SAFETENSORS = {text: dtype for dtype, text in SAFETENSORS.items()}

# Copied as these where torch has no copy of the dtype itself.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Kind = Literal["floating", "complex", "whole", "packed", "quantized"]


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name: "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name: torch.bfloat16 of "bfloat16". Raises: ValueError."""
    found = BY_NAME.get(name)
    if found is None:
        raise ValueError(f"dtype {name!r} is not known to this torch")
    return found


def kind_of(dtype: torch.dtype) -> Kind:
    """Return the kind of a dtype; bool is whole."""
    if dtype_name(dtype).startswith(("qint", "quint")):
        return "quantized"
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "packed" if dtype is torch.float4_e2m1fn_x2 else "floating"
    # Those that torch computes with are those of safetensors.
    return "whole" if dtype in SAFETENSORS else "packed"


def converts(there: torch.dtype, here: torch.dtype) -> bool:
    """Return whether values of one dtype are taken as another: the same, or of the same kind of
    numbers.
    """
    kind = kind_of(there)
    return there == here or (kind == kind_of(here) and kind not in ("packed", "quantized"))


# -- sizes in a file of safetensors ----------------------------------------------------------------


def stored_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that safetensors states: of float4_e2m1fn_x2, whose items are two numbers
    each, it counts the numbers.
    """
    return (*shape[:-1], 2 * shape[-1]) if dtype is torch.float4_e2m1fn_x2 and shape else shape


def shape_of_stored(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return torch's shape of a tensor whose shape safetensors states. Raises: ValueError."""
    if dtype is not torch.float4_e2m1fn_x2:
        return shape
    if not shape or shape[-1] % 2:
        raise ValueError(f"F4 of shape {shape} has half an item of torch.float4_e2m1fn_x2")
    return (*shape[:-1], shape[-1] // 2)


def in_safetensors(dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Return whether safetensors has such a tensor: all shapes of its dtypes, but no scalar of
    float4_e2m1fn_x2, which it would count as two numbers.
    """
    return dtype in SAFETENSORS and (dtype is not torch.float4_e2m1fn_x2 or bool(shape))


# -- copies, bit for bit ---------------------------------------------------------------------------


def why_not_bits(value: torch.Tensor) -> str:
    """Say why a tensor is more than its shape and its bits; "" if it is not."""
    if kind_of(value.dtype) == "quantized":
        return "its scales lie beside its bits"
    if value.is_nested:
        return "it is nested"
    return "" if value.layout is torch.strided else f"it is of layout {value.layout}"


def check_kept(tensors: Iterable[tuple[str, torch.Tensor]], what: str) -> None:
    """Raise ValueError naming the first of these buffers whose values `what` cannot keep."""
    for name, value in tensors:
        reason = why_not_bits(value)
        if reason:
            raise ValueError(
                f"{what} cannot keep the buffer {name}, a {value.dtype} tensor: {reason}. Give the "
                "model an ordinary tensor (dequantize(), to_dense(), padded), or register it with "
                "persistent=False"
            )


def check_torch_saves(tensors: Iterable[tuple[str, torch.dtype]], what: str) -> None:
    """Raise ValueError naming the first of these tensors that torch.save does not take."""
    for name, dtype in tensors:
        if not torch_saves(dtype):
            raise ValueError(
                f"{what} is written by torch.save, which does not take {name}, a {dtype} tensor: "
                "inf.save keeps it; for an export give the model another dtype"
            )


def as_integers(value: torch.Tensor) -> torch.Tensor:
    """View a tensor's items, of at most 8 bytes, as integers of the same size, whose copies and
    comparisons are those of bits.
    """
    return value.view(_INTEGERS[value.element_size()])


def bytes_of(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, one-dimensional, in row-major order; a view if it is
    contiguous.
    """
    # A view as bytes would lose that values are conjugated when they are read.
    value = value.detach().resolve_conj().resolve_neg()
    if value.element_size() in _INTEGERS:
        value = as_integers(value)
    return value.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(
    data: bytes | bytearray | memoryview, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Make a tensor of these bytes, which it does not share. Raises: ValueError for another number
    of bytes than such a tensor has.
    """
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes are no {dtype} tensor of shape {shape}")
    # Memory of its own, in which every dtype is aligned.
    found = torch.empty(len(data), dtype=torch.uint8)
    found.numpy().data[:] = data
    return found.view(dtype).view(shape)


def copied(value: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the CPU, contiguous."""
    data = bytes_of(value)
    # Memory of its own, in which every dtype is aligned.
    data = data.clone() if data.device.type == "cpu" else data.to("cpu")
    return data.view(value.dtype).view(value.shape)


def copy_(out: torch.Tensor, value: torch.Tensor) -> None:
    """Give `out` these values, in place, where `converts` says that it may."""
    if kind_of(out.dtype) == "packed" and out.dtype == value.dtype:
        out, value = as_integers(out), as_integers(value)
    out.copy_(value)


def torch_saves(dtype: torch.dtype) -> bool:
    """Return whether torch.save takes tensors of a dtype: some packed ones it does not."""
    if kind_of(dtype) == "packed":
        try:
            torch.save(torch.empty(0, dtype=dtype), io.BytesIO())
        except KeyError:
            return False
    return True
