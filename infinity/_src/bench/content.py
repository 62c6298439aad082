"""What is written: random, so that no drive can compress it, and never the same block twice, so that none can deduplicate it."""

from __future__ import annotations

import numpy as np

from infinity import aio
from infinity._src.bench.streams import CHUNK_BYTES

_CHUNKS_PER_DRIVE = 8
_BLOCK_WORDS = 512


class Content:
    """Two halves of random bytes, `half` chunks each: one is written while the other is made new.

    A half is made new by XOR of every word with a random constant: as random as before, different everywhere, at the
    speed of memory. (Making random numbers takes a core per GB/s.)
    """

    def __init__(self, drive_count: int) -> None:
        self.half = _CHUNKS_PER_DRIVE * drive_count
        self._slab = aio.Slab(2 * self.half * CHUNK_BYTES)
        self._random = np.random.default_rng()
        words = self._slab.array(np.uint64)
        # 64 KiB of generated numbers at a time, or the first measurement would wait for a second array of this size.
        for start in range(0, len(words), 1 << 20):
            part = words[start : start + (1 << 20)]
            part[:] = self._random.integers(0, 2**64, size=len(part), dtype=np.uint64)

    def renew(self, half: int) -> None:
        """Make half 0 or 1 new. Nothing may be reading it."""
        words = self._slab.array(np.uint64, offset=half * self.half * CHUNK_BYTES, count=self.half * CHUNK_BYTES // 8)
        words ^= self._random.integers(1, 2**64, dtype=np.uint64)

    def addresses(self, half: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Where the chunks of a half lie."""
        first = self._slab.address + half * self.half * CHUNK_BYTES
        return np.arange(first, first + self.half * CHUNK_BYTES, CHUNK_BYTES, dtype=np.uint64)

    @property
    def memory(self) -> memoryview:
        """All of it as bytes."""
        return self._slab.memory

    def close(self) -> None:
        """Free the memory. Nothing may be reading it."""
        self._slab.close()


def is_hole(page: bytes | memoryview) -> bool:
    """Whether a page is what a hole, or memory that nobody filled, reads as: every word the same."""
    words = np.frombuffer(page, dtype=np.uint64, count=min(_BLOCK_WORDS, len(page) // 8))
    return bool((words == words[0]).all())
