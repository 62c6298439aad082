"""Matmul from int8 groups and 24-bit masters: exact where sums are, the gradients of the dequantized weight, one rounding."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity._src.kernels import choice, codec
from infinity._src.kernels.quant_matmul import (
    CompactWeight,
    Int8Weight,
    compact_matmul,
    int8_matmul,
    multiply,
)
from infinity._src.kernels.quantize import dequantize, quantize
from infinity.aio.plan import Format, Master, Moments
from tests.unit.kernels.operands import (
    DTYPES,
    assert_summed_in_fp32,
    dtypes,
    generators,
    interpreted,
    laid_out,
    layouts,
    mostly_slow,
    normal,
    seeds,
    sizes,
    whole,
)

IMPLEMENTATIONS = ("torch", *(("triton",) if importlib.util.find_spec("triton") else ()))
both = pytest.mark.parametrize("which", IMPLEMENTATIONS)


def int8_weight(rows: int, inner: int, group: int, device: torch.device, seed: int, *, exact: bool = False) -> Int8Weight:
    """Codes and scales. exact: small codes and powers of two, so that all products and sums are exact in fp32."""
    numbers = generators(seed)
    most = 4 if exact else 127
    codes = torch.randint(-most, most + 1, (rows, inner), generator=numbers, dtype=torch.int8)
    groups = -(-inner // group)
    if exact:
        scales = torch.randint(-1, 2, (rows, groups), generator=numbers).float().exp2()
    else:
        scales = torch.rand((rows, groups), generator=numbers) / 64
    return Int8Weight(codes.to(device), scales.bfloat16().to(device), group)


def compact_weight(values: torch.Tensor, device: torch.device) -> CompactWeight:
    """A weight's sections as the codec writes them."""
    state = Format(Master.SPLIT8, Moments.BF16, 0)
    hi, lo = codec.encode_sections(state, values.numpy().reshape(-1), [])
    return CompactWeight(
        torch.from_numpy(hi.view(np.int16)).view(values.shape).to(device), torch.from_numpy(lo).view(values.shape).to(device)
    )


@both
@interpreted
@given(st.data())
def test_int8_whole_numbers_give_the_exact_product_of_any_shapes_and_strides(
    device: torch.device, which: str, data: st.DataObject
) -> None:
    m, k, n, dtype = data.draw(sizes), data.draw(sizes), data.draw(sizes), data.draw(dtypes)
    group = data.draw(st.sampled_from([32, 64, 96, 128]))
    seed, transposed = data.draw(seeds), data.draw(st.booleans())
    codes, scales, _ = int8_weight(n, k, group, device, seed, exact=True)
    weight = Int8Weight(laid_out(codes, data.draw(layouts)), laid_out(scales, data.draw(layouts)), group)
    dense = (weight.codes.double() * weight.scales.double().repeat_interleave(group, 1)[:, :k]).t()
    x = laid_out(whole((m, n if transposed else k), dtype, device, generators(seed)), data.draw(layouts))
    bias = whole((k if transposed else n,), dtype, device, generators(seed + 1)) if data.draw(st.booleans()) else None
    with choice.forced(int8_matmul=which):
        found = multiply("int8_matmul", x, weight, bias, transposed=transposed)
    expected = x.double() @ (dense.t() if transposed else dense) + (0 if bias is None else bias.double())
    assert torch.equal(found, expected.to(dtype))


@both
@interpreted
@given(sizes, sizes, sizes, dtypes, st.booleans(), seeds)
def test_a_24_bit_master_takes_part_whole(
    device: torch.device, which: str, m: int, k: int, n: int, dtype: torch.dtype, transposed: bool, seed: int
) -> None:
    """fp16 x: rounded to fp16 first. bf16 and fp32 x: to the last bit, which bf16 alone could not carry."""
    numbers = generators(seed)
    weight = compact_weight(normal((n, k), torch.float32, torch.device("cpu"), numbers), device)
    x = normal((m, n if transposed else k), dtype, device, numbers)
    with choice.forced(compact_matmul=which):
        found = multiply("compact_matmul", x, weight, transposed=transposed)
    dense = weight.master().to(torch.float16 if dtype == torch.float16 else torch.float32).double()
    dense = dense if transposed else dense.t()
    assert_summed_in_fp32(found, x.double() @ dense, x.double().abs() @ dense.abs(), 2 * dense.shape[0])


