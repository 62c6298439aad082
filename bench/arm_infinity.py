"""One run of R1 under infinity with everything on NVMe and the smallest RAM budget; prints one JSON line."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from typing import Any

import meter
import r1
import torch

import infinity as inf


def run(workload: r1.Workload, swap_dir: str, verify: str) -> dict[str, Any]:
    """Train with an ordinary loop and measure. Blocks until done."""
    began = time.perf_counter()
    policy = inf.Policy(params="nvme", optim="nvme", nvme=[swap_dir], ram="min", verify=verify)
    model = inf.offload(r1.build_on_meta(workload), policy, load=partial(r1.fill, seed=workload.seed))
    optimizer = inf.AdamW(model.parameters(), lr=workload.lr, weight_decay=workload.weight_decay)
    handle = inf.handle(model)
    batches = r1.micro_batches(workload)

    def step() -> float:
        total = 0.0
        for tokens in batches:
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / len(batches)).backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clip)
        optimizer.step()
        optimizer.zero_grad()
        return total / len(batches)

    record = meter.measure(
        step,
        flush=handle.flush,
        warmup=workload.warmup,
        steps=workload.steps,
        parameters=workload.parameters,
        setup_s=time.perf_counter() - began,
    )
    handle.close()
    return {"arm": "infinity", "verify": verify, "torch": torch.__version__, **record}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True, help="swap directory")
    parser.add_argument("--verify", default="full", choices=("full", "sample", "off"), help="checksums (%(default)s)")
    r1.add_arguments(parser)
    args = parser.parse_args()
    meter.report(run(r1.from_arguments(args), args.dir, args.verify))
    return 0


if __name__ == "__main__":
    sys.exit(main())
