"""The fault campaign: each request of a training fails in each way, in each phase.

    python -m tests.campaign                          # all of it: `make campaign`, hours
    python -m tests.campaign --slice 5 --seed 3       # a sample of five minutes
    python -m tests.campaign --only 'EIO write 3 step two threads 1 4'     # one case again

A case is an injection: a kind of fault, at request n of reads or writes counted from the beginning
of a phase, under a policy, with a backend, on one or two ranks and one or four drives. A process
(of each rank) trains with the fault, and closes; a second process starts again. A case is right if

    the numbers are those of a run in memory, bit by bit, or an error of a promised type says why;
    what was committed, or saved, before comes back, and damage is named;
    no thread, descriptor, lock, locked byte or file is left;
    it ends: processes that hang are ended, and that is a finding.

How a case of a fault, phase and policy may end is the table `PROMISES`. Every case is a line of the
record (--record), which --resume continues.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import hashlib
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from tests.campaign_life import PHASES, POLICIES, Case, Told, serve
from tests.forks import FORKSERVER
from tests.unit.aio.rig import BACKENDS

SECONDS = 60.0
"""A process that has not ended by then hangs."""
LATE = 12
"""Concurrent cases with a late request, which only wait."""
PASSES = {
    *itertools.product(("EAGAIN", "short", "late"), ("read", "write")),
    *itertools.product(("bitflip", "stale", "misdirected"), ("read",)),
}
"""Faults that a retry or a second read repairs."""
SPOILS = set(itertools.product(("bitflip", "stale", "misdirected"), ("write",)))
"""Damage of written bytes, which only a read detects."""
FAILS = {
    ("EIO", "read"),
    ("EIO", "write"),
    ("ENOSPC", "write"),
    ("zero", "read"),
    ("zero", "write"),
}
FAULTS = [*sorted(PASSES), *sorted(SPOILS), *sorted(FAILS)]
TRAINS = ("forward", "backward", "step", "commit")
OTHERS = tuple(phase for phase in PHASES if phase not in TRAINS)
GENERATIONS = tuple(policy for policy in POLICIES if policy != "one")
OUTCOMES = ("right", "retried", "undone", "ended", "refused", "named", "not met", "finding")
PROMISES: Sequence[tuple[Any, ...]] = (
    # faults, phases, policies, ranks: allowed outcomes
    (PASSES, PHASES, POLICIES, (1, 2), ("right",)),
    (FAILS, TRAINS, GENERATIONS, (1,), ("right", "retried", "undone")),
    (FAILS, TRAINS, POLICIES, (1, 2), ("right", "retried", "undone", "ended")),
    (FAILS, OTHERS, POLICIES, (1, 2), ("right", "retried", "undone", "refused")),
    (SPOILS, TRAINS, POLICIES, (1, 2), ("right", "retried", "undone", "ended", "named")),
    (SPOILS, OTHERS, POLICIES, (1, 2), ("right", "retried", "undone", "refused", "named")),
)
"""The first matching row applies to a case. A case may also end as "not met", if its request was
not made; none may end as "finding".

    right    no process saw an error
    retried  an error reached the loop, which repeated the call or the step
    undone   the engine undid the step, and the loop repeated it
    ended    the training ended with an error of a promised type
    refused  set-up, save or restore ended so
    named    the next start named the elements that are damaged, and gave all others
