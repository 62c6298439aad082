"""`infinity train` on two ranks, as torchrun starts them: what one rank does on the same global
batch, and ends that all see."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from rich.console import Console
from safetensors.torch import load_file

from infinity._src.checkpoint import save
from infinity._src.checkpoint.directory import DirectoryLock, newest_generation
from infinity._src.cli import train as command
from infinity._src.cli.main import build_parser
from infinity._src.cli.torchrun import Joined, joined, place_of
from infinity._src.cli.train import run_train
from infinity.aio import Fault, Seam
from tests.distributed.ranks import on_ranks
from tests.tiny_llama import TEXT, write_model

TIMEOUT_S = 180
SMALL = [
    "--steps",
    "3",
    "--seq",
    "32",
    "--lr",
    "1e-3",
    "--eval-batches",
    "3",
    "--dtype",
    "float32",
    "--accumulate",
    "2",
    "--no-trace",
    "--eval-every",
    "2",
    "--prompt",
    "In the",
    "--prompt-tokens",
    "2",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a text, and a drive for each of two ranks."""
    directory = write_model(tmp_path_factory.mktemp("model"))
    (directory / "text.txt").write_text(TEXT)
    for rank in range(2):
        (directory / f"drive{rank}").mkdir()
    return directory


def arguments(place: Path, out: Path, *more: str) -> list[str]:
    return [
        "train",
        str(place),
        "--text",
        str(place / "text.txt"),
        "--out",
        str(out),
        *SMALL,
        *more,
    ]


