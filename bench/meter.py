"""Measurements of one arm about itself: wall time, NVMe bytes and peak memory.

Imports the standard library only: it also runs in the environments of other engines.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def io_bytes() -> tuple[int, int]:
    """Bytes this process (all its threads) has had read from and written to storage."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def peak_rss_bytes() -> int:
    """The high-water mark of this process's resident memory since its start or the last reset."""
    return _status_bytes("VmHWM:")


def rss_bytes() -> int:
    """Resident memory of this process."""
    return _status_bytes("VmRSS:")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no line {name}")


def reset_peak_rss() -> None:
    """Set the high-water mark to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(
    step: Callable[[], float],
    *,
    flush: Callable[[], None],
    warmup: int,
    steps: int,
    parameters: int,
    setup_s: float,
    counters: Callable[[], Mapping[str, float]] = dict,
) -> dict[str, Any]:
    """Run ``warmup`` + ``steps`` steps and return one arm's JSON record.

    ``step`` runs one optimizer step and returns its loss; ``flush`` returns when no work of earlier
    steps is pending. ``flush`` runs before the first and after the last measured step, and its time
    counts, so deferred work is attributed to the measured steps exactly once. ``counters``: running
    totals; the record has each measured step's increments, by name.
    """
    losses = [step() for _ in range(warmup)]
    flush()
    gc.collect()
    os.sync()
    peak_setup = peak_rss_bytes()
    reset_peak_rss()
    read_before, written_before = io_bytes()
    seconds: list[float] = []
    totals = [dict(counters())]
    cpu_before = time.process_time()
    began = time.perf_counter()
    mark = began
    for _ in range(steps):
        losses.append(step())
        now = time.perf_counter()
        seconds.append(now - mark)
        mark = now
        totals.append(dict(counters()))
    flush()
    total = time.perf_counter() - began
    cpu_s = time.process_time() - cpu_before
    read_after, written_after = io_bytes()
    peak_steps = peak_rss_bytes()
    moved = parameters * steps
    return {
        "s_per_step": total / steps,
        "cpu_s_per_step": cpu_s / steps,
        "step_s": [round(s, 4) for s in seconds],
        "flush_s": round(total - sum(seconds), 4),
        "read_bytes_per_param": (read_after - read_before) / moved,
        "write_bytes_per_param": (written_after - written_before) / moved,
        "peak_rss_bytes": max(peak_setup, peak_steps),
        "peak_rss_steps_bytes": peak_steps,
        "setup_s": round(setup_s, 2),
        "losses": losses,
        **{
            name: [round(b[name] - a[name], 6) for a, b in itertools.pairwise(totals)]
            for name in totals[0]
        },
    }


def report(record: dict[str, Any]) -> None:
    """Print the record as the one JSON line that the orchestrator looks for."""
    print("\n" + json.dumps(record), flush=True)


# -- files of checkpoints --------------------------------------------------------------------------


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def tree_bytes(folder: Path) -> int:
    """Bytes of all files in a folder and below."""
    return sum(path.stat().st_size for path in _files(folder))


def sync_tree(folder: Path) -> None:
    """Return when every file and folder in it is on the drive."""
    for path in [*_files(folder), *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def forget_tree(folder: Path) -> None:
    """Drop a folder's files from the page cache, so that reads reach the drive."""
    sync_tree(folder)
    for path in _files(folder):
        number = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(number)
