"""UPDATE jobs that read other sections than they write: a section 0 that is given, gradients that
lie on the drive."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from infinity import aio
from infinity._src.cabi import records
from infinity.errors import ChecksumError, DeviceFailedError
from tests.unit.aio.rig import NUMEL, adamw, hyper_record, outcome, random_chunk, same


def random_grad(rng) -> np.ndarray:
    """Plausible bf16 values."""
    return (rng.integers(0x3C00, 0x3F00, NUMEL) | rng.integers(0, 2, NUMEL) << 15).astype(np.uint16)


def spilled_chunk(rng):
    """A chunk with its gradient."""
    return [*random_chunk(rng), random_grad(rng)]


def updated(value, grad, step: int = 1):
    """The chunk after its update."""
    after = [section.copy() for section in value]
    adamw(records.Format.SPLIT, after[:4], grad, hyper_record(step)[0])
    return after


def moved(rig, before) -> tuple[int, int]:
    """Bytes read and written per element since the stats `before`."""
    stats = rig.executor.stats()
    return (stats.bytes_read - before.bytes_read) // NUMEL, (
        stats.bytes_written - before.bytes_written
    ) // NUMEL


def test_a_given_section_is_written_and_not_read(make_rig, rng):
    rig = make_rig()
    values, grads = (
        {i: random_chunk(rng) for i in range(3)},
        {i: random_grad(rng) for i in range(3)},
    )
    rig.store(values).wait()
    # not what lies on the drive: it must not matter
    given = {i: random_chunk(rng)[0] for i in range(3)}
    target = np.zeros((3, NUMEL), dtype=np.uint16)
    before = rig.executor.stats()
    ticket = rig.update(grads, given=given, target=target)
    ticket.wait_filled(20)
    for i in range(3):
        given[i][:] = 0  # its memory may be reused
    ticket.wait(20)
    assert moved(rig, before) == (3 * 10, 3 * 12)


@pytest.mark.parametrize("verify", ["full", "sample", "off"])
def test_an_update_with_a_given_section_is_as_if_it_had_been_there(make_rig, rng, verify):
    rig = make_rig(verify=verify)
    value, grad, hi = random_chunk(rng), random_grad(rng), random_chunk(rng)[0]
    rig.store({0: value}).wait()
    target = np.zeros((1, NUMEL), dtype=np.uint16)
    rig.update({0: grad}, given={0: hi}, target=target).wait(20)
    wanted = updated([hi, *value[1:]], grad)
    assert target[0].tobytes() == wanted[0].tobytes()
    assert same(rig.read(0), wanted)
    rig.update({0: grad}, step=2).wait(20)  # its checksums are those of what was written
    assert same(rig.read(0), updated(wanted, grad, 2))


def test_what_is_given_may_be_where_the_result_goes(make_rig, rng):
    rig = make_rig()
    value, grad = random_chunk(rng), random_grad(rng)
    rig.store({0: value}).wait()
    gathered = value[0].copy()[None]
    rig.update({0: grad}, given={0: gathered[0]}, target=gathered).wait(20)
    wanted = updated(value, grad)
    assert gathered[0].tobytes() == wanted[0].tobytes()
    assert same(rig.read(0), wanted)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("nth", [0, 3, 4])
def test_a_flip_is_mended_by_another_read_and_what_was_given_is_given_again(
    make_rig, rng, nth, in_place
):
    rig = make_rig(seam=aio.Seam(fault=aio.Fault("read", nth, kind="bitflip")), piece=128)
    value, grad = random_chunk(rng), random_grad(rng)
    rig.store({0: value}).wait()
    gathered = value[0].copy()[None]
    target = gathered if in_place else np.zeros_like(gathered)
    rig.update({0: grad}, given={0: gathered[0]}, target=target).wait(20)
    wanted = updated(value, grad)
    assert target[0].tobytes() == wanted[0].tobytes()
    assert same(rig.read(0), wanted)
    assert rig.executor.stats().rereads == 1


def test_what_lies_wrong_on_the_drive_fails_but_not_in_what_is_given(make_rig, rng):
    rig = make_rig()
    value, grad = random_chunk(rng), random_grad(rng)
    rig.store({0: value, 1: value}).wait()
    rig.sums[0, 0] += 1  # of hi, which is given
    rig.sums[1, 1] += 1
    rig.update({0: grad}, given={0: value[0]}).wait(20)
    assert same(rig.read(0), updated(value, grad))
    with pytest.raises(ChecksumError):
        rig.update({1: grad}, given={1: value[0]}).wait(20)
    assert rig.executor.invalid(rig.ids[:2]).tolist() == [0, 15]


@pytest.mark.parametrize("resident", [(0,), (0, 1, 2, 3)])
def test_a_resident_section_is_as_good_as_a_given_one(make_rig, rng, resident):
    rig = make_rig(resident=resident)
    value, grad = random_chunk(rng), random_grad(rng)
    rig.store({0: value}).wait()
    rig.update({0: grad}, given={0: value[0]}).wait(20)
    assert same(rig.read(0), updated(value, grad))


def test_an_update_that_reads_nothing_still_writes(make_rig, rng):
    rig = make_rig(resident=(1, 2, 3))
    value, grad = random_chunk(rng), random_grad(rng)
    rig.store({0: value}).wait()
    before = rig.executor.stats()
    rig.update({0: grad}, given={0: value[0]}).wait(20)
    assert moved(rig, before) == (0, 2)
    assert same(rig.read(0), updated(value, grad))


def test_given_without_an_address_or_to_another_kind_is_refused(make_rig, rng):
    rig = make_rig()
    for kind, address, mask in (
        (records.JobKind.UPDATE, 0, 0),
        (records.JobKind.FETCH, 8, 1),
        (records.JobKind.STORE, 8, 1),
    ):
        job = np.zeros(1, dtype=records.JOB)
        job["chunk"], job["kind"], job["base"], job["mask"] = (
            rig.ids[0],
            kind,
            -1,
            aio.MASK_PARAM_IN_MEMORY | mask,
        )
        job["ptr"][0, 1] = address
        with pytest.raises(ValueError, match="MASK_PARAM_IN_MEMORY"):
            rig.executor.submit(job, priority=aio.Priority.DEMAND)


def test_a_lost_section_that_is_given_is_lost_no_more(make_rig, rng):
    fault = aio.Fault("write", 1, errno=errno.EIO)
    rig = make_rig(block_bytes=1 << 20, seam=aio.Seam(fault=fault))
    value, grad = random_chunk(rng), random_grad(rng)
    rig.store({0: value}).wait()
    assert outcome(rig.store({1: value})) is not None  # marks the drive
    assert outcome(rig.store({0: value}, mask=1)) is not None  # refused
    assert rig.executor.invalid(rig.ids)[0] == 1
    rig.executor.recover().wait(20)
    with pytest.raises(DeviceFailedError):
        rig.read(0)
    rig.update({0: grad}, given={0: value[0]}).wait(20)
    assert rig.executor.invalid(rig.ids)[0] == 0
    assert same(rig.read(0), updated(value, grad))


def test_spilled_gradients_are_read_and_not_written(make_rig, rng):
    rig = make_rig(spilled=True)
    value = spilled_chunk(rng)
    rig.store({0: value}, mask=31).wait()
    before = rig.executor.stats()
    rig.update({0: None}).wait(20)
    assert moved(rig, before) == (14, 12)
    wanted = updated(value, value[4])
    ticket, targets = rig.fetch([0], mask=31)
    ticket.wait(20)
    assert same(targets[0], wanted)  # the gradient too is as it was


def test_spilled_gradients_that_no_segment_wants_are_not_read(make_rig, rng):
    rig = make_rig(spilled=True)
    value, grad = spilled_chunk(rng), random_grad(rng)
    rig.store({0: value}).wait()  # never stored a gradient: what lies there is no gradient
    before = rig.executor.stats()
    rig.update({0: grad}, given={0: value[0]}).wait(20)
    assert moved(rig, before) == (10, 12)
    assert same(rig.read(0)[:4], updated(value, grad)[:4])


def test_a_spilled_gradient_may_be_resident_and_the_gradient_alone_on_the_drive(make_rig, rng):
    for resident, reads, writes in (((4,), 12, 12), ((0, 1, 2, 3), 2, 0)):
        rig = make_rig(spilled=True, resident=resident)
        value = spilled_chunk(rng)
        rig.store({0: value}, mask=31).wait()
        before = rig.executor.stats()
        rig.update({0: None}).wait(20)
        assert moved(rig, before) == (reads, writes)
        assert same(rig.read(0)[:4], updated(value, value[4])[:4])


def test_a_failed_write_keeps_what_it_wrote_and_the_gradient_stays_on_the_drive(make_rig, rng):
    fault = aio.Fault("write", 1, errno=errno.EIO)
    rig = make_rig(spilled=True, block_bytes=1 << 20, seam=aio.Seam(fault=fault))
    value = spilled_chunk(rng)
    rig.store({0: value}, mask=31).wait()
    assert outcome(rig.update({0: None})) is not None
    assert rig.executor.stats().kept_chunks == 1
    wanted = updated(value, value[4])
    for mask in (31, 16, 15):
        ticket, targets = rig.fetch([0], mask=mask)
        ticket.wait(20)
        assert all(
            targets[0][s].tobytes() == wanted[s].tobytes() for s in range(5) if mask >> s & 1
        )
    rig.executor.recover().wait(20)
    rig.update({0: None}, step=2).wait(20)
    ticket, targets = rig.fetch([0], mask=31)
    ticket.wait(20)
    assert same(targets[0], updated(wanted, value[4], 2))


def test_an_update_that_fails_does_not_take_the_gradient_with_it(make_rig, rng):
    rig = make_rig(spilled=True)
    value = spilled_chunk(rng)
    rig.store({0: value}, mask=31).wait()
    rig.sums[0, 2] += 1
    with pytest.raises(ChecksumError):
        rig.update({0: None}).wait(20)
    assert rig.executor.invalid(rig.ids)[0] == 15
    ticket, targets = rig.fetch([0], mask=16)
    ticket.wait(20)
    assert targets[0][4].tobytes() == value[4].tobytes()
    rig.store({0: value}).wait()
    rig.update({0: None}).wait(20)
    assert same(rig.read(0)[:4], updated(value, value[4])[:4])


def test_a_flip_where_a_spilled_gradient_is_read_is_seen_and_mended(make_rig, rng):
    rig = make_rig(spilled=True, seam=aio.Seam(fault=aio.Fault("read", 6, kind="bitflip")))
    value = spilled_chunk(rng)
    rig.store({0: value}, mask=31).wait()
    rig.update({0: None}).wait(20)
    assert rig.executor.stats().rereads == 1
    assert same(rig.read(0)[:4], updated(value, value[4])[:4])


@pytest.mark.parametrize("spilled", [False, True])
def test_updates_of_neighbours_move_what_each_of_them_has(make_rig, rng, spilled):
    rig = make_rig(spilled=spilled, block_bytes=1 << 20, pools=(3, 6))
    values = {i: spilled_chunk(rng) if spilled else random_chunk(rng) for i in range(6)}
    rig.store(values, mask=31 if spilled else 15).wait()
    grads = {i: None if spilled and i % 2 else random_grad(rng) for i in range(6)}
    rig.update(grads, given={i: values[i][0] for i in (1, 2, 5)}).wait(20)
    for i in range(6):
        grad = values[i][4] if grads[i] is None else grads[i]
        assert same(rig.read(i)[:4], updated(values[i], grad)[:4])
