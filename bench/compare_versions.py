"""Compares R1 with this tree and with another tree of the project: alternating runs, ratios of each
pair.

The other tree is a checkout with its extension built (`make native` there); both run in this Python
environment. The machine must be idle otherwise: the load before each arm is recorded.

Two more tables have Python's CPU time per unit (arm_unit_time.py), and the time of set-up beside
its limits (arm_set_up.py), in as many alternating pairs.

    python bench/compare_versions.py --dir /mnt/nvme0 --old ../infinity-before --rounds 6
    python bench/compare_versions.py --dir /mnt/nvme0 --old ../infinity-before --only set-up \
        --hidden 2048

Where torch multiplies bf16 slowly (0.6 GFLOP/s for a gradient of the input on a CPU without
AVX-512), `--tokens 2` keeps the engine's share of a step large.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import r1

CONFIGURATIONS: dict[str, tuple[int, tuple[str, ...]]] = {
    "NVMe, min": (1, ("--ram=min",)),
    "NVMe, 750MB": (1, ("--ram=750MB",)),
    "all in RAM": (1, ("--tier=cpu", "--ram=8GB")),
    "2 ranks, NVMe, min": (2, ("--ram=min",)),
}
"""By name: ranks, and options of arm_infinity.py."""
UNIT_TIME = "Python per unit"
SET_UP = "set-up"
CASES = {
    "cached": "page cache",
    "dropped": "drive",
    "module": "module in RAM",
    "mapping": "mapping in RAM",
    "function": "function",
}
"""Places of the values at set-up."""


def tree_commit(tree: Path) -> str:
    """Return the commit of a checkout, empty outside of one."""
    found = subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def run_arm(
    tree: Path, ranks: int, options: Sequence[str], directory: Path, limit_s: float
) -> dict[str, Any]:
    """Train R1 once with one tree. Raises: BenchError."""
    arm = "arm_infinity.py" if ranks == 1 else "ranks_arm.py"
    python = [sys.executable] if ranks == 1 else [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
    ]  # fmt: skip
    # Each rank has its share of the cores; spinning threads must not occupy another rank's.
    threads = max((os.cpu_count() or 1) // ranks, 1)
    env = harness.environment(PYTHONPATH=str(tree), OMP_NUM_THREADS=str(threads))
    os.sync()  # so that the previous arm's dirty pages are not written during this one
    with harness.scratch(directory) as place:
        command = [*python, str(tree / "bench" / arm), f"--dir={place}", *options]
        return harness.last_json_line(
            harness.run_command(command, env, timeout_s=limit_s, cwd=tree)
        )


def run_unit_time(tree: Path, limit_s: float) -> dict[str, Any]:
    """Measure Python's time per unit once with one tree. Raises: BenchError."""
    # This tree's arm for both: it uses the public interface alone.
    command = [sys.executable, str(harness.ROOT / "bench" / "arm_unit_time.py")]
    env = harness.environment(PYTHONPATH=str(tree), OMP_NUM_THREADS="1")
    return harness.last_json_line(harness.run_command(command, env, timeout_s=limit_s, cwd=tree))


def alternate(rounds: int, what: str) -> Iterator[tuple[str, float]]:
    """Yield each side ("old", "new") with the machine's load. Rounds alternate which goes first."""
    for number in range(rounds):
        for side in ("old", "new") if number % 2 == 0 else ("new", "old"):
            load = os.getloadavg()[0]
            harness.note(f"{what}, round {number + 1}, {side}; load {load:.2f}")
            yield side, load


def compare_unit_time(
    args: argparse.Namespace, trees: dict[str, Path], about: dict[str, Any]
) -> None:
    """Print the table of Python's time per unit."""
    found: dict[str, list[dict[str, Any]]] = {"old": [], "new": []}
    for side, load in alternate(args.rounds, UNIT_TIME):
        record = run_unit_time(trees[side], args.limit_s)
        found[side].append(record)
        line = {**about, "configuration": UNIT_TIME, "side": side, "load": load, "us": record}
        harness.append_line(args.results, line)
    rows = []
    for units in found["new"][0]:
        for what in ("forward", "step"):
            old, new = ([record[units][what] for record in found[side]] for side in trees)
            ratio = f"{statistics.median(old) / statistics.median(new):.3f}"
            rows.append([f"{what}, {units} units", harness.Summary.of(old).text(0),
                         harness.Summary.of(new).text(0), ratio])  # fmt: skip
    harness.print_table(
        "Python's time per unit, microseconds", ["pass", "old", "new", "ratio of medians"], rows
    )


