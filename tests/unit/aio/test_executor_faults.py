"""Faults one by one: what is counted, what is said, and causes outside the seam.
`test_every_fault.py` has every request."""

from __future__ import annotations

import errno
import time

import numpy as np
import pytest

from infinity import aio
from infinity._src.base.alarm import Alarm
from infinity.aio import _handles
from infinity.errors import (
    AioClosedError,
    AioError,
    ChecksumError,
    DeviceFailedError,
    ShortTransferError,
    SwapFullError,
)
from tests.unit.aio.child import run_python
from tests.unit.aio.rig import NUMEL, RUN_BYTES, outcome, random_chunk, same


def stored_and_read(rig, rng) -> AioError | None:
    """Store a chunk and fetch it; the first error. What is fetched without one is right."""
    value = random_chunk(rng)
    first = outcome(rig.store({0: value}))
    ticket, targets = rig.fetch([0])
    second = outcome(ticket)
    assert second is not None or same(targets[0], value)
    return first or second


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize(
    ("kind", "code", "counter"),
    [
        ("errno", errno.EAGAIN, "retries"),
        ("errno", errno.EINTR, "retries"),
        ("short", 0, "short_transfers"),
    ],
)
def test_transient_errors_are_retried_and_counted(make_rig, rng, op, kind, code, counter):
    rig = make_rig(seam=aio.Seam(fault=aio.Fault(op, 0, kind=kind, errno=code)))
    assert stored_and_read(rig, rng) is None
    stats = rig.executor.stats()
    assert getattr(stats, counter) == getattr(stats.drives[0], counter) == 1
    assert stats.drives[0].errors == stats.jobs_failed == 0
    assert rig.executor.fault() is None


def test_a_ticket_that_fails_sounds_the_alarm_after_its_own_word(make_rig, rng):
    alarm = Alarm()
    rig = make_rig(alarm=alarm)
    assert stored_and_read(rig, rng) is None
    assert not alarm.word.value
    rig.executor.set_seam(aio.Seam(fault=aio.Fault("read", 0, lasting=True)))
    ticket, _ = rig.fetch([0])
    while not alarm.word.value:
        time.sleep(0.001)
    assert ticket.failed


def test_an_executor_that_is_abandoned_writes_to_no_alarm(make_rig, rng, monkeypatch):
    """Its threads still run, and the memory of the alarm may belong to another object by then."""
    alarm = Alarm()
    rig = make_rig(alarm=alarm)
    assert stored_and_read(rig, rng) is None
    seam = aio.Seam(read_bytes_per_s=RUN_BYTES / 0.7, fault=aio.Fault("read", 0, lasting=True))
    rig.executor.set_seam(seam)
    busy_s = rig.executor.stats().drives[0].busy_s
    ticket, _ = rig.fetch([0])
    while rig.executor.stats().drives[0].busy_s == busy_s:
        time.sleep(0.001)  # closing would cancel a read that has not begun
    monkeypatch.setattr(_handles, "CANCEL_S", 0.0)
    rig.executor.close(wait=False)
    assert not ticket.done, "the read ended before the executor was abandoned"
    while not ticket.done:
        time.sleep(0.001)
    assert ticket.failed
    assert not alarm.word.value


