"""Calls of training loops between forward, backward and step. None changes numbers without an error
that says what is wrong."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity.errors import BudgetError, EngineClosed
from tests import harness, models
from tests.test_bad_input import llama, nvme, values_of

BATCHES = models.token_batches(4)


def train(model: nn.Module, optimizer: Any, before_step: Any = None) -> dict[str, torch.Tensor]:
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
        model = inf.offload(llama(), nvme(path, state="bf16"))
        handle = inf.handle(model)
        optimizer = make(model.parameters())
        values = train(model, optimizer, before_step)
        steps = {handle.optimizer_state(param)["step"] for param in model.parameters()}
        handle.close()
        return values, steps

    (found, steps), (expected, _) = run(tmp_path / "failing", fail), run(tmp_path / "plain", None)
    assert steps == {len(BATCHES)}
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_scheduler_may_be_made_between_backward_and_step(tmp_path: Path) -> None:
    """Making a scheduler writes `initial_lr` into the groups, which no update takes."""

    def schedule(index: int, optimizer: Any) -> None:
        if index == 1:
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)

    model = inf.offload(llama(), nvme(tmp_path, update="backward"))
    train(model, inf.AdamW(model.parameters()), schedule)
    assert inf.handle(model).stats().step_count == len(BATCHES)
    inf.handle(model).close()


def test_a_backward_after_close_says_so(tmp_path: Path) -> None:
    model = inf.offload(llama(), nvme(tmp_path))
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
        inf.handle(inf.offload(make(), nvme(tmp_path))).close()
    with pytest.warns(UserWarning, match="0.weight: dimensions are in another order"):
        model = inf.offload(make().to(memory_format=torch.channels_last), nvme(tmp_path))
    assert all(
        torch.equal(value, make().state_dict()[name]) for name, value in model.state_dict().items()
    )
    inf.handle(model).close()


def test_the_least_that_is_named_beside_another_model_works(tmp_path: Path) -> None:
    def second(ram: int | str) -> None:
        model = inf.offload(llama(), nvme(tmp_path, ram=ram))
        try:
            inf.AdamW(model.parameters())
        finally:
            inf.handle(model).close()

    first = inf.offload(llama(), nvme(tmp_path, ram="64MiB"))
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
