"""fp16 in infinity.compat.deepspeed: the rules of loss scales step by step, and steps that
overflow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.compat.deepspeed.loss_scale import (
    AutocastLossScaler,
    DynamicLossScaler,
    LossScaleAtMinimum,
    LossScaler,
)
from tests.integrations.deepspeed_runs import (
    alone,
    assert_same,
    batches,
    built,
    config,
    native,
    net,
    train,
    values_of,
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCAL_RANK", "0")
    with alone():
        yield


def scales(scaler: LossScaler, overflows: str) -> list[float]:
    """The scale after each step: "x" for one that overflows, "." for one that does not."""
    found = []
    for step in overflows:
        scaler.update_scale(step == "x")
        found.append(scaler.cur_scale)
    return found


def dynamic(scale: float, window: int, hysteresis: int = 1, **settings: Any) -> DynamicLossScaler:
    return DynamicLossScaler(scale, window, 1.0, hysteresis, **settings)


# -- the rules -------------------------------------------------------------------------------------


def test_an_overflow_halves_and_a_window_without_doubles() -> None:
    assert scales(dynamic(8, 2), "x..x.....") == [4, 4, 4, 2, 2, 2, 4, 4, 8]


def test_the_first_window_begins_before_the_first_step() -> None:
    # The count of steps without overflow begins at -1.
    assert scales(dynamic(8, 2), ".....") == [8, 8, 16, 16, 32]


def test_hysteresis_is_used_up_first_and_refilled_by_a_doubling() -> None:
    assert scales(dynamic(8, 2, hysteresis=2), "xxx") == [8, 4, 2]
    # The first overflow uses up the hysteresis, a doubling refills it: the next overflow halves
    # nothing.
    assert scales(dynamic(8, 2, hysteresis=2), "x...xx") == [8, 8, 8, 16, 16, 8]
    # Without a doubling in between the hysteresis is not refilled.
    assert scales(dynamic(8, 9, hysteresis=2), "x.x") == [8, 8, 4]


def test_consecutive_hysteresis_is_refilled_by_each_step_without_overflow() -> None:
    scaler = dynamic(8, 9, hysteresis=2, consecutive_hysteresis=True)
    assert scales(scaler, "x.x.xx") == [8, 8, 8, 8, 8, 4]


def test_an_overflow_at_the_least_scale_raises() -> None:
    scaler = DynamicLossScaler(4, 9, 2.0)
    assert scales(scaler, "x") == [2]
    with pytest.raises(LossScaleAtMinimum, match=r"min_loss_scale=2\.0"):
        scaler.update_scale(True)
    # Without the error the scale stays at its minimum.
    assert scales(DynamicLossScaler(3, 9, 2.0, raise_error_at_min_scale=False), "xx") == [2, 2]


def test_a_fixed_scale_stays() -> None:
    assert scales(LossScaler(64), "x..x") == [64] * 4


def test_autocast_has_the_rules_of_torchs_scaler() -> None:
    theirs = torch.amp.GradScaler("cpu", growth_interval=2000)
    ours = AutocastLossScaler()
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    for step in range(2005):
        theirs.scale(param.sum())
        param.grad = torch.full((1,), math.inf if step in (0, 1) else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update_scale(step in (0, 1))
        assert ours.cur_scale == theirs.get_scale()
    assert ours.cur_scale == 2.0**15


# -- steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_a_scale_changes_no_bit(clip: float, tmp_path: Path) -> None:
    fp16 = {"enabled": True, "loss_scale": 32.0}
    settings = config(3, tmp_path, fp16=fp16, gradient_clipping=clip)
    data = batches(4, torch.float16)
    plain = native(settings, data, dtype=torch.float16, clip=clip, scale=32.0)
    engine = built(net(), settings)
    assert train(engine, data) == plain.losses
    assert_same(values_of(engine.module), plain.values)
    assert engine.optimizer.cur_scale == engine.optimizer.loss_scale == 32.0
    assert not engine.dynamic_loss_scale()
    engine.destroy()


def test_steps_that_overflow_are_skipped() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 2}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
    engine = built(net(), config(fp16=fp16, scheduler=schedule))
    (good, labels), optimizer = batches(1, torch.float16)[0], engine.optimizer
    bad = good.clone()
    bad[0, 0] = math.inf
    told = []
    for kind in "x..x.x":
        before, rate = values_of(engine.module), engine.get_lr()
        train(engine, [(bad if kind == "x" else good, labels)])
        told.append((optimizer.overflow, optimizer.cur_scale, engine.was_step_applied()))
        if kind == "x":
            assert_same(values_of(engine.module), before)
            assert engine.get_lr() == rate
            assert engine.get_global_grad_norm() == math.inf
            assert all(param.grad is None for param in engine.module.parameters())
        else:
            assert engine.get_lr() != rate or engine.lr_scheduler.last_batch_iteration == 0
            assert 0 < engine.get_global_grad_norm() < math.inf
    assert told == [
        (True, 128.0, False), (False, 128.0, True), (False, 128.0, True), (True, 64.0, False),
        (False, 64.0, True), (True, 32.0, False),
    ]  # fmt: skip
    assert (engine.global_steps, engine.skipped_steps) == (6, 3)
    # Steps that were taken, alone, are counted by the optimizer.
    assert engine.lr_scheduler.last_batch_iteration == 2
    engine.destroy()


def test_a_run_at_the_least_scale_ends() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 0, "min_loss_scale": 1, "hysteresis": 1}
    engine = built(net(), config(fp16=fp16))
    x, y = batches(1, torch.float16)[0]
    x[0, 0] = math.nan
    with pytest.raises(LossScaleAtMinimum):
        train(engine, [(x, y)])
    engine.destroy()


def test_a_loss_that_was_not_scaled_is_refused() -> None:
    engine = built(net(), config(fp16={"enabled": True, "initial_scale_power": 4}))
    x, y = batches(1, torch.float16)[0]
    with pytest.raises(RuntimeError, match="Loss scaling is required"):
        engine(x, y).backward()
    scaled = engine.scale(engine(x, y))
    scaled.backward()
    engine.step()
    # It counts for one backward only.
    with pytest.raises(RuntimeError, match="Loss scaling is required"):
        engine(x, y).backward()
    engine.destroy()


class _Raises(torch.autograd.Function):
    """A step between the engine's output and the loss whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in backward")


