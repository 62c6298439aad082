"""What a swap measurement found, and how it is told in JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity._src.bench.streams import Sample
from infinity.aio import DriveStats, IoSettings

KINDS = ("read", "write", "mixed")


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

    @property
    def rounds_gbps(self) -> list[float]:
        """Every round in GB/s."""
        return [value / 1e9 for value in self.rounds]


@dataclasses.dataclass(frozen=True)
class PhaseFigures:
    """One kind of phase: a sample per round, and the limit's samples in the same rounds (none where it was not measured)."""

    samples: tuple[Sample, ...]
    limit_samples: tuple[Sample, ...] = ()

    @property
    def spread(self) -> Spread:
        """All drives together."""
        return Spread(tuple(sample.rate for sample in self.samples))

    @property
    def limit(self) -> Spread | None:
        """The limit, all drives together."""
        return Spread(tuple(sample.rate for sample in self.limit_samples)) if self.limit_samples else None

    @property
    def of_limit_rounds(self) -> tuple[float, ...]:
        """Achieved / limit of each round: drives drift, so only rates of one round compare."""
        pairs = zip(self.samples, self.limit_samples, strict=False)
        return tuple(ours.rate / limit.rate for ours, limit in pairs)

    @property
    def of_limit(self) -> float | None:
        """The median of achieved / limit."""
        return statistics.median(self.of_limit_rounds) if self.limit_samples else None

    @property
    def cpu_s_per_gb(self) -> float:
        """Median CPU seconds per 10^9 bytes."""
        return statistics.median(sample.cpu_s_per_gb for sample in self.samples)

    @property
    def limit_cpu_s_per_gb(self) -> float | None:
        """The same of the limit."""
        return statistics.median(one.cpu_s_per_gb for one in self.limit_samples) if self.limit_samples else None

    def drive(self, number: int) -> Spread:
        """One drive's part while all are at work."""
        return Spread(tuple(sample.drive_rates[number] for sample in self.samples))

    def as_dict(self, directories: Sequence[str]) -> dict[str, Any]:
        """Ready for JSON."""
        total = self.spread.median
        drives = {
            directory: {"gbps": self.drive(number).gbps, "share": self.drive(number).median / total,
                        "rounds": self.drive(number).rounds_gbps}
            for number, directory in enumerate(directories)
        }  # fmt: skip
        limit = None
        if self.limit is not None:
            limit = {
                "gbps": self.limit.gbps,
                "rounds": self.limit.rounds_gbps,
                "cpu_s_per_gb": self.limit_cpu_s_per_gb,
                "cpu_rounds": [sample.cpu_s_per_gb for sample in self.limit_samples],
            }
        return {
            "gbps": self.spread.gbps,
            "rounds": self.spread.rounds_gbps,
            "cpu_s_per_gb": self.cpu_s_per_gb,
            "cpu_rounds": [sample.cpu_s_per_gb for sample in self.samples],
            "of_limit": self.of_limit,
            "of_limit_rounds": list(self.of_limit_rounds),
            "limit": limit,
            "drives": drives,
        }


@dataclasses.dataclass(frozen=True)
class SwapFigures:
    """What one measurement found. `size_bytes` is what was really written and read back in a round.

    `block_bytes` is the longest request that was sent; `block_bytes_asked` what was asked for, None for what suits the backend.

    `verified_bytes` were read back and their checksums compared, apart from what the rounds themselves compare.
    `limit_by` names what measured the limit, empty without one.
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
        """The phases by name, in order."""
        return {"read": self.read, "write": self.write, "mixed": self.mixed}

    @property
    def directories(self) -> list[str]:
        """The drives' directories, absolute."""
        return [str(Path(drive.path).absolute()) for drive in self.drives]

    @property
    def settings(self) -> IoSettings:
        """What `Policy(io=...)` takes: the sizes that were asked for, the backend, and each drive's bandwidths."""
        bandwidths = {
            directory: (self.read.drive(number).median, self.write.drive(number).median)
            for number, directory in enumerate(self.directories)
        }
        return IoSettings(self.block_bytes_asked, self.depth, bandwidths, self.backend)

    def as_dict(self) -> dict[str, Any]:
        """The figures ready for JSON; rates are in 10^9 bytes per second, medians where there is one number."""
        return {
            "read_gbps": self.read.spread.gbps,
            "write_gbps": self.write.spread.gbps,
            "mixed_gbps": self.mixed.spread.gbps,
            "fill_gbps": self.fill_bytes_per_s / 1e9,
            "rounds": {f"{name}_gbps": phase.spread.rounds_gbps for name, phase in self.phases.items()},
            "phases": {name: phase.as_dict(self.directories) for name, phase in self.phases.items()},
            "limit_by": self.limit_by or None,
            "settings": self.settings.as_dict(),
            "size_bytes": self.size_bytes,
            "block_bytes": self.block_bytes,
            "depth": self.depth,
            "checksums": self.checksums,
            "backend": self.backend,
            "backend_reason": self.backend_reason,
            "direct": self.direct,
            "huge_page_share": self.huge_page_share,
            "registered": self.registered,
            "verified_bytes": self.verified_bytes,
            "drives": [drive_as_dict(drive) for drive in self.drives],
        }


def drive_as_dict(drive: DriveStats) -> dict[str, Any]:
    """One drive's counters over the whole measurement, ready for JSON."""
    latencies = {"read_latency": drive.read_latency, "write_latency": drive.write_latency}
    return {
        "path": str(Path(drive.path).absolute()),
        "bytes_read": drive.bytes_read,
        "bytes_written": drive.bytes_written,
        "block_bytes": drive.block_bytes,
        "depth": drive.depth,
        "depth_mean": drive.depth_mean,
        "in_flight_max": drive.in_flight_max,
        "retries": drive.retries,
        "short_transfers": drive.short_transfers,
        "direct": drive.direct,
        "direct_reason": drive.direct_reason,
        **{name: dataclasses.asdict(latency) for name, latency in latencies.items()},
    }
