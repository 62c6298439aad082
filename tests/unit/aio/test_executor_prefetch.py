"""Idle slots read ahead for UPDATEs; only the counters show it."""

from __future__ import annotations

import errno
import time

import numpy as np
import pytest

from infinity import aio
from infinity._src.cabi import records
from infinity._src.kernels.hyper import hyper_row_muon_momentum
from infinity.aio import TRACK_READ
from infinity.errors import AioClosedError, ChecksumError, DeviceFailedError
from tests.oracle import update_sections
from tests.unit.aio.rig import NUMEL, adamw, hyper_record, outcome, random_chunk, same

LONG_S = 30.0
SLOW = aio.Seam(read_bytes_per_s=12 * NUMEL / 0.1)
"""A chunk takes a tenth of a second."""


def prepared(make_rig, rng, **options):
    """A rig whose chunks hold something, and what; and a gradient for each."""
    options = {
        "hold_s": LONG_S,
        "pools": (3, 4),
        "chunk_count": 8,
        "block_bytes": 1 << 20,
        **options,
    }
    rig = make_rig(**options)
    values = {i: random_chunk(rng) for i in range(options["chunk_count"])}
    for i, value in values.items():  # one by one: each is a request
        rig.store({i: value}).wait(20)
    return rig, values, {i: rng.standard_normal(NUMEL).astype(np.float32) for i in values}


def updated(value, grad, step: int = 1):
    """The chunk after its update."""
    after = [section.copy() for section in value]
    adamw(records.Format.SPLIT, after, grad, hyper_record(step)[0])
    return after


def live(rig) -> int:
    """Slots that hold a read ahead."""
    return rig.executor.stats().extra["reads_ahead_live"]


