"""What a drive of the Python executor does, in numbers: latency, time in use, depth, bandwidth by the second."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field

from infinity.aio.latency import latency_of
from infinity.aio.stats import DriveStats, Latency, Window
from infinity.aio.swap_file import SwapFile

WINDOWS_MAX = 64
_BUCKETS_PER_OCTAVE = 4
_COUNTED = ("bytes_read", "bytes_written", "reads", "writes", "retries", "short_transfers", "errors")


class LatencyHistogram:
    """Durations in buckets of a quarter octave: a percentile is right within 2 ** (1 / 8), 9 %."""

    def __init__(self) -> None:
        self._counts = [0] * (64 * _BUCKETS_PER_OCTAVE)
        self._max_ns = 0

    def add(self, took_ns: int) -> None:
        """Count one duration."""
        self._counts[int(_BUCKETS_PER_OCTAVE * math.log2(max(1, took_ns)))] += 1
        self._max_ns = max(self._max_ns, took_ns)

    def latency(self) -> Latency:
        """Count, median, 99th percentile and the longest so far."""
        return latency_of(self._counts, self._max_ns, lambda bucket: 2 ** ((bucket + 0.5) / _BUCKETS_PER_OCTAVE) / 1e9)


@dataclass
class _Second:
    """A second in which requests were in flight: bytes by operation (read, write), and for how long there were any."""

    moved: list[int] = field(default_factory=lambda: [0, 0])
    busy_ns: int = 0


class DriveMeter:
    """Counters of one drive. Safe from any thread; nothing else is locked while its lock is held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._in_flight = 0
        self._in_flight_max = 0
        self._bytes = 0
        self._bytes_max = 0
        self._metered_ns = time.monotonic_ns()  # up to when busy time is counted
        self._busy_ns = 0
        self._depth_ns = 0
        self._seconds: dict[int, _Second] = {}  # by the clock's whole seconds, oldest first
        self._latencies = (LatencyHistogram(), LatencyHistogram())

    def count(self, name: str) -> None:
        """One more retry, short transfer or error."""
        with self._lock:
            self._counts[name] += 1

    def sent(self, op: int, asked: int) -> int:
        """A request is in flight from now on; returns when that was."""
        with self._lock:
            now = self._tick()
            self._counts["writes" if op else "reads"] += 1
            self._in_flight += 1
            self._bytes += asked
            self._in_flight_max = max(self._in_flight_max, self._in_flight)
            self._bytes_max = max(self._bytes_max, self._bytes)
        return now

    def ended(self, op: int, asked: int, moved: int, sent_ns: int) -> None:
        """The request is back, and moved that many bytes (none if it failed)."""
        with self._lock:
            now = self._tick()
            self._in_flight -= 1
            self._bytes -= asked
            self._latencies[op].add(now - sent_ns)
            if moved > 0:
                self._counts["bytes_written" if op else "bytes_read"] += moved
                self._spread(op, moved, sent_ns, now)

    def _tick(self) -> int:
        """Count the time since the last call, second by second: a request may take longer than one."""
        now = time.monotonic_ns()
        at = self._metered_ns
        self._metered_ns = now
        if not self._in_flight or now <= at:
            return now
        self._busy_ns += now - at
        self._depth_ns += (now - at) * self._in_flight
        at = max(at, now - WINDOWS_MAX * 10**9)  # older seconds would be forgotten again
        while at < now:
            end = min(now, at - at % 10**9 + 10**9)
            self._second(at // 10**9).busy_ns += end - at
            at = end
        return now

    def _second(self, number: int) -> _Second:
        if number not in self._seconds:
            self._seconds[number] = _Second()
            if len(self._seconds) > WINDOWS_MAX:
                del self._seconds[next(iter(self._seconds))]
        return self._seconds[number]

    def _spread(self, op: int, moved: int, sent_ns: int, now: int) -> None:
        """Bytes of a request that took several seconds belong to all of them."""
        left = moved
        took = max(1, now - sent_ns)
        for number, second in self._seconds.items():
            inside = min(now, (number + 1) * 10**9) - max(sent_ns, number * 10**9)
            share = min(left, moved * inside // took) if inside > 0 else 0
            second.moved[op] += share
            left -= share
        self._second(max(now - 1, sent_ns) // 10**9).moved[op] += left  # what rounding left over

    def stats(self, file: SwapFile, *, block_bytes: int, depth: int, failed: str) -> DriveStats:
        """Everything so far."""
        with self._lock:
            self._tick()
            windows = tuple(
                Window(float(number), second.moved[0], second.moved[1], second.busy_ns / 1e9)
                for number, second in self._seconds.items()
            )
            return DriveStats(
                path=file.path,
                **self._counts,
                in_flight_max=self._in_flight_max,
                in_flight_bytes_max=self._bytes_max,
                direct=file.direct,
                direct_reason=file.direct_reason,
                block_bytes=block_bytes,
                depth=depth,
                busy_s=self._busy_ns / 1e9,
                depth_mean=self._depth_ns / self._busy_ns if self._busy_ns else 0.0,
                read_latency=self._latencies[0].latency(),
                write_latency=self._latencies[1].latency(),
                windows=windows,
                failed=failed,
            )
