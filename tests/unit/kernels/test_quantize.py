"""Group quantization: errors, exactness, NaN, means, and the same bits from torch and from
Triton."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity._src.kernels import choice
from infinity._src.kernels.quantize import dequantize, levels_of, quantize
from infinity._src.kernels.quantized import DTYPES, GROUP_NUMEL_LEAST, Quantized
from infinity._src.kernels.random_bits import random_bits, rounding_key
from tests import oracle
from tests.marks import mostly_slow

# Some inputs overflow on purpose, and numpy, with which Triton's interpreter computes, warns.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
quick = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
KEY = rounding_key(7, 3, "layers.0.weight")


@st.composite
def values_of_many_kinds(draw: Any, *, finite: bool = False) -> torch.Tensor:
    """Any shape and strides, magnitudes from denormal to huge, equal numbers, zeros; unless
    `finite` NaN and infinities."""
    shape = draw(
        st.one_of(
            st.tuples(st.integers(0, 1500)), st.tuples(st.integers(1, 40), st.integers(1, 70))
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0, 4, 30, 126]))
    x = rng.standard_normal(shape) * np.exp2(rng.uniform(-spread, spread / 2, shape)) + draw(
        st.sampled_from([0, 0, 3])
    )
    x *= rng.random(shape) > draw(st.sampled_from([0.0, 0.5]))
    values = torch.from_numpy(x.astype(np.float32))
    if not finite and draw(st.booleans()):
        values[torch.from_numpy(rng.random(shape) < 0.002)] = draw(
            st.sampled_from([math.nan, math.inf, -math.inf])
        )
    values = values.to(draw(st.sampled_from(DTYPES)))
    if finite:
        values = torch.nan_to_num(values)  # many values are too large for fp16
    if values.dim() == 2:
        layout = draw(st.sampled_from(["rows", "columns", "every other", "slice"]))
        if layout == "columns":
            return values.t().contiguous().t()
        if layout == "every other":
            return torch.repeat_interleave(values, 2, dim=1)[:, ::2]
        if layout == "slice":
            return torch.nn.functional.pad(values, (3, 2))[:, 3:-2]
    return values


def options(draw: st.DrawFn) -> dict[str, Any]:
    """bits, group_numel, symmetric, key and element."""
    return {
        "bits": draw(st.sampled_from([8, 4])),
        "group_numel": draw(st.sampled_from([64, 128, 256, 1024])),
        "symmetric": draw(st.booleans()),
        "key": draw(st.sampled_from([None, KEY, 0, 2**64 - 1])),
        "element": draw(st.sampled_from([0, 5, 2**32 - 100, 2**40 + 64])),
    }


def step_of(q: Quantized) -> torch.Tensor:
    """fp32 [numel]: the scale of each value's group."""
    return q.scales.float().repeat_interleave(q.group_numel)[: q.numel].view(q.shape)


def assert_same(left: Quantized, right: Quantized) -> None:
    assert left.codes.dtype == right.codes.dtype
    assert torch.equal(left.codes.cpu(), right.codes.cpu())
    assert torch.equal(left.scales.view(torch.int16).cpu(), right.scales.view(torch.int16).cpu())
    assert (left.zeros is None) == (right.zeros is None)
    if left.zeros is not None and right.zeros is not None:
        assert torch.equal(left.zeros.cpu(), right.zeros.cpu())


@quick
@given(st.data())
def test_triton_gives_the_bits_of_torch(device: torch.device, data: st.DataObject) -> None:
    values, how = data.draw(values_of_many_kinds()), data.draw(st.composite(options)())
    with choice.forced(group_quantize="torch", group_dequantize="torch"):
        expected = quantize(values, **how)
    placed = values.to(device)
    with choice.forced(group_quantize="triton", group_dequantize="triton"):
        ours = quantize(placed, **how)
        assert_same(ours, expected)
        for dtype in DTYPES:
            back = dequantize(ours, dtype=dtype)
            with choice.forced(group_dequantize="torch"):
                reference = dequantize(expected, dtype=dtype)
            torch.testing.assert_close(back.cpu(), reference, rtol=0, atol=0, equal_nan=True)
            into = torch.empty_like(placed, dtype=dtype)  # with the strides of the values
            dequantize(ours, out=into)
            torch.testing.assert_close(into.cpu(), reference, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("key", [None, KEY])
def test_a_short_last_group_and_an_odd_last_element_leave_the_same_bits(
    device: torch.device, bits: int, symmetric: bool, key: int | None
) -> None:
    for numel in (1, 2, 63, 65, 2047, 2049):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) - 0.5
        with choice.forced(group_quantize="torch"):
            expected = quantize(values, bits=bits, group_numel=64, symmetric=symmetric, key=key)
        with choice.forced(group_quantize="triton", group_dequantize="triton"):
            ours = quantize(
                values.to(device), bits=bits, group_numel=64, symmetric=symmetric, key=key
            )
            assert_same(ours, expected)
            back = dequantize(ours)
        with choice.forced(group_dequantize="torch"):
            assert torch.equal(back.cpu(), dequantize(expected))


