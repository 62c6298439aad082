"""Runs the commands for a GPU: steps with time limits, and results that survive a kill.

A command is a script `fNN_*.py`: a list of steps, each a process with a time limit. Results are
appended to files of the results folder at once, so that they survive the end of the command or the
machine:

    results.jsonl    one JSON line per test, figure and step when it ends (and when a test begins)
    log.txt          the output, its first 12 MiB
    table.md         the lines as tables, rewritten by every command

Each step has a share of the command's time: its limit, or less if the limits of all steps exceed
the command's time. A step never uses a later step's share, and passes unused time on.

Exit status: 0 everything ran and passed; 1 something failed or ran out of time; 3 nothing failed,
but something did NOT run, and a line says what and why. A skipped test counts as not run.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import bench_path
import harness
import prepare
from bench_path import HERE, ROOT

NOT_RUN = 3
NOTHING_COLLECTED = 5  # pytest's, and pytest_lines' where every test was skipped
TIMED_OUT = 124
COMMAND_S_MAX = 480.0
PREPARE_S = 90.0
GRACE_S = 10.0
KILL_S = 10.0
LOG_BYTES_MAX = 12 << 20  # a larger file might not be brought back
DEVICES = ("cuda", "simulated", "cpu")
TMPFS = ("tmpfs", "ramfs")
#: Threads of torch's operations, and of its compiler: tests are small, and run beside each other.
ONE_THREAD = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")


@dataclasses.dataclass(frozen=True)
class Step:
    """One process of a command.

    limit_s: seconds that it may take, its end included; the command may have less. why_not: the
    reason for which it is not run; "" runs it. find: a pattern; lines of output that have it are
    recorded. pytest: its status 5 says that nothing ran. closing_s: seconds that the step needs to
    end. It gets `--seconds`, its limit less these, and starts nothing after that.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    why_not: str = ""
    find: str = ""
    pytest: bool = False
    closing_s: float | None = None


