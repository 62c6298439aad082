"""Swap space over one or several drives: chunks go round the drives, each chunk whole on one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from infinity.aio.extents import ExtentAllocator
from infinity.aio.swap_file import SwapFile


@dataclasses.dataclass(frozen=True)
class Place:
    """Bytes [offset, offset + size) of the swap file of one drive."""

    drive: int
    offset: int
    size_bytes: int


class SwapSpace:
    """Swap files in `directories`, one each, and what of them is in use.

    Ephemeral: the files have no name, so nothing stays behind however the process ends.
    Raises: what SwapFile raises for a directory that is missing, read-only, full or on tmpfs.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self.files: list[SwapFile] = []
        try:
            for directory in directories:
                self.files.append(SwapFile.create(directory))
        except BaseException:
            self.close()
            raise
        self._extents = ExtentAllocator(max(len(self.files), 1))
        self._turn = 0

    @property
    def size_bytes(self) -> int:
        """Bytes preallocated on all drives."""
        return sum(file.size_bytes for file in self.files)

    def reserve(self, sizes: Sequence[int]) -> list[Place]:
        """Places for chunks of `sizes` bytes (multiples of 4096), round the drives; grows the files first.

        Raises: SwapFullError saying how much is missing; then nothing was reserved.
        """
        places: list[Place] = []
        try:
            for size in sizes:
                drive, offset = self._extents.allocate(size, drive=self._turn)
                places.append(Place(drive, offset, size))
                self._turn = (self._turn + 1) % len(self.files)
            for drive, file in enumerate(self.files):
                file.grow(self._extents.file_bytes(drive))
        except BaseException:
            for place in places:
                self.free(place)
            raise
        return places

    def free(self, place: Place) -> None:
        """Give a place back."""
        self._extents.free(place.drive, place.offset)

    def close(self) -> None:
        """Close the files; ephemeral ones vanish. Idempotent."""
        for file in self.files:
            file.close()
        self.files = []
