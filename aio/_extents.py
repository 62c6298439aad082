"""Allocator of ranges of swap files. Pure bookkeeping: it touches no file.

Extents are 4096-aligned. A freed extent is joined with its free neighbours and reused, lowest
offset first, so that a file only grows when it must. `file_bytes` says how long a file has to be.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import dataclass, field

ALIGNMENT_BYTES = 4096


@dataclass
class _Drive:
    """Free ranges by ascending offset (start, end), never adjacent; beyond `end` everything is
    free.
    """

    end: int = 0
    used: int = 0
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    too_large: int = sys.maxsize
    """No free range has so many bytes."""


class ExtentAllocator:
    """Allocates ranges of `drive_count` files of at most `capacity_bytes` each (None: no limit)."""

    def __init__(self, drive_count: int, *, capacity_bytes: int | None = None) -> None:
        if drive_count < 1:
            raise ValueError(
                f"ExtentAllocator(drive_count={drive_count}): at least one drive is needed"
            )
        self._drives = [_Drive() for _ in range(drive_count)]
        self._capacity_bytes = capacity_bytes
        self._sizes: dict[tuple[int, int], int] = {}

    def allocate(self, size_bytes: int, *, drive: int | None = None) -> tuple[int, int]:
        """Take a free range: (drive, offset). drive=None: on the drive that holds the least.
        `size_bytes` is rounded up to 4096.

        Raises ValueError for a size below 1, MemoryError when no drive has that much left.
        """
        if size_bytes < 1:
            raise ValueError(f"allocate(size_bytes={size_bytes}): must be >= 1")
        size = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        # By what a drive holds, so that extents spread evenly; ties by number, so that runs repeat.
        order = sorted(
            range(len(self._drives)), key=lambda index: (self._drives[index].used, index)
        )
        for index in order if drive is None else [drive]:
            offset = self._take(self._drives[index], size)
            if offset is not None:
                # `free` gets the offset alone, and needs the size.
                self._sizes[index, offset] = size
                return index, offset
        raise MemoryError(f"no drive has {size} bytes left of {self._capacity_bytes}")

    def _take(self, drive: _Drive, size: int) -> int | None:
        # First fit: low offsets fill up, and the file stays short. Not where it is known to find
        # nothing: a million ranges may be free, each too small.
        ranges = zip(drive.starts, drive.ends, strict=True) if size < drive.too_large else ()
        for at, (start, end) in enumerate(ranges):
            if end - start < size:
                continue
            if end - start == size:
                del drive.starts[at], drive.ends[at]
            else:
                drive.starts[at] = start + size
            drive.used += size
            return start
        drive.too_large = min(drive.too_large, size)
        # No free range fits: the file grows, up to its capacity.
        if self._capacity_bytes is not None and drive.end + size > self._capacity_bytes:
            return None
        offset = drive.end
        drive.end += size
        drive.used += size
        return offset

    def free(self, drive: int, offset: int) -> None:
        """Take a range back. Raises ValueError for one that was not handed out."""
        size = self._sizes.pop((drive, offset), None)
        if size is None:
            raise ValueError(f"no extent at offset {offset} of drive {drive}")
        self._put_back(self._drives[drive], offset, offset + size)

    def trim(self, drive: int, offset: int, size_bytes: int) -> int:
        """Shorten a range to `size_bytes`, a multiple of 4096. Returns the bytes that are free now.

        Raises ValueError for a range that was not handed out, or is shorter.
        """
        size = self._sizes.get((drive, offset))
        if size is None or size < size_bytes or size_bytes < 1 or size_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"no extent of {size_bytes} bytes at offset {offset} of drive {drive}")
        if size > size_bytes:
            self._sizes[drive, offset] = size_bytes
            self._put_back(self._drives[drive], offset + size_bytes, offset + size)
        return size - size_bytes

    def _put_back(self, space: _Drive, start: int, end: int) -> None:
        space.used -= end - start
        # Joined with both neighbours: free ranges are never adjacent, so first fit sees whole ones.
        at = bisect_left(space.starts, start)
        if at < len(space.starts) and space.starts[at] == end:
            end = space.ends[at]
            del space.starts[at], space.ends[at]
        if at > 0 and space.ends[at - 1] == start:
            start = space.starts[at - 1]
            del space.starts[at - 1], space.ends[at - 1]
            at -= 1
        # Free space at the end shortens the file instead of staying a hole.
        if end == space.end:
            space.end = start
        else:
            space.too_large = max(space.too_large, end - start + 1)
            space.starts.insert(at, start)
            space.ends.insert(at, end)

    def used_bytes(self, drive: int) -> int:
        """Bytes handed out on a drive."""
        return self._drives[drive].used

    def file_bytes(self, drive: int) -> int:
        """Length that the drive's file must have to hold all extents."""
        return self._drives[drive].end
