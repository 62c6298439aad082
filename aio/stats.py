"""What an executor has counted: of its drives, and of all."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Latency:
    """How long requests took from being sent to their result, in seconds; percentiles within 13 % (a histogram's buckets)."""

    count: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0


@dataclass(frozen=True)
class Window:
    """What a drive moved in one second; `busy_s` is the part of it in which a request was in flight.

    start_s: CLOCK_MONOTONIC. Windows without traffic are left out.
    """

    start_s: float
    bytes_read: int
    bytes_written: int
    busy_s: float


@dataclass(frozen=True)
class DriveStats:
    """What one drive has done since the executor was opened. Bytes are those the drive confirmed.

    `direct`: O_DIRECT, and in `direct_reason` why not. `block_bytes`, `depth`: of requests, as fitted to the device.
    `busy_s`: time with a request in flight; `depth_mean`: requests in flight in that time. `windows`: the last 64 seconds with
    traffic, oldest first. `failed`: what marked the drive, empty while it is sound.
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

    `wait_s` is time that callers spent blocked in `Ticket.wait`; `compute_s` the time of verify, update and copy on workers.
    `rereads` counts runs that were read again because a checksum did not match; `checksum_failures` those that still did not.
    `registered` says whether the slab's pages are registered with io_uring, `registered_reason` why not; `huge_bytes` how much
    of it huge pages back. `backend_reason`: as `Executor.backend_reason`. `kept_chunks`: chunks whose write failed and whose
    contents are in memory only. `jobs_cancelled`: fetches that were given up. `reads_ahead`: chunks that idle slots began to
    read for later UPDATEs; `reads_ahead_dropped`: those of them of which no UPDATE had anything. `to_device_bytes`,
    `from_device_bytes`: copied to and from the attached device; `..._s`: time while at least one such copy was under way.
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
        """Transfers that came back short and were resumed."""
        return sum(drive.short_transfers for drive in self.drives)
