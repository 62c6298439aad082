"""Effects of jobs on chunks: the same in every backend."""

from __future__ import annotations

import numpy as np
import pytest

from infinity import aio
from infinity._src.cabi import records
from tests.unit.aio.rig import DTYPES, NUMEL, PIECE, adamw, hyper_record, random_chunk, same


def test_what_is_stored_is_fetched(make_rig, rng):
    rig = make_rig()
    values = {i: random_chunk(rng) for i in range(6)}
    rig.store(values).wait()
    ticket, targets = rig.fetch(range(6))
    ticket.wait()
    assert all(same(targets[i], values[i]) for i in range(6))
    assert ticket.done
    assert ticket.filled
    assert not ticket.failed


def test_the_drive_is_read_and_written_exactly_once_per_byte(make_rig, rng):
    rig = make_rig()
    rig.store({i: random_chunk(rng) for i in range(6)}).wait()
    assert rig.executor.stats().bytes_written == 6 * 12 * NUMEL
    rig.fetch(range(6), mask=1)[0].wait()
    assert rig.executor.stats().bytes_read == 6 * 2 * NUMEL


def test_a_fetch_of_some_sections_leaves_the_other_targets_alone(make_rig, rng):
    rig = make_rig()
    value = random_chunk(rng)
    rig.store({0: value}).wait()
    for mask in range(1, 16):
        ticket, targets = rig.fetch([0], mask=mask)
        ticket.wait()
        for s in range(4):
            expected = value[s] if mask >> s & 1 else np.zeros(NUMEL, DTYPES[s])
            assert targets[0][s].tobytes() == expected.tobytes()


def test_a_store_of_some_sections_keeps_the_others(make_rig, rng):
    rig = make_rig()
    first, second = random_chunk(rng), random_chunk(rng)
    rig.store({0: first}).wait()
    rig.store({0: second}, mask=0b0101).wait()
    assert same(rig.read(0), [second[0], first[1], second[2], first[3]])


def test_a_store_without_source_writes_zeros(make_rig, rng):
    rig = make_rig()
    rig.store({0: random_chunk(rng)}).wait()
    job = np.zeros(1, dtype=records.JOB)
    job["chunk"], job["kind"], job["mask"], job["base"] = rig.ids[0], records.JobKind.STORE, 15, -1
    rig.executor.submit(job, priority=aio.Priority.DEMAND).wait()
    assert same(rig.read(0), [np.zeros(NUMEL, dtype) for dtype in DTYPES])


