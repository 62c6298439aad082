"""Progress lines on a terminal and in a log, and the work that has one."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.base import progress
from infinity._src.base.progress import ProgressLine
from infinity._src.base.sizes import GIB
from infinity._src.params import deferred_init


class Stream(io.StringIO):
    """Standard error, of a terminal or of a log."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


class Clock(types.SimpleNamespace):
    """A clock that the test advances."""

    def __init__(self) -> None:
        super().__init__(now_s=100.0, monotonic=lambda: self.now_s)


def written(
    monkeypatch: pytest.MonkeyPatch, *, terminal: bool, shown: bool = True, total: int | None
) -> list[str]:
    """Return what is written by each of 10 steps of 1 GiB and 10 seconds, and by the end."""
    stream, clock, found = Stream(terminal=terminal), Clock(), []
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "time", clock)
    with ProgressLine("copying", total, shown=shown) as line:
        for _ in range(10):
            clock.now_s += 10.0
            line.advance(GIB)
            found.append(stream.getvalue())
            stream.seek(stream.truncate(0))
    return [*found, stream.getvalue()]


def test_a_terminal_has_one_line_with_what_is_left_which_goes_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    *steps, end = written(monkeypatch, terminal=True, total=20 * GIB)
    assert steps[0] == "\rcopying: 1 GiB of 20 GiB, 102.4 MiB/s, 3 min left"
    assert all(text.startswith("\rcopying: ") and "\n" not in text for text in steps)
    assert end == "\r" + " " * max(len(text) - 1 for text in steps) + "\r"


def test_a_log_has_a_line_every_half_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    *steps, end = written(monkeypatch, terminal=False, total=20 * GIB)
    assert [bool(text) for text in steps] == [False, False, True] * 3 + [False]
    assert steps[2] == "infinity: copying: 3 GiB of 20 GiB, 102.4 MiB/s, 3 min left\n"
    assert end == ""


def test_an_unknown_total_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    found = written(monkeypatch, terminal=False, total=None)
    assert found[2] == "infinity: copying: 3 GiB, 102.4 MiB/s\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_other_ranks_write_nothing(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(written(monkeypatch, terminal=terminal, shown=False, total=20 * GIB))


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("way", ["full", "no reader", "closed", "none"])
def test_a_line_that_cannot_be_written_breaks_nothing_off(
    way: str,
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream: Any = None
    if way == "full":
        stream = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    elif way == "no reader":
        reader, writer = os.pipe()
        os.close(reader)
        stream = os.fdopen(writer, "w")
    elif way == "closed":
        stream = io.StringIO()
    if stream is not None:
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
    clock = Clock()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "time", clock)
    with ProgressLine("copying", 20 * GIB, shown=True) as line:
        if way == "closed":
            stream.close()
        for _ in range(8):
            clock.now_s += 10.0
            line.advance(GIB)
    if way == "closed":
        monkeypatch.delattr(stream, "isatty")
        ProgressLine("copying again", GIB, shown=True).end()
    with contextlib.suppress(OSError):
        if stream is not None:
            stream.close()
    assert capsys.readouterr().out == ""


def test_what_goes_over_all_weights_has_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LOGGED_EVERY_S", 1e-6)
    monkeypatch.setattr(deferred_init, "DEFERRED_BYTES_MIN", 256)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))

    with torch.device("meta"):
        model = build()
    inf.offload(model, inf.Policy(params="cpu", optim="cpu", ram="64MiB"), init=build)
    inf.export_safetensors(model, tmp_path)
    inf.load_safetensors(model, tmp_path)
    optimizer = inf.Elementwise(torch.optim.Adagrad, model.parameters())
    model(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    inf.handle(model).close()
    shown = capsys.readouterr().err.splitlines()
    for title in (
        "drawing initial values",
        "loading parameters",
        "writing weights",
        "loading weights",
        optimizer.title,
    ):
        lines = [line for line in shown if line.startswith(f"infinity: {title}: ")]
        assert lines, title
        # To the last byte, where the total is known.
        _, _, sizes = lines[-1].partition(f"{title}: ")
        done, of, total = sizes.split(", ")[0].partition(" of ")
        assert done == (total if of else done)
