"""What every test leaves behind: nothing, also when it fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _close_what_a_failed_test_left_open() -> Iterator[None]:
    """A model that stays offloaded keeps its part of the process's budget, and the next test would fail for it."""
    yield
    engine = sys.modules.get("infinity.engine")
    for handle in list(engine._OPEN) if engine is not None else ():
        try:
            handle.close()
        except Exception as error:
            print(f"closing a model that a test left open: {error}")
