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

from infinity._src.kernels import choice

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "bench"
GPU = BENCH / "gpu"
NAMES = (
    *(path.stem for path in GPU.glob("*.py")),
    *("bench_ops", "drive", "harness", "meter", "r1"),
)
COMMANDS = (
    *("f01_smoke", "f02_first_training", "f03_late_gpu", "f04_sanitizer", "f05_gpu_tests"),
    *("f06_kernels", "f07_update_on_device", "f08_train", "f09_copies_and_linear"),
    "f10_operations",
)
TINY = {"hidden": 64, "layers": 2, "vocab": 256, "tokens": 16}


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Gives a script by its name, imported as scripts import each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        patch.syspath_prepend(str(GPU))
        yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)


# -- what is run -----------------------------------------------------------------------------------


def test_every_operation_with_two_implementations_is_measured(bench: Any) -> None:
    ops = bench("bench_ops")
    assert set(ops.CASES) == set(choice.OPS)
    assert sorted(bench("f10_operations").OPERATIONS) == sorted(choice.OPS)
    if not choice.interpreted():
        return  # on a GPU the command itself runs them
    flush = torch.empty(1, dtype=torch.uint8)
    for name in ("wire_encode", "wire_decode", "ordered_sum"):
        for case in ops.CASES[name](torch.device("cpu"), True):
            assert case.op == name
            assert set(ops.measure_case(case, flush, rounds=1)["ms"]) == set(choice.IMPLEMENTATIONS)


def test_copies_are_timed_beside_plain_ones_and_their_bytes_are_the_models(bench: Any) -> None:
    found = {
        way: bench("copies").measure(way, "cpu", side=64, layers=3, rounds=2)
        for way in bench("copies").WAYS
    }
    size = 3 * 64 * 64 * 2
    assert [found[way]["bytes"] for way in found] == [[size, 0], [0, size], [size, size]]
    assert all(row["ratio_least"] <= row["ratio"] <= row["ratio_most"] for row in found.values())


