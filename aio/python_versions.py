"""Two places of a chunk, for the Python executor: which one is written, and the way back. As native/executor_versions.c."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from infinity.aio import checks, plan
from infinity.aio.python_sections import memory_at, sums_of

if TYPE_CHECKING:
    from infinity.aio.python_engine import Engine
    from infinity.aio.python_records import Chunk, Run
    from infinity.aio.swap_file import SwapFile


class Live(IntEnum):
    """What the live place of a versioned chunk is."""

    FREE = 0
    """Nothing was committed yet: written in place."""
    COMMITTED = 1
    """What is written next goes to the other place."""
    MOVED = 2
    """The other place is the committed one."""


def states_of(record: Any) -> int:
    """The sections that have versions, as a mask: all but spilled gradients."""
    return (1 << plan.Format.of(record["format"]).written_count) - 1


def moves(run: Run) -> bool:
    """Whether the job will write the chunk's other place. [locked]"""
    chunk = run.chunk
    if chunk.live != Live.COMMITTED or not checks.is_versioned(chunk.record):
        return False
    return run.kind == plan.JobKind.UPDATE or (run.kind == plan.JobKind.STORE and bool(run.mask & states_of(chunk.record)))


def other_of(record: Any) -> Any:
    """The chunk as it is at its other place, written next."""
    other = record.copy()
    # Never one that was written before, so that what is stale does not pass.
    other["generation"] = max(int(record["generation"]), int(record["other_generation"])) + 1
    other["file_offset"], other["file"] = record["other_offset"], record["other_file"]
    other["sums_ptr"] = record["other_sums_ptr"]
    for section, address in enumerate(record["other_ptr"]):
        if address:
            other["section_ptr"][section] = address
    return other


def bring(record: Any) -> None:
    """The new version of resident sections begins as the live one."""
    for section, address in enumerate(record["other_ptr"]):
        if address:
            size = checks.section_bytes(record, section)
            memory_at(int(address), size)[:] = memory_at(int(record["section_ptr"][section]), size)


def _swap(record: Any, generation: int) -> None:
    """The two places change their roles."""
    was, grad = record.copy(), checks.grad_section(record)
    record["generation"], record["other_generation"] = generation, was["generation"]
    record["file_offset"], record["other_offset"] = was["other_offset"], was["file_offset"]
    record["file"], record["other_file"] = was["other_file"], was["file"]
    record["sums_ptr"], record["other_sums_ptr"] = was["other_sums_ptr"], was["sums_ptr"]
    for section, address in enumerate(was["other_ptr"]):
        if address:
            record["section_ptr"][section], record["other_ptr"][section] = address, was["section_ptr"][section]
    before, now = sums_of(was), sums_of(record)
    if grad >= 0 and before is not None and now is not None:
        now[grad] = before[grad]  # gradients have no versions, and so neither have their checksums


def flip(chunk: Chunk) -> None:
    """The other place, just written, is the live one. [locked]"""
    _swap(chunk.record, int(other_of(chunk.record)["generation"]))
    chunk.live = Live.MOVED


def _for_good(record: Any) -> bool:
    """Whether a resident section is changed for good."""
    return any(
        record["section_at"][section] < 0 and not record["other_ptr"][section]
        for section in range(plan.SECTION_MAX)
        if states_of(record) >> section & 1
    )


def _leaves_states(run: Run) -> bool:
    """Whether a job writes no state; gradients that spill are written to a place that has no versions. [locked]"""
    stores = run.kind == plan.JobKind.STORE and not run.mask & states_of(run.chunk.record)
    return run.kind == plan.JobKind.FETCH or stores


def _pick(engine: Engine, ids: Sequence[int], what: str, *, back: bool = False) -> list[Chunk]:
    """The chunks, none of which has pending jobs that write states; with `back`, any at all. Raises: ValueError."""
    chunks = [engine.chunks.get(int(index)) for index in ids]
    if any(chunk is None or (chunk.fifo if back else not all(map(_leaves_states, chunk.fifo))) for chunk in chunks):
        raise ValueError(checks.versions_refused(what, irrevocable=False))
    return [chunk for chunk in chunks if chunk is not None]


def commit(engine: Engine, ids: Sequence[int]) -> None:
    """See `Executor.commit`. [locked]"""
    for chunk in _pick(engine, ids, "commit"):
        chunk.live = Live.COMMITTED
        chunk.committed = (chunk.invalid, chunk.fault)


def relocate(engine: Engine, ids: Sequence[int], files: Sequence[int], offsets: Sequence[int]) -> None:
    """See `Executor.relocate`. [locked]"""
    chunks = _pick(engine, ids, "relocate")
    for chunk, file, offset in zip(chunks, files, offsets, strict=True):
        if not chunk.record["other_bytes"] or file not in engine.channels[chunk.drive].files or offset < 0:
            raise ValueError(checks.versions_refused("relocate", irrevocable=False))
        if chunk.live == Live.MOVED:
            raise ValueError(checks.RELOCATES_COMMITTED)
    for chunk, file, offset in zip(chunks, files, offsets, strict=True):
        chunk.record["other_file"], chunk.record["other_offset"] = file, offset


def add_file(engine: Engine, drive: int, file: SwapFile) -> int:
    """See `Executor.add_file`. [locked]"""
    files = engine.channels[drive].files
    index = next((index for index in range(1, checks.FILE_MAX) if index not in files), 0)
    if not index:
        raise ValueError(checks.TOO_MANY_FILES)
    files[index] = file
    return index


def remove_file(engine: Engine, drive: int, index: int) -> None:
    """See `Executor.remove_file`. [locked]"""
    used = any(chunk.drive == drive and index in checks.files_of(chunk.record) for chunk in engine.chunks.values())
    if used or index < 1 or index not in engine.channels[drive].files:
        raise ValueError(checks.FILE_STAYS)
    del engine.channels[drive].files[index]


def rollback(engine: Engine, ids: Sequence[int]) -> None:
    """See `Executor.rollback`. [locked]"""
    chunks = _pick(engine, ids, "rollback", back=True)
    if any(chunk.live == Live.MOVED and _for_good(chunk.record) for chunk in chunks):
        raise ValueError(checks.versions_refused("rollback", irrevocable=True))
    for chunk in chunks:
        if chunk.live == Live.FREE:
            continue
        if chunk.live == Live.MOVED:
            engine.ahead.drop(chunk)
            engine.kept.drop(chunk)
            _swap(chunk.record, int(chunk.record["other_generation"]))
        states = states_of(chunk.record)
        invalid, chunk.fault = chunk.committed
        chunk.invalid = (chunk.invalid & ~states) | (invalid & states)
        chunk.live = Live.COMMITTED
    engine.pump()
