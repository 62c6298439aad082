"""Runs of infinity.compat.deepspeed for its tests: a tiny model, configurations, and the same
training by the engine's native calls."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import infinity as inf
from infinity.compat import deepspeed
from infinity.compat.deepspeed import DeepSpeedEngine

WIDTH = 12
ROWS = 4
"""Rows of a micro-batch."""


class Net(nn.Module):
    """A classifier that returns its loss, with a buffer and a parameter in two places."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.tied = self.layers[0]
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, self.tied]:
            x = x + torch.tanh(layer(x)) * self.scale.to(x.dtype)
        return nn.functional.cross_entropy(x.float(), y)


def net(seed: int = 0, **settings: Any) -> Net:
    """The model, with the values of a seed."""
    torch.manual_seed(seed)
    return Net(**settings)


def batches(count: int, dtype: torch.dtype = torch.float32, rank: int = 0) -> list[Any]:
    """Micro-batches of a rank."""
    numbers = torch.Generator().manual_seed(7 + rank)
    return [
        (
            torch.randn(ROWS, WIDTH, generator=numbers).to(dtype),
            torch.randint(0, WIDTH, (ROWS,), generator=numbers),
        )
        for _ in range(count)
    ]


def config(stage: int = 3, place: Path | None = None, **values: Any) -> dict[str, Any]:
    """A configuration: states in CPU memory, or on NVMe in `place`."""
    zero: dict[str, Any] = {"stage": stage}
    device = {"device": "cpu"} if place is None else {"device": "nvme", "nvme_path": str(place)}
    if stage == 3:
        zero["offload_param"] = device
    if stage > 0:
        zero["offload_optimizer"] = device
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        **values,
    }


def built(model: nn.Module, settings: dict[str, Any], **arguments: Any) -> DeepSpeedEngine:
    """The engine of a model."""
    return deepspeed.initialize(model=model, config=settings, **arguments)[0]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A block of one rank that leaves no engine open and no process group behind."""
    assert not dist.is_initialized()
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def train(engine: DeepSpeedEngine, data: list[Any]) -> list[float]:
    """Train on micro-batches. Returns their losses."""
    losses = []
    for x, y in data:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the state dict."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """The same names with the same bits."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@dataclasses.dataclass(frozen=True)
class Native:
    """A run by the engine's own calls: losses of the micro-batches, and the values at the end."""

    losses: list[float]
    values: dict[str, torch.Tensor]


def native(
    settings: dict[str, Any],
    data: list[Any],
    *,
    dtype: torch.dtype = torch.float32,
    steps: int = 1,
    clip: float = 0.0,
    scale: float = 1.0,
    optimizer: Any = None,
) -> Native:
    """Train with `inf.offload` and a plain loop. steps: micro-batches of a step."""
    model = inf.offload(net().to(dtype), inf.Policy.from_deepspeed(settings))
    make = optimizer or (lambda params: inf.AdamW(params, lr=1e-2, weight_decay=0.1))
    opt = make(model.parameters())
    handle = inf.handle(model)
    losses = []
    for index, (x, y) in enumerate(data):
        last = (index + 1) % steps == 0
        with contextlib.nullcontext() if last else handle.no_sync():
            loss = model(x, y)
            (loss / steps * scale).backward()
        losses.append(loss.item())
        if last:
            for param in model.parameters():
                param.grad *= 1 / scale
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.step()
            opt.zero_grad()
    values = values_of(model)
    handle.close()
    return Native(losses, values)