@pytest.mark.parametrize("resident", [(), (0,), (0, 1), (2, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("bf16", [False, True])
def test_an_update_is_bitwise_the_reference(make_rig, rng, resident, bf16):
    rig = make_rig(resident=resident)
    values = {i: random_chunk(rng) for i in range(6)}
    rig.store(values).wait()
    for step in (1, 2):
        grads = {i: rng.standard_normal(NUMEL).astype(np.float32) for i in range(6)}
        if bf16:
            grads = {i: (grad.view(np.uint32) >> 16).astype(np.uint16) for i, grad in grads.items()}
        rig.update(grads, step=step).wait()
        for i in range(6):
            adamw(records.Format.SPLIT, values[i], grads[i], hyper_record(step)[0])
            assert same(rig.read(i), values[i])
    assert rig.executor.stats().updates == 12


def test_an_update_hands_the_parameter_to_its_target(make_rig, rng):
    rig = make_rig()
    values = {i: random_chunk(rng) for i in range(4)}
    rig.store(values).wait()
    target = np.zeros((4, NUMEL), dtype=np.uint16)
    grads = {i: rng.standard_normal(NUMEL).astype(np.float32) for i in range(4)}
    ticket = rig.update(grads, target=target)
    ticket.wait_filled()
    filled = target.copy()
    ticket.wait()
    for i in range(4):
        adamw(records.Format.SPLIT, values[i], grads[i], hyper_record()[0])
        assert filled[i].tobytes() == values[i][0].tobytes()


def test_segments_update_only_their_elements(make_rig, rng):
    rig = make_rig()
    value = random_chunk(rng)
    rig.store({0: value}).wait()
    grad = rng.standard_normal(NUMEL).astype(np.float32)
    segs = np.zeros(2, dtype=records.SEG)
    spans = [(100, 500), (PIECE - 7, 20)]
    for seg, (start, numel) in zip(segs, spans, strict=True):
        seg["start"], seg["numel"], seg["grad"], seg["grad_dtype"] = (
            start,
            numel,
            grad[start:].ctypes.data,
            1,
        )
    job = np.zeros(1, dtype=records.JOB)
    job["chunk"], job["kind"], job["base"], job["seg_count"] = (
        rig.ids[0],
        records.JobKind.UPDATE,
        -1,
        2,
    )
    rig.executor.submit(job, segs, hyper_record(), priority=aio.Priority.WRITEBACK).wait()
    for start, numel in spans:
        part = [section[start : start + numel] for section in value]
        adamw(records.Format.SPLIT, part, grad[start : start + numel], hyper_record()[0])
    assert same(rig.read(0), value)


def test_jobs_on_one_chunk_run_in_the_order_of_submission(make_rig, rng):
    rig = make_rig(chunk_count=2, seam=aio.Seam(delay_us_max=2000, seed=3))
    expected = random_chunk(rng)
    # the source may change from here on
    rig.store({0: expected, 1: random_chunk(rng)}).wait_filled()
    tickets = []
    for step in range(1, 6):
        grad = rng.standard_normal(NUMEL).astype(np.float32)
        rig.update({0: grad}, step=step)
        adamw(records.Format.SPLIT, expected, grad, hyper_record(step)[0])
        tickets.append((*rig.fetch([0]), [section.copy() for section in expected]))
    for ticket, targets, wanted in tickets:
        ticket.wait()
        assert same(targets[0], wanted)


def test_random_delays_do_not_change_the_numbers(make_rig):
    results = []
    for seed in (1, 2):
        rng = np.random.default_rng(0)
        rig = make_rig(drive_count=2, seam=aio.Seam(delay_us_max=1500, seed=seed))
        rig.store({i: random_chunk(rng) for i in range(6)})
        for step in range(1, 4):
            rig.update(
                {i: rng.standard_normal(NUMEL).astype(np.float32) for i in range(6)}, step=step
            )
        results.append([rig.read(i) for i in range(6)])
    assert all(same(a, b) for a, b in zip(*results, strict=True))


def test_more_chunks_than_slots_and_several_drives_work(make_rig, rng):
    rig = make_rig(chunk_count=40, drive_count=3, pools=(1, 2))
    values = {i: random_chunk(rng) for i in range(40)}
    rig.store(values)
    ticket, targets = rig.fetch(range(40))
    ticket.wait()
    assert all(same(targets[i], values[i]) for i in range(40))


def test_chunks_whose_sections_have_gaps_and_odd_sizes_work(make_rig, rng):
    rig = make_rig(chunk_count=2)
    record = np.zeros(1, dtype=records.CHUNK)
    record["key"], record["numel"], record["piece_numel"] = 77, 1000, 300
    record["section_at"] = (0, 8192, 20480, -1, -1, -1)
    record["run_bytes"], record["format"], record["section_count"] = 24576, records.Format.FP32, 3
    record["itemsize"] = (4, 4, 4, 0, 0, 0)
    sums = np.zeros((3, 4), dtype=np.uint32)
    record["sums_ptr"] = sums.ctypes.data
    chunk = rig.executor.define(record)
    sources = [rng.standard_normal(1000).astype(np.float32) for _ in range(3)]
    targets = [np.zeros(1000, dtype=np.float32) for _ in range(3)]
    for kind, arrays in ((records.JobKind.STORE, sources), (records.JobKind.FETCH, targets)):
        job = np.zeros(1, dtype=records.JOB)
        job["chunk"], job["kind"], job["mask"], job["base"] = chunk[0], kind, 7, -1
        job["ptr"][0, :3] = [array.ctypes.data for array in arrays]
        rig.executor.submit(job, priority=aio.Priority.DEMAND).wait()
    assert same(sources, targets)


def test_a_plan_that_cannot_run_is_a_value_error_and_runs_nothing(make_rig, rng):
    rig = make_rig()
    good = np.zeros(1, dtype=records.JOB)
    good["chunk"], good["kind"], good["mask"], good["base"] = (
        rig.ids[0],
        records.JobKind.FETCH,
        1,
        -1,
    )
    for field, value in (
        ("chunk", 99),
        ("chunk", -1),
        ("kind", 0),
        ("kind", 4),
        ("mask", 0),
        ("mask", 16),
        ("base", 0),
        ("base", -2),
    ):
        bad = np.concatenate([good, good])
        bad[1][field] = value
        with pytest.raises(ValueError, match="job 1"):
            rig.executor.submit(bad, priority=aio.Priority.DEMAND)
    update = good.copy()
    update["kind"], update["seg_count"] = records.JobKind.UPDATE, 1
    with pytest.raises(ValueError, match="segments"):
        rig.executor.submit(update, priority=aio.Priority.DEMAND)
    with pytest.raises(ValueError, match=r"infinity\.aio\.JOB"):
        rig.executor.submit(np.zeros(3), priority=aio.Priority.DEMAND)
    assert rig.executor.stats().jobs_submitted == 0


def test_an_update_with_segments_out_of_range_is_an_error_that_touches_nothing(make_rig, rng):
    rig = make_rig()
    value = random_chunk(rng)
    rig.store({0: value}).wait()
    grad = np.ones(NUMEL, dtype=np.float32)
    for start, hyper in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        seg = np.zeros(1, dtype=records.SEG)
        seg["start"], seg["numel"], seg["grad"], seg["grad_dtype"] = (
            start,
            NUMEL,
            grad.ctypes.data,
            1,
        )
        seg["hyper"] = hyper
        job = np.zeros(1, dtype=records.JOB)
        job["chunk"], job["kind"], job["base"], job["seg_count"] = (
            rig.ids[0],
            records.JobKind.UPDATE,
            -1,
            1,
        )
        ticket = rig.executor.submit(job, seg, hyper_record(), priority=aio.Priority.WRITEBACK)
        with pytest.raises(OSError, match="out of range"):
            ticket.wait()
    assert same(rig.read(0), value)


def test_chunks_that_cannot_be_are_value_errors(make_rig):
    rig = make_rig()
    for field, value in (
        ("section_count", 0),
        ("section_count", 5),
        ("numel", 0),
        ("piece_numel", 0),
        ("run_bytes", 4096),
        ("file_offset", 100),
        ("file_offset", -1),
        ("drive", 1),
        ("drive", -1),
        ("section_at", (0, 0, 0, 0, -1, -1)),
        ("section_at", (100, 8192, 16384, 32768, -1, -1)),
        ("section_at", (-1, 8192, 16384, 32768, -1, -1)),
        ("itemsize", (0, 2, 4, 4, 0, 0)),
    ):
        chunk = rig.chunks[:1].copy()
        chunk[field] = value
        with pytest.raises(ValueError, match="chunk"):
            rig.executor.define(chunk)
    assert len(rig.executor.define(rig.chunks[:0])) == 0


def test_chunks_are_dropped_and_their_ids_no_longer_work(make_rig, rng):
    rig = make_rig()
    rig.store({0: random_chunk(rng)}).wait()
    rig.executor.drop(rig.ids[:1])
    with pytest.raises(ValueError, match="not defined"):
        rig.fetch([0])
    with pytest.raises(ValueError, match="not defined"):
        rig.executor.drop(rig.ids[:1])
    rig.ids[0] = rig.executor.define(rig.chunks[:1])[0]
    rig.store({0: random_chunk(rng)}).wait()


def test_a_chunk_with_pending_jobs_cannot_be_dropped(make_rig, rng):
    rig = make_rig(hold_s=30)
    rig.store({0: random_chunk(rng)}).wait()
    gate = rig.executor.gate()
    ticket, _ = rig.fetch([0], gate=gate)
    with pytest.raises(ValueError, match="pending"):
        rig.executor.drop(rig.ids[:1])
    ticket.wait()
    rig.executor.drop(rig.ids[:1])


def test_a_submission_of_nothing_is_done(make_rig):
    rig = make_rig()
    ticket = rig.executor.submit(np.zeros(0, dtype=records.JOB), priority=aio.Priority.DEMAND)
    assert ticket.done
    assert ticket.filled
    ticket.wait()


def test_spans_tell_what_was_done_when(make_rig, rng):
    rig = make_rig()
    rig.executor.spans(True)
    rig.store({i: random_chunk(rng) for i in range(6)}).wait()
    rig.update({i: np.ones(NUMEL, dtype=np.float32) for i in range(6)}).wait()
    rig.executor.wait_all()
    spans = rig.executor.take_spans()
    tracks = [int((spans["track"] == track).sum()) for track in range(4)]
    assert tracks == [6, 12, 6, 6]
    assert (spans["end_ns"] >= spans["start_ns"]).all()
    assert spans["bytes"][spans["track"] <= aio.TRACK_WRITE].tolist() == [12 * NUMEL] * 18
    assert len(rig.executor.take_spans()) == 0
    rig.executor.spans(False)
    rig.fetch([0])[0].wait()
    assert len(rig.executor.take_spans()) == 0


def test_the_measuring_mode_moves_slots_without_touching_them(make_rig):
    rig = make_rig(checksums=False)
    jobs = np.zeros(6, dtype=records.JOB)
    jobs["chunk"], jobs["mask"], jobs["base"] = rig.ids, aio.MASK_MOVE_ONLY | 15, -1
    for kind in (records.JobKind.STORE, records.JobKind.FETCH):
        jobs["kind"] = kind
        rig.executor.submit(jobs, priority=aio.Priority.DEMAND).wait()
    stats = rig.executor.stats()
    assert stats.bytes_read == stats.bytes_written == 6 * 12 * NUMEL
