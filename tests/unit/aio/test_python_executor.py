"""The Python executor alone: its threads outlive exceptions, and its batches and requests stay apart."""


from __future__ import annotations

import errno
import os
import threading

import numpy as np
import pytest

from infinity import aio
from infinity.aio import plan
from infinity.aio.python_executor import PythonExecutor
from infinity.aio.python_transfer import BLOCK_BYTES, PARTS_MAX, DriveChannel, RequestCounter, TransferError
from infinity.errors import AioError, ChecksumError, DeviceFailedError
from tests.unit.aio.child import run_python
from tests.unit.aio.rig import NUMEL, RUN_BYTES, Rig, adamw, hyper_record, random_chunk, same, until


@pytest.fixture
def backend() -> str:
    """Rigs of this backend only."""
    return "python"


def with_kernel(rig: Rig, kernel) -> None:
    """Let the rig's updates run something else."""
    rig.executor._engine.kernel = kernel


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("infinity-aio")]


# ---- exceptions ----


@pytest.mark.parametrize("error", [ZeroDivisionError("in the kernel"), MemoryError(), SystemExit(3)])
def test_an_exception_in_the_kernel_fails_the_job_and_the_thread_lives_on(make_rig, rng, error, caplog):
    rig = make_rig()
    values = {i: random_chunk(rng) for i in range(3)}
    rig.store(values).wait()

    def kernel(fmt, sections, grad, hyper, element):
        if grad[0] == 666:
            sections[0][:] = 1  # half done
            raise error
        adamw(fmt, sections, grad, hyper)

    with_kernel(rig, kernel)
    grads = {i: np.full(NUMEL, 666 if i == 1 else 0.5, np.float32) for i in range(3)}
    before = engine_threads()
    ticket = rig.update(grads)
    with pytest.raises(AioError, match=type(error).__name__) as caught:
        ticket.wait(20)
    assert caught.value.__cause__ is error
    assert "chunk 1" in str(caught.value)
    assert "ended with an exception" in caplog.text
    assert rig.executor.invalid(rig.ids).tolist() == [0, 15, 0, 0, 0, 0]
    with pytest.raises(AioError, match="earlier"):
        rig.read(1)
    for i in (0, 2):
        adamw(plan.Format.SPLIT, values[i], grads[i], hyper_record()[0])
        assert same(rig.read(i), values[i])
    rig.store({1: values[1]}).wait()
    assert same(rig.read(1), values[1])
    assert engine_threads() == before
    assert type(rig.executor.fault()) is AioError
    assert rig.executor.stats().jobs_failed == 2


def test_an_exception_in_a_write_keeps_what_was_to_be_written(make_rig, rng):
    rig = make_rig()
    value, other = random_chunk(rng), random_chunk(rng)
    fd = rig.files[0].fd
    rig.files[0].fd = None
    with pytest.raises(AioError, match=r"TypeError.*write of 49152 bytes at offset 0"):
        rig.store({0: value}).wait(20)
    rig.files[0].fd = fd
    assert rig.executor.invalid(rig.ids).tolist() == [0] * 6
    assert "TypeError" in rig.executor.stats().drives[0].failed
    assert same(rig.read(0), value)
    assert rig.executor.stats().bytes_read == 0
    rig.executor.recover().wait(20)
    rig.store({1: other}).wait(20)
    assert same(rig.read(0), value)
    assert rig.executor.stats().bytes_read == RUN_BYTES


def test_too_few_threads_are_an_error_that_leaves_none_behind(tmp_path):
    done = run_python(
        f"""
        import os, resource, threading
        from infinity import aio
        from infinity.aio.python_executor import PythonExecutor
        file = aio.SwapFile.create({str(tmp_path)!r})
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + (256 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            PythonExecutor([file], small=aio.PoolSpec(0, 0), large=aio.PoolSpec(4, 1 << 20), threads_per_drive=500)
        except OSError as error:
            print(error.errno, threading.active_count())
        """
    )
    assert done.stdout.split() == [str(errno.EAGAIN), "1"], done.stderr


def test_an_executor_that_dies_in_one_of_its_own_threads_ends(make_rig, rng):
    rig = make_rig()
    rig.store({0: random_chunk(rng)}).wait()
    before = len(engine_threads())
    own = [rig.executor]
    entered, go_on = threading.Event(), threading.Event()

    def kernel(fmt, sections, grad, hyper, element):
        entered.set()
        go_on.wait(20)
        own.clear()  # the last hold, in a worker

    with_kernel(rig, kernel)
    rig.update({0: np.ones(NUMEL, np.float32)})
    assert entered.wait(20)
    rig.executor = make_rig().executor
    go_on.set()
    until(lambda: len(engine_threads()) == before)
    assert not own


