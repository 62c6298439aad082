"""Gates hold work back until its targets exist, but not indefinitely."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest

from infinity import aio
from infinity._src.cabi import records
from infinity.errors import ChecksumError
from tests.unit.aio.rig import (
    DTYPES,
    NUMEL,
    RUN_BYTES,
    adamw,
    hyper_record,
    random_chunk,
    same,
    until,
)

LONG_S = 30.0


def prepared(make_rig, rng, **options):
    """A rig whose chunks hold something, and what."""
    rig = make_rig(**{"hold_s": LONG_S, **options})
    values = {i: random_chunk(rng) for i in range(6)}
    rig.store(values).wait()
    return rig, values


def test_a_gated_update_waits_and_then_fills_its_target(make_rig, rng):
    rig, values = prepared(make_rig, rng)
    gate = rig.executor.gate()
    target = np.zeros((2, NUMEL), dtype=np.uint16)
    grads = {i: rng.standard_normal(NUMEL).astype(np.float32) for i in range(2)}
    ticket = rig.update(grads, gate=gate, target=target)
    time.sleep(0.05)
    assert not ticket.done
    assert not gate.escaped
    assert gate.open([target.ctypes.data])
    ticket.wait()
    for i in range(2):
        adamw(records.Format.SPLIT, values[i], grads[i], hyper_record()[0])
        assert target[i].tobytes() == values[i][0].tobytes()
    stats = rig.executor.stats()
    assert (stats.gates_opened, stats.gates_escaped) == (1, 0)


def test_a_gated_fetch_adds_its_base(make_rig, rng):
    rig, values = prepared(make_rig, rng)
    gate = rig.executor.gate()
    targets = np.zeros((2, 3, NUMEL), dtype=np.uint16)
    jobs = np.zeros(3, dtype=records.JOB)
    jobs["chunk"], jobs["kind"], jobs["mask"], jobs["base"] = (
        rig.ids[:3],
        records.JobKind.FETCH,
        1,
        (0, 1, 0),
    )
    jobs["ptr"][:, 0] = np.arange(3) * 2 * NUMEL
    ticket = rig.executor.submit(jobs, priority=aio.Priority.PREFETCH, gate=gate)
    assert gate.open([targets[0].ctypes.data, targets[1].ctypes.data])
    ticket.wait()
    for i, base in enumerate((0, 1, 0)):
        assert targets[base, i].tobytes() == values[i][0].tobytes()
        assert not targets[1 - base, i].any()


def test_an_idle_executor_lets_gates_escape_and_updates_still_happen(make_rig, rng):
    rig, values = prepared(make_rig, rng, hold_s=0.02)
    target = np.zeros((1, NUMEL), dtype=np.uint16)
    grads = {i: rng.standard_normal(NUMEL).astype(np.float32) for i in range(6)}
    gates = [rig.executor.gate() for _ in range(6)]
    tickets = [rig.update({i: grads[i]}, gate=gates[i], target=target) for i in range(6)]
    deadline = time.monotonic() + 20
    while not all(ticket.done for ticket in tickets):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    assert all(gate.escaped for gate in gates)
    assert not gates[0].open([target.ctypes.data])
    assert not target.any()
    for i in range(6):
        adamw(records.Format.SPLIT, values[i], grads[i], hyper_record()[0])
        assert same(rig.read(i), values[i])


def test_after_an_escape_the_next_gates_hold_again(make_rig, rng):
    rig, values = prepared(make_rig, rng, hold_s=0.2)
    first = rig.fetch([0], gate=rig.executor.gate())[0]
    deadline = time.monotonic() + 20
    while not first.done:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    gate = rig.executor.gate()
    ticket, targets = rig.fetch([0], gate=gate)
    assert gate.open([])
    ticket.wait(20)
    assert same(targets[0], values[0])


def test_a_fetch_whose_gate_escaped_is_skipped(make_rig, rng):
    rig, _ = prepared(make_rig, rng)
    gate = rig.executor.gate()
    ticket, targets = rig.fetch([0], gate=gate)
    rig.executor.release_gates()
    ticket.wait()
    assert not targets[0][0].any()
    assert rig.executor.stats().bytes_read == 0
    assert not gate.open([])


def test_waiting_for_a_gated_ticket_makes_its_gate_and_older_ones_escape(make_rig, rng):
    rig, _ = prepared(make_rig, rng)
    gates = [rig.executor.gate() for _ in range(3)]
    tickets = [rig.fetch([i], gate=gates[i])[0] for i in range(3)]
    tickets[1].wait(20)
    assert [gate.escaped for gate in gates] == [True, True, False]
    assert gates[2].open([])
    tickets[2].wait(20)


def test_waiting_behind_a_gated_job_of_the_same_chunk_makes_it_escape(make_rig, rng):
    rig, values = prepared(make_rig, rng)
    gate, later = rig.executor.gate(), rig.executor.gate()
    grad = rng.standard_normal(NUMEL).astype(np.float32)
    rig.update({0: grad}, gate=gate, target=np.zeros((1, NUMEL), dtype=np.uint16))
    rig.fetch([3], gate=later)
    ticket, targets = rig.fetch([0, 1])
    ticket.wait(20)
    adamw(records.Format.SPLIT, values[0], grad, hyper_record()[0])
    assert same(targets[0], values[0])
    assert gate.escaped
    assert not later.escaped


def test_a_closed_gate_does_not_hold_other_chunks(make_rig, rng):
    rig, values = prepared(make_rig, rng)
    gate = rig.executor.gate()
    rig.update({0: np.ones(NUMEL, np.float32)}, gate=gate, target=np.zeros((1, NUMEL), np.uint16))
    assert same(rig.read(1), values[1])
    assert not gate.escaped


def test_drain_and_close_let_all_gates_escape(make_rig, rng):
    rig, _ = prepared(make_rig, rng)
    tickets = [rig.fetch([i], gate=rig.executor.gate())[0] for i in range(3)]
    rig.executor.wait_all(20)
    assert all(ticket.done for ticket in tickets)
    gate = rig.executor.gate()
    ticket, _ = rig.fetch([0], gate=gate)
    rig.executor.close()
    assert ticket.done
    assert not ticket.failed
    assert gate.escaped


def test_a_gate_without_a_holder_escapes(make_rig, rng):
    rig, _ = prepared(make_rig, rng)
    gate = rig.executor.gate()
    ticket = rig.fetch([0], gate=gate)[0]
    del gate
    gc.collect()
    deadline = time.monotonic() + 20
    while not ticket.done:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_an_unreferenced_gate_escapes_also_while_gates_are_held(make_rig, rng):
    rig = make_rig(hold_s=30)
    rig.store({0: random_chunk(rng)}).wait()
    rig.executor.hold_gates(True)
    gate = rig.executor.gate()
    ticket, targets = rig.fetch([0], gate=gate)
    del gate
    until(lambda: ticket.done)
    assert not targets[0][0].any()


def test_a_gate_takes_several_submissions(make_rig, rng):
    rig, values = prepared(make_rig, rng)
    gate = rig.executor.gate()
    fetches = [rig.fetch([i], gate=gate) for i in range(3)]
    assert gate.open([])
    after = rig.fetch([3], gate=gate)
    for i, (ticket, targets) in enumerate([*fetches, after]):
        ticket.wait(20)
        assert same(targets[0], values[i])


def test_a_gate_opens_once_and_wants_all_its_bases(make_rig, rng):
    rig, _ = prepared(make_rig, rng)
    gate = rig.executor.gate()
    target = np.zeros((1, NUMEL), dtype=np.uint16)
    ticket = rig.update({0: np.ones(NUMEL, np.float32)}, gate=gate, target=target)
    with pytest.raises(ValueError, match="bases"):
        gate.open([])
    assert gate.open([target.ctypes.data])
    with pytest.raises(ValueError, match="once"):
        gate.open([target.ctypes.data])
    ticket.wait(20)


def test_a_gate_whose_fetch_was_given_up_wants_only_the_bases_of_the_others(make_rig, rng):
    rig, values = prepared(make_rig, rng)
    gate = rig.executor.gate()
    jobs = np.zeros(1, dtype=records.JOB)
    jobs["kind"], jobs["mask"] = records.JobKind.FETCH, 1
    target = np.zeros(NUMEL, dtype=np.uint16)
    tickets = []
    for index, base in ((0, 0), (1, 5)):
        jobs["chunk"], jobs["base"] = rig.ids[index], base
        tickets.append(rig.executor.submit(jobs, priority=aio.Priority.PREFETCH, gate=gate))
    with pytest.raises(ValueError, match="bases"):
        gate.open([target.ctypes.data])
    tickets[1].cancel()
    assert tickets[1].done
    assert gate.open([target.ctypes.data])
    tickets[0].wait(20)
    assert target.tobytes() == values[0][0].tobytes()


def test_a_gate_of_another_executor_is_a_value_error(make_rig, rng):
    rig, other = make_rig(), make_rig()
    with pytest.raises(ValueError, match="another executor"):
        rig.fetch([0], gate=other.executor.gate())


def test_opening_a_gate_stops_the_escape_of_the_others(make_rig, rng):
    rig, _ = prepared(make_rig, rng, hold_s=LONG_S)
    gates = [rig.executor.gate() for _ in range(3)]
    tickets = [rig.fetch([i], gate=gate)[0] for i, gate in enumerate(gates)]
    assert gates[0].open([])
    tickets[0].wait(20)
    assert [gate.escaped for gate in gates] == [False] * 3
    rig.executor.wait_all(20)


def test_faults_behind_gates_reach_their_tickets(make_rig, rng):
    rig = make_rig(hold_s=LONG_S, seam=aio.Seam(fault=aio.Fault("read", 0, persistent=True)))
    rig.store({0: random_chunk(rng)}).wait()
    gate = rig.executor.gate()
    ticket = rig.update(
        {0: np.ones(NUMEL, np.float32)}, gate=gate, target=np.zeros((1, NUMEL), np.uint16)
    )
    rig.executor.release_gates()
    with pytest.raises(OSError, match="drive failed"):
        ticket.wait(20)


def late(rig, index: int) -> tuple[aio.Gate, aio.Ticket, np.ndarray]:
    """A FETCH of a whole chunk at a gate that stays; the memory to open it with."""
    gate, memory = rig.executor.gate(escapes=False), np.zeros(RUN_BYTES, dtype=np.uint8)
    job = np.zeros(1, dtype=records.JOB)
    job["chunk"], job["kind"], job["mask"] = rig.ids[index], records.JobKind.FETCH, 15
    job["ptr"][0, :4] = [0, 2 * NUMEL, 4 * NUMEL, 8 * NUMEL]
    ticket = rig.executor.submit(job, priority=aio.Priority.WRITEBACK, gate=gate)
    return gate, ticket, memory


def held_in(memory: np.ndarray) -> list[np.ndarray]:
    parts = np.split(memory, [2 * NUMEL, 4 * NUMEL, 8 * NUMEL])
    return [part.view(dtype) for part, dtype in zip(parts, DTYPES, strict=True)]


@pytest.mark.parametrize("versioned", [False, True])
def test_a_fetch_after_an_update_copies_from_its_slot(make_rig, rng, versioned):
    rig, values = prepared(make_rig, rng, versioned=versioned)
    grad = rng.standard_normal(NUMEL).astype(np.float32)
    update = rig.executor.gate()
    before = rig.executor.stats().drives[0].bytes_read
    rig.update({0: grad}, gate=update)
    gate, ticket, memory = late(rig, 0)
    assert gate.open([memory.ctypes.data])
    assert not ticket.done
    update.open([0])
    ticket.wait_turn()
    adamw(records.Format.SPLIT, values[0], grad, hyper_record()[0])
    assert same(held_in(memory), values[0])
    assert rig.executor.stats().drives[0].bytes_read - before == RUN_BYTES  # the update's


def test_what_a_fetch_copies_from_an_updates_slot_is_verified(make_rig, rng):
    """The seam flips a bit in the slot itself, after the update has made its checksums."""
    seam = aio.Seam(fault=aio.Fault("write", 6, "bitflip"))  # after a write for each chunk
    rig, _ = prepared(make_rig, rng, block_bytes=RUN_BYTES, seam=seam)
    update = rig.executor.gate()
    rig.update({0: rng.standard_normal(NUMEL).astype(np.float32)}, gate=update)
    gate, ticket, memory = late(rig, 0)
    assert gate.open([memory.ctypes.data])
    update.open([0])
    with pytest.raises(ChecksumError):
        ticket.wait(20)


def test_a_gate_that_stays_holds_later_updates_but_no_fetches(make_rig, rng):
    rig, values = prepared(make_rig, rng, hold_s=0.001)
    gate, ticket, memory = late(rig, 0)
    rig.executor.release_gates()
    assert same(rig.read(0), values[0])  # it passes
    grad = rng.standard_normal(NUMEL).astype(np.float32)
    update = rig.update({0: grad})
    with pytest.raises(TimeoutError):
        update.wait(0.02)
    assert not gate.escaped
    assert gate.open([memory.ctypes.data])
    update.wait()
    assert ticket.done
    assert same(held_in(memory), values[0])
    adamw(records.Format.SPLIT, values[0], grad, hyper_record()[0])
    assert same(rig.read(0), values[0])


def test_a_gate_that_stays_escapes_when_it_is_released_or_the_executor_closes(make_rig, rng):
    rig, values = prepared(make_rig, rng)
    gate, ticket, memory = late(rig, 0)
    other, other_ticket, _ = late(rig, 1)
    gate.release()
    ticket.wait()
    assert gate.escaped
    assert not gate.open([memory.ctypes.data])
    with pytest.raises(ValueError, match="released"):
        rig.update({0: np.zeros(NUMEL, dtype=np.float32)}, gate=gate)
    assert not memory.any()
    assert same(rig.read(0), values[0])
    rig.executor.close()
    assert other.escaped
    assert other_ticket.done
