"""Compares R1 on one and two ranks with DeepSpeed: stage 3 with everything on NVMe, and stage 2
with CPU offload.

    python bench/ranks.py --dir /mnt/nvme0                                  # both parts, 1 and 2
    ranks, 3 rounds python bench/ranks.py --dir /mnt/nvme0 --parts cpu --ranks 2 --rounds 5
    python bench/ranks.py --dir /mnt/nvme0 --rounds 1 --warmup 1 --steps 2  # a trial

A round runs every part and number of ranks, infinity and DeepSpeed right after each other. The
batch per rank is R1's on both (1 x 128 tokens, different on each rank), so the global batch has one
row for each rank. The ranks share the machine's cores evenly: on two cores two threads for one
rank, one each for two. See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compare_deepspeed
import harness
import r1

# Stage 3: everything on NVMe at the smallest budget. Stage 2: parameters on every rank's device,
# the rest in RAM as it likes.
PARTS = {
    "nvme": {"infinity": ["--zero=3", "--tier=nvme", "--ram=min"], "deepspeed": ["--zero=3"]},
    "cpu": {"infinity": ["--zero=2", "--tier=device", "--ram=default"], "deepspeed": ["--zero=2"]},
}
SCRIPTS = {"infinity": "ranks_arm.py", "deepspeed": "ranks_arm_deepspeed.py"}


def run_arm(
    engine: str, part: str, ranks: int, workload: r1.Workload, args: argparse.Namespace
) -> dict[str, Any]:
    """One engine on some ranks, in fresh processes and a fresh swap directory; its record. Blocks
    until it ends."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    if engine == "deepspeed":
        python, env = (
            str(compare_deepspeed.VENV / "bin" / "python"),
            compare_deepspeed.deepspeed_environment(),
        )
    else:
        python, env = sys.executable, harness.environment(PYTHONPATH=str(harness.ROOT))
    options = [*PARTS[part][engine], *(args.infinity if engine == "infinity" else ())]
    os.sync()  # so that the previous arm's dirty pages are not written during this one
    with harness.scratch(args.dir) as swap:
        launch = [
            python,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        command = [
            *launch,
            str(harness.BENCH / SCRIPTS[engine]),
            f"--dir={swap}",
            *workload.arguments(),
            *options,
        ]
        output = harness.run_command(
            command, {**env, "OMP_NUM_THREADS": str(threads)}, timeout_s=args.limit_s
        )
    return {**harness.last_json_line(output), "part": part, "threads": threads, "options": options}


def summarise(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per part, number of ranks and engine: medians; in DeepSpeed's, the ratios of each
    round to infinity's."""
    rows = []
    keys = dict.fromkeys((record["part"], record["ranks"], record["engine"]) for record in records)
    for part, ranks, engine in keys:
        mine = {
            r["round"]: r
            for r in records
            if (r["part"], r["ranks"], r["engine"]) == (part, ranks, engine)
        }
        ours = {
            r["round"]: r
            for r in records
            if (r["part"], r["ranks"], r["engine"]) == (part, ranks, "infinity")
        }
        found = list(mine.values())
        ratios = [harness.steady_s(mine[n]) / harness.steady_s(ours[n]) for n in mine if n in ours]
        rows.append(
            {
                "part": part,
                "ranks": ranks,
                "engine": engine,
                "s_per_step": vars(harness.Summary.of([harness.steady_s(r) for r in found])),
                "s_per_step_flushed": vars(harness.Summary.of([r["s_per_step"] for r in found])),
                "ratio": vars(harness.Summary.of(ratios))
                if engine != "infinity" and ratios
                else None,
                "cpu_s_per_step": harness.Summary.of([r["cpu_s_per_step"] for r in found]).median,
                "read_bytes_per_param": harness.Summary.of(
                    [r["read_bytes_per_param"] for r in found]
                ).median,
                "write_bytes_per_param": harness.Summary.of(
                    [r["write_bytes_per_param"] for r in found]
                ).median,
                "peak_rss_bytes": max(r["peak_rss_bytes"] for r in found),
                "peak_rss_rank_max": max(r["peak_rss_rank_max"] for r in found),
                "first_loss": found[-1]["losses"][0],
                "last_loss": found[-1]["losses"][-1],
            }
        )
    return rows


def show(workload: r1.Workload, rows: Sequence[dict[str, Any]]) -> None:
    """Print the summary for people."""
    columns = [
        "part",
        "ranks",
        "engine",
        "s/step (min–max)",
        "DeepSpeed / infinity",
        "with flush",
        "CPU s/step",
        "read B/param",
        "write B/param",
        "peak RSS GB, all",
        "one rank",
        "first loss",
        "last loss",
    ]
    table = [
        [
            {"nvme": "stage 3, NVMe", "cpu": "stage 2, CPU offload"}[row["part"]],
            str(row["ranks"]),
            row["engine"],
            harness.Summary(**row["s_per_step"]).text(),
            harness.Summary(**row["ratio"]).text() if row["ratio"] else "",
            f"{row['s_per_step_flushed']['median']:.2f}",
            f"{row['cpu_s_per_step']:.2f}",
            f"{row['read_bytes_per_param']:.2f}",
            f"{row['write_bytes_per_param']:.2f}",
            f"{row['peak_rss_bytes'] / 1e9:.2f}",
            f"{row['peak_rss_rank_max'] / 1e9:.2f}",
            f"{row['first_loss']:.4f}",
            f"{row['last_loss']:.4f}",
        ]
        for row in rows
    ]
    title = (f"{workload.parameters / 1e6:.0f}M parameters, "
             f"{workload.micro_batches} micro-batch(es) of 1 x {workload.tokens} per rank, "
             f"{workload.steps} steps, clipped at {workload.clip:g}")  # fmt: skip
    harness.print_table(title, columns, table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir", type=Path, required=True, help="swap directory, on the drive that all ranks share"
    )
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=tuple(PARTS))
    parser.add_argument("--ranks", nargs="+", type=int, default=(1, 2), help="(1 2)")
    parser.add_argument("--engines", nargs="+", choices=tuple(SCRIPTS), default=tuple(SCRIPTS))
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds (%(default)s)")
    parser.add_argument(
        "--infinity",
        nargs="+",
        default=(),
        metavar="OPTION=VALUE",
        help="more options of arm_infinity.py: ram=1GiB update=backward",
    )
    parser.add_argument(
        "--deepspeed-venv",
        type=Path,
        help="an environment that compare_deepspeed.py made elsewhere",
    )
    parser.add_argument(
        "--pip-args", default="", help="more arguments for pip when DeepSpeed's environment is made"
    )
    parser.add_argument(
        "--limit-s", type=float, default=3600.0, help="time limit of an arm (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument(
        "--results",
        type=Path,
        default=harness.RESULTS / "ranks.jsonl",
        help="JSON lines file to append to (bench/results/ranks.jsonl)",
    )
    r1.add_arguments(parser)
    args = parser.parse_args()
    if args.rounds < 1 or min(args.ranks) < 1:
        parser.error("--rounds, --ranks: give at least 1")
    if args.steps < 2:
        parser.error("--steps: give at least 2; the first step follows no update, and is left out")
    if any("=" not in option for option in args.infinity):
        parser.error(
            f"--infinity {' '.join(args.infinity)}: give options as ram=1GiB update=backward"
        )
    args.infinity = [f"--{option}" for option in args.infinity]
    return args


def main() -> int:
    args = parse()
    workload = r1.from_arguments(args)
    room = (
        compare_deepspeed.SWAP_BYTES_PER_PARAM * workload.parameters + compare_deepspeed.SPARE_BYTES
    )
    harness.check_directory(args.dir, room)
    if "deepspeed" in args.engines:
        compare_deepspeed.check_size(workload)
        compare_deepspeed.have_environment(args.deepspeed_venv, args.pip_args.split())
    about = {
        "run": harness.now(),
        "commit": harness.commit(),
        "workload": workload.describe(),
        "machine": harness.machine(),
    }
    records: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for part in args.parts:
            for ranks in args.ranks:
                # The first engine alternates, too.
                for engine in args.engines[:: -1 if number % 2 else 1]:
                    began = time.perf_counter()
                    record = {"round": number, **run_arm(engine, part, ranks, workload, args)}
                    records.append(record)
                    harness.append_line(args.results, {**about, **record})
                    harness.note(
                        f"round {number + 1}/{args.rounds} {part} {engine}, {ranks} rank(s): "
                        f"{harness.steady_s(record):.2f} s/step ({time.perf_counter() - began:.0f} "
                        "s)"
                    )
    rows = summarise(records)
    if args.json:
        print(json.dumps({**about, "rows": rows}))
    else:
        show(workload, rows)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
