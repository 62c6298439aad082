"""Which pass runs: a training forward, an evaluation, a backward; and how often each unit was used in it."""

from __future__ import annotations

from infinity.params.schedule import Phase
from infinity.params.unit import Unit


class Passes:
    """What has begun and not ended. A backward may run inside a forward, and forwards (recompute) inside a backward.

    in_backward: also when one broke off and nothing has begun since.
    """

    def __init__(self) -> None:
        self._forward: Phase | None = None
        self.in_backward = False
        self._left: dict[Unit, int] = {}  # Uses, by the last training forward
        self._ended: dict[Unit, int] = {}  # Uses, in this backward

    @property
    def evaluates(self) -> bool:
        """Whether a forward without gradients runs, with whatever backward is inside."""
        return self._forward is Phase.EVAL

    @property
    def trains(self) -> bool:
        """Whether a training forward or backward runs."""
        return self._forward is Phase.TRAIN or (self.in_backward and not self.evaluates)

    def forward_start(self, *, trains: bool) -> None:
        """An outermost forward begins; trains: with gradients."""
        self._forward = Phase.TRAIN if trains else Phase.EVAL
        if trains:
            self._left.clear()

    def backward_start(self) -> None:
        """A backward begins."""
        self.in_backward = True
        self._ended.clear()

    def forward_end(self) -> None:
        """The outermost forward has ended."""
        self._forward = None

    def reset(self) -> None:
        """Nothing runs any more."""
        self._forward = None
        self.in_backward = False

    def use_left(self, unit: Unit) -> None:
        """A forward call that needed the unit has left a Use for backward."""
        if not self.in_backward:
            self._left[unit] = self._left.get(unit, 0) + 1

    def use_ended(self, unit: Unit) -> None:
        """A Use of the unit has ended."""
        self._ended[unit] = self._ended.get(unit, 0) + 1

    def all_ended(self, unit: Unit) -> bool:
        """Whether as many Uses of the unit have ended in this backward as the last forward left: no gradient is to come."""
        return self._ended.get(unit, 0) >= self._left.get(unit, 1)
