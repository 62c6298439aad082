"""Codec of state formats: fp32 masters and moments to the sections of a format, and back, on any
device.

    sections = encode_sections(format, master, moments)   # to nearest; with `key` stochastically
    master, moments = decode_sections(format, sections)

Updates on a device, access to single states, and checkpoints use this codec. Its results are bit
for bit those of native/kernels/update_codec.h: every line rounds once, and divisors are tensors,
since on a GPU torch multiplies by a scalar's reciprocal. Integers are wrapping int32: int64 is
several times slower on a CPU.

**Split master** (`hi` bf16, `lo` int16): the fp32 bits are `hi` << 16 plus `lo`, where `hi` is the
fp32 rounded to nearest, ties to even, as torch rounds. Two masters are half-way to a neighbour of
an even `hi`, with `lo` = -32768 and 32768. int16 cannot represent 32768, so both are stored as
-32768, and the sign bit of an fp32 second moment, which is never negative in AdamW, distinguishes
them. Without such a moment, or with a negative one, the master is changed to its neighbour nearer
to `hi`.

**24-bit master** (`hi` bf16, `lo` int8): the upper 24 bits of the fp32, rounded stochastically in
an update, since updates smaller than half of the last bit would otherwise always be lost. NaN is
canonical, as in the split master.

**bf16 moments**: rounded stochastically, for the same reason (beta2 = 0.999 changes a second moment
by less than a bf16's last bit).

**8-bit moments**: groups of 64 elements share a scale, their maximum rounded up to bf16. Codes are
companded, so that small numbers in a group with a large one do not become zero:

    moment 0   c in -127 .. 127    sign(c) * c^2 / 127^2 * scale   down to 1/16,129 of the largest
    moment 1   c in 0 .. 255       c^4 / 255^4 * scale             down to 1/4,228,250,625 of it

A number between two codes is rounded stochastically, with probabilities that preserve its expected
value. Moment 1 has two exceptions, since its square root is a divisor: a positive value has at
least code 1, and scales are at least 2^-94, so that code 1 is not zero. A group with infinity or
NaN (or, in moment 1, a negative value) has the scale NaN, so all its values become NaN. A
non-finite value never decodes to a finite one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from infinity._src.cabi.records import QUANT_GROUP, Format, GradSection, Master, Moments
from infinity._src.kernels.random_bits import random_bits, shift_right, sqrt_exact

_NAN_BITS, _INFINITY_BITS, _MAGNITUDE = 0x7FC00000, 0x7F800000, 0x7FFFFFFF
# 2^-94, so that code 1 of moment 1 is not zero; and the largest finite bf16.
_SCALE_LEAST, _SCALE_MOST = 0x1080, 0x7F7F
# 127^2 and 255^4: the companding of moments 0 and 1.
_LEVELS = (16129.0, 4228250625.0)
# Rounded to fp32, as in the C kernels: decoding multiplies instead of dividing.
_STEPS = tuple(float(np.float32(1) / np.float32(levels)) for levels in _LEVELS)
_THIRD_MOMENT_KEY = 0x5555555555555555
"""XORed to the key for a third moment, since 32 bits suffice for a master and two moments."""


def encode_sections(
    state_format: Format,
    master: torch.Tensor,
    moments: Sequence[torch.Tensor],
    *,
    key: int | None = None,
    element: int = 0,
) -> list[torch.Tensor]:
    """Encode fp32 values [numel] as the sections of a format (without `grad`), one 1-D tensor each.

    key: None: round to nearest; else (see `rounding_key`) round 24-bit masters, bf16 and 8-bit
    moments stochastically, as an update does. element: the parameter's index of the first value,
    which starts a group in 8-bit formats. Returns hi int16 (bf16 bits), lo int16 or int8, fp16,
    bf16 moments int16, codes uint8, scales int16 [groups * count]. fp32 sections are the given
    tensors; a second moment that stores signs of split masters is a new one. Raises: ValueError for
    a format without states, or a wrong number of moments.
    """
    _check(state_format)
    if len(moments) != state_format.count:
        raise ValueError(
            f"{state_format} has {state_format.count} moments, {len(moments)} were given"
        )
    # fp32 masters and moments are not rounded and need no random bits.
    rounds = state_format.master is Master.SPLIT8 or state_format.moments is not Moments.FP32
    random = (
        random_bits(key, element, master.numel(), master.device)
        if key is not None and rounds
        else None
    )
    sections = _encode_master(state_format.master, master, random)
    scales = []
    for index, values in enumerate(moments):
        if state_format.moments is Moments.FP32:
            sections.append(values)
            continue
        # A third moment needs new bits: the master and two moments have used all 32.
        if index == 2 and key is not None:
            random = random_bits(key ^ _THIRD_MOMENT_KEY, element, master.numel(), master.device)
        drawn = None if random is None else _draw(state_format, index, random)
        if state_format.moments is Moments.BF16:
            sections.append(_encode_bf16(values, index, drawn))
        else:
            codes, scale = _encode_q8(values, index, drawn)
            sections.append(codes)
            scales.append(scale)
    if scales:
        # Interleaved: the scales of a group are adjacent.
        sections.append(torch.stack(scales, dim=1).reshape(-1))
    signs = state_format.sign_section
    if signs is not None:
        sections[1], sections[signs] = _encode_ties(_canonical(master), sections[signs])
    return sections


def decode_sections(
    state_format: Format, sections: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Decode the sections of a format (without `grad`) to (master, moments) in fp32 [numel] each.

    sections: 1-D contiguous tensors of any dtype with the section's bytes. fp32 sections are
    returned as views, except a second moment that stores signs of split masters; other results are
    new tensors. Raises: ValueError for a format without states.
    """
    _check(state_format)
    bare = [section.view(torch.uint8) for section in sections]
    moments = [_decode_moment(state_format, bare, index) for index in range(state_format.count)]
    signs = state_format.sign_section
    if signs is not None:
        moments[1] = _without_signs(bare[1], moments[1])
    return decode_master(state_format, [bare[s] for s in state_format.master_sections]), moments


