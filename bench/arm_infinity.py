"""One run of R1 under infinity, by default with everything on NVMe and the smallest RAM budget; prints one JSON line."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import meter
import r1
import torch

import infinity as inf


def run(workload: r1.Workload, policy: inf.Policy) -> dict[str, Any]:
    """Train with an ordinary loop and measure. Blocks until done. update="backward" cannot clip, and does not."""
    began = time.perf_counter()
    model = inf.offload(r1.build_on_meta(workload), policy, load=partial(r1.fill, seed=workload.seed))
    optimizer = inf.AdamW(model.parameters(), lr=workload.lr, weight_decay=workload.weight_decay)
    handle = inf.handle(model)
    batches = r1.micro_batches(workload)

    def step() -> float:
        total = 0.0
        for number, tokens in enumerate(batches, 1):
            with handle.no_sync() if number < len(batches) else nullcontext():
                loss = model(input_ids=tokens, labels=tokens).loss
                (loss / len(batches)).backward()
            total += float(loss.detach())
        if policy.update != "backward":
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
    stats = handle.stats()
    terms = stats.terms
    handle.close()
    return {
        "arm": "infinity",
        "verify": policy.verify,
        "torch": torch.__version__,
        **record,
        "nvme_share": stats.nvme_bytes / max(stats.nvme_bytes + stats.resident_bytes, 1),
        "ram_bytes": stats.ram_bytes,
        "gathered_bytes_peak": stats.gathered_bytes_peak,
        "update": policy.update,
        "moved": dataclasses.asdict(terms.moved) if terms is not None else None,
        "terms": str(terms),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True, help="swap directory")
    parser.add_argument("--verify", default="full", choices=("full", "sample", "off"), help="checksums (%(default)s)")
    parser.add_argument("--tier", default="nvme", choices=("nvme", "cpu", "device"),
                        help="where everything may rest; device: parameters, with states in RAM (%(default)s)")  # fmt: skip
    parser.add_argument("--ram", default="min", help="Policy(ram=) (%(default)s)")
    parser.add_argument("--state", default="exact", choices=("exact", "bf16", "compact"), help="(%(default)s)")
    parser.add_argument("--update", default="deferred", choices=("deferred", "backward", "delayed"), help="(%(default)s)")
    parser.add_argument("--nonfinite", default="raise", choices=("raise", "ignore"), help="(%(default)s)")
    r1.add_arguments(parser)
    args = parser.parse_args()
    nvme = [args.dir] if args.tier == "nvme" else ()
    policy = inf.Policy(
        params=args.tier, optim="cpu" if args.tier == "device" else args.tier, nvme=nvme, ram=args.ram, verify=args.verify, state=args.state,
        update=args.update, delayed_warmup=0, on_nonfinite=args.nonfinite,
    )  # fmt: skip
    meter.report(run(r1.from_arguments(args), policy))
    return 0


if __name__ == "__main__":
    sys.exit(main())
