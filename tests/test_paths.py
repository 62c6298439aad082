"""Relative paths: each is where it was when it was given, whatever `os.chdir` does afterwards."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity as inf
from infinity._src.base.paths import absolute, argument
from infinity._src.cli.main import build_parser
from infinity._src.measure import command
from infinity.aio import SwapFile

NVME: dict[str, Any] = {"params": "nvme", "optim": "nvme", "ram": "min"}


class Net(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](checkpoint(self[0], x + 0, use_reentrant=False))


def made(seed: int = 0, **values: Any) -> tuple[Any, inf.AdamW]:
    torch.manual_seed(seed)
    model = Net(nn.Linear(16, 16), nn.Linear(16, 16))
    inf.offload(model, inf.Policy(**values))
    return model, inf.AdamW(model.parameters(), lr=1e-2)


def step(model: Any, optimizer: inf.AdamW) -> None:
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# Each door is used with a relative path; every `yield` is a moment at which the directory changes.
# It yields what has to be at that path in the end.


def save() -> Iterator[str]:
    model, optimizer = made()
    step(model, optimizer)
    for _ in range(2):
        # Taken at the call, so that the second one lies where the first does.
        saving = inf.save(model, optimizer, "place")
        yield ""
        saving.wait()
        yield "back"
    assert inf.restore(model, optimizer, "place").step == 1
    yield "manifest-00000002.rank0"


def durable() -> Iterator[str]:
    model, optimizer = made(**NVME, nvme="place", durable=True)
    yield ""
    step(model, optimizer)
    yield ""
    step(model, optimizer)
    inf.handle(model).flush()
    yield "back"
    saving = inf.save(model, optimizer, "saved")  # by second names of the run's files
    yield ""
    saving.wait()
    step(model, optimizer)
    inf.handle(model).close()
    yield "back"
    model, optimizer = made(1, **NVME, nvme="place", durable=True)
    assert inf.restore(model, optimizer, "place").step == 3
    yield ""
    inf.handle(model).close()
    yield "infinity-run"


def swap() -> Iterator[str]:
    values = {**NVME, "activations": "nvme", "grads": "nvme", "nvme": ["place"]}
    model, optimizer = made(**values)
    yield ""
    loss = model(torch.ones(2048, 16)).sum()
    yield ""
    loss.backward()
    yield ""
    optimizer.step()
    yield ""
    inf.handle(model).close()
    yield "."


def step_log() -> Iterator[str]:
    model, optimizer = made()
    with inf.StepLog(model, "place") as log:
        for _ in range(2):
            yield ""
            step(model, optimizer)
            log.step(1.0)
    yield "timeline.json"


def safetensors() -> Iterator[str]:
    model, _ = made()
    here = Path.cwd()

    def rename(name: str) -> str:
        os.chdir(here.parent / "second")
        return name

    inf.export_safetensors(model, "place", names=rename)
    yield "model.safetensors"


def dcp() -> Iterator[str]:
    model, optimizer = made()
    step(model, optimizer)
    shutil.rmtree("place")
    inf.export_dcp(model, optimizer, "place")
    yield "back"
    inf.load_dcp(model, optimizer, "place")
    yield ".metadata"


def trace() -> Iterator[str]:
    model, _ = made()
    inf.handle(model).trace("place/trace.json")
    yield "trace.json"


def swap_file() -> Iterator[str]:
    files = [SwapFile.durable("place", "a"), SwapFile.create("place"), SwapFile.new("place/b")]
    yield ""
    for file in files:
        file.grow(8192)
        assert Path(file.path).exists(), file.path
        file.close()
    yield "b"


DOORS: list[Callable[[], Iterator[str]]] = [
    save, durable, swap, step_log, safetensors, dcp, trace, swap_file,
]  # fmt: skip


def tree(place: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(place)): path.read_bytes() if path.is_file() else None
        for path in sorted(place.rglob("*"))
    }


@pytest.mark.parametrize("gone", [False, True], ids=["another", "removed"])
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
def test_a_path_stays_where_it_was_given(
    door: Callable[[], Iterator[str]], gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, lost = (tmp_path / name for name in ("first", "second", "lost"))
    for place in (first, second):
        (place / "place").mkdir(parents=True, mode=0o700)
    monkeypatch.chdir(second)
    # A checkpoint of another run, and files of the names that the doors use.
    model, optimizer = made(2)
    inf.save(model, optimizer, "place").wait()
    for name in ("model.safetensors", "metrics.jsonl", "timeline.json", "trace.json", "a", "b"):
        (second / "place" / name).write_text("of another run")
    before = tree(second)
    monkeypatch.chdir(first)
    for found in door():
        expected = found
        if found == "back":
            os.chdir(first)
        elif gone:
            lost.mkdir()
            os.chdir(lost)
            lost.rmdir()
        else:
            os.chdir(second)
    assert (first / "place" / expected).exists()
    assert tree(second) == before


def test_where_the_current_directory_is_gone_a_relative_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = made()
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    calls: list[Callable[[], Any]] = [
        lambda: inf.save(model, optimizer, "a"),
        lambda: inf.restore(model, optimizer, "a"),
        lambda: inf.restore(model, optimizer, [tmp_path, "a"]),
        lambda: inf.export_safetensors(model, "a"),
        lambda: inf.load_safetensors(model, "a"),
        lambda: inf.export_dcp(model, optimizer, "a"),
        lambda: inf.load_dcp(model, optimizer, "a"),
        lambda: inf.load_deepspeed(model, "a"),
        lambda: inf.offload(nn.Linear(1, 1), load="a"),
        lambda: inf.Policy(**NVME, nvme=[tmp_path, "a"]),
        lambda: inf.StepLog(model, "a"),
        lambda: inf.handle(model).trace("a"),
        lambda: SwapFile.create("a"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"'a' is relative, and the current directory is gone"):
            call()
    inf.save(model, optimizer, tmp_path / "saved").wait()
    with pytest.raises(SystemExit):
        build_parser().parse_args(["checkpoint", "verify", "saved"])
    assert "path='saved' is relative" in capsys.readouterr().err


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)


def test_every_path_of_a_command_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    actions = [
        action
        for parser in (*parsers(build_parser()), *parsers(command.build_parser()))
        for action in parser._actions
    ]
    for action in actions:
        if action.metavar in ("DIR", "FILE", "OUT", "MODEL") or action.type is Path:
            assert action.type is argument, action.dest
    found = {action.dest for action in actions if action.type is argument}
    assert {"out", "nvme", "dir", "directory", "directories", "model", "json"} <= found
    assert argument("a/../b") == tmp_path / "a/../b"  # not resolved: a may be a link
    assert argument("-") == Path("-")


def test_a_path_keeps_its_links_and_has_its_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("target")
    assert absolute("link/a", "directory") == tmp_path / "link/a"
    assert absolute("~/a", "directory") == tmp_path / "a"
    assert absolute("~nobody-of-this-name", "directory") == tmp_path / "~nobody-of-this-name"
    for wrong in (b"a", 3, None):
        with pytest.raises(ValueError, match=r"directory=.* is not a path"):
            absolute(wrong, "directory")  # type: ignore[arg-type]
    model, optimizer = made()
    before = sorted(tmp_path.iterdir())
    for door in (inf.save, inf.restore, inf.load_dcp):
        with pytest.raises(ValueError, match=r"is an empty path.*give '\.'"):
            door(model, optimizer, "")  # type: ignore[operator]
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(argparse.ArgumentTypeError, match="empty path"):
        argument("")
    inf.save(model, optimizer, "~/saved").wait()
    assert (tmp_path / "saved" / "manifest-00000001.rank0").exists()


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    model, optimizer = made()
    (tmp_path / "shards").mkdir()
    for link in (dangling := tmp_path / "link", tmp_path / "shards/a.safetensors"):
        link.symlink_to(tmp_path / "lost")
    (tmp_path / "indexed").mkdir()
    (tmp_path / "indexed/model.safetensors.index.json").symlink_to(tmp_path / "lost")
    calls: list[Callable[[], Any]] = [
        lambda: inf.save(model, optimizer, dangling),
        lambda: inf.restore(model, optimizer, dangling),
        lambda: inf.export_safetensors(model, dangling),
        lambda: inf.load_safetensors(model, dangling),
        lambda: inf.load_safetensors(model, tmp_path / "shards"),
        lambda: inf.load_safetensors(model, tmp_path / "indexed"),
        lambda: inf.export_dcp(model, optimizer, dangling),
        lambda: inf.load_dcp(model, optimizer, dangling),
        lambda: inf.StepLog(model, dangling),
        lambda: inf.offload(nn.Linear(1, 1), load=dangling),
        lambda: made(**NVME, nvme=dangling),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"is a symbolic link to .*lost.* does not exist"):
            call()
    assert not (tmp_path / "lost").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_torch_save_is_told_from_a_damaged_one(zipped: bool, tmp_path: Path) -> None:
    model, _ = made()
    file = tmp_path / "model.pt"
    torch.save(model.state_dict(), file, _use_new_zipfile_serialization=zipped)
    for call in (
        lambda: inf.load_safetensors(model, file),
        lambda: inf.offload(nn.Linear(1, 1), load=file),
    ):
        with pytest.raises(ValueError, match=rf"{file} is a file of torch.save.*load=torch.load"):
            call()
