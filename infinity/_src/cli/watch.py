"""`infinity report --watch`: rewrites the page while runs continue; the page reloads itself. The
command ends when all runs have ended, or with a signal; the last page does not reload.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from infinity._src.base.metrics_file import FILE_NAME
from infinity._src.cli.run_history import RunHistory, read_run
from infinity._src.cli.stop_signals import StopSignals, status_of

Write = Callable[[Sequence[RunHistory], float | None], object]
"""A function that writes the page of runs, which reloads itself after some seconds; None: never."""


def watch(find: Callable[[], Sequence[Path]], write: Write, every_s: float) -> int:
    """Every `every_s` seconds, write the page of the runs that `find` finds if they have changed.
    Returns the exit status: 0 when all runs have ended, 128 + n after the signal n. Blocks.

    Raises: as `find`, `read_run` and `write`.
    """
    seen: object = None
    try:
        with StopSignals():
            while True:
                directories = find()
                now = [_state(directory) for directory in directories]
                if now != seen:
                    runs = [read_run(directory) for directory in directories]
                    # While a model is loading, its run has no record yet.
                    ended = bool(runs) and all(run.summary for run in runs)
                    if any(run.series.points for run in runs):
                        write(runs, None if ended else every_s)
                    if ended:
                        return 0
                    seen = now
                time.sleep(every_s)
    except KeyboardInterrupt as error:
        runs = [read_run(directory) for directory in find()]
        if any(run.series.points for run in runs):
            write(runs, None)
        return status_of(error)


def _state(directory: Path) -> tuple[Path, int, int]:
    found = (directory / FILE_NAME).stat()
    return directory, found.st_size, found.st_mtime_ns
