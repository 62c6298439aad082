"""The script that measures beside another job: arms, environments, ratios, and the job's end."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

BENCH = Path(__file__).parents[3] / "bench"
NAMES = ("beside_a_job", "compare_deepspeed", "drive", "harness", "r1")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Gives the script, imported as scripts import each other."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("beside_a_job")
    for name in NAMES:
        sys.modules.pop(name, None)


def test_each_arm_waits_as_its_users_do_or_as_it_is_told(script: Any) -> None:
    assert script.parse_arm("infinity:ram=600MiB") == ("infinity:ram=600MiB", "passive")
    assert script.parse_arm("infinity:wait=default:tier=cpu") == ("infinity:tier=cpu", "default")
    assert script.parse_arm("deepspeed:offload=cpu") == ("deepspeed:offload=cpu", "default")
    assert script.parse_arm("plain:wait=active") == ("plain", "active")
    for wrong in ("plain:wait=never", "plain:wait=active:wait=passive", "limit", "plain:ram"):
        with pytest.raises(ValueError, match=f"--arms {wrong}"):
            script.parse_arm(wrong)


def test_an_arm_has_the_waiting_it_names_whatever_our_own_environment_says(script: Any) -> None:
    ours = {"PATH": "/bin", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "7"}
    assert script.waiting(ours, "default") == {"PATH": "/bin"}
    assert script.waiting(ours, "active") == {"PATH": "/bin", "OMP_WAIT_POLICY": "ACTIVE"}


def test_deepspeed_waits_as_it_comes_and_others_sleep(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = sys.modules["compare_deepspeed"]
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert "OMP_WAIT_POLICY" not in compare.interpreter_of("deepspeed")[1]
    assert compare.interpreter_of("infinity")[1]["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    for kind in ("deepspeed", "plain"):
        assert compare.interpreter_of(kind)[1]["OMP_WAIT_POLICY"] == "ACTIVE"


def test_a_ratio_is_of_the_two_runs_of_a_round(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def record(number: int, busy: bool, seconds: float) -> dict[str, Any]:
        # The first measured step is left out.
        steps = [9.0, seconds, seconds]
        return {"arm": "infinity", "busy": busy, "round": number, "step_s": steps}

    records = [record(0, False, 1.0), record(0, True, 2.0), record(1, True, 9.0),
               record(1, False, 3.0), record(2, False, 5.0)]  # fmt: skip
    summary = script.summarise(records, ["infinity", "plain"])
    assert list(summary) == ["infinity"]
    ratio = summary["infinity"]["ratio"]
    assert (ratio.median, ratio.least, ratio.most, ratio.count) == (2.5, 2.0, 3.0, 2)
    assert summary["infinity"]["quiet_s"].count == 3
    script.show(sys.modules["r1"].Workload(), 2, summary)
    assert "infinity: more than 2 times as long beside the job" in capsys.readouterr().out


def test_a_job_that_does_not_begin_is_said_and_none_is_left(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    harness = sys.modules["harness"]
    monkeypatch.setattr(harness, "BENCH", tmp_path)
    with pytest.raises(harness.BenchError, match="did not begin"), script.other_job(1):
        raise AssertionError("the block ran without the job")
    (tmp_path / "other_job.py").write_text("print('begun', flush=True)\n")
    with pytest.raises(harness.BenchError, match="ended before"), script.other_job(1):
        time.sleep(0.5)
    (tmp_path / "other_job.py").write_text(
        "import time; print('begun', flush=True); time.sleep(60)\n"
    )
    started = []
    before = script.subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> Any:
        started.append(before(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(script.subprocess, "Popen", popen)
    with script.other_job(1):
        assert started[0].poll() is None
    assert started[0].poll() is not None
