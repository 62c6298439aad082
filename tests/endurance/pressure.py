"""A machine under pressure: the right numbers, and back to speed when it is over.

    python -m tests.endurance.pressure --seconds 60

    cpu      two other processes compute all the time
    drive    the drive goes at a tenth of its speed
    memory   a cgroup of what the process has before the model, and 105 % of the plan (needs root)

Prints seconds per step before, during and after. Losses and parameters are those of the plain loop,
bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.r1 import Workload
from infinity.aio import Seam
from infinity.aio._memory_limits import CgroupLimit, cgroup_limits
from tests.endurance.record import Record, record_in
from tests.endurance.training import SMALLER, Course, Offloaded, Plain, compare
from tests.harness import one_thread

MIB = 1 << 20
WARM = 3
MORE = 1.05
BUDGET = "500MiB"
LARGER = Workload(hidden=512, layers=16, vocab=4096, tokens=16)
"""A twentieth of its plan is more than a step's activations take."""
SPIN = "while True: pass"


@contextlib.contextmanager
def busy_processors(_ours: Offloaded) -> Iterator[None]:
    """Two processes that compute."""
    others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(2)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@contextlib.contextmanager
def slow_drive(ours: Offloaded) -> Iterator[None]:
    """A tenth of the speed at which the drive went until now."""
    ours.handle.flush()
    begun, before = time.monotonic(), ours.counters()["bytes"]
    for _ in range(3):
        ours.losses.append(ours.step())
    ours.handle.flush()
    speed = 0.1 * (ours.counters()["bytes"] - before) / (time.monotonic() - begun)
    ours.executor.set_seam(Seam(read_bytes_per_s=speed, write_bytes_per_s=speed))
    try:
        yield
    finally:
        ours.executor.set_seam(Seam())


PRESSURES = {"cpu": busy_processors, "drive": slow_drive}


def steps_for(ours: Offloaded, seconds: float) -> list[float]:
    """Train for so long, at least three steps. Returns the seconds of each."""
    until, took = time.monotonic() + seconds, []
    while len(took) < 3 or time.monotonic() < until:
        begun = time.monotonic()
        ours.losses.append(ours.step())
        ours.handle.flush()
        took.append(time.monotonic() - begun)
    return took


def check(plain: Plain, ours: Offloaded) -> None:
    """Losses and parameters are those of the plain loop."""
    wanted = [plain.loss(index) for index in range(len(ours.losses))]
    assert ours.losses == wanted, "losses differ"
    compare(plain, ours)


def under(
    name: str, place: Path, record: Record, *, seconds: float, workload: Workload
) -> dict[str, Any]:
    """Train before, under and after a pressure. Returns the seconds of a step in each phase."""
    course, phases = Course(workload), {}
    ours = Offloaded(course, place)
    for _ in range(WARM):
        ours.losses.append(ours.step())
    for phase, pressure, share in (
        ("before", contextlib.nullcontext(ours), 0.5),
        ("during", PRESSURES[name](ours), 1.0),
        ("after", contextlib.nullcontext(ours), 0.5),
    ):
        with pressure:
            took = steps_for(ours, share * seconds)
        phases[phase] = round(statistics.median(took), 4)
        record.add("steps", pressure=name, phase=phase, seconds=[round(s, 4) for s in took])
        record.show(f"{name}: {phase}, {phases[phase]:.3f} s a step")
    check(Plain(course), ours)
    found = {
        "pressure": name,
        **phases,
        "steps": ours.index,
        "during/before": round(phases["during"] / phases["before"], 2),
        "after/before": round(phases["after"] / phases["before"], 2),
    }
    ours.handle.close()
    record.add("right", **found)
    return found


# ---- a cgroup --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cgroup:
    """A memory cgroup of this process. limit: name of the file with its limit."""

    folder: Path
    limit: str

    def now(self) -> CgroupLimit:
        """Return what is used of it now."""
        return next(found for found in cgroup_limits() if found.path == str(self.folder))

    def times_full(self) -> int:
        """Return how often the kernel had to reclaim pages for the limit."""
        if self.limit == "memory.max":
            events = (self.folder / "memory.events").read_text().split()
            return int(events[events.index("max") + 1])
        return int((self.folder / "memory.failcnt").read_text())


def own_cgroup() -> Cgroup:
    """Make a memory cgroup below this process's. Raises: OSError where that cannot be had."""
    name = f"infinity-pressure-{uuid.uuid4().hex[:8]}"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, inner = line.split(":", 2)
        root = Path("/sys/fs/cgroup")
        if "memory" in controllers.split(","):
            made = Cgroup(root / "memory" / inner.lstrip("/") / name, "memory.limit_in_bytes")
        elif controllers == "" and (root / "memory.stat").exists():
            made = Cgroup(root / inner.lstrip("/") / name, "memory.max")
        else:
            continue
        made.folder.mkdir()
        return made
    raise OSError("there is no memory cgroup here")


