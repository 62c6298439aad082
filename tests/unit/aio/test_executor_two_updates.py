"""Two updates of a versioned chunk between commits: each writes its own sections to the new
version, and until the second one has ended every job finds each section where it is."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infinity import aio
from infinity._src.cabi import records
from infinity._src.kernels.hyper import hyper_row_muon, hyper_row_muon_momentum
from infinity.errors import ChecksumError, DeviceFailedError
from tests.oracle import update_sections
from tests.unit.aio.rig import BACKENDS, NUMEL, Rig, outcome, random_chunk, same

MOMENTUM = hyper_row_muon_momentum(momentum=0.9, nesterov=True).reshape(1)
MASTERS = hyper_row_muon(step_size=0.1, decay=0.999).reshape(1)
ONE_UPDATE = {
    "first": {"hyper": MOMENTUM, "leaves": 0b1011, "first": True},
    "second": {"hyper": MASTERS, "leaves": 0b1100},
}
SECOND_MOMENT = 0b1000


class Chunk:
    """One chunk with two places and committed states, and what it must hold."""

    def __init__(self, directory: Path, backend: str, **options: Any) -> None:
        options = {"chunk_count": 1, **options}
        self.rig = Rig(directory, backend, versioned=True, verify="full", **options)
        self.now = random_chunk(np.random.default_rng(0))
        zeros = self.rig.zeros
        self.now = [s * 0 if zeros >> n & 1 else s for n, s in enumerate(self.now)]
        self.rig.store({0: self.now}, mask=15 & ~zeros).wait(20)
        self.rig.executor.commit(self.rig.ids)
        self.committed = self.now

    def start(self, which: str, **options: Any) -> aio.Ticket:
        """Submit one of the two updates; `now` is what it makes of the chunk."""
        grad = np.random.default_rng(len(which)).standard_normal(NUMEL).astype(np.float32)
        update = {**ONE_UPDATE[which], **options}
        # A momentum's update writes into its gradient.
        ticket = self.rig.update({0: grad.copy()}, **update)
        self.now = [section.copy() for section in self.now]
        update_sections(records.Format.SPLIT, self.now, grad, update["hyper"][0])
        return ticket

    def holds(self, values: list) -> bool:
        return same(self.rig.read(0), values)

    def commit(self) -> None:
        self.rig.executor.commit(self.rig.ids)
        self.committed = self.now

    def undo(self) -> None:
        self.rig.executor.rollback(self.rig.ids)
        self.rig.executor.recover().wait(20)
        self.now = self.committed

    def step(self) -> None:
        """Both updates, and a commit."""
        self.start("first").wait(20)
        self.start("second").wait(20)
        self.commit()
        assert self.holds(self.now)

    @property
    def record(self) -> Any:
        return self.rig.executor.look(self.rig.ids)[0]

    @property
    def moved(self) -> np.ndarray:
        """Bytes read and written, per element."""
        drives = self.rig.executor.stats().drives
        moved = [sum(d.bytes_read for d in drives), sum(d.bytes_written for d in drives)]
        return np.array(moved) / NUMEL

    def fail(self, op: str, nth: int, **options: Any) -> None:
        fault = aio.Fault(op, nth, **{"errno": errno.EIO, **options})
        self.rig.executor.set_seam(aio.Seam(fault=fault))


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(("zeros", "signs"), [(SECOND_MOMENT, 0), (0, 4)])
def test_each_update_moves_its_own_sections(
    backend: str, zeros: int, signs: int, tmp_path: Path
) -> None:
    """A second moment that is not zero moves with the masters, since it may have their signs."""
    chunk = Chunk(tmp_path, backend, zeros=zeros)
    for _ in range(2):
        before = chunk.moved
        chunk.start("first").wait(20)
        assert (chunk.moved - before).tolist() == [4, 4]
        assert chunk.record["older"] == 0b1011 & ~zeros
        before = chunk.moved
        chunk.start("second").wait(20)
        assert (chunk.moved - before).tolist() == [4 + signs, 4 + signs]
        assert (chunk.record["older"], chunk.record["zeros"]) == (0, zeros)
        assert chunk.holds(chunk.now)
        chunk.commit()
    chunk.rig.close()


def test_until_the_second_one_each_section_is_read_where_it_is(
    backend: str, tmp_path: Path
) -> None:
    chunk = Chunk(tmp_path, backend)
    chunk.start("first").wait(20)
    assert chunk.holds(chunk.now)
    with pytest.raises(ValueError, match="first of two updates"):
        chunk.rig.executor.commit(chunk.rig.ids)
    with pytest.raises(ValueError, match="committed"):
        chunk.rig.executor.relocate(chunk.rig.ids, [0], [1], [0])
    chunk.start("first").wait(20)  # writes no more than the one before
    assert chunk.record["older"] == 0b1011
    chunk.now = [chunk.now[0], random_chunk(np.random.default_rng(7))[1], *chunk.now[2:]]
    chunk.rig.store({0: chunk.now}, mask=0b0010).wait(20)
    assert chunk.record["older"] == 0b1001
    assert chunk.holds(chunk.now)
    chunk.start("second").wait(20)
    assert chunk.holds(chunk.now)
    chunk.undo()
    assert chunk.record["older"] == 0
    assert chunk.holds(chunk.committed)
    chunk.step()
    chunk.rig.close()


def test_the_second_one_writes_what_neither_needs(backend: str, tmp_path: Path) -> None:
    chunk = Chunk(tmp_path, backend)
    chunk.start("first").wait(20)
    chunk.start("first", first=False).wait(20)
    assert chunk.record["older"] == 0
    assert chunk.holds(chunk.now)
    chunk.commit()
    chunk.step()
    chunk.rig.close()


@pytest.mark.parametrize("resident", [(0,), (2,), (0, 1), (1, 2, 3), (0, 1, 2, 3)])
def test_sections_in_memory(backend: str, resident: tuple[int, ...], tmp_path: Path) -> None:
    chunk = Chunk(tmp_path, backend, resident=resident)
    chunk.start("first").wait(20)
    assert chunk.holds(chunk.now)
    chunk.undo()
    assert chunk.holds(chunk.committed)
    chunk.step()
    chunk.start("first").wait(20)
    chunk.start("second").wait(20)
    chunk.undo()
    assert chunk.holds(chunk.committed)
    chunk.rig.close()


@pytest.mark.parametrize("which", ["first", "second"])
@pytest.mark.parametrize("op", ["read", "write"])
def test_a_fault_in_either_update_can_be_undone(
    backend: str, op: str, which: str, tmp_path: Path
) -> None:
    chunk = Chunk(tmp_path, backend)
    for nth in range(2):
        if which == "second":
            chunk.start("first").wait(20)
        chunk.fail(op, nth, lasting=True)
        failed = chunk.start(which)
        following = chunk.start("second")
        assert outcome(failed) is not None
        assert outcome(following) is not None
        chunk.rig.executor.set_seam(aio.Seam())
        chunk.undo()
        assert chunk.holds(chunk.committed)
        chunk.step()
    chunk.rig.close()


def test_a_momentum_that_no_drive_takes_is_kept_beside_older_masters(
    backend: str, tmp_path: Path
) -> None:
    chunk = Chunk(tmp_path, backend)
    chunk.fail("write", 0)
    assert isinstance(outcome(chunk.start("first")), DeviceFailedError)
    assert chunk.holds(chunk.now)
    chunk.rig.executor.recover().wait(20)
    assert chunk.record["older"] == 0b1011
    chunk.start("second").wait(20)
    chunk.commit()
    assert chunk.holds(chunk.now)
    chunk.rig.close()


@pytest.mark.parametrize("which", ["first", "second"])
@pytest.mark.parametrize("zeros", [0, SECOND_MOMENT])
def test_a_bad_block_goes_unnoticed(backend: str, which: str, zeros: int, tmp_path: Path) -> None:
    """The reserved extent gets what the new version has by then."""
    chunk = Chunk(tmp_path, backend, spares=1, zeros=zeros)
    if which == "second":
        chunk.start("first").wait(20)
    chunk.fail("write", 1)
    chunk.start(which).wait(20)
    assert chunk.rig.executor.stats().moved_writes == 1
    assert chunk.holds(chunk.now)
    if which == "first":
        chunk.start("second").wait(20)
    chunk.commit()
    chunk.step()
    chunk.rig.close()


@pytest.mark.parametrize("which", ["first", "second"])
@pytest.mark.parametrize("zeros", [0, SECOND_MOMENT])
def test_to_another_drive_a_version_moves_whole(
    backend: str, which: str, zeros: int, tmp_path: Path
) -> None:
    chunk = Chunk(tmp_path, backend, drive_count=2, spares=(0, 2), zeros=zeros)
    if which == "second":
        chunk.start("first").wait(20)
    chunk.fail("write", 0, persistent=True, drive=0)
    chunk.start(which).wait(20)
    assert (chunk.record["drive"], chunk.record["other_drive"]) == (1, 0)
    assert chunk.record["older"] == 0
    assert chunk.holds(chunk.now)
    chunk.rig.executor.set_seam(aio.Seam())
    if which == "first":
        chunk.start("second").wait(20)
    chunk.commit()
    assert chunk.holds(chunk.now)
    # From now on the first update writes all, as the second one could not read two drives.
    chunk.start("first").wait(20)
    assert chunk.record["older"] == 0
    chunk.undo()
    chunk.step()
    chunk.rig.close()


def test_masters_are_verified_where_they_are(backend: str, tmp_path: Path) -> None:
    chunk = Chunk(tmp_path, backend)
    chunk.start("first").wait(20)
    chunk.fail("read", 0, kind="bitflip")
    chunk.start("second").wait(20)
    assert chunk.rig.executor.stats().rereads == 1
    assert chunk.holds(chunk.now)
    chunk.undo()
    chunk.start("first").wait(20)
    record = chunk.record
    file = (chunk.rig.others if record["other_file"] else chunk.rig.files)[0]
    at = int(record["other_offset"] + record["section_at"][1])
    path = Path(f"/proc/self/fd/{file.fd}")
    with path.open("r+b", buffering=0) as opened:
        os.pwrite(opened.fileno(), b"\x5a" * 4096, at)
    error = outcome(chunk.start("second"))
    assert isinstance(error, ChecksumError)
    assert error.offset == at
    chunk.rig.close()


def test_reads_ahead_have_the_sections_of_each_update(backend: str, tmp_path: Path) -> None:
    chunk = Chunk(tmp_path, backend, zeros=SECOND_MOMENT, hold_s=30.0)
    before = chunk.moved
    mask = ONE_UPDATE["first"]["leaves"] << aio.LEAVES_SHIFT | records.MASK_FIRST
    chunk.rig.executor.prefetch(chunk.rig.ids, np.array([mask], dtype=np.uint32))
    chunk.start("first").wait(20)
    assert (chunk.moved - before).tolist() == [4, 4]
    gate = chunk.rig.executor.gate()
    target = np.zeros((1, NUMEL), dtype=np.uint16)
    ticket = chunk.start("second", gate=gate, target=target)
    gate.open([target.ctypes.data])
    ticket.wait(20)
    assert (chunk.moved - before).tolist() == [8, 8]
    assert chunk.rig.executor.stats().reads_ahead == 2
    assert np.array_equal(target[0], chunk.now[0])
    assert chunk.holds(chunk.now)
    chunk.rig.close()
