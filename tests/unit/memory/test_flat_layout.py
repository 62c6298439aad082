"""The layout of flats: arithmetic that every rank must agree on."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.cabi.records import QUANT_GROUP
from infinity._src.memory.flat_layout import ALIGN_BYTES, CHUNK_NUMEL, GROUP_NUMEL, plan_flat

NUMELS = st.lists(st.integers(0, 3 * CHUNK_NUMEL), min_size=1, max_size=12).map(tuple)


@settings(max_examples=50)
@given(NUMELS, st.sampled_from([2, 4]), st.integers(1, 5))
def test_parameters_are_aligned_and_never_overlap(
    numels: tuple[int, ...], itemsize: int, world: int
) -> None:
    layout = plan_flat(numels, itemsize, world)
    end = 0
    for offset, numel in zip(layout.offsets, layout.numels, strict=True):
        assert offset >= end
        assert offset * itemsize % ALIGN_BYTES == 0
        end = offset + numel
    assert end <= layout.numel
    assert layout.numel == world * layout.shard_numel


@settings(max_examples=50)
@given(NUMELS, st.sampled_from([2, 4]), st.integers(1, 5))
def test_shards_are_equal_and_hold_every_element_once(
    numels: tuple[int, ...], itemsize: int, world: int
) -> None:
    layout = plan_flat(numels, itemsize, world)
    assert layout.shard_numel % GROUP_NUMEL == 0
    for index, numel in enumerate(numels):
        covered = 0
        for rank in range(world):
            start, source, count = layout.shard_range(index, rank)
            if count:
                assert source == covered
                assert rank * layout.shard_numel + start == layout.offsets[index] + source
            covered += count
        assert covered == numel


@settings(max_examples=50)
@given(NUMELS, st.integers(1, 5))
def test_chunks_tile_the_shard_and_start_on_pages(numels: tuple[int, ...], world: int) -> None:
    layout = plan_flat(numels, 2, world)
    end = 0
    for span in layout.chunks:
        assert span.start == end
        assert 0 < span.numel <= CHUNK_NUMEL
        assert span.numel * 2 % 4096 == 0
        end += span.numel
    assert end == layout.shard_numel


@settings(max_examples=50)
@given(NUMELS, st.integers(2, 5))
def test_where_an_element_lies_does_not_depend_on_the_world_size(
    numels: tuple[int, ...], world: int
) -> None:
    assert plan_flat(numels, 2, world).offsets == plan_flat(numels, 2, 1).offsets


@settings(max_examples=50)
@given(
    NUMELS,
    st.sampled_from([2, 4]),
    st.integers(1, 3),
    st.sampled_from([393_216, 589_824, 917_504, 2048]),
)
def test_chunks_have_the_size_that_was_asked_for_and_groups_hold_one_parameter(
    numels: tuple[int, ...], itemsize: int, world: int, chunk_numel: int
) -> None:
    layout = plan_flat(numels, itemsize, world, chunk_numel)
    assert all(offset % QUANT_GROUP == 0 for offset in layout.offsets)
    spans = layout.chunks
    assert sum(span.numel for span in spans) == layout.shard_numel
    assert all(span.numel == chunk_numel for span in spans[:-1])
    assert all(span.start % QUANT_GROUP == 0 for span in spans)


@settings(max_examples=50)
@given(NUMELS, st.sampled_from([2, 4]), st.integers(1, 5), st.sampled_from([1, 3, 192]))
def test_segments_of_a_shard_are_the_spans_of_its_parameters(
    numels: tuple[int, ...], itemsize: int, world: int, groups: int
) -> None:
    layout = plan_flat(numels, itemsize, world, groups * GROUP_NUMEL)
    for rank in range(world):
        wanted = [
            (index, chunk, start, numel, element - layout.shard_range(index, rank)[1], element)
            for index in range(len(numels))
            for chunk, start, element, numel in layout.spans(index, rank)
        ]
        found = layout.segments(rank)
        assert list(zip(*(column.tolist() for column in found), strict=True)) == wanted
        # As the executor wants them: ascending, by chunk.
        assert wanted == sorted(wanted, key=lambda each: (each[1], each[2]))


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("world", [1, 3])
def test_every_shard_starts_where_direct_io_wants_it(itemsize: int, world: int) -> None:
    for numel in (0, 1, 2049, 400_000):
        assert plan_flat((numel,), itemsize, world).shard_numel * itemsize % 4096 == 0
