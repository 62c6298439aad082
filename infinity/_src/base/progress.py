"""A progress line for work that may take long. On a terminal it is shown after a second, with an
estimate of what is left, and taken away at the end. Elsewhere, as in the log of a job, a line of
its own is written every half minute.
"""

from __future__ import annotations

import sys
import time
from typing import final

from infinity._src.base.sizes import format_size

SHOWN_AFTER_S = 1.0
LOGGED_EVERY_S = 30.0
_EVERY_S = 0.2
# Of a standard error that is full, a pipe without a reader, closed, or None.
_UNWRITABLE = (OSError, ValueError, AttributeError)


def format_left(seconds: float) -> str:
    """Format a time to go: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@final
class ProgressLine:
    """Bytes done of a total, on standard error. One thread uses it at a time.

    total_bytes: None where it is not known. shown: False writes nothing (ranks but the first).

    Never raises for a line that cannot be written: it shows no more, and the work goes on.
    """

    def __init__(self, title: str, total_bytes: int | None, *, shown: bool) -> None:
        self._title = title
        self._total = total_bytes
        self._shown = shown
        # In a log file the carriage returns would make one endless line.
        self._in_place = False
        try:
            self._in_place = sys.stderr.isatty()
        except _UNWRITABLE:
            self._shown = False
        self._done = 0
        self._start_s = time.monotonic()
        self._next_s = self._start_s + (SHOWN_AFTER_S if self._in_place else LOGGED_EVERY_S)
        self._width = 0

    def advance(self, size_bytes: int) -> None:
        self._done += size_bytes
        now = time.monotonic()
        if not self._shown or now < self._next_s:
            return
        self._next_s = now + (_EVERY_S if self._in_place else LOGGED_EVERY_S)
        text = self._text(now - self._start_s)
        if self._in_place:
            self._write(f"\r{text:{self._width}}")
            self._width = max(self._width, len(text))
        else:
            self._write(f"infinity: {text}\n")

    def _write(self, text: str) -> None:
        try:
            # Not print, which writes to standard output where standard error is None.
            sys.stderr.write(text)
            sys.stderr.flush()
        except _UNWRITABLE:
            # No silent fall-back: nothing but the display is lost. Raised, the error would break
            # off a restore or a save whose own files are well.
            self._shown = False

    def _text(self, seconds: float) -> str:
        rate = self._done / seconds
        done = f"{self._title}: {format_size(self._done)}"
        if self._total is not None:
            done += f" of {format_size(self._total)}"
        done += f", {format_size(int(rate))}/s"
        if self._total is None or not rate:
            return done
        return f"{done}, {format_left((self._total - self._done) / rate)} left"

    def end(self) -> None:
        """Take the line away. Idempotent."""
        if self._width and self._shown:
            self._write("\r" + " " * self._width + "\r")
        self._width = 0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()
