"""One bar that goes through the phases, on a terminal only."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_REFRESH_S = 0.25


def progress_bar(console: Console) -> AbstractContextManager[Callable[[str, float], None] | None]:
    """A context that gives what phases call with their name and done share; None where there is no terminal."""
    return _Bar(console) if console.is_terminal else nullcontext()


class _Bar:
    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description:<20}"), BarColumn(), TimeElapsedColumn())
        # Drawn from the calls, not by a thread of its own: that thread's CPU time would count as the benchmark's.
        self._progress = Progress(*columns, console=console, transient=True, auto_refresh=False)
        self._task = self._progress.add_task("starting", total=1.0)
        self._drawn_s = 0.0
        self._phase = ""

    def __enter__(self) -> Callable[[str, float], None]:
        self._progress.start()
        return self._say

    def _say(self, phase: str, share: float) -> None:
        now_s = time.monotonic()
        if phase == self._phase and now_s - self._drawn_s < _REFRESH_S:
            return
        self._phase, self._drawn_s = phase, now_s
        self._progress.update(self._task, description=phase, completed=share, refresh=True)

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()
