"""The order of units: traced while it happens, followed afterwards. Pure bookkeeping, no tensors.

A step has phases: a training forward, a backward, a forward without gradients. Each phase keeps the order in which it
last demanded units. While a phase runs, a cursor follows the order of its last run; units demanded out of order move
the cursor if they come later, and are otherwise only demand reads: the rest of the schedule stands.

    forward  0 1 2 3      after it comes  backward  3 2 1 0      after it comes  forward ...

so the distance to the next use of a unit is known over the phase's end: what is used last in forward is used first in
backward, and needs no second read.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterator


class Phase(enum.Enum):
    """What kind of pass demands units."""

    TRAIN = "train"
    BACKWARD = "backward"
    EVAL = "eval"


_NEXT = {Phase.TRAIN: Phase.BACKWARD, Phase.BACKWARD: Phase.TRAIN, Phase.EVAL: Phase.EVAL}

NEVER = 1 << 60
"""The distance of a unit that the schedule does not use again."""


class Schedule:
    """Units are named by their index. Distances count demands from now."""

    def __init__(self) -> None:
        self._order: dict[Phase, list[int]] = {phase: [] for phase in Phase}
        self._positions: dict[Phase, dict[int, list[int]]] = {phase: {} for phase in Phase}
        self._phase = Phase.TRAIN
        self._cursor = 0
        self._record: list[int] | None = None
        self.deviations = 0

    @property
    def phase(self) -> Phase:
        """The phase that runs, or ran last."""
        return self._phase

    def order(self, phase: Phase) -> list[int]:
        """The order of the phase's last complete run."""
        return self._order[phase]

    def start(self, phase: Phase) -> None:
        """A phase begins."""
        self._phase = phase
        self._cursor = 0
        self._record = []

    def end(self) -> None:
        """The phase has ended: its order is the one to follow next time."""
        if self._record:
            if self._record != self._order[self._phase]:
                self._order[self._phase] = self._record
                positions: dict[int, list[int]] = {}
                for place, unit in enumerate(self._record):
                    positions.setdefault(unit, []).append(place)
                self._positions[self._phase] = positions
            self._cursor = len(self._record)
        self._record = None

    def abandon(self) -> None:
        """The phase broke off: what was recorded of it is no order to follow."""
        self._record = None
        self._cursor = 0

    def demand(self, unit: int) -> bool:
        """A unit is wanted now. Returns whether the schedule knew it would come."""
        if self._record is not None:
            self._record.append(unit)
        places = self._positions[self._phase].get(unit, [])
        at = bisect.bisect_left(places, self._cursor)
        if at == len(places):
            self.deviations += bool(self._order[self._phase])
            return False
        self._cursor = places[at] + 1
        return True

    def upcoming(self) -> Iterator[int]:
        """The units to come, each once, over the end of the phase, soonest first."""
        found: set[int] = set()
        here = self._order[self._phase]
        then = self._order[_NEXT[self._phase]]
        for order, start in ((here, self._cursor), (then, 0)):
            for place in range(start, len(order)):
                if order[place] not in found:
                    found.add(order[place])
                    yield order[place]

    def distance(self, unit: int) -> int:
        """Demands until the unit is used next; NEVER if the schedule does not use it."""
        places = self._positions[self._phase].get(unit, [])
        at = bisect.bisect_left(places, self._cursor)
        if at < len(places):
            return places[at] - self._cursor
        rest = len(self._order[self._phase]) - self._cursor
        then = self._positions[_NEXT[self._phase]].get(unit)
        return rest + then[0] if then else NEVER
