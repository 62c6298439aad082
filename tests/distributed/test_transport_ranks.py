"""Collectives over each transport: the same bits and bytes counted, on one level and on two."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from infinity._src.distributed.collectives import Collectives
from infinity._src.distributed.topology import Topology
from infinity._src.distributed.transport import (
    GlooTransport,
    Message,
    NcclTransport,
    StagedTransport,
    Transport,
)
from tests.distributed.ranks import on_ranks

CPU = torch.device("cpu")
SHARD = 4096
DTYPES = (torch.bfloat16, torch.float32, torch.int16)
"""Dtypes of three flats of a unit; gloo's collectives do not know the last."""


class Watched(GlooTransport):
    """Counts, for each exchange, the distinct memories of its messages."""

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__(group, device)
        self.memories: list[int] = []

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        storages = {tensor.untyped_storage().data_ptr() for _, tensor in [*sends, *receives]}
        self.memories.append(len(storages))
        super().exchange(sends, receives)


@dataclasses.dataclass(frozen=True)
class EveryCollective:
    """Each collective of the engine over each transport, NCCL's over gloo, on ranks of nodes with
    `local_world` ranks."""

    local_world: int

    def __call__(self, rank: int, place: Path) -> dict[str, Any]:
        world, group = dist.get_world_size(), dist.group.WORLD
        assert group is not None
        topology = Topology.of(rank, world, self.local_world)
        watched = Watched(group, CPU)
        found = {}
        transports: dict[str, Transport] = {
            "gloo": GlooTransport(group, CPU),
            "nccl": NcclTransport(group, CPU),
            "staged": StagedTransport(group, CPU, over=watched),
        }
        for name, transport in transports.items():
            collectives = Collectives(topology, transport, CPU)
            results = self.results(collectives, rank, world)
            volume = collectives.volume
            found[name] = results, (volume.inside, volume.across)
        # All messages of an exchange were in the host's buffer, and none in the memory of flats,
        # flags and sums, which are tensors of their own.
        assert max(watched.memories) == 1
        return found

    def results(self, collectives: Collectives, rank: int, world: int) -> list[torch.Tensor]:
        """Run each collective, and return its tensors."""
        chance = torch.Generator().manual_seed(rank)
        values = torch.randn(3, world, SHARD, generator=chance)

        def flats() -> list[torch.Tensor]:
            made = [torch.zeros(world, SHARD, dtype=dtype) for dtype in DTYPES]
            for flat, value in zip(made, values, strict=True):
                flat[rank] = (1000 * value[rank]).to(flat.dtype)
            return made

        whole = flats()
        collectives.all_gather(whole)
        sent = collectives.volume.inside + collectives.volume.across
        assert sent == (world - 1) * sum(SHARD * dtype.itemsize for dtype in DTYPES)
        kept = flats()
        # Parts of the counterparts are there, as secondary shards have them.
        for flat, full in zip(kept, whole, strict=True):
            for counterpart in collectives.topology.counterparts:
                flat[counterpart] = full[counterpart]
        collectives.all_gather(kept, across=False)
        coded = flats()[:2]
        collectives.all_gather_quantized(coded)
        flags = torch.zeros(world + 2, dtype=torch.uint8)
        flags[rank] = 1
        collectives.all_reduce_or(flags)
        sums = [value.to(dtype) for value, dtype in zip(values, DTYPES[:2], strict=False)]
        means = [torch.zeros(SHARD, dtype=dtype) for dtype in DTYPES[:2]]
        collectives.reduce_scatter_mean([list(each.clone()) for each in sums], means)
        coarse = [torch.zeros(SHARD, dtype=dtype) for dtype in DTYPES[:2]]
        given = [list(each.clone()) for each in sums]
        collectives.reduce_scatter_mean_quantized(given, coarse, lambda _level, _index: None)
        return [*whole, *kept, *coded, flags, *means, *coarse]


@pytest.mark.parametrize(
    ("world", "local_world"),
    [(2, 2), (2, 1), (3, 3), pytest.param(4, 2, marks=pytest.mark.ranks)],
)
def test_every_transport_moves_the_same_bits_and_counts_the_same_bytes(
    tmp_path: Path, world: int, local_world: int
) -> None:
    ranks = on_ranks(EveryCollective(local_world), tmp_path / "run", world, timeout_s=60)
    for found in ranks:
        expected, volume = found["gloo"]
        assert sum(volume) > 0
        for name in ("nccl", "staged"):
            results, counted = found[name]
            assert counted == volume, name
            for ours, theirs in zip(results, expected, strict=True):
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), name
    # Gathered: each rank has all parts, and the same.
    for found in ranks[1:]:
        for ours, theirs in zip(found["gloo"][0][:9], ranks[0]["gloo"][0][:9], strict=True):
            assert torch.equal(ours, theirs)
