"""Loss scales of fp16 training: a fixed one, and one that follows overflows.

    overflow      the step is skipped. Hysteresis is used up first; then the scale is divided by 2,
                  down to the least one, at which another overflow raises
    no overflow   after each `scale_window` steps in a row without one, the scale is doubled
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("infinity")

SCALE_FACTOR = 2.0


class LossScaleAtMinimum(RuntimeError):
    """Raised when gradients overflow at the least loss scale: the run does not train."""


class LossScaler:
    """A loss scale that stays. cur_scale: the scale."""

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = float(scale)

    @property
    def loss_scale(self) -> float:
        """The scale by which the next loss is multiplied."""
        return self.cur_scale

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss times the scale."""
        return loss if self.cur_scale == 1.0 else loss * self.cur_scale

    def update_scale(self, overflow: bool) -> None:
        """Note a step, taken or skipped."""

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        return {"cur_scale": self.cur_scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        for name, value in state.items():
            setattr(self, name, value)


class DynamicLossScaler(LossScaler):
    """A loss scale that is halved on overflow and doubled after a while without.

    init_scale: the first scale. scale_window: steps without overflow until it is doubled.
    min_scale: the least one. delayed_shift: overflows in a window until it is halved (hysteresis).
    consecutive_hysteresis: whether each step without overflow refills the hysteresis; else a
    doubling does. raise_error_at_min_scale: whether an overflow at the least scale raises.
    """

    dynamic = True

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
        raise_error_at_min_scale: bool = True,
    ) -> None:
        super().__init__(init_scale)
        self.scale_window, self.min_scale = scale_window, min_scale
        self.scale_factor = SCALE_FACTOR
        self.delayed_shift = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale
        self.cur_hysteresis = delayed_shift
        self.cur_iter = 0
        self.last_overflow_iter = -1

    def update_scale(self, overflow: bool) -> None:
        """Note a step, taken or skipped. Raises: LossScaleAtMinimum."""
        if overflow:
            self._overflowed()
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            stable = self.cur_iter - self.last_overflow_iter - 1
            if stable > 0 and stable % self.scale_window == 0:
                self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    def _overflowed(self) -> None:
        if self.delayed_shift != 1 and self.cur_hysteresis != 1:
            self.cur_hysteresis -= 1
            log.info(
                "gradients overflow at loss scale %s: the step is skipped, the scale stays "
                "(hysteresis %s)",
                self.cur_scale,
                self.cur_hysteresis,
            )
            return
        if self.cur_scale == self.min_scale and self.raise_error_at_min_scale:
            raise LossScaleAtMinimum(
                f"gradients overflow at the least loss scale, fp16.min_loss_scale="
                f"{self.min_scale}: nothing is trained any more. Use bf16, a lower learning rate, "
                "or gradient_clipping"
            )
        before, self.cur_scale = self.cur_scale, max(
            self.cur_scale / self.scale_factor, self.min_scale
        )
        log.info(
            "gradients overflow at loss scale %s: the step is skipped, the scale is %s now",
            before,
            self.cur_scale,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
        return {name: getattr(self, name) for name in names}


class AutocastLossScaler(LossScaler):
    """The loss scale of autocast in fp16, by the rules and defaults of `torch.amp.GradScaler`."""

    dynamic = True
    _BACKOFF, _GROWTH, _INTERVAL = 0.5, 2.0, 2000

    def __init__(self) -> None:
        super().__init__(65536.0)
        self.stable_steps = 0

    def update_scale(self, overflow: bool) -> None:
        """Note a step, taken or skipped."""
        self.stable_steps = 0 if overflow else self.stable_steps + 1
        if overflow:
            self.cur_scale *= self._BACKOFF
        elif self.stable_steps == self._INTERVAL:
            self.cur_scale *= self._GROWTH
            self.stable_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        return {"cur_scale": self.cur_scale, "stable_steps": self.stable_steps}
