"""Quantization of values to int8 or int4 codes with a scale per group, and dequantization: ZeRO++'s
blocked quantization.

    q = quantize(weight, bits=8, group_numel=256)               # qwZ: int8 weights to all_gather
    key = rounding_key(seed, step, name)
    q = quantize(grad, bits=4, group_numel=128, key=key)        # qgZ: int4 gradients
    values = dequantize(q, dtype=torch.bfloat16)

Groups are consecutive elements of the flat (row-major) values; the last may be short. Per group

    symmetric     value = code * scale             code in -127 .. 127 (int8), -7 .. 7 (int4)
    asymmetric    value = (code - zero) * scale    code in 0 .. 255, 0 .. 15

with two bytes of scale, and one byte of zero point if asymmetric.

**Scales are bf16**: half the bytes of fp32, and since a code (minus its zero point) has 8
significant bits and a bf16 has 8, every product is exact in fp32. So `dequantize` rounds once, to
its dtype; zero is preserved; every implementation gives the same bits. **Rounding of the scale**:

- to nearest, symmetric: the scale is the largest magnitude / 127 (7), rounded to the nearest bf16.
  The scale's relative error is at most 1/257, so the largest value has code 127 (7) and an error of
  at most half a step, like all others. Quantization is idempotent: fp32 values of a round trip,
  quantized again, give the same codes and scales.
- otherwise the scale is rounded up: for asymmetric codes, which must span the range, and for
  stochastic rounding, where clipping would bias the mean. With both, one code is reserved: the
  scale is the range / 254 (14), and the zero point is rounded up. A second round trip may then
  choose a finer scale.

**Error**: at most half a step, |value - x| <= scale / 2 (within fp32's rounding of x / scale), or
one step with stochastic rounding, before the rounding to `dtype`. Scales are at least 2^-126, so
values below 2^-127 may become zero. Dequantized values are clamped to bf16's range.

**Stochastic rounding** (`key`) chooses one of the two neighbours, with probabilities that preserve
the expected value (to 2^-24), and only depends on (seed, step, parameter, element):
infinity/_src/kernels/random_bits.py.

**Not finite**: a group with infinity or NaN has the scale NaN, and all its values decode to NaN.

Source: ZeRO++ (Wang et al. 2023), section 3.1 (blocks) and 3.3 (gradients), which does not specify
rounding and NaN.
"""

from __future__ import annotations

import dataclasses

import torch

from infinity._src.kernels import choice
from infinity._src.kernels.quantized import DTYPES, VALUE_MOST, Quantized, check_groups
from infinity._src.kernels.random_bits import random_bits, shift_right
from infinity._src.kernels.trial import Trial, sample

# 2^-126, the least normal fp32: the minimum of scales.
_SCALE_LEAST_BITS = 0x00800000
_NAN_BITS = 0x7FC00000


def quantize(
    values: torch.Tensor,
    *,
    bits: int,
    group_numel: int,
    symmetric: bool = True,
    key: int | None = None,
    element: int = 0,
) -> Quantized:
    """Quantize `values` in groups of int8 or int4.

    values: bf16, fp16 or fp32, any shape and strides. bits: 8 or 4. group_numel: a power of two, 64
    to 1024. key: for stochastic rounding (`random_bits.rounding_key`), with `element`, the index of
    the first value in its parameter; None: to nearest, ties to even. Raises: ValueError for other
    arguments.
    """
    check_groups(bits, group_numel)
    if values.dtype not in DTYPES:
        raise ValueError(f"values are {values.dtype}: quantize bfloat16, float16 or float32")
    if element < 0:
        raise ValueError(f"element={element}: the index of the first value is not negative")
    values = values.detach()
    with torch.no_grad():
        trial = quantize_trial(values.dtype, bits, group_numel, symmetric, key is not None)
        which = choice.implementation("group_quantize", values.device, trial)
        return _quantize(which, values, bits, group_numel, symmetric, key, element)


def _quantize(
    which: str,
    values: torch.Tensor,
    bits: int,
    group_numel: int,
    symmetric: bool,
    key: int | None,
    element: int,
) -> Quantized:
    if which == "torch":
        return quantize_torch(values, bits, group_numel, symmetric, key, element)
    from infinity._src.kernels.triton.quantize import quantize_triton

    codes, scales, zeros = quantize_triton(values, bits, group_numel, symmetric, key, element)
    return Quantized(codes, scales, zeros, values.shape, values.dtype, bits, group_numel)


