"""`Ticket.cancel` cancels fetches that the drive has not begun, wherever they wait, and nothing
else. No data is lost."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from infinity import aio
from infinity._src.cabi import records
from infinity.errors import AioCancelledError, AioError
from tests.unit.aio.rig import NUMEL, adamw, hyper_record, outcome, random_chunk, same

#: A chunk takes 80 ms: what is queued behind one stays queued until the test is through with it.
SLOW = aio.Seam(read_bytes_per_s=1e5, write_bytes_per_s=1e5)


def slow(make_rig, rng, stored, **options):
    """A slow rig, some of whose chunks hold something."""
    rig = make_rig(**{"seam": SLOW, "hold_s": 30.0, "resident": (1, 2, 3), **options})
    values = {i: random_chunk(rng) for i in stored}
    rig.store(values).wait(20)
    return rig, values


def check_given_up(rig, ticket, targets, *, count=1):
    """Assert that the job has ended and says so every time, filled nothing, and did no other
    harm."""
    assert ticket.done
    assert ticket.filled
    for _ in range(2):
        with pytest.raises(AioCancelledError):
            ticket.wait(20)
    assert ticket.failed
    assert not any(array.any() for arrays in targets for array in arrays)
    stats = rig.executor.stats()
    assert stats.jobs_cancelled == count
    assert rig.executor.fault() is None
    assert not rig.executor.invalid(rig.ids).any()


def test_a_fetch_behind_a_gate_is_given_up(make_rig, rng):
    rig, values = slow(make_rig, rng, [0])
    gate = rig.executor.gate()
    ticket, targets = rig.fetch([0], gate=gate)
    assert not ticket.done
    ticket.cancel()
    check_given_up(rig, ticket, targets)
    assert rig.executor.stats().bytes_read == 0
    assert rig.executor.stats().gates_escaped == 0 or gate.escaped
    gate.open([])  # whether it escaped or not: it holds no job
    assert not targets[0][0].any()
    assert same(rig.read(0), values[0])


def test_a_fetch_behind_a_gated_one_is_given_up_and_the_gate_goes_on_holding(make_rig, rng):
    rig, values = slow(make_rig, rng, [0])
    gate = rig.executor.gate()
    first, got = rig.fetch([0], gate=gate)
    ticket, targets = rig.fetch([0])
    after = rig.store({0: (new := random_chunk(rng))}, mask=1)
    ticket.cancel()
    check_given_up(rig, ticket, targets)
    assert not gate.escaped
    assert not first.done
    assert not after.done
    assert gate.open([])
    first.wait(20)
    after.wait(20)
    assert same(got[0], values[0])
    assert same(rig.read(0), [new[0], *values[0][1:]])


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_of_a_row_of_waiting_fetches_any_can_be_given_up(make_rig, rng, place):
    rig, values = slow(make_rig, rng, [0])
    gate = rig.executor.gate()
    row = [rig.fetch([0], gate=gate), *(rig.fetch([0]) for _ in range(3))]
    ticket, targets = row.pop({"first": 0, "middle": 1, "last": -1}[place])
    ticket.cancel()
    check_given_up(rig, ticket, targets)
    row.append(rig.fetch([0]))  # the end of the row is where it should be
    assert gate.open([])
    for other, got in row:
        other.wait(20)
        assert same(got[0], values[0])


def test_a_fetch_behind_another_job_of_its_chunk_is_given_up(make_rig, rng):
    rig, values = slow(make_rig, rng, [0])
    grad = np.ones(NUMEL, np.float32)
    before = rig.update({0: grad})
    ticket, targets = rig.fetch([0])
    after, wanted = rig.fetch([0])
    ticket.cancel()
    check_given_up(rig, ticket, targets)
    before.wait(20)
    after.wait(20)
    adamw(records.Format.SPLIT, values[0], grad, hyper_record()[0])
    assert same(wanted[0], values[0])
    assert rig.executor.stats().bytes_read == 2 * 2 * NUMEL  # the update's and the second fetch's


def test_a_fetch_that_waits_for_a_slot_is_given_up(make_rig, rng):
    rig, values = slow(make_rig, rng, [0, 1], pools=(1, 0))
    first, got = rig.fetch([0])
    ticket, targets = rig.fetch([1])
    ticket.cancel()
    check_given_up(rig, ticket, targets)
    first.wait(20)
    assert same(got[0], values[0])
    assert same(rig.read(1), values[1])


def test_a_fetch_in_the_drives_queue_is_given_up(make_rig, rng):
    """More slots than requests in flight: the last ones wait with a slot, and give it back."""
    rig, values = slow(make_rig, rng, range(6), pools=(6, 6), depth=2, threads_per_drive=1)
    fetches = [rig.fetch([i]) for i in range(6)]
    fetches[-1][0].cancel()
    check_given_up(rig, *fetches[-1])
    for i, (ticket, targets) in enumerate(fetches[:-1]):
        ticket.wait(20)
        assert same(targets[0], values[i])
    assert same(rig.read(5), values[5])


def test_a_fetch_that_the_drive_has_begun_ends_either_way(make_rig, rng):
    rig, values = slow(make_rig, rng, [0])
    ticket, targets = rig.fetch([0])
    while rig.executor.stats().drives[0].reads == 0:
        pass
    ticket.cancel()
    error = outcome(ticket)
    assert error is None or isinstance(error, AioCancelledError)
    assert error is not None or same(targets[0], values[0])
    assert same(rig.read(0), values[0])


def test_stores_and_updates_are_never_given_up(make_rig, rng):
    rig, values = slow(make_rig, rng, [0], pools=(1, 0))
    grad = np.ones(NUMEL, np.float32)
    new = random_chunk(rng)
    tickets = [
        rig.update({0: grad}),
        rig.store({1: new}),
        rig.update({1: grad}, gate=rig.executor.gate()),
    ]
    for ticket in tickets:
        ticket.cancel()
    for ticket in tickets:
        ticket.wait(20)
    for value in (values[0], new):
        adamw(records.Format.SPLIT, value, grad, hyper_record()[0])
    assert same(rig.read(0), values[0])
    assert same(rig.read(1), new)
    assert rig.executor.stats().jobs_cancelled == 0


def test_a_mixed_ticket_is_not_given_up_and_tells_of_its_stores_alone(make_rig, rng):
    """Updates of a unit and fetches of its frozen parameters are one ticket: a cancelled gather
    must not look like a failed update."""
    rig, values = slow(make_rig, rng, [0], pools=(1, 0))
    new, target = random_chunk(rng), np.zeros(NUMEL, np.uint16)
    jobs = np.zeros(2, dtype=records.JOB)
    jobs["chunk"], jobs["base"], jobs["mask"] = rig.ids[:2], -1, (1, 15)
    jobs["kind"] = records.JobKind.FETCH, records.JobKind.STORE
    jobs["ptr"][0, 0] = target.ctypes.data
    jobs["ptr"][1, :4] = [array.ctypes.data for array in new]
    behind = rig.fetch([0])[0]
    ticket = rig.executor.submit(jobs, priority=aio.Priority.DEMAND)
    ticket.cancel()
    ticket.wait(20)
    assert not ticket.failed
    behind.wait(20)
    assert same([target], values[0][:1])
    assert same(rig.read(1), new)
    assert rig.executor.stats().jobs_cancelled == 0


def test_giving_up_twice_late_or_after_the_end_does_nothing(make_rig, rng):
    rig = make_rig()
    value = random_chunk(rng)
    rig.store({0: value}).wait(20)
    ticket, targets = rig.fetch([0])
    ticket.wait(20)
    ticket.cancel()
    ticket.cancel()
    ticket.wait(0)
    assert same(targets[0], value)
    empty = rig.executor.submit(np.zeros(0, dtype=records.JOB), priority=aio.Priority.DEMAND)
    empty.cancel()
    empty.wait(0)
    gate = rig.executor.gate()  # a gate that is not held would escape
    gated, _ = rig.fetch([0], gate=gate)
    gated.cancel()
    gated.cancel()
    assert isinstance(outcome(gated), AioCancelledError)
    assert rig.executor.stats().jobs_cancelled == 1
    rig.executor.close()
    for late in (ticket, gated):
        late.cancel()


def test_cancel_races_with_everything_and_loses_nothing(make_rig, rng):
    rig = make_rig(pools=(2, 2), depth=2, seam=aio.Seam(delay_us_max=300, seed=4))
    values = {i: random_chunk(rng) for i in range(6)}
    rig.store(values).wait(20)
    ended: list[tuple[int, AioError | None, list]] = []

    def work(seed: int) -> None:
        mine = np.random.default_rng(seed)
        for _ in range(25):
            index = int(mine.integers(0, 6))
            ticket, targets = rig.fetch([index], priority=int(mine.integers(0, 3)))
            if mine.integers(0, 2):
                threading.Timer(float(mine.random()) * 1e-3, ticket.cancel).start()
            else:
                ticket.cancel()
            ended.append((index, outcome(ticket), targets[0]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) == 100
    for index, error, target in ended:
        assert error is None or isinstance(error, AioCancelledError)
        assert error is not None or same(target, values[index])
    assert all(same(rig.read(i), values[i]) for i in values)
    rig.executor.wait_all(20)
    stats = rig.executor.stats()
    assert stats.jobs_cancelled == sum(error is not None for _, error, _ in ended)
    assert stats.jobs_done == stats.jobs_submitted
    assert rig.executor.fault() is None


def test_a_wait_asks_its_check_and_what_that_raises_ends_the_wait_alone(make_rig, rng):
    # One chunk takes more than a second.
    rig, values = slow(make_rig, rng, [0], seam=aio.Seam(read_bytes_per_s=7e3))
    ticket, targets = rig.fetch([0])
    asked = 0

    def check():
        nonlocal asked
        asked += 1
        if asked == 2:
            raise LookupError("a rank has failed")

    for wait in (ticket.wait, ticket.wait_filled):
        asked = 0
        with pytest.raises(LookupError, match="a rank has failed"):
            wait(20, check=check)
        # Every 100 ms, and not only at the end.
        assert asked == 2
    assert not ticket.done
    ticket.wait(20)
    assert same(targets[0], values[0])
