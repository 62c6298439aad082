"""What every test leaves behind: nothing, also when it fails."""

from __future__ import annotations

import signal
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


# A run in the background of a shell starts with SIGINT ignored, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
