"""Signals that ask `infinity train` to stop: Ctrl-C, SIGTERM, SIGUSR1, SIGHUP.

    during set-up of a model    the command ends at once: nothing was trained
    later                       the command ends after the current step, measurement or save
    a second of the same kind   the command ends at once, and closes its files
    a third of the same kind    the system ends the process

After any of these a checkpoint or a durable run is whole. A launcher may send a signal to a process
group and also pass it on, so the same signal within moments counts once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, final

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
TWICE_S = 0.2
"""Within this time a repeated signal counts once: `timeout` sends it to the process and to the
process group.
"""
AGAIN_S = 0.01
"""Delay of a repetition, in which a destructor ends."""
LAUNCHED_TWICE_S = 5.0
"""The same under torchrun, which passes on signals that SLURM has also sent to the ranks."""


class Stopped(KeyboardInterrupt):
    """A signal ends the command at once. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(name_of(number))
        self.number = number


def name_of(number: int) -> str:
    """Return the name of a signal; "Ctrl-C" for SIGINT."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def status_of(error: KeyboardInterrupt) -> int:
    """Return the exit status of a command that a signal has ended: 128 + its number."""
    return 128 + (error.number if isinstance(error, Stopped) else signal.SIGINT)


@final
class StopSignals:
    """Context manager that receives the signals while it is entered, in the main thread; in any
    other thread it receives none. Ignored signals, as SIGHUP under nohup, stay ignored.

    Python drops what is raised in a destructor, so `Stopped` is raised again after one.

    environment: says whether torchrun has started this process.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.number = 0
        """The first signal received; 0 if none was."""
        self._defers = False
        self._first_s: dict[int, float] = {}
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}
        self._hook_before = sys.unraisablehook
        self._again: threading.Timer | None = None
        self._handler: Any = None
        launched = "TORCHELASTIC_RUN_ID" in environment
        self._launched = launched
        self._twice_s = LAUNCHED_TWICE_S if launched else TWICE_S

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._received)
            self._hook_before, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if sys.unraisablehook == self._unraisable:
            sys.unraisablehook = self._hook_before
        for number, handler in self._before.items():
            # None: a handler that Python has not set and cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._launched and self.number and self._before:
            # When one rank has ended, torchrun sends SIGTERM to the remaining ranks. Ignore it, so
            # that this rank's status stays 128 + n.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._before.clear()

    def defer(self) -> None:
        """From now on record a first signal in `number` instead of raising `Stopped`. Raises:
        Stopped if a signal came before: the handler's `Stopped` may have been raised in code that
        drops errors.
        """
        self._defers = True
        if self.number:
            raise Stopped(self.number)

    def _unraisable(self, dropped: Any) -> None:
        if not issubclass(dropped.exc_type, Stopped):
            self._hook_before(dropped)
            return
        # The handler may have been replaced, so that the next signal kills the process.
        self._handler = signal.signal(self.number, self._received)
        main = threading.main_thread().ident
        assert main is not None
        self._again = threading.Timer(AGAIN_S, signal.pthread_kill, (main, self.number))
        self._again.daemon = True
        self._again.start()

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if self._again is not None:
            self._again = None
            signal.signal(self.number, self._handler)
            raise Stopped(self.number)
        now = time.monotonic()
        again = number in self._first_s
        first_s = self._first_s.setdefault(number, now)
        self.number = self.number or number
        if self._defers and not again:
            # Not `print`: the signal may have interrupted another `print`.
            with contextlib.suppress(OSError):
                os.write(2, _told(number))
            return
        if again and now - first_s < self._twice_s:
            return
        if again or self._defers:
            # Closing files may wait for a drive that no longer answers: let the next signal kill
            # the process.
            signal.signal(number, signal.SIG_DFL)
        raise Stopped(number)


def _told(number: int) -> bytes:
    return (
        f"infinity: {name_of(number)}: stopping when what is under way has ended; the same signal "
        "again stops at once\n"
    ).encode()
