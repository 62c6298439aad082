"""Calls of training loops between forward, backward and step, and after `close`. None changes
numbers without an error that says what is wrong; a closed engine lets gradients, memory and the
model go."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity.errors import BudgetError, EngineClosed
from tests import harness, models
from tests.harness import assert_same, policy, train, values_of

BATCHES = models.token_batches(3)


def trained(model: nn.Module, optimizer: Any, before_step: Any = None) -> dict[str, torch.Tensor]:
    with harness.one_thread():
        for index, batch in enumerate(BATCHES):
            models.loss_of(model, batch).backward()
            if before_step is not None:
                before_step(index, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return values_of(model)


@pytest.mark.parametrize(
    "make", [inf.AdamW, lambda params: inf.SGD(params, lr=1e-2, momentum=0.9)], ids=["AdamW", "SGD"]
)
def test_a_step_that_cannot_compute_its_numbers_has_not_been_taken(
    make: Any, tmp_path: Path
) -> None:
    def fail(index: int, optimizer: Any) -> None:
        if index == 1:
            group = optimizer.param_groups[0]
            right, group["lr"] = group["lr"], None
            with pytest.raises((TypeError, ValueError)):
                optimizer.step()
            group["lr"] = right

    def run(path: Path, before_step: Any) -> tuple[dict[str, torch.Tensor], set[int]]:
        path.mkdir()
        # its rounding depends on the step's number
        model = inf.offload(models.make(models.Small), policy(path, state="bf16"))
        handle = inf.handle(model)
        optimizer = make(model.parameters())
        values = trained(model, optimizer, before_step)
        steps = {handle.optimizer_state(param)["step"] for param in model.parameters()}
        handle.close()
        return values, steps

    (found, steps), (expected, _) = run(tmp_path / "failing", fail), run(tmp_path / "plain", None)
    assert steps == {len(BATCHES)}
    assert_same(found, expected)


def test_a_scheduler_may_be_made_between_backward_and_step(tmp_path: Path) -> None:
    """Making a scheduler writes `initial_lr` into the groups, which no update takes."""

    def schedule(index: int, optimizer: Any) -> None:
        if index == 1:
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)

    model = inf.offload(models.make(models.Small), policy(tmp_path, update="backward"))
    trained(model, inf.AdamW(model.parameters()), schedule)
    assert inf.handle(model).stats().step_count == len(BATCHES)
    inf.handle(model).close()


def test_a_backward_after_close_says_so(tmp_path: Path) -> None:
    model = inf.offload(models.make(models.Small), policy(tmp_path))
    loss = models.loss_of(model, BATCHES[0])
    inf.handle(model).close()
    with pytest.raises(EngineClosed, match="the engine of this model was closed"):
        loss.backward()


def test_parameters_in_another_order_in_memory_are_named(tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 2))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inf.handle(inf.offload(make(), policy(tmp_path))).close()
    with pytest.warns(UserWarning, match="0.weight: dimensions are in another order"):
        model = inf.offload(make().to(memory_format=torch.channels_last), policy(tmp_path))
    assert_same(dict(model.state_dict()), dict(make().state_dict()))
    inf.handle(model).close()


def test_the_least_that_is_named_beside_another_model_works(tmp_path: Path) -> None:
    def second(ram: int | str) -> None:
        model = inf.offload(models.make(models.Small), policy(tmp_path, ram=ram))
        try:
            inf.AdamW(model.parameters())
        finally:
            inf.handle(model).close()

    first = inf.offload(models.make(models.Small), policy(tmp_path, ram="64MiB"))
    inf.AdamW(first.parameters())
    with pytest.raises(BudgetError, match="other models hold") as caught:
        second("100KiB")
    assert "close those that are done with" in str(caught.value)
    least = re.search(r"works is (\d+) bytes", str(caught.value))
    assert least is not None
    second(int(least[1]))
    with pytest.raises(BudgetError):
        second(int(least[1]) - 4096)
    inf.handle(first).close()


def test_a_gradient_kept_past_close_raises_and_its_memory_is_free(tmp_path: Path) -> None:
    model = inf.offload(models.make(models.ListMoe), policy(tmp_path))
    optimizer = inf.AdamW(model.parameters())
    models.loss_of(model, BATCHES[0]).backward()
    kept = next(model.parameters()).grad
    inf.handle(model).close()
    with pytest.raises(RuntimeError, match="stale"):
        kept.materialize()  # type: ignore[union-attr]
    assert all(param.grad is None for param in model.parameters())
    assert optimizer.param_groups


def test_parameters_of_an_offloaded_model_are_told_from_others(tmp_path: Path) -> None:
    model = models.make(models.ListMoe)
    assert not any(inf.is_offloaded(param) for param in model.parameters())
    inf.offload(model, policy(tmp_path))
    added = nn.Linear(2, 2)
    assert all(inf.is_offloaded(param) for param in model.parameters())
    assert not any(inf.is_offloaded(param) for param in added.parameters())
    inf.handle(model).close()
    # It takes no optimizer of torch even now.
    assert all(inf.is_offloaded(param) for param in model.parameters())


def test_close_inside_gather_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    model = inf.offload(models.make(models.ListMoe), policy(tmp_path))
    handle = inf.handle(model)
    weight = next(model.parameters())
    with torch.no_grad(), handle.gather(weight):
        weight.fill_(2.0)
        with pytest.raises(RuntimeError, match=r"inside handle\.gather"):
            handle.close()
    assert bool((handle.read(weight.infinity_link.param) == 2.0).all())  # type: ignore[attr-defined]
    handle.close()
    with pytest.raises(ValueError, match="was closed"):
        inf.offload(model, policy(tmp_path))


def test_a_closed_model_can_be_collected(tmp_path: Path) -> None:
    model = inf.offload(models.make(models.ListMoe), policy(tmp_path))
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
        # models that other tests left open
        before = {id(each) for each in gc.get_objects() if type(each) is torch.Tensor}
        chosen = policy(tmp_path, update=update, delayed_warmup=0)
        model = inf.offload(models.make(models.Small), chosen)
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
