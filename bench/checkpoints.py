"""Cost of a checkpoint: the time that training stops, the time until it is durable, its bytes, and
the time of a restore.

    python bench/checkpoints.py --dir /mnt/nvme0
    python bench/checkpoints.py --dir /mnt/nvme0 --arms infinity torch deepspeed:offload=cpu
    --rounds 1 --saves 1

An arm is infinity (saves during training), torch (`torch.save` of the same states, all in RAM) or
deepspeed (`save_checkpoint`), with options of arm_infinity.py or arm_deepspeed.py after colons.
Each arm saves in one process and restores in a fresh one. Ratios compare the first arm with each
other arm in one round. An arm that fails or takes too long is recorded with its error. See
bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compare_deepspeed
import harness
import r1

ARMS = ("infinity", "infinity:durable=on", "torch", "deepspeed", "deepspeed:offload=cpu")
SCRIPTS = {
    "infinity": "arm_save.py",
    "torch": "arm_save_torch.py",
    "deepspeed": "arm_save_deepspeed.py",
}
# Of the largest arm: two generations at rest, a checkpoint, and the next checkpoint.
ROOM_BYTES_PER_PARAM = 60
SPARE_BYTES = 4_000_000_000
ERROR_CHARS = 400

Record = dict[str, Any]


def reason(error: harness.BenchError, directory: Path) -> str:
    """Return the error's line, without the names of this machine's folders."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) == 1:  # it took too long
        return (
            "the process" + lines[0][lines[0].rindex(" took ") :]
            if " took " in lines[0]
            else lines[0][:ERROR_CHARS]
        )
    told = [
        line
        for line in lines
        if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception|Interrupt)\b", line)
    ]
    text = (told or lines)[-1]
    for path, name in ((directory, "DIR"), (harness.ROOT, "."), (Path.home(), "~")):
        text = text.replace(str(path), name)
    return text[:ERROR_CHARS]


def stages_of(arm: str) -> tuple[str, ...]:
    """The processes of an arm, one after the other."""
    return ("save", "resume", "restore") if "durable=on" in arm else ("save", "restore")


def run_arm(arm: str, workload: r1.Workload, args: argparse.Namespace) -> Record:
    """Run all stages of one arm. Returns a record or an error for each stage; stages that depend on
    a failed stage are not run. Blocks."""
    kind, chosen = compare_deepspeed.parse_arm(arm, SCRIPTS)
    if kind == "deepspeed":
        python, env = (
            str(compare_deepspeed.VENV / "bin" / "python"),
            compare_deepspeed.deepspeed_environment(),
        )
    else:
        python, env = sys.executable, harness.environment(PYTHONPATH=str(harness.ROOT))
    found: Record = {"arm": arm, "limit_s": args.limit_s}
    with harness.scratch(args.dir) as folder:
        target, swap, fresh = (folder / name for name in ("checkpoint", "swap", "fresh"))
        for path in (swap, fresh):
            path.mkdir()
        for stage in stages_of(arm):
            if stage == "restore":
                shutil.rmtree(swap)  # what rests there is no part of the checkpoint
            # What came before must not be written during this.
            os.sync()
            command = [
                python,
                str(harness.BENCH / SCRIPTS[kind]),
                f"--stage={stage}",
                f"--saves={args.saves}",
                f"--dir={fresh if stage == 'restore' else swap}",
                f"--target={target}",
                *workload.arguments(),
                *chosen,
            ]
            began = time.perf_counter()
            try:
                output = harness.run_command(command, env, timeout_s=args.limit_s)
                found[stage] = harness.last_json_line(output)
            except harness.BenchError as error:
                found[stage] = {
                    "error": reason(error, args.dir),
                    "after_s": round(time.perf_counter() - began, 1),
                }
                harness.note(str(error))
                if stage == "save":
                    break
    return found


def figures(record: Record) -> dict[str, float]:
    """Return the figures of one arm in one round, without unknown ones."""
    found: dict[str, float] = {}
    save = record.get("save", {})
    if "saves" in save:
        found["step_s"] = statistics.fmean(s for steps in save["alone_s"] for s in steps)
        for name in ("stall_s", "call_s", "sync_s", "wall_s", "bytes"):
            values = [each[name] for each in save["saves"] if name in each]
            if values:
                found[name] = statistics.median(values)
    for stage in ("restore", "resume"):
        part = record.get(stage, {})
        if "restore_s" in part:
            found[f"{stage}_s"], found[f"{stage}_setup_s"] = part["restore_s"], part["setup_s"]
    if "committed" in save and "step" in record.get("resume", {}):
        found["steps_lost"] = save["committed"] - record["resume"]["step"]
    if "following" in save and "following" in record.get("restore", {}):
        found["losses_apart"] = max(
            abs(a - b)
            for a, b in zip(save["following"], record["restore"]["following"], strict=True)
        )
    return found


