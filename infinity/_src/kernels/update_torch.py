"""Any algorithm on any state format in torch, on any device: the bits of infinity/_src/kernels/update.py.

What updates chunks on a GPU that has no Triton, and what Triton's kernel is measured beside. Every line rounds once: products and
sums are separate operations, divisors are tensors (by a number torch divides through its reciprocal on a GPU), and the CPU's
square root is not torch's (`adamw.sqrt_exact`). infinity/_src/kernels/codec.py says what the encodings mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from infinity._src.kernels.adamw import sqrt_exact
from infinity._src.kernels.quantize import random_bits_torch
from infinity.aio.plan import QUANT_GROUP, Algorithm, Format, HyperFlag, LogKind, Master, Moments

_MASK = 0xFFFFFFFF
_NAN_BITS, _INFINITY_BITS = 0x7FC00000, 0x7F800000
_SCALE_LEAST, _SCALE_MOST = 0x1080, 0x7F7F
_LEVELS = (16129.0, 4228250625.0)
_STEPS = tuple(float(np.float32(1) / np.float32(levels)) for levels in _LEVELS)


def update_torch(
    state_format: Format, sections: Sequence[torch.Tensor], grad: torch.Tensor, row: Any, element: int
) -> None:
    """The update of one segment, in place.

    sections: the segment's bytes of each, uint8. grad: bf16, fp16 or fp32 [numel]. row: a HYPER record. element: the
    parameter's, at the first.
    """
    numel, first, count = grad.numel(), state_format.master_count, state_format.count
    algorithm = Algorithm(int(row["algorithm"]))
    g = _replayed(grad, row)
    p = _load_master(state_format.master, sections)
    m = [_load_moment(state_format, sections, index) for index in range(count)]
    if algorithm is Algorithm.ADAMW:
        p, m = _adamw(p, m[0], m[1], g, row)
    elif algorithm is Algorithm.SGD:
        p, m = _sgd(p, m, g, row)
    else:
        p, m = _lion(p, m[0], g, row)
    random = None
    if state_format.master is Master.SPLIT8 or state_format.moments is not Moments.FP32:
        random = random_bits_torch(int(row["key"]), element, numel, grad.device)
    _store_master(state_format.master, sections, p, random)
    for index in range(count):
        if state_format.moments is Moments.FP32:
            sections[first + index].view(torch.float32).copy_(m[index])
            continue
        assert random is not None
        drawn, width = _draw(state_format, index, random)
        if state_format.moments is Moments.BF16:
            sections[first + index].view(torch.int16).copy_(_bf16(m[index], index, drawn, width))
        else:
            codes, scales = _q8(m[index], index, drawn, width)
            sections[first + index].copy_(codes)
            sections[first + count].view(torch.int16).view(-1, count)[:, index].copy_(scales)


# -- algorithms on fp32: the order of operations is native/update_body.h's -----------------------------------------------


def _scalar(value: Any, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), float(value), dtype=torch.float32, device=like.device)


def _sqrt(values: torch.Tensor) -> torch.Tensor:
    return sqrt_exact(values) if values.device.type == "cpu" else torch.sqrt(values)


def _replayed(grad: torch.Tensor, row: Any) -> torch.Tensor:
    g = grad.to(torch.float32)
    for index in range(int(row["log_count"])):
        value = _scalar(row["log_value"][index], g)
        g = g * value if int(row["log_kind"][index]) == LogKind.MUL else g / value
    return g


def _adamw(
    p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, row: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    m = m * float(row["beta1"]) + g * float(row["one_minus_beta1"])
    v = v * float(row["beta2"]) + (g * g) * float(row["one_minus_beta2"])
    denom = _sqrt(v) / _scalar(row["bc2_sqrt"], v) + float(row["eps"])
    return p * float(row["decay"]) - (m / denom) * float(row["step_size"]), [m, v]


def _sgd(
    p: torch.Tensor, moments: list[torch.Tensor], g: torch.Tensor, row: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    flags, momentum = int(row["flags"]), float(row["beta1"])
    if row["weight_decay"]:
        g = g + p * float(row["weight_decay"])
    if moments:
        b = g if flags & HyperFlag.FIRST else moments[0] * momentum + g * float(row["one_minus_beta1"])
        moments = [b]
        g = g + b * momentum if flags & HyperFlag.NESTEROV else b
    return p - g * float(row["step_size"]), moments


def _lion(
    p: torch.Tensor, m: torch.Tensor, g: torch.Tensor, row: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    c = m * float(row["beta1"]) + g * float(row["one_minus_beta1"])
    sign = torch.where(c.isnan(), c, torch.sign(c))  # torch's sign of NaN is zero
    p = p * float(row["decay"]) - sign * float(row["step_size"])
    return p, [m * float(row["beta2"]) + g * float(row["one_minus_beta2"])]


# -- encodings ---------------------------------------------------------------------------------------------------------


def _float_of(bits: torch.Tensor) -> torch.Tensor:
    """fp32 of int64 with 32 bits each."""
    return bits.to(torch.int32).view(torch.float32)


def _bits_of(values: torch.Tensor) -> torch.Tensor:
    """int64: the 32 bits of fp32."""
    return values.view(torch.int32).to(torch.int64) & _MASK


def _canonical(values: torch.Tensor) -> torch.Tensor:
    bits = _bits_of(values)
    return bits.masked_fill((bits & 0x7FFFFFFF) > _INFINITY_BITS, _NAN_BITS)


def _load_master(kind: Master, sections: Sequence[torch.Tensor]) -> torch.Tensor:
    if kind is Master.FP32:
        return sections[0].view(torch.float32)
    if kind is Master.FP16:
        return sections[1].view(torch.float32)
    high = sections[0].view(torch.int16).to(torch.int32) << 16
    if kind is Master.SPLIT8:
        return (high + (sections[1].view(torch.int8).to(torch.int32) << 8)).view(torch.float32)
    return (high + sections[1].view(torch.int16).to(torch.int32)).view(torch.float32)


def _store_master(
    kind: Master, sections: Sequence[torch.Tensor], p: torch.Tensor, random: torch.Tensor | None
) -> None:
    if kind is Master.FP32:
        sections[0].view(torch.float32).copy_(p)
        return
    if kind is Master.FP16:
        sections[0].view(torch.int16).copy_(p.to(torch.float16).view(torch.int16).masked_fill(p.isnan(), 0x7E00))
        sections[1].view(torch.float32).copy_(p)
        return
    bits = _canonical(p)
    if kind is Master.SPLIT8:
        assert random is not None
        bits = bits + (random >> 24) & 0xFFFFFF00
        sections[1].copy_(bits >> 8 & 0xFF)
    else:
        sections[1].view(torch.int16).copy_(bits & 0xFFFF)
    sections[0].view(torch.int16).copy_(bits + 0x8000 >> 16 & 0xFFFF)


def _load_moment(state_format: Format, sections: Sequence[torch.Tensor], index: int) -> torch.Tensor:
    first, count = state_format.master_count, state_format.count
    section = sections[first + index]
    if state_format.moments is Moments.FP32:
        return section.view(torch.float32)
    if state_format.moments is Moments.BF16:
        return (section.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    bits = sections[first + count].view(torch.int16).view(-1, count)[:, index]
    scales = (bits.to(torch.int32) << 16).view(torch.float32)[:, None]
    if index == 0:
        c = _grouped(section.view(torch.int8)).to(torch.float32)
        values = ((c * c.abs()) * _STEPS[0]) * scales
    else:
        c = _grouped(section).to(torch.float32)
        square = c * c
        values = ((square * square) * _STEPS[1]) * scales
    return values.reshape(-1)[: section.numel()]


def _grouped(values: torch.Tensor) -> torch.Tensor:
    """[numel] -> [groups, QUANT_GROUP], zeros after the end."""
    groups = -(-values.numel() // QUANT_GROUP)
    return torch.nn.functional.pad(values, (0, groups * QUANT_GROUP - values.numel())).view(groups, QUANT_GROUP)


def _draw(state_format: Format, moment: int, random: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The bits that round a moment, and how many they are."""
    width = 12 if state_format.master is Master.SPLIT8 else 16
    return random >> (width if moment == 0 else 0) & ((1 << width) - 1), width


