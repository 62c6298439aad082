"""Opens an executor with io_uring, else with threads. The fallback to threads is logged once."""

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


def _warn_once(reason: str) -> None:
    # Once per reason: a process opens many executors (checkpoints, benchmarks).
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
    """Open an executor with the backend that `backend` names ("auto": io_uring, else threads).

    `drives`: open swap files, which must stay open until `close`. `small`, `large`: the pools.
    `workers`: threads that verify, update and copy. `verify`: "full", "sample" or "off"
    (_validate.VERIFY). `block_bytes`: bytes of the longest request (None: the backend's default);
    `depth`: maximum requests in flight, one number for all drives or one per drive. block_bytes and
    depth are reduced to the drive's limits. `hold_s`: seconds of idle time of the executor after
    which a closed gate (`Executor.gate`) escapes, so that its jobs run without target buffers.
    `check`: called every 100 ms in each wait for a ticket and in `wait_all`; an exception that it
    raises ends the wait, and the jobs continue.
    `examine`: maps a job's error to the error to raise. `alarm`: sounded whenever a ticket fails.
    Raises ImportError when the C extension is missing, ValueError for an unknown backend, OSError
    when the named backend does not work here ("auto" falls back from io_uring to threads instead),
    MemoryError when the pools do not fit.
    """
    # Checked first: a misspelled name must not look like a missing backend.
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: must be one of {', '.join(BACKENDS)}")
    reasons: list[str] = []
    # The faster backend first. A backend that the user names has no fallback.
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
        # Not ImportError (no extension), MemoryError (pools) or ValueError: the thread backend
        # would fail in the same way.
        except OSError as error:
            # Never replace a backend that the user named.
            if backend != "auto":
                raise OSError(
                    f"I/O backend {backend!r} was requested, but does not work here: {error}"
                ) from error
            # The executor stores the reasons; `infinity doctor` shows them.
            reasons.append(f"no {name} backend: {error}")
            _warn_once(reasons[-1])
    raise OSError(f"no I/O backend works here: {'; '.join(reasons)}")
