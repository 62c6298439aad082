"""Schedules of infinity.compat.deepspeed: the rates of each step, computed here from the formulas'
definition (DeepSpeed 0.19.8 gives the same floats)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from infinity.compat.deepspeed import DeepSpeedRefusal
from infinity.compat.deepspeed.schedules import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    Schedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    scheduler_class,
)


def optimizer(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [torch.zeros(1)], "lr": rate} for rate in rates or (0.5,)])


def rates(schedule: Schedule, steps: int) -> list[float]:
    """The rate of the first group before the first step, and after each."""
    groups = schedule.optimizer.param_groups
    found = [groups[0]["lr"]]
    for _ in range(steps):
        schedule.step()
        found.append(groups[0]["lr"])
    return found


def near(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-12, abs=1e-15)


def test_warmup_by_the_logarithm() -> None:
    found = rates(WarmupLR(optimizer(), 0.1, 0.9, warmup_num_steps=8), 10)
    log = [0.1 + 0.8 * math.log(step + 1) / math.log(8) for step in range(8)]
    assert found == near([0.1, *log, 0.9, 0.9])


def test_warmup_linear_and_to_each_groups_own_rate() -> None:
    made = optimizer(0.2, 0.4)
    schedule = WarmupLR(made, 0.0, None, warmup_num_steps=4, warmup_type="linear")
    for _ in range(3):
        schedule.step()
    assert schedule.get_last_lr() == near([0.2 * 2 / 4, 0.4 * 2 / 4])
    assert [group["lr"] for group in made.param_groups] == schedule.get_last_lr()


@pytest.mark.parametrize("shape", [(), (1,)])
def test_rates_that_are_tensors_are_set_in_place(shape: tuple[int, ...]) -> None:
    rate = torch.full(shape, 0.2, dtype=torch.float64)
    made = torch.optim.AdamW([torch.zeros(1)], lr=rate)
    # Its own rate is the top of the warm-up, though the same tensor begins at 0.
    schedule = WarmupLR(made, 0.0, None, warmup_num_steps=4, warmup_type="linear")
    assert made.param_groups[0]["lr"] is rate
    assert rate.item() == 0.0
    for _ in range(3):
        schedule.step()
    assert made.param_groups[0]["lr"] is rate
    assert rate.shape == shape
    assert rate.item() == pytest.approx(0.2 * 2 / 4)


def test_warmup_of_one_step_counts_two() -> None:
    assert rates(WarmupLR(optimizer(), 0.0, 1.0, warmup_num_steps=1), 3) == near([0, 0, 1, 1])


def test_warmup_then_linear_decay() -> None:
    found = rates(
        WarmupDecayLR(optimizer(), 10, 0.1, 0.9, warmup_num_steps=4, warmup_type="linear"), 13
    )
    warm = [0.1 + 0.8 * step / 4 for step in range(4)]
    decay = [0.1 + 0.8 * (10 - step) / 6 for step in range(4, 10)]
    assert found == near([0.1, *warm, *decay, 0.1, 0.1, 0.1])


def test_warmup_then_half_a_cosine() -> None:
    schedule = WarmupCosineLR(
        optimizer(0.5), 12, warmup_min_ratio=0.2, warmup_num_steps=4, cos_min_ratio=0.1,
        warmup_type="linear",
    )  # fmt: skip
    warm = [0.5 * (0.2 + 0.8 * step / 4) for step in range(4)]
    cosine = [math.cos(math.pi * (step - 3) / 8) for step in range(4, 12)]
    fall = [0.5 * (0.1 + 0.9 * (1 + each) / 2) for each in cosine]
    assert rates(schedule, 14) == near([0.0, *warm, *fall, 0.05, 0.05])


def test_one_cycle_up_down_and_decay() -> None:
    made = optimizer()
    schedule = OneCycle(
        made, 0.1, 0.5, decay_lr_rate=0.5, cycle_first_step_size=4, cycle_second_step_size=2,
        decay_step_size=2, cycle_min_mom=0.8, cycle_max_mom=0.9, decay_mom_rate=0.1,
    )  # fmt: skip
    assert made.param_groups[0]["betas"] == (0.8, 0.99)
    betas = []
    found = [made.param_groups[0]["lr"]]
    for _ in range(8):
        schedule.step()
        found.append(made.param_groups[0]["lr"])
        betas.append(made.param_groups[0]["betas"][0])
    height = [1 / 4, 2 / 4, 3 / 4, 1, 1 / 2, 0]
    assert found == near([0.1, *(0.1 + 0.4 * each for each in height), 0.1 / 1.25, 0.1 / 1.5])
    assert betas == near([*(0.9 - 0.1 * each for each in height), 0.9 * 1.05, 0.9 * 1.1])


def test_one_cycle_in_stairs() -> None:
    schedule = OneCycle(
        optimizer(), 0.0, 1.0, cycle_first_step_size=6, cycle_first_stair_count=3,
        cycle_second_stair_count=2, cycle_momentum=False,
    )  # fmt: skip
    up = [0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 1]
    down = [0.5, 0.5, 0.5, 0.0, 0.0, 0.0]
    assert rates(schedule, 12)[1:] == near([*up, *down])
    assert schedule.get_mom() is None


@pytest.mark.parametrize(
    ("staircase", "of"),
    [(False, lambda step: (step + 1) / 4), (True, lambda step: (step + 1) // 4)],
)
def test_the_range_test(staircase: bool, of: Callable[[int], float]) -> None:
    schedule = LRRangeTest(optimizer(), 0.1, 4, 2.0, lr_range_test_staircase=staircase)
    assert rates(schedule, 9) == near([0.1, *(0.1 * (1 + 2 * of(step)) for step in range(9))])


def test_a_schedule_goes_on_from_its_state() -> None:
    def made() -> WarmupDecayLR:
        return WarmupDecayLR(optimizer(), 20, warmup_num_steps=5)

    whole = rates(made(), 12)
    first = made()
    rates(first, 6)
    later = made()
    later.load_state_dict(first.state_dict())
    assert later.state_dict() == {"last_batch_iteration": 5}
    assert rates(later, 6)[1:] == whole[7:]
    # A schedule that resumes (last_batch_iteration given) sets no rate before its first step.
    goes_on = WarmupLR(optimizer(0.25), last_batch_iteration=3)
    assert goes_on.optimizer.param_groups[0]["lr"] == 0.25
    with pytest.raises(DeepSpeedRefusal, match="call step"):
        goes_on.get_last_lr()


def test_rates_that_are_tensors() -> None:
    made = torch.optim.AdamW([torch.zeros(1)], lr=torch.tensor(0.5))
    tensor = made.param_groups[0]["lr"]
    schedule = WarmupLR(made, 0.0, 1.0, warmup_num_steps=2)
    schedule.step()
    schedule.step()
    assert made.param_groups[0]["lr"] is tensor
    assert tensor.item() == 1.0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda made: WarmupLR(made, warmup_num_steps=0), "warmup_num_steps=0"),
        (lambda made: WarmupLR(made, [0.0, 0.1]), "warmup_min_lr=\\[0.0, 0.1\\]: expected 1"),
        (lambda made: OneCycle(made, 0.1, 0.2, cycle_first_step_size=0), "cycle_first_step_size=0"),
        (lambda made: OneCycle(made, 0.1, 0.2, cycle_second_step_size=-1), "second_step_size=-1"),
        (lambda made: LRRangeTest(made, lr_range_test_step_size=0), "step_size=0"),
        (lambda _made: scheduler_class("WarmupLr"), "WarmupLr"),
    ],
)
def test_refusals(make: Callable[[Any], Any], says: str) -> None:
    with pytest.raises(DeepSpeedRefusal, match=says):
        make(optimizer())


def test_all_names_have_a_class() -> None:
    assert [scheduler_class(name).__name__ for name in VALID_LR_SCHEDULES] == VALID_LR_SCHEDULES
    assert scheduler_class("StepLR") is torch.optim.lr_scheduler.StepLR
