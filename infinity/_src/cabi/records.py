"""Records shared with C as numpy structured arrays: chunks, jobs, segments, hyper-parameters.

The executor keeps one `CHUNK` record per chunk; each submission has `JOB`, `SEG` and `HYPER`
records. The dtypes mirror the structs of native/infinity.h byte for byte, so C reads the arrays in
place; tests/unit/native/test_records_layout.py compares every offset.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

GROUP_NUMEL: Final = 2048
"""Shard and chunk boundaries are multiples of this: whole 4096-byte blocks of two-byte elements,
whole quantization groups.
"""

QUANT_GROUP: Final = 64
"""Elements per quantization scale. Parameters start at multiples of it, so no group spans two
parameters.
"""

CHUNK_BYTES: Final = 4_718_592
"""Maximum bytes of a chunk of any format, with all its sections: 4.5 MiB."""

CHUNK_NUMEL: Final = 393_216
"""Elements per chunk of the `exact` state; for others see `chunk_numel`."""

PIECE_NUMEL: Final = 8192
"""Elements per checksum and section: 8-32 KiB, so a piece of all sections stays in L2 through the
fused pass.
"""

VERIFY_STRIDE: Final = 16
"""With verify="sample", this many reads of a chunk verify all of its pieces."""

SECTION_MAX: Final = 6
LOG_MAX: Final = 8
ALIGNMENT_BYTES: Final = 4096


class JobKind(IntEnum):
    """Kind of a job."""

    FETCH = 1
    STORE = 2
    UPDATE = 3
    REWRITE = 4
    """Repeat a failed write from its slot; `Executor.recover` submits these."""
    COPY = 6
    """Copy between host and device memory, without a chunk."""


class Master(IntEnum):
    """Encoding of the parameter and its fp32 master at rest."""

    RAW = 0
    """The parameter alone, any dtype."""
    SPLIT = 1
    """hi (bf16, used by forward) and lo (int16): together the fp32 master; see
    `Format.sign_section`.
    """
    SPLIT8 = 2
    """hi (bf16) and lo (int8): the upper 24 bits of the master."""
    FP32 = 3
    """The parameter is the master."""
    FP16 = 4
    """The parameter in fp16, and the fp32 master."""


class Moments(IntEnum):
    """Encoding of an optimizer's moments at rest."""

    FP32 = 0
    BF16 = 1
    Q8 = 2
    """One byte per moment and element, and a section of scales: one bf16 per group of QUANT_GROUP
    elements and moment.
    """


class GradSection(IntEnum):
    """Section of spilled gradients, which an UPDATE only reads."""

    NONE = 0
    BF16 = 1
    FP32 = 2
    FP16 = 3


NumelT = TypeVar("NumelT", int, npt.NDArray[np.int64])
"""Elements: one number, or one for each of several chunks."""


