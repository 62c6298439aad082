"""Speed of the update kernels: per instruction set and state format, from cache and from
memory.

Each round runs all arms in turn; figures are medians over the rounds. "cache": the kernel updates
two pieces repeatedly. "memory": the kernel updates states far larger than the caches, and each
round also measures the memory's bandwidth, by the faster of the in-place additions `a += 1` and
`a += b`; a copy would measure less, since a copy also reads the cache lines that it overwrites.
`torch.optim.AdamW(fused=True)` on fp32 is measured from memory only: in cache, most of its time is
overhead of `step()`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity._src.base.sizes import format_size
from infinity._src.cabi import native
from infinity._src.cabi.records import PIECE_NUMEL, QUANT_GROUP, Master, Moments, piece_count
from infinity.aio import CHUNK, HYPER, SEG, Format, GradDtype, Slab
from infinity.aio._memory_limits import memory_left_bytes

CACHE_NUMEL = 2 * PIECE_NUMEL
MEMORY_NUMEL = 16 << 20
_BYTES_PER_PARAM = 120
STATES = {
    "exact": Format.SPLIT,
    "bf16": Format(Master.SPLIT, Moments.BF16, 2),
    "compact": Format(Master.SPLIT8, Moments.Q8, 2),
    "fp32": Format.FP32,
}
"""Formats by name: a `Policy.state` of bf16 parameters, or "fp32" for fp32 parameters."""

Progress = Callable[[str, float], None]

_CACHE_S = 0.02
_PAGE_BYTES = 4096
_LR, _BETAS, _EPS, _DECAY, _STEP = 1e-4, (0.9, 0.999), 1e-8, 0.1, 10


@dataclasses.dataclass(frozen=True)
class Arm:
    """One computation to time. Each of `parts` runs on a separate thread; together they update
    `numel` parameters.
    """

    name: str
    isa: str
    state: str
    numel: int
    traffic: float
    """Bytes read and written per parameter."""
    parts: Sequence[Callable[[], object]]
    keep: object = None
    """Owners of memory that `parts` refer to by address only."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One arm's figures. of_memory: the arm's traffic over the memory's bandwidth; None from cache.
    """

    name: str
    isa: str
    state: str
    where: str
    numel: int
    gparam_per_s: float
    rounds: list[float]
    gb_per_s: float
    of_memory: float | None


@dataclasses.dataclass(frozen=True)
class AdamFigures:
    """Rows and settings of one measurement."""

    rows: tuple[Row, ...]
    threads: int
    memory_gb_per_s: float
    torch: str
    isa: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "threads": self.threads,
            "isa": self.isa,
            "isas": list(native.isas()),
            "torch": self.torch or None,
            "memory_gb_per_s": self.memory_gb_per_s,
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }


def _upper(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the upper halves of fp32 numbers: bf16, rounded to zero."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _codes(noise: npt.NDArray[np.float32]) -> npt.NDArray[np.int8]:
    """Return 8-bit codes from 1 to 127, which are valid for both moments: second moments are not
    negative.
    """
    codes: npt.NDArray[np.int8] = np.clip(np.abs(noise) * 40, 1, 127).astype(np.int8)
    return codes


def _copied(slab: Slab, offset: int, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    place = slab.array(values.dtype, offset=offset, count=values.size)
    place[:] = values
    return place


class _States:
    """States and a gradient of one format, with plausible values, as arguments of the kernels."""

    def __init__(self, state: Format, numel: int) -> None:
        self.state = state
        self.numel = numel
        self._kept: list[tuple[npt.NDArray[Any], ...]] = []
        sections, grad, self.kind = self._values(state, numel)
        # The engine keeps states in pages of a slab. A numpy array starts 16 bytes after a page's
        # start, so half of its vectors would cross a cache line.
        starts = [0]
        for array in (*sections, grad):
            starts.append(-(-(starts[-1] + array.nbytes) // _PAGE_BYTES) * _PAGE_BYTES)
        slab = Slab(starts[-1])
        self.sections = [
            _copied(slab, start, array) for start, array in zip(starts, sections, strict=False)
        ]
        self.grad = _copied(slab, starts[-2], grad)

    @staticmethod
    def _values(
        state: Format, numel: int
    ) -> tuple[list[npt.NDArray[Any]], npt.NDArray[Any], GradDtype]:
        """Return (the sections, the gradient, its dtype)."""
        # Generate a part and repeat it: one core generates about 1 GB of random numbers a second.
        noise = np.random.default_rng(0).standard_normal(min(numel, 1 << 20)).astype(np.float32)
        master = np.resize(noise, numel)
        # Moments far from denormals, which cost the kernel about 17 times a normal element
        # (bench/README.md).
        moments = [master * np.float32(0.01), np.square(master) * np.float32(1e-4)]
        grad = np.resize(noise[::-1], numel).astype(np.float32)
        if state is Format.FP32:
            return [master, *moments], grad, GradDtype.FP32
        hi, lo = np.empty(numel, np.uint16), np.empty(numel, np.int16)
        casts = (_at(master, "float *"), _at(hi, "uint16_t *"), _at(lo, "int16_t *"))
        native.lib.inf_split_master(*casts, numel)
        sections: list[npt.NDArray[Any]]
        if state.moments is Moments.FP32:
            sections = [hi, lo, *moments]
        elif state.moments is Moments.BF16:
            sections = [hi, lo, *(_upper(moment) for moment in moments)]
        else:
            scales = np.array([0.01, 1e-4], np.float32)
            # The last section has a bf16 scale for each moment of a group.
            sections = [
                hi,
                (lo >> 8).astype(np.int8),
                _codes(master),
                _codes(master),
                np.resize(_upper(scales), 2 * -(-numel // QUANT_GROUP)),
            ]
        return sections, _upper(grad), GradDtype.BF16

    @property
    def traffic(self) -> float:
        states = sum(section.itemsize / section.group_numel for section in self.state.sections)
        # States are read and written, the gradient is only read.
        return 2 * states + self.grad.itemsize

    def update(self) -> Callable[[], object]:
        """Return a call of the update kernel alone."""
        function = native.lib.inf_update
        sections = native.ffi.new(
            "uint8_t *[6]", [_at(section, "uint8_t *") for section in self.sections]
        )
        grad, row = _at(self.grad, "void *"), _at(_HYPER_ROW, "inf_hyper *")

        def run() -> None:
            function(int(self.state), sections, grad, int(self.kind), self.numel, 0, row)

        return run

    def fused_pass(self) -> Callable[[], object]:
        """Return a call that does the executor's work: verify, update, checksum, piece by piece."""
        lib, ffi = native.lib, native.ffi
        pieces = piece_count(self.numel)
        sections = self.state.sections
        sums, scratch = (np.zeros((len(sections), pieces), np.uint32) for _ in range(2))
        record, seg, hypers = np.zeros((), CHUNK), np.zeros(1, SEG), np.array([_HYPER_ROW], HYPER)
        record["numel"], record["format"], record["section_count"] = (
            self.numel,
            int(self.state),
            len(sections),
        )
        record["piece_numel"], record["sums_ptr"] = PIECE_NUMEL, sums.ctypes.data
        for number, section in enumerate(sections):
            record["itemsize"][number] = section.itemsize
            record["group_numel"][number] = section.group_numel
            record["section_at"][number] = record["run_bytes"]
            record["run_bytes"] += section.size_bytes(self.numel)
        seg["numel"], seg["grad"], seg["grad_dtype"] = (
            self.numel,
            self.grad.ctypes.data,
            int(self.kind),
        )
        chunk = _at(record, "inf_chunk *")
        addresses = ffi.new(
            "uint8_t *[6]", [_at(section, "uint8_t *") for section in self.sections]
        )
        # The pass compares checksums before it updates, so store the first ones.
        for number in range(len(sections)):
            lib.inf_section_store(chunk, number, addresses[number], addresses[number])
        arguments = (
            chunk, addresses, _at(seg, "inf_seg *"), 1, _at(hypers, "inf_hyper *"), 1,
            ffi.NULL, 1, 0, _at(scratch, "uint32_t *"),
        )  # fmt: skip
        # The kernel refers to these arrays by address only.
        self._kept.append((sums, scratch, record, seg, hypers))

        def run() -> None:
            code = lib.inf_chunk_update(*arguments)
            assert code == -1, f"the pass finds a wrong checksum in section {code}"

        return run


