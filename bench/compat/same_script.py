"""Runs one unmodified training script under DeepSpeed itself and under infinity's adapter.

    python bench/compat/same_script.py --dir /mnt/nvme0                  # all cases, 1 and 2 ranks
    python bench/compat/same_script.py --dir /mnt/nvme0 --cases nvme fp16 --ranks 2 --rounds 5
    python bench/compat/same_script.py --dir /mnt/nvme0 --hidden 768 --layers 2 --rounds 1
    python bench/compat/same_script.py --show RUN

The script is trainee.py; a case is a JSON file, the same for both. A round runs every case and
number of ranks under both engines right after each other, in alternating order. It compares the
losses of all steps, warm-up included (every step must agree within the tolerance of its dtype, and
in fp16 the same steps must be skipped), seconds per step, memory and bytes. The exit status is 1 if
a case disagrees. DeepSpeed runs in a separate environment, which the first run creates.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench_folder  # noqa: F401 - adds bench/ to sys.path
import compare_deepspeed
import deepspeed_json
import harness
import r1

HERE = Path(__file__).resolve().parent
ENGINES = ("infinity", "deepspeed")
RESULTS = harness.RESULTS / "same_script.jsonl"
TIMEOUT_S = 3600.0
STEPS = 20

TOLERANCES = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 2.0**-14}
"""Distance at which two losses still agree, by the dtype that computes: the spacing of its numbers
(bf16, fp16), and for fp32 512 of them, for sums of other orders over 20 steps. Relative to the larger, and
below a loss of 1 absolute. DeepSpeed's own placements lie about half as far apart
(`among_themselves`)."""

PLACEMENTS = ("zero1", "zero2", "zero3", "zero2-cpu", "zero3-cpu", "nvme")
"""Cases that compute the same, with states in other places."""


# -- cases -----------------------------------------------------------------------------------------


def on_the_device(workload: r1.Workload, stage: int) -> dict[str, Any]:
    """Nothing offloaded."""
    config = deepspeed_json.everything_on_nvme(workload, "")
    del config["aio"]
    config["zero_optimization"] = {
        "stage": stage,
        "reduce_bucket_size": 50_000_000,
        "allgather_bucket_size": 50_000_000,
        "overlap_comm": False,
    }
    return config


def with_overflows(workload: r1.Workload) -> dict[str, Any]:
    """fp16, with a scale from which the first steps overflow, and which grows again soon."""
    config = on_the_device(workload, 2)
    del config["bf16"]
    config["fp16"] = {
        "enabled": True, "initial_scale_power": 26, "loss_scale_window": 4, "hysteresis": 1,
    }  # fmt: skip
    return config


def with_warmup(config: dict[str, Any], clip: float) -> dict[str, Any]:
    """Clipped, and with a schedule of the learning rate."""
    config["gradient_clipping"] = clip
    lr = config["optimizer"]["params"]["lr"]
    config["scheduler"] = {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": lr, "warmup_num_steps": 5, "total_num_steps": STEPS},
    }
    return config


def in_fp32(config: dict[str, Any]) -> dict[str, Any]:
    """The same in fp32."""
    del config["bf16"]
    return config


CASES: dict[str, Callable[[r1.Workload, str], dict[str, Any]]] = {
    "zero1": lambda w, _: on_the_device(w, 1),
    "zero2": lambda w, _: on_the_device(w, 2),
    "zero3": lambda w, _: on_the_device(w, 3),
    "zero2-cpu": lambda w, _: deepspeed_json.stage2_with_states_in_ram(w),
    "zero3-cpu": lambda w, _: deepspeed_json.everything_in_ram(w),
    "nvme": deepspeed_json.everything_on_nvme,
    "fp16": lambda w, _: with_overflows(w),
    "accumulation": lambda w, _: on_the_device(w, 2),
    "accumulation-cpu": lambda w, _: deepspeed_json.everything_in_ram(w),
    "clipping": lambda w, _: with_warmup(on_the_device(w, 1), 0.1),
    "fp32": lambda w, _: in_fp32(on_the_device(w, 2)),
    "fp32-cpu": lambda w, _: in_fp32(deepspeed_json.everything_in_ram(w)),
}
"""Cases to compare, by name: the JSON for a workload and a swap directory."""

MICRO_BATCHES = {"accumulation": 4, "accumulation-cpu": 4}
FP16 = {"hidden": 256, "layers": 2}
"""A small model: a CPU without fp16 instructions multiplies it a hundred times slower than bf16."""


def workload_of(case: str, args: argparse.Namespace) -> r1.Workload:
    """Return the workload of a case."""
    args.micro_batches = MICRO_BATCHES.get(case, 1)
    workload = r1.from_arguments(args)
    return dataclasses.replace(workload, **FP16) if case == "fp16" else workload


def dtype_of(config: dict[str, Any]) -> str:
    """Return the dtype that a JSON trains in, by the key that chooses it."""
    return next((key for key in ("bf16", "fp16") if config.get(key, {}).get("enabled")), "fp32")


# -- runs ------------------------------------------------------------------------------------------


def command_of(engine: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    """Return how an engine starts the script on some ranks, and its environment."""
    launch = ["--standalone", f"--nproc-per-node={ranks}"]
    script = str(HERE / "trainee.py")
    if engine == "deepspeed":
        python, env = compare_deepspeed.interpreter_of("deepspeed")
        # Its collectives through shared memory, which it takes when all ranks are on one node.
        env["LOCAL_SIZE"] = str(ranks)
        start = [python, "-m", "torch.distributed.run", *launch, str(HERE / "under_deepspeed.py")]
    else:
        env = harness.environment(PYTHONPATH=str(harness.ROOT))
        start = [sys.executable, "-m", "infinity.compat.deepspeed", *launch]
    env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
    return [*start, script], env


def run_arm(engine: str, case: str, ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run the script under one engine in fresh processes and a fresh swap directory; its record.
    Blocks until it ends."""
    workload = workload_of(case, args)
    command, env = command_of(engine, ranks)
    os.sync()  # what the arm before left in the page cache must not be written during this one
    named = set(Path("/dev/shm").iterdir())
    with harness.scratch(args.dir) as swap:
        config = CASES[case](workload, str(swap))
        file = swap / "ds_config.json"
        file.write_text(json.dumps(config))
        command += [f"--deepspeed_config={file}", *workload.arguments()]
        try:
            output = harness.run_command(command, env, timeout_s=TIMEOUT_S)
        finally:
            # DeepSpeed leaves a buffer of 69 MB in shared memory by each run.
            for path in set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*")) - named:
                path.unlink(missing_ok=True)
    record = harness.last_json_line(output)
    return {**record, "engine": engine, "case": case, "dtype": dtype_of(config)}


