"""Sustained bandwidth: the load of optimizer steps for minutes, past the drives' caches.

    fill       write random bytes to fresh extents, as `swap` does
    alone      requests of 4 KiB and of the block size at random places, one at a time: latencies
    sustained  the traffic of optimizer steps, for the given minutes: a row for each second
    after      reads, writes and both at once, measured as `swap` does; these rates are the record's
               `settings`

A step has the traffic of the `exact` state with one forward and backward: the update reads and
writes all 12 bytes of each parameter and passes parameters to the forward; the backward reads 2
bytes of each parameter again. Every drive runs its steps without a pause, as in training that waits
for its drives. Chunks have the sections of the `exact` state; the CPU neither copies nor verifies
them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from infinity import aio
from infinity._src.cabi.records import ALIGNMENT_BYTES
from infinity._src.measure.drive_facts import temperature_c
from infinity._src.measure.streams import CHUNK_BYTES, Chunks, Streams
from infinity._src.measure.swap import (
    Bench,
    PhaseFigures,
    Progress,
    SwapTask,
    measure_rounds,
)
from infinity.aio import IoSettings
from infinity.aio._stats import DriveStats, Latency

ROW_S = 1.0
"""Seconds of a row."""
ROWS_MIN = 10
"""Least number of rows, so that the first and the last tenth have a row each."""
_ALONE_MOST = 4096
_DIRECTIONS = ("read", "write")


@dataclasses.dataclass(frozen=True)
class SustainedTask:
    """Settings of a measurement. swap: directories, size, requests, backend. interval_s: seconds of
    a row. thermometers: temperature files of sysfs to read for each row. Raises: ValueError if the
    minutes are too few for `ROWS_MIN` rows.
    """

    swap: SwapTask
    minutes: float
    interval_s: float = ROW_S
    thermometers: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        least = ROWS_MIN * self.interval_s / 60
        # `not` is also true of NaN.
        if not least <= self.minutes < math.inf:
            raise ValueError(
                f"--sustained {self.minutes} must be at least {least:.2g} minutes: {ROWS_MIN} rows "
                f"of {self.interval_s:g} s"
            )


@dataclasses.dataclass(frozen=True)
class Row:
    """Traffic of all drives in one interval. at_s: the interval's start, in seconds since the load
    began. drives: (read, written) bytes of each drive. temperature_c: temperature of the hottest
    drive at the interval's end; None: unknown.
    """

    at_s: float
    seconds: float
    drives: tuple[tuple[int, int], ...]
    read: Latency
    write: Latency
    temperature_c: float | None = None

    @property
    def read_bytes_per_s(self) -> float:
        return sum(read for read, _ in self.drives) / self.seconds

    @property
    def write_bytes_per_s(self) -> float:
        return sum(written for _, written in self.drives) / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {
            "at_s": self.at_s,
            "seconds": self.seconds,
            "read_bytes_per_s": self.read_bytes_per_s,
            "write_bytes_per_s": self.write_bytes_per_s,
            "read_latency": self.read.as_dict(),
            "write_latency": self.write.as_dict(),
            "temperature_c": self.temperature_c,
            "drives": [
                {
                    "read_bytes_per_s": read / self.seconds,
                    "write_bytes_per_s": written / self.seconds,
                }
                for read, written in self.drives
            ],
        }


def join(rows: Sequence[Row]) -> Row:
    """Combine consecutive rows into one."""
    return Row(
        rows[0].at_s,
        sum(row.seconds for row in rows),
        tuple(
            (sum(read for read, _ in drive), sum(written for _, written in drive))
            for drive in zip(*(row.drives for row in rows), strict=True)
        ),
        Latency.between((), [row.read for row in rows]),
        Latency.between((), [row.write for row in rows]),
        max((row.temperature_c for row in rows if row.temperature_c is not None), default=None),
    )


@dataclasses.dataclass(frozen=True)
class Alone:
    """Latencies of one drive's requests, submitted one at a time at random places."""

    path: str
    request_bytes: int
    read: Latency
    write: Latency

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "request_bytes": self.request_bytes,
            "read_latency": self.read.as_dict(),
            "write_latency": self.write.as_dict(),
        }


