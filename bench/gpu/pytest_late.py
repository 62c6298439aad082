"""A pytest plugin that makes every kernel of a unit late, so that a copy that does not wait for a
kernel reads, or writes, too early.

    -p pytest_late [--late-cycles N] [--unordered]

On a GPU the current stream sleeps after every `unshard`, so the kernels that use the unit run
milliseconds after their launch. On the simulated device and the CPU the computing thread itself
sleeps. The bits must equal those of a run without the plugin. A run without any delay fails: the
engine's names have changed.

--unordered breaks the engine on purpose: its copies wait for an empty stream. Tests must then fail
(pytest_lines --must-fail), or the delays detect nothing.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

CYCLES = 3_000_000  # 1.5 ms at 2 GHz
SLEEP_S = 0.0005
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered behind the default stream
DELAYED = "late_kernels"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options above."""
    group = parser.getgroup("late")
    group.addoption("--late-cycles", type=int, default=CYCLES, help="(%(default)s)")
    group.addoption("--unordered", action="store_true", help="copies do not wait for kernels")


class _Late:
    """Counts what it delays."""

    def __init__(self, cycles: int) -> None:
        self.count = 0
        self._cycles = cycles

    def delay(self, device: torch.device) -> None:
        """Make what is launched on the device from here on late."""
        self.count += 1
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda._sleep(self._cycles)
        else:
            time.sleep(SLEEP_S)


def patched(monkeypatch: pytest.MonkeyPatch, cycles: int, *, unordered: bool) -> _Late:
    """Patch the engine. Returns what counts."""
    from infinity._src.memory.device import Device
    from infinity._src.params.unshard import Unsharder

    made = _Late(cycles)
    unshard = Unsharder.unshard

    def unshard_late(self: Unsharder, unit: Any) -> None:
        unshard(self, unit)
        made.delay(unit.flats[0].tensor.device)

    monkeypatch.setattr(Unsharder, "unshard", unshard_late)
    if unordered:
        monkeypatch.setattr(Device, "behind", _behind_nothing)
    return made


@pytest.fixture(autouse=True)
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Late]:
    """The engine is late while a test runs."""
    option = request.config.getoption
    made = patched(monkeypatch, option("--late-cycles"), unordered=option("--unordered"))
    yield made
    request.node.user_properties.append((DELAYED, made.count))


def _behind_nothing(self: Any) -> None:
    """Order copies behind a stream on which nothing runs."""
    driver = self.driver
    if driver is None:
        return
    stream = ctypes.c_void_p()
    if not hasattr(driver, "idle_stream"):
        with driver._current():
            driver._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(NON_BLOCKING))
        driver.idle_stream = int(stream.value or 0)
    self._executor.compute_stream(driver.idle_stream)


def pytest_configure(config: pytest.Config) -> None:
    """Count over all tests, in the process that has all reports."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Total(), "late kernels of a run")


class _Total:
    """The kernels that were delayed in a run, and the tests that ran."""

    def __init__(self) -> None:
        self.ran = self.delayed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add what a test delayed."""
        self.ran += report.when == "call" and not report.skipped
        if report.when == "teardown":
            self.delayed += sum(value for name, value in report.user_properties if name == DELAYED)

    # After pytest_lines, which calls a run good in which all tests failed as they must.
    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that delayed nothing."""
        if self.ran and not self.delayed:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say how many there were."""
        terminalreporter.write_line(f"late kernels: {self.delayed} in {self.ran} tests")
        if self.ran and not self.delayed:
            terminalreporter.write_line(
                "NOTHING WAS DELAYED: infinity no longer unshards by Unsharder.unshard", red=True
            )
