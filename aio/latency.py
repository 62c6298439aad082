"""Percentiles of a histogram of latencies; each executor has buckets of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from infinity.aio.stats import Latency


def latency_of(counts: Sequence[int], max_ns: int, middle_s: Callable[[int], float]) -> Latency:
    """Count, median, 99th percentile and longest. `middle_s`: the middle of a bucket in seconds, which stands for all of it."""
    total = sum(counts)
    if total == 0:
        return Latency()

    def percentile(share: float) -> float:
        rank, seen = math.ceil(share * total), 0
        for bucket, count in enumerate(counts):
            seen += count
            if seen >= rank:
                return min(middle_s(bucket), max_ns / 1e9)
        return max_ns / 1e9

    return Latency(count=total, p50_s=percentile(0.5), p99_s=percentile(0.99), max_s=max_ns / 1e9)
