"""Swap bandwidth of one or several drives, measured through the same executor that training uses.

    fill    random bytes, copied and checksummed, onto fresh extents        (also proves that the drive takes them)
    verify  a sample read back, every checksum compared
    rounds  read | write | mixed, alternating, so that a drive whose speed drifts is seen from all three sides

The rounds move slots as they are (`MASK_MOVE_ONLY`): they measure the drive and the rings, not memcpy. What they write is
the random data that earlier reads left in the slots. A phase ends at the data's end or at its deadline.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity import aio
from infinity.aio.plan import ALIGNMENT_BYTES, piece_count

CHUNK_BYTES = 4_718_592
"""What a full chunk of the `exact` state takes (393,216 elements of 12 bytes), and so what one slot moves."""

_PIECE_BYTES = 65_536
_RANDOM_BYTES = 64 << 20

Progress = Callable[[str, float], None]
"""Called with the phase's name and its done share, 0 to 1."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Bandwidths of the rounds of one phase, in bytes per second."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle round, which is what is reported."""
        return statistics.median(self.rounds)

    @property
    def gbps(self) -> float:
        """The median in GB/s (10^9 bytes)."""
        return self.median / 1e9


@dataclasses.dataclass(frozen=True)
class SwapFigures:
    """What one measurement found. `size_bytes` is what was really written and read back in a round."""

    read: Spread
    write: Spread
    mixed: Spread
    fill_bytes_per_s: float
    size_bytes: int
    block_bytes: int
    depth: int
    backend: str
    backend_reason: str
    direct: bool
    huge_page_share: float
    verified_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """The figures ready for JSON; `*_gbps` are medians in 10^9 bytes per second."""
        return {
            "read_gbps": self.read.gbps,
            "write_gbps": self.write.gbps,
            "mixed_gbps": self.mixed.gbps,
            "fill_gbps": self.fill_bytes_per_s / 1e9,
            "rounds": {
                name: [value / 1e9 for value in spread.rounds]
                for name, spread in (("read_gbps", self.read), ("write_gbps", self.write), ("mixed_gbps", self.mixed))
            },
            "size_bytes": self.size_bytes,
            "block_bytes": self.block_bytes,
            "depth": self.depth,
            "backend": self.backend,
            "backend_reason": self.backend_reason,
            "direct": self.direct,
            "huge_page_share": self.huge_page_share,
            "verified_bytes": self.verified_bytes,
        }


