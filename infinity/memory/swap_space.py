"""Swap space over one or several drives: each chunk whole on one of them, the drives in proportion to their shares.

Chunks that follow one another are read one after another, so every stretch of them has to be in proportion, not only
the whole: smooth weighted round robin, over bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from infinity.aio.extents import ExtentAllocator
from infinity.aio.swap_file import SwapFile

_UNIT = 1 << 20
"""Shares are kept in millionths, about."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Bytes [offset, offset + size) of the swap file of one drive."""

    drive: int
    offset: int
    size_bytes: int


class Turns:
    """Whose turn it is, so that drives get bytes in proportion to `shares`.

    Every drive earns its share of each chunk as credit; the one with the most takes the chunk and pays for it. Over any
    stretch of chunks, what each of n drives gets is off by n chunks of the largest size at most.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        total = sum(shares)
        if not shares or not all(share > 0 for share in shares) or not math.isfinite(total):
            raise ValueError(f"shares={list(shares)}: one positive number for each drive")
        # In whole numbers, so that equal shares stay equal however many chunks there were.
        self._weights = [max(round(share / total * _UNIT), 1) for share in shares]
        self.credits = [0] * len(self._weights)

    @property
    def shares(self) -> tuple[float, ...]:
        """What part of the bytes each drive gets."""
        return tuple(weight / sum(self._weights) for weight in self._weights)

    def take(self, size_bytes: int) -> int:
        """The drive for the next chunk."""
        for drive, weight in enumerate(self._weights):
            self.credits[drive] += weight * size_bytes
        drive = max(range(len(self.credits)), key=lambda index: (self.credits[index], -index))
        self.credits[drive] -= sum(self._weights) * size_bytes
        return drive


class SwapSpace:
    """Swap files in `directories`, one each, and what of them is in use.

    Ephemeral: the files have no name, so nothing stays behind however the process ends.
    shares: what part of the bytes each drive gets, in any unit (None: the same); set before the first `reserve`.
    Raises: what SwapFile raises for a directory that is missing, read-only, full or on tmpfs.
    """

    def __init__(self, directories: Sequence[Path], shares: Sequence[float] | None = None) -> None:
        self.files: list[SwapFile] = []
        try:
            for directory in directories:
                self.files.append(SwapFile.create(directory))
            self._turns = Turns([1.0] * max(len(self.files), 1))
            if shares is not None:
                self.shares = tuple(shares)
        except BaseException:
            self.close()
            raise
        self._extents = ExtentAllocator(max(len(self.files), 1))

    @property
    def shares(self) -> tuple[float, ...]:
        """The part of the bytes that each drive gets; they add up to 1."""
        return self._turns.shares

    @shares.setter
    def shares(self, shares: Sequence[float]) -> None:
        if len(shares) != len(self.files):
            raise ValueError(f"shares={list(shares)}: there are {len(self.files)} swap directories")
        self._turns = Turns(shares)

    @property
    def size_bytes(self) -> int:
        """Bytes preallocated on all drives."""
        return sum(file.size_bytes for file in self.files)

    def reserve(self, sizes: Sequence[int]) -> list[Place]:
        """Places for chunks of `sizes` bytes (multiples of 4096), in proportion to the shares; grows the files first.

        Raises: SwapFullError that names the directory and says how much is missing there; then nothing was reserved, and
        no file has grown. Other drives do not take what one has no room for: they would be the slower for it.
        """
        places: list[Place] = []
        credits_before, lengths_before = list(self._turns.credits), [file.size_bytes for file in self.files]
        try:
            for size in sizes:
                drive, offset = self._extents.allocate(size, drive=self._turns.take(size))
                places.append(Place(drive, offset, size))
            for drive, file in enumerate(self.files):
                file.grow(self._extents.file_bytes(drive))
        except BaseException:
            for place in places:
                self.free(place)
            self._turns.credits = credits_before
            for file, length in zip(self.files, lengths_before, strict=True):
                file.shrink(length)
            raise
        return places

    def free(self, place: Place) -> None:
        """Give a place back; its file keeps its length, for the next."""
        self._extents.free(place.drive, place.offset)

    def release(self, places: Sequence[Place]) -> None:
        """Give places back, and to the file system what the files then hold at their ends for nobody."""
        for place in places:
            self.free(place)
        for drive, file in enumerate(self.files):
            file.shrink(self._extents.file_bytes(drive))

    def close(self) -> None:
        """Close the files; ephemeral ones vanish. Idempotent."""
        for file in self.files:
            file.close()
        self.files = []
