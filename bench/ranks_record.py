"""One rank's micro-batches of R1, and the joint record of an arm's ranks. Runs in either engine's
environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import meter
import r1
import torch
import torch.distributed as dist


def batches(workload: r1.Workload, rank: int) -> list[torch.Tensor]:
    """The micro-batches of a rank, each int64 [1, tokens]; rank 0 has R1's own. The global batch
    has as many rows as ranks."""
    return r1.micro_batches(dataclasses.replace(workload, seed=workload.seed + rank))


def measure(
    step: Callable[[], float], workload: r1.Workload, *, flush: Callable[[], None], setup_s: float
) -> dict[str, Any]:
    """Run `meter.measure` on all ranks at once. Blocks."""
    dist.barrier()
    return meter.measure(
        step,
        flush=flush,
        warmup=workload.warmup,
        steps=workload.steps,
        parameters=workload.parameters,
        setup_s=setup_s,
    )


def report(engine: str, mine: dict[str, Any]) -> None:
    """Print, on rank 0, one record of all ranks. Blocks; all ranks call it.

    Times are of the slowest rank, bytes and memory the sums over ranks (`*_rank_max`: the most of
    one), losses their mean.
    """
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    if dist.get_rank():
        return
    record = {
        "engine": engine,
        "ranks": len(every),
        "s_per_step": max(one["s_per_step"] for one in every),
        "cpu_s_per_step": sum(one["cpu_s_per_step"] for one in every),
        "step_s": [max(values) for values in zip(*(one["step_s"] for one in every), strict=True)],
        "flush_s": max(one["flush_s"] for one in every),
        "setup_s": max(one["setup_s"] for one in every),
        "losses": [
            sum(values) / len(every)
            for values in zip(*(one["losses"] for one in every), strict=True)
        ],
        "torch": torch.__version__,
        "by_rank": every,
    }
    for name in (
        "read_bytes_per_param",
        "write_bytes_per_param",
        "peak_rss_bytes",
        "peak_rss_steps_bytes",
    ):
        record[name] = sum(one[name] for one in every)
    record["peak_rss_rank_max"] = max(one["peak_rss_bytes"] for one in every)
    meter.report(record)
