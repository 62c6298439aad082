"""Bandwidth that ranks and drives add up to: the units of a model gathered once around, forward
only, nothing resident.

    python bench/ranks_bandwidth.py --dir /mnt/nvme0                                   # 1, 2, 4
    ranks x 1, 2, 4 drives python bench/ranks_bandwidth.py --dir /mnt/nvme0 --ranks 1,2 --drives 1,2
    --rounds 5 --results bench/results/ranks_bandwidth.jsonl

Two arms, alternating: "sliced", the engine, where each rank reads its part of every unit and all
gather; and "owner", where each unit lies whole with one rank, which reads it and broadcasts it,
reading its next one meanwhile (--ahead 0: it does not). Drives are directories on one real drive,
each throttled to --drive-mbps by the executor's seam; ranks that share one get equal parts of it.
So aggregate bandwidth grows with the drives that are reached until the real drive, or the copies
between ranks, saturate. Drives are dealt out to ranks: with more ranks than drives some share one,
with fewer a rank has several.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness

ARMS = ("sliced", "owner")
TIMEOUT_S = 900

Record = dict[str, Any]


def run_arm(args: argparse.Namespace, arm: str, ranks: int, drives: int) -> Record:
    """One arm on so many ranks and drives. gbps: bytes read by all ranks over the time of a pass,
    the median pass."""
    with harness.scratch(args.dir) as swap:
        options = [
            f"--{name}={getattr(args, name)}" for name in ("units", "hidden", "passes", "ahead")
        ]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            str(harness.BENCH / "arm_gather.py"),
            f"--arm={arm}",
            f"--dir={swap}",
            f"--drives={drives}",
            f"--drive-mbps={args.drive_mbps}",
            *options,
        ]
        env = harness.environment(PYTHONPATH=str(harness.ROOT), OMP_NUM_THREADS="1")
        record = harness.last_json_line(harness.run_command(command, env, timeout_s=TIMEOUT_S))
    rates = [
        size / seconds / 1e9
        for size, seconds in zip(record["read_bytes"], record["pass_s"], strict=True)
    ]
    return {**record, "gbps": harness.Summary.of(rates).median}


def measure(args: argparse.Namespace) -> list[Record]:
    """Every case and arm once per round, in an order that chance decides; each result is kept at
    once."""
    order = random.Random(args.seed)
    about = {
        "run": harness.now(),
        "units": args.units,
        "hidden": args.hidden,
        "drive_mbps": args.drive_mbps,
        "ahead": args.ahead,
        "machine": harness.machine(),
        "commit": harness.commit(),
    }
    cases = [(arm, ranks, drives) for ranks in args.ranks for drives in args.drives for arm in ARMS]
    records = []
    for number in range(args.rounds):
        for arm, ranks, drives in order.sample(cases, len(cases)):
            os.sync()
            record = {"round": number, **run_arm(args, arm, ranks, drives)}
            records.append(record)
            if args.results is not None:
                harness.append_line(args.results, {**about, **record})
            harness.note(
                f"{number + 1}/{args.rounds} {arm}, {ranks} ranks, {drives} drives: "
                f"{record['gbps']:.3f} GB/s"
            )
    return records


def rows_of(records: Sequence[Record], drive_mbps: float) -> list[list[str]]:
    """A row for each case: medians with extremes, and pairs of one round as ratios."""
    rows = []
    for ranks, drives in sorted({(record["ranks"], record["drives"]) for record in records}):
        mine = [
            record for record in records if (record["ranks"], record["drives"]) == (ranks, drives)
        ]
        by_arm = {arm: {r["round"]: r["gbps"] for r in mine if r["arm"] == arm} for arm in ARMS}
        given = drive_mbps * drives / 1e3
        found = {arm: harness.Summary.of(list(values.values())) for arm, values in by_arm.items()}
        ratios = [by_arm["sliced"][number] / by_arm["owner"][number] for number in by_arm["owner"]]
        rows.append([
            str(ranks), str(drives), f"{given:.2f}", *(found[arm].text(3) for arm in ARMS),
            f"{found['sliced'].median / given:.0%}", harness.Interval.of(ratios).text(2),
        ])  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="directory on the real drive")
    parser.add_argument(
        "--ranks", type=harness.counts, default=[1, 2, 4], help="numbers of ranks (1,2,4)"
    )
    parser.add_argument(
        "--drives",
        type=harness.counts,
        default=[1, 2, 4],
        help="numbers of throttled drives (1,2,4)",
    )
    parser.add_argument(
        "--drive-mbps",
        type=float,
        default=200.0,
        help="what each drive reads, in MB/s (%(default)s)",
    )
    parser.add_argument("--units", type=int, default=24, help="units of the model (%(default)s)")
    parser.add_argument(
        "--hidden",
        type=int,
        default=2048,
        help="each is hidden x hidden bf16; a power of two (%(default)s)",
    )
    parser.add_argument("--passes", type=int, default=3, help="measured passes (%(default)s)")
    parser.add_argument(
        "--ahead",
        type=int,
        default=1,
        help="owner: units that a rank reads ahead of their turn (%(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="every case once per round (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the order within rounds (%(default)s)"
    )
    parser.add_argument("--results", type=Path, help="JSON lines file to append to")
    args = parser.parse_args()
    if args.hidden < 1 or args.hidden & args.hidden - 1:
        parser.error(f"--hidden={args.hidden}: give a power of two")
    size = 2 * args.units * args.hidden**2
    harness.check_directory(args.dir, 4 * size)
    records = measure(args)
    title = (
        f"{args.units} units of {2 * args.hidden**2 / 1e6:.1f} MB, drives of {args.drive_mbps:.0f} "
        "MB/s; GB/s read by all ranks"
    )
    heads = [
        "ranks",
        "drives",
        "drives give",
        "sliced",
        "owner",
        "sliced of given",
        "sliced / owner",
    ]
    harness.print_table(title, heads, rows_of(records, args.drive_mbps))
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
