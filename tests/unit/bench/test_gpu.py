"""The commands and benchmarks of bench/gpu without a GPU: they say what did not run, never that it
passed; what they learned is there when they are cut off; they plan within a machine's means."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import infinity as inf
from infinity._src.kernels import choice
from tests.device import simulated

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[3]
GPU = ROOT / "bench" / "gpu"
COMMANDS = sorted(path.stem for path in GPU.glob("f[0-9][0-9]_*.py"))
WAIT_S = 60.0
TINY = {"hidden": 64, "layers": 2, "vocab": 256, "tokens": 16}


def records(out: Path, script: str) -> list[dict[str, Any]]:
    """Lines that a run left."""
    file = out / "results.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [one for one in map(json.loads, lines) if one["script"] == script]


def command(name: str, out: Path, *arguments: object, **env: str) -> subprocess.Popen[str]:
    """A command, begun."""
    return subprocess.Popen(
        [sys.executable, str(GPU / f"{name}.py"), "--out", str(out), "--swap", str(out / "swap")]
        + [str(argument) for argument in arguments],
        env={**os.environ, **env},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(met: Callable[[], bool]) -> None:
    """Return when it is so."""
    until = time.monotonic() + WAIT_S
    while not met():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.05)


def run_of(bench: Any, name: str, out: Path, device: str, *arguments: str) -> Any:
    """A run of a command that is not begun, and its module."""
    stage, module = bench("stage"), bench(name)
    parser = stage.parser("", 1.0)
    getattr(module, "options", lambda _parser: None)(parser)
    args = parser.parse_args(["--device", device, "--out", str(out), *arguments])
    return module, stage.Run(name, args)


# -- the commands ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_every_step_is_a_script_with_a_limit(name: str, bench: Any, tmp_path: Path) -> None:
    for device in ("cuda", "simulated", "cpu"):
        module, run = run_of(bench, name, tmp_path, device, "--seconds", "480")
        steps = list(module.steps(run))
        assert steps
        assert len({step.name for step in steps}) == len(steps)
        assert all(0 < step.limit_s <= 480 for step in steps)
        for step in steps:
            files = [word for word in step.command if word.endswith(".py") or word == "tests/gpu"]
            assert all((ROOT / file).exists() for file in files), step.command
            if step.pytest:
                words = list(step.command)
                on = "cpu" if (name, device) == ("f06_kernels", "simulated") else device
                assert words[words.index("--on") + 1] == on
                # Eight workers of all cores each would wait for each other.
                assert set(bench("stage").ONE_THREAD) <= set(step.env)
                marks = words[words.index("-m", words.index("pytest")) + 1]
                assert (marks == "gpu") == (device == "cuda")


def test_three_calls_run_all_ten_each_within_ten_minutes(bench: Any) -> None:
    call, stage = bench("call"), bench("stage")
    assert list(call.CALLS) == [1, 2, 3]
    assert sorted(one.name for number in call.CALLS for one in call.CALLS[number]) == COMMANDS
    for commands in call.CALLS.values():
        assert stage.PREPARE_S + sum(one.share_s for one in commands) <= call.CALL_S
    # Late commands are ended, then killed.
    assert call.CALL_S + stage.GRACE_S + stage.KILL_S <= 590


@pytest.mark.parametrize("name", ["f08_train"])
def test_without_a_gpu_a_command_says_that_it_did_not_run(name: str, tmp_path: Path) -> None:
    process = command(name, tmp_path, CUDA_VISIBLE_DEVICES="")
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 3, output
    assert f"NOT RUN: {name} needs a CUDA device: " in output
    assert [one["status"] for one in records(tmp_path, "command") if one["state"] == "ended"] == [3]
    assert f"| {name} | cuda |" in (tmp_path / "table.md").read_text()


TWO_TESTS = """
import os, pathlib, time
pathlib.Path(PID).write_text(str(os.getpid()))
def test_first():
    pass
def test_second():
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_killed_leaves_what_it_learned(number: int, tmp_path: Path) -> None:
    """No process is left either: the kernel ends pytest's when its parent dies."""
    tests, pid = tmp_path / "test_two.py", tmp_path / "pid"
    tests.write_text(TWO_TESTS.replace("PID", repr(str(pid))))
    arguments = ("--device", "cpu", "--paths", tests, "--select", "")
    process = command("f02_first_training", tmp_path, *arguments)
    wait_for(lambda: len(records(tmp_path, "tests")) == 3)
    process.send_signal(number)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == (-9 if number == signal.SIGKILL else 143)
    found = [
        (one["test"].rpartition("::")[2], one["outcome"]) for one in records(tmp_path, "tests")
    ]
    assert found == [("test_first", "began"), ("test_first", "passed"), ("test_second", "began")]
    child = int(pid.read_text())
    wait_for(lambda: not Path(f"/proc/{child}").exists())
    ended = [one["state"] for one in records(tmp_path, "command")]
    assert ended == (["began"] if number == signal.SIGKILL else ["began", "ended"])


# -- the plugins -----------------------------------------------------------------------------------


class Config:
    """The part of pytest's interface that the plugin uses."""

    def __init__(self, **options: Any) -> None:
        self.options = {"suite": "s", "lines": None, **options}

    def getoption(self, name: str) -> Any:
        return self.options.get(name[2:].replace("-", "_"))


def reports(*outcomes: str, why: str = "") -> list[pytest.TestReport]:
    """The reports of one test, phase by phase."""
    return [
        pytest.TestReport("test_it", ("f", 1, "t"), {}, outcome, why or None, when)  # type: ignore[arg-type]
        for outcome, when in zip(outcomes, ("setup", "call", "teardown"), strict=True)
    ]


