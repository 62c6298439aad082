"""Tiny models and the units of each, for the tests of the life cycle."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tests import models

Groups = dict[str, Sequence[nn.Module]]


def tokens(seed: int, rows: int = 2, columns: int = 8, vocabulary: int = 64) -> torch.Tensor:
    return torch.randint(
        0, vocabulary, (rows, columns), generator=torch.Generator().manual_seed(seed)
    )


def lm_loss(model: nn.Module, seed: int) -> torch.Tensor:
    x = tokens(seed)
    return model(input_ids=x, labels=x).loss


def t5_loss(model: nn.Module, seed: int) -> torch.Tensor:
    return model(input_ids=tokens(seed), labels=tokens(seed + 1)).loss


def llama(layers: int = 4, dtype: torch.dtype = torch.bfloat16, **options: Any) -> nn.Module:
    return models.make(functools.partial(models.llama, layers, **options), dtype=dtype)


def gpt2() -> nn.Module:
    return models.make(models.gpt2)


def t5() -> nn.Module:
    return models.make(models.t5)


def qwen3_moe() -> nn.Module:
    return models.make(models.qwen3_moe)


def llama_groups(model: Any) -> Groups:
    layers = {f"layer{index}": [layer] for index, layer in enumerate(model.model.layers)}
    return {
        "embed": [model.model.embed_tokens],
        **layers,
        "head": [model.model.norm, model.lm_head],
    }


def gpt2_groups(model: Any) -> Groups:
    layers = {f"layer{index}": [layer] for index, layer in enumerate(model.transformer.h)}
    return {"embed": [model.transformer.wte, model.lm_head], **layers}


def t5_groups(model: Any) -> Groups:
    groups: Groups = {"shared": [model.shared]}
    for side in ("encoder", "decoder"):
        stack = getattr(model, side)
        groups |= {f"{side}{index}": [block] for index, block in enumerate(stack.block)}
        groups[f"{side}_norm"] = [stack.final_layer_norm]
    return groups


class Block(nn.Module):
    """A residual block whose last operation is an in-place sum on a linear's output, which is a
    view."""

    def __init__(self, width: int = 16, *, inplace: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.inplace = inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.down(torch.nn.functional.gelu(self.up(x)))
        if self.inplace:
            out += x
            return out
        return out + x


class Stack(nn.Module):
    """Blocks, and a head. What a parent does to a block's output is `between`."""

    def __init__(self, blocks: Sequence[nn.Module], width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 4)

    def between(self, x: Any) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.between(block(x))
        return self.head(x)


def stack(
    count: int = 3, width: int = 16, dtype: torch.dtype = torch.float32, **options: Any
) -> Stack:
    torch.manual_seed(0)
    return Stack([Block(width, **options) for _ in range(count)], width).to(dtype)


def stack_groups(model: Any) -> Groups:
    return {
        **{f"block{index}": [block] for index, block in enumerate(model.blocks)},
        "head": [model.head],
    }


def stack_input(model: nn.Module, seed: int, width: int = 16) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return torch.randn(2, 3, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stack_loss(model: nn.Module, seed: int) -> torch.Tensor:
    return model(stack_input(model, seed)).float().square().mean()


class Experts(nn.Module):
    """A mixture of experts as a ModuleList, top-1: most experts get no gradient."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(Block(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        best = int(weights.sum((0, 1)).argmax())
        return x + weights[..., best : best + 1] * self.experts[best](x)
