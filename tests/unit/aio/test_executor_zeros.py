"""Sections that nothing has written yet and that stand for zeros: they are not read, whatever the
drive has there, until a job writes them."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from infinity import aio
from infinity._src.cabi import records
from infinity._src.kernels.hyper import hyper_row_muon
from tests.oracle import update_sections
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

MOMENTS = 0b1100
NEW = 0b1110


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def begun(rig: Rig, index: int = 0) -> list:
    """A chunk whose parameter is stored, and nothing else."""
    hi = random_chunk(np.random.default_rng(index))[0]
    sections = [hi, *(np.zeros(NUMEL, dtype) for dtype in rig.dtypes[1:])]
    rig.store({index: sections}, mask=1).wait()
    return sections


def gradient(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(NUMEL).astype(np.float32)


def updated(sections: list, step: int = 1) -> list:
    new = [section.copy() for section in sections]
    adamw(records.Format.SPLIT, new, gradient(), hyper_record(step)[0])
    return new


def bytes_read(rig: Rig) -> int:
    return sum(drive.bytes_read for drive in rig.executor.stats().drives)


def zeros_of(rig: Rig, index: int = 0) -> int:
    return int(rig.executor.look(rig.ids[index : index + 1])[0]["zeros"])


@pytest.mark.parametrize("verify", ["full", "sample", "off"])
def test_they_are_read_as_zeros_and_no_byte_moves(
    backend: str, verify: str, tmp_path: Path
) -> None:
    rig = Rig(tmp_path, backend, chunk_count=2, zeros=NEW, verify=verify)
    sections = begun(rig)
    ticket, targets = rig.fetch([0], mask=MOMENTS)
    for target in targets[0]:
        target[:] = 7
    ticket.wait()
    assert bytes_read(rig) == 0
    assert same(rig.read(0), sections)
    assert bytes_read(rig) == 2 * NUMEL
    rig.close()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("resident", [(), (2,)])
def test_the_first_update_reads_the_parameter_alone(
    backend: str, given: bool, resident: tuple, tmp_path: Path
) -> None:
    rig = Rig(tmp_path, backend, chunk_count=1, zeros=NEW, resident=resident)
    sections = begun(rig)
    taken = {0: sections[0].copy()} if given else None
    rig.update({0: gradient()}, given=taken).wait()
    assert bytes_read(rig) == (0 if given else 2 * NUMEL)
    now = updated(sections)
    assert same(rig.read(0), now)
    assert zeros_of(rig) == 0
    rig.update({0: gradient()}, step=2).wait()
    assert same(rig.read(0), updated(now, 2))
    rig.close()


def test_signs_of_a_store_that_has_not_ended_are_read(backend: str, tmp_path: Path) -> None:
    """The store makes the moment with the signs of masters real, which an update leaves out only
    while it is zero."""
    rig = Rig(tmp_path, backend, zeros=NEW)
    begun(rig)
    sections = random_chunk(np.random.default_rng(5))
    hi, lo, _, v = sections
    hi[::9] &= ~np.uint16(1)
    lo[::9], v[::9] = -32768, -v[::9]
    gate = rig.executor.gate(escapes=False)
    rig.fetch([0], gate=gate)
    rig.store({0: sections})
    masters = hyper_row_muon(step_size=0.1, decay=0.999).reshape(1)
    ticket = rig.update({0: gradient()}, hyper=masters, leaves=MOMENTS)
    gate.open([])
    ticket.wait(20)
    wanted = [section.copy() for section in sections]
    update_sections(records.Format.SPLIT, wanted, gradient(), masters[0])
    assert same(rig.read(0), wanted)
    rig.close()


def test_zeros_that_an_update_leaves_out_stay_zeros_in_a_new_version(
    backend: str, tmp_path: Path
) -> None:
    rig = Rig(tmp_path, backend, chunk_count=1, zeros=NEW, versioned=True)
    sections = begun(rig)
    rig.executor.commit(rig.ids)
    masters = hyper_row_muon(step_size=0.1, decay=0.999).reshape(1)
    rig.update({0: gradient()}, hyper=masters, leaves=MOMENTS).wait()
    update_sections(records.Format.SPLIT, sections, gradient(), masters[0])
    assert (zeros_of(rig), same(rig.read(0), sections)) == (MOMENTS, True)
    rig.close()


def test_a_store_makes_the_sections_it_writes_real(backend: str, tmp_path: Path) -> None:
    rig = Rig(tmp_path, backend, chunk_count=1, zeros=NEW)
    sections = begun(rig)
    sections[2] = random_chunk(np.random.default_rng(5))[2]
    rig.store({0: sections}, mask=0b0100).wait()
    assert zeros_of(rig) == 0b1010
    assert same(rig.read(0), sections)
    rig.update({0: gradient()}).wait()
    assert same(rig.read(0), updated(sections))
    rig.close()


def test_a_rollback_finds_them_zeros_again(backend: str, tmp_path: Path) -> None:
    rig = Rig(tmp_path, backend, chunk_count=1, zeros=NEW, versioned=True)
    sections = begun(rig)
    rig.executor.commit(rig.ids)
    for _ in range(2):
        rig.update({0: gradient()}).wait()
        assert (zeros_of(rig), same(rig.read(0), updated(sections))) == (0, True)
        rig.executor.rollback(rig.ids)
        assert (zeros_of(rig), same(rig.read(0), sections)) == (NEW, True)
    rig.update({0: gradient()}).wait()
    rig.executor.commit(rig.ids)  # the place of the zeros is the next one to be written
    now = updated(sections)
    rig.update({0: gradient()}, step=2).wait()
    assert (zeros_of(rig), same(rig.read(0), updated(now, 2))) == (0, True)
    rig.executor.rollback(rig.ids)
    assert (zeros_of(rig), same(rig.read(0), now)) == (0, True)
    rig.close()


def test_a_part_of_a_new_version_brings_zeros_along(backend: str, tmp_path: Path) -> None:
    rig = Rig(tmp_path, backend, chunk_count=1, zeros=NEW, versioned=True)
    sections = begun(rig)
    rig.executor.commit(rig.ids)
    changed = [random_chunk(np.random.default_rng(9))[0], *sections[1:]]
    rig.store({0: changed}, mask=1).wait()
    assert (zeros_of(rig), same(rig.read(0), changed)) == (0, True)
    rig.executor.rollback(rig.ids)
    assert same(rig.read(0), sections)
    rig.close()


@pytest.mark.parametrize("versioned", [False, True])
def test_a_write_that_fails_keeps_what_it_should_have_written(
    backend: str, versioned: bool, tmp_path: Path
) -> None:
    fault = aio.Fault("write", 1, kind="errno", errno=errno.EIO)
    rig = Rig(
        tmp_path, backend, chunk_count=1, zeros=NEW, versioned=versioned,
        seam=aio.Seam(fault=fault),
    )  # fmt: skip
    sections = begun(rig)
    rig.executor.commit(rig.ids)
    assert outcome(rig.update({0: gradient()})) is not None
    now = updated(sections)
    assert same(rig.read(0), now)
    rig.executor.recover().wait()
    assert (zeros_of(rig), same(rig.read(0), now)) == (0, True)
    rig.close()


def test_an_update_behind_a_gate_reads_no_zeros_ahead(backend: str, tmp_path: Path) -> None:
    rig = Rig(tmp_path, backend, chunk_count=1, zeros=NEW, hold_s=30.0)
    sections = begun(rig)
    gate = rig.executor.gate()
    target = np.zeros((1, NUMEL), dtype=np.uint16)
    ticket = rig.update({0: gradient()}, gate=gate, target=target)
    gate.open([target.ctypes.data])
    ticket.wait(20)
    assert same(rig.read(0), updated(sections))
    assert np.array_equal(target[0], updated(sections)[0])
    assert bytes_read(rig) == 2 * NUMEL + 12 * NUMEL
    rig.close()


def test_a_damaged_parameter_is_found_beside_zeros(backend: str, tmp_path: Path) -> None:
    """The pass begins anew after a second read: zeros that it has spoilt are zeros again."""
    seam = aio.Seam(fault=aio.Fault("read", 0, kind="bitflip"))
    rig = Rig(tmp_path, backend, chunk_count=1, zeros=NEW, seam=seam, verify="full")
    sections = begun(rig)
    rig.update({0: gradient()}).wait()
    assert rig.executor.stats().rereads == 1
    assert same(rig.read(0), updated(sections))
    rig.close()


@pytest.mark.parametrize(("zeros", "resident"), [(0b100000, ()), (0b0100, (2,))])
def test_zeros_of_sections_that_are_not_on_a_drive_are_refused(
    backend: str, zeros: int, resident: tuple, tmp_path: Path
) -> None:
    rig = Rig(tmp_path, backend, chunk_count=1, resident=resident)
    chunk = rig.chunks[:1].copy()
    chunk["zeros"], chunk["key"] = zeros, 77
    with pytest.raises(ValueError, match="zeros"):
        rig.executor.define(chunk)
    rig.close()


def test_a_store_that_was_refused_leaves_no_zeros_behind(backend: str, tmp_path: Path) -> None:
    fault = aio.Fault("write", 2, kind="errno", errno=errno.EIO)
    rig = Rig(tmp_path, backend, chunk_count=2, zeros=NEW, seam=aio.Seam(fault=fault))
    sections = [begun(rig, index) for index in range(2)]
    assert outcome(rig.update({1: gradient()})) is not None  # it marks the drive
    sections[0][2] = random_chunk(np.random.default_rng(5))[2]
    assert outcome(rig.store({0: sections[0]}, mask=0b0100)) is not None
    for mask in (0b0100, 0b0110):
        assert outcome(rig.fetch([0], mask=mask)[0]) is not None
    rig.executor.recover().wait()
    assert outcome(rig.fetch([0], mask=0b0100)[0]) is not None
    rig.store({0: sections[0]}, mask=0b0100).wait()
    assert same(rig.read(0), sections[0])
    rig.close()
