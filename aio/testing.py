"""Faults and slow drives for tests: `open_executor(..., seam=Seam(fault=Fault("read", nth=3)))`.

io_uring makes no libc calls that a mock could intercept, so the executor has a fault injector. It
delays and reorders completions, fails a chosen request, slows a drive down, or replaces a drive by
a null drive (`null`). `Seam` has the settings of the fault injector, and `Executor.set_seam`
replaces them in a running executor; native/executor/drive.c (`seam_inject`) and native/rings/null.c
implement them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Fault", "Seam"]

NULL_BATCH_MAX = 64
"""Maximum requests that a null drive completes together: INF_NULL_BATCH_MAX of
native/executor/executor.cdef.h.
"""


KINDS = ("errno", "short", "zero", "bitflip", "stale", "misdirected", "late")
"""Kinds of faults, in the order of INF_SEAM_* of native/executor/executor.h, from 1 on."""


@dataclass(frozen=True)
class Fault:
    """Injected fault of the `nth` request (from 0) of `op`, and of all later ones if `persistent`.

    kind: "errno" (the request fails with `errno` and nothing is transferred), "short" (half of the
    bytes are transferred), "zero" (the request returns 0), "bitflip" (one bit of the data read or
    written is flipped), "stale" (the request reports success, but transfers nothing), "misdirected"
    (the next range of the same length in the file is read or overwritten instead; at the end of the
    file the previous one), "late" (the result is delayed by `late_s` seconds).

    lasting: the job's recovery fails, too: its second read, or its write to a reserved extent.

    drive, start, stop: only requests of this drive that overlap bytes [start, stop) of one of its
    files count and fail; None: any drive, the file's end. To simulate a bad block, set
    `persistent`.
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
                f"Fault(start={self.start}, stop={self.stop}): start must be 0 or more, and stop "
                "must be greater than start"
            )
        if self.drive is not None and self.drive < 0:
            raise ValueError(f"Fault(drive={self.drive}): drives are counted from 0; None is any")
        if not (math.isfinite(self.late_s) and self.late_s >= 0):
            raise ValueError(f"Fault(late_s={self.late_s}): must be seconds, 0 or more")


@dataclass(frozen=True)
class Seam:
    """Settings of the fault injector, for tests and simulations: delays, reordering, faults,
    speeds.

    `delay_us_max`: every completion is delayed by a random time up to this (so completions are
    reordered), drawn from `seed`. `read_bytes_per_s`, `write_bytes_per_s`: throttle of the drives,
    one number for all or a tuple with one per drive (0: none); reads and writes share a drive's
    time.

    `null`: all drives are null drives, which complete up to this many requests (1 to 64) together,
    immediately, without moving data: reads leave slots unchanged, so use verify="off". Their files
    may be sparse, of any size (`SwapFile.sparse`). 0: real drives. `null_computes` = n: with null
    drives, workers compute one chunk of n (by its id) and skip the others; 0: none.

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
            raise ValueError(f"Seam(null={self.null}): must be 0 (real drives) to {NULL_BATCH_MAX}")
        if self.null_computes < 0 or (self.null_computes != 1 and not self.null):
            raise ValueError(
                f"Seam(null_computes={self.null_computes}): must be 0 or more, and 1 without null "
                "drives"
            )

    def throttle(self, drive: int) -> tuple[float, float]:
        """(read, write) bytes per second of one drive; 0: not throttled."""
        pair = (self.read_bytes_per_s, self.write_bytes_per_s)
        # A number applies to all drives.
        read, write = (value[drive] if isinstance(value, tuple) else value for value in pair)
        return read, write
