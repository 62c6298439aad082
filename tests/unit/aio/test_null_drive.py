"""Null drives, a seam: they answer at once and move nothing, in sparse files of any size."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity import aio
from infinity._src.cabi import records
from infinity._src.cabi.native import lib
from infinity.aio._executor import Executor
from infinity.aio.testing import NULL_BATCH_MAX
from tests.unit.aio.rig import NUMEL, RUN_BYTES, Rig, hyper_record, outcome, random_chunk, same

FAR = (1 << 42) + (1 << 32)
"""Offset past what 42 bits hold: the files of 405 billion parameters on one drive have such."""


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[aio.SwapFile]]:
    """Two sparse files."""
    made = [aio.SwapFile.sparse(tmp_path) for _ in range(2)]
    yield made
    for file in made:
        file.close()


def far_chunks(files: list[aio.SwapFile], count: int, numel: int = NUMEL) -> npt.NDArray[np.void]:
    """CHUNK records of the `exact` state in the files' last bytes, in turn."""
    run = 12 * numel
    for file in files:
        file.grow(FAR + -(-count // len(files)) * run)
    chunks = np.zeros(count, dtype=records.CHUNK)
    chunks["key"], chunks["numel"] = np.arange(count) + 1, numel
    chunks["drive"] = np.arange(count) % len(files)
    chunks["file_offset"] = FAR + np.arange(count) // len(files) * run
    chunks["run_bytes"], chunks["piece_numel"] = run, numel
    chunks["format"], chunks["section_count"] = records.Format.SPLIT, 4
    chunks["itemsize"][:, :4] = 2, 2, 4, 4
    chunks["group_numel"][:, :4] = 1
    chunks["section_at"] = -1
    chunks["section_at"][:, :4] = 0, 2 * numel, 4 * numel, 8 * numel
    chunks["other_offset"] = chunks["grad_offset"] = -1
    return chunks


def null_executor(files: list[aio.SwapFile], numel: int = NUMEL, **seam: object) -> Executor:
    return Executor(
        files,
        small=aio.PoolSpec(0, 0),
        large=aio.PoolSpec(2, 12 * numel),
        verify="off",
        block_bytes=min(12 * numel, 1 << 26),
        seam=aio.Seam(**{"null": 4, **seam}),  # type: ignore[arg-type]
    )


def jobs_on(
    ids: npt.NDArray[np.int32], kind: records.JobKind, mask: int = 15
) -> npt.NDArray[np.void]:
    jobs = np.zeros(len(ids), dtype=records.JOB)
    jobs["chunk"], jobs["kind"], jobs["base"] = ids, kind, -1
    jobs["mask"] = 0 if kind is records.JobKind.UPDATE else mask | aio.MASK_MOVE_ONLY
    return jobs


def test_counters_go_past_a_terabyte_and_offsets_past_42_bits(files):
    numel, rounds = 2730 * 2048, 9  # just below 64 MiB in one request
    with null_executor(files, numel, null=64) as executor:
        ids = executor.define(far_chunks(files, 2000, numel))
        for _ in range(rounds):
            executor.submit(jobs_on(ids, records.JobKind.FETCH), priority=aio.Priority.DEMAND).wait(
                60
            )
        executor.submit(jobs_on(ids, records.JobKind.STORE), priority=aio.Priority.DEMAND).wait(60)
        stats = executor.stats()
    assert stats.backend == "null"
    assert [drive.bytes_read for drive in stats.drives] == [rounds * 1000 * 12 * numel] * 2
    assert [drive.bytes_written for drive in stats.drives] == [1000 * 12 * numel] * 2
    assert sum(drive.bytes_read for drive in stats.drives) > 1 << 40
    assert (
        sum(window.bytes_read for window in stats.drives[0].windows) == rounds * 1000 * 12 * numel
    )
    assert stats.drives[0].reads == rounds * 1000 == stats.drives[0].read_latency.count
    assert files[0].size_bytes > FAR
    assert files[0].preallocated is False
    assert Path(f"/proc/self/fd/{files[0].fd}").stat().st_blocks == 0


def test_real_drives_keep_bits_past_42_bits(backend, tmp_path, rng):
    file = aio.SwapFile.sparse(tmp_path)
    rig = Rig(tmp_path, backend, files=[file])
    try:
        file.grow(FAR + 6 * RUN_BYTES)
        rig.executor.drop(rig.ids)
        rig.chunks["file_offset"] += FAR
        rig.ids = rig.executor.define(rig.chunks)
        values = {index: random_chunk(rng) for index in range(6)}
        rig.store(values).wait(20)
        assert all(same(rig.read(index), values[index]) for index in values)
        # Where they would be, were the upper bits lost.
        assert not np.any(np.frombuffer(_read(file, 0, 6 * RUN_BYTES), dtype=np.uint8))
    finally:
        rig.close()


def _read(file: aio.SwapFile, offset: int, size_bytes: int) -> bytes:
    with Path(f"/proc/self/fd/{file.fd}").open("rb") as plain:
        plain.seek(offset)
        return plain.read(size_bytes)


def test_a_fault_says_where_past_42_bits(files):
    fault = aio.Fault("read", nth=3, errno=errno.EIO, lasting=True)
    with null_executor(files[:1], fault=fault) as executor:
        ids = executor.define(far_chunks(files[:1], 8))
        ticket = executor.submit(jobs_on(ids, records.JobKind.FETCH), priority=aio.Priority.DEMAND)
        error = outcome(ticket)
        assert error is not None
        assert error.errno == errno.EIO
        assert (error.offset, error.length) == (FAR + 3 * RUN_BYTES, RUN_BYTES)
        assert executor.stats().jobs_failed == 1


@pytest.mark.parametrize(("every", "updated"), [(1, [0, 1, 2, 3, 4, 5]), (4, [0, 4]), (0, [])])
def test_workers_compute_one_chunk_in_so_many(files, every, updated):
    grad = np.ones(NUMEL, dtype=np.float32)
    out = np.zeros((6, NUMEL), dtype=np.uint16)
    given = np.full(NUMEL, 0x3F80, dtype=np.uint16)
    with null_executor(files, null_computes=every) as executor:
        ids = executor.define(far_chunks(files, 6))
        assert ids.tolist() == [0, 1, 2, 3, 4, 5]
        jobs, segs = jobs_on(ids, records.JobKind.UPDATE), np.zeros(6, dtype=records.SEG)
        jobs["mask"] = aio.MASK_PARAM_IN_MEMORY
        jobs["seg_first"], jobs["seg_count"] = np.arange(6), 1
        jobs["ptr"][:, 0] = out.ctypes.data + 2 * NUMEL * np.arange(6, dtype=np.uint64)
        jobs["ptr"][:, 1] = given.ctypes.data
        segs["numel"], segs["grad"] = NUMEL, grad.ctypes.data
        segs["grad_dtype"] = records.GradDtype.FP32
        executor.submit(jobs, segs, hyper_record(), priority=aio.Priority.DEMAND).wait(20)
        assert executor.stats().updates == 6
    assert [index for index in range(6) if out[index].any()] == updated
    # 1.0, updated with a gradient of 1, is a little less than 1.
    assert all(np.all(out[index] < 0x3F80) and np.all(out[index] > 0x3F00) for index in updated)


@settings(max_examples=15, deadline=None)
@given(
    null=st.integers(1, 64),
    depth=st.integers(2, 40),
    work=st.lists(
        st.tuples(st.sampled_from([1, 2, 3]), st.integers(0, 2), st.sets(st.integers(0, 11))),
        max_size=12,
    ),
    short=st.none() | st.integers(0, 30),
)
def test_every_byte_is_counted_once(tmp_path_factory, null, depth, work, short):
    fault = None if short is None else aio.Fault("read", nth=short, kind="short")
    seam = aio.Seam(null=null, null_computes=0, fault=fault)
    files = [aio.SwapFile.sparse(tmp_path_factory.mktemp("null")) for _ in range(3)]
    executor = Executor(
        files, small=aio.PoolSpec(1, 2 * NUMEL), large=aio.PoolSpec(3, RUN_BYTES), verify="off",
        block_bytes=8192, depth=depth, seam=seam,
    )  # fmt: skip
    with executor:
        ids = executor.define(far_chunks(files, 12))
        read = written = 0
        for kind, priority, chosen in work:
            jobs = jobs_on(ids[sorted(chosen)], records.JobKind(kind))
            executor.submit(jobs, priority=aio.Priority(priority))
            read += len(chosen) * RUN_BYTES * (kind != records.JobKind.STORE)
            written += len(chosen) * RUN_BYTES * (kind != records.JobKind.FETCH)
        executor.wait_all(20)
        stats = executor.stats()
    assert sum(drive.bytes_read for drive in stats.drives) == read
    assert sum(drive.bytes_written for drive in stats.drives) == written
    assert (stats.jobs_done, stats.jobs_failed) == (stats.jobs_submitted, 0)
    for file in files:
        file.close()


def test_nothing_can_be_verified_on_null_drives(files):
    with pytest.raises(ValueError, match=r"Seam\(null=4\) moves nothing: use verify='off'"):
        Executor(
            files, small=aio.PoolSpec(0, 0), large=aio.PoolSpec(1, 4096), seam=aio.Seam(null=4)
        )


def test_more_at_once_than_a_null_drive_gives_back_is_refused_by_c_too(files):
    assert lib.INF_NULL_BATCH_MAX == NULL_BATCH_MAX
    seam = aio.Seam(null=NULL_BATCH_MAX)
    # Past the check of `Seam`: was cut to the most in silence.
    object.__setattr__(seam, "null", NULL_BATCH_MAX + 1)
    with pytest.raises(OSError, match="null: Invalid argument"):
        Executor(
            files,
            small=aio.PoolSpec(0, 0),
            large=aio.PoolSpec(1, 4096),
            verify="off",
            seam=seam,
        )


@pytest.mark.parametrize("wrong", [{"null": -1}, {"null": 65}, {"null": 1, "null_computes": -1},
                                   {"null_computes": 2}])  # fmt: skip
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="Seam"):
        aio.Seam(**wrong)
