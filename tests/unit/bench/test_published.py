"""The tables of published results in bench/README.md are what the plan's terms give today."""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def published() -> Iterator[Any]:
    """bench/published.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        yield importlib.import_module("published")
        sys.modules.pop("published", None)


def test_the_committed_rows_are_those_of_today(published: Any) -> None:
    shown = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    results = [row for results in published.RESULTS for row in results()]
    assert len(results) == 33
    for row in results:
        assert published.row_of(row) in shown
    for ratio in published.RATIOS:
        assert published.row_of_ratio(ratio) in shown


def test_the_errors_that_the_documents_tell_are_those_of_the_rows(published: Any) -> None:
    shown = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for results in (published.ratel(), published.mlp_offload()):
        errors = [row.error for row in results if row.counts]
        most = max(errors, key=abs)
        sign = "+" if most > 0 else "\u2212"
        cells = (len(errors), f"{statistics.median(map(abs, errors)):.0%}", f"{abs(most):.0%}")
        median, largest = (cell.replace("%", " %") for cell in cells[1:])
        assert f"| {cells[0]} | {median} | {sign}{largest} |" in shown
