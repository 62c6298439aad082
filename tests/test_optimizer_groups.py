"""Optimizers and groups that come late or go, frozen parameters in them, and steps that are
refused."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity.errors import NonFiniteGradient
from tests import models
from tests.harness import assert_same, one_thread, policy, train
from tests.reference import ReferenceAdamW

BATCHES = models.token_batches(8)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def moe() -> nn.Module:
    return models.make(models.ListMoe)


def train_all(pairs: list[tuple[nn.Module, Any]], first: int, last: int) -> None:
    """The same batches through every model, each with its optimizer."""
    for model, optimizer in pairs:
        train(model, optimizer, BATCHES[first:last])
        model.zero_grad()


def test_an_optimizer_built_anew_starts_with_masters_and_moments_of_its_own(tmp_path: Path) -> None:
    model, plain = inf.offload(moe(), policy(tmp_path)), moe()
    for first in (0, 3):
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        theirs = ReferenceAdamW([{"params": list(plain.parameters())}], lr=1e-2)
        train_all([(model, optimizer), (plain, theirs)], first, first + 3)
        assert_same(model, plain)
        del optimizer
        gc.collect()
    inf.handle(model).close()


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_group_added_in_mid_training_leaves_the_states_of_the_others_alone(
    tmp_path: Path, share: float
) -> None:
    probe = inf.offload(moe(), policy(tmp_path))
    optimizer = inf.AdamW(probe.parameters())
    needs = inf.handle(probe).parts.tiers.planner.plan
    inf.handle(probe).close()

    ram = needs.min_bytes + int(share * needs.nvme_bytes)
    model, plain = inf.offload(moe(), policy(tmp_path, ram=ram)), moe()
    mine, theirs = list(model.parameters()), list(plain.parameters())
    optimizer = inf.AdamW(mine[:9], lr=1e-2)
    reference = ReferenceAdamW([{"params": theirs[:9]}], lr=1e-2)
    train_all([(model, optimizer), (plain, reference)], 0, 2)
    optimizer.add_param_group({"params": mine[9:]})
    reference.param_groups.append({**reference.param_groups[0], "params": theirs[9:]})
    reference.params += theirs[9:]
    train_all([(model, optimizer), (plain, reference)], 2, 5)
    assert_same(model, plain)
    inf.handle(model).close()


def test_gradients_that_wait_survive_a_second_optimizer(tmp_path: Path) -> None:
    model = inf.offload(moe(), policy(tmp_path))
    params = [param for param in model.parameters() if param.requires_grad]
    optimizers = [inf.AdamW(params[:3])]
    models.loss_of(model, BATCHES[0]).backward()
    before = [param.grad.materialize() for param in params if param.grad is not None]  # type: ignore[attr-defined]
    optimizers.append(inf.AdamW(params[3:]))
    after = [param.grad.materialize() for param in params if param.grad is not None]  # type: ignore[attr-defined]
    assert len(before) == len(after) > 3
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    inf.handle(model).close()


def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    model = inf.offload(moe(), policy(tmp_path))
    params = list(model.parameters())
    optimizer = inf.AdamW(params[:3])
    for group in ({"params": params[3:], "lr": -1.0}, {"params": [nn.Parameter(torch.ones(1))]}):
        with pytest.raises(ValueError, match=r"range|offloaded"):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": params[3:]})
    inf.handle(model).close()


def test_a_step_over_two_models_happens_to_both_or_to_none(tmp_path: Path) -> None:
    left, right = inf.offload(moe(), policy(tmp_path)), inf.offload(moe(), policy(tmp_path))
    optimizer = inf.AdamW([*left.parameters(), *right.parameters()], lr=0.1)
    for model in (left, right):
        models.loss_of(model, BATCHES[0]).backward()
    before = left.state_dict()
    next(right.parameters()).grad.mul_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(NonFiniteGradient):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in left.state_dict().items())
    assert {entry["step"] for entry in optimizer.state_dict()["state"].values()} == {0}
    for model in (left, right):
        inf.handle(model).close()


def test_a_step_that_is_refused_counts_no_step(tmp_path: Path) -> None:
    model = inf.offload(moe(), policy(tmp_path))
    optimizer = inf.AdamW(model.parameters())
    models.loss_of(model, BATCHES[0]).backward()
    with (
        inf.handle(model).gather(model.parameters()),
        pytest.raises(RuntimeError, match="in use"),
    ):
        optimizer.step()
    assert {entry["step"] for entry in optimizer.state_dict()["state"].values()} == {0}
    inf.handle(model).close()
