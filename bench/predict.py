"""Compares predictions of `infinity plan` with measurements: s/step of R1 in many configurations,
and the error of each.

    python bench/predict.py --dir /mnt/nvme0                                   # 3 rounds of 13
    configurations: half an hour or more
    python bench/predict.py --dir /mnt/nvme0 --rounds 1 --hidden 512 --steps 3 --warmup 1      # a
    trial: minutes python bench/predict.py --dir /mnt/nvme0 --only min,half,6.8:5.0
    python bench/predict.py --published      # other engines' published results; measures nothing

Every round measures, per number of tokens, a plain forward and backward without offloading. Then
the configurations run in random order, each in a fresh process; the drive is measured before each.
A prediction uses only these measurements and the configuration. "6.8:5.0" and "3.5:3.0" throttle
the drive by the fault injector to these ratios of read to write, scaled to its speed (SEAM_SHARE).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import drive
import harness
import published
import r1

TIMEOUT_S = 3600
SEAM_SHARE = 0.6
"""Throttled drives get at most this share of the real drive's bandwidth, so that the throttle is
the bottleneck."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One configuration. ram: "min", or a share of the bytes that keep everything in RAM. ratio:
    (read, write) of a throttled drive."""

    ram: str = "min"
    state: str = "exact"
    update: str = "deferred"
    micro_batches: int = 1
    tokens: int = 128
    ratio: tuple[float, float] | None = None


CONFIGS = {
    "min": Config(),
    "half": Config(ram="0.5"),
    "three quarters": Config(ram="0.75"),
    "all in RAM": Config(ram="1.0"),
    "8 micro-batches": Config(micro_batches=8),
    "512 tokens": Config(tokens=512),
    "bf16": Config(state="bf16"),
    "compact": Config(state="compact"),
    "backward": Config(update="backward"),
    "delayed": Config(update="delayed"),
    "6.8:5.0": Config(ratio=(6.8, 5.0)),
    "3.5:3.0": Config(ratio=(3.5, 3.0)),
    "6.8:5.0 compact half": Config(ratio=(6.8, 5.0), state="compact", ram="0.5"),
}

Record = dict[str, Any]


def arm(
    part: str, args: argparse.Namespace, *options: str, tokens: int, micro_batches: int
) -> Record:
    """Run one measurement of arm_predict.py in a fresh process. Blocks until it ends."""
    command = [
        sys.executable,
        str(harness.BENCH / "arm_predict.py"),
        part,
        f"--hidden={args.hidden}",
        f"--layers={args.layers}",
        f"--steps={args.steps}",
        f"--warmup={args.warmup}",
        f"--tokens={tokens}",
        f"--micro-batches={micro_batches}",
        *options,
    ]
    env = harness.environment(PYTHONPATH=str(harness.ROOT))
    return harness.last_json_line(harness.run_command(command, env, timeout_s=TIMEOUT_S))


def bandwidths(config: Config, found: Mapping[str, float]) -> tuple[float, float]:
    """(read, write) that a configuration's drive has: the real ones, or the throttled ones."""
    if config.ratio is None:
        return found["read"], found["write"]
    read, write = config.ratio
    scale = SEAM_SHARE * min(found["read"] / read, found["write"] / write)
    return read * scale, write * scale


def error_of(record: Record) -> float:
    """Return predicted / measured - 1."""
    return float(record["predicted_s"]) / harness.steady_s(record) - 1


def run_round(
    names: Sequence[str], args: argparse.Namespace, number: int, chance: random.Random
) -> list[Record]:
    """Measure plain passes, and every configuration once with the drive before it."""
    passes = {
        tokens: arm("plain", args, tokens=tokens, micro_batches=1)
        for tokens in sorted({CONFIGS[name].tokens for name in names})
    }
    harness.note(f"round {number}")
    records = []
    for name in chance.sample(list(names), len(names)):
        config = CONFIGS[name]
        now = drive.measure(args.dir)
        read, write = bandwidths(config, now)
        given = {
            "ram": config.ram,
            "state": config.state,
            "update": config.update,
            "throttled": config.ratio is not None,
            "read_bytes_per_s": read,
            "write_bytes_per_s": write,
            **passes[config.tokens],
        }
        with harness.scratch(args.dir) as swap:
            options = (f"--dir={swap}", f"--config={json.dumps(given)}")
            found = arm(
                "step", args, *options, tokens=config.tokens, micro_batches=config.micro_batches
            )
        harness.note(
            f"  {name}: {harness.steady_s(found):.3f} s/step, predicted {found['predicted_s']:.3f} "
            f"({error_of(found):+.0%}); drive reads {now['read'] / 1e9:.2f}, writes "
            f"{now['write'] / 1e9:.2f} GB/s"
        )
        records.append(
            {
                "schema": "infinity.bench.predict/1",
                "run": args.run,
                "commit": args.commit,
                "machine": harness.machine(),
                "workload": {"hidden": args.hidden, "layers": args.layers},
                "round": number,
                "config": name,
                **dataclasses.asdict(config),
                "drive": now,
                "given": given,
                **found,
            }
        )
        harness.append_line(args.results, records[-1])
    return records


