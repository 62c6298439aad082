"""`infinity train` that is killed, and resumes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import resource
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from safetensors.torch import load_file

from infinity._src.checkpoint import save
from infinity._src.checkpoint.directory import (
    DirectoryLock,
    file_name,
    newest_generation,
    write_attachment,
)
from infinity._src.checkpoint.durable import initialization
from infinity._src.checkpoint.formats.safe_pickle import extra_bytes
from infinity._src.cli import stop_signals
from infinity._src.cli import train as command
from infinity._src.cli.corpus import Corpus
from infinity._src.cli.main import build_parser
from infinity._src.cli.resume import SmallState, Source, find_source
from infinity._src.cli.stop_signals import NUMBERS, name_of
from infinity._src.engine import handle as engine
from infinity._src.measure.swap import SwapTask, measure_swap
from infinity.aio import Fault, Seam
from infinity.errors import AioError, StepUndone
from tests import forks
from tests.harness import assert_same
from tests.marks import mostly_slow
from tests.places import place_in
from tests.reading import Counted
from tests.tiny_llama import TEXT, write_model
from tests.unit.checkpoint.test_manifest import encoded, manifest
from tests.unit.cli import commands

STEPS = 6
WEIGHTS_BYTES = 2 * (127_488 + 257 * 64)
"""Bytes of the model's tensors."""
KILLED_IN = 5
"""The step whose record is the last that the killed process writes."""


def measured_in_no_time(task: SwapTask) -> Any:
    return measure_swap(dataclasses.replace(task, size_bytes=32 << 20, rounds=1, phase_s=0.01))


pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture(autouse=True, scope="module")
def _drives_are_measured_in_no_time() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "measure_swap", measured_in_no_time)
        yield


def train(arguments: list[str]) -> tuple[int, str]:
    return commands.run(command.run_train, "train", *arguments)


def train_until_killed(arguments: list[str]) -> None:
    """Kill this process, as the kernel kills one for memory, when a step has been recorded."""
    torch.set_num_threads(1)
    add = command.MetricsFile.add

    def counted(self: Any, kind: str, record: dict[str, Any]) -> None:
        add(self, kind, record)
        if kind == "step" and record["step"] == KILLED_IN:
            os.kill(os.getpid(), signal.SIGKILL)

    command.MetricsFile.add = counted  # type: ignore[method-assign]
    command.measure_swap = measured_in_no_time
    train(arguments)


