"""A gradient in one pass: what is written, its sum of squares, its finiteness; the same bits from torch and from Triton."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infinity._src.kernels import choice
from infinity._src.kernels.unscale_norm import BLOCK_NUMEL, DTYPES, PARTIALS, unscale_norm

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # overflow is meant; the interpreter is numpy
quick = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def in_order(values: np.ndarray[Any, Any]) -> np.float32:
    """The sum of squares in the order that the module states, written another way: recursively, in numpy."""

    def tree(part: np.ndarray[Any, Any]) -> np.float32:
        if len(part) == 1:
            return np.float32(part[0])
        half = len(part) // 2
        return np.float32(tree(part[:half]) + tree(part[half:]))

    def padded(part: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
        return np.pad(part, (0, -len(part) % size)).reshape(-1, size)

    with np.errstate(over="ignore", invalid="ignore"):
        partials = [tree(block) for block in padded(values * values, BLOCK_NUMEL)]
        columns = np.zeros(PARTIALS, np.float32)
        for row in padded(np.array(partials, np.float32), PARTIALS):
            columns = columns + row
        return tree(columns)


@st.composite
def gradients(draw: Any) -> torch.Tensor:
    shape = draw(st.one_of(st.tuples(st.integers(0, 9000)), st.tuples(st.integers(1, 60), st.integers(1, 99)), st.just(())))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0, 8, 60]))
    values = rng.standard_normal(shape) * np.exp2(rng.uniform(-spread, spread / 4, shape))
    grad = torch.from_numpy(np.asarray(values, np.float32))
    if draw(st.integers(0, 3)) == 0 and grad.numel():
        grad.reshape(-1)[draw(st.integers(0, grad.numel() - 1))] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    grad = grad.to(draw(st.sampled_from(DTYPES)))
    return grad.t().contiguous().t() if grad.dim() == 2 and draw(st.booleans()) else grad


@pytest.mark.parametrize("which", choice.IMPLEMENTATIONS)
@quick
@given(data=st.data())
def test_every_implementation_writes_and_sums_the_same(device: torch.device, which: str, data: st.DataObject) -> None:
    grad, dtype = data.draw(gradients()), data.draw(st.sampled_from(DTYPES))
    factor = data.draw(st.sampled_from([1.0, 1 / 65536, 0.1, 3e4]))
    divide, in_memory = data.draw(st.booleans()), data.draw(st.booleans())
    layout = data.draw(st.sampled_from(["contiguous", "every other", "own"]))
    out = torch.empty(grad.shape, dtype=dtype, device=device)
    if layout == "every other" and grad.dim():
        out = torch.empty((*grad.shape[:-1], grad.shape[-1] * 2), dtype=dtype, device=device)[..., ::2]
    placed = grad.to(device)
    if layout == "own":
        out = placed.clone().to(dtype)
    by = torch.tensor(factor, device=device) if in_memory else factor
    with choice.forced(unscale_norm=which):
        squares, finite = unscale_norm(placed, out, factor=by, divide=divide)
    with np.errstate(all="ignore"):
        scalar = np.float32(factor)
        raised = grad.float().numpy()
        expected = torch.from_numpy(np.asarray(raised / scalar if divide else raised * scalar, np.float32)).to(dtype)
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    written = expected.float().reshape(-1).numpy()
    assert bool(finite) == bool(np.isfinite(written).all())
    assert squares.dtype is torch.float32
    assert squares.shape == finite.shape == ()
    if np.isfinite(written).all():
        total = in_order(written)
        assert squares.item() == total
        exact = float((written.astype(np.float64) ** 2).sum())
        if 1e-30 < exact < 1e38:  # within range, and no squares lost as denormals
            assert abs(total - exact) <= exact * 24 * 2.0**-24 + 1e-38


@pytest.mark.parametrize("which", choice.IMPLEMENTATIONS)
def test_more_blocks_than_columns_are_summed_in_order(device: torch.device, which: str) -> None:
    if device.type == "cpu" and which == "triton":
        pytest.skip("2,049 blocks take the interpreter minutes; the last sum alone is tested below")
    values = torch.randn(BLOCK_NUMEL * (PARTIALS + 1) + 5, generator=torch.Generator().manual_seed(0))
    placed = values.to(device)
    with choice.forced(unscale_norm=which):
        squares, _ = unscale_norm(placed, placed)
    blocks = np.pad((values.numpy() ** 2), (0, BLOCK_NUMEL - 5)).reshape(-1, BLOCK_NUMEL)
    while blocks.shape[1] > 1:
        blocks = blocks[:, 0::2] + blocks[:, 1::2]
    partials = np.pad(blocks[:, 0], (0, 2 * PARTIALS - len(blocks))).reshape(2, PARTIALS)
    columns = partials[0] + partials[1]
    while len(columns) > 1:
        columns = columns[0::2] + columns[1::2]
    assert squares.item() == columns[0]


def test_the_last_sum_goes_on_where_a_row_of_partial_sums_ends(device: torch.device) -> None:
    from infinity._src.kernels.triton.unscale_norm import _add_up

    partials = torch.rand(2 * PARTIALS + 100, generator=torch.Generator().manual_seed(1)).to(device)
    for bad in (None, 0, PARTIALS + 7, len(partials) - 1):
        infinite = torch.zeros(len(partials), dtype=torch.int32, device=device)
        if bad is not None:
            infinite[bad] = 1
        squares, finite = torch.empty((), device=device), torch.empty((), dtype=torch.uint8, device=device)
        _add_up[(1,)](partials, infinite, squares, finite, len(partials), PARTIALS=PARTIALS, num_warps=8)
        rows = torch.nn.functional.pad(partials.cpu(), (0, PARTIALS - 100)).view(3, PARTIALS)
        columns = (rows[0] + rows[1]) + rows[2]
        while len(columns) > 1:
            columns = columns[0::2] + columns[1::2]
        assert squares.item() == columns[0].item()
        assert bool(finite) == (bad is None)


@pytest.mark.parametrize("which", choice.IMPLEMENTATIONS)
def test_a_gradient_may_be_unscaled_in_place(device: torch.device, which: str) -> None:
    grad = torch.full((3000,), 4.0, device=device, dtype=torch.float16)
    with choice.forced(unscale_norm=which):
        squares, finite = unscale_norm(grad, grad, factor=0.5)
    assert bool((grad == 2.0).all())
    assert squares.item() == 12000.0
    assert bool(finite)


@pytest.mark.parametrize("which", choice.IMPLEMENTATIONS)
def test_an_overflow_in_what_is_written_is_not_finite(device: torch.device, which: str) -> None:
    grad = torch.tensor([1.0, 70000.0], device=device)
    with choice.forced(unscale_norm=which):
        assert not unscale_norm(grad, torch.empty(2, dtype=torch.float16, device=device))[1]
        assert unscale_norm(grad, torch.empty(2, dtype=torch.bfloat16, device=device))[1]


@pytest.mark.parametrize("which", choice.IMPLEMENTATIONS)
def test_what_lies_past_the_end_of_a_gradient_is_no_part_of_its_sum(device: torch.device, which: str) -> None:
    """Zeros there times infinity would be NaN."""
    grad = torch.ones(100, device=device)
    with choice.forced(unscale_norm=which):
        squares, finite = unscale_norm(grad, torch.empty_like(grad), factor=math.inf)
    assert squares.item() == math.inf
    assert not finite


def test_what_does_not_fit_together_is_refused() -> None:
    grad = torch.zeros(4)
    with pytest.raises(ValueError, match="float64"):
        unscale_norm(grad.double(), grad)
    with pytest.raises(ValueError, match="must agree"):
        unscale_norm(grad, torch.zeros(5))
    with pytest.raises(ValueError, match="one element"):
        unscale_norm(grad, grad, factor=torch.ones(2))