@pytest.mark.gpu
@quick
@given(st.data())
def test_torch_gives_the_same_bits_on_a_gpu(data: st.DataObject) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    values, how = data.draw(values_of_many_kinds()), data.draw(st.composite(options)())
    with choice.forced(group_quantize="torch", group_dequantize="torch"):
        assert_same(quantize(values.cuda(), **how), quantize(values, **how))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_value_is_half_a_step_off_at_most(data: st.DataObject) -> None:
    values, how = data.draw(values_of_many_kinds(finite=True)), data.draw(st.composite(options)())
    q = quantize(values, **how)
    error = (dequantize(q, dtype=torch.float32).double() - values.double()).abs()
    share = 0.5 if how["key"] is None else 1.0
    assert bool((error <= step_of(q).double() * share * (1 + 2.0**-14)).all())
    zero = values == 0
    assert bool((dequantize(q)[zero] == 0).all())


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_the_values_of_a_round_trip_are_quantized_as_they_are(data: st.DataObject) -> None:
    values = data.draw(values_of_many_kinds(finite=True))
    bits, group_numel = data.draw(st.sampled_from([8, 4])), data.draw(st.sampled_from([64, 512]))
    first = quantize(values, bits=bits, group_numel=group_numel)
    back = dequantize(first, dtype=torch.float32)
    second = quantize(back, bits=bits, group_numel=group_numel)
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(dequantize(second, dtype=torch.float32), back)


def test_every_scale_comes_back_with_the_largest_code() -> None:
    """The largest magnitude of a group gets the largest code, for each of the 128 mantissas of a
    bf16 scale and for magnitudes between them."""
    largest = torch.linspace(1, 2, 4096, dtype=torch.float64).float()
    for bits in (8, 4):
        values = torch.zeros(4096, 64)
        values[:, 5] = largest
        q = quantize(values, bits=bits, group_numel=64)
        assert bool(
            (
                dequantize(q, dtype=torch.float32)[:, 5] == q.scales.float() * levels_of(bits, True)
            ).all()
        )


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_a_group_that_is_not_finite_comes_back_as_nan_wholly(
    bits: int, symmetric: bool, special: float
) -> None:
    values = torch.linspace(-1, 1, 300)
    values[130] = special
    back = dequantize(quantize(values, bits=bits, group_numel=64, symmetric=symmetric))
    assert torch.equal(torch.isnan(back), (torch.arange(300) >= 128) & (torch.arange(300) < 192))


@pytest.mark.parametrize("symmetric", mostly_slow([True, False], True))
def test_random_rounding_keeps_the_mean(symmetric: bool) -> None:
    values = torch.linspace(-1, 0.7, 64)
    keys = range(1500)
    mean = torch.stack(
        [
            dequantize(quantize(values, bits=4, group_numel=64, symmetric=symmetric, key=key))
            for key in keys
        ]
    ).mean(0)
    step = step_of(quantize(values, bits=4, group_numel=64, symmetric=symmetric, key=0))
    # One draw has a standard deviation of at most half a step. The mean of the draws may be off by
    # five of its standard deviations.
    assert bool(((mean - values).abs() < 5 * 0.5 * step / math.sqrt(len(keys))).all())


def test_random_rounding_depends_on_the_element_alone_not_on_where_the_values_are_cut() -> None:
    values = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    whole = quantize(values, bits=8, group_numel=64, key=KEY, element=2**32 - 512)
    parts = [
        quantize(values[at : at + 256], bits=8, group_numel=64, key=KEY, element=2**32 - 512 + at)
        for at in range(0, 1024, 256)
    ]
    assert torch.equal(whole.codes, torch.cat([part.codes for part in parts]))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**64 - 1),
    st.sampled_from([0, 77, 2**32 - 9, 2**33 - 1, 2**50]),
    st.integers(0, 300),
)
def test_torch_draws_the_bits_of_numpy(key: int, element: int, numel: int) -> None:
    ours = random_bits(key, element, numel, torch.device("cpu"))
    assert np.array_equal(ours.numpy().view(np.uint32), oracle.random_bits(key, element, numel))


def test_bytes_are_what_zero_plus_plus_counts_on() -> None:
    values = torch.randn(1 << 14)
    assert quantize(values, bits=8, group_numel=256).size_bytes == (1 << 14) + 2 * 64
    assert quantize(values, bits=4, group_numel=128).size_bytes == (1 << 13) + 2 * 128
    assert (
        quantize(values[:-1], bits=4, group_numel=128, symmetric=False).size_bytes
        == (1 << 13) + 3 * 128
    )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"bits": 3, "group_numel": 64}, "bits=3"),
        ({"bits": 8, "group_numel": GROUP_NUMEL_LEAST // 2}, "power of two from 64"),
        ({"bits": 8, "group_numel": 96}, "group_numel=96"),
        ({"bits": 8, "group_numel": 64, "element": -1}, "element=-1"),
    ],
)
def test_what_it_cannot_do_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(torch.zeros(4), **how)


def test_other_dtypes_and_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        quantize(torch.zeros(4, dtype=torch.float64), bits=8, group_numel=64)
    q = quantize(torch.zeros(4), bits=8, group_numel=64)
    with pytest.raises(ValueError, match="bfloat16, float16 and float32"):
        dequantize(q, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"out is \[5\]"):
        dequantize(q, out=torch.zeros(5))
