"""All algorithms on all state formats in one Triton kernel, bitwise equal to
infinity/_src/kernels/update.py, in one pass over a chunk.

    sections, gradient -> fp32 in registers -> the algorithm -> the format's encoding -> sections

One launch updates all segments of a chunk, whatever their HYPER records (one launch per algorithm
and gradient dtype, if these differ). A program updates BLOCK_NUMEL elements of one segment; tables
on the device give it the segment and the HYPER record. It views the elements as [groups,
QUANT_GROUP], so that the scales of 8-bit moments are reductions of rows.

Every operation rounds once to fp32, in the order of native/kernels/optimizer_kernels.h. On a GPU
this relies on three things: launches say `enable_fp_fusion=False` (else a product and the sum that
follows become one FMA, in LLVM and again in ptxas), `tl.div_rn` and `tl.sqrt_rn` (else both are
approximate), and that none of the operations used flushes denormals.
tests/unit/kernels/test_triton_compiles.py looks for all three in the PTX.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from infinity._src.base.torch_device import on_device, table_on
from infinity._src.cabi.records import (
    HYPER,
    QUANT_GROUP,
    Algorithm,
    Format,
    GradDtype,
    HyperFlag,
    LogKind,
    Master,
    Moments,
)
from infinity._src.kernels.triton.random import (
    INFINITY_BITS,
    bits_of,
    canonical_bits,
    float_of,
    float_of_bf16,
    random_bits,
)

# Whole groups, so that no two programs share a scale.
BLOCK_NUMEL = 1024

GROUP = tl.constexpr(QUANT_GROUP)
COLUMNS = tl.constexpr(7)
WORDS = tl.constexpr(HYPER.itemsize // 4)
SPLIT, SPLIT8, MASTER_FP32, MASTER_FP16 = (
    tl.constexpr(int(m)) for m in (Master.SPLIT, Master.SPLIT8, Master.FP32, Master.FP16)
)
MOMENTS_FP32, MOMENTS_BF16, MOMENTS_Q8 = (
    tl.constexpr(int(m)) for m in (Moments.FP32, Moments.BF16, Moments.Q8)
)
ADAMW, SGD = (tl.constexpr(int(a)) for a in (Algorithm.ADAMW, Algorithm.SGD))
GRAD_BF16, GRAD_FP16 = (tl.constexpr(int(g)) for g in (GradDtype.BF16, GradDtype.FP16))
NESTEROV, FIRST = (tl.constexpr(int(f)) for f in (HyperFlag.NESTEROV, HyperFlag.FIRST))


def _word(name: str) -> tl.constexpr:
    """Index of the 32-bit word of a HYPER record that holds a field. Its key is words 0 and 1."""
    assert HYPER.fields is not None
    return tl.constexpr(HYPER.fields[name][1] // 4)


DECAY, STEP_SIZE, EPS, BC2_SQRT, WEIGHT_DECAY = map(
    _word, ("decay", "step_size", "eps", "bc2_sqrt", "weight_decay")
)
BETA1, BETA2 = map(_word, ("beta1", "beta2"))
ONE_MINUS_BETA1, ONE_MINUS_BETA2 = map(_word, ("one_minus_beta1", "one_minus_beta2"))
FLAGS, LOG_COUNT, LOG_KIND, LOG_VALUE = map(_word, ("flags", "log_count", "log_kind", "log_value"))
LOG_MUL, LOG_DIV, LOG_CLAMP_MIN = (
    tl.constexpr(int(k)) for k in (LogKind.MUL, LogKind.DIV, LogKind.CLAMP_MIN)
)
# `_block` reads the key as words 0 and 1.
assert _word("key").value == 0

SQUARE_LEVELS, FOURTH_LEVELS = tl.constexpr(16129.0), tl.constexpr(4228250625.0)
# Rounded to fp32, as in the other implementations: decoding multiplies instead of dividing.
SQUARE_STEP = tl.constexpr(float(np.float32(1) / np.float32(16129.0)))
FOURTH_STEP = tl.constexpr(float(np.float32(1) / np.float32(4228250625.0)))
SCALE_LEAST, SCALE_MOST = tl.constexpr(0x1080), tl.constexpr(0x7F7F)

# bf16 and fp16 as integers: the kernels widen and round by bits, alike on every device.
_MASTER_DTYPES = {
    Master.SPLIT: (torch.int16, torch.int16),
    Master.SPLIT8: (torch.int16, torch.int8),
    Master.FP32: (torch.float32,),
    Master.FP16: (torch.int16, torch.float32),
}
_MOMENT_DTYPES = {
    Moments.FP32: (torch.float32, torch.float32),
    Moments.BF16: (torch.int16, torch.int16),
    Moments.Q8: (torch.int8, torch.uint8),
}


class Launches:
    """Launches of a step: for each chunk one per pair of algorithm and gradient dtype. Their tables
    are on the device.
    """

    def __init__(
        self,
        state_format: Format,
        chunks: Sequence[npt.NDArray[np.void]],
        hypers: npt.NDArray[np.void],
        device: torch.device,
    ) -> None:
        """`update.UpdatePlan` has checked the arguments, and resolved the segments.

        Makes two copies to the device, without waiting.
        """
        self._format = state_format
        self._launches: list[list[_Launch]] = []
        words: list[npt.NDArray[np.int64]] = []
        at = 0
        for segs in chunks:
            algorithms = hypers["algorithm"][segs["hyper"]]
            # The algorithm and the gradient's dtype are constants of the kernel: a launch for each
            # pair.
            pairs = sorted(
                {(int(a), int(g)) for a, g in zip(algorithms, segs["grad_dtype"], strict=True)}
            )
            self._launches.append([])
            for algorithm, grad_dtype in pairs:
                table, rows, aligned = _table(
                    segs[(algorithms == algorithm) & (segs["grad_dtype"] == grad_dtype)]
                )
                self._launches[-1].append(
                    _Launch(algorithm, grad_dtype, at, at + table.size, len(rows), aligned)
                )
                words += [table.reshape(-1), rows]
                at += table.size + len(rows)
        packed = np.concatenate(words) if words else np.zeros(0, np.int64)
        # One copy for all tables of a step.
        self._tables = table_on(device, packed)
        self._hypers = table_on(device, np.ascontiguousarray(hypers).view(np.int32))

    def run(self, index: int, sections: Sequence[torch.Tensor], base: int) -> None:
        """Update chunk `index` in place.

        base: the address that relative gradients count from.
        """
        kind, views = self._format, _typed(self._format, sections)
        for launch in self._launches[index]:
            with on_device(self._tables.device):
                _update[(launch.programs,)](
                    *views, self._tables[launch.table :], self._tables[launch.rows :], self._hypers,
                    base,
                    MASTER=int(kind.master), MOMENTS=int(kind.moments), COUNT=kind.count,
                    ALGORITHM=launch.algorithm, GRAD=launch.grad_dtype,
                    GROUPS=BLOCK_NUMEL // QUANT_GROUP,
                    # A relative address is aligned only if its base is.
                    ALIGNED=launch.aligned and base % 16 == 0,
                    # No FMA: a product contracted with a sum would round once instead of twice.
                    num_warps=4, enable_fp_fusion=False,
                )  # fmt: skip


class _Launch(NamedTuple):
    algorithm: int
    grad_dtype: int
    table: int
    """Index of the table's first word among the words on the device."""
    rows: int
    """Index of the first of the words that map each program to a row of the table."""
    programs: int
    aligned: bool
    """Every segment begins at a multiple of 16 elements, and every gradient of 16 bytes."""


