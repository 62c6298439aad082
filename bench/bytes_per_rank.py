"""Bytes of each rank, by state, ZeRO stage and tier: the prediction of `infinity plan`, compared
with the engine's allocations.

    python bench/bytes_per_rank.py --dir /mnt/nvme0                        # 2 ranks on the CPU,
    gloo; a minute
    python bench/bytes_per_rank.py --dir /mnt/nvme0 --ranks 4 --nodes 2    # the same with a mesh of
    2 x 2
    python bench/bytes_per_rank.py --dir /mnt/nvme0 --json FILE            # one record a line, too

For each case every rank trains for two steps of two micro-batches. Then rank 0 and the last rank,
which has the padding, count: sections of chunks by the place of their memory or extents, slabs of
gradients and of whole sums, storages of flats, shards and retained errors; and the bytes that a
step sends to reduce gradients. The counts use no plan. For gathered memory, which is freed again,
the peak counts. Pools, checksums and scratch are no states and do not count. The prediction uses
only the model's shape and the policy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pickle
import sys
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import harness
import r1
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import infinity as inf
from infinity._src.base.sizes import GIB, format_size
from infinity._src.memory.flat_layout import aligned_section_bytes
from infinity._src.plan.machine import describe_machine
from infinity._src.plan.memory import BESIDE_BUDGET, TierBytes
from infinity._src.plan.ranks import bytes_of_rank, exchanges
from infinity._src.plan.workload import Job, shape_in, shape_of

MICRO_BATCHES = 2
RAM_BYTES = 64 * GIB  # for each rank
STEPS = 2
NOT_STATES = ("buffers and checksums", BESIDE_BUDGET)
SENT = "gradients sent in a step"

CASES: dict[str, dict[str, Any]] = {
    "stage 1: optimizer on CPU": {"zero": 1, "params": "device", "optim": "cpu"},
    "stage 1: optimizer on NVMe": {"zero": 1, "params": "device", "optim": "nvme"},
    "stage 2: optimizer on CPU": {"zero": 2, "params": "device", "optim": "cpu"},
    "stage 2: optimizer on NVMe": {"zero": 2, "params": "device", "optim": "nvme"},
    "stage 3: all on CPU": {"params": "cpu", "optim": "cpu"},
    "stage 3: optimizer on NVMe": {"params": "cpu", "optim": "nvme"},
    "stage 3: all on NVMe": {"params": "nvme", "optim": "nvme"},
    "stage 3: parameters on the device": {"params": "device", "optim": "cpu"},
    "stage 3: compact, all on NVMe": {"params": "nvme", "optim": "nvme", "state": "compact"},
    "stage 3: hpZ on CPU": {"params": "cpu", "optim": "cpu", "hpz": "cpu"},
    "stage 3: hpZ on the device": {"params": "cpu", "optim": "cpu", "hpz": "device"},
    "stage 3: qgZ with errors fed back": {
        "params": "cpu",
        "optim": "cpu",
        "qgz": True,
        "error_feedback": True,
    },
}


@dataclasses.dataclass(frozen=True)
class Task:
    """Work of every rank: the cases, the model, the ranks as nodes x ranks of a node."""

    cases: tuple[str, ...]
    workload: r1.Workload
    world: int
    nodes: int
    directory: str


def policy_of(case: str) -> dict[str, Any]:
    """Return the case's policy fields: no state rests above its tier, whatever the budget."""
    values = CASES[case]
    resident = {kind: 0.0 for kind in ("params", "optim") if values[kind] == "nvme"}
    return {**values, "resident": resident or None, "ram": RAM_BYTES}


Said = tuple[dict[str, TierBytes], tuple[int, int]]
"""Bytes by state and tier; gradients sent in a step, inside the node and across."""


def predicted(case: str, task: Task) -> Said:
    """Return the planner's bytes of one rank, states only."""
    policy = inf.Policy(**policy_of(case), nvme=["."])  # no directory is opened
    machine = describe_machine(
        gpus=0,
        ranks=task.world // task.nodes,
        nodes=task.nodes,
        ram_bytes=float(RAM_BYTES * task.world),
        drives=1,
    )
    with torch.device("meta"):
        shape = shape_of(model_of(task.workload), nested=False)
    tokens = task.world * 64 * MICRO_BATCHES
    job = Job(policy, tokens=tokens, sequence=64, micro_batches=MICRO_BATCHES)
    states = {
        name: size
        for name, size in bytes_of_rank(shape, machine, job).states.items()
        if name not in NOT_STATES
    }
    (sent,) = (
        each
        for each in exchanges(shape_in(job, shape), machine, job, 0.0).each
        if each.name == "reduction of gradients"
    )
    return states, (int(sent.count * sent.inside), int(sent.count * sent.across))


