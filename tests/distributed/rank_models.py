"""Models and batches that are hard on ranks: experts that some ranks do not use, sizes that nothing
divides, exact sums."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from tests import models
from tests.harness import Training

EXPERTS = 5
_ALLOWED = ((0, 1), (0, 1), (1, 2), (1, 2), (2,), (2,))
"""Experts of the tokens of each row of six. Expert 3 has tokens in the last row of every other
micro-batch only; 4 never has."""


class RoutedBlock(nn.Module):
    """Every token goes to the expert that its id says."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.experts = nn.ModuleList([models.Expert(hidden) for _ in range(EXPERTS)])

    def forward(self, x: torch.Tensor, expert_of: torch.Tensor) -> torch.Tensor:
        tokens, index = self.norm(x).flatten(0, 1), expert_of.flatten()
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows = (index == number).nonzero().flatten()
            if rows.numel():
                out = out.index_add(0, rows, expert(tokens[rows]))
        return x + out.view_as(x)


class Routed(nn.Module):
    """A mixture of experts whose tokens choose by their ids, so that a batch says which rank uses
    which."""

    def __init__(self, hidden: int = 24, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, hidden)
        self.blocks = nn.ModuleList([RoutedBlock(hidden) for _ in range(layers)])
        self.head = nn.Linear(hidden, models.VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, input_ids % EXPERTS)
        return {"loss": models.next_token_loss(self.head(x), labels)}


@dataclasses.dataclass(frozen=True)
class RoutedTraining(Training):
    """Six rows, or several times six; with 2 and 3 ranks no rank uses all experts that any uses."""

    @property
    def batches(self) -> list[models.Batch]:
        generator = torch.Generator().manual_seed(7)
        found = []
        for micro in range(self.steps * self.accumulation):
            rows = []
            for row in range(self.rows):
                allowed = _ALLOWED[row * 6 // self.rows]
                if row + 1 == self.rows and micro % 2:
                    allowed = (2, 3)
                tens = (
                    torch.randint(0, models.VOCAB // EXPERTS, (12,), generator=generator) * EXPERTS
                )
                rows.append(
                    tens
                    + torch.tensor(allowed)[
                        torch.randint(0, len(allowed), (12,), generator=generator)
                    ]
                )
            ids = torch.stack(rows)
            found.append({"input_ids": ids, "labels": ids})
        return found


class OddBlock(nn.Module):
    """Sizes that are prime, and a scalar."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(13, inner)
        self.down = nn.Linear(inner, 13, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Odd(nn.Module):
    """A number of parameters that 2, 3 and 4 do not divide, some in units of a few elements; two
    blocks share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 13)
        self.blocks = nn.ModuleList([OddBlock(inner) for inner in (1, 7, 29)])
        self.blocks.append(nn.Linear(13, 13, bias=False))
        self.again = nn.ModuleList([nn.Linear(13, 13, bias=False)])
        self.again[0].weight = self.blocks[3].weight
        self.last = nn.Parameter(torch.ones(3))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        x = self.again[0](torch.relu(x)) * self.last.sum()
        return {
            "loss": models.next_token_loss(torch.nn.functional.linear(x, self.embed.weight), labels)
        }


class Sums(nn.Module):
    """Gradients that are sums of the inputs, whatever the weights: small whole numbers, and so
    exact in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(37, size) for size in (5, 64, 11)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.to(self.blocks[0].weight.dtype)
        return {
            "loss": torch.stack([block(x).float().sum() for block in self.blocks]).sum() / len(x)
        }


@dataclasses.dataclass(frozen=True)
class SumsTraining(Training):
    """Rows of small whole numbers; 1, 2 and 4 ranks take means of them without rounding."""

    @property
    def batches(self) -> list[models.Batch]:
        generator = torch.Generator().manual_seed(11)
        shape = (self.rows, 37)
        return [
            {"x": torch.randint(-4, 5, shape, generator=generator)}
            for _ in range(self.steps * self.accumulation)
        ]


@dataclasses.dataclass(frozen=True)
class SameTraining(Training):
    """Every rank of `copies` has the same rows: the mean over ranks is each one's gradient, also of
    three (bf16 in fp32 sums)."""

    copies: int = 1

    @property
    def batches(self) -> list[models.Batch]:
        return [
            {name: value.repeat(self.copies, 1) for name, value in batch.items()}
            for batch in super().batches
        ]
