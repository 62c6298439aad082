"""The GPU's benchmarks on the CPU, with tiny sizes: they run, plan within a machine's means, and
say what they could not do."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "bench"
NAMES = (
    "gpu_arm",
    "gpu_copy",
    "gpu_device",
    "gpu_largest_linear",
    "gpu_table",
    "gpu_train",
    "harness",
    "meter",
    "r1",
    "drive",
)
TINY = {"hidden": 64, "layers": 2, "vocab": 256, "tokens": 16}


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Gives a script by its name, imported as scripts import each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)


# -- what is run -----------------------------------------------------------------------------------


def test_copies_are_timed_beside_plain_ones_and_their_bytes_are_the_models(bench: Any) -> None:
    found = {
        way: bench("gpu_copy").measure(way, "cpu", side=64, layers=3, rounds=2)
        for way in bench("gpu_copy").WAYS
    }
    size = 3 * 64 * 64 * 2
    assert [found[way]["bytes"] for way in found] == [[size, 0], [0, size], [size, size]]
    assert all(row["ratio_least"] <= row["ratio"] <= row["ratio_most"] for row in found.values())


def test_a_plain_copy_is_charged_for_the_bytes_that_were_asked_for(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are whole; what is moved too much or too little is taken out of the time."""
    device = bench("gpu_device")
    copies, ticks = device.PlainCopies("cpu", piece_bytes=100), iter([10.0, 14.0])
    monkeypatch.setattr(device.time, "perf_counter", lambda: next(ticks))
    assert copies.seconds(to_bytes=250.0, from_bytes=0.0) == 4.0 * 250 / 200


def test_arms_start_from_the_same_loss_and_go_down(bench: Any) -> None:
    arm, workload = bench("gpu_arm"), bench("r1").Workload(**TINY)
    asked = {"rows": 2, "warmup": 1, "steps": 3}
    losses = []
    makers = (
        lambda: arm.infinity_arm(workload, "cpu", {"params": "cpu", "optim": "cpu"}),
        lambda: arm.fsdp2_arm(workload, "cpu"),
    )
    for make in makers:
        made = make()
        try:
            found = arm.measure(made, workload, "cpu", asked)
        finally:
            made.close()
        assert found["tokens"] == 32
        assert len(found["step_s"]) == 3
        losses.append(found["losses"])
    assert losses[0][0] == losses[1][0]
    assert all(
        mine == pytest.approx(theirs, rel=0.02) for mine, theirs in zip(*losses, strict=True)
    )
    assert losses[0][-1] < losses[0][0]


