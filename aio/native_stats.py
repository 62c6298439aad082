"""Counters of the native executor, from its C records to `executor.ExecutorStats`."""

from __future__ import annotations

import os
from typing import Any

from infinity.aio import checks
from infinity.aio.latency import latency_of
from infinity.aio.stats import DriveStats, Window
from infinity.aio.swap_file import SwapFile

_WINDOWS = 64
_BUCKETS = 128
_REGISTERED_NOT = {
    0: "there are no slots to register",
    2: "the slab is not backed by huge pages, and registered 4 KiB pages are slower than none; see `infinity doctor`",
    3: "the slab is larger than the kernel registers",
}


def registered_reason(code: int, backend: str) -> str:
    """Why the slab is not registered with the kernel; empty when it is."""
    if code == 1:
        return ""
    if backend != "io_uring":
        return f"the {backend} backend has nothing to register with"
    if code < 0:
        advice = "; RLIMIT_MEMLOCK is too small, raise it (ulimit -l)" if -code == 12 else ""
        return f"the kernel refuses: {os.strerror(-code)}{advice}"
    return _REGISTERED_NOT.get(code, f"code {code}")


def bucket_bounds_s(bucket: int) -> tuple[float, float]:
    """Lower and upper bound of a bucket of native/executor_meter.c, in seconds."""
    if bucket < 4:
        low, width = bucket, 1
    else:
        octave, quarter = divmod(bucket + 4, 4)
        low, width = (4 + quarter) << (octave - 2), 1 << (octave - 2)
    return low * 1024e-9, (low + width) * 1024e-9


def _bucket_middle_s(bucket: int) -> float:
    return sum(bucket_bounds_s(bucket)) / 2


def _windows(record: Any) -> tuple[Window, ...]:
    count = int(record.window_count)
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


def drive_stats(record: Any, file: SwapFile, block_bytes: int, fault: checks.FaultRecord | None) -> DriveStats:
    """One drive's inf_drive_stats; `fault` is what marked the drive."""
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
        read_latency=latency_of(list(record.latency[0]), record.latency_max_ns[0], _bucket_middle_s),
        write_latency=latency_of(list(record.latency[1]), record.latency_max_ns[1], _bucket_middle_s),
        windows=_windows(record),
        failed="" if fault is None else str(fault.to_error([file.path] * (fault.drive + 1))),
    )