@dataclasses.dataclass(frozen=True)
class SustainedFigures:
    """Figures of one measurement. size_bytes: bytes of all chunks, each of which a step reads and
    writes. after: read, write and mixed, as `swap` measures them, after the load.
    """

    minutes: float
    rows: tuple[Row, ...]
    alone: tuple[Alone, ...]
    after: dict[str, PhaseFigures]
    fill_bytes_per_s: float
    size_bytes: int
    block_bytes: int
    block_bytes_asked: int | None
    depth: int
    backend: str
    direct: bool
    drives: tuple[DriveStats, ...]

    @property
    def first(self) -> Row:
        """The first tenth of the rows, combined into one."""
        return join(self.rows[: max(len(self.rows) // 10, 1)])

    @property
    def last(self) -> Row:
        return join(self.rows[-max(len(self.rows) // 10, 1) :])

    @property
    def bytes_written(self) -> int:
        """Bytes that the load wrote to all drives."""
        return sum(written for row in self.rows for _, written in row.drives)

    @property
    def directories(self) -> list[str]:
        return [str(Path(drive.path).absolute()) for drive in self.drives]

    @property
    def settings(self) -> IoSettings:
        """Settings for `Policy(io=...)`, with the bandwidths after the load."""
        bandwidths = {
            directory: (
                self.after["read"].drive(number).median,
                self.after["write"].drive(number).median,
            )
            for number, directory in enumerate(self.directories)
        }
        return IoSettings(self.block_bytes_asked, self.depth, bandwidths, self.backend)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures ready for JSON."""
        return {
            "minutes": self.minutes,
            "summary": {
                "first_tenth": self.first.as_dict(),
                "last_tenth": self.last.as_dict(),
                "slowest_row": min(row.write_bytes_per_s for row in self.rows),
            },
            "alone": [one.as_dict() for one in self.alone],
            "after": {name: phase.as_dict(self.directories) for name, phase in self.after.items()},
            "settings": self.settings.as_dict(),
            "fill_gbps": self.fill_bytes_per_s / 1e9,
            "size_bytes": self.size_bytes,
            "bytes_written": self.bytes_written,
            "block_bytes": self.block_bytes,
            "depth": self.depth,
            "backend": self.backend,
            "direct": self.direct,
            "rows": [row.as_dict() for row in self.rows],
        }


def measure_sustained(task: SustainedTask, progress: Progress | None = None) -> SustainedFigures:
    """Measure all drives of `task` together.

    Blocks for the minutes of `task`, at most as long again for the fill, and some seconds. Leaves
    no files behind, even if it fails. Raises: ValueError, SwapFullError, AioError, MemoryError.
    """
    say = progress or (lambda _phase, _share: None)
    seconds, swap = task.minutes * 60, task.swap
    with Bench(swap, say) as bench:
        how: dict[str, Any] = {"block_bytes": swap.block_bytes, "depth": swap.depth}
        with bench.streams(**how, verify="full") as streams:
            fill = bench.fill(streams, seconds)
            block_bytes = streams.request_bytes
        sizes = sorted({ALIGNMENT_BYTES, block_bytes})
        alone = tuple(one for size in sizes for one in _alone(bench, size))
        steps = Chunks(bench.chunks.drives, bench.chunks.count, state=aio.Format.SPLIT)
        with Streams(steps, **how, backend=swap.backend, verify="off") as streams:
            rows = _load(streams, task, say)
            stats = streams.executor.stats()
        with bench.streams(**how, verify="full") as streams:
            streams.warm()
            after, _ = measure_rounds(bench, streams, None)
        # Last, so that the check also reads the data that the load wrote.
        bench.check_no_holes()
        return SustainedFigures(
            minutes=task.minutes,
            rows=rows,
            alone=alone,
            after={kind: PhaseFigures(tuple(samples)) for kind, samples in after.items()},
            fill_bytes_per_s=fill,
            size_bytes=bench.chunks.size_bytes,
            block_bytes=block_bytes,
            block_bytes_asked=swap.block_bytes,
            depth=swap.depth,
            backend=stats.backend,
            direct=all(file.direct for file in bench.chunks.drives),
            drives=stats.drives,
        )


# -- One request at a time -------------------------------------------------------------------------


def _alone(bench: Bench, request_bytes: int) -> list[Alone]:
    """Read, then write, at random places of each drive, one request at a time. Blocks for at most
    `phase_s` per drive and direction.
    """
    room = bench.chunks.count * CHUNK_BYTES // request_bytes
    # A permutation, since chunks may not overlap.
    places = np.random.default_rng().permutation(room)[:_ALONE_MOST] * request_bytes
    drives = bench.chunks.drives
    chunks = Chunks(drives, len(places), chunk_bytes=request_bytes, offsets=places)
    with Streams(
        chunks,
        block_bytes=request_bytes,
        depth=bench.task.depth,
        backend=bench.task.backend,
        verify="off",
    ) as streams:
        streams.warm()
        before = streams.executor.stats().drives
        for kind, name in zip((aio.JobKind.FETCH, aio.JobKind.STORE), _DIRECTIONS, strict=True):
            for jobs in streams.jobs(kind, 1 | aio.MASK_MOVE_ONLY):
                _one_at_a_time(bench, streams, jobs, name)
        after = streams.executor.stats().drives
    return [
        Alone(
            str(Path(drive.path).absolute()),
            request_bytes,
            Latency.between([earlier.read_latency], [drive.read_latency]),
            Latency.between([earlier.write_latency], [drive.write_latency]),
        )
        for earlier, drive in zip(before, after, strict=True)
    ]


def _one_at_a_time(bench: Bench, streams: Streams, jobs: npt.NDArray[np.void], name: str) -> None:
    end_s = time.monotonic() + bench.task.phase_s
    for number in range(len(jobs)):
        streams.executor.submit(jobs[number : number + 1], priority=aio.Priority.DEMAND).wait()
        bench.say(f"{name}s, one at a time", number / len(jobs))
        if time.monotonic() > end_s:
            return


# -- The load --------------------------------------------------------------------------------------


def step_jobs(streams: Streams) -> list[npt.NDArray[np.void]]:
    """Make each drive's jobs of a step: the update's reads and writes in turn, each write half of
    the chunks ahead of its read; then the backward's reads.
    """
    everything = (1 << len(aio.Format.SPLIT.sections)) - 1 | aio.MASK_MOVE_ONLY
    found = []
    for reads, writes, again in zip(
        streams.jobs(aio.JobKind.FETCH, everything),
        streams.jobs(aio.JobKind.STORE, everything),
        streams.jobs(aio.JobKind.FETCH, 1 | aio.MASK_MOVE_ONLY),
        strict=True,
    ):
        update = np.empty(2 * len(reads), dtype=aio.JOB)
        update[0::2] = reads
        update[1::2] = np.roll(writes, -(len(writes) // 2))
        found.append(np.concatenate([update, again]))
    return found


def _load(streams: Streams, task: SustainedTask, say: Progress) -> tuple[Row, ...]:
    streams.warm((1 << len(aio.Format.SPLIT.sections)) - 1)
    with _Sampler(streams.executor, task, say) as sampler:
        streams.run(step_jobs(streams), task.minutes * 60, lambda _share: None, again=True)
    return sampler.rows()


class _Reading(NamedTuple):
    at_s: float
    drives: tuple[DriveStats, ...]
    temperature_c: float | None


@final
class _Sampler:
    """Thread that reads the executor's counters while the load runs, so that a stalled drive has
    rows, too.
    """

    def __init__(self, executor: aio.Executor, task: SustainedTask, say: Progress) -> None:
        self._executor = executor
        self._thermometers = task.thermometers
        self._seconds = task.minutes * 60
        self._interval_s = task.interval_s
        self._say = say
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="infinity-bench", daemon=True)
        self._readings: list[_Reading] = []

    def _read(self) -> None:
        found = [temperature_c(each) for each in self._thermometers]
        hottest = max((each for each in found if each is not None), default=None)
        self._readings.append(_Reading(time.monotonic(), self._executor.stats().drives, hottest))

    def __enter__(self) -> _Sampler:
        self._read()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        # On a busy machine the thread may not have run: the whole load is then one row.
        if len(self._readings) == 1:
            self._read()

    def _run(self) -> None:
        start_s = self._readings[0].at_s
        for number in itertools.count(1):
            # Counted from the start, so that the intervals do not drift.
            due_s = start_s + number * self._interval_s
            if due_s > start_s + self._seconds + self._interval_s / 2:
                return
            if self._stop.wait(max(due_s - time.monotonic(), 0.0)):
                return
            self._read()
            row = self._row(len(self._readings) - 1)
            self._say(
                f"steps, GB/s: {row.read_bytes_per_s / 1e9:.2f} read, "
                f"{row.write_bytes_per_s / 1e9:.2f} written",
                min(number * self._interval_s / self._seconds, 1.0),
            )

    def _row(self, number: int) -> Row:
        (from_s, before, _), (to_s, after, hottest) = self._readings[number - 1 : number + 1]
        return Row(
            from_s - self._readings[0].at_s,
            to_s - from_s,
            tuple(
                (now.bytes_read - then.bytes_read, now.bytes_written - then.bytes_written)
                for then, now in zip(before, after, strict=True)
            ),
            Latency.between(
                [drive.read_latency for drive in before], [drive.read_latency for drive in after]
            ),
            Latency.between(
                [drive.write_latency for drive in before], [drive.write_latency for drive in after]
            ),
            hottest,
        )

    def rows(self) -> tuple[Row, ...]:
        return tuple(self._row(number) for number in range(1, len(self._readings)))
