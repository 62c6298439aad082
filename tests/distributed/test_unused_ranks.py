"""Stages 1 and 2 where each rank uses other modules than the others, in an order of its own:
gradients and parameters are those of DDP(find_unused_parameters=True), bit for bit."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import infinity as inf
from infinity._src.engine import offload
from infinity.aio import Seam
from infinity.errors import RankFailed, RanksDiverged
from tests.distributed.ranks import named, on_ranks
from tests.reference import ReferenceAdamW

WIDTH, BLOCKS = 24, 4
LR, DECAY = 1e-2, 0.1

Calls = tuple[int, ...]
"""The blocks that a forward calls, in order."""
Step = tuple[Calls, ...]
"""A step's micro-batches, of one rank."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Dropped(nn.Module):
    """A stack of blocks of which each call runs those that it is told to. `spare` is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        # Before the blocks: gathers end in this order, and a wait for it is none for the blocks.
        self.last = nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, calls: Calls) -> torch.Tensor:
        x = self.first(x)
        for index in calls:
            x = self.blocks[index](x)
        return self.last(x).square().mean()


def fresh() -> Dropped:
    torch.manual_seed(5)
    return Dropped()


def rows(rank: int, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(3, WIDTH, generator=generator)


Found = tuple[list[dict[str, torch.Tensor | None]], dict[str, torch.Tensor]]
"""The gradients of each step, and the parameters at the end, by name."""


def plain(rank: int, steps: Sequence[Step]) -> Found:
    """DDP, and the reference update."""
    model = fresh()
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = ReferenceAdamW(
        [{"params": list(model.parameters())}], lr=LR, weight_decay=DECAY, order=model.parameters()
    )
    grads = []
    for number, step in enumerate(steps):
        for micro, calls in enumerate(step):
            if micro + 1 < len(step):
                with wrapped.no_sync():
                    wrapped(rows(rank, number, micro), calls).backward()
            else:
                wrapped(rows(rank, number, micro), calls).backward()
        grads.append(
            {
                name: None if one.grad is None else one.grad.clone()
                for name, one in model.named_parameters()
            }
        )
        optimizer.step()
        optimizer.zero_grad()
    return grads, {name: one.detach().clone() for name, one in model.named_parameters()}


def policy(**chosen: Any) -> inf.Policy:
    values = {
        "zero": 2,
        "params": "device",
        "optim": "cpu",
        "find_unused_parameters": True,
        "rank_timeout_s": 60.0,
        **chosen,
    }
    return inf.Policy(**values)


def ours(
    rank: int, steps: Sequence[Step], chosen: dict[str, Any], seam: Seam | None = None
) -> Found:
    model = offload(fresh(), policy(**chosen), _seam=seam)
    handle, optimizer = (
        inf.handle(model),
        inf.AdamW(model.parameters(), lr=LR, weight_decay=DECAY),
    )
    grads = []
    for number, step in enumerate(steps):
        for micro, calls in enumerate(step):
            if micro + 1 < len(step):
                with handle.no_sync():
                    model(rows(rank, number, micro), calls).backward()
            else:
                model(rows(rank, number, micro), calls).backward()
        grads.append({name: handle.full_grad(one) for name, one in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    found = {name: value.clone() for name, value in model.state_dict().items()}
    handle.close()
    return grads, found


def assert_same(mine: Found, theirs: Found) -> None:
    for number, (one, other) in enumerate(zip(mine[0], theirs[0], strict=True)):
        assert one.keys() == other.keys()
        for name, grad in one.items():
            wanted = other[name]
            assert (grad is None) == (wanted is None), (number, name)
            assert grad is None or torch.equal(grad, wanted), (number, name)
    assert mine[1].keys() == theirs[1].keys()
    for name, value in mine[1].items():
        assert torch.equal(value, theirs[1][name]), name


@dataclasses.dataclass(frozen=True)
class Both:
    """The same programs (a list of steps by rank) with DDP and with the engine, under each policy."""

    programs: tuple[tuple[tuple[Step, ...], ...], ...]
    policies: tuple[dict[str, Any], ...]

    def __call__(self, rank: int, place: Path) -> list[tuple[Found, list[Found]]]:
        found = []
        for of_ranks in self.programs:
            steps = of_ranks[rank]
            theirs = plain(rank, steps)
            mine = []
            for chosen in self.policies:
                values = dict(chosen, nvme=place) if "nvme" in chosen.values() else chosen
                mine.append(ours(rank, steps, values))
            found.append((theirs, mine))
        return found


def drawn(world: int, steps: int, micros: int, seed: int) -> tuple[tuple[Step, ...], ...]:
    """Stochastic depth: each rank's forwards leave out each block with even odds."""
    odds = random.Random(seed)

    def calls() -> Calls:
        return tuple(index for index in range(BLOCKS) if odds.random() < 0.5)

    return tuple(
        tuple(tuple(calls() for _ in range(micros)) for _ in range(steps)) for _ in range(world)
    )


# Rank 0 runs what rank 1 leaves out; blocks in another order; twice; none at all.
CROSSED: tuple[tuple[Step, ...], ...] = (
    (((0, 1),), ((3, 2, 1, 0),), ((),), ((1, 1, 2),), ((),)),
    (((2, 3),), ((0, 1, 2, 3),), ((0, 3),), ((2, 0),), ((),)),
)
POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"zero": 1},
    {"optim": "nvme", "ram": "min"},
    {"optim": "nvme", "generations": 2},
)


def test_gradients_and_parameters_are_those_of_ddp_whatever_each_rank_leaves_out(
    tmp_path: Path,
) -> None:
    job = Both((CROSSED, drawn(2, 4, 1, seed=3)), POLICIES)
    for theirs, mine in [each for found in on_ranks(job, tmp_path / "run", 2) for each in found]:
        for chosen, one in zip(POLICIES, mine, strict=True):
            with named(chosen):
                assert_same(one, theirs)


def slow_drive(rank: int, place: Path) -> tuple[Found, Found]:
    """Rank 0 leaves out every block, whose updates its drive brings late; rank 1 waits for them."""
    steps = [(tuple(range(BLOCKS)) if rank == 1 else (),)] * 3
    seam = Seam(delay_us_max=100_000, seed=3) if rank == 0 else None
    chosen = {"optim": "nvme", "ram": "min", "nvme": place, "rank_timeout_s": 20.0}
    return plain(rank, steps), ours(rank, steps, chosen, seam)


def test_a_rank_that_leaves_out_what_its_drive_brings_late_holds_no_other_up(
    tmp_path: Path,
) -> None:
    for theirs, mine in on_ranks(slow_drive, tmp_path / "run", 2):
        assert_same(mine, theirs)
