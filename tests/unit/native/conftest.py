"""Fixture of the native tests: one run per instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from infinity._src.cabi import native


@pytest.fixture(params=native.ISA_NAMES)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that this machine has, in turn."""
    if request.param not in native.isas():
        pytest.skip(f"this machine has no {request.param}")
    before = native.isa()
    native.select_isa(request.param)
    yield request.param
    native.select_isa(before)
