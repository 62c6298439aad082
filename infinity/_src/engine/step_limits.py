"""A step compared with its limits, term by term: times, traffic, bandwidths of drives, η.

Compute is the time of forwards and backwards without their waits. Updates, verifications and copies
run at the same time, and slow compute down if the CPU computes. `loop` counts this slowdown as
compute, so its limits are too high and its η is too good, most at small batches.
`alone` takes the first forward's time from forwards that began with no update pending (those after
`flush()`, and those of further micro-batches), where there were any.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infinity._src.base.sizes import format_size
from infinity._src.base.telemetry import PHASES, PhaseClock, PhaseFigures
from infinity._src.memory.pcie import Copied, Copies, LinkSpeed, measured_copies
from infinity._src.memory.roofline import (
    Compute,
    Drives,
    Limits,
    Moved,
    Traffic,
    limits,
    measured_traffic,
)
from infinity.aio import DriveStats, ExecutorStats
from infinity.aio._endurance import BUSY_SHARE_MIN, SAMPLE_BYTES_MIN


@dataclasses.dataclass(frozen=True)
class Bandwidths:
    """Summed bandwidths of all drives, for the limits, and their source."""

    drives: Drives
    source: str


@dataclasses.dataclass(frozen=True)
class StepTerms:
    """Means per step, from the end of the first step to the end of the last one.

    steps: number of steps in the means. update: the update mode.
    passes: forwards of the model, each of which reads parameters and reduces gradients.
    micro_batches: micro-batches in all passes; those of one `inf.microbatched` batch share a pass.
    step_s: seconds per step without evaluations. phases: seconds and bytes by phase, keyed by
        `telemetry.PHASES`. moved: bytes by kind.
    loop, alone: compute with and without interference in the first forward; alone is None when no
        forward ran without interference.
    bandwidths: None when nothing moved, and when they are not known (`drives_known`).
    limits: with `alone` where that is known, otherwise with `loop`; of compute only where the
        drives are not known. limits_loop: with `loop`.
    copied: bytes that the executor copied between the CPU and a GPU that computes. Torch's copies
        are not counted: of gradient sums that the GPU adds to, and of parameters with
        update="delayed".
    link: rate of these copies, bytes over the time with a copy in flight; None without copies.
    """

    steps: int
    passes: int
    micro_batches: int
    update: str
    step_s: float
    phases: Mapping[str, PhaseFigures]
    moved: Traffic
    loop: Compute
    alone: Compute | None
    bandwidths: Bandwidths | None
    limits: Limits
    limits_loop: Limits
    copied: Copies
    link: LinkSpeed | None

    @property
    def schedule(self) -> str:
        """Order of the micro-batches: "vertical" or "horizontal"."""
        return "vertical" if self.micro_batches > self.passes else "horizontal"

    @property
    def drives_known(self) -> bool:
        """True if the limits contain the time of the drives. Without it they are too low, and there
        is no η.
        """
        return self.bandwidths is not None or not (
            self.moved.total.read or self.moved.total.written
        )

    @property
    def eta_floor(self) -> float | None:
        """Shortest time of any schedule's step, divided by the measured time; None without known
        drives."""
        return self.limits.eta(self.step_s)[0] if self.drives_known else None

    @property
    def eta_schedule(self) -> float | None:
        """Shortest time of a step in this update mode, divided by the measured time; None without
        known drives."""
        return self.limits.eta(self.step_s)[1] if self.drives_known else None

    def as_dict(self) -> dict[str, Any]:
        """Make a plain dictionary, for logs and JSON."""
        record = dataclasses.asdict(self)
        loop = self.limits_loop.eta(self.step_s) if self.drives_known else (None, None)
        return record | {
            "schedule": self.schedule,
            "drives_known": self.drives_known,
            "eta_floor": self.eta_floor,
            "eta_schedule": self.eta_schedule,
            "eta_floor_loop": loop[0],
            "eta_schedule_loop": loop[1],
        }

    @classmethod
    def collect(
        cls,
        clock: PhaseClock,
        executor: ExecutorStats,
        *,
        update: str,
        bandwidths: Mapping[str, tuple[float, float]],
        frozen_bytes: float = 0.0,
        slices: float | None = None,
    ) -> StepTerms | None:
        """Make the terms from the counters of a clock and an executor; None before two steps have
        ended.

        bandwidths: as in `IoSettings`, used if they include every drive.
        frozen_bytes: bytes on the drives of parameters that no optimizer owns.
        slices: mean micro-batches per forward; None for a model that is not microbatched.
        """
        steps = clock.steady_steps
        if not steps:
            return None
        found = clock.steady()
        phases = {name: found[name].per(steps) for name in PHASES}
        # An evaluation is no part of a step: `step_s` leaves it out.
        training = [figures for name, figures in phases.items() if name != "evaluation"]
        # The first forward of a step is a separate phase. All micro-batches of a forward are one
        # pass: the phase's sums contain the compute and the repeated gathers of all of them.
        count = max(round((found["first forward"].count + found["forward"].count) / steps), 1)
        total = sum(training, PhaseFigures())
        traffic = _traffic(total, update, count, frozen_bytes)
        loop = _compute(phases, phases["first forward"].compute_s)
        quiet = clock.quiet_forward
        alone = _compute(phases, quiet.compute_s / quiet.count) if quiet.count else None
        # If no byte moved, the drives do not limit the step, even if their bandwidths are known.
        measured = (
            bandwidths_of(executor.drives, bandwidths)
            if total.bytes_read + total.bytes_written
            else None
        )
        drives = measured.drives if measured else None
        copied = measured_copies(
            Copied(total.h2d_bytes, total.d2h_bytes),
            update,
            count,
            # Activations cross the link to the GPU, whether their tier is RAM or a drive.
            activations=Copied(total.activations_read_bytes, total.activations_written_bytes),
        )
        link = _link(total)
        links = [link.busy_time(copied)] if link is not None else []
        return cls(
            steps=steps,
            passes=count,
            micro_batches=round(count * (slices or 1)),
            update=update,
            step_s=total.seconds,
            phases=phases,
            moved=traffic,
            loop=loop,
            alone=alone,
            bandwidths=measured,
            limits=limits(traffic, alone or loop, drives, update, others=links),
            limits_loop=limits(traffic, loop, drives, update, others=links),
            copied=copied,
            link=link,
        )

    def __str__(self) -> str:
        """Format the terms as a table."""
        names = f"{'per step':14} {'time':>8} {'waited':>8} {'read':>10} {'written':>10}"
        head = f"{names} {'drives busy':>11}"
        rows = [head]
        for name, figures in self.phases.items():
            if figures.seconds >= 5e-5:
                busy = f"{figures.drives_busy_s / figures.seconds:.0%}"
                read, written = format_size(figures.bytes_read), format_size(figures.bytes_written)
                rows.append(
                    f"{name:14} {figures.seconds:6.3f} s {figures.wait_s:6.3f} s {read:>10} "
                    f"{written:>10} {busy:>11}"
                )
        rows.append(
            f"{self.step_s:.3f} s per step (mean of {self.steps}, "
            f"{micro_batches_text(self.micro_batches, self.passes)}, update {self.update}); "
            f"{self._moved_by_kind()}"
        )
        return "\n".join([*rows, *self._limit_rows()])

    def _moved_by_kind(self) -> str:
        moved = self.moved
        kinds = {
            "states": moved.states,
            "spilled gradients": moved.grads,
            "activations": moved.activations,
        }
        read = _sizes(
            {"parameters": moved.params_read} | {kind: each.read for kind, each in kinds.items()}
        )
        return (
            f"read {read}; written {_sizes({kind: each.written for kind, each in kinds.items()})}"
        )

    def _limit_rows(self) -> list[str]:
        rows, limit = [], self.limits
        if not self.drives_known:
            return [
                "drives not known: no second at least half busy",
                (
                    f"limit of compute alone {limit.compute_s:.3f} s; that of the drives may be "
                    "higher, so there is no η"
                ),
            ]
        if self.bandwidths is not None:
            drives = self.bandwidths.drives
            rows.append(
                f"drives: read {drives.read_bytes_per_s / 1e9:.2f}, write "
                f"{drives.write_bytes_per_s / 1e9:.2f} GB/s ({self.bandwidths.source})"
            )
        between = ""
        if self.link is not None:
            total, link = self.copied.total, self.link
            rows.append(
                f"link to the GPU: {format_size(total.h2d)} there at "
                f"{link.h2d_bytes_per_s / 1e9:.2f}, {format_size(total.d2h)} back at "
                f"{link.d2h_bytes_per_s / 1e9:.2f} GB/s (bytes over copying time of this run)"
            )
            between = f", link {limit.other_s:.3f}"
        eta = limit.eta(self.step_s)
        rows.append(
            f"limits: any schedule {limit.floor_s:.3f} s (compute {limit.compute_s:.3f}, drives "
            f"{limit.io_s:.3f}{between}), η {eta[0]:.2f}; {self.update} {limit.schedule_s:.3f} s, "
            f"η {eta[1]:.2f}; compute {self._compute_basis()}"
        )
        if self.alone is not None:
            loop = self.limits_loop.eta(self.step_s)
            rows.append(
                f"η with the compute of the loop, interference counted as compute: {loop[0]:.2f} "
                f"and {loop[1]:.2f}"
            )
        return rows

    def _compute_basis(self) -> str:
        if self.alone is None:
            return "as in the loop: concurrent updates count as compute, so η is too good"
        return "with the first forward timed while no update is pending"


def micro_batches_text(count: int, passes: int) -> str:
    """Format micro-batches and their order: "8 micro-batches, vertical". passes: forwards of the
    model that they share.
    """
    text = f"{count} micro-batch{'' if count == 1 else 'es'}"
    if count == passes:
        return text
    return f"{text}, vertical" + (f" in {passes} passes" if passes > 1 else "")


def _sizes(kinds: Mapping[str, float]) -> str:
    """Format bytes by kind: "1 MiB of parameters and 5 MiB of states"."""
    parts = [f"{format_size(size)} of {kind}" for kind, size in kinds.items() if round(size)]
    *most, last = parts or ["nothing"]
    return f"{', '.join(most)} and {last}" if most else last


def _traffic(total: PhaseFigures, update: str, passes: int, frozen_bytes: float) -> Traffic:
    return measured_traffic(
        Moved(total.bytes_read, total.bytes_written),
        total.params_read_bytes,
        update,
        passes,
        grads=Moved(total.grads_read_bytes, total.grads_written_bytes),
        activations=Moved(total.activations_read_bytes, total.activations_written_bytes),
        frozen=frozen_bytes,
    )


def _compute(phases: Mapping[str, PhaseFigures], first_forward_s: float) -> Compute:
    backward = phases["backward"]
    # The clock sums all backwards, so the mean stands for the last one.
    last_s = backward.compute_s / max(backward.count, 1)
    return Compute(
        first_forward_s, last_s, phases["forward"].compute_s + backward.compute_s - last_s
    )


def _link(total: PhaseFigures) -> LinkSpeed | None:
    """Return the bandwidth of the link in each direction. If only one direction was used, both get
    its bandwidth.
    """
    rates = [
        size / seconds
        for size, seconds in ((total.h2d_bytes, total.h2d_s), (total.d2h_bytes, total.d2h_s))
        if size > 0 and seconds > 0
    ]
    return LinkSpeed(rates[0], rates[-1]) if rates else None


def fit_drives(samples: Sequence[tuple[float, float, float]]) -> tuple[Drives, bool] | None:
    """Fit bandwidths to samples (bytes read, bytes written, seconds busy) of drives under load, by
    least squares over seconds = read / B_r + written / B_w. Also returns whether B_r and B_w could
    be separated.

    If all samples have the same mix of reads and writes, they cannot: then B_r = B_w is the drive's
    bandwidth for that mix. None without samples. Time with only a few requests in flight counts as
    busy, so this is the bandwidth that the run achieved, not the drive's maximum.
    """
    rr = sum(read * read for read, _, _ in samples)
    ww = sum(written * written for _, written, _ in samples)
    rw = sum(read * written for read, written, _ in samples)
    rt = sum(read * busy_s for read, _, busy_s in samples)
    wt = sum(written * busy_s for _, written, busy_s in samples)
    both = rr + 2 * rw + ww
    if both <= 0 or rt + wt <= 0:
        return None
    # Least squares with B_r = B_w: the best single bandwidth.
    one = both / (rt + wt)
    determinant = rr * ww - rw * rw
    # Its largest value is rr * ww. Near 0 all samples have the same mix, so the rates are noise.
    if determinant > 1e-3 * rr * ww:
        per_read, per_written = (rt * ww - wt * rw) / determinant, (wt * rr - rt * rw) / determinant
        # A rate ten times the single bandwidth, or a negative one, is noise.
        if per_read * 10 * one > 1 and per_written * 10 * one > 1:
            return Drives(1 / per_read, 1 / per_written), True
    return Drives(one, one), False


def known_bandwidths(
    paths: Sequence[str], known: Mapping[str, tuple[float, float]]
) -> Bandwidths | None:
    """Return the summed bandwidths of all drives from `known`, which has (read, write) bytes/s by
    directory; None where `known` lacks a drive, or there are no drives.
    """
    # A directory may have several spellings, for example through a link.
    by_place = {Path(directory).resolve(): pair for directory, pair in known.items()}
    pairs = [by_place.get(Path(path).resolve()) for path in paths]
    # all() of no drives would be True.
    if not (pairs and all(pair is not None for pair in pairs)):
        return None
    reads, writes = zip(*(pair for pair in pairs if pair is not None), strict=True)
    return Bandwidths(Drives(sum(reads), sum(writes)), "as Policy(io=) has them")


def bandwidths_of(
    drives: tuple[DriveStats, ...], known: Mapping[str, tuple[float, float]]
) -> Bandwidths | None:
    """Return the summed bandwidths of all drives: from `known` (by directory) if it has every
    drive, otherwise as this run measured them. Of the last 64 seconds, a second counts if the drive
    was busy for at least half of it. None when a drive has no such second.
    """
    given = known_bandwidths([drive.path for drive in drives], known)
    if given is not None:
        return given
    total_read = total_write = 0.0
    apart = True
    for drive in drives:
        samples = [
            (float(window.bytes_read), float(window.bytes_written), window.busy_s)
            for window in drive.windows
            if window.busy_s >= BUSY_SHARE_MIN
            and window.bytes_read + window.bytes_written >= SAMPLE_BYTES_MIN
        ]
        fitted = fit_drives(samples)
        if fitted is None:
            # The sum without this drive would be too low, and η too high. No estimate can replace
            # it: a drive that is mostly idle may be the fastest of all.
            return None
        total_read += fitted[0].read_bytes_per_s
        total_write += fitted[0].write_bytes_per_s
        # One drive whose reads and writes cannot be separated makes both sums uncertain.
        apart = apart and fitted[1]
    # There are no drives.
    if not total_read:
        return None
    source = "bytes over busy time of this run"
    return Bandwidths(
        Drives(total_read, total_write),
        source if apart else f"{source}, reads and writes not separable",
    )
