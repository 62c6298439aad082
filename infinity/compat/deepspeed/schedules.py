"""Learning rate schedules of DeepSpeed's configuration: WarmupLR, WarmupDecayLR, WarmupCosineLR,
OneCycle, LRRangeTest.

    constructor   sets every group's initial learning rate
    step()        advances the step number, which starts at 0, and sets that step's rates

`engine.step()` calls `step()` after each optimizer step that was not skipped.
"""

from __future__ import annotations

import abc
import argparse
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from infinity.compat.deepspeed.errors import DeepSpeedRefusal

log = logging.getLogger("infinity")

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = VALID_LR_SCHEDULES
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"

SECOND_BETA = 0.99
"""The second beta of AdamW while OneCycle cycles the first."""


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return a torch optimizer, unwrapped if necessary. Raises: TypeError if there is none."""
    for found in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(found, torch.optim.Optimizer):
            return found
    raise TypeError(f"{type(optimizer).__name__} neither is nor wraps a torch.optim.Optimizer")


class Schedule(abc.ABC):
    """Base of the schedules. The state is the number of the last step, -1 before the first.

    optimizer: a torch optimizer, or a wrapper with one in `.optimizer`. The schedule sets the
    learning rates of its `param_groups`. last_batch_iteration: a resumed run's last step number;
    the groups then keep their rates until the next step.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[Any] | None = None

    @abc.abstractmethod
    def get_lr(self) -> list[Any]:
        """Return the rate of each group at the last step."""

    def get_last_lr(self) -> list[Any]:
        """Return the rates set last. Raises: DeepSpeedRefusal if the schedule has set none."""
        if self._last_lr is None:
            raise DeepSpeedRefusal(
                "get_last_lr() before the first step of a resumed schedule: call step() first"
            )
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance the step number, or set it, and set the rates of that step."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the last step."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        """Restore the number of the last step. The groups keep their rates until the next step."""
        self.last_batch_iteration = sd["last_batch_iteration"]

    def _begin(self) -> None:
        """Set the initial rates, unless the run is resumed."""
        if self.last_batch_iteration == -1:
            self._set(self.get_lr())

    def _set(self, rates: Sequence[Any]) -> None:
        groups = self.optimizer.param_groups
        for group, rate in zip(groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                # In place: the script may hold this tensor. It has one element, of any shape.
                group["lr"].fill_(float(rate))
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in groups]

    def _own_rates(self) -> list[Any]:
        """Return copies of the groups' current rates (`_set` writes tensors in place)."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]

    def _of_groups(self, name: str, value: Any) -> list[Any]:
        """Return one value for each group. Raises: DeepSpeedRefusal if a list's length differs."""
        count = len(self.optimizer.param_groups)
        if not isinstance(value, (list, tuple)):
            return [value] * count
        if len(value) != count:
            raise DeepSpeedRefusal(
                f"{name}={value!r}: expected {count} values, one for each parameter group"
            )
        return list(value)


