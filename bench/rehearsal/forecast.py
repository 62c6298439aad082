"""Forecasts of `infinity plan` for a rehearsal, from rates that were measured just before it."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from pathlib import Path
from typing import Any

import drive
import harness
import torch
from torch import nn

import infinity as inf
from infinity._src.plan.machine import Machine, describe_machine
from infinity._src.plan.memory import beside_budgets
from infinity._src.plan.predict import outside, predict
from infinity._src.plan.workload import Job, ModelShape

COPY_BYTES = 256 << 20
ROUNDS = 3

Rates = dict[str, float]


def measure_rates(directory: Path, linear: nn.Linear, tokens: int) -> Rates:
    """Measure what this machine does in a second: bytes of its drive and of its memory (read and
    written), and floating-point operations of this layer, forward and backward. Blocks for seconds.
    """
    found = drive.measure(directory)
    return {
        "read_bytes_per_s": found["read"],
        "write_bytes_per_s": found["write"],
        "dram_bytes_per_s": 2 * COPY_BYTES / statistics.median(_copies()),
        "flops_per_gpu": _flops(linear, tokens),
    }


def _copies() -> list[float]:
    """Seconds of copies of `COPY_BYTES`."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.ones(COPY_BYTES, dtype=torch.uint8)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return seconds


def _flops(linear: nn.Linear, tokens: int) -> float:
    """Operations in a second of a forward and a backward. The first round is not counted."""
    x = torch.randn(tokens, linear.in_features, dtype=linear.weight.dtype, requires_grad=True)
    seconds = []
    for _ in range(1 + ROUNDS):
        began = time.perf_counter()
        linear(x).sum().backward()
        seconds.append(time.perf_counter() - began)
        linear.weight.grad = x.grad = None
    return 6 * tokens * linear.weight.numel() / statistics.median(seconds[1:])


def machine_of(rates: Rates, ram_bytes: int, drives: int = 1) -> Machine:
    """Describe this machine with the budget that an engine used; the CPU computes. Rates that are
    not given are assumed."""
    given: dict[str, Any] = dict(rates)
    return describe_machine(
        gpus=0, ram_bytes=ram_bytes, gpu_mem_bytes=1e15, drives=drives,
        cores=len(os.sched_getaffinity(0)), **given,
    )  # fmt: skip


def forecast(
    shape: ModelShape,
    policy: inf.Policy,
    machine: Machine,
    tokens: int,
    *,
    checkpointing: bool,
    expert_tile: int = 0,
    init: bool = False,
) -> dict[str, Any]:
    """Return the planner's figures for steps of one sequence, after the first, and for set-up.
    init: it draws the values, and reads none."""
    job = Job(
        policy, tokens=tokens, sequence=tokens, checkpointing=checkpointing,
        expert_tile=expert_tile,
    )  # fmt: skip
    # `machine_of` includes the overhead besides the budget in the machine's RAM.
    beside = beside_budgets(shape, machine, job)
    machine = dataclasses.replace(machine, ram_bytes=machine.ram_bytes + beside)
    found = predict(shape, machine, job)
    besides = outside(shape, found)
    total, set_up = found.moved.total, besides.set_up
    return {
        "fits": found.fits,
        "step_s": found.step_s,
        "terms_s": found.terms_s,
        "read_bytes": total.read,
        "written_bytes": total.written,
        "file_bytes": found.nvme.bytes,
        "ram_bytes": found.budget_bytes,
        "beside_ram_bytes": found.ram_beside.peak,
        "set_up": {
            "s": set_up.init_seconds if init else set_up.seconds,
            "read_bytes": 0.0 if init else set_up.read,
            "written_bytes": set_up.written,
        },
    }


def show(record: dict[str, Any]) -> None:
    """Print measurements next to the plan's forecast. record: with set-up, steps (the median of all
    but the first counts), forecast and parameters."""
    plan, set_up = record["forecast"], record["set_up"]
    steps, parameters = record["steps"][1:] or record["steps"], record["parameters"]

    def median(name: str) -> float:
        return statistics.median(step[name] for step in steps)

    rows = [
        ("step, s", median("s"), plan["step_s"]),
        ("read in a step, B/param", median("read_bytes_per_param"),
         plan["read_bytes"] / parameters),
        ("written in a step, B/param", median("written_bytes_per_param"),
         plan["written_bytes"] / parameters),
        ("`ram`, GB", record["ram_bytes"] / 1e9, plan["ram_bytes"] / 1e9),
        ("swap files, GB", set_up["file_bytes"] / 1e9, plan["file_bytes"] / 1e9),
        ("set-up, s", set_up["s"], plan["set_up"]["s"]),
        ("read at set-up, B/param", set_up["read_bytes"] / parameters,
         plan["set_up"]["read_bytes"] / parameters),
        ("written at set-up, B/param", set_up["written_bytes"] / parameters,
         plan["set_up"]["written_bytes"] / parameters),
    ]  # fmt: skip
    harness.print_table(
        "measured (steps: medians after the first), and the plan",
        ["", "measured", "forecast"],
        [[name, f"{measured:.2f}", f"{said:.2f}"] for name, measured, said in rows],
    )
