"""Speed of the executor itself: requests and bytes per second on null drives, which complete
requests at once without moving bytes, and the cost of its one mutex.

    python bench/executor.py --dir out                  # 1, 4, 8 drives; 256 KiB, 1 MiB, 4 MiB
    python bench/executor.py --dir out --drives 8 --blocks 1MiB --real
    python bench/executor.py --dir out --smoke          # tiny and fast: only shows that it runs

Every arm runs in two processes: without and (if there is a C compiler) with lock_meter.c preloaded,
which measures the mutex. Kernels "none": jobs pass through slots, drives and workers, but no bytes
are copied, updated or summed, so only the executor's cost remains. A null drive completes `--batch`
requests together; 1 is the worst case.

CPU time is that of all threads of the process. *lock us* is the time that a request holds the
mutex; holds of more than 0.1 ms, during which the thread lost its CPU, are omitted. *lock GB/s* is
the throughput at which the mutex would be held all the time: above the drives' bandwidth, it is no
bottleneck. `--real` adds the jobs with kernels on io_uring and the drive under --dir. Each arm
appends a JSON line to bench/results/executor.jsonl.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness

from infinity._src.base.sizes import format_size, parse_size
from infinity._src.engine.storage import default_update_threads

NEEDED_GB_PER_S = 60
"""Bytes per second of eight drives that read and write, which the mutex must sustain."""
KERNELS = ("none", "all")
TIMEOUT_S = 600
CHUNKS_PER_DRIVE = 64
REAL_CHUNKS = 128


def lock_meter(directory: Path) -> Path | None:
    """Compile the meter of the mutex. None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        harness.note("no C compiler: the mutex is not metered")
        return None
    library = directory / "lock_meter.so"
    source = harness.BENCH / "lock_meter.c"
    subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-o", library, source, "-ldl"],
        check=True,
    )
    return library


def run_arm(
    swap: Path, arm: dict[str, Any], seconds: float, preload: Path | None
) -> dict[str, Any]:
    """Run one arm in a separate process; returns its figures by kind."""
    script = str(harness.BENCH / "arm_executor.py")
    command = [sys.executable, script, f"--dir={swap}", f"--seconds={seconds}"]
    command += [
        f"--{name}={arm[name]}" for name in ("drives", "block", "batch", "workers", "chunks")
    ]
    command += ["--kernels"] * (arm["kernels"] == "all")
    changes = {"PYTHONPATH": str(harness.ROOT)}
    if preload is not None:
        changes["LD_PRELOAD"] = str(preload)
    output = harness.run_command(command, harness.environment(**changes), timeout_s=TIMEOUT_S)
    return harness.last_json_line(output)


