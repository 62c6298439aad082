"""Wires and ordered sums in Triton, bitwise equal to infinity/_src/kernels/comm_codec.py, in one
pass.

A program processes BLOCK_NUMEL elements, a multiple of every group and of the codes' padding. The
pieces of a sum may lie at any addresses; the kernel reads these from a small table on the device.
FMA contraction is off (`enable_fp_fusion=False`), and divisions are IEEE divisions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from infinity._src.base.torch_device import on_device, table_on
from infinity._src.kernels.quantized import codes_bytes
from infinity._src.kernels.triton.quantize import (
    BLOCK_NUMEL,
    SCALE_LEAST_BITS,
    VALUE_MOST,
    raw,
    round_down,
    round_even,
    signed,
)
from infinity._src.kernels.triton.random import (
    INFINITY_BITS,
    NAN_BITS,
    bf16_bits,
    bits_of,
    canonical_bits,
    float_of_bf16,
    load_float,
    random_bits,
    store_float,
)

BF16, FP16, FP32 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_ALIGN_BYTES = 16
"""If all addresses are multiples of this, the kernels read in vectors."""
SCALES_PADDED = tl.constexpr(32)
"""Scales are padded to a multiple of this many."""


def encode_triton(
    values: torch.Tensor,
    wire: torch.Tensor,
    bits: int,
    group_numel: int,
    key: int | None,
    element: int,
    error: torch.Tensor | None,
) -> None:
    """Encode as `comm_codec.encode`, which has checked the arguments."""
    numel, codes = values.numel(), codes_bytes(values.numel(), bits)
    # The scales follow the codes and their padding to 64 bytes.
    scales = wire[codes:].view(torch.int16)
    if numel:
        with on_device(values.device):
            _encode[(-(-numel // BLOCK_NUMEL),)](
                raw(values), values if error is None else raw(error), wire, scales,
                numel, codes, scales.numel(), signed(key or 0), element,
                FROM_BF16=values.dtype is torch.bfloat16, ERROR=error is not None,
                ERROR_BF16=error is not None and error.dtype is torch.bfloat16,
                RANDOM=key is not None,
                LEVELS=127 if bits == 8 else 7, BITS=bits, GROUP=group_numel,
                GROUPS=BLOCK_NUMEL // group_numel,
                # No FMA: a product contracted with a sum would round once where the reference
                # rounds twice.
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip


def decode_sum_triton(
    wires: Sequence[torch.Tensor], out: torch.Tensor, bits: int, group_numel: int, divisor: int
) -> None:
    """Decode and sum as `comm_codec.decode_sum`, which has checked the arguments."""
    numel = out.numel()
    if numel:
        table, aligned = _table(wires, out.device)
        with on_device(out.device):
            _decode_sum[(-(-numel // BLOCK_NUMEL),)](
                table, _words(out), numel, codes_bytes(numel, bits), len(wires), float(divisor),
                DIVIDE=divisor != 1, TO=_DTYPES[out.dtype], BITS=bits, GROUP=group_numel,
                GROUPS=BLOCK_NUMEL // group_numel,
                ALIGNED=aligned, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip


def sum_in_order_triton(pieces: Sequence[torch.Tensor], out: torch.Tensor, divisor: int) -> None:
    """Sum as `comm_codec.sum_in_order`, which has checked the arguments."""
    numel = out.numel()
    if numel:
        table, aligned = _table(pieces, out.device)
        with on_device(out.device):
            _sum_in_order[(-(-numel // BLOCK_NUMEL),)](
                table, _words(out), numel, len(pieces), float(divisor),
                DIVIDE=divisor != 1, FROM=_DTYPES[pieces[0].dtype], TO=_DTYPES[out.dtype],
                BLOCK=BLOCK_NUMEL,
                ALIGNED=aligned, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip


def _table(tensors: Sequence[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, bool]:
    """Copy the tensors' addresses to the device, without waiting. Return them, int64 [tensors], and
    whether all are multiples of _ALIGN_BYTES.
    """
    addresses = [tensor.data_ptr() for tensor in tensors]
    # `table_on` copies on the current stream, on which the kernel reads the table.
    table = table_on(device, np.array(addresses, np.int64))
    return table, all(address % _ALIGN_BYTES == 0 for address in addresses)


def _words(out: torch.Tensor) -> torch.Tensor:
    """View floats as integers with the same bits: the kernels store one bit pattern for NaN."""
    return out.view(torch.int32 if out.dtype is torch.float32 else torch.int16)


@triton.jit(do_not_specialize=["key", "element"])
def _encode(
    x_ptr: tl.tensor, error_ptr: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor,
    numel: tl.tensor, codes_bytes: tl.tensor, scales_numel: tl.tensor, key: tl.tensor,
    element: tl.tensor,
    FROM_BF16: tl.constexpr, ERROR: tl.constexpr, ERROR_BF16: tl.constexpr, RANDOM: tl.constexpr,
    LEVELS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
) -> None:  # fmt: skip
    first_group = tl.program_id(0).to(tl.int64) * GROUPS
    first = first_group * GROUP
    group = first_group + tl.arange(0, GROUPS)
    within = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    index = first + within
    mask = index < numel
    x = load_float(x_ptr + index, mask, FROM_BF16)
    if ERROR:
        x = x + load_float(error_ptr + index, mask, ERROR_BF16)
    # Compare magnitudes as integers: exact, and NaN is above infinity.
    most = tl.max((bits_of(x) & 0x7FFFFFFF).to(tl.int32), axis=1)
    # A group with infinity or NaN is computed as zeros, and becomes NaN by its scale.
    finite = most < INFINITY_BITS
    x = tl.where(finite[:, None], x, 0.0)
    levels = tl.full((GROUPS,), LEVELS, tl.float32)
    # IEEE division, as in the reference: the default one is approximate.
    scale_bits = tl.div_rn(tl.where(finite, most, 0).to(tl.float32, bitcast=True), levels).to(
        tl.int32, bitcast=True
    )
    if RANDOM:
        # Round up: clipping would bias the mean.
        scale_bits += 0xFFFF
    else:
        # To nearest, ties to even, on the bits of bf16.
        scale_bits += 0x7FFF + ((scale_bits >> 16) & 1)
    scale_bits = tl.maximum(scale_bits & -0x10000, SCALE_LEAST_BITS)
    scale = tl.broadcast_to(scale_bits.to(tl.float32, bitcast=True)[:, None], (GROUPS, GROUP))
    y = tl.div_rn(x, scale)
    if RANDOM:
        random = random_bits(key.to(tl.uint64), element + first, within)
        below = round_down(y)
        u = ((random >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
        code = (below + tl.where(u < y - below, 1.0, 0.0)).to(tl.int32)
    else:
        code = round_even(y).to(tl.int32)
    code = tl.minimum(tl.maximum(code, -LEVELS), LEVELS)
    if ERROR:
        # The error of the round trip, which the next call adds to its values.
        left = tl.where(finite[:, None], x - _clamped(code.to(tl.float32) * scale), 0.0)
        store_float(error_ptr + index, left, mask, ERROR_BF16)
    # Padding is zero, so that equal values have equal bytes.
    code = tl.where(mask, code, 0)
    if BITS == 8:
        tl.store(codes_ptr + index, code.to(tl.uint8), mask=index < codes_bytes)
    else:
        nibble = code & 15
        # An even element is the low half of its byte.
        low, high = tl.split(tl.reshape(nibble, (GROUPS * GROUP // 2, 2)))
        byte = first // 2 + tl.arange(0, GROUPS * GROUP // 2)
        tl.store(codes_ptr + byte, (low | (high << 4)).to(tl.uint8), mask=byte < codes_bytes)
    # NaN by its bits, as in the reference.
    stored = (tl.where(finite, scale_bits, NAN_BITS) >> 16).to(tl.int16)
    tl.store(scales_ptr + group, stored, mask=group * GROUP < numel)
    # The last program also writes the padding of the scales, zeros.
    if first + GROUPS * GROUP >= numel:
        pad = (numel + GROUP - 1) // GROUP + tl.arange(0, SCALES_PADDED)
        tl.store(scales_ptr + pad, tl.zeros((SCALES_PADDED,), tl.int16), mask=pad < scales_numel)


@triton.jit
def _clamped(value: tl.tensor) -> tl.tensor:
    value = tl.where(value > VALUE_MOST, VALUE_MOST, value)
    # Comparisons, not a minimum: NaN stays NaN.
    return tl.where(value < -VALUE_MOST, -VALUE_MOST, value)


@triton.jit
def _decoded(
    address: tl.tensor, codes_bytes: tl.tensor, first_group: tl.tensor, numel: tl.tensor,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, ALIGNED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """fp32 [GROUPS, GROUP]: a wire's values; padding decodes to zero."""
    group = first_group + tl.arange(0, GROUPS)
    if BITS == 8:
        codes = address.to(tl.pointer_type(tl.int8))
        # A hint on the pointer, since a hint on the integer is lost in the conversion.
        if ALIGNED:
            codes = tl.multiple_of(codes, 16)
        at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        code = tl.load(codes + at, mask=at < codes_bytes, other=0).to(tl.int32)
    else:
        packed = address.to(tl.pointer_type(tl.uint8))
        if ALIGNED:
            packed = tl.multiple_of(packed, 16)
        at = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        byte = tl.load(packed + at, mask=at < codes_bytes, other=0).to(tl.int32)
        code = tl.reshape(tl.join(byte & 15, byte >> 4), (GROUPS, GROUP))
        # Sign-extend the four-bit code.
        code = code - ((code >> 3) << 4)
    scales = (address + codes_bytes).to(tl.pointer_type(tl.int16))
    scale = float_of_bf16(tl.load(scales + group, mask=group * GROUP < numel, other=0))
    return _clamped(code.to(tl.float32) * scale[:, None])


