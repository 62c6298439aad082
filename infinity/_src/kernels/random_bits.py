"""Random bits for stochastic rounding of states and codes, and a correctly rounded square root.

Stochastic rounding chooses one of a value's two neighbours, with probabilities that preserve the
expected value. An element's 32 random bits depend only on a key and the element's index in its
parameter. So an update rounds identically on every device, for every division into chunks, and in
every order. native/kernels/float_bits.h (`inf_mix64`, `inf_random`) and triton/random.py compute
the same hash.

state_codec.py and native/kernels/update_codec.h round states with these bits; quantize.py and
native/kernels/comm_codec_kernels.h round codes.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1
_PART_NUMEL = 1 << 31  # elements of one torch.arange of int32


def rounding_key(seed: int, step: int, name: str) -> int:
    """Return HYPER["key"] (uint64) for the update of parameter `name` in step `step` of a run with
    `seed`.
    """
    words = f"{seed}/{step}/{name}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def mix64(word: int) -> int:
    """Mix a 64-bit number by a bijection in which each input bit flips each output bit half of the
    time (splitmix64).
    """
    word = (word + 0x9E3779B97F4A7C15) & _MASK64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK64
    return word ^ (word >> 31)


def random_bits(key: int, element: int, numel: int, device: torch.device) -> torch.Tensor:
    """Return int32 [numel] on `device`: 32 random bits for each of the elements
    [element, element + numel).
    """
    parts = []
    while numel > 0:
        low = element & _MASK32
        # Up to the next multiple of 2^32 the upper half of the index is constant.
        count = min(numel, (1 << 32) - low, _PART_NUMEL)
        # The upper half of the index is mixed into the key; the lower half is hashed per element.
        mixed = mix64(key ^ ((element >> 32) * 0x9E3779B97F4A7C15 & _MASK64))
        parts.append(_hashed(mixed, low, count, device))
        element += count
        numel -= count
    if not parts:
        return torch.zeros(0, dtype=torch.int32, device=device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift int32 right by 1 to 31 places, filling with zeros."""
    return (bits >> count).bitwise_and_((1 << 32 - count) - 1)


def sqrt_exact(values: torch.Tensor) -> torch.Tensor:
    """Return the correctly rounded square root of an fp32 tensor of at least one dimension."""
    if values.device.type != "cpu":
        return torch.sqrt(values)
    # torch.sqrt on the CPU uses MKL, which is off by one unit in the last place for 0.6 % of values
    # (torch 2.13). numpy and the native kernels use the CPU's instruction, which rounds correctly.
    with np.errstate(invalid="ignore"):  # a negative number gives NaN, as in torch
        return torch.from_numpy(np.sqrt(values.detach().numpy()))


def _hashed(mixed: int, low: int, count: int, device: torch.device) -> torch.Tensor:
    # The hash lowbias32 (C. Wellons, hash-prospector), with both halves of `mixed` added in.
    # int32 with wrapping products: int64 is ten times slower on a CPU.
    h = torch.arange(count, dtype=torch.int32, device=device)
    h += _signed(low + mixed)
    h ^= shift_right(h, 16)
    h *= _signed(0x7FEB352D)
    h ^= shift_right(h, 15)
    h ^= _signed(mixed >> 32)
    h *= _signed(0x846CA68B)
    h ^= shift_right(h, 16)
    return h


def _signed(word: int) -> int:
    """Return the lower 32 bits of a number as an int32."""
    word &= _MASK32
    return word - (1 << 32) if word >> 31 else word
