"""The trainer that docs/embedding.md shows: against a plain loop, interrupted, and on two ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import infinity as inf
from docs.examples.own_trainer import Batch, Trainer
from tests import models
from tests.distributed.ranks import on_ranks
from tests.reference import ReferenceAdamW

STEPS, ACCUMULATE, LR = 6, 2, 1e-2
PAGE = Path(__file__).resolve().parents[2] / "docs" / "embedding.md"


@dataclasses.dataclass(frozen=True)
class Rows:
    """Micro-batches of one rank: its part of the rows of each."""

    rank: int = 0
    world: int = 1

    def __call__(self, step: int, n: int) -> Batch:
        ids = models.token_batches(1, seed=10 * step + n, rows=4)[0]["input_ids"]
        mine = ids.chunk(self.world)[self.rank]
        return {"input_ids": mine, "labels": mine}


def trainer(place: Path, rows: Rows, max_norm: float | None = None) -> Trainer:
    policy = inf.Policy(params="nvme", optim="nvme", nvme=place, ram="min")
    torch.manual_seed(0)
    return Trainer(
        models.llama, policy, rows, steps=STEPS, lr=LR, accumulate=ACCUMULATE, max_norm=max_norm
    )


def plain(
    rows: Rows, max_norm: float | None = None, *, ddp: bool = False, rounded_once: bool = False
) -> Any:
    """Losses of a loop with torch's own parts, and the model. rounded_once: with the AdamW of the
    tests, whose operations all round once, as torch's root does not."""
    torch.manual_seed(0)
    model = models.llama()
    called = torch.nn.parallel.DistributedDataParallel(model) if ddp else model
    torchs = torch.optim.AdamW(model.parameters(), lr=LR, foreach=False)
    scheduler = torch.optim.lr_scheduler.LinearLR(torchs, 1.0, 0.1, STEPS)
    optimizer: Any = torchs
    if rounded_once:
        optimizer = ReferenceAdamW([{"params": model.parameters()}], lr=LR)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for n in range(ACCUMULATE):
            loss = called(**rows(step, n)).loss / ACCUMULATE
            loss.backward()
            total += loss.item()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=False)
        optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_losses_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    embedded = trainer(tmp_path, Rows())
    losses = [embedded.step() for _ in range(STEPS)]
    expected, model = plain(Rows(), rounded_once=True)
    assert losses == expected
    assert losses == pytest.approx(plain(Rows())[0], rel=1e-6)
    held_out = [Rows()(100, n) for n in range(3)]
    with torch.no_grad():
        mean = sum(model.eval()(**batch).loss.item() for batch in held_out) / 3
    assert embedded.evaluate(held_out) == mean
    embedded.finish(tmp_path / "out")
    model.config.save_pretrained(tmp_path / "out")
    again = type(model).from_pretrained(tmp_path / "out").state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(again[name], value), name


def test_clipped_losses_differ_by_the_rounding_of_the_norm(tmp_path: Path) -> None:
    embedded = trainer(tmp_path, Rows(), max_norm=0.1)
    losses = [embedded.step() for _ in range(STEPS)]
    embedded.handle.close()
    expected, _ = plain(Rows(), max_norm=0.1)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses != plain(Rows())[0], "nothing was clipped"


def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = trainer(tmp_path, Rows(), max_norm=0.1)
    losses = [whole.step() for _ in range(3)]
    whole.save(tmp_path / "checkpoint")
    losses += [whole.step() for _ in range(3)]
    whole.finish(tmp_path / "whole")

    resumed = trainer(tmp_path, Rows(), max_norm=0.1)
    resumed.step()  # something else than the checkpoint has
    resumed.resume(tmp_path / "checkpoint")
    assert resumed.done == 3
    assert [resumed.step() for _ in range(3)] == losses[3:]
    resumed.finish(tmp_path / "resumed")
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "resumed")[name], value), name


@dataclasses.dataclass(frozen=True)
class TwoRanks:
    """Embedded, then resumed from half, and by DDP."""

    def __call__(self, rank: int, place: Path) -> dict[str, list[float]]:
        rows = Rows(rank, dist.get_world_size())
        first = trainer(place, rows)
        losses = [first.step() for _ in range(3)]
        first.save(place / "checkpoint")
        losses += [first.step() for _ in range(3)]
        first.finish(place / "out")
        second = trainer(place, rows)
        second.resume(place / "checkpoint")
        resumed = [second.step() for _ in range(3)]
        second.handle.close()
        return {"embedded": losses, "resumed": resumed, "ddp": plain(rows, ddp=True)[0]}


@pytest.mark.integrations
def test_two_ranks_train_as_ddp_and_one_goes_on_from_their_checkpoint(tmp_path: Path) -> None:
    found = on_ranks(TwoRanks(), tmp_path / "run", 2)
    for rank in found:
        assert rank["embedded"] == pytest.approx(rank["ddp"], rel=1e-6)
        assert rank["resumed"] == rank["embedded"][3:]
    one = trainer(tmp_path, Rows())
    one.resume(tmp_path / "run" / "checkpoint")
    assert one.done == 3
    mean = [sum(pair) / 2 for pair in zip(*(rank["embedded"] for rank in found), strict=True)]
    assert [one.step() for _ in range(3)] == pytest.approx(mean[3:], rel=1e-5)
    one.handle.close()


def test_the_page_shows_this_trainer() -> None:
    source = (PAGE.parent / "examples" / "own_trainer.py").read_text(encoding="utf-8")
    shown = source.partition('"""\n\n')[2].partition("\n\n\ndef tiny_model")[0]
    assert f"```python\n{shown}\n```" in PAGE.read_text(encoding="utf-8")
