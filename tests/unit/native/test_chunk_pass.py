"""Passes over a chunk: what a flipped byte, a stale run or a misplaced one looks like, and what an
update leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.cabi.native import ffi, lib
from infinity._src.cabi.records import piece_count
from infinity.aio import CHUNK, HYPER, SEG, Format, GradDtype
from tests.unit.native.states import (
    HYPER_LATE,
    HYPER_LOGGED,
    HYPER_PLAIN,
    Array,
    assert_same_bits,
    random_states,
    torch_update,
)

OK, BAD_PLAN = -1, -2


@dataclass
class Chunk:
    """One chunk in memory with its checksums; sections in `resident` stand for ones that never
    leave RAM."""

    state_format: Format
    sections: list[Array]
    piece_numel: int
    resident: frozenset[int] = frozenset()
    summed: bool = True
    record: Any = field(init=False)
    sums: Array = field(init=False)
    scratch: Array = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.sections)
        self.numel = self.sections[0].size
        self.pieces = piece_count(self.numel, self.piece_numel)
        self.sums = np.zeros((count, self.pieces), np.uint32)
        self.scratch = np.zeros((count, self.pieces), np.uint32)
        self.record = record = np.zeros((), CHUNK)
        record["key"], record["generation"], record["numel"] = 1234, 7, self.numel
        record["drive"], record["format"], record["section_count"] = (
            0,
            int(self.state_format),
            count,
        )
        record["piece_numel"] = self.piece_numel
        record["section_at"] = -1
        at = 0
        for index, section in enumerate(self.sections):
            record["itemsize"][index] = section.itemsize
            if index in self.resident:
                record["section_ptr"][index] = section.ctypes.data
            else:
                record["section_at"][index] = at
                at += -(-section.nbytes // 4096) * 4096
        record["run_bytes"] = at
        record["sums_ptr"] = self.sums.ctypes.data if self.summed else 0
        for index in range(count):
            self.store(index)

    @property
    def pointer(self) -> Any:
        return ffi.cast("inf_chunk *", self.record.ctypes.data)

    def store(self, section: int, source: Array | None = None) -> None:
        target = ffi.cast("uint8_t *", self.sections[section].ctypes.data)
        origin = target if source is None else ffi.cast("uint8_t *", source.ctypes.data)
        lib.inf_section_store(self.pointer, section, origin, target)

    def fetch(self, section: int, target: Array | None = None, *, verify: bool = True) -> int:
        to = ffi.NULL if target is None else ffi.cast("uint8_t *", target.ctypes.data)
        origin = ffi.cast("uint8_t *", self.sections[section].ctypes.data)
        return int(lib.inf_section_fetch(self.pointer, section, origin, to, verify))

    def update(
        self,
        segs: Array,
        hypers: Array,
        *,
        out: Array | None = None,
        verify: bool = True,
        given: int = 0,
        undo: bool = False,
    ) -> int:
        """The pass; `undo`: with memory to keep resident sections in."""
        room = np.zeros(int(lib.inf_undo_bytes(self.pointer)) + 1, np.uint8)
        addresses = [ffi.cast("uint8_t *", section.ctypes.data) for section in self.sections]
        addresses += [ffi.NULL] * (6 - len(addresses))
        return int(
            lib.inf_chunk_update_undo(
                self.pointer,
                self.pointer,
                ffi.new("uint8_t *[6]", addresses),
                ffi.cast("inf_seg *", segs.ctypes.data),
                len(segs),
                ffi.cast("inf_hyper *", hypers.ctypes.data),
                len(hypers),
                ffi.NULL if out is None else ffi.cast("uint8_t *", out.ctypes.data),
                verify,
                given,
                ffi.cast("uint32_t *", self.scratch.ctypes.data),
                ffi.cast("uint8_t *", room.ctypes.data) if undo else ffi.NULL,
            )
        )

    def verified(self) -> bool:
        return all(self.fetch(section) == OK for section in range(len(self.sections)))


def make_chunk(state_format: Format, numel: int, piece_numel: int, **options: Any) -> Chunk:
    sections, _ = random_states(state_format, numel, seed=9)
    return Chunk(state_format, sections, piece_numel, **options)


def make_segs(ranges: list[tuple[int, int]], grads: list[Array], hyper: int = 0) -> Array:
    segs = np.zeros(len(ranges), SEG)
    for seg, (start, numel), grad in zip(segs, ranges, grads, strict=True):
        kind = GradDtype.BF16 if grad.itemsize == 2 else GradDtype.FP32
        seg["start"], seg["numel"], seg["grad"], seg["grad_dtype"] = (
            start,
            numel,
            grad.ctypes.data,
            int(kind),
        )
        seg["hyper"] = hyper
    return segs


def make_hypers(*hypers: Any) -> Array:
    return np.array([hyper.row() for hyper in hypers], HYPER)


FORMATS = [Format.SPLIT, Format.FP32]


@pytest.mark.parametrize("state_format", FORMATS)
def test_every_single_flipped_byte_of_every_section_is_found(state_format: Format) -> None:
    chunk = make_chunk(state_format, numel=96, piece_numel=32)
    _, grad = random_states(state_format, 96, seed=4)
    segs, hypers = make_segs([(0, 96)], [grad]), make_hypers(HYPER_PLAIN)
    sums = chunk.sums.copy()
    pristine = [section.copy() for section in chunk.sections]
    for section, data in enumerate(chunk.sections):
        raw = data.view(np.uint8)
        for index in range(raw.size):
            raw[index] ^= 1 << (index % 8)
            piece = index // (32 * data.itemsize)
            assert chunk.fetch(section) == piece
            assert chunk.update(segs, hypers) == section * chunk.pieces + piece
            np.testing.assert_array_equal(chunk.sums, sums)
            for target, source in zip(chunk.sections, pristine, strict=True):
                target[:] = source  # the run is read again
    assert chunk.verified()


def test_a_run_of_another_generation_key_section_or_piece_is_found() -> None:
    chunk = make_chunk(Format.SPLIT, numel=64, piece_numel=32)
    for section in chunk.sections:
        section[:] = 0
    for section in range(4):
        chunk.store(section)
    # All pieces of equal sections hold the same zeros, yet their checksums differ.
    assert len(np.unique(chunk.sums)) == chunk.sums.size
    for name in ("generation", "key"):
        chunk.record[name] += 1
        assert chunk.fetch(0) == 0
        chunk.record[name] -= 1
    assert chunk.verified()


@pytest.mark.parametrize("state_format", FORMATS)
@pytest.mark.parametrize("numel", [1, 31, 32, 33, 2048, 2048 + 17])
def test_store_then_fetch_returns_the_bytes(state_format: Format, numel: int) -> None:
    chunk = make_chunk(state_format, numel, piece_numel=32)
    for section, data in enumerate(chunk.sections):
        target = np.zeros_like(data)
        assert chunk.fetch(section, target) == OK
        assert target.tobytes() == data.tobytes()
        source = data[::-1].copy()
        chunk.store(section, source)
        assert data.tobytes() == source.tobytes()
        assert chunk.fetch(section) == OK


def test_storing_nothing_stores_zeros() -> None:
    chunk = make_chunk(Format.FP32, 100, piece_numel=32)
    lib.inf_section_store(
        chunk.pointer, 1, ffi.NULL, ffi.cast("uint8_t *", chunk.sections[1].ctypes.data)
    )
    assert not chunk.sections[1].any()
    assert chunk.fetch(1) == OK


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_an_update_in_segments_equals_the_reference_on_each_and_leaves_the_rest(
    data: st.DataObject,
) -> None:
    state_format = data.draw(st.sampled_from(FORMATS))
    numel = data.draw(st.integers(1, 700))
    piece_numel = data.draw(st.sampled_from([16, 64, 250, 1024]))
    resident = frozenset(data.draw(st.sets(st.integers(0, len(state_format.sections) - 1))))
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=8)))
    ranges = [(a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    chunk = make_chunk(
        state_format, numel, piece_numel, resident=resident, summed=data.draw(st.booleans())
    )
    hypers = make_hypers(HYPER_PLAIN, HYPER_LATE, HYPER_LOGGED)
    grads = [
        random_states(state_format, max(1, length), seed=index, bf16_grad=data.draw(st.booleans()))[
            1
        ]
        for index, (_, length) in enumerate(ranges)
    ]
    segs = make_segs(ranges, grads)
    segs["hyper"] = [data.draw(st.integers(0, 2)) for _ in ranges]
    expected = [section.copy() for section in chunk.sections]
    for (start, length), grad, seg in zip(ranges, grads, segs, strict=True):
        if length:
            parts = [section[start : start + length] for section in expected]
            torch_update(state_format, parts, grad[:length], hypers[seg["hyper"]])
    out = np.empty_like(chunk.sections[0])
    assert chunk.update(segs, hypers, out=out) == OK
    assert_same_bits(chunk.sections, expected)
    assert out.tobytes() == chunk.sections[0].tobytes()
    assert chunk.verified()


def test_a_piece_that_no_segment_meets_keeps_its_checksum() -> None:
    chunk = make_chunk(Format.SPLIT, 96, piece_numel=32)
    _, grad = random_states(Format.SPLIT, 8, seed=2)
    before = chunk.sums.copy()
    assert chunk.update(make_segs([(40, 8)], [grad]), make_hypers(HYPER_PLAIN)) == OK
    np.testing.assert_array_equal(chunk.sums[:, [0, 2]], before[:, [0, 2]])
    assert (chunk.sums[:, 1] != before[:, 1]).all()


def test_after_a_mismatch_the_run_can_be_read_again_and_the_update_redone() -> None:
    chunk = make_chunk(Format.SPLIT, 256, piece_numel=32)
    _, grad = random_states(Format.SPLIT, 256, seed=2)
    segs, hypers = make_segs([(0, 256)], [grad]), make_hypers(HYPER_PLAIN)
    on_drive = [section.copy() for section in chunk.sections]
    # in piece 6: pieces 0-5 are updated before it is met
    chunk.sections[2].view(np.uint8)[4 * 200] ^= 4
    assert chunk.update(segs, hypers) == 2 * chunk.pieces + 6
    for section, source in zip(chunk.sections, on_drive, strict=True):
        section[:] = source
    assert chunk.update(segs, hypers) == OK
    torch_update(Format.SPLIT, on_drive, grad, hypers[0])
    assert_same_bits(chunk.sections, on_drive)
    assert chunk.verified()


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("byte", range(0, 512, 37))
def test_a_mismatch_leaves_resident_sections_and_the_target_untouched(
    byte: int, undo: bool
) -> None:
    chunk = make_chunk(Format.SPLIT, 256, piece_numel=32, resident=frozenset({0, 3}))
    _, grad = random_states(Format.SPLIT, 256, seed=2)
    before = [section.copy() for section in chunk.sections]
    sums = chunk.sums.copy()
    out = np.zeros_like(chunk.sections[0])
    chunk.sections[1].view(np.uint8)[byte] ^= 1
    segs, hypers = make_segs([(0, 256)], [grad]), make_hypers(HYPER_PLAIN)
    assert chunk.update(segs, hypers, out=out, undo=undo) == 1 * chunk.pieces + byte // 64
    for section in (0, 3):
        assert chunk.sections[section].tobytes() == before[section].tobytes()
    assert chunk.sums.tobytes() == sums.tobytes()
    assert not out.any()
    # As the executor does: it reads the sections of the run again, and repeats the pass.
    for section in (1, 2):
        chunk.sections[section][:] = before[section]
    assert chunk.update(segs, hypers, out=out, undo=undo) == OK
    torch_update(Format.SPLIT, before, grad, hypers[0])
    assert_same_bits(chunk.sections, before)
    assert out.tobytes() == before[0].tobytes()
    assert chunk.verified()


def test_resident_sections_are_not_verified() -> None:
    chunk = make_chunk(Format.FP32, 64, piece_numel=32, resident=frozenset({0, 1, 2}))
    chunk.sections[0][:] = 3.0
    assert chunk.fetch(0) == OK
    _, grad = random_states(Format.FP32, 64, seed=2)
    assert chunk.update(make_segs([(0, 64)], [grad]), make_hypers(HYPER_PLAIN)) == OK


def test_without_verification_a_flipped_byte_passes_and_is_summed_anew() -> None:
    chunk = make_chunk(Format.FP32, 64, piece_numel=32)
    chunk.sections[1].view(np.uint8)[0] ^= 1
    _, grad = random_states(Format.FP32, 64, seed=2)
    assert chunk.fetch(1, verify=False) == OK
    assert chunk.update(make_segs([(0, 64)], [grad]), make_hypers(HYPER_PLAIN), verify=False) == OK
    assert chunk.verified()


BROKEN_SEGS = {
    "before the chunk": {"start": -1},
    "past the chunk": {"numel": 65},
    "far past the chunk": {"numel": 2**62},
    "negative": {"numel": -1},
    "no gradient": {"grad": 0},
    "unknown gradient dtype": {"grad_dtype": 4},
    "no section of gradients": {"grad_dtype": 3},
    "hyper past the array": {"hyper": 1},
    "hyper negative": {"hyper": -1},
}


@pytest.mark.parametrize("fields", BROKEN_SEGS.values(), ids=list(BROKEN_SEGS))
def test_a_malformed_segment_is_refused_before_anything_is_touched(fields: dict[str, int]) -> None:
    chunk = make_chunk(Format.SPLIT, 64, piece_numel=32)
    _, grad = random_states(Format.SPLIT, 64, seed=2)
    segs, hypers = make_segs([(0, 64)], [grad]), make_hypers(HYPER_PLAIN)
    for name, value in fields.items():
        segs[0][name] = value
    before = [section.copy() for section in chunk.sections]
    assert chunk.update(segs, hypers) == BAD_PLAN
    assert [s.tobytes() for s in chunk.sections] == [s.tobytes() for s in before]


def test_segments_that_overlap_and_logs_that_are_too_long_are_refused() -> None:
    chunk = make_chunk(Format.SPLIT, 64, piece_numel=32)
    _, grad = random_states(Format.SPLIT, 64, seed=2)
    hypers = make_hypers(HYPER_PLAIN)
    assert chunk.update(make_segs([(0, 33), (32, 8)], [grad, grad]), hypers) == BAD_PLAN
    for count in (-1, 9):
        hypers["log_count"] = count
        assert chunk.update(make_segs([(0, 64)], [grad]), hypers) == BAD_PLAN


BROKEN_CHUNKS = {
    "no elements": {"numel": 0},
    "no pieces": {"piece_numel": 0},
    "unknown format": {"format": 5},
    "a section too few": {"section_count": 3},
    "a wrong itemsize": {"itemsize": (4, 2, 4, 4, 0, 0)},
    "a section past the run": {"section_at": (0, 4096, 8192, 12_288, -1, -1)},
    "a resident section without an address": {"section_at": (-1, 0, 4096, 4096, -1, -1)},
    "bytes past what fits": {"numel": 2**62},
}


@pytest.mark.parametrize("fields", BROKEN_CHUNKS.values(), ids=list(BROKEN_CHUNKS))
def test_a_malformed_chunk_is_refused(fields: dict[str, Any]) -> None:
    chunk = make_chunk(Format.SPLIT, 1024, piece_numel=32)
    assert lib.inf_chunk_valid(chunk.pointer) == 1
    chunk.record["run_bytes"] = 12_288
    for name, value in fields.items():
        chunk.record[name] = value
    assert lib.inf_chunk_valid(chunk.pointer) == 0
