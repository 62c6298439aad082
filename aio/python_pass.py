"""What one job of the Python executor does to its chunk's bytes between read and write."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from infinity.aio import checks, plan, python_versions
from infinity.aio.python_records import Run
from infinity.aio.python_sections import Kernel, Sections, memory_at

_STORE, _FETCH, _UPDATE = plan.JobKind.STORE, plan.JobKind.FETCH, plan.JobKind.UPDATE
PASSED, BAD_PLAN = -1, -2


def run_pass(run: Run, kernel: Kernel | None, *, verify: str) -> int:
    """Verify, update, copy, seal one job's sections. Needs no lock.

    Returns PASSED; BAD_PLAN for an update that cannot be; section * pieces + piece of the first mismatch, and then nothing
    was touched.
    """
    chunk = run.chunk
    kept = chunk.kept if run.kind == _FETCH else None
    lodged = [
        run.place.section(s) if kept is None or run.place.at[s] >= 0 else kept.section(s)
        for s in range(plan.SECTION_MAX)
    ]
    live = sections = Sections(chunk.record, lodged)
    if run.moves:
        sections = Sections(python_versions.other_of(chunk.record), lodged)
    used = _of(run.mask)
    if run.given:
        hi = sections.arrays[0]
        assert hi is not None
        hi[:] = memory_at(run.ptr[1], hi.nbytes)
    if verify != "off":
        phase = run.phase if verify == "sample" and not run.reread else None
        for section in _of(run.reads):
            bad = live.verify(section, phase)
            if bad >= 0:
                return section * sections.pieces + bad
    if run.moves:
        python_versions.bring(chunk.record)
    if run.kind == _UPDATE:
        assert kernel is not None
        submission = run.submission
        if not sections.update(kernel, submission.segs[run.segs], submission.hypers):
            return BAD_PLAN
    for section in used if run.kind == _STORE else ():
        _copy(sections.arrays[section], run.ptr[section])
    for section in _of(run.writes) if verify != "off" else ():
        (live if section == checks.grad_section(chunk.record) else sections).seal(section)
    for section in used if run.kind == _FETCH else [0] if run.kind == _UPDATE else []:
        array = sections.arrays[section]
        if run.ptr[section] and array is not None and array.ctypes.data != run.ptr[section]:
            memory_at(run.ptr[section], array.nbytes)[:] = array
    return PASSED


def _of(mask: int) -> list[int]:
    return [section for section in range(plan.SECTION_MAX) if mask >> section & 1]


def _copy(target: npt.NDArray[np.uint8] | None, address: int) -> None:
    """STORE's copy: from the address, or zeros."""
    assert target is not None
    if address == 0:
        target[:] = 0
    elif address != target.ctypes.data:
        target[:] = memory_at(address, target.nbytes)


def section_of(run: Run, bad: int) -> int:
    """Which section a mismatch of `run_pass` is in."""
    record = run.chunk.record
    return bad // plan.piece_count(int(record["numel"]), int(record["piece_numel"]))


def checksum_fault(run: Run, bad: int) -> checks.FaultRecord:
    """Which piece does not match: `bad` is section * pieces + piece."""
    record: Any = run.chunk.record
    numel, piece_numel = int(record["numel"]), int(record["piece_numel"])
    section, piece = divmod(bad, plan.piece_count(numel, piece_numel))
    first = piece * piece_numel
    return checks.FaultRecord(
        kind=checks.FAULT_CHECKSUM,
        op=0,
        offset=checks.section_file_at(record, section) + checks.section_bytes(record, section, first),
        length=checks.section_bytes(record, section, min(numel - first, piece_numel)),
        section=section,
        piece=piece,
    )