def decode_master(state_format: Format, sections: Sequence[torch.Tensor]) -> torch.Tensor:
    """Decode the fp32 master [numel] as `decode_sections`, from `state_format.master_sections`."""
    _check(state_format)
    bare = [section.view(torch.uint8) for section in sections]
    master = _decode_master(state_format.master, bare)
    if state_format.sign_section is not None:
        beyond = _beyond(bare[1], bare[2])
        master.view(torch.int32).add_(beyond.to(torch.int32) << 16)
    return master


def clear_signs(lo: torch.Tensor, moment: torch.Tensor, where: torch.Tensor) -> bool:
    """Clear, in place, the signs that a second moment stores for split masters. Return whether any
    sign changed.

    lo, moment: the second section of the old masters, and `sign_section`. where: bool mask of the
    elements whose masters the caller is about to overwrite.
    """
    theirs = _beyond(lo, moment) & where
    moment.view(torch.int32)[theirs] &= _MAGNITUDE
    return bool(theirs.any())


def _check(state_format: Format) -> None:
    if state_format.master is Master.RAW:
        raise ValueError("a RAW chunk has no optimizer states: it is the parameter alone")
    if state_format.grad is not GradSection.NONE:
        raise ValueError(
            "spilled gradients are no optimizer state: pass format.with_grad(GradSection.NONE)"
        )


# -- masters ---------------------------------------------------------------------------------------


