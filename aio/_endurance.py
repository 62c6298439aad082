"""Forecast of drive wear, and detection of drives whose bandwidth has dropped.

The caller passes an executor's counters to `Endurance` once per optimizer step:

    endurance = Endurance()
    endurance.observe(executor.stats(), steps=steps_done)  # warns when a drive has become slow
    endurance.forecast(0).tb_per_day                       # of the executor's first drive

A drive slows down when it is hot, when its fast (SLC) cache is full, or when another process uses
it. `Endurance` compares the bandwidth of busy seconds with earlier seconds of a similar load:

- Seconds are classified by their share of reads, since most drives write slower than they read.
- Mostly idle seconds are ignored: a few requests do not show the bandwidth.
- The sustained bandwidth of a class is the best median of `SUSTAINED_SAMPLES` samples in a row.
- `SLOW_SAMPLES` slow samples in a row begin an episode, logged as one warning. As many good samples
  in a row end it, logged once at INFO.

This module does no I/O.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from infinity.aio._stats import DriveStats, ExecutorStats, Window

log = logging.getLogger("infinity.aio")

# A median of several, so that one fast second does not count as sustained.
SUSTAINED_SAMPLES = 8
# Several in a row, so that one slow second causes no warning.
SLOW_SAMPLES = 5
#: A sample is good from this share of the sustained bandwidth on. Samples between the slow and the
#: good share neither begin nor end an episode.
RECOVERED_SHARE = 0.75
BUSY_SHARE_MIN = 0.5
#: A busy second with fewer bytes is merged with the next one.
SAMPLE_BYTES_MIN = 4 << 20
WINDOW_S = 1.0
#: A second's counters are final after this time: requests in flight at its end then have results.
RESULTS_LAG_S = 1.0
#: Edges of the classes, as shares of reads. Classes near 0 and 1 are narrow, since a few requests
#: in the slower direction take much of the time: if the bandwidths of reads and writes differ by a
#: factor of ten at most, bandwidth varies by a quarter at most within a class.
CLASS_EDGES = (0.01, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99)
#: The write rate is measured over the last 15 minutes, or the last step if it took longer.
RATE_SPAN_S = 900.0
# Bounds the history to 180 points in 15 minutes, however often `observe` is called.
_RATE_EVERY_S = 5.0
_DAY_S = 86_400.0


@dataclass(frozen=True)
class Forecast:
    """Rate at which a drive is written. None: unknown until the first step has ended.

    `bytes_written`: since the executor was opened, with set-up. The rates exclude set-up.
    """

    bytes_written: int = 0
    bytes_per_step: float | None = None
    bytes_per_day: float | None = None

    @property
    def tb_per_day(self) -> float | None:
        """Terabytes (10^12 bytes) per day at the current rate."""
        return None if self.bytes_per_day is None else self.bytes_per_day / 1e12

    def days(self, rated_tb: float, used_tb: float = 0.0) -> float | None:
        """Days at the current rate until a drive has reached its rating of `rated_tb` terabytes
        written (TBW).

        used_tb: terabytes written before, for example "Data Units Written" of `smartctl`. Infinite
        at a rate of 0, None while the rate is unknown. Raises: ValueError for a rating that is not
        positive.
        """
        if not (rated_tb > 0 and used_tb >= 0):
            raise ValueError(
                f"rated_tb={rated_tb}, used_tb={used_tb}: give the drive's rating in terabytes, "
                "above 0"
            )
        if self.bytes_per_day is None:
            return None
        left = max(rated_tb - used_tb, 0.0) * 1e12
        return left / self.bytes_per_day if self.bytes_per_day else math.inf


@dataclass(frozen=True)
class Notice:
    """Notice that a drive's bandwidth has dropped, or has recovered (`recovered`).

    Bandwidths are in bytes per busy second.
    """

    path: str
    direction: str
    before_bytes_per_s: float
    now_bytes_per_s: float
    lasted_s: float
    recovered: bool = False

    def __str__(self) -> str:
        before, now = self.before_bytes_per_s / 1e9, self.now_bytes_per_s / 1e9
        if self.recovered:
            back = f"{self.direction} are back at {now:.2f} GB/s after {self.lasted_s:.0f} s"
            return f"{self.path}: {back} ({before:.2f} GB/s before)"
        return (
            f"{self.path}: {self.direction} have dropped to {now:.2f} GB/s for {self.lasted_s:.0f} "
            f"s; the drive sustained {before:.2f} GB/s before. It may be hot, its fast cache may "
            "be full, or another process uses it"
        )


def recent_bytes_per_s(
    windows: Sequence[Window], span_s: float, *, opened_s: float, now_s: float
) -> tuple[float, float]:
    """Return (read, written) bytes per second over the last `span_s` whole seconds, idle seconds
    included."""
    # The current second is incomplete.
    end_s = math.floor(now_s / WINDOW_S) * WINDOW_S
    span_s = min(span_s, end_s - opened_s)
    # No whole second yet.
    if span_s < WINDOW_S:
        return 0.0, 0.0
    # Windows are aligned to whole seconds, so the executor was opened within its first window.
    recent = [window for window in windows if end_s - span_s - WINDOW_S < window.start_s < end_s]
    return sum(w.bytes_read for w in recent) / span_s, sum(w.bytes_written for w in recent) / span_s


@dataclass
class _Class:
    """Samples with a similar share of reads."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=SUSTAINED_SAMPLES))
    sustained: float = 0.0

    def add(self, rate: float) -> float:
        """Add a sample; return the bandwidth sustained before it (0.0: unknown)."""
        # Read before the sample is added: a sample is compared with the samples before it.
        before = self.sustained
        self.latest.append(rate)
        if len(self.latest) == SUSTAINED_SAMPLES:
            # Never lowered, so that a permanently slow drive is still reported as slow.
            self.sustained = max(self.sustained, statistics.median(self.latest))
        return before


