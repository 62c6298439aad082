"""The seam's faults that report success, or come late; and arming an executor that runs."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from infinity.aio import Fault, Seam
from infinity.errors import AioError, ChecksumError, DeviceFailedError
from tests.unit.aio.rig import RUN_BYTES, outcome, random_chunk, same

BLOCK = 8192


def on_drive(rig: Any, index: int = 0) -> bytes:
    """The run of a chunk of a rig with one drive, as the file has it."""
    fd = os.open(f"/proc/self/fd/{rig.files[0].fd}", os.O_RDONLY)
    try:
        return os.pread(fd, RUN_BYTES, index * RUN_BYTES)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kind": "mislaid"}, "kind='mislaid'"),
        ({"kind": "late", "late_s": -1.0}, "late_s=-1.0"),
        ({"kind": "late", "late_s": float("nan")}, "late_s=nan"),
        ({"drive": -1}, "drive=-1"),
    ],
)
def test_a_fault_that_is_none_is_refused(values, said):
    with pytest.raises(ValueError, match=said):
        Fault("read", 0, **values)


def test_the_next_read_detects_a_stale_write(make_rig, rng):
    rig = make_rig(seam=Seam(fault=Fault("write", 7, kind="stale")))
    old, new = random_chunk(rng), random_chunk(rng)
    rig.store({0: old}).wait()
    before = on_drive(rig)
    rig.store({0: new}).wait()
    after = on_drive(rig)
    written = [before[at : at + BLOCK] != after[at : at + BLOCK]
               for at in range(0, RUN_BYTES, BLOCK)]  # fmt: skip
    assert written.count(False) == 1
    assert isinstance(outcome(rig.fetch([0])[0]), ChecksumError)


def test_a_stale_read_is_read_again(make_rig, rng):
    rig = make_rig(pools=(1, 1), seam=Seam(fault=Fault("read", 3, kind="stale")))
    values = {i: random_chunk(rng) for i in range(2)}
    rig.store(values).wait()
    assert all(same(rig.read(i), values[i]) for i in values)
    assert rig.executor.stats().rereads == 1


def test_a_stale_read_for_ever_is_a_checksum_error(make_rig, rng):
    rig = make_rig(seam=Seam(fault=Fault("read", 0, kind="stale", persistent=True)))
    rig.store({0: random_chunk(rng)}).wait()
    rig.store({1: random_chunk(rng)}).wait()  # memory has these now
    assert isinstance(outcome(rig.fetch([0])[0]), ChecksumError)


@pytest.mark.parametrize(("chunk", "victim"), [(0, 1), (5, 4)], ids=["behind", "at_the_end"])
def test_a_misdirected_write_damages_two_places_and_both_are_detected(make_rig, rng, chunk, victim):
    rig = make_rig(block_bytes=RUN_BYTES)
    values = {i: random_chunk(rng) for i in range(6)}
    rig.store(values).wait()
    before = [on_drive(rig, i) for i in range(6)]
    rig.executor.set_seam(Seam(fault=Fault("write", 0, kind="misdirected")))
    rig.store({chunk: random_chunk(rng)}).wait()
    after = [on_drive(rig, i) for i in range(6)]
    assert [i for i in range(6) if before[i] != after[i]] == [victim]
    assert rig.executor.set_seam(Seam()) == 1
    for index in range(6):
        error = outcome(rig.fetch([index])[0])
        assert isinstance(error, ChecksumError) == (index in (chunk, victim)), (index, error)
    assert all(same(rig.read(i), values[i]) for i in values if i not in (chunk, victim))


def test_a_misdirected_read_is_read_again_or_an_error(make_rig, rng):
    rig = make_rig()
    values = {i: random_chunk(rng) for i in range(6)}
    rig.store(values).wait()
    rig.executor.set_seam(Seam(fault=Fault("read", 0, kind="misdirected")))
    assert same(rig.read(0), values[0])
    assert rig.executor.stats().rereads == 1
    rig.executor.set_seam(Seam(fault=Fault("read", 0, kind="misdirected", persistent=True)))
    error = outcome(rig.fetch([5])[0])
    assert isinstance(error, ChecksumError)
    assert 5 * RUN_BYTES <= error.offset < 6 * RUN_BYTES  # where it belongs


def test_an_only_block_of_a_file_cannot_be_misdirected(make_rig, rng):
    rig = make_rig(chunk_count=1, block_bytes=RUN_BYTES,
                   seam=Seam(fault=Fault("write", 0, kind="misdirected")))  # fmt: skip
    assert os.fstat(rig.files[0].fd).st_size < 2 * RUN_BYTES
    value = random_chunk(rng)
    rig.store({0: value}).wait()
    assert same(rig.read(0), value)
    assert rig.executor.set_seam(Seam()) == 0


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_late_request_only_delays(make_rig, rng, op):
    rig = make_rig()
    value = random_chunk(rng)
    rig.executor.set_seam(Seam(fault=Fault(op, 1, kind="late", late_s=0.3)))
    begun = time.monotonic()
    rig.store({0: value}).wait()
    assert same(rig.read(0), value)
    assert time.monotonic() - begun >= 0.3
    assert rig.executor.set_seam(Seam()) == 1
    assert same(rig.read(0), value)


def test_a_fault_of_one_drive_strikes_that_one(make_rig, rng):
    rig = make_rig(drive_count=2)
    values = {i: random_chunk(rng) for i in range(4)}
    rig.store(values).wait()
    rig.executor.set_seam(Seam(fault=Fault("read", 0, persistent=True, drive=1)))
    for index in range(4):
        error = outcome(rig.fetch([index])[0])
        assert (error is None) == (index % 2 == 0)
    assert rig.executor.stats().drives[0].errors == 0


def test_an_executor_is_armed_and_disarmed_while_it_runs(make_rig, rng):
    """Counts begin when it is armed; `set_seam` returns how many requests got the earlier fault."""
    rig = make_rig(seam=Seam(delay_us_max=50, seed=3))
    value = random_chunk(rng)
    rig.store({0: value}).wait()
    assert rig.executor.set_seam(Seam(fault=Fault("read", 2, lasting=True))) == 0
    assert isinstance(outcome(rig.fetch([0])[0]), DeviceFailedError)
    assert rig.executor.set_seam(Seam(fault=Fault("read", 100))) == 2
    assert same(rig.read(0), value)
    assert rig.executor.set_seam(Seam()) == 0
    assert same(rig.read(0), value)
    rig.executor.close()
    with pytest.raises(AioError):
        rig.executor.set_seam(Seam())