@pytest.mark.parametrize(
    ("must_fail", "outcomes", "why", "status"),
    [
        (False, ("passed", "passed", "passed"), "", 0),
        (False, ("passed", "failed", "passed"), "assert 1", 1),
        (False, ("passed", "passed", "failed"), "assert 1", 1),
        (False, ("skipped", "passed", "passed"), "", 5),  # no pass: nothing ran
        (True, ("passed", "failed", "passed"), "assert 1", 0),
        (True, ("passed", "passed", "failed"), "AssertionError: races", 0),
        (True, ("passed", "failed", "passed"), "infinity.errors.NonFiniteGradient: x", 0),
        (True, ("passed", "failed", "passed"), "AttributeError: a name has moved", 1),
        (True, ("passed", "passed", "passed"), "", 1),
    ],
)
def test_the_status_of_a_run_says_what_ran(
    must_fail: bool, outcomes: tuple[str, ...], why: str, status: int, bench: Any
) -> None:
    lines = bench("pytest_lines").Lines(Config(must_fail=must_fail))
    for report in reports(*outcomes, why=why):
        lines.pytest_runtest_logreport(report)
    session = types.SimpleNamespace(exitstatus=int("failed" in outcomes))
    lines.pytest_sessionfinish(session, session.exitstatus)
    assert session.exitstatus == status


@pytest.mark.parametrize("unordered", [False, True])
def test_units_are_late_and_copies_that_wait_for_nothing_are_seen(
    unordered: bool, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of the engine that the plugin patches are those of today."""
    raced = pytest.raises(AssertionError) if unordered else contextlib.nullcontext()
    late = bench("pytest_late").patched(monkeypatch, 0, unordered=unordered)
    with raced, simulated(monkeypatch):
        model = inf.offload(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))))
        inf.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 8)).sum().backward()
        inf.handle(model).close()
    assert late.count >= 2  # forward and backward


@pytest.fixture
def bundle(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle with one package and an extension, for a tree in tmp_path."""
    prepare = bench("prepare")
    monkeypatch.setattr(prepare, "SITE", tmp_path / "site" / prepare.SITE.name)
    monkeypatch.setattr(prepare, "DIGEST", tmp_path / "site" / prepare.DIGEST.name)
    monkeypatch.setattr(prepare, "EXTENSION", tmp_path / "tree" / "_native.abi3.so")
    (tmp_path / "tree").mkdir()
    made = tmp_path / "bundle"
    (made / "wheels").mkdir(parents=True)
    (made / "_native.abi3.so").write_bytes(b"an extension")
    about = "infinity_bundled-1.0.dist-info"
    with zipfile.ZipFile(made / "wheels" / "infinity_bundled-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("infinity_bundled.py", "there = True\n")
        named = "Metadata-Version: 2.1\nName: infinity-bundled\nVersion: 1.0\n"
        tagged = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{about}/METADATA", named)
        wheel.writestr(f"{about}/WHEEL", tagged)
        wheel.writestr(f"{about}/RECORD", "")
    files = [path for path in made.rglob("*") if path.is_file()]
    manifest = {
        "native": prepare.native_digest(),
        "pythons": bench("bundle").PYTHONS,
        "packages": bench("bundle").PACKAGES,
        "files": {str(path.relative_to(made)): prepare.file_digest(path) for path in files},
    }
    (made / "manifest.json").write_text(json.dumps(manifest))
    return made


def test_every_package_that_the_project_needs_is_given_or_in_the_bundle(bench: Any) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = text[text.index("\ndependencies = [") : text.index("[project.optional-dependencies]")]
    wanted = set(re.findall(r"""^    ["']([\w-]+)""", listed, flags=re.MULTILINE))
    assert "torch" in wanted
    prepare = bench("prepare")
    assert wanted <= {*prepare.WHEELS.values(), *prepare.GIVEN}


# -- the benchmarks --------------------------------------------------------------------------------


def test_the_probe_asks_the_driver_and_says_what_it_cannot_ask(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = bench("probe")
    found: list[dict[str, Any]] = []

    def broken(_device: str, _gpu: Any) -> dict[str, Any]:
        raise RuntimeError("it broke")

    monkeypatch.setitem(probe.PARTS, "waiting", broken)
    with bench("accelerator").computing("simulated"):
        ends = probe.probe("simulated", list(probe.PARTS), found.append)
    by_name = dict(zip(probe.PARTS, ends, strict=True))
    assert by_name == {
        "versions": "", "attributes": "not run", "pinned read": "not run", "waiting": "failed",
        "copies": "", "allocator": "not run", "pinning": "",
    }  # fmt: skip
    assert [one["part"] for one in found] == list(probe.PARTS)
    (rows,) = (one["found"]["rows"] for one in found if one["part"] == "copies")
    assert {(row["way"], row["piece_kib"]) for row in rows} == {
        (way, kib) for way in ("to", "from") for kib in (16, 64)
    }
    assert all(row["us_per_wait"] > 0 for row in rows if row["in_flight"] == 1)


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
    given_ = f"--device cpu --dir {tmp_path} --results {results} --arms cpu,deepspeed"
    of_steps = "--tokens 32 --rounds 1 --steps 2"
    done = subprocess.run(
        [sys.executable, str(GPU / "train.py"), *f"{given_} {of_steps}".split()],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True,
        check=False, timeout=200,
    )  # fmt: skip
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