def summarise(records: Sequence[Record]) -> list[Record]:
    """Per configuration: medians over the rounds, and the error as the median of the rounds'
    errors."""
    rows = []
    for name in dict.fromkeys(record["config"] for record in records):
        mine = [record for record in records if record["config"] == name]
        rows.append(
            {
                "config": name,
                "rounds": len(mine),
                **{
                    key: statistics.median(one[key] for one in mine)
                    for key in ("predicted_s", "predicted_limit_s")
                },
                "s_per_step": statistics.median(map(harness.steady_s, mine)),
                "error": statistics.median(map(error_of, mine)),
                "errors": list(map(error_of, mine)),
                "read_error": statistics.median(
                    one["predicted_read_bytes_per_param"] - one["read_bytes_per_param"]
                    for one in mine
                ),
                "write_error": statistics.median(
                    one["predicted_write_bytes_per_param"] - one["write_bytes_per_param"]
                    for one in mine
                ),
            }
        )
    return rows


def show(rows: Sequence[Record]) -> None:
    """Print the table and the error over all configurations."""
    columns = [
        "configuration",
        "measured s",
        "predicted s",
        "error",
        "limit s",
        "η",
        "read B/param off by",
        "written",
    ]
    lines = [
        [
            row["config"],
            f"{row['s_per_step']:.3f}",
            f"{row['predicted_s']:.3f}",
            f"{row['error']:+.1%}",
            f"{row['predicted_limit_s']:.3f}",
            f"{row['predicted_limit_s'] / row['s_per_step']:.2f}",
            f"{row['read_error']:+.2f}",
            f"{row['write_error']:+.2f}",
        ]
        for row in rows
    ]
    harness.print_table("Predicted and measured", columns, lines)
    errors = [abs(row["error"]) for row in rows]
    print(
        f"error over {len(rows)} configurations: median {statistics.median(errors):.1%}, largest "
        f"{max(errors):.1%}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, help="a directory on the drive to measure")
    parser.add_argument(
        "--show",
        metavar="RUN",
        help="measure nothing; print a recorded run, named by its time",
    )
    parser.add_argument(
        "--published",
        action="store_true",
        help="measure nothing; compare the plan's terms with published results of other engines",
    )
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument(
        "--only", help="these configurations, separated by commas: " + "; ".join(CONFIGS)
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the order within rounds (%(default)s)"
    )
    parser.add_argument("--results", type=Path, default=harness.RESULTS / "predict.jsonl")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    r1.add_arguments(parser)
    args = parser.parse_args()
    if args.published:
        print("\n".join(published.tables()))
        return 0
    if args.show:
        lines = [json.loads(line) for line in args.results.read_text().splitlines()]
        show(summarise([record for record in lines if record["run"] == args.show]))
        return 0
    if args.dir is None:
        raise ValueError("--dir: give a directory on the drive")
    if args.steps < 2:
        raise ValueError(f"--steps {args.steps}: give at least 2; the first step is left out")
    if args.rounds < 1:
        raise ValueError(f"--rounds {args.rounds}: give at least 1")
    names = (
        list(CONFIGS)
        if not args.only
        else [name for name in CONFIGS if name in args.only.split(",")]
    )
    unknown = set(args.only.split(",")) - set(CONFIGS) if args.only else set()
    if unknown:
        raise ValueError(
            f"--only: {', '.join(sorted(unknown))} not known; there are {'; '.join(CONFIGS)}"
        )
    workload = r1.from_arguments(args)
    harness.check_directory(args.dir, 14 * workload.parameters + (2 << 30))
    args.run, args.commit = harness.now(), harness.commit()
    chance = random.Random(args.seed)
    records = [
        record for number in range(args.rounds) for record in run_round(names, args, number, chance)
    ]
    rows = summarise(records)
    if args.json:
        print(json.dumps(rows))
    else:
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
