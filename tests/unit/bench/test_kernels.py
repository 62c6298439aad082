"""The kernel benchmark runs, and its record has every arm with its limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infinity import native

ROOT = Path(__file__).parents[3]


def test_the_smoke_run_measures_every_arm_and_prints_one_json_line() -> None:
    if not native.available():
        pytest.skip(f"no native extension: {native.reason()}")
    done = subprocess.run(
        [sys.executable, "bench/bench_kernels.py", "--smoke", "--json"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["isa"] in native.ISA_NAMES
    for where in ("cache", "memory"):
        arms = {row["arm"]: row for row in record["updates"][where]}
        assert set(arms) == {
            "exact",
            "fused pass: verify, exact, checksum",
            "fp32",
            "torch.optim.AdamW(fused=True), fp32",
            "torch fall-back, exact",
        }
        assert all(row["gparam_per_s"] > 0 and row["limit_gparam_per_s"] > 0 for row in arms.values())
    assert {row["implementation"] for row in record["checksums"]} >= {"portable"}
