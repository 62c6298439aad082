"""Shared code of comparisons: scratch directories, subprocesses that end with this one, ratios,
tables, result lines."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infinity._src.cli.stop_signals import StopSignals, status_of

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
RESULTS = BENCH / "results"
RESAMPLES = 10_000
WAIT_POLICY = "OMP_WAIT_POLICY"
_LOG_TAIL = 4000
_LAY_OUT_BYTES = 64 << 20
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class BenchError(Exception):
    """A comparison cannot be made or an arm failed; the message says what to do. Shown without a
    traceback."""


@dataclass(frozen=True)
class Summary:
    """Median and extremes of a few measurements.

    With n independent pairs the extremes enclose the true median with probability 1 - 2**(1 - n).
    """

    median: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        if not values:
            raise ValueError("nothing was measured")
        return cls(statistics.median(values), min(values), max(values), len(values))

    def text(self, digits: int = 2) -> str:
        if self.count == 1:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.least:.{digits}f}–{self.most:.{digits}f})"


@dataclass(frozen=True)
class Interval:
    """The median of a few paired measurements, with a confidence interval of it.

    The interval is the 2.5 % and 97.5 % quantile of the medians of `RESAMPLES` resamples
    (percentile bootstrap, fixed seed).
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        if not values:
            raise ValueError("nothing was measured")
        chance = random.Random(0)
        medians = sorted(
            statistics.median(chance.choices(values, k=len(values))) for _ in range(RESAMPLES)
        )
        low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]
        return cls(statistics.median(values), low, high, len(values))

    def text(self, digits: int = 3) -> str:
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP remove scratch directories and arms, and then exit
    with status 128 + number."""
    try:
        with StopSignals():
            yield
    except KeyboardInterrupt as error:
        note("interrupted; scratch files and processes are gone")
        raise SystemExit(status_of(error)) from None


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """Enter a private directory under ``parent``, removed on every exit."""
    path = Path(tempfile.mkdtemp(prefix="infinity-bench-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def check_directory(directory: Path, needed_bytes: int) -> None:
    """Raise BenchError unless ``directory`` can be written to and has ``needed_bytes`` free."""
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        raise BenchError(
            f"{directory} is not a directory that can be written to: give another --dir"
        )
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise BenchError(
            f"{directory} has {free / 1e9:.1f} GB free and this run needs {needed_bytes / 1e9:.1f} "
            "GB: give another --dir, or a smaller workload"
        )


def lay_out(file: Path, size: int) -> None:
    """Write ``size`` random bytes (64 MiB that repeat) to ``file`` and to its drive.

    The first pass over a new file allocates its blocks. A training reuses its swap files, so a
    measurement must not include this allocation.
    """
    block = random.Random(0).randbytes(_LAY_OUT_BYTES)
    with file.open("wb") as target:
        os.posix_fallocate(target.fileno(), 0, size)
        for start in range(0, size, _LAY_OUT_BYTES):
            target.write(block[: min(_LAY_OUT_BYTES, size - start)])
        target.flush()
        os.fsync(target.fileno())
        os.posix_fadvise(target.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def commit() -> str:
    """The commit of this checkout, with "+" when files differ from it; empty outside of one."""
    git = ["git", "-C", str(ROOT), "-c", "core.fsmonitor=false"]
    try:
        found = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found + ("+" if changed.strip() else "")


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with `changes`, without the variables that would leak one
    Python's packages into another. Threads wait passively unless our environment says otherwise:
    with spinning threads, other load on the machine would distort the figures."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {WAIT_POLICY: "PASSIVE", **kept, **changes}


def die_with_parent() -> None:
    """Ask the kernel to kill this child when its parent dies, even by SIGKILL. Called between fork
    and exec."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def run_command(
    command: Sequence[str], env: Mapping[str, str], *, timeout_s: float, cwd: Path | None = None
) -> str:
    """Run a command to its end and return its standard output.

    The command leads a new process group, which is killed as a whole on an interrupt or a timeout.
    Raises BenchError with the end of its output if it fails.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - safe: this process has one thread
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as expired:
            raise BenchError(f"{' '.join(command)} took more than {timeout_s:.0f} s") from expired
        finally:
            kill_group(process)
        if process.returncode != 0:
            log.seek(0)
            tail = (log.read() + output)[-_LOG_TAIL:]
            raise BenchError(f"{' '.join(command)} ended with {process.returncode}:\n{tail}")
        return output


def kill_group(process: subprocess.Popen[str], timeout_s: float | None = None) -> None:
    """Kill the process group that ``process`` leads, and reap ``process``. Raises TimeoutExpired if
    it has not ended after ``timeout_s``."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout_s)


def last_json_line(output: str) -> dict[str, Any]:
    """Return the record that an arm printed among its libraries' messages. Raises BenchError if
    there is none."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            record: dict[str, Any] = json.loads(line)
            return record
    raise BenchError(f"the arm printed no JSON line:\n{output[-_LOG_TAIL:]}")


def steady_s(record: Mapping[str, Any]) -> float:
    """Return an arm's seconds per step in steady state, in which each step includes the update of
    the step before it. The first measured step is left out, since no update was pending before it.
    `s_per_step` also includes the last update, which overlaps nothing."""
    return statistics.fmean(record["step_s"][1:])


def now() -> str:
    """The time of a run, as its identifier: UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def machine() -> dict[str, Any]:
    """Return what figures depend on: CPU, memory, kernel. Results are published, so the host's name
    is left out."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_bytes": memory,
        "kernel": platform.release().split("-")[0],
    }


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line to a results file, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def note(text: str) -> None:
    """Print progress to standard error; standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with rich where it is installed and output is a terminal, else in plain
    columns."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        Console = None  # type: ignore[assignment, misc]  # noqa: N806
    if Console is not None and sys.stdout.isatty():
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(len(line[i]) for line in [columns, *rows]) for i in range(len(columns))]
    print(title)
    for line in [columns, ["-" * width for width in widths], *rows]:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


def some_of(choices: Collection[str]) -> Callable[[str], list[str]]:
    """Return the type of an argument that names some of `choices`, separated by commas."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if len(set(names)) != len(names) or not set(names) <= set(choices):
            raise argparse.ArgumentTypeError(f"{text!r}: give some of {','.join(choices)}")
        return names

    return parse


def run_main(main: Any) -> int:
    """Run a command's ``main()``. An error that the user can fix prints one line and exits with
    status 1."""
    try:
        with stopping():
            return int(main())
    except (BenchError, ValueError) as error:
        note(f"error: {error}")
        return 1


def counts(text: str) -> list[int]:
    """Read counts such as 1,2,4, for an argument."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers of 1 or more")
    return found
