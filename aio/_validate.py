"""Checks of records and options before C uses them, and error messages for faults of C."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity._src.cabi import records
from infinity._src.cabi.records import PoolSpec
from infinity.errors import (
    AioCancelledError,
    AioClosedError,
    AioError,
    ChecksumError,
    DeviceCopyError,
    DeviceFailedError,
    ShortTransferError,
    SwapFullError,
)

(
    FAULT_ERRNO,
    FAULT_SHORT,
    FAULT_CHECKSUM,
    FAULT_NO_SPACE,
    FAULT_CLOSED,
    FAULT_PLAN,
    FAULT_CANCELLED,
) = 1, 2, 3, 4, 5, 6, 7
FAULT_DEVICE = 8
OP_NAMES = {0: "read", 1: "write", -1: ""}

#: Error number of native/executor/submit.c -> message about a job.
JOB_WRONG = {
    1: "names a chunk that is not defined",
    2: "has an unknown kind",
    3: "has a mask that selects no section, or one that the chunk does not have",
    4: "has a gate base, but there is no gate, or the gate was opened with fewer bases",
    5: "has segments outside the segments array",
    6: "is a STORE with a gate base; only FETCH and UPDATE have one",
    7: "needs a larger slot than the pools have",
    8: "updates a chunk that has no optimizer state",
    9: "has MASK_PARAM_IN_MEMORY, but is no UPDATE with an address in ptr[1]",
    10: "has MASK_DEVICE, and no device is attached",
    11: "is a COPY that has a chunk, a gate or another mask, or lacks an address or a size",
}


_EARLIER = {
    0: "",
    1: " (of an earlier job, which left the chunk invalid)",
    2: (
        " (an earlier write to this drive failed, and no more is written to it until "
        "Executor.recover())"
    ),
}

#: `verify`: which pieces are compared with their checksums. "sample": one piece of 16, in rotation.
VERIFY = ("full", "sample", "off")


BYTES_MAX = 1 << 60
"""Maximum of a size or an offset of a chunk (INF_BYTES_MAX), so that sums of a few do not overflow
64 bits.
"""

_ITEMSIZE_MAX = 16
_SIZES = ("numel", "run_bytes", "file_offset", "other_offset", "other_bytes", "grad_offset")


def section_bytes(chunk: Any, section: int, numel: int | None = None) -> int:
    """Bytes of a section's first `numel` elements (None: all of the chunk), rounded up to whole
    items.
    """
    # 0 means 1 in CHUNK["group_numel"].
    group = max(int(chunk["group_numel"][section]), 1)
    return -(-(int(chunk["numel"]) if numel is None else numel) // group) * int(
        chunk["itemsize"][section]
    )


def align_up(size_bytes: int) -> int:
    """Round `size_bytes` up to a multiple of 4096, for O_DIRECT."""
    return -(-size_bytes // records.ALIGNMENT_BYTES) * records.ALIGNMENT_BYTES


@dataclass(frozen=True)
class FaultRecord:
    """Fault of a job; `kind` is one of FAULT_*. offset and length are bytes in the drive's file."""

    kind: int
    op: int = -1
    drive: int = -1
    error: int = 0
    offset: int = 0
    length: int = 0
    key: int = 0
    chunk: int = -1
    earlier: int = 0
    """0: of this job; 1: of an earlier job, which left the chunk invalid; 2: refused, because the
    drive is marked.
    """
    section: int = -1
    piece: int = -1

    def to_error(self, paths: Sequence[str]) -> AioError:
        """Return the typed error."""
        path = paths[self.drive] if 0 <= self.drive < len(paths) else "memory"
        of = f"chunk {self.chunk} (key {self.key:#x})"
        kinds: dict[int, tuple[type[AioError], str]] = {
            FAULT_SHORT: (
                ShortTransferError,
                f"{of}: the file is too short, or the transfer makes no progress",
            ),
            FAULT_CHECKSUM: (
                ChecksumError,
                (
                    f"{of}: section {self.section} piece {self.piece} is not what was written, "
                    "also when read again"
                ),
            ),
            FAULT_NO_SPACE: (SwapFullError, f"{of}: no space on the drive"),
            FAULT_CLOSED: (AioClosedError, f"{of}: the executor was closed before the job ran"),
            FAULT_CANCELLED: (AioCancelledError, f"{of}: the fetch was cancelled"),
            FAULT_PLAN: (
                AioError,
                f"{of}: the update's segments or hyper-parameters are out of range",
            ),
        }
        error_type, message = kinds.get(self.kind, (DeviceFailedError, f"{of}: the drive failed"))
        if self.kind == FAULT_DEVICE:
            return DeviceCopyError(
                f"{of}: a copy of {self.length} bytes to or from the device failed (the driver's "
                f"code is {self.error})"
            )
        message += _EARLIER[self.earlier]
        # No transfer failed, so the error has no path and range.
        if self.kind in (FAULT_CLOSED, FAULT_PLAN, FAULT_CANCELLED):
            return error_type(message, errno=self.error)
        return error_type(
            message,
            errno=self.error,
            path=path,
            op=OP_NAMES[self.op],
            offset=self.offset,
            length=self.length,
            chunk=self.chunk,
        )