class Section(NamedTuple):
    """One state of a chunk: name and bytes per item. An item is `group_numel` elements."""

    name: str
    itemsize: int
    group_numel: int = 1

    def size_bytes(self, numel: NumelT) -> NumelT:
        """Bytes of the first `numel` elements (a number, or one per chunk), rounded up to whole
        items.
        """
        return -(-numel // self.group_numel) * self.itemsize


_MASTER_SECTIONS: Final[dict[Master, tuple[Section, ...]]] = {
    Master.SPLIT: (Section("hi", 2), Section("lo", 2)),
    Master.SPLIT8: (Section("hi", 2), Section("lo", 1)),
    Master.FP32: (Section("param", 4),),
    Master.FP16: (Section("param", 2), Section("master", 4)),
}
_MOMENT_ITEMSIZES: Final = {Moments.FP32: 4, Moments.BF16: 2, Moments.Q8: 1}
_GRAD_ITEMSIZES: Final = {GradSection.BF16: 2, GradSection.FP32: 4, GradSection.FP16: 2}


class Format(int):
    """State format of a chunk: the encoding of master, moments and spilled gradients, and so its
    sections.

    An int, the code of CHUNK["format"]: master | moments << 8 | count << 16 | grad << 24. One
    object per code. Raises: ValueError for an unsupported format.
    """

    RAW: ClassVar[Format]
    """The parameter alone, any dtype."""
    SPLIT: ClassVar[Format]
    """The `exact` state of bf16: hi, lo, two fp32 moments."""
    FP32: ClassVar[Format]
    """The `exact` state of fp32: param, two fp32 moments."""
    _known: ClassVar[dict[int, Format]] = {}

    def __new__(  # noqa: PYI034 - interned, and not to be derived from
        cls,
        master: int = Master.RAW,
        moments: int = Moments.FP32,
        count: int = 0,
        grad: int = GradSection.NONE,
    ) -> Format:
        """master: a Master; moments: a Moments; count: how many moments, 0 to 3; grad: a
        GradSection.
        """
        code = Master(master) | Moments(moments) << 8 | count << 16 | GradSection(grad) << 24
        if master == Master.RAW and code:
            raise ValueError("Master.RAW is the parameter alone: it has no moments and no gradient")
        if not 0 <= count <= 3 or (moments == Moments.Q8 and count not in (1, 2)):
            raise ValueError(
                f"{count} moments in {Moments(moments).name}: 0 to 3, in Q8 one or two"
            )
        # Interned, so that formats compare and hash like ints, and by identity.
        found = cls._known.get(code)
        return found if found is not None else cls._known.setdefault(code, int.__new__(cls, code))

    @classmethod
    def of(cls, code: int) -> Format:
        """Return the format of a CHUNK["format"]."""
        code = int(code)
        return cls(code & 255, code >> 8 & 255, code >> 16 & 255, code >> 24)

    @property
    def code(self) -> int:
        return int(self)

    @functools.cached_property
    def master(self) -> Master:
        return Master(self & 255)

    @functools.cached_property
    def moments(self) -> Moments:
        return Moments(self >> 8 & 255)

    @functools.cached_property
    def count(self) -> int:
        return self >> 16 & 255

    @functools.cached_property
    def grad(self) -> GradSection:
        return GradSection(self >> 24)

    def with_grad(self, grad: int) -> Format:
        """Return the same states with another section of spilled gradients (a GradSection)."""
        return Format(self.master, self.moments, self.count, grad)

    @functools.cached_property
    def sections(self) -> tuple[Section, ...]:
        """Sections in order. RAW's single section has itemsize 0: the parameter's is unknown
        here.
        """
        return _sections(self)

    @functools.cached_property
    def master_count(self) -> int:
        """Number of sections of the parameter and its master; the moments follow."""
        return 1 if self.master in (Master.RAW, Master.FP32) else 2

    @functools.cached_property
    def sign_section(self) -> int | None:
        """Index of the second moment's section, if its sign bits belong to the masters, else None.

        `hi` is the master rounded to even. If a master is half-way between two bf16 values and `hi`
        is the one nearer to zero, `lo` would be 32768, which int16 cannot hold. Then `lo` is -32768
        and the sign bit of the second moment is set. With any other `lo` the sign bit belongs to
        the moment.
        """
        signed = self.master is Master.SPLIT and self.moments is Moments.FP32 and self.count > 1
        return self.master_count + 1 if signed else None

    @functools.cached_property
    def master_sections(self) -> tuple[int, ...]:
        """Indices of the sections from which a master is decoded."""
        own = tuple(range(self.master_count))
        return own if self.sign_section is None else (*own, self.sign_section)

    @functools.cached_property
    def written_count(self) -> int:
        """Number of sections that an UPDATE writes: all except `grad`, which is the last."""
        return len(self.sections) - (self.grad is not GradSection.NONE)

    def __repr__(self) -> str:
        return (
            f"Format({self.master.name}, {self.count} x {self.moments.name}, grad {self.grad.name})"
        )

    __str__ = __repr__

    def __getnewargs__(self) -> tuple[int, int, int, int]:  # type: ignore[override]
        return (self.master, self.moments, self.count, self.grad)


@functools.lru_cache(maxsize=256)
def _sections(state: Format) -> tuple[Section, ...]:
    """Compute `Format.sections`. Cached, since it is called for every chunk."""
    if state.master is Master.RAW:
        return (Section("param", 0),)
    itemsize = _MOMENT_ITEMSIZES[state.moments]
    moments = [Section(f"moment{index}", itemsize) for index in range(state.count)]
    if state.moments is Moments.Q8:
        moments.append(Section("scales", 2 * state.count, QUANT_GROUP))
    if state.grad:
        moments.append(Section("grad", _GRAD_ITEMSIZES[state.grad]))
    return (*_MASTER_SECTIONS[state.master], *moments)


Format.RAW = Format()
Format.SPLIT = Format(Master.SPLIT, Moments.FP32, 2)
Format.FP32 = Format(Master.FP32, Moments.FP32, 2)


@functools.lru_cache(maxsize=256)
def chunk_numel(state_format: Format) -> int:
    """Elements per chunk: as many as fit in CHUNK_BYTES with all sections, a multiple of 8 *
    GROUP_NUMEL; for RAW as for the `exact` state.

    Spilled gradients are not counted, so that the boundaries of chunks do not depend on the budget.
    """
    if state_format.master is Master.RAW:
        return CHUNK_NUMEL
    step = 8 * GROUP_NUMEL
    sections = state_format.with_grad(GradSection.NONE).sections
    return CHUNK_BYTES // sum(section.size_bytes(step) for section in sections) * step


class GradDtype(IntEnum):
    """Dtype of a segment's gradient, or SECTION."""

    BF16 = 0
    FP32 = 1
    FP16 = 2
    SECTION = 3
    """The gradient is in the chunk's `grad` section, from the segment's start on; the segment has
    no address.
    """


class Algorithm(IntEnum):
    """Algorithm of an update; infinity/_src/kernels has the reference implementations."""

    ADAMW = 0
    SGD = 1
    LION = 2
    MUON_MOMENTUM = 3
    """Muon's first update: changes the momentum, and replaces the gradient by the combination of
    momentum and gradient.
    """
    MUON = 4
    """Muon's second update: changes the master by the orthogonalized matrix, passed as gradient."""


class HyperFlag(IntEnum):
    """Bits of HYPER["flags"] for SGD. MUON_MOMENTUM uses only NESTEROV."""

    NESTEROV = 1
    FIRST = 2
    """The parameter's first step: the momentum buffer is set to the gradient."""


class LogKind(IntEnum):
    """One scaling or clamping of a gradient, replayed in fp32 before the update."""

    MUL = 0
    DIV = 1
    CLAMP_MIN = 2
    CLAMP_MAX = 3


CHUNK: Final = np.dtype(
    [
        ("key", "<u8"),
        ("generation", "<u8"),
        ("other_generation", "<u8"),
        ("numel", "<i8"),
        ("file_offset", "<i8"),
        ("run_bytes", "<i8"),
        ("other_offset", "<i8"),
        ("other_bytes", "<i8"),
        ("grad_offset", "<i8"),
        ("drive", "<i4"),
        ("format", "<i4"),
        ("section_count", "<i4"),
        ("piece_numel", "<i4"),
        ("file", "<i4"),
        ("other_file", "<i4"),
        ("grad_file", "<i4"),
        ("other_drive", "<i4"),
        ("zeros", "<u2"),
        ("other_zeros", "<u2"),
        ("older", "<u2"),
        ("reserved", "<u2"),
        ("itemsize", "<i4", (SECTION_MAX,)),
        ("group_numel", "<i4", (SECTION_MAX,)),
        ("section_at", "<i8", (SECTION_MAX,)),
        ("section_ptr", "<u8", (SECTION_MAX,)),
        ("other_ptr", "<u8", (SECTION_MAX,)),
        ("sums_ptr", "<u8"),
        ("other_sums_ptr", "<u8"),
    ]
)
"""`inf_chunk`. `group_numel`: elements per item of a section; 0 stands for 1. `other_*`: the second
place of a versioned chunk. `zeros`: mask of sections on NVMe that were never written; a read
returns zeros, without I/O. `older`: mask of sections that are at the second place until the second
of a step's two updates writes them, too. `other_drive`: of the second place; equal to `drive`
unless a failed write was moved to another drive. Gradients are on `drive`.
"""

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
    [
        ("start", "<i8"),
        ("numel", "<i8"),
        ("element", "<i8"),
        ("grad", "<u8"),
        ("grad_dtype", "<i4"),
        ("hyper", "<i4"),
    ]
)
"""`inf_seg`. `element`: index in the parameter of the segment's first element, which stochastic
rounding uses.
"""