def _hyper_row() -> npt.NDArray[np.void]:
    """Make a HYPER record without torch, which `infinity._src.kernels.hyper.hyper_row_adamw` needs.
    """
    row = np.zeros((), HYPER)
    row["decay"] = 1.0 - _LR * _DECAY
    row["beta1"], row["one_minus_beta1"] = _BETAS[0], 1.0 - _BETAS[0]
    row["beta2"], row["one_minus_beta2"] = _BETAS[1], 1.0 - _BETAS[1]
    row["eps"] = _EPS
    row["bc2_sqrt"] = math.sqrt(1.0 - _BETAS[1] ** _STEP)
    row["step_size"] = _LR / (1.0 - _BETAS[0] ** _STEP)
    return row


_HYPER_ROW = _hyper_row()


def _at(array: npt.NDArray[Any], kind: str) -> Any:
    return native.ffi.cast(kind, array.ctypes.data)


def measure_adam(
    *,
    threads: int = 1,
    rounds: int = 5,
    numel: int = MEMORY_NUMEL,
    progress: Progress | None = None,
) -> AdamFigures:
    """Measure every kernel on `threads` threads. Blocks for about 15 s; takes about
    `_BYTES_PER_PARAM` bytes of memory per parameter of `numel`.

    Raises: ValueError without native kernels, or for arguments out of range.
    """
    if not native.available():
        raise ValueError(
            f"there are no native kernels to measure ({native.reason()}); `infinity doctor` shows "
            "the fix"
        )
    if threads < 1 or rounds < 1:
        raise ValueError(f"--threads {threads}, --rounds {rounds}: both must be at least 1")
    if numel < threads * PIECE_NUMEL:
        raise ValueError(
            f"--numel {numel} is too small for {threads} threads; use at least "
            f"{threads * PIECE_NUMEL}"
        )
    if _BYTES_PER_PARAM * numel > (left := memory_left_bytes()):
        raise ValueError(
            f"--numel {numel} needs about {format_size(_BYTES_PER_PARAM * numel)} of memory, and "
            f"{format_size(left)} are available; use a smaller number"
        )
    say = progress or (lambda _phase, _share: None)
    before = native.isa()
    # The instruction set and torch's number of threads are settings of the process: `undo` restores
    # them.
    with contextlib.ExitStack() as undo:
        undo.callback(native.select_isa, before)
        torch_arm, version = _torch_arm(numel, threads, undo)
        pool = undo.enter_context(ThreadPoolExecutor(threads))
        cached, _ = _measure(pool, _arms(CACHE_NUMEL, threads), "cache", rounds, say)
        arms = [*_arms(numel // threads, threads), *torch_arm]
        in_memory, memory = _measure(
            pool, arms, "memory", rounds, say, _additions(numel // threads, threads)
        )
    return AdamFigures((*cached, *in_memory), threads, memory / 1e9, version, before)


def _arms(numel: int, threads: int) -> list[Arm]:
    """Make an arm for each kernel and instruction set, with `numel` parameters per thread."""
    found = []
    for name, state in STATES.items():
        # Separate states: the fused pass verifies the checksums that it stored last, and the plain
        # update changes states without updating checksums.
        plain = [_States(state, numel) for _ in range(threads)]
        summed = [_States(state, numel) for _ in range(threads)]
        updates, passes = [one.update() for one in plain], [one.fused_pass() for one in summed]
        for isa in native.isas():
            found.append(
                Arm("update", isa, name, numel * threads, plain[0].traffic, updates, plain)
            )
            found.append(
                Arm(
                    "verify, update, checksum",
                    isa,
                    name,
                    numel * threads,
                    plain[0].traffic,
                    passes,
                    summed,
                )
            )
    return found


def _torch_arm(numel: int, threads: int, undo: contextlib.ExitStack) -> tuple[list[Arm], str]:
    """Return ([the arm of torch's optimizer], torch's version); ([], "") if torch cannot be
    imported. Sets torch's number of threads until `undo` is closed.
    """
    try:
        import torch
    except ImportError:
        return [], ""
    undo.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(threads)
    # torch divides one parameter over its threads; several would only lengthen its loop.
    parameter = torch.randn(numel, requires_grad=True)
    parameter.grad = torch.randn(numel)
    optimizer = torch.optim.AdamW(
        [parameter], lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY, fused=True
    )
    # The first step allocates the states, untimed.
    optimizer.step()
    return [
        # fp32: a parameter and two moments, read and written, and the gradient.
        Arm("torch.optim.AdamW(fused)", "", "fp32", numel, 2 * 12 + 4, [optimizer.step])
    ], torch.__version__


def _additions(numel: int, threads: int) -> list[Arm]:
    """Make the arms that measure the memory's bandwidth: in-place additions of a number and of an
    array.
    """
    one = np.float32(1.0)

    def add(array: npt.NDArray[np.float32], other: Any) -> Callable[[], object]:
        return lambda: np.add(array, other, out=array)

    arrays = [(np.ones(numel, np.float32), np.ones(numel, np.float32)) for _ in range(threads)]
    return [
        # Per element, both read and write 4 B of the left side; `a += b` also reads 4 B of `b`.
        Arm("a += 1", "", "", numel * threads, 8, [add(left, one) for left, _ in arrays]),
        Arm("a += b", "", "", numel * threads, 12, [add(left, right) for left, right in arrays]),
    ]


def _measure(
    pool: ThreadPoolExecutor,
    arms: Sequence[Arm],
    where: str,
    rounds: int,
    say: Progress,
    limit: Sequence[Arm] = (),
) -> tuple[list[Row], float]:
    """Time the arms in turn. Returns (a row per arm, the limit's bytes per second or 0)."""
    rates: list[list[float]] = [[] for _ in arms]
    shares: list[list[float]] = [[] for _ in arms]
    limits: list[float] = []
    # A run from memory is long enough to be timed alone.
    repeats = [1 if limit else _repeats(pool, arm) for arm in arms]
    for number in range(rounds):
        if limit:
            # An arm's share refers to the bandwidth of the same round.
            limits.append(max(one.numel * one.traffic / _seconds(pool, one, 1) for one in limit))
        for index, arm in enumerate(arms):
            say(f"{where} {number + 1}/{rounds}", index / len(arms))
            rate = arm.numel / _seconds(pool, arm, repeats[index])
            rates[index].append(rate)
            if limit:
                shares[index].append(rate * arm.traffic / limits[-1])
    rows = []
    for arm, mine, share in zip(arms, rates, shares, strict=True):
        rate = statistics.median(mine)
        rows.append(
            Row(
                name=arm.name,
                isa=arm.isa,
                state=arm.state,
                where=where,
                numel=arm.numel,
                gparam_per_s=rate / 1e9,
                rounds=[value / 1e9 for value in mine],
                gb_per_s=rate * arm.traffic / 1e9,
                of_memory=statistics.median(share) if share else None,
            )
        )
    return rows, statistics.median(limits) if limits else 0.0


def _repeats(pool: ThreadPoolExecutor, arm: Arm) -> int:
    return max(1, int(_CACHE_S / max(_seconds(pool, arm, 3), 1e-6)))


def _seconds(pool: ThreadPoolExecutor, arm: Arm, repeats: int) -> float:
    # The previous arm may have selected another instruction set.
    if arm.isa:
        native.select_isa(arm.isa)

    def loop(part: Callable[[], object]) -> None:
        for _ in range(repeats):
            part()

    start_s = time.perf_counter()
    # A single part runs in this thread, without the delay of the pool.
    if len(arm.parts) == 1:
        loop(arm.parts[0])
    else:
        for future in [pool.submit(loop, part) for part in arm.parts]:
            future.result()
    return (time.perf_counter() - start_s) / repeats