def arms(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the arms to measure."""
    chunks = 8 if args.smoke else CHUNKS_PER_DRIVE
    for kernels in args.kernels:
        for drives in args.drives:
            for block in args.blocks:
                yield {
                    "kernels": kernels, "drives": drives, "block": block, "batch": args.batch,
                    "workers": args.workers, "chunks": chunks * drives,
                }  # fmt: skip
        if args.real and kernels == "all":
            yield {
                "kernels": kernels, "drives": 1, "block": args.blocks[0], "batch": 0,
                "workers": args.workers, "chunks": REAL_CHUNKS,
            }  # fmt: skip


def figures(plain: dict[str, float], metered: dict[str, float]) -> dict[str, float]:
    """Return an arm's rates, and those of the mutex if it was metered."""
    found = {
        "gb_per_s": plain["bytes"] / plain["s"] / 1e9,
        "requests_per_s": plain["requests"] / plain["s"],
        "cpu_us_per_request": plain["cpu_s"] / plain["requests"] * 1e6,
        "cpu_ms_per_gb": plain["cpu_s"] / plain["bytes"] * 1e12,
    }
    if "holds" not in metered:
        return found
    short = metered["holds"] - metered["long_holds"]
    # Estimate the omitted holds by the mean of the others.
    hold_s = metered["hold_ns"] / 1e9 * metered["holds"] / short
    return {
        **found,
        "holds_per_s": metered["holds"] / metered["s"],
        "holds_per_request": metered["holds"] / metered["requests"],
        "lock_us_per_request": hold_s / metered["requests"] * 1e6,
        "lock_share": hold_s / metered["s"],
        "contended_share": metered["contended"] / metered["holds"],
        "lock_gb_per_s": metered["bytes"] / hold_s / 1e9,
    }


def measure(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """Run all arms; each result is kept at once."""
    meter, records = lock_meter(scratch), []
    about = {"run": harness.now(), "commit": harness.commit(), "machine": harness.machine()}
    for arm in arms(args):
        plain = run_arm(scratch, arm, args.seconds, None)
        metered = run_arm(scratch, arm, args.seconds, meter) if meter is not None else {}
        for kind, raw in plain.items():
            more = metered.get(kind, {})
            record = {**arm, "kind": kind, **figures(raw, more), "plain": raw, "metered": more}
            records.append(record)
            harness.append_line(args.results, {**about, **record})
        harness.note(
            f"{arm['drives']} drives, {format_size(arm['block'])}, {arm['kernels']}: "
            + ", ".join(
                f"{kind} {raw['bytes'] / raw['s'] / 1e9:.1f} GB/s" for kind, raw in plain.items()
            )
        )
    return records


def show(records: list[dict[str, Any]], title: str) -> None:
    """Print a table, and whether the mutex sustains MUST_PASS."""
    names = (
        ("GB/s", "gb_per_s", 1.0, 1), ("k req/s", "requests_per_s", 1e-3, 1),
        ("CPU us/req", "cpu_us_per_request", 1.0, 2), ("CPU ms/GB", "cpu_ms_per_gb", 1.0, 2),
        ("k locks/s", "holds_per_s", 1e-3, 1), ("lock us/req", "lock_us_per_request", 1.0, 2),
        ("of time", "lock_share", 1.0, 3), ("contended", "contended_share", 1.0, 4),
        ("lock GB/s", "lock_gb_per_s", 1.0, 0),
    )  # fmt: skip
    rows = []
    for record in records:
        drive = f"{record['drives']} null" if record["batch"] else "io_uring"
        row = [record["kind"], record["kernels"], drive, format_size(record["block"])]
        for _, name, factor, digits in names:
            row.append(f"{record[name] * factor:.{digits}f}" if name in record else "")
        rows.append(row)
    columns = ["job", "kernels", "drives", "block", *(name for name, *_ in names)]
    harness.print_table(title, columns, rows)
    metered = [record for record in records if "lock_gb_per_s" in record and record["batch"]]
    if metered:
        least = min(metered, key=lambda record: record["lock_gb_per_s"])
        print(
            f"the mutex lets at least {least['lock_gb_per_s']:.0f} GB/s through ({least['kind']}, "
            f"{least['drives']} drives, {format_size(least['block'])}); {NEEDED_GB_PER_S} are "
            "wanted"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="directory for the files")
    parser.add_argument("--drives", type=harness.counts, default=[1, 4, 8], help="(1,4,8)")
    parser.add_argument("--blocks", default="256KiB,1MiB,4MiB", help="(%(default)s)")
    parser.add_argument("--kernels", type=harness.some_of(KERNELS), default=[*KERNELS])
    parser.add_argument(
        "--batch", type=int, default=1, help="requests that a null drive completes together"
    )
    parser.add_argument("--workers", type=int, help="(as the engine on this machine)")
    parser.add_argument("--seconds", type=float, default=1.0, help="per kind (%(default)s)")
    parser.add_argument("--real", action="store_true", help="also measure the drive of --dir")
    parser.add_argument("--smoke", action="store_true", help="tiny: only shows that it runs")
    parser.add_argument("--results", type=Path, default=harness.RESULTS / "executor.jsonl")
    args = parser.parse_args()
    args.blocks = [parse_size(text) for text in args.blocks.split(",")]
    args.workers = args.workers or default_update_threads(1, on_gpu=False)
    if args.smoke:
        args.drives, args.blocks, args.seconds = [2], [1 << 20], 0.01
    return args


def main() -> int:
    args = parse()
    harness.check_directory(args.dir, 1 << 30)
    with harness.scratch(args.dir) as scratch:
        records = measure(args, scratch)
    show(records, f"The executor on null drives, {args.workers} workers, batch {args.batch}")
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
