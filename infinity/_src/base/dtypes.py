"""torch's dtypes: names, kinds, safetensors names, and bitwise copies of tensors of every kind.

    floating, complex, whole    torch converts between dtypes of these kinds
    packed                      containers of bits (float4_e2m1fn_x2, bits8, int4, …), which torch
                                does not convert; some it cannot copy
    quantized                   their scales are separate from their bits; not supported here
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
"""Name -> dtype, with aliases: "bfloat16", "half", "float16"."""

SAFETENSORS = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64",
    torch.float32: "F32", torch.uint32: "U32", torch.int32: "I32",
    torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16", torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8", torch.uint8: "U8", torch.float4_e2m1fn_x2: "F4", torch.bool: "BOOL",
}  # fmt: skip
"""Dtype -> safetensors name, in the order of tensors in a file: large items first, so that all
tensors are aligned.
"""

FROM_SAFETENSORS = {text: dtype for dtype, text in SAFETENSORS.items()}

# Bytes per item -> dtype for bitwise views of dtypes that torch cannot copy.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Kind = Literal["floating", "complex", "whole", "packed", "quantized"]


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name: "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with a name: torch.bfloat16 for "bfloat16". Raises: ValueError."""
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
    # torch computes with exactly the whole dtypes that safetensors has.
    return "whole" if dtype in SAFETENSORS else "packed"


def converts(there: torch.dtype, here: torch.dtype) -> bool:
    """Return whether values of dtype `there` may be converted to `here`: equal, or of the same kind
    (not packed or quantized).
    """
    kind = kind_of(there)
    return there == here or (kind == kind_of(here) and kind not in ("packed", "quantized"))


# -- sizes in a file of safetensors ----------------------------------------------------------------


def stored_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a tensor's shape in safetensors, which counts both numbers of a float4_e2m1fn_x2 item.
    """
    return (*shape[:-1], 2 * shape[-1]) if dtype is torch.float4_e2m1fn_x2 and shape else shape


def shape_of_stored(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return torch's shape for a shape in safetensors. Raises: ValueError."""
    if dtype is not torch.float4_e2m1fn_x2:
        return shape
    if not shape or shape[-1] % 2:
        raise ValueError(f"F4 of shape {shape} has half an item of torch.float4_e2m1fn_x2")
    return (*shape[:-1], shape[-1] // 2)


def in_safetensors(dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Return whether safetensors can store such a tensor: any shape of its dtypes except a scalar
    of float4_e2m1fn_x2, which would be two numbers.
    """
    return dtype in SAFETENSORS and (dtype is not torch.float4_e2m1fn_x2 or bool(shape))


# -- copies, bit for bit ---------------------------------------------------------------------------


def why_not_bits(value: torch.Tensor) -> str:
    """Return why shape and bits do not determine a tensor, or ""."""
    if kind_of(value.dtype) == "quantized":
        return "its scales are separate from its bits"
    if value.is_nested:
        return "it is nested"
    return "" if value.layout is torch.strided else f"it is of layout {value.layout}"


def check_kept(tensors: Iterable[tuple[str, torch.Tensor]], what: str) -> None:
    """Raise ValueError naming the first of these buffers that `what` cannot store."""
    for name, value in tensors:
        reason = why_not_bits(value)
        if reason:
            raise ValueError(
                f"{what} cannot keep the buffer {name}, a {value.dtype} tensor: {reason}. Give the "
                "model an ordinary tensor (dequantize(), to_dense(), padded), or register it with "
                "persistent=False"
            )


def check_torch_saves(tensors: Iterable[tuple[str, torch.dtype]], what: str) -> None:
    """Raise ValueError naming the first of these tensors that torch.save cannot write."""
    for name, dtype in tensors:
        if not torch_saves(dtype):
            raise ValueError(
                f"{what} is written by torch.save, which does not take {name}, a {dtype} tensor: "
                "inf.save keeps it; for an export give the model another dtype"
            )


def as_integers(value: torch.Tensor) -> torch.Tensor:
    """View a tensor's items of 1, 2, 4 or 8 bytes as integers, for bitwise copies and comparisons.
    """
    return value.view(_INTEGERS[value.element_size()])


def bytes_of(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as uint8 [n], in row-major order; a view if the tensor is contiguous.
    """
    # A view as bytes would ignore a lazy conjugation or negation.
    value = value.detach().resolve_conj().resolve_neg()
    if value.element_size() in _INTEGERS:
        value = as_integers(value)
    return value.contiguous().reshape(-1).view(torch.uint8)


def from_bytes(
    data: bytes | bytearray | memoryview, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Create a tensor from a copy of these bytes. Raises: ValueError for a wrong number of bytes.
    """
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes are no {dtype} tensor of shape {shape}")
    # New memory, aligned for every dtype.
    found = torch.empty(len(data), dtype=torch.uint8)
    found.numpy().data[:] = data
    return found.view(dtype).view(shape)


def copied(value: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a tensor on the CPU."""
    data = bytes_of(value)
    # New memory, aligned for every dtype.
    data = data.clone() if data.device.type == "cpu" else data.to("cpu")
    return data.view(value.dtype).view(value.shape)


def copy_(out: torch.Tensor, value: torch.Tensor) -> None:
    """Copy `value` to `out`, in place; the caller has checked `converts`."""
    if kind_of(out.dtype) == "packed" and out.dtype == value.dtype:
        out, value = as_integers(out), as_integers(value)
    out.copy_(value)


def torch_saves(dtype: torch.dtype) -> bool:
    """Return whether torch.save can write tensors of a dtype; it cannot for some packed ones."""
    if kind_of(dtype) == "packed":
        try:
            torch.save(torch.empty(0, dtype=dtype), io.BytesIO())
        except KeyError:
            return False
    return True
