"""State formats in numpy: fp32 masters and moments into the sections of a format, and back.

    sections = encode_sections(format, master, moments)      # to nearest; with `key`: unbiased random rounding
    master, moments = decode_sections(format, sections)

It is the reference of native/update_codec.h, bit for bit, and what reads and writes
optimizer states outside an update.

**24-bit master** (`hi` bf16, `lo` int8): the upper 24 bits of the fp32, rounded at random in an update, since an update
smaller than half of the last bit would else be lost every time. NaN is canonical, as in the split master.

**bf16 moments**: rounded at random, for the same reason (beta2 = 0.999 moves a second moment by less than a bf16's last bit).

**8-bit moments**: groups of 64 elements share a scale, their maximum rounded up to bf16. Codes are companded, so that small
numbers in a group with a large one survive:

    moment 0   c in -127 .. 127    sign(c) * c^2 / 127^2 * scale     down to 1/16,129 of the largest
    moment 1   c in 0 .. 255       c^4 / 255^4 * scale               down to 1/4,228,250,625 of the largest

A number between two codes goes to one of them at random, with the probabilities that keep its expected value. Two exceptions,
both of moment 1, which a square root divides by: above zero it never becomes zero (code 1 at least), and scales are at
least 2^-94, so that code 1 is not zero either. A group that holds infinity or NaN (or, in moment 1, something negative)
becomes NaN as a whole: its scale is NaN. Nothing that is not finite ever comes back as a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity._src.kernels.rounding import random_bits
from infinity.aio import Format
from infinity.aio._records import QUANT_GROUP, GradSection, Master, Moments

Array = npt.NDArray[Any]

_NAN_BITS = np.uint32(0x7FC00000)
_INFINITY_BITS = np.uint32(0x7F800000)
_SCALE_LEAST, _SCALE_MOST = 0x1080, 0x7F7F
_ONE = np.float32
_SQUARE_STEP = _ONE(1) / _ONE(16129)
_FOURTH_STEP = _ONE(1) / _ONE(4228250625)


def _bits(values: Array) -> Array:
    return np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)


def _canonical(values: Array) -> Array:
    bits = _bits(values)
    return np.where((bits & np.uint32(0x7FFFFFFF)) > _INFINITY_BITS, _NAN_BITS, bits)


# -- masters -----------------------------------------------------------------------------------------------------------


def _encode_master(kind: Master, master: Array, random: Array | None) -> list[Array]:
    if kind is Master.FP32:
        return [master.astype(np.float32)]
    if kind is Master.FP16:
        with np.errstate(over="ignore"):  # too large becomes infinity, as in torch
            half = master.astype(np.float16)
        return [np.where(np.isnan(half), np.float16(np.nan), half), master.astype(np.float32)]
    bits = _canonical(master)
    if kind is Master.SPLIT8:
        if random is None:
            bits = bits + np.uint32(0x7F) + (bits >> np.uint32(8) & np.uint32(1))  # to nearest, ties to even
        else:
            bits = bits + (random >> np.uint32(24))
        bits = bits & np.uint32(0xFFFFFF00)
    hi = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    if kind is Master.SPLIT8:
        return [hi, (bits >> np.uint32(8)).astype(np.uint8).view(np.int8)]
    return [hi, bits.astype(np.uint16).view(np.int16)]


def _decode_master(kind: Master, sections: Sequence[Array]) -> Array:
    if kind is Master.FP32:
        return np.array(sections[0].view(np.float32))
    if kind is Master.FP16:
        return np.array(sections[1].view(np.float32))
    high = sections[0].view(np.uint16).astype(np.uint32) << np.uint32(16)
    if kind is Master.SPLIT8:
        low = sections[1].view(np.int8).astype(np.int32) << 8
    else:
        low = sections[1].view(np.int16).astype(np.int32)
    joined: Array = (high + low.view(np.uint32)).view(np.float32)
    return joined


# -- moments -----------------------------------------------------------------------------------------------------------


def _draw(state_format: Format, moment: int, random: Array) -> tuple[Array, int]:
    """The bits of `random` that round a moment, and how many they are: 12 beside a 24-bit master, which takes 8; else 16."""
    width = 12 if state_format.master is Master.SPLIT8 else 16
    shift = width if moment == 0 else 0
    return random >> np.uint32(shift) & np.uint32((1 << width) - 1), width


def _encode_bf16(values: Array, moment: int, drawn: tuple[Array, int] | None) -> Array:
    bits = _canonical(values)
    if drawn is None:
        noise = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    else:
        spare = 16 - drawn[1]
        noise = drawn[0] << np.uint32(spare) | np.uint32((1 << spare) >> 1)
    rounded = (bits + noise) >> np.uint32(16)
    if moment == 1:
        rounded = np.maximum(rounded, bits != 0)
    encoded: Array = rounded.astype(np.uint16)
    return encoded


def _grouped(values: Array) -> Array:
    """[numel] -> [groups, QUANT_GROUP], zeros after the end."""
    groups = -(-values.size // QUANT_GROUP)
    out = np.zeros(groups * QUANT_GROUP, values.dtype)
    out[: values.size] = values
    return out.reshape(groups, QUANT_GROUP)


def _scales(groups: Array, moment: int) -> Array:
    """uint16 [groups]: the bits of a bf16 each."""
    bits = groups.view(np.uint32)
    most = (bits & np.uint32(0x7FFFFFFF) if moment == 0 else bits).max(axis=1)
    up = np.clip((most.astype(np.uint64) + 0xFFFF) >> np.uint64(16), _SCALE_LEAST, _SCALE_MOST)
    up = np.where(most == 0, 0, up)
    return np.where(most >= _INFINITY_BITS, 0x7FC0, up).astype(np.uint16)


def _codes(groups: Array, scale: Array, moment: int, u: Array | np.float32) -> Array:
    """Codes [groups, QUANT_GROUP] of finite groups with a scale; of others zeros. u: in [1, 2); 1.5 rounds to nearest."""
    plain = (scale > 0) & (scale <= _SCALE_MOST)
    scales = np.where(plain, scale.astype(np.uint32) << np.uint32(16), np.uint32(0x3F800000)).view(np.float32)
    x = np.where(plain[:, None], groups, _ONE(0))
    factor = (_ONE(16129 if moment == 0 else 4228250625) / scales)[:, None]
    y = np.abs(x) * factor
    if moment == 0:
        c = np.floor(np.sqrt(y))
        step = c + c + _ONE(1)
        up = u * step < (y - c * c) + step
        number = np.minimum(c.astype(np.int32) + up, 127)
        signed: Array = np.where(x < 0, -number, number).astype(np.int8).view(np.uint8)
        return signed
    c = np.floor(np.sqrt(np.sqrt(x) * np.sqrt(factor)))
    below, above = c * c, (c + _ONE(1)) * (c + _ONE(1))
    base = below * below
    step = above * above - base
    up = u * step < (y - base) + step
    number = np.minimum(c.astype(np.int32) + up, 255)
    return np.where((number == 0) & (x > 0), 1, number).astype(np.uint8)


def _encode_q8(values: Array, moment: int, drawn: tuple[Array, int] | None) -> tuple[Array, Array]:
    """Codes uint8 [numel], scales uint16 [groups]."""
    groups = _grouped(values.astype(np.float32) + _ONE(0))  # -0.0 has no code
    scale = _scales(groups, moment)
    u: Array | np.float32 = _ONE(1.5)
    if drawn is not None:  # one, and the random bits in the mantissa, and half of the last of them
        spare = 23 - drawn[1]
        bits = np.uint32(0x3F800000) | _grouped(drawn[0]) << np.uint32(spare) | np.uint32((1 << spare) >> 1)
        u = bits.view(np.float32)
    return _codes(groups, scale, moment, u).reshape(-1)[: values.size], scale


def _decode_q8(codes: Array, scale: Array, moment: int) -> Array:
    scales = (scale.astype(np.uint32) << np.uint32(16)).view(np.float32)[:, None]
    if moment == 0:
        c = _grouped(codes.view(np.int8)).astype(np.float32)
        values = ((c * np.abs(c)) * _SQUARE_STEP) * scales
    else:
        c = _grouped(codes.view(np.uint8)).astype(np.float32)
        square = c * c
        values = ((square * square) * _FOURTH_STEP) * scales
    flat: Array = values.reshape(-1)[: codes.size]
    return flat


# -- both --------------------------------------------------------------------------------------------------------------


def _check(state_format: Format) -> None:
    if state_format.master is Master.RAW:
        raise ValueError("a RAW chunk has no optimizer states: it is the parameter alone")
    if state_format.grad is not GradSection.NONE:
        raise ValueError("spilled gradients are no optimizer state: pass format.with_grad(GradSection.NONE)")


def encode_sections(
    state_format: Format,
    master: Array,
    moments: Sequence[Array],
    *,
    key: int | None = None,
    element: int = 0,
) -> list[Array]:
    """The sections of a format (without `grad`), one 1-D array each, for fp32 values [numel].

    Rounds to nearest; with a `key` (see `rounding_key`) 24-bit masters, bf16 and 8-bit moments at random as an update does,
    `element` being the parameter's index of the first. In 8-bit formats that first element starts a group. Arrays: hi uint16
    (bf16 bits), lo int16 or int8, fp32 and fp16 as they are, bf16 moments uint16, codes uint8, scales uint16
    [groups * count]. Raises: ValueError for a format without states, or another number of moments than it has.
    """
    _check(state_format)
    if len(moments) != state_format.count:
        raise ValueError(f"{state_format} has {state_format.count} moments, {len(moments)} were given")
    random = None if key is None else random_bits(key, element, master.size)
    with np.errstate(all="ignore"):
        sections = _encode_master(state_format.master, master, random)
        scales = []
        for index, values in enumerate(moments):
            if state_format.moments is Moments.FP32:
                sections.append(values.astype(np.float32))
                continue
            if random is not None and index == 2 and key is not None:
                random = random_bits(key ^ 0x5555555555555555, element, master.size)
            drawn = None if random is None else _draw(state_format, index, random)
            if state_format.moments is Moments.BF16:
                sections.append(_encode_bf16(values, index, drawn))
            else:
                codes, scale = _encode_q8(values, index, drawn)
                sections.append(codes)
                scales.append(scale)
        if scales:
            sections.append(np.stack(scales, axis=1).reshape(-1))
    return sections


def decode_sections(state_format: Format, sections: Sequence[Array]) -> tuple[Array, list[Array]]:
    """(master, moments) as fp32 [numel] each, fresh arrays, from the sections of a format (without `grad`).

    sections: 1-D contiguous arrays of any dtype of the section's bytes. Raises: ValueError for a format without states.
    """
    _check(state_format)
    bare = [section.view(np.uint8) for section in sections]
    first, count = state_format.master_count, state_format.count
    moments = []
    with np.errstate(all="ignore"):
        for index in range(count):
            section = bare[first + index]
            if state_format.moments is Moments.FP32:
                moments.append(section.view(np.float32).copy())
            elif state_format.moments is Moments.BF16:
                moments.append((section.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32))
            else:
                scale = bare[first + count].view(np.uint16).reshape(-1, count)[:, index]
                moments.append(_decode_q8(section, scale, index))
        return _decode_master(state_format.master, bare), moments