def train_until_killed_in_the_fill(arguments: list[str]) -> None:
    """Kill this process when most of the model's bytes were read."""
    torch.set_num_threads(1)
    initialization.NOTE_EVERY_S = 0
    command.measure_swap = measured_in_no_time
    with Counted(WEIGHTS_BYTES * 3 // 4, kills=True):
        train(arguments)


def killed(target: Any, arguments: list[str]) -> None:
    process = forks.FORKSERVER.Process(target=target, args=(arguments,))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def records(out: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with dropout, so that a step depends on the random generator, and without tied
    weights, so that either order of micro-batches has the same bits; its text, and the results of a
    run that nothing disturbs.
    """
    found = tmp_path_factory.mktemp("place")
    directory = found / "model"
    directory.mkdir()
    write_model(directory, tied=False)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    (found / "text.txt").write_text(TEXT)
    status, shown = train([*common(found), "--out", str(found / "whole")])
    assert status == 0, shown
    return found


def common(place: Path) -> list[str]:
    given = "--steps 6 --batch 2 --seq 32 --lr 3e-3 --warmup 2 --accumulate 2 --eval-every 3"
    more = "--eval-batches 1 --no-trace --prompt In --prompt-tokens 2 --dtype bfloat16"
    return [
        *map(str, (place / "model", "--text", place / "text.txt")),
        *given.split(),
        *more.split(),
    ]


def on_drive(place: Path, tmp_path: Path, *more: str) -> tuple[Path, list[str]]:
    """The arguments of a run with all states on a drive and the least memory, and its --out."""
    out, drive = tmp_path / "out", tmp_path / "drive"
    drive.mkdir(exist_ok=True)
    on_nvme = f"--params nvme --optim nvme --nvme {drive} --ram min".split()
    return out, [*common(place), "--out", str(out), *on_nvme, *more]


def is_whole(place: Path, out: Path) -> None:
    """Check that a run has the results of the one that nothing disturbed."""
    for kind, names in (("step", ("step", "loss", "lr", "grad_norm")), ("held_out", ("loss",))):
        rows, whole = (
            [[row[name] for name in names] for row in records(each, kind)]
            for each in (out, place / "whole")
        )
        assert rows == whole
    (ours, theirs) = [records(each, "summary")[0] for each in (out, place / "whole")]
    assert ours["held_out"] == theirs["held_out"]
    assert ours["texts"] == theirs["texts"]
    same_weights(place, out)


def same_weights(place: Path, out: Path) -> None:
    ours, theirs = (load_file(each / "model.safetensors") for each in (out, place / "whole"))
    assert_same(ours, theirs)


@pytest.mark.parametrize("kept", ["durable", "saved"])
def test_a_killed_run_goes_on_to_the_same_bits(place: Path, tmp_path: Path, kept: str) -> None:
    out, arguments = on_drive(place, tmp_path, "--durable")
    if kept == "saved":
        arguments = [*common(place), "--out", str(out), "--save-every", "2"]
    killed(train_until_killed, arguments)
    assert [row["step"] for row in records(out, "step")] == [1, 2, 3, 4, 5]
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # a line that the kill tore

    status, shown = train(arguments)
    assert status == 2
    assert "continue it by --resume" in shown
    source = tmp_path / "drive" / "infinity-run" if kept == "durable" else out / "checkpoint"
    before = contents(source)
    status, shown = train([*arguments, "--resume", "--state", "bf16"])
    assert status == 2
    assert "--state was exact and is bf16. Give" in shown
    assert contents(source) == before
    with damaged(source) as file:
        status, shown = train([*arguments, "--resume"])
        assert status == 1
        assert f"{file}" in shown
    # The failed attempt replaced nothing, and the model's files are not read, since the restore has
    # all values.
    with Counted() as counted:
        status, shown = train([*arguments, "--resume", "--schedule", "horizontal"])
    assert status == 0, shown
    assert counted.bytes == 0
    # Step 5 was submitted, and not committed. The save of step 4 may have been under way.
    goes_on = [4] if kept == "durable" else [2, 4]
    (committed,) = (step for step in goes_on if f"continuing after step {step}, from" in shown)

    is_whole(place, out)
    assert [row["goes_on_after"] for row in records(out, "run")] == [0, committed]

    if kept == "durable":
        return
    # A run that has ended does so again, and its records stay.
    status, shown = train([*arguments, "--resume"])
    assert status == 0, shown
    assert f"earlier processes have taken all {STEPS} steps" in shown
    assert len(records(out, "summary")) == 1
    status, shown = train([*arguments, "--resume", "--lr", "1", "--seed", "5"])
    assert status == 2
    assert "--lr was 0.003 and is 1.0; --seed was 0 and is 5" in shown


@pytest.mark.parametrize("kept", mostly_slow(["--generations=2", "--durable"], "--durable"))
def test_a_step_that_a_fault_undoes_is_taken_again(
    place: Path, tmp_path: Path, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, arguments = on_drive(place, tmp_path, kept)
    add, struck = command.MetricsFile.add, []

    def counted(self: Any, kind: str, record: dict[str, Any]) -> None:
        add(self, kind, record)
        # The third evaluates, and the last is undone by the end of training.
        if kind == "step" and record["step"] in (2, 3, STEPS) and record["step"] not in struck:
            struck.append(record["step"])
            (handle,) = engine._OPEN
            handle.parts.tiers.executor.set_seam(Seam(fault=Fault("write", 1, lasting=True)))

    monkeypatch.setattr(command.MetricsFile, "add", counted)
    status, shown = train(arguments)
    assert status == 0, shown
    assert struck == [2, 3, STEPS]
    assert shown.count("is taken again: ") >= 2
    is_whole(place, out)


def lose(
    monkeypatch: pytest.MonkeyPatch, part: tuple[Any, str], calls: Sequence[int], section: int
) -> list[int]:
    """Make the present place of a chunk's section unreadable when one of these calls of a part of
    the command begins. Returns a list to which such calls add their numbers."""
    count, struck = 0, list[int]()
    original = getattr(*part)

    def called(*given: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        if count in calls:
            struck.append(count)
            (handle,) = engine._OPEN
            # Nothing is pending: the place is that of the last step.
            handle.flush()
            # A unit that the pass before has not read ahead.
            place = place_in(handle, section, unit=3)
            start, stop = place.offset, place.offset + 4096
            fault = Fault("read", 0, persistent=True, start=start, stop=stop)
            handle.parts.tiers.executor.set_seam(Seam(fault=fault))
        return original(*given, **more)

    monkeypatch.setattr(*part, called)
    return struck


ENDS: list[tuple[tuple[Any, str], list[int]]] = [
    ((command._Run, "_measure_held_out"), [2]),
    ((command._Run, "_continue"), [2]),
    ((command.hf_model, "save_pretrained"), [1]),
]
"""Parts of the command that run after steps, and the call that follows the third step, or the last.
A part that raises a fault is called again. A third fault in a row would end the run."""


def test_a_fault_after_the_last_step_takes_it_again(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, arguments = on_drive(place, tmp_path, "--generations=2")
    struck = [lose(monkeypatch, *part, section=0) for part in ENDS]
    status, shown = train(arguments)
    assert status == 0, shown
    assert struck == [calls for _, calls in ENDS]
    told = re.findall(r"step (\d) is taken again: a unit cannot be read", shown)
    assert told == ["3", "6", "6"]
    is_whole(place, out)


def wait_for_saves(monkeypatch: pytest.MonkeyPatch, *, good_again: bool = False) -> None:
    """Let each save end before training continues: a save of a longer pass has read all states
    before the next step writes. good_again: no request fails after the save."""
    begin = command._Run._begin_save

    def ended(run: Any, step: int) -> None:
        begin(run, step)
        run.save._ended.wait()
        if good_again:
            run.handle.parts.tiers.executor.set_seam(Seam())

    monkeypatch.setattr(command._Run, "_begin_save", ended)


def test_a_save_that_is_the_first_to_meet_damage_takes_the_step_again(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out, arguments = on_drive(place, tmp_path, "--generations=2", "--save-every=2")
    wait_for_saves(monkeypatch)
    # The saves of steps 2, 4, 4 again, 6 and 6 again. Moments, which no gather reads.
    struck = lose(monkeypatch, (command._Run, "_begin_save"), [2, 4], section=2)
    status, shown = train(arguments)
    assert status == 0, shown
    assert struck == [2, 4]
    assert re.findall(r"step (\d) is taken again: a unit cannot be read", shown) == ["4", "6"]
    for step in (4, 6):
        assert caplog.text.count(f"no checkpoint of step {step} was written: chunk ") == 1
    is_whole(place, out)
    assert newest_generation(out / "checkpoint")[0].step == STEPS


def test_a_save_that_fails_is_told_of_and_made_up_for(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one generation no step is undone. Here the step after the save writes all values again.
    """
    out, arguments = on_drive(place, tmp_path, "--save-every=2")
    wait_for_saves(monkeypatch, good_again=True)
    struck = lose(monkeypatch, (command._Run, "_begin_save"), [2], section=2)
    status, shown = train(arguments)
    assert struck == [2]
    assert status == 0, shown
    assert caplog.text.count("no checkpoint of step 4 was written: chunk ") == 1
    is_whole(place, out)
    assert newest_generation(out / "checkpoint")[0].step == STEPS


@contextlib.contextmanager
def no_file_grows(_run: Any) -> Iterator[None]:
    """Have every write fail as on a full drive: EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def no_thread_starts(_run: Any) -> Iterator[None]:
    """Have the system give a save no thread."""
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if thread.name == "infinity-save":
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", started)
        yield


@contextlib.contextmanager
def no_memory_is_left(_run: Any) -> Iterator[None]:
    """Have the thread of a save get no buffers."""

    def refused(*_given: Any, **_more: Any) -> Any:
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "slab_buffers", refused)
        yield


def saves_fail(monkeypatch: pytest.MonkeyPatch, faults: Mapping[int, Any]) -> list[int]:
    """Let these saves of the command fail, counted from 1. Returns a list to which each save adds
    its step."""
    begin, begun = command._Run._begin_save, list[int]()

    def ended(run: Any, step: int) -> None:
        # No update may be pending: the fault must strike the save alone.
        run.handle.flush()
        begun.append(step)
        with faults.get(len(begun), lambda _run: contextlib.nullcontext())(run):
            begin(run, step)
            if run.save is not None:
                run.save._ended.wait()

    monkeypatch.setattr(command._Run, "_begin_save", ended)
    return begun


def end_again(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Let the end of the run meet a fault, in the `call`th sample of the text."""
    original, count = command._Run._continue, itertools.count(1)

    def met(run: Any) -> str:
        if next(count) == call:
            undone = StepUndone("an optimizer update failed; take the step's batches again")
            raise undone from AioError("a drive had a fault")
        return original(run)

    monkeypatch.setattr(command._Run, "_continue", met)


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_last_save_that_failed_is_not_forgotten_where_the_end_is_made_again(
    place: Path, tmp_path: Path, succeeds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*common(place), "--out", str(tmp_path), "--save-every", "2"]
    failing = [3, 4] if succeeds else [3, 4, 5]
    begun = saves_fail(monkeypatch, dict.fromkeys(failing, no_file_grows))
    end_again(monkeypatch, 2)
    status, shown = train(arguments)
    assert begun == [2, 4, STEPS, STEPS, STEPS]
    assert re.search(r"the end of the run is repeated: a drive had a fault\s*\n", shown)
    assert status == (0 if succeeds else 1), shown
    assert newest_generation(tmp_path / "checkpoint")[0].step == (STEPS if succeeds else 4)
    is_whole(place, tmp_path)


def locked(run: Any) -> contextlib.AbstractContextManager[object]:
    """Have another save hold the directory."""
    directory = command.save_directory(run.options)
    directory.mkdir(parents=True, exist_ok=True)
    stack = contextlib.ExitStack()
    stack.callback(DirectoryLock(directory).release)
    return stack


OBSTACLES = {
    2: (2, locked, "another save into this directory is running"),
    4: (4, no_thread_starts, "can't start new thread"),
    6: (STEPS, no_memory_is_left, "MemoryError"),
    7: (STEPS, no_memory_is_left, "MemoryError"),
}
"""Step of each save that fails, what is in its way, and what is said, by the number of the save."""


def test_whatever_stops_a_save_training_goes_on(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun = saves_fail(monkeypatch, {call: fault for call, (_, fault, _) in OBSTACLES.items()})
    status, shown = train([*common(place), "--out", str(tmp_path), "--save-every", "1"])
    assert status == 1, shown
    assert begun == [1, 2, 3, 4, 5, STEPS, STEPS]
    told = re.findall(r"no checkpoint of step (\d) was written: ([^\n]*)", caplog.text)
    for (step, text), (wanted, _, reason) in zip(told, OBSTACLES.values(), strict=True):
        assert (int(step), text[: len(reason)]) == (wanted, reason)
    assert "error: no checkpoint" in shown
    assert newest_generation(tmp_path / "checkpoint")[0].step == 5
    is_whole(place, tmp_path)


def test_a_first_save_that_cannot_begin_ends_the_command(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves_fail(monkeypatch, {1: locked})
    status, shown = train([*common(place), "--out", str(tmp_path), "--save-every", "1"])
    assert status == 1
    assert "error: another save into this directory is running" in shown
    assert [row["step"] for row in records(tmp_path, "step")] == [1]


def test_an_error_before_the_first_step_is_told_as_it_is(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_given: Any, **_more: Any) -> Any:
        raise AioError("a drive had a fault")

    monkeypatch.setattr(command.inf, "AdamW", refused)
    status, shown = train([*common(place), "--out", str(tmp_path)])
    assert status == 1
    assert "error: a drive had a fault" in shown


def test_a_read_that_fails_in_saves_alone_undoes_their_step_once(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out, arguments = on_drive(place, tmp_path, "--generations=2", "--save-every=2")

    @contextlib.contextmanager
    def unreadable(run: Any) -> Iterator[None]:
        executor = run.handle.parts.tiers.executor
        found = place_in(run.handle, 2, unit=3)
        start, stop = found.offset, found.offset + 4096
        executor.set_seam(Seam(fault=Fault("read", 0, persistent=True, start=start, stop=stop)))
        yield
        executor.set_seam(Seam())

    begun = saves_fail(monkeypatch, dict.fromkeys((2, 3), unreadable))
    status, shown = train(arguments)
    assert status == 0, shown
    assert begun == [2, 4, 4, STEPS]
    assert re.findall(r"step (\d) is taken again", shown) == ["4"]
    assert caplog.text.count("no checkpoint of step 4 was written: chunk ") == 2
    is_whole(place, out)


def test_a_durable_run_that_had_ended_makes_up_for_its_last_save_and_keeps_its_records(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, arguments = on_drive(place, tmp_path, "--durable", "--save-every=2")
    with monkeypatch.context() as patch:
        saves_fail(patch, dict.fromkeys((3, 4), no_file_grows))
        status, shown = train(arguments)
    assert status == 1, shown
    assert newest_generation(out / "checkpoint")[0].step == 4
    before = [records(out, kind) for kind in ("step", "held_out", "summary")]
    assert [len(rows) for rows in before] == [STEPS, 3, 1]
    # The text before is known: the first sample is that of the end.
    end_again(monkeypatch, 1)
    begun = saves_fail(monkeypatch, {})
    for again in (1, 0):
        status, shown = train([*arguments, "--resume"])
        assert status == 0, shown
        assert shown.count("the end of the run is repeated: a drive had a fault") == again
        assert f"earlier processes have taken all {STEPS} steps" in shown
        assert [records(out, kind) for kind in ("step", "held_out", "summary")] == before
        # The second finds it.
        assert begun == [STEPS]
        assert newest_generation(out / "checkpoint")[0].step == STEPS
    is_whole(place, out)
    # A run can resume from it.
    shutil.rmtree(tmp_path / "drive" / "infinity-run")
    status, shown = train([*arguments, "--resume"])
    assert status == 0, shown
    assert f"continuing after step {STEPS}, from {out / 'checkpoint'}" in shown


LIMITED = (
    "import resource, runpy, sys; "
    "sys.modules |= {'plotly': None, 'matplotlib': None, 'matplotlib.figure': None}; "
    "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); "
    "runpy.run_module('infinity', run_name='__main__')"
)
"""The command where no file can be longer than 1 MiB: the exported weights are shorter, states in
a checkpoint are not. Nor is the page of a run, which has the whole of plotly."""


def test_a_drive_that_is_full_for_the_last_saves_is_told_of_on_stderr(
    place: Path, tmp_path: Path
) -> None:
    arguments = [*common(place), "--out", str(tmp_path), "--params=cpu", "--optim=cpu"]
    arguments += ["--save-every", "2"]
    killed(train_until_killed, arguments)
    done = forks.run_code(LIMITED, "train", *arguments, "--resume", COLUMNS="400")
    assert done.returncode == 1, done.stdout + done.stderr
    # The save of step 4 may have been under way.
    found = re.search(r"continuing after step ([24]), from ", done.stdout)
    assert found, done.stdout
    assert done.stderr.count(f"no checkpoint of step {STEPS} was written: no space for a ") == 2
    assert "error: no space for a checkpoint of" in done.stderr
    assert newest_generation(tmp_path / "checkpoint")[0].step == int(found[1])
    is_whole(place, tmp_path)


def test_a_damaged_commit_is_passed_over_on_request(place: Path, tmp_path: Path) -> None:
    out, arguments = on_drive(place, tmp_path, "--durable", "--generations=3")
    killed(train_until_killed, arguments)
    with damaged(tmp_path / "drive" / "infinity-run"):
        status, shown = train([*arguments, "--resume", "--damaged", "from-older"])
    assert status == 0, shown
    assert "continuing after step 3, from" in shown
    is_whole(place, out)


@pytest.mark.parametrize("lost", mostly_slow([0, 1], 0))
def test_a_run_that_has_lost_a_drive_goes_on_from_the_last_save(
    place: Path, tmp_path: Path, lost: int
) -> None:
    """One command, on the drives that are left."""
    out, drives = tmp_path / "out", [tmp_path / "a", tmp_path / "b"]
    for drive in drives:
        drive.mkdir()
    durable = ["--durable", "--params=nvme", "--optim=nvme", "--ram=min", "--save-every=2"]
    arguments = [*common(place), "--out", str(out), *durable]
    killed(train_until_killed, [*arguments, *(f"--nvme={drive}" for drive in drives)])
    shutil.rmtree(drives[lost])
    left = [*arguments, f"--nvme={drives[1 - lost]}"]
    (out / "checkpoint").rename(tmp_path / "aside")
    status, shown = train([*left, "--resume"])
    assert status == 1
    assert "cannot resume from step 4: a file of a checkpoint is missing" in shown
    (tmp_path / "aside").rename(out / "checkpoint")
    status, shown = train([*left, "--resume"])
    assert status == 0, shown
    # The save of step 4 may have been under way.
    assert re.search(r"continuing after step [24], from .*checkpoint", shown), shown
    assert "instead of step 4 of the durable run" in shown
    is_whole(place, out)
    # The run is one of the drive that is left.
    assert find_source(options(*left[len(common(place)) :], "--resume"), [drives[1 - lost]])


def contents(holder: Path) -> dict[str, bytes]:
    """Every file of a checkpoint or a durable run."""
    return {path.name: path.read_bytes() for path in holder.iterdir()}


@contextlib.contextmanager
def damaged(source: Path) -> Iterator[Path]:
    """Have another byte in the states of a checkpoint or a durable run."""
    (found,) = newest_generation(source)
    row = found.rows[0]
    path = source / found.files[row["file"]].name
    with path.open("r+b") as file:
        at = file.seek(int(row["file_offset"] + row["section_at"][0]))
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 4]))
        file.flush()
        yield path
        file.seek(at)
        file.write(byte)


def test_a_fill_that_was_killed_goes_on_to_the_same_bits(place: Path, tmp_path: Path) -> None:
    out, arguments = on_drive(place, tmp_path, "--durable", "--resume")
    drive = tmp_path / "drive"
    killed(train_until_killed_in_the_fill, arguments)
    assert (drive / "infinity-run" / "fill.rank0").exists()
    before = {path.name for path in (drive / "infinity-run").glob("states-*")}
    with Counted() as counted:
        status, shown = train(arguments)
    assert status == 0, shown
    assert "no step was committed or saved yet: training begins" in shown
    assert 0 < counted.bytes < WEIGHTS_BYTES
    assert {path.name for path in (drive / "infinity-run").glob("states-*")} == before
    is_whole(place, out)


def test_a_run_that_goes_away_leaves_no_run_without_values(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable = f"--durable --params nvme --optim nvme --nvme {tmp_path} --ram min --resume".split()
    gone = Source(tmp_path, 0, None)
    monkeypatch.setattr(command, "find_source", lambda _options, _directories: gone)
    status, shown = train([*common(place), "--out", str(tmp_path / "out"), *durable])
    assert status == 2
    assert f"{tmp_path} has just been removed" in shown
    names = {path.name for path in (tmp_path / "infinity-run").iterdir()}
    assert names == {"lock.rank0"}


def options(*arguments: str) -> argparse.Namespace:
    given = ["train", "model", "--text", "text", "--out", "out", *arguments]
    return build_parser().parse_args(given)


WINDOWS = Corpus(torch.arange(28).reshape(7, 4), torch.zeros(1, 4))


@settings(max_examples=30, deadline=None)
@given(start=st.integers(0, 40), batch=st.integers(1, 9), seed=st.integers(0, 5))
def test_batches_go_on_where_they_were(start: int, batch: int, seed: int) -> None:
    whole = itertools.islice(WINDOWS.batches(batch, seed), start, start + 5)
    rest = WINDOWS.batches(batch, seed, start=start)
    assert all(torch.equal(one, other) for one, other in zip(whole, rest, strict=False))


def small(*arguments: str, source: Source | None = None, **more: Any) -> SmallState:
    more = {"rank": 0, "world": 1, "tied": False, **more}
    return SmallState(options(*arguments), WINDOWS, torch.device("cpu"), source, **more)


def source_of(extra: Any, step: int = 1) -> Source:
    return Source(Path("here"), step, extra)


def scheduler() -> Any:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def test_other_ranks_with_the_same_rows_go_on_with_generators_of_their_own() -> None:
    extra = small("--batch", "2", world=2).capture(scheduler(), [(0, 1.0)], "")
    source = source_of(extra)
    state = torch.get_rng_state()
    torch.rand(1)
    later = torch.get_rng_state()
    for batch, world, same in (("2", 2, True), ("4", 1, False)):
        torch.set_rng_state(later)
        rates = scheduler()
        here = small("--batch", batch, source=source, world=world)
        found = here.take_up(extra, 1, rates)
        assert (found.same_ranks, found.step, found.held_out) == (same, 1, ((0, 1.0),))
        assert torch.equal(torch.get_rng_state(), state if same else later)
        assert rates.get_last_lr() == [0.5]
        assert here.capture(rates, [], "")["run"] == extra["run"]
    assert small().capture(scheduler(), [], "")["run"] != extra["run"]
    with pytest.raises(ValueError, match="--batch times ranks was 4 and is 2"):
        small("--batch", "2", source=source)


def test_options_that_decide_the_losses_stay_as_they_were() -> None:
    delayed = ("--update", "delayed")
    source = source_of(small(*delayed).capture(scheduler(), [], ""))
    # Without the option its value is that of the run.
    small(*delayed, "--delayed-warmup", "40", source=source)
    for changed, told in (
        ((*delayed, "--delayed-warmup", "9"), "--delayed-warmup was 40 and is 9. Give"),
        ((*delayed, "--state", "bf16"), "--state was exact and is bf16. Give"),
        ((*delayed, "--optimizer", "muon"), "--optimizer was adamw and is muon. Give"),
        ((*delayed, "--weight-decay", "1"), "--weight-decay was 0.01 and is 1.0. Give"),
        ((), "--update was delayed and is deferred. Give"),
    ):
        with pytest.raises(ValueError, match=re.escape(told)):
            small(*changed, source=source)


def test_the_order_of_micro_batches_stays_where_it_orders_sums_of_tied_weights() -> None:
    both, other = ("--accumulate", "2"), ("--accumulate", "2", "--schedule", "horizontal")
    untied = source_of(small(*both).capture(scheduler(), [], ""))
    small(*other, source=untied)
    extra = small(*both, tied=True).capture(scheduler(), [], "")
    small(*both, source=source_of(extra), tied=True)
    with pytest.raises(ValueError, match=r"tied weights.* was vertical and is horizontal. Give"):
        small(*other, source=source_of(extra), tied=True)
    # With one micro-batch there is no order.
    alone = source_of(small(tied=True).capture(scheduler(), [], ""))
    small("--schedule", "horizontal", source=alone, tied=True)
    # A checkpoint from before this option.
    earlier = source_of(small(*both).capture(scheduler(), [], ""))
    small(*other, source=earlier, tied=True)
    with pytest.raises(ValueError, match=r"tied weights.* was horizontal and is vertical. Give"):
        small(*both, source=earlier, tied=True)


@pytest.mark.parametrize("extra", [None, {"mine": 1}])
def test_states_of_another_loop_are_no_run_of_this_one(extra: Any) -> None:
    with pytest.raises(ValueError, match="here was not written by infinity train"):
        small(source=source_of(extra, 3))
    assert small(source=source_of(extra, 0)).take_up(extra, 0, scheduler()).step == 0


def test_tiles_stay_as_they_were_and_states_from_before_these_options_have_none() -> None:
    extra = small().capture(scheduler(), [(0, 1.0)], "")
    with pytest.raises(ValueError, match="--tile-experts was None and is 2"):
        small("--tile-experts", "2", source=source_of(extra))
    for name in ("--tile-linears", "--tile-loss", "--tile-experts"):
        del extra["train"][name]
        with pytest.raises(ValueError, match=f"{name} was None and is 2"):
            small(name, "2", source=source_of(extra))
    assert small(source=source_of(extra)).take_up(extra, 1, scheduler()).step == 1


def test_adapters_go_on_beside_the_model_that_they_were_trained_with() -> None:
    extra = small(base=7).capture(scheduler(), [], "")
    small(base=7, source=source_of(extra))
    with pytest.raises(ValueError, match="checksum of the model beside the adapters was 7 and is"):
        small(base=8, source=source_of(extra))


def test_held_out_losses_of_other_windows_are_not_gone_on_with() -> None:
    source = source_of(small().capture(scheduler(), [(0, 1.0)], ""))
    device = torch.device("cpu")
    for held_out in (torch.zeros(2, 4), torch.ones(1, 4)):
        other = Corpus(WINDOWS.train, held_out)
        told = r"held-out windows of the text \(--eval-batches.* was 1 \(checksum \w{8}\) and is"
        with pytest.raises(ValueError, match=told):
            SmallState(options(), other, device, source, rank=0, world=1)


def commit(
    holder: Path,
    step: int,
    generation: int = 1,
    ranks: Sequence[int] = (0, 1),
    run: str = "one",
) -> None:
    """Write these of two ranks' manifests, of the run with this id."""
    holder.mkdir(0o700, parents=True, exist_ok=True)
    for rank in ranks:
        data = extra_bytes({"train": {}, "run": run} if step else None)
        name = file_name("extra", generation, rank)
        extra = write_attachment(holder, name, data) if data is not None else None
        one = dataclasses.replace(manifest(rank, 2, generation), step=step, extra=extra)
        (holder / one.name).write_bytes(encoded(one))
        for file in one.files:
            with (holder / file.name).open("ab") as data:
                data.truncate(file.size_bytes)


@pytest.mark.parametrize(
    ("run", "saved", "source"),
    [
        (4, None, "drive"),
        (None, 4, "saved"),
        (4, 4, "drive"),
        (5, 4, "drive"),
        (0, 4, "saved"),  # was the run, at set-up: training began anew and replaced the checkpoint
        (None, None, None),
    ],
)
def test_the_later_step_is_gone_on_with(
    tmp_path: Path, run: int | None, saved: int | None, source: str | None
) -> None:
    drive, place = tmp_path / "drive", tmp_path / "saved"
    given = ("--durable", "--save-every", "1", "--save-dir", str(place))
    for holder, step in ((drive / "infinity-run", run), (place, saved)):
        # Parts of a later commit, and of an interrupted save, are no generation.
        commit(holder, 9, 2, ranks=(1,))
        (holder / "manifest-00000003.rank0.partial").touch()
        if step is not None:
            commit(holder, step)
    found = find_source(options(*given, "--resume"), [drive])
    assert (found and found.place) == (tmp_path / source if source else None)
    if source is None:
        assert find_source(options(*given), [drive]) is None
        return
    with pytest.raises(
        ValueError, match=r"already holds a .*: continue it by --resume; .* another directory"
    ) as refused:
        find_source(options(*given), [drive])
    # Following the error's advice loses nothing.
    assert "remove" not in str(refused.value)
    damaged = (place if saved is not None else drive / "infinity-run") / manifest(0, 2).name
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(AioError, match=r"manifest-00000001\.rank0"):
        find_source(options(*given, "--resume"), [drive])


def test_a_run_and_a_checkpoint_of_another_one_do_not_replace_each_other(tmp_path: Path) -> None:
    drive, saved = tmp_path / "drive", tmp_path / "out" / "checkpoint"
    given = ("--durable", "--out", str(tmp_path / "out"), "--resume")
    named = [(*given, "--save-every", "100"), (*given, "--save-dir", str(saved))]

    def place_of(arguments: Sequence[str]) -> Path | None:
        found = find_source(options(*arguments), [drive])
        return found.place if found is not None else None

    commit(saved, 1000, run="earlier")
    assert place_of(given) == saved
    for step in (0, 500):
        commit(drive / "infinity-run", step, run="later")
        # No option names the checkpoint.
        assert place_of(given) == drive
    for earlier, later, same in (
        ("earlier", "later", False),
        ("one", "one", True),
        ("", "later", False),
        # A checkpoint of a release that kept no ids.
        ("", "", False),
    ):
        for holder, step, run in ((saved, 1000, earlier), (drive / "infinity-run", 500, later)):
            commit(holder, step, run=run)
        before = [contents(saved), contents(drive / "infinity-run")]
        for arguments in named:
            if same:
                assert place_of(arguments) == saved
                continue
            told = "durable run at step 500, and .* a checkpoint at step 1000 that is not known"
            with pytest.raises(ValueError, match=told):
                place_of(arguments)
        assert [contents(saved), contents(drive / "infinity-run")] == before


STOPS: list[tuple[tuple[Any, str], int, int, int]] = [
    ((command.hf_model, "offload_pretrained"), 1, signal.SIGTERM, 0),
    ((command._Run, "_continue"), 1, signal.SIGHUP, 0),
    ((command._Run, "_passes"), 2, signal.SIGTERM, 2),
    ((command.MetricsFile, "add"), 2, signal.SIGINT, 3),  # the first line describes the run
    ((command._Run, "_measure_held_out"), 1, signal.SIGUSR1, 3),
    ((command._Run, "_begin_save"), 1, signal.SIGUSR1, 4),
    ((command.hf_model, "save_pretrained"), 1, signal.SIGTERM, STEPS),
    ((command._Run, "_leave_page"), 1, signal.SIGTERM, STEPS),
]
"""A function and the number of a call during which a signal comes, and the last step then taken."""


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("kept", mostly_slow(["durable", "saved"], "durable"))
def test_a_run_that_signals_stop_again_and_again_has_the_same_bits(
    place: Path, tmp_path: Path, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, arguments = on_drive(place, tmp_path, "--durable", "--durable-every=4", "--resume")
    if kept == "saved":
        # Only one step is saved without a signal.
        arguments = [*common(place), "--out", str(out), "--save-every", "4", "--resume"]
    before = [signal.getsignal(number) for number in NUMBERS]
    for part, call, number, step in STOPS if kept == "saved" else STOPS[::2]:
        with monkeypatch.context() as patch:
            signalled(patch, part, call, number)
            status, shown = train(arguments)
        assert status == 128 + number, shown
        assert [signal.getsignal(each) for each in NUMBERS] == before
        if part[1] == "offload_pretrained":
            assert f"{name_of(number)}: stopped at once" in shown
        elif step < STEPS:
            assert f"{name_of(number)}: stopped after step {step}; " in shown
            assert ("the same command with --resume continues" in shown) == (step > 0)
        if (out / "metrics.jsonl").exists():
            assert [row["step"] for row in records(out, "step")] == list(range(1, step + 1))
        assert (out / "report.html").exists() == (step > 0)
    status, shown = train(arguments)
    assert status == 0, shown
    assert f"earlier processes have taken all {STEPS} steps" in shown
    is_whole(place, out)


def signalled(patch: pytest.MonkeyPatch, part: tuple[Any, str], call: int, *numbers: int) -> None:
    """Send signals when the `call`th call of a part of the command begins."""
    original, count = getattr(*part), itertools.count(1)

    def called(*given: Any, **more: Any) -> Any:
        if next(count) == call:
            for number in numbers:
                os.kill(os.getpid(), number)
        return original(*given, **more)

    patch.setattr(*part, called)


def test_a_second_signal_ends_a_run_at_once(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier saves stay, and two signals of different kinds are no second one."""
    monkeypatch.setattr(stop_signals, "TWICE_S", 0)
    arguments = [*common(place), "--out", str(tmp_path), "--save-every", "1"]
    twice = signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1
    with monkeypatch.context() as patch:
        signalled(patch, (command._Run, "_passes"), 2, *twice)
        status, shown = train(arguments)
    assert status == 128 + signal.SIGUSR1, shown
    assert "SIGUSR1: stopped at once; what was measured so far is in" in shown
    assert [row["step"] for row in records(tmp_path, "step")] == [1]
    assert newest_generation(tmp_path / "checkpoint")[0].step == 1


def test_a_run_that_has_ended_goes_on_with_more_steps(place: Path, tmp_path: Path) -> None:
    """By the schedule of a run with that number of steps; with the same rates it has the same bits
    as such a run."""

    def trained(out: str, *more: str) -> str:
        directories = ("--out", str(tmp_path / out), "--save-every", "4")
        short = ("--eval-every=0", "--accumulate=1", "--no-save")
        status, shown = train([*common(place), *directories, *short, *more])
        assert status == 0, shown
        return shown

    def rows(out: str, kind: str, *names: str) -> list[list[Any]]:
        return [[row[name] for name in names] for row in records(tmp_path / out, kind)]

    # Warm-up to the end: the rates of both are equal.
    trained("whole", "--steps=4", "--warmup=9")
    trained("more", "--steps=2", "--warmup=9")
    shown = trained("more", "--steps=4", "--warmup=9", "--resume")
    assert "follows the schedule of 4 steps; before, it followed that of 2" in shown
    figures = ("step", "loss", "lr", "grad_norm")
    assert rows("more", "step", *figures) == rows("whole", "step", *figures)
    # The loss between them is kept.
    assert [step for (step,) in rows("more", "held_out", "step")] == [0, 2, 4]
    assert len(rows("more", "summary")) == 1

    # Left out, it is that of the run.
    left_out = [each for each in common(place) if each not in ("--steps", str(STEPS))]
    short = ("--eval-every=0", "--accumulate=1", "--no-save", "--warmup=9")
    given = [*left_out, *short, "--out", str(tmp_path / "more"), "--resume", "--save-every", "4"]
    status, shown = train(given)
    assert status == 0, shown
    assert "earlier processes have taken all 4 steps" in shown
    before = contents(tmp_path / "more" / "checkpoint")
    status, shown = train([*given, "--steps", "3"])
    assert status == 2, shown
    assert "has taken 4 steps, and --steps 3 is fewer; give 4 or more" in shown
    assert contents(tmp_path / "more" / "checkpoint") == before


def test_the_rates_of_more_steps_are_those_of_a_run_of_so_many() -> None:
    def rates_of(steps: int) -> Any:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        rate = functools.partial(command.learning_rate, warmup=2, steps=steps)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    five, seven = rates_of(5), rates_of(7)
    for _ in range(4):
        five.optimizer.step()
        five.step()
    # Captured before the scheduler's step of the fifth and last.
    extra = small("--steps", "5").capture(five, [], "")
    small("--steps", "7", source=source_of(extra, 5)).take_up(extra, 5, seven)
    assert seven.get_last_lr() == [command.learning_rate(5, 2, 7)]
    assert source_of(extra, 5).rule("--steps") == 5


def test_saves_are_of_the_run_that_writes_them(tmp_path: Path) -> None:
    status, shown = train(
        ["model", "--text", "text", "--out", str(tmp_path), "--save-dir", str(tmp_path)]
    )
    assert status == 2
    assert "add --save-every STEPS, or --resume" in shown
