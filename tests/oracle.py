"""Numpy oracle of the optimizer's kernels: every algorithm on every state format, bit for bit.

Three implementations must agree with it: native/kernels/optimizer_kernels.c, the torch code of
infinity and Triton's kernel. It shares nothing with them but the records, the check of what is
known, and `mix64`. States are decoded to fp32, updated by operations that round once each, and
encoded again; the update uses the moments before they are rounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity._src.cabi.records import (
    QUANT_GROUP,
    Algorithm,
    Format,
    GradSection,
    HyperFlag,
    LogKind,
    Master,
    Moments,
)
from infinity._src.kernels.hyper import hyper_row_adamw
from infinity._src.kernels.random_bits import mix64
from infinity._src.kernels.update import check_update

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


def random_bits(key: int, element: int, numel: int) -> npt.NDArray[np.uint32]:
    """uint32 [numel] for elements [element, element + numel)."""
    parts = []
    while numel > 0:
        low = element & 0xFFFFFFFF
        count = min(numel, (1 << 32) - low)
        parts.append(
            _hashed(mix64(key ^ ((element >> 32) * 0x9E3779B97F4A7C15 & (1 << 64) - 1)), low, count)
        )
        element += count
        numel -= count
    return np.concatenate(parts) if parts else np.zeros(0, np.uint32)


def _hashed(mixed: int, low: int, count: int) -> npt.NDArray[np.uint32]:
    h = np.arange(count, dtype=np.uint32)
    h += np.uint32((low + mixed) & 0xFFFFFFFF)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x7FEB352D)
    h ^= h >> np.uint32(15)
    h ^= np.uint32(mixed >> 32)
    h *= np.uint32(0x846CA68B)
    h ^= h >> np.uint32(16)
    return h


# -- masters ---------------------------------------------------------------------------------------


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
            # to nearest, ties to even
            bits = bits + np.uint32(0x7F) + (bits >> np.uint32(8) & np.uint32(1))
        else:
            bits = bits + (random >> np.uint32(24))
        bits = bits & np.uint32(0xFFFFFF00)
        hi = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
        return [hi, (bits >> np.uint32(8)).astype(np.uint8).view(np.int8)]
    odd = bits >> np.uint32(16) & np.uint32(1)
    hi = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    rest = bits.astype(np.int64) - (hi.astype(np.int64) << 16)  # -32768 to 32768
    return [hi, np.minimum(rest, 0x7FFF).astype(np.int16)]


def _tie(master: Array, second: Array) -> tuple[Array, Array]:
    """`lo`, and the second moment with the signs of ties, of a format that has these."""
    hi, lo = _encode_master(Master.SPLIT, master, None)
    rest = _canonical(master).astype(np.int64) - (hi.astype(np.int64) << 16)
    signed = np.abs(rest) == 0x8000
    free = signed & ~np.signbit(second)
    rest = np.where(signed & ~free, np.sign(rest) * 0x7FFF, rest)
    lo = np.where(rest == 0x8000, -0x8000, rest).astype(np.int16)
    return lo, np.where(free & (rest > 0), -second, second)


def _untie(master: Array, lo: Array, second: Array) -> tuple[Array, Array]:
    """Master and second moment, of what `_tie` leaves."""
    beyond = (lo == -0x8000) & np.signbit(second)
    bits = master.view(np.uint32) + (beyond.astype(np.uint32) << np.uint32(16))
    return bits.view(np.float32), np.where(beyond, -second, second)


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


# -- moments ---------------------------------------------------------------------------------------


def _draw(state_format: Format, moment: int, random: Array) -> tuple[Array, int]:
    """The bits of `random` that round a moment, and how many they are: 12 beside a 24-bit master,
    which takes 8; else 16."""
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
    """Codes [groups, QUANT_GROUP] of finite groups with a scale; of others zeros. u: in [1, 2); 1.5
    rounds to nearest."""
    plain = (scale > 0) & (scale <= _SCALE_MOST)
    scales = np.where(plain, scale.astype(np.uint32) << np.uint32(16), np.uint32(0x3F800000)).view(
        np.float32
    )
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
        bits = (
            np.uint32(0x3F800000)
            | _grouped(drawn[0]) << np.uint32(spare)
            | np.uint32((1 << spare) >> 1)
        )
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


# -- both ------------------------------------------------------------------------------------------


def _check(state_format: Format) -> None:
    if state_format.master is Master.RAW:
        raise ValueError("a RAW chunk has no optimizer states: it is the parameter alone")
    if state_format.grad is not GradSection.NONE:
        raise ValueError(
            "spilled gradients are no optimizer state: pass format.with_grad(GradSection.NONE)"
        )


def encode_sections(
    state_format: Format,
    master: Array,
    moments: Sequence[Array],
    *,
    key: int | None = None,
    element: int = 0,
) -> list[Array]:
    """The sections of a format (without `grad`), one 1-D array each, for fp32 values [numel].

    Rounds to nearest; with a `key` (see `rounding_key`) 24-bit masters, bf16 and 8-bit moments at
    random as an update does, `element` being the parameter's index of the first. In 8-bit formats
    that first element starts a group. Arrays: hi uint16 (bf16 bits), lo int16 or int8, fp32 and
    fp16 as they are, bf16 moments uint16, codes uint8, scales uint16 [groups * count]. Raises:
    ValueError for a format without states, or another number of moments than it has.
    """
    _check(state_format)
    if len(moments) != state_format.count:
        raise ValueError(
            f"{state_format} has {state_format.count} moments, {len(moments)} were given"
        )
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
    if _has_ties(state_format):
        sections[1], sections[3] = _tie(master, sections[3])
    return sections


def decode_sections(state_format: Format, sections: Sequence[Array]) -> tuple[Array, list[Array]]:
    """(master, moments) as fp32 [numel] each, fresh arrays, from the sections of a format (without
    `grad`).

    sections: 1-D contiguous arrays of any dtype of the section's bytes. Raises: ValueError for a
    format without states.
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
                moments.append(
                    (section.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
                )
            else:
                scale = bare[first + count].view(np.uint16).reshape(-1, count)[:, index]
                moments.append(_decode_q8(section, scale, index))
        master = _decode_master(state_format.master, bare)
    if _has_ties(state_format):
        master, moments[1] = _untie(master, bare[1].view(np.int16), moments[1])
    return master, moments


def _has_ties(state_format: Format) -> bool:
    """Return whether the sign of the second moment says on which side of `hi` a tie lies."""
    split = state_format.master is Master.SPLIT and state_format.moments is Moments.FP32
    return split and state_format.count > 1


# -- the update ------------------------------------------------------------------------------------


def update_sections(
    state_format: Format, sections: Sequence[Array], grad: Array, hyper: Any, element: int = 0
) -> None:
    """Update sections in place.

    sections: one writable contiguous 1-D array per section of the format, which has no `grad`, for
    [numel] elements (any dtype of the section's itemsize, or bytes; the scales of all groups that
    begin). grad [numel]: fp32, fp16, or uint16 with the bits of bf16. hyper: a HYPER record.
    element: the parameter's, at the first; in 8-bit formats a multiple of QUANT_GROUP. Raises:
    ValueError for what the kernels do not know.
    """
    kind = Format.of(state_format)
    algorithm = Algorithm(int(hyper["algorithm"]))
    if algorithm in (Algorithm.MUON_MOMENTUM, Algorithm.MUON):
        muon_sections(kind, sections, grad, hyper, element)
        return
    check_update(kind, hyper)
    if kind.moments is Moments.Q8 and element % QUANT_GROUP:
        raise ValueError(f"element {element} does not start a group of {QUANT_GROUP}")
    master, moments = decode_sections(kind, sections)
    update = {Algorithm.ADAMW: adamw_, Algorithm.SGD: sgd_, Algorithm.LION: lion_}[algorithm]
    with np.errstate(all="ignore"):
        update(master, moments, replay_log(grad, hyper), hyper)
    encoded = encode_sections(kind, master, moments, key=int(hyper["key"]), element=element)
    for target, source in zip(sections, encoded, strict=True):
        target.view(np.uint8)[:] = source.view(np.uint8)


def fma(a: Array, b: Any, c: Array) -> Array:
    """a * b + c on fp32, rounded once: the sum in fp64 is rounded to odd first."""
    product = a.astype(np.float64) * np.float64(b)
    wide = c.astype(np.float64)
    total = product + wide
    back = total - product
    error = (product - (total - back)) + (wide - back)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    odd = np.where((error != 0) & np.isfinite(error) & even, np.nextafter(total, towards), total)
    return odd.astype(np.float32)


def lerp(start: Array, end: Array, weight: np.float32) -> Array:
    """torch.lerp on fp32 arrays."""
    near = abs(weight) < 0.5
    return fma(end - start, weight if near else weight - np.float32(1), start if near else end)


def muon_sections(
    kind: Format, sections: Sequence[Array], grad: Array, row: Any, element: int
) -> None:
    """One of Muon's two updates, in place: of the momentum, whose matrix replaces `grad`, or of the
    masters. Other sections keep their bytes, but for the signs that masters have in them."""
    master, moments = decode_sections(kind, sections)
    with np.errstate(all="ignore"):
        g = replay_log(grad, row)
        if Algorithm(int(row["algorithm"])) is Algorithm.MUON:
            master = fma(g, -row["step_size"], master * row["decay"])
            written = range(kind.master_count)
        else:
            moments[0][:] = lerp(moments[0], g, row["one_minus_beta1"])
            nesterov = int(row["flags"]) & HyperFlag.NESTEROV
            u = lerp(g, moments[0], row["beta1"]) if nesterov else moments[0]
            grad[:] = u if grad.dtype == np.float32 else _bf16_bits(u).view(grad.dtype)
            written = range(kind.master_count, kind.master_count + 1)
    # As without a second moment: then a master's ties need no sign.
    bare = Format(kind.master, kind.moments, 1)
    encoded = encode_sections(bare, master, moments[:1], key=int(row["key"]), element=element)
    for index in written:
        sections[index].view(np.uint8)[:] = encoded[index].view(np.uint8)
    if Algorithm(int(row["algorithm"])) is Algorithm.MUON:
        if _has_ties(kind):
            sections[3].view(np.uint8)[:] = moments[1].view(np.uint8)
    elif kind.moments is Moments.Q8:
        scales = sections[kind.master_count + kind.count].view(np.uint16).reshape(-1, kind.count)
        scales[:, 0] = encoded[kind.master_count + 1].view(np.uint16)


def _bf16_bits(values: Array) -> Array:
    """Rounded to nearest even, every NaN as 0x7FC0."""
    bits = _canonical(values)
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> 16).astype(
        np.uint16
    )


