"""Wire buffers and ordered sums: errors, exactness, NaN, error feedback, and the same bits from C,
torch and Triton."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity._src.cabi import native
from infinity._src.kernels import choice
from infinity._src.kernels import comm_codec as wire
from infinity._src.kernels.comm_codec import decode, decode_sum, encode, sum_in_order
from infinity._src.kernels.quantize import dequantize, quantize
from infinity._src.kernels.quantized import DTYPES, codes_bytes, wire_bytes
from infinity._src.kernels.random_bits import rounding_key
from tests import forks

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning:triton"
)  # overflow to infinity is meant; the interpreter is numpy
ROOT = Path(__file__).resolve().parents[3]
KEY = rounding_key(7, 3, "layers.0.weight")
quick = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
FORCED = {"wire_encode": "triton", "wire_decode": "triton", "ordered_sum": "triton"}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Integers with the bits, on the CPU: NaN equals NaN, and -0 is not 0."""
    return tensor.cpu().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    )


def spoilt(numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Memory in which nothing is zero, so that what is not written is seen."""
    out = torch.empty(numel, dtype=dtype, device=device)
    out.view(torch.uint8).fill_(0xA5)
    return out


def finite(dtype: torch.dtype, x: Any) -> torch.Tensor:
    return torch.nan_to_num(torch.from_numpy(x.astype(np.float32)).to(dtype))


@st.composite
def vectors(
    draw: Any, *, numel: int | None = None, odd: bool = True, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """[numel], magnitudes from denormal to huge, equal numbers, zeros; with `odd`, NaN and
    infinities."""
    numel = draw(st.integers(0, 2600)) if numel is None else numel
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0, 4, 30, 126]))
    x = rng.standard_normal(numel) * np.exp2(rng.uniform(-spread, spread / 2, numel)) + draw(
        st.sampled_from([0, 0, 3])
    )
    x *= rng.random(numel) > draw(st.sampled_from([0.0, 0.5]))
    values = finite(dtype or draw(st.sampled_from(DTYPES)), x)
    if odd and draw(st.booleans()):
        values[torch.from_numpy(rng.random(numel) < 0.002)] = draw(
            st.sampled_from([math.nan, math.inf, -math.inf])
        )
        values[torch.from_numpy(rng.random(numel) < 0.002)] = -0.0
    return values


def groups_drawn(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "bits": draw(st.sampled_from([8, 4])),
        "group_numel": draw(st.sampled_from([64, 128, 256, 1024])),
    }


def keys_drawn(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "key": draw(st.sampled_from([None, KEY, 0, 2**64 - 1])),
        "element": draw(st.sampled_from([0, 5, 2**32 - 100, 2**40 + 64])),
    }


def encoded(values: torch.Tensor, *, bits: int, group_numel: int, **how: Any) -> torch.Tensor:
    out = spoilt(wire_bytes(values.numel(), bits, group_numel), torch.uint8, values.device)
    encode(values, out, bits=bits, group_numel=group_numel, **how)
    return out


def decoded(buffer: torch.Tensor, numel: int, *, bits: int, group_numel: int) -> torch.Tensor:
    out = spoilt(numel, torch.float32)
    decode(buffer, out, bits=bits, group_numel=group_numel)
    return out


def step_of(buffer: torch.Tensor, numel: int, *, bits: int, group_numel: int) -> torch.Tensor:
    """fp32 [numel]: the scale of each value's group."""
    scales = buffer[codes_bytes(numel, bits) :].view(torch.bfloat16).float()
    return scales.repeat_interleave(group_numel)[:numel]


# -- one definition, three implementations ---------------------------------------------------------


def implementations(
    device: torch.device,
) -> list[Callable[[], contextlib.AbstractContextManager[None]]]:
    """Return the implementations on `device` besides the reference: the extension (the default on
    the CPU), and Triton."""
    ways: list[Callable[[], contextlib.AbstractContextManager[None]]] = [
        lambda: choice.forced(**FORCED)
    ]
    if device.type == "cpu":
        ways.append(contextlib.nullcontext)
    return ways


@quick
@given(st.data())
def test_encoding_has_the_bits_of_the_reference(device: torch.device, data: st.DataObject) -> None:
    values = data.draw(vectors())
    groups, keys = data.draw(st.composite(groups_drawn)()), data.draw(st.composite(keys_drawn)())
    error_dtype = data.draw(st.sampled_from([None, torch.bfloat16, torch.float32]))
    before = (
        None if error_dtype is None else data.draw(vectors(numel=values.numel(), dtype=error_dtype))
    )
    expected_error = None if before is None else before.clone()
    expected = spoilt(wire_bytes(values.numel(), **groups), torch.uint8)
    wire.encode_torch(
        values,
        expected,
        groups["bits"],
        groups["group_numel"],
        keys["key"],
        keys["element"],
        expected_error,
    )
    for way in implementations(device):
        error = None if before is None else before.clone().to(device)
        with way():
            ours = encoded(values.to(device), **groups, **keys, error=error)
        assert torch.equal(ours.cpu(), expected)
        if error is not None and expected_error is not None:
            assert torch.equal(bits_of(error), bits_of(expected_error))


@quick
@given(st.data())
def test_decoding_and_sums_of_any_bytes_have_the_bits_of_the_reference(
    device: torch.device, data: st.DataObject
) -> None:
    """Also of wires that `encode` never writes: infinite, negative and denormal scales, the code
    -128."""
    numel, groups = data.draw(st.integers(0, 2600)), data.draw(st.composite(groups_drawn)())
    count, divisor = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2, 3, 8, 2**24]))
    wires = [encoded(data.draw(vectors(numel=numel)), **groups) for _ in range(count)]
    if data.draw(st.booleans()):
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
        wires[-1] = torch.randint(0, 256, wires[-1].shape, dtype=torch.uint8, generator=generator)
    for dtype in DTYPES:
        expected = spoilt(numel, dtype)
        wire.decode_sum_torch(wires, expected, groups["bits"], groups["group_numel"], divisor)
        for way in implementations(device):
            ours = spoilt(numel, dtype, device)
            with way():
                decode_sum([buffer.to(device) for buffer in wires], ours, **groups, divisor=divisor)
            assert torch.equal(bits_of(ours), bits_of(expected))


