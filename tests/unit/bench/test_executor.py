"""Benchmark of the executor on null drives: its arms run, and its figures are what they say."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]
SCRIPTS = ("arm_executor", "arm_verify", "executor", "harness", "meter")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Gives a script by its name, imported as scripts import each other."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    yield importlib.import_module
    for name in SCRIPTS:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("kernels", [False, True])
def test_an_arm_moves_whole_chunks_in_blocks(bench: Any, tmp_path: Path, kernels: bool) -> None:
    arm = bench("arm_executor")
    found = arm.run(
        tmp_path, drives=2, block=1 << 20, batch=3, workers=1, kernels=kernels, chunks=6,
        seconds=0.001,
    )  # fmt: skip
    assert set(found) == {"store", "fetch", "update"}
    for kind, figures in found.items():
        turns = 2 if kind == "update" else 1
        assert figures["chunks"] >= 6
        assert figures["bytes"] == turns * figures["chunks"] * arm.CHUNK_BYTES
        # 4.5 MiB in blocks of 1 MiB.
        assert figures["requests"] == turns * figures["chunks"] * 5
        assert figures["cpu_s"] > 0


def test_rates_are_of_the_plain_run_and_the_mutex_of_the_metered_one(bench: Any) -> None:
    figures = bench("executor").figures
    plain = {"s": 2.0, "cpu_s": 1.0, "requests": 4000, "bytes": 8e9}
    rates = {
        "gb_per_s": 4.0,
        "requests_per_s": 2000.0,
        "cpu_us_per_request": 250.0,
        "cpu_ms_per_gb": 125.0,
    }
    assert figures(plain, {}) == pytest.approx(rates)
    metered = {
        "s": 4.0, "requests": 1000, "bytes": 2e9, "holds": 3000, "contended": 30,
        "long_holds": 1000, "hold_ns": 2_000_000, "long_ns": 10**9, "waited_ns": 0,
    }  # fmt: skip
    found = figures(plain, metered)
    # Long holds count as much as others: 3000 times 1 us.
    assert found["lock_us_per_request"] == pytest.approx(3.0)
    assert found["lock_share"] == pytest.approx(0.003 / 4)
    assert found["lock_gb_per_s"] == pytest.approx(2 / 0.003)
    assert (found["holds_per_s"], found["holds_per_request"]) == (750, 3)
    assert found["contended_share"] == pytest.approx(0.01)


@pytest.mark.slow
def test_the_smoke_run_meters_the_mutex(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    done = subprocess.run(
        [
            sys.executable, "bench/executor.py", "--smoke", f"--dir={tmp_path}",
            f"--results={results}",
        ],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in results.read_text().splitlines()]
    kinds = {(record["kind"], record["kernels"]) for record in records}
    assert kinds == {
        (kind, all_) for kind in ("store", "fetch", "update") for all_ in ("none", "all")
    }
    if shutil.which("cc"):
        assert all(record["metered"]["holds"] > 0 for record in records)
        assert "GB/s through" in done.stdout
