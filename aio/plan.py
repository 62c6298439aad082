"""The plan: what Python hands to an executor, as numpy structured arrays.

One `CHUNK` record per chunk (kept by the executor), and per submission `JOB`, `SEG` and `HYPER` records. The dtypes
mirror the structs of native/infinity.h byte for byte, so a native executor reads the arrays as they lie and a Python
executor reads the same arrays; tests/unit/native/test_plan_layout.py compares every offset.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np

GROUP_NUMEL: Final = 2048
"""Shard and chunk boundaries are multiples of this, so every section of a chunk starts 4096-aligned (2 B x 2048)."""

CHUNK_NUMEL: Final = 393_216
"""Elements per chunk: 4.5 MiB with all sections of the `exact` state."""

PIECE_NUMEL: Final = 8192
"""Elements per checksum and section: 16-32 KiB, so a piece of all sections stays in L2 through the fused pass."""

SECTION_MAX: Final = 4
LOG_MAX: Final = 8
ALIGNMENT_BYTES: Final = 4096


class JobKind(IntEnum):
    """What a job does with its chunk."""

    FETCH = 1
    STORE = 2
    UPDATE = 3
    REWRITE = 4
    """Write again what a failed write kept; `Executor.recover` submits these."""


class Format(IntEnum):
    """State format of a chunk: which sections it has."""

    RAW = 0
    """The parameter alone, any dtype."""
    SPLIT = 1
    """bf16 AdamW: hi, lo, exp_avg, exp_avg_sq."""
    FP32 = 2
    """fp32 AdamW: param, exp_avg, exp_avg_sq."""


class GradDtype(IntEnum):
    """Element type of a segment's gradient."""

    BF16 = 0
    FP32 = 1


class LogKind(IntEnum):
    """One operation that was done to a gradient, replayed in fp32 before the update."""

    MUL = 0
    DIV = 1


SECTION_NAMES: Final[dict[Format, tuple[str, ...]]] = {
    Format.RAW: ("param",),
    Format.SPLIT: ("hi", "lo", "exp_avg", "exp_avg_sq"),
    Format.FP32: ("param", "exp_avg", "exp_avg_sq"),
}

SECTION_ITEMSIZES: Final[dict[Format, tuple[int, ...]]] = {
    Format.SPLIT: (2, 2, 4, 4),
    Format.FP32: (4, 4, 4),
}
"""Bytes per element of each section. RAW is absent: its one section has the parameter's itemsize."""

CHUNK: Final = np.dtype(
    [
        ("key", "<u8"),
        ("generation", "<u8"),
        ("numel", "<i8"),
        ("file_offset", "<i8"),
        ("run_bytes", "<i8"),
        ("drive", "<i4"),
        ("format", "<i4"),
        ("section_count", "<i4"),
        ("piece_numel", "<i4"),
        ("itemsize", "<i4", (SECTION_MAX,)),
        ("section_at", "<i8", (SECTION_MAX,)),
        ("section_ptr", "<u8", (SECTION_MAX,)),
        ("sums_ptr", "<u8"),
    ]
)
"""`inf_chunk`."""

JOB: Final = np.dtype(
    [
        ("chunk", "<i4"),
        ("kind", "<i4"),
        ("mask", "<u4"),
        ("base", "<i4"),
        ("seg_first", "<i4"),
        ("seg_count", "<i4"),
        ("ptr", "<u8", (SECTION_MAX,)),
    ]
)
"""`inf_job`."""

SEG: Final = np.dtype(
    [("start", "<i8"), ("numel", "<i8"), ("grad", "<u8"), ("grad_dtype", "<i4"), ("hyper", "<i4")]
)
"""`inf_seg`."""

HYPER: Final = np.dtype(
    [
        ("decay", "<f4"),
        ("beta1", "<f4"),
        ("one_minus_beta1", "<f4"),
        ("beta2", "<f4"),
        ("one_minus_beta2", "<f4"),
        ("eps", "<f4"),
        ("bc2_sqrt", "<f4"),
        ("step_size", "<f4"),
        ("log_count", "<i4"),
        ("log_kind", "<i4", (LOG_MAX,)),
        ("log_value", "<f4", (LOG_MAX,)),
    ]
)
"""`inf_hyper`."""


def piece_count(numel: int, piece_numel: int = PIECE_NUMEL) -> int:
    """Checksums per section of a chunk of `numel` elements."""
    return -(-numel // piece_numel)


def sum_seed(generation: int, key: int, section: int, piece: int) -> int:
    """What the checksum of a piece starts from (uint32); `inf_sum_seed` of native/chunk_pass.c.

    Mixing in where the piece belongs makes stale or misdirected data of the right shape fail the checksum.
    """
    mask = (1 << 64) - 1
    mixed = (key * 0x9E3779B97F4A7C15 + generation) & mask
    for word in (section, piece):
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 + word + 1) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) & 0xFFFFFFFF
