"""The ten commands of bench/gpu, without a GPU: they say what did not run, never that it passed,
and what they learned is there when they are cut off."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.device import simulated

ROOT = Path(__file__).parents[3]
GPU = ROOT / "bench" / "gpu"
COMMANDS = sorted(path.stem for path in GPU.glob("f[0-9][0-9]_*.py"))
NAMES = (*(path.stem for path in GPU.glob("*.py")), "harness")
WAIT_S = 60.0
BUNDLE_BYTES = 16 << 20  # it has 11 MiB


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Gives a script by its name, imported as scripts import each other."""
    monkeypatch.syspath_prepend(str(GPU))
    monkeypatch.syspath_prepend(str(GPU.parent))
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)


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


def test_there_are_ten_in_the_order_of_their_value() -> None:
    assert [name[:3] for name in COMMANDS] == [f"f{number:02}" for number in range(1, 11)]


@pytest.mark.parametrize("device", ["cuda", "simulated", "cpu"])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_step_is_a_script_with_a_limit(
    name: str, device: str, bench: Any, tmp_path: Path
) -> None:
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


def test_the_limits_of_all_commands_are_below_eight_minutes(bench: Any) -> None:
    """`stage.main` refuses others when a command begins; here all are seen."""
    for name in COMMANDS:
        last = (GPU / f"{name}.py").read_text().rpartition("stage.main(__file__, __doc__, ")[2]
        assert float(last.split(",")[0]) <= bench("stage").COMMAND_S_MAX == 480


@pytest.mark.parametrize("name", ["f05_gpu_tests", "f08_train"])
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
    """And no process: the tests' own is told by the kernel."""
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