@quick
@given(st.data())
def test_sums_of_pieces_have_the_bits_of_the_reference(
    device: torch.device, data: st.DataObject
) -> None:
    numel, dtype = data.draw(st.integers(0, 2600)), data.draw(st.sampled_from(DTYPES))
    count, divisor = (
        data.draw(st.integers(1, 5)),
        data.draw(st.sampled_from([1, 2, 3, 7, 8, 2**24])),
    )
    pieces = [data.draw(vectors(numel=numel, dtype=dtype)) for _ in range(count)]
    for out_dtype in DTYPES:
        expected = spoilt(numel, out_dtype)
        wire.sum_in_order_torch(pieces, expected, divisor)
        for way in implementations(device):
            ours = spoilt(numel, out_dtype, device)
            with way():
                sum_in_order([piece.to(device) for piece in pieces], ours, divisor=divisor)
            assert torch.equal(bits_of(ours), bits_of(expected))


@pytest.mark.gpu
@quick
@given(st.data())
def test_torch_gives_the_same_bits_on_a_gpu(data: st.DataObject) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    values, groups = data.draw(vectors()), data.draw(st.composite(groups_drawn)())
    keys, divisor = data.draw(st.composite(keys_drawn)()), data.draw(st.sampled_from([1, 3]))
    errors = [torch.ones(values.numel(), device=device) for device in ("cpu", "cuda")]
    with choice.forced(wire_encode="torch", wire_decode="torch", ordered_sum="torch"):
        here = encoded(values, **groups, **keys, error=errors[0])
        there = encoded(values.cuda(), **groups, **keys, error=errors[1])
        assert torch.equal(here, there.cpu())
        assert torch.equal(bits_of(errors[0]), bits_of(errors[1]))
        for dtype in DTYPES:
            outs = [spoilt(values.numel(), dtype, device) for device in ("cpu", "cuda")]
            for buffer, out in zip((here, there), outs, strict=True):
                decode_sum([buffer, buffer], out, **groups, divisor=divisor)
            assert torch.equal(bits_of(outs[0]), bits_of(outs[1]))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_short_last_group_and_an_odd_last_element_leave_the_same_bits(
    device: torch.device, bits: int
) -> None:
    for numel in (1, 2, 63, 65, 127, 129, 1023, 1025, 2047, 2049):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) - 0.5
        expected = spoilt(wire_bytes(numel, bits, 64), torch.uint8)
        wire.encode_torch(values, expected, bits, 64, KEY, 3, None)
        for way in implementations(device):
            with way():
                assert torch.equal(
                    encoded(values.to(device), bits=bits, group_numel=64, key=KEY, element=3).cpu(),
                    expected,
                )