def adamw_(param: Array, moments: Sequence[Array], grad: Array, row: Any) -> None:
    """AdamW on fp32 arrays [numel] in place; the order of operations is the specification."""
    exp_avg, exp_avg_sq = moments
    param *= row["decay"]
    exp_avg[:] = exp_avg * row["beta1"] + grad * row["one_minus_beta1"]
    exp_avg_sq[:] = exp_avg_sq * row["beta2"] + grad * grad * row["one_minus_beta2"]
    denom = np.sqrt(exp_avg_sq) / row["bc2_sqrt"] + row["eps"]
    param -= exp_avg / denom * row["step_size"]


def sgd_(
    param: npt.NDArray[Any], moments: Sequence[npt.NDArray[Any]], grad: npt.NDArray[Any], row: Any
) -> None:
    """The update of fp32 arrays [numel] in place; `moments` holds the momentum buffer, or
    nothing."""
    g = grad + param * row["weight_decay"] if row["weight_decay"] else grad
    flags = int(row["flags"])
    if moments:
        buffer = moments[0]
        buffer[:] = (
            g if flags & HyperFlag.FIRST else buffer * row["beta1"] + g * row["one_minus_beta1"]
        )
        g = g + buffer * row["beta1"] if flags & HyperFlag.NESTEROV else buffer
    param -= g * row["step_size"]


