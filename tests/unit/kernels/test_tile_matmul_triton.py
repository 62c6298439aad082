"""Products of tiles on Triton: exact where sums are exact, near where they are not, the same bits
from every configuration."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity._src.kernels import choice
from infinity._src.kernels.tile_matmul import reference
from infinity._src.kernels.tile_matmul import tile_matmul as dispatched
from infinity._src.kernels.tiling.tiled_linear import TiledLinear
from tests.marks import mostly_slow
from tests.unit.kernels.operands import (
    DTYPES,
    assert_summed_in_fp32,
    dtypes,
    generators,
    interpreted,
    laid_out,
    layouts,
    normal,
    seeds,
    sizes,
    whole,
)

triton = pytest.importorskip("triton")

from infinity._src.kernels.triton.tile_matmul import _narrow, _wide, tile_matmul  # noqa: E402
from infinity._src.kernels.triton.tuning import block_k  # noqa: E402
from tests.unit.kernels.configurations import each_configuration  # noqa: E402


@interpreted
@given(st.data())
def test_whole_numbers_give_the_exact_product_of_any_shapes_and_strides(
    device: torch.device, data: st.DataObject
) -> None:
    m, k, n, dtype = data.draw(sizes), data.draw(sizes), data.draw(sizes), data.draw(dtypes)
    numbers = generators(data.draw(seeds))
    a = laid_out(whole((m, k), dtype, device, numbers), data.draw(layouts))
    b = laid_out(whole((k, n), dtype, device, numbers), data.draw(layouts))
    wide = data.draw(st.booleans())
    out = torch.empty((m, 2 * n), dtype=torch.float32 if wide else dtype, device=device)[:, ::2]
    added = whole((m, n), torch.float32, device, numbers) if data.draw(st.booleans()) else None
    bias = whole((n,), data.draw(dtypes), device, numbers) if data.draw(st.booleans()) else None
    expected = a.double() @ b.double()
    if added is not None:
        expected += added
    if bias is not None:
        expected += bias
    if wide and added is not None and data.draw(st.booleans()):
        out.copy_(added)
        added = out  # in place
    tile_matmul(a, b, out, accumulator=added, bias=bias)
    assert torch.equal(out, expected.to(out.dtype))


@interpreted
@given(sizes, sizes, sizes, dtypes, seeds)
def test_sums_are_in_fp32_and_rounded_once(
    device: torch.device, m: int, k: int, n: int, dtype: torch.dtype, seed: int
) -> None:
    numbers = generators(seed)
    a, b = normal((m, k), dtype, device, numbers), normal((k, n), dtype, device, numbers)
    added, bias = (
        normal((m, n), torch.float32, device, numbers),
        normal((n,), dtype, device, numbers),
    )
    exact = added.double() + a.double() @ b.double() + bias.double()
    magnitude = added.double().abs() + a.double().abs() @ b.double().abs() + bias.double().abs()
    out = torch.empty((m, n), dtype=dtype, device=device)
    tile_matmul(a, b, out, accumulator=added.clone(), bias=bias)
    assert_summed_in_fp32(out, exact, magnitude, k)
    reference(a, b, out, accumulator=added, bias=bias)
    assert_summed_in_fp32(out, exact, magnitude, k)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", mostly_slow(DTYPES, torch.float32), ids=str)
@pytest.mark.usefixtures("ordered_dot")
def test_every_configuration_gives_the_same_bits(device: torch.device, dtype: torch.dtype) -> None:
    """A measurement chooses among them, and must not choose the rounding (design: placement never
    changes the numbers)."""
    numbers = generators(0)
    a, b = normal((300, 333), dtype, device, numbers), normal((333, 270), dtype, device, numbers)
    added = normal((300, 270), torch.float32, device, numbers)
    found = []
    for _ in each_configuration(_wide if dtype == torch.float32 else _narrow):
        found.append(torch.empty((300, 270), dtype=torch.float32, device=device))
        tile_matmul(a, b, found[-1], accumulator=added)
    assert len(found) > 1
    assert all(torch.equal(found[0], other) for other in found)
    assert not torch.equal(found[0], torch.empty_like(added).copy_(added))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_of_whole_steps_give_the_bits_of_one_product(
    device: torch.device, dtype: torch.dtype
) -> None:
    numbers = generators(1)
    step = block_k(dtype)
    a, b = (
        normal((70, 5 * step + 7), dtype, device, numbers),
        normal((5 * step + 7, 90), dtype, device, numbers),
    )
    bias = normal((90,), dtype, device, numbers)
    at_once = torch.empty((70, 90), dtype=dtype, device=device)
    tile_matmul(a, b, at_once, bias=bias)
    total = torch.empty((70, 90), dtype=torch.float32, device=device)
    tile_matmul(a[:, : 2 * step], b[: 2 * step], total)
    tile_matmul(a[:, 2 * step : 3 * step], b[2 * step : 3 * step], total, accumulator=total)
    tiled = torch.empty_like(at_once)
    tile_matmul(a[:, 3 * step :], b[3 * step :], tiled, accumulator=total, bias=bias)
    assert torch.equal(at_once, tiled)
    assert not torch.equal(at_once.float(), total)


def test_infinity_and_nan_arrive(device: torch.device) -> None:
    a = torch.ones((17, 40), dtype=torch.bfloat16, device=device)
    a[3, 5], a[4, 6] = float("inf"), float("nan")
    out = torch.empty((17, 18), dtype=torch.bfloat16, device=device)
    tile_matmul(a, torch.ones((40, 18), dtype=torch.bfloat16, device=device), out)
    assert bool((out[3] == float("inf")).all())
    assert bool(out[4].isnan().all())
    assert bool((out[[0, 1, 2, 16]] == 40).all())


def test_nothing_to_sum_is_what_was_summed_and_the_bias(device: torch.device) -> None:
    a, b = torch.empty((5, 0), device=device), torch.empty((0, 6), device=device)
    out = torch.full((5, 6), 7.0, device=device)
    tile_matmul(a, b, out, bias=torch.arange(6.0, device=device))
    assert torch.equal(out, torch.arange(6.0, device=device).expand(5, 6))
    tile_matmul(a, b, out, accumulator=out)
    assert torch.equal(out, torch.arange(6.0, device=device).expand(5, 6))
    tile_matmul(a[:0], b, out[:0])


def test_the_dispatch_reaches_it(device: torch.device) -> None:
    numbers = generators(2)
    a, b = (
        whole((33, 65), torch.bfloat16, device, numbers),
        whole((65, 20), torch.bfloat16, device, numbers),
    )
    found = {}
    for which in choice.IMPLEMENTATIONS:
        found[which] = torch.empty((33, 20), dtype=torch.bfloat16, device=device)
        with choice.forced(tile_matmul=which):
            dispatched(a, b, found[which])
    assert torch.equal(found["torch"], found["triton"])


@pytest.mark.parametrize("tiles", [(2, 1), (3, 2)])
def test_a_tiled_linear_runs_on_it_forward_and_backward(
    device: torch.device, tiles: tuple[int, int]
) -> None:
    """Whole numbers: what it computes, and all three gradients, are exact."""
    numbers = generators(3)
    x = whole((21, 130), torch.bfloat16, device, numbers).requires_grad_()
    weight, bias = (
        whole((70, 130), torch.bfloat16, device, numbers),
        whole((70,), torch.bfloat16, device, numbers),
    )
    plain = torch.nn.Linear(130, 70, device=device, dtype=torch.bfloat16)
    plain.load_state_dict({"weight": weight, "bias": bias})
    tiled = TiledLinear.from_linear(plain, tiles)
    dy = whole((21, 70), torch.bfloat16, device, numbers)
    with choice.forced(tile_matmul="triton"):
        y = tiled(x)
        y.backward(dy)
    assert torch.equal(y, (x.double() @ weight.double().t() + bias.double()).bfloat16())
    assert x.grad is not None
    assert torch.equal(x.grad, (dy.double() @ weight.double()).bfloat16())
    for parameter, (rows, columns) in tile_places(tiled):
        assert parameter.grad is not None
        expected = dy[:, slice(*rows)].double().t() @ x[:, slice(*columns)].double()
        assert torch.equal(parameter.grad, expected.bfloat16())


def tile_places(
    tiled: TiledLinear,
) -> list[tuple[torch.nn.Parameter, tuple[tuple[int, int], tuple[int, int]]]]:
    """Each tile's parameter with its rows and columns."""
    found = []
    for name, row, column in tiled.grid.names():
        place = tiled.grid.place(row, column)
        found.append((tiled.get_submodule(name).weight, (place.rows, place.columns)))
    return found


def test_what_does_not_go_together_is_said(device: torch.device) -> None:
    a, b, out = (torch.zeros((4, 4), device=device) for _ in range(3))
    with pytest.raises(ValueError, match=r"\[M, K\] and \[K, N\]"):
        tile_matmul(a, b[:3], out)
    with pytest.raises(ValueError, match="two bf16, two fp16 or two fp32"):
        tile_matmul(a, b.bfloat16(), out)
    with pytest.raises(ValueError, match=r"bias has shape \(3,\)"):
        tile_matmul(a, b, out, bias=a[0, :3])