def test_without_the_extension_the_cpu_has_no_slow_way_but_an_import_error() -> None:
    code = (
        "import sys; sys.modules['infinity._native'] = None\n"
        "import torch\n"
        "from infinity._src.kernels.comm_codec import sum_in_order\n"
        "sum_in_order([torch.ones(3)], torch.empty(3))\n"
    )
    done = forks.run_code(code)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: infinity's C extension is missing")


# -- what a wire is --------------------------------------------------------------------------------


@quick
@given(st.data())
def test_a_wire_holds_the_codes_and_scales_of_the_groups_and_zeros(data: st.DataObject) -> None:
    values, groups = data.draw(vectors()), data.draw(st.composite(groups_drawn)())
    keys, numel = data.draw(st.composite(keys_drawn)()), values.numel()
    q, buffer = quantize(values, **groups, **keys), encoded(values, **groups, **keys)
    at, codes, scales = (
        codes_bytes(numel, groups["bits"]),
        q.codes.view(torch.uint8),
        q.scales.view(torch.uint8),
    )
    assert torch.equal(buffer[: codes.numel()], codes)
    assert torch.equal(buffer[at : at + scales.numel()], scales)
    assert not buffer[codes.numel() : at].any()
    assert not buffer[at + scales.numel() :].any()
    back = decoded(buffer, numel, **groups)
    torch.testing.assert_close(
        back, dequantize(q, dtype=torch.float32), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("bits", [8, 4])
def test_bytes_are_codes_then_scales_each_a_multiple_of_64(bits: int) -> None:
    assert wire_bytes(0, bits, 64) == 0
    assert wire_bytes(1, bits, 64) == 128
    assert wire_bytes(1 << 14, bits, 256) == (1 << 14) * bits // 8 + 2 * 64
    assert wire_bytes((1 << 14) + 1, bits, 256) == (1 << 14) * bits // 8 + 64 + 192
    for numel in (0, 1, 63, 64, 65, 1000, 2**40 + 1):
        for group_numel in (64, 1024):
            assert native.lib.inf_wire_bytes(numel, bits, group_numel, 0) == wire_bytes(
                numel, bits, group_numel
            )
            assert native.lib.inf_wire_bytes(numel, bits, group_numel, 1) == codes_bytes(
                numel, bits
            )


# -- what is not finite ----------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_that_is_not_finite_comes_back_as_nan_wholly_and_leaves_no_error(
    bits: int, special: float, dtype: torch.dtype
) -> None:
    values, error = torch.linspace(-1, 1, 300).to(dtype), torch.full((300,), 0.25)
    values[130] = special
    groups = {"bits": bits, "group_numel": 64}
    buffer = encoded(values, **groups, error=error)
    there = (torch.arange(300) >= 128) & (torch.arange(300) < 192)
    out = spoilt(300, dtype)
    decode(buffer, out, **groups)
    assert torch.equal(torch.isnan(out), there)
    assert bool((error[there] == 0).all())
    assert bool(error[~there].ne(0).any())
    clean = encoded(torch.ones(300), **groups)
    decode_sum([clean, buffer, clean], out, **groups, divisor=3)
    assert torch.equal(torch.isnan(out), there)
    assert set(bits_of(out)[there].tolist()) == set(
        bits_of(torch.tensor([math.nan], dtype=dtype)).tolist()
    )


def test_a_sum_of_value_and_error_that_overflows_is_not_finite() -> None:
    error = torch.full((128,), 3e38)
    buffer = encoded(torch.full((128,), 3e38), bits=8, group_numel=64, error=error)
    assert bool(decoded(buffer, 128, bits=8, group_numel=64).isnan().all())
    assert bool((error == 0).all())


