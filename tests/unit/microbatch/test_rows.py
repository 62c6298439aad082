"""Cutting a batch into rows and joining it: values and gradients are moved, and never rounded."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity._src.microbatch.rows import (
    ALIGNED_BYTES,
    PerSlice,
    cut_rows,
    join_rows,
    mapped,
    tensors_in,
)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    shape=st.lists(st.integers(1, 4), max_size=3),
    turned=st.booleans(),
    wanted=st.booleans(),
)
def test_what_is_cut_and_joined_is_the_same(
    sizes: list[int], shape: list[int], turned: bool, wanted: bool
) -> None:
    whole = torch.randn(sum(sizes), *shape)
    if turned and len(shape) > 1:
        whole = whole.transpose(1, 2).contiguous().transpose(1, 2)
    whole.requires_grad_(wanted)
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    parts = cut_rows(whole, bounds)
    for part, (first, last) in zip(parts, bounds, strict=True):
        assert torch.equal(part, whole[first:last])
        assert part.data_ptr() % 16 == whole.data_ptr() % 16
    joined = join_rows(parts)
    assert torch.equal(joined, whole)
    if not turned or min(shape, default=1) > 1:
        assert joined.stride() == whole.stride()
    if wanted:
        weight = torch.randn_like(whole)
        (joined * weight).sum().backward()
        assert whole.grad is not None
        assert torch.equal(whole.grad, weight)


def test_parts_have_memory_of_their_own_where_they_would_begin_unaligned() -> None:
    row = ALIGNED_BYTES // 4
    aligned, odd = torch.randn(4, row), torch.randn(4, row + 1)
    bounds = [(0, 2), (2, 4)]
    assert cut_rows(aligned, bounds)[1].data_ptr() == aligned[2].data_ptr()
    assert cut_rows(odd, bounds)[1].data_ptr() != odd[2].data_ptr()
    learning = aligned.requires_grad_()
    assert cut_rows(learning, bounds)[1].data_ptr() != learning[2].data_ptr()


def test_a_slice_without_a_gradient_has_zeros() -> None:
    whole = torch.randn(4, 3, requires_grad=True)
    cut_rows(whole, [(0, 1), (1, 4)])[1].sum().backward()
    assert whole.grad is not None
    assert whole.grad.tolist() == [[0.0] * 3] + [[1.0] * 3] * 3


class Pair(NamedTuple):
    first: torch.Tensor
    second: object


def test_containers_keep_their_types() -> None:
    tensor = torch.zeros(2)
    value = {"a": [tensor, 1], "b": Pair(tensor, (None, "x"))}
    assert mapped(value, lambda leaf: leaf) == value
    assert type(mapped(value, lambda leaf: leaf)["b"]) is Pair
    assert list(tensors_in(value)) == [tensor, tensor]


def test_values_of_slices_refuse_what_would_mix_them() -> None:
    values = PerSlice([torch.zeros(()), torch.ones(())], "blocks.0")
    with pytest.raises(ValueError, match=r"of an output of blocks\.0 that is no batch of rows"):
        torch.zeros(()) + values  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"^mean of an output of blocks\.0"):
        values.mean()
    assert copy.deepcopy(values).owner == "blocks.0"
