"""A progress line for work that may take long: shown on a terminal only, after a second, with an
estimate of what is left; and taken away at the end.
"""

from __future__ import annotations

import sys
import time
from typing import final

from infinity._src.sizes import format_size

SHOWN_AFTER_S = 1.0
_EVERY_S = 0.2


def format_left(seconds: float) -> str:
    """Format a time to go: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@final
class ProgressLine:
    """Bytes done of a total, on standard error. One thread uses it at a time."""

    def __init__(self, title: str, total_bytes: int, *, shown: bool) -> None:
        self._title = title
        self._total = total_bytes
        self._done = 0
        self._start_s = time.monotonic()
        self._next_s = self._start_s + SHOWN_AFTER_S
        self._width = 0
        # In a log file the carriage returns would fill it with one endless line.
        self._may_show = shown and sys.stderr.isatty()

    def advance(self, size_bytes: int) -> None:
        """Add bytes that are done."""
        self._done += size_bytes
        now = time.monotonic()
        if self._may_show and now >= self._next_s:
            self._next_s = now + _EVERY_S
            rate = self._done / (now - self._start_s)
            left = f", {format_left((self._total - self._done) / rate)} left" if rate else ""
            text = (
                f"{self._title}: {format_size(self._done)} of {format_size(self._total)}, "
                f"{format_size(int(rate))}/s{left}"
            )
            print(f"\r{text:{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = max(self._width, len(text))

    def end(self) -> None:
        """Take the line away. Idempotent."""
        if self._width:
            print("\r" + " " * self._width + "\r", end="", file=sys.stderr, flush=True)
            self._width = 0

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()
