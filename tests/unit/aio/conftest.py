"""Fixtures: every test that takes `make_rig` runs once per backend that this machine has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.aio.rig import BACKENDS, Rig


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend that this machine has."""
    return str(request.param)


@pytest.fixture
def make_rig(backend: str, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Makes rigs of the backend; closes them."""
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig(tmp_path, backend, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def rng() -> np.random.Generator:
    """Seeded."""
    return np.random.default_rng(7)
