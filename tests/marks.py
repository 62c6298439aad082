"""Choices among a test's parameters: those of the quick run, and those of `make slow` and `make
ranks`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

# Three ranks take as long as two and four together on two cores. The order of a sum of three and
# parts of unequal length, which two do not show, have tests without this mark.
THREE = pytest.param(3, marks=pytest.mark.ranks)
FOUR = pytest.param(4, marks=pytest.mark.ranks)


def mostly_slow(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Mark all values but the quick ones as slow: a test that takes long with each runs with these
    alone, unless by `make slow` (and on a GPU)."""
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]


def pairwise(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of values, one of each axis, as lists of parameters. The axes are of
    one length, two or three. Quick are those of a Latin square, in which each value of one of three
    axes meets each of another; the others are slow."""
    assert len({len(axis) for axis in axes}) == 1, "axes of one length"
    found = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[place] for axis, place in zip(axes, places, strict=True)]
        quick = sum(places) % len(axes[0]) == 0
        found.append(pytest.param(*values, marks=() if quick else pytest.mark.slow))
    return found


def alternating(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of values, one of each axis, as parameters (of one axis, its values).
    Quick is every second one, so that each value of an axis meets half of the others; the rest are
    slow."""
    found = []
    for places in itertools.product(*(enumerate(axis) for axis in axes)):
        values = [value for _, value in places]
        quick = sum(place for place, _ in places) % 2 == 0
        found.append(pytest.param(*values, marks=() if quick else pytest.mark.slow))
    return found


def every_second(*values: Any) -> list[Any]:
    """Mark every second value as slow: those of the same kind are beside each other."""
    return alternating(values)


def mostly_ranks(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Mark all values but the quick ones for `make ranks`: jobs of several ranks that take long."""
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.ranks)
        for value in values
    ]
