"""The Python executor alone: who gets which of its threads, and what its counters say."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity import aio
from infinity.aio import plan
from infinity.aio.python_lanes import READ, WRITE, DriveLanes
from infinity.aio.python_records import Chunk, Place, Run, Submission, TicketState
from infinity.aio.python_stats import DriveMeter, LatencyHistogram
from infinity.aio.python_transfer import BLOCK_BYTES
from tests.unit.aio.rig import RUN_BYTES, random_chunk, until


@pytest.fixture
def backend() -> str:
    """Rigs of this backend only."""
    return "python"


# ---- shares ----


def waiting_run(priority: int, index: int = 0) -> Run:
    """A job of one section that no other is a neighbour of."""
    record = np.zeros(1, dtype=plan.CHUNK)[0]
    record["numel"], record["piece_numel"], record["section_count"] = 1024, 1024, 1
    record["itemsize"][0], record["run_bytes"], record["file_offset"] = 4, 4096, index * 8192
    job = np.zeros(1, dtype=plan.JOB)[0]
    job["kind"], job["mask"] = plan.JobKind.FETCH, 1
    run = Run(Submission(TicketState(), None), Chunk(index, record), job, priority)
    run.place = Place(record, 1, 1, 1)
    return run


def lanes_of(depth: int) -> DriveLanes:
    lock = threading.RLock()
    lock.acquire()
    return DriveLanes(depth, lock)


@pytest.mark.parametrize("depth", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("others", [(READ,), (WRITE,), (READ, WRITE)])
def test_a_demand_finds_a_thread_however_much_else_is_queued(depth, others):
    lanes = lanes_of(depth)
    for index in range(100):
        for op in others:
            lanes.push(
                op, waiting_run(aio.Priority.WRITEBACK if op == WRITE else aio.Priority.PREFETCH, index)
            )
    taken = 0
    while lanes.take() is not None:
        taken += 1
    assert depth // 2 <= taken <= depth - depth / 4
    demand = waiting_run(aio.Priority.DEMAND)
    lanes.push(READ, demand)
    assert lanes.take() == (READ, aio.Priority.DEMAND, [demand])


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("reads", list(aio.Priority))
def test_writes_have_their_half_beside_endless_reads(depth, reads):
    lanes = lanes_of(depth)
    for index in range(200):
        lanes.push(READ, waiting_run(reads, index))
        lanes.push(WRITE, waiting_run(aio.Priority.WRITEBACK, index))
    in_flight, sent = [], [0, 0]
    for _ in range(100):
        while (taken := lanes.take()) is not None:
            in_flight.append(taken)
            sent[taken[0]] += 1
        assert len(in_flight) <= depth
        op, priority, _ = in_flight.pop(0)
        lanes.end(op, priority)
    assert min(sent) >= 0.3 * sum(sent)


@settings(max_examples=60, deadline=None)
@given(
    depth=st.integers(1, 9),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 2))),
)
def test_any_order_of_work_is_bounded_and_gets_done(depth, steps):
    lanes = lanes_of(depth)
    in_flight, pushed, taken_count = [], 0, 0

    def take() -> bool:
        nonlocal taken_count
        taken = lanes.take()
        if taken is not None:
            taken_count += len(taken[2])
            in_flight.append(taken)
        assert len(in_flight) <= depth
        return taken is not None

    for what, op, priority in steps:
        if what == 0:
            pushed += 1
            lanes.push(op, waiting_run(priority, pushed))
        elif what == 1:
            take()
        elif in_flight:
            lanes.end(*in_flight.pop(priority % len(in_flight))[:2])
    while take() or in_flight:
        if in_flight:
            lanes.end(*in_flight.pop()[:2])
    assert taken_count == pushed


def test_prefetches_leave_a_quarter_of_the_threads_free(make_rig, rng):
    rig = make_rig(chunk_count=40, pools=(8, 8), seam=aio.Seam(read_bytes_per_s=2e6))
    rig.store({i: random_chunk(rng) for i in range(40)}).wait(20)
    before = rig.executor.stats().drives[0]
    assert before.depth == 4
    # Every second chunk: no neighbours, so each is a request of its own.
    ticket = rig.fetch(range(0, 40, 2), priority=1, mask=4)[0]
    until(lambda: rig.executor.stats().drives[0].reads - before.reads >= 6)
    assert not ticket.done
    assert rig.executor.stats().drives[0].in_flight_max <= 3
    rig.executor.close(drain=False)


# ---- counters ----


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 10**11), min_size=1, max_size=300))
def test_percentiles_are_right_within_their_buckets(times):
    histogram = LatencyHistogram()
    for took in times:
        histogram.add(took)
    latency = histogram.latency()
    ordered = sorted(times)
    assert latency.count == len(times)
    assert latency.max_s == ordered[-1] / 1e9
    for share, got in ((0.5, latency.p50_s), (0.99, latency.p99_s)):
        exact = ordered[-(-int(share * 100) * len(times) // 100) - 1] / 1e9
        assert exact / 1.13 <= got <= exact * 1.13


def test_windows_share_out_what_took_longer_than_a_second(tmp_path):
    with aio.SwapFile.create(tmp_path) as file:
        meter = DriveMeter()
        start = time.monotonic()
        sent = meter.sent(1, 1000)
        time.sleep(1.3)
        first = meter.sent(0, 50)
        meter.ended(0, 50, 50, first)
        meter.ended(1, 1000, 1000, sent)
        took = time.monotonic() - start
        drive = meter.stats(file, block_bytes=1, depth=2, failed="")
    assert 2 <= len(drive.windows) <= 3
    assert sum(window.bytes_written for window in drive.windows) == 1000
    assert sum(window.bytes_read for window in drive.windows) == 50
    assert sum(window.busy_s for window in drive.windows) == pytest.approx(drive.busy_s)
    assert drive.busy_s == pytest.approx(took, rel=0.1)
    for window in drive.windows:
        assert window.start_s == int(window.start_s)
        assert window.busy_s <= 1
        assert window.bytes_written == pytest.approx(1000 * window.busy_s / drive.busy_s, abs=2)
    assert drive.in_flight_max == 2
    assert drive.in_flight_bytes_max == 1050
    assert 1 <= drive.depth_mean < 1.2
    assert drive.write_latency.max_s >= 1.3


def test_only_the_last_64_busy_seconds_are_remembered(tmp_path, monkeypatch):
    clock = [10**9 * 100]
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock[0])
    with aio.SwapFile.create(tmp_path) as file:
        meter = DriveMeter()
        for _ in range(100):
            sent = meter.sent(0, 4096)
            clock[0] += 10**8
            meter.ended(0, 4096, 4096, sent)
            clock[0] += 2 * 10**9 - 10**8
        windows = meter.stats(file, block_bytes=1, depth=1, failed="").windows
        assert len(windows) == 64
        assert [window.start_s for window in windows] == [100.0 + 2 * n for n in range(36, 100)]
        assert {(window.bytes_read, round(window.busy_s, 6)) for window in windows} == {(4096, 0.1)}
        sent = meter.sent(0, 10**6)
        clock[0] += 10**9 * 86_400  # a drive that hung for a day
        meter.ended(0, 10**6, 10**6, sent)
        drive = meter.stats(file, block_bytes=1, depth=1, failed="")
    assert len(drive.windows) == 64
    assert drive.busy_s == pytest.approx(86_410)
    assert sum(window.bytes_read for window in drive.windows) == 10**6


def test_what_stats_say_of_drives_and_backend(make_rig, rng):
    rig = make_rig(drive_count=2, backend_reason="no compiler")
    rig.store({i: random_chunk(rng) for i in range(6)}).wait()
    rig.fetch(range(6))[0].wait()
    stats = rig.executor.stats()
    assert stats.backend_reason == "no compiler"
    assert stats.registered_reason
    assert 0 <= time.monotonic() - stats.opened_s < 60
    for drive, file in zip(stats.drives, rig.files, strict=True):
        assert (drive.direct, drive.direct_reason) == (file.direct, file.direct_reason)
        assert (drive.block_bytes, drive.depth, drive.failed) == (BLOCK_BYTES, 4, "")
        assert drive.read_latency.count == drive.reads > 0
        assert drive.write_latency.count == drive.writes > 0
        assert 0 < drive.read_latency.p50_s <= drive.read_latency.p99_s <= drive.read_latency.max_s
        assert 0 < drive.busy_s < 60
        assert 1 <= drive.depth_mean <= drive.in_flight_max <= 4
        assert drive.in_flight_bytes_max <= drive.bytes_written
        assert sum(window.bytes_read for window in drive.windows) == drive.bytes_read == 3 * RUN_BYTES
        assert sum(window.bytes_written for window in drive.windows) == drive.bytes_written == 3 * RUN_BYTES