def _bf16(values: torch.Tensor, moment: int, drawn: torch.Tensor, width: int) -> torch.Tensor:
    """int64 with the bits of bf16 each."""
    spare = 16 - width
    bits = _canonical(values)
    rounded = bits + (drawn << spare | (1 << spare) >> 1) >> 16
    return torch.maximum(rounded, (bits != 0).to(torch.int64)) if moment == 1 else rounded


def _q8(values: torch.Tensor, moment: int, drawn: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [numel], int64 with 8 bits each; scales int64 [groups], the bits of a bf16 each."""
    x = _grouped(values + 0.0)  # -0.0 has no code
    most = (_bits_of(x) & (0x7FFFFFFF if moment == 0 else _MASK)).amax(dim=1)
    scale = (most + 0xFFFF >> 16).clamp(_SCALE_LEAST, _SCALE_MOST).masked_fill(most == 0, 0)
    scale = scale.masked_fill(most >= _INFINITY_BITS, 0x7FC0)
    plain = (scale > 0) & (scale <= _SCALE_MOST)
    scales = _float_of(torch.where(plain, scale << 16, torch.full_like(scale, 0x3F800000)))
    x = torch.where(plain[:, None], x, torch.zeros_like(x))
    factor = (_scalar(_LEVELS[moment], x) / scales)[:, None]
    spare = 23 - width
    u = _float_of(_grouped(drawn) << spare | (0x3F800000 | (1 << spare) >> 1))
    y = x.abs() * factor
    if moment == 0:
        c = torch.floor(_sqrt(y))
        step = c + c + 1.0
        number = (c.to(torch.int64) + (u * step < (y - c * c) + step)).clamp(max=127)
        code = torch.where(x < 0, -number, number) & 0xFF
    else:
        c = torch.floor(_sqrt(_sqrt(x) * _sqrt(factor)))
        below, above = c * c, (c + 1.0) * (c + 1.0)
        base = below * below
        step = above * above - base
        number = (c.to(torch.int64) + (u * step < (y - base) + step)).clamp(max=255)
        code = number.masked_fill((number == 0) & (x > 0), 1)
    return code.reshape(-1)[: values.numel()], scale
