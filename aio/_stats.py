"""Counters of an executor and its drives: public dataclasses, converted from C records."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from infinity.aio import _validate
from infinity.aio._swap_file import SwapFile


@dataclass(frozen=True)
class Latency:
    """Seconds from submission of a request to its result; percentiles within 13 % (histogram
    buckets).

    `counts`: requests of each bucket; () without requests.
    """

    count: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0
    p999_s: float = 0.0
    counts: tuple[int, ...] = field(default=(), repr=False)

    @classmethod
    def between(cls, before: Sequence[Latency], after: Sequence[Latency]) -> Latency:
        """Return the latency of all requests that ended between two readings of several drives. Its
        maximum is the upper bound of the slowest request's bucket.
        """
        counts = [0] * max((len(one.counts) for one in after), default=0)
        for sign, readings in ((1, after), (-1, before)):
            for one in readings:
                for bucket, count in enumerate(one.counts):
                    counts[bucket] += sign * count
        last = max((bucket for bucket, count in enumerate(counts) if count), default=0)
        bound_s = min(bucket_bounds_s(last)[1], max((one.max_s for one in after), default=0.0))
        return latency_of(counts, round(bound_s * 1e9), _bucket_middle_s)

    def as_dict(self) -> dict[str, Any]:
        """Return count and seconds, ready for JSON."""
        return {
            name: getattr(self, name) for name in ("count", "p50_s", "p99_s", "p999_s", "max_s")
        }


@dataclass(frozen=True)
class Window:
    """Traffic of a drive in one second. `busy_s`: the time in this second with a request in flight.

    start_s: CLOCK_MONOTONIC. Seconds without traffic have no Window.
    """

    start_s: float
    bytes_read: int
    bytes_written: int
    busy_s: float


@dataclass(frozen=True)
class DriveStats:
    """Counters of one drive since the executor was opened. Bytes: of completed transfers.

    `direct`: whether it uses O_DIRECT; `direct_reason`: why not, or "". `block_bytes`, `depth`: the
    limits of requests, reduced to the device's. `busy_s`: time with a request in flight;
    `depth_mean`: mean number in flight during that time. `windows`: the last 64 seconds with
    traffic, oldest first. `failed`: the error that marked the drive; "": not marked.
    """

    path: str
    bytes_read: int
    bytes_written: int
    reads: int
    writes: int
    retries: int
    short_transfers: int
    errors: int
    in_flight_max: int
    in_flight_bytes_max: int = 0
    direct: bool = True
    direct_reason: str = ""
    block_bytes: int = 0
    depth: int = 0
    busy_s: float = 0.0
    depth_mean: float = 0.0
    read_latency: Latency = Latency()
    write_latency: Latency = Latency()
    windows: tuple[Window, ...] = ()
    failed: str = ""


@dataclass(frozen=True)
class ExecutorStats:
    """Counters since the executor was opened; times in seconds.

    `wait_s`: time that callers were blocked in `Ticket.wait`; `compute_s`: time of verify, update
    and copy on workers. `rereads`: chunk reads repeated because a checksum did not match or the
    drive failed; `checksum_failures`: repeated reads whose checksum still did not match.
    `registered`: whether the slab is registered with io_uring, `registered_reason`: why not;
    `huge_bytes`: bytes of the slab backed by huge pages. `backend_reason`: why "auto" fell back to
    this backend, or "". `kept_chunks`: chunks whose write failed and whose contents are in memory
    only; `moved_writes`: failed writes moved to a reserved extent. `jobs_cancelled`: cancelled
    fetches. `reads_ahead`: prefetches begun; `reads_ahead_dropped`: prefetches that no UPDATE used.
    `to_device_bytes`, `from_device_bytes`: copied to and from the attached device; `to_device_s`,
    `from_device_s`: time with at least one such copy in flight.
    """

    backend: str
    drives: tuple[DriveStats, ...]
    jobs_submitted: int
    jobs_done: int
    jobs_failed: int
    updates: int
    gates_opened: int
    gates_escaped: int
    rereads: int
    checksum_failures: int
    wait_s: float
    compute_s: float
    pool_bytes: int
    huge_bytes: int
    registered: bool
    spans_dropped: int
    backend_reason: str = ""
    registered_reason: str = ""
    kept_chunks: int = 0
    moved_writes: int = 0
    jobs_cancelled: int = 0
    reads_ahead: int = 0
    reads_ahead_dropped: int = 0
    to_device_bytes: int = 0
    from_device_bytes: int = 0
    to_device_s: float = 0.0
    from_device_s: float = 0.0
    opened_s: float = 0.0
    """CLOCK_MONOTONIC when the executor was opened."""
    extra: dict[str, int] = field(default_factory=dict)

    @property
    def bytes_read(self) -> int:
        """Bytes read from all drives."""
        return sum(drive.bytes_read for drive in self.drives)

    @property
    def bytes_written(self) -> int:
        """Bytes written to all drives."""
        return sum(drive.bytes_written for drive in self.drives)

    @property
    def retries(self) -> int:
        """Requests sent again after EAGAIN or EINTR."""
        return sum(drive.retries for drive in self.drives)

    @property
    def short_transfers(self) -> int:
        """Short transfers, which were resumed."""
        return sum(drive.short_transfers for drive in self.drives)


# ---- from the C records ----


_WINDOWS = 64
_REGISTERED_NOT = {
    0: "there are no slots to register",
    2: (
        "the slab is not backed by huge pages, and registered 4 KiB pages are slower than none; "
        "see `infinity doctor`"
    ),
    3: "the slab is larger than the kernel registers",
}


def registered_reason(code: int, backend: str) -> str:
    """Return why the slab is not registered with io_uring, or ""."""
    if code == 1:
        return ""
    if backend != "io_uring":
        return f"the {backend} backend has nothing to register with"
    if code < 0:
        # 12 is ENOMEM: registered memory counts against RLIMIT_MEMLOCK.
        advice = "; RLIMIT_MEMLOCK is too small, raise it (ulimit -l)" if -code == 12 else ""
        return f"the kernel refuses: {os.strerror(-code)}{advice}"
    return _REGISTERED_NOT.get(code, f"code {code}")


def bucket_bounds_s(bucket: int) -> tuple[float, float]:
    """Lower and upper bound of a bucket of native/executor/meter.c, in seconds."""
    if bucket < 4:
        low, width = bucket, 1
    else:
        octave, quarter = divmod(bucket + 4, 4)
        low, width = (4 + quarter) << (octave - 2), 1 << (octave - 2)
    # Buckets count units of 1024 ns: four linear ones, then four per octave.
    return low * 1024e-9, (low + width) * 1024e-9


def _bucket_middle_s(bucket: int) -> float:
    return sum(bucket_bounds_s(bucket)) / 2


def _windows(record: Any) -> tuple[Window, ...]:
    count = int(record.window_count)
    # C stores window i in a ring, at i % _WINDOWS.
    newest = [record.windows[index % _WINDOWS] for index in range(max(0, count - _WINDOWS), count)]
    return tuple(
        Window(
            start_s=window.start_ns / 1e9,
            bytes_read=window.bytes_read,
            bytes_written=window.bytes_written,
            busy_s=window.busy_ns / 1e9,
        )
        for window in newest
    )


def drive_stats(
    record: Any, file: SwapFile, block_bytes: int, fault: _validate.FaultRecord | None
) -> DriveStats:
    """Convert an inf_drive_stats; `fault`: the fault that marked the drive."""
    return DriveStats(
        path=file.path,
        bytes_read=record.bytes_read,
        bytes_written=record.bytes_written,
        reads=record.reads,
        writes=record.writes,
        retries=record.retries,
        short_transfers=record.short_transfers,
        errors=record.errors,
        in_flight_max=record.in_flight_max,
        in_flight_bytes_max=record.in_flight_bytes_max,
        direct=file.direct,
        direct_reason=file.direct_reason,
        block_bytes=block_bytes,
        depth=record.depth,
        busy_s=record.busy_ns / 1e9,
        depth_mean=record.depth_ns / record.busy_ns if record.busy_ns else 0.0,
        read_latency=latency_of(
            list(record.latency[0]), record.latency_max_ns[0], _bucket_middle_s
        ),
        write_latency=latency_of(
            list(record.latency[1]), record.latency_max_ns[1], _bucket_middle_s
        ),
        windows=_windows(record),
        # `to_error` finds the path by the drive's number, and only this drive's path is known here.
        failed="" if fault is None else str(fault.to_error([file.path] * (fault.drive + 1))),
    )


def latency_of(counts: Sequence[int], max_ns: int, middle_s: Callable[[int], float]) -> Latency:
    """Summarize a histogram. `middle_s`: returns the middle of a bucket in seconds, which stands
    for all requests of the bucket.
    """
    total = sum(counts)
    if total == 0:
        return Latency()

    def percentile(share: float) -> float:
        rank, seen = math.ceil(share * total), 0
        for bucket, count in enumerate(counts):
            seen += count
            if seen >= rank:
                # The middle of the last bucket may exceed the maximum.
                return min(middle_s(bucket), max_ns / 1e9)
        return max_ns / 1e9

    return Latency(
        count=total,
        p50_s=percentile(0.5),
        p99_s=percentile(0.99),
        max_s=max_ns / 1e9,
        p999_s=percentile(0.999),
        counts=tuple(counts),
    )
