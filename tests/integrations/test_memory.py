"""Nothing of a model is whole in RAM: what loading, saving, the best model and resuming add."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench" / "integrations" / "memory.py"


@pytest.mark.slow
def test_memory_stays_within_the_budget_and_three_tensors(tmp_path: Path) -> None:
    """With a model of 470 MiB; the script's own is of 1 GiB."""
    sizes = ["--hidden", "1024", "--layers", "10"]
    done = subprocess.run(
        [sys.executable, str(BENCH), "--dir", str(tmp_path), *sizes],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "| whole | state_dict |" in done.stdout
