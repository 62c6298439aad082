"""Selects a test's parameters for the quick run, `make slow` and `make ranks`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

# Three ranks take as long as two and four together on two cores. Sums of three and parts of unequal
# length, which need three ranks, have tests without this mark.
THREE = pytest.param(3, marks=pytest.mark.ranks)
FOUR = pytest.param(4, marks=pytest.mark.ranks)


def mostly_slow(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Mark all values but the quick ones as slow, for a test that takes long with each value (also
    on a GPU)."""
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]


def pairwise(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of values, one of each axis, as lists of parameters. The axes are of
    one length, two or three. The combinations of a Latin square are quick: they have each pair of
    values of two axes. The others are slow."""
    assert len({len(axis) for axis in axes}) == 1, "axes of one length"
    found = []
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[place] for axis, place in zip(axes, places, strict=True)]
        quick = sum(places) % len(axes[0]) == 0
        found.append(pytest.param(*values, marks=() if quick else pytest.mark.slow))
    return found


def alternating(*axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of values, one of each axis, as parameters (of one axis, its values).
    Every second one is quick, so that each value is combined with half of the other axes' values;
    the others are slow."""
    found = []
    for places in itertools.product(*(enumerate(axis) for axis in axes)):
        values = [value for _, value in places]
        quick = sum(place for place, _ in places) % 2 == 0
        found.append(pytest.param(*values, marks=() if quick else pytest.mark.slow))
    return found


def every_second(*values: Any) -> list[Any]:
    """Mark every second value as slow: adjacent values are of the same kind."""
    return alternating(values)


def mostly_ranks(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Mark all values but the quick ones for `make ranks`: jobs of several ranks that take long."""
    return [
        value if value in quick else pytest.param(value, marks=pytest.mark.ranks)
        for value in values
    ]


Values = dict[str, Any]


def covering(
    axes: Mapping[str, Sequence[Any]], allowed: Callable[[Values], bool], seed: int = 0
) -> list[Values]:
    """Return rows, one value of each axis, that together contain each allowed pair of values.

    allowed: whether the values of a row, or of a part of one, may be combined. Greedy, after AETG:
    a row begins with a missing pair; each further axis takes the value that adds most pairs.
    """
    chance = random.Random(seed)
    place = {name: index for index, name in enumerate(axes)}
    left = dict.fromkeys(
        (a, x, b, y)
        for a, b in itertools.combinations(axes, 2)
        for x, y in itertools.product(axes[a], axes[b])
        if allowed({a: x, b: y})
    )

    def filled(row: Values) -> Values | None:
        for name in chance.sample(list(axes), len(axes)):
            if name in row:
                continue
            fitting = [value for value in axes[name] if allowed({**row, name: value})]
            if not fitting:
                return None
            chance.shuffle(fitting)
            before = [pair for pair in row.items() if place[pair[0]] < place[name]]
            after = [pair for pair in row.items() if place[pair[0]] > place[name]]
            adds = [
                sum((*pair, name, value) in left for pair in before)
                + sum((name, value, *pair) in left for pair in after)
                for value in fitting
            ]
            row[name] = fitting[adds.index(max(adds))]
        return row

    rows = []
    while left:
        a, x, b, y = next(iter(left))
        tries = (filled({a: x, b: y}) for _ in range(10))
        found = [{name: row[name] for name in axes} for row in tries if row is not None]
        if not found:
            del left[a, x, b, y]
            continue
        held = [
            [pair for one, other in itertools.combinations(row.items(), 2)
             if (pair := (*one, *other)) in left]
            for row in found
        ]  # fmt: skip
        best = max(range(len(found)), key=lambda index: len(held[index]))
        rows.append(found[best])
        for pair in held[best]:
            del left[pair]
    return rows
