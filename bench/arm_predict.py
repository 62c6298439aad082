"""Makes one measurement for predict.py, in a separate process; prints one JSON line.

plain    forward and backward of one micro-batch with everything in RAM and no optimizer, and the
memory's bandwidth
step     a training step of R1 under a policy, on drives that the fault injector may throttle, and
the plan's forecast of it
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import meter
import r1
import torch

import infinity as inf
from infinity._src.engine.handle import offload
from infinity._src.plan.machine import Machine, describe_machine
from infinity._src.plan.memory import beside_budgets
from infinity._src.plan.predict import Prediction, predict
from infinity._src.plan.workload import Job, ModelShape, shape_of
from infinity.aio import Seam

COPY_BYTES = 256 << 20
PLAIN_ROUNDS = 3


def plain(workload: r1.Workload) -> dict[str, Any]:
    """Median seconds of forward and of backward of one micro-batch; bytes per second through memory
    (read and written)."""
    model = r1.build_on_meta(workload).to_empty(device="cpu")
    r1.renew_rotary(model)
    for name, parameter in model.named_parameters():
        r1.fill(name, parameter.data, workload.seed)
    tokens = r1.micro_batches(workload)[0]
    forwards, backwards = [], []
    for _ in range(PLAIN_ROUNDS + 1):
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        middle = time.perf_counter()
        loss.backward()
        forwards.append(middle - start)
        backwards.append(time.perf_counter() - middle)
        model.zero_grad()
    source, target = (
        torch.ones(COPY_BYTES, dtype=torch.uint8),
        torch.ones(COPY_BYTES, dtype=torch.uint8),
    )
    copies = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        copies.append(2 * COPY_BYTES / (time.perf_counter() - start))
    return {
        "forward_s": statistics.median(forwards[1:]),
        "backward_s": statistics.median(backwards[1:]),
        "memory_bytes_per_s": statistics.median(copies),
    }


def budget_of(shape: ModelShape, machine: Machine, job: Job, ram: str) -> int | str:
    """Return a configuration's `ram` in bytes: "min", or a share of the bytes that keep everything
    in RAM."""
    if ram == "min":
        return ram
    found = predict(shape, machine, job)
    whole = found.budget_bytes
    return int(float(ram) * whole) + 1


def step(config: dict[str, Any], workload: r1.Workload, directory: str) -> dict[str, Any]:
    """Measure one configuration and predict it. Blocks until done."""
    began = time.perf_counter()
    read, write = config["read_bytes_per_s"], config["write_bytes_per_s"]
    policy = inf.Policy(
        params="nvme",
        optim="nvme",
        nvme=[directory],
        state=config["state"],
        update=config["update"],
        delayed_warmup=0,
    )
    job = Job(
        policy,
        tokens=workload.tokens * workload.micro_batches,
        sequence=workload.tokens,
        micro_batches=workload.micro_batches,
        checkpointing=False,
        compute_s=(config["forward_s"], config["backward_s"]),
    )
    machine = describe_machine(
        gpus=0, ram_bytes=1e15, gpu_mem_bytes=1e15, read_bytes_per_s=read, write_bytes_per_s=write,
        dram_bytes_per_s=config["memory_bytes_per_s"], cores=len(os.sched_getaffinity(0)),
    )  # fmt: skip
    model = r1.build_on_meta(workload)
    shape = shape_of(model)
    ram = budget_of(shape, machine, job, config["ram"])
    seam = Seam(read_bytes_per_s=read, write_bytes_per_s=write) if config["throttled"] else None
    policy = dataclasses.replace(policy, ram=ram)
    offload(model, policy, load=partial(r1.fill, seed=workload.seed), _seam=seam)
    optimizer = inf.AdamW(model.parameters(), lr=workload.lr, weight_decay=workload.weight_decay)
    handle = inf.handle(model)
    batches = r1.micro_batches(workload)

    def one() -> float:
        total = 0.0
        for index, tokens in enumerate(batches):
            last = index == len(batches) - 1
            loss = model(input_ids=tokens, labels=tokens).loss
            if last:
                (loss / len(batches)).backward()
            else:
                with handle.no_sync():
                    (loss / len(batches)).backward()
            total += float(loss.detach())
        if config["update"] != "backward":
            torch.nn.utils.clip_grad_norm_(model.parameters(), workload.clip)
        optimizer.step()
        optimizer.zero_grad()
        return total / len(batches)

    record = meter.measure(
        one,
        flush=handle.flush,
        warmup=workload.warmup,
        steps=workload.steps,
        parameters=workload.parameters,
        setup_s=time.perf_counter() - began,
    )
    stats = handle.stats()
    handle.close()
    beside = beside_budgets(shape, machine, job)
    found = predict(shape, describe(machine, stats.ram_bytes + beside), job)
    return {
        **record,
        **told(found, workload),
        "ram_bytes": stats.ram_bytes,
        "nvme_bytes": stats.nvme_bytes,
    }


def describe(machine: Machine, ram_bytes: int) -> Machine:
    """Return the machine with this much RAM."""
    return dataclasses.replace(machine, ram_bytes=ram_bytes)


def told(found: Prediction, workload: r1.Workload) -> dict[str, Any]:
    """Return the planner's figures, for the results."""
    total = found.moved.total
    return {
        "predicted_s": found.step_s,
        "predicted_limit_s": found.limits.schedule_s,
        "predicted_floor_s": found.limits.floor_s,
        "predicted_terms_s": found.terms_s,
        "predicted_read_bytes_per_param": total.read / workload.parameters,
        "predicted_write_bytes_per_param": total.written / workload.parameters,
        "predicted_nvme_bytes": found.nvme.bytes,
        "predicted_ram_bytes": found.budget_bytes,
        "predicted_fits": found.fits,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("plain", "step"))
    parser.add_argument("--dir", type=Path, default=Path(), help="swap directory (step)")
    parser.add_argument("--config", default="{}", help="the configuration as JSON (step)")
    r1.add_arguments(parser)
    args = parser.parse_args()
    workload = r1.from_arguments(args)
    meter.report(
        plain(workload)
        if args.part == "plain"
        else step(json.loads(args.config), workload, str(args.dir))
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
