"""(hi, lo) is the fp32 master: a bijection, rounded to nearest with ties away from zero, in C and
in torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.kernels.state_codec import decode_sections, encode_sections
from infinity._src.native import ffi, lib
from infinity.aio._records import Format, Master

Bits = npt.NDArray[np.uint32]
SPLIT = Format(Master.SPLIT)


def native_round_trip(bits: Bits) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int16], Bits]:
    hi, lo, back = (
        np.empty(bits.size, np.uint16),
        np.empty(bits.size, np.int16),
        np.empty(bits.size, np.uint32),
    )
    pointers = [
        ffi.cast(kind, array.ctypes.data)
        for kind, array in (
            ("float *", bits),
            ("uint16_t *", hi),
            ("int16_t *", lo),
            ("float *", back),
        )
    ]
    lib.inf_split_master(*pointers[:3], bits.size)
    lib.inf_join_master(pointers[1], pointers[2], pointers[3], bits.size)
    return hi, lo, back


def interesting_bits() -> Bits:
    """Every bf16 value times every low half near a rounding edge; and 2**24 random patterns."""
    highs = np.arange(1 << 16, dtype=np.uint32) << 16
    lows = np.array(
        [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xFFFE, 0xFFFF], dtype=np.uint32
    )
    edges = (highs[:, None] | lows[None, :]).ravel()
    noise = np.random.default_rng(11).integers(0, 1 << 32, 1 << 24, dtype=np.uint32)
    return np.concatenate([edges, noise])


def is_nan(bits: Bits) -> npt.NDArray[np.bool_]:
    return (bits & 0x7FFFFFFF) > 0x7F800000


def test_every_value_but_nan_round_trips_and_nan_becomes_canonical() -> None:
    bits = interesting_bits()
    hi, lo, back = native_round_trip(bits)
    expected = np.where(is_nan(bits), np.uint32(0x7FC00000), bits)
    np.testing.assert_array_equal(back, expected)
    torch_hi, torch_lo = encode_sections(SPLIT, torch.from_numpy(bits.view(np.float32)), [])
    np.testing.assert_array_equal(torch_hi.numpy().view(np.uint16), hi)
    np.testing.assert_array_equal(torch_lo.numpy(), lo)
    joined = decode_sections(SPLIT, [torch_hi, torch_lo])[0].numpy().view(np.uint32)
    np.testing.assert_array_equal(joined, expected)


def test_hi_is_torchs_bfloat16_except_on_ties_where_it_is_the_one_away_from_zero() -> None:
    bits = interesting_bits()
    bits = bits[~is_nan(bits)]
    hi, _, _ = native_round_trip(bits)
    rounded = (
        torch.from_numpy(bits.view(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    )
    tie = (bits & 0xFFFF) == 0x8000
    np.testing.assert_array_equal(hi[~tie], rounded[~tie])
    np.testing.assert_array_equal(hi[tie], (bits[tie] >> 16) + 1)


def test_every_bf16_value_is_its_own_hi_with_a_zero_lo() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = bits[~is_nan(bits)]
    hi, lo, _ = native_round_trip(bits)
    np.testing.assert_array_equal(hi, bits >> 16)
    assert not lo.any()