def test_a_dropped_gate_escapes_also_while_gates_are_held(make_rig, rng):
    rig = make_rig(hold_s=30)
    rig.store({0: random_chunk(rng)}).wait()
    rig.executor.hold_gates(True)
    gate = rig.executor.gate()
    ticket, targets = rig.fetch([0], gate=gate)
    del gate
    until(lambda: ticket.done)
    assert not targets[0][0].any()


# ---- batches ----


@pytest.mark.parametrize("verify", ["full", "off"])
def test_a_batch_with_a_hole_in_it_moves_the_right_bytes(make_rig, rng, verify):
    """Neighbours go in one request. One that drops out must not make those behind it slip into its place."""
    rig = make_rig(verify=verify, pools=(6, 6))
    values = {i: random_chunk(rng) for i in range(6)}
    rig.store(values).wait()

    def kernel(fmt, sections, grad, hyper, element):
        if grad[0] == 666:
            raise ValueError("this one")
        adamw(fmt, sections, grad, hyper)

    with_kernel(rig, kernel)
    grads = {i: np.full(NUMEL, 666 if i == 2 else i + 1, np.float32) for i in range(6)}
    with pytest.raises(AioError, match="this one"):
        rig.update(grads).wait(20)
    with pytest.raises(AioError):
        rig.fetch(range(6))[0].wait(20)
    for i in (0, 1, 3, 4, 5):
        adamw(plan.Format.SPLIT, values[i], grads[i], hyper_record()[0])
    ticket, targets = rig.fetch(range(6))
    until(lambda: ticket.done)
    assert all(same(targets[i], values[i]) for i in (0, 1, 3, 4, 5))
    assert rig.executor.stats().rereads == 0


def test_more_neighbours_than_a_request_takes_parts(tmp_path, rng):
    count = PARTS_MAX + 200
    chunks = np.zeros(count, dtype=plan.CHUNK)
    chunks["key"], chunks["numel"], chunks["piece_numel"] = np.arange(count), 1024, 512
    chunks["section_count"], chunks["itemsize"][:, 0], chunks["run_bytes"] = 1, 4, 4096
    chunks["file_offset"] = np.arange(count) * 4096
    sums = np.zeros((count, 2), dtype=np.uint32)
    chunks["sums_ptr"] = sums.ctypes.data + np.arange(count) * 8
    source, target = rng.random((count, 1024)).astype(np.float32), np.zeros((count, 1024), np.float32)
    with (
        aio.SwapFile.create(tmp_path) as file,
        PythonExecutor([file], small=aio.PoolSpec(0, 0), large=aio.PoolSpec(count, 4096)) as executor,
    ):
        file.grow(count * 4096)
        jobs = np.zeros(count, dtype=plan.JOB)
        jobs["chunk"], jobs["mask"], jobs["base"] = executor.define(chunks), 1, -1
        for kind, memory in ((plan.JobKind.STORE, source), (plan.JobKind.FETCH, target)):
            jobs["kind"], jobs["ptr"][:, 0] = kind, memory.ctypes.data + np.arange(count) * 4096
            executor.submit(jobs, priority=aio.Priority.DEMAND).wait(60)
        stats = executor.stats()
        assert stats.drives[0].errors == 0
        assert stats.drives[0].writes < count
        assert stats.drives[0].in_flight_bytes_max <= stats.drives[0].depth * BLOCK_BYTES
    assert np.array_equal(source, target)


def test_an_update_that_was_not_done_leaves_no_old_values_behind(make_rig, rng):
    """Also not in those sections that were valid."""
    rig = make_rig()
    value = random_chunk(rng)
    rig.store({0: value}).wait()

    def kernel(fmt, sections, grad, hyper, element):
        raise ValueError

    with_kernel(rig, kernel)
    for _ in range(2):
        with pytest.raises(AioError):
            rig.update({0: np.ones(NUMEL, np.float32)}).wait(20)
        rig.store({0: value}, mask=0b0011).wait()
        assert rig.executor.invalid(rig.ids[:1]).tolist() == [0b1100]
    with pytest.raises(AioError):
        rig.update({0: np.ones(NUMEL, np.float32)}).wait(20)
    assert rig.executor.invalid(rig.ids[:1]).tolist() == [0b1111]


