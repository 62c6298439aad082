"""Swap bandwidth of one or several drives, measured through the same executor that training uses.

    fill    write random bytes, copied and checksummed, to fresh extents
    verify  read a sample back, or everything, and compare every checksum; this shows that the
            drives store the data
    rounds  read | write | mixed, each also by the reference (the limit), such as fio, on separate
            files, which are written in advance

Every round has all kinds, and executor and reference go first in turn, so that drift of a drive's
speed affects both alike. With `checksums="off"` the rounds transfer slots without copies or
checksums (`MASK_MOVE_ONLY`): they measure the drives and the rings, not memcpy. They write the
random data that earlier reads left in the slots, about 72 MiB, repeatedly. With "full" and "sample"
every chunk is copied and its checksums are computed (write) or compared (read; "sample": in part),
and every round writes new data. A phase ends after the last chunk or at its deadline.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, final

import numpy as np

from infinity import aio
from infinity._src.base.sizes import format_size
from infinity._src.cabi.records import ALIGNMENT_BYTES
from infinity._src.measure.reference import Reference, check_reference, open_reference
from infinity._src.measure.streams import CHUNK_BYTES, Chunks, Content, Sample, Streams, is_hole
from infinity.aio import DriveStats, IoSettings
from infinity.aio._settings import DEPTH_MAX
from infinity.errors import AioError

# -- Figures ---------------------------------------------------------------------------------------


KINDS = ("read", "write", "mixed")


@dataclasses.dataclass(frozen=True)
class Spread:
    """Bandwidths of the rounds of one phase, in bytes per second."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median round, which reports show."""
        return statistics.median(self.rounds)

    @property
    def gbps(self) -> float:
        return self.median / 1e9

    @property
    def rounds_gbps(self) -> list[float]:
        return [value / 1e9 for value in self.rounds]


@dataclasses.dataclass(frozen=True)
class PhaseFigures:
    """One kind of phase: the executor's samples, one per round, and the reference's samples of the
    same rounds (limit_samples), or () without a reference.
    """

    samples: tuple[Sample, ...]
    limit_samples: tuple[Sample, ...] = ()

    @property
    def spread(self) -> Spread:
        return Spread(tuple(sample.rate for sample in self.samples))

    @property
    def limit(self) -> Spread | None:
        return (
            Spread(tuple(sample.rate for sample in self.limit_samples))
            if self.limit_samples
            else None
        )

    @property
    def of_limit_rounds(self) -> tuple[float, ...]:
        """Achieved / limit of each round. Drives drift, so rates of different rounds do not
        compare.
        """
        # Without a limit there are no pairs.
        pairs = zip(self.samples, self.limit_samples, strict=False)
        return tuple(ours.rate / limit.rate for ours, limit in pairs)

    @property
    def of_limit(self) -> float | None:
        """The median of achieved / limit."""
        return statistics.median(self.of_limit_rounds) if self.limit_samples else None

    @property
    def seconds(self) -> float:
        """Seconds of the shortest sample, of either arm."""
        return min(max(sample.drive_s) for sample in (*self.samples, *self.limit_samples))

    @property
    def cpu_s_per_gb(self) -> float:
        """Median CPU seconds per 10^9 bytes."""
        return statistics.median(sample.cpu_s_per_gb for sample in self.samples)

    @property
    def limit_cpu_s_per_gb(self) -> float | None:
        return (
            statistics.median(one.cpu_s_per_gb for one in self.limit_samples)
            if self.limit_samples
            else None
        )

    def drive(self, number: int) -> Spread:
        """Return one drive's bandwidths of rounds in which all drives work."""
        return Spread(tuple(sample.drive_rates[number] for sample in self.samples))

    def as_dict(self, directories: Sequence[str]) -> dict[str, Any]:
        total = self.spread.median
        drives = {
            directory: {"gbps": self.drive(number).gbps, "share": self.drive(number).median / total,
                        "rounds": self.drive(number).rounds_gbps}
            for number, directory in enumerate(directories)
        }  # fmt: skip
        return {
            **_arm(self.samples),
            "of_limit": self.of_limit,
            "of_limit_rounds": list(self.of_limit_rounds),
            "limit": _arm(self.limit_samples) if self.limit_samples else None,
            "drives": drives,
        }


