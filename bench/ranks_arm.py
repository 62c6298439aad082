"""One rank of R1 under infinity, started by ranks.py under torchrun; rank 0 prints one JSON line
for all."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import arm_infinity
import r1
import ranks_record
import torch
import torch.distributed as dist

import infinity as inf


def build(workload: r1.Workload, policy: inf.Policy) -> arm_infinity.Training:
    """R1 and an ordinary loop on this rank's rows."""
    model = inf.offload(
        r1.build_on_meta(workload), policy, load=partial(r1.fill, seed=workload.seed)
    )
    optimizer = inf.AdamW(model.parameters(), lr=workload.lr, weight_decay=workload.weight_decay)
    handle = inf.handle(model)
    batches = ranks_record.batches(workload, dist.get_rank())
    clips = policy.update != "backward" or policy.speculates

    def step() -> float:
        total = 0.0
        for number, tokens in enumerate(batches, 1):
            with handle.no_sync() if number < len(batches) else nullcontext():
                loss = model(input_ids=tokens, labels=tokens).loss
                (loss / len(batches)).backward()
            total += float(loss.detach())
        if clips:
            torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clip)
        optimizer.step()
        optimizer.zero_grad()
        return total / len(batches)

    return arm_infinity.Training(model, optimizer, handle, step)


def flush(handle: Any) -> None:
    """Wait until no rank has pending work."""
    handle.flush()
    dist.barrier()


def run(workload: r1.Workload, policy: inf.Policy) -> dict[str, Any]:
    """Train and measure; this rank's record. Blocks."""
    began = time.perf_counter()
    training = build(workload, policy)
    handle = training.handle
    record = ranks_record.measure(
        training.step, workload, flush=partial(flush, handle), setup_s=time.perf_counter() - began
    )
    stats = handle.stats()
    handle.close()
    held = {name: value for name, value in dataclasses.asdict(stats).items()
            if name.endswith("_bytes") or name.startswith("comm_")}  # fmt: skip
    return {**record, "zero": policy.zero, "held": held}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True, help="swap directory, of all ranks")
    parser.add_argument(
        "--zero", type=int, default=3, choices=(1, 2, 3), help="stage (%(default)s)"
    )
    arm_infinity.add_arguments(parser)
    r1.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    args.ram = None if args.ram == "default" else args.ram
    policy = dataclasses.replace(arm_infinity.policy_of(args), zero=args.zero)
    ranks_record.report("infinity", run(r1.from_arguments(args), policy))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
