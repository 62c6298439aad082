"""The order in which passes use units: recorded in one pass, predicted in later ones. No tensors.

A step has phases: a training forward, a backward, a forward without gradients. The schedule
remembers the last few orders (traces) of each phase, and which trace followed which. So it predicts
the distance to a unit's next use beyond the end of a phase, and a phase's first demand even if two
kinds of forward alternate:

    forward  0 1 2 3      followed by  backward  3 2 1 0      followed by  forward ...

How far ahead units are gathered: `Unsharder.prefetch_ahead` (params/unshard.py), as many as fit the
bytes of `gathered_capacity` (memory/device_capacity.py), at most AHEAD_MAX.

A unit that is used last in forward is used first in backward, and needs no second read.

While a phase runs, a cursor follows one trace. A demand of another unit than the next is a
deviation. If another trace begins with this phase's demands so far, the cursor switches to that
trace. Otherwise the demand takes the unit's first free place in the trace, behind the cursor (a
skipped place) or ahead. Then the phase may continue from that place (it skipped the places between)
or from the cursor (the unit was early): both are predicted until the next demand decides. Each
place is taken once.

The schedule remembers the order of a phase that deviated. If the phase followed most of its trace,
the next expected order also has the units that it skipped (a layer dropped at random), unless the
phase before skipped them, too.

Predictions depend only on demands, so ranks that demand the same units predict the same.

`PassTracker` knows which phase runs, and whether a backward is done with a unit. A forward call
that needs a unit makes the backward expect a use, which ends when backward has passed the call. One
backward may end the uses of several forwards. So `PassTracker` counts uses until a backward has
ended all of them and freed its graph, or the optimizer steps, after which earlier graphs cannot
run. A use without a backward makes the count too high: then gradients are reduced late, never
early.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from infinity._src.base.telemetry import LoopWaits, PhaseClock

if TYPE_CHECKING:
    from infinity._src.params.unit import Unit


class Phase(enum.Enum):
    """The kind of pass that demands units."""

    TRAIN = "train"
    BACKWARD = "backward"
    EVAL = "eval"

    # `Enum.__hash__` is a Python function, and each demand looks a phase up.
    __hash__ = object.__hash__


_NEXT = {Phase.TRAIN: Phase.BACKWARD, Phase.BACKWARD: Phase.TRAIN, Phase.EVAL: Phase.EVAL}

NEVER = 1 << 60
"""The distance of a unit without a predicted use."""

AHEAD_MAX = 32
"""The most units that are prefetched, however small. The bound in bytes is reached first, except in
a model of many small units and a large one."""

LOOK_MAX = 8 * AHEAD_MAX
"""The most predicted uses that a search for these units examines."""

TRACES_MAX = 8
"""The most traces of each phase that are remembered."""


@dataclasses.dataclass(eq=False)
class _Trace:
    """An order of a phase.

    then: the expected next trace, for each phase that may follow. doubted: phases for which another
    trace, or none yet, followed last time; only then a new trace replaces the expected one. missed:
    the places skipped last time.
    """

    order: list[int] = dataclasses.field(default_factory=list)
    then: dict[Phase, _Trace] = dataclasses.field(default_factory=dict)
    doubted: set[Phase] = dataclasses.field(default_factory=set)
    missed: set[int] = dataclasses.field(default_factory=set)
    # The places of each unit in `order`, ascending.
    places: dict[int, list[int]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for place, unit in enumerate(self.order):
            self.places.setdefault(unit, []).append(place)

    def followed_by(self, phase: Phase, trace: _Trace) -> None:
        """Record which trace followed this one."""
        if self.then.get(phase) is trace:
            self.doubted.discard(phase)
        elif phase in self.then and phase not in self.doubted:
            # Only a second sighting replaces the expected successor: passes may alternate.
            self.doubted.add(phase)
        else:
            self.then[phase] = trace
            self.doubted.discard(phase)


class Schedule:
    """Predicts the order of units, given by index. Distances count demands from now."""

    def __init__(self) -> None:
        # Oldest first.
        self._traces: dict[Phase, list[_Trace]] = {phase: [] for phase in Phase}
        # The latest phase that ended; evaluation has a separate entry, since it interleaves.
        self._ended: dict[bool, _Trace | None] = {}
        self._phase = Phase.TRAIN
        self._trace = _Trace()  # the trace that this phase follows
        self._cursor = 0  # the place expected next
        self._skipped: int | None = None  # the cursor before the last demand moved it ahead
        self._taken: set[int] = set()  # places that a demand took
        self._record: list[int] | None = None
        self._record_places: list[int] = []  # places that the record's demands took; -1: none
        self._foreseen = 0  # demands of the record that were predicted
        self._matching: list[_Trace] = []  # traces that begin like the record
        self.deviations = 0
        # Another training forward follows the current one, not a backward.
        self.forward_follows = False

    def order(self, phase: Phase) -> list[int]:
        """Return the phase's expected next order, or the current one if it runs."""
        evaluates = phase is Phase.EVAL
        if self._record is not None and phase is self._phase:
            return self._trace.order
        running = self._record is not None and (self._phase is Phase.EVAL) == evaluates
        return self._expected(self._trace if running else self._ended.get(evaluates), phase).order

    def start(self, phase: Phase) -> None:
        """Begin a phase: follow the trace expected after the previous one."""
        self._phase = phase
        self._trace = self._expected(self._ended.get(phase is Phase.EVAL), phase)
        self._matching = list(self._traces[phase])
        self._record = []
        self._record_places = []
        self._foreseen = 0
        self._go_to(0)

    def end(self) -> None:
        """End the phase: remember its order, and which trace it followed."""
        if self._record:
            # A trace in `_matching` of the record's length equals the record.
            new = all(len(one.order) != len(self._record) for one in self._matching)
            trace = self._remembered(self._record, set())
            # Remember the completed order last: the latest trace is expected next time.
            if new and self._foreseen * 2 > len(self._trace.order):
                trace = self._remembered(*self._completed(self._record))
            evaluates = self._phase is Phase.EVAL
            before = self._ended.get(evaluates)
            if before is not None:
                before.followed_by(self._phase, trace)
            self._ended[evaluates] = self._trace = trace
            self._go_to(len(trace.order))
        self._record = None

    def abandon(self) -> None:
        """Drop the record of an aborted phase."""
        self._record = None
        self._go_to(0)

    def record_unshard(self, unit: int) -> bool:
        """Record a demand of a unit. Returns whether it was predicted as the next."""
        foreseen = self._record is not None and self._follow(unit, self._record)
        self._foreseen += foreseen
        self.deviations += not foreseen and bool(self._trace.order)
        return foreseen

    def upcoming(self) -> Iterator[int]:
        """Yield the units of the next LOOK_MAX predicted uses, each once, soonest first, across the
        end of the phase.
        """
        found: set[int] = set()
        here = self._trace.order
        # Alternate between two possible continuations until a demand decides.
        ways = [range(way, len(here)) for way in self._ways()]
        places = (
            place for row in itertools.zip_longest(*ways) for place in row if place is not None
        )
        rest = (here[place] for place in places if place not in self._taken)
        # Bounded: otherwise each demand would search all of a long trace with few units.
        for unit in itertools.islice(
            itertools.chain(rest, self._expected(self._trace, self._next_phase).order), LOOK_MAX
        ):
            if unit not in found:
                found.add(unit)
                yield unit

    def distance(self, unit: int) -> int:
        """Return the number of demands until the unit's next use; NEVER if none is predicted."""
        # Called often: a loop is faster than generators.
        found = NEVER
        for way in self._ways():
            place = self._place_from(way, unit)
            if place is not None:
                found = min(found, place - way)
        if found != NEVER:
            return found
        # Not in the remaining phase: continue counting in the next one.
        then = self._expected(self._trace, self._next_phase).places.get(unit)
        return len(self._trace.order) - self._cursor + then[0] if then else NEVER

    @property
    def _next_phase(self) -> Phase:
        """Return the phase expected after the running (or last) one."""
        if self.forward_follows and self._phase is Phase.TRAIN:
            return Phase.TRAIN
        return _NEXT[self._phase]

    # -- following a trace -------------------------------------------------------------------------

    def _follow(self, unit: int, record: list[int]) -> bool:
        """Move the cursor past a place of the unit. Returns whether it was the next place."""
        record.append(unit)
        count = len(record)
        self._matching = [
            one
            for one in self._matching
            if len(one.order) >= count and one.order[count - 1] == unit
        ]
        order = self._trace.order
        # If both continuations predict it, take the one that skips nothing.
        for way in sorted(self._ways()):
            if way < len(order) and order[way] == unit:
                self._take(way)
                return True
        # Other traces begin exactly like this phase: switch to the latest.
        if self._matching:
            self._trace = self._matching[-1]
            self._go_to(count)
            self._record_places = list(range(count))
            self._taken.update(self._record_places)
            self._foreseen = count - 1
            return False
        place = self._place_from(0, unit)
        if place is None:
            # No free place of this unit: the cursor stays.
            self._record_places.append(-1)
        else:
            before = self._cursor
            self._take(place)
            # The phase may also continue from the cursor's old place: predict both.
            if before != self._cursor and before < len(order):
                self._skipped = before
        return False

    def _ways(self) -> tuple[int, ...]:
        """Return the places from which the phase may continue, the likelier first."""
        return (self._cursor,) if self._skipped is None else (self._cursor, self._skipped)

    def _go_to(self, place: int) -> None:
        """Follow the trace from `place`, with all its places free."""
        self._cursor = place
        self._skipped = None
        self._taken.clear()

    def _take(self, place: int) -> None:
        """Take this place, and move the cursor to the next free one."""
        self._taken.add(place)
        self._record_places.append(place)
        self._skipped = None
        while place in self._taken:
            place += 1
        self._cursor = place

    def _place_from(self, start: int, unit: int) -> int | None:
        """Return the unit's first free place at or after `start`."""
        places = self._trace.places.get(unit, [])
        for at in range(bisect.bisect_left(places, start), len(places)):
            if places[at] not in self._taken:
                return places[at]
        return None

    # -- remembering traces ------------------------------------------------------------------------

    def _expected(self, before: _Trace | None, phase: Phase) -> _Trace:
        then = before.then.get(phase) if before is not None else None
        if then is not None:
            return then
        return self._traces[phase][-1] if self._traces[phase] else _Trace()

    def _completed(self, record: list[int]) -> tuple[list[int], set[int]]:
        """Return the record plus the units of the trace that it skipped, and their places.

        Units that were skipped last time, too, are not added.
        """
        order: list[int] = []
        missed: set[int] = set()

        def add_skipped(place: int) -> None:
            while place < len(self._trace.order) and place not in self._taken:
                if place not in self._trace.missed:
                    missed.add(len(order))
                    order.append(self._trace.order[place])
                place += 1

        add_skipped(0)
        for unit, place in zip(record, self._record_places, strict=True):
            order.append(unit)
            if place >= 0:
                add_skipped(place + 1)
        return order, missed

    def _remembered(self, order: list[int], missed: set[int]) -> _Trace:
        """Return the trace with this order, and remember it as the phase's latest. The oldest is
        forgotten.

        A new trace inherits the expected successors of the trace that the phase deviated from.
        """
        traces = self._traces[self._phase]
        trace = next((one for one in traces if one.order == order), None)
        if trace is not None:
            traces.remove(trace)
        else:
            # All successors are doubted: none has followed this order yet.
            trace = _Trace(order, dict(self._trace.then), set(self._trace.then))
        trace.missed = missed
        traces.append(trace)
        if len(traces) > TRACES_MAX:
            forgotten = traces.pop(0)
            # Remove it as the successor of other traces.
            for one in itertools.chain(*self._traces.values()):
                if one.then.get(self._phase) is forgotten:
                    del one.then[self._phase]
        return trace