@pytest.mark.parametrize("delay_us", [0, 100])
def test_another_seam_serves_from_its_first_request_until_the_next(make_rig, rng, delay_us):
    """Also in an executor that was opened without a seam, and while jobs are in flight."""
    rig = make_rig(seam=aio.Seam(delay_us_max=delay_us) if delay_us else None)
    assert stored_and_read(rig, rng) is None
    for _ in range(2):
        rig.executor.set_seam(aio.Seam(fault=aio.Fault("read", 0, lasting=True)))
        error = stored_and_read(rig, rng)
        assert isinstance(error, DeviceFailedError)
        assert error.op == "read"
        assert stored_and_read(rig, rng) is None
    before = time.monotonic()
    rig.executor.set_seam(aio.Seam(read_bytes_per_s=RUN_BYTES / 0.2, fault=aio.Fault("read", 500)))
    assert stored_and_read(rig, rng) is None
    assert time.monotonic() - before >= 0.2
    rig.executor.set_seam(aio.Seam(fault=aio.Fault("write", 1, persistent=True)))
    rig.executor.set_seam(aio.Seam())
    assert stored_and_read(rig, rng) is None
    with pytest.raises(ValueError, match="null"):
        rig.executor.set_seam(aio.Seam(null=1))
    rig.executor.close()
    with pytest.raises(AioClosedError):
        rig.executor.set_seam(aio.Seam())


def test_a_bit_that_flips_in_a_read_is_read_again(make_rig, rng):
    rig = make_rig(seam=aio.Seam(fault=aio.Fault("read", 0, kind="bitflip")))
    assert stored_and_read(rig, rng) is None
    stats = rig.executor.stats()
    assert (stats.rereads, stats.checksum_failures) == (1, 0)


def test_a_bit_that_flips_in_a_write_is_a_checksum_error(make_rig, rng):
    rig = make_rig(seam=aio.Seam(fault=aio.Fault("write", 0, kind="bitflip")))
    error = stored_and_read(rig, rng)
    assert isinstance(error, ChecksumError)
    assert "section" in str(error)
    assert error.length > 0
    stats = rig.executor.stats()
    assert (stats.rereads, stats.checksum_failures) == (1, 1)


@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize(
    ("kind", "code", "error_type"),
    [
        ("short", 0, ShortTransferError),
        ("errno", errno.EAGAIN, DeviceFailedError),
        ("errno", errno.EINTR, DeviceFailedError),
        ("errno", errno.ENOSPC, SwapFullError),
        ("errno", errno.EDQUOT, SwapFullError),
        ("errno", errno.ENXIO, DeviceFailedError),
    ],
)
def test_what_never_mends_ends_in_an_error(make_rig, rng, op, kind, code, error_type):
    rig = make_rig(seam=aio.Seam(fault=aio.Fault(op, 0, kind=kind, errno=code, persistent=True)))
    error = stored_and_read(rig, rng)
    assert type(error) is error_type
    assert error.op == op
    assert error.errno == code
    assert rig.executor.stats().drives[0].errors >= 1
    assert type(rig.executor.fault()) is error_type


def test_bits_that_flip_in_every_read_are_a_checksum_error(make_rig, rng):
    rig = make_rig(seam=aio.Seam(fault=aio.Fault("read", 0, "bitflip", persistent=True)))
    assert isinstance(stored_and_read(rig, rng), ChecksumError)
    assert rig.executor.stats().checksum_failures == 1


def test_an_update_that_failed_to_read_leaves_no_stale_values_behind(make_rig, rng):
    rig = make_rig(chunk_count=2, seam=aio.Seam(fault=aio.Fault("read", 0, lasting=True)))
    value = random_chunk(rng)
    rig.store({0: value}).wait()
    ticket = rig.update({0: np.ones(NUMEL, dtype=np.float32)})
    after, _ = rig.fetch([0])
    for failed in (ticket, ticket, after):
        with pytest.raises(DeviceFailedError):
            failed.wait()
    with pytest.raises(DeviceFailedError, match="earlier job"):
        after.wait()
    assert rig.executor.invalid(rig.ids).tolist() == [15, 0]
    rig.store({0: value}, mask=0b0011).wait()  # a read that failed says nothing about writing
    assert rig.executor.invalid(rig.ids).tolist() == [12, 0]
    rig.fetch([0], mask=0b0011)[0].wait()
    for blocked in (rig.fetch([0])[0], rig.update({0: np.ones(NUMEL, dtype=np.float32)})):
        with pytest.raises(DeviceFailedError, match="earlier job"):
            blocked.wait()
    rig.store({0: value}).wait()
    assert same(rig.read(0), value)


