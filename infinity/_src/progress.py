"""A progress line for long work: shown on a terminal only, and taken away at the end."""

from __future__ import annotations

import sys
import time

from infinity._src.sizes import format_size

SHOWN_AFTER_S = 1.0
_EVERY_S = 0.2


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
            rate = format_size(int(self._done / (now - self._start_s)))
            text = (
                f"{self._title}: {format_size(self._done)} of {format_size(self._total)}, {rate}/s"
            )
            print(f"\r{text:{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = max(self._width, len(text))

    def end(self) -> None:
        """Take the line away."""
        if self._width:
            print("\r" + " " * self._width + "\r", end="", file=sys.stderr, flush=True)
            self._width = 0
