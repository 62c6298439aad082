"""Opening, closing, waiting, sharing: nothing hangs, nothing crashes, nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from infinity import aio
from infinity._src.cabi import records
from infinity.errors import AioClosedError, SwapFullError
from tests.unit.aio.rig import NUMEL, RUN_BYTES, Rig, random_chunk, same

SLOW = aio.Seam(read_bytes_per_s=2e6, write_bytes_per_s=2e6)


def test_close_runs_what_is_pending(make_rig, rng):
    rig = make_rig(seam=aio.Seam(delay_us_max=3000, seed=1))
    tickets = [rig.store({i: random_chunk(rng)}) for i in range(6)]
    rig.executor.close()
    assert all(ticket.done and not ticket.failed for ticket in tickets)
    rig.executor.close()


def test_close_without_drain_cancels_what_has_not_started(make_rig, rng):
    rig = make_rig(chunk_count=40, seam=SLOW, pools=(1, 2))
    ticket = rig.store({i: random_chunk(rng) for i in range(40)})
    gated = rig.fetch([0], gate=rig.executor.gate())[0]
    rig.executor.close(wait=False)
    assert rig.executor.stats().drives[0].writes < 40
    for cancelled in (ticket, gated):
        assert cancelled.done
        with pytest.raises(AioClosedError):
            cancelled.wait()


def test_after_close_everything_raises_but_looking_does_not(make_rig, rng):
    rig = make_rig()
    ticket = rig.store({0: random_chunk(rng)})
    gate = rig.executor.gate()
    rig.executor.close()
    ticket.wait()
    assert ticket.done
    assert rig.executor.stats().jobs_done == 1
    assert rig.executor.fault() is None
    jobs = np.zeros(1, dtype=records.JOB)
    for call in (
        lambda: rig.executor.submit(jobs, priority=aio.Priority.DEMAND),
        lambda: rig.executor.define(rig.chunks),
        lambda: rig.executor.drop(rig.ids),
        rig.executor.gate,
        rig.executor.wait_all,
        rig.executor.release_gates,
        lambda: gate.open([]),
        lambda: rig.executor.invalid(rig.ids),
    ):
        with pytest.raises(AioClosedError):
            call()


def test_tickets_outlive_their_executor(make_rig, rng):
    rig = make_rig()
    tickets = [rig.store({i: random_chunk(rng)}) for i in range(6)]
    rig.close()
    rig.executor = make_rig().executor
    gc.collect()
    assert all(ticket.done for ticket in tickets)
    for ticket in tickets:
        with contextlib.suppress(AioClosedError):
            ticket.wait()


def test_a_wait_times_out_and_can_be_repeated(make_rig, rng):
    rig = make_rig(seam=SLOW)
    ticket = rig.store({i: random_chunk(rng) for i in range(6)})
    with pytest.raises(TimeoutError):
        ticket.wait(0.01)
    with pytest.raises(TimeoutError):
        rig.executor.wait_all(0.01)
    ticket.wait(20)
    rig.executor.wait_all(20)


def test_a_waiting_thread_leaves_the_interpreter_to_others(make_rig, rng):
    rig = make_rig(seam=SLOW)
    ticks = 0
    ended = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not ended.is_set():
            ticks += 1
            time.sleep(0.002)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.monotonic()
    rig.store({i: random_chunk(rng) for i in range(6)}).wait(20)
    took = time.monotonic() - start
    ended.set()
    thread.join()
    assert took > 0.1
    assert ticks > 10


def test_a_busy_interpreter_does_not_stop_the_pipeline(make_rig, rng):
    rig = make_rig()
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    tickets = []
    for step in range(1, 4):
        rig.store({i: random_chunk(rng) for i in range(6)}).wait_filled()
        tickets.append(rig.update({i: np.ones(NUMEL, np.float32) for i in range(6)}, step=step))
    for ticket in tickets:
        ticket.wait(20)
    ended.set()
    thread.join()


@pytest.mark.parametrize("slots", [3, 12])
def test_a_slow_drive_does_not_hold_a_fast_one(make_rig, rng, slots):
    """Bytes, not times: when the fast drive's share is moved, most of the slow drive's is still to
    come."""
    speeds = (2e4, 0.0)
    rig = make_rig(
        chunk_count=12,
        drive_count=2,
        pools=(3, slots),
        block_bytes=4096,
        depth=2,
        threads_per_drive=1,
        seam=aio.Seam(read_bytes_per_s=speeds, write_bytes_per_s=speeds),
    )
    values = {i: random_chunk(rng) for i in range(12)}
    # all of the slow drive's first: they ask for slots first
    order = [*range(0, 12, 2), *range(1, 12, 2)]
    tickets = [ticket for _, ticket in sorted((i, rig.store({i: values[i]})) for i in order)]
    for ticket in tickets[1::2]:
        ticket.wait(30)
    slow, fast = rig.executor.stats().drives
    assert fast.bytes_written == 6 * RUN_BYTES
    assert slow.bytes_written < 3 * RUN_BYTES
    assert not tickets[-2].done
    fetches = [rig.fetch([i]) for i in range(1, 12, 2)]
    for i, (ticket, targets) in zip(range(1, 12, 2), fetches, strict=True):
        ticket.wait(30)
        assert same(targets[0], values[i])
    assert not tickets[-2].done
    rig.executor.close(wait=False)


def test_throttles_are_each_drives_own():
    seam = aio.Seam(read_bytes_per_s=(1.0, 2.0), write_bytes_per_s=3.0)
    assert [seam.throttle(drive) for drive in range(2)] == [(1.0, 3.0), (2.0, 3.0)]
    assert aio.Seam().throttle(5) == (0.0, 0.0)


def test_demand_passes_prefetch_and_writeback(make_rig, rng):
    rig = make_rig(chunk_count=40, seam=SLOW)
    rig.store({0: random_chunk(rng)}).wait()
    behind = rig.fetch(range(1, 40), priority=1)[0]
    rig.fetch([0], mask=1)[0].wait(20)
    assert not behind.done
    rig.executor.close(wait=False)


def test_a_prefetch_that_is_waited_for_becomes_a_demand(make_rig, rng):
    rig = make_rig(chunk_count=40, seam=SLOW)
    rig.store({0: random_chunk(rng)}).wait()
    behind = rig.fetch(range(1, 40), priority=1)[0]
    last = rig.fetch([0], priority=2)[0]
    last.wait(20)
    assert not behind.done
    rig.executor.close(wait=False)


def test_writes_progress_beside_endless_reads(make_rig, rng):
    rig = make_rig(chunk_count=40, seam=aio.Seam(read_bytes_per_s=2e7))
    rig.store({i: random_chunk(rng) for i in range(40)}).wait()
    reads = [rig.fetch(range(1, 40), mask=1)[0] for _ in range(30)]
    rig.store({0: random_chunk(rng)}, priority=2).wait(20)
    assert not reads[-1].done
    reads[-1].wait(20)


def test_memory_does_not_grow_after_warm_up(make_rig, rng):
    rig = make_rig()
    values = {i: random_chunk(rng) for i in range(6)}
    grads = {i: np.ones(NUMEL, dtype=np.float32) for i in range(6)}

    def rounds(count: int) -> int:
        for _ in range(count):
            rig.store(values).wait()
            rig.update(grads).wait()
            rig.fetch(range(6))[0].wait()
            rig._keep.clear()
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1])
        return 0

    before = rounds(20)
    assert rounds(60) - before < 2048
    assert rig.executor.stats().extra.get("submissions_live", 0) == 0


def test_pools_take_no_more_than_they_were_given(make_rig, rng):
    rig, values = make_rig(pools=(4, 5)), {0: random_chunk(rng)}
    assert rig.executor.pool_bytes == 4 * 2 * NUMEL + 5 * RUN_BYTES
    rig.store(values).wait()
    rig.executor.resize_pools(aio.PoolSpec(1, 2 * NUMEL), aio.PoolSpec(9, RUN_BYTES))
    assert rig.executor.pool_bytes == 2 * NUMEL + 9 * RUN_BYTES
    assert rig.executor.stats().pool_bytes == rig.executor.pool_bytes
    assert same(rig.read(0), values[0])


def test_many_threads_may_submit_at_once(make_rig, rng):
    rig = make_rig(chunk_count=8)
    values = {i: random_chunk(rng) for i in range(8)}
    rig.store(values).wait()
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            wrong.extend([] if same(rig.read(index), values[index]) else [index])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.privileged
def test_a_full_file_system_is_a_swap_full_error(backend, tmp_path, monkeypatch, rng):
    monkeypatch.setenv("INFINITY_ALLOW_TMPFS", "1")
    size = 3 * RUN_BYTES + 8192
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(tmp_path)]
    if subprocess.run(["mount", *options], check=False, capture_output=True).returncode:
        pytest.skip("may not mount here")
    try:
        monkeypatch.setattr(
            aio.SwapFile, "grow", lambda self, size_bytes: os.ftruncate(self.fd, size_bytes)
        )
        rig = Rig(tmp_path, backend)
        values = {i: random_chunk(rng) for i in range(6)}
        tickets = [rig.store({i: values[i]}) for i in range(6)]
        full = 0
        for i, ticket in enumerate(tickets):
            try:
                ticket.wait(20)
                assert same(rig.read(i), values[i])
            except SwapFullError:
                full += 1
        assert full >= 3
        rig.close()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_an_exception_in_a_with_block_cancels_and_goes_on(make_rig, rng):
    rig = make_rig(chunk_count=40, seam=SLOW, pools=(1, 2))
    with pytest.raises(ZeroDivisionError):
        with rig.executor:
            tickets = [rig.store({i: random_chunk(rng)}) for i in range(40)]
            1 / 0  # noqa: B018
    assert all(ticket.done for ticket in tickets)
    assert tickets[-1].failed
    with pytest.raises(AioClosedError):
        tickets[-1].wait()


def test_a_with_block_that_ends_well_runs_what_is_pending(make_rig, rng):
    rig = make_rig(seam=aio.Seam(delay_us_max=3000, seed=2))
    with rig.executor:
        tickets = [rig.store({i: random_chunk(rng)}) for i in range(6)]
    assert all(ticket.done and not ticket.failed for ticket in tickets)