def _canonical(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of fp32 as int32, with one pattern for every NaN."""
    return values.view(torch.int32).masked_fill(values.isnan(), _NAN_BITS)


def _encode_master(
    kind: Master, master: torch.Tensor, random: torch.Tensor | None
) -> list[torch.Tensor]:
    if kind is Master.FP32:
        return [master]
    if kind is Master.FP16:
        # Write NaN by its bits: the payload of a converted NaN depends on the device.
        half = master.to(torch.float16).view(torch.int16).masked_fill(master.isnan(), 0x7E00)
        return [half.view(torch.float16), master]
    bits = _canonical(master)
    if kind is Master.SPLIT8:
        if random is None:
            bits = bits + (bits >> 8 & 1).add_(0x7F)  # to nearest, ties to even
        else:
            # The upper 8 random bits; moments use the others, so that roundings are independent.
            bits = bits + shift_right(random, 24)
        # Truncate after adding the noise, which may carry into bit 8.
        bits &= -0x100
        # NaN is canonical, 0x7FC00000: 0x7FFFFFFF would round up into the sign and decode as -0.0.
        return [(bits + 0x8000 >> 16).to(torch.int16), (bits >> 8).to(torch.int8)]
    hi = (bits >> 16 & 1).add_(0x7FFF).add_(bits) >> 16
    # int16 has no 32768: 32767 replaces it, unless a sign can represent it (`_encode_ties`).
    return [hi.to(torch.int16), (bits - _unsaid(bits)).to(torch.int16)]


def _unsaid(bits: torch.Tensor) -> torch.Tensor:
    """Return int32: 1 where `lo` would be 32768, since the master is half-way between two bf16
    numbers and `hi` is the lower one.
    """
    return (bits & 0x1FFFF).eq(0x8000).to(torch.int32)


def _encode_ties(
    bits: torch.Tensor, moment: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `lo` of masters with these bits, and the second moment with the signs of ties."""
    moment = moment.view(torch.int32)
    unsaid = _unsaid(bits)
    # A negative moment keeps its sign, so the tied master moves to its neighbour nearer to `hi`.
    kept = ((bits & 0xFFFF) == 0x8000) & (moment < 0)
    lo = bits + torch.where(kept, 1 - 2 * unsaid, 0)
    signs = torch.where(kept, 0, unsaid << 31)
    return lo.to(torch.int16), (moment | signs).view(torch.float32)


def _beyond(lo: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """Return a mask of elements whose second moment has a sign that belongs to the master."""
    return (lo.view(torch.int16) == -0x8000) & (moment.view(torch.int32) < 0)


def _without_signs(lo: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """Return the second moment as a new tensor, without the masters' signs."""
    bits = moment.view(torch.int32)
    return torch.where(_beyond(lo, moment), bits & _MAGNITUDE, bits).view(torch.float32)


def _decode_master(kind: Master, sections: Sequence[torch.Tensor]) -> torch.Tensor:
    if kind is Master.FP32:
        return sections[0].view(torch.float32)
    if kind is Master.FP16:
        return sections[1].view(torch.float32)
    high = sections[0].view(torch.int16).to(torch.int32) << 16
    if kind is Master.SPLIT8:
        high += sections[1].view(torch.int8).to(torch.int32) << 8
    else:
        high += sections[1].view(torch.int16)
    return high.view(torch.float32)


# -- moments ---------------------------------------------------------------------------------------


def _draw(state_format: Format, moment: int, random: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the random bits for a moment, and their number: 12 with a 24-bit master, which uses 8,
    else 16.
    """
    width = 12 if state_format.master is Master.SPLIT8 else 16
    shifted = random >> width if moment == 0 else random
    return shifted & (1 << width) - 1, width


def _decode_moment(
    state_format: Format, sections: Sequence[torch.Tensor], index: int
) -> torch.Tensor:
    first, count = state_format.master_count, state_format.count
    section = sections[first + index]
    if state_format.moments is Moments.FP32:
        return section.view(torch.float32)
    if state_format.moments is Moments.BF16:
        return (section.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    scales = sections[first + count].view(torch.int16).view(-1, count)[:, index]
    return _decode_q8(section, scales, index)


def _encode_bf16(
    values: torch.Tensor, moment: int, drawn: tuple[torch.Tensor, int] | None
) -> torch.Tensor:
    """Return bf16 bits as int16."""
    bits = _canonical(values)
    if drawn is None:
        noise = (bits >> 16 & 1).add_(0x7FFF)
    else:
        spare = 16 - drawn[1]
        noise = drawn[0] << spare | (1 << spare) >> 1
    rounded = noise.add_(bits) >> 16
    if moment == 1:  # its square root is a divisor: keep positive values positive
        rounded.masked_fill_((rounded == 0) & (bits != 0), 1)
    return rounded.to(torch.int16)


def _grouped(values: torch.Tensor) -> torch.Tensor:
    """Reshape [numel] to [groups, QUANT_GROUP], padded with zeros."""
    spare = -values.numel() % QUANT_GROUP
    return (torch.nn.functional.pad(values, (0, spare)) if spare else values).view(-1, QUANT_GROUP)


def _scales(groups: torch.Tensor, moment: int) -> torch.Tensor:
    """Return the scales' bf16 bits as int32 [groups]."""
    bits = groups.view(torch.int32)
    # Magnitudes for moment 0; bits of positive floats are ordered like their values.
    most = (bits & 0x7FFFFFFF if moment == 0 else bits).amax(dim=1)
    bad = most >= _INFINITY_BITS
    if moment == 1:
        # `groups` has no -0.0, so a set sign bit means a negative value or NaN.
        bad |= (bits < 0).any(dim=1)
    # Rounded up to bf16, so that no value exceeds the scale.
    up = (most.clamp(max=_INFINITY_BITS) + 0xFFFF >> 16).clamp(_SCALE_LEAST, _SCALE_MOST)
    return up.masked_fill_(most == 0, 0).masked_fill_(bad, 0x7FC0)


def _encode_q8(
    values: torch.Tensor, moment: int, drawn: tuple[torch.Tensor, int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes uint8 [numel] and scales int16 [groups]."""
    x = _grouped(values + 0.0)  # -0.0 has no code
    scale = _scales(x, moment)
    plain = (scale > 0) & (scale <= _SCALE_MOST)  # finite groups that are not zero
    # The division below needs a finite scale that is not zero: use 1.0 elsewhere, where x is 0.
    scales = (scale << 16).masked_fill_(~plain, 0x3F800000).view(torch.float32)
    x = x.masked_fill(~plain[:, None], 0.0)
    factor = (torch.full_like(scales, _LEVELS[moment]) / scales)[:, None]
    # Without random bits: 1.5, which rounds to nearest.
    u: torch.Tensor | float = 1.5
    # With random bits: in [1, 2), 1.0 with the bits in the mantissa, plus half of the last bit.
    if drawn is not None:
        spare = 23 - drawn[1]
        u = (
            (_grouped(drawn[0]) << spare)
            .bitwise_or_(0x3F800000 | (1 << spare) >> 1)
            .view(torch.float32)
        )
    y = x.abs() * factor
    if moment == 0:
        c = sqrt_exact(y).floor_()
        base = c * c
        step = c + c + 1.0
    else:
        c = (sqrt_exact(sqrt_exact(x) * sqrt_exact(factor))).floor_()
        above = c + 1.0
        below, above = c * c, above * above
        base = below * below
        step = above * above - base
    # Round up if u, uniform in [1, 2), is less than 1 + fraction: that preserves the expected
    # value.
    number = c.to(torch.int32) + (step * u < (y - base) + step)
    if moment == 0:
        number.clamp_(max=127)
        code = torch.where(x < 0, -number, number).to(torch.int8).view(torch.uint8)
    else:
        number.clamp_(max=255)
        # The square root of moment 1 is a divisor: positive values get at least code 1.
        code = number.masked_fill_((number == 0) & (x > 0), 1).to(torch.uint8)
    return code.reshape(-1)[: values.numel()], scale.to(torch.int16)


def _decode_q8(codes: torch.Tensor, scales: torch.Tensor, moment: int) -> torch.Tensor:
    """Return fp32 [numel]. codes: uint8 [numel]; scales: bf16 bits as int16 [groups]."""
    of_group = (scales.to(torch.int32) << 16).view(torch.float32)[:, None]
    if moment == 0:
        c = _grouped(codes.view(torch.int8)).to(torch.float32)
        values = c * c.abs()
    else:
        square = _grouped(codes).to(torch.float32).square_()
        values = square * square
    return values.mul_(_STEPS[moment]).mul_(of_group).reshape(-1)[: codes.numel()]
