"""Versioned chunks: the committed place is never written, and whatever happened since, there is a
way back to it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from infinity import aio
from infinity._src.cabi import records
from infinity.errors import AioError, DeviceFailedError
from tests.unit.aio.rig import (
    BACKENDS,
    NUMEL,
    Rig,
    adamw,
    hyper_record,
    outcome,
    random_chunk,
    same,
)

SECTIONS = 4


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def live_file(rig: Rig, index: int) -> tuple[Path, int, int]:
    """Return the chunk's live place: a path that opens the file, offset, bytes."""
    chunk = rig.executor.look(rig.ids[index : index + 1])[0]
    file = (rig.others if chunk["file"] else rig.files)[chunk["drive"]]
    return Path(f"/proc/self/fd/{file.fd}"), int(chunk["file_offset"]), int(chunk["run_bytes"])


def committed_bytes(rig: Rig, index: int) -> bytes:
    """Read the bytes on the drive at the place that is live now."""
    path, offset, size = live_file(rig, index)
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), size, offset)


def filled(rig: Rig, count: int = 2) -> list[list]:
    """Random states in every chunk, committed."""
    rng = np.random.default_rng(0)
    values = {index: random_chunk(rng) for index in range(count)}
    rig.store(values).wait()
    rig.executor.commit(rig.ids)
    return list(values.values())


def updated(sections: list, grad: np.ndarray, step: int = 1) -> list:
    new = [section.copy() for section in sections]
    adamw(records.Format.SPLIT, new, grad, hyper_record(step)[0])
    return new


@pytest.mark.parametrize("resident", [(), (0,), (1, 2)])
def test_updates_and_stores_leave_the_committed_place_alone(
    backend: str, resident: tuple, tmp_path: Path
) -> None:
    rig = Rig(tmp_path, backend, chunk_count=2, versioned=True, resident=resident)
    values = filled(rig)
    before = committed_bytes(rig, 0)
    where = rig.executor.look(rig.ids[:1])[0]["file"]
    grad = np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32)
    rig.update({0: grad}).wait()
    now = updated(values[0], grad)
    assert same(rig.read(0), now)
    rig.update({0: grad}, step=2).wait()  # in place, on what is not committed
    rig.store({0: [values[1][0], *now[1:]]}, mask=1).wait()
    chunk = rig.executor.look(rig.ids[:1])[0]
    assert chunk["other_file"] == where != chunk["file"]
    assert chunk["generation"] > chunk["other_generation"]
    rig.executor.rollback(rig.ids)
    assert committed_bytes(rig, 0) == before
    assert same(rig.read(0), values[0])
    rig.close()


def test_a_store_of_one_section_makes_a_whole_version(backend: str, tmp_path: Path) -> None:
    rig = Rig(tmp_path, backend, chunk_count=2, versioned=True)
    values = filled(rig)
    other = random_chunk(np.random.default_rng(2))
    rig.store({0: other}, mask=0b0100).wait()
    rig.executor.commit(rig.ids)
    rig.store({0: other}, mask=0b0001).wait()
    assert same(rig.read(0), [other[0], values[0][1], other[2], values[0][3]])
    rig.executor.rollback(rig.ids)
    assert same(rig.read(0), [values[0][0], values[0][1], other[2], values[0][3]])
    assert same(rig.read(1), values[1])
    rig.close()


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_step_that_fails_can_be_undone_and_done_again(
    backend: str, op: str, tmp_path: Path
) -> None:
    """Every request of the step fails once: afterwards the states are those of before, bit for bit,
    and the step can be taken."""
    grad = np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32)
    struck = 0
    for nth in range(60):
        seam = aio.Seam(fault=aio.Fault(op, nth, errno=errno.EIO, lasting=True))
        rig = Rig(tmp_path, backend, chunk_count=2, drive_count=2, versioned=True, seam=seam)
        try:
            rng = np.random.default_rng(0)
            values = [random_chunk(rng) for _ in range(2)]
            ticket = rig.store(dict(enumerate(values)))
            if outcome(ticket) is not None:
                continue  # the fault fell before the step
            rig.executor.commit(rig.ids)
            error = outcome(rig.update({0: grad, 1: grad}))
            if error is None:
                break  # past the last request
            assert isinstance(error, DeviceFailedError)
            struck += 1
            rig.executor.wait_all()
            rig.executor.rollback(rig.ids)
            assert not rig.executor.invalid(rig.ids).any()
            assert rig.executor.stats().kept_chunks == 0
            assert outcome(rig.executor.recover()) is None  # the drive takes writes again
            assert all(same(rig.read(index), values[index]) for index in range(2))
            rig.update({0: grad, 1: grad}).wait()
            assert all(same(rig.read(index), updated(values[index], grad)) for index in range(2))
        finally:
            rig.close()
    assert struck


