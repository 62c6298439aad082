"""One flat at rest: its chunk records, and how they are made. No tensor is touched, and nothing is moved."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity._src.memory.layout import Section, aligned_section_bytes, sections_of
from infinity._src.memory.swap_space import ExtentRequest, SwapExtent
from infinity._src.params.unit import Flat
from infinity.aio import CHUNK, Format
from infinity.aio._records import PIECE_NUMEL, GradSection, Master, piece_count

PLACES = (("file_offset", "file"), ("other_offset", "other_file"), ("grad_offset", "grad_file"))
"""The fields of a record that say where its run lies, its second run, and its gradients."""


def sections_in_common(before: Format, now: Format) -> int:
    """How many sections keep their contents when a flat changes its format: the parameter, or all states."""
    none = GradSection.NONE
    if before.master is Master.RAW or before.with_grad(none) != now.with_grad(none):
        return 1
    return min(before.written_count, now.written_count)


def sections_carried(before: Format, now: Format) -> dict[int, int]:
    """The sections that keep their contents, and which ones of the old format have them: those in common, and spilled
    gradients, which are no part of the states and wait for a step whatever becomes of these."""
    carried = {section: section for section in range(sections_in_common(before, now))}
    if now.grad and now.grad is before.grad:
        carried[now.written_count] = before.written_count
    return carried


@dataclasses.dataclass(eq=False)
class ShardRecords:
    """One rank's shard of a flat at rest: chunk records, their ids in the executor, their places on NVMe.

    `sections` and `records["section_*"]` agree; a section of a chunk is resident (an address) or in the chunk's run. Of versioned
    chunks `records` are what they were made with; which place is the live one only the executor knows.
    """

    flat: Flat
    format: Format
    sections: tuple[Section, ...]
    records: npt.NDArray[Any]  # CHUNK [chunks]
    ids: npt.NDArray[np.int32]  # [chunks]
    places: list[SwapExtent]  # of its runs, first and second ones
    sums: npt.NDArray[np.uint32]  # [places, chunks, sections * pieces]
    versioned: bool  # each chunk has a second place

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Element of the shard at which each chunk starts."""
        starts: npt.NDArray[np.int64] = np.array(
            [span.start for span in self.flat.layout.chunks], dtype=np.int64
        )
        return starts

    @property
    def first_sums(self) -> npt.NDArray[np.uint64]:
        """Addresses of the checksums of each chunk's first place."""
        row_bytes = self.sums.strides[1]
        addresses: npt.NDArray[np.uint64] = self.sums.ctypes.data + row_bytes * np.arange(len(self.records), dtype=np.uint64)
        return addresses

    def pieces(self, numel: int) -> int:
        """Checksums of one section of a chunk with so many elements."""
        return piece_count(numel)

    def grad_bytes(self, record: Any) -> int:
        """Bytes of a chunk's spilled gradients, at the end of its run."""
        return aligned_section_bytes(self.sections[-1], int(record["numel"])) if self.format.grad else 0

    def wants(self, record: Any, layers: tuple[int, int]) -> list[ExtentRequest]:
        """What a chunk wants of the swap space, in the order of `PLACES`; its first and second run in these layers."""
        if not self.versioned:
            return [ExtentRequest(int(record["run_bytes"]), layers[0])]
        states = int(record["other_bytes"])
        return [ExtentRequest(states, layers[0]), ExtentRequest(states, layers[1]), ExtentRequest(self.grad_bytes(record))]

    def put(self, record: Any, places: Sequence[SwapExtent | None]) -> None:
        """A chunk got what it wants."""
        self.places.extend(place for place in places if place is not None)
        record["drive"] = next(place.drive for place in places if place is not None)
        for place, (offset, file) in zip(places, PLACES, strict=False):
            if place is not None:
                record[offset], record[file] = place.offset, place.layer
        if record["file_offset"] < 0:  # gradients alone
            record["file_offset"], record["file"] = record["grad_offset"], record["grad_file"]


def unplaced(
    flat: Flat, state_format: Format, masks: Sequence[int], *, key: int, versioned: bool, sums_on: bool
) -> ShardRecords:
    """A flat's chunks without places: those of `masks[chunk]` are to lie in runs. key: of the first chunk; others follow."""
    sections = sections_of(state_format, flat.layout.itemsize)
    spans = flat.layout.chunks
    records = np.zeros(len(spans), dtype=CHUNK)
    pieces = piece_count(max(span.numel for span in spans))
    sums: npt.NDArray[np.uint32] = np.zeros((1 + versioned, len(spans), len(sections) * pieces), dtype=np.uint32)
    records["key"] = key + np.arange(len(spans), dtype=np.uint64)
    records["drive"] = records["file_offset"] = records["section_at"] = -1
    records["format"], records["section_count"], records["piece_numel"] = state_format, len(sections), PIECE_NUMEL
    for index, (span, mask, record) in enumerate(zip(spans, masks, records, strict=True)):
        record["numel"] = span.numel
        for s, section in enumerate(sections):
            record["itemsize"][s], record["group_numel"][s] = section.itemsize, section.group_numel
            if mask >> s & 1:
                record["section_at"][s] = record["run_bytes"]
                record["run_bytes"] += aligned_section_bytes(section, span.numel)
        if sums_on:
            record["sums_ptr"] = sums[0, index].ctypes.data
            record["other_sums_ptr"] = sums[1, index].ctypes.data if versioned else 0
    rest = ShardRecords(flat, state_format, sections, records, np.zeros(0, np.int32), [], sums, versioned)
    if versioned:
        records["other_bytes"] = [record["run_bytes"] - rest.grad_bytes(record) for record in records]
    return rest
