"""Swap space: every stretch of chunks in proportion, and a failure that leaves nothing behind."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.memory.swap_space import SwapExtent, SwapSpace, WeightedRoundRobin
from infinity.aio import SwapFile
from infinity.errors import SwapFullError
from tests.unit.aio.disks import loop_ext4

MIB = 1 << 20


@settings(max_examples=200)
@given(
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8),
    st.lists(st.integers(1, 1152), min_size=1, max_size=200),
)
def test_every_stretch_of_chunks_is_shared_in_proportion(shares, pages):
    sizes = [page * 4096 for page in pages]
    turns = WeightedRoundRobin(shares)
    drives = [turns.next_drive(size) for size in sizes]
    assert math.isclose(sum(turns.shares), 1)
    bound = max(len(shares) - 1, 1) * max(sizes) + 1
    for drive, share in enumerate(turns.shares):
        # The bytes that the drive is ahead (+) of its share, or behind (-), after each chunk; for a
        # stretch take the difference of two.
        ahead = [0.0]
        for size, taken in zip(sizes, drives, strict=True):
            ahead.append(ahead[-1] + (size if taken == drive else 0) - share * size)
        assert max(ahead) <= max(sizes) + 1
        assert min(ahead) >= -bound
        assert max(ahead) - min(ahead) <= bound + max(sizes)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=4), st.integers(1, 300))
def test_equal_chunks_never_stray_further_than_two_chunks(shares, count):
    turns = WeightedRoundRobin([float(share) for share in shares])
    drives = [turns.next_drive(MIB) for _ in range(count)]
    for first in range(0, count, 7):
        for last in range(first, count + 1, 5):
            for drive, share in enumerate(turns.shares):
                assert abs(drives[first:last].count(drive) - share * (last - first)) <= 2


def test_equal_shares_go_round():
    turns = WeightedRoundRobin([1, 1, 1])
    assert [turns.next_drive(4096) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    turns = WeightedRoundRobin([3, 1])
    assert [turns.next_drive(4096) for _ in range(8)].count(0) == 6


@pytest.mark.parametrize(
    "shares", [[], [1.0, 0.0], [1.0, -1.0], [1.0, math.inf], [math.nan, 1.0], [1e308, 1e308]]
)
def test_shares_that_are_none_are_value_errors(shares):
    with pytest.raises(ValueError, match="shares"):
        WeightedRoundRobin(shares)


def directories(tmp_path: Path, count: int) -> list[Path]:
    made = [tmp_path / str(number) for number in range(count)]
    for directory in made:
        directory.mkdir()
    return made


def test_places_follow_the_shares_and_do_not_overlap(tmp_path):
    space = SwapSpace(directories(tmp_path, 2), shares=[3e9, 1e9])
    assert space.shares == (0.75, 0.25)
    places = space.reserve([MIB] * 40)
    assert [sum(place.drive == drive for place in places) for drive in (0, 1)] == [30, 10]
    assert len({(place.drive, place.offset) for place in places}) == 40
    assert [file.size_bytes for file in space.files] == [30 * MIB, 10 * MIB]
    with pytest.raises(ValueError, match="2 swap directories"):
        space.shares = (1.0,)
    space.shares = (1.0, 1.0)
    assert [place.drive for place in space.reserve([4096] * 4)] == [0, 1, 0, 1]
    space.release(places)
    space.close()
    space.close()
    fds = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(ValueError, match="there are 1 swap directories"):
        SwapSpace([tmp_path], shares=[1, 2])
    assert set(Path("/proc/self/fd").iterdir()) == fds


def test_released_places_are_given_back_to_the_file_system(tmp_path):
    space = SwapSpace(directories(tmp_path, 2))
    first = space.reserve([MIB] * 2)
    second = space.reserve([MIB] * 4)
    space.release(second)
    assert [file.size_bytes for file in space.files] == [MIB, MIB]
    assert space.reserve([MIB] * 2) == [SwapExtent(0, MIB, MIB), SwapExtent(1, MIB, MIB)]
    space.free(first[0])
    assert space.size_bytes == 4 * MIB
    space.close()


def test_a_place_that_was_exchanged_twice_is_given_back_by_its_first_name(tmp_path):
    space = SwapSpace(directories(tmp_path, 1))
    first, second, third = space.reserve([MIB] * 3)
    space.exchange(first, second)
    space.exchange(second, third)
    space.free(first)
    # The two places that refused a write are not given back.
    assert space.reserve([MIB] * 2) == [third, SwapExtent(0, 3 * MIB, MIB)]
    space.close()


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_drive_that_is_full_is_named_and_no_other_has_grown(tmp_path, monkeypatch, culprit):
    paths = directories(tmp_path, 3)
    space = SwapSpace(paths, shares=[2, 1, 1])
    kept = space.reserve([MIB] * 5)
    lengths = [file.size_bytes for file in space.files]
    ahead = list(space._turns.credits)
    with monkeypatch.context() as patch:
        real = SwapFile.free_bytes
        patch.setattr(
            SwapFile, "free_bytes", lambda file: MIB if file is space.files[culprit] else real(file)
        )
        with pytest.raises(
            SwapFullError, match=r"are missing.*add a directory to Policy\.nvme"
        ) as caught:
            space.reserve([MIB] * 40)
        assert caught.value.path == str(paths[culprit])
        assert caught.value.errno == errno.ENOSPC
    assert [file.size_bytes for file in space.files] == lengths
    assert [os.fstat(file.fd).st_size for file in space.files] == lengths
    assert [space._extents[0].file_bytes(drive) for drive in range(3)] == lengths
    assert space._turns.credits == ahead
    more = space.reserve([MIB] * 3)
    assert not {(place.drive, place.offset) for place in kept} & {
        (place.drive, place.offset) for place in more
    }
    space.close()


@pytest.mark.privileged
def test_of_two_real_drives_the_small_one_that_is_full_takes_nothing_from_the_other(tmp_path):
    large = tmp_path / "large"
    large.mkdir()
    with loop_ext4(tmp_path / "small", 32 * MIB) as small:
        free = os.statvfs(small).f_bavail
        space = SwapSpace([large, small])
        try:
            with pytest.raises(SwapFullError) as caught:
                space.reserve([4 * MIB] * 32)
            assert caught.value.path == str(small)
            assert f"{64 * MIB - free * os.statvfs(small).f_frsize} are missing" in str(
                caught.value
            )
            assert space.size_bytes == 0
            assert os.statvfs(small).f_bavail == free
            assert os.fstat(space.files[0].fd).st_blocks == 0
            space.shares = (15.0, 1.0)
            space.reserve([4 * MIB] * 32)
            assert [file.size_bytes for file in space.files] == [120 * MIB, 8 * MIB]
        finally:
            space.close()


def test_an_interrupt_in_the_middle_leaves_nothing_either(tmp_path, monkeypatch):
    space = SwapSpace(directories(tmp_path, 2))
    real = os.posix_fallocate
    calls = []

    def interrupt(fd: int, offset: int, length: int) -> None:
        real(fd, offset, length)
        calls.append(fd)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_fallocate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        space.reserve([MIB] * 4)
    assert space.size_bytes == 0
    assert [os.fstat(file.fd).st_blocks for file in space.files] == [0, 0]
    space.close()


def test_at_once_files_grow_together_after_room_was_asked(tmp_path):
    asked = []

    def room(files: Sequence[SwapFile], sizes: Sequence[int]) -> None:
        asked.append((list(files), list(sizes), space.size_bytes))

    space = SwapSpace(directories(tmp_path, 2), room=room)
    first = space.reserve([MIB] * 2)
    with space.grow_together():
        space.reserve([MIB] * 3)
        second = space.reserve([MIB] * 4)
        assert space.size_bytes == 2 * MIB
    assert asked == [(space.files, [4 * MIB, 3 * MIB], 2 * MIB)]
    assert [os.fstat(file.fd).st_size for file in space.files] == [5 * MIB, 4 * MIB]
    space.reserve([MIB])  # outside of the block the check is not called
    assert len(asked) == 1
    with space.grow_together():
        pass
    assert asked[1][1] == [0, 0]
    assert len({(place.drive, place.offset) for place in first + second}) == 6
    space.close()


def test_at_once_no_file_grows_where_room_refuses_or_one_is_full(tmp_path, monkeypatch):
    refused = [False]

    def room(*_: object) -> None:
        if refused[0]:
            raise SwapFullError("together", path="x", op="allocate")

    space = SwapSpace(directories(tmp_path, 2), room=room)
    places = []
    for refused[0], free in ((True, None), (False, MIB)):
        with monkeypatch.context() as patch:
            if free is not None:
                real = SwapFile.free_bytes
                patch.setattr(
                    SwapFile,
                    "free_bytes",
                    lambda file, real=real: MIB if file is space.files[1] else real(file),
                )
            with pytest.raises(SwapFullError), space.grow_together():
                places = space.reserve([MIB] * 8)
        assert space.size_bytes == 0
        space.release(places)
    assert space.reserve([MIB] * 2) == [SwapExtent(0, 0, MIB), SwapExtent(1, 0, MIB)]
    space.close()