def summarise(records: Sequence[Record], arms: Sequence[str]) -> dict[str, Any]:
    """Medians per arm, its errors, and first arm / arm of each round for the stall, the time to the
    drive and the restore."""
    by_arm = {arm: {r["round"]: r for r in records if r["arm"] == arm} for arm in arms}
    numbers = {
        arm: {number: figures(r) for number, r in mine.items()} for arm, mine in by_arm.items()
    }
    summary: dict[str, Any] = {"arms": {}, "ratios": {}}
    for arm, mine in by_arm.items():
        names = dict.fromkeys(name for found in numbers[arm].values() for name in found)
        errors = {
            stage: part["error"]
            for r in mine.values()
            for stage, part in r.items()
            if isinstance(part, dict) and "error" in part
        }
        medians = {
            name: vars(
                harness.Summary.of(
                    [found[name] for found in numbers[arm].values() if name in found]
                )
            )
            for name in names
        }
        summary["arms"][arm] = {"figures": medians, "errors": errors}
    first, *others = arms
    for arm in others:
        for name in ("stall_s", "wall_s", "restore_s"):
            pairs = [(numbers[first][n][name], found[name]) for n, found in numbers[arm].items()
                     if name in found and name in numbers[first].get(n, {})]  # fmt: skip
            if pairs:
                summary["ratios"].setdefault(arm, {})[name] = vars(
                    harness.Summary.of([a / b for a, b in pairs])
                )
    return summary


def show(workload: r1.Workload, summary: dict[str, Any]) -> None:
    """Print the summary for people."""
    columns = {
        "step_s": "step alone s",
        "stall_s": "stands still s",
        "call_s": "call s",
        "sync_s": "then sync s",
        "wall_s": "on the drive after s",
        "bytes": "GB",
        "restore_s": "restore s",
        "restore_setup_s": "after set-up s",
        "resume_s": "resume s",
        "steps_lost": "steps lost",
        "losses_apart": "losses apart",
    }
    rows = []
    for arm, values in summary["arms"].items():
        row = [arm]
        for name in columns:
            found = values["figures"].get(name)
            scale, digits = (
                (1e9, 2) if name == "bytes" else (1.0, 5 if name == "losses_apart" else 2)
            )
            row.append(
                ""
                if found is None
                else harness.Summary(
                    found["median"] / scale,
                    found["least"] / scale,
                    found["most"] / scale,
                    found["count"],
                ).text(digits)
            )
        rows.append(row)
    title = (
        f"{workload.parameters / 1e6:.0f}M parameters, hidden {workload.hidden}, {workload.layers} "
        "layers: medians (min–max)"
    )
    harness.print_table(title, ["arm", *columns.values()], rows)
    for arm, values in summary["arms"].items():
        for stage, error in values["errors"].items():
            print(f"{arm}, {stage}: {error}")
    first = next(iter(summary["arms"]))
    for arm, ratios in summary["ratios"].items():
        told = "; ".join(
            f"{columns[name].removesuffix(' s')} {harness.Summary(**found).text(3)}"
            for name, found in ratios.items()
        )
        print(f"{first} / {arm}: {told}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir",
        type=Path,
        required=True,
        help="directory on the drive to measure: swap files and checkpoints",
    )
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds (%(default)s)")
    parser.add_argument(
        "--saves", type=int, default=2, help="saves per arm and round (%(default)s)"
    )
    parser.add_argument(
        "--arms",
        nargs="+",
        default=ARMS,
        metavar="ARM",
        help=f"what is compared ({' '.join(ARMS)})",
    )
    parser.add_argument(
        "--limit-s", type=float, default=1800.0, help="time limit of a process (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument(
        "--pip-args", default="", help="more arguments for pip when DeepSpeed's environment is made"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=harness.RESULTS / "checkpoints.jsonl",
        help="JSON lines file to append to (bench/results/checkpoints.jsonl)",
    )
    r1.add_arguments(parser)
    args = parser.parse_args()
    for name in ("rounds", "saves"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: give at least 1")
    try:
        for arm in args.arms:
            compare_deepspeed.parse_arm(arm, SCRIPTS)
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> int:
    args = parse()
    workload = r1.from_arguments(args)
    arms = tuple(dict.fromkeys(args.arms))
    harness.check_directory(args.dir, ROOM_BYTES_PER_PARAM * workload.parameters + SPARE_BYTES)
    if any(arm.startswith("deepspeed") for arm in arms):
        compare_deepspeed.check_size(workload)
        compare_deepspeed.prepare_deepspeed(args.pip_args.split())
    about = {
        "run": harness.now(),
        "workload": workload.describe(),
        "saves": args.saves,
        "machine": harness.machine(),
        "commit": harness.commit(),
    }
    records: list[Record] = []
    for number in range(args.rounds):
        for arm in arms:
            began = time.perf_counter()
            record = {"round": number, **run_arm(arm, workload, args)}
            records.append(record)
            harness.append_line(args.results, {**about, **record})
            told = ", ".join(f"{name} {value:.4g}" for name, value in figures(record).items())
            harness.note(
                f"round {number + 1}/{args.rounds} {arm}: {told} "
                f"({time.perf_counter() - began:.0f} s)"
            )
    summary = summarise(records, arms)
    if args.json:
        print(json.dumps({**about, **summary}))
    else:
        show(workload, summary)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