def _table(segs: npt.NDArray[np.void]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], bool]:
    """Make the table: a row per segment, the row of each program, and whether all is aligned."""
    counts = -(-segs["numel"] // BLOCK_NUMEL)
    table = np.empty((len(segs), COLUMNS.value), np.int64)
    for column, name in enumerate(("start", "numel", "element", "grad", "hyper", "relative")):
        table[:, column] = segs[name].astype(np.int64)
    # The segment's first program: a program subtracts it from its number to find its block.
    table[:, 6] = np.cumsum(counts) - counts
    rows = np.repeat(np.arange(len(segs), dtype=np.int64), counts)
    return table, rows, bool((segs["start"] % 16 == 0).all() and (segs["grad"] % 16 == 0).all())


def _typed(state_format: Format, sections: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """View sections as tensors of their items: two of the master, two moments, scales.

    The first section replaces each one that the format lacks.
    """
    master = _MASTER_DTYPES[state_format.master]
    moments = _MOMENT_DTYPES[state_format.moments][: state_format.count]
    scales = (torch.int16,) if state_format.moments is Moments.Q8 else ()
    views = [
        section[: section.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        for section, dtype in zip(sections, (*master, *moments, *scales), strict=False)
    ]
    # Never read: COUNT and MASTER are constants of the kernel.
    absent = views[0]
    first, count = len(master), len(moments)
    return [
        views[0],
        views[1] if first == 2 else absent,
        views[first] if count > 0 else absent,
        views[first + 1] if count > 1 else absent,
        views[first + count] if scales else absent,
    ]


# Not specialized on alignment: tables begin anywhere in one tensor, and the kernel would be
# compiled again for each alignment.
@triton.jit(do_not_specialize=["base"], do_not_specialize_on_alignment=["table_ptr", "rows_ptr"])
def _update(
    s0: tl.tensor, s1: tl.tensor, s2: tl.tensor, s3: tl.tensor, scales: tl.tensor,
    table_ptr: tl.tensor, rows_ptr: tl.tensor, hypers_ptr: tl.tensor, base: tl.tensor,
    MASTER: tl.constexpr, MOMENTS: tl.constexpr, COUNT: tl.constexpr, ALGORITHM: tl.constexpr,
    GRAD: tl.constexpr,
    GROUPS: tl.constexpr, ALIGNED: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    table = table_ptr + tl.load(rows_ptr + program) * COLUMNS
    start, numel, element = tl.load(table), tl.load(table + 1), tl.load(table + 2)
    hyper = hypers_ptr + tl.load(table + 4) * WORDS
    address = tl.load(table + 3) + tl.load(table + 5) * base.to(tl.int64)
    done = (program - tl.load(table + 6)) * (GROUPS * GROUP)
    # A hint: the compiler does not know the alignment of a loaded number.
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    left = numel - done
    # A whole block has no masks, so that loads and stores are as wide as they can be.
    if left >= GROUPS * GROUP:
        _block(s0, s1, s2, s3, scales, start + done, address, done, element + done, left, hyper,
               MASTER, MOMENTS, COUNT, ALGORITHM, GRAD, ALIGNED, GROUPS, WHOLE=True)  # fmt: skip
    else:
        _block(s0, s1, s2, s3, scales, start + done, address, done, element + done, left, hyper,
               MASTER, MOMENTS, COUNT, ALGORITHM, GRAD, ALIGNED, GROUPS, WHOLE=False)  # fmt: skip


@triton.jit
def _block(
    s0: tl.tensor, s1: tl.tensor, s2: tl.tensor, s3: tl.tensor, scales: tl.tensor,
    at: tl.tensor, address: tl.tensor, done: tl.tensor, element: tl.tensor, left: tl.tensor,
    hyper: tl.tensor,
    MASTER: tl.constexpr, MOMENTS: tl.constexpr, COUNT: tl.constexpr, ALGORITHM: tl.constexpr,
    GRAD: tl.constexpr,
    ALIGNED: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """Update the chunk's elements from `at` on, which are the segment's from `done` on: one block,
    or the `left` elements that remain.
    """
    within = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = within < left
    groups = at // GROUP + tl.arange(0, GROUPS)
    in_groups = tl.arange(0, GROUPS) * GROUP < left
    g = _gradient(address, done, within, mask, hyper, GRAD, ALIGNED, WHOLE)
    p = _load_master(s0, s1, at + within, mask, MASTER, WHOLE)
    if COUNT > 0:
        m = _load_moment(s2, scales, at + within, groups, mask, in_groups, 0, MOMENTS, COUNT, WHOLE)
    else:
        # The compiled branches need a value; without moments they do not use it.
        m = p
    if COUNT > 1:
        v = _load_moment(s3, scales, at + within, groups, mask, in_groups, 1, MOMENTS, COUNT, WHOLE)
    else:
        v = p
    # `Format.sign_section`; a launch has two moments at most.
    SIGNS: tl.constexpr = MASTER == SPLIT and MOMENTS == MOMENTS_FP32 and COUNT > 1
    if SIGNS:
        # Load `lo` again, from the cache: `p` has combined it with `hi`.
        lo = _load(s1 + at + within, mask, WHOLE)
        beyond = tl.where(lo == -32768, bits_of(v) & 0x80000000, 0).to(tl.uint32)
        p = float_of(bits_of(p) + (beyond >> 15))
        v = float_of(bits_of(v) ^ beyond)
    if ALGORITHM == ADAMW:
        p, m, v = _adamw(p, m, v, g, hyper)
    elif ALGORITHM == SGD:
        p, m = _sgd(p, m, g, hyper, COUNT)
    else:
        p, m = _lion(p, m, g, hyper)
    # Hash random bits only if a section is rounded stochastically.
    if MASTER == SPLIT8 or (COUNT > 0 and MOMENTS != MOMENTS_FP32):
        low, high = (
            tl.load(hyper).to(tl.uint32, bitcast=True),
            tl.load(hyper + 1).to(tl.uint32, bitcast=True),
        )
        random = random_bits(low.to(tl.uint64) | (high.to(tl.uint64) << 32), element, within)
    else:
        random = within.to(tl.uint32)
    _store_master(s0, s1, at + within, p, random, mask, MASTER, SIGNS, WHOLE)
    if SIGNS:
        # Kernels write this second moment for AdamW alone, where it is never negative.
        v = float_of(bits_of(v) | (_unsaid(canonical_bits(p)) << 31))
    if COUNT > 0:
        _store_moment(s2, scales, at + within, groups, m, random, mask, in_groups, 0,
                      MASTER, MOMENTS, COUNT, GROUPS, WHOLE)  # fmt: skip
    if COUNT > 1:
        _store_moment(s3, scales, at + within, groups, v, random, mask, in_groups, 1,
                      MASTER, MOMENTS, COUNT, GROUPS, WHOLE)  # fmt: skip


# -- algorithms on fp32 ----------------------------------------------------------------------------


@triton.jit
def _scalar(hyper: tl.tensor, WORD: tl.constexpr) -> tl.tensor:
    return tl.load(hyper + WORD).to(tl.float32, bitcast=True)


@triton.jit
def _gradient(
    address: tl.tensor, done: tl.tensor, within: tl.tensor, mask: tl.tensor, hyper: tl.tensor,
    GRAD: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The gradient in fp32, with the log replayed."""
    if GRAD == GRAD_BF16:
        pointer = address.to(tl.pointer_type(tl.int16))
    elif GRAD == GRAD_FP16:
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.float32))
    # A hint on the pointer, since a hint on the integer is lost in the conversion.
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    g = _load(pointer + done + within, mask, WHOLE)
    g = float_of_bf16(g) if GRAD == GRAD_BF16 else g.to(tl.float32)
    # The log has no fixed length, so the loop runs on the device.
    count, index = tl.load(hyper + LOG_COUNT), 0
    while index < count:
        value = tl.load(hyper + LOG_VALUE + index).to(tl.float32, bitcast=True)
        kind = tl.load(hyper + LOG_KIND + index)
        if kind == LOG_MUL:
            g = g * value
        elif kind == LOG_DIV:
            # IEEE division, as in the reference: the default one is approximate.
            g = tl.div_rn(g, tl.zeros_like(g) + value)
        elif kind == LOG_CLAMP_MIN:
            # Keeps NaN, since comparisons with it are false.
            g = tl.where(g < value, value, g)
        else:
            g = tl.where(g > value, value, g)
        index += 1
    return g


@triton.jit
def _adamw(p: tl.tensor, m: tl.tensor, v: tl.tensor, g: tl.tensor, hyper: tl.tensor) -> tl.tensor:
    m = m * _scalar(hyper, BETA1) + g * _scalar(hyper, ONE_MINUS_BETA1)
    # Products and sums are separate, in the order of native/kernels/optimizer_kernels.h.
    v = v * _scalar(hyper, BETA2) + (g * g) * _scalar(hyper, ONE_MINUS_BETA2)
    denom = tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + _scalar(hyper, BC2_SQRT)) + _scalar(
        hyper, EPS
    )
    p = p * _scalar(hyper, DECAY) - tl.div_rn(m, denom) * _scalar(hyper, STEP_SIZE)
    return p, m, v


@triton.jit
def _sgd(
    p: tl.tensor, b: tl.tensor, g: tl.tensor, hyper: tl.tensor, COUNT: tl.constexpr
) -> tl.tensor:
    weight_decay, momentum, flags = (
        _scalar(hyper, WEIGHT_DECAY),
        _scalar(hyper, BETA1),
        tl.load(hyper + FLAGS),
    )
    # Skipped for zero: p * 0 would turn infinity into NaN.
    if weight_decay != 0.0:
        g = g + p * weight_decay
    if COUNT > 0:
        if flags & FIRST != 0:
            b = g
        else:
            b = b * momentum + g * _scalar(hyper, ONE_MINUS_BETA1)
        if flags & NESTEROV != 0:
            g = g + b * momentum
        else:
            g = b
    return p - g * _scalar(hyper, STEP_SIZE), b


@triton.jit
def _lion(p: tl.tensor, m: tl.tensor, g: tl.tensor, hyper: tl.tensor) -> tl.tensor:
    c = m * _scalar(hyper, BETA1) + g * _scalar(hyper, ONE_MINUS_BETA1)
    sign = tl.where(c > 0.0, 1.0, tl.where(c < 0.0, -1.0, 0.0))
    sign = tl.where(c != c, c, sign)  # the sign of NaN is NaN
    p = p * _scalar(hyper, DECAY) - sign * _scalar(hyper, STEP_SIZE)
    return p, m * _scalar(hyper, BETA2) + g * _scalar(hyper, ONE_MINUS_BETA2)


# -- encodings: infinity/_src/kernels/state_codec.py says why --------------------------------------


@triton.jit
def _load(pointer: tl.tensor, mask: tl.tensor, WHOLE: tl.constexpr) -> tl.tensor:
    if WHOLE:
        value = tl.load(pointer)
    else:
        value = tl.load(pointer, mask=mask, other=0)
    return value


@triton.jit
def _store(pointer: tl.tensor, value: tl.tensor, mask: tl.tensor, WHOLE: tl.constexpr) -> None:
    if WHOLE:
        tl.store(pointer, value)
    else:
        tl.store(pointer, value, mask=mask)


@triton.jit
def _load_master(
    s0: tl.tensor,
    s1: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    MASTER: tl.constexpr,
    WHOLE: tl.constexpr,
) -> tl.tensor:
    if MASTER == MASTER_FP32:
        p = _load(s0 + at, mask, WHOLE)
    elif MASTER == MASTER_FP16:
        p = _load(s1 + at, mask, WHOLE)
    else:
        high = _load(s0 + at, mask, WHOLE).to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        low = _load(s1 + at, mask, WHOLE).to(tl.int32).to(tl.uint32, bitcast=True)
        # 24 bits: `lo` is the third byte, with its sign.
        if MASTER == SPLIT8:
            low = low << 8
        p = float_of(high + low)
    return p


@triton.jit
def _store_master(
    s0: tl.tensor, s1: tl.tensor, at: tl.tensor, p: tl.tensor, random: tl.tensor, mask: tl.tensor,
    MASTER: tl.constexpr, SIGNS: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    if MASTER == MASTER_FP32:
        _store(s0 + at, p, mask, WHOLE)
    elif MASTER == MASTER_FP16:
        half = p.to(tl.float16).to(tl.int16, bitcast=True)
        # NaN by its bits: the payload of an fp16 NaN depends on the device.
        _store(s0 + at, tl.where(p != p, 0x7E00, half).to(tl.int16), mask, WHOLE)
        _store(s1 + at, p, mask, WHOLE)
    else:
        # NaN is canonical, 0x7FC00000: 0x7FFFFFFF would round up into the sign and decode as -0.0.
        bits = canonical_bits(p)
        if MASTER == SPLIT8:
            # The upper 8 random bits; the moments use the others.
            bits = bits + (random >> 24)
            _store(s1 + at, (bits >> 8).to(tl.int8), mask, WHOLE)
            # `hi` rounds ties away from zero; `lo` is the signed rest.
            hi = (((bits >> 8) << 8) + 0x8000) >> 16
        else:
            hi = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            lo = bits if SIGNS else bits - _unsaid(bits)
            _store(s1 + at, lo.to(tl.int16), mask, WHOLE)
        _store(s0 + at, hi.to(tl.int16), mask, WHOLE)


@triton.jit
def _unsaid(bits: tl.tensor) -> tl.tensor:
    """uint32: 1 where `lo` would be 32768, which int16 lacks."""
    return ((bits & 0x1FFFF) == 0x8000).to(tl.uint32)


@triton.jit
def _load_moment(
    section: tl.tensor, scales: tl.tensor, at: tl.tensor, groups: tl.tensor, mask: tl.tensor,
    in_groups: tl.tensor,
    MOMENT: tl.constexpr, MOMENTS: tl.constexpr, COUNT: tl.constexpr, WHOLE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    stored = _load(section + at, mask, WHOLE)
    if MOMENTS == MOMENTS_BF16:
        value = float_of_bf16(stored)
    elif MOMENTS == MOMENTS_Q8:
        scale = float_of_bf16(_load(scales + groups * COUNT + MOMENT, in_groups, WHOLE))[:, None]
        c = stored.to(tl.float32)
        if MOMENT == 0:
            value = ((c * tl.abs(c)) * SQUARE_STEP) * scale
        else:
            square = c * c
            value = ((square * square) * FOURTH_STEP) * scale
    else:
        value = stored
    return value


@triton.jit
def _store_moment(
    section: tl.tensor, scales: tl.tensor, at: tl.tensor, groups: tl.tensor, value: tl.tensor,
    random: tl.tensor,
    mask: tl.tensor, in_groups: tl.tensor,
    MOMENT: tl.constexpr, MASTER: tl.constexpr, MOMENTS: tl.constexpr, COUNT: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    # A 24-bit master uses 8 of the 32 random bits: 12 remain for each moment.
    width: tl.constexpr = 12 if MASTER == SPLIT8 else 16
    drawn = (random >> (width if MOMENT == 0 else 0)) & ((1 << width) - 1)
    if MOMENTS == MOMENTS_FP32:
        _store(section + at, value, mask, WHOLE)
    elif MOMENTS == MOMENTS_BF16:
        bits = canonical_bits(value)
        rounded = (bits + ((drawn << (16 - width)) | ((1 << (16 - width)) >> 1))) >> 16
        # The square root of moment 1 is a divisor: positive values stay positive.
        if MOMENT == 1:
            rounded = tl.where((rounded == 0) & (bits != 0), 1, rounded)
        _store(section + at, rounded.to(tl.int16), mask, WHOLE)
    else:
        # Elements beyond the segment must not raise the scale; -0.0 has no code.
        value = tl.where(mask, value, 0.0) + 0.0
        u = float_of((drawn << (23 - width)) | (0x3F800000 | ((1 << (23 - width)) >> 1)))
        code, scale = _q8(value, u, MOMENT, GROUPS)
        _store(section + at, code.to(section.dtype.element_ty), mask, WHOLE)
        _store(scales + groups * COUNT + MOMENT, scale.to(tl.int16), in_groups, WHOLE)


@triton.jit
def _q8(x: tl.tensor, u: tl.tensor, MOMENT: tl.constexpr, GROUPS: tl.constexpr) -> tl.tensor:
    """Codes int32 [GROUPS, GROUP], scales uint32 [GROUPS], the bits of a bf16 each.

    u: random, in [1, 2).
    """
    bits = bits_of(x)
    if MOMENT == 0:
        bits = bits & 0x7FFFFFFF
    # By bits: for positive floats the order of integers is that of values.
    most = tl.max(bits, axis=1)
    # Up to bf16, and at least 2^-94, so that code 1 of moment 1 is not zero.
    scale = tl.minimum(tl.maximum((most + 0xFFFF) >> 16, SCALE_LEAST), SCALE_MOST)
    scale = tl.where(most == 0, 0, scale)
    scale = tl.where(most >= INFINITY_BITS, 0x7FC0, scale).to(tl.uint32)
    plain = (scale > 0) & (scale <= SCALE_MOST)
    # The division below needs a finite scale that is not zero: use 1.0 elsewhere, where x is 0.
    divisor = float_of(tl.where(plain, scale << 16, 0x3F800000).to(tl.uint32))
    levels = tl.full((GROUPS,), SQUARE_LEVELS if MOMENT == 0 else FOURTH_LEVELS, tl.float32)
    factor = tl.div_rn(levels, divisor)
    x = tl.where(plain[:, None], x, 0.0)
    y = tl.abs(x) * factor[:, None]
    if MOMENT == 0:
        low = tl.sqrt_rn(y).to(tl.int32)
        c = low.to(tl.float32)
        base = c * c
        step = c + c + 1.0
    else:
        low = tl.sqrt_rn(tl.sqrt_rn(x) * tl.sqrt_rn(factor)[:, None]).to(tl.int32)
        c = low.to(tl.float32)
        below, above = c * c, (c + 1.0) * (c + 1.0)
        base = below * below
        step = above * above - base
    # Round up with the probability that preserves the expected value: u is in [1, 2).
    number = low + tl.where(u * step < (y - base) + step, 1, 0)
    if MOMENT == 0:
        number = tl.minimum(number, 127)
        number = tl.where(x < 0.0, -number, number)
    else:
        number = tl.minimum(number, 255)
        # The square root of moment 1 is a divisor: positive values get at least code 1.
        number = tl.where((number == 0) & (x > 0.0), 1, number)
    return number, scale