@both
def test_the_low_bits_count(device: torch.device, which: str) -> None:
    """x picks single weights: in fp32 they come back to the bit, and a difference of two weights of one `hi` is not zero."""
    values = torch.tensor([[1.0, 1.0 + 2.0**-15, -3.0, 1e-20, 0.0]]).repeat(16, 1)
    weight = compact_weight(values, device)
    with choice.forced(compact_matmul=which):
        picked = multiply("compact_matmul", torch.eye(5, device=device), weight)
        apart = multiply(
            "compact_matmul", torch.tensor([[-1.0, 1.0, 0, 0, 0]], device=device).bfloat16(), weight
        )
    assert torch.equal(picked, weight.master().t())
    assert float(picked[1, 0]) == 1.0 + 2.0**-15
    assert apart.tolist() == [[2.0**-15] * 16]


@both
def test_what_is_not_finite_arrives(device: torch.device, which: str) -> None:
    values = torch.ones(20, 40)
    values[3, 2], values[4, 5], values[5, 0] = float("inf"), float("nan"), float("-inf")
    weight = compact_weight(values, device)
    x = torch.ones(2, 40, device=device, dtype=torch.bfloat16)
    with choice.forced(compact_matmul=which, int8_matmul=which):
        found = multiply("compact_matmul", x, weight)[0].tolist()
        codes, scales, group = int8_weight(20, 40, 32, device, 0)
        scales[7, 1] = float("nan")
        broken = multiply("int8_matmul", x, Int8Weight(codes, scales, group))[0].isnan().tolist()
    assert found[3] == float("inf")
    assert found[4] != found[4]
    assert found[5] == float("-inf")
    assert found[6] == 40
    assert broken == [row == 7 for row in range(20)]


