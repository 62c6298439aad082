"""Random rounding's bits: 32 for each element, from a key and the element's index in its parameter, and from nothing else.

So the same update rounds alike wherever it runs, however a parameter is cut into chunks, and in whatever order. The hash
is that of native/update_codec.h, in numpy.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1


def rounding_key(seed: int, step: int, name: str) -> int:
    """HYPER["key"] (uint64) of the update that makes step `step` of the parameter `name`, for a run's `seed`."""
    words = f"{seed}/{step}/{name}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def mix64(word: int) -> int:
    """A bijection of 64-bit numbers in which every input bit changes every output bit half of the time (splitmix64)."""
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def random_bits(key: int, element: int, numel: int) -> npt.NDArray[np.uint32]:
    """uint32 [numel] for elements [element, element + numel)."""
    parts = []
    while numel > 0:
        low = element & 0xFFFFFFFF
        count = min(numel, (1 << 32) - low)
        parts.append(_bits(mix64(key ^ ((element >> 32) * 0x9E3779B97F4A7C15 & _MASK)), low, count))
        element += count
        numel -= count
    return np.concatenate(parts) if parts else np.zeros(0, np.uint32)


def _bits(mixed: int, low: int, count: int) -> npt.NDArray[np.uint32]:
    h = np.arange(count, dtype=np.uint32)
    h += np.uint32((low + mixed) & 0xFFFFFFFF)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x7FEB352D)
    h ^= h >> np.uint32(15)
    h ^= np.uint32(mixed >> 32)
    h *= np.uint32(0x846CA68B)
    h ^= h >> np.uint32(16)
    return h