def test_a_step_that_takes_too_long_is_ended_and_the_next_one_runs(
    bench: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, run = run_of(bench, "f02_first_training", tmp_path, "cpu", "--seconds", "30")
    stage = bench("stage")
    kill_group = bench("harness").kill_group

    def hung(process: Any, timeout_s: float) -> None:
        kill_group(process)
        raise subprocess.TimeoutExpired("it", timeout_s)

    with monkeypatch.context() as patch:  # a process in a driver's call that hangs
        patch.setattr(bench("harness"), "kill_group", hung)
        run.step(stage.Step("hung", ["sh", "-c", "exec sleep 600"], 1.0))
    assert "was killed 10 s ago and has not ended" in capfd.readouterr().out
    monkeypatch.setattr(stage, "LOG_BYTES_MAX", (tmp_path / "log.txt").stat().st_size + 100)
    run.step(stage.Step("long", ["sh", "-c", "echo begun; exec sleep 600"], 1.0))
    run.step(stage.Step("short", ["sh", "-c", "echo 'ERROR SUMMARY: 0'; exit 3"], 5.0, find="ERR"))
    run.step(stage.Step("tests", ["sh", "-c", "exit 5"], 5.0, pytest=True))
    run.step(stage.Step("inside pytest", ["sh", "-c", "exit 3"], 5.0, pytest=True))
    run.step(stage.Step("missing", ["/nowhere/program"], 5.0))
    told = ["sh", "-c", "echo TOLD $0 $1"]
    run.step(stage.Step("told", told, 20.0, find="TOLD", closing_s=8.0))
    assert run.statuses == [124, 124, 3, 3, 1, 127, 0]
    steps = records(tmp_path, "stage")
    assert [one.get("found") for one in steps[2:]] == [
        ["ERROR SUMMARY: 0"], None, None, None, ["TOLD --seconds 12"],
    ]  # fmt: skip
    log = (tmp_path / "log.txt").read_text()
    assert "begun\n" in log
    assert "\nTOLD" not in log  # the log was as large as it may become
    assert "NOT RUN: f02_first_training/tests: no test ran" in capfd.readouterr().out


# -- the calls -------------------------------------------------------------------------------------


def test_three_calls_run_all_ten_each_within_ten_minutes(bench: Any) -> None:
    call, stage = bench("call"), bench("stage")
    assert list(call.CALLS) == [1, 2, 3]
    assert sorted(one.name for number in call.CALLS for one in call.CALLS[number]) == COMMANDS
    for commands in call.CALLS.values():
        assert stage.PREPARE_S + sum(one.share_s for one in commands) <= call.CALL_S
    # Late commands are ended, then killed.
    assert call.CALL_S + stage.GRACE_S + stage.KILL_S <= 590


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("seconds", "takes", "given"),
    [
        (60, (99, 99, 99), (10, 20, 30)),  # each hangs: to its limit, and the next has its own
        (30, (99, 99, 99), (5, 10, 15)),  # less time than limits: shares of it
        (30, (1, 99, 99), (5, 14, 15)),  # what one leaves goes to the next,
        (30, (1, 2, 99), (5, 14, 27)),  # and on
        (30, (0, 0, 99), (5, 15, 30)),
    ],
)
@pytest.mark.parametrize("what", ["steps", "commands"])
def test_none_takes_the_share_of_a_later_one(
    what: str,
    seconds: float,
    takes: tuple[float, ...],
    given: tuple[float, ...],
    bench: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, call, clock, found = bench("stage"), bench("call"), Clock(), []
    for module in (stage, call):
        monkeypatch.setattr(module, "time", clock)

    def spend(limit_s: float) -> int:
        found.append(limit_s)
        clock.now_s += min(limit_s, takes[len(found) - 1])
        return 0

    if what == "steps":
        _, run = run_of(bench, "f02_first_training", tmp_path, "cpu", "--seconds", str(seconds))
        steps = [stage.Step(str(limit), ["true"], limit) for limit in (10, 20, 30)]
        for step in stage._in_shares(
            run, [steps[0], stage.Step("no", [], 99, why_not="no"), *steps[1:]]
        ):
            if not step.why_not:
                spend(step.limit_s)
    else:
        made = call.Call(call.parse(["1", "--out", str(tmp_path), "--seconds", str(seconds)]))
        monkeypatch.setattr(
            made, "command", lambda _, kept_s: spend(made.until_s - clock.now_s - kept_s)
        )
        made.commands([call.Command(str(share), share) for share in (10, 20, 30)])
    assert tuple(found) == pytest.approx(given)
    assert clock.now_s <= seconds


def test_a_command_that_hangs_or_dies_costs_its_own_results_only(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, stage = bench("call"), bench("stage")
    scripts = {
        "hangs": "import time; time.sleep(600)",
        "dies": "import os; os.kill(os.getpid(), 9)",
        "tells": "import sys; print('TOLD', *sys.argv[1:]); sys.exit(3)",
    }

    def script(_run: Any, name: str, *arguments: object) -> list[str]:
        return [sys.executable, "-c", scripts[name.removesuffix(".py")], *map(str, arguments)]

    monkeypatch.setattr(stage.Run, "script", script)
    monkeypatch.setattr(call, "CLOSING_S", 0.0)
    made = call.Call(call.parse(["1", "--dry", "--out", str(tmp_path), "--seconds", "8"]))
    commands = [
        call.Command(name, share, "a test") for name, share in zip(scripts, (1, 3, 4), strict=True)
    ]
    assert made.commands(commands) == [124, -9, 3]
    assert [stage.together(some) for some in ([0], [0, 3], [3, -9], [124, 3])] == [0, 3, 1, 1]
    assert "hangs did not end in 1 s" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_dry_call_selects_a_few_of_the_tests(number: int, bench: Any) -> None:
    """`make gpu-dry` runs them, and fails where a selection finds none."""
    for one in bench("call").CALLS[number]:
        text = (GPU / f"{one.name}.py").read_text()
        assert bool(one.dry) == ("run.pytest(" in text), one.name


def test_without_a_gpu_a_call_says_that_it_did_not_run(tmp_path: Path) -> None:
    process = command("call", tmp_path, 2, CUDA_VISIBLE_DEVICES="")
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 3, output
    assert "NOT RUN: call 2: " in output


def test_a_rehearsal_says_what_is_wrong(bench: Any, tmp_path: Path) -> None:
    rehearse, call, outs = bench("rehearse"), bench("call"), []
    for number, commands in call.CALLS.items():
        out = tmp_path / f"call-{number}"
        outs.append(out)
        ends: list[dict[str, Any]] = [
            {"script": "command", "name": one.name, "state": "ended", "status": 0}
            for one in commands
        ]
        ends += [
            {"script": "tests", "suite": f"{one.name}/a", "test": "t", "outcome": end, "why": "w"}
            for one in commands
            for end in ("skipped", "passed")
            if one.dry and one.name != "f04_sanitizer"
        ]
        ends.append({"script": "stage", "name": "f04_sanitizer/memcheck", "why": "there is none"})
        out.mkdir()
        (out / "results.jsonl").write_text("\n".join(map(json.dumps, ends)))
    assert rehearse.faults(outs, [0, 3, 0]) == []
    assert rehearse.faults(outs, [0, 1, 124]) == ["call 2 ended with 1", "call 3 ended with 124"]
    text = (outs[0] / "results.jsonl").read_text()
    (outs[0] / "results.jsonl").write_text(text.replace('"passed"', '"skipped"'))
    nothing = rehearse.faults(outs, [0, 3, 0])
    assert nothing == [f"{COMMANDS[1]} ran no test: -k 'many_steps and threads' finds none"]
    (outs[0] / "results.jsonl").write_text(text)
    (outs[2] / "results.jsonl").write_text("")
    missing = [f"{one.name} did not end" for one in call.CALLS[3]]
    assert rehearse.faults(outs, [0, 3, 0]) == missing
    with (outs[0] / "trace").open("wb") as file:
        file.truncate(rehearse.FILE_BYTES_MAX + 1)
    assert f"{outs[0]} has 2 files; too large: ['trace']" in rehearse.faults(outs, [0] * 3)


# -- what a machine may lack -----------------------------------------------------------------------


def test_a_missing_program_is_told_and_fails_nothing(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(bench("f01_smoke"), "BESIDE_THE_DRIVER", str(tmp_path))
    monkeypatch.setattr(bench("f04_sanitizer"), "PLACES", ())
    wanted = {
        "f01_smoke": {"nvidia-smi": "no nvidia-smi", "query": "no nvidia-smi"},
        "f04_sanitizer": {"memcheck": "no compute-sanitizer"},
        "f06_kernels": {"kernels": "no CC, gcc or clang"},
        "f10_operations": {"update": "no CC, gcc or clang"},
    }
    for name, reasons in wanted.items():
        module, run = run_of(bench, name, tmp_path, "cuda")
        found = {step.name: step.why_not for step in module.steps(run)}
        assert all(why in found[step] for step, why in reasons.items()), found
    monkeypatch.setenv("CC", "cc")
    stage = bench("stage")
    monkeypatch.setattr(stage.sysconfig, "get_paths", lambda **_: {"include": str(tmp_path)})
    assert stage.no_compiler().endswith(f"there is no {tmp_path / 'Python.h'}")
    (tmp_path / "Python.h").touch()
    assert stage.no_compiler() == ""


@pytest.mark.parametrize(
    ("arguments", "groups"),
    [
        ((), {"ram": "cpu,fsdp2", "drive": "nvme"}),
        (("--arms", "nvme"), {"drive": "nvme"}),
        (("--arms", "fsdp2,deepspeed,cpu"), {"ram": "fsdp2,deepspeed,cpu"}),
        (("--sizes", "largest"), {"drive": "nvme"}),
    ],
)
def test_a_slow_drive_costs_the_arms_in_ram_nothing(
    arguments: tuple[str, ...], groups: dict[str, str], bench: Any, tmp_path: Path
) -> None:
    module, run = run_of(bench, "f08_train", tmp_path, "cuda", "--ram", "99", *arguments)
    steps = {step.name: list(step.command) for step in module.steps(run)}
    assert {name: words[words.index("--arms") + 1] for name, words in steps.items()} == groups
    assert all(words[words.index("--ram") + 1] == "99" for words in steps.values())


# -- the plugins -----------------------------------------------------------------------------------


TESTS = """
import pytest
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("number", [1, 2])
def test_of_a_device(device, number):
    assert number == 1
def test_skipped():
    pytest.skip("there is none")
"""


def test_a_run_leaves_a_line_per_test_of_its_device(tmp_path: Path) -> None:
    (tmp_path / "test_these.py").write_text(TESTS)
    lines = tmp_path / "lines.jsonl"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_lines"),
            *("--rootdir", str(tmp_path), "-c", os.devnull, "--lines", str(lines), "--on", "cuda"),
            *("--must-fail", "test_these.py"),
        ],
        env={**os.environ, "PYTHONPATH": str(GPU), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    assert done.returncode == 1, done.stdout
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert {one["test"].rpartition("::")[2]: one["outcome"] for one in found} == {
        "test_of_a_device[1-cuda]": "failed",  # it passed, and must not
        "test_of_a_device[2-cuda]": "passed",
        "test_skipped": "skipped",
    }
    assert len(found) == 6


class Config:
    """As much of pytest's as the plugin asks for."""

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


@pytest.mark.parametrize(("delayed", "status"), [(3, 0), (0, 1)])
def test_a_run_in_which_nothing_was_late_fails(delayed: int, status: int, bench: Any) -> None:
    late = bench("pytest_late")
    total = late._Total()
    for report in reports("passed", "passed", "passed"):
        report.user_properties.append((late.DELAYED, delayed))
        total.pytest_runtest_logreport(report)
    session = types.SimpleNamespace(exitstatus=0)
    total.pytest_sessionfinish(session)
    assert session.exitstatus == status
    assert (total.ran, total.delayed) == (1, delayed)


@pytest.mark.parametrize("unordered", [False, True])
def test_units_are_late_and_copies_that_wait_for_nothing_are_seen(
    unordered: bool, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of the engine that the plugin patches are those of today."""
    inf, torch = pytest.importorskip("infinity"), pytest.importorskip("torch")
    raced = pytest.raises(AssertionError) if unordered else contextlib.nullcontext()
    late = bench("pytest_late").patched(monkeypatch, 0, unordered=unordered)
    with raced, simulated(monkeypatch):
        model = inf.offload(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))))
        inf.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 8)).sum().backward()
        inf.handle(model).close()
    assert late.count >= 2  # forward and backward


def test_on_a_gpu_the_stream_sleeps_behind_each_unit(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    slept: list[tuple[str, int]] = []

    class On:
        def __init__(self, device: Any) -> None:
            self.device = device

        def __enter__(self) -> None:
            slept.append((str(self.device), 0))

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: slept.append(("sleep", cycles)))
    made = bench("pytest_late")._Late(77)
    made.delay(torch.device("cuda:1"))
    assert (slept, made.count) == ([("cuda:1", 0), ("sleep", 77)], 1)


# -- the probe and the copies on the simulated device ----------------------------------------------


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


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_of_gradients_in_pageable_memory_are_not_timed(
    pinned: bool, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that no optimizer holds have memory of their own: their figures would be void."""
    copies, accelerator = bench("copies"), bench("accelerator")
    with accelerator.computing("simulated") as device:
        way = copies.Way("from the device", device, 64, 3)
        if not pinned:
            pageable = pytest.importorskip("torch").empty(64)
            monkeypatch.setattr(way, "_gradients", lambda: [pageable])
        try:
            if pinned:
                assert way.seconds()[1:] == (0, 3 * 64 * 64 * 2)
                assert len(way._gradients()) == 3
            else:
                with pytest.raises(accelerator.harness.BenchError, match="pageable"):
                    way.seconds()
        finally:
            way.close()


# -- the bundle ------------------------------------------------------------------------------------


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


def test_what_is_missing_is_installed_from_the_bundle_alone(
    bench: Any, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = bench("prepare")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(prepare, "WHEELS", {"infinity_bundled": "infinity_bundled", "json": "json"})
    monkeypatch.setattr(prepare, "OLD_PYTHON", {})
    monkeypatch.setattr(prepare, "check", dict)
    assert not prepare.is_ready()
    assert prepare.lacking(prepare.SITE) == ["infinity_bundled"]
    # Neither the site of another Python, whose extensions do not load here, nor what was left by an
    # installation that was cut off.
    assert prepare.SITE.name == sysconfig.get_config_var("SOABI")
    mine, other = prepare.SITE, prepare.SITE.with_name("cpython-39-x86_64-linux-gnu")
    left = mine.with_name(f"{mine.name}.part")
    for site in (other, left):
        site.mkdir(parents=True)
        (site / "infinity_bundled.py").touch()
    prepare.place_extension(bundle)
    assert not prepare.is_ready()
    prepare.prepare(bundle)
    assert prepare.is_ready()
    assert not left.exists()
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "SITE", other)
        assert prepare.is_ready()  # each of two Pythons keeps its own
        assert (other / "infinity_bundled.py").read_text() == ""
    assert (mine / "infinity_bundled.py").read_text() == "there = True\n"
    assert prepare.EXTENSION.read_bytes() == b"an extension"
    # Sources that change make an extension that came from a bundle old; one built here stays.
    prepare.DIGEST.write_text("of other sources")
    assert not prepare.is_ready()
    prepare.DIGEST.unlink()
    assert prepare.is_ready()


@pytest.mark.parametrize(
    ("name", "version", "older"),
    [
        ("torch", "2.11.0+cu130", False), ("torch", "2.10.1", True), ("triton", "3.6.0", False),
        ("transformers", "5.17.0", False), ("transformers", "4.57.1", True),
        ("numpy", "2.5.2", False), ("numpy", "2.3.0rc1", True), ("pytest", "7.0", False),
    ],
)  # fmt: skip
def test_a_release_older_than_any_that_was_tried_is_told(
    name: str, version: str, older: bool, bench: Any
) -> None:
    assert bool(bench("prepare").untried(name, version)) == older


def test_tree_and_bundle_are_below_what_travels(bench: Any, bundle: Path, tmp_path: Path) -> None:
    made = bench("bundle")
    tree = made.tree()
    assert ROOT / "infinity" / "aio" in tree  # a link, as one
    assert made.size_bytes(tree) < made.LIMIT_BYTES - BUNDLE_BYTES
    assert made.too_large(tree) == ""
    files = made.files_of(bundle)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(3 << 20)
    why = made.too_large([*files, tmp_path / "large"], 2 << 20)
    assert "3.0 MiB together, more than the 2 MiB that travel" in why
    assert why.partition("in MiB: ")[2].startswith(f"{tmp_path / 'large'} 3.0, ")


@pytest.mark.parametrize("name", ["PACKAGES", "PYTHONS"])
def test_a_bundle_of_other_sources_pythons_or_packages_is_made_anew(
    name: str, bench: Any, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bench("bundle")
    assert made.is_current(bundle)
    assert not made.is_current(bundle / "nowhere")
    monkeypatch.setattr(made, name, [*getattr(made, name), "one-more"])
    assert not made.is_current(bundle)


def test_what_the_preparation_imports_is_there(bench: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", bench("prepare").CHECK, "torch,numpy"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    assert set(json.loads(done.stdout)) == {"torch", "numpy"}


def test_what_was_installed_does_not_hide_what_is_installed_again(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of packages that lacks one is made anew with all of them."""
    prepare = bench("prepare")
    (tmp_path / "there.py").touch()
    monkeypatch.setattr(prepare, "SITE", tmp_path)
    monkeypatch.setattr(prepare, "WHEELS", {"there": "there", "missing": "missing"})
    monkeypatch.setattr(prepare, "OLD_PYTHON", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert prepare.lacking(tmp_path) == ["missing"]
    assert prepare.lacking() == ["there", "missing"]


def test_a_python_without_pip_is_told_so(
    bench: Any, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = bench("prepare")
    monkeypatch.setattr(prepare, "has", lambda module, *_: module != "pip")
    with pytest.raises(prepare.Unready, match=r"no pip to install bundled.*-m ensurepip"):
        prepare.install(bundle, ["bundled"])


@pytest.mark.parametrize(
    ("status", "there", "ready"),
    [(0, True, True), (124, True, True), (124, False, False), (1, True, False)],
)
def test_a_check_that_was_cut_off_costs_nothing_more(
    status: int,
    there: bool,
    ready: bool,
    bench: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first imports of a fresh machine come from a slow drive."""
    _, run = run_of(bench, "f02_first_training", tmp_path, "cpu")
    asked = iter([False, there])
    monkeypatch.setattr(bench("prepare"), "is_ready", lambda: next(asked))
    monkeypatch.setattr(run, "step", lambda _step: run.statuses.append(status))
    assert run.is_ready() == ready


def test_a_bundle_that_is_not_whole_is_refused(bench: Any, bundle: Path, tmp_path: Path) -> None:
    prepare = bench("prepare")
    with pytest.raises(prepare.Unready, match="run `make gpu-bundle`"):
        prepare.install(tmp_path / "nothing", ["infinity_bundled"])
    (bundle / "_native.abi3.so").write_bytes(b"an ext")
    with pytest.raises(
        prepare.Unready, match=r"_native\.abi3\.so is missing or not as it was made"
    ):
        prepare.place_extension(bundle)


def test_every_package_that_the_project_needs_is_given_or_in_the_bundle(bench: Any) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = text[text.index("\ndependencies = [") : text.index("[project.optional-dependencies]")]
    wanted = set(re.findall(r"""^    ["']([\w-]+)""", listed, flags=re.MULTILINE))
    assert "torch" in wanted
    prepare = bench("prepare")
    assert wanted <= {*prepare.WHEELS.values(), *prepare.GIVEN}


def test_a_missing_driver_is_a_reason_not_a_fault(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = bench("stage")

    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert stage.no_gpu() == "this machine has no libcuda.so.1"
