"""Measures `save_checkpoint` and `load_checkpoint` of R1 under DeepSpeed ZeRO-3; prints
one JSON line.

Runs in DeepSpeed's own environment, tuned as in arm_deepspeed.py. Training stops during a whole
save.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import arm_deepspeed
import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]
import meter
import r1
import torch

FOLLOWING = 2


def kinds_of(target: Path) -> dict[str, int]:
    """Return bytes by kind of file: with states on NVMe DeepSpeed's save copies its swap files."""
    found: dict[str, int] = {}
    for path in target.rglob("*"):
        if path.is_file():
            kind = "swap files" if "offloaded_tensors" in path.parts else path.suffix or "other"
            found[kind] = found.get(kind, 0) + path.stat().st_size
    return found


def save_once(engine: Any, target: Path, tag: str) -> dict[str, Any]:
    """Save, then sync the page cache. The sync is recorded separately, since DeepSpeed does not
    wait for it."""
    target.mkdir(exist_ok=True)
    start = time.perf_counter()
    engine.save_checkpoint(str(target), tag=tag)
    saved = time.perf_counter()
    meter.sync_tree(target)
    end = time.perf_counter()
    return {
        "call_s": saved - start,
        "sync_s": end - saved,
        "wall_s": end - start,
        "stall_s": saved - start,
        "bytes": meter.tree_bytes(target / tag),
        "kinds": kinds_of(target / tag),
    }


def run(args: argparse.Namespace, workload: r1.Workload) -> dict[str, Any]:
    """One stage. Blocks until done."""
    if args.stage == "restore":
        meter.forget_tree(args.target)
    start = time.perf_counter()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    arm_deepspeed.unlink_shared_memory()
    engine = arm_deepspeed.build_engine(workload, args.dir, args.offload)
    tokens = r1.micro_batches(workload)
    record: dict[str, Any] = {"setup_s": time.perf_counter() - start}

    def step() -> float:
        return arm_deepspeed.train_step(engine, tokens)

    if args.stage == "save":
        for _ in range(workload.warmup):
            step()
        alone = []
        for _ in range(workload.steps):
            start = time.perf_counter()
            step()
            alone.append(time.perf_counter() - start)
        saves = []
        for number in range(args.saves):
            saves.append(save_once(engine, args.target, f"save{number}"))
            shutil.rmtree(args.target / f"save{number - 1}", ignore_errors=True)
        record |= {"alone_s": [alone], "saves": saves}
    else:
        read, start = meter.io_bytes()[0], time.perf_counter()
        path, _ = engine.load_checkpoint(str(args.target), tag=f"save{args.saves - 1}")
        if path is None:
            raise RuntimeError("load_checkpoint found nothing that it can load")
        record |= {
            "restore_s": time.perf_counter() - start,
            "bytes_read": meter.io_bytes()[0] - read,
        }
    record["following"] = [step() for _ in range(FOLLOWING)]
    return {
        **record,
        "version": deepspeed.__version__,
        "torch": torch.__version__,
        "peak_rss_bytes": meter.peak_rss_bytes(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True, help="swap directory")
    parser.add_argument("--stage", required=True, choices=("save", "restore"))
    parser.add_argument("--target", type=Path, required=True, help="the checkpoint's directory")
    parser.add_argument("--saves", type=int, default=1, help="saves in a row (%(default)s)")
    parser.add_argument(
        "--offload",
        default="nvme",
        choices=("nvme", "cpu"),
        help="where everything rests (%(default)s)",
    )
    r1.add_arguments(parser)
    args = parser.parse_args()
    arm_deepspeed.single_process_environment()
    try:
        meter.report(run(args, r1.from_arguments(args)))
    finally:
        arm_deepspeed.unlink_shared_memory()
    # As in arm_deepspeed.py.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