@dataclass
class _Direction:
    """Direction of traffic: reads, writes, or both at once.

    Holds the current streak of slow or good samples, and the episode in progress, if any. Rates are
    relative to the sustained bandwidth of their class, so a streak may mix classes.
    """

    name: str
    # Samples in a row that may begin or end an episode.
    streak: list[float] = field(default_factory=list)
    streak_start_s: float = 0.0
    slow_since_s: float | None = None
    notice: Notice | None = None  # of the episode in progress
    episodes: int = 0

    def judge(
        self, path: str, rate: float, before: float, start_s: float, end_s: float, share: float
    ) -> Notice | None:
        """Add a sample. before: the sustained bandwidth of its class. Returns a Notice if the
        sample begins or ends an episode."""
        # Two thresholds, so that a drive whose bandwidth is near one does not warn repeatedly.
        slow, good = rate < share * before, rate >= max(RECOVERED_SHARE, share) * before
        changes = slow if self.slow_since_s is None else good
        if self.slow_since_s is not None and slow:
            # Updated, so that `slow` returns the current bandwidth.
            self.notice = Notice(path, self.name, before, rate, end_s - self.slow_since_s)
        if not changes:
            self.streak.clear()
            return None
        if not self.streak:
            self.streak_start_s = start_s
        # Relative: samples of one streak may be of classes with different bandwidths.
        self.streak.append(rate / before)
        if len(self.streak) < SLOW_SAMPLES:
            return None
        now = statistics.median(self.streak) * before
        self.streak.clear()
        if self.slow_since_s is None:
            # The episode began with the first slow sample of the streak.
            self.slow_since_s = self.streak_start_s
            self.episodes += 1
            self.notice = Notice(path, self.name, before, now, end_s - self.slow_since_s)
            return self.notice
        # The episode ended with the first good sample of the streak.
        lasted_s = self.streak_start_s - self.slow_since_s
        self.slow_since_s = self.notice = None
        return Notice(path, self.name, before, now, lasted_s, recovered=True)