def check_options(
    small: PoolSpec,
    large: PoolSpec,
    *,
    verify: str,
    workers: int,
    block_bytes: int,
    depth: int,
    threads_per_drive: int,
    null: int,
) -> None:
    """Raise ValueError for options that no executor can run with."""
    if verify not in VERIFY:
        raise ValueError(f"verify={verify!r}: must be one of {', '.join(VERIFY)}")
    # A null drive reads nothing, so no data match their checksum.
    if null and verify != "off":
        raise ValueError(f"Seam(null={null}) moves nothing: use verify='off'")
    if workers < 1 or threads_per_drive < 1:
        raise ValueError(
            f"workers={workers}, threads_per_drive={threads_per_drive}: both must be >= 1"
        )
    if not 2 <= depth <= 4096:
        raise ValueError(
            f"depth={depth}: must be 2 to 4096, so that reads and writes can both be in flight"
        )
    if (
        block_bytes < records.ALIGNMENT_BYTES
        or block_bytes % records.ALIGNMENT_BYTES
        or block_bytes > 1 << 30
    ):
        raise ValueError(f"block_bytes={block_bytes}: must be a multiple of 4096, at most 1 GiB")
    check_pools(small, large)


def check_pools(small: records.PoolSpec, large: records.PoolSpec) -> None:
    """Raise ValueError if the small pool has the larger slots."""
    if small.count and large.count and small.bytes > large.bytes:
        raise ValueError(
            f"small slots ({small.bytes} bytes) are larger than large ones ({large.bytes} bytes)"
        )


def as_records(
    array: npt.NDArray[Any] | None, dtype: np.dtype[Any], what: str
) -> npt.NDArray[np.void]:
    """Return `array` contiguous; None: an empty array. Raises ValueError for another dtype or
    shape.
    """
    if array is None:
        return np.zeros(0, dtype=dtype)
    if array.dtype != dtype or array.ndim != 1:
        raise ValueError(f"{what} must be a one-dimensional array of infinity.aio.{what.upper()}")
    # C reads the records in place.
    return np.ascontiguousarray(array)


