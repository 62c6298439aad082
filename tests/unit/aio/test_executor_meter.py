"""Counters of a drive: latencies, busy seconds, bandwidth by the second, requests in flight."""

from __future__ import annotations

import ctypes
import math
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity import aio
from infinity._src.cabi import native
from infinity.aio._stats import DriveStats, Latency, drive_stats
from native.build_native import compiler_command
from tests.unit.aio.rig import RUN_BYTES, random_chunk, until

ROOT = Path(__file__).resolve().parents[3]
READ, WRITE = 0, 1
SECOND = 10**9


class Meter:
    """The meter of native/executor/meter.c for one drive, with a clock that the test moves."""

    def __init__(self, library: Path, file: aio.SwapFile) -> None:
        self._lib, self._file = ctypes.CDLL(str(library)), file
        self._lib.meter_stats.restype = ctypes.c_void_p
        self.reset()

    def reset(self, now_ns: int = 0) -> None:
        self._lib.meter_reset(ctypes.c_int64(now_ns))

    def pass_ns(self, ns: int) -> None:
        self._lib.meter_pass(ctypes.c_int64(ns))

    def send(self, op: int) -> None:
        self._lib.meter_send(ctypes.c_int32(op))

    def end(self, op: int, size_bytes: int) -> None:
        self._lib.meter_end(ctypes.c_int32(op), ctypes.c_int64(size_bytes))

    def stats(self) -> DriveStats:
        record = native.ffi.cast("inf_drive_stats *", self._lib.meter_stats())
        return drive_stats(record, self._file, 4096, None)


