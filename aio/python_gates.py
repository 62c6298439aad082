"""The gates of the Python executor: which are closed, and which of them escape when. All [locked]."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from infinity.aio.python_records import GATE_CLOSED, GATE_ESCAPED, GateState, Run, State, Submission


class Gates:
    """Closed gates that hold submissions. `consider` is told of every job that a gate lets go."""

    def __init__(self, consider: Callable[[Run], None], hold_s: float) -> None:
        self.closed: list[GateState] = []  # oldest first
        self.abandoned: deque[GateState] = deque()  # nobody can open them any more
        self.flowing = False  # gates escape one after another until someone opens one
        self.held = False  # somebody is on the way to open them: none escapes for being idle
        self.idle_since = time.monotonic()
        self.opened = self.escaped = 0
        self._consider = consider
        self._hold_s = hold_s

    def attach(self, submission: Submission) -> None:
        """A submission comes; its gate, if closed, holds it."""
        gate = submission.gate
        if gate is None:
            return
        submission.escaped = gate.state == GATE_ESCAPED
        if gate.state == GATE_CLOSED:
            if not gate.submissions:
                gate.order = submission.order
                self.closed.append(gate)
            gate.submissions.append(submission)
            self.idle_since = time.monotonic()

    def detach(self, submission: Submission) -> None:
        """A submission is done, perhaps without its gate: its jobs were given up."""
        gate = submission.gate
        if gate is not None and submission in gate.submissions:
            gate.submissions.remove(submission)
            if not gate.submissions and gate in self.closed:
                self.closed.remove(gate)

    def let_go(self, gate: GateState, state: int) -> None:
        """The gate is closed no more."""
        gate.state = state
        if gate in self.closed:
            self.closed.remove(gate)
        self.flowing = self.flowing and bool(self.closed)  # what comes next is held again
        if state == GATE_ESCAPED:
            self.escaped += 1
        else:
            self.opened += 1
        submissions, gate.submissions = gate.submissions, []
        for submission in submissions:
            submission.escaped = state == GATE_ESCAPED
            for run in submission.runs:
                self._consider(run)

    def escape_oldest(self) -> None:
        """The oldest closed gate escapes."""
        self.let_go(self.closed[0], GATE_ESCAPED)

    def escape(self, order_max: int | None = None) -> None:
        """Make closed gates escape whose first submission is not later than `order_max`."""
        while self.closed and (order_max is None or self.closed[0].submissions[0].order <= order_max):
            self.escape_oldest()

    def escape_for(self, submission: Submission) -> None:
        """Make all gates escape that keep the submission from running."""
        order = 0
        for run in submission.runs:
            for before in run.chunk.fifo if run.state != State.DONE else ():
                gate = before.submission.gate
                if gate is not None and gate.state == GATE_CLOSED:
                    order = max(order, before.submission.order)
                if before is run:
                    break
        if order:
            self.escape(order)

    def let_go_abandoned(self) -> bool:
        """Gates that nobody holds escape; whether there were any."""
        found = False
        while self.abandoned:
            gate = self.abandoned.popleft()
            if gate.state == GATE_CLOSED:
                self.let_go(gate, GATE_ESCAPED)
                found = True
        return found

    def left_s(self) -> float | None:
        """How long until the oldest gate has been held long enough in an idle executor. None: no such gate."""
        if not self.closed or self.held:
            return None
        return max(0.0, self.idle_since + self._hold_s - time.monotonic())
