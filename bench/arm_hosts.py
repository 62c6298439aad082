"""One rank of a training over two nodes, started by hosts.py under torchrun; rank 0 prints one JSON
line."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import meter
import r1
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import infinity as inf

NODES = 2
# hpz: the secondary shard is in CPU memory, like the first.
SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "qwz": {"qwz": True},
    "hpz": {"hpz": "cpu"},
    "qgz": {"qgz": True},
    "all": {"qwz": True, "hpz": "cpu", "qgz": True},
}
# In the polling interval heartbeats and barriers send less than this; a gather sends more.
SMALL_BYTES, PAUSE_S = 16384, 0.3


def link_bytes(link: str) -> int:
    """Bytes that this node has sent over the link."""
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text())


def engine_counts(handle: Any) -> dict[str, float]:
    """Return the engine's counts of communication, on this rank, since set-up."""
    return {name: float(value) for name, value in dataclasses.asdict(handle.stats()).items()
            if name.startswith("comm_") and isinstance(value, (int, float))}  # fmt: skip


def counts_at_rest(link: str, handle: Any) -> tuple[int, dict[str, float]]:
    """Return the counts of bytes sent once no rank is sending: prefetching gathers continue after a
    step. Collective."""
    before = -SMALL_BYTES
    while link_bytes(link) - before >= SMALL_BYTES:
        before = link_bytes(link)
        time.sleep(PAUSE_S)
    dist.barrier()
    found = (link_bytes(link), engine_counts(handle))
    dist.barrier()
    return found


def train(workload: r1.Workload, arm: str, link: str) -> dict[str, Any] | None:
    """Train and measure; the record on rank 0, None elsewhere. Blocks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (NODES, world // NODES), mesh_dim_names=("nodes", "ranks"))
    policy = inf.Policy(params="cpu", optim="cpu", mesh=mesh, **SWITCHES[arm])
    began = time.perf_counter()
    model = inf.offload(
        r1.build_on_meta(workload), policy, load=partial(r1.fill, seed=workload.seed)
    )
    optimizer = inf.AdamW(model.parameters(), lr=workload.lr, weight_decay=workload.weight_decay)
    handle = inf.handle(model)
    batches = r1.micro_batches(dataclasses.replace(workload, seed=workload.seed + rank))
    setup_s = time.perf_counter() - began

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

    def done() -> None:
        handle.flush()
        dist.barrier()

    losses = [step() for _ in range(workload.warmup)]
    gc.collect()
    done()
    before = counts_at_rest(link, handle)
    marks = [time.perf_counter()]
    for _ in range(workload.steps):
        losses.append(step())
        marks.append(time.perf_counter())
    done()
    total_s = time.perf_counter() - marks[0]
    after = counts_at_rest(link, handle)
    mine = {
        "link": (after[0] - before[0]) / workload.steps,
        "engine": {name: (after[1][name] - before[1][name]) / workload.steps for name in after[1]},
        "losses": losses,
        "peak_rss_bytes": meter.peak_rss_bytes(),
    }
    handle.close()
    found: list[Any] = [None] * world
    dist.all_gather_object(found, mine)
    if rank:
        return None
    heads = found[:: world // NODES]  # the first rank of each node: a node's ranks share its link
    return {
        "s_per_step": total_s / workload.steps,
        "step_s": [round(b - a, 4) for a, b in itertools.pairwise(marks)],
        "setup_s": round(setup_s, 2),
        "m_bytes": 2 * workload.parameters,
        "link_bytes_per_step": sum(head["link"] for head in heads),
        "link_bytes_per_step_by_node": [head["link"] for head in heads],
        "engine_per_step": {
            name: sum(each["engine"][name] for each in found) for name in mine["engine"]
        },
        "losses": [
            sum(values) / world for values in zip(*(each["losses"] for each in found), strict=True)
        ],
        "peak_rss_bytes": max(each["peak_rss_bytes"] for each in found),
        "torch": torch.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arm", required=True, choices=tuple(SWITCHES))
    parser.add_argument("--link", required=True, help="the interface whose bytes are counted")
    parser.add_argument("--vocab", type=int, default=r1.Workload().vocab, help="(%(default)s)")
    r1.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    record = train(
        dataclasses.replace(r1.from_arguments(args), vocab=args.vocab), args.arm, args.link
    )
    if record is not None:
        meter.report(record)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