def _chunk_wrong(chunk: Any, drive_count: int) -> str:
    """Return what is wrong with a CHUNK record, or ""."""
    count = int(chunk["section_count"])
    if not 1 <= count <= records.SECTION_MAX:
        return f"has {count} sections"
    if chunk["numel"] < 1 or chunk["piece_numel"] < 1:
        return f"has {chunk['numel']} elements in pieces of {chunk['piece_numel']}"
    for name in _SIZES:
        if abs(int(chunk[name])) > BYTES_MAX:
            return f"has {name} {chunk[name]}, past 2^60"
    end_before = 0
    for section in range(count):
        itemsize, at = int(chunk["itemsize"][section]), int(chunk["section_at"][section])
        if not 1 <= itemsize <= _ITEMSIZE_MAX or chunk["group_numel"][section] < 0:
            return f"has elements of {itemsize} bytes in section {section}"
        if chunk["numel"] > BYTES_MAX // itemsize or at > BYTES_MAX:
            return (
                f"has {chunk['numel']} elements of {itemsize} bytes at {at} in section {section}, "
                "past 2^60"
            )
        # A section that is not in the run is resident in RAM.
        if at < 0:
            if chunk["section_ptr"][section] == 0:
                return (
                    f"has section {section} neither in its run (section_at) nor in memory "
                    "(section_ptr)"
                )
            continue
        if at % records.ALIGNMENT_BYTES or at < end_before:
            return (
                f"has section {section} at {at}, which is not 4096-aligned or overlaps the one "
                "before"
            )
        # Sections ascend, so comparing with the previous end finds overlaps.
        end_before = at + align_up(section_bytes(chunk, section))
    on_drive = sum(1 << s for s in range(count) if chunk["section_at"][s] >= 0)
    zeros = int(chunk["zeros"] | chunk["other_zeros"])
    if zeros & ~on_drive:
        return f"has zeros {zeros:#b} outside the sections on its drive ({on_drive:#b})"
    if end_before > chunk["run_bytes"]:
        return f"has sections of {end_before} bytes in a run of {chunk['run_bytes']}"
    if end_before and (chunk["file_offset"] < 0 or chunk["file_offset"] % records.ALIGNMENT_BYTES):
        return f"has its run at offset {chunk['file_offset']}, which is not 4096-aligned"
    if end_before and not 0 <= chunk["drive"] < drive_count:
        return f"lies on drive {chunk['drive']} of {drive_count}"
    if is_versioned(chunk):
        return _second_place_wrong(chunk, drive_count)
    return ""


def _second_place_wrong(chunk: Any, drive_count: int) -> str:
    """Return what is wrong with the second place of a versioned CHUNK record, or ""."""
    end = grad = 0
    for section in range(int(chunk["section_count"])):
        if chunk["section_at"][section] < 0:
            continue
        if section == grad_section(chunk):
            grad = section_bytes(chunk, section)
        else:
            end = int(chunk["section_at"][section]) + align_up(section_bytes(chunk, section))
    first, other = int(chunk["file_offset"]), int(chunk["other_offset"])
    if end > chunk["other_bytes"]:
        return f"has states of {end} bytes in a second run of {chunk['other_bytes']}"
    if end and not 0 <= chunk["other_drive"] < drive_count:
        return f"has its second run on drive {chunk['other_drive']} of {drive_count}"
    one_file = chunk["drive"] == chunk["other_drive"] and chunk["file"] == chunk["other_file"]
    overlaps = one_file and first < other + end and other < first + end
    if end and (other < 0 or other % records.ALIGNMENT_BYTES or overlaps):
        return (
            f"has its second run at offset {other}, which is not 4096-aligned or overlaps the "
            f"first at {first}"
        )
    at = int(chunk["grad_offset"])
    if grad and (at < 0 or at % records.ALIGNMENT_BYTES):
        return f"has its gradients at offset {at}, which is not 4096-aligned"
    places = [(chunk["file"], first)]
    if chunk["other_drive"] == chunk["drive"]:
        places.append((chunk["other_file"], other))
    if grad and any(
        file == chunk["grad_file"] and at < place + end and place < at + grad
        for file, place in places
    ):
        return f"has its gradients at offset {at}, where its states are"
    if bool(chunk["sums_ptr"]) != bool(chunk["other_sums_ptr"]):
        return "has checksums for only one of its places"
    return ""


