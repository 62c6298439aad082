"""A closed engine: gradients, memory and the model are let go, and an open gather is not lost."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from tests import models

BATCHES = models.token_batches(3)


def nvme(tmp_path: Path, **values: Any) -> inf.Policy:
    return inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram="min", **values)


def moe() -> nn.Module:
    return models.make(models.ListMoe)


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for batch in BATCHES[:steps]:
        models.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_gradient_kept_past_close_raises_and_its_memory_is_free(tmp_path: Path) -> None:
    model = inf.offload(moe(), nvme(tmp_path))
    optimizer = inf.AdamW(model.parameters())
    models.loss_of(model, BATCHES[0]).backward()
    kept = next(model.parameters()).grad
    inf.handle(model).close()
    with pytest.raises(RuntimeError, match="stale"):
        kept.materialize()  # type: ignore[union-attr]
    assert all(param.grad is None for param in model.parameters())
    assert optimizer.param_groups


def test_parameters_of_an_offloaded_model_are_told_from_others(tmp_path: Path) -> None:
    model = moe()
    assert not any(inf.is_offloaded(param) for param in model.parameters())
    inf.offload(model, nvme(tmp_path))
    added = nn.Linear(2, 2)
    assert all(inf.is_offloaded(param) for param in model.parameters())
    assert not any(inf.is_offloaded(param) for param in added.parameters())
    inf.handle(model).close()
    # It takes no optimizer of torch even now.
    assert all(inf.is_offloaded(param) for param in model.parameters())


def test_close_inside_gather_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    model = inf.offload(moe(), nvme(tmp_path))
    handle = inf.handle(model)
    weight = next(model.parameters())
    with torch.no_grad(), handle.gather(weight):
        weight.fill_(2.0)
        with pytest.raises(RuntimeError, match=r"inside handle\.gather"):
            handle.close()
    assert bool((handle.read(weight.infinity_link.param) == 2.0).all())  # type: ignore[attr-defined]
    handle.close()
    with pytest.raises(ValueError, match="was closed"):
        inf.offload(model, nvme(tmp_path))


def test_a_closed_model_can_be_collected(tmp_path: Path) -> None:
    model = inf.offload(moe(), nvme(tmp_path))
    optimizer = inf.AdamW(model.parameters())
    train(model, optimizer, 1)
    inf.handle(model).close()
    alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert alive() is None


def test_a_closed_engine_keeps_no_gradient_memory(tmp_path: Path) -> None:
    """The handle lives as long as the model."""
    for update in ("delayed", "backward"):
        # other tests' leavings
        before = {id(each) for each in gc.get_objects() if type(each) is torch.Tensor}
        policy = nvme(tmp_path, update=update, delayed_warmup=0)
        model = inf.offload(models.make(models.llama), policy)
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, 3)
        inf.handle(model).close()
        del optimizer
        gc.collect()
        numels = {parameter.numel() for parameter in model.parameters()}
        held = [
            each
            for each in gc.get_objects()
            if type(each) is torch.Tensor and each.dtype is torch.bfloat16 and each.dim() == 1
            if id(each) not in before and each.numel() in numels and each.untyped_storage().nbytes()
        ]
        assert held == []
