"""Loss scales of fp16 training: static, dynamic, and that of torch's autocast.

The dynamic loss scale:

    overflow      the step is skipped. Overflows first use up the hysteresis; the next ones halve
                  the scale, down to the minimum; an overflow at the minimum raises
    no overflow   each `scale_window` consecutive steps without overflow double the scale
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("infinity")

SCALE_FACTOR = 2.0


class LossScaleAtMinimum(RuntimeError):
    """Raised when gradients overflow at the minimum loss scale: the run no longer trains."""


class LossScaler:
    """A static loss scale. cur_scale: the scale."""

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
        """Restore the attributes that `state_dict` returned."""
        for name, value in state.items():
            setattr(self, name, value)


class DynamicLossScaler(LossScaler):
    """A loss scale that overflows halve and that doubles after enough steps without overflow.

    init_scale: the first scale. scale_window: steps without overflow until the scale doubles.
    min_scale: the minimum. delayed_shift: the hysteresis: overflows until the scale is halved.
    consecutive_hysteresis: True: each step without overflow restores the hysteresis; False: only a
    doubling does. raise_error_at_min_scale: raise on an overflow at the minimum scale.
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
                f"gradients overflow at the minimum loss scale, fp16.min_loss_scale="
                f"{self.min_scale}: training cannot continue. Use bf16, a lower learning rate, or "
                "gradient_clipping"
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
    """The loss scale for fp16 autocast, with the rules and defaults of `torch.amp.GradScaler`."""

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
