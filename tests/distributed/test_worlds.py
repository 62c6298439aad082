"""One training at several world sizes, compared with torch's DistributedDataParallel."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from tests import harness, models
from tests.distributed.plain_ranks import Ddp, assert_near
from tests.distributed.rank_models import (
    Odd,
    Routed,
    RoutedTraining,
    SameTraining,
    Sums,
    SumsTraining,
)
from tests.distributed.ranks import Train, assert_ranks_agree, mean_losses, named, on_ranks
from tests.harness import Result, Training
from tests.marks import FOUR, THREE

STAGES: tuple[dict[str, Any], ...] = (
    {"zero": 3, "params": "nvme", "optim": "nvme", "ram": "min"},
    {"zero": 2, "params": "device", "optim": "cpu"},
    {"zero": 1, "params": "device", "optim": "nvme"},
)


def whole(results: Sequence[Result]) -> Result:
    """Merge the results of the ranks, which must agree, into one run of the global batches."""
    assert_ranks_agree(results)
    return dataclasses.replace(results[0], losses=mean_losses(results))


def trained(
    runs: Sequence[tuple[Training, dict[str, Any]]], place: Path, world: int
) -> list[Result]:
    return [
        whole(results) for results in zip(*on_ranks(Train(tuple(runs)), place, world), strict=True)
    ]


LLAMA = functools.partial(models.llama, 2)
FP32 = Training(LLAMA, steps=2, rows=12, lr=1e-3, max_norm=0.7, dtype=torch.float32)


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3, 4])
def test_one_training_at_every_world_size_is_the_same_within_rounding(
    tmp_path: Path, world: int
) -> None:
    """In fp32, and in bf16, where gradients of fewer rows are rounded more often."""
    bf16 = dataclasses.replace(FP32, dtype=torch.bfloat16)
    odd = Training(Odd, steps=2, rows=12, lr=1e-3, dtype=torch.float32)
    runs = [(training, stage) for training in (FP32, odd, bf16) for stage in STAGES]
    for (training, stage), ours in zip(runs, trained(runs, tmp_path / "run", world), strict=True):
        one = harness.reference(training)
        with named(training, stage):
            if training is bf16:
                assert_near(ours, one, losses=2e-3, norms=1e-2, share=0.9, far=2 * 2 * 1e-3)
            else:
                assert_near(ours, one, losses=1e-5, norms=1e-4, share=0.99, far=2 * 2 * 1e-3)


@pytest.mark.parametrize("world", [2, THREE, FOUR])
def test_where_sums_are_exact_every_world_size_gives_the_same_bits(
    tmp_path: Path, world: int
) -> None:
    """Three ranks: the mean of three equal bf16 gradients is each of them. Two and four: also of
    different whole numbers."""
    same = SameTraining(LLAMA, steps=2, rows=2, lr=2e-3, max_norm=1e6)
    # Of an odd world no other sums are exact, at any stage.
    stages = STAGES if world % 2 else STAGES[:1]
    runs: list[tuple[Training, dict[str, Any]]] = [
        (dataclasses.replace(same, copies=world), stage) for stage in stages
    ]
    compact = {**STAGES[0], "state": "compact"}
    runs.append((dataclasses.replace(same, copies=world), compact))
    sums = SumsTraining(Sums, steps=3, rows=8, lr=2e-3, max_norm=1e6)
    if world % 2 == 0:
        runs += [(sums, stage) for stage in (*STAGES, compact)]
    for (training, chosen), ours in zip(runs, trained(runs, tmp_path / "run", world), strict=True):
        alone = (
            dataclasses.replace(training, copies=1)
            if isinstance(training, SameTraining)
            else training
        )
        with named(type(training), chosen):
            one = harness.offloaded(alone, inf.Policy(state=chosen.get("state", "exact")))
            assert ours.norms == pytest.approx(one.norms, rel=1e-5)
            if training is not sums:  # whose loss is a sum of activations, in another order
                assert ours.losses == pytest.approx(one.losses, rel=1e-7)
            harness.assert_equal(Result([], [], [], ours.params), Result([], [], [], one.params))


ROUTED = RoutedTraining(
    Routed, steps=2, rows=6, lr=1e-3, dtype=torch.float32, no_sync=True, max_norm=0.5
)
TRAININGS: tuple[Training, ...] = (
    Training(
        LLAMA,
        steps=2,
        accumulation=2,
        rows=6,
        lr=1e-3,
        dtype=torch.float32,
        max_norm=0.5,
        no_sync=True,
    ),
    ROUTED,
    Training(functools.partial(models.lora, 2), steps=2, rows=6, lr=1e-3, dtype=torch.float32),
    Training(
        models.gpt2, steps=2, rows=6, lr=1e-3, dtype=torch.float32, max_norm=None, groups=True
    ),
    Training(LLAMA, steps=2, rows=6, lr=1e-3, dtype=torch.float32, checkpointing=False),
    Training(LLAMA, steps=2, accumulation=2, rows=6, lr=1e-3, max_norm=0.5, no_sync=True),
)


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, THREE])
def test_every_stage_is_ddp_with_the_same_update_within_rounding(
    tmp_path: Path, world: int
) -> None:
    """Clipping, accumulation with no_sync, schedules, experts that some ranks do not use, frozen
    and tied weights."""
    theirs = [
        whole(results)
        for results in zip(*on_ranks(Ddp(TRAININGS), tmp_path / "ddp", world), strict=True)
    ]
    stages = STAGES if world == 2 else STAGES[::2]
    runs = [(training, stage) for stage in stages for training in TRAININGS]
    for (training, stage), ours in zip(runs, trained(runs, tmp_path / "run", world), strict=True):
        other = theirs[TRAININGS.index(training)]
        far = 2 * training.steps * training.lr
        with named(training, stage):
            if training.dtype is torch.bfloat16:
                assert_near(ours, other, losses=2e-3, norms=1e-2, share=0.9, far=far)
            else:
                assert_near(ours, other, losses=1e-5, norms=1e-4, share=0.99, far=far)