def test_what_no_version_holds_cannot_be_undone_and_says_so(backend: str, tmp_path: Path) -> None:
    rig = Rig(tmp_path, backend, chunk_count=1, versioned=True, resident=(2,))
    rig.chunks["other_ptr"] = 0
    rig.executor.drop(rig.ids)
    rig.ids = rig.executor.define(rig.chunks)
    filled(rig, 1)
    grad = np.ones(NUMEL, np.float32)
    rig.executor.rollback(rig.ids)  # nothing was changed
    rig.update({0: grad}).wait()
    with pytest.raises(ValueError, match="resident section"):
        rig.executor.rollback(rig.ids)
    rig.close()


def test_pending_jobs_and_unknown_chunks_are_refused(backend: str, tmp_path: Path) -> None:
    rig = Rig(tmp_path, backend, chunk_count=1, versioned=True)
    filled(rig, 1)
    gate = rig.executor.gate()
    target = np.zeros(NUMEL, np.uint16)
    ticket = rig.update({0: np.ones(NUMEL, np.float32)}, gate=gate, target=target)
    for call in (rig.executor.commit, rig.executor.rollback, rig.executor.exchange):
        with pytest.raises(ValueError, match="pending jobs"):
            call(rig.ids)
        with pytest.raises(ValueError, match="not defined"):
            call(np.array([77], np.int32))
    with pytest.raises(ValueError, match="not defined"):
        rig.executor.look(np.array([77], np.int32))
    assert gate.open([target.ctypes.data])
    ticket.wait()
    rig.close()


def test_a_stale_version_does_not_pass_for_the_new_one(backend: str, tmp_path: Path) -> None:
    """A write that the drive acknowledged and lost leaves what lay there two versions ago: the
    checksum tells."""
    rig = Rig(tmp_path, backend, chunk_count=1, versioned=True)
    filled(rig, 1)
    grad = np.ones(NUMEL, np.float32)
    rig.update({0: grad}).wait()
    lost = committed_bytes(rig, 0)
    rig.executor.commit(rig.ids)
    rig.update({0: np.zeros(NUMEL, np.float32)}, step=2).wait()
    rig.executor.commit(rig.ids)
    rig.update({0: grad}, step=3).wait()
    path, offset, _ = live_file(rig, 0)
    with path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), lost, offset)
        os.fsync(file.fileno())
    with pytest.raises(AioError, match="not what was written"):
        rig.read(0)
    rig.executor.rollback(rig.ids)
    rig.read(0)
    rig.close()


def test_the_version_before_can_be_gone_back_to_while_nothing_has_overwritten_it(
    backend: str, tmp_path: Path
) -> None:
    rig = Rig(tmp_path, backend, chunk_count=2, versioned=True)
    values = filled(rig)
    grad = np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32)
    with pytest.raises(ValueError, match="cannot exchange: a chunk is not committed"):
        rig.update({0: grad}).wait()
        rig.executor.exchange(rig.ids)
    rig.executor.commit(rig.ids)
    now = updated(values[0], grad)
    for _ in range(2):
        rig.executor.exchange(rig.ids[:1])
        assert same(rig.read(0), values[0])
        rig.executor.exchange(rig.ids[:1])
        assert same(rig.read(0), now)
    # The next version is newer than both, and is gone back from to the one that was chosen.
    rig.executor.exchange(rig.ids[:1])
    rig.update({0: grad}, step=2).wait()
    chunk = rig.executor.look(rig.ids[:1])[0]
    assert chunk["generation"] == 2 > chunk["other_generation"]
    assert same(rig.read(0), updated(values[0], grad, step=2))
    rig.executor.rollback(rig.ids)
    assert same(rig.read(0), values[0])
    # Stored, as a restore does, or changed after its update: there are no states before that.
    with pytest.raises(ValueError, match="the states before its last update"):
        rig.executor.exchange(rig.ids[1:])
    rig.update({1: grad}).wait()
    rig.store({1: [values[0][0], *values[1][1:]]}, mask=1).wait()
    rig.executor.commit(rig.ids)
    with pytest.raises(ValueError, match="the states before its last update"):
        rig.executor.exchange(rig.ids[1:])
    rig.close()


def test_a_store_that_fails_before_it_writes_leaves_the_version_before(
    backend: str, tmp_path: Path
) -> None:
    rig = Rig(tmp_path, backend, chunk_count=1, versioned=True)
    values = filled(rig, 1)
    rig.executor.commit(rig.ids)
    rig.update({0: np.ones(NUMEL, np.float32)}).wait()
    rig.executor.commit(rig.ids)
    # The store also reads the other sections, to write a new version.
    rig.executor.set_seam(aio.Seam(fault=aio.Fault("read", 0, persistent=True)))
    with pytest.raises(AioError):
        rig.store({0: values[0]}, mask=1).wait()
    rig.executor.set_seam(aio.Seam())
    rig.executor.rollback(rig.ids)
    rig.executor.exchange(rig.ids)
    assert same(rig.read(0), values[0])
    rig.close()


