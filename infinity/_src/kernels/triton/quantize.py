"""Group quantization in Triton, bitwise equal to infinity/_src/kernels/quantize.py, in one pass.

A program processes BLOCK_NUMEL elements, which are whole groups. FMA contraction is off
(`enable_fp_fusion=False`), since an FMA would round once where the reference rounds twice, and
divisions are IEEE divisions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from infinity._src.base.torch_device import on_device
from infinity._src.kernels.quantized import Quantized
from infinity._src.kernels.triton.random import (
    INFINITY_BITS,
    NAN_BITS,
    bits_of,
    float_of_bf16,
    load_float,
    random_bits,
    store_float,
)

BLOCK_NUMEL = 2048
SCALE_LEAST_BITS = tl.constexpr(0x00800000)
VALUE_MOST = tl.constexpr(float.fromhex("0x1.fep127"))
ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2^23: adding and subtracting it rounds numbers below 2^22 to integers, to nearest, ties to
even.
"""


def quantize_triton(
    values: torch.Tensor,
    bits: int,
    group_numel: int,
    symmetric: bool,
    key: int | None,
    element: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return codes, scales, zeros. `quantize.quantize` has checked the arguments."""
    flat, columns, stride_row, stride_column = addressed(values)
    numel, device = flat.numel(), flat.device
    groups = -(-numel // group_numel)
    code_dtype = torch.int8 if bits == 8 and symmetric else torch.uint8
    codes = torch.empty(numel if bits == 8 else -(-numel // 2), dtype=code_dtype, device=device)
    scales = torch.empty(groups, dtype=torch.bfloat16, device=device)
    zeros = None if symmetric else torch.empty(groups, dtype=torch.uint8, device=device)
    # Whole groups, so that no two programs share a scale.
    per_program = max(1, BLOCK_NUMEL // group_numel)
    if numel:
        with on_device(device):
            _quantize[(-(-groups // per_program),)](
                raw(flat), codes, raw(scales), codes if zeros is None else zeros,
                numel, codes.numel(), columns, stride_row, stride_column, signed(key or 0), element,
                BF16=values.dtype is torch.bfloat16, STRIDED=columns != 0, SYMMETRIC=symmetric,
                RANDOM=key is not None,
                LEVELS=(1 << bits - symmetric) - 1, BITS=bits, GROUP=group_numel,
                GROUPS=per_program,
                # No FMA: a product contracted with a sum would round once where the reference
                # rounds twice.
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return codes, scales, zeros


def dequantize_triton(quantized: Quantized, out: torch.Tensor) -> None:
    """Write the values into `out`, which has the shape of the quantized values."""
    flat, columns, stride_row, stride_column = addressed(out)
    numel = flat.numel()
    groups, per_program = (
        -(-numel // quantized.group_numel),
        max(1, BLOCK_NUMEL // quantized.group_numel),
    )
    if numel:
        with on_device(flat.device):
            _dequantize[(-(-groups // per_program),)](
                quantized.codes, raw(quantized.scales),
                quantized.codes if quantized.zeros is None else quantized.zeros, raw(flat),
                numel, quantized.codes.numel(), columns, stride_row, stride_column,
                BF16=out.dtype is torch.bfloat16, STRIDED=columns != 0,
                SYMMETRIC=quantized.symmetric, BITS=quantized.bits,
                GROUP=quantized.group_numel, GROUPS=per_program,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    # If `addressed` made a copy, copy the values back to `out`.
    if flat.data_ptr() != out.data_ptr():
        out.copy_(flat.view(out.shape))


def addressed(values: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """Return a tensor that a kernel can address, with its columns, row stride and column stride;
    columns 0: the tensor is contiguous.

    A two-dimensional tensor is addressed by its strides; any other that is not contiguous is
    copied.
    """
    if values.is_contiguous():
        return values, 0, 0, 0
    if values.dim() == 2:
        return values, values.shape[1], values.stride(0), values.stride(1)
    return values.contiguous(), 0, 0, 0


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """View bf16 as int16 with the same bits, since the kernels round by integer arithmetic."""
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


def signed(word: int) -> int:
    """Return the int64 with the bits of a uint64."""
    return word - (1 << 64) if word >> 63 else word


@triton.jit
def place(
    index: tl.tensor,
    columns: tl.tensor,
    stride_row: tl.tensor,
    stride_column: tl.tensor,
    STRIDED: tl.constexpr,
) -> tl.tensor:
    """int64 offsets of elements in a tensor as `addressed` describes it."""
    if STRIDED:
        offset = (index // columns) * stride_row + (index % columns) * stride_column
    else:
        offset = index
    return offset


@triton.jit
def round_even(value: tl.tensor) -> tl.tensor:
    """fp32 below 2^22 in magnitude to the nearest whole number, ties to even."""
    # Not a conversion to int and back, which rounds toward zero.
    return (value + ROUNDER) - ROUNDER


@triton.jit
def round_down(value: tl.tensor) -> tl.tensor:
    """fp32 below 2^31 in magnitude to the next whole number below.

    tl.floor takes a denormal for zero on a GPU.
    """
    whole = value.to(tl.int32).to(tl.float32)
    return tl.where(whole > value, whole - 1.0, whole)


@triton.jit
def _rounded(
    y: tl.tensor, key: tl.tensor, first: tl.tensor, index: tl.tensor, RANDOM: tl.constexpr
) -> tl.tensor:
    if RANDOM:
        random = random_bits(key.to(tl.uint64), first, index)
        below = round_down(y)
        # 23 random bits and half of the last: u lies strictly between 0 and 1.
        u = ((random >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
        code = below + tl.where(u < y - below, 1.0, 0.0)
    else:
        code = round_even(y)
    return code


@triton.jit(do_not_specialize=["key", "element"])
def _quantize(
    x_ptr: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor,
    numel: tl.tensor, code_numel: tl.tensor, columns: tl.tensor, stride_row: tl.tensor,
    stride_column: tl.tensor,
    key: tl.tensor, element: tl.tensor,
    BF16: tl.constexpr, STRIDED: tl.constexpr, SYMMETRIC: tl.constexpr, RANDOM: tl.constexpr,
    LEVELS: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
) -> None:  # fmt: skip
    first_group = tl.program_id(0).to(tl.int64) * GROUPS
    first = first_group * GROUP
    group = first_group + tl.arange(0, GROUPS)
    within = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    index = first + within
    mask = index < numel
    x = load_float(x_ptr + place(index, columns, stride_row, stride_column, STRIDED), mask, BF16)
    # Largest magnitude by bits: for positive floats the order of integers is that of values.
    most = tl.max((bits_of(x) & 0x7FFFFFFF).to(tl.int32), axis=1)
    finite = most < INFINITY_BITS
    # A group with infinity or NaN is computed as zeros, and becomes NaN by its scale.
    x = tl.where(finite[:, None], x, 0.0)
    # Asymmetric with stochastic rounding: one code is reserved, since the zero point is rounded up.
    levels = tl.full((GROUPS,), LEVELS if SYMMETRIC or not RANDOM else LEVELS - 1, tl.float32)
    lowest = tl.zeros((GROUPS,), tl.float32)
    if SYMMETRIC:
        # IEEE division, as in the reference: the default one is approximate.
        exact = tl.div_rn(tl.where(finite, most, 0).to(tl.float32, bitcast=True), levels)
    else:
        lowest = tl.minimum(tl.min(x, axis=1), 0.0)
        exact = tl.div_rn(tl.maximum(tl.max(x, axis=1), 0.0), levels) - tl.div_rn(lowest, levels)
    scale_bits = exact.to(tl.int32, bitcast=True)
    if SYMMETRIC and not RANDOM:
        # Round to nearest if no value can be clipped by that; otherwise round up.
        scale_bits += 0x7FFF + ((scale_bits >> 16) & 1)
    else:
        scale_bits += 0xFFFF
    # At least 2^-126: a group of zeros would divide by zero.
    scale_bits = tl.maximum(scale_bits & -0x10000, SCALE_LEAST_BITS)
    scale = scale_bits.to(tl.float32, bitcast=True)
    y = tl.div_rn(x, tl.broadcast_to(scale[:, None], (GROUPS, GROUP)))
    code = _rounded(y, key, element + first, within, RANDOM).to(tl.int32)
    in_range = group * GROUP < numel
    if SYMMETRIC:
        code = tl.minimum(tl.maximum(code, -LEVELS), LEVELS)
    else:
        zero = tl.div_rn(-lowest, scale)
        # Rounded up with stochastic rounding: a lower zero point would clip the least value.
        zero = (-round_down(-zero) if RANDOM else round_even(zero)).to(tl.int32)
        code = tl.minimum(tl.maximum(code + zero[:, None], 0), LEVELS)
        # The codes of a NaN group are unused: set them to zero.
        code = tl.where(finite[:, None], code, 0)
        tl.store(zeros_ptr + group, tl.where(finite, zero, 0).to(tl.uint8), mask=in_range)
    tl.store(
        scales_ptr + group,
        (tl.where(finite, scale_bits, NAN_BITS) >> 16).to(tl.int16),
        mask=in_range,
    )
    if BITS == 8:
        tl.store(codes_ptr + index, code.to(codes_ptr.dtype.element_ty), mask=mask)
    else:
        # Zero beyond the end: the last byte of an odd number of codes has half of its bits unused.
        nibble = tl.where(mask, code & 15, 0)
        low, high = tl.split(tl.reshape(nibble, (GROUPS * GROUP // 2, 2)))
        byte = first // 2 + tl.arange(0, GROUPS * GROUP // 2)
        tl.store(codes_ptr + byte, (low | (high << 4)).to(tl.uint8), mask=byte < code_numel)


@triton.jit
def _dequantize(
    codes_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor, out_ptr: tl.tensor,
    numel: tl.tensor, code_numel: tl.tensor, columns: tl.tensor, stride_row: tl.tensor,
    stride_column: tl.tensor,
    BF16: tl.constexpr, STRIDED: tl.constexpr, SYMMETRIC: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:  # fmt: skip
    first_group = tl.program_id(0).to(tl.int64) * GROUPS
    group = first_group + tl.arange(0, GROUPS)
    index = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = index < numel
    in_range = group * GROUP < numel
    if BITS == 8:
        code = tl.load(codes_ptr + index, mask=mask, other=0).to(tl.int32)
    else:
        at = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        byte = tl.load(codes_ptr + at, mask=at < code_numel, other=0).to(tl.int32)
        code = tl.reshape(tl.join(byte & 15, byte >> 4), (GROUPS, GROUP))
        if SYMMETRIC:
            # Sign-extend the four-bit code.
            code = code - ((code >> 3) << 4)
    if not SYMMETRIC:
        code = code - tl.load(zeros_ptr + group, mask=in_range, other=0).to(tl.int32)[:, None]
    scale = float_of_bf16(tl.load(scales_ptr + group, mask=in_range, other=0))
    value = code.to(tl.float32) * scale[:, None]
    # Comparisons, not a minimum: NaN stays NaN.
    value = tl.where(value > VALUE_MOST, VALUE_MOST, value)
    value = tl.where(value < -VALUE_MOST, -VALUE_MOST, value)
    store_float(
        out_ptr + place(index, columns, stride_row, stride_column, STRIDED), value, mask, BF16
    )
