"""Waiting of OpenMP threads: the rules are those of the runtimes, commands decide in time, and the
library warns once."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import infinity as inf
from infinity._src.base import openmp

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that has these variables of OpenMP and no others."""
    kept = {name: value for name, value in os.environ.items() if name not in NAMES}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, check=True, cwd=ROOT,
        env={**kept, "OMP_DISPLAY_ENV": "VERBOSE", **variables},
    )  # fmt: skip


def turns(shown: str) -> int:
    """Turns in the loop of a waiting thread, as libgomp shows them when it is loaded."""
    return int(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", shown)[0])


def libgomp() -> str:
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = sorted({line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line})
    if not paths:
        pytest.skip("this torch has another runtime")
    return paths[0]


@pytest.mark.parametrize(
    ("variables", "active"),
    [
        ({}, True),
        ({"OMP_WAIT_POLICY": "passive"}, False),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, True),
        ({"GOMP_SPINCOUNT": "0"}, False),
        ({"GOMP_SPINCOUNT": "5k", "OMP_WAIT_POLICY": "PASSIVE"}, True),
        ({"GOMP_SPINCOUNT": "many", "OMP_WAIT_POLICY": "PASSIVE"}, False),
        ({"KMP_BLOCKTIME": "200", "OMP_WAIT_POLICY": "PASSIVE"}, False),
    ],
)
def test_the_rules_are_those_of_libgomp(variables: dict[str, str], active: bool) -> None:
    shown = run("import ctypes, sys; ctypes.CDLL(sys.argv[1])", libgomp(), **variables).stderr
    assert (turns(shown) > 0) is active
    assert bool(openmp.why_active("libgomp", variables)) is active


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({}, "the default of libomp"),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, ""),
        ({"KMP_BLOCKTIME": "0", "OMP_WAIT_POLICY": "ACTIVE"}, ""),
        ({"KMP_BLOCKTIME": "infinite", "OMP_WAIT_POLICY": "PASSIVE"}, "KMP_BLOCKTIME=infinite"),
        ({"KMP_BLOCKTIME": "200ms"}, "KMP_BLOCKTIME=200ms"),
        ({"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "active"}, "OMP_WAIT_POLICY=ACTIVE"),
    ],
)
def test_the_time_of_llvm_and_intel_goes_before_the_policy(
    variables: dict[str, str], reason: str
) -> None:
    assert openmp.why_active("libomp", variables) == reason


def test_runtimes_are_found_under_the_names_that_wheels_give_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = tmp_path / "maps"
    monkeypatch.setattr(openmp, "_MAPS", maps)
    for file, found in (
        ("libgomp-24e2ab19.so.1.0.0", ["libgomp"]),
        ("libgomp.so.1 (deleted)", ["libgomp"]),
        ("libiomp5.so", ["libiomp5"]),
        ("libomp.so", ["libomp"]),
        ("libgompish.so", []),
    ):
        maps.write_text(f"7f00-7f01 r-xp 00000000 08:01 1   /opt/lib/{file}\n7f02-7f03 rw-p\n")
        assert openmp.loaded_runtimes() == found


def test_this_process_has_the_runtime_of_its_torch() -> None:
    assert openmp.loaded_runtimes()


def test_commands_decide_before_torch_is_loaded() -> None:
    libgomp()
    code = "import sys; from infinity._src.cli.main import main; assert main(sys.argv[1:]) == 2"
    assert turns(run(code, "checkpoint", "ls", "nothing").stderr) == 0


def test_a_user_s_choice_and_a_loaded_torch_are_left_alone() -> None:
    code = (
        "import os, sys; from infinity._src.base.openmp import wait_passively; wait_passively(); "
        "print(os.environ.get('OMP_WAIT_POLICY'))"
    )
    assert run(code).stdout == "PASSIVE\n"
    assert run(code, OMP_WAIT_POLICY="ACTIVE").stdout == "ACTIVE\n"
    # Where torch is loaded the variable would have no effect.
    assert run(f"import sys; sys.modules['torch'] = None; {code}").stdout == "None\n"


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with several threads that wait actively, and without a warning so far."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(openmp, "_warned", False)
    monkeypatch.setattr(openmp, "loaded_runtimes", lambda: ["libgomp"])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for record in caplog.records if "wait actively" in (text := record.getMessage())]


@pytest.mark.usefixtures("active")
def test_offload_warns_once_and_says_what_to_set(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "infinity"):
        for _ in range(2):
            model = inf.offload(torch.nn.Linear(4, 4))
            inf.handle(model).close()
    (text,) = told(caplog)
    assert "the default of libgomp" in text
    assert "OMP_WAIT_POLICY=PASSIVE" in text


@pytest.mark.usefixtures("active")
def test_nothing_is_said_of_threads_that_sleep_or_are_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING, "infinity"):
        openmp.warn_if_active(1)
        monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
        openmp.warn_if_active(2)
    assert not told(caplog)