class Run:
    """One run of a command: where results go, what computes, and how long it may take."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        self.args = args
        self.device: str = args.device
        self.out: Path = args.out.resolve()
        self.swap: Path = args.swap.resolve()
        self.results = self.out / "results.jsonl"
        self.log_file = self.out / "log.txt"
        self.until_s = time.monotonic() + args.seconds
        self.statuses: list[int] = []

    @property
    def left_s(self) -> float:
        """Seconds that are left to the command."""
        return self.until_s - time.monotonic()

    @property
    def on_cuda(self) -> bool:
        """True where a real GPU computes."""
        return self.device == "cuda"

    def script(self, name: str, *arguments: object) -> list[str]:
        """The command line of a script of this folder, or of bench/."""
        file = next(place / name for place in (HERE, HERE.parent) if (place / name).is_file())
        return [sys.executable, str(file), *map(str, arguments)]

    def pytest(
        self, name: str, *paths: str, select: str = "", workers: int = 0, extra: Sequence[str] = (),
        on: str = "", env: dict[str, str] | None = None, **fields: Any,
    ) -> Step:  # fmt: skip
        """A step that runs tests: those of the device, each recorded as it ends.

        select: pytest's -k, unless the command line gives another. workers: processes, on a GPU.
        on: the device that the tests' parameter names, where it is not the run's.
        """
        select = self.args.select if self.args.select is not None else select
        marks = "gpu" if self.on_cuda else "not gpu and not soak and not ranks and not hosts"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-m", marks, "-p", "no:cacheprovider"),
            *("-p", "pytest_lines", "--lines", str(self.results)),
            *("--suite", f"{self.name}/{name}", "--on", on or self.device),
            *("-o", "faulthandler_timeout=90", "--basetemp", str(self.swap / "pytest")),
            # A newer numpy or torch warns of what it will take away: to be read, no failure today.
            *("-W", "default::DeprecationWarning", "-W", "default::FutureWarning"),
        ]
        if select:
            command += ["-k", select]
        paths = tuple(self.args.paths or paths)
        if workers > 1 and self.on_cuda and prepare.has("xdist", prepare.SITE):
            # `load`, not `loadfile`: references are computed more than once, but all are busy.
            command += ["-n", str(workers), "--dist", "load"]
        given = {one: os.environ.get(one, "1") for one in ONE_THREAD}
        return Step(
            name, [*command, *extra, *paths], env={**given, **(env or {})}, pytest=True, **fields
        )

    def is_ready(self) -> bool:
        """Set the machine up if necessary; return whether it is ready. A set-up whose final check
        timed out counts as ready: the first imports may take minutes."""
        if prepare.is_ready():
            return True
        self.step(Step("prepare", self.script("prepare.py"), PREPARE_S))
        return self.statuses[-1] == 0 or (self.statuses[-1] == TIMED_OUT and prepare.is_ready())

    def record(self, found: dict[str, Any]) -> None:
        """Append a line to the results at once."""
        harness.append_line(self.results, found)

    def say(self, text: str) -> None:
        """Tell the person who waits, and the log."""
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        with self.log_file.open("a") as log:
            log.write(f"{text}\n")

    def environment(self) -> dict[str, str]:
        """The environment of every step: this tree and what was installed for it come first."""
        places = [str(ROOT), str(HERE), str(bench_path.BENCH), str(prepare.SITE)]
        given = os.environ.get("PYTHONPATH")
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*places, *([given] if given else [])]),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        # Without bytecode on disk each step compiles all of torch again.
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        if self.on_cuda:
            env.pop("TRITON_INTERPRET", None)  # there Triton compiles
        if file_system(self.swap) in TMPFS:
            env["INFINITY_ALLOW_TMPFS"] = "1"
        return env

    def step(self, step: Step) -> None:
        """Run a step within its time, and record how it ended."""
        limit = min(step.limit_s, self.left_s)
        began = time.monotonic()
        lines: list[str] = []
        if step.why_not:
            self.say(f"NOT RUN: {self.name}/{step.name}: {step.why_not}")
            status = NOT_RUN
        elif limit < 1:
            self.say(f"NOT RUN: {self.name}/{step.name}: no time is left")
            status = TIMED_OUT
        else:
            command = list(step.command)
            if step.closing_s is not None:
                command += ["--seconds", f"{max(limit - step.closing_s, limit / 2):.0f}"]
            self.say(f"== {self.name}/{step.name} (at most {limit:.0f} s): {' '.join(command)}")
            wanted = re.compile(step.find) if step.find else None
            env = {**self.environment(), **step.env}
            status = self._run(command, env, limit, wanted, lines)
            if step.pytest and status == NOTHING_COLLECTED:
                self.say(f"NOT RUN: {self.name}/{step.name}: no test ran; the log has the reasons")
                status = NOT_RUN
            elif step.pytest and status == NOT_RUN:
                status = 1  # pytest's status 3: an internal error
        ended = {
            "script": "stage",
            "name": f"{self.name}/{step.name}",
            "status": status,
            "seconds": round(time.monotonic() - began, 1),
        }
        found = {"found": lines, "why": step.why_not}
        self.record({**ended, **{name: value for name, value in found.items() if value}})
        self.say(f"== {self.name}/{step.name}: {told(status)} after {ended['seconds']} s")
        self.statuses.append(status)

    def _run(
        self, command: Sequence[str], env: dict[str, str], limit_s: float,
        wanted: re.Pattern[str] | None, lines: list[str],
    ) -> int:  # fmt: skip
        """Run a process to its end or its limit, its output to us and to the log as it comes."""
        try:
            process = subprocess.Popen(
                command,
                env=env,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
                preexec_fn=harness.die_with_parent,  # noqa: PLW1509 - we have one thread
            )
        except OSError as error:
            self.say(f"{command[0]}: {error}")
            return 127
        assert process.stdout is not None
        grace_s = min(GRACE_S, limit_s / 10)
        until_s = time.monotonic() + limit_s - grace_s
        try:
            with self.log_file.open("a") as log:
                over = _listen(process.stdout, until_s, log, wanted, lines)
            if over:
                end(process, grace_s)
                return TIMED_OUT
            try:
                # It may close its output, and hang in the driver as it ends.
                return process.wait(max(until_s - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                end(process, grace_s)
                return TIMED_OUT
        finally:
            self.kill(process)

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Kill the rest of a step, and wait a bounded time: a process inside a hanging driver call
        cannot be killed, and later steps are still worth a try."""
        try:
            harness.kill_group(process, timeout_s=KILL_S)
        except subprocess.TimeoutExpired:
            self.say(f"process {process.pid} was killed {KILL_S:.0f} s ago and has not ended")


def _listen(
    output: TextIO, until_s: float, log: TextIO, wanted: re.Pattern[str] | None, lines: list[str]
) -> bool:
    """Hand output on until it ends. True: time was over before."""
    os.set_blocking(output.fileno(), False)
    rest = ""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while (left := until_s - time.monotonic()) > 0:
            if not selector.select(min(left, 1.0)):
                continue
            text = os.read(output.fileno(), 1 << 16).decode(errors="replace")
            if not text:
                return False
            for place in (sys.stdout, *([log] if log.tell() < LOG_BYTES_MAX else [])):
                place.write(text)
                place.flush()
            *whole, rest = (rest + text).split("\n")
            lines += [_plain(line) for line in whole if wanted and wanted.search(line)]
    return True


def _plain(line: str) -> str:
    """A line, or the row of a table that rich has drawn, without what is only there to be seen."""
    return " ".join(line.replace("│", " ").split())[:300]


def end(process: subprocess.Popen[str], grace_s: float) -> None:
    """Ask a process to end, so that it leaves no scratch files, and end it if it does not."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()


def together(statuses: Sequence[int]) -> int:
    """The exit status of steps, or commands, that ended so."""
    if set(statuses) <= {0}:
        return 0
    return NOT_RUN if set(statuses) <= {0, NOT_RUN} else 1


def told(status: int) -> str:
    """A step's status, for people."""
    names = {0: "ok", NOT_RUN: "NOT RUN", TIMED_OUT: "OUT OF TIME"}
    return names.get(status, f"FAILED ({status})")


