"""Forecast of drive wear, and a watch for drives that have become slower than they were.

`Endurance` takes an executor's counters once per optimizer step, and whenever somebody asks:

    endurance = Endurance()
    endurance.observe(executor.stats(), steps=steps_done)  # warns when a drive has become slow
    endurance.forecast(0).tb_per_day                       # of the executor's first drive

A drive stays slow when it is hot, when its fast (SLC) cache is full, or when somebody else uses it.
The watch compares bandwidth while busy, second by second, like with like:

- A second belongs to a class by its share of reads, since most drives write slower than they read.
- Mostly idle seconds do not count: a few requests are no load.
- The sustained bandwidth of a class is the best median of `SUSTAINED_SAMPLES` samples in a row.
- `SLOW_SAMPLES` slow samples in a row begin an episode: one warning. As many good ones end it: one
  line at INFO.

Nothing here does I/O.
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

# A median of several: one lucky second is nothing that a drive sustains.
SUSTAINED_SAMPLES = 8
# In a row, so that a hiccup of a second causes no warning.
SLOW_SAMPLES = 5
#: An episode ends at this share of what was sustained; between it and the share where one begins
#: nothing changes.
RECOVERED_SHARE = 0.75
BUSY_SHARE_MIN = 0.5
#: Fewer bytes are no sample: a busy second with less is counted together with the next.
SAMPLE_BYTES_MIN = 4 << 20
WINDOW_S = 1.0
#: Counters of a second are final once the requests that were in flight at its end have results.
RESULTS_LAG_S = 1.0
#: Edges of the classes by share of reads: narrow where a little of the slower direction makes much
#: of the time, so that within a class no drive whose directions differ by up to ten times changes
#: its bandwidth by more than a quarter.
CLASS_EDGES = (0.01, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99)
#: The rate of writing is that of the last quarter of an hour, or of the last step if that took
#: longer.
RATE_SPAN_S = 900.0
# Bounds the history: 180 points in a quarter of an hour, however often `observe` is called.
_RATE_EVERY_S = 5.0
_DAY_S = 86_400.0


@dataclass(frozen=True)
class Forecast:
    """Rate at which a drive is written. None: unknown until the first step has ended.

    `bytes_written`: since the executor was opened, set-up included. The rates are of training
    alone.
    """

    bytes_written: int = 0
    bytes_per_step: float | None = None
    bytes_per_day: float | None = None

    @property
    def tb_per_day(self) -> float | None:
        """Terabytes (10^12 bytes) per day at the current rate."""
        return None if self.bytes_per_day is None else self.bytes_per_day / 1e12

    def days(self, rated_tb: float, used_tb: float = 0.0) -> float | None:
        """Days until a drive rated for `rated_tb` terabytes written (TBW) has reached them.

        At the current rate.
        used_tb: terabytes written before, for example "Data Units Written" of `smartctl`. Infinite
        when nothing is written. Raises: ValueError for a rating that is not positive.
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
    """Notice that a drive's bandwidth has dropped, or has come back (`recovered`).

    Bandwidths are in bytes per second while busy.
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
            "be full, or something else uses it"
        )


def recent_bytes_per_s(
    windows: Sequence[Window], span_s: float, *, opened_s: float, now_s: float
) -> tuple[float, float]:
    """(read, written) bytes per second over the last `span_s` whole seconds, idle ones included."""
    # The present second is incomplete.
    end_s = math.floor(now_s / WINDOW_S) * WINDOW_S
    span_s = min(span_s, end_s - opened_s)
    # No whole second yet.
    if span_s < WINDOW_S:
        return 0.0, 0.0
    # Seconds are aligned, so the executor was opened within its first.
    recent = [window for window in windows if end_s - span_s - WINDOW_S < window.start_s < end_s]
    return sum(w.bytes_read for w in recent) / span_s, sum(w.bytes_written for w in recent) / span_s


@dataclass
class _Class:
    """Samples of about the same share of reads."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=SUSTAINED_SAMPLES))
    sustained: float = 0.0

    def add(self, rate: float) -> float:
        """Add a sample; return the bandwidth sustained before it (0.0: unknown)."""
        # Taken first: a sample is judged by what was sustained without it.
        before = self.sustained
        self.latest.append(rate)
        if len(self.latest) == SUSTAINED_SAMPLES:
            # Never lowered: a drive that slows down for good must not become its own measure.
            self.sustained = max(self.sustained, statistics.median(self.latest))
        return before


