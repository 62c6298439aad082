"""(hi, lo) is the fp32 master, `hi` as torch rounds it, in C and in torch; beside a second moment
all of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.cabi.native import ffi, lib
from infinity._src.cabi.records import Format, Master
from infinity._src.kernels.state_codec import decode_master, decode_sections, encode_sections

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


def torchs(bits: Bits) -> npt.NDArray[np.uint16]:
    """The upper halves as torch rounds to bf16, with one NaN."""
    rounded = torch.from_numpy(bits.view(np.float32)).bfloat16().view(torch.int16).numpy()
    return np.where(is_nan(bits), np.uint16(0x7FC0), rounded.view(np.uint16))


def test_hi_is_torchs_bfloat16_and_the_rest_round_trips() -> None:
    """NaN becomes canonical. Half of the ties have no code: they lose one unit in the last
    place."""
    bits = interesting_bits()
    hi, lo, back = native_round_trip(bits)
    expected = np.where(is_nan(bits), np.uint32(0x7FC00000), bits)
    lost = (bits & 0x1FFFF == 0x8000) & ~is_nan(bits)
    assert lost.sum() > 0x7F00
    expected -= lost
    np.testing.assert_array_equal(hi, torchs(bits))
    np.testing.assert_array_equal(back, expected)
    torch_hi, torch_lo = encode_sections(SPLIT, torch.from_numpy(bits.view(np.float32)), [])
    np.testing.assert_array_equal(torch_hi.numpy().view(np.uint16), hi)
    np.testing.assert_array_equal(torch_lo.numpy(), lo)
    joined = decode_sections(SPLIT, [torch_hi, torch_lo])[0].numpy().view(np.uint32)
    np.testing.assert_array_equal(joined, expected)


SECONDS = np.array(
    [
        *(0x00000000, 0x00000001, 0x3F800000, 0x7F800000, 0x7FC00000),
        *(0x80000000, 0x80000001, 0xBF800000, 0xFFC00000),
    ],
    dtype=np.uint32,
)
"""Second moments with a free sign, NaN among them, and with a sign of their own."""


def test_the_sign_of_a_second_moment_tells_every_master_from_its_neighbours() -> None:
    bits = interesting_bits()[: 10 << 16]
    master = torch.from_numpy(np.repeat(bits, len(SECONDS)).view(np.float32))
    second = torch.from_numpy(np.tile(SECONDS, len(bits)).view(np.float32))
    wide = master.numpy().view(np.uint32)
    expected = np.where(is_nan(wide), np.uint32(0x7FC00000), wide)
    # A moment that needs its sign keeps it, and the master is rounded towards `hi`.
    kept = (expected & 0xFFFF == 0x8000) & (second.numpy().view(np.int32) < 0)
    expected[kept] = np.where(wide & 0x10000, wide + 1, wide - 1)[kept]
    sections = encode_sections(Format.SPLIT, master, [master, second])
    np.testing.assert_array_equal(sections[0].numpy().view(np.uint16), torchs(wide))
    found, (first, back) = decode_sections(Format.SPLIT, sections)
    np.testing.assert_array_equal(found.numpy().view(np.uint32), expected)
    np.testing.assert_array_equal(back.view(torch.int32), second.view(torch.int32))
    assert first.data_ptr() == master.data_ptr()
    own = [sections[index] for index in Format.SPLIT.master_sections]
    assert torch.equal(decode_master(Format.SPLIT, own).view(torch.int32), found.view(torch.int32))


def test_states_of_before_ties_had_signs_read_as_they_did() -> None:
    """`hi` was rounded away from zero then, so an odd one may have -32768 beside it."""
    hi = torch.tensor([0x3F81, 0x3F82, -0x8000 + 0x3F81], dtype=torch.int16)
    lo = torch.full((3,), -0x8000, dtype=torch.int16)
    moment = torch.tensor([0.0, 1.0, 2.0])
    master, (_, second) = decode_sections(Format.SPLIT, [hi, lo, moment, moment])
    assert master.tolist() == [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8]
    assert torch.equal(second, moment)


def test_every_bf16_value_is_its_own_hi_with_a_zero_lo() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    bits = bits[~is_nan(bits)]
    hi, lo, _ = native_round_trip(bits)
    np.testing.assert_array_equal(hi, bits >> 16)
    assert not lo.any()