"""

PROCESSES = threading.Lock()
"""Held while a process is started, and while an exit code is read: a start polls all processes, and
a code can be read only once."""


class Setting(NamedTuple):
    """Policy and machine of a training of the campaign."""

    policy: str
    backend: str
    ranks: int
    drives: int


class Outcome(NamedTuple):
    """Result of a case: one of OUTCOMES, and the observed errors."""

    how: str
    seen: tuple[str, ...]
    seconds: float


# -- processes -------------------------------------------------------------------------------------


def _lives(case: Case, place: Path, wanted: Any, bounds: tuple[int, int] | None) -> list[Any]:
    """Run one process per rank. Returns their reports; for a process that hangs or dies a message.
    """
    started = []
    for rank in range(case.ranks):
        here, there = FORKSERVER.Pipe(duplex=False)
        mine = None if wanted is None else wanted[case.ranks][rank]
        process = FORKSERVER.Process(
            target=serve, args=(there, case, rank, str(place), mine, bounds), daemon=True
        )
        with PROCESSES:
            process.start()
        there.close()
        started.append((process, here))
    # Time for a late request, and for one that waits for it.
    until = time.monotonic() + SECONDS + 3 * case.late_s
    try:
        return [_told(process, pipe, until) for process, pipe in started]
    finally:
        for process, pipe in started:
            with PROCESSES:
                process.kill()
            _ended(process, None)
            pipe.close()


def _told(process: Any, pipe: Any, until: float) -> Any:
    if not wait([pipe], max(0.0, until - time.monotonic())):
        return "hangs"
    try:
        found = pipe.recv()
    except EOFError:
        return f"the process ended with {_ended(process, 10)}"
    code = _ended(process, max(1.0, until - time.monotonic()))
    if code is None:
        return "hangs at its end"
    return found if code == 0 else f"the process ended with {code}"


def _ended(process: Any, seconds: float | None) -> int | None:
    """Wait for the end of a process. Returns its code, or None."""
    wait([process.sentinel], seconds)
    with PROCESSES:
        code: int | None = process.exitcode
    return code


def run_case(case: Case, wanted: Any) -> Outcome:
    """Run both starts of a case."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=os.environ.get("TMPDIR")) as name:
        place = Path(name)
        first = _lives(case, place, wanted, None)
        texts = [each for each in first if isinstance(each, str)]
        second: list[Any] = []
        if not texts:
            # A step that one rank knows as committed is committed.
            bounds = max(each.least for each in first), max(each.most for each in first)
            second = _lives(case, place, wanted, bounds)
            texts = [f"next start: {each}" for each in second if isinstance(each, str)]
        files = [] if texts else _left_in(case, place)
    if texts:
        return Outcome("finding", tuple(texts), time.monotonic() - begun)
    how, seen = judge(case, first, second)
    if files:
        how, seen = "finding", [*seen, f"files left: {files[:4]}"]
    return Outcome(how, tuple(seen), time.monotonic() - begun)


def _left_in(case: Case, place: Path) -> list[str]:
    """Return files on the drives that belong to no run."""
    return [str(path.relative_to(place)) for drive in case.drives_in(place)
            for path in drive.iterdir()
            if not (case.policy == "durable" and path.name == "infinity-run")]  # fmt: skip


def judge(case: Case, first: Sequence[Told], second: Sequence[Told]) -> tuple[str, list[str]]:
    """Return a case's outcome, and the errors that its processes saw."""
    seen = [each for told in (*first, *second) for each in told.seen]
    wrong = [each for told in (*first, *second) for each in told.wrong]
    how = _how(case, first, second, seen)
    if not all(told.finished for told in second):
        wrong.append("the next start did not end well")
    if not seen and not all(told.finished for told in first):
        wrong.append("not finished, and no error")
    if how not in (*promised(case), "not met"):
        wrong.append(f"{how}, and the promise is {' or '.join(promised(case))}")
    return ("finding", [*wrong, *seen]) if wrong else (how, seen)


def promised(case: Case) -> tuple[str, ...]:
    """Return the allowed outcomes of a case."""
    meets = ((case.kind, case.op), case.phase, case.policy, case.ranks)
    for *columns, outcomes in PROMISES:
        if all(value in column for value, column in zip(meets, columns, strict=True)):
            found: tuple[str, ...] = outcomes
            return found
    raise AssertionError(f"no promise for {case}")


def _how(case: Case, first: Sequence[Told], second: Sequence[Told], seen: Sequence[str]) -> str:
    if any(told.named for told in second):
        return "named"
    if not seen:
        return "right" if any(told.met for told in first) else "not met"
    if not all(told.finished for told in first):
        return "ended" if case.phase in TRAINS else "refused"
    return "undone" if any("StepUndone" in each for each in seen) else "retried"


# -- the matrix ------------------------------------------------------------------------------------


