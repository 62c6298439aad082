"""The matmuls compile for GPUs that are not there, and every configuration to the same matrix
instruction."""

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
OPS = ("tile_matmul", "linear_cross_entropy")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="there is no Triton here"
)


def compiled(tmp_path: Path, capability: int, name: str, count: str) -> list[dict[str, Any]]:
    """Run tests/unit/kernels/compiled_matmul.py for an operation and return the records that it
    prints."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "TRITON_CACHE_DIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [
        sys.executable,
        "-m",
        "tests.unit.kernels.compiled_matmul",
        str(capability),
        name,
        count,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", mostly_slow(OPS))
def test_the_first_configuration_fits_any_gpu_and_no_sum_is_left_to_chance(
    tmp_path: Path, name: str
) -> None:
    """48 KiB of shared memory; no atomics; matrix units for all but exact fp32."""
    launches = compiled(tmp_path, 86, name, "first")
    assert launches
    for launch in launches:
        assert launch["shared_bytes"] <= 48 << 10, launch
        assert launch["atomics"] == 0, launch
        assert bool(launch["matrix"]) == (launch["operands"] != "torch.float32"), launch


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", OPS)
def test_all_configurations_of_a_form_use_the_same_matrix_instruction(
    tmp_path: Path, name: str, capability: int
) -> None:
    """Instructions of another depth may add in another order: a measurement must not choose between
    them."""
    launches = compiled(tmp_path, capability, name, "all")
    forms: dict[tuple[str, str], set[str]] = {}
    for launch in launches:
        forms.setdefault((launch["form"], launch["operands"]), set()).add(
            json.dumps(launch["matrix"])
        )
        # what an H100 has; smaller GPUs pass over the large ones
        assert launch["shared_bytes"] <= 227 << 10, launch
    assert len(launches) > len(forms)
    assert all(len(found) == 1 for found in forms.values()), forms
