"""Lightning's Trainer with strategy="infinity" on two ranks: it trains, saves and resumes as with
strategy="ddp", and a run of two ranks resumes on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import infinity as inf
from infinity.integrations.lightning import InfinityStrategy
from tests.distributed.ranks import on_ranks
from tests.integrations.lightning_runs import (
    Module,
    Rivals,
    assert_same,
    batches,
    close,
    fit,
    launched,
    offloaded_fit,
    policy,
    states,
    trainer,
)

pytestmark = pytest.mark.integrations

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 2},
    "clip": {"gradient_clip_val": 0.1},
    "local sums": {"accumulate_grad_batches": 2, "policy": {"accumulate": "local"}},
}
TWO: dict[str, Any] = {"devices": 2, "use_distributed_sampler": True}


def _beside_ddp(rank: int, place: Path) -> list[tuple[list[float], list[float]]]:
    found = []
    with launched(LOCAL_RANK=str(rank)):
        for name, run in RUNS.items():
            settings = {key: value for key, value in run.items() if key != "policy"}
            plain, module = Module(), Module(inf.AdamW)
            fit("ddp", plain, **TWO, **settings)
            offloaded_fit(place / name, module, **TWO, **run)
            made = trainer(InfinityStrategy(), **TWO)
            mine = made.validate(module, batches(), verbose=False)[0]["val"]
            theirs = trainer("ddp", **TWO).validate(plain, batches(), verbose=False)[0]["val"]
            found.append(([*plain.losses, theirs], [*module.losses, mine]))
            close(module)
    return found


def test_losses_are_those_of_ddp(tmp_path: Path) -> None:
    for rank in on_ranks(_beside_ddp, tmp_path / "run", 2):
        for name, (plain, offloaded) in zip(RUNS, rank, strict=True):
            assert offloaded == pytest.approx(plain, rel=5e-7), name
            assert len(plain) == 9


SETTINGS: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}


def _kept(place: Path) -> ModelCheckpoint:
    return ModelCheckpoint(place, filename="{epoch}", save_top_k=-1, every_n_epochs=1)


def _whole_and_resumed(rank: int, place: Path) -> bool:
    with launched(LOCAL_RANK=str(rank)):
        whole, first, second = Module(inf.AdamW), Module(inf.AdamW), Module(inf.AdamW, seed=7)
        offloaded_fit(place / "a", whole, max_epochs=3, **TWO, **SETTINGS)
        kept = _kept(place / "kept")
        offloaded_fit(place / "b", first, callbacks=[kept], max_epochs=2, **TWO, **SETTINGS)
        path = place / "kept" / "epoch=1.ckpt"
        offloaded_fit(place / "c", second, ckpt_path=path, max_epochs=3, **TWO, **SETTINGS)
        assert first.losses + second.losses == whole.losses
        assert_same(states(second), states(whole))
        for module in (whole, first, second):
            close(module)
        return len(second.losses) == 4


def test_a_resumed_run_equals_one_that_went_on(tmp_path: Path) -> None:
    assert on_ranks(_whole_and_resumed, tmp_path / "run", 2) == [True, True]


def _first_part(rank: int, place: Path) -> list[float]:
    """Two epochs. Both ranks have the rows that one has alone: the means are the same bits."""
    with launched(LOCAL_RANK=str(rank)):
        module, kept = Module(inf.AdamW), _kept(place / "kept")
        offloaded_fit(place / "swap", module, devices=2, callbacks=[kept], **SETTINGS)
        close(module)
        return module.losses


def test_saved_on_two_ranks_and_resumed_on_one(tmp_path: Path) -> None:
    first = on_ranks(_first_part, tmp_path / "run", 2)
    with launched():
        whole, second = Module(inf.AdamW), Module(inf.AdamW, seed=7)
        offloaded_fit(tmp_path / "whole", whole, max_epochs=3, **SETTINGS)
        path = tmp_path / "run" / "kept" / "epoch=1.ckpt"
        offloaded_fit(tmp_path / "swap", second, ckpt_path=path, max_epochs=3, **SETTINGS)
        assert first[0] + second.losses == whole.losses
        assert_same(states(second), states(whole))


def _values_alone(rank: int, place: Path) -> bool:
    with launched(LOCAL_RANK=str(rank)):
        module, other = Module(inf.AdamW), Module(seed=7)
        made = offloaded_fit(place / "a", module, **TWO)
        made.save_checkpoint(place / "values.ckpt", weights_only=True)
        wanted = made.validate(module, batches(), verbose=False)
        alone = trainer(InfinityStrategy(policy(place / "b")), **TWO)
        path = place / "values.ckpt"
        found = alone.validate(other, batches(), ckpt_path=path, verbose=False)
        close(module)
        close(other)
        return found == wanted


def test_values_alone(tmp_path: Path) -> None:
    assert on_ranks(_values_alone, tmp_path / "run", 2) == [True, True]


def _by_hand(rank: int, place: Path) -> list[float]:
    with launched(LOCAL_RANK=str(rank)):
        first, second = Rivals(inf.AdamW, place=place / "a"), Rivals(inf.AdamW, 7, place / "b")
        fit("infinity", first, devices=2, callbacks=[_kept(place / "kept")])
        path = place / "kept" / "epoch=1.ckpt"
        fit("infinity", second, devices=2, max_epochs=3, ckpt_path=path)
        close(first)
        close(second)
        return first.losses + second.losses


def test_manual_optimization_with_two_optimizers(tmp_path: Path) -> None:
    """Saved and resumed, and with the same rows on both ranks the run of one."""
    ranks = on_ranks(_by_hand, tmp_path / "run", 2)
    with launched():
        alone = Rivals(inf.AdamW, place=tmp_path / "alone")
        fit("infinity", alone, max_epochs=3)
        assert ranks == [alone.losses, alone.losses]


class _Split(Module):
    """Has a head that is not offloaded."""

    def build(self) -> None:
        super().build()
        self.head = nn.Linear(32, 32)


def _refusals(rank: int, place: Path) -> list[str]:
    told = []

    def offload(module: Any) -> None:
        inf.offload(module.net, policy(place / "net"))

    with launched(LOCAL_RANK=str(rank)):
        module = _Split(inf.AdamW, offload)
        with pytest.raises(ValueError) as error:
            fit("infinity", module, **TWO)
        told.append(str(error.value))
        close(module)
        # As without a strategy: each rank has different values.
        module = Module(inf.AdamW, offload, seed=rank)
        with pytest.raises(ValueError) as error:
            fit("infinity", module, **TWO)
        told.append(str(error.value))
        close(module)
        # The strategy takes those of rank 0.
        module = Module(inf.AdamW, seed=rank)
        offloaded_fit(place / "whole", module, **TWO)
        told.append(repr(float(sum(v.double().sum() for v in module.state_dict().values()))))
        close(module)
    return told


def test_what_would_not_be_reduced_is_refused(tmp_path: Path) -> None:
    one, two = on_ranks(_refusals, tmp_path / "run", 2)
    assert one == two
    assert "head.weight, head.bias of _Split: not offloaded" in one[0]
    assert "not the same on all ranks" in one[1]
    assert torch.tensor(float(one[2])).isfinite()


def _early(rank: int, place: Path) -> str:
    """The ranks meet when each has offloaded a net of its own."""
    dist.destroy_process_group()
    module = Module(inf.AdamW)
    inf.offload(module.net, policy(place / str(rank)))
    store = dist.FileStore(str(place / "again"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    with launched(LOCAL_RANK=str(rank)), pytest.raises(ValueError) as error:
        fit("infinity", module, **TWO)
    close(module)
    return str(error.value)


def test_a_net_that_was_offloaded_before_the_ranks_met(tmp_path: Path) -> None:
    for told in on_ranks(_early, tmp_path / "run", 2):
        assert "Net was offloaded for 1 rank(s), and the trainer runs 2" in told
        assert "configure_model" in told
