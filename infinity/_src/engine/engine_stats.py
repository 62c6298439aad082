"""Statistics of an engine, as one record of numbers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from infinity._src.base.sizes import format_size
from infinity._src.base.telemetry import PhaseFigures
from infinity._src.engine.step_limits import StepTerms
from infinity._src.hooks.activation_offload import ActivationFigures
from infinity._src.memory.ram_budget import PlacementPlan, name_parts
from infinity._src.optim.step import StepPipeline
from infinity._src.params.prefetch_schedule import Progress
from infinity._src.params.reduce import GradReducer
from infinity._src.params.unshard import Unsharder
from infinity.aio import DriveStats, ExecutorStats
from infinity.aio._endurance import Endurance, recent_bytes_per_s


@dataclasses.dataclass(frozen=True)
class DriveFigures:
    """Counters of one drive since `inf.offload`. Bytes count when the drive has confirmed them;
    times in seconds.

    read_p50_s ... write_p99_s: latency of requests, from submission to result.
    depth_mean: mean requests in flight while there were any; depth: the most; block_bytes: the size
        of the largest request.
    busy_s: time with a request in flight.
    *_bytes_per_s_10s, _60s: bandwidth over the last 10 or 60 whole seconds, idle ones included.
    direct: whether files are open with O_DIRECT; direct_reason: why not.
    failed: the failed write that marked the drive, empty while the drive is sound.
    slow: a description while the drive has less bandwidth than earlier in the run, otherwise empty;
        slow_episodes: number of such periods.
    written_per_step_bytes, written_tb_per_day: written by training, set-up excluded; None before
        the first step.
    """

    path: str
    bytes_read: int
    bytes_written: int
    reads: int
    writes: int
    read_p50_s: float
    read_p99_s: float
    write_p50_s: float
    write_p99_s: float
    depth_mean: float
    depth: int
    block_bytes: int
    in_flight_bytes_max: int
    busy_s: float
    read_bytes_per_s_10s: float
    write_bytes_per_s_10s: float
    read_bytes_per_s_60s: float
    write_bytes_per_s_60s: float
    retries: int
    short_transfers: int
    errors: int
    direct: bool
    direct_reason: str
    failed: str
    slow: str
    slow_episodes: int
    written_per_step_bytes: float | None
    written_tb_per_day: float | None

    @classmethod
    def collect(
        cls, number: int, drive: DriveStats, endurance: Endurance, *, opened_s: float, now_s: float
    ) -> DriveFigures:
        read_10s, write_10s = recent_bytes_per_s(drive.windows, 10, opened_s=opened_s, now_s=now_s)
        read_60s, write_60s = recent_bytes_per_s(drive.windows, 60, opened_s=opened_s, now_s=now_s)
        forecast = endurance.forecast(number)
        return cls(
            **{name: getattr(drive, name) for name in _OF_DRIVE},
            read_p50_s=drive.read_latency.p50_s,
            read_p99_s=drive.read_latency.p99_s,
            write_p50_s=drive.write_latency.p50_s,
            write_p99_s=drive.write_latency.p99_s,
            read_bytes_per_s_10s=read_10s,
            write_bytes_per_s_10s=write_10s,
            read_bytes_per_s_60s=read_60s,
            write_bytes_per_s_60s=write_60s,
            slow="; ".join(str(notice) for notice in endurance.slow(number)),
            slow_episodes=endurance.episodes(number),
            written_per_step_bytes=forecast.bytes_per_step,
            written_tb_per_day=forecast.tb_per_day,
        )

    def __str__(self) -> str:
        """Format the figures as one line, and one more line for each fault."""
        reads = f"{1e3 * self.read_p50_s:.1f}/{1e3 * self.read_p99_s:.1f} ms"
        writes = f"{1e3 * self.write_p50_s:.1f}/{1e3 * self.write_p99_s:.1f} ms"
        parts = [
            (
                f"{self.path}: {format_size(self.bytes_read)} read, "
                f"{format_size(self.bytes_written)} written"
            ),
            f"p50/p99 read {reads}, write {writes}",
            f"depth {self.depth_mean:.1f} of {self.depth} x {format_size(self.block_bytes)}",
        ]
        if self.written_tb_per_day is not None:
            parts.append(f"{self.written_tb_per_day:.3g} TB written per day")
        wrong = [
            f"FAILED: {self.failed}" if self.failed else "",
            "" if self.direct else f"through the page cache: {self.direct_reason}",
            f"{self.retries} retries, {self.short_transfers} short transfers, {self.errors} errors"
            if self.retries or self.short_transfers or self.errors
            else "",
            self.slow,
        ]
        return "\n  ".join(["; ".join(parts), *filter(None, wrong)])


_OF_DRIVE = (
    "path", "bytes_read", "bytes_written", "reads", "writes", "depth_mean", "depth", "block_bytes",
    "in_flight_bytes_max", "busy_s", "retries", "short_transfers", "errors", "direct",
    "direct_reason", "failed",
)  # fmt: skip
"""Fields of `DriveStats` that `DriveFigures` copies."""

_OF_EXECUTOR = (
    "bytes_read", "bytes_written", "compute_s",
    "gates_opened", "gates_escaped", "retries", "short_transfers", "rereads", "checksum_failures",
    "huge_bytes", "registered", "registered_reason", "backend", "kept_chunks", "moved_writes",
    "jobs_cancelled",
)  # fmt: skip
"""Counters of the executor that `Stats` copies under the same names."""
_OF_UNSHARDER = ("gathered_bytes_peak", "demands", "demand_reads")
_OF_PIPELINE = (
    "updates_ahead", "updates_withdrawn", "steps_undone", "older_chunks", "matrices_s",
)  # fmt: skip

_OF_PLACEMENT = (
    "pool_bytes", "grad_bytes", "spilled_bytes", "staging_bytes", "resident_bytes", "sums_bytes",
    "scratch_bytes", "nvme_bytes",
)  # fmt: skip
"""Fields of the placement plan that `Stats` copies under the same names."""

_PUBLIC_NAMES = {"delayed_params_bytes": "shadow_bytes"}
"""Fields of the placement plan that `Stats` copies under other names."""

_COPIES = {
    "h2d_bytes": "to_device_bytes", "d2h_bytes": "from_device_bytes",
    "h2d_s": "to_device_s", "d2h_s": "from_device_s",
}  # fmt: skip
"""Counters of the executor that `Stats` copies under other names."""

_OF_RANKS = (
    "comm_gather_inside_bytes", "comm_gather_across_bytes", "comm_reduce_inside_bytes",
    "comm_reduce_across_bytes", "whole_grad_bytes", "secondary_bytes", "feedback_bytes",
)  # fmt: skip
"""Fields of `Stats` that are 0 with one rank."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counters since `inf.offload`. Sizes in bytes, times in seconds.

    params, units: elements and units of the model. step_count: optimizer steps submitted.
    bytes_read, bytes_written: on all drives. Parts of them: params_read_bytes: parameters, read for
        forward and backward alone; grads_read_bytes, grads_written_bytes: spilled gradients,
        counted when a transfer begins.
    io_wait_s: time that forward and backward waited for units. update_wait_s: time that
        `opt.step()`, `flush()` and other calls waited for updates. compute_s: time that the
        executor's workers verified, updated and copied. matrices_s: time that the program's thread
        transformed matrices (`inf.Muon`), in `opt.step()` or in backward.
    ram_bytes: RAM that the engine holds by plan. ram_min_bytes: the least that works.
        ram_budget_bytes: the most that `Policy.ram` allows (None for "min").
    Parts of ram_bytes: pool_bytes: pinned staging buffers; grad_bytes: gradients; staging_bytes:
        windows through which gradients spill; shadow_bytes: the second copy of the parameters
        (update="delayed"); resident_bytes: states; sums_bytes: checksums of states; scratch_bytes:
        memory in which norms and optimizers compute.
    nvme_bytes: states at rest on NVMe; frozen_bytes: the part of them that belongs to parameters
        without an optimizer. spilled_bytes: gradients at rest on NVMe.
    Device memory, not in ram_bytes: gathered_bytes_peak: the most bytes gathered at once;
        fresh_grad_bytes_peak: the most bytes of gradients between autograd and accumulators;
        heap_spare_bytes: the most freed memory that the allocator retained in addition to memory in
        use, where the CPU computes.
    demands: requests for a unit (one for all micro-batches of a batch, if the unit stays gathered).
        demand_reads: demands for which nothing was prefetched. deviations: demands that the traced
        order did not predict.
    gates_opened, gates_escaped: see the executor. retries: requests sent again after EAGAIN or
        EINTR. short_transfers: short transfers, which were resumed. rereads: chunks read again
        after a wrong checksum or a failed read; checksum_failures: rereads that were wrong, too.
    huge_bytes: bytes of the pools in huge pages. registered: whether io_uring has the pools' pages
        registered; registered_reason: why not. backend: of the executor; backend_reason: why "auto"
        did not choose io_uring.
    kept_chunks: chunks that are only in memory, because their write failed. moved_writes: failed
        writes that were redirected to a reserved extent. jobs_cancelled: cancelled reads.
    written_per_step_bytes, written_tb_per_day: written by training to all drives; None before the
        first step.
    updates_ahead: units that were updated in backward, before their step, and whose update the step
        confirmed. updates_withdrawn: units whose early update was undone, because the step did not
        confirm it. steps_undone: steps undone after faults. older_chunks: chunks with states of an
        earlier step, because a drive lost the last one's (`Policy.damaged`). All four need two
        generations.
    commit_s: time of the commits of a durable run.
    comm_gather_*_bytes, comm_reduce_*_bytes: bytes of weights and of gradients that this rank sent
        to ranks of its node (inside) and of other nodes (across). comm_wait_s: time that backward
        waited for reductions.
    whole_grad_bytes: unreduced sums of gradients (accumulate="local"). secondary_bytes: secondary
        shards of gathered weights (hpz, or stage 3 on the device). feedback_bytes: rounding errors
        of gradients (error_feedback).
    h2d_bytes, d2h_bytes: copied to and from the GPU that computes; h2d_s, d2h_s: time with at least
        one such copy in flight. All four are 0 where the CPU computes. Gradients that an update on
        the device reads in place are not copied, and not counted.
    phases: time and traffic by phase, keyed by `telemetry.PHASES`.
    terms: a step's times, compared with their limits; None before two steps have ended, and where
        the device updates.
    activations: see `ActivationFigures`. drives: one `DriveFigures` per drive.
    """

    params: int
    units: int
    step_count: int
    bytes_read: int
    bytes_written: int
    params_read_bytes: int
    grads_read_bytes: int
    grads_written_bytes: int
    io_wait_s: float
    update_wait_s: float
    matrices_s: float
    compute_s: float
    ram_bytes: int
    ram_min_bytes: int
    ram_budget_bytes: int | None
    pool_bytes: int
    grad_bytes: int
    spilled_bytes: int
    staging_bytes: int
    shadow_bytes: int
    resident_bytes: int
    sums_bytes: int
    scratch_bytes: int
    nvme_bytes: int
    frozen_bytes: int
    gathered_bytes_peak: int
    fresh_grad_bytes_peak: int
    heap_spare_bytes: int
    demands: int
    demand_reads: int
    deviations: int
    gates_opened: int
    gates_escaped: int
    retries: int
    short_transfers: int
    rereads: int
    checksum_failures: int
    huge_bytes: int
    registered: bool
    registered_reason: str
    backend: str
    backend_reason: str
    kept_chunks: int
    moved_writes: int
    jobs_cancelled: int
    written_per_step_bytes: float | None
    written_tb_per_day: float | None
    updates_ahead: int
    updates_withdrawn: int
    steps_undone: int
    older_chunks: int
    commit_s: float
    comm_gather_inside_bytes: int
    comm_gather_across_bytes: int
    comm_reduce_inside_bytes: int
    comm_reduce_across_bytes: int
    comm_wait_s: float
    whole_grad_bytes: int
    secondary_bytes: int
    feedback_bytes: int
    h2d_bytes: int
    d2h_bytes: int
    h2d_s: float
    d2h_s: float
    phases: Mapping[str, PhaseFigures]
    terms: StepTerms | None
    activations: ActivationFigures
    drives: tuple[DriveFigures, ...]

    @property
    def ram_parts(self) -> dict[str, int]:
        """Parts of `ram_bytes` that are not zero, by name, in bytes."""
        return name_parts(self, _PUBLIC_NAMES)

    def as_dict(self) -> dict[str, Any]:
        """Return a plain dictionary, for logs and JSON."""
        record = dataclasses.asdict(self)
        record["drives"] = list(record["drives"])
        record["terms"] = self.terms.as_dict() if self.terms is not None else None
        return record

    def __str__(self) -> str:
        """Format as text: memory, the time of a step by phase, η for both limits, the drives."""
        parts = ", ".join(f"{name} {format_size(size)}" for name, size in self.ram_parts.items())
        held = format_size(self.ram_bytes) + (f" ({parts})" if parts else "")
        lines = [
            f"{self.params / 1e6:.1f} M parameters in {self.units} units; {self.step_count} steps",
            (
                f"RAM {held}; NVMe {format_size(self.nvme_bytes)}; gathered at most "
                f"{format_size(self.gathered_bytes_peak)}"
            ),
            f"waited {self.io_wait_s:.2f} s for units, {self.update_wait_s:.2f} s for updates",
        ]
        if self.terms is not None:
            lines.append(str(self.terms))
        if self.updates_ahead or self.updates_withdrawn or self.steps_undone:
            lines.append(
                f"{self.updates_ahead} updates of units ahead of their step, "
                f"{self.updates_withdrawn} withdrawn; {self.steps_undone} steps undone"
            )
        if self.activations.calls:
            lines.append(str(self.activations))
        sent = [getattr(self, name) for name in _OF_RANKS[:4]]
        if any(sent):
            lines.append(
                f"sent to other ranks: {format_size(sent[0] + sent[1])} of weights, "
                f"{format_size(sent[2] + sent[3])} of gradients"
                + (
                    f"; of that {format_size(sent[1] + sent[3])} to other nodes"
                    if sent[1] or sent[3]
                    else ""
                )
            )
        if self.h2d_bytes or self.d2h_bytes:
            ways = [("to", self.h2d_bytes, self.h2d_s), ("from", self.d2h_bytes, self.d2h_s)]
            copies = [
                f"{format_size(size)} {way} the GPU"
                + (f" at {size / seconds / 1e9:.1f} GB/s" if seconds > 0 else "")
                for way, size, seconds in ways
            ]
            lines.append(f"copied {' and '.join(copies)}")
        return "\n".join([*lines, *map(str, self.drives)])

    @classmethod
    def collect(
        cls,
        *,
        executor: ExecutorStats,
        unsharder: Unsharder,
        gradients: GradReducer,
        progress: Progress,
        pipeline: StepPipeline,
        placement: PlacementPlan,
        param_numel: int,
        unit_count: int,
        backend_reason: str,
        budget_bytes: int | None = None,
        endurance: Endurance | None = None,
        update: str | None = "deferred",
        bandwidths: Mapping[str, tuple[float, float]] | None = None,
        activations: ActivationFigures | None = None,
        ranks: Mapping[str, Any] | None = None,
        fresh_grad_bytes_peak: int = 0,
        heap_spare_bytes: int = 0,
        frozen_bytes: int = 0,
        slices: float | None = None,
    ) -> Stats:
        """Collect the counters of the engine's parts.

        endurance: has observed `executor`; without it `written_per_step_bytes` and
        `written_tb_per_day` are None. update: the update mode; None where no limits are known
        (`update_on="device"`). bandwidths, slices: see `StepTerms.collect`. ranks: values of the
        fields in `_OF_RANKS`; None sets them to 0.
        """
        drives, marks = drive_figures(executor, endurance or Endurance()), progress.clock.marks()
        terms = None if update is None else StepTerms.collect(
            progress.clock, executor, update=update, bandwidths=bandwidths or {}, slices=slices,
            frozen_bytes=frozen_bytes,
        )
        return cls(
            params=param_numel,
            units=unit_count,
            step_count=pipeline.steps,
            params_read_bytes=marks.params_read,
            grads_read_bytes=marks.grads_read,
            grads_written_bytes=marks.grads_written,
            io_wait_s=progress.waits.units_s,
            update_wait_s=progress.waits.updates_s,
            ram_bytes=placement.ram_bytes,
            ram_min_bytes=placement.min_bytes,
            ram_budget_bytes=budget_bytes,
            **{name: getattr(placement, name) for name in _OF_PLACEMENT},
            **{public: getattr(placement, name) for name, public in _PUBLIC_NAMES.items()},
            frozen_bytes=frozen_bytes,
            **{name: getattr(unsharder, name) for name in _OF_UNSHARDER},
            fresh_grad_bytes_peak=fresh_grad_bytes_peak,
            heap_spare_bytes=heap_spare_bytes,
            deviations=progress.schedule.deviations,
            **{name: getattr(executor, name) for name in _OF_EXECUTOR},
            backend_reason=backend_reason,
            written_per_step_bytes=_sum([drive.written_per_step_bytes for drive in drives]),
            written_tb_per_day=_sum([drive.written_tb_per_day for drive in drives]),
            **{name: getattr(pipeline, name) for name in _OF_PIPELINE},
            commit_s=pipeline.transaction.commit_s if pipeline.transaction is not None else 0.0,
            **(dict.fromkeys(_OF_RANKS, 0) if ranks is None else ranks),
            comm_wait_s=gradients.wait_s,
            **{public: getattr(executor, name) for public, name in _COPIES.items()},
            phases=progress.clock.totals(),
            terms=terms,
            activations=activations or ActivationFigures(),
            drives=drives,
        )


def drive_figures(
    executor: ExecutorStats, endurance: Endurance, *, now_s: float | None = None
) -> tuple[DriveFigures, ...]:
    """Return the figures of each drive. now_s: CLOCK_MONOTONIC in seconds, by default now."""
    now_s = time.monotonic() if now_s is None else now_s
    return tuple(
        DriveFigures.collect(number, drive, endurance, opened_s=executor.opened_s, now_s=now_s)
        for number, drive in enumerate(executor.drives)
    )


def _sum(values: list[float | None]) -> float | None:
    """Return the sum; None if there are no values, or one of them is None."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
