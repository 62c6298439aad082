"""State encodings: what survives them, that random rounding is unbiased, and that nothing
non-finite becomes a number."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.cabi.records import QUANT_GROUP, Format, Master, Moments
from infinity._src.kernels import state_codec
from infinity._src.kernels.random_bits import rounding_key
from tests import oracle
from tests.marks import mostly_slow
from tests.unit.native.states import random_bits as odd_bits
from tests.unit.native.test_update_kernels import assert_same_sections

COMPACT = Format(Master.SPLIT8, Moments.Q8, 2)
BF16 = Format(Master.SPLIT, Moments.BF16, 2)
Array = npt.NDArray[np.float32]

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
POSITIVE = st.floats(0, 2.0**100, width=32)
FORMATS = [
    Format(master, moments, 2)
    for master in (Master.SPLIT, Master.SPLIT8, Master.FP32, Master.FP16)
    for moments in (Moments.FP32, Moments.BF16, Moments.Q8)
]


def encode_sections(
    state_format: Format,
    master: Array,
    moments: list[Array],
    *,
    key: int | None = None,
    element: int = 0,
) -> list[npt.NDArray[np.generic]]:
    """The codec on numpy memory."""
    values = [torch.from_numpy(values) for values in (master, *moments)]
    found = state_codec.encode_sections(
        state_format, values[0], values[1:], key=key, element=element
    )
    return [section.numpy() for section in found]


def decode_sections(
    state_format: Format, sections: list[npt.NDArray[np.generic]]
) -> tuple[Array, list[Array]]:
    """The codec on numpy memory."""
    given_ = [torch.from_numpy(section.view(np.uint8)) for section in sections]
    master, moments = state_codec.decode_sections(state_format, given_)
    return master.numpy(), [moment.numpy() for moment in moments]


def array(values: list[float]) -> Array:
    return np.array(values, np.float32)


def spacing(state_format: Format, row: int, values: Array) -> Array:
    """Between the codes next to each of `values` (row 0: masters, 1 and 2: moments), at least."""
    if row == 0 or state_format.moments is Moments.BF16:
        return np.abs(values) * np.float32(2.0**-15 if row == 0 else 2.0**-8)
    scale = np.abs(values).reshape(-1, QUANT_GROUP).max(axis=1).repeat(QUANT_GROUP)
    codes, power = (127, 2) if row == 1 else (255, 4)
    code = np.floor(codes * (np.abs(values) / scale) ** (1 / power))
    return (scale * ((code + 1) ** power - code**power) / codes**power).astype(np.float32)


def moments_of(
    state_format: Format, first: Array, second: Array, key: int | None = None, element: int = 0
) -> list[Array]:
    sections = encode_sections(
        state_format, np.zeros_like(first), [first, second], key=key, element=element
    )
    return decode_sections(state_format, sections)[1]


@given(
    st.sampled_from(FORMATS),
    st.lists(st.tuples(FLOATS, FLOATS, POSITIVE), min_size=1, max_size=200),
)
@settings(max_examples=150, deadline=None)
def test_what_was_decoded_encodes_to_the_same(
    state_format: Format, rows: list[tuple[float, float, float]]
) -> None:
    master, first, second = (array([row[i] for row in rows]) for i in range(3))
    once = decode_sections(state_format, encode_sections(state_format, master, [first, second]))
    again = decode_sections(state_format, encode_sections(state_format, once[0], once[1]))
    np.testing.assert_array_equal(once[0], again[0])
    # A group whose largest number is not a bf16 gets the same scale again: its code is the largest,
    # which is the scale.
    for left, right in zip(once[1], again[1], strict=True):
        np.testing.assert_allclose(left, right, rtol=0.02, atol=float(np.abs(left).max()) * 1e-4)


@given(st.sampled_from(FORMATS), st.lists(FLOATS, min_size=1, max_size=100))
@settings(max_examples=150, deadline=None)
def test_masters_come_back_as_near_as_their_bits_allow(
    state_format: Format, values: list[float]
) -> None:
    master = array(values)
    zeros = [np.zeros_like(master)] * 2
    for key in (None, 7):
        back = decode_sections(state_format, encode_sections(state_format, master, zeros, key=key))[
            0
        ]
        if state_format.master is Master.SPLIT8:
            spacing = np.maximum(
                np.abs(master) * 2.0**-15, 2.0**-141
            )  # 16 bits of significand, denormals too
            wide = np.abs(back.astype(np.float64) - master) <= spacing
            assert (wide | np.isinf(back) & (np.abs(master) > 3.38e38)).all()
        else:
            np.testing.assert_array_equal(back.view(np.uint32), master.view(np.uint32))


@given(st.lists(FLOATS, min_size=1, max_size=100))
@settings(max_examples=200, deadline=None)
def test_hi_is_the_bf16_next_to_the_master_and_half_is_torchs(values: list[float]) -> None:
    master = array(values)
    zeros = [np.zeros_like(master)] * 2
    hi = encode_sections(COMPACT, master, zeros)[0].view(np.uint16).astype(np.uint32) << np.uint32(
        16
    )
    kept = decode_sections(COMPACT, encode_sections(COMPACT, master, zeros))[0]
    with np.errstate(invalid="ignore"):
        near = (
            np.abs(hi.view(np.float32).astype(np.float64) - kept)
            <= np.abs(kept.astype(np.float64)) * 2.0**-8 + 1e-40
        )
    assert (near | ~np.isfinite(hi.view(np.float32))).all()
    half = encode_sections(Format(Master.FP16, Moments.FP32, 2), master, zeros)[0]
    np.testing.assert_array_equal(
        half.view(np.int16), torch.from_numpy(master).half().view(torch.int16).numpy()
    )


def test_every_half_and_every_24_bit_master_round_trips() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32)
    low = np.array([0x00, 0x7F, 0x80, 0xFF], np.uint32)
    master = (
        ((bits[:, None] << np.uint32(16)) | (low << np.uint32(8))[None, :])
        .reshape(-1)
        .view(np.float32)
    )
    master = master[~np.isnan(master)]
    back = decode_sections(
        COMPACT, encode_sections(COMPACT, master, [np.zeros_like(master)] * 2, key=5)
    )[0]
    np.testing.assert_array_equal(back.view(np.uint32), master.view(np.uint32))


@pytest.mark.parametrize(
    "state_format", mostly_slow([COMPACT, BF16, Format(Master.FP32, Moments.Q8, 2)], BF16)
)
def test_random_rounding_is_unbiased(state_format: Format) -> None:
    """The mean of many roundings is the number, within five standard errors of what the spacing of
    codes allows."""
    rng = np.random.default_rng(4)
    numel, times = 16 * QUANT_GROUP, 4000
    master = (rng.standard_normal(numel) * np.exp2(rng.uniform(-12, 3, numel))).astype(np.float32)
    first = (rng.standard_normal(numel) * np.exp2(rng.uniform(-10, 0, numel))).astype(np.float32)
    second = np.square(rng.standard_normal(numel) * np.exp2(rng.uniform(-8, 0, numel))).astype(
        np.float32
    )
    sums = np.zeros((3, numel))
    squares = np.zeros((3, numel))
    for step in range(times):
        sections = encode_sections(
            state_format, master, [first, second], key=rounding_key(0, step, "w")
        )
        got, moments = decode_sections(state_format, sections)
        for row, values in enumerate((got, *moments)):
            sums[row] += values
            squares[row] += np.square(values.astype(np.float64))
    mean = sums / times
    error = np.sqrt(np.maximum(squares / times - mean**2, 0) / times)
    least = (
        second.reshape(-1, QUANT_GROUP).max(axis=1).repeat(QUANT_GROUP) * 2.5e-10
    )  # below it, code 1 is too much
    for row, wanted in enumerate((master, first, second)):
        above = (
            wanted > least
            if row == 2 and state_format.moments is Moments.Q8
            else np.ones(numel, bool)
        )
        assert above.mean() > 0.9
        # The sample's spread is wrong if hardly any rounding went the other way.
        few = spacing(state_format, row, wanted) * np.sqrt(20) / times
        z = (mean[row] - wanted)[above] / np.maximum(error[row], few)[above]
        assert np.abs(z).max() < 5.5, (row, np.abs(z).max())
        assert abs(z.mean()) < 5 / np.sqrt(numel), (row, z.mean())  # nor all a little to one side


@pytest.mark.slow
@pytest.mark.parametrize("state_format", [COMPACT, BF16])
def test_small_steps_add_up_where_rounding_to_nearest_loses_them(state_format: Format) -> None:
    """An average that moves by less than half a code each time still arrives."""
    value, target, rate = (
        np.full(256, 1e-4, np.float32),
        np.full(256, 4e-4, np.float32),
        np.float32(1e-3),
    )
    value[::QUANT_GROUP] = target[::QUANT_GROUP] = (
        2.0**-6
    )  # the largest of each group stays, and so does the scale
    rest = np.arange(256) % QUANT_GROUP != 0
    nearest = value.copy()
    first = np.zeros_like(value)
    for step in range(3000):
        value = moments_of(
            state_format, first, value + (target - value) * rate, rounding_key(0, step, "w")
        )[1]
        nearest = moments_of(state_format, first, nearest + (target - nearest) * rate)[1]
    wanted = 4e-4 + (1e-4 - 4e-4) * (1 - 1e-3) ** 3000
    assert abs(value[rest].mean() / wanted - 1) < 0.01
    assert abs(nearest[rest].mean() / wanted - 1) > 0.1


def test_small_second_moments_survive_beside_large_ones() -> None:
    """Twenty-eight binades below the largest of its group, and never zero: what a square root
    divides by."""
    second = np.exp2(-np.arange(QUANT_GROUP, dtype=np.float32) / 2)
    for key in (None, 1, 2, 3):
        back = moments_of(COMPACT, np.zeros_like(second), second, key)[1]
        assert (back > 0).all()
        assert (np.abs(np.log2(back[:40] / second[:40])) < 1).all()
    tiny = np.full(QUANT_GROUP, 1e-42, np.float32)
    tiny[0] = 1e30
    assert (moments_of(COMPACT, tiny, tiny, 1)[1] > 0).all()
    assert (moments_of(BF16, tiny, tiny, 1)[1] > 0).all()


@pytest.mark.parametrize("largest", [1e-45, 1e-40, 1e-38, 1e-36, 1e-30, 1e38, 3.4e38])
def test_groups_of_any_magnitude_keep_their_largest(largest: float) -> None:
    values = np.full(QUANT_GROUP, largest, np.float32)
    for key in (None, 1):
        first, second = moments_of(COMPACT, -values, values, key)
        assert (second > 0).all()
        assert np.isfinite(first).all()
        assert np.isfinite(second).all()
        if largest > 2.0**-94:
            np.testing.assert_allclose(first, -values, rtol=0.02)
            np.testing.assert_allclose(second, values, rtol=0.02)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("state_format", FORMATS)
def test_what_is_not_finite_never_becomes_a_number(state_format: Format, bad: float) -> None:
    values = np.linspace(0.1, 1, 3 * QUANT_GROUP, dtype=np.float32)
    master = values.copy()
    values[70] = master[70] = bad
    for key in (None, 1):
        got, moments = decode_sections(
            state_format, encode_sections(state_format, master, [values, values], key=key)
        )
        for back in (got, *moments):
            assert not np.isfinite(back[70])
            others = np.r_[0:64, 128:192]
            assert np.isfinite(back[others]).all()
        if state_format.moments is Moments.Q8:
            assert np.isnan(moments[0][64:128]).all()


def test_a_negative_second_moment_is_no_number_in_8_bits() -> None:
    values = np.full(QUANT_GROUP, -1e-3, np.float32)
    assert np.isnan(moments_of(COMPACT, values, values)[1]).all()
    assert (moments_of(COMPACT, -0.0 * values, -0.0 * np.abs(values))[1] == 0).all()


def test_zeros_are_zeros_and_signs_are_kept() -> None:
    values = array([0.0, -0.0, 1.0, -1.0, 0.25, -0.25])
    first, second = moments_of(COMPACT, values, np.abs(values), 3)
    np.testing.assert_array_equal(np.sign(first), np.sign(values))
    assert (second[:2] == 0).all()
    np.testing.assert_allclose(first[[2, 3]], [1, -1], rtol=1e-6)


def test_formats_without_states_and_wrong_numbers_of_moments_are_refused() -> None:
    one = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match="RAW"):
        encode_sections(Format.RAW, one, [])
    with pytest.raises(ValueError, match="spilled gradients"):
        decode_sections(Format.SPLIT.with_grad(1), [])
    with pytest.raises(ValueError, match="2 moments, 1 were given"):
        encode_sections(Format.SPLIT, one, [one])


def test_three_moments_are_rounded_with_bits_of_their_own() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(4096).astype(np.float32)
    three = Format(Master.SPLIT, Moments.BF16, 3)
    moments = decode_sections(three, encode_sections(three, values, [values] * 3, key=1))[1]
    up = [moment > values for moment in moments]
    for a, b in ((0, 1), (1, 2), (0, 2)):
        assert 0.4 < (up[a] == up[b]).mean() < 0.9


@pytest.mark.parametrize("master", [Master.SPLIT, Master.SPLIT8, Master.FP32, Master.FP16])
@pytest.mark.parametrize("moments", list(Moments))
@pytest.mark.parametrize("key", [None, 0, 0xDEADBEEF12345678])
def test_sections_and_values_have_the_bits_of_the_oracle(
    master: Master, moments: Moments, key: int | None
) -> None:
    """Any bits, of any length, at elements on both sides of 2^32: encoded and decoded as numpy
    does."""
    for seed, (numel, element) in enumerate(
        [(1, 0), (63, 64), (4096 + 17, 2**32 - 2048), (1000, 2**40)]
    ):
        for count in (1, 2, 3) if moments is not Moments.Q8 else (1, 2):
            state_format = Format(master, moments, count)
            rng = np.random.default_rng(seed)
            values = [odd_bits(rng, numel, spread).view(np.float32) for spread in (60, 60, 90, 60)][
                : 1 + count
            ]
            if seed % 2 and count > 1:
                values[2] = np.abs(values[2])
            ours = encode_sections(state_format, values[0], values[1:], key=key, element=element)
            theirs = oracle.encode_sections(
                state_format, values[0], values[1:], key=key, element=element
            )
            assert_same_sections(state_format, ours, theirs)
            found, expected = (
                decode_sections(state_format, ours),
                oracle.decode_sections(state_format, theirs),
            )
            for left, right in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
                np.testing.assert_array_equal(left, right)  # any NaN equals any NaN