def lion_(
    param: npt.NDArray[Any], moments: Sequence[npt.NDArray[Any]], grad: npt.NDArray[Any], row: Any
) -> None:
    """The update of fp32 arrays [numel] in place; `moments` holds the one moment."""
    moment = moments[0]
    direction = np.sign(moment * row["beta1"] + grad * row["one_minus_beta1"])
    param *= row["decay"]
    param -= direction * row["step_size"]
    moment[:] = moment * row["beta2"] + grad * row["one_minus_beta2"]


def replay_log(grad: npt.NDArray[Any], row: Any) -> npt.NDArray[np.float32]:
    """The gradient in fp32 with the log replayed, a new array. grad: fp32, fp16, or uint16 with the
    bits of bf16; [numel]."""
    if grad.dtype == np.uint16:
        g: npt.NDArray[np.float32] = (grad.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        g = grad.astype(np.float32)
    for index in range(int(row["log_count"])):
        value = row["log_value"][index]
        kind = LogKind(int(row["log_kind"][index]))
        if kind is LogKind.MUL:
            g = g * value
        elif kind is LogKind.DIV:
            g = g / value
        else:
            outside = g < value if kind is LogKind.CLAMP_MIN else g > value
            g = np.where(outside, value, g)
    return g


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Scalars that one AdamW update depends on besides the states, in Python doubles.

    `step` counts from 1 (the update about to happen). `log` holds the operations done to the
    gradient since it came, oldest first, as (a LogKind or its name, number); they are
    replayed in fp32 before the update.
    """

    lr: float
    step: int
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    log: tuple[tuple[LogKind | str, float], ...] = ()
    key: int = 0

    def row(self) -> npt.NDArray[np.void]:
        """The HYPER record; see `hyper_row_adamw`."""
        return hyper_row_adamw(
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            step=self.step,
            log=self.log,
            key=self.key,
        )
