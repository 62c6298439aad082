"""Fixtures of the commands' tests."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

PACKAGES = ("plotly", "matplotlib", "matplotlib.figure")

# A package that is imported a second time does not fit its modules of the first time.
_imported: dict[str, ModuleType] = {}


@pytest.fixture(scope="module")
def without_pictures() -> Iterator[None]:
    """Runs draw neither page nor curve, as where these packages are not installed: half of a tiny
    run's time."""
    with pytest.MonkeyPatch.context() as patch:
        for package in PACKAGES:
            if package in sys.modules:
                _imported[package] = sys.modules[package]
            patch.setitem(sys.modules, package, None)
        yield


@pytest.fixture
def pictures(without_pictures: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of this test draw them."""
    for package in PACKAGES:
        if package in _imported:
            monkeypatch.setitem(sys.modules, package, _imported[package])
        else:
            monkeypatch.delitem(sys.modules, package)
            _imported[package] = importlib.import_module(package)
