"""One run of R1 under plain torch, all in RAM; prints one JSON line.

bf16 parameters, fp32 masters and torch's fused AdamW on them: what a user writes who has the memory. With --optimizer=none
only forward, backward and clipping: the floor of computation.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import meter
import r1
import torch


def run(workload: r1.Workload, optimizer_name: str) -> dict[str, Any]:
    """Train with an ordinary loop and measure. Blocks until done."""
    began = time.perf_counter()
    model = r1.construct(workload)
    r1.renew_rotary(model)
    for name, parameter in model.named_parameters():
        r1.fill(name, parameter.data, workload.seed)
    params = list(model.parameters())
    masters = [] if optimizer_name == "none" else [parameter.detach().float() for parameter in params]
    for master in masters:
        master.requires_grad_()
        master.grad = torch.zeros_like(master)
    optimizer = (
        torch.optim.AdamW(masters, lr=workload.lr, weight_decay=workload.weight_decay, fused=True) if masters else None
    )
    batches = r1.micro_batches(workload)

    def step() -> float:
        total = 0.0
        for tokens in batches:
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / len(batches)).backward()
            total += float(loss.detach())
        if optimizer is None:
            torch.nn.utils.clip_grad_norm_(params, workload.clip)
        else:
            for parameter, master in zip(params, masters, strict=True):
                assert parameter.grad is not None
                assert master.grad is not None
                master.grad.copy_(parameter.grad)
            torch.nn.utils.clip_grad_norm_(masters, workload.clip)
            optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(params, masters, strict=True):
                    parameter.copy_(master)
        model.zero_grad()
        return total / len(batches)

    record = meter.measure(
        step,
        flush=lambda: None,
        warmup=workload.warmup,
        steps=workload.steps,
        parameters=workload.parameters,
        setup_s=time.perf_counter() - began,
    )
    return {"arm": "plain", "torch": torch.__version__, **record}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", help="not used")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "none"), help="(%(default)s)")
    r1.add_arguments(parser)
    args = parser.parse_args()
    meter.report(run(r1.from_arguments(args), args.optimizer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