def test_states_in_memory_have_no_version_before(backend: str, tmp_path: Path) -> None:
    """An update that stops at a wrong checksum has begun to change their second version."""
    rig = Rig(tmp_path, backend, chunk_count=1, versioned=True, resident=(1,))
    filled(rig, 1)
    with pytest.raises(ValueError, match="on a drive alone"):
        rig.executor.exchange(rig.ids)
    rig.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"other_bytes": 4096}, "second run of 4096"),
        ({"other_offset": 100}, "not 4096-aligned"),
        ({"other_offset": 4096, "other_file": 0}, "overlaps the first"),
        ({"other_sums_ptr": 0}, "checksums for only one of its places"),
    ],
)
def test_second_places_that_cannot_be_are_refused(
    backend: str, change: dict, message: str, tmp_path: Path
) -> None:
    rig = Rig(tmp_path, backend, chunk_count=1, versioned=True)
    for field, value in change.items():
        rig.chunks[field] = value
    with pytest.raises(ValueError, match=message):
        rig.executor.define(rig.chunks)
    rig.close()


def test_a_file_that_holds_a_commit_can_be_left_to_others(backend: str, tmp_path: Path) -> None:
    """A checkpoint without copies keeps the file of the committed places, which is never written
    again."""
    rig = Rig(tmp_path, backend, chunk_count=2, versioned=True)
    filled(rig)
    grad = np.ones(NUMEL, np.float32)
    rig.update({0: grad, 1: grad}).wait()  # all live places are in the second file now
    rig.executor.commit(rig.ids)
    kept = [committed_bytes(rig, index) for index in range(2)]
    path = live_file(rig, 0)[0]
    rig.update({0: grad, 1: grad}, step=2).wait()
    rig.executor.commit(rig.ids)
    fresh = aio.SwapFile.create(tmp_path)
    fresh.grow(2 * rig.run_bytes)
    index = rig.executor.add_file(0, fresh)
    assert index == 2
    drives = rig.chunks["drive"]
    rig.executor.relocate(rig.ids, drives, np.full(2, index), np.arange(2) * rig.run_bytes)
    rig.executor.remove_file(0, 1)
    values = [rig.read(index) for index in range(2)]
    rig.update({0: grad, 1: grad}, step=3).wait()
    for number in range(2):
        new = [section.copy() for section in values[number]]
        adamw(records.Format.SPLIT, new, grad, hyper_record(3)[0])
        assert same(rig.read(number), new)
        with path.open("rb", buffering=0) as file:
            assert os.pread(file.fileno(), rig.run_bytes, number * rig.run_bytes) == kept[number]
    with pytest.raises(ValueError, match="second place of a chunk is the committed one"):
        rig.executor.relocate(rig.ids, drives, np.full(2, index), np.arange(2) * rig.run_bytes)
    rig.close()
    fresh.close()


def test_files_are_refused_that_are_in_use_or_not_there(backend: str, tmp_path: Path) -> None:
    rig = Rig(tmp_path, backend, chunk_count=1, versioned=True)
    for index in (0, 1, 5, -1):
        with pytest.raises(ValueError, match="cannot remove"):
            rig.executor.remove_file(0, index)
    with pytest.raises(ValueError, match="file is not known"):
        rig.executor.relocate(rig.ids, np.array([0]), np.array([3]), np.array([0]))
    rig.chunks["other_file"] = 4
    with pytest.raises(ValueError, match="add_file comes first"):
        rig.executor.define(rig.chunks)
    for _ in range(6):
        rig.executor.add_file(0, rig.others[0])
    with pytest.raises(ValueError, match="at most 8 files"):
        rig.executor.add_file(0, rig.others[0])
    rig.close()


def test_gradients_on_their_way_hold_up_no_commit(backend: str, tmp_path: Path) -> None:
    """Gradients have no versions: units of one model spill while the first update of another begins
    a step."""
    rng = np.random.default_rng(0)
    seam = aio.Seam(write_bytes_per_s=500_000.0)
    rig = Rig(tmp_path, backend, chunk_count=1, versioned=True, spilled=True, seam=seam)
    grad = rng.integers(0x3F00, 0x3F80, NUMEL, dtype=np.uint16)
    values = [*random_chunk(rng), grad]
    rig.store({0: values}).wait()
    rig.executor.commit(rig.ids)
    for generation in range(2):
        before = rig.executor.look(rig.ids)[0]["generation"]
        spilled = rig.store({0: values}, mask=1 << SECTIONS)
        rig.executor.commit(rig.ids)
        assert not spilled.done
        with pytest.raises(ValueError, match="cannot rollback"):
            rig.executor.rollback(rig.ids)
        update = rig.update({0: None}, step=generation + 1)
        with pytest.raises(ValueError, match="cannot commit"):
            rig.executor.commit(rig.ids)
        spilled.wait()
        update.wait()
        assert rig.executor.look(rig.ids)[0]["generation"] > before
        rig.executor.rollback(rig.ids)
        ticket, found = rig.fetch([0], mask=31)
        ticket.wait()
        assert same(found[0], values)
    rig.close()