def test_a_plain_copy_is_charged_for_the_bytes_that_were_asked_for(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are whole; what is moved too much or too little is taken out of the time."""
    device = bench("accelerator")
    copies, ticks = device.PlainCopies("cpu", piece_bytes=100), iter([10.0, 14.0])
    monkeypatch.setattr(device.time, "perf_counter", lambda: next(ticks))
    assert copies.seconds(to_bytes=250.0, from_bytes=0.0) == 4.0 * 250 / 200


@pytest.mark.slow
def test_arms_start_from_the_same_loss_and_go_down(bench: Any) -> None:
    arm, workload = bench("train_arm"), bench("r1").Workload(**TINY)
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


@pytest.mark.slow
def test_training_is_measured_through_a_process_and_recorded(bench: Any, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    command = [
        sys.executable,
        str(GPU / "train.py"),
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
    plan = bench("train").Plan("cpu", "tiny", TINY, {}, 0.0)
    assert (
        row["model_flops"]
        == plan.flops(32)
        == 32 * (6 * (plan.parameters - 256 * 64) + 6 * 2 * 64 * 16)
    )
    assert row["mfu"] == pytest.approx(row["model_flops"] / row["steady_s"] / row["peak_flops"])
    assert [one["failed"] for one in rows if one["arm"] == "deepspeed"] == ["is not installed"]
    assert list(tmp_path.iterdir()) == [results]  # swap is gone
    page = bench("table").make(bench("table").lines_of([tmp_path]))
    assert f"| tiny | 0.00 | cpu | 32 | {row['steady_s']:.2f} |" in page
    assert "is not installed" in page


@pytest.mark.slow
def test_an_arm_that_ends_is_recorded_with_its_last_words(bench: Any) -> None:
    train = bench("train")
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
    linear = bench("largest_linear")
    until_s = time.monotonic() + 60
    first, second = linear.search(1, "cpu", first=64, width_max=128, until_s=until_s)
    assert first["failed"] == second["failed"] == ""
    assert (first["params"], second["params"]) == (4 * 64 * 64 + 256, 4 * 128 * 128 + 512)
    monkeypatch.setattr(linear, "memory_left_bytes", lambda: 1 << 20)
    found = list(linear.search(1, "cpu", first=64, width_max=1 << 20, until_s=until_s))
    assert [one["width"] for one in found] == [64, 128]
    assert found[-1]["failed"].startswith("RAM")


def test_a_linear_that_the_engine_refuses_is_recorded(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = bench("largest_linear")
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
    train = bench("train")
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
    train = bench("train")
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


def test_the_table_names_what_failed_and_survives_a_broken_line(bench: Any, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    begun = {"script": "command", "device": "cuda", "run": "now"}
    steps = [("a/build", 1), ("a/build", 0), ("a/tests", 1), ("a/train", 124), ("a/sanitizer", 3)]
    tests = [("good", "began"), ("good", "passed"), ("bad[cuda]", "failed"), ("hung", "began")]
    about = {"script": "tests", "suite": "s", "why": "assert 1 | 2"}
    records: list[dict[str, Any]] = [
        {**begun, "name": "f01", "state": "began"},
        {**begun, "name": "f01", "state": "ended", "status": 0},
        {**begun, "name": "f02", "state": "began"},
        *({"script": "stage", "name": name, "status": end, "seconds": 3} for name, end in steps),
        *({**about, "test": name, "outcome": end} for name, end in tests),
    ]
    lines = [json.dumps(record) for record in records]
    results.write_text("\n".join([*lines, '{"script": "copi']))
    page = bench("table").make(bench("table").lines_of([results]))
    for part in (
        "| f01 | cuda | now | ok |",
        "| f02 | cuda | now | CUT OFF |",
        "| a/build | ok | 3 |",
        "| a/tests | FAILED (1) | 3 |",
        "| a/train | out of time | 3 |",
        "| a/sanitizer | NOT RUN | 3 |",
        "| s | 1 | 1 | 0 | 1 |",
        "| `bad[cuda]` | s | assert 1 \\| 2 |",
        "| `hung` | s | it began, and has no end |",
    ):
        assert part in page, page
    assert page.count("| a/build |") == 1  # the last run of a step


def test_several_results_add_up_and_the_later_of_one_thing_holds(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table, machine = bench("table"), {"cores": 16, "memory_bytes": 1 << 37}
    step = {"script": "stage", "name": "a/tests", "seconds": 3}
    calls: list[list[dict[str, Any]]] = [
        [
            {**step, "status": 1},
            {"script": "tests", "suite": "s", "test": "t", "outcome": "passed"},
        ],
        [{**step, "status": 0}, {**step, "name": "b/more", "status": 0}],
    ]
    for number, name in enumerate(("H100", "H200")):
        on = {"name": name, "torch": "2.11.0+cu130"}
        about = {"on": on, "machine": machine, "run": "now", "commit": "c"}
        (tmp_path / name).mkdir()
        lines = [
            json.dumps(one) for one in [*calls[number], {"script": "probe", "part": "p", **about}]
        ]
        (tmp_path / name / "results.jsonl").write_text("\n".join(lines))
    out = tmp_path / "all"
    arguments = [*map(str, (tmp_path / "H100", tmp_path / "H200" / "results.jsonl"))]
    monkeypatch.setattr(sys, "argv", ["table.py", *arguments, "--out", str(out)])
    assert table.main() == 0
    page = (out / "table.md").read_text()
    assert page.startswith("# On H100, H200\n")
    assert "different devices: compare those of one run only" in page
    assert "| a/tests | ok |" in page
    assert "| b/more | ok |" in page
    assert "| s | 1 | 0 | 0 | 0 |" in page
    assert table.make(table.lines_of([out])) == page
    monkeypatch.setattr(sys, "argv", ["table.py", str(tmp_path / "nowhere")])
    assert table.main() == 1
    assert capsys.readouterr().err == f"no results in {tmp_path / 'nowhere'}\n"


def test_the_entries_of_measured_are_the_least_ratios(bench: Any) -> None:
    """Entries are of an operation's last run, where it was whole."""
    hopper = {"capability": [9, 0]}
    ended = {"state": "ended"}

    def run(op: str, at: str, *found: dict[str, Any], on: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"op": op, "run": at, "on": on, "what": str(each), **each} for each in found]

    rows = [
        *run("update", "1", {"ratio": 0.5}, ended, on=hopper),
        *run("update", "2", {"ratio": 1.5}, {"ratio": 1.25}, on=hopper),
        *run("tile_matmul", "2", {"ratio": 3.0}, {"failed": "no"}, ended, on=hopper),
        *run("wire_encode", "2", {"ratio": 3.0}, on=hopper),  # cut off
        *run("group_quantize", "2", {"ratio": 2.0}, ended, on={}),  # the CPU's interpreter
    ]
    for each in rows:
        if "state" in each:
            del each["what"]
    measured = bench("table").measured
    assert measured(rows) == []
    end = {"op": "update", "run": "2", "on": hopper, **ended}
    ampere = run("update", "1", {"ratio": 0.5}, on={"capability": [8, 0]})
    ampere.append({**end, "run": "1", "on": {"capability": [8, 0]}})
    expected = ['("update", (9, 0)): 1.25,', '("update", (8, 0)): 0.50,']
    assert measured([*rows, end, *ampere]) == expected
    # The last run is the latest, in whatever order the files are named.
    assert measured([*ampere, end, *rows]) == expected[::-1]


