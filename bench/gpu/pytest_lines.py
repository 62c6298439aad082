"""A pytest plugin for runs that may be cut off: writes a JSON line when a test begins and when it
ends, and selects the tests of one device.

    -p pytest_lines --lines FILE --suite NAME --on cuda|simulated|cpu [--must-fail]

If all tests were skipped, the run ends with pytest's status for an empty collection (5), so that it
does not look like a pass. With --must-fail each test must fail, by an assertion or by gradients
that are not finite: for runs with an engine that was broken on purpose.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

PHASES = ("setup", "call", "teardown")
WHY_LENGTH = 600
NOT_FINITE = "infinity.errors.NonFiniteGradient"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options above."""
    group = parser.getgroup("lines")
    group.addoption("--lines", type=Path, help="file to append a JSON line per test to")
    group.addoption("--suite", default="tests", help="name of the run in those lines")
    group.addoption(
        "--on", choices=("cpu", "simulated", "cuda"), help="device of the tests that use one"
    )
    group.addoption(
        "--must-fail", action="store_true", help="tests must fail, by wrong numbers; none may pass"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other devices."""
    wanted = config.getoption("--on")
    if wanted is None:
        return
    others = [item for item in items if _device(item) not in (None, wanted)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def _device(item: pytest.Item) -> str | None:
    """The device that a test is for, by its parameters; None: it has none."""
    params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    found = params.get("device", params.get("cuda"))
    return found if isinstance(found, str) else None


def pytest_configure(config: pytest.Config) -> None:
    """Watch the run; workers of xdist hand their reports to the process that started them."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Lines(config), "lines of a run")


class Lines:
    """The lines of one run, and its status."""

    def __init__(self, config: pytest.Config) -> None:
        self._file: Path | None = config.getoption("--lines")
        self._suite = config.getoption("--suite")
        self._must_fail = config.getoption("--must-fail")
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test began: what is cut off, or hangs, is known by name."""
        self._write({"test": nodeid, "outcome": "began"})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test ended; the last one, or the crash of its process, ends the test."""
        reports = self._reports.setdefault(report.nodeid, [])
        reports.append(report)
        if report.when in PHASES[:2]:
            return
        del self._reports[report.nodeid]
        outcome, why = self._ended(reports)
        self.counts[outcome] += 1
        found: dict[str, Any] = {
            "test": report.nodeid,
            "outcome": outcome,
            "seconds": round(sum(one.duration for one in reports), 2),
        }
        found |= dict(report.user_properties)
        self._write({**found, **({"why": why} if why else {})})

    def _ended(self, reports: list[pytest.TestReport]) -> tuple[str, str]:
        """Outcome of a test, and the reason for it."""
        bad = [one for one in reports if one.failed]
        skipped = [one for one in reports if one.skipped]
        if self._must_fail and not skipped:
            if not bad:
                return "failed", "it passed on an engine that was broken on purpose"
            if all(_by_wrong_numbers(one) for one in bad):
                return "passed", f"failed as it must: {_why(bad[0])}"
        if bad:
            return "failed", _why(bad[0])
        return ("skipped", _why(skipped[0])) if skipped else ("passed", "")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Let the status tell what ran."""
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        if self.counts["failed"]:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        elif not self.counts["passed"]:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        elif self._must_fail:
            session.exitstatus = pytest.ExitCode.OK

    def _write(self, found: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                file.write(json.dumps({"script": "tests", "suite": self._suite, **found}) + "\n")


def _why(report: pytest.TestReport) -> str:
    """A line or two of what failed, or why it was skipped."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:WHY_LENGTH]
    return (crash.message if crash is not None else str(report.longrepr))[:WHY_LENGTH]


def _by_wrong_numbers(report: pytest.TestReport) -> bool:
    """Tell whether numbers were wrong, and nothing else."""
    return _why(report).startswith(("assert", "AssertionError", NOT_FINITE))
