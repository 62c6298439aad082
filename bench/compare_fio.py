"""`python -m infinity.bench` beside fio's io_uring engine: the same drive, alternating runs.

    python bench/compare_fio.py --dir /mnt/nvme0 --size 4GiB

fio writes and reads the same 1 MiB blocks at depth 32 with O_DIRECT and huge pages. See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness

from infinity.sizes import MIB, format_size, parse_size

KINDS = ("read", "write", "mixed")
ARMS = ("infinity", "fio")
TIMEOUT_S = 1800
# infinity.bench reports medians of three rounds; one pass of fio against that would make fio look unsteady.
FIO_PASSES = 3


def fio_environment() -> dict[str, str]:
    """fio's buffers come from malloc; without huge pages it reaches half of what the drive gives."""
    return harness.environment(GLIBC_TUNABLES="glibc.malloc.hugetlb=1")


def fio_command(kind: str, file: Path, size: int, *, fixed: bool) -> list[str]:
    """The fio command for one pass over ``size`` bytes of ``file``: sequential, overwriting in place."""
    pattern = {"read": ["--rw=read"], "write": ["--rw=write"], "mixed": ["--rw=rw", "--rwmixread=50"]}[kind]
    registered = ["--fixedbufs=1", "--registerfiles=1"] if fixed else []
    return [
        "fio", f"--name={kind}", f"--filename={file}", f"--size={size}", *pattern, "--bs=1M", "--iodepth=32",
        "--ioengine=io_uring", "--direct=1", "--overwrite=1", "--invalidate=1", "--output-format=json", *registered,
    ]  # fmt: skip


def fio_gbps(output: str) -> float:
    """GB/s (10^9 bytes, reads and writes together) from fio's JSON output. Raises BenchError on an I/O error."""
    # fio may print notes before its JSON.
    job = json.loads(output[output.index("{") :])["jobs"][0]
    if job["error"]:
        raise harness.BenchError(f"fio reports error {job['error']} for {job['jobname']}")
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"]) / 1e9


def run_fio(file: Path, size: int, *, fixed: bool) -> dict[str, float]:
    """GB/s of each kind: the median of ``FIO_PASSES`` passes, in turns. Blocks until done."""
    env = fio_environment()
    passes: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(FIO_PASSES):
        for kind in KINDS:
            output = harness.run_command(fio_command(kind, file, size, fixed=fixed), env, timeout_s=TIMEOUT_S)
            passes[kind].append(fio_gbps(output))
    return {kind: statistics.median(rates) for kind, rates in passes.items()}


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every number in a JSON value, with the keys that lead to it; a list of numbers counts as its median."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, str(key)))
    elif isinstance(value, list):
        numbers = [item for item in value if isinstance(item, (int, float)) and not isinstance(item, bool)]
        if numbers and len(numbers) == len(value):
            yield path, float(statistics.median(numbers))
        else:
            for number, item in enumerate(value):
                yield from leaves(item, (*path, str(number)))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, float(value)


def infinity_gbps(result: Any) -> dict[str, float]:
    """GB/s of each kind from the JSON of `infinity.bench swap`.

    The outermost key ending in "_gbps" that names the kind is taken, ``<kind>_gbps`` before longer names; a mixed
    rate given as two directions is their sum. Raises BenchError naming the keys there are.
    """
    rates = [(path, number) for path, number in leaves(result) if path and path[-1].endswith("gbps")]
    found: dict[str, float] = {}
    for kind in KINDS:
        named = [
            (path, number)
            for path, number in rates
            if re.search(rf"(^|_){kind}(_|$)", path[-1]) and (kind == "mixed" or "mixed" not in path[-1])
        ]
        exact = [(path, number) for path, number in named if path[-1] == f"{kind}_gbps"]
        candidates = exact or named
        if not candidates:
            keys = sorted({".".join(path) for path, _ in leaves(result)})
            raise harness.BenchError(
                f"infinity.bench reports no {kind} rate in GB/s; it has: {', '.join(keys)}"
            )
        outermost = min(len(path) for path, _ in candidates)
        top = [(path[-1], number) for path, number in candidates if len(path) == outermost]
        directions = [number for name, number in top if "read" in name or "write" in name]
        found[kind] = sum(directions) if kind == "mixed" and len(directions) == 2 else top[0][1]
    return found


