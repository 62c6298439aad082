"""The benchmark of wires runs, and its record has every case with its limit and torch beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infinity._src.cabi import native

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_the_smoke_run_measures_every_case_and_prints_one_json_line() -> None:
    done = subprocess.run(
        [sys.executable, "bench/bench_wire.py", "--smoke", "--json"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["isa"] in native.ISA_NAMES
    names = {row["case"] for row in record["cases"]}
    assert {
        "encode int8, to nearest",
        "encode int4, at random",
        "sum of 4 wires int4",
        "sum of 4 pieces bf16",
    } <= names
    assert len(names) == 12
    assert all(
        row["gelem_per_s"] > 0 and row["of_limit"] > 0 and row["torch_gelem_per_s"] > 0
        for row in record["cases"]
    )