def worker(cgroup: Cgroup, place: Path, steps: int, plan_bytes: int, workload: Workload) -> None:
    """Join the cgroup, and train; with a plan, in that and a twentieth more. Prints JSON."""
    (cgroup.folder / "cgroup.procs").write_text("0")
    with one_thread():
        warm = Offloaded(Course(Workload(hidden=64, layers=2, vocab=256)), place)
        for _ in range(2):
            warm.step()
        warm.handle.close()
        # Any limit at first: the engine ignores a group without one.
        (cgroup.folder / cgroup.limit).write_text(str(64 << 30))
        there = cgroup.now()
        before = there.used_bytes - there.reclaimable_bytes
        if plan_bytes:
            limit = before + int(MORE * plan_bytes)
            (cgroup.folder / cgroup.limit).write_text(str(limit))
        ours, took = Offloaded(Course(workload), place, ram=BUDGET), []
        for _ in range(steps):
            begun = time.monotonic()
            ours.losses.append(ours.step())
            took.append(time.monotonic() - begun)
        ours.handle.flush()
        stats, full = ours.handle.stats(), cgroup.times_full()
        check(Plain(Course(workload)), ours) if not plan_bytes else None
        held = stats.gathered_bytes_peak + stats.fresh_grad_bytes_peak + stats.heap_spare_bytes
        print(json.dumps({
            "plan": stats.ram_bytes + held, "ram": stats.ram_bytes, "before": before,
            "losses": ours.losses, "step_s": round(statistics.median(took[1:]), 3),
            "times_full": full,
        }))  # fmt: skip
        ours.handle.close()


def run_worker(cgroup: Cgroup, place: Path, steps: int, plan: int, hidden: int) -> dict[str, Any]:
    """`worker` in a process of its own. Raises: RuntimeError when it was killed, or failed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.endurance.pressure", "--worker", str(cgroup.folder),
         cgroup.limit, str(steps), str(plan), str(hidden), "--dir", str(place)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"it ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def in_a_cgroup(place: Path, record: Record, *, steps: int, hidden: int) -> dict[str, Any]:
    """Train without a limit and within 105 % of the plan. Raises: OSError without cgroups."""
    cgroup = own_cgroup()
    try:
        record.show("memory: without a limit")
        free = run_worker(cgroup, place, steps, 0, hidden)
        record.show(f"memory: a plan of {free['plan'] / MIB:.0f} MiB and a twentieth")
        tight = run_worker(cgroup, place, steps, free["plan"], hidden)
    finally:
        cgroup.folder.rmdir()
    assert tight["losses"] == free["losses"], "losses differ"
    found = {
        "pressure": "memory",
        "plan_mib": round(free["plan"] / MIB),
        "beside_mib": round(tight["before"] / MIB),
        "steps": steps,
        "free_step_s": free["step_s"],
        "tight_step_s": tight["step_s"],
        "tight/free": round(tight["step_s"] / free["step_s"], 2),
        "times_full": tight["times_full"],
    }
    record.add("right", **found)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = (*PRESSURES, "memory")
    parser.add_argument("--seconds", type=float, default=60.0, help="under pressure (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--hidden", type=int, default=SMALLER.hidden)
    parser.add_argument("--record", type=Path, default=Path("out/pressure.jsonl"))
    parser.add_argument("--dir", type=Path, help="directory on the drive (a temporary one)")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        folder, limit, steps, plan, hidden = options.worker
        larger = dataclasses.replace(LARGER, hidden=int(hidden))
        worker(Cgroup(Path(folder), limit), options.dir, int(steps), int(plan), larger)
        return 0
    smaller = dataclasses.replace(SMALLER, hidden=options.hidden)
    with (
        tempfile.TemporaryDirectory(prefix="infinity-pressure-", dir=options.dir) as directory,
        record_in(options.record) as record,
    ):
        place = Path(directory)
        for name in options.only:
            if name == "memory":
                try:
                    print(in_a_cgroup(place, record, steps=5, hidden=options.hidden))
                except OSError as error:
                    print(f"NOT TESTED: no memory cgroup can be made here: {error}")
                continue
            with one_thread():
                print(under(name, place, record, seconds=options.seconds, workload=smaller))
    return 0


if __name__ == "__main__":
    sys.exit(main())
