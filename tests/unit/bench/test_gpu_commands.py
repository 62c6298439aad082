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
    assert all(0 < step.limit_s <= 480 for step in steps)
    for step in steps:
        files = [word for word in step.command if word.endswith(".py") or word == "tests/gpu"]
        assert all((ROOT / file).exists() for file in files), step.command
        if step.pytest:
            words = list(step.command)
            assert words[words.index("--on") + 1] == device
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
    bench: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, run = run_of(bench, "f02_first_training", tmp_path, "cpu", "--seconds", "30")
    stage = bench("stage")
    run.step(stage.Step("long", ["sh", "-c", "echo begun; exec sleep 600"], 1.0))
    run.step(stage.Step("short", ["sh", "-c", "echo 'ERROR SUMMARY: 0'; exit 3"], 5.0, find="ERR"))
    run.step(stage.Step("tests", ["sh", "-c", "exit 5"], 5.0, pytest=True))
    run.step(stage.Step("inside pytest", ["sh", "-c", "exit 3"], 5.0, pytest=True))
    run.step(stage.Step("missing", ["/nowhere/program"], 5.0))
    assert run.statuses == [124, 3, 3, 1, 127]
    assert records(tmp_path, "stage")[1]["found"] == ["ERROR SUMMARY: 0"]
    assert "begun\n" in (tmp_path / "log.txt").read_text()
    assert "NOT RUN: f02_first_training/tests: no test ran" in capfd.readouterr().out


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
    monkeypatch.setattr(prepare, "SITE", tmp_path / "site")
    monkeypatch.setattr(prepare, "DIGEST", tmp_path / "site" / "native.digest")
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
    assert prepare.lacking() == ["infinity_bundled"]
    prepare.prepare(bundle)
    assert prepare.is_ready()
    assert (prepare.SITE / "infinity_bundled.py").read_text() == "there = True\n"
    assert prepare.EXTENSION.read_bytes() == b"an extension"
    # Sources that change make an extension that came from a bundle old; one built here stays.
    prepare.DIGEST.write_text("of other sources")
    assert not prepare.is_ready()
    prepare.DIGEST.unlink()
    assert prepare.is_ready()


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