HYPER: Final = np.dtype(
    [
        ("key", "<u8"),
        ("decay", "<f4"),
        ("beta1", "<f4"),
        ("one_minus_beta1", "<f4"),
        ("beta2", "<f4"),
        ("one_minus_beta2", "<f4"),
        ("eps", "<f4"),
        ("bc2_sqrt", "<f4"),
        ("step_size", "<f4"),
        ("weight_decay", "<f4"),
        ("algorithm", "<i4"),
        ("flags", "<i4"),
        ("log_count", "<i4"),
        ("log_kind", "<i4", (LOG_MAX,)),
        ("log_value", "<f4", (LOG_MAX,)),
    ]
)
"""`inf_hyper`; native/infinity.h defines each scalar for each algorithm."""


def piece_count(numel: int, piece_numel: int = PIECE_NUMEL) -> int:
    """Checksums per section of a chunk of `numel` elements."""
    return -(-numel // piece_numel)


def sum_seed(generation: int, key: int, section: int, piece: int) -> int:
    """Seed of a piece's checksum (uint32); `inf_sum_seed` of native/kernels/chunk_pass.c.

    It depends on the piece's position and generation, so that stale or misdirected data fails the
    comparison.
    """
    mask = (1 << 64) - 1
    # splitmix64, with the constants of the C function.
    mixed = (key * 0x9E3779B97F4A7C15 + generation) & mask
    for word in (section, piece):
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 + word + 1) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) & 0xFFFFFFFF