def eventually(condition) -> None:
    """Fails if it does not come true."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def settled(rig, count: int) -> None:
    """Wait until `count` chunks were read ahead to the end, and see that it stays so."""
    eventually(lambda: rig.executor.stats().bytes_read >= count * 12 * NUMEL)
    time.sleep(0.05)
    stats = rig.executor.stats()
    assert (stats.bytes_read, live(rig)) == (count * 12 * NUMEL, count)


def test_an_update_behind_a_gate_is_read_ahead_and_waits_in_its_slot(make_rig, rng):
    rig, values, grads = prepared(make_rig, rng)
    gate = rig.executor.gate()
    target = np.zeros((2, NUMEL), dtype=np.uint16)
    ticket = rig.update({i: grads[i] for i in range(2)}, gate=gate, target=target)
    settled(rig, 2)
    assert not ticket.done
    assert gate.open([target.ctypes.data])
    ticket.wait(20)
    for i in range(2):
        assert target[i].tobytes() == updated(values[i], grads[i])[0].tobytes()
    stats = rig.executor.stats()
    assert (stats.reads_ahead, stats.reads_ahead_dropped, stats.bytes_read) == (
        2,
        0,
        2 * 12 * NUMEL,
    )
    assert all(same(rig.read(i), updated(values[i], grads[i])) for i in range(2))


@pytest.mark.parametrize(("large", "most"), [(1, 0), (2, 1), (3, 2), (4, 3), (8, 6)])
def test_a_quarter_of_the_slots_is_left_alone(make_rig, rng, large, most):
    rig, values, grads = prepared(make_rig, rng, pools=(0, large))
    gate = rig.executor.gate()
    ticket = rig.update(grads, gate=gate)
    settled(rig, most)
    rig.executor.release_gates()
    ticket.wait(20)
    assert all(same(rig.read(i), updated(values[i], grads[i])) for i in values)
    assert rig.executor.stats().reads_ahead_dropped == 0


def test_the_oldest_gate_is_read_first(make_rig, rng):
    rig, _, grads = prepared(make_rig, rng)
    rig.executor.spans(True)
    gates = [rig.executor.gate() for _ in range(4)]
    tickets = [rig.update({i: grads[i], i + 4: grads[i + 4]}, gate=gates[3 - i]) for i in range(4)]
    settled(rig, 3)
    spans = [span for span in rig.executor.take_spans() if span["track"] == TRACK_READ]
    assert sorted(span["chunk"] for span in spans) == sorted(rig.ids[[0, 4, 1]])
    assert {int(span["priority"]) for span in spans} == {3}
    assert gates[3].open([0])  # the oldest's slots are free: the next ones are read
    tickets[0].wait(20)
    eventually(lambda: rig.executor.stats().reads_ahead == 5)
    rig.executor.wait_all(20)


def test_jobs_wait_for_their_quarter_and_nothing_is_read_twice(make_rig, rng):
    rig, values, grads = prepared(make_rig, rng)
    gates = [rig.executor.gate() for _ in range(3)]
    tickets = [rig.update({i: grads[i]}, gate=gate) for i, gate in enumerate(gates)]
    settled(rig, 3)
    ticket, targets = rig.fetch([4, 5, 6], priority=2)
    ticket.wait(20)
    assert all(same(targets[n], values[4 + n]) for n in range(3))
    assert not any(gate.escaped for gate in gates)
    stats = rig.executor.stats()
    assert (stats.reads_ahead, stats.reads_ahead_dropped, stats.bytes_read, live(rig)) == (
        3,
        0,
        6 * 12 * NUMEL,
        3,
    )
    for gate, ticket in zip(gates, tickets, strict=True):
        assert gate.open([])
        ticket.wait(20)
    assert all(same(rig.read(i), updated(values[i], grads[i])) for i in range(3))


def test_making_room_on_a_busy_drive_reads_nothing_twice(make_rig, rng):
    rig, values, _ = prepared(make_rig, rng, pools=(0, 8), seam=SLOW, chunk_count=12)
    rig.executor.prefetch(rig.ids[:6])
    ticket, targets = rig.fetch([8, 9, 10, 11])
    ticket.wait(20)
    assert all(same(targets[n], values[8 + n]) for n in range(4))
    rig.executor.wait_all(20)
    stats = rig.executor.stats()
    assert (stats.reads_ahead - stats.reads_ahead_dropped, stats.bytes_read) == (6, 10 * 12 * NUMEL)


def test_jobs_of_a_drive_whose_share_is_read_ahead_get_the_youngest(make_rig, rng):
    rig, values, grads = prepared(make_rig, rng, drive_count=2, pools=(0, 8), chunk_count=16)
    gate = rig.executor.gate()
    mine = [i for i in values if i % 2 == 0]
    ticket = rig.update({i: grads[i] for i in mine[:6]}, gate=gate)
    settled(rig, 6)  # of eight, two are the other drive's
    fetched, targets = rig.fetch(mine[6:])
    fetched.wait(20)
    assert all(same(target, values[i]) for target, i in zip(targets, mine[6:], strict=True))
    assert not gate.escaped
    assert 1 <= rig.executor.stats().reads_ahead_dropped <= 2  # as many as are left to jobs
    eventually(lambda: live(rig) == 6)  # and they are read again
    gate.open([])
    ticket.wait(20)
    assert all(same(rig.read(i), updated(values[i], grads[i])) for i in mine[:6])


def test_a_read_ahead_that_a_drive_works_on_makes_room_when_it_is_through(make_rig, rng):
    rig, values, grads = prepared(make_rig, rng, pools=(0, 2), seam=SLOW)
    gate = rig.executor.gate()
    rig.update({0: grads[0]}, gate=gate)
    eventually(lambda: live(rig) == 1)
    ticket, targets = rig.fetch([4, 5])
    ticket.wait(20)
    assert same(targets[0], values[4])
    assert same(targets[1], values[5])
    assert not gate.escaped


def test_no_drive_is_kept_out_by_what_another_reads_ahead(make_rig, rng):
    rig, values, grads = prepared(make_rig, rng, drive_count=2, pools=(0, 4))
    gate = rig.executor.gate()
    rig.update({i: grads[i] for i in (0, 2, 4)}, gate=gate)
    time.sleep(0.05)
    tickets = [rig.fetch([i]) for i in (1, 6, 3, 5)]
    for (ticket, targets), i in zip(tickets, (1, 6, 3, 5), strict=True):
        ticket.wait(20)
        assert same(targets[0], values[i])
    assert not gate.escaped
    rig.executor.wait_all(20)


def test_what_was_asked_for_is_there_when_the_update_comes(make_rig, rng):
    rig, values, grads = prepared(make_rig, rng)
    assert rig.executor.prefetch(rig.ids[:2]) == 2
    assert rig.executor.prefetch(rig.ids[:1]) == 1  # it is there already
    settled(rig, 2)
    rig.update({i: grads[i] for i in range(3)}).wait(20)
    stats = rig.executor.stats()
    assert (stats.reads_ahead, stats.reads_ahead_dropped, stats.bytes_read) == (
        2,
        0,
        3 * 12 * NUMEL,
    )
    assert all(same(rig.read(i), updated(values[i], grads[i])) for i in range(3))


def test_no_more_is_accepted_than_slots_may_hold(make_rig, rng):
    rig, _, grads = prepared(make_rig, rng)
    assert rig.executor.prefetch(rig.ids) == 3
    settled(rig, 3)
    assert rig.executor.prefetch(rig.ids[3:]) == 0
    rig.update({0: grads[0]}).wait(20)
    assert rig.executor.prefetch(rig.ids[3:]) == 1
    rig.executor.wait_all(20)
    assert live(rig) == 3
    with pytest.raises(ValueError, match="not defined"):
        rig.executor.prefetch(np.array([0, 10_000], dtype=np.int32))
    rig.executor.close()
    with pytest.raises(AioClosedError):
        rig.executor.prefetch(rig.ids)


def test_an_update_that_comes_while_its_chunk_is_being_read_waits_for_that(make_rig, rng):
    rig, values, grads = prepared(make_rig, rng, seam=SLOW)
    rig.executor.prefetch(rig.ids[:3])
    eventually(lambda: live(rig) == 3)
    rig.update({i: grads[i] for i in range(3)}).wait(20)
    assert rig.executor.stats().bytes_read == 3 * 12 * NUMEL
    assert rig.executor.stats().reads_ahead_dropped == 0
    assert all(same(rig.read(i), updated(values[i], grads[i])) for i in range(3))


def test_a_store_takes_the_place_of_what_was_read(make_rig, rng):
    rig, values, grads = prepared(make_rig, rng)
    rig.executor.prefetch(rig.ids[:3])
    settled(rig, 3)
    new = {i: random_chunk(rng) for i in range(3)}
    rig.store({0: new[0]}).wait(20)
    rig.store({1: new[1]}, mask=1).wait(20)
    assert rig.executor.stats().reads_ahead_dropped == 1
    rig.update({i: grads[i] for i in range(3)}).wait(20)
    assert rig.executor.stats().bytes_read == (3 * 12 + 12 + 2) * NUMEL
    wanted = [new[0], [new[1][0], *values[1][1:]], values[2]]
    assert all(same(rig.read(i), updated(wanted[i], grads[i])) for i in range(3))


def test_a_store_while_the_chunk_is_being_read_ahead_is_not_overtaken(make_rig, rng):
    rig, values, grads = prepared(make_rig, rng, seam=SLOW)
    rig.executor.prefetch(rig.ids[:2])
    eventually(lambda: live(rig) == 2)
    new = {i: random_chunk(rng) for i in range(2)}
    rig.store({0: new[0]})
    rig.store({1: new[1]}, mask=0b0110)
    rig.update({i: grads[i] for i in range(2)}).wait(20)
    wanted = [new[0], [values[1][0], new[1][1], new[1][2], values[1][3]]]
    assert all(same(rig.read(i), updated(wanted[i], grads[i])) for i in range(2))


def test_gradients_that_spill_after_the_chunk_was_read_are_all_that_is_read_then(make_rig, rng):
    rig, values, _ = prepared(make_rig, rng, spilled=True)
    rig.executor.prefetch(rig.ids[:1])
    settled(rig, 1)
    grad = rng.integers(0x3C00, 0x3F00, NUMEL).astype(np.uint16)
    rig.store({0: [*values[0], grad]}, mask=16).wait(20)
    rig.update({0: None}).wait(20)
    assert rig.executor.stats().bytes_read == 14 * NUMEL
    assert rig.executor.stats().reads_ahead_dropped == 0
    assert same(rig.read(0)[:4], updated(values[0], grad))


@pytest.mark.parametrize(
    ("asked", "comes", "total"), [(True, True, 10), (False, True, 12), (True, False, 12)]
)
def test_a_section_that_will_be_given_is_not_read_ahead(make_rig, rng, asked, comes, total):
    rig, values, grads = prepared(make_rig, rng)
    rig.executor.prefetch(rig.ids[:1], records.MASK_PARAM_IN_MEMORY * asked)
    eventually(lambda: rig.executor.stats().bytes_read == (10 if asked else 12) * NUMEL)
    rig.update({0: grads[0]}, given={0: values[0][0]} if comes else None).wait(20)
    assert rig.executor.stats().bytes_read == total * NUMEL
    assert same(rig.read(0), updated(values[0], grads[0]))


@pytest.mark.parametrize(("versioned", "total"), [(False, 4), (True, 12)])
def test_only_sections_that_the_update_reads_are_read_ahead(make_rig, rng, versioned, total):
    """A momentum, which is 4 B of the 12; the update of a committed chunk reads all of it, for a
    new version."""
    rig, values, grads = prepared(make_rig, rng, versioned=versioned)
    if versioned:
        rig.executor.commit(rig.ids)
    leaves = 0b1011
    rig.executor.prefetch(rig.ids[:1], leaves << aio.LEAVES_SHIFT)
    eventually(lambda: rig.executor.stats().bytes_read == total * NUMEL)
    hyper = hyper_row_muon_momentum(momentum=0.9, nesterov=True).reshape(1)
    wanted, matrix = [section.copy() for section in values[0]], grads[0].copy()
    update_sections(records.Format.SPLIT, wanted, matrix, hyper[0])
    rig.update({0: grads[0]}, hyper=hyper, leaves=leaves).wait(20)
    assert rig.executor.stats().bytes_read == total * NUMEL
    assert rig.executor.stats().reads_ahead_dropped == 0
    assert same(rig.read(0), wanted)
    assert np.array_equal(grads[0], matrix)


def test_what_was_asked_for_and_made_room_is_read_again(make_rig, rng):
    rig, values, grads = prepared(make_rig, rng, drive_count=2, pools=(0, 8), chunk_count=16)
    mine = [i for i in values if i % 2 == 0]
    assert rig.executor.prefetch(rig.ids[mine[:6]]) == 6
    settled(rig, 6)
    rig.fetch(mine[6:])[0].wait(20)
    eventually(lambda: live(rig) == 6)
    stats = rig.executor.stats()
    assert stats.reads_ahead == 6 + stats.reads_ahead_dropped
    assert 1 <= stats.reads_ahead_dropped <= 2
    rig.update({i: grads[i] for i in mine[:6]}).wait(20)
    assert all(same(rig.read(i), updated(values[i], grads[i])) for i in mine[:6])


def test_a_fetch_beside_what_was_read_ahead(make_rig, rng):
    rig, values, grads = prepared(make_rig, rng)
    rig.executor.prefetch(rig.ids[:1])
    assert same(rig.read(0), values[0])
    rig.update({0: grads[0]}).wait(20)
    assert same(rig.read(0), updated(values[0], grads[0]))


def test_what_was_asked_for_meets_a_gate(make_rig, rng):
    """The job at the gate takes the wish over: it is not read twice."""
    rig, values, grads = prepared(make_rig, rng)
    assert rig.executor.prefetch(rig.ids[:3]) == 3
    gate = rig.executor.gate()
    ticket = rig.update({i: grads[i] for i in (2, 1, 0)}, gate=gate)
    settled(rig, 3)
    assert rig.executor.prefetch(rig.ids[:3]) == 3
    assert gate.open([])
    ticket.wait(20)
    assert rig.executor.stats().bytes_read == 3 * 12 * NUMEL
    assert all(same(rig.read(i), updated(values[i], grads[i])) for i in range(3))


@pytest.mark.parametrize("gated", [False, True])
def test_a_read_ahead_that_fails_is_as_if_it_had_never_been(make_rig, rng, gated):
    fault = aio.Fault("read", 0, errno=errno.EIO)
    rig, values, grads = prepared(make_rig, rng, seam=aio.Seam(fault=fault))
    gate = rig.executor.gate() if gated else None
    ticket = rig.update({0: grads[0]}, gate=gate) if gated else None
    if ticket is None:
        rig.executor.prefetch(rig.ids[:1])
    eventually(lambda: rig.executor.stats().reads_ahead_dropped == 1)
    assert rig.executor.fault() is None
    assert gate is None or gate.open([])
    (ticket or rig.update({0: grads[0]})).wait(20)
    stats = rig.executor.stats()
    assert (stats.jobs_failed, stats.reads_ahead, live(rig)) == (0, 1, 0)
    assert stats.drives[0].errors == 1
    assert same(rig.read(0), updated(values[0], grads[0]))


def test_a_fault_that_stays_is_told_by_the_update(make_rig, rng):
    fault = aio.Fault("read", 0, errno=errno.EIO, persistent=True)
    rig, _, grads = prepared(make_rig, rng, seam=aio.Seam(fault=fault))
    rig.executor.prefetch(rig.ids[:2])
    eventually(lambda: rig.executor.stats().reads_ahead_dropped == 2)
    rig.executor.wait_all(20)
    assert rig.executor.fault() is None
    assert rig.executor.invalid(rig.ids[:2]).tolist() == [0, 0]
    with pytest.raises(DeviceFailedError):
        rig.update({0: grads[0]}).wait(20)
    assert rig.executor.invalid(rig.ids[:2]).tolist() == [15, 0]


def test_an_update_that_waits_for_a_read_that_fails_reads_for_itself(make_rig, rng):
    fault = aio.Fault("read", 0, errno=errno.EIO)
    rig, values, grads = prepared(make_rig, rng, seam=aio.Seam(fault=fault, delay_us_max=50_000))
    rig.executor.prefetch(rig.ids[:1])
    eventually(lambda: rig.executor.stats().drives[0].reads == 1)
    rig.update({0: grads[0]}).wait(20)
    assert rig.executor.fault() is None
    assert same(rig.read(0), updated(values[0], grads[0]))


@pytest.mark.parametrize("verify", ["full", "sample"])
def test_a_flip_in_what_was_read_ahead_is_found_by_the_update_and_mended(make_rig, rng, verify):
    fault = aio.Fault("read", 0, kind="bitflip")
    rig, values, grads = prepared(
        make_rig, rng, verify=verify, seam=aio.Seam(fault=fault), piece=NUMEL
    )
    rig.executor.prefetch(rig.ids[:1])
    settled(rig, 1)
    rig.update({0: grads[0]}).wait(20)
    assert rig.executor.stats().rereads == 1
    assert same(rig.read(0), updated(values[0], grads[0]))


def test_what_lies_wrong_on_the_drive_is_found_too(make_rig, rng):
    rig, _, grads = prepared(make_rig, rng)
    rig.executor.prefetch(rig.ids[:1])
    settled(rig, 1)
    rig.sums[0, 3] += 1
    with pytest.raises(ChecksumError):
        rig.update({0: grads[0]}).wait(20)


def test_chunks_may_be_dropped_whatever_is_read_of_them(make_rig, rng):
    rig, values, grads = prepared(make_rig, rng, seam=SLOW)
    rig.executor.prefetch(rig.ids[:3])
    eventually(lambda: live(rig) == 3)
    rig.executor.drop(rig.ids[:3])
    rig.ids[:3] = rig.executor.define(rig.chunks[:3])
    rig.executor.wait_all(20)
    assert live(rig) == 0
    rig.executor.prefetch(rig.ids[:3])
    eventually(lambda: live(rig) == 3)
    rig.executor.wait_all(20)
    rig.executor.drop(rig.ids[:2])
    rig.ids[:2] = rig.executor.define(rig.chunks[:2])
    assert live(rig) == 1
    rig.update({i: grads[i] for i in range(3)}).wait(20)
    assert all(same(rig.read(i), updated(values[i], grads[i])) for i in range(3))
    assert rig.executor.stats().reads_ahead_dropped == 5


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("held", [True, False])
def test_closing_ends_whatever_is_read_ahead(make_rig, rng, wait, held):
    rig, _, grads = prepared(make_rig, rng, seam=None if held else SLOW)
    gate = rig.executor.gate()
    ticket = rig.update({4: grads[4]}, gate=gate)
    rig.executor.prefetch(rig.ids[:2])
    eventually(lambda: live(rig) == 3)
    rig.executor.close(wait=wait)
    assert ticket.done
    if wait:
        assert outcome(ticket) is None
        assert rig.executor.stats().updates == 1
    assert live(rig) == 0


def test_draining_leaves_what_was_read_ahead_for_later(make_rig, rng):
    rig, values, grads = prepared(make_rig, rng, seam=SLOW)
    gate = rig.executor.gate()
    ticket = rig.update({4: grads[4]}, gate=gate)
    rig.executor.prefetch(rig.ids[:2])
    eventually(lambda: live(rig) == 3)
    rig.executor.wait_all(20)
    assert ticket.done
    assert gate.escaped
    assert live(rig) == 2
    rig.update({0: grads[0], 1: grads[1]}).wait(20)
    assert rig.executor.stats().bytes_read == 3 * 12 * NUMEL
    assert all(same(rig.read(i), updated(values[i], grads[i])) for i in (0, 1, 4))


def test_an_idle_executor_lets_gates_escape_though_it_reads_ahead(make_rig, rng):
    rig, values, grads = prepared(make_rig, rng, hold_s=0.02)
    gate = rig.executor.gate()
    ticket = rig.update(grads, gate=gate)
    eventually(lambda: ticket.done)
    assert gate.escaped
    assert all(same(rig.read(i), updated(values[i], grads[i])) for i in values)


def test_what_a_failed_write_keeps_is_not_read_ahead_before_it_is_written_again(make_rig, rng):
    fault = aio.Fault("write", 8, errno=errno.EIO)
    rig, values, grads = prepared(make_rig, rng, seam=aio.Seam(fault=fault))
    rig.executor.prefetch(rig.ids[:2])
    settled(rig, 2)
    new = random_chunk(rng)
    assert outcome(rig.store({0: new}, mask=0b0110)) is not None
    gate = rig.executor.gate()
    ticket = rig.update({0: grads[0]}, gate=gate)
    rig.executor.recover().wait(20)
    assert rig.executor.stats().kept_chunks == 0
    assert gate.open([])
    ticket.wait(20)
    wanted = [values[0][0], new[1], new[2], values[0][3]]
    assert same(rig.read(0), updated(wanted, grads[0]))


def test_a_refused_update_lets_go_of_what_was_read_for_it(make_rig, rng):
    fault = aio.Fault("write", 8, errno=errno.EIO)
    rig, values, grads = prepared(make_rig, rng, seam=aio.Seam(fault=fault))
    rig.executor.prefetch(rig.ids[:1])
    settled(rig, 1)
    assert outcome(rig.store({4: values[4]})) is not None
    assert outcome(rig.update({0: grads[0]})) is not None
    assert live(rig) == 0
    assert rig.executor.invalid(rig.ids)[0] == 15
    rig.executor.recover().wait(20)
    rig.store({0: values[0]}).wait(20)
    rig.update({0: grads[0]}).wait(20)
    assert same(rig.read(0), updated(values[0], grads[0]))


def test_resident_chunks_and_those_without_updates_have_nothing_to_read(make_rig, rng):
    rig, _, grads = prepared(make_rig, rng, resident=(0, 1, 2, 3))
    assert rig.executor.prefetch(rig.ids) == 8
    rig.update(grads, gate=rig.executor.gate()).wait(20)
    assert rig.executor.stats().reads_ahead == 0