@pytest.fixture(scope="module")
def meter(tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("meter")
    library = directory / "meter.so"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    sources = [Path(__file__).with_name("meter_clock.c"), ROOT / "native" / "executor" / "meter.c"]
    command = [*compiler_command(), *flags, f"-I{ROOT / 'native'}", "-o", str(library)]
    done = subprocess.run(
        [*command, *map(str, sources)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with aio.SwapFile.create(directory) as file:
        yield Meter(library, file)


@settings(max_examples=50, deadline=None)
@given(
    times=st.lists(st.integers(1, 10**11), min_size=1, max_size=300),
    op=st.sampled_from([READ, WRITE]),
)
def test_percentiles_are_right_within_their_buckets(meter, times, op):
    meter.reset()
    for took in times:
        meter.send(op)
        meter.pass_ns(took)
        meter.end(op, 4096)
    drive = meter.stats()
    latency, other = drive.read_latency, drive.write_latency
    if op == WRITE:
        latency, other = other, latency
    assert other == Latency()
    ordered = sorted(times)
    assert latency.count == len(times)
    assert latency.max_s == ordered[-1] / SECOND
    for percent, got in ((50, latency.p50_s), (99, latency.p99_s)):
        exact = ordered[math.ceil(percent * len(times) / 100) - 1] / SECOND
        # Below 4 µs the buckets are 1.024 µs wide.
        assert exact / 1.13 - 0.52e-6 <= got <= exact * 1.13 + 0.52e-6


def test_only_the_last_64_busy_seconds_are_remembered(meter):
    meter.reset(100 * SECOND)
    for _ in range(100):
        meter.send(READ)
        meter.pass_ns(SECOND // 10)
        meter.end(READ, 4096)
        meter.pass_ns(2 * SECOND - SECOND // 10)
    windows = meter.stats().windows
    assert [window.start_s for window in windows] == [100.0 + 2 * n for n in range(36, 100)]
    assert {(window.bytes_read, window.bytes_written) for window in windows} == {(4096, 0)}
    assert {window.busy_s for window in windows} == {0.1}
    meter.send(READ)
    meter.pass_ns(86_400 * SECOND)  # a drive that hung for a day
    meter.end(READ, 10**6)
    drive = meter.stats()
    assert len(drive.windows) == 64
    assert drive.busy_s == pytest.approx(86_410)
    assert sum(window.bytes_read for window in drive.windows) == 10**6
    assert sum(window.busy_s for window in drive.windows) == pytest.approx(63)
    assert drive.bytes_read == 100 * 4096 + 10**6


def test_a_busy_time_is_shared_out_over_its_seconds_and_bytes_come_with_their_result(meter):
    meter.reset(100 * SECOND + SECOND // 2)
    meter.send(WRITE)
    meter.pass_ns(1_300_000_000)
    meter.send(READ)
    meter.pass_ns(100_000_000)
    meter.end(READ, 50)
    meter.end(WRITE, 1000)
    drive = meter.stats()
    assert [
        (window.start_s, round(window.busy_s, 9), window.bytes_read, window.bytes_written)
        for window in drive.windows
    ] == [(100.0, 0.5, 0, 0), (101.0, 0.9, 50, 1000)]
    assert drive.busy_s == pytest.approx(1.4)
    assert drive.depth_mean == pytest.approx(1.5 / 1.4)
    assert drive.write_latency.max_s == pytest.approx(1.4)
    assert drive.read_latency.max_s == pytest.approx(0.1)


def test_stats_tell_of_drives_and_backend(make_rig, rng, backend):
    rig = make_rig(drive_count=2, backend_reason="no other one")
    rig.store({i: random_chunk(rng) for i in range(6)}).wait(20)
    rig.fetch(range(6))[0].wait(20)
    stats = rig.executor.stats()
    assert (stats.backend, stats.backend_reason) == (backend, "no other one")
    assert stats.registered or stats.registered_reason
    assert 0 <= time.monotonic() - stats.opened_s < 60
    for drive, file in zip(stats.drives, rig.files, strict=True):
        assert (drive.direct, drive.direct_reason) == (file.direct, file.direct_reason)
        assert (drive.block_bytes, drive.failed) == (8192, "")
        assert drive.read_latency.count == drive.reads > 0
        assert drive.write_latency.count == drive.writes > 0
        assert 0 < drive.read_latency.p50_s <= drive.read_latency.p99_s <= drive.read_latency.max_s
        assert 0 < drive.busy_s < 60
        assert 1 <= drive.depth_mean <= drive.in_flight_max <= drive.depth <= 8
        assert drive.in_flight_bytes_max <= drive.in_flight_max * drive.block_bytes
        assert sum(window.bytes_read for window in drive.windows) == drive.bytes_read
        assert sum(window.bytes_written for window in drive.windows) == drive.bytes_written
        assert drive.bytes_read == drive.bytes_written == 3 * RUN_BYTES


def test_prefetches_leave_a_quarter_of_the_depth_to_demands(make_rig, rng):
    rig = make_rig(
        chunk_count=40, pools=(16, 16), threads_per_drive=8, seam=aio.Seam(read_bytes_per_s=2e5)
    )
    rig.store({i: random_chunk(rng) for i in range(40)}).wait(20)
    depth = rig.executor.stats().drives[0].depth
    assert depth >= 4
    reads = rig.executor.stats().drives[0].reads
    ticket = rig.fetch(range(40), priority=1, mask=1)[0]

    def sent() -> int:
        return rig.executor.stats().drives[0].reads - reads

    # A slow drive: what is not sent at once is not sent within the test.
    until(lambda: sent() >= depth // 2)
    time.sleep(0.02)
    assert sent() <= depth - depth // 4
    demand = rig.fetch([39], mask=4)[0]
    until(lambda: sent() > depth // 2)
    assert not ticket.done
    assert not demand.done
    rig.executor.close(wait=False)


def test_writes_have_their_share_beside_endless_reads(make_rig, rng):
    """Reads take slots of the small pool, and stores of the large one: the drive decides."""
    rig = make_rig(
        chunk_count=16,
        pools=(16, 16),
        threads_per_drive=8,
        seam=aio.Seam(delay_us_max=4000),
    )
    value = random_chunk(rng)
    rig.store(dict.fromkeys(range(16), value)).wait(20)
    writes = [rig.store(dict.fromkeys(range(8, 16), value), priority=2) for _ in range(30)]
    reads = [rig.fetch(range(8), mask=1)[0] for _ in range(90)]
    before = rig.executor.stats().drives[0]
    until(lambda: rig.executor.stats().drives[0].reads - before.reads >= 200)
    drive = rig.executor.stats().drives[0]
    assert not reads[-1].done
    assert not writes[-1].done
    read, written = drive.reads - before.reads, drive.writes - before.writes
    assert min(read, written) >= 0.3 * (read + written)
    rig.executor.close(wait=False)
