"""A bound for tests that compare measured traffic with `perf.roofline`."""

from __future__ import annotations


def turning_bytes_max(gathered_bytes: float, update: str, micro_batches: int) -> float:
    """The most that turning points can save: at each, up to `gathered_bytes` of gathered units
    need no second read.

    A forward turns into its backward M times, a backward into the next micro-batch's forward M - 1
    times. After the last backward comes an update, which moves every state whatever stays gathered;
    but frozen units, and with "backward" the first units of the next forward, save there too.
    """
    turns = 2 * micro_batches - 1
    return gathered_bytes * (turns if update == "deferred" else turns + 1)
