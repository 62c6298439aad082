"""Several ranks with a current CUDA device that is not the model's: refused at once, on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.engine import build
from infinity._src.engine.handle import offload
from infinity._src.memory import device as module
from infinity.errors import PeerFailed
from tests.distributed.ranks import on_ranks
from tests.fake_cuda import FakeCuda


def offload_on(rank: int, place: Path) -> tuple[str, str]:
    """The error of offload. Rank 1 computes on cuda:1 and never
    called set_device."""
    drive = place / str(rank)
    drive.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            cuda: Any = FakeCuda(patch)
            assert cuda.current == 0
            second = torch.device("cuda", 1)
            patch.setattr(build, "check_current", lambda _device: module.check_current(second))
        model = nn.Linear(4, 4)
        try:
            offload(model, inf.Policy(nvme=drive, params="nvme", optim="nvme", ram="64MiB"))
        except (ValueError, PeerFailed) as error:
            assert isinstance(model.weight, nn.Parameter), "the model is as it was"
            return type(error).__name__, str(error)
    return "", ""


def test_a_rank_that_has_not_set_its_device_is_refused_and_the_others_hear_of_it(
    tmp_path: Path,
) -> None:
    here, there = on_ranks(offload_on, tmp_path / "ranks", 2)
    assert there[0] == "ValueError"
    assert "on cuda:1, and the current CUDA device of this rank is cuda:0" in there[1]
    assert "torch.cuda.set_device(1)" in there[1]
    assert here[0] == "PeerFailed"
    assert "torch.cuda.set_device(local_rank)" in here[1]


def test_one_rank_may_compute_on_a_device_that_is_not_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_device: torch.device) -> None:
        pytest.fail("one rank names the device with each call")

    monkeypatch.setattr(build, "check_current", refuse)
    model = nn.Linear(4, 4)
    offload(model, inf.Policy(nvme=tmp_path, params="nvme", optim="nvme"))
    inf.handle(model).close()