def model_of(workload: r1.Workload) -> torch.nn.Module:
    """R1's model at this size, in bf16."""
    return r1.LlamaForCausalLM(workload.config()).to(torch.bfloat16)


def counted(model: torch.nn.Module, policy: inf.Policy) -> dict[str, TierBytes]:
    """Return the bytes that this rank's engine has allocated, by the planner's names."""
    handle: Any = inf.handle(model)
    found: dict[str, TierBytes] = defaultdict(TierBytes)
    sections, extents = 0, 0
    for flat in handle.parts.split.flats:
        shard = handle.parts.tiers.store[flat]
        for record in shard.records:
            for index, section in enumerate(shard.sections):
                name = (
                    "gradients"
                    if index >= shard.format.written_count
                    else "optimizer states"
                    if index
                    else "parameters at rest"
                )
                size = section.size_bytes(int(record["numel"]))
                if record["section_at"][index] >= 0:
                    found[name] += TierBytes(
                        nvme=aligned_section_bytes(section, int(record["numel"]))
                    )
                else:
                    assert record["section_ptr"][index], (flat, name)
                    found[name] += TierBytes(cpu=size)
                    sections += -(-size // 64) * 64
        extents += sum(place.size_bytes for place in shard.places)
    # The records list all allocations in slabs and swap files.
    assert sections == handle.parts.tiers.store.resident_bytes, (
        sections,
        handle.parts.tiers.store.resident_bytes,
    )
    assert extents == handle.parts.tiers.store.nvme_bytes, (
        extents,
        handle.parts.tiers.store.nvme_bytes,
    )
    files = (
        handle.parts.tiers.storage.space.files
        if handle.parts.tiers.storage.space is not None
        else []
    )
    assert sum(os.fstat(file.fd).st_blocks * 512 for file in files) >= extents
    assert sum(size.nvme for size in found.values()) == extents
    found["gradients"] += TierBytes(cpu=handle.parts.tiers.buffers.size_bytes)
    live = sum(flat.tensor.untyped_storage().nbytes() for flat in handle.parts.split.flats)
    if policy.zero < 3:
        found["parameters on the device"] = TierBytes(device=live)
    else:
        found["parameters gathered, at most"] = TierBytes(device=handle.stats().gathered_bytes_peak)
    reducer, kept = handle.parts.grads.reducer, handle.unsharder._pending.secondary
    if reducer._unreduced is not None:
        found["whole sums of gradients"] = TierBytes(cpu=reducer._unreduced.size_bytes)
    if kept is not None:
        size = sum(part.nbytes for part in kept._parts.values())
        if policy.hpz is None:
            found["shards kept on the device"] = TierBytes(device=size)
        else:
            found["the node's copy (hpZ)"] = (
                TierBytes(device=size) if policy.hpz == "device" else TierBytes(cpu=size)
            )
    errors = reducer._reduce_scatter._errors.tensors
    if errors:
        found["errors fed back (qgZ)"] = TierBytes(cpu=sum(error.nbytes for error in errors))
    return {name: size for name, size in found.items() if size}


def train(case: str, task: Task, mesh: Any) -> Said:
    """Train two steps of a case on this rank, and count its bytes."""
    torch.manual_seed(0)
    policy = inf.Policy(**policy_of(case), nvme=[task.directory], mesh=mesh)
    model = inf.offload(model_of(task.workload), policy)
    try:
        optimizer = inf.AdamW(model.parameters(), lr=1e-4)
        ids = torch.randint(0, task.workload.vocab, (1, 64))
        for _ in range(STEPS):
            for index in range(MICRO_BATCHES):
                with inf.handle(model).no_sync() if index < MICRO_BATCHES - 1 else nullcontext():
                    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        inf.handle(model).flush()
        stats = inf.handle(model).stats()
        return counted(model, policy), (
            stats.comm_reduce_inside_bytes // STEPS,
            stats.comm_reduce_across_bytes // STEPS,
        )
    finally:
        inf.handle(model).close()


def rank_main(rank: int, task: Task, place: str) -> None:
    """Run every case on one rank, one after the other; rank 0 and the last rank write their counts.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=task.world
    )
    mesh = dist.device_mesh.init_device_mesh("cpu", (task.nodes, task.world // task.nodes))
    found = {case: train(case, task, mesh) for case in task.cases}
    if rank in (0, task.world - 1):
        Path(place, f"counted{rank}").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


def measure(task: Task) -> list[dict[str, Said]]:
    """Return the counts of rank 0 and the last rank, by case. Blocks until all ranks have ended."""
    with tempfile.TemporaryDirectory() as place:
        mp.spawn(rank_main, (task, place), nprocs=task.world)
        return [
            pickle.loads(Path(place, f"counted{rank}").read_bytes())
            for rank in sorted({0, task.world - 1})
        ]


def rows_of(task: Task, ranks: list[dict[str, Said]]) -> list[dict[str, Any]]:
    """Yield a row for each case, state and tier: bytes predicted, and counted on each of the two
    ranks."""
    rows = []
    for case in task.cases:
        (said, sent), counts = predicted(case, task), [found[case][0] for found in ranks]
        for name in dict.fromkeys([*said, *(name for count in counts for name in count)]):
            for tier in ("device", "cpu", "nvme"):
                values = [int(getattr(count.get(name, TierBytes()), tier)) for count in counts]
                planned = int(getattr(said.get(name, TierBytes()), tier))
                if planned or any(values):
                    rows.append(
                        {
                            "case": case,
                            "state": name,
                            "tier": tier,
                            "predicted": planned,
                            "counted": values,
                        }
                    )
        for index, way in enumerate(("inside", "across")):
            values = [found[case][1][index] for found in ranks]
            if sent[index] or any(values):
                rows.append(
                    {
                        "case": case,
                        "state": SENT,
                        "tier": way,
                        "predicted": sent[index],
                        "counted": values,
                    }
                )
    return rows


def differs(row: dict[str, Any]) -> bool:
    """True when a row differs from its prediction. Counts must match to the byte; the prediction of
    gathered parameters is an upper bound of their peak."""
    bound = row["state"] == "parameters gathered, at most"
    return any(
        value > row["predicted"] or (value != row["predicted"] and not bound)
        for value in row["counted"]
    )


def as_markdown(rows: list[dict[str, Any]], params: int) -> str:
    """Return the table of docs/performance.md: rank 0's counts in bytes per parameter of the model.
    """
    short = {
        "parameters gathered, at most": "gathered",
        "parameters on the device": "parameters",
        "optimizer states": "optimizer",
        "parameters at rest": "parameters",
        "whole sums of gradients": "whole sums",
        "shards kept on the device": "secondary shards",
        "the node's copy (hpZ)": "the node's copy",
        "errors fed back (qgZ)": "errors",
    }
    lines = ["| bytes per parameter | device | RAM | NVMe |", "|---|---|---|---|"]
    for case in dict.fromkeys(row["case"] for row in rows):
        cells = []
        for tier in ("device", "cpu", "nvme"):
            found = [row for row in rows if row["case"] == case and row["tier"] == tier]
            cells.append(
                ", ".join(
                    f"{short.get(row['state'], row['state'])} {row['counted'][0] / params:.2f}"
                    for row in found
                )
            )
        lines.append(f"| {case} | {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir", type=Path, default=os.environ.get("INFINITY_NVME_DIR"), help="swap directory"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1, help="nodes among which ranks are divided")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1021)
    parser.add_argument(
        "--only", type=harness.some_of(CASES), default=list(CASES), metavar="CASE,CASE"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the table of docs/performance.md instead"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a record")
    args = parser.parse_args(argv)
    if args.dir is None:
        parser.error("--dir DIR (or $INFINITY_NVME_DIR) says where swap files go")
    if args.nodes < 1 or args.ranks < 2 or args.ranks % args.nodes:
        parser.error(
            f"--ranks {args.ranks} --nodes {args.nodes}: give at least two ranks, as many on each "
            "node"
        )
    return args


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 where something is not as predicted."""
    args = parse(argv)
    workload = r1.Workload(hidden=args.hidden, layers=args.layers, vocab=args.vocab)
    task = Task(tuple(args.only), workload, args.ranks, args.nodes, str(args.dir))
    rows = rows_of(task, measure(task))
    with torch.device("meta"):
        params = sum(parameter.numel() for parameter in model_of(workload).parameters())
    cells = [
        [
            row["case"],
            row["state"],
            row["tier"],
            f"{row['predicted']:,}",
            *(f"{value:,}" for value in row["counted"]),
            f"{row['counted'][0] / params:.3f}",
            "differs" if differs(row) else "",
        ]
        for row in rows
    ]
    title = (
        f"{params:,} parameters ({format_size(2 * params)} in bf16), {args.ranks} ranks on "
        f"{args.nodes} node(s): bytes"
    )
    columns = [
        "case",
        "state",
        "tier",
        "predicted",
        "rank 0",
        f"rank {args.ranks - 1}",
        "B/param",
        "",
    ]
    if args.markdown:
        print(as_markdown(rows, params))
    else:
        harness.print_table(title, columns, cells)
    if args.json is not None:
        record = {
            "run": harness.now(),
            "machine": harness.machine(),
            "params": params,
            "ranks": args.ranks,
            "nodes": args.nodes,
        }
        harness.append_line(
            args.json, record | {"workload": dataclasses.asdict(workload), "rows": rows}
        )
    wrong = [row for row in rows if differs(row)]
    for row in wrong:
        sys.stderr.write(f"not as predicted: {json.dumps(row)}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