def _arm(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the figures of the executor or the reference, ready for JSON."""
    spread = Spread(tuple(sample.rate for sample in samples))
    cpu = [sample.cpu_s_per_gb for sample in samples]
    return {
        "gbps": spread.gbps,
        "rounds": spread.rounds_gbps,
        "cpu_s_per_gb": statistics.median(cpu),
        "cpu_rounds": cpu,
    }


@dataclasses.dataclass(frozen=True)
class SwapFigures:
    """Figures of one measurement.

    size_bytes: bytes of the chunks that the fill wrote, on all drives; a phase that ends by its
    deadline moves fewer. block_bytes: the longest request that was sent. block_bytes_asked: the
    requested block size; None: the backend's default. verified_bytes: bytes that were read back and
    compared with checksums, not counting the rounds. limit_by: the program that measured the limit;
    empty without a limit.
    """

    read: PhaseFigures
    write: PhaseFigures
    mixed: PhaseFigures
    fill_bytes_per_s: float
    size_bytes: int
    block_bytes: int
    block_bytes_asked: int | None
    depth: int
    checksums: str
    backend: str
    backend_reason: str
    direct: bool
    huge_page_share: float
    registered: bool
    verified_bytes: int
    limit_by: str
    drives: tuple[DriveStats, ...]

    @property
    def phases(self) -> dict[str, PhaseFigures]:
        return {"read": self.read, "write": self.write, "mixed": self.mixed}

    @property
    def directories(self) -> list[str]:
        return [str(Path(drive.path).absolute()) for drive in self.drives]

    @property
    def settings(self) -> IoSettings:
        """Settings for `Policy(io=...)`: the requested block size and depth, the backend, and each
        drive's bandwidths.
        """
        bandwidths = {
            directory: (self.read.drive(number).median, self.write.drive(number).median)
            for number, directory in enumerate(self.directories)
        }
        # The requested block size, not the resulting one: every executor adapts it to the drives.
        return IoSettings(self.block_bytes_asked, self.depth, bandwidths, self.backend)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures ready for JSON. Rates are in 10^9 bytes per second; a single number is
        the median of the rounds.
        """
        return {
            "read_gbps": self.read.spread.gbps,
            "write_gbps": self.write.spread.gbps,
            "mixed_gbps": self.mixed.spread.gbps,
            "fill_gbps": self.fill_bytes_per_s / 1e9,
            "rounds": {
                f"{name}_gbps": phase.spread.rounds_gbps for name, phase in self.phases.items()
            },
            "phases": {
                name: phase.as_dict(self.directories) for name, phase in self.phases.items()
            },
            "limit_by": self.limit_by or None,
            "settings": self.settings.as_dict(),
            **{name: getattr(self, name) for name in _PLAIN},
            "drives": [drive_as_dict(drive) for drive in self.drives],
        }


_PLAIN = (
    "size_bytes", "block_bytes", "depth", "checksums", "backend", "backend_reason", "direct",
    "huge_page_share", "registered", "verified_bytes",
)  # fmt: skip
_PLAIN_OF_DRIVE = (
    "bytes_read", "bytes_written", "block_bytes", "depth", "depth_mean", "in_flight_max", "retries",
    "short_transfers", "direct", "direct_reason",
)  # fmt: skip
"""Fields that a record copies unchanged."""


def drive_as_dict(drive: DriveStats) -> dict[str, Any]:
    """Return one drive's counters over the whole measurement, ready for JSON."""
    return {
        "path": str(Path(drive.path).absolute()),
        **{name: getattr(drive, name) for name in _PLAIN_OF_DRIVE},
        "read_latency": drive.read_latency.as_dict(),
        "write_latency": drive.write_latency.as_dict(),
    }


# -- The measurement -------------------------------------------------------------------------------


CHECKSUMS = ("off", "sample", "full")
SHORT_S = 0.1
"""A shorter phase measures mostly its beginning and end, when not all slots are busy."""

Progress = Callable[[str, float], None]
"""A function that is called with a phase's name and its completed share, 0 to 1."""

_SAMPLE_CHUNKS = 16


@dataclasses.dataclass(frozen=True)
class SwapTask:
    """Settings of a measurement. Raises: ValueError for a wrong setting; the message gives the fix.

    block_bytes: None: the backend's default, as in training.
    """

    directories: tuple[Path, ...]
    size_bytes: int
    block_bytes: int | None = None
    depth: int = 32
    backend: str = "auto"
    rounds: int = 3
    phase_s: float = 1.5
    checksums: str = "off"
    limit: str = "off"
    verify_all: bool = False

    def __post_init__(self) -> None:
        if self.size_bytes < 4 * CHUNK_BYTES:
            raise ValueError(
                f"--size {self.size_bytes} is too small to measure; use at least "
                f"{4 * CHUNK_BYTES >> 20}MiB"
            )
        if self.rounds < 1:
            raise ValueError(f"--rounds {self.rounds} must be at least 1")
        if not 0 < self.phase_s < 3600:
            raise ValueError(f"--seconds {self.phase_s} must be above 0 and below 3600")
        block = self.block_bytes
        if block is not None and (block > CHUNK_BYTES or block < 1 or block % ALIGNMENT_BYTES):
            raise ValueError(
                f"--block-size {block} must be a multiple of {ALIGNMENT_BYTES}, at most "
                f"{CHUNK_BYTES} (4.5 MiB, a chunk)"
            )
        if not 2 <= self.depth <= DEPTH_MAX:
            raise ValueError(f"--depth {self.depth} must be 2 to {DEPTH_MAX}; 32 suits most drives")
        check_reference(self.limit)
        check_directories(self.directories)
        # The reference's files are as large as the executor's.
        check_room(self.directories, self.size_bytes * (1 if self.limit == "off" else 2))

    @property
    def chunks_per_drive(self) -> int:
        # At least two: a mixed phase reads the first half and writes the second.
        return max(self.size_bytes // CHUNK_BYTES // len(self.directories), 2)


def check_directories(directories: Sequence[Path]) -> None:
    """Raise ValueError for directories that are missing, not writable, or named twice."""
    if not directories:
        raise ValueError("no directory to measure; name one with --dir")
    missing = [str(directory) for directory in directories if not directory.exists()]
    if missing:
        raise ValueError(
            f"directory {', '.join(missing)} does not exist; create it, or name another one"
        )
    for directory in directories:
        if not directory.is_dir():
            raise ValueError(f"{directory} is not a directory; name one")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ValueError(
                f"directory {directory} cannot be written to by this user; name another"
            )
    if len({directory.resolve() for directory in directories}) != len(directories):
        raise ValueError(f"a directory is named twice: {', '.join(map(str, directories))}")


def check_room(directories: Sequence[Path], size_bytes: int) -> None:
    """Raise ValueError if `size_bytes`, divided equally over the directories, do not fit."""
    wanted: dict[int, int] = {}
    free: dict[int, tuple[int, Path]] = {}
    # Directories on one device share its free space.
    for directory in directories:
        device = directory.stat().st_dev
        wanted[device] = wanted.get(device, 0) + size_bytes // len(directories)
        free[device] = (shutil.disk_usage(directory).free, directory)
    for device, need in wanted.items():
        room, directory = free[device]
        if need > room:
            raise ValueError(
                f"not enough space: {directory} has {format_size(room)} free and "
                f"{format_size(need)} are needed; use a smaller --size (with a limit, twice the "
                "size is needed: --limit off saves half), or another --dir"
            )


@final
class Bench:
    """The files, chunks and random data of a measurement, for sweep and swap: a context manager
    that frees them.
    """

    def __init__(self, task: SwapTask, say: Progress) -> None:
        self.task = task
        self.say = say
        self._stack = ExitStack()
        try:
            self.content = Content(len(task.directories))
            self._stack.callback(self.content.close)
            self.chunks = Chunks(self._files(), task.chunks_per_drive)
        except BaseException:
            self._stack.close()
            raise

    def _files(self) -> list[aio.SwapFile]:
        files = []
        for directory in self.task.directories:
            files.append(aio.SwapFile.create(directory))
            # Register each file before the next is created, which may fail.
            self._stack.callback(files[-1].close)
        return files

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def streams(self, *, block_bytes: int | None, depth: int, verify: str) -> Streams:
        """Open an executor over the chunks."""
        return Streams(
            self.chunks,
            block_bytes=block_bytes,
            depth=depth,
            backend=self.task.backend,
            verify=verify,
        )

    def fill(self, streams: Streams, most_s: float | None = None) -> float:
        """Write random bytes to all chunks, or to as many as possible in `most_s` seconds (None:
        4 * phase_s). Return the bytes per second. Blocks.

        `chunks.count` becomes the number of chunks per drive that were written.
        """
        content, drives = self.content, len(self.chunks.drives)
        jobs = streams.jobs(aio.JobKind.STORE)
        per_drive = content.half // drives
        flying: list[aio.Ticket | None] = [None, None]
        most_s = 4 * self.task.phase_s if most_s is None else most_s
        start_s = time.monotonic()
        done = 0
        while done < self.chunks.count and time.monotonic() - start_s < most_s:
            half = done // per_drive % 2
            before = flying[half]
            if before is not None:
                # Its bytes are then in slots, so the half may change while the writes continue.
                before.wait_filled()
                content.renew(half)
            parts = np.concatenate([one[done : done + per_drive] for one in jobs])
            parts["ptr"][:, 0] = content.addresses(half)[: len(parts)]
            flying[half] = streams.executor.submit(parts, priority=aio.Priority.DEMAND)
            done += len(parts) // drives
            self.say("fill", done / self.chunks.count)
        for ticket in flying:
            if ticket is not None:
                ticket.wait()
        took_s = time.monotonic() - start_s
        self.chunks.count = done
        return self.chunks.size_bytes / took_s

    def verify(self, streams: Streams, phase: str, *, everything: bool) -> int:
        """Read chunks back and compare their checksums. Return the number of bytes. Blocks.

        streams: an executor with verify="full". Raises: ChecksumError.
        """
        with aio.Slab(4 * CHUNK_BYTES) as target:
            # Chunks may share a target, since the data are discarded.
            pointers = target.address + np.arange(4, dtype=np.uint64) * np.uint64(CHUNK_BYTES)
            jobs = streams.jobs(aio.JobKind.FETCH, 1, pointers)
            if not everything:
                count = min(self.chunks.count, _SAMPLE_CHUNKS)
                picked = np.linspace(0, self.chunks.count - 1, count).astype(np.int64)
                jobs = [one[picked] for one in jobs]
            # One drive at a time: a run over several drives ends as soon as one drive is done.
            samples = [
                streams.run([one], math.inf, lambda share: self.say(phase, share)) for one in jobs
            ]
        return sum(sum(sample.drive_bytes) for sample in samples)

    def check_no_holes(self) -> None:
        """Read some pages from the drives. Raises: AioError if a page does not hold random data."""
        with aio.Slab(ALIGNMENT_BYTES) as page:
            for drive in self.chunks.drives:
                for chunk in np.linspace(0, self.chunks.count - 1, _SAMPLE_CHUNKS).astype(np.int64):
                    # In the middle of a chunk, at the alignment of O_DIRECT.
                    offset = (
                        int(chunk) * CHUNK_BYTES
                        + CHUNK_BYTES // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
                    )
                    moved = os.preadv(drive.fd, [page.memory], offset)
                    if moved != page.size_bytes or is_hole(page.memory):
                        raise AioError(
                            "the benchmark read a hole of the file, not data: a defect of infinity",
                            path=drive.path,
                            op="read",
                            offset=offset,
                        )

    def limit(self, name: str, *, block_bytes: int, depth: int) -> Reference | None:
        if name == "off":
            return None
        files = self._files()
        for file in files:
            file.grow(self.chunks.count * CHUNK_BYTES)
        self.say("fill for the limit", 0.0)
        return open_reference(name, files, self.content, block_bytes=block_bytes, depth=depth)

    def phases(
        self, streams: Streams, checksums: str
    ) -> dict[str, list[np.ndarray[tuple[int], np.dtype[np.void]]]]:
        if checksums == "off":
            reads = streams.jobs(aio.JobKind.FETCH, 1 | aio.MASK_MOVE_ONLY)
            writes = streams.jobs(aio.JobKind.STORE, 1 | aio.MASK_MOVE_ONLY)
        else:
            # Reads use the second half, so that they do not change the data to write.
            halves = self.content.addresses(0), self.content.addresses(1)
            reads = streams.jobs(aio.JobKind.FETCH, 1, halves[1])
            writes = streams.jobs(aio.JobKind.STORE, 1, halves[0])
        half = self.chunks.count // 2
        mixed = []
        for read, write in zip(reads, writes, strict=True):
            both = np.empty(2 * half, dtype=aio.JOB)
            # A step's updates, too, read chunks while they write others.
            both[0::2] = read[:half]
            both[1::2] = write[self.chunks.count - half :]
            mixed.append(both)
        return {"read": reads, "write": writes, "mixed": mixed}


def measure_swap(task: SwapTask, progress: Progress | None = None) -> SwapFigures:
    """Measure all drives of `task` together.

    Blocks for about 3 * rounds * phase_s and the time to write size_bytes; with a reference, for
    twice as long. Takes about 300 MiB of memory per drive. Leaves no files behind, even if it
    fails. Raises: ValueError, SwapFullError, AioError, MemoryError.
    """
    say = progress or (lambda _phase, _share: None)
    with Bench(task, say) as bench:
        # "full" also with checksums off: the fill's checksums are compared once; only the rounds
        # neither copy nor compute checksums.
        verify = "sample" if task.checksums == "sample" else "full"
        with bench.streams(
            block_bytes=task.block_bytes, depth=task.depth, verify=verify
        ) as streams:
            fill = bench.fill(streams)
            verified = _verify(bench, streams, "verify", everything=task.verify_all)
            # The reference must send requests as long as the executor's.
            block_bytes = streams.request_bytes
            limit = bench.limit(task.limit, block_bytes=block_bytes, depth=task.depth)
            # Rounds without checksums write the slots' contents.
            streams.warm()
            ours, theirs = measure_rounds(bench, streams, limit)
            # After the rounds, so that the check also reads the data that they wrote.
            bench.check_no_holes()
            # Rounds without checksums overwrite the data: the fill's checksums no longer match.
            if task.verify_all and task.checksums != "off":
                verified += _verify(bench, streams, "verify again", everything=True)
            stats = streams.executor.stats()
            return SwapFigures(
                **{kind: PhaseFigures(tuple(ours[kind]), tuple(theirs[kind])) for kind in KINDS},
                fill_bytes_per_s=fill,
                size_bytes=bench.chunks.size_bytes,
                block_bytes=block_bytes,
                block_bytes_asked=task.block_bytes,
                depth=task.depth,
                checksums=task.checksums,
                backend=streams.executor.backend,
                backend_reason=streams.executor.backend_reason,
                direct=all(file.direct for file in bench.chunks.drives),
                huge_page_share=max(stats.huge_bytes, 0) / stats.pool_bytes,
                registered=stats.registered,
                verified_bytes=verified,
                limit_by=limit.name if limit is not None else "",
                drives=stats.drives,
            )


def _verify(bench: Bench, streams: Streams, phase: str, *, everything: bool) -> int:
    """Verify with an executor that compares every checksum."""
    # `streams` compares every checksum unless the task says "sample".
    if bench.task.checksums != "sample":
        return bench.verify(streams, phase, everything=everything)
    with bench.streams(
        block_bytes=bench.task.block_bytes, depth=bench.task.depth, verify="full"
    ) as full:
        return bench.verify(full, phase, everything=everything)


def measure_rounds(
    bench: Bench, streams: Streams, limit: Reference | None
) -> tuple[dict[str, list[Sample]], dict[str, list[Sample]]]:
    """Return (the executor's samples, the reference's samples) by kind, one per round. Executor and
    reference go first in turn. Blocks.
    """
    task, say = bench.task, bench.say
    phases = bench.phases(streams, task.checksums)
    ours: dict[str, list[Sample]] = {kind: [] for kind in KINDS}
    theirs: dict[str, list[Sample]] = {kind: [] for kind in KINDS}
    for number in range(task.rounds):
        if task.checksums != "off":
            bench.content.renew(0)
        for kind in KINDS:
            label = f"{kind} {number + 1}/{task.rounds}"

            def arm_ours(kind: str = kind, label: str = label) -> None:
                ours[kind].append(
                    streams.run(phases[kind], task.phase_s, lambda share: say(label, share))
                )

            def arm_limit(kind: str = kind, label: str = label) -> None:
                if limit is not None:
                    say(f"{label}, limit", 0.0)
                    theirs[kind].append(limit.measure(kind, task.phase_s))

            for arm in (arm_ours, arm_limit) if number % 2 == 0 else (arm_limit, arm_ours):
                arm()
    return ours, theirs
