"""Forecast of wear, and the notice that a drive has become slow, for simulated seconds."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from infinity import aio
from infinity.aio._endurance import (
    CLASS_EDGES,
    SLOW_SAMPLES,
    SUSTAINED_SAMPLES,
    Endurance,
    Forecast,
    Notice,
    recent_bytes_per_s,
)
from infinity.aio._stats import Window
from tests.drives import drive_stats, executor_stats

GB = 10**9


def second(start_s: float, rate: float, *, reads: float = 0.0, busy_s: float = 1.0) -> Window:
    """A second in which a drive moves `rate` bytes per second while busy, `reads` of them read."""
    moved = rate * busy_s
    return Window(start_s, int(moved * reads), int(moved * (1 - reads)), busy_s)


def feed(endurance: Endurance, windows: Sequence[Window], *, at_once: int = 5) -> list[Notice]:
    """Show `endurance` the 64 newest seconds of an executor every `at_once` seconds. Returns its
    notices."""
    found: list[Notice] = []
    for index in range(0, len(windows), at_once):
        shown = windows[: index + at_once][-64:]
        found += endurance.observe(
            executor_stats(drive_stats(shown)), now_s=shown[-1].start_s + 2.0
        )
    return found


def test_a_drop_is_one_warning_and_the_recovery_one_line(caplog: pytest.LogCaptureFixture) -> None:
    endurance = Endurance()
    windows = [second(t, 4 * GB if t < 20 or t >= 80 else GB) for t in range(100)]
    with caplog.at_level(logging.INFO, logger="infinity.aio"):
        dropped, recovered = feed(endurance, windows)
    assert (dropped.path, dropped.direction, dropped.recovered) == ("/mnt/nvme0", "writes", False)
    assert dropped.before_bytes_per_s == pytest.approx(4 * GB)
    assert dropped.now_bytes_per_s == pytest.approx(GB)
    assert dropped.lasted_s == pytest.approx(SLOW_SAMPLES)
    assert recovered.recovered
    assert recovered.lasted_s == pytest.approx(60)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert (
        "/mnt/nvme0: writes have dropped to 1.00 GB/s for 5 s; the drive sustained 4.00 GB/s"
        in caplog.messages[0]
    )
    assert "back at 4.00 GB/s after 60 s" in caplog.messages[1]
    assert (endurance.episodes(0), endurance.slow(0)) == (1, ())


def test_an_episode_in_progress_can_be_asked_for() -> None:
    endurance = Endurance()
    feed(endurance, [second(t, 4 * GB if t < 20 else GB) for t in range(50)])
    (notice,) = endurance.slow(0)
    assert notice.lasted_s == pytest.approx(30)
    assert endurance.slow(7) == ()


def test_directions_have_episodes_of_their_own() -> None:
    endurance = Endurance()
    speeds = {1.0: 3 * GB, 0.0: 4 * GB}
    good = [
        second(2 * t + (reads == 0), speed, reads=reads)
        for t in range(20)
        for reads, speed in speeds.items()
    ]
    # Writes drop; reads continue at the same speed, second by second.
    speeds[0.0] = GB
    bad = [
        second(40 + 2 * t + (reads == 0), speed, reads=reads)
        for t in range(20)
        for reads, speed in speeds.items()
    ]
    assert [notice.direction for notice in feed(endurance, good + bad)] == ["writes"]


def test_a_stalled_second_counts_with_the_next_that_moves_something() -> None:
    endurance = Endurance()
    stalling = [second(20 + t, 3 * GB if t % 3 == 2 else 0.0) for t in range(30)]
    (notice,) = feed(endurance, [second(t, 3 * GB) for t in range(20)] + stalling)
    assert notice.now_bytes_per_s == pytest.approx(GB)


def test_seconds_in_progress_are_left_for_later() -> None:
    endurance = Endurance()
    windows = [second(t, 4 * GB) for t in range(20)] + [
        second(20 + t, 0.1 * GB) for t in range(SLOW_SAMPLES)
    ]
    assert not endurance.observe(executor_stats(drive_stats(windows)), now_s=24.5)
    assert endurance.observe(executor_stats(drive_stats(windows)), now_s=26.0)
    assert not endurance.observe(executor_stats(drive_stats(windows)), now_s=27.0), (
        "a second is judged once"
    )


# Phases of a drive whose speed is constant: any mix and idleness, with 8 % of noise. A drive that
# is mostly idle may look slower.
_PHASES = st.lists(
    st.tuples(
        st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.95, 1.0])),
        st.floats(0.01, 1),
        st.integers(1, 500),
        st.integers(1, 30),
    ),
    min_size=2,
    max_size=12,
)


@given(
    phases=_PHASES,
    read=st.floats(0.05, 10),
    ratio=st.one_of(st.floats(0.1, 10), st.sampled_from([0.1, 10])),
    trickle=st.floats(0.05, 1),
    seed=st.integers(0, 99),
    at_once=st.integers(1, 64),
)
@settings(deadline=None, max_examples=300)
def test_constant_speed_never_warns_whatever_mix_and_idle_gaps(
    phases: list[tuple[float, float, int, int]],
    read: float,
    ratio: float,
    trickle: float,
    seed: int,
    at_once: int,
) -> None:
    noise = random.Random(seed)
    start, windows = 0.0, []
    for reads, busy_s, gap, count in phases:
        for _ in range(count):
            start += gap
            rate = noise.uniform(0.96, 1.04) * GB / (reads / read + (1 - reads) / (read * ratio))
            rate *= trickle if busy_s < 0.5 else 1.0
            windows.append(second(start, rate, reads=reads, busy_s=busy_s))
    assert feed(Endurance(), windows, at_once=at_once) == []


@given(
    reads=st.floats(0, 1),
    speed=st.floats(0.05, 15),
    drop=st.floats(0.01, 0.5),
    before=st.lists(
        st.tuples(st.floats(0.5, 1), st.integers(1, 300), st.floats(0.96, 1.04)),
        min_size=2 * SUSTAINED_SAMPLES,
    ),
    after=st.lists(
        st.tuples(st.floats(0.01, 1), st.integers(1, 300), st.floats(0.96, 1.04)),
        min_size=SLOW_SAMPLES,
        max_size=60,
    ),
)
@settings(deadline=None)
def test_a_lasting_drop_to_half_always_warns_once_within_the_samples_promised(
    reads: float,
    speed: float,
    drop: float,
    before: list[tuple[float, int, float]],
    after: list[tuple[float, int, float]],
) -> None:
    # Close to an edge, rounding to bytes decides the class, and the other class has no samples yet.
    assume(all(abs(reads - edge) > 1e-3 for edge in CLASS_EDGES))
    start, windows, slow = 0.0, [], 0
    for busy_s, gap, noise in before:
        start += gap
        windows.append(second(start, noise * speed * GB, reads=reads, busy_s=busy_s))
    endurance = Endurance()
    assert feed(endurance, windows) == []
    found: list[Notice] = []
    for busy_s, gap, noise in after:
        start += gap
        window = second(start, noise * speed * drop * GB, reads=reads, busy_s=busy_s)
        windows.append(window)
        found += feed(endurance, windows[-1:])
        # Seconds with very few bytes count together with the next, so only full ones are counted
        # here.
        slow += busy_s >= 0.5 and window.bytes_read + window.bytes_written >= 4 << 20
        if slow >= SLOW_SAMPLES:
            assert len(found) == 1
    assert endurance.episodes(0) == len(found)


def test_the_forecast_leaves_set_up_out() -> None:
    endurance = Endurance()
    endurance.observe(executor_stats(drive_stats(written=50 * GB)), now_s=100.0)
    endurance.observe(executor_stats(drive_stats(written=100 * GB)), now_s=200.0)
    assert endurance.forecast(0) == Forecast(100 * GB)
    for step in range(1, 11):
        endurance.observe(
            executor_stats(drive_stats(written=(100 + 6 * step) * GB)),
            steps=step,
            now_s=200.0 + 10 * step,
        )
    found = endurance.forecast(0)
    assert found.bytes_per_step == pytest.approx(6 * GB)
    assert found.tb_per_day == pytest.approx(0.6e9 * 86400 / 1e12)
    assert found.days(600) == pytest.approx(600 / 51.84)
    assert found.days(600, used_tb=700) == 0
    with pytest.raises(ValueError, match="rated_tb=0"):
        found.days(0)


def test_the_rate_is_the_present_one_and_long_steps_count_whole() -> None:
    endurance = Endurance()
    endurance.observe(executor_stats(drive_stats()), now_s=0.0)
    # Ten thousand seconds at 1 GB/s, then one step of an hour at 0.1.
    for step in range(1, 10_001):
        endurance.observe(
            executor_stats(drive_stats(written=step * GB)), steps=step, now_s=float(step)
        )
    assert endurance.forecast(0).bytes_per_day == pytest.approx(GB * 86400)
    endurance.observe(
        executor_stats(drive_stats(written=10_360 * GB)), steps=10_001, now_s=13_600.0
    )
    assert endurance.forecast(0).bytes_per_day == pytest.approx(0.1 * GB * 86400, rel=0.01)
    assert len(endurance._drives[0].history) < 200


def test_a_drive_that_is_not_written_lasts_for_ever() -> None:
    endurance = Endurance()
    endurance.observe(executor_stats(drive_stats(written=5)), now_s=0.0)
    endurance.observe(executor_stats(drive_stats(written=5)), steps=3, now_s=10.0)
    assert endurance.forecast(0).days(100) == math.inf
    assert Endurance().forecast(0).days(100) is None


def test_recent_bandwidth_is_over_whole_seconds() -> None:
    windows = [second(t, GB, reads=0.25) for t in range(100, 130)]
    found = recent_bytes_per_s(windows, 10, opened_s=90.2, now_s=130.4)
    assert found == pytest.approx((0.25 * GB, 0.75 * GB))
    assert sum(recent_bytes_per_s(windows, 60, opened_s=90.2, now_s=130.4)) == pytest.approx(
        30 * GB / 39.8
    )
    assert recent_bytes_per_s(windows, 10, opened_s=129.9, now_s=130.4) == (0.0, 0.0)


@pytest.mark.parametrize("share", [0.0, 1.0, -1, math.nan])
def test_a_share_that_means_nothing_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share="):
        Endurance(share=share)


@pytest.mark.slow
def test_a_throttled_executor_is_reported(tmp_path: Path) -> None:
    """Real seconds of two executors: one at full speed, then a throttled one (the speed is fixed
    when an executor opens)."""
    chunk_bytes, count = 1 << 20, 64
    endurance = Endurance()
    found: list[Notice] = []
    with aio.SwapFile.create(tmp_path) as file:
        file.grow(count * chunk_bytes)
        for speed, seconds in ((200e6, SUSTAINED_SAMPLES + 3), (60e6, SLOW_SAMPLES + 4)):
            seam = aio.Seam(read_bytes_per_s=speed, write_bytes_per_s=speed)
            executor = aio.open_executor(
                [file], small=aio.PoolSpec(0, 0), large=aio.PoolSpec(16, chunk_bytes), seam=seam
            )
            chunks = np.zeros(count, dtype=aio.CHUNK)
            chunks["key"] = np.arange(count) + 1
            chunks["numel"] = chunks["run_bytes"] = chunk_bytes
            chunks["file_offset"] = np.arange(count) * chunk_bytes
            chunks["section_count"], chunks["piece_numel"] = 1, 65536
            chunks["itemsize"][:, 0] = 1
            chunks["section_at"][:, 1:] = -1
            jobs = np.zeros(count, dtype=aio.JOB)
            jobs["chunk"] = executor.define(chunks)
            jobs["kind"], jobs["mask"], jobs["base"] = aio.JobKind.STORE, 1 | aio.MASK_MOVE_ONLY, -1
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                executor.submit(jobs, priority=aio.Priority.DEMAND).wait()
                found += endurance.observe(executor.stats())
            executor.close()
    (notice,) = found
    assert notice.direction == "writes"
    assert notice.before_bytes_per_s == pytest.approx(200e6, rel=0.2)
    assert notice.now_bytes_per_s == pytest.approx(60e6, rel=0.2)