def compare_set_up(args: argparse.Namespace, trees: dict[str, Path], about: dict[str, Any]) -> None:
    """Print the table of set-up."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with harness.scratch(args.dir) as folder:
        file = folder / "model.safetensors"

        def run(arm: str, case: str = "cached", tree: Path = harness.ROOT) -> str:
            # This tree's arm for both: it uses the public interface alone.
            options = [f"--arm={arm}", f"--case={case}", *r1.from_arguments(args).arguments()]
            script = str(harness.ROOT / "bench" / "arm_set_up.py")
            with harness.scratch(args.dir) as place:
                command = [sys.executable, script, f"--dir={place}", f"--file={file}", *options]
                env = harness.environment(PYTHONPATH=str(tree))
                return harness.run_command(command, env, timeout_s=args.limit_s, cwd=tree)

        run("write")
        limits = [("limit", "cached"), ("load_file", "cached"), ("load_file", "dropped")]
        for number in range(args.rounds):
            sides = ("old", "new") if number % 2 == 0 else ("new", "old")
            for side, case in [*((side, case) for case in CASES for side in sides), *limits]:
                arm, tree = ("offload", trees[side]) if side in trees else (side, harness.ROOT)
                load = os.getloadavg()[0]
                record = harness.last_json_line(run(arm, case, tree))
                found.setdefault((side, case), []).append(record)
                harness.note(f"{SET_UP}, round {number + 1}, {side}, {case}: {record['s']:.2f} s")
                head = {"configuration": SET_UP, "side": side, "case": case, "load": load}
                harness.append_line(args.results, {**about, **head, **record})
    rows = []
    for case, name in CASES.items():
        old, new = (found[side, case] for side in trees)
        pairs = [before["s"] / after["s"] for before, after in zip(old, new, strict=True)]
        both = [f"{statistics.median(record[field] for record in old) / scale:.{digits}f} -> "
                f"{statistics.median(record[field] for record in new) / scale:.{digits}f}"
                for field, scale, digits in (("cpu_s", 1, 2), ("faults", 1, 0),
                                             ("peak_rss_bytes", 1e6, 0))]  # fmt: skip
        rows.append([name, *(harness.Summary.of([record["s"] for record in side]).text()
                             for side in (old, new)),
                     harness.Summary.of(pairs).text(), *both])  # fmt: skip
    for arm, case in limits:
        seconds = harness.Summary.of([record["s"] for record in found[arm, case]]).text()
        rows.append([f"{arm}, {CASES[case]}", "", seconds, "", "", "", ""])
    size = found["limit", "cached"][0]["written_bytes"] / 1e9
    columns = ["values from", "old s", "new s", "old/new, pairs", "CPU s", "page faults",
               "more RSS, MB"]  # fmt: skip
    harness.print_table(f"set-up, {size:.2f} GB of parameters", columns, rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="swap directory")
    parser.add_argument(
        "--old", type=Path, required=True, help="the other tree, with its extension built"
    )
    parser.add_argument("--rounds", type=int, default=6, help="alternating pairs (%(default)s)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=(*CONFIGURATIONS, UNIT_TIME, SET_UP),
        default=(*CONFIGURATIONS, UNIT_TIME, SET_UP),
    )
    parser.add_argument(
        "--limit-s", type=float, default=900.0, help="time limit of an arm (%(default)s)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=harness.RESULTS / "compare_versions.jsonl",
        help="JSON lines file to append to (bench/results/compare_versions.jsonl)",
    )
    r1.add_arguments(parser)
    args = parser.parse_args()
    args.old = args.old.resolve()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: give at least 1")
    if not list((args.old / "infinity").glob("_native*.so")):
        parser.error(f"--old {args.old}: build its extension first (make native)")
    return args


def compare_steps(args: argparse.Namespace, trees: dict[str, Path], about: dict[str, Any]) -> None:
    """Print the table of R1's time per step."""
    options = r1.from_arguments(args).arguments()
    rows = []
    for name in [name for name in CONFIGURATIONS if name in args.only]:
        ranks, given = CONFIGURATIONS[name]
        found: dict[str, list[dict[str, Any]]] = {"old": [], "new": []}
        for side, load in alternate(args.rounds, name):
            record = run_arm(trees[side], ranks, (*given, *options), args.dir, args.limit_s)
            found[side].append(record)
            head = {"configuration": name, "ranks": ranks, "side": side, "load": load}
            harness.append_line(args.results, {**about, **head, **record})
        old, new = ([harness.steady_s(record) for record in found[side]] for side in trees)
        pairs = harness.Summary.of([before / after for before, after in zip(old, new, strict=True)])
        losses = {tuple(record["losses"]) for side in found.values() for record in side}
        rows.append([name, harness.Summary.of(old).text(), harness.Summary.of(new).text(),
                     f"{statistics.median(old) / statistics.median(new):.3f}", pairs.text(3),
                     "equal" if len(losses) == 1 else "DIFFER"])  # fmt: skip
    columns = ["configuration", "old s/step", "new s/step", "ratio of medians", "old/new, pairs",
               "losses"]  # fmt: skip
    if rows:
        harness.print_table(f"{args.rounds} alternating pairs", columns, rows)


def main() -> int:
    args = parse()
    trees = {"old": args.old, "new": harness.ROOT}
    about = {"run": harness.now(), "machine": harness.machine(),
             "commits": {name: tree_commit(tree) for name, tree in trees.items()}}  # fmt: skip
    compare_steps(args, trees, about)
    if UNIT_TIME in args.only:
        compare_unit_time(args, trees, about)
    if SET_UP in args.only:
        compare_set_up(args, trees, about)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
