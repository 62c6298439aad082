"""The places of a rank's chunks as tables: the rows of a manifest, and in two parts those of a
durable run, so that a commit writes little.

    TABLE   both places of each chunk; written again when one of them changes, which steps do not
    Marks   what a step changes: which place is live, its generation, its checksums
    ROW     the two joined, as readers use them

Marks have one checksum for each section of a chunk, taken of those of its pieces (`folded`): 25
bytes for a chunk of four sections, where rows with the checksums of all pieces would take 888.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from infinity._src.cabi import native
from infinity._src.cabi.records import SECTION_MAX

ROW: Final = np.dtype(
    [
        ("start", "<i8"),
        ("numel", "<i8"),
        ("key", "<u8"),
        ("generation", "<u8"),
        ("file_offset", "<i8"),
        ("run_bytes", "<i8"),
        ("section_at", "<i8", (SECTION_MAX,)),
        ("sums_at", "<i8"),
        ("flat", "<i4"),
        ("file", "<i4"),
        ("padded", "<i4"),
        ("zeros", "<i4"),
    ]
)
"""`start`: of the chunk in the shard. `sums_at`: of its first checksum. `zeros`: bit s = section s,
which lies here, is all zeros and was never written; its bytes and checksums mean nothing. `padded`:
how the checksums were taken.

CHUNKED: as an executor takes those of a CHUNK, of all its sections, in pieces of PIECE_NUMEL
elements, from `key` and `generation`. PADDED: of each section that is here, as a separate chunk:
of its bytes up to the next multiple of 4096, in pieces of PIECE_BYTES, from `key` + the section's
index. Then no byte of a file is without a checksum. FOLDED: as CHUNKED, but one for each section,
that of the pieces' checksums in order.
"""
CHUNKED, PADDED, FOLDED = range(3)

TABLE: Final = np.dtype(
    [
        ("start", "<i8"),
        ("numel", "<i8"),
        ("key", "<u8"),
        ("run_bytes", "<i8"),
        ("file_offset", "<i8", (2,)),
        ("section_at", "<i8", (SECTION_MAX,)),
        ("flat", "<i4"),
        ("file", "<i4", (2,)),
    ]
)
"""A chunk of a durable run, with both its places. `file`: numbers of the run's files, which
manifests give names to."""

_SECOND: Final = 1 << 7
"""In a mark: the second place is the live one. The bits below are ROW's `zeros`."""


@dataclasses.dataclass(frozen=True)
class Marks:
    """Statement of one commit on the chunks of TABLE, in its order.

    generations: of the live places, uint64 [chunks]. flags: uint8 [chunks]. folded: uint32, for
    each chunk one checksum per section.
    """

    generations: npt.NDArray[np.uint64]
    flags: npt.NDArray[np.uint8]
    folded: npt.NDArray[np.uint32]

    @classmethod
    def join(cls, parts: Sequence[Marks]) -> Marks:
        return cls(
            np.concatenate([part.generations for part in parts]),
            np.concatenate([part.flags for part in parts]),
            np.concatenate([part.folded for part in parts]),
        )

    def parts(self) -> list[memoryview]:
        """Return the bytes of the arrays, little-endian, one after the other."""
        arrays = (
            self.generations.astype("<u8", copy=False),
            self.flags,
            self.folded.astype("<u4", copy=False),
        )
        return [array.view(np.uint8).data for array in arrays]

    @classmethod
    def decode(cls, data: bytes, offset: int, chunks: int, sums: int) -> Marks:
        """Read the bytes of `parts` at `offset`. Raises: ValueError where there are fewer."""
        generations = np.frombuffer(data, "<u8", chunks, offset)
        flags = np.frombuffer(data, np.uint8, chunks, offset + generations.nbytes)
        folded = np.frombuffer(data, "<u4", sums, offset + generations.nbytes + flags.nbytes)
        return cls(generations, flags, folded.astype(np.uint32))


def marks_of(
    now: npt.NDArray[np.void],
    second: npt.NDArray[np.bool_],
    pieces: npt.NDArray[np.int64],
    sections: int,
) -> Marks:
    """Make the marks of chunks of one format from their CHUNK records. second: the second place is
    live. pieces: of each section. sections: that are states.
    """
    zeros = now["zeros"] & np.uint16((1 << sections) - 1)
    return Marks(
        now["generation"].astype(np.uint64),
        (zeros | np.where(second, np.uint16(_SECOND), np.uint16(0))).astype(np.uint8),
        _fold(now["sums_ptr"], pieces, sections).reshape(-1),
    )


def joined(
    table: npt.NDArray[np.void],
    marks: Marks,
    sections: Sequence[int],
    files: Sequence[int],
) -> npt.NDArray[np.void]:
    """Return the chunks as rows, whose checksums are `marks.folded`. sections: of each flat; files:
    the numbers of the files that rows["file"] counts.

    Raises: ValueError where the two do not fit each other.
    """
    if len(table) != len(marks.flags):
        raise ValueError(f"its table has {len(table)} chunks, not {len(marks.flags)}")
    if ((table["flat"] < 0) | (table["flat"] >= len(sections))).any():
        raise ValueError("a row has a flat that there is not")
    rows = np.zeros(len(table), dtype=ROW)
    for name in ("start", "numel", "key", "run_bytes", "section_at", "flat"):
        rows[name] = table[name]
    live = (marks.flags >= _SECOND).astype(np.intp)
    at = np.arange(len(table))
    rows["file_offset"] = table["file_offset"][at, live]
    rows["generation"] = marks.generations
    rows["zeros"] = marks.flags & np.uint8(_SECOND - 1)
    rows["padded"] = FOLDED
    counts = np.array(sections, dtype=np.int64)[table["flat"]]
    rows["sums_at"] = np.cumsum(counts) - counts
    known = np.array(files, dtype=np.int64)
    wanted = table["file"][at, live]
    order = np.argsort(known, kind="stable")
    found = np.searchsorted(known, wanted, sorter=order)
    # -1: a file without a name, which `check_manifest` refuses.
    rows["file"] = -1
    inside = np.flatnonzero(found < len(known))
    inside = inside[known[order[found[inside]]] == wanted[inside]]
    rows["file"][inside] = order[found[inside]]
    return rows


def _fold(
    sums: npt.NDArray[np.uint64], pieces: npt.NDArray[np.int64], sections: int
) -> npt.NDArray[np.uint32]:
    """Compute one checksum for each section of chunks, that of its pieces' in order: [chunks,
    sections]. sums: addresses of uint32 [sections, pieces] of each chunk.
    """
    ffi, lib = native.load()
    folded: npt.NDArray[np.uint32] = np.zeros((len(sums), sections), dtype=np.uint32)
    addresses = np.ascontiguousarray(sums, dtype=np.uint64)
    counts = np.ascontiguousarray(pieces, dtype=np.int64)
    assert len(counts) == len(addresses), (len(counts), len(addresses))
    lib.inf_fold_sums(
        ffi.from_buffer("uint64_t[]", addresses),
        ffi.from_buffer("int64_t[]", counts),
        len(addresses),
        sections,
        ffi.from_buffer("uint32_t[]", folded, require_writable=True),
    )
    return folded
