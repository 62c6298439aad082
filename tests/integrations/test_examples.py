"""The scripts of docs/examples run as their pages say. Each asserts its own results: losses fall, a
resumed run has the bits of the uninterrupted one, files load without infinity."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import in_a_fork, script_in_a_fork

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
QUICK = {"own_trainer", "plain_loop"}
"""Scripts that need no other trainer."""
TRAINERS = {"lightning_module": "lightning", "trl_sft": "trl"}
"""Packages that only `make integrations` installs."""
ALONE = [
    pytest.param(path.stem, marks=[] if path.stem in QUICK else [pytest.mark.integrations])
    for path in sorted(EXAMPLES.glob("*.py"))
    if path.stem != "deepspeed_script"
]


def places(place: Path) -> tuple[str, ...]:
    (place / "nvme").mkdir()
    return "--nvme", str(place / "nvme"), "--out", str(place / "out")


def falling(output: str) -> int:
    """The number of lines that name two losses, each with the second below the first."""
    found = re.findall(r"loss ([\d.]+) -> ([\d.]+)", output)
    assert all(float(last) < float(first) for first, last in found), output
    return len(found)


def test_there_are_seven_scripts() -> None:
    assert len(ALONE) + 1 == 7


@pytest.mark.parametrize("script", ALONE)
def test_a_script_runs(script: str, tmp_path: Path) -> None:
    if script in TRAINERS:
        pytest.importorskip(TRAINERS[script])
    assert falling(script_in_a_fork(EXAMPLES / f"{script}.py", *places(tmp_path))) == 1
    assert not list((tmp_path / "nvme").iterdir()), "swap files were left"


def test_a_script_of_deepspeed_runs_as_it_is(tmp_path: Path) -> None:
    script = EXAMPLES / "deepspeed_script.py"
    assert "infinity" not in script.read_text(encoding="utf-8").partition('"""\n\n')[2]
    given = ("--deepspeed", "--deepspeed_config", EXAMPLES / "ds_config.json", *places(tmp_path))
    rank = ("infinity.compat.deepspeed", "infinity.rank", "script")
    assert falling(in_a_fork(*rank, script, *given)) == 1


@pytest.mark.integrations
def test_a_trainer_of_ones_own_runs_on_two_ranks(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
            str(EXAMPLES / "own_trainer.py"), *places(tmp_path),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert falling(done.stdout) == 2
