"""Measures a save of R1 under infinity during training, and a restore into a fresh engine; prints
one JSON line.

    --stage save      steps alone, then steps during a save, repeated as requested; two losses after
    the last save
    --stage restore   a fresh engine in the same directories, `inf.restore`, the same two steps

checkpoints.py starts each stage as a separate process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import arm_infinity
import meter
import r1

import infinity as inf

FOLLOWING = 2
"""Steps after the last save whose losses a restored run must repeat."""
STEPS_MAX = 1000


def timed(step: Any) -> tuple[float, float]:
    """(seconds, loss) of one step."""
    start = time.perf_counter()
    loss = step()
    return time.perf_counter() - start, loss


def stall_s(call_s: float, steps: list[float], alone: list[float]) -> float:
    """Return the time that training lost: the call and the steps during the save, minus the same
    number of steps alone.

    A call that waits for the pending update, for which otherwise the next step would have waited,
    is counted once.
    """
    return call_s + sum(steps) - len(steps) * statistics.fmean(alone)


def one_save(training: arm_infinity.Training, target: Path, least: int) -> dict[str, Any]:
    """Save during training, for `least` steps or until the save is complete. Blocks until then."""
    ended: list[float] = []
    links: list[int] = []
    written = meter.io_bytes()[1]
    start = time.perf_counter()
    save = inf.save(training.model, training.optimizer, target)
    call_s = time.perf_counter() - start

    def watch() -> None:
        save.wait()
        ended.append(time.perf_counter())
        # counted now: the run removes its own links to the files later
        links.extend(path.stat().st_nlink for path in target.glob("data*"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    seconds: list[float] = []
    losses: list[float] = []
    while len(seconds) < least or (not save.done and len(seconds) < STEPS_MAX):
        took, loss = timed(training.step)
        seconds.append(took)
        losses.append(loss)
    watcher.join()
    save.wait()
    return {
        "call_s": call_s,
        "step_s": seconds,
        "wall_s": ended[0] - start,
        "bytes_copied": 0 if min(links) > 1 else save.size_bytes,
        "bytes": meter.tree_bytes(target),
        "bytes_written_meanwhile": meter.io_bytes()[1] - written,
        "following": losses[:FOLLOWING],
    }


def save_stage(
    training: arm_infinity.Training, workload: r1.Workload, target: Path, saves: int
) -> dict[str, Any]:
    """Train, save, train. Blocks until done; the last save's checkpoint stays."""
    for _ in range(workload.warmup):
        training.step()
    alone = [[timed(training.step)[0] for _ in range(workload.steps)]]
    found: list[dict[str, Any]] = []
    for _ in range(saves):
        found.append(one_save(training, target, FOLLOWING))
        alone.append([timed(training.step)[0] for _ in range(workload.steps)])
    for before, after, save in zip(alone, alone[1:], found, strict=False):
        save["stall_s"] = stall_s(save["call_s"], save["step_s"], before + after)
    return {
        "alone_s": alone,
        "saves": found,
        "following": found[-1]["following"],
        "peak_rss_bytes": meter.peak_rss_bytes(),
    }


def durable_stage(training: arm_infinity.Training) -> dict[str, Any]:
    """Return the losses that a run restored from the swap directory must repeat. Afterwards the
    directory holds that run."""
    training.handle.flush()
    return {
        "committed": training.handle.pipeline.steps,
        "commit_s": training.handle.stats().commit_s,
    }


def restore_stage(training: arm_infinity.Training, source: Path) -> dict[str, Any]:
    """Restore, and take the steps that followed the save. Blocks until done."""
    read = meter.io_bytes()[0]
    start = time.perf_counter()
    restored = inf.restore(training.model, training.optimizer, source)
    took = time.perf_counter() - start
    return {
        "restore_s": took,
        "bytes_read": meter.io_bytes()[0] - read,
        "step": restored.step,
        "following": [training.step() for _ in range(FOLLOWING)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", required=True, help="swap directory")
    parser.add_argument(
        "--stage",
        required=True,
        choices=("save", "restore", "resume"),
        help="resume: a durable run, from --dir",
    )
    parser.add_argument("--target", type=Path, required=True, help="the checkpoint's directory")
    parser.add_argument("--saves", type=int, default=1, help="saves in a row (%(default)s)")
    arm_infinity.add_arguments(parser)
    r1.add_arguments(parser)
    args = parser.parse_args()
    workload = r1.from_arguments(args)
    if args.stage == "restore":
        meter.forget_tree(args.target)
    elif args.stage == "resume":
        meter.forget_tree(Path(args.dir))
    start = time.perf_counter()
    training = arm_infinity.build(workload, arm_infinity.policy_of(args))
    setup_s = time.perf_counter() - start
    if args.stage == "save":
        record = save_stage(training, workload, args.target, args.saves)
        if args.durable == "on":
            record |= durable_stage(training)
    else:
        record = restore_stage(training, args.target if args.stage == "restore" else Path(args.dir))
    if args.stage == "save" and args.durable == "on":
        # As a crash would leave it: nothing is closed.
        meter.report({"setup_s": setup_s, **record})
        sys.stdout.flush()
        os._exit(0)
    training.handle.close()
    meter.report({"setup_s": setup_s, **record})
    return 0


if __name__ == "__main__":
    sys.exit(main())
