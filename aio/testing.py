"""Faults and slow drives for tests: `open_executor(..., seam=Seam(fault=Fault("read", nth=3)))`.

io_uring makes no libc calls that a mock could intercept, so tests go in by this seam, which delays
and reorders completions, fails a chosen request, slows a drive down, or takes it away (`null`).
`Executor.set_seam` changes it in an executor that runs. `Seam` has the settings;
native/executor/drive.c (`seam_inject`) and native/rings/null.c carry them out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Fault", "Seam"]

NULL_BATCH_MAX = 64
"""Requests that a null drive completes together at most: INF_NULL_BATCH_MAX of
native/executor/executor.cdef.h."""


KINDS = ("errno", "short", "zero", "bitflip", "stale", "misdirected", "late")
"""Kinds of faults, in the order of INF_SEAM_* of native/executor/executor.h, which begins at 1."""


@dataclass(frozen=True)
class Fault:
    """Injected fault (tests): of the `nth` request (from 0) of `op`, and of all later ones if
    `persistent`.

    kind: "errno" (the request fails with `errno` and nothing is transferred), "short" (half of it
    is transferred), "zero" (the request returns 0), "bitflip" (one bit of what was read, or of what
    is written, is flipped), "stale" (it is reported as done, and nothing is transferred: what was
    there before stays, on the drive or in memory), "misdirected" (the range behind it in its file,
    of the same length, is read or overwritten instead; at the end of the file the one before it),
    "late" (the result comes `late_s` seconds later).

    lasting: what the same job does to make up for it fails, too: it reads again, or writes to a
    reserved extent.

    drive, start, stop: only requests of this drive, and that meet bytes [start, stop) of any of its
    files, count and fail. A bad block is `persistent`, from the first such request on.
    """

    op: str
    nth: int
    kind: str = "errno"
    errno: int = 5
    persistent: bool = False
    lasting: bool = False
    drive: int | None = None
    start: int = 0
    stop: int | None = None
    late_s: float = 1.0

    def __post_init__(self) -> None:
        if self.op not in ("read", "write"):
            raise ValueError(f"Fault(op={self.op!r}): must be 'read' or 'write'")
        if self.kind not in KINDS:
            raise ValueError(f"Fault(kind={self.kind!r}): must be one of {', '.join(KINDS)}")
        if self.nth < 0:
            raise ValueError(f"Fault(nth={self.nth}): requests are counted from 0")
        if self.start < 0 or (self.stop is not None and self.stop <= self.start):
            raise ValueError(
                f"Fault(start={self.start}, stop={self.stop}): a range of bytes that is not empty"
            )
        if self.drive is not None and self.drive < 0:
            raise ValueError(f"Fault(drive={self.drive}): drives are counted from 0; None is any")
        if not (math.isfinite(self.late_s) and self.late_s >= 0):
            raise ValueError(f"Fault(late_s={self.late_s}): must be seconds, 0 or more")


@dataclass(frozen=True)
class Seam:
    """Changes to an executor for tests and simulations: delays, reordering, faults, a slower drive.

    `delay_us_max`: every completion is held back by a random time up to this (so they also come out
    of order), from `seed`. `read_bytes_per_s`, `write_bytes_per_s`: speed of each drive, one number
    for all or a tuple with one for each; reads and writes share a drive's time (0: as it is).

    `null`: all drives are null drives, which complete up to so many requests (1 to 64) together, at
    once, and move nothing: reads leave slots as they are, so verify="off". Their files may be
    sparse, of any size (`SwapFile.sparse`). 0: real drives. `null_computes`: workers copy and
    update one of their chunks in so many (by its id), and pass the others on as they are. 0: none.

    Raises: ValueError for numbers out of range.
    """

    delay_us_max: int = 0
    seed: int = 0
    fault: Fault | None = None
    read_bytes_per_s: float | tuple[float, ...] = 0.0
    write_bytes_per_s: float | tuple[float, ...] = 0.0
    null: int = 0
    null_computes: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.null <= NULL_BATCH_MAX:
            raise ValueError(f"Seam(null={self.null}): 0 (real drives) to {NULL_BATCH_MAX}")
        if self.null_computes < 0 or (self.null_computes != 1 and not self.null):
            raise ValueError(
                f"Seam(null_computes={self.null_computes}): one chunk of null drives in so many, "
                "or 0; and 1 without them"
            )

    def throttle(self, drive: int) -> tuple[float, float]:
        """(read, write) bytes per second of one drive, 0 for as it is."""
        pair = (self.read_bytes_per_s, self.write_bytes_per_s)
        # One number serves all drives.
        read, write = (value[drive] if isinstance(value, tuple) else value for value in pair)
        return read, write