def test_the_largest_numbers_stay_in_the_range_of_bf16() -> None:
    values = torch.full((128,), torch.finfo(torch.float32).max)
    values[64:] *= -1
    buffer = encoded(values, bits=8, group_numel=64)
    largest = torch.finfo(torch.bfloat16).max
    assert decoded(buffer, 128, bits=8, group_numel=64).tolist() == [largest] * 64 + [-largest] * 64


# -- error feedback --------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("error_dtype", [torch.float32, torch.bfloat16])
def test_error_feedback_telescopes(bits: int, key: int | None, error_dtype: torch.dtype) -> None:
    """The sum of what was decoded is the sum of the values less the last error, whose size does not
    grow with the rounds."""
    rounds, numel, groups = 200, 777, {"bits": bits, "group_numel": 64}
    values = torch.randn(numel, generator=torch.Generator().manual_seed(4)) * torch.linspace(
        0.01, 3, numel
    )
    error, sent, largest = (
        torch.zeros(numel, dtype=error_dtype),
        torch.zeros(numel, dtype=torch.float64),
        torch.zeros(numel),
    )
    for step in range(rounds):
        buffer = encoded(values, **groups, key=None if key is None else key + step, error=error)
        sent += decoded(buffer, numel, **groups)
        largest = torch.maximum(largest, step_of(buffer, numel, **groups))
    share = 0.5 if key is None else 1.0
    bf16 = error_dtype is torch.bfloat16
    assert bool((error.float().abs() <= share * largest * (1.01 if bf16 else 1.0001)).all())
    # Each round loses at most half a last place of the error (8 bits in bf16), and of the fp32 sum.
    lost = rounds * (
        share * largest.double() * 2.0**-8 * bf16 + 2.0**-24 * (values.abs() + largest).double() * 2
    )
    assert bool(((sent + error.double() - rounds * values.double()).abs() <= lost).all())
    if key is None:  # without feedback the same error is made again and again
        plain = rounds * decoded(encoded(values, **groups), numel, **groups).double()
        off, without = ((total - rounds * values.double()).abs().mean() for total in (sent, plain))
        assert off * 10 < without


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_an_error_is_the_value_less_what_was_decoded(data: st.DataObject) -> None:
    values, groups = data.draw(vectors(odd=False)), data.draw(st.composite(groups_drawn)())
    error = torch.zeros(values.numel())
    buffer = encoded(values, **groups, error=error)
    assert torch.equal(error, values.float() - decoded(buffer, values.numel(), **groups))
    assert torch.equal(buffer, encoded(values, **groups))  # an error of zero changes nothing


# -- sums ------------------------------------------------------------------------------------------


@quick
@given(st.data())
def test_sums_are_fp32_additions_in_order_one_division_one_rounding(data: st.DataObject) -> None:
    numel, count, divisor = (
        data.draw(st.integers(1, 70)),
        data.draw(st.integers(1, 5)),
        data.draw(st.integers(1, 9)),
    )
    dtype = data.draw(st.sampled_from(DTYPES))
    pieces = [data.draw(vectors(numel=numel, dtype=dtype, odd=False)) for _ in range(count)]
    expected = []
    with np.errstate(all="ignore"):
        for column in zip(*[piece.float().numpy() for piece in pieces], strict=True):
            total = column[0]
            for value in column[1:]:
                total = np.float32(total + value)
            expected.append(np.float32(total / np.float32(divisor)))
    for out_dtype in DTYPES:
        out = spoilt(numel, out_dtype)
        sum_in_order(pieces, out, divisor=divisor)
        reference = torch.from_numpy(np.array(expected)).to(out_dtype)
        torch.testing.assert_close(out, reference, rtol=0, atol=0, equal_nan=True)


def test_the_order_is_the_order_given() -> None:
    pieces = [torch.full((5,), value) for value in (1e8, 1.0, -1e8)]
    out = torch.empty(5)
    sum_in_order(pieces, out)
    assert out.tolist() == [0.0] * 5
    sum_in_order([pieces[0], pieces[2], pieces[1]], out)
    assert out.tolist() == [1.0] * 5


