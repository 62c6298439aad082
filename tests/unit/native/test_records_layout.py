"""infinity/_src/cabi/records.py and native/infinity.h describe the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity._src.cabi import records
from infinity._src.cabi.native import ffi, lib

STRUCTS = [
    ("inf_chunk", records.CHUNK),
    ("inf_job", records.JOB),
    ("inf_seg", records.SEG),
    ("inf_hyper", records.HYPER),
]


@pytest.mark.parametrize(("name", "dtype"), STRUCTS)
def test_every_field_of_a_struct_has_the_offset_and_size_of_its_dtype(
    name: str, dtype: np.dtype[Any]
) -> None:
    assert ffi.sizeof(name) == dtype.itemsize
    assert dict(ffi.typeof(name).fields).keys() == set(dtype.names or ())
    for field, kind in ffi.typeof(name).fields:
        assert dtype.fields is not None
        field_dtype, offset = dtype.fields[field][:2]
        assert kind.offset == offset, field
        assert ffi.sizeof(kind.type) == field_dtype.itemsize, field


@pytest.mark.parametrize(("name", "dtype"), STRUCTS)
def test_structs_hold_no_padding(name: str, dtype: np.dtype[Any]) -> None:
    assert dtype.fields is not None
    assert sum(field[0].itemsize for field in dtype.fields.values()) == ffi.sizeof(name)


U64 = st.integers(0, 2**64 - 1)


@given(U64, U64, st.integers(0, 3), st.integers(0, 2**40))
def test_python_and_c_seed_a_checksum_alike(
    generation: int, key: int, section: int, piece: int
) -> None:
    assert records.sum_seed(generation, key, section, piece) == lib.inf_sum_seed(
        generation, key, section, piece
    )


def test_neighbouring_places_seed_different_checksums() -> None:
    seeds = {
        records.sum_seed(generation, key, section, piece)
        for generation in range(4)
        for key in range(8)
        for section in range(4)
        for piece in range(48)
    }
    assert len(seeds) == 4 * 8 * 4 * 48


def test_section_boundaries_are_4096_aligned_for_every_multiple_of_a_group() -> None:
    assert records.CHUNK_NUMEL % records.GROUP_NUMEL == 0
    assert records.CHUNK_NUMEL % records.PIECE_NUMEL == 0
