"""Plans of several ranks, compared with the engine: bytes that each rank holds, exactly, and bytes
that it sends to reduce gradients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240


@pytest.mark.ranks
def test_each_rank_holds_and_sends_what_is_planned(tmp_path: Path) -> None:
    """`bench/bytes_per_rank.py`, on a model that no world divides; its status says whether all was
    as predicted."""
    (tmp_path / "swap").mkdir()
    cases = [
        "stage 1: optimizer on NVMe",
        "stage 2: optimizer on CPU",
        "stage 3: all on NVMe",
        "stage 3: hpZ on the device",
        "stage 3: qgZ with errors fed back",
    ]
    command = [
        sys.executable,
        str(ROOT / "bench" / "bytes_per_rank.py"),
        "--dir",
        str(tmp_path / "swap"),
        "--json",
        str(tmp_path / "record"),
        "--hidden",
        "64",
        "--layers",
        "1",
        "--vocab",
        "509",
        "--only",
        ",".join(cases),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "record").read_text())
    rows = {(row["case"], row["state"], row["tier"]): row for row in record["rows"]}
    for case, state, tier in (
        ("stage 1: optimizer on NVMe", "whole sums of gradients", "cpu"),
        ("stage 2: optimizer on CPU", "parameters on the device", "device"),
        ("stage 3: all on NVMe", "optimizer states", "nvme"),
        ("stage 3: hpZ on the device", "the node's copy (hpZ)", "device"),
        ("stage 3: qgZ with errors fed back", "errors fed back (qgZ)", "cpu"),
        ("stage 1: optimizer on NVMe", "gradients sent in a step", "inside"),
        ("stage 3: qgZ with errors fed back", "gradients sent in a step", "inside"),
    ):
        row = rows[case, state, tier]
        assert row["counted"] == [row["predicted"]] * 2 != [0, 0], row
    assert list((tmp_path / "swap").iterdir()) == []
