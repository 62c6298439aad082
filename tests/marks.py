"""Choices among a test's parameters: those of the quick run, and those of `make slow` and `make
ranks`."""

from __future__ import annotations

from collections.abc import Iterable
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


def mostly_ranks(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Mark all values but the quick ones for `make ranks`: jobs of several ranks that take long."""
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.ranks)
        for value in values
    ]