class Matrix:
    """All cases: for every setting the requests of each phase of a run without a fault."""

    def __init__(self, settings: Sequence[Setting], late_s: float, each: int | None) -> None:
        self.settings, self.late_s, self.each = settings, late_s, each
        self.wanted: dict[int, Any] = {}
        self.counts: dict[Setting, dict[str, tuple[int, int]]] = {}

    def look(self, pool: concurrent.futures.Executor) -> None:
        """Run the reference, and each setting without a fault. Raises: RuntimeError if one is
        wrong."""
        for ranks in sorted({setting.ranks for setting in self.settings}):
            with tempfile.TemporaryDirectory() as place:
                case = Case("", "read", 0, "", "one", "threads", ranks, 1)
                self.wanted[ranks] = _lives(case, Path(place), None, None)
        for setting, found in zip(self.settings, pool.map(self._count, self.settings), strict=True):
            self.counts[setting] = found

    def _count(self, setting: Setting) -> dict[str, tuple[int, int]]:
        with tempfile.TemporaryDirectory() as place:
            case = Case("", "read", 0, "", *setting)
            told = _lives(case, Path(place), self.wanted, None)
            for each in told:
                if isinstance(each, str) or each.wrong or each.seen or not each.finished:
                    raise RuntimeError(f"{setting} without a fault: {each}")
            counts: dict[str, tuple[int, int]] = told[-1].counts
            return counts

    def cases(self) -> Iterable[Case]:
        """Yield all cases, setting by setting."""
        for setting, phase in itertools.product(self.settings, PHASES):
            for kind, op in FAULTS:
                total = self.counts[setting].get(phase, (0, 0))[op == "write"]
                stride = 1 if self.each is None else max(1, total // self.each)
                for nth in range(0, total, stride):
                    yield Case(kind, op, nth, phase, *setting, self.late_s)


def name_of(case: Case) -> str:
    return (f"{case.kind} {case.op} {case.nth} {case.phase} {case.policy} {case.backend} "
            f"{case.ranks} {case.drives}")  # fmt: skip


def case_of(name: str, late_s: float) -> Case:
    kind, op, nth, phase, policy, backend, ranks, drives = name.split()
    return Case(kind, op, int(nth), phase, policy, backend, int(ranks), int(drives), late_s)


# -- the record ------------------------------------------------------------------------------------


class Record:
    """A file of JSON lines, one for each case that was run."""

    def __init__(self, path: Path | None, *, resume: bool) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._lock = threading.Lock()
        if path is not None and resume and path.exists():
            for line in path.read_text().splitlines():
                found = json.loads(line)
                self.outcomes[found["case"]] = Outcome(
                    found["how"], tuple(found["seen"]), found["seconds"]
                )
        self._file = path.open("a" if resume else "w") if path is not None else None

    def add(self, case: Case, outcome: Outcome) -> None:
        with self._lock:
            self.outcomes[name_of(case)] = outcome
            if self._file is not None:
                line = {"case": name_of(case), **outcome._asdict()}
                self._file.write(json.dumps(line) + "\n")
                self._file.flush()

    def findings(self) -> dict[str, Outcome]:
        return {name: each for name, each in self.outcomes.items() if each.how == "finding"}

    def table(self, column: int) -> str:
        """Counts of outcomes by one column of the names of cases (0 the kind and 1 the operation, 3
        the phase)."""
        counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for name, outcome in self.outcomes.items():
            words = name.split()
            key = " of a ".join(words[:2]) if column == 0 else words[column]
            counts[key][outcome.how] += 1
            counts["all"][outcome.how] += 1
        order = [*(" of a ".join(each) for each in FAULTS), *PHASES, *POLICIES, "all"]
        used = [how for how in OUTCOMES if counts["all"][how]]
        lines = ["| | injections | " + " | ".join(used) + " |", "|" + "---|" * (len(used) + 2)]
        for key in sorted(counts, key=lambda each: order.index(each) if each in order else 0):
            cells = " | ".join(str(counts[key][how]) for how in used)
            lines.append(f"| {key} | {counts[key].total()} | {cells} |")
        return "\n".join(lines)


def in_order(cases: Iterable[Case], seed: int) -> list[Case]:
    """Order cases at random, by their names: adding cases does not reorder the others."""
    return sorted(
        cases, key=lambda case: hashlib.sha256(f"{seed} {name_of(case)}".encode()).digest()
    )


def run_all(
    cases: Sequence[Case], wanted: Any, record: Record, processes: int, *, until: float | None
) -> None:
    """Run cases missing in the record, in order: `processes` at once, plus `LATE` that wait for a
    late request."""
    with concurrent.futures.ThreadPoolExecutor(processes + LATE) as pool:
        _run_all(cases, wanted, record, pool, processes, until=until)


def _run_all(
    cases: Sequence[Case],
    wanted: Any,
    record: Record,
    pool: concurrent.futures.Executor,
    processes: int,
    *,
    until: float | None,
) -> None:
    left = [case for case in cases if name_of(case) not in record.outcomes]
    begun, done = time.monotonic(), 0
    turns = collections.deque(left)
    running: dict[Any, Case] = {}
    while True:
        over = until is not None and time.monotonic() > until
        while turns and not over:
            late = turns[0].kind == "late"
            beside = sum((case.kind == "late") == late for case in running.values())
            if beside == (LATE if late else processes):
                break
            case = turns.popleft()
            running[pool.submit(run_case, case, wanted)] = case
        if not running:
            return
        ended, _ = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
        for each in ended:
            record.add(running.pop(each), each.result())
            done += 1
        if sys.stderr.isatty():
            rest = (time.monotonic() - begun) / done * (len(left) - done)
            rest = rest if until is None else min(rest, until - time.monotonic())
            print(f"\r{done}/{len(left)} cases, {len(record.findings())} findings, {rest:.0f} s "
                  "left ", end="", file=sys.stderr)  # fmt: skip


def show(record: Record) -> None:
    """Print the tables and the findings."""
    for column in (0, 3, 4):
        print(record.table(column), end="\n\n")
    findings = record.findings()
    print(f"{len(record.outcomes)} injections, {len(findings)} findings")
    for name, outcome in itertools.islice(findings.items(), 50):
        print(f"  --only '{name}': {outcome.seen[0][:300]}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slice", type=float, metavar="MINUTES", help="a sample for so long (all)")
    parser.add_argument("--cases", type=int, help="so many at most (all)")
    parser.add_argument("--seed", type=int, default=0, help="of their order (%(default)s)")
    parser.add_argument("--each", type=int, help="about so many requests of each phase (all)")
    parser.add_argument("--late", type=float, default=30.0, metavar="S", help="(%(default)s)")
    parser.add_argument("--policies", nargs="+", choices=tuple(POLICIES), default=list(POLICIES))
    parser.add_argument("--backends", nargs="+", choices=("io_uring", "threads"), default=BACKENDS)
    parser.add_argument("--ranks", type=int, nargs="+", choices=(1, 2), default=(1, 2))
    parser.add_argument("--drives", type=int, nargs="+", choices=(1, 4), default=(1, 4))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--record", type=Path, metavar="FILE", help="JSON lines")
    parser.add_argument("--resume", action="store_true", help="keep what the record has")
    parser.add_argument("--show", action="store_true", help="tables of the record; run nothing")
    parser.add_argument("--only", metavar="CASE", help="one case, and what it saw")
    options = parser.parse_args(arguments)
    if options.show:
        show(Record(options.record, resume=True))
        return 0
    begun = time.monotonic()
    axes = (options.policies, options.backends, options.ranks, options.drives)
    settings = [Setting(*each) for each in itertools.product(*axes)]
    with concurrent.futures.ThreadPoolExecutor(options.processes) as pool:
        matrix = Matrix(settings, options.late, options.each)
        if options.only is not None:
            case = case_of(options.only, options.late)
            matrix.settings = [Setting(case.policy, case.backend, case.ranks, case.drives)]
            matrix.look(pool)
            outcome = run_case(case, matrix.wanted)
            print(outcome.how, *outcome.seen, sep="\n  ")
            return int(outcome.how == "finding")
        matrix.look(pool)
    cases = in_order(matrix.cases(), options.seed)[: options.cases]
    record = Record(options.record, resume=options.resume)
    until = None if options.slice is None else begun + 60 * options.slice
    run_all(cases, matrix.wanted, record, options.processes, until=until)
    show(record)
    return 1 if record.findings() else 0


if __name__ == "__main__":
    sys.exit(main())
