"""Fixtures of the commands' tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def without_pictures() -> Iterator[None]:
    """Runs draw neither page nor curve, as where these packages are not installed: half of a tiny
    run's time."""
    with pytest.MonkeyPatch.context() as patch:
        for package in ("plotly", "matplotlib", "matplotlib.figure"):
            patch.setitem(sys.modules, package, None)
        yield


@pytest.fixture
def pictures(without_pictures: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of this test draw them."""
    for package in ("plotly", "matplotlib", "matplotlib.figure"):
        monkeypatch.delitem(sys.modules, package)