#: One span of work of an executor, as returned by `take_spans`. `track` is one of TRACK_*; times
#: are CLOCK_MONOTONIC nanoseconds (`time.monotonic_ns`); `drive` is -1 for work without I/O;
#: `chunk` is the id that `define` returned; `priority` is a Priority, or 3 for a read ahead; `kind`
#: is that of the job (a JobKind, or KIND_AHEAD for a read ahead) and `mask` its mask.
SPAN = np.dtype(
    [
        ("track", np.int32),
        ("drive", np.int32),
        ("chunk", np.int32),
        ("priority", np.int32),
        ("kind", np.int32),
        ("mask", np.uint32),
        ("start_ns", np.int64),
        ("end_ns", np.int64),
        ("bytes", np.int64),
    ],
    align=True,
)
TRACK_READ, TRACK_WRITE, TRACK_UPDATE, TRACK_COPY, TRACK_TO_DEVICE, TRACK_FROM_DEVICE = range(6)

#: The `kind` of a SPAN that belongs to a read ahead. No job has this kind.
KIND_AHEAD = 5

#: In a job's mask: transfer the slot without copy and checksum. For measuring drives
#: (`infinity.bench`).
MASK_MOVE_ONLY = 0x8000_0000
#: In an UPDATE's mask: section 0 is not read from the drive but copied from ptr[1], the caller's
#: memory with the chunk's whole section, which must not change until the ticket is `filled`. The
#: section is not verified, but written like all sections. ptr[0] may be the same memory. No effect
#: if section 0 is resident: then it has the same values.
MASK_PARAM_IN_MEMORY = 0x4000_0000
#: Position in an UPDATE's mask of a second mask: the sections that the UPDATE neither reads nor
#: writes, because the algorithm of no segment needs them.
LEAVES_SHIFT = 8
#: In an UPDATE's mask: another UPDATE of the chunk follows before the next commit. So this one
#: leaves sections out of a new version, and the next one without this bit completes it.
MASK_FIRST = 0x0800_0000
#: In a job's mask: ptr[] are addresses on the attached device (`Executor.attach_device`).
MASK_DEVICE = 0x2000_0000
#: In a FETCH's mask: the chunk has one checksum per section, computed from its pieces' checksums
#: (`inf_fold_sums`). A mismatch names the section, not the piece.
MASK_FOLDED = 0x1000_0000
#: In the mask of a COPY, with MASK_DEVICE: ptr[0] is on the device, else ptr[1].
MASK_COPY_OUT = 1


class Priority(IntEnum):
    """Priority of a submission. Writes of all priorities share half of the drive's depth."""

    DEMAND = 0
    PREFETCH = 1
    WRITEBACK = 2


@dataclass(frozen=True)
class PoolSpec:
    """A pool of `count` slots of `bytes` each (a multiple of 4096) in the executor's slab."""

    count: int
    bytes: int

    def __post_init__(self) -> None:
        if self.count < 0 or self.bytes < 0 or self.bytes % 4096:
            raise ValueError(
                f"PoolSpec(count={self.count}, bytes={self.bytes}): count must be >= 0 and bytes "
                "a multiple of 4096"
            )