def _chunks_suspect(chunks: npt.NDArray[np.void], drive_count: int) -> npt.NDArray[np.bool_]:
    """Vectorized `_chunk_wrong`: a 100B-parameter model has 250,000 chunks."""
    count, numel = chunks["section_count"], chunks["numel"]
    wrong = (count < 1) | (count > records.SECTION_MAX) | (numel < 1) | (chunks["piece_numel"] < 1)
    for name in _SIZES:
        wrong |= (chunks[name] > BYTES_MAX) | (chunks[name] < -BYTES_MAX)
    end = np.zeros(len(chunks), dtype=np.int64)
    zeros = (chunks["zeros"] | chunks["other_zeros"]).astype(np.int64)
    for section in range(records.SECTION_MAX):
        used = section < count
        itemsize, at = chunks["itemsize"][:, section], chunks["section_at"][:, section]
        in_run = used & (at >= 0)
        group = chunks["group_numel"][:, section]
        wrong |= used & ((itemsize < 1) | (itemsize > _ITEMSIZE_MAX) | (group < 0))
        # By division: the product may overflow 64 bits.
        wrong |= used & (numel > BYTES_MAX // np.maximum(itemsize.astype(np.int64), 1))
        wrong |= in_run & (at > BYTES_MAX)
        wrong |= used & (at < 0) & (chunks["section_ptr"][:, section] == 0)
        wrong |= in_run & ((at % records.ALIGNMENT_BYTES != 0) | (at < end))
        size = -(-numel // np.maximum(group, 1)) * itemsize
        size = -(-size // records.ALIGNMENT_BYTES) * records.ALIGNMENT_BYTES
        end = np.where(in_run, at + size, end)
        zeros &= ~(in_run.astype(np.int64) << section)
    wrong |= zeros != 0  # zeros of a section that is not on the drive
    offset, drive = chunks["file_offset"], chunks["drive"]
    placed = end > 0
    wrong |= end > chunks["run_bytes"]
    wrong |= placed & ((offset < 0) | (offset % records.ALIGNMENT_BYTES != 0))
    wrong |= placed & ((drive < 0) | (drive >= drive_count))
    # Check versioned chunks one by one, unless they are wrong already: their sections may be
    # invalid.
    versioned = np.flatnonzero(
        ((chunks["other_bytes"] > 0) | chunks["other_ptr"].any(axis=1)) & ~wrong
    )
    wrong[versioned] |= np.array(
        [bool(_second_place_wrong(chunk, drive_count)) for chunk in chunks[versioned]], dtype=bool
    )
    result: npt.NDArray[np.bool_] = wrong
    return result


def check_chunks(chunks: npt.NDArray[np.void], drive_count: int) -> None:
    """Raise ValueError naming the first chunk that is wrong."""
    suspects = np.flatnonzero(_chunks_suspect(chunks, drive_count))
    for index in suspects:
        chunk = chunks[index]
        wrong = _chunk_wrong(chunk, drive_count)
        assert wrong, f"the two checks disagree on {chunk}"
        raise ValueError(f"chunk {index} (key {int(chunk['key']):#x}) {wrong}")


FILE_MAX = 8
"""Files of one drive: INF_FILE_MAX."""
TOO_MANY_FILES = f"a drive has at most {FILE_MAX} files"
FILE_UNKNOWN = "a chunk lies in a file that its drive does not have: add_file comes first"
FILE_STAYS = "cannot remove the file: a chunk has a place in it, or it is not one that was added"
SPARE_WRONG = (
    "a reserved extent is not 4096-aligned, is empty, or lies on an unknown drive or in an unknown "
    "file"
)
RELOCATES_COMMITTED = "cannot relocate: the second place of a chunk is the committed one"


def versions_refused(what: str, *, irrevocable: bool) -> str:
    """Return the message for a refused `commit`, `rollback`, `exchange` or `relocate` (`what`)."""
    if irrevocable and what == "exchange":
        return (
            "cannot exchange: a chunk is not committed, or has no second place on a drive alone "
            "with the states before its last update"
        )
    if irrevocable and what == "commit":
        return "cannot commit: a chunk has the first of two updates, and not the second"
    if irrevocable:
        return "cannot rollback: a resident section without another version was changed"
    more = ", or has no second place, or the file is not known" if what == "relocate" else ""
    return f"cannot {what}: a chunk has pending jobs, or is not defined{more}"


def is_versioned(chunk: Any) -> bool:
    """Return whether a CHUNK record has a second place."""
    return bool(chunk["other_bytes"] > 0 or chunk["other_ptr"].any())


def grad_section(chunk: Any) -> int:
    """Index of a CHUNK record's section of spilled gradients; -1: none."""
    return int(chunk["section_count"]) - 1 if int(chunk["format"]) >> 24 else -1