def test_a_case_that_cannot_be_made_is_recorded_and_others_go_on(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = bench("bench_ops")

    def cases(*_: Any) -> Iterator[Any]:
        yield ops.Case("update", "one", 0, dict.fromkeys(choice.IMPLEMENTATIONS, lambda: None))
        raise ValueError("no Triton here")

    monkeypatch.setattr(ops, "CASES", {"update": cases, "wire_decode": lambda *_: iter(())})
    found = list(ops.measure(["update", "wire_decode"], torch.device("cpu"), rounds=1, smoke=True))
    assert [row.get("what", row.get("state")) for row in found] == [
        "one", "making the case after one", "ended", "ended",
    ]  # fmt: skip
    assert found[1]["failed"] == "ValueError: no Triton here"


def test_ratios_are_taken_round_by_round(bench: Any) -> None:
    common = {"size": "1b", "tokens": 8}
    rows = [
        {**common, "arm": arm, "round": number, "tokens_per_s": rate}
        for arm, rates in (("nvme", (10.0, 30.0)), ("fsdp2", (5.0, 10.0)))
        for number, rate in enumerate(rates)
    ]
    assert bench("table").beside_fsdp2(rows, rows[0]) == [2.0, 3.0]
    assert bench("table").beside_fsdp2(rows, rows[2]) == []


def test_the_gaps_between_copies_are_those_of_one_direction(bench: Any) -> None:
    copy = {"cat": "gpu_memcpy", "args": {"bytes": 1 << 20}, "dur": 10.0}
    events = [
        {**copy, "name": "Memcpy HtoD (Pinned -> Device)", "ts": start}
        for start in (0.0, 15.0, 125.0)
    ]
    events.append({**copy, "name": "Memcpy DtoH (Device -> Pinned)", "ts": 3.0})
    found = bench("profile_steps").gaps([*events, {"cat": "kernel", "name": "k", "ts": 0.0}])
    assert found["HtoD"]["copies"] == 3
    assert found["HtoD"]["mean_kib"] == 1024
    assert found["HtoD"]["busy_share"] == round(30 / 135, 3)
    assert found["HtoD"]["gaps_below_50_us_s"] == round(5e-6, 4)
    assert found["HtoD"]["gaps_above_s"] == round(100e-6, 4)
    assert found["DtoH"]["copies"] == 1
