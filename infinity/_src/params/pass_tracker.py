"""Which pass runs: a training forward, an evaluation, a backward; and whether a backward is done with a unit.

A forward call that needs a unit leaves a Use of it, which ends when backward has gone past the call. Several forwards may leave
theirs for one backward, so they are counted until a backward has ended all of them and freed its graph, or a step is taken
(which makes graphs of before useless). Who counts too many is late, and never early: a Use that no backward comes for, say.
"""

from __future__ import annotations

from infinity._src.params.prefetch_schedule import Phase
from infinity._src.params.unit import Unit


class Passes:
    """What has begun and not ended. A backward may run inside a forward, and forwards (recompute) inside a backward.

    in_backward: also when one broke off and nothing has begun since.
    """

    def __init__(self) -> None:
        self._forward: Phase | None = None
        self.in_backward = False
        self._left: dict[Unit, int] = {}  # Uses
        # Of those, by forwards without gradients: no backward comes for them, or that of a checkpoint of the whole model.
        self._idle_left: dict[Unit, int] = {}
        self._ended: dict[Unit, int] = {}  # of those, for good: in backwards that freed their graph
        self._ended_now: dict[Unit, int] = {}  # in this backward
        self._kept = False  # the graph of this backward may run again

    @property
    def evaluates(self) -> bool:
        """Whether a forward without gradients runs, with whatever backward is inside."""
        return self._forward is Phase.EVAL

    @property
    def trains(self) -> bool:
        """Whether a training forward or backward runs."""
        return self._forward is Phase.TRAIN or (self.in_backward and not self.evaluates)

    def forward_start(self, *, trains: bool) -> None:
        """An outermost forward begins; trains: with gradients. Forwards without, before it, have been evaluation: what they left
        ends never, and on one rank perhaps alone."""
        if trains:
            for unit, count in self._idle_left.items():
                self._left[unit] = max(self._left.get(unit, 0) - count, 0)
            self._idle_left.clear()
        self._forward = Phase.TRAIN if trains else Phase.EVAL

    def backward_start(self, *, kept: bool) -> None:
        """A backward begins; kept: with retain_graph."""
        self.in_backward = True
        self._kept = kept
        self._ended_now.clear()

    def backward_end(self) -> None:
        """A backward has ended."""
        self.in_backward = False
        if self._kept:
            return
        for unit, count in self._ended_now.items():
            self._ended[unit] = self._ended.get(unit, 0) + count
        for unit in [unit for unit, count in self._left.items() if self._ended.get(unit, 0) >= count]:
            del self._left[unit]
            self._ended.pop(unit, None)
            self._idle_left.pop(unit, None)

    def forward_end(self) -> None:
        """The outermost forward has ended."""
        self._forward = None

    def reset(self) -> None:
        """Nothing runs any more."""
        self._forward = None
        self.in_backward = False
        self.step_taken()

    def step_taken(self) -> None:
        """No Use of before will be wanted."""
        self._left.clear()
        self._idle_left.clear()
        self._ended.clear()

    def use_left(self, unit: Unit) -> None:
        """A forward call that needed the unit has left a Use for backward."""
        if not self.in_backward:
            self._left[unit] = self._left.get(unit, 0) + 1
            if self.evaluates:
                self._idle_left[unit] = self._idle_left.get(unit, 0) + 1

    def use_ended(self, unit: Unit) -> None:
        """A Use of the unit has ended."""
        self._ended_now[unit] = self._ended_now.get(unit, 0) + 1

    def all_ended(self, unit: Unit) -> bool:
        """Whether as many Uses of the unit have ended in this backward as forwards have left: it is done with the unit."""
        return self._ended_now.get(unit, 0) >= max(self._left.get(unit, 0), 1)
