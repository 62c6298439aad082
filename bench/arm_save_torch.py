"""Measures `torch.save` and `torch.load` of R1's states in a plain loop with everything in RAM;
prints one JSON line.

The states are the same as infinity's: bf16 parameters, fp32 masters, both moments. The arm saves
them to the measured drive, and syncs the files.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import arm_plain
import meter
import r1
import torch

FOLLOWING = 2
NAME = "states.pt"


def save_once(training: arm_plain.Training, target: Path) -> dict[str, Any]:
    """Save, and sync the file. Training waits for both, so the stall is the whole time."""
    target.mkdir(exist_ok=True)
    partial = target / (NAME + ".partial")
    start = time.perf_counter()
    torch.save(training.states(), partial)
    saved = time.perf_counter()
    meter.sync_tree(target)
    partial.replace(target / NAME)
    meter.sync_tree(target)
    end = time.perf_counter()
    return {
        "call_s": saved - start,
        "sync_s": end - saved,
        "wall_s": end - start,
        "stall_s": end - start,
        "bytes": meter.tree_bytes(target),
        "bytes_copied": training.state_bytes,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", help="ignored: this arm has no swap files")
    parser.add_argument("--stage", required=True, choices=("save", "restore"))
    parser.add_argument("--target", type=Path, required=True, help="the checkpoint's directory")
    parser.add_argument("--saves", type=int, default=1, help="saves in a row (%(default)s)")
    r1.add_arguments(parser)
    args = parser.parse_args()
    workload = r1.from_arguments(args)
    if args.stage == "restore":
        meter.forget_tree(args.target)
    start = time.perf_counter()
    training = arm_plain.build(workload, "adamw")
    record: dict[str, Any] = {"setup_s": time.perf_counter() - start}
    if args.stage == "save":
        for _ in range(workload.warmup):
            training.step()
        alone = []
        for _ in range(workload.steps):
            start = time.perf_counter()
            training.step()
            alone.append(time.perf_counter() - start)
        record |= {
            "alone_s": [alone],
            "saves": [save_once(training, args.target) for _ in range(args.saves)],
        }
    else:
        read, start = meter.io_bytes()[0], time.perf_counter()
        training.load_states(torch.load(args.target / NAME, weights_only=True))
        record |= {
            "restore_s": time.perf_counter() - start,
            "bytes_read": meter.io_bytes()[0] - read,
        }
    record["following"] = [training.step() for _ in range(FOLLOWING)]
    meter.report({**record, "peak_rss_bytes": meter.peak_rss_bytes()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