def test_an_update_that_could_not_run_leaves_no_section_at_its_old_value(make_rig, rng):
    """Some sections were lost before: the update fails for them, and no other section may be read
    with its old value."""
    rig = make_rig(chunk_count=2, seam=aio.Seam(fault=aio.Fault("read", 0, lasting=True)))
    value, grad = random_chunk(rng), np.ones(NUMEL, dtype=np.float32)
    rig.store({0: value}).wait()
    assert outcome(rig.update({0: grad})) is not None
    rig.store({0: value}, mask=0b0011).wait()
    assert rig.executor.invalid(rig.ids)[0] == 0b1100
    assert isinstance(outcome(rig.update({0: grad})), DeviceFailedError)
    assert rig.executor.invalid(rig.ids)[0] == 15
    assert isinstance(outcome(rig.fetch([0], mask=0b0011)[0]), DeviceFailedError)


def test_a_failed_fetch_damages_nothing(make_rig, rng):
    rig = make_rig(seam=aio.Seam(fault=aio.Fault("read", 0, lasting=True)))
    value = random_chunk(rng)
    rig.store({0: value}).wait()
    with pytest.raises(DeviceFailedError):
        rig.read(0)
    assert rig.executor.invalid(rig.ids).tolist() == [0] * 6
    assert rig.executor.stats().drives[0].failed == ""
    assert same(rig.read(0), value)


def test_an_error_names_path_offset_and_length(make_rig, rng):
    rig = make_rig(seam=aio.Seam(fault=aio.Fault("write", 0)))
    with pytest.raises(AioError) as caught:
        rig.store({3: random_chunk(rng)}).wait()
    error = caught.value
    assert error.offset == 3 * RUN_BYTES
    assert 0 < error.length <= RUN_BYTES
    assert str(rig.files[0].path) in str(error)
    assert "key 0x3eb" in str(error)


def test_a_file_size_limit_is_a_swap_full_error_and_loses_nothing(backend, tmp_path):
    done = run_python(f"""
        import resource, signal
        import numpy as np
        from pathlib import Path
        from infinity.errors import SwapFullError
        from tests.unit.aio.rig import RUN_BYTES, Rig, outcome, random_chunk, same
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        rig = Rig(Path({str(tmp_path)!r}), {backend!r})
        rng = np.random.default_rng(0)
        values = {{i: random_chunk(rng) for i in range(6)}}
        limits = (2 * RUN_BYTES + 4096 + 512, resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        for i in range(6):
            error = outcome(rig.store({{i: values[i]}}))
            assert error is None or isinstance(error, SwapFullError), error
            assert (error is None) == (i < 2), (i, error)
        assert "recover" in str(error), error  # the drive is marked: nothing more was tried
        stats = rig.executor.stats()
        assert stats.kept_chunks == 1 and "errno" in stats.drives[0].failed, stats
        assert rig.executor.invalid(rig.ids).tolist() == [0, 0, 0, 15, 15, 15]
        assert all(same(rig.read(i), values[i]) for i in range(3))  # the third one from memory
        assert isinstance(outcome(rig.executor.recover()), SwapFullError)
        assert same(rig.read(2), values[2])
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        rig.executor.recover().wait(20)
        rig.store({{i: values[i] for i in range(3, 6)}}).wait(20)
        assert rig.executor.stats().kept_chunks == 0
        assert all(same(rig.read(i), values[i]) for i in range(6))
        rig.close()
        print("end")
    """)
    assert done.stdout.split() == ["end"], done.stderr


def test_a_drive_that_is_closed_under_the_executor_is_a_typed_error(make_rig, rng):
    rig = make_rig()
    if rig.executor.backend == "io_uring":
        pytest.skip("the ring holds the file open itself")
    rig.files[0].close()
    with pytest.raises(AioError):
        rig.store({0: random_chunk(rng)}).wait()
