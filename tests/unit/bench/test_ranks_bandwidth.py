"""Drives that the ranks of the bandwidth benchmark have, and the figures that it makes of its
records."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
NAMES = ("harness", "arm_gather", "ranks_bandwidth")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ...]]:
    monkeypatch.syspath_prepend(str(BENCH))
    yield tuple(importlib.import_module(name) for name in NAMES)
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("ranks", "drives"), [(1, 1), (1, 4), (2, 1), (2, 4), (3, 4), (4, 2), (4, 3)]
)
def test_all_drives_are_dealt_out_and_those_that_share_one_say_so(scripts, ranks, drives):
    _, arm, _ = scripts
    found = [arm.drives_of(rank, ranks, drives) for rank in range(ranks)]
    taken = Counter(drive for mine, _ in found for drive in mine)
    assert set(taken) == set(range(drives))
    assert all(taken[drive] == sharers for mine, sharers in found for drive in mine)


def test_ratios_are_of_one_round_and_shares_of_what_the_drives_give(scripts):
    _, _, bench = scripts
    records = [
        {"round": number, "arm": arm, "ranks": 2, "drives": 4, "gbps": gbps}
        for number, pair in enumerate([(0.6, 0.3), (0.8, 0.2), (0.7, 0.35)])
        for arm, gbps in zip(bench.ARMS, pair, strict=True)
    ]
    assert bench.rows_of(records, 250.0) == [
        ["2", "4", "1.00", "0.700 (0.600–0.800)", "0.300 (0.200–0.350)", "70%", "2.00 [2.00, 4.00]"]
    ]
