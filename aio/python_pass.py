"""What one job of the Python executor does to its chunk's bytes between read and write."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from infinity.aio import checks, plan
from infinity.aio.python_records import Run
from infinity.aio.python_transfer import Kernel, Sections, memory_at

_STORE, _FETCH, _UPDATE = plan.JobKind.STORE, plan.JobKind.FETCH, plan.JobKind.UPDATE


def run_pass(run: Run, kernel: Kernel | None, *, verify: bool) -> int:
    """Verify, update, copy, seal one job's sections. Needs no lock.

    Returns -1; -2 for a plan that cannot be; section * pieces + piece of the first mismatch, and then nothing was touched.
    """
    sections = Sections(run.chunk.record, slot_of(run) if run.bytes else None, run.slot_at)
    used = [section for section in range(sections.count) if run.mask >> section & 1]
    if run.kind != _STORE and verify:
        for section in used:
            bad = sections.verify(section)
            if bad >= 0:
                return section * sections.pieces + bad
    if run.kind == _UPDATE:
        assert kernel is not None
        submission = run.submission
        if not sections.update(kernel, submission.segs[run.segs], submission.hypers):
            return -2
    for section in used if run.kind == _STORE else ():
        _copy(sections.arrays[section], run.ptr[section])
    for section in used if run.kind != _FETCH else ():
        sections.seal(section)
    for section in used if run.kind == _FETCH else [0] if run.kind == _UPDATE else []:
        array = sections.arrays[section]
        if run.ptr[section] and array is not None and array.ctypes.data != run.ptr[section]:
            memory_at(run.ptr[section], array.nbytes)[:] = array
    return -1


def slot_of(run: Run) -> npt.NDArray[np.uint8]:
    """The memory of the job's slot."""
    assert run.pool is not None
    return run.pool.slot(run.slot)


def _copy(target: npt.NDArray[np.uint8] | None, address: int) -> None:
    """STORE's copy: from the address, or zeros."""
    assert target is not None
    if address == 0:
        target[:] = 0
    elif address != target.ctypes.data:
        target[:] = memory_at(address, target.nbytes)


def neighbours(first: Run, second: Run) -> bool:
    """Whether `second` follows `first` in the file, so that one request serves both."""
    if len(first.ranges) != 1 or len(second.ranges) != 1 or first.kind != second.kind:
        return False
    same_drive = first.chunk.record["drive"] == second.chunk.record["drive"]
    return bool(same_drive and sum(first.ranges[0][::2]) == second.ranges[0][0])


def checksum_fault(run: Run, bad: int) -> checks.FaultRecord:
    """Which piece does not match: `bad` is section * pieces + piece."""
    record: Any = run.chunk.record
    numel, piece_numel = int(record["numel"]), int(record["piece_numel"])
    section, piece = divmod(bad, plan.piece_count(numel, piece_numel))
    first = piece * piece_numel
    itemsize = int(record["itemsize"][section])
    return checks.FaultRecord(
        kind=checks.FAULT_CHECKSUM,
        op=0,
        offset=int(record["file_offset"]) + int(record["section_at"][section]) + first * itemsize,
        length=min(numel - first, piece_numel) * itemsize,
        section=section,
        piece=piece,
    )
