"""What the Python executor hands out: tickets and gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infinity.aio.python_records import GATE_CLOSED, GATE_ESCAPED, GATE_OPEN, GateState, TicketState

if TYPE_CHECKING:
    from infinity.aio.python_executor import PythonExecutor


class PythonTicket:
    """`executor.Ticket` of the Python executor."""

    def __init__(self, executor: PythonExecutor, state: TicketState) -> None:
        self._executor = executor
        self._state = state

    @property
    def done(self) -> bool:
        """See `Ticket.done`."""
        return self._state.done

    @property
    def filled(self) -> bool:
        """See `Ticket.filled`."""
        return self._state.filled

    @property
    def failed(self) -> bool:
        """See `Ticket.failed`."""
        return self._state.failed

    def wait(self, timeout: float | None = None) -> None:
        """See `Ticket.wait`."""
        self._wait("done", timeout)

    def wait_filled(self, timeout: float | None = None) -> None:
        """See `Ticket.wait_filled`."""
        self._wait("filled", timeout)

    def cancel(self) -> None:
        """See `Ticket.cancel`."""
        if not self._state.done:
            self._executor._cancel(self._state)

    def _wait(self, word: str, timeout: float | None) -> None:
        if not getattr(self._state, word):
            self._executor._block(self._state, word, timeout)
        if self._state.fault is not None:
            raise self._state.fault.to_error(self._executor._paths)


class PythonGate:
    """`executor.Gate` of the Python executor."""

    def __init__(self, executor: PythonExecutor, state: GateState) -> None:
        self._executor = executor
        self._state = state

    @property
    def escaped(self) -> bool:
        """See `Gate.escaped`."""
        return self._state.state == GATE_ESCAPED

    def open(self, bases: Sequence[int]) -> bool:
        """See `Gate.open`."""
        self._executor._check()
        engine, gate = self._executor._engine, self._state
        with engine.lock:
            engine.gates.flowing = False
            if gate.state == GATE_ESCAPED:
                return False
            if gate.state == GATE_OPEN:
                raise ValueError("the gate was opened before; a gate opens once")
            if any(run.base >= len(bases) for submission in gate.submissions for run in submission.runs):
                raise ValueError(f"the gate's jobs need more than the {len(bases)} bases given")
            gate.bases = [int(base) for base in bases]
            engine.open_gate(gate, GATE_OPEN)
        return True

    def __del__(self) -> None:
        engine = self._executor._engine
        if self._executor._forked or self._state.state != GATE_CLOSED or not self._state.submissions:
            return
        # Nobody can open it any more. This thread may be anywhere, even inside the engine: leave the work to another.
        engine.gates.abandoned.append(self._state)
        with engine.lock:
            engine.work.notify()
