"""The engine takes nothing from torch's generators: every rank draws what its plain loop draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity as inf
from tests.distributed.plain_ranks import Mean, Rules
from tests.distributed.ranks import on_ranks
from tests.reference import ReferenceAdamW


class Block(nn.Module):
    """Dropout, recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.3), nn.Linear(24, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return x + found


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3))).to(torch.bfloat16)


def batch_of(rank: int) -> torch.Tensor:
    """Drawn from torch's generator, as loops do."""
    return torch.randn(4, 24).bfloat16() + rank


def drawn(rank: int, place: Path) -> list[tuple[list[float], torch.Tensor]]:
    """Losses of a training with dropout under several policies, and where the generator is then;
    each rank has its seed."""
    found = []
    nvme: dict[str, Any] = {"params": "nvme", "optim": "nvme", "ram": "min", "nvme": place}
    for values in (
        {"zero": 2, "params": "device"},
        nvme,
        {**nvme, "state": "compact", "update": "backward", "generations": 2},
    ):
        model = network()
        torch.manual_seed(100 + rank)
        inf.offload(model, inf.Policy(**values))
        optimizer = inf.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(3):
            loss = model(batch_of(rank)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        inf.handle(model).close()
        found.append((losses, torch.get_rng_state()))
    return found


def plainly(world: int) -> list[tuple[list[float], torch.Tensor]]:
    """The same in one process with one model: each rank's generator is put in place for its
    turn."""
    model = network()
    optimizer = ReferenceAdamW([{"params": model.parameters()}], lr=1e-3)
    mean, states, losses = Mean(Rules()), [], [[] for _ in range(world)]
    for rank in range(world):
        torch.manual_seed(100 + rank)
        states.append(torch.get_rng_state())
    for _ in range(3):
        grads = []
        for rank in range(world):
            torch.set_rng_state(states[rank])
            loss = model(batch_of(rank)).float().square().mean()
            loss.backward()
            losses[rank].append(loss.item())
            states[rank] = torch.get_rng_state()
            grads.append([param.grad for param in model.parameters()])
            for param in model.parameters():
                param.grad = None
        for index, param in enumerate(model.parameters()):
            param.grad = mean.of(param, [each[index] for each in grads], param.dtype)
        optimizer.step()
        optimizer.zero_grad()
    return list(zip(losses, states, strict=True))


def test_dropout_differs_by_rank_as_its_seed_says_and_nothing_else_is_drawn(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    wanted = plainly(3)
    torch.set_rng_state(before)
    for rank, found in enumerate(on_ranks(drawn, tmp_path / "run", 3)):
        (stage2, state), (stage3, other), (compact, third) = found
        assert stage2 == stage3 == wanted[rank][0]
        assert compact[0] == stage2[0]
        assert all(torch.equal(one, wanted[rank][1]) for one in (state, other, third))
    assert wanted[0][0] != wanted[1][0]
