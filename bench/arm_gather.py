"""One rank of ranks_bandwidth.py: the units of a model, gathered once around from throttled drives.
Started by torchrun.

    sliced   the engine: each rank reads its part of every unit, and all gather
    owner    each unit whole on the drives of one rank (round robin), which reads it and broadcasts
    it

Rank 0 prints a JSON line. A drive is a directory; what it gives is set by the executor's seam, and
divided among ranks that share it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import infinity as inf
from infinity import aio

CHUNK_BYTES = 1 << 20


class Stack(nn.Module):
    """`count` units of one square weight each, which map ones to ones: 1/hidden is exact for powers
    of two."""

    def __init__(self, count: int, hidden: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(
            nn.Linear(hidden, hidden, bias=False, dtype=torch.bfloat16) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            x = unit(x)
        return x


def drives_of(rank: int, world: int, drives: int) -> tuple[list[int], int]:
    """The drives of a rank, and how many ranks share each of them: drives are dealt out, or ranks
    are."""
    if drives >= world:
        return list(range(rank, drives, world)), 1
    mine = rank % drives
    return [mine], len(range(mine, world, drives))


def sliced(
    args: argparse.Namespace, places: list[Path], seam: aio.Seam
) -> tuple[Callable[[], None], Callable[[], int]]:
    """(a pass, bytes that this rank has read) of the engine."""
    with torch.device("meta"):
        model: Any = Stack(args.units, args.hidden)
    policy = inf.Policy(
        params="nvme", optim="nvme", nvme=places, ram="min", verify="off",
        io={"bandwidths": {str(place): [args.drive_mbps * 1e6] * 2 for place in places}},
    )  # fmt: skip
    model = inf.offload(
        model, policy, load=lambda _name, tensor: tensor.fill_(1 / args.hidden), _seam=seam
    )
    ones = torch.ones(1, args.hidden, dtype=torch.bfloat16)

    def run() -> None:
        with torch.no_grad():
            if not torch.equal(model(ones), ones):
                raise SystemExit("a unit was gathered wrong")

    return run, lambda: sum(
        drive.bytes_read for drive in inf.handle(model).parts.tiers.executor.stats().drives
    )


class Owner:
    """Units whole on one rank each, in an executor of its own: read into one of a few buffers, and
    broadcast from there."""

    def __init__(self, args: argparse.Namespace, places: list[Path], seam: aio.Seam) -> None:
        self.rank, self.world, self.count = dist.get_rank(), dist.get_world_size(), args.units
        self.unit_bytes = 2 * args.hidden**2
        self.chunk_count = -(-self.unit_bytes // CHUNK_BYTES)
        self.mine = list(range(self.rank, args.units, self.world))
        self.files = [aio.SwapFile.create(place) for place in places]
        slots = aio.PoolSpec(32 * len(places), CHUNK_BYTES)
        self.executor = aio.open_executor(
            self.files, small=aio.PoolSpec(0, 0), large=slots, verify="off", seam=seam
        )
        self.buffers = [
            torch.zeros(self.unit_bytes, dtype=torch.uint8) for _ in range(args.ahead + 2)
        ]
        self.ids = self._define()
        for turn, unit in enumerate(self.mine):
            self.buffers[0].fill_(unit % 251)
            self._submit(aio.JobKind.STORE, turn, self.buffers[0]).wait()
        self.ahead = args.ahead

    def _define(self) -> Any:
        """A record for each chunk of this rank's units, over its drives in turn."""
        if not self.mine:
            return np.zeros((0, self.chunk_count), np.int32)
        sizes = np.full(self.chunk_count, CHUNK_BYTES)
        sizes[-1] = self.unit_bytes - CHUNK_BYTES * (self.chunk_count - 1)
        chunks = np.zeros((len(self.mine), self.chunk_count), dtype=aio.CHUNK)
        number = np.arange(chunks.size).reshape(chunks.shape)
        chunks["drive"], chunks["file_offset"] = (
            number % len(self.files),
            number // len(self.files) * CHUNK_BYTES,
        )
        chunks["key"] = number + 1
        chunks["numel"] = chunks["run_bytes"] = sizes
        chunks["format"], chunks["section_count"] = aio.Format.RAW, 1
        chunks["piece_numel"], chunks["itemsize"][..., 0] = CHUNK_BYTES, 1
        chunks["section_at"] = -1
        chunks["section_at"][..., 0] = 0
        for file in self.files:
            file.grow(-(-chunks.size // len(self.files)) * CHUNK_BYTES)
        return self.executor.define(chunks.reshape(-1)).reshape(chunks.shape)

    def _submit(self, kind: aio.JobKind, turn: int, buffer: torch.Tensor) -> aio.Ticket:
        jobs = np.zeros(self.chunk_count, dtype=aio.JOB)
        jobs["chunk"], jobs["kind"], jobs["mask"], jobs["base"] = self.ids[turn], kind, 1, -1
        jobs["ptr"][:, 0] = np.uint64(buffer.data_ptr()) + np.arange(
            self.chunk_count, dtype=np.uint64
        ) * np.uint64(CHUNK_BYTES)
        return self.executor.submit(jobs, priority=aio.Priority.DEMAND)

    def run(self) -> None:
        """A pass. This rank's next `ahead` units are read while those of others are broadcast."""
        *own, common = self.buffers
        tickets = [
            self._submit(aio.JobKind.FETCH, turn, own[turn % len(own)])
            for turn in range(min(self.ahead, len(self.mine)))
        ]
        for unit in range(self.count):
            owner, turn = unit % self.world, unit // self.world
            if owner == self.rank:
                if len(tickets) <= turn:
                    tickets.append(self._submit(aio.JobKind.FETCH, turn, own[turn % len(own)]))
                tickets[turn].wait()
                following = turn + self.ahead
                if len(tickets) <= following < len(self.mine):
                    tickets.append(
                        self._submit(aio.JobKind.FETCH, following, own[following % len(own)])
                    )
            buffer = own[turn % len(own)] if owner == self.rank else common
            dist.broadcast(buffer, owner)
            if buffer[0] != unit % 251 or buffer[-1] != unit % 251:
                raise SystemExit("a unit was broadcast wrong")

    def bytes_read(self) -> int:
        """Since the beginning."""
        return sum(drive.bytes_read for drive in self.executor.stats().drives)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arm", choices=("sliced", "owner"), required=True)
    parser.add_argument("--dir", type=Path, required=True)
    for name, standard in (
        ("drives", 1),
        ("units", 24),
        ("hidden", 2048),
        ("passes", 3),
        ("ahead", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=standard)
    parser.add_argument("--drive-mbps", type=float, default=200.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mine, sharers = drives_of(rank, world, args.drives)
    places = [args.dir / f"drive{number}" for number in mine]
    for place in places:
        place.mkdir(exist_ok=True)
    seam = aio.Seam(read_bytes_per_s=args.drive_mbps * 1e6 / sharers)
    if args.arm == "sliced":
        run, bytes_read = sliced(args, places, seam)
    else:
        owner = Owner(args, places, seam)
        run, bytes_read = owner.run, owner.bytes_read
    run()  # the order of units is traced, and files are warm
    seconds, moved = [], []
    for _ in range(args.passes):
        before = bytes_read()
        dist.barrier()
        start = time.perf_counter()
        run()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        total = torch.tensor(float(bytes_read() - before), dtype=torch.float64)
        dist.all_reduce(total)
        moved.append(int(total))
    if rank == 0:
        print(
            json.dumps(
                {
                    "arm": args.arm,
                    "ranks": world,
                    "drives": args.drives,
                    "pass_s": seconds,
                    "read_bytes": moved,
                }
            )
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