def weights(name: str, device: torch.device) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of the public function, and the dense weight in fp64 [48, 160]."""
    if name == "int8_matmul":
        weight = int8_weight(48, 160, 32, device, 5)
        named = {"codes": weight.codes, "scales": weight.scales, "group_numel": 32}
        return named, weight.dequantized(torch.float32).double()
    compact = compact_weight(torch.randn(48, 160, generator=generators(5)), device)
    return {"hi": compact.hi.view(torch.bfloat16), "lo": compact.lo}, compact.master().double()


@both
@pytest.mark.parametrize("name", ["int8_matmul", "compact_matmul"])
def test_gradients_are_those_of_the_dense_weight(device: torch.device, name: str, which: str) -> None:
    """x with leading dimensions; a bias in fp32; codes that get no gradient and are all that is kept."""
    function = {"int8_matmul": int8_matmul, "compact_matmul": compact_matmul}[name]
    arguments, dense = weights(name, device)
    numbers = generators(6)
    x = normal((4, 2, 160), torch.float32, device, numbers).transpose(0, 1).requires_grad_()
    bias = normal((48,), torch.float32, device, numbers).requires_grad_()
    dy = normal((2, 4, 48), torch.float32, device, numbers)
    kept: list[torch.Tensor] = []
    with choice.forced(**{name: which}), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = function(x, **arguments, bias=bias)
        dx, dbias = torch.autograd.grad(y, (x, bias), dy)
    assert y.shape == (2, 4, 48)
    for found, expected in ((y, x.double() @ dense.t() + bias), (dx, dy.double() @ dense), (dbias, dy.double().sum((0, 1)))):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    assert sorted(tensor.element_size() for tensor in kept) == [1, 2], "more than the codes is kept for backward"
    with choice.forced(**{name: which}):
        alone = function(x.detach(), **arguments, bias=bias)
        (only,) = torch.autograd.grad(alone, (bias,), dy)
    assert torch.equal(only, dbias)


@both
def test_lora_over_an_int8_base_learns_what_the_dense_base_would(device: torch.device, which: str) -> None:
    """Gradients of two adapters, one before the base layer, equal those with the base dequantized."""
    weight = int8_weight(64, 64, 32, device, 7)
    numbers = generators(8)
    down, up, first = (normal(shape, torch.float32, device, numbers).requires_grad_() for shape in ((64, 4), (4, 64), (64, 64)))
    x = normal((10, 64), torch.float32, device, numbers)

    def grads(base: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        hidden = torch.tanh(x @ first / 8)
        return torch.autograd.grad((base(hidden) + hidden @ down @ up).square().mean(), (down, up, first))

    with choice.forced(int8_matmul=which):
        found = grads(lambda hidden: int8_matmul(hidden, weight.codes, weight.scales, group_numel=32))
    expected = grads(lambda hidden: hidden @ weight.dequantized(torch.float32).t())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif("triton" not in IMPLEMENTATIONS, reason="there is no Triton here")
@pytest.mark.parametrize("dtype", mostly_slow(DTYPES, torch.float32), ids=str)
def test_every_configuration_gives_the_same_bits(device: torch.device, dtype: torch.dtype) -> None:
    from infinity._src.kernels.triton import quant_matmul as kernels
    from tests.unit.kernels.configurations import each_configuration

    tuned = kernels._wide if dtype == torch.float32 else kernels._narrow
    numbers = generators(9)
    compact = compact_weight(normal((70, 136), torch.float32, torch.device("cpu"), numbers), device)
    for weight in (int8_weight(70, 136, 32, device, 9), int8_weight(70, 136, 128, device, 9), compact):
        for transposed in (False, True):
            x = normal((40, 70 if transposed else 136), dtype, device, numbers)
            found = [kernels.multiply(x, weight, transposed=transposed) for _ in each_configuration(tuned)]
            assert len(found) > 1
            assert all(torch.equal(found[0], other) for other in found)


def test_flat_scales_are_taken_where_groups_fill_rows(device: torch.device) -> None:
    codes, scales, group = int8_weight(6, 128, 64, device, 3)
    x = torch.ones(2, 128, device=device)
    flat = int8_matmul(x, codes, scales.reshape(-1), group_numel=group)
    assert torch.equal(flat, int8_matmul(x, codes, scales, group_numel=group))
    with pytest.raises(ValueError, match="group that divides the row"):
        int8_matmul(x[:, :96], codes[:, :96], scales.reshape(-1)[:9], group_numel=group)


@both
def test_quantized_groups_multiply_as_if_dequantized(device: torch.device, which: str) -> None:
    """Codes and scales as `groups.quantize` makes them; x picks single weights, so nothing else rounds."""
    values = torch.randn(24, 128, generator=generators(10)).to(device)
    q = quantize(values, bits=8, group_numel=64)
    with choice.forced(int8_matmul=which, group_dequantize="torch"):
        found = int8_matmul(
            torch.eye(128, device=device, dtype=torch.bfloat16), q.codes.view(q.shape), q.scales, group_numel=q.group_numel
        )
        expected = dequantize(q, dtype=torch.bfloat16)
    assert torch.equal(found, expected.t())


@both
def test_under_autocast_it_computes_as_a_linear_would(device: torch.device, which: str) -> None:
    """x is cast, also for the reference, and its gradient comes back in its own dtype."""
    codes, scales, group = int8_weight(16, 64, 64, device, 3, exact=True)
    x = whole((4, 64), torch.float32, device, generators(4)).requires_grad_()
    with torch.autocast(device.type, torch.bfloat16), choice.forced(int8_matmul=which):
        y = int8_matmul(x, codes, scales, group_numel=group)
    y.sum().backward()
    dense = codes.float() * scales.float()
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, (x @ dense.t()).bfloat16())
    assert x.grad is not None
    assert torch.equal(x.grad, dense.sum(0).bfloat16().float().expand(4, 64))


def test_nothing_to_multiply_is_nothing(device: torch.device) -> None:
    codes, scales, group = int8_weight(6, 64, 32, device, 3)
    for which in IMPLEMENTATIONS:
        with choice.forced(int8_matmul=which):
            assert int8_matmul(torch.ones(0, 3, 64, device=device), codes, scales, group_numel=group).shape == (0, 3, 6)


def test_what_does_not_go_together_is_said(device: torch.device) -> None:
    codes, scales, _ = int8_weight(6, 64, 32, device, 3)
    x = torch.ones(2, 64, device=device)
    with pytest.raises(ValueError, match="group_numel=48: use a multiple of 32"):
        int8_matmul(x, codes, scales, group_numel=48)
    with pytest.raises(ValueError, match=r"x is \[2, 63\]"):
        int8_matmul(x[:, 1:], codes, scales, group_numel=32)
    with pytest.raises(ValueError, match=r"x is torch.float64: pass bfloat16"):
        int8_matmul(x.double(), codes, scales, group_numel=32)
    with pytest.raises(ValueError, match=r"codes are torch\.uint8"):
        int8_matmul(x, codes.view(torch.uint8), scales, group_numel=32)
    with pytest.raises(ValueError, match=r"bias is torch.float32 \[5\]: pass floating point \[6\]"):
        int8_matmul(x, codes, scales, group_numel=32, bias=torch.ones(5, device=device))
    with pytest.raises(ValueError, match=r"hi is torch\.float32"):
        compact_matmul(x, codes.float(), codes)
    with pytest.raises(ValueError, match=r"hi is \[6, 64\] and lo \[6, 63\]"):
        compact_matmul(x, codes.bfloat16(), codes[:, 1:])
