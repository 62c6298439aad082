"""Compares `python -m infinity.bench swap` with fio's io_uring engine and DeepSpeed's ds_io: one
drive, alternating runs.

    python bench/compare_io.py --dir /mnt/nvme0                        # all three, 15 rounds
    python bench/compare_io.py --dir /mnt/nvme0 --arms infinity,fio --rounds 25

Every round runs each arm once, in random order; ratios are of one round. See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import harness

from infinity._src.base.sizes import MIB, format_size, parse_size

KINDS = ("read", "write", "mixed")
ARMS = ("infinity", "fio", "deepspeed")
PARALLEL = (1, 2, 4, 8)
TUNE_PASSES = 3
TIMEOUT_S = 1800
# A phase of infinity's benchmark ends when the data ends: its deadline must be later.
PHASE_S = 600

Figures = dict[str, dict[str, float]]
"""For each kind: gbps (10^9 bytes per second) and cpu_s_per_gb (user and system)."""


def huge_page_environment() -> dict[str, str]:
    """Buffers of fio and DeepSpeed come from malloc; with 4 KiB pages they reach half of what the
    drive gives."""
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


# -- infinity --------------------------------------------------------------------------------------


def infinity_figures(report: Mapping[str, Any]) -> Figures:
    """Figures from the JSON of `infinity.bench swap`. Raises BenchError naming what is missing."""
    try:
        return {
            kind: {
                "gbps": float(report[f"{kind}_gbps"]),
                "cpu_s_per_gb": float(report["phases"][kind]["cpu_s_per_gb"]),
            }
            for kind in KINDS
        }
    except KeyError as missing:
        raise harness.BenchError(
            f"the JSON of infinity.bench swap has no {missing}; it has {sorted(report)}"
        ) from None


def run_infinity(
    directory: Path, size: int, options: Sequence[str]
) -> tuple[Figures, dict[str, Any]]:
    """One pass of each kind by the project's own benchmark, without checksums. Blocks until done.

    The benchmark counts CPU time from the start of a pass to its end (getrusage, all threads): no
    start-up is in it.
    """
    with harness.scratch(directory) as swap:
        report = swap / "report.json"
        command = [
            sys.executable,
            "-m",
            "infinity.bench",
            "swap",
            f"--dir={swap}",
            f"--size={size}",
            "--rounds=1",
            f"--seconds={PHASE_S}",
            "--checksums=off",
            "--limit=off",
            f"--json={report}",
            *options,
        ]
        harness.run_command(command, harness.environment(), timeout_s=TIMEOUT_S, cwd=harness.ROOT)
        found = json.loads(report.read_text())
    kept = (
        "backend",
        "backend_reason",
        "direct",
        "huge_page_share",
        "registered",
        "block_bytes",
        "depth",
        "size_bytes",
    )
    return infinity_figures(found), {name: found[name] for name in kept if name in found}


# -- fio -------------------------------------------------------------------------------------------


def fio_command(kind: str, file: Path, size: int, *, fixed: bool) -> list[str]:
    """The fio command for one pass over ``size`` bytes of ``file``: sequential, overwriting in
    place.

    For the least CPU time fio measures no latencies and does not change buffers between writes: the
    second alone saves 70 of 78 ms of CPU per GB written. Jobs are threads: a forked job would leave
    the process group that we kill.
    """
    pattern = {
        "read": ["--rw=read"],
        "write": ["--rw=write"],
        "mixed": ["--rw=rw", "--rwmixread=50"],
    }[kind]
    registered = ["--fixedbufs=1", "--registerfiles=1"] if fixed else []
    return [
        "fio",
        "--thread",
        f"--name={kind}",
        f"--filename={file}",
        f"--size={size}",
        *pattern,
        "--bs=1M",
        "--iodepth=32",
        "--ioengine=io_uring",
        "--direct=1",
        "--overwrite=1",
        "--invalidate=1",
        "--gtod_reduce=1",
        "--scramble_buffers=0",
        "--output-format=json",
        *registered,
    ]


def fio_figures(output: str) -> dict[str, float]:
    """Rate and CPU time of one pass from fio's JSON output. Raises BenchError on an I/O error.

    fio counts CPU time from the start of the job's I/O to its end, so its start-up is not in it.
    """
    # fio may print notes before its JSON.
    job = json.loads(output[output.index("{") :])["jobs"][0]
    if job["error"]:
        raise harness.BenchError(f"fio reports error {job['error']} for {job['jobname']}")
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    gbps = float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"]) / 1e9
    return {"gbps": gbps, "cpu_s_per_gb": cpu_s / moved * 1e9}


def run_fio(file: Path, size: int, *, fixed: bool) -> tuple[Figures, dict[str, Any]]:
    """One pass of each kind. Blocks until done."""
    env = harness.environment(**huge_page_environment())
    figures = {}
    for kind in KINDS:
        output = harness.run_command(
            fio_command(kind, file, size, fixed=fixed), env, timeout_s=TIMEOUT_S
        )
        figures[kind] = fio_figures(output)
    return figures, {"registered": fixed}


# -- DeepSpeed -------------------------------------------------------------------------------------


def run_dsio(
    file: Path, size: int, parallel: Mapping[str, Sequence[int]], passes: int
) -> dict[str, Any]:
    """The record of arm_dsio.py. Blocks until done."""
    import compare_deepspeed  # it needs transformers, which the other arms do not

    env = compare_deepspeed.deepspeed_environment() | huge_page_environment()
    options = [f"--{kind}={','.join(map(str, parallel[kind]))}" for kind in KINDS]
    command = [
        str(compare_deepspeed.VENV / "bin" / "python"), str(harness.BENCH / "arm_dsio.py"),
        f"--file={file}", f"--size={size}", f"--passes={passes}", *options,
    ]  # fmt: skip
    return harness.last_json_line(harness.run_command(command, env, timeout_s=TIMEOUT_S))


def tune_dsio(file: Path, size: int) -> tuple[dict[str, int], dict[str, Any]]:
    """(the best intra_op_parallelism of each kind, the record): the one with the best median of a
    few passes in turns."""
    record = run_dsio(file, size, dict.fromkeys(KINDS, PARALLEL), TUNE_PASSES)
    best = {}
    for kind in KINDS:
        medians = {
            int(number): statistics.median(sample["gbps"] for sample in samples)
            for number, samples in record["passes"][kind].items()
        }
        best[kind] = max(medians, key=lambda number: medians[number])
        harness.note(
            f"ds_io {kind}: " + ", ".join(f"{n} -> {rate:.2f} GB/s" for n, rate in medians.items())
        )
    return best, record


def dsio_figures(record: Mapping[str, Any]) -> Figures:
    """Figures of a run with one parallelism and one pass of each kind."""
    return {kind: next(iter(record["passes"][kind].values()))[0] for kind in KINDS}


# -- the comparison --------------------------------------------------------------------------------


class Comparison:
    """The arms, their files, and their results."""

    def __init__(self, args: argparse.Namespace, size: int, file: Path) -> None:
        self.args = args
        self.size = size
        self.file = file
        self.about = {
            "run": harness.now(),
            "size_bytes": size,
            "seed": args.seed,
            "machine": harness.machine(),
            "commit": harness.commit(),
            "infinity_args": args.infinity_args,
        }
        self.parallel: dict[str, int] = {}
        self.records: list[dict[str, Any]] = []

    def tune(self) -> None:
        """Find DeepSpeed's best settings."""
        harness.note("finding ds_io's best intra_op_parallelism ...")
        harness.lay_out(self.file, self.size)
        os.sync()
        self.parallel, record = tune_dsio(self.file, self.size)
        harness.append_line(
            self.args.results, {**self.about, "round": -1, "best": self.parallel, **record}
        )

    def run_arm(self, arm: str) -> tuple[Figures, dict[str, Any]]:
        """Create a file for each run, written once before; infinity's benchmark writes its own."""
        if arm == "infinity":
            os.sync()
            return run_infinity(self.args.dir, self.size, self.args.infinity_args.split())
        self.file.unlink(missing_ok=True)
        harness.lay_out(self.file, self.size)
        # Flush earlier writes, so that they are not written back during the measurement.
        os.sync()
        if arm == "fio":
            return run_fio(self.file, self.size, fixed=not self.args.no_fixed)
        record = run_dsio(
            self.file, self.size, {kind: [number] for kind, number in self.parallel.items()}, 1
        )
        return dsio_figures(record), {
            "parallel": self.parallel,
            "huge_page_share": record["huge_page_share"],
        }

    def rounds(self) -> None:
        """Run every arm once per round, in an order that chance decides; each result is kept at
        once."""
        order = random.Random(self.args.seed)
        for number in range(self.args.rounds):
            for arm in order.sample(self.args.arms, len(self.args.arms)):
                figures, settings = self.run_arm(arm)
                record = {"round": number, "arm": arm, "figures": figures, "settings": settings}
                self.records.append(record)
                harness.append_line(self.args.results, {**self.about, **record})
                rates = ", ".join(f"{kind} {figures[kind]['gbps']:.2f}" for kind in KINDS)
                harness.note(f"round {number + 1}/{self.args.rounds} {arm}: {rates} GB/s")


