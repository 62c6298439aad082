"""`from_pretrained` under ZeRO-3 over the stand-in: `deepspeed_loads` has the tests, each
run in a process of its own, since `install()` is for a whole process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integrations
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ROOT = Path(__file__).parents[2]


def held(function: str, place: Path) -> str:
    told = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.deepspeed_loads", function, str(place)],
        cwd=ROOT, env={**os.environ, **told}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.parametrize("function", ["alike", "other_ways", "changed", "order"])
def test_a_model_is_mapped(function: str, tmp_path: Path) -> None:
    held(function, tmp_path)


@pytest.mark.slow
def test_no_model_is_whole_in_memory(tmp_path: Path) -> None:
    held("memory", tmp_path)
