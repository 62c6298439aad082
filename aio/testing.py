"""Faults and slow drives for tests: `open_executor(..., seam=Seam(fault=Fault("read", nth=3)))`.

io_uring makes no libc calls that a mock could intercept, so tests go in by this seam, which delays
and reorders completions, fails a chosen request, and slows a drive down. `Seam` has the settings;
native/executor_drive.c (`seam_inject`) carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Fault", "Seam"]


@dataclass(frozen=True)
class Fault:
    """Injected fault (tests): of the `nth` request (from 0) of `op` on any drive, and of all later
    ones if `persistent`.

    kind: "errno" (the request fails with `errno` and nothing is transferred), "short" (half of it
    is transferred), "zero" (the request returns 0), "bitflip" (one bit of what was read, or of what
    is written, is flipped).
    """

    op: str
    nth: int
    kind: str = "errno"
    errno: int = 5
    persistent: bool = False

    def __post_init__(self) -> None:
        if self.op not in ("read", "write"):
            raise ValueError(f"Fault(op={self.op!r}): must be 'read' or 'write'")
        if self.kind not in ("errno", "short", "zero", "bitflip"):
            raise ValueError(
                f"Fault(kind={self.kind!r}): must be 'errno', 'short', 'zero' or 'bitflip'"
            )
        if self.nth < 0:
            raise ValueError(f"Fault(nth={self.nth}): requests are counted from 0")


@dataclass(frozen=True)
class Seam:
    """Changes to an executor for tests and simulations: delays, reordering, faults, a slower drive.

    `delay_us_max`: every completion is held back by a random time up to this (so they also come out
    of order), from `seed`. `read_bytes_per_s`, `write_bytes_per_s`: speed of each drive, one number
    for all or a tuple with one for each; reads and writes share a drive's time (0: as it is).
    """

    delay_us_max: int = 0
    seed: int = 0
    fault: Fault | None = None
    read_bytes_per_s: float | tuple[float, ...] = 0.0
    write_bytes_per_s: float | tuple[float, ...] = 0.0

    def throttle(self, drive: int) -> tuple[float, float]:
        """(read, write) bytes per second of one drive, 0 for as it is."""
        pair = (self.read_bytes_per_s, self.write_bytes_per_s)
        # One number serves all drives.
        read, write = (value[drive] if isinstance(value, tuple) else value for value in pair)
        return read, write
