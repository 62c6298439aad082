"""Extents never overlap, are aligned, and freed space is complete."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.aio import ExtentAllocator


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 100_000), st.booleans(), st.randoms(use_true_random=False)),
        max_size=60,
    )
)
def test_extents_are_disjoint_and_freeing_all_leaves_nothing(steps):
    allocator = ExtentAllocator(2)
    live: dict[tuple[int, int], int] = {}
    for size, take, random in steps:
        if take or not live:
            drive, offset = allocator.allocate(size)
            end = offset + size
            assert offset % 4096 == 0
            assert end <= allocator.file_bytes(drive)
            for (other, start), other_size in live.items():
                assert other != drive or end <= start or start + other_size <= offset
            live[drive, offset] = size
        else:
            key = random.choice(sorted(live))
            del live[key]
            allocator.free(*key)
    assert sum(allocator.used_bytes(d) for d in range(2)) == sum(
        -(-s // 4096) * 4096 for s in live.values()
    )
    for key in live:
        allocator.free(*key)
    assert [allocator.file_bytes(d) for d in range(2)] == [0, 0]


def test_freed_neighbours_are_joined_and_reused():
    allocator = ExtentAllocator(1)
    extents = [allocator.allocate(4096) for _ in range(4)]
    for at in (2, 0, 1):
        allocator.free(*extents[at])
    assert allocator.allocate(3 * 4096) == (0, 0)
    assert allocator.file_bytes(0) == 4 * 4096


def test_extents_go_to_the_drive_that_holds_least_unless_one_is_named():
    allocator = ExtentAllocator(3)
    assert [allocator.allocate(8192)[0] for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert allocator.allocate(4096, drive=2) == (2, 16384)


def test_a_full_drive_is_a_memory_error_and_another_one_is_tried():
    allocator = ExtentAllocator(2, capacity_bytes=8192)
    assert allocator.allocate(8192) == (0, 0)
    assert allocator.allocate(4096) == (1, 0)
    assert allocator.allocate(4096) == (1, 4096)
    with pytest.raises(MemoryError, match="4096"):
        allocator.allocate(1)


def test_mistakes_are_value_errors():
    allocator = ExtentAllocator(1)
    with pytest.raises(ValueError, match=">= 1"):
        allocator.allocate(0)
    with pytest.raises(ValueError, match="no extent"):
        allocator.free(0, 0)
    with pytest.raises(ValueError, match="drive"):
        ExtentAllocator(0)