class LRRangeTest(Schedule):
    """A learning rate that grows from min_lr without bound (Smith, arXiv 1803.09820).

    At step t it is min_lr (1 + step_rate (t + 1) / step_size). staircase: the quotient
    (t + 1) / step_size is rounded down.
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: Any = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._of_groups("lr_range_test_min_lr", lr_range_test_min_lr)
        _check_steps("lr_range_test_step_size", lr_range_test_step_size)
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        # Before step 0 the rate is min_lr.
        if last_batch_iteration == -1:
            self._set(self.min_lr)

    def get_lr(self) -> list[Any]:
        """Return the rate of each group at the last step."""
        interval = float(self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        return [rate * (1 + self.step_rate * interval) for rate in self.min_lr]

    def step(self, batch_iteration: int | None = None) -> None:
        """Count a step, or set its number, and set the rates of that step."""
        super().step(batch_iteration)


class OneCycle(Schedule):
    """One cycle of the learning rate, up and down, while the first beta moves down and up; then a
    decay (Smith, arXiv 1803.09820).

    cycle_first_step_size, cycle_second_step_size: steps of the rising and the falling half; the
    second defaults to the first. *_stair_count: stairs in a half; 0: a linear ramp.
    decay_step_size: steps of one decay interval; 0: no decay. At step d after the cycle the rate is
    min_lr / (1 + decay_lr_rate d / decay_step_size), and the first beta
    max_mom (1 + decay_mom_rate d / decay_step_size).
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: Any,
        cycle_max_lr: Any,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Any = 0.8,
        cycle_max_mom: Any = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if cycle_first_step_size <= 0:
            raise DeepSpeedRefusal(
                f"cycle_first_step_size={cycle_first_step_size!r}: give 1 or more"
            )
        if second < 0:
            raise DeepSpeedRefusal(f"cycle_second_step_size={second!r}: give 0 or more")
        self.first_step_size, self.second_step_size = float(cycle_first_step_size), float(second)
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = (
            cycle_first_stair_count
            if cycle_second_stair_count is None
            else cycle_second_stair_count
        )
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.min_lrs = self._of_groups("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._of_groups("cycle_max_lr", cycle_max_lr)
        self.min_moms = self._of_groups("cycle_min_mom", cycle_min_mom)
        self.max_moms = self._of_groups("cycle_max_mom", cycle_max_mom)
        self.cycle_momentum = cycle_momentum and "betas" in self.optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            log.warning(
                "OneCycle: %s has no betas, so no momentum is cycled",
                type(self.optimizer).__name__,
            )
        if last_batch_iteration == -1:
            self._set(self.min_lrs)
            if self.cycle_momentum:
                self._set_betas(self.min_moms)

    def get_lr(self) -> list[Any]:
        """Return the rate of each group at the last step."""
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            return [
                low + (high - low) * height
                for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
            ]
        factor = 1 + self.decay_lr_rate * self._decay_intervals()
        return [low / factor for low in self.min_lrs]

    def get_mom(self) -> list[Any] | None:
        """Return the betas of each group at the last step; None if momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            height = self._height()
            first = [
                high - (high - low) * height
                for low, high in zip(self.min_moms, self.max_moms, strict=True)
            ]
        else:
            factor = 1 + self.decay_mom_rate * self._decay_intervals()
            first = [high * factor for high in self.max_moms]
        return [(beta, SECOND_BETA) for beta in first]

    def step(self, batch_iteration: int | None = None) -> None:
        """Advance the step number, or set it, and set the rates and betas of that step."""
        super().step(batch_iteration)
        betas = self.get_mom()
        if betas is not None:
            self._set_betas([first for first, _ in betas])

    def _set_betas(self, first: Sequence[Any]) -> None:
        for group, beta in zip(self.optimizer.param_groups, first, strict=True):
            group["betas"] = (beta, SECOND_BETA)

    def _decay_intervals(self) -> float:
        """Return the decay intervals since the end of the cycle, the current step included."""
        if math.isclose(self.decay_step_size, 0):
            return 0.0
        return (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size

    def _height(self) -> float:
        """Return the position between the minimum rate (0) and the maximum (1)."""
        count = self.last_batch_iteration + 1
        place = count / self.total_size
        place = 1.0 + place - math.floor(1 + place)
        rising = self.step_ratio
        up = place <= rising
        height = place / rising if up else (place - 1) / (rising - 1)
        stairs = self.first_stair_count if up else self.second_stair_count
        if stairs <= 0:
            return height
        # Computed from step counts: rounding may put `height` just below a stair.
        steps = count % self.total_size
        if steps <= self.first_step_size:
            stair = steps * stairs / self.first_step_size
        else:
            stair = (self.total_size - steps) * stairs / self.second_step_size
        return math.floor(stair) / stairs


class _Warmup(Schedule):
    """Base of schedules with a warm-up, logarithmic or linear in the step number."""

    def __init__(
        self, optimizer: Any, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        _check_steps("warmup_num_steps", warmup_num_steps)
        # The warm-up divides by this logarithm, and log(1) is 0.
        self.warmup_num_steps = max(2, warmup_num_steps)
        if warmup_type not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
            log.warning("warmup_type=%r is not known: taking 'log'", warmup_type)
            warmup_type = WARMUP_LOG_RATE
        self.warmup_type = warmup_type
        self.inverse_log_warm_up = 1.0 / math.log(self.warmup_num_steps)

    def _warmed_up(self) -> float | None:
        """Return the completed share of the warm-up, from 0 on; None after the warm-up."""
        if self.last_batch_iteration >= self.warmup_num_steps:
            return None
        if self.warmup_type == WARMUP_LOG_RATE:
            return self.inverse_log_warm_up * math.log(self.last_batch_iteration + 1)
        return self.last_batch_iteration / self.warmup_num_steps


class WarmupLR(_Warmup):
    """A learning rate that grows from warmup_min_lr to warmup_max_lr (None: the rate that each
    group has) in warmup_num_steps steps, and then stays constant.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        if warmup_max_lr is None:
            warmup_max_lr = self._own_rates()
        self.min_lrs = self._of_groups("warmup_min_lr", warmup_min_lr)
        self.max_lrs = self._of_groups("warmup_max_lr", warmup_max_lr)
        self._begin()

    def get_lr(self) -> list[Any]:
        """Return the rate of each group at the last step."""
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        warm = self._warmed_up()
        gamma = self._after_warmup() if warm is None else warm
        return [
            low + (high - low) * gamma
            for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def _after_warmup(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """WarmupLR's warm-up, then a linear decay to warmup_min_lr at total_num_steps."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type,
            last_batch_iteration,
        )  # fmt: skip
        _warn_if_short(total_num_steps, self.warmup_num_steps)

    def _after_warmup(self) -> float:
        remaining = float(self.total_num_steps - self.last_batch_iteration)
        return max(0.0, remaining / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(_Warmup):
    """A warm-up from warmup_min_ratio times each group's initial rate to that rate, then half a
    cosine down to cos_min_ratio times the rate at total_num_steps.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        _warn_if_short(total_num_steps, self.warmup_num_steps)
        self.org_lrs = self._own_rates()
        self._begin()

    def get_lr_ratio(self) -> float:
        """Return the factor on each group's initial rate at the last step; 0 before the first."""
        if self.last_batch_iteration < 0:
            return 0.0
        warm = self._warmed_up()
        if warm is not None:
            return self.warmup_min_ratio + warm * (1.0 - self.warmup_min_ratio)
        step = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(1.0, step / max(1, self.total_num_steps - self.warmup_num_steps))
        height = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * height)

    def get_lr(self) -> list[Any]:
        """Return the rate of each group at the last step."""
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]


def _check_steps(name: str, value: Any) -> None:
    if not isinstance(value, int) or value <= 0:
        raise DeepSpeedRefusal(f"{name}={value!r}: give a whole number of steps, 1 or more")


def _warn_if_short(total: int, warmup: int) -> None:
    if total < warmup:
        log.warning("total_num_steps=%s is less than warmup_num_steps=%s", total, warmup)


SCHEDULES: dict[str, type[Schedule]] = {
    kind.__name__: kind
    for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}


def scheduler_class(name: str) -> Any:
    """Return the class that the configuration's scheduler.type names: one of SCHEDULES or of
    `torch.optim.lr_scheduler`. Raises: DeepSpeedRefusal for another name.
    """
    found = SCHEDULES.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    if not isinstance(found, type):
        known = ", ".join(VALID_LR_SCHEDULES)
        raise DeepSpeedRefusal(
            f"scheduler.type={name!r} is not known; use one of {known}, or a class of "
            "torch.optim.lr_scheduler"
        )
    return found


_TUNING: dict[str, float | str | bool] = {
    "lr_range_test_min_lr": 0.001, "lr_range_test_step_rate": 1.0, "lr_range_test_step_size": 1000,
    "lr_range_test_staircase": False, "cycle_first_step_size": 1000, "cycle_first_stair_count": -1,
    "cycle_second_step_size": -1, "cycle_second_stair_count": -1, "decay_step_size": 1000,
    "cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "decay_lr_rate": 0.0, "cycle_momentum": False,
    "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.0, "warmup_min_lr": 0.0,
    "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "warmup_type": WARMUP_LOG_RATE,
    "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001,
}  # fmt: skip
"""The options of `add_tuning_arguments` with their defaults, whose types are the options' types."""


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add an option for each schedule setting to a parser, and return the parser."""
    group = parser.add_argument_group("Convergence Tuning", "settings of learning rate schedules")
    group.add_argument("--lr_schedule", type=str, help="schedule that a script builds")
    for name, default in _TUNING.items():
        if isinstance(default, bool):
            group.add_argument(f"--{name}", action="store_true")
        else:
            group.add_argument(f"--{name}", type=type(default), default=default)
    return parser


def __getattr__(name: str) -> str:
    """Return the name of a setting by DeepSpeed's constant for it: "cycle_min_lr" of CYCLE_MIN_LR.
    """
    setting = name.lower()
    if name.isupper() and (setting in _TUNING or setting == "total_num_steps"):
        return setting
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