def on_two_ranks(place: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc-per-node 2 -m infinity train ...` on a free port; whatever it leaves is
    killed."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "infinity",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, *arguments(place, out, *more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            shown, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            process.wait(30)
            raise
    return subprocess.CompletedProcess(command, process.returncode, shown, errors)


def records(out: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


@pytest.mark.ranks
def test_two_ranks_with_one_row_do_what_one_rank_does_with_two(place: Path, tmp_path: Path) -> None:
    drives = [
        "--params",
        "nvme",
        "--optim",
        "nvme",
        "--nvme",
        str(place / "drive{local_rank}"),
        "--ram",
        "min",
    ]
    two = on_two_ranks(place, tmp_path / "two", "--batch", "1", *drives)
    assert two.returncode == 0, two.stderr
    options = build_parser().parse_args(arguments(place, tmp_path / "one", "--batch", "2"))
    assert run_train(options, Console(file=io.StringIO())) == 0

    for kind, value in (("step", "loss"), ("step", "grad_norm"), ("held_out", "loss")):
        of_one, of_two = (
            [row[value] for row in records(tmp_path / name, kind)] for name in ("one", "two")
        )
        assert len(of_two) == 3
        assert of_two == pytest.approx(of_one, rel=1e-4), (kind, value)
    assert [row["tokens"] for row in records(tmp_path / "two", "step")] == [2 * 2 * 32] * 3
    assert (
        records(tmp_path / "two", "held_out")[0]["windows"]
        == records(tmp_path / "one", "held_out")[0]["windows"]
    )
    (run,) = records(tmp_path / "two", "run")
    assert run["ranks"] == 2
    # Once each: only rank 0 prints.
    for said in (
        "loading /",
        "on 2 ranks, ZeRO stage 3",
        "step 1/3",
        "the trained model is in",
        "What the run did",
    ):
        assert two.stdout.count(said) == 1, two.stdout
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        # AdamW's first steps divide a gradient by its own size: elements whose gradient is rounding
        # noise may differ.
        assert torch.isclose(weights[1][name], value, rtol=1e-3, atol=2e-5).float().mean() > 0.99, (
            name
        )
    assert [list((place / f"drive{rank}").iterdir()) for rank in range(2)] == [[], []]


@pytest.mark.ranks
def test_what_stops_one_rank_stops_both_with_one_message(place: Path, tmp_path: Path) -> None:
    (place / "own0").mkdir()  # rank 1 has none
    drives = [
        "--params",
        "nvme",
        "--optim",
        "nvme",
        "--nvme",
        str(place / "own{local_rank}"),
        "--ram",
        "min",
    ]
    found = on_two_ranks(place, tmp_path / "out", *drives)
    assert found.returncode in (1, 2)
    (message,) = [
        line for line in (found.stdout + found.stderr).splitlines() if line.startswith("error:")
    ]
    assert message.startswith("error: rank 1: ")
    assert f"{place}/own1" in message
    assert list((place / "own0").iterdir()) == []


def trained(rank: int, directory: Path, given: list[str], *, struck: bool) -> str:
    """Train in this process. struck: the second rank's drive cannot give back parameters that the
    third measurement reads, nor those that the fourth does. Returns what was shown.
    """
    console = Console(file=io.StringIO(), width=400)
    options = build_parser().parse_args(given)
    ranks = Joined(rank, 2, rank, "cpu", dist.distributed_c10d._get_default_store())
    measure, count = command._Run._measure_held_out, 0

    def measured(run: Any, step: int) -> float:
        nonlocal count
        count += 1
        if struck and rank == 1 and count in (3, 4, 5):
            parts = run.handle.parts
            (flat, *_) = parts.split.units[3].flats
            (chunk,) = parts.tiers.executor.look(parts.tiers.store[flat].ids[:1])
            start = int(chunk["file_offset"] + chunk["section_at"][0])
            fault = Fault("read", 0, persistent=True, start=start, stop=start + 4096)
            parts.tiers.executor.set_seam(Seam(fault=fault) if count < 5 else Seam())
        return measure(run, step)

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(command._Run, "_measure_held_out", measured)
        # Times of drives are not tested here.
        patch.setattr(command._Run, "_measure_drives", lambda _run: None)
        assert command._Run(options, console, stack, ranks).run() == 0
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kept", "again"),
    [
        ("--generations=2", ["step 3 is taken again"] * 2),
        # What was committed is not undone.
        ("--durable", ["the end of the run is repeated"] * 2),
    ],
)
def test_a_measurement_is_repeated_after_a_fault(
    place: Path, tmp_path: Path, kept: str, again: list[str]
) -> None:
    outs = [tmp_path / "whole", tmp_path / "struck"]
    for out in outs:
        (out / "drive").mkdir(parents=True)
        drives = [f"--nvme={out}/drive", "--params=nvme", "--optim=nvme", "--ram=min"]
        given = arguments(place, out, *drives, kept, "--batch=1")
        job = functools.partial(trained, given=given, struck=out.name == "struck")
        shown = on_ranks(job, out / "ranks", 2)
    assert re.findall(r"(.* (?:again|repeated)): ", shown[0]) == again
    for kind in ("step", "held_out"):
        whole, struck = ([row["loss"] for row in records(out, kind)] for out in outs)
        assert len(whole) == 3
        assert struck == whole
    weights = [load_file(out / "model.safetensors") for out in outs]
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())


def saving(rank: int, directory: Path, given: list[str]) -> list[str]:
    """Train in this process. The directory of the second save is locked for the first rank, and the
    thread of the third gets no memory on the second rank. Returns the warnings of this rank.
    """
    options = build_parser().parse_args(given)
    ranks = Joined(rank, 2, rank, "cpu", dist.distributed_c10d._get_default_store())
    begin, count, told = command._Run._begin_save, itertools.count(1), list[str]()

    def refused(*_given: Any, **_more: Any) -> Any:
        raise MemoryError

    def begun(run: Any, step: int) -> None:
        call = next(count)
        with contextlib.ExitStack() as faults, pytest.MonkeyPatch.context() as patch:
            if call == 2 and rank == 0:
                faults.callback(DirectoryLock(command.save_directory(options)).release)
            if call == 3 and rank == 1:
                patch.setattr(save, "slab_buffers", refused)
            begin(run, step)
            if run.save is not None:
                run.save._ended.wait()

    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setattr(command._Run, "_begin_save", begun)
        patch.setattr(command._Run, "_measure_drives", lambda _run: None)
        patch.setattr(command.log, "warning", lambda text, *more: told.append(text % more))
        console = Console(file=io.StringIO())
        assert command._Run(options, console, stack, ranks).run() == 0
    return told


@pytest.mark.ranks
def test_a_save_that_fails_on_one_rank_fails_on_both(
    place: Path, tmp_path: Path
) -> None:
    given = arguments(place, tmp_path, "--batch=1", "--save-every=1")
    told = on_ranks(functools.partial(saving, given=given), tmp_path / "ranks", 2)
    texts = [
        ["another save into this directory is running", "another rank failed to write"],
        ["another rank cannot save", "MemoryError"],
    ]
    for rank in range(2):
        warned = [text for text in told[rank] if text.startswith("no checkpoint of step ")]
        assert len(warned) == 2
        for step, line, text in zip((2, 3), warned, texts[rank], strict=True):
            assert line.startswith(f"no checkpoint of step {step} was written: {text}")
    heads = newest_generation(tmp_path / "checkpoint")
    assert [head.step for head in heads] == [3, 3]


def stopping(rank: int, directory: Path, given: list[str], *, at: str = "", call: int = 0) -> int:
    """Run the command in this process. A signal reaches the second rank alone at the `call`th call
    of the method `at`; "": no signal. Returns the exit status."""
    options = build_parser().parse_args(given)
    ranks = Joined(rank, 2, rank, "cpu", dist.distributed_c10d._get_default_store())
    count = itertools.count(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command._Run, "_measure_drives", lambda _run: None)
        if at:
            original = getattr(command._Run, at)

            def called(*values: Any) -> Any:
                if next(count) == call and rank == 1:
                    os.kill(os.getpid(), signal.SIGUSR1)
                return original(*values)

            patch.setattr(command._Run, at, called)
        return command._train(options, Console(file=io.StringIO()), ranks)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("at", "call"),
    [
        ("_passes", 2),
        # The ranks have met for the last time in this step, and stop after the next.
        ("_keep", 1),
    ],
)
def test_a_signal_that_reaches_one_rank_stops_both_after_the_same_step(
    place: Path, tmp_path: Path, at: str, call: int
) -> None:
    outs = [tmp_path / "whole", tmp_path / "stopped"]
    for out in outs:
        given = arguments(place, out, "--batch=1", "--save-every=4", "--steps=4", "--resume")
        if out.name == "stopped":
            job = functools.partial(stopping, given=given, at=at, call=call)
            assert on_ranks(job, tmp_path / "ranks", 2) == [128 + signal.SIGUSR1] * 2
            assert [head.step for head in newest_generation(out / "checkpoint")] == [2, 2]
        job = functools.partial(stopping, given=given)
        assert on_ranks(job, tmp_path / f"ranks-{out.name}", 2) == [0, 0]
    for kind in ("step", "held_out"):
        whole, stopped = ([row["loss"] for row in records(out, kind)] for out in outs)
        assert stopped == whole
    weights = [load_file(out / "model.safetensors") for out in outs]
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())


# -- the places of ranks ---------------------------------------------------------------------------

TORCHRUN = {
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}


def test_a_rank_computes_on_the_gpu_of_its_number_or_where_all_are_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert place_of("cpu", TORCHRUN) == Joined(3, 4, 1, "cpu")
    assert place_of("cuda:1", {}) == Joined(device="cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert place_of(None, TORCHRUN).device == "cuda:1"
    assert place_of("cuda", TORCHRUN).device == "cuda:1"
    assert place_of(None, {}).device == "cuda"
    with pytest.raises(ValueError, match="local rank 2 has no GPU: the node has 2"):
        place_of(None, {**TORCHRUN, "LOCAL_RANK": "2"})


@pytest.mark.parametrize(
    ("device", "change", "message"),
    [
        ("cuda:0", {}, "give --device cuda"),
        (
            "cpu",
            {"MASTER_PORT": None, "RANK": None},
            "RANK, MASTER_PORT: start several ranks with torchrun --nproc-per-node 4",
        ),
        ("cpu", {"RANK": "first"}, "RANK='first' in the environment is not a number"),
    ],
)
def test_an_environment_that_is_not_torchrun_s_names_the_fix(
    device: str, change: dict[str, str | None], message: str
) -> None:
    environment = {
        name: value for name, value in {**TORCHRUN, **change}.items() if value is not None
    }
    with pytest.raises(ValueError, match=message), joined(device, environment):
        pass


def test_one_rank_needs_no_agreement() -> None:
    with joined("cpu", {}) as alone:
        assert alone.first
        assert alone.sums(1.5, 2.0) == [1.5, 2.0]
        assert alone.tells(RuntimeError("lost"))
        alone.together()
