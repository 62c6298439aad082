"""Records the order in which the engine's parts call each other, one line an event.

`EVENTS` is the only place that names classes and methods of the engine: a rename changes this table
and nothing else. The lines are the vocabulary of tests/data/call_order/*.txt.

Only calls of the training thread that do not depend on timing are recorded: evictions, prefetches
and transfers in flight are not.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from infinity._src.optim.backward_update import BackwardUpdate
from infinity._src.optim.device_update import DeviceUpdate
from infinity._src.optim.speculative_update import SpeculativeUpdate
from infinity._src.optim.step import StepHooks, StepPipeline
from infinity._src.optim.transaction import Transaction
from infinity._src.optim.update_mode import DelayedUpdate, UpdateMode
from infinity._src.params.accumulator import GradAccumulator
from infinity._src.params.param_copies import DelayedParams
from infinity._src.params.reduce import GradReducer
from infinity._src.params.unit import Unit, UnitState
from infinity._src.params.unshard import Unsharder
from infinity._src.params.update_hooks import UpdateHooks


class Event(NamedTuple):
    """One call to record: `word` and the text that `subject` makes of the arguments; None: not
    recorded."""

    word: str
    owner: type
    method: str
    subject: Callable[..., str | None] = lambda *_args, **_kwargs: ""


def _name(_self: Any, unit_or_param: Any, *_args: Any, **_kwargs: Any) -> str:
    return str(unit_or_param.name)


def _names(_self: Any, units: Any, *_args: Any, **_kwargs: Any) -> str:
    return " ".join(unit.name for unit in units)


MODES = (
    *(UpdateHooks, StepHooks, UpdateMode),
    *(BackwardUpdate, SpeculativeUpdate, DelayedUpdate, DeviceUpdate),
)
MODE_EVENTS = [  # of any update mode, when another part calls it
    # Gathers also call it now and then where there is nothing to guard.
    Event(
        "mode.before_read",
        UpdateMode,
        "before_read",
        lambda mode, unit: unit.name if mode.guards_reads else None,
    ),
    Event("mode.backward_begin", UpdateMode, "backward_begin"),
    Event("mode.grad_ready", BackwardUpdate, "grad_ready", _name),
    Event("mode.unit_released", UpdateMode, "unit_released", _name),
    Event("mode.backward_end", UpdateMode, "backward_end"),
    Event("mode.backward_aborted", UpdateMode, "backward_aborted"),
    Event("mode.before_assign", UpdateMode, "before_assign", _name),
    Event("mode.before_step", UpdateMode, "before_step"),
    Event("mode.submit", UpdateMode, "submit", _names),
    Event("mode.withdraw", UpdateMode, "undo_ahead"),
    Event("mode.undone", UpdateMode, "undone"),
]
EVENTS = [
    Event("gather", Unsharder, "unshard", _name),
    Event("forward_begin", Unsharder, "forward_start"),
    Event("forward_end", Unsharder, "forward_end"),
    Event("backward_begin", Unsharder, "backward_start"),
    Event("backward_end", Unsharder, "backward_end"),
    Event("reset", Unsharder, "reset"),
    Event("grad", GradReducer, "accumulate_grad", _name),
    Event("unit_done", Unsharder, "unit_done", _name),
    Event("reduce", GradReducer, "_reduce", _name),
    Event("accumulate", GradReducer, "accumulate", _name),
    Event("grads.backward_end", GradReducer, "backward_end"),
    Event("grads.reset", GradReducer, "reset"),
    Event("accumulator.consumed", GradAccumulator, "consume", lambda accumulator: accumulator.name),
    Event(
        "accumulator.wait_for_reader",
        GradAccumulator,
        "_before_write",
        lambda accumulator: accumulator.name if accumulator._reader is not None else None,
    ),
    Event(
        "step.compare_ranks",
        StepPipeline,
        "check_ranks_agree",
        lambda _self, _opt, params: f"{len(params)} parameters",
    ),
    Event("step.check_idle", StepPipeline, "check_idle"),
    Event("step.begin", StepPipeline, "begin"),
    Event("step.submit", StepPipeline, "submit"),
    Event("step.counted", StepPipeline, "count_step"),
    Event("step.drop", StepPipeline, "cancel_step"),
    Event("step.wait", StepPipeline, "wait"),
    Event("step.finish_pending", StepPipeline, "_finish"),
    Event("submit_deferred", UpdateMode, "submit", _names),
    Event(
        "submit",
        StepPipeline,
        "start",
        lambda _self, unit, _work, _grads, gate=None, targets=(): (
            f"{unit.name}{' behind a gate' if gate is not None else ''}"
        ),
    ),
    Event("submitted", StepPipeline, "add_pending"),
    Event(
        "read_ahead",
        StepPipeline,
        "prefetch_states",
        lambda _self, phase, in_memory: f"{phase.name} in_memory={in_memory}",
    ),
    Event("hand_over", Unsharder, "hand_over", _name),
    Event("updated", Unsharder, "updated", _name),
    Event("rewritten", Unsharder, "rewritten", _name),
    Event("stale", Unsharder, "mark_stale", _names),
    Event("renew", Unsharder, "renew", _name),
    Event("write", Unsharder, "write", _name),
    Event("commit", Transaction, "_flip"),
    Event("withdraw_states", Transaction, "undo_units", _names),
    Event("rollback", Transaction, "undo"),
    Event("delayed.refresh", DelayedParams, "refresh", _name),
    Event("delayed.outdated", DelayedParams, "outdated", _name),
]


class Recorder:
    """The recorded lines. `told` adds a line from the test itself."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.on = False
        self.transitions: set[tuple[UnitState, UnitState]] = set()
        self._thread = threading.get_ident()

    def told(self, line: str) -> None:
        """Add a line that describes the loop's action."""
        self.lines.append(f"# {line}")

    def add(self, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add the line of a call."""
        if self.on and threading.get_ident() == self._thread:
            subject = event.subject(*args, **kwargs)
            if subject is not None:
                self.lines.append(f"{event.word} {subject}".rstrip())


def _wrapped(recorder: Recorder, event: Event, inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def called(*args: Any, **kwargs: Any) -> Any:
        recorder.add(event, args, kwargs)
        return inner(*args, **kwargs)

    return called


def _wrapped_of_mode(
    recorder: Recorder, event: Event, inner: Callable[..., Any]
) -> Callable[..., Any]:
    """Record unless the mode itself is the caller."""

    @functools.wraps(inner)
    def called(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_locals.get("self") is not args[0]:
            recorder.add(event, args, kwargs)
        return inner(*args, **kwargs)

    return called


_MOVERS = (Unit.move_to.__code__, Unit.__init__.__code__)


def _by_move_to(recorder: Recorder) -> Callable[[Unit, str, Any], None]:
    """`Unit.__setattr__` that notes each change of a unit's state, which only `move_to` makes."""

    def assign(unit: Unit, name: str, value: Any) -> None:
        if name == "state":
            assert sys._getframe(1).f_code in _MOVERS, f"{unit.name}.state is `move_to`'s to write"
            if name in unit.__dict__:
                recorder.transitions.add((unit.state, value))
        object.__setattr__(unit, name, value)

    return assign


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Models that are offloaded inside are recorded while `on` of the recorder is set, and the
    transitions of their units always."""
    recorder, patch = Recorder(), pytest.MonkeyPatch()
    patch.setattr(Unit, "__setattr__", _by_move_to(recorder))
    for event in EVENTS:
        patch.setattr(
            event.owner, event.method, _wrapped(recorder, event, getattr(event.owner, event.method))
        )
    for event in MODE_EVENTS:
        for mode in MODES:
            if event.method in vars(mode):
                patch.setattr(
                    mode, event.method, _wrapped_of_mode(recorder, event, vars(mode)[event.method])
                )
    try:
        yield recorder
    finally:
        patch.undo()
