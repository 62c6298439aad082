"""Opens the best executor there is: io_uring, else threads. A step down is logged once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from infinity._src.base.alarm import Alarm
from infinity._src.cabi.records import PoolSpec
from infinity.aio._executor import Executor
from infinity.aio._swap_file import SwapFile
from infinity.aio.testing import Seam
from infinity.errors import AioError

log = logging.getLogger("infinity.aio")

BACKENDS = ("auto", "io_uring", "threads")
_logged: set[str] = set()


def _step_down(reason: str) -> None:
    # A process opens many executors (checkpoints, benchmarks); one line in the log is enough.
    if reason not in _logged:
        _logged.add(reason)
        log.warning("%s", reason)


def open_executor(
    drives: Sequence[SwapFile],
    *,
    small: PoolSpec,
    large: PoolSpec,
    backend: str = "auto",
    verify: str = "full",
    workers: int = 1,
    block_bytes: int | None = None,
    depth: int | Sequence[int] = 32,
    hold_s: float = 0.02,
    seam: Seam | None = None,
    check: Callable[[], None] | None = None,
    examine: Callable[[AioError], AioError] | None = None,
    alarm: Alarm | None = None,
) -> Executor:
    """Open the best executor there is here, or the one that `backend` names.

    `drives`: open swap files, which must stay open until `close`. `small`, `large`: the pools.
    `workers`: threads that verify, update and copy. `verify`: "full", "sample" or "off"
    (_validate.VERIFY). `block_bytes`: the longest request (None: the backend's default), `depth`:
    how many of them a drive has at most, one number or one for each drive; both are fitted to the
    drive. `hold_s`: idle time after which closed gates escape. `check`: called every 100 ms in each
    wait for a ticket and in `wait_all`; what it raises ends the wait, and not the work. `examine`:
    gets the error of a job, and returns the one to raise. `alarm`: sounded whenever a ticket fails.
    Raises ImportError when the C extension is missing, ValueError for an unknown backend, OSError
    when a named one cannot be had ("auto" steps down from io_uring to threads instead), MemoryError
    when the pools do not fit.
    """
    # Before anything is tried: a misspelled name must not look like a missing backend.
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: must be one of {', '.join(BACKENDS)}")
    reasons: list[str] = []
    # The best first. A backend that the user names has no fall-back.
    for name in ("io_uring", "threads") if backend == "auto" else (backend,):
        try:
            return Executor(
                drives,
                small=small,
                large=large,
                backend=name,
                verify=verify,
                workers=workers,
                block_bytes=block_bytes,
                depth=depth,
                hold_s=hold_s,
                seam=seam,
                check=check,
                examine=examine,
                alarm=alarm,
                backend_reason="; ".join(reasons),
            )
        # ImportError (no extension), MemoryError (pools) and ValueError pass: threads would meet
        # them too.
        except OSError as error:
            # A forced backend that cannot be had is an error, never another one in silence.
            if backend != "auto":
                raise OSError(
                    f"I/O backend {backend!r} was asked for and cannot be had: {error}"
                ) from error
            # Kept with the executor, too: `infinity doctor` shows it.
            reasons.append(f"no {name} backend: {error}")
            _step_down(reasons[-1])
    raise OSError(f"no I/O backend can be had here: {'; '.join(reasons)}")