def run_infinity(directory: Path, size: int) -> dict[str, float]:
    """GB/s of each kind from one run of the project's own benchmark. Blocks until done."""
    with harness.scratch(directory) as swap:
        report = swap / "report.json"
        command = [
            sys.executable,
            "-m",
            "infinity.bench",
            "swap",
            f"--dir={swap}",
            f"--size={size}",
            f"--json={report}",
        ]
        harness.run_command(command, harness.environment(), timeout_s=TIMEOUT_S, cwd=harness.ROOT)
        return infinity_gbps(json.loads(report.read_text()))


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians per arm and kind, and the ratio infinity / fio of each pair."""
    rates = {arm: [r["gbps"] for r in records if r["arm"] == arm] for arm in ARMS}
    summary: dict[str, Any] = {}
    for kind in KINDS:
        summary[kind] = {
            arm: vars(harness.Summary.of([one[kind] for one in mine])) for arm, mine in rates.items() if mine
        }
        pairs = list(zip(rates["infinity"], rates["fio"], strict=False))
        if pairs:
            summary[kind]["ratio"] = vars(harness.Summary.of([ours[kind] / fio[kind] for ours, fio in pairs]))
    return summary


def show(summary: dict[str, Any], size: int) -> None:
    """Print the summary for people."""
    names = [name for name in (*ARMS, "ratio") if name in summary["read"]]
    heads = {"infinity": "infinity GB/s", "fio": "fio GB/s", "ratio": "infinity / fio"}
    rows = [[kind, *(harness.Summary(**summary[kind][name]).text() for name in names)] for kind in KINDS]
    title = f"1 MiB blocks, depth 32, O_DIRECT, {format_size(size)} per pass: median (min–max)"
    harness.print_table(title, ["", *(heads[name] for name in names)], rows)
    count = summary["read"][names[0]]["count"]
    if count > 1:
        covered = harness.Summary(0.0, 0.0, 0.0, count).coverage
        print(f"{count} rounds: min–max encloses the true median with probability {covered:.0%}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="a directory on the drive to measure")
    parser.add_argument("--size", default="2GiB", help="bytes per pass (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="alternating pairs (%(default)s)")
    parser.add_argument("--only", choices=ARMS, help="run one arm only")
    parser.add_argument(
        "--no-fixed", action="store_true", help="do not let fio register its buffers (locked memory)"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument("--results", type=Path, default=harness.RESULTS / "compare_fio.jsonl",
                        help="JSON lines file to append to (bench/results/compare_fio.jsonl)")  # fmt: skip
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: give at least 1")
    return args


def main() -> int:
    args = parse()
    size = parse_size(args.size) // MIB * MIB
    if size < 64 * MIB:
        raise ValueError(
            f"--size {args.size}: a pass of less than 64 MiB measures nothing; give 1GiB or more"
        )
    arms = (args.only,) if args.only else ARMS
    if "fio" in arms and shutil.which("fio") is None:
        raise harness.BenchError("fio is not installed: apt-get install fio")
    harness.check_directory(args.dir, 3 * size)
    about = {"run": harness.now(), "size_bytes": size, "machine": harness.machine()}
    records: list[dict[str, Any]] = []
    with harness.scratch(args.dir) as folder:
        file = folder / "fio"
        if "fio" in arms:
            # The first pass over a new file pays for its blocks; swap files are reused, so it is not measured.
            layout = fio_command("write", file, size, fixed=False)
            harness.run_command(layout, fio_environment(), timeout_s=TIMEOUT_S)
        for number in range(args.rounds):
            for arm in arms:
                fixed = not args.no_fixed
                gbps = run_fio(file, size, fixed=fixed) if arm == "fio" else run_infinity(args.dir, size)
                record = {"round": number, "arm": arm, "gbps": {kind: round(gbps[kind], 4) for kind in KINDS}}
                records.append(record)
                harness.append_line(args.results, {**about, **record})
                rates = ", ".join(f"{kind} {gbps[kind]:.2f}" for kind in KINDS)
                harness.note(f"round {number + 1}/{args.rounds} {arm}: {rates} GB/s")
    summary = summarise(records)
    if args.json:
        print(json.dumps({**about, **summary}))
    else:
        show(summary, size)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
