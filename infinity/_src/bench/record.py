"""The JSON of every benchmark: one envelope, versioned, written whole or not at all.

    schema      "infinity.bench.<benchmark>/<version>"; a version changes or removes fields, added fields keep it
    time        when the measurement ended, UTC, ISO 8601
    infinity    version; commit (40 hex digits) and dirty in a git checkout, else null
    command     the arguments
    hardware    host, cpu, cores, memory_bytes, kernel, architecture, python, huge_pages, and for swap the drives: path,
                file_system, device, model, rotational, scheduler, nr_requests, max_sectors_kb, free_bytes

and the figures beside them at the top level. `infinity.bench.swap/1`: read_gbps, write_gbps, mixed_gbps, fill_gbps (medians,
10^9 bytes per second); rounds; phases.<kind> (gbps, rounds, cpu_s_per_gb, cpu_rounds, of_limit, of_limit_rounds, limit, drives);
limit_by; settings (what `Policy(io=...)` reads: block_bytes, null for what suits the backend, depth, bandwidths in bytes per
second, backend that was measured); size_bytes, block_bytes (of the longest request), depth,
checksums, backend, backend_reason, direct, huge_page_share, registered, verified_bytes; drives (counters and latencies in
seconds over the whole measurement); sweep (points, best), null without one. `infinity.bench.adam/1`: isas,
threads, torch, rows. `infinity.bench.copy/1`: device (null without one), rows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from infinity import __version__
from infinity._src.bench import hardware

SCHEMAS = {name: f"infinity.bench.{name}/1" for name in ("swap", "adam", "copy")}


def make_record(
    benchmark: str, figures: Mapping[str, Any], command: Sequence[str], directories: Sequence[Path] = ()
) -> dict[str, Any]:
    """The record of one benchmark: envelope and figures."""
    machine = hardware.machine()
    if directories:
        machine["drives"] = [hardware.drive(directory) for directory in directories]
    return {
        "schema": SCHEMAS[benchmark],
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "infinity": {"version": __version__, **checkout()},
        "command": list(command),
        **figures,
        "hardware": machine,
    }


def checkout() -> dict[str, Any]:
    """commit and dirty of the git checkout that this package runs from; None for each where it does not."""
    root = Path(__file__).resolve().parents[2]
    unknown = {"commit": None, "dirty": None}
    if not (root / ".git").exists():
        return unknown
    git = ["git", "-C", str(root), "-c", "core.fsmonitor=false"]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        status = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return unknown  # no git here, or a checkout of somebody else
    return {"commit": commit.stdout.strip(), "dirty": bool(status.stdout.strip())}


def check_target(path: Path | None, option: str) -> None:
    """Raises ValueError when a file could not be written there: found before the measurement, not after."""
    if path is None or str(path) == "-":
        return
    if path.is_dir():
        raise ValueError(f"{option} {path} is a directory; name a file")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: directory {path.absolute().parent} does not exist; create it")
    if not os.access(path.absolute().parent, os.W_OK):
        raise ValueError(f"{option} {path}: this user may not write to {path.absolute().parent}")


def write_record(record: Mapping[str, Any], path: Path | None) -> None:
    """Write the record to `path`, whole or not at all; "-" is standard output, None nothing."""
    if path is None:
        return
    text = json.dumps(record, indent=2) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