def test_a_backward_that_raises_leaves_no_scaled_loss_behind() -> None:
    engine = built(net(), config(fp16={"enabled": True, "initial_scale_power": 4}))
    x, y = batches(1, torch.float16)[0]
    # Once before a hook of the engine has run, and once after.
    with pytest.raises(ZeroDivisionError):
        engine.scale(_Raises.apply(engine(x, y))).backward()
    with pytest.raises(RuntimeError, match="Loss scaling is required"):
        engine(x, y).backward()
    with pytest.raises(ZeroDivisionError):
        engine.scale(engine(_Raises.apply(x.requires_grad_()), y)).backward()
    with pytest.raises(RuntimeError, match="Loss scaling is required"):
        engine(x.detach(), y).backward()
    engine.zero_grad()
    engine.scale(engine(x.detach(), y)).backward()
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()


def test_a_loss_scaled_by_hand_has_the_same_gradients() -> None:
    settings = config(
        fp16={"enabled": True, "initial_scale_power": 4}, gradient_accumulation_steps=2
    )
    data = batches(4, torch.float16)
    engine = built(net(), settings)
    losses = train(engine, data)
    values = values_of(engine.module)
    engine.destroy()
    engine, by_hand = built(net(), settings), []
    for x, y in data:
        loss = engine(x, y)
        engine.scale(loss).backward()
        engine.step()
        by_hand.append(loss.item())
    assert by_hand == losses
    assert_same(values_of(engine.module), values)
    engine.destroy()


def test_inputs_are_cast_where_the_configuration_says_so() -> None:
    engine = built(net(), config(fp16={"enabled": True, "auto_cast": True}))
    seen = []
    engine.module.layers[0].register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    engine(*batches(1)[0])
    assert seen[0].dtype is torch.float16
    engine.destroy()


def test_bf16_skips_a_step_that_is_not_finite() -> None:
    for check, skipped in ((True, 1), (False, 0)):
        engine = built(net(), config(bf16={"enabled": True, "check_grad_overflow": check}))
        x, y = batches(1, torch.bfloat16)[0]
        x[0, 0] = math.inf
        train(engine, [(x, y)])
        assert engine.skipped_steps == skipped
        finite = all(value.isfinite().all() for value in values_of(engine.module).values())
        assert finite == check
        engine.destroy()
