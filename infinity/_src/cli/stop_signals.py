"""Signals that ask `infinity train` to stop: Ctrl-C, SIGTERM, SIGUSR1, SIGHUP.

    while a model is set up     the command ends at once: nothing was trained
    later                       what is under way is ended first: the step, a measurement, a save
    a second of the same kind   the command ends at once, and closes what it has open
    a third                     the system ends the process

A checkpoint or a durable run is whole after each of them. Launchers may send a signal to a process
group and pass it on as well, so what comes twice within moments is one signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, final

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
TWICE_S = 0.2
"""A signal that comes again so soon is the same one: `timeout` sends it to the process and to its
group.
"""
LAUNCHED_TWICE_S = 5.0
"""The same below torchrun, which passes on what SLURM has sent to the ranks, too."""


class Stopped(KeyboardInterrupt):
    """A signal ends the command at once. number: the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(name_of(number))
        self.number = number


def name_of(number: int) -> str:
    """Return a signal's name, as Ctrl-C for SIGINT."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def status_of(error: KeyboardInterrupt) -> int:
    """Return the exit status of a command that a signal has ended."""
    return 128 + (error.number if isinstance(error, Stopped) else signal.SIGINT)


@final
class StopSignals:
    """Receiver of the signals while it is entered. Of the thread that Python gives signals to; in
    any other it receives none. Signals that are ignored, as SIGHUP below nohup, stay so.

    environment: tells whether a launcher has started this process.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.number = 0
        """The first signal that came; 0 before."""
        self._defers = False
        self._first_s: dict[int, float] = {}
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}
        launched = "TORCHELASTIC_RUN_ID" in environment
        self._launched = launched
        self._twice_s = LAUNCHED_TWICE_S if launched else TWICE_S

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            # None: a handler that was not set from Python, and cannot be set from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._launched and self.number and self._before:
            # torchrun ends the ranks that are left when one has ended: the status stays 128 + n.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._before.clear()

    def defer(self) -> None:
        """Leave signals from now on to whoever asks for `number`. Raises: Stopped where one came
        before, which may have been raised in a place that drops errors.
        """
        self._defers = True
        if self.number:
            raise Stopped(self.number)

    def _received(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        again = number in self._first_s
        first_s = self._first_s.setdefault(number, now)
        self.number = self.number or number
        if self._defers and not again:
            # Not by `print`: the signal may have come in the middle of one.
            with contextlib.suppress(OSError):
                os.write(2, _told(number))
            return
        if again and now - first_s < self._twice_s:
            return
        if again or self._defers:
            # What closes may wait for a drive that no longer answers.
            signal.signal(number, signal.SIG_DFL)
        raise Stopped(number)


def _told(number: int) -> bytes:
    return (
        f"infinity: {name_of(number)}: stopping when what is under way has ended; the same signal "
        "again stops at once\n"
    ).encode()
