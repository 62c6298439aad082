"""The kernels compile for GPUs that are not there, and to arithmetic that rounds as the references
do."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.marks import mostly_slow

ROOT = Path(__file__).resolve().parents[3]
BITWISE = ("groups", "update", "wire")
"""Operations of which choice.OPS says that the bits are torch's."""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="there is no Triton here"
)


def compiled(tmp_path: Path, capability: int, name: str) -> list[dict[str, Any]]:
    """Run tests/unit/kernels/compiled.py for an operation and return the records that it prints."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TRITON_CACHE_DIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.unit.kernels.compiled", str(capability), name]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(BITWISE, "update"))
def test_what_must_have_the_bits_of_torch_compiles_to_operations_that_round_once(
    tmp_path: Path, name: str
) -> None:
    """No contraction to FMA, no denormal flushed, nothing approximate; vector loads; small enough
    for any GPU."""
    launches = compiled(tmp_path, 90, name)
    assert launches
    for launch in launches:
        assert launch["fused"] == 0, launch
        assert launch["inexact"] == [], launch
        assert launch["shared_bytes"] <= 48 << 10, launch
        assert launch["atomics"] == 0, launch
    assert any(launch["vector_loads"] for launch in launches)