def test_training_is_measured_through_a_process_and_recorded(bench: Any, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    command = [
        sys.executable,
        str(BENCH / "gpu_train.py"),
        "--device",
        "cpu",
        "--dir",
        str(tmp_path),
        "--results",
        str(results),
        "--arms",
        "cpu,deepspeed",
        "--tokens",
        "32",
        "--rounds",
        "1",
        "--steps",
        "2",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    (row,) = [row for row in rows if "tokens_per_s" in row]
    plan = bench("gpu_train").Plan("cpu", "tiny", TINY, {}, 0.0)
    assert (
        row["model_flops"]
        == plan.flops(32)
        == 32 * (6 * (plan.parameters - 256 * 64) + 6 * 2 * 64 * 16)
    )
    assert row["mfu"] == pytest.approx(row["model_flops"] / row["steady_s"] / row["peak_flops"])
    assert [one["failed"] for one in rows if one["arm"] == "deepspeed"] == ["is not installed"]
    assert list(tmp_path.iterdir()) == [results]  # swap is gone
    page = bench("gpu_table").make(results, [])
    assert f"| tiny | 0.00 | cpu | 32 | {row['steady_s']:.2f} |" in page
    assert "is not installed" in page


def test_an_arm_that_ends_is_recorded_with_its_last_words(bench: Any) -> None:
    train = bench("gpu_train")
    plan = train.Plan("cpu", "tiny", TINY, {"params": "nowhere"}, 0.0)
    process = train.Process(plan, "cpu")
    try:
        with pytest.raises(train.ArmFailed, match="params='nowhere' is not known"):
            process.answer(120.0)
    finally:
        process.end()


def test_a_linear_that_does_not_fit_ram_ends_the_search(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = bench("gpu_largest_linear")
    until_s = time.monotonic() + 60
    (first, second) = linear.search(1, "cpu", first=64, width_max=128, until_s=until_s)
    assert first["failed"] == second["failed"] == ""
    assert (first["params"], second["params"]) == (4 * 64 * 64 + 256, 4 * 128 * 128 + 512)
    monkeypatch.setattr(linear, "memory_left_bytes", lambda: 1 << 20)
    found = linear.search(1, "cpu", first=64, width_max=1 << 20, until_s=until_s)
    assert [one["width"] for one in found] == [64, 128]
    assert found[-1]["failed"].startswith("RAM")


def test_a_linear_that_the_engine_refuses_is_recorded(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = bench("gpu_largest_linear")
    real = linear.inf.Policy
    monkeypatch.setattr(
        linear.inf, "Policy", lambda **values: real(**values, ram="1KiB"), raising=False
    )
    assert linear.attempt(64, 1, "cpu")["failed"].startswith("RAM: ")


# -- what is planned -------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    arm=st.sampled_from(["cpu", "nvme", "fsdp2"]), shape=st.sampled_from(["1b", "7b", "largest"]),
    ram=st.floats(1e9, 1e12), disk=st.floats(0, 1e12),
)  # fmt: skip
def test_no_plan_takes_more_than_there_is(
    bench: Any, arm: str, shape: str, ram: float, disk: float
) -> None:
    train = bench("gpu_train")
    budget = train.Budget(ram, disk, 0.0)
    plan = train.plan_arm(arm, shape, 2048, Path("/swap"), budget)
    if plan.why_not:
        return
    assert plan.ram_bytes <= ram + 1
    if plan.policy.get("params") != "nvme":
        return
    largest = plan.policy.get("state") == "compact"
    held = (5.1 if largest else 14.0) * plan.parameters  # states, and gradients where they wait
    if plan.policy["ram"] == "min":
        assert 12.0 * plan.parameters <= disk
    else:
        assert held <= plan.policy["ram"] + disk


def test_the_largest_model_grows_with_ram_and_drive(bench: Any) -> None:
    train = bench("gpu_train")
    sizes = []
    for ram, disk in ((64e9, 0.0), (128e9, 0.0), (128e9, 50e9)):
        sizes.append(
            train.plan_arm(
                "nvme", "largest", 2048, Path("/swap"), train.Budget(ram, disk, 0.0)
            ).parameters
        )
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[2] > 25e9  # 0.9 x 124 GB and 50 GB, at 5.2 B


# -- what is shown ---------------------------------------------------------------------------------

JUNIT = """<testsuites><testsuite>
<testcase name="good"/><testcase name="left_out"><skipped/></testcase>
<testcase name="bad[cuda]"><failure message="assert 1 | 2"/></testcase></testsuite></testsuites>"""


def test_the_table_names_what_failed_and_survives_a_broken_line(bench: Any, tmp_path: Path) -> None:
    results, junit = tmp_path / "results.jsonl", tmp_path / "tests.xml"
    ends = [("build", 1), ("build", 0), ("tests", 1), ("train", 124)]
    lines = [
        json.dumps({"script": "stage", "name": name, "status": status, "seconds": 3})
        for name, status in ends
    ]
    results.write_text("\n".join([*lines, '{"script": "gpu_co']))
    junit.write_text(JUNIT)
    page = bench("gpu_table").make(results, [junit, tmp_path / "none.xml"])
    for part in (
        "| build | ok | 3 |",
        "| tests | FAILED (1) | 3 |",
        "| train | out of time | 3 |",
        "| tests | 1 | 1 | 1 |",
        "| `bad[cuda]` | assert 1 \\| 2 |",
    ):
        assert part in page, page
    assert page.count("| build |") == 1  # the last run of a stage


def test_ratios_are_taken_round_by_round(bench: Any) -> None:
    common = {"size": "1b", "tokens": 8}
    rows = [
        {**common, "arm": arm, "round": number, "tokens_per_s": rate}
        for arm, rates in (("nvme", (10.0, 30.0)), ("fsdp2", (5.0, 10.0)))
        for number, rate in enumerate(rates)
    ]
    assert bench("gpu_table").beside_fsdp2(rows, rows[0]) == [2.0, 3.0]
    assert bench("gpu_table").beside_fsdp2(rows, rows[2]) == []


@pytest.mark.parametrize(
    ("stage", "device", "why"),
    [("nothing", "cpu", "no stage nothing"), ("build", "cuda", "CUDA device")],
)
def test_the_script_says_what_is_wrong_before_it_begins(
    stage: str, device: str, why: str, tmp_path: Path
) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    place = {
        "DEVICE": device,
        "PYTHON": sys.executable,
        "OUT": str(tmp_path / "out"),
        "SWAP": str(tmp_path / "swap"),
    }
    command = ["bash", str(BENCH / "gpu.sh"), stage]
    done = subprocess.run(
        command,
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert why in done.stderr


def test_a_stage_without_time_is_named_in_the_table_and_the_others_are_not_lost(
    tmp_path: Path,
) -> None:
    place = {
        "DEVICE": "cpu",
        "PYTHON": sys.executable,
        "OUT": str(tmp_path / "out"),
        "SWAP": str(tmp_path / "swap"),
        "TOTAL_S": "0",
    }
    command = ["bash", str(BENCH / "gpu.sh"), "linear", "copy"]
    done = subprocess.run(
        command,
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    page = (tmp_path / "out" / "table.md").read_text()
    assert "| linear | out of time |" in page
    assert "| copy | out of time |" in page
    assert not (tmp_path / "swap").exists()
