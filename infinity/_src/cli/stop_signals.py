"""Signals that ask `infinity train` to stop: Ctrl-C, SIGTERM, SIGUSR1, SIGHUP.

    during set-up of a model    the command ends at once: nothing was trained
    later                       the command ends after the current step, measurement or save
    a second of the same kind   the command ends at once, and closes its files
    a third of the same kind    the system ends the process

Checkpoint and durable run stay whole in all four cases. A launcher may send a signal to the process
group and also to the process, so a signal that repeats within moments counts once.
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
"""Time within which a repeated signal counts once: `timeout` sends signals both to the process and
to the process group.
"""
AGAIN_S = 0.01
"""Delay before a signal is sent again, so that the interrupted destructor can end."""
LAUNCHED_TWICE_S = 5.0
"""TWICE_S under torchrun, which forwards signals that SLURM also sends to the ranks."""


class Stopped(KeyboardInterrupt):
    """A signal ends the command at once. number: the signal's number."""

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
    """Context manager that handles the signals, in the main thread only. Ignored signals, such as
    SIGHUP under nohup, stay ignored.

    Python drops exceptions that are raised in a destructor; then `Stopped` is raised again after
    the destructor.

    environment: shows whether torchrun has started this process.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.number = 0
        """The first signal received; 0 before."""
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
            # None: code outside of Python set the handler, and Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._launched and self.number and self._before:
            # When one rank has ended, torchrun sends SIGTERM to all others. This rank ignores it,
            # so that its exit status stays 128 + n.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._before.clear()

    def defer(self) -> None:
        """From now on a first signal sets `number` and does not raise `Stopped`. Raises: Stopped if
        a signal came before this call, since other code may have dropped the handler's `Stopped`.
        """
        self._defers = True
        if self.number:
            raise Stopped(self.number)

    def _unraisable(self, dropped: Any) -> None:
        if not issubclass(dropped.exc_type, Stopped):
            self._hook_before(dropped)
            return
        # `_received` may have replaced the handler by the default, which kills the process.
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
            # `print` is unsafe, since the signal may have interrupted another `print`.
            with contextlib.suppress(OSError):
                os.write(2, _notice(number))
            return
        if again and now - first_s < self._twice_s:
            return
        if again or self._defers:
            # Closing files may wait for a drive that no longer answers, so the next signal kills
            # the process.
            signal.signal(number, signal.SIG_DFL)
        raise Stopped(number)


def _notice(number: int) -> bytes:
    return (
        f"infinity: {name_of(number)}: stopping after the current step, measurement or save; the "
        "same signal again stops at once\n"
    ).encode()