@triton.jit
def _store_rounded(
    out_ptr: tl.tensor,
    value: tl.tensor,
    divisor: tl.tensor,
    mask: tl.tensor,
    DIVIDE: tl.constexpr,
    TO: tl.constexpr,
) -> None:
    """Store value / divisor, rounded once; out_ptr: of integers with the bits of floats."""
    if DIVIDE:
        value = tl.div_rn(value, tl.zeros_like(value) + divisor)
    if TO == BF16:
        tl.store(out_ptr, bf16_bits(value), mask=mask)
    elif TO == FP16:
        half = value.to(tl.float16).to(tl.int16, bitcast=True)
        # By bits: the payload of an fp16 NaN depends on the device.
        nan = (bits_of(value) & 0x7FFFFFFF) > INFINITY_BITS
        tl.store(out_ptr, tl.where(nan, 0x7E00, half).to(tl.int16), mask=mask)
    else:
        tl.store(out_ptr, canonical_bits(value).to(tl.int32, bitcast=True), mask=mask)


# Not specialized: one compiled kernel serves any number of ranks.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["table_ptr"])
def _decode_sum(
    table_ptr: tl.tensor, out_ptr: tl.tensor, numel: tl.tensor, codes_bytes: tl.tensor,
    count: tl.tensor, divisor: tl.tensor,
    DIVIDE: tl.constexpr, TO: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    first_group = tl.program_id(0).to(tl.int64) * GROUPS
    index = (first_group + tl.arange(0, GROUPS))[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    # Start with the first piece, not with zero, and add in the order of ranks: a single piece keeps
    # its bits, -0.0 included.
    total = _decoded(
        tl.load(table_ptr), codes_bytes, first_group, numel, BITS, GROUP, GROUPS, ALIGNED
    )
    k = 1
    while k < count:
        total += _decoded(
            tl.load(table_ptr + k), codes_bytes, first_group, numel, BITS, GROUP, GROUPS, ALIGNED
        )
        k += 1
    _store_rounded(out_ptr + index, total, divisor, index < numel, DIVIDE, TO)


@triton.jit
def _piece(
    address: tl.tensor, index: tl.tensor, mask: tl.tensor, FROM: tl.constexpr, ALIGNED: tl.constexpr
) -> tl.tensor:
    """fp32: elements of a piece."""
    # Load bf16 as integers: `load_float` widens it by its bits, alike on every device.
    if FROM == BF16:
        pointer = address.to(tl.pointer_type(tl.int16))
    elif FROM == FP16:
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return load_float(pointer + index, mask, FROM == BF16)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["table_ptr"])
def _sum_in_order(
    table_ptr: tl.tensor, out_ptr: tl.tensor, numel: tl.tensor, count: tl.tensor,
    divisor: tl.tensor,
    DIVIDE: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr, BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    total = _piece(tl.load(table_ptr), index, mask, FROM, ALIGNED)
    k = 1
    while k < count:
        total += _piece(tl.load(table_ptr + k), index, mask, FROM, ALIGNED)
        k += 1
    _store_rounded(out_ptr + index, total, divisor, mask, DIVIDE, TO)
