"""Set-up of every test run. Prepares hypothesis, Triton and signals, reports I/O backends that no
test has seen, and closes models that a failed test left open."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator

import hypothesis
import pytest
import torch

# Tests assert no time: on a busy machine the first example of a test may take longer than any
# limit.
hypothesis.settings.register_profile("infinity", deadline=None)
hypothesis.settings.load_profile("infinity")

# As under `make`: threads of the processes that tests start wait passively, so none warns.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# As under `make`, too, and before anything imports huggingface_hub: tests ask nothing of a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Set before any library imports Triton: at import Triton becomes interpreter or compiler for good.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _backends_missing() -> dict[str, str]:
    """Backends of the I/O engine that no test of this run has seen, and why."""
    from tests.unit.aio.rig import MISSING

    return MISSING


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze the million objects of imports and collection, which live to the end: tests request
    many full garbage collections, and each would traverse them."""
    gc.collect()
    gc.freeze()
    # glibc looks at each of the small free blocks that a long test run leaves: checks of the heap
    # take 2 % of the time here, too, not 6 %.
    from infinity._src.memory import heap

    heap.BRIEF_S = 0.0


def pytest_sessionfinish(session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
    """INFINITY_REQUIRE_BACKENDS=1: a run that leaves a backend out has failed. Where io_uring is
    forbidden, and that is known and accepted, INFINITY_WITHOUT_BACKENDS names it."""
    accepted = os.environ.get("INFINITY_WITHOUT_BACKENDS", "").split(",")
    required = os.environ.get("INFINITY_REQUIRE_BACKENDS") == "1"
    if required and exitstatus == pytest.ExitCode.OK and set(_backends_missing()) - set(accepted):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the backends that were not tested, in a line that is hard to overlook."""
    missing = _backends_missing()
    if missing:
        terminalreporter.section("I/O backends that were NOT tested", sep="!", red=True, bold=True)
    for name, reason in missing.items():
        terminalreporter.write_line(f"NOT TESTED: {name}: {reason}", red=True)
    if missing and os.environ.get("INFINITY_REQUIRE_BACKENDS") == "1":
        terminalreporter.write_line("INFINITY_REQUIRE_BACKENDS=1 makes this a failure.", red=True)


@pytest.fixture(autouse=True)
def _close_what_a_failed_test_left_open() -> Iterator[None]:
    """A model that stays offloaded keeps its part of the process's budget, and the next test would
    fail for it."""
    yield
    engine = sys.modules.get("infinity._src.engine.handle")
    for handle in list(engine._OPEN) if engine is not None else ():
        try:
            handle.close()
        except Exception as error:
            print(f"closing a model that a test left open: {error}")


# A run in the background of a shell starts with SIGINT ignored, and one under nohup with SIGHUP. So
# would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