def file_system(place: Path) -> str:
    """The kind of the file system that a folder is on."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    inside = [(point, kind) for point, kind in mounts if place.is_relative_to(point)]
    return max(inside, key=lambda one: len(one[0]), default=("", ""))[1]


def no_gpu() -> str:
    """Reason for which there is no GPU here, "" with one; torch would take seconds to say."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "this machine has no libcuda.so.1"
    count = ctypes.c_int()
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return f"CUDA's driver says {code}"
    return "" if count.value else "CUDA's driver knows no device"


def no_compiler() -> str:
    """Reason for which Triton cannot make what launches its kernels, "" where it can. For that it
    compiles C, as `triton/runtime/build.py` says."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton launches kernels through C that it compiles; there is no CC, gcc or clang"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
    return "" if header.is_file() else f"Triton compiles C for this Python; there is no {header}"


def base_parser(about: str, seconds: float) -> argparse.ArgumentParser:
    """The arguments of whatever is run for a time: what computes, where, and for how long."""
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--device",
        default="cuda",
        choices=DEVICES,
        help="what computes; simulated and cpu try the command without a GPU (%(default)s)",
    )
    made.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT") or harness.RESULTS / "gpu"),
        help="results folder, added to ($OUT, else %(default)s)",
    )
    made.add_argument(
        "--swap",
        type=Path,
        default=ROOT / "build" / "gpu-swap",
        help="directory for swap files, on a drive (%(default)s)",
    )
    made.add_argument("--seconds", type=float, default=seconds, help="for all of it (%(default)s)")
    return made


def parser(about: str, seconds: float) -> argparse.ArgumentParser:
    """The arguments that every command takes."""
    assert seconds <= COMMAND_S_MAX
    made = base_parser(about, seconds)
    made.add_argument("--select", help="pytest's -k in place of the command's own; '' is all")
    made.add_argument("--paths", nargs="+", help="tests in place of the command's own")
    return made


@harness.stopping()
def main(
    file: str, about: str | None, seconds: float, steps: Callable[[Run], Iterable[Step]],
    options: Callable[[argparse.ArgumentParser], None] = lambda _parser: None,
) -> int:  # fmt: skip
    """Run a command. Returns its exit status."""
    made = parser(about or "", seconds)
    options(made)
    run = Run(Path(file).stem, made.parse_args())
    run.out.mkdir(parents=True, exist_ok=True)
    run.swap.mkdir(parents=True, exist_ok=True)
    began = {"script": "command", "name": run.name, "device": run.device, "run": harness.now()}
    run.record({**began, "state": "began", "commit": harness.commit()})
    run.say(f"==== {run.name} on {run.device}, {began['run']}, at most {run.args.seconds:.0f} s")
    status = 1
    try:
        # A folder of the command alone: what a step that was cut off leaves goes with it.
        with harness.scratch(run.swap) as run.swap:
            status = _steps(run, steps)
    finally:
        run.record({**began, "state": "ended", "status": status})
        _table(run)
    run.say(f"==== {run.name}: {told(status)}; {run.results}, table.md and log.txt beside it")
    return status


def _steps(run: Run, steps: Callable[[Run], Iterable[Step]]) -> int:
    why_not = no_gpu() if run.on_cuda else ""
    if why_not:
        run.say(
            f"NOT RUN: {run.name} needs a CUDA device: {why_not}. --device simulated or --device "
            "cpu tries it on tiny sizes"
        )
        return NOT_RUN
    if not run.is_ready():
        return 1
    for step in _with_cleaning(run, _in_shares(run, list(steps(run)))):
        run.step(step)
    return together(run.statuses)


def _in_shares(run: Run, steps: Sequence[Step]) -> Iterator[Step]:
    """The steps, each with what it may take when its turn comes."""
    limits = [0.0 if step.why_not else step.limit_s for step in steps]
    scale = min(run.left_s / max(sum(limits), 1.0), 1.0)
    for number, step in enumerate(steps):
        kept_s = scale * sum(limits[number + 1 :])
        yield dataclasses.replace(step, limit_s=min(step.limit_s, run.left_s - kept_s))


def _with_cleaning(run: Run, steps: Iterable[Step]) -> Iterator[Step]:
    """The steps; what each left in the swap directory goes behind it."""
    for step in steps:
        yield step
        for left in run.swap.glob("*"):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def _table(run: Run) -> None:
    """Make table.md anew; a fault in that costs no result."""
    made = subprocess.run(
        run.script("table.py", run.results), capture_output=True, text=True, check=False
    )
    if made.returncode:
        run.say(f"table.md was not made: {made.stderr[-500:]}")
    else:
        (run.out / "table.md").write_text(made.stdout)
