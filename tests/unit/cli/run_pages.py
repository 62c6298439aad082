"""Runs for the page of `infinity report`: real ones, and files of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from infinity._src.cli import train as command
from tests.tiny_llama import TEXT, write_model
from tests.unit.cli.commands import run

HOSTILE = "<img src=x onerror=alert(1)>&<b>%{x}</b></script><script>alert(2)</script>"


def train_run(place: Path, *more: str) -> Path:
    """Train a tiny model by `infinity train`, 9 steps on NVMe. Returns its --out."""
    (place / "model").mkdir(parents=True)
    (place / "swap").mkdir()
    write_model(place / "model")
    (place / "text.txt").write_text(TEXT)
    given = "--steps 9 --batch 2 --seq 32 --lr 3e-3 --eval-batches 1 --eval-every 3 --no-save"
    paths = ("train", place / "model", "--text", place / "text.txt", "--out", place / "out")
    placed = ("--params", "nvme", "--optim", "nvme", "--nvme", place / "swap", "--ram", "min")
    arguments = [*map(str, (*paths, *placed)), *given.split(), *more]
    status, shown = run(command.run_train, *arguments)
    assert status == 0, shown
    return place / "out"


def step_row(step: int, **values: Any) -> dict[str, Any]:
    """A line of a step."""
    drive = {"bytes_read": 3e9, "bytes_written": 2e9, "busy_s": 1.0, "written_tb_per_day": 86.4}
    return {
        "kind": "step", "step": step, "loss": 3.0 - step / 1e6, "step_s": 2.0, "compute_s": 1.0,
        "io_wait_s": 0.5, "update_s": 0.25, "bytes_read": 3e9, "bytes_written": 2e9,
        "rss_bytes": 4e9, "ram_bytes": 1e9,
        "drives": [{"path": "/mnt/a", **drive}],
        "memory": {
            "device": {"gathered units, at most": 5e8}, "ram": {"pools": 1e9},
            "nvme": {"states": 9e9}, "ram_budget_bytes": 2e9,
        },
        **values,
    }  # fmt: skip


def run_row(**values: Any) -> dict[str, Any]:
    """A line of a run."""
    return {
        "kind": "run", "schema": "infinity.train/1", "params": 1_000_000, "ranks": 1,
        "goes_on_after": 0,
        "bandwidth": {"read_gbps": 4.0, "write_gbps": 2.0, "mixed_gbps": 3.0}, **values,
    }  # fmt: skip


def write_run(directory: Path, *rows: dict[str, Any], tail: str = "") -> Path:
    """Write these lines, and `tail` behind them."""
    directory.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows) + tail
    (directory / "metrics.jsonl").write_text(text)
    return directory


def hostile_run(directory: Path) -> Path:
    """A run whose every text is an attack."""
    bars = {"compute": [[0, 0, 0, 0.0, 0.9, 10]], "phase": [[0, 0, 0, 0.0, 1.0, 0]]}
    write_run(
        directory,
        run_row(
            options={"model": HOSTILE, "update": HOSTILE, "ram": [HOSTILE]},
            hardware={"cpu": HOSTILE, "cores": HOSTILE},
            bandwidth={"read_gbps": 1.0, "write_gbps": 1.0, "source": HOSTILE},
        ),
        *(
            step_row(
                step,
                drives=[
                    {"path": HOSTILE + tail, "bytes_read": 1e9, "bytes_written": 1e9}
                    for tail in ("", "\u2028\ud800", "x" * 100_000)
                ],
                memory={"device": {HOSTILE: 1e9}, "ram": {HOSTILE: 1e9}, "nvme": {}},
            )
            for step in (1, 2)
        ),
    )
    timeline = {
        "schema": "infinity.timeline/1", "step": 2, "seconds": 1.0, "dropped": 0,
        "names": [HOSTILE], "lanes": bars,
    }  # fmt: skip
    (directory / "timeline.json").write_text(json.dumps(timeline))
    return directory
