"""Passes over chunks of every format: sections of gradients, given sections, quantization
groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.cabi import native
from infinity._src.cabi.native import ffi, lib
from infinity._src.cabi.records import (
    CHUNK,
    HYPER,
    QUANT_GROUP,
    SEG,
    Algorithm,
    Format,
    GradDtype,
    GradSection,
    Master,
    Moments,
    piece_count,
)
from infinity._src.kernels.hyper import (
    hyper_row_adamw,
    hyper_row_muon,
    hyper_row_muon_momentum,
)
from infinity._src.optim.update_jobs import sections_updated
from tests.oracle import update_sections
from tests.unit.native.states import Array, native_update
from tests.unit.native.test_update_kernels import as_bf16, assert_same_sections, states

OK, BAD_PLAN = -1, -2
COMPACT = Format(Master.SPLIT8, Moments.Q8, 2)
ROW = hyper_row_adamw(lr=1e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1, step=7, key=77)
PIECE = 128


class Chunk:
    """A chunk whose sections lie in memory as in a slot, with checksums."""

    def __init__(
        self, state_format: Format, sections: list[Array], piece_numel: int = PIECE
    ) -> None:
        self.format, self.sections = state_format, sections
        self.numel = sections[0].size
        self.pieces = piece_count(self.numel, piece_numel)
        self.sums = np.zeros((len(sections), self.pieces), np.uint32)
        self.record: Any = np.zeros((), CHUNK)
        self.record["key"], self.record["numel"], self.record["format"] = (
            5,
            self.numel,
            state_format,
        )
        self.record["section_count"], self.record["piece_numel"] = len(sections), piece_numel
        self.record["sums_ptr"], self.record["section_at"] = self.sums.ctypes.data, -1
        at = 0
        for index, kind in enumerate(state_format.sections):
            self.record["itemsize"][index], self.record["group_numel"][index] = (
                kind.itemsize,
                kind.group_numel,
            )
            self.record["section_at"][index] = at
            at += -(-kind.size_bytes(self.numel) // 4096) * 4096
        self.record["run_bytes"] = at
        for index in range(len(sections)):
            self.store(index)

    @property
    def pointer(self) -> Any:
        return ffi.cast("inf_chunk *", self.record.ctypes.data)

    def store(self, section: int) -> None:
        here = ffi.cast("uint8_t *", self.sections[section].ctypes.data)
        lib.inf_section_store(self.pointer, section, here, here)

    def bad(self) -> list[int]:
        """Verify each section. Returns the first bad piece of each, or OK."""
        return [
            lib.inf_section_fetch(
                self.pointer, index, ffi.cast("uint8_t *", section.ctypes.data), ffi.NULL, 1
            )
            for index, section in enumerate(self.sections)
        ]

    def update(
        self, segs: Array, given_mask: int = 0, verify: int = 1, *, row: Any = ROW, absent: int = 0
    ) -> int:
        """absent: mask of sections that are left out."""
        scratch = np.zeros_like(self.sums)
        hypers = np.array([row], HYPER)
        places = [ffi.cast("uint8_t *", section.ctypes.data) for section in self.sections]
        places += [ffi.NULL] * (6 - len(places))
        places = [ffi.NULL if absent >> at & 1 else place for at, place in enumerate(places)]
        return int(
            lib.inf_chunk_update(
                self.pointer,
                ffi.new("uint8_t *[6]", places),
                ffi.cast("inf_seg *", segs.ctypes.data),
                len(segs),
                ffi.cast("inf_hyper *", hypers.ctypes.data),
                1,
                ffi.NULL,
                verify,
                given_mask,
                ffi.cast("uint32_t *", scratch.ctypes.data),
            )
        )


def segment(start: int, numel: int, element: int, grad: Array | None) -> Array:
    segs = np.zeros(1, SEG)
    segs["start"], segs["numel"], segs["element"] = start, numel, element
    segs["grad_dtype"] = GradDtype.SECTION if grad is None else GradDtype.FP32
    segs["grad"] = 0 if grad is None else grad.ctypes.data
    return segs


def in_section(grad: Array, kind: GradSection) -> Array:
    if kind is GradSection.BF16:
        return as_bf16(grad)
    return grad.astype(np.float16) if kind is GradSection.FP16 else grad.copy()


FORMATS = [
    COMPACT,
    Format.SPLIT,
    Format(Master.SPLIT, Moments.BF16, 2),
    Format(Master.FP16, Moments.Q8, 2),
]


@pytest.mark.parametrize("state_format", FORMATS, ids=str)
@pytest.mark.parametrize(
    "row",
    [hyper_row_muon_momentum(momentum=0.9, nesterov=True), hyper_row_muon(step_size=0.1, decay=1)],
    ids=["momentum", "masters"],
)
def test_an_update_takes_the_sections_that_it_needs_and_no_others(
    row: Any, state_format: Format
) -> None:
    """The same ones as for Python, which leaves the others out."""
    needed = sections_updated(state_format, Algorithm(int(row["algorithm"])))
    for absent in range(1 << state_format.written_count):
        sections, grad = states(state_format, QUANT_GROUP, 0, odd=False)
        chunk = Chunk(state_format, sections)
        before = [section.copy() for section in sections]
        code = chunk.update(segment(0, QUANT_GROUP, 0, grad), row=row, absent=absent)
        assert code == (BAD_PLAN if absent & needed else OK)
        for at, section in enumerate(before):
            assert needed >> at & 1 or np.array_equal(chunk.sections[at], section)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_segments_of_any_format_are_the_reference_on_each_and_gradients_stay(
    data: st.DataObject,
) -> None:
    state_format = data.draw(st.sampled_from(FORMATS))
    kind = data.draw(st.sampled_from(list(GradSection)[1:]))
    numel = QUANT_GROUP * data.draw(st.integers(1, 12))
    sections, grad = states(state_format, numel, data.draw(st.integers(0, 999)), odd=False)
    with np.errstate(over="ignore"):
        held = in_section(grad, kind)
    expected = [section.copy() for section in sections]
    chunk = Chunk(state_format.with_grad(kind), [*sections, held.copy()])
    cut = QUANT_GROUP * data.draw(st.integers(0, numel // QUANT_GROUP))
    # the first parameter ends inside its last group
    short = data.draw(st.integers(0, min(63, cut)))
    segs = np.concatenate([segment(0, cut - short, 640, None), segment(cut, numel - cut, 0, None)])
    for seg in segs:
        start, end = int(seg["start"]), int(seg["start"] + seg["numel"])
        if start == end:
            continue
        part = [
            section.view(np.uint8)[item.size_bytes(start) : item.size_bytes(end)].view(
                section.dtype
            )
            for item, section in zip(state_format.sections, expected, strict=True)
        ]
        update_sections(state_format, part, held[start:end], ROW, int(seg["element"]))
    before = chunk.sums[-1].copy()
    assert chunk.update(segs) == OK
    assert_same_sections(state_format, chunk.sections[:-1], expected)
    np.testing.assert_array_equal(chunk.sections[-1].view(np.uint8), held.view(np.uint8))
    np.testing.assert_array_equal(chunk.sums[-1], before)
    assert chunk.bad() == [OK] * len(chunk.sections)


@pytest.mark.parametrize("isa", native.isas())
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_an_update_of_long_pieces_sums_and_verifies_them_in_its_shadow(
    isa: str, data: st.DataObject
) -> None:
    """Pieces are long enough that the update's loops compute checksums of other pieces."""
    state_format = data.draw(st.sampled_from([COMPACT, Format.SPLIT, FORMATS[2]]))
    piece_numel = data.draw(st.sampled_from([2048, 4096, 8192, 20_480]))
    numel = QUANT_GROUP * data.draw(st.integers(1, 4 * piece_numel // QUANT_GROUP))
    sections, grad = states(state_format, numel, data.draw(st.integers(0, 99)), odd=False)
    chunk = Chunk(state_format, sections, piece_numel)
    cut, later = sorted(data.draw(st.integers(0, numel // QUANT_GROUP)) for _ in range(2))
    ranges = [(0, QUANT_GROUP * cut), (QUANT_GROUP * later, numel)]
    segs = np.concatenate(
        [segment(first, end - first, first, grad[first:]) for first, end in ranges]
    )
    verify = data.draw(st.sampled_from([0, 1, 2, 3]))  # none, all, one of a stride
    expected = [section.copy() for section in sections]
    before = native.isa()
    native.select_isa(isa)
    try:
        if verify == 1 and data.draw(st.booleans()):
            index = data.draw(st.integers(0, len(sections) - 1))
            at = data.draw(st.integers(0, sections[index].nbytes - 1))
            sections[index].view(np.uint8)[at] ^= 16
            item = state_format.sections[index]
            piece = at // item.size_bytes(piece_numel)
            assert chunk.update(segs) == index * chunk.pieces + piece
            return
        assert chunk.update(segs, verify=verify) == OK
        for first, end in ranges:
            part = [
                section.view(np.uint8)[item.size_bytes(first) : item.size_bytes(end)]
                for item, section in zip(state_format.sections, expected, strict=True)
            ]
            native_update(state_format, part, grad[first:end], ROW, first)
    finally:
        native.select_isa(before)
    assert chunk.bad() == [OK] * len(sections)
    assert_same_sections(state_format, sections, expected)


@pytest.mark.parametrize("index", range(6))
def test_a_flipped_bit_in_any_section_of_a_compact_chunk_is_found(index: int) -> None:
    sections, grad = states(COMPACT, 640, 1, odd=False)
    chunk = Chunk(COMPACT.with_grad(GradSection.BF16), [*sections, as_bf16(grad)])
    chunk.sections[index].view(np.uint8)[-1] ^= 4
    assert chunk.bad()[index] == chunk.pieces - 1
    assert chunk.update(segment(0, 640, 0, None)) == index * chunk.pieces + chunk.pieces - 1


def test_a_given_section_is_not_verified_but_summed_anew_and_untouched_by_a_mismatch() -> None:
    sections, grad = states(Format.SPLIT, 640, 1, odd=False)
    chunk = Chunk(Format.SPLIT, sections)
    chunk.sections[0] ^= 1  # from the caller's memory: not what the drive has
    before = chunk.sections[0].copy()
    segs = segment(0, 100, 0, grad)
    chunk.sections[2].view(np.uint8)[-1] ^= 1
    assert chunk.update(segs, given_mask=1) == 2 * chunk.pieces + chunk.pieces - 1
    np.testing.assert_array_equal(chunk.sections[0], before)
    chunk.sections[2].view(np.uint8)[-1] ^= 1
    assert chunk.update(segs, given_mask=1) == OK
    assert chunk.bad() == [OK] * 4  # also of the pieces that no segment meets
    chunk.sections[0] ^= 1
    assert chunk.update(segs) == 0


@pytest.mark.parametrize("field", ["start", "element"])
def test_segments_of_groups_start_where_groups_do(field: str) -> None:
    sections, grad = states(COMPACT, 640, 1, odd=False)
    chunk = Chunk(COMPACT, sections)
    segs = segment(0, 64, 0, grad)
    segs[field] = 32
    assert chunk.update(segs) == BAD_PLAN
    segs[field] = 64
    assert chunk.update(segs) == OK


@pytest.mark.parametrize(
    ("field", "value"),
    [("group_numel", (1,) * 6), ("piece_numel", 96), ("format", 0x4020201), ("section_count", 4)],
)
def test_a_compact_chunk_with_other_geometry_is_refused(field: str, value: Any) -> None:
    chunk = Chunk(COMPACT, states(COMPACT, 640, 1, odd=False)[0])
    assert lib.inf_chunk_valid(chunk.pointer) == 1
    chunk.record[field] = value
    assert lib.inf_chunk_valid(chunk.pointer) == 0


def test_python_and_c_know_the_same_formats() -> None:
    itemsize, group = ffi.new("int32_t[6]"), ffi.new("int32_t[6]")
    for master in range(6):
        for moments in range(4):
            for count in range(5):
                for grad in range(5):
                    code = master | moments << 8 | count << 16 | grad << 24
                    found = lib.inf_format_sections(code, itemsize, group)
                    try:
                        sections = Format.of(code).sections
                    except ValueError:
                        assert found == 0, hex(code)
                        continue
                    assert [(s.itemsize, s.group_numel) for s in sections] == [
                        (itemsize[i], group[i]) for i in range(found)
                    ], hex(code)
