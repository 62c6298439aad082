"""The kernel benchmark runs, and its record has every arm with its limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infinity._src.cabi import native

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_the_smoke_run_measures_every_arm_and_prints_one_json_line() -> None:
    if not native.available():
        pytest.skip(f"no native extension: {native.reason()}")
    done = subprocess.run(
        [sys.executable, "bench/bench_kernels.py", "--smoke", "--json", "--threads", "2"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["isa"] in native.ISA_NAMES
    rows = record["updates"]
    assert {(row["arm"], row["threads"]) for row in rows} == {
        (arm, 2) for arm in ("exact", "exact verified", "bf16", "compact", "torch")
    }
    assert all(row["gparam_per_s"] > 0 and row["limit_gparam_per_s"] > 0 for row in rows)
    assert {row["implementation"] for row in record["checksums"]} >= {"portable"}