@dataclass
class _Direction:
    """Direction of traffic: reads, writes, or both at once.

    Holds the streak of slow or good samples in a row, and the episode, if there is one. A sample is
    its rate relative to what its class sustained, so that samples of several classes can follow
    each other.
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
        """Take in a sample whose class sustained `before`.

        Returns a Notice when an episode begins or ends with it.
        """
        # Between the two nothing changes, so a drive at the edge does not warn again and again.
        slow, good = rate < share * before, rate >= max(RECOVERED_SHARE, share) * before
        # In an episode good samples count, outside of one slow ones.
        changes = slow if self.slow_since_s is None else good
        if self.slow_since_s is not None and slow:
            # Refreshed, so that `slow` tells how it is now.
            self.notice = Notice(path, self.name, before, rate, end_s - self.slow_since_s)
        if not changes:
            self.streak.clear()
            return None
        if not self.streak:
            self.streak_start_s = start_s
        # Relative: the samples of a streak may come from classes of different bandwidth.
        self.streak.append(rate / before)
        if len(self.streak) < SLOW_SAMPLES:
            return None
        now = statistics.median(self.streak) * before
        self.streak.clear()
        if self.slow_since_s is None:
            # The episode began with the first slow sample, not with the one that was one too many.
            self.slow_since_s = self.streak_start_s
            self.episodes += 1
            self.notice = Notice(path, self.name, before, now, end_s - self.slow_since_s)
            return self.notice
        # The episode ended where the good samples began.
        lasted_s = self.streak_start_s - self.slow_since_s
        self.slow_since_s = self.notice = None
        return Notice(path, self.name, before, now, lasted_s, recovered=True)


class _Drive:
    """One drive: its history of writing and its bandwidth. Bounded, however long the run."""

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
        """Remember how much has been written by now."""
        self.latest = (now_s, bytes_written, steps)
        # Set-up fills the drive once and says nothing about training, so its writes are left out.
        if self.base is None or steps <= 0:
            self.base = self.latest
            self.history = deque([(now_s, bytes_written)])
            return
        if now_s - self.history[-1][0] >= _RATE_EVERY_S:
            self.history.append((now_s, bytes_written))
        # One point older than the span stays: a step may take longer than a quarter of an hour.
        while len(self.history) > 1 and now_s - self.history[1][0] >= RATE_SPAN_S:
            self.history.popleft()

    def forecast(self) -> Forecast:
        now_s, written, steps = self.latest
        # No step has ended since training began: there is no rate yet.
        if self.base is None or steps <= self.base[2] or now_s <= self.history[0][0]:
            return Forecast(written)
        from_s, from_bytes = self.history[0]
        per_step = (written - self.base[1]) / (steps - self.base[2])
        return Forecast(written, per_step, (written - from_bytes) / (now_s - from_s) * _DAY_S)

    def watch(self, drive: DriveStats, now_s: float) -> Iterator[Notice]:
        """Judge the seconds that became final since the last call."""
        for window in drive.windows:
            # Not judged twice, and not before requests in flight at its end have their results.
            if window.start_s <= self.seen_s or window.start_s + WINDOW_S + RESULTS_LAG_S > now_s:
                continue
            self.seen_s = window.start_s
            sample = self._sample(window)
            if sample is not None:
                notice = self._judge(drive.path, sample, window.start_s + WINDOW_S)
                if notice is not None:
                    yield notice

    def _sample(self, window: Window) -> Window | None:
        """Make a sample of the window and of what was carried into it; None when it is no sample.

        A stalled drive has seconds that are busy and move nothing. They count with the next second
        that moves something.
        """
        carried, self.carried = self.carried, None
        # A few requests are no load, and say nothing about bandwidth.
        if window.busy_s < BUSY_SHARE_MIN * WINDOW_S:
            return None
        if (
            # Seconds after an idle pause are not joined with those before it.
            carried is not None
            and window.start_s - carried.start_s <= carried.busy_s + 2 * WINDOW_S
        ):
            window = Window(
                carried.start_s,
                carried.bytes_read + window.bytes_read,
                carried.bytes_written + window.bytes_written,
                carried.busy_s + window.busy_s,
            )
        # Busy and almost nothing moved: counted with the next, or a stall would go unseen.
        if window.bytes_read + window.bytes_written < SAMPLE_BYTES_MIN:
            self.carried = window
            return None
        return window

    def _judge(self, path: str, sample: Window, end_s: float) -> Notice | None:
        total = sample.bytes_read + sample.bytes_written
        kind = bisect_right(CLASS_EDGES, sample.bytes_read / total)
        rate = total / sample.busy_s
        before = self.classes[kind].add(rate)
        # The first samples of a class have nothing to be compared with.
        if not before:
            return None
        direction = self.directions[0 if kind == 0 else 2 if kind == len(CLASS_EDGES) else 1]
        return direction.judge(path, rate, before, sample.start_s, end_s, self.share)


class Endurance:
    """Watch over the drives of one executor, and forecast of their wear: see the module.

    Call it from one thread at a time; a call takes microseconds.
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
        """Take in an executor's counters after `steps` optimizer steps; returns what was noticed,
        which is also logged.

        Writes before the last call with `steps` 0 are set-up, and not in the rates.
        Call it at least once a minute of I/O: an executor keeps 64 seconds. now_s: CLOCK_MONOTONIC,
        the present by default.
        """
        if now_s is None:
            now_s = time.monotonic()
        # Made on the first call, which is the first to know how many drives there are.
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
        """Forecast for the executor's drive of this number, as of the last `observe`."""
        return self._drives[drive].forecast() if drive < len(self._drives) else Forecast()

    def slow(self, drive: int) -> tuple[Notice, ...]:
        """Episodes in progress: the drive gives less than before. Empty while all is well."""
        if drive >= len(self._drives):
            return ()
        return tuple(d.notice for d in self._drives[drive].directions if d.notice is not None)

    def episodes(self, drive: int) -> int:
        """Count the times that the drive's bandwidth has dropped."""
        return (
            sum(d.episodes for d in self._drives[drive].directions)
            if drive < len(self._drives)
            else 0
        )
