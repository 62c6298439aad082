"""Wrong data on the drive is caught: stale, misdirected, damaged behind the engine's back, by
whatever path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from infinity import aio
from infinity._src.cabi import native, records
from infinity.aio import Executor
from infinity.errors import AioError, ChecksumError, ShortTransferError
from tests.unit.aio.rig import NUMEL, RUN_BYTES, adamw, hyper_record, outcome, random_chunk, same

STRIDE = 16
PIECE = 128  # 32 pieces in each section, more than the stride

#: Run by another process on /proc/PID/fd/N of this one: `damage` names what to do to the file.
DAMAGE = """
import mmap, os, sys
path, what = sys.argv[1:3]
direct, at, other, size = map(int, sys.argv[3:])
fd = os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))
first, second = mmap.mmap(-1, size), mmap.mmap(-1, size)  # page aligned, as O_DIRECT wants
assert os.preadv(fd, [first], at) == os.preadv(fd, [second], other) == size
if what == "swap":
    assert os.pwritev(fd, [second], at) == os.pwritev(fd, [first], other) == size
elif what == "bit":
    first[size // 2] ^= 1
    assert os.pwritev(fd, [first], at) == size
elif what == "zero":
    assert os.pwritev(fd, [bytes(size) if not direct else mmap.mmap(-1, size)], at) == size
elif what == "copy":
    assert os.pwritev(fd, [second], at) == size
elif what == "cut":
    os.ftruncate(fd, at + size // 2)
"""


def damage(
    rig, what: str, *, direct: bool, at: int = 0, other: int = RUN_BYTES, size: int = RUN_BYTES
) -> None:
    """Another process changes the file of the rig's first drive."""
    path = f"/proc/{os.getpid()}/fd/{rig.files[0].fd}"
    arguments = [path, what, str(int(direct)), str(at), str(other), str(size)]
    done = subprocess.run(
        [sys.executable, "-S", "-c", DAMAGE, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def swap(rig) -> None:
    """The first two runs of the rig's first drive change places; by this process, which is
    quicker."""
    fd = os.open(f"/proc/self/fd/{rig.files[0].fd}", os.O_RDWR)
    try:
        both = os.pread(fd, 2 * RUN_BYTES, 0)
        os.pwrite(fd, both[RUN_BYTES:] + both[:RUN_BYTES], 0)
    finally:
        os.close(fd)


@pytest.mark.parametrize("file_direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("direct", [True, False], ids=["by_direct", "by_cache"])
@pytest.mark.parametrize("what", ["swap", "bit", "zero", "copy"])
def test_damage_by_another_process_is_caught(make_rig, rng, what, direct, file_direct):
    rig = make_rig(direct=file_direct)
    values = {i: random_chunk(rng) for i in range(3)}
    rig.store(values).wait()
    damage(rig, what, direct=direct)
    with pytest.raises(ChecksumError) as caught:
        rig.read(0)
    assert caught.value.op == "read"
    assert 0 <= caught.value.offset < RUN_BYTES
    if what == "swap":
        with pytest.raises(ChecksumError):
            rig.read(1)
    else:
        assert same(rig.read(1), values[1])
    assert same(rig.read(2), values[2])
    assert rig.executor.stats().checksum_failures == (2 if what == "swap" else 1)
    with pytest.raises(ChecksumError):
        rig.update({0: np.ones(NUMEL, np.float32)}).wait()
    # the update did not happen: nothing may be read there
    assert rig.executor.invalid(rig.ids)[0] == 15
    rig.store({0: values[2]}).wait()
    assert same(rig.read(0), values[2])


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_was_cut_is_a_typed_error(make_rig, rng, direct):
    rig = make_rig()
    rig.store({0: random_chunk(rng)}).wait()
    damage(rig, "cut", direct=direct)
    with pytest.raises((ShortTransferError, ChecksumError)):
        rig.read(0)


@pytest.mark.parametrize("verify", ["full", "sample"])
def test_a_lost_write_is_detected(make_rig, rng, verify):
    """A stale run: what lay there before the last store is put back."""
    rig = make_rig(verify=verify, piece=PIECE)
    for index in range(5):
        rig.store({index: random_chunk(rng)}).wait()
        damage(
            rig, "copy", direct=True, at=5 * RUN_BYTES, other=index * RUN_BYTES
        )  # a copy of what lies there now
        rig.store({index: random_chunk(rng)}).wait()
        damage(rig, "copy", direct=True, at=index * RUN_BYTES, other=5 * RUN_BYTES)
        assert isinstance(outcome(rig.fetch([index])[0]), ChecksumError)


@pytest.mark.parametrize("verify", ["full", "sample"])
@pytest.mark.parametrize("mask", [1, 2, 0b1100, 15])
def test_a_misdirected_run_is_caught_at_the_first_read_whatever_was_sampled_before(
    make_rig, rng, verify, mask
):
    rig = make_rig(verify=verify, piece=PIECE)
    values = {i: random_chunk(rng) for i in range(2)}
    rig.store(values).wait()
    for _ in range(STRIDE + 1):
        assert outcome(rig.fetch([0], mask=mask)[0]) is None
        swap(rig)
        for index in (0, 1):
            assert isinstance(outcome(rig.fetch([index], mask=mask)[0]), ChecksumError)
        swap(rig)
    assert all(same(rig.read(i), values[i]) for i in values)


@pytest.mark.parametrize("at", [0, 5000, 2 * NUMEL + 77, 8 * NUMEL - 1, 12 * NUMEL - 1])
def test_one_bit_is_caught_within_sixteen_sampled_reads(make_rig, rng, at):
    rig = make_rig(verify="sample", piece=PIECE, pools=(1, 1))
    value = random_chunk(rng)
    rig.store({0: value}).wait()
    page, within = at // 4096 * 4096, at % 4096
    with Path(f"/proc/self/fd/{rig.files[0].fd}").open("r+b", buffering=0) as file:
        data = bytearray(os.pread(file.fileno(), 4096, page))
        data[within] ^= 1
        os.pwrite(file.fileno(), data, page)
    errors = [outcome(rig.fetch([0])[0]) for _ in range(2 * STRIDE)]
    caught = [n for n, error in enumerate(errors) if error is not None]
    assert all(isinstance(error, ChecksumError) for error in errors if error is not None)
    assert caught[0] < STRIDE
    assert len(caught) == 2
    assert caught[1] - caught[0] == STRIDE  # every piece has its turn
    assert rig.executor.stats().rereads == 2  # read again, and the same pieces compared again


def test_sampled_updates_are_right_and_seal_everything(make_rig, rng):
    rig = make_rig(verify="sample", piece=PIECE)
    value = random_chunk(rng)
    rig.store({0: value}).wait()
    for step in range(1, 6):
        grad = rng.standard_normal(NUMEL).astype(np.float32)
        rig.update({0: grad}, step=step)
        adamw(records.Format.SPLIT, value, grad, hyper_record(step)[0])
    for _ in range(STRIDE + 1):
        assert same(rig.read(0), value)
    assert rig.executor.fault() is None


def test_a_sampled_update_on_a_misdirected_run_is_caught(make_rig, rng):
    rig = make_rig(verify="sample", piece=PIECE)
    rig.store({i: random_chunk(rng) for i in range(2)}).wait()
    swap(rig)
    assert isinstance(outcome(rig.update({0: np.ones(NUMEL, np.float32)})), ChecksumError)
    assert isinstance(outcome(rig.fetch([0])[0]), ChecksumError)  # invalid now, of the same cause
    assert rig.executor.invalid(rig.ids)[0] == 15


def test_off_compares_nothing(make_rig, rng):
    rig = make_rig(verify="off", seam=aio.Seam(fault=aio.Fault("read", 0, "bitflip")))
    value = random_chunk(rng)
    rig.store({0: value}).wait()
    assert not rig.sums.any()
    assert not same(rig.read(0), value)
    assert same(rig.read(0), value)
    grad = np.ones(NUMEL, np.float32)
    rig.update({0: grad}).wait()
    adamw(records.Format.SPLIT, value, grad, hyper_record()[0])
    assert same(rig.read(0), value)
    assert not rig.sums.any()


@pytest.mark.parametrize("verify", ["full", "sample"])
def test_every_write_sets_every_checksum(make_rig, rng, verify):
    rig = make_rig(verify=verify, piece=PIECE)
    rig.store({0: random_chunk(rng)}).wait()
    stored = rig.sums[0].copy()
    assert (stored != 0).mean() > 0.99
    rig.update({0: rng.standard_normal(NUMEL).astype(np.float32)}).wait()
    assert (rig.sums[0] != stored).mean() > 0.99


def test_an_unknown_mode_is_a_value_error(make_rig):
    for wrong in ("none", "", True, 1):
        with pytest.raises(ValueError, match="verify"):
            make_rig(verify=wrong)


def test_stale_and_misdirected_records_fail_their_checksums(make_rig, rng):
    rig = make_rig()
    values = {i: random_chunk(rng) for i in range(2)}
    rig.store(values).wait()
    swapped = rig.chunks[:2].copy()
    swapped["file_offset"] = swapped["file_offset"][::-1]
    ids = rig.executor.define(swapped)
    jobs = np.zeros(1, dtype=records.JOB)
    jobs["chunk"], jobs["kind"], jobs["mask"], jobs["base"] = ids[0], records.JobKind.FETCH, 15, -1
    with pytest.raises(AioError) as caught:
        rig.executor.submit(jobs, priority=aio.Priority.DEMAND).wait()
    assert isinstance(caught.value, ChecksumError)


@pytest.mark.parametrize("verify", ["full", "sample"])
def test_one_checksum_for_each_section_tells_which_section_is_wrong(make_rig, rng, verify):
    """Folded: an executor that reads what another wrote has one of all pieces' checksums."""
    rig = make_rig(piece=PIECE)
    values = {i: random_chunk(rng) for i in range(2)}
    rig.store(values).wait()
    folded = np.zeros((2, 4), dtype=np.uint32)
    for chunk in range(2):
        folded[chunk] = [native.crc32c(rig.sums[chunk, section]) for section in range(4)]
    reader = Executor(
        rig.files,
        small=aio.PoolSpec(0, 0),
        large=aio.PoolSpec(3, RUN_BYTES),
        verify=verify,
        backend=rig.executor.backend,
    )
    known = rig.chunks[:2].copy()
    known["sums_ptr"] = folded.ctypes.data + 16 * np.arange(2, dtype=np.uint64)
    ids = reader.define(known)

    def fetch(section: int, mask: int = aio.MASK_FOLDED) -> np.ndarray:
        found = np.zeros(NUMEL, rig.dtypes[section])
        job = np.zeros(1, dtype=records.JOB)
        job["chunk"], job["kind"], job["base"] = ids[1], records.JobKind.FETCH, -1
        job["mask"] = mask | 1 << section
        job["ptr"][0, section] = found.ctypes.data
        reader.submit(job, priority=aio.Priority.DEMAND).wait()
        return found

    for section in range(4):
        assert np.array_equal(fetch(section), values[1][section])
    at = RUN_BYTES + int(known["section_at"][1, 2])
    size = NUMEL * np.dtype(rig.dtypes[2]).itemsize
    damage(rig, "bit", direct=False, at=at, size=size)
    assert np.array_equal(fetch(1), values[1][1])
    with pytest.raises(ChecksumError) as caught:
        fetch(2)
    assert (caught.value.offset, caught.value.length) == (at, size)
    job = np.zeros(1, dtype=records.JOB)
    job["chunk"], job["kind"], job["base"] = ids[0], records.JobKind.STORE, -1
    job["mask"] = aio.MASK_FOLDED | 1
    with pytest.raises(ValueError, match="mask"):
        reader.submit(job, priority=aio.Priority.DEMAND)
    reader.close(wait=False)