def test_jobs_submitted_beside_recover_wait_for_the_slots_that_it_frees(make_rig, rng):
    rig = make_rig(pools=(1, 1), seam=aio.Seam(fault=aio.Fault("write", 0), delay_us_max=20_000))
    value = random_chunk(rng)
    with pytest.raises(DeviceFailedError):
        rig.store({0: value}).wait(20)
    with pytest.raises(DeviceFailedError, match="recover"):
        rig.read(1)
    recovery = rig.executor.recover()
    stored = rig.store({1: value})
    recovery.wait(20)
    stored.wait(20)
    assert same(rig.read(0), value)
    assert same(rig.read(1), value)


def test_what_is_kept_goes_before_gated_writes(make_rig, rng):
    rig = make_rig(hold_s=30, seam=aio.Seam(fault=aio.Fault("write", 0)))
    value = random_chunk(rng)
    gate = rig.executor.gate()
    stored = rig.store({0: value})
    target = np.zeros((1, NUMEL), dtype=np.uint16)
    grad = rng.standard_normal(NUMEL).astype(np.float32)
    updated = rig.update({0: grad}, gate=gate, target=target)
    with pytest.raises(DeviceFailedError):
        stored.wait(20)
    rig.executor.recover().wait(20)
    assert not gate.escaped
    assert gate.open([target.ctypes.data])
    updated.wait(20)
    adamw(plan.Format.SPLIT, value, grad, hyper_record()[0])
    assert target[0].tobytes() == value[0].tobytes()
    assert same(rig.read(0), value)


# ---- requests ----


class LargeSectors(DriveChannel):
    """A drive that takes whole 4 KiB only, and ends its first transfers in the middle of one."""

    short = 2

    def _call(self, op, views, offset, fd):
        if offset % 4096:
            return -errno.EINVAL
        moved = super()._call(op, views, offset, fd)
        if self.short and moved > 4096:
            self.short -= 1
            return moved - 1024
        return moved


def test_a_short_transfer_goes_on_where_the_drive_allows(tmp_path, rng):
    data = rng.integers(0, 255, 64 << 10).astype(np.uint8)
    back = np.zeros_like(data)
    with aio.SwapFile.create(tmp_path, direct=False) as file:
        channel = LargeSectors(0, file, None, RequestCounter(None))
        channel.transfer(1, [data[:5000].data, data[5000:].data], 4096)
        channel.transfer(0, [back.data], 4096)
        assert os.pread(file.fd, len(data), 4096) == data.tobytes()
        drive = channel.meter.stats(file, block_bytes=0, depth=0, failed="")
    assert back.tobytes() == data.tobytes()
    assert drive.short_transfers == 2
    assert drive.retries == 2
    with pytest.raises(TransferError):
        channel.transfer(0, [back.data], 1024)


def test_a_bit_that_flips_on_its_way_to_the_drive_leaves_the_slot_alone(tmp_path, rng):
    data = rng.integers(0, 255, 8192).astype(np.uint8)
    before = data.tobytes()
    seam = aio.Seam(fault=aio.Fault("write", 0, kind="bitflip"))
    with aio.SwapFile.create(tmp_path, direct=False) as file:
        DriveChannel(0, file, seam, RequestCounter(seam)).transfer(1, [data[:4096].data, data[4096:].data], 0)
        written = np.frombuffer(os.pread(file.fd, 8192, 0), np.uint8)
    assert data.tobytes() == before
    assert np.unpackbits(written ^ data).sum() == 1


def test_what_is_kept_is_verified_in_memory_and_not_read_again(make_rig, rng):
    rig = make_rig(seam=aio.Seam(fault=aio.Fault("write", 0)))
    value = random_chunk(rng)
    with pytest.raises(DeviceFailedError):
        rig.store({0: value}).wait(20)
    kept = rig.executor._engine.chunks[int(rig.ids[0])].kept
    kept.section(2)[77] ^= 1
    with pytest.raises(ChecksumError, match="section 2 piece 0"):
        rig.read(0)
    kept.section(2)[77] ^= 1
    assert same(rig.read(0), value)
    stats = rig.executor.stats()
    assert (stats.rereads, stats.checksum_failures, stats.drives[0].reads) == (0, 1, 0)
