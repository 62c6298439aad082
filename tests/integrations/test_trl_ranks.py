"""TRL's trainers on two ranks: against DDP, and resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("trl")
pytest.importorskip("peft")

from tests.distributed.ranks import on_ranks
from tests.integrations import trl_runs
from tests.integrations.trl_runs import SAVED, STEPS, Result

pytestmark = pytest.mark.integrations

WORLD = 2


@contextlib.contextmanager
def launched(rank: int, world: int) -> Iterator[None]:
    """The environment that torchrun gives to a rank; the group is there already."""
    found = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    from accelerate.state import AcceleratorState

    with mock.patch.dict(os.environ, found):
        try:
            yield
        finally:
            # The process does another job next.
            AcceleratorState._reset_state(reset_partial_state=True)


@dataclasses.dataclass(frozen=True)
class Train:
    """A task on each rank. resume: a directory that a run saved to."""

    task: str
    models: Path
    offloads: bool
    given: tuple[tuple[str, Any], ...] = ()
    resume: Path | None = None

    def __call__(self, rank: int, place: Path) -> Result:
        given = {"ddp_backend": "gloo", **dict(self.given)}
        with launched(rank, dist.get_world_size()):
            if not self.offloads:
                return trl_runs.plain(self.task, self.models, place / "out", **given)
            return trl_runs.embedded(
                self.task, self.models, place / "out", resume=self.resume, **given
            )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trl_runs.write_pretrained(tmp_path_factory.mktemp("models"))


def assert_ranks_agree(results: list[Result]) -> None:
    for other in results[1:]:
        for name, value in results[0].params.items():
            assert torch.equal(value, other.params[name]), name


@pytest.mark.parametrize("task", ["sft", "sft-packed", "sft-lora", "dpo", "dpo-sync", "dpo-lora"])
def test_two_ranks_equal_ddp_and_resume(task: str, models: Path, tmp_path: Path) -> None:
    want = on_ranks(Train(task, models, offloads=False), tmp_path / "ddp", WORLD)
    saves = (("save_strategy", "steps"), ("save_steps", SAVED))
    whole = on_ranks(Train(task, models, offloads=True, given=saves), tmp_path / "whole", WORLD)
    assert_ranks_agree(whole)
    for got, ddp in zip(whole, want, strict=True):
        # A mean of two ranks, and AdamW, round otherwise than DDP's and torch's.
        torch.testing.assert_close(
            torch.tensor(got.losses), torch.tensor(ddp.losses), rtol=1e-6, atol=1e-7
        )
        for name, value in ddp.params.items():
            torch.testing.assert_close(got.params[name], value, rtol=1e-4, atol=1e-6)
    saved = tmp_path / "whole" / "out" / f"checkpoint-{SAVED}"
    resumed = on_ranks(
        Train(task, models, offloads=True, resume=saved), tmp_path / "resumed", WORLD
    )
    for got, uninterrupted in zip(resumed, whole, strict=True):
        assert len(got.losses) == STEPS - SAVED
        uninterrupted.losses[:SAVED] = []
        trl_runs.assert_same(got, uninterrupted)


def test_one_rank_resumes_what_two_have_saved(models: Path, tmp_path: Path) -> None:
    saves = (("save_strategy", "steps"), ("save_steps", SAVED))
    two = on_ranks(Train("sft", models, offloads=True, given=saves), tmp_path / "two", WORLD)
    saved = tmp_path / "two" / "out" / f"checkpoint-{SAVED}"
    one = trl_runs.embedded(
        # The rows of both ranks.
        "sft", models, tmp_path / "one", resume=saved, per_device_train_batch_size=4
    )  # fmt: skip
    means = [sum(losses) / WORLD for losses in zip(*(each.losses for each in two), strict=True)]
    torch.testing.assert_close(one.losses, means[SAVED:], rtol=1e-6, atol=0)


def test_ranks_generate_texts_of_different_lengths(models: Path, tmp_path: Path) -> None:
    """Each rank continues to compute until the longest text of all ranks has ended."""
    want = on_ranks(Train("grpo-beta", models, offloads=False), tmp_path / "ddp", WORLD)
    got = on_ranks(Train("grpo-beta", models, offloads=True), tmp_path / "offloaded", WORLD)
    assert_ranks_agree(got)
    assert [row.get("reward") for row in got[0].logged] == [
        row.get("reward") for row in want[0].logged
    ]