# -- the table -------------------------------------------------------------------------------------


def distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest difference of two runs' losses at any step: relative to the larger loss,
    or absolute if both are below 1; infinite if a loss is NaN."""
    pairs = zip(ours, theirs, strict=True)
    found = [abs(a - b) / max(abs(a), abs(b), 1.0) for a, b in pairs]
    return max(value if math.isfinite(value) else math.inf for value in found)


def apart(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the distance of two runs' losses; infinite where other steps were skipped."""
    skipped = [run["by_rank"][0]["skipped"] for run in (ours, theirs)]
    return distance(ours["losses"], theirs["losses"]) if skipped[0] == skipped[1] else math.inf


def among_themselves(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return, for each engine and number of ranks, how far its own runs of `PLACEMENTS` lie apart
    at most."""
    found: dict[str, float] = {}
    for engine in ENGINES:
        for ranks in sorted({record["ranks"] for record in records}):
            mine = [
                r["losses"]
                for r in records
                if (r["engine"], r["ranks"]) == (engine, ranks) and r["case"] in PLACEMENTS
            ]
            pairs = itertools.combinations(mine, 2)
            found[f"{engine}, {ranks} rank(s)"] = max(
                (distance(*pair) for pair in pairs), default=0.0
            )
    return found


def summarise(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each case and number of ranks: medians of each engine, the ratios of each
    round, and how far the losses lie apart in any."""
    rows = []
    for case, ranks in dict.fromkeys((r["case"], r["ranks"]) for r in records):
        mine = [r for r in records if (r["case"], r["ranks"]) == (case, ranks)]
        by_round = [
            {r["engine"]: r for r in mine if r["round"] == number}
            for number in sorted({r["round"] for r in mine})
        ]
        pairs = [pair for pair in by_round if len(pair) == len(ENGINES)]
        if not pairs:
            continue
        row: dict[str, Any] = {"case": case, "ranks": ranks, "dtype": mine[0]["dtype"]}
        for engine in ENGINES:
            found = [pair[engine] for pair in pairs]
            row[engine] = {
                "s_per_step": vars(harness.Summary.of([harness.steady_s(r) for r in found])),
                "peak_rss_bytes": max(r["peak_rss_bytes"] for r in found),
                **{name: harness.Summary.of([r[name] for r in found]).median
                   for name in ("read_bytes_per_param", "write_bytes_per_param", "setup_s")},
                "last_loss": found[-1]["losses"][-1],
            }  # fmt: skip
        row["ratio"] = vars(harness.Summary.of([
            harness.steady_s(pair["deepspeed"]) / harness.steady_s(pair["infinity"])
            for pair in pairs
        ]))  # fmt: skip
        row["skipped"] = pairs[-1]["infinity"]["by_rank"][0]["skipped"][-1]
        row["apart"] = max(apart(pair["infinity"], pair["deepspeed"]) for pair in pairs)
        row["agrees"] = row["apart"] <= TOLERANCES[row["dtype"]]
        rows.append(row)
    return rows


def show(workload: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Print the table; in a cell infinity's figure first."""
    columns = ["case", "ranks", "dtype", "losses apart", "allowed", "skipped", "s/step",
               "DeepSpeed / infinity", "peak RSS GB", "read B/param", "write B/param",
               "last loss"]  # fmt: skip

    def both(row: dict[str, Any], name: str, digits: int, scale: float = 1.0) -> str:
        values = (row[engine][name] for engine in ENGINES)
        return " | ".join(
            f"{(v['median'] if isinstance(v, dict) else v) / scale:.{digits}f}" for v in values
        )

    table = [
        [
            row["case"],
            str(row["ranks"]),
            row["dtype"],
            f"{row['apart']:.1e}" + ("" if row["agrees"] else " TOO FAR"),
            f"{TOLERANCES[row['dtype']]:.1e}",
            str(row["skipped"]),
            both(row, "s_per_step", 3),
            harness.Summary(**row["ratio"]).text(),
            both(row, "peak_rss_bytes", 2, 1e9),
            both(row, "read_bytes_per_param", 1),
            both(row, "write_bytes_per_param", 1),
            both(row, "last_loss", 4),
        ]
        for row in rows
    ]
    title = (
        f"{workload['parameters'] / 1e6:.0f}M parameters, rows of {workload['tokens']} tokens, "
        f"{workload['warmup']} + {workload['steps']} steps; infinity | DeepSpeed"
    )
    harness.print_table(title, columns, table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, help="swap directory, on a drive")
    parser.add_argument("--show", metavar="RUN", help="print a recorded run, named by its time")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--ranks", nargs="+", type=int, default=(1, 2), help="(1 2)")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument(
        "--rounds", type=int, default=3, help="alternating rounds (%(default)s)"
    )
    parser.add_argument(
        "--deepspeed-venv",
        type=Path,
        help="an environment that compare_deepspeed.py made elsewhere",
    )
    parser.add_argument(
        "--pip-args", default="", help="more arguments for pip, which installs DeepSpeed"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="JSON lines file (%(default)s)"
    )
    r1.add_arguments(parser)
    parser.set_defaults(warmup=4, steps=STEPS - 4)
    args = parser.parse_args()
    if args.dir is None and not args.show:
        parser.error("--dir: give the swap directory")
    if args.rounds < 1 or min(args.ranks) < 1:
        parser.error("--rounds, --ranks: give at least 1")
    if args.steps < 2:
        parser.error("--steps: give at least 2; the first step follows no update, and is left out")
    return args


def recorded(run: str, results: Path) -> list[dict[str, Any]]:
    """Return the records of a run. Raises ValueError when it is not there."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    found = [line for line in lines if line["run"] == run]
    if not found:
        runs = ", ".join(sorted({line["run"] for line in lines}))
        raise ValueError(f"--show {run}: {results} has the runs {runs}")
    return found


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all rounds, and return their records. Appends each record to the results file as soon as
    it is measured. Blocks."""
    workload = workload_of("", args)
    room = compare_deepspeed.SWAP_BYTES_PER_PARAM * workload.parameters
    harness.check_directory(args.dir, room + compare_deepspeed.SPARE_BYTES)
    if "deepspeed" in args.engines:
        compare_deepspeed.check_size(workload)
        compare_deepspeed.have_environment(args.deepspeed_venv, args.pip_args.split())
    about = {
        "run": harness.now(), "commit": harness.commit(), "machine": harness.machine(),
        "workload": workload.describe(),
    }  # fmt: skip
    records: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for case in args.cases:
            for ranks in args.ranks:
                for engine in args.engines[:: -1 if number % 2 else 1]:
                    began = time.perf_counter()
                    record = {"round": number, **run_arm(engine, case, ranks, args)}
                    records.append({**about, **record})
                    harness.append_line(args.results, records[-1])
                    harness.note(
                        f"round {number + 1}/{args.rounds} {case}, {ranks} rank(s), {engine}: "
                        f"{harness.steady_s(record):.3f} s/step, last loss "
                        f"{record['losses'][-1]:.4f} ({time.perf_counter() - began:.0f} s)"
                    )
    return records


def main() -> int:
    args = parse()
    records = recorded(args.show, args.results) if args.show else measure(args)
    rows = summarise(records)
    show(records[0]["workload"], rows)
    for runs, value in among_themselves(records).items():
        print(f"{runs}: its own placements ({', '.join(PLACEMENTS)}) lie {value:.1e} apart at most")
    return int(not all(row["agrees"] for row in rows))


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
