"""Statistics of an executor as a test wants them: only drives with the given windows and bytes."""

from __future__ import annotations

from collections.abc import Sequence

from infinity.aio import DriveStats, ExecutorStats
from infinity.aio._stats import Window


def drive_stats(
    windows: Sequence[Window] = (), *, written: int = 0, path: str = "/mnt/nvme0"
) -> DriveStats:
    return DriveStats(
        path=path,
        bytes_read=0,
        bytes_written=written,
        reads=0,
        writes=0,
        retries=0,
        short_transfers=0,
        errors=0,
        in_flight_max=0,
        windows=tuple(windows),
    )


def executor_stats(*drives: DriveStats) -> ExecutorStats:
    return ExecutorStats(
        backend="threads",
        drives=drives,
        jobs_submitted=0,
        jobs_done=0,
        jobs_failed=0,
        updates=0,
        gates_opened=0,
        gates_escaped=0,
        rereads=0,
        checksum_failures=0,
        wait_s=0,
        compute_s=0,
        pool_bytes=0,
        huge_bytes=0,
        registered=False,
        spans_dropped=0,
    )
