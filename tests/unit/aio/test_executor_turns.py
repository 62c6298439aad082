"""Order of service: by priority, but every job is served, however many demands there are."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from infinity import aio
from tests.unit.aio.rig import NUMEL, RUN_BYTES, random_chunk, same

FAIR_TURN = 8  # of native/executor/slots.c: one turn in eight goes to who waited longest
IN_FLIGHT = 4
THREADS = 2
ENOUGH = 400


def demand(rig, indexes: list[int], behind: list[aio.Ticket], passed: list[int]) -> None:
    """Keep demands in flight until everything in `behind` is done, and count those that passed
    it."""
    tickets: deque[aio.Ticket] = deque()
    number = 0
    while len(passed) < ENOUGH and not (behind and all(ticket.done for ticket in behind)):
        while len(tickets) < IN_FLIGHT:
            tickets.append(rig.fetch([indexes[number % len(indexes)]], mask=int(rig.mask))[0])
            number += 1
        tickets.popleft().wait(60)
        if behind:
            passed.append(number)
    for ticket in tickets:
        ticket.wait(60)


@pytest.mark.parametrize(
    ("mask", "drive_count", "slots"),
    [(15, 1, 2), (1, 1, 2), (15, 2, 2), (15, 1, 12)],
    ids=["large", "small", "two_drives", "waiting_at_the_drive"],
)
def test_write_back_and_prefetches_progress_beside_endless_demands(
    make_rig, rng, mask, drive_count, slots
):
    """Counts, not times: only a fixed number of demands may pass."""
    # slow enough that demands always wait for slots
    speed = (RUN_BYTES if mask == 15 else 2 * NUMEL) / 3e-3
    rig = make_rig(
        pools=(slots, slots),
        chunk_count=12,
        drive_count=drive_count,
        depth=2,
        threads_per_drive=1,
        seam=aio.Seam(read_bytes_per_s=speed, write_bytes_per_s=speed),
    )
    rig.mask = mask
    values = {i: random_chunk(rng) for i in range(12)}
    rig.store(values).wait(60)
    new = random_chunk(rng)
    behind: list[aio.Ticket] = []
    passed: list[int] = []
    threads = [
        threading.Thread(
            target=demand, args=(rig, range(n * IN_FLIGHT, (n + 1) * IN_FLIGHT), behind, passed)
        )
        for n in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    before = rig.executor.stats().jobs_done
    while rig.executor.stats().jobs_done < before + 2 * IN_FLIGHT:
        assert any(thread.is_alive() for thread in threads)
    store = rig.store({8: new}, mask=mask, priority=aio.Priority.WRITEBACK)
    fetch, targets = rig.fetch([9], mask=mask, priority=aio.Priority.PREFETCH)
    behind.extend((store, fetch))  # both at once: only then do the threads count
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert store.done
    assert fetch.done
    # Both are at most as far back as the demands before them and a fair turn each for a slot and a
    # worker; twice that.
    assert len(passed) <= 2 * (THREADS * IN_FLIGHT + 4 * FAIR_TURN * drive_count)
    wanted = [section if mask >> s & 1 else values[8][s] for s, section in enumerate(new)]
    assert same(rig.read(8), wanted)
    assert all(targets[0][s].tobytes() == values[9][s].tobytes() for s in range(4) if mask >> s & 1)


def test_what_takes_longer_than_a_second_is_spread_over_the_windows(make_rig, rng):
    rig = make_rig(block_bytes=1 << 20, seam=aio.Seam(write_bytes_per_s=RUN_BYTES / 1.2))
    rig.store({0: random_chunk(rng)}).wait(60)
    drive = rig.executor.stats().drives[0]
    assert drive.busy_s > 1
    assert len(drive.windows) >= 2
    for window in drive.windows:
        assert window.busy_s <= 1.0 + 1e-6
    assert sum(window.busy_s for window in drive.windows) == pytest.approx(drive.busy_s, rel=0.05)
    assert sum(window.bytes_written for window in drive.windows) == drive.bytes_written == RUN_BYTES
    starts = [window.start_s for window in drive.windows]
    assert starts == sorted(set(starts))
