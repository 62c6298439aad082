"""Accelerate on two ranks: the losses of DDP, and checkpoints from which two ranks or one resume.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType

import infinity as inf
from infinity.integrations.accelerate import attach
from tests.distributed.ranks import on_ranks
from tests.integrations.accelerate_script import (
    accelerator,
    assert_same,
    losses_of,
    net,
    policy,
    prepared,
    states,
)

pytestmark = pytest.mark.integrations

ACCUMULATED: dict[str, Any] = {"gradient_accumulation_steps": 2, "epochs": 3}
BATCH = 2
"""Rows of a rank: two ranks have four batches an epoch."""


@dataclasses.dataclass(frozen=True)
class Losses:
    """The script on all ranks, under each policy."""

    policies: tuple[dict[str, Any] | None, ...]
    clip: float | None

    def __call__(self, _rank: int, place: Path) -> list[list[float]]:
        return [
            losses_of(
                None if values is None else policy(place, **values),
                clip=self.clip,
                settings={"batch": BATCH},
                **ACCUMULATED,
            )
            for values in self.policies
        ]


@pytest.mark.parametrize("clip", [None, 0.05])
def test_losses_are_those_of_ddp(clip: float | None, tmp_path: Path) -> None:
    policies = (None, {}, {"zero": 1, "accumulate": "local", "params": "device"})
    for ddp, *offloaded in on_ranks(Losses(policies, clip), tmp_path / "ranks", 2):
        for losses in offloaded:
            # Gradients are added up in another order, and optimizers of torch join roundings.
            assert losses == pytest.approx(ddp, rel=2e-6)
        assert len(set(ddp)) == len(ddp)


def test_one_rank_of_a_launcher_is_one_rank(tmp_path: Path) -> None:
    """accelerate takes it for distributed, and would wrap the model."""
    [[alone]] = on_ranks(Losses(({},), None), tmp_path / "ranks", 1)
    assert alone == losses_of(policy(tmp_path), settings={"batch": BATCH}, **ACCUMULATED)


@dataclasses.dataclass(frozen=True)
class TwoModels:
    """An offloaded model and one that DDP wraps, step by step in turn."""

    def __call__(self, rank: int, place: Path) -> list[dict[str, Any]]:
        with accelerator() as own:
            attach(own)
            one, other = inf.offload(net(0), policy(place)), net(1)
            opts = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, other)]
            one, other, *opts = own.prepare(one, other, *opts)
            for step in range(4):
                rows = torch.full((2, 12), 1.0 + rank + step)
                loss = other(one(rows).repeat(1, 4)).square().mean()
                own.backward(loss)
                for opt in opts:
                    opt.step()
                    opt.zero_grad()
                if step == 1:
                    own.save_state(place / "ckpt")
                    saved = one.state_dict(), own.unwrap_model(other).state_dict()
                    kept = [{n: v.clone() for n, v in each.items()} for each in saved]
            assert type(other).__name__ == "DistributedDataParallel"
            own.load_state(place / "ckpt")
            back = [one.state_dict(), own.unwrap_model(other).state_dict()]
            for found, expected in zip(back, kept, strict=True):
                assert_same(dict(found), expected)
            # Before it destroys the groups.
            own.end_training()
            assert inf.offloaded_modules(one) == []
            return kept


def test_an_offloaded_model_trains_beside_one_of_ddp(tmp_path: Path) -> None:
    one, other = on_ranks(TwoModels(), tmp_path / "ranks", 2)
    for found, expected in zip(one, other, strict=True):
        assert_same(found, expected)


@dataclasses.dataclass(frozen=True)
class Resumed:
    """Train, save, train; then restore into a fresh model, and train."""

    def __call__(self, rank: int, place: Path) -> tuple[Any, ...]:
        with accelerator(gradient_accumulation_steps=2) as own:
            assert own.distributed_type is DistributedType.MULTI_CPU
            run = prepared(own, policy(place), batch=BATCH)
            run.train(1)
            own.save_state(place / "ckpt")
            saved = states(run.model)
            run.losses.clear()
            run.train(2)
            whole, ended = run.losses, states(run.model)
            own.save_model(run.model, place / "weights")
            values = own.get_state_dict(run.model)
            own.free_memory()
        with accelerator(gradient_accumulation_steps=2) as own:
            run = prepared(own, policy(place, optim="cpu"), batch=BATCH)
            own.load_state(place / "ckpt")
            assert_same(states(run.model), saved)
            run.train(2)
            assert run.losses == whole
            assert_same(states(run.model), ended)
            own.free_memory()
        return saved, ended, values


def test_two_ranks_resume_bit_for_bit_and_one_rank_takes_up_what_two_saved(tmp_path: Path) -> None:
    results = on_ranks(Resumed(), tmp_path / "ranks", 2)
    saved, ended, values = results[0]
    assert_same(results[1][0], saved)
    assert_same(results[1][1], ended)
    from safetensors.torch import load_file

    assert_same(load_file(tmp_path / "ranks" / "weights" / "model.safetensors"), values)
    with accelerator(gradient_accumulation_steps=2) as own:
        run = prepared(own, policy(tmp_path), batch=BATCH)
        own.load_state(tmp_path / "ranks" / "ckpt")
        assert_same(states(run.model), saved)
        # The schedule stands where two ranks had brought it: it moves once for each of them.
        rate = run.optimizer.param_groups[0]["lr"]
        assert rate == pytest.approx(1e-2 * 5 / 9)
        run.train(1)
        assert all(torch.isfinite(torch.tensor(run.losses)))
        own.free_memory()
    assert inf.offloaded_modules(run.model) == []
