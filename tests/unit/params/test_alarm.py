"""A gather queries the owners of faults if one of them has sounded the alarm, and otherwise none.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.checkpoint import save
from infinity._src.engine.access_checks import EngineAccess
from infinity._src.memory import drive_health
from infinity._src.params import unshard
from infinity.errors import DeviceFailedError, DriveLostError, EngineClosed, StateInvalid


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, Any]:
    """A model after a step, of which gathers look at the engine for an alarm alone."""
    monkeypatch.setattr(unshard, "CHECK_S", float("inf"))
    model = inf.offload(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram="min"),
    )
    optimizer = inf.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    inf.handle(model).flush()
    return model, optimizer


def gather(model: nn.Module) -> None:
    handle = inf.handle(model)
    for unit in handle.units:
        handle.unsharder.unshard(unit)


def test_without_an_alarm_no_owner_is_asked(
    trained: tuple[nn.Module, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    gather(trained[0])
    monkeypatch.setattr(EngineAccess, "before_read", lambda _access, unit: asked.append(unit))
    gather(trained[0])
    assert not asked
    monkeypatch.setattr(unshard, "CHECK_S", 0.0)
    inf.handle(trained[0]).unsharder._check_at_s = time.monotonic()
    gather(trained[0])
    assert len(asked) == len(inf.handle(trained[0]).units), "also so often where all is well"
    inf.handle(trained[0]).close()


def fail_an_update(model: nn.Module, _optimizer: Any, _patch: pytest.MonkeyPatch) -> None:
    inf.handle(model).pipeline.set_fault(StateInvalid("an update failed"))


def lose_a_drive(model: nn.Module, _optimizer: Any, patch: pytest.MonkeyPatch) -> None:
    found = inf.handle(model).parts.tiers.storage.drives
    patch.setattr(drive_health, "_ask", lambda *_: "it is gone")
    error = DeviceFailedError("no", path=str(found._directories[0] / "file"))
    assert isinstance(found.examine(error), DriveLostError)


def fail_a_save(model: nn.Module, optimizer: Any, patch: pytest.MonkeyPatch) -> None:
    def fail(_job: object) -> None:
        raise OSError("no space")

    patch.setattr(save._SaveJob, "save", fail)
    inf.save(model, optimizer, inf.handle(model).policy.directories[0] / "saved")
    word, end_s = inf.handle(model).parts.access._alarm.word, time.monotonic() + 30
    while not word.value:
        assert time.monotonic() < end_s
        time.sleep(0.001)


def close(model: nn.Module, _optimizer: Any, _patch: pytest.MonkeyPatch) -> None:
    inf.handle(model).parts.access.close()


@pytest.mark.parametrize(
    ("cause", "error", "again"),
    [
        (fail_an_update, StateInvalid, True),
        (lose_a_drive, DriveLostError, True),
        (fail_a_save, OSError, False),
        (close, EngineClosed, True),
    ],
)
def test_the_next_gather_raises_what_an_owner_has_found(
    trained: tuple[nn.Module, Any],
    monkeypatch: pytest.MonkeyPatch,
    cause: Callable[..., None],
    error: type[Exception],
    again: bool,
) -> None:
    model, optimizer = trained
    gather(model)
    cause(model, optimizer, monkeypatch)
    with pytest.raises(error):
        gather(model)
    with pytest.raises(error) if again else contextlib.nullcontext():
        gather(model)
    inf.handle(model).parts.access.closed = False
    with pytest.raises(error) if again and cause is not close else contextlib.nullcontext():
        inf.handle(model).close()