def dequantize(
    quantized: Quantized, *, dtype: torch.dtype | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Dequantize into `out`, or into a new tensor of `quantized.shape`.

    dtype: bf16, fp16 or fp32; None: the dtype of `out`, else of the original values. out: any
    strides without overlap, on the same device. Raises: ValueError for another dtype or shape.
    """
    if out is None:
        out = torch.empty(
            quantized.shape, dtype=dtype or quantized.dtype, device=quantized.codes.device
        )
    if out.dtype not in DTYPES or dtype not in (None, out.dtype):
        raise ValueError(
            f"dtype={dtype}, out is {out.dtype}: both must be the same of bfloat16, float16 and "
            "float32"
        )
    if out.shape != quantized.shape or out.device != quantized.codes.device:
        raise ValueError(
            f"out is {list(out.shape)} on {out.device}, and the values are {list(quantized.shape)} "
            f"on {quantized.codes.device}"
        )
    with torch.no_grad():
        trial = dequantize_trial(
            out.dtype, quantized.bits, quantized.group_numel, quantized.symmetric
        )
        which = choice.implementation("group_dequantize", out.device, trial)
        _dequantize(which, quantized, out)
    return out


def _dequantize(which: str, quantized: Quantized, out: torch.Tensor) -> None:
    if which == "torch":
        out.copy_(dequantize_torch(quantized).reshape(quantized.shape))
        return
    from infinity._src.kernels.triton.quantize import dequantize_triton

    dequantize_triton(quantized, out)


def levels_of(bits: int, symmetric: bool) -> int:
    """Return the largest code: 127 or 7 if symmetric, else 255 or 15."""
    return (1 << bits - symmetric) - 1


# -- trials of Triton's kernels --------------------------------------------------------------------


def quantize_trial(
    dtype: torch.dtype, bits: int, group_numel: int, symmetric: bool, random: bool
) -> Trial:
    """Return the trial of `quantize` on contiguous values. random: with a key."""
    return Trial(_quantized_sample, (dtype, bits, group_numel, symmetric, random))


def dequantize_trial(dtype: torch.dtype, bits: int, group_numel: int, symmetric: bool) -> Trial:
    """Return the trial of `dequantize` into contiguous values of `dtype`."""
    return Trial(_dequantized_sample, (dtype, bits, group_numel, symmetric))


def _quantized_sample(
    which: str,
    device: torch.device,
    dtype: torch.dtype,
    bits: int,
    group_numel: int,
    symmetric: bool,
    random: bool,
) -> dict[str, torch.Tensor]:
    values = sample(dtype, finite=False).to(device)
    q = _quantize(which, values, bits, group_numel, symmetric, 7 if random else None, 64)
    zeros = {} if q.zeros is None else {"zeros": q.zeros}
    return {"codes": q.codes, "scales": q.scales, **zeros}


def _dequantized_sample(
    which: str,
    device: torch.device,
    dtype: torch.dtype,
    bits: int,
    group_numel: int,
    symmetric: bool,
) -> dict[str, torch.Tensor]:
    # Finite values only, since NaN may decode with any payload.
    q = quantize_torch(sample(torch.float32), bits, group_numel, symmetric, None, 0)
    zeros = None if q.zeros is None else q.zeros.to(device)
    placed = dataclasses.replace(
        q, codes=q.codes.to(device), scales=q.scales.to(device), zeros=zeros
    )
    out = torch.empty(q.shape, dtype=dtype, device=device)
    _dequantize(which, placed, out)
    return {"values": out}


# -- the reference, in torch -----------------------------------------------------------------------


def quantize_torch(
    values: torch.Tensor,
    bits: int,
    group_numel: int,
    symmetric: bool,
    key: int | None,
    element: int,
) -> Quantized:
    """Reference of `quantize`, which has checked the arguments."""
    numel, levels = values.numel(), float(levels_of(bits, symmetric))
    groups = -(-numel // group_numel)
    # Pad the last group with zeros, which do not change its maximum.
    x = torch.zeros(groups * group_numel, dtype=torch.float32, device=values.device)
    x[:numel] = values.reshape(-1)
    x = x.view(groups, group_numel)
    finite = torch.isfinite(x).all(dim=1)
    # A group with infinity or NaN is computed as zeros; its scale is set to NaN.
    x = torch.where(finite[:, None], x, torch.zeros_like(x))
    # Divisors are tensors: on a GPU torch multiplies by a scalar's reciprocal, which rounds twice.
    divisor = torch.full((), levels if symmetric or key is None else levels - 1, device=x.device)
    if symmetric:
        exact = x.abs().amax(dim=1) / divisor
    else:
        exact = x.amax(dim=1).clamp(min=0) / divisor - x.amin(dim=1).clamp(max=0) / divisor
    # Round up if codes must span the range, or if clipping would bias the mean.
    scale = _rounded_scale(exact, up=not symmetric or key is not None)
    y = x / scale[:, None]
    zeros = None
    if symmetric:
        code = _rounded(y, key, element).clamp(-levels, levels)
    else:
        exact = x.amin(dim=1).clamp(max=0).neg() / scale
        # With stochastic rounding the zero point is rounded up, since clipping the lowest value
        # would bias the mean.
        zero = torch.round(exact) if key is None else torch.ceil(exact)
        code = (_rounded(y, key, element) + zero[:, None]).clamp(0, levels)
        code = torch.where(finite[:, None], code, torch.zeros_like(code))
        zeros = torch.where(finite, zero, torch.zeros_like(zero)).to(torch.uint8)
    # Write NaN by its bits: torch's vector and scalar loops convert NaN to bf16 differently.
    bits16 = scale.view(torch.int32).masked_fill(~finite, _NAN_BITS) >> 16
    scales = bits16.to(torch.int16).view(torch.bfloat16)
    flat = code.reshape(-1)[:numel]
    codes = _packed(flat, bits, symmetric)
    return Quantized(codes, scales, zeros, values.shape, values.dtype, bits, group_numel)


def _rounded_scale(exact: torch.Tensor, *, up: bool) -> torch.Tensor:
    """Round `exact` to bf16 (to nearest, or up), at least 2^-126; returned as fp32."""
    bits = exact.view(torch.int32)
    # Add to the 16 bits that bf16 drops: all ones to round up; or, to round to nearest with ties to
    # even, just under half, plus the last bit that bf16 keeps.
    bits = bits + (0xFFFF if up else 0x7FFF + (bits >> 16 & 1))
    # At least 2^-126, so that a group of zeros does not divide by zero.
    return (bits & -0x10000).clamp(min=_SCALE_LEAST_BITS).view(torch.float32)


def _rounded(y: torch.Tensor, key: int | None, element: int) -> torch.Tensor:
    """Round to integers: to nearest, ties to even, or with a key stochastically."""
    if key is None:
        return torch.round(y)
    below = torch.floor(y)
    # 23 random bits plus a half: u is strictly between 0 and 1, so integers are unchanged.
    u = (
        shift_right(random_bits(key, element, y.numel(), y.device), 9).to(torch.float32) + 0.5
    ) * 2.0**-23
    return below + (u.view_as(y) < y - below).to(torch.float32)


def _packed(code: torch.Tensor, bits: int, symmetric: bool) -> torch.Tensor:
    if bits == 8:
        return code.to(torch.int8 if symmetric else torch.uint8)
    nibble = code.to(torch.int32) & 15
    if nibble.numel() % 2:
        nibble = torch.cat([nibble, nibble.new_zeros(1)])
    return (nibble[0::2] | nibble[1::2] << 4).to(torch.uint8)


def dequantize_torch(quantized: Quantized) -> torch.Tensor:
    """Reference of `dequantize`: returns fp32 [numel]."""
    code = quantized.codes.to(torch.int32)
    if quantized.bits == 4:
        code = torch.stack([code & 15, code >> 4], dim=1).reshape(-1)[: quantized.numel]
        if quantized.symmetric:
            # Sign-extend the nibble.
            code = code - (code >> 3 << 4)
    # Index the groups instead of reshaping, since the last group may be short.
    group = torch.arange(code.numel(), device=code.device) // quantized.group_numel
    if quantized.zeros is not None:
        code = code - quantized.zeros.to(torch.int32)[group]
    values = code.to(torch.float32) * quantized.scales.to(torch.float32)[group]
    # The largest code times a rounded-up scale may exceed bf16's range.
    return values.clamp(-VALUE_MOST, VALUE_MOST)
