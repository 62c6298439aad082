"""Operands for tests of matmuls: any strides, whole numbers where sums must be exact, and how near
a sum in fp32 must come."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

LAYOUTS = ("rows", "columns", "gaps", "broadcast")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

interpreted = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
"""Few examples: the interpreter takes milliseconds per block. The fixture is the same device for
all of them."""

sizes = st.integers(1, 150)
layouts = st.sampled_from(LAYOUTS)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**31 - 1)


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values [rows, columns] (broadcast: the first row's, for all) with other strides,
    amid NaN."""
    rows, columns = values.shape
    if layout == "columns":
        return values.t().contiguous().t()
    if layout == "gaps":
        wide = (
            values.new_full((rows + 3, 2 * columns + 5), float("nan"))
            if values.is_floating_point()
            else values.new_full((rows + 3, 2 * columns + 5), 99)
        )
        view = wide[2 : 2 + rows, 3 : 3 + 2 * columns : 2]
        return view.copy_(values)
    if layout == "broadcast":
        return values[:1].clone().expand(rows, columns)
    return values.contiguous()


def whole(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Whole numbers from -4 to 4: their products and sums of thousands of them are exact in fp32,
    in any order."""
    return torch.randint(-4, 5, tuple(shape), generator=generator).to(dtype).to(device)


def normal(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Normal numbers, rounded to the dtype."""
    return torch.randn(tuple(shape), generator=generator).to(dtype).to(device)


def generators(seed: int) -> torch.Generator:
    """A generator on the CPU: the same numbers for every device."""
    return torch.Generator().manual_seed(seed)


def assert_summed_in_fp32(
    found: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, terms: int
) -> None:
    """`found` is as near to `exact` (fp64) as a sum of `terms` numbers in fp32, rounded once to its
    dtype, must be.

    magnitude (fp64): the sum of the absolute values of the terms. Each addition may err by an ulp
    of what it makes (matrix units truncate), hence 2^-23 of the magnitude per term, which is far
    more than a sum that has gone wrong would need.
    """
    info = torch.finfo(found.dtype)
    bound = (
        exact.abs() * info.eps / 2
        + magnitude * (terms + 2) * 2.0**-23 * (1 + info.eps)
        + info.smallest_normal * info.eps
    )
    error = (found.double() - exact).abs()
    assert bool((error <= bound).all()), float((error - bound).max())
