"""Progress line for long operations. On a terminal it appears after a second, with an estimate of
the remaining time, and is erased at the end. In a log file, a new line is written every half
minute.
"""

from __future__ import annotations

import sys
import time
from typing import final

from infinity._src.base.sizes import format_size

SHOWN_AFTER_S = 1.0
LOGGED_EVERY_S = 30.0
_EVERY_S = 0.2
# Errors of a write to stderr if its drive is full, its reader is gone, or it is closed or None.
_UNWRITABLE = (OSError, ValueError, AttributeError)


def format_left(seconds: float) -> str:
    """Format a remaining time: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@final
class ProgressLine:
    """Shows bytes done of a total on standard error. Not thread-safe.

    total_bytes: None if unknown. shown: False writes nothing (ranks other than 0).

    A write error is not raised; it only ends the display.
    """

    def __init__(self, title: str, total_bytes: int | None, *, shown: bool) -> None:
        self._title = title
        self._total = total_bytes
        self._shown = shown
        # In a log file carriage returns would produce one endless line.
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
            # Not print, which writes to standard output if standard error is None.
            sys.stderr.write(text)
            sys.stderr.flush()
        except _UNWRITABLE:
            # Only the display is lost; raising would abort a restore or a save.
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
        """Erase the line. Idempotent."""
        if self._width and self._shown:
            self._write("\r" + " " * self._width + "\r")
        self._width = 0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()