def test_wires_are_summed_as_what_they_decode_to() -> None:
    generator = torch.Generator().manual_seed(1)
    groups = {"bits": 4, "group_numel": 128}
    wires = [
        encoded(torch.randn(1001, generator=generator) * 10.0**k, **groups) for k in (3, -3, 0)
    ]
    for dtype in DTYPES:
        expected, out = spoilt(1001, dtype), spoilt(1001, dtype)
        sum_in_order([decoded(buffer, 1001, **groups) for buffer in wires], expected, divisor=3)
        decode_sum(wires, out, **groups, divisor=3)
        assert torch.equal(bits_of(out), bits_of(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_piece_comes_back_as_it_is_and_out_may_be_a_piece(
    device: torch.device, dtype: torch.dtype
) -> None:
    piece = torch.tensor([0.0, -0.0, 1.5, -(2.0**-14), math.inf, -math.inf] * 500, dtype=dtype)
    other = torch.arange(3000, dtype=torch.float32).to(dtype)
    for way in implementations(device):
        with way():
            out = spoilt(3000, dtype, device)
            sum_in_order([piece.to(device)], out)
            assert torch.equal(bits_of(out), bits_of(piece))
            third = other.clone().to(device)
            sum_in_order([piece.to(device), third, third], third, divisor=2)
        expected = spoilt(3000, dtype)
        wire.sum_in_order_torch([piece, other, other], expected, 2)
        assert torch.equal(bits_of(third), bits_of(expected))


def test_nothing_is_encoded_decoded_and_summed_to_nothing(device: torch.device) -> None:
    nothing, buffer = (
        torch.zeros(0, device=device),
        torch.zeros(0, dtype=torch.uint8, device=device),
    )
    for way in implementations(device):
        with way():
            encode(nothing, buffer, bits=4, group_numel=64, error=nothing.clone())
            decode_sum([buffer, buffer], nothing, bits=4, group_numel=64)
            sum_in_order([nothing, nothing], nothing.clone())
    assert wire_bytes(0, 4, 64) == 0


# -- what is refused -------------------------------------------------------------------------------


ROOM = torch.zeros(wire_bytes(64, 8, 64) + 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "bits=3"),
        ({"group_numel": 96}, "group_numel=96"),
        ({"group_numel": 32}, "power of two from 64"),
        ({"values": torch.zeros(64, dtype=torch.float64)}, "float64"),
        ({"values": torch.zeros(8, 8)}, "one dimension"),
        ({"values": torch.zeros(128)[::2]}, "contiguous"),
        ({"element": -1}, "element=-1"),
        ({"key": -1}, "key=-1"),
        ({"key": 1 << 64}, "rounding_key"),
        ({"wire": ROOM[:64]}, "take 128 bytes"),
        ({"wire": ROOM[1:129]}, "odd address"),
        ({"wire": torch.zeros(128, dtype=torch.int8)}, "uint8"),
        ({"error": torch.zeros(63)}, "must agree"),
        ({"error": torch.zeros(64, dtype=torch.float16)}, "of bfloat16, float32"),
    ],
)
def test_what_cannot_be_encoded_is_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "values": torch.zeros(64),
        "wire": ROOM[:128],
        "bits": 8,
        "group_numel": 64,
    }
    encode(**good)
    with pytest.raises(ValueError, match=message):
        encode(**{**good, **change})


def test_what_cannot_be_summed_is_refused() -> None:
    out = torch.zeros(64)
    with pytest.raises(ValueError, match="wires is empty"):
        decode_sum([], out, bits=8, group_numel=64)
    with pytest.raises(ValueError, match="64 values on cpu take 128 bytes"):
        decode(ROOM[:64], out, bits=8, group_numel=64)
    with pytest.raises(ValueError, match="pieces is empty"):
        sum_in_order([], out)
    for divisor in (0, -1, 2**24 + 1, 1.5):
        with pytest.raises(ValueError, match="divisor="):
            sum_in_order([out], out, divisor=divisor)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pieces of one dtype"):
        sum_in_order([out, out.bfloat16()], out)
    with pytest.raises(ValueError, match="the size of out"):
        sum_in_order([torch.zeros(63)], out)
    with pytest.raises(ValueError, match="numel=-1"):
        wire_bytes(-1, 8, 64)