class _Run:
    """Chunks on drives, and phases over them. Bounded: `slots` slots, three waves of them queued."""

    def __init__(self, executor: aio.Executor, drives: Sequence[aio.SwapFile], size_bytes: int, slots: int) -> None:
        self.executor = executor
        self.slots = slots
        self.count = max(size_bytes // CHUNK_BYTES, 2 * len(drives))
        chunks = np.zeros(self.count, dtype=aio.CHUNK)
        index = np.arange(self.count)
        pieces = piece_count(CHUNK_BYTES, _PIECE_BYTES)
        self.sums = np.zeros((self.count, pieces), dtype=np.uint32)
        chunks["key"] = index + 1
        chunks["numel"] = CHUNK_BYTES
        chunks["file_offset"] = index // len(drives) * CHUNK_BYTES
        chunks["run_bytes"] = CHUNK_BYTES
        chunks["drive"] = index % len(drives)
        chunks["format"] = aio.Format.RAW
        chunks["section_count"] = 1
        chunks["piece_numel"] = _PIECE_BYTES
        chunks["itemsize"][:, 0] = 1
        chunks["section_at"] = -1
        chunks["section_at"][:, 0] = 0
        chunks["sums_ptr"] = self.sums.ctypes.data + index * (pieces * 4)
        for number, drive in enumerate(drives):
            drive.grow(len(range(number, self.count, len(drives))) * CHUNK_BYTES)
        self.ids = executor.define(chunks)

    def jobs(self, kind: aio.JobKind, mask: int, pointers: npt.NDArray[np.uint64] | int = 0) -> npt.NDArray[Any]:
        """One job per chunk, in order."""
        jobs = np.zeros(self.count, dtype=aio.JOB)
        jobs["chunk"] = self.ids
        jobs["kind"] = kind
        jobs["mask"] = mask
        jobs["base"] = -1
        jobs["ptr"][:, 0] = pointers
        return jobs

    def run(
        self, jobs: npt.NDArray[Any], deadline_s: float, step: Callable[[float], None]
    ) -> tuple[int, float]:
        """Run jobs in order until they end or the deadline passes. Returns (jobs done, seconds). Blocks."""
        wave = max(self.slots // 2, 1)
        flying: deque[aio.Ticket] = deque()
        start = time.monotonic()
        sent = 0
        while sent < len(jobs) and time.monotonic() - start < deadline_s:
            part = jobs[sent : sent + wave]
            flying.append(self.executor.submit(part, priority=aio.Priority.DEMAND))
            sent += len(part)
            # Four half-waves keep every slot busy and the queue short enough for a deadline to mean something.
            if len(flying) >= 4:
                flying.popleft().wait()
            step(sent / len(jobs))
        while flying:
            flying.popleft().wait()
        return sent, time.monotonic() - start


def measure_swap(
    directories: Sequence[str | Path],
    *,
    size_bytes: int,
    block_bytes: int = 1 << 20,
    depth: int = 32,
    backend: str = "auto",
    rounds: int = 3,
    phase_s: float = 4.0,
    progress: Progress | None = None,
) -> SwapFigures:
    """Measure the drives under `directories` together with `size_bytes` of swap in all.

    Blocks for at most about (3 * rounds + 3) * phase_s. Leaves nothing behind, whatever ends it. The memory that it
    takes is about 160 MiB per drive.
    Raises: ValueError for directories that cannot hold swap, SwapFullError, AioError.
    """
    if size_bytes < 4 * CHUNK_BYTES:
        raise ValueError(f"size={size_bytes} bytes is too small to measure; use at least 32MiB")
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")
    say = progress or (lambda _phase, _share: None)
    with ExitStack() as stack:
        drives = []
        for directory in directories:
            drives.append(aio.SwapFile.create(directory))
            stack.callback(drives[-1].close)
        in_flight = depth * block_bytes // CHUNK_BYTES + 1
        slots = max(in_flight * 2, 8) * len(drives)
        source = aio.Slab(_RANDOM_BYTES)
        stack.callback(source.close)
        executor = aio.open_executor(
            drives,
            small=aio.PoolSpec(0, 0),
            large=aio.PoolSpec(slots, CHUNK_BYTES),
            backend=backend,
            workers=1,
            block_bytes=block_bytes,
            depth=depth,
        )
        # Not drained: on Ctrl-C what has not started must not run.
        stack.callback(executor.close, drain=False)
        run = _Run(executor, drives, size_bytes, slots)
        fill = _fill(run, source, phase_s, say)
        found = _rounds(run, rounds, phase_s, say)
        return SwapFigures(
            read=Spread(tuple(found["read"])),
            write=Spread(tuple(found["write"])),
            mixed=Spread(tuple(found["mixed"])),
            fill_bytes_per_s=fill[0],
            size_bytes=run.count * CHUNK_BYTES,
            block_bytes=block_bytes,
            depth=depth,
            backend=executor.backend,
            backend_reason=executor.backend_reason,
            direct=all(drive.direct for drive in drives),
            huge_page_share=max(executor.stats().huge_bytes, 0) / executor.pool_bytes,
            verified_bytes=fill[1],
        )


def _fill(run: _Run, source: aio.Slab, phase_s: float, say: Progress) -> tuple[float, int]:
    """Write random bytes everywhere the deadline allows, verify a sample. Returns (bytes/s, bytes verified).

    A slow drive gets less data: `run.count` shrinks to what was really written.
    """
    words = source.array(np.uint64)
    words[:] = np.random.default_rng().integers(0, 2**64, size=len(words), dtype=np.uint64)
    offsets = np.arange(run.count, dtype=np.uint64) * np.uint64(ALIGNMENT_BYTES * 37)
    offsets %= np.uint64(_RANDOM_BYTES - CHUNK_BYTES)
    pointers = np.uint64(source.address) + offsets
    jobs = run.jobs(aio.JobKind.STORE, 1, pointers)
    done, took_s = run.run(jobs, 2 * phase_s, lambda share: say("fill", share))
    run.count, run.ids = done, run.ids[:done]
    sample = np.linspace(0, done - 1, min(done, 16)).astype(np.int64)
    with aio.Slab(CHUNK_BYTES) as target:
        jobs = run.jobs(aio.JobKind.FETCH, 1, target.address)[sample]
        # One after the other: they share the target.
        for index in range(len(jobs)):
            run.executor.submit(jobs[index : index + 1], priority=aio.Priority.DEMAND).wait()
    return done * CHUNK_BYTES / took_s, len(sample) * CHUNK_BYTES


def _rounds(run: _Run, rounds: int, phase_s: float, say: Progress) -> dict[str, list[float]]:
    """Bytes per second of each phase and round."""
    mask = 1 | aio.MASK_MOVE_ONLY
    reads = run.jobs(aio.JobKind.FETCH, mask)
    writes = run.jobs(aio.JobKind.STORE, mask)
    half = run.count // 2
    mixed = np.empty(2 * half, dtype=aio.JOB)
    # Read one half while the other is written, as a pass of updates does.
    mixed[0::2] = reads[:half]
    mixed[1::2] = writes[run.count - half :]
    phases = {"read": reads, "write": writes, "mixed": mixed}
    found: dict[str, list[float]] = {name: [] for name in phases}
    for number in range(rounds):
        for name, jobs in phases.items():
            label = f"{name} {number + 1}/{rounds}"
            done, took_s = run.run(jobs, phase_s, lambda share, label=label: say(label, share))  # type: ignore[misc]
            found[name].append(done * CHUNK_BYTES / took_s)
    return found
