"""Sizes for people, read back."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from infinity._src.base.sizes import format_size, parse_size, round_size


@given(st.integers(0, 1 << 60))
@example((1 << 56) + 1)  # more digits than a float has
def test_what_is_rounded_up_is_enough(size: int) -> None:
    enough = parse_size(round_size(size).replace(" ", ""))
    assert size <= enough <= size * 1.11 + 1


@given(st.integers(0, 1023))
def test_small_sizes_are_exact(size: int) -> None:
    assert (
        parse_size(format_size(size).replace(" ", ""))
        == parse_size(round_size(size).replace(" ", ""))
        == size
    )
