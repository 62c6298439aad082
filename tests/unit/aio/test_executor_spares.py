"""A failed write is redirected to a reserved extent, and no job fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from infinity import aio
from infinity._src.cabi import records
from infinity.aio._spares import SPARE
from infinity.errors import AioClosedError, DeviceFailedError, SwapFullError
from tests.unit.aio.rig import NUMEL, adamw, hyper_record, outcome, random_chunk, same, until

RUN = 12 * NUMEL


def bad_block(at: int, *, drive: int | None = None, nth: int = 0, **options) -> aio.Seam:
    """A block of the file that refuses every write, from the nth on."""
    fault = aio.Fault("write", nth, persistent=True, drive=drive, start=at, stop=at + 1, **options)
    return aio.Seam(fault=fault)


def updated(value, grad, step=1):
    """The chunk after AdamW."""
    adamw(records.Format.SPLIT, value[:4], grad, hyper_record(step)[0])
    return value


@pytest.mark.parametrize(
    "fault", [{}, {"errno": errno.ENOSPC}, {"kind": "zero"}], ids=str
)
def test_a_whole_write_goes_to_a_spare_range(make_rig, rng, fault):
    # In the third block of chunk 1, so that others have been written, and are in flight.
    rig = make_rig(spares=2, seam=bad_block(RUN + 20_000, **fault))
    values = {i: random_chunk(rng) for i in range(6)}
    rig.store(values).wait(20)
    assert all(same(rig.read(i), values[i]) for i in values)
    grads = {i: rng.standard_normal(NUMEL).astype(np.float32) for i in values}
    rig.update(grads).wait(20)
    assert all(same(rig.read(i), updated(values[i], grads[i])) for i in values)
    stats = rig.executor.stats()
    assert (stats.moved_writes, stats.kept_chunks, stats.drives[0].failed) == (1, 0, "")
    (move,) = rig.executor.take_moved_writes()
    assert (move.chunk, move.key, move.drive, move.offset) == (rig.ids[1], 1001, 0, RUN)
    assert (move.to_drive, move.to_offset, move.size_bytes) == (0, 6 * RUN, RUN)
    assert isinstance(move.error, (DeviceFailedError, SwapFullError))
    assert rig.executor.take_moved_writes() == []
    assert rig.executor.look(rig.ids[1:2])[0]["file_offset"] == 6 * RUN
    assert [int(spare["offset"]) for spare in rig.executor.take_spares()] == [7 * RUN]


def test_without_a_spare_range_it_is_kept_as_before(make_rig, rng):
    rig = make_rig(spares=1, seam=bad_block(RUN))
    rig.executor.take_spares()
    value = random_chunk(rng)
    with pytest.raises(DeviceFailedError):
        rig.store({1: value}).wait(20)
    assert rig.executor.stats().kept_chunks == 1
    assert same(rig.read(1), value)


def test_a_spare_range_given_afterwards_takes_what_was_kept(make_rig, rng):
    rig = make_rig(spares=1, seam=bad_block(RUN))
    spares, value = rig.executor.take_spares(), random_chunk(rng)
    with pytest.raises(DeviceFailedError):
        rig.store({1: value}).wait(20)
    rig.executor.add_spares(spares)
    rig.executor.recover().wait(20)
    assert rig.executor.stats().kept_chunks == 0
    assert same(rig.read(1), value)
    assert rig.executor.stats().bytes_read > 0


@pytest.mark.parametrize("own", [0, 2], ids=["no spare of its own", "its own are bad too"])
@pytest.mark.parametrize("versioned", [False, True])
def test_a_drive_that_refuses_all_writes_gives_its_chunks_to_another(make_rig, rng, own, versioned):
    seam = aio.Seam(fault=aio.Fault("write", 0, persistent=True, drive=0))
    rig = make_rig(
        drive_count=2, chunk_count=4, spares=(own, 6), versioned=versioned, seam=seam
    )
    values = {i: random_chunk(rng) for i in range(4)}
    rig.store(values).wait(20)
    for step in (1, 2):
        if versioned:
            rig.executor.commit(rig.ids)
        grads = {i: rng.standard_normal(NUMEL).astype(np.float32) for i in values}
        rig.update(grads, step=step).wait(20)
        assert all(same(rig.read(i), updated(values[i], grads[i], step)) for i in values)
    now = rig.executor.look(rig.ids)
    assert now["drive"].tolist() == [1, 1, 1, 1]
    assert not any(drive.failed for drive in rig.executor.stats().drives)


def test_a_drive_is_marked_when_no_range_is_left(make_rig, rng):
    seam = aio.Seam(fault=aio.Fault("write", 0, persistent=True))
    rig = make_rig(drive_count=2, chunk_count=2, spares=4, seam=seam)
    value = random_chunk(rng)
    with pytest.raises(DeviceFailedError):
        rig.store({0: value}).wait(20)
    # It used one extent of its own drive and one of the other; not all.
    assert len(rig.executor.take_spares()) == 6
    assert same(rig.read(0), value)
    assert [bool(drive.failed) for drive in rig.executor.stats().drives] == [False, True]


def test_a_version_that_moved_is_rolled_back_and_forth(make_rig, rng):
    # The second file has the same offsets as the first: the second write to the block is that of
    # the new version.
    rig = make_rig(spares=2, versioned=True, block_bytes=1 << 20, seam=bad_block(0, nth=1))
    value, grad = random_chunk(rng), np.ones(NUMEL, np.float32)
    first = [section.copy() for section in value]
    rig.store({0: value}).wait(20)
    rig.executor.commit(rig.ids)
    for _ in range(2):
        rig.update({0: grad}).wait(20)
        assert same(rig.read(0), updated([section.copy() for section in first], grad))
        rig.executor.rollback(rig.ids)
        assert same(rig.read(0), first)
    (move,) = rig.executor.take_moved_writes()
    assert (move.file, move.to_file, move.to_offset) == (1, 0, 6 * RUN)
    assert rig.executor.look(rig.ids[:1])[0]["other_offset"] == 6 * RUN


def test_spilled_gradients_move_with_the_update_that_reads_them(make_rig, rng):
    rig = make_rig(spares=2, spilled=True, block_bytes=1 << 20, seam=bad_block(0, nth=1))
    grad = rng.integers(0x3C00, 0x3F00, NUMEL).astype(np.uint16)
    value = [*random_chunk(rng), grad]
    rig.store({0: value}, mask=31).wait(20)
    rig.update({0: None}).wait(20)
    updated(value, grad)
    ticket, targets = rig.fetch([0], mask=31)
    ticket.wait(20)
    assert same(targets[0], value)
    assert rig.executor.stats().moved_writes == 1


def test_spilled_gradients_of_a_version_move_alone(make_rig, rng):
    at = 4 * 2 * NUMEL + 2 * 2 * NUMEL  # behind the four sections of states, in the first file
    rig = make_rig(spares=2, spilled=True, versioned=True, seam=bad_block(at))
    grad = rng.integers(0x3C00, 0x3F00, NUMEL).astype(np.uint16)
    states = random_chunk(rng)
    rig.store({0: [*states, grad]}, mask=15).wait(20)
    rig.executor.commit(rig.ids)
    rig.store({0: [*states, grad]}, mask=16).wait(20)
    rig.update({0: None}).wait(20)
    updated(states, grad)
    ticket, targets = rig.fetch([0], mask=31)
    ticket.wait(20)
    assert same(targets[0], [*states, grad])
    assert rig.executor.stats().moved_writes == 1


def bad_place() -> aio.Seam:
    """The place of chunk 0, which refuses every write."""
    return aio.Seam(fault=aio.Fault("write", 0, persistent=True, start=0, stop=RUN))


def merged(first, second, mask):
    """The sections of `second` that the mask names, and the others of `first`."""
    pairs = enumerate(zip(first, second, strict=True))
    return [two if mask >> s & 1 else one for s, (one, two) in pairs]


# The small slots hold one section of two bytes; the last pools have none of these.
POOLS = [(3, 3), (1, 1), (0, 1)]


@pytest.mark.parametrize("pools", POOLS, ids=str)
@pytest.mark.parametrize("mask", [0b0001, 0b0010, 0b1010])
@pytest.mark.parametrize("versioned", [False, True])
def test_a_part_goes_with_the_rest_of_its_place(make_rig, rng, pools, mask, versioned):
    rig = make_rig(spares=2, pools=pools, versioned=versioned)
    first, second = random_chunk(rng), random_chunk(rng)
    rig.store({0: first, 1: first}).wait(20)
    rig.executor.set_seam(bad_place())
    rig.store({0: second, 1: second}, mask=mask).wait(20)
    wanted = merged(first, second, mask)
    assert same(rig.read(0), wanted)
    (move,) = rig.executor.take_moved_writes()
    assert (move.offset, move.to_offset, move.size_bytes) == (0, 6 * RUN, RUN)
    assert rig.executor.stats().kept_chunks == 0
    assert rig.executor.fault() is None
    grad = rng.standard_normal(NUMEL).astype(np.float32)
    rig.update({0: grad, 1: grad}).wait(20)
    for index in (0, 1):
        assert same(rig.read(index), updated([section.copy() for section in wanted], grad))


def test_a_part_whose_range_was_refused_too_goes_to_another_drive(make_rig, rng):
    rig = make_rig(drive_count=2, spares=1)
    first, second = random_chunk(rng), random_chunk(rng)
    rig.store({0: first}).wait(20)
    rig.executor.set_seam(aio.Seam(fault=aio.Fault("write", 0, persistent=True, drive=0)))
    rig.store({0: second}, mask=1).wait(20)
    assert same(rig.read(0), [second[0], *first[1:]])
    assert [move.to_drive for move in rig.executor.take_moved_writes()] == [0, 1]


def test_a_part_of_an_update_takes_gradients_along_that_it_did_not_read(make_rig, rng):
    rig = make_rig(spares=2, spilled=True)
    value = [*random_chunk(rng), rng.integers(0x3C00, 0x3F00, NUMEL).astype(np.uint16)]
    rig.store({0: value}, mask=31).wait(20)
    rig.executor.set_seam(bad_place())
    grad = rng.standard_normal(NUMEL).astype(np.float32)
    rig.update({0: grad}).wait(20)
    ticket, targets = rig.fetch([0], mask=31)
    ticket.wait(20)
    assert same(targets[0], updated(value, grad))
    assert rig.executor.stats().moved_writes == 1


def spoil(rig, how):
    """Damage the last section of chunk 0 on the drive. Returns what mends it."""
    path = Path(f"/proc/self/fd/{rig.files[0].fd}")
    with path.open("r+b", buffering=0) as file:
        whole = file.read()
        if how == "wrong":
            os.pwrite(file.fileno(), bytes([whole[RUN - 1] ^ 1]), RUN - 1)
        else:
            file.truncate(RUN - 4096)
        os.fsync(file.fileno())

    def mend():
        with path.open("r+b", buffering=0) as file:
            file.write(whole)
            os.fsync(file.fileno())

    return mend


@pytest.mark.parametrize("pools", POOLS, ids=str)
@pytest.mark.parametrize("how", ["wrong", "cut off"])
def test_a_part_is_kept_if_the_other_sections_cannot_be_read(make_rig, rng, pools, how):
    rig = make_rig(spares=2, pools=(pools[0], 1 + pools[1]))
    first, second = random_chunk(rng), random_chunk(rng)
    rig.store({0: first}).wait(20)
    mend = spoil(rig, how)
    rig.executor.set_seam(bad_place())
    with pytest.raises(DeviceFailedError, match="write"):
        rig.store({0: second}, mask=1).wait(20)
    stats = rig.executor.stats()
    assert (stats.moved_writes, stats.kept_chunks, stats.rereads) == (0, 1, 1)
    assert "write" in stats.drives[0].failed
    assert rig.executor.look(rig.ids[:1])[0]["file_offset"] == 0
    assert not rig.executor.invalid(rig.ids).any()
    ticket, targets = rig.fetch([0], mask=1)
    ticket.wait(20)
    assert same(targets[0][:1], second[:1])
    rig.executor.set_seam(aio.Seam())
    mend()
    assert same(rig.read(0), [second[0], *first[1:]])
    rig.executor.recover().wait(20)
    assert same(rig.read(0), [second[0], *first[1:]])
    assert rig.executor.stats().kept_chunks == 0
    assert len(rig.executor.take_spares()) == 2


def test_a_part_that_was_kept_moves_when_a_spare_range_is_given(make_rig, rng):
    rig = make_rig(spares=1)
    spares = rig.executor.take_spares()
    first, second = random_chunk(rng), random_chunk(rng)
    rig.store({0: first}).wait(20)
    rig.executor.set_seam(bad_place())
    with pytest.raises(DeviceFailedError):
        rig.store({0: second}, mask=2).wait(20)
    rig.executor.add_spares(spares)
    rig.executor.recover().wait(20)
    assert rig.executor.stats().moved_writes == 1
    assert same(rig.read(0), merged(first, second, 2))


def test_a_part_is_kept_where_no_slot_is_large_enough(make_rig, rng):
    rig = make_rig(drive_count=2, spares=1, pools=(2, 1))
    spares = rig.executor.take_spares()
    first, second = random_chunk(rng), random_chunk(rng)
    rig.store({0: first}).wait(20)
    rig.executor.set_seam(aio.Seam(fault=aio.Fault("write", 0, persistent=True)))
    with pytest.raises(DeviceFailedError):
        rig.store({1: first}).wait(20)  # keeps the only large slot
    rig.executor.add_spares(spares)
    with pytest.raises(DeviceFailedError):
        rig.store({0: second}, mask=1).wait(20)
    assert rig.executor.stats().kept_chunks == 2
    rig.executor.set_seam(aio.Seam())
    rig.executor.recover().wait(20)
    assert same(rig.read(0), [second[0], *first[1:]])
    assert same(rig.read(1), first)
    assert len(rig.executor.take_spares()) == 2


@pytest.mark.parametrize("pools", [(1, 1), (3, 1), (2, 2), (0, 2)], ids=str)
def test_parts_that_fail_all_at_once_share_few_slots(make_rig, rng, pools):
    rig = make_rig(drive_count=2, chunk_count=8, spares=(0, 4), pools=pools)
    values = {i: random_chunk(rng) for i in range(8)}
    rig.store(values).wait(20)
    rig.executor.set_seam(
        aio.Seam(delay_us_max=500, fault=aio.Fault("write", 0, persistent=True, drive=0))
    )
    fresh = {i: random_chunk(rng) for i in values}
    grads = {i: rng.standard_normal(NUMEL).astype(np.float32) for i in values}
    tickets = [rig.store(fresh, mask=1), rig.update(grads)]
    fetched, targets = rig.fetch(list(values))
    for ticket in (*tickets, fetched):
        ticket.wait(20)
    for i, target in zip(values, targets, strict=True):
        assert same(target, updated([fresh[i][0], *values[i][1:]], grads[i]))
    assert rig.executor.stats().moved_writes == 4


def test_a_part_moves_where_the_rest_are_zeros(make_rig, rng):
    rig = make_rig(spares=1, zeros=0b1100, seam=bad_block(0))
    value = random_chunk(rng)
    rig.store({0: value}, mask=3).wait(20)
    zeros = np.zeros(NUMEL, np.float32)
    assert same(rig.read(0), [value[0], value[1], zeros, zeros])
    assert rig.executor.stats().moved_writes == 1


@pytest.mark.parametrize("job", ["update", "store"])
def test_what_a_chunk_keeps_is_not_overtaken_by_a_version_on_another_drive(make_rig, rng, job):
    rig = make_rig(drive_count=2, chunk_count=2, spares=(0, 2), versioned=True)
    rig.store({0: random_chunk(rng)}).wait(20)
    rig.executor.commit(rig.ids)
    rig.executor.set_seam(aio.Seam(fault=aio.Fault("write", 0, persistent=True)))
    kept = random_chunk(rng)
    with pytest.raises(DeviceFailedError):
        rig.store({0: kept}).wait(20)
    rig.executor.set_seam(aio.Seam())
    now = rig.executor.look(rig.ids[:1])[0]
    # The drive of the next version accepts writes; the drive of the kept version does not.
    assert (now["drive"], now["other_drive"]) == (1, 0)
    rig.executor.commit(rig.ids)
    grads = {0: np.ones(NUMEL, np.float32)}
    ticket = rig.update(grads) if job == "update" else rig.store({0: random_chunk(rng)})
    assert isinstance(outcome(ticket), DeviceFailedError)
    rig.executor.rollback(rig.ids)
    assert same(rig.read(0), kept)
    rig.executor.recover().wait(20)
    assert rig.executor.stats().kept_chunks == 0
    assert same(rig.read(0), kept)
    rig.update(grads).wait(20)
    assert same(rig.read(0), updated(kept, grads[0]))


@pytest.mark.parametrize(
    "wrong", [{"drive": 1}, {"drive": -1}, {"file": 3}, {"offset": 7}, {"bytes": 0}, {"bytes": 512}]
)
def test_a_spare_range_that_cannot_be_is_refused(make_rig, wrong):
    rig = make_rig()
    spare = np.zeros(1, dtype=SPARE)
    spare["bytes"] = 4096
    for name, value in wrong.items():
        spare[name] = value
    with pytest.raises(ValueError, match="reserved extent"):
        rig.executor.add_spares(spare)
    assert len(rig.executor.take_spares()) == 0


def test_a_file_with_a_spare_range_is_not_taken_back(make_rig):
    rig = make_rig(versioned=True)
    spare = np.zeros(1, dtype=SPARE)
    spare["file"], spare["offset"], spare["bytes"] = 1, 6 * RUN, RUN
    rig.executor.drop(rig.ids)
    rig.executor.add_spares(spare)
    with pytest.raises(ValueError, match="cannot remove"):
        rig.executor.remove_file(0, 1)
    rig.executor.take_spares()
    rig.executor.remove_file(0, 1)


@pytest.mark.parametrize("mask", [15, 1])
def test_closing_amid_a_move_leaves_nothing(make_rig, rng, mask):
    rig = make_rig(spares=6, pools=(3, 1))
    rig.store({i: random_chunk(rng) for i in range(6)}).wait(20)
    rig.executor.set_seam(
        aio.Seam(delay_us_max=3000, fault=aio.Fault("write", 0, persistent=True, stop=6 * RUN))
    )
    ticket = rig.store({i: random_chunk(rng) for i in range(6)}, mask=mask)
    until(lambda: rig.executor.stats().drives[0].errors)
    rig.executor.close(wait=False)
    assert isinstance(outcome(ticket), AioClosedError | DeviceFailedError | None)
    assert rig.executor.stats().extra["submissions_live"] == 0
