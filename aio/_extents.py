"""Allocator of ranges of swap files. It records which ranges are free, and opens no file.

Extents are 4096-aligned. A freed extent is joined with its free neighbours. Free extents with the
lowest offset are reused first, so that a file grows only when no free extent fits. `file_bytes`
returns the length that a file needs.

Drive, file and offset of each chunk: `ShardRecords` (infinity/_src/params/state_store.py).
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import dataclass, field

ALIGNMENT_BYTES = 4096


@dataclass
class _Drive:
    """Free ranges [start, end) by ascending offset, never adjacent; all bytes from `end` on are
    free.
    """

    end: int = 0
    used: int = 0
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    too_large: int = sys.maxsize
    """Every free range is smaller than this."""


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
        """Allocate a range and return (drive, offset). drive=None: the drive with the fewest
        allocated bytes. `size_bytes` is rounded up to 4096.

        Raises ValueError for a size below 1, MemoryError when no drive has enough free bytes.
        """
        if size_bytes < 1:
            raise ValueError(f"allocate(size_bytes={size_bytes}): must be >= 1")
        size = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        # By allocated bytes, so that extents spread evenly; ties by number, so that runs repeat.
        order = sorted(
            range(len(self._drives)), key=lambda index: (self._drives[index].used, index)
        )
        for index in order if drive is None else [drive]:
            offset = self._take(self._drives[index], size)
            if offset is not None:
                # For `free`, which gets only the offset.
                self._sizes[index, offset] = size
                return index, offset
        raise MemoryError(f"no drive has {size} bytes left of {self._capacity_bytes}")

    def _take(self, drive: _Drive, size: int) -> int | None:
        # First fit: low offsets fill up, and the file stays short. Skipped when no free range is
        # large enough: the list may have a million small ones.
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
        # No free range fits: extend the file, up to its capacity.
        if self._capacity_bytes is not None and drive.end + size > self._capacity_bytes:
            return None
        offset = drive.end
        drive.end += size
        drive.used += size
        return offset

    def free(self, drive: int, offset: int) -> None:
        """Free an allocated range. Raises ValueError if none begins at this offset."""
        size = self._sizes.pop((drive, offset), None)
        if size is None:
            raise ValueError(f"no extent at offset {offset} of drive {drive}")
        self._put_back(self._drives[drive], offset, offset + size)

    def trim(self, drive: int, offset: int, size_bytes: int) -> int:
        """Shorten a range to `size_bytes`, a multiple of 4096. Returns how many bytes this frees.

        Raises ValueError if no range begins at this offset, or the range is shorter.
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
        # Merge with both neighbours, so that free ranges are never adjacent.
        at = bisect_left(space.starts, start)
        if at < len(space.starts) and space.starts[at] == end:
            end = space.ends[at]
            del space.starts[at], space.ends[at]
        if at > 0 and space.ends[at - 1] == start:
            start = space.starts[at - 1]
            del space.starts[at - 1], space.ends[at - 1]
            at -= 1
        # A free range at the end of the file shortens the file instead.
        if end == space.end:
            space.end = start
        else:
            space.too_large = max(space.too_large, end - start + 1)
            space.starts.insert(at, start)
            space.ends.insert(at, end)

    def used_bytes(self, drive: int) -> int:
        """Allocated bytes of a drive."""
        return self._drives[drive].used

    def file_bytes(self, drive: int) -> int:
        """Return the length in bytes that the drive's file needs to hold all extents."""
        return self._drives[drive].end