def summarise(records: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> dict[str, Any]:
    """Per kind: medians of each arm, and the ratios infinity / other of each round with their
    confidence intervals."""
    summary: dict[str, Any] = {}
    for kind in KINDS:
        by_arm = {
            arm: {
                record["round"]: record["figures"][kind]
                for record in records
                if record["arm"] == arm
            }
            for arm in arms
        }
        summary[kind] = {
            arm: {
                name: vars(harness.Summary.of([one[name] for one in found.values()]))
                for name in ("gbps", "cpu_s_per_gb")
            }
            for arm, found in by_arm.items()
            if found
        }
        ours = by_arm.get("infinity", {})
        for arm in arms:
            both = [number for number in ours if number in by_arm[arm]]
            if arm != "infinity" and both:
                ratios = [ours[number]["gbps"] / by_arm[arm][number]["gbps"] for number in both]
                summary[kind][f"ratio_{arm}"] = vars(harness.Interval.of(ratios))
    return summary


def show(summary: Mapping[str, Any], args: argparse.Namespace, size: int) -> None:
    """Print the summary for people."""
    rows = []
    for kind in KINDS:
        found = summary[kind]
        row = [kind]
        for arm in args.arms:
            cpu = harness.Summary(**found[arm]["cpu_s_per_gb"])
            row.append(f"{harness.Summary(**found[arm]['gbps']).text()}; {1e3 * cpu.median:.1f}")
        row += [
            harness.Interval(**found[name]).text()
            for name in sorted(found)
            if name.startswith("ratio_")
        ]
        rows.append(row)
    heads = [f"{arm} GB/s; CPU ms/GB" for arm in args.arms]
    heads += [
        f"infinity / {arm}"
        for arm in sorted(args.arms)
        if arm != "infinity" and "infinity" in args.arms
    ]
    title = (
        f"1 MiB blocks, depth 32, O_DIRECT, {format_size(size)} per pass, {args.rounds} rounds: "
        "median (min–max)"
    )
    harness.print_table(title, ["", *heads], rows)
    if len(heads) > len(args.arms):
        print(
            "ratios: the median over rounds [95 % confidence interval, bootstrap]; CPU is user + "
            "system, all threads"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir", type=Path, required=True, help="a directory on the drive to measure"
    )
    parser.add_argument("--size", default="1GiB", help="bytes per pass (%(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=15, help="every arm once per round (%(default)s)"
    )
    parser.add_argument(
        "--arms",
        type=harness.some_of(ARMS),
        default=list(ARMS),
        help=f"arms to run ({','.join(ARMS)})",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the order within rounds (%(default)s)"
    )
    parser.add_argument(
        "--no-fixed",
        action="store_true",
        help="do not let fio register its buffers (locked memory)",
    )
    parser.add_argument(
        "--infinity-args",
        default="",
        help="more arguments for infinity.bench swap, as --infinity-args=--depth=64",
    )
    parser.add_argument(
        "--pip-args", default="", help="more arguments for pip when DeepSpeed's environment is made"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument(
        "--results",
        type=Path,
        default=harness.RESULTS / "compare_io.jsonl",
        help="JSON lines file to append to (bench/results/compare_io.jsonl)",
    )
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: give at least 1")
    return args


def check_tools(args: argparse.Namespace) -> None:
    """Raise BenchError that says what to install; make DeepSpeed's environment when it is needed
    and missing."""
    if "fio" in args.arms and shutil.which("fio") is None:
        raise harness.BenchError(
            "fio is not installed: apt-get install fio (or leave it out: --arms infinity,deepspeed)"
        )
    if "deepspeed" in args.arms:
        import compare_deepspeed

        compare_deepspeed.check_build_tools()
        compare_deepspeed.prepare_deepspeed(args.pip_args.split())


def main() -> int:
    args = parse()
    # A multiple of the bytes that eight threads of ds_io read in whole blocks.
    size = parse_size(args.size) // (64 * MIB) * 64 * MIB
    if size < 64 * MIB:
        raise ValueError(
            f"--size {args.size}: a pass of less than 64 MiB measures nothing; give 1GiB or more"
        )
    harness.check_directory(args.dir, 3 * size)
    check_tools(args)
    with harness.scratch(args.dir) as folder:
        comparison = Comparison(args, size, folder / "file")
        if "deepspeed" in args.arms:
            comparison.tune()
        comparison.rounds()
    summary = summarise(comparison.records, args.arms)
    if args.json:
        print(
            json.dumps(
                {
                    **comparison.about,
                    "rounds": args.rounds,
                    "parallel": comparison.parallel,
                    **summary,
                }
            )
        )
    else:
        show(summary, args, size)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