class _Drive:
    """Write history and bandwidth samples of one drive, of bounded size."""

    def __init__(self, share: float) -> None:
        self.share = share
        # (time, bytes written, steps) where training began.
        self.base: tuple[float, int, int] | None = None
        self.history: deque[tuple[float, int]] = deque()
        self.latest = (0.0, 0, 0)
        self.seen_s = -math.inf
        self.carried: Window | None = None
        self.classes = [_Class() for _ in range(len(CLASS_EDGES) + 1)]
        self.directions = (
            _Direction("writes"),
            _Direction("mixed reads and writes"),
            _Direction("reads"),
        )

    def write(self, now_s: float, bytes_written: int, steps: int) -> None:
        """Record the bytes written so far."""
        self.latest = (now_s, bytes_written, steps)
        # The rate excludes set-up, which writes all states once.
        if self.base is None or steps <= 0:
            self.base = self.latest
            self.history = deque([(now_s, bytes_written)])
            return
        if now_s - self.history[-1][0] >= _RATE_EVERY_S:
            self.history.append((now_s, bytes_written))
        # Keep one point older than the span: a step may take longer than 15 minutes.
        while len(self.history) > 1 and now_s - self.history[1][0] >= RATE_SPAN_S:
            self.history.popleft()

    def forecast(self) -> Forecast:
        now_s, written, steps = self.latest
        # No rate before the first step has ended.
        if self.base is None or steps <= self.base[2] or now_s <= self.history[0][0]:
            return Forecast(written)
        from_s, from_bytes = self.history[0]
        per_step = (written - self.base[1]) / (steps - self.base[2])
        return Forecast(written, per_step, (written - from_bytes) / (now_s - from_s) * _DAY_S)

    def watch(self, drive: DriveStats, now_s: float) -> Iterator[Notice]:
        """Yield the notices of the seconds that became final since the last call."""
        for window in drive.windows:
            # Each second once, and only when it is final (see RESULTS_LAG_S).
            if window.start_s <= self.seen_s or window.start_s + WINDOW_S + RESULTS_LAG_S > now_s:
                continue
            self.seen_s = window.start_s
            sample = self._sample(window)
            if sample is not None:
                notice = self._judge(drive.path, sample, window.start_s + WINDOW_S)
                if notice is not None:
                    yield notice

    def _sample(self, window: Window) -> Window | None:
        """Merge the window with the carried one; return None if the result is not a sample.

        A stalled drive has busy seconds without traffic. `_carried` adds them to the next second
        with traffic.
        """
        carried, self.carried = self.carried, None
        # A mostly idle second does not show the bandwidth.
        if window.busy_s < BUSY_SHARE_MIN * WINDOW_S:
            return None
        if (
            # Do not merge seconds across an idle pause.
            carried is not None
            and window.start_s - carried.start_s <= carried.busy_s + 2 * WINDOW_S
        ):
            window = Window(
                carried.start_s,
                carried.bytes_read + window.bytes_read,
                carried.bytes_written + window.bytes_written,
                carried.busy_s + window.busy_s,
            )
        # Carry a busy second with almost no traffic, so that a stall counts.
        if window.bytes_read + window.bytes_written < SAMPLE_BYTES_MIN:
            self.carried = window
            return None
        return window

    def _judge(self, path: str, sample: Window, end_s: float) -> Notice | None:
        total = sample.bytes_read + sample.bytes_written
        kind = bisect_right(CLASS_EDGES, sample.bytes_read / total)
        rate = total / sample.busy_s
        before = self.classes[kind].add(rate)
        # The class has no sustained bandwidth yet.
        if not before:
            return None
        direction = self.directions[0 if kind == 0 else 2 if kind == len(CLASS_EDGES) else 1]
        return direction.judge(path, rate, before, sample.start_s, end_s, self.share)


class Endurance:
    """Slowdown detection and wear forecast for the drives of one executor: see the module.

    Not thread-safe. A call takes microseconds.
    """

    def __init__(self, *, share: float = 0.6) -> None:
        """A drive is slow below `share` of its sustained bandwidth.

        Raises: ValueError for a share outside (0, 1).
        """
        if not 0 < share < 1:
            raise ValueError(f"share={share}: must be above 0 and below 1")
        self._share = share
        self._drives: list[_Drive] = []

    def observe(
        self, stats: ExecutorStats, *, steps: int = 0, now_s: float | None = None
    ) -> tuple[Notice, ...]:
        """Add an executor's counters after `steps` optimizer steps. Returns the new notices, which
        are also logged.

        Writes before the last call with `steps` 0 are set-up, excluded from the rates. Call it at
        least once a minute during I/O: an executor retains 64 seconds. now_s: CLOCK_MONOTONIC
        seconds; default: now.
        """
        if now_s is None:
            now_s = time.monotonic()
        # Here, because the constructor does not know the number of drives.
        while len(self._drives) < len(stats.drives):
            self._drives.append(_Drive(self._share))
        notices: list[Notice] = []
        for mine, drive in zip(self._drives, stats.drives, strict=True):
            mine.write(now_s, drive.bytes_written, steps)
            notices.extend(mine.watch(drive, now_s))
        for notice in notices:
            log.log(logging.INFO if notice.recovered else logging.WARNING, "%s", notice)
        return tuple(notices)

    def forecast(self, drive: int) -> Forecast:
        """Forecast for the executor's drive with this index, as of the last `observe`."""
        return self._drives[drive].forecast() if drive < len(self._drives) else Forecast()

    def slow(self, drive: int) -> tuple[Notice, ...]:
        """Episodes in progress; empty while the drive is not slow."""
        if drive >= len(self._drives):
            return ()
        return tuple(d.notice for d in self._drives[drive].directions if d.notice is not None)

    def episodes(self, drive: int) -> int:
        """Number of episodes of the drive so far."""
        return (
            sum(d.episodes for d in self._drives[drive].directions)
            if drive < len(self._drives)
            else 0
        )
