"""Cost of checksums: compares verify="full", "sample" and "off" in alternating runs.

    python bench/cost_of_verify.py --dir /mnt/nvme0                      # both parts
    python bench/cost_of_verify.py --dir /mnt/nvme0 --part executor      # CPU and time per GB of
    STORE, FETCH, UPDATE
    python bench/cost_of_verify.py --dir /mnt/nvme0 --part step          # time and CPU of a
    training step of R1, ram="min"

Every round runs each setting once, in random order; differences and ratios to "off" are of one
round. See bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness

from infinity._src.base.sizes import format_size, parse_size

MODES = ("full", "sample", "off")
PARTS = ("executor", "step")
ROUNDS = {"executor": 15, "step": 5}
TIMEOUT_S = 3600

Record = dict[str, Any]
"""part, round, arm (the setting), and figures: kind -> name -> number."""


def executor_arm(args: argparse.Namespace, size: int) -> Callable[[str], Record]:
    """Runs one setting over `size` bytes of states."""

    def run(mode: str) -> Record:
        with harness.scratch(args.dir) as swap:
            command = [
                sys.executable,
                str(harness.BENCH / "arm_verify.py"),
                f"--dir={swap}",
                f"--size={size}",
                f"--verify={mode}",
            ]
            env = harness.environment(PYTHONPATH=str(harness.ROOT))
            return harness.last_json_line(harness.run_command(command, env, timeout_s=TIMEOUT_S))

    return run


def step_arm(args: argparse.Namespace) -> Callable[[str], Record]:
    """Trains R1 with one setting."""
    options = [
        f"--{name}={getattr(args, name)}" for name in ("hidden", "layers", "steps", "warmup")
    ]

    def run(mode: str) -> Record:
        with harness.scratch(args.dir) as swap:
            command = [
                sys.executable,
                str(harness.BENCH / "arm_infinity.py"),
                f"--dir={swap}",
                f"--verify={mode}",
                *options,
            ]
            env = harness.environment(PYTHONPATH=str(harness.ROOT))
            record = harness.last_json_line(harness.run_command(command, env, timeout_s=TIMEOUT_S))
        figures = {
            "step": {"s_per_step": record["s_per_step"], "cpu_s_per_step": record["cpu_s_per_step"]}
        }
        return {"arm": mode, "figures": figures, "losses": record["losses"]}

    return run


def measure(
    part: str, run: Callable[[str], Record], args: argparse.Namespace, about: Mapping[str, Any]
) -> list[Record]:
    """Every setting once per round, in an order that chance decides; each result is kept at
    once."""
    order = random.Random(args.seed)
    rounds = args.rounds or ROUNDS[part]
    records = []
    for number in range(rounds):
        for mode in order.sample(args.modes, len(args.modes)):
            # Flush earlier writes, so that they are not written back during the measurement.
            os.sync()
            record = {"part": part, "round": number, **run(mode)}
            records.append(record)
            harness.append_line(args.results, {**about, **record})
            told = "; ".join(
                f"{kind} " + ", ".join(f"{value:.3f} {name}" for name, value in figures.items())
                for kind, figures in record["figures"].items()
            )
            harness.note(f"{part} {number + 1}/{rounds} {mode}: {told}")
    return records


def summarise(records: Sequence[Record], modes: Sequence[str]) -> dict[str, Any]:
    """kind -> name -> setting -> median and extremes, and what the setting costs over "off", with a
    confidence interval."""
    summary: dict[str, Any] = {}
    for kind, names in records[0]["figures"].items():
        for name in names:
            values = {
                mode: {r["round"]: r["figures"][kind][name] for r in records if r["arm"] == mode}
                for mode in modes
            }
            found: dict[str, Any] = {
                mode: vars(harness.Summary.of(list(mine.values()))) for mode, mine in values.items()
            }
            for mode in modes:
                if mode != "off" and "off" in modes:
                    pairs = [
                        (values[mode][number], values["off"][number]) for number in values["off"]
                    ]
                    found[f"{mode}_minus_off"] = vars(
                        harness.Interval.of([a - b for a, b in pairs])
                    )
                    found[f"{mode}_over_off"] = vars(harness.Interval.of([a / b for a, b in pairs]))
            summary.setdefault(kind, {})[name] = found
    return summary


def show(part: str, summary: Mapping[str, Any], modes: Sequence[str], title: str) -> None:
    """Print one part for people; times in milliseconds."""
    names = {
        "cpu_s_per_gb": ("CPU ms per GB", 1e3), "gbps": ("GB/s", 1.0),
        "s_per_step": ("s per step", 1.0), "cpu_s_per_step": ("CPU s per step", 1.0),
    }  # fmt: skip
    rows = []
    for kind, figures in summary.items():
        for name, found in figures.items():
            label, factor = names[name]
            row = [f"{kind}, {label}"]
            row += [f"{factor * harness.Summary(**found[mode]).median:.2f}" for mode in modes]
            for mode in modes:
                if f"{mode}_minus_off" in found:
                    more = harness.Interval(**found[f"{mode}_minus_off"])
                    scaled = harness.Interval(
                        factor * more.median, factor * more.low, factor * more.high, more.count
                    )
                    row += [scaled.text(2), harness.Interval(**found[f"{mode}_over_off"]).text()]
            rows.append(row)
    others = [mode for mode in modes if mode != "off" and "off" in modes]
    heads = [head for mode in others for head in (f"{mode} - off", f"{mode} / off")]
    harness.print_table(f"{part}: {title}", ["", *modes, *heads], rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir", type=Path, required=True, help="swap directory, on the drive to measure"
    )
    parser.add_argument("--part", choices=PARTS, help="one part only")
    parser.add_argument(
        "--modes",
        type=harness.some_of(MODES),
        default=list(MODES),
        help=f"settings to compare ({','.join(MODES)})",
    )
    parser.add_argument(
        "--rounds", type=int, help="every setting once per round (executor 15, step 5)"
    )
    parser.add_argument("--size", default="1GiB", help="executor: bytes of states (%(default)s)")
    parser.add_argument("--hidden", type=int, default=1024, help="step: hidden size (%(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="step: layers (%(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="step: measured steps (%(default)s)")
    parser.add_argument(
        "--warmup", type=int, default=3, help="step: warm-up steps (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the order within rounds (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.add_argument(
        "--results",
        type=Path,
        default=harness.RESULTS / "cost_of_verify.jsonl",
        help="JSON lines file to append to (bench/results/cost_of_verify.jsonl)",
    )
    args = parser.parse_args()
    if args.rounds is not None and args.rounds < 1:
        parser.error("--rounds: give at least 1")
    return args


def main() -> int:
    args = parse()
    size = parse_size(args.size)
    about = {
        "run": harness.now(),
        "size_bytes": size,
        "hidden": args.hidden,
        "layers": args.layers,
        "steps": args.steps,
        "seed": args.seed,
        "machine": harness.machine(),
        "commit": harness.commit(),
    }
    harness.check_directory(args.dir, 2 * size + 2**32)
    arms = {"executor": executor_arm(args, size), "step": step_arm(args)}
    titles = {
        "executor": f"{format_size(size)} of states through the executor",
        "step": f"R1, hidden {args.hidden}, {args.layers} layers, ram=min, {args.steps} steps",
    }
    whole: dict[str, Any] = dict(about)
    for part in PARTS if args.part is None else (args.part,):
        records = measure(part, arms[part], args, about)
        whole[part] = summarise(records, args.modes)
        if part == "step" and len({json.dumps(record["losses"]) for record in records}) != 1:
            raise harness.BenchError(
                "the losses differ between settings of verify, which is a bug: please report it"
            )
        if not args.json:
            show(part, whole[part], args.modes, titles[part])
    if args.json:
        print(json.dumps(whole))
    elif "off" in args.modes:
        print(
            'medians; differences and ratios of one round to "off": median [95 % confidence '
            "interval, bootstrap]"
        )
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