class PassTracker:
    """The running passes. A backward may run inside a forward, and forwards (recompute) inside a
    backward.

    in_backward: a backward runs, or was aborted and no pass has begun since.
    """

    def __init__(self) -> None:
        self._forward: Phase | None = None
        self.in_backward = False
        self._uses: dict[Unit, int] = {}  # uses that a backward is expected to end
        # The part of `_uses` from forwards without gradients. No backward follows these forwards,
        # except under a checkpoint around the whole model.
        self._eval_uses: dict[Unit, int] = {}
        self._ended: dict[Unit, int] = {}  # uses ended by backwards that freed their graph
        self._ended_now: dict[Unit, int] = {}  # uses ended by this backward
        self._retains_graph = False  # the graph of this backward may run again

    @property
    def evaluates(self) -> bool:
        """True while a forward without gradients runs, also during a backward inside it."""
        return self._forward is Phase.EVAL

    @property
    def trains(self) -> bool:
        """True while a training forward or backward runs."""
        return self._forward is Phase.TRAIN or (self.in_backward and not self.evaluates)

    def forward_start(self, *, trains: bool) -> None:
        """Begin an outermost forward; trains: with gradients.

        Drops the uses of earlier forwards without gradients: these forwards were an evaluation,
        perhaps on one rank only, and no backward follows them.
        """
        if trains:
            for unit, count in self._eval_uses.items():
                self._uses[unit] = max(self._uses.get(unit, 0) - count, 0)
            self._eval_uses.clear()
        self._forward = Phase.TRAIN if trains else Phase.EVAL

    def backward_start(self, *, retain_graph: bool) -> None:
        self.in_backward = True
        self._retains_graph = retain_graph
        self._ended_now.clear()

    def backward_end(self) -> None:
        self.in_backward = False
        # The graph may run again, so its uses are not over.
        if self._retains_graph:
            return
        for unit, count in self._ended_now.items():
            self._ended[unit] = self._ended.get(unit, 0) + count
        for unit in [
            unit for unit, count in self._uses.items() if self._ended.get(unit, 0) >= count
        ]:
            del self._uses[unit]
            self._ended.pop(unit, None)
            self._eval_uses.pop(unit, None)

    def forward_end(self) -> None:
        self._forward = None

    def reset(self) -> None:
        self._forward = None
        self.in_backward = False
        # Graphs of an interrupted pass cannot run, so drop their uses.
        self.step_taken()

    def step_taken(self) -> None:
        """Forget all uses: earlier graphs cannot run after the step."""
        self._uses.clear()
        self._eval_uses.clear()
        self._ended.clear()

    def expect_use(self, unit: Unit) -> None:
        """Count a use of the unit that backward must end."""
        if not self.in_backward:
            self._uses[unit] = self._uses.get(unit, 0) + 1
            if self.evaluates:
                self._eval_uses[unit] = self._eval_uses.get(unit, 0) + 1

    def expects_uses(self, unit: Unit) -> bool:
        """Return whether the unit has uses that no backward has ended yet."""
        return self._uses.get(unit, 0) > 0

    def use_ended(self, unit: Unit) -> None:
        self._ended_now[unit] = self._ended_now.get(unit, 0) + 1

    def all_ended(self, unit: Unit) -> bool:
        """Return whether this backward has ended all uses of the unit."""
        return self._ended_now.get(unit, 0) >= max(self._uses.get(unit, 0), 1)


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of training: running passes, their order of units, their times and waits."""

    passes: PassTracker
    schedule: Schedule
    clock: PhaseClock
    waits: LoopWaits
