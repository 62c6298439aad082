"""A write that failed loses nothing: its slot, the only copy, stays readable, and `recover` writes
it."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from infinity import aio
from infinity._src.cabi import records
from infinity.errors import DeviceFailedError, ShortTransferError, SwapFullError
from tests.unit.aio.rig import DTYPES, NUMEL, adamw, hyper_record, outcome, random_chunk, same


def failing(make_rig, *, nth: int = 0, persistent: bool = False, kind: str = "errno", **options):
    """A rig whose nth write fails. Runs are one request each, so that `nth` counts them."""
    fault = aio.Fault("write", nth, kind=kind, errno=errno.EIO, persistent=persistent)
    return make_rig(**{"block_bytes": 1 << 20, "seam": aio.Seam(fault=fault), **options})


@pytest.mark.parametrize(
    ("kind", "error_type"),
    [("errno", DeviceFailedError), ("zero", SwapFullError)],
)
def test_what_a_failed_store_kept_is_fetched_from_memory(make_rig, rng, kind, error_type):
    rig = failing(make_rig, kind=kind)
    value = random_chunk(rng)
    with pytest.raises(error_type):
        rig.store({0: value}).wait()
    assert rig.executor.invalid(rig.ids).tolist() == [0] * 6
    stats = rig.executor.stats()
    assert stats.kept_chunks == 1
    assert "write" in stats.drives[0].failed
    for mask in (15, 1, 0b1010):
        ticket, targets = rig.fetch([0], mask=mask)
        ticket.wait()
        for s in range(4):
            wanted = value[s] if mask >> s & 1 else np.zeros(NUMEL, DTYPES[s])
            assert targets[0][s].tobytes() == wanted.tobytes()
    assert rig.executor.stats().bytes_read == 0
    rig.executor.recover().wait(20)
    stats = rig.executor.stats()
    assert (stats.kept_chunks, stats.drives[0].failed) == (0, "")
    assert same(rig.read(0), value)
    assert rig.executor.stats().bytes_read > 0


def test_a_transfer_that_makes_no_progress_is_kept_too(make_rig, rng):
    rig = failing(make_rig, kind="short", persistent=True)
    value = random_chunk(rng)
    with pytest.raises(ShortTransferError):
        rig.store({0: value}).wait()
    assert same(rig.read(0), value)
    assert rig.executor.stats().kept_chunks == 1


def test_a_failed_update_keeps_the_updated_values(make_rig, rng):
    rig = failing(make_rig, nth=1)
    value, grad = random_chunk(rng), rng.standard_normal(NUMEL).astype(np.float32)
    rig.store({0: value}).wait()
    target = np.zeros((1, NUMEL), dtype=np.uint16)
    ticket = rig.update({0: grad}, target=target)
    with pytest.raises(DeviceFailedError):
        ticket.wait()
    adamw(records.Format.SPLIT, value, grad, hyper_record()[0])
    assert target[0].tobytes() == value[0].tobytes()
    assert same(rig.read(0), value)
    assert rig.executor.stats().bytes_read == 12 * NUMEL  # the update's own
    rig.executor.recover().wait(20)
    assert same(rig.read(0), value)
    rig.update({0: grad}, step=2).wait(20)
    adamw(records.Format.SPLIT, value, grad, hyper_record(2)[0])
    assert same(rig.read(0), value)


def test_kept_sections_come_from_memory_and_the_others_from_the_drive(make_rig, rng):
    rig = failing(make_rig, nth=1, resident=(3,))
    first, second = random_chunk(rng), random_chunk(rng)
    rig.store({0: first}).wait()
    with pytest.raises(DeviceFailedError):
        rig.store({0: second}, mask=0b0011).wait()
    assert same(rig.read(0), [second[0], second[1], first[2], first[3]])
    assert rig.executor.stats().bytes_read == 4 * NUMEL
    rig.executor.recover().wait(20)
    assert same(rig.read(0), [second[0], second[1], first[2], first[3]])


def test_a_marked_drive_refuses_writes_with_its_cause_and_the_others_go_on(make_rig, rng):
    rig = failing(make_rig, nth=1, drive_count=2, chunk_count=6)
    values = {i: random_chunk(rng) for i in range(6)}
    rig.store({2: values[2]}).wait()
    with pytest.raises(DeviceFailedError):
        rig.store({0: values[0]}).wait()
    assert rig.executor.stats().drives[0].failed != ""
    assert rig.executor.stats().drives[1].failed == ""
    written = rig.executor.stats().drives[0].writes
    with pytest.raises(DeviceFailedError, match=r"recover\(\)") as refused:
        rig.store({4: values[4]}).wait()
    assert refused.value.errno == errno.EIO
    grad = np.ones(NUMEL, np.float32)
    for index in (0, 2):
        with pytest.raises(DeviceFailedError):
            rig.update({index: grad}).wait()
    rig.store({1: values[1]}).wait()
    rig.update({1: grad}).wait()
    adamw(records.Format.SPLIT, values[1], grad, hyper_record()[0])
    assert same(rig.read(1), values[1])
    assert rig.executor.stats().drives[0].writes == written
    # An update that did not happen is not silently skipped: no reader may take the old values for
    # the new ones.
    assert rig.executor.invalid(rig.ids).tolist() == [15, 0, 15, 0, 15, 0]
    for index in (0, 2, 4):
        with pytest.raises(DeviceFailedError):
            rig.read(index)
    assert outcome(rig.executor.recover()) is None
    rig.store(values).wait(20)
    assert all(same(rig.read(i), values[i]) for i in values)
    assert rig.executor.stats().kept_chunks == 0


def test_sections_in_memory_have_no_drive_that_could_be_marked(make_rig, rng):
    rig = failing(make_rig, persistent=True, resident=(0, 1, 2, 3))
    value = random_chunk(rng)
    rig.store({0: value}).wait()
    rig.update({0: np.ones(NUMEL, np.float32)}).wait()
    adamw(records.Format.SPLIT, value, np.ones(NUMEL, np.float32), hyper_record()[0])
    assert same(rig.read(0), value)
    rig.executor.recover().wait(20)  # nothing to write


def test_recover_that_fails_again_keeps_and_marks_again(make_rig, rng):
    rig = failing(make_rig, persistent=True)
    values = {i: random_chunk(rng) for i in range(2)}
    assert outcome(rig.store({0: values[0]})) is not None
    for _ in range(3):
        with pytest.raises(DeviceFailedError):
            rig.executor.recover().wait(20)
        stats = rig.executor.stats()
        assert stats.kept_chunks == 1
        assert stats.drives[0].failed != ""
        assert same(rig.read(0), values[0])
    rig.executor.wait_all(20)
    assert rig.executor.invalid(rig.ids).tolist() == [0] * 6
    # A store that was refused is lost; the next one is kept, and so readable.
    assert outcome(rig.store({1: values[1]})) is not None
    assert rig.executor.invalid(rig.ids[1:2]) == [15]
    rig.executor.drop(rig.ids[:1])
    rig.executor.recover().wait(20)
    assert outcome(rig.store({1: values[1]})) is not None
    assert rig.executor.invalid(rig.ids[1:2]) == [0]
    assert same(rig.read(1), values[1])


def test_jobs_submitted_beside_recover_wait_for_the_slots_that_it_frees(make_rig, rng):
    rig = failing(make_rig, pools=(1, 1))
    value = random_chunk(rng)
    assert outcome(rig.store({0: value})) is not None
    with pytest.raises(DeviceFailedError, match="recover"):
        rig.read(1)  # the only slot is kept
    recovery = rig.executor.recover()
    stored = rig.store({1: value})
    recovery.wait(20)
    stored.wait(20)
    assert same(rig.read(0), value)
    assert same(rig.read(1), value)


def test_recover_without_a_fault_ends_well(make_rig, rng):
    rig = make_rig()
    rig.executor.recover().wait(20)
    value = random_chunk(rng)
    rig.store({0: value})
    rig.executor.recover().wait(20)
    assert same(rig.read(0), value)


def test_a_new_store_takes_the_place_of_what_was_kept(make_rig, rng):
    rig = failing(make_rig)
    old, new = random_chunk(rng), random_chunk(rng)
    assert outcome(rig.store({0: old})) is not None
    again = rig.executor.recover()
    rig.store({0: new}, mask=0b0101).wait(20)
    again.wait(20)
    assert same(rig.read(0), [new[0], old[1], new[2], old[3]])
    assert rig.executor.stats().kept_chunks == 0


@pytest.mark.parametrize(
    "options", [{}, {"verify": "off"}, {"checksums": False}], ids=["full", "off", "no_sums"]
)
@pytest.mark.parametrize("later", ["store", "update"])
def test_what_is_kept_is_written_before_what_waits_at_a_gate(make_rig, rng, later, options):
    rig = failing(make_rig, nth=1, hold_s=30.0, pools=(1, 1), chunk_count=3, **options)
    value, kept, new = (random_chunk(rng) for _ in range(3))
    rig.store({0: value}).wait(20)
    assert outcome(rig.store({0: kept}, mask=1)) is not None
    wanted = [kept[0], *value[1:]]
    gate = rig.executor.gate()
    gated, targets = rig.fetch([0], gate=gate)
    if later == "store":
        last = [new[0], *value[1:]]
        behind = rig.store({0: new}, mask=1)
    else:
        last = [section.copy() for section in wanted]
        grad = rng.standard_normal(NUMEL).astype(np.float32)
        adamw(records.Format.SPLIT, last, grad, hyper_record()[0])
        behind = rig.update({0: grad})
    rig.executor.recover().wait(20)  # does not wait for the gate
    assert rig.executor.stats().kept_chunks == 0
    assert not gate.escaped
    assert not gated.done
    assert not behind.done
    assert gate.open([])
    for ticket in (gated, behind):
        ticket.wait(20)
    assert same(targets[0], wanted)
    assert same(rig.read(0), last)
    every_slot_is_back(rig, rng)
    assert same(rig.read(0), last)


@pytest.mark.parametrize("later", ["store", "update"])
def test_a_gate_that_opens_while_a_recovery_writes_lets_nothing_pass_it(make_rig, rng, later):
    """No call waits in between: whatever the threads do, the values submitted last are stored."""
    rig = failing(make_rig, nth=1, hold_s=30.0, pools=(1, 1), chunk_count=3)
    value, kept, new = (random_chunk(rng) for _ in range(3))
    rig.store({0: value}).wait(20)
    assert outcome(rig.store({0: kept}, mask=0b0101)) is not None
    gate = rig.executor.gate()
    rig.fetch([0], gate=gate)
    last = [new[0], value[1], kept[2], value[3]]
    behind = rig.store({0: new}, mask=1)
    if later == "update":
        grad = rng.standard_normal(NUMEL).astype(np.float32)
        adamw(
            records.Format.SPLIT,
            last := [section.copy() for section in last],
            grad,
            hyper_record()[0],
        )
        behind = rig.update({0: grad})
    again = rig.executor.recover()
    assert gate.open([])
    behind.wait(20)
    again.wait(20)
    assert same(rig.read(0), last)
    assert rig.executor.stats().kept_chunks == 0
    every_slot_is_back(rig, rng)


def every_slot_is_back(rig, rng):
    """Work that needs all slots of pools of one each, on chunks that hold nothing else."""
    values = {i: random_chunk(rng) for i in (1, 2)}
    tickets = [
        rig.store({1: values[1]}),
        rig.store({2: values[2]}),
        rig.store({1: values[2]}, mask=1),
    ]
    for ticket in tickets:
        ticket.wait(20)
    assert same(rig.read(1), [values[2][0], *values[1][1:]])
    assert same(rig.read(2), values[2])


def test_resident_sections_of_a_chunk_that_keeps_others_can_be_stored(make_rig, rng):
    rig = failing(make_rig, resident=(0, 3))
    first, second = random_chunk(rng), random_chunk(rng)
    assert outcome(rig.store({0: first})) is not None
    assert rig.executor.stats().kept_chunks == 1
    rig.store({0: second}, mask=0b1001).wait(20)
    wanted = [second[0], first[1], first[2], second[3]]
    assert same(rig.read(0), wanted)
    assert rig.executor.stats().kept_chunks == 1
    rig.executor.recover().wait(20)
    assert same(rig.read(0), wanted)
    assert not rig.executor.invalid(rig.ids).any()


def test_a_store_that_was_refused_is_lost_and_said_to_be_and_what_was_kept_stays(make_rig, rng):
    rig = failing(make_rig)
    first, second = random_chunk(rng), random_chunk(rng)
    tickets = [rig.store({0: first}, mask=0b0011), rig.store({0: second}, mask=0b1100)]
    assert all(isinstance(outcome(ticket), DeviceFailedError) for ticket in tickets)
    assert rig.executor.invalid(rig.ids)[0] == 0b1100
    ticket, targets = rig.fetch([0], mask=0b0011)
    ticket.wait()
    assert same(targets[0][:2], first[:2])
    with pytest.raises(DeviceFailedError):
        rig.read(0)
    rig.executor.recover().wait(20)
    assert rig.executor.invalid(rig.ids)[0] == 0b1100
    rig.store({0: second}, mask=0b1100).wait(20)
    assert same(rig.read(0), [*first[:2], *second[2:]])


def test_dropping_a_chunk_frees_what_was_kept(make_rig, rng):
    rig = failing(make_rig, pools=(0, 1))
    values = {i: random_chunk(rng) for i in range(2)}
    assert outcome(rig.store({0: values[0]})) is not None
    rig.executor.drop(rig.ids[:1])
    assert rig.executor.stats().kept_chunks == 0
    rig.executor.recover().wait(20)
    rig.store({1: values[1]}).wait(20)  # needs the only slot
    assert same(rig.read(1), values[1])
    rig.ids[0] = rig.executor.define(rig.chunks[:1])[0]
    rig.store({0: values[0]}).wait(20)
    assert same(rig.read(0), values[0])


def test_when_every_slot_is_kept_jobs_fail_instead_of_waiting_for_ever(make_rig, rng):
    rig = failing(make_rig, persistent=True, pools=(1, 2), chunk_count=8)
    values = {i: random_chunk(rng) for i in range(8)}
    tickets = [rig.store({i: values[i]}) for i in range(8)]
    errors = [outcome(ticket) for ticket in tickets]
    assert all(isinstance(error, DeviceFailedError) for error in errors)
    kept = [i for i, invalid in enumerate(rig.executor.invalid(rig.ids)) if not invalid]
    assert 1 <= len(kept) <= 2
    assert rig.executor.stats().kept_chunks == len(kept)
    for i in range(8):
        ticket, targets = rig.fetch([i])
        error = outcome(ticket)
        assert (error is None) == (i in kept)
        assert error is not None or same(targets[0], values[i])
    rig.executor.wait_all(20)


def test_jobs_that_wait_for_a_slot_fail_when_the_last_one_is_kept(make_rig, rng):
    rig = failing(make_rig, pools=(0, 1), chunk_count=4)
    values = {i: random_chunk(rng) for i in range(4)}
    waiting = [rig.store({0: values[0]}), *(rig.fetch([i])[0] for i in range(1, 4))]
    errors = [outcome(ticket) for ticket in waiting]
    assert all(isinstance(error, DeviceFailedError) for error in errors)
    rig.executor.recover().wait(20)
    rig.store(values).wait(20)
    assert all(same(rig.read(i), values[i]) for i in values)


def test_an_update_of_resident_states_takes_gradients_that_were_kept(make_rig, rng):
    refuses = aio.Seam(fault=aio.Fault("write", 0, persistent=True))
    rig = make_rig(spilled=True, resident=(0, 1, 2, 3), seam=refuses)
    states = random_chunk(rng)
    grad = rng.integers(0x3C00, 0x3F00, NUMEL).astype(np.uint16)
    rig.store({0: [*states, grad]}, mask=0b1111).wait(20)
    kept = rig.store({0: [*states, grad]}, mask=0b10000)
    assert isinstance(outcome(kept), DeviceFailedError)
    rig.update({0: None}).wait(20)
    assert not np.array_equal(rig.read(0)[1], states[1])


@pytest.mark.parametrize("wait", [True, False])
def test_closing_with_something_kept_ends(make_rig, rng, wait):
    rig = failing(make_rig, persistent=True)
    assert outcome(rig.store({0: random_chunk(rng)})) is not None
    rig.executor.close(wait=wait)
    assert rig.executor.stats().drives[0].failed != ""


def test_several_drives_recover_at_once(make_rig, rng):
    rig = failing(make_rig, persistent=True, drive_count=2, chunk_count=4, pools=(2, 4))
    values = {i: random_chunk(rng) for i in range(4)}
    for i in (0, 1):
        assert outcome(rig.store({i: values[i]})) is not None
    assert all(drive.failed for drive in rig.executor.stats().drives)
    ticket = rig.executor.recover()
    assert isinstance(outcome(ticket), DeviceFailedError)
    assert rig.executor.stats().kept_chunks == 2
    assert all(same(rig.read(i), values[i]) for i in (0, 1))
