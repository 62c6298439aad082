"""Measures the drive's present bandwidth. It drifts by a factor of two between minutes, so every
arm measures it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import harness

from infinity._src.measure.swap import SwapTask, measure_swap

SIZE_BYTES = 512 << 20
PHASE_S = 1.0

Drive = dict[str, float]


def measure(directory: Path) -> Drive:
    """Bytes per second by phase ("read", "write", ...), medians of three rounds of the swap
    benchmark. Blocks for seconds."""
    with harness.scratch(directory) as swap:
        task = SwapTask(directories=(swap,), size_bytes=SIZE_BYTES, rounds=3, phase_s=PHASE_S)
        return {name: phase.spread.median for name, phase in measure_swap(task).phases.items()}


def mean(drives: Sequence[Drive]) -> Drive:
    """Format the bandwidths, phase by phase."""
    return {name: statistics.fmean(one[name] for one in drives) for name in drives[0]}
