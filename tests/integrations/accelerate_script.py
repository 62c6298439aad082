"""A script for Accelerate, as its users write one, with a tiny model; and what the tests of the
integration compare."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn

import infinity as inf
from infinity.integrations.accelerate import attach

ROWS = 16


def policy(place: Path, **values: Any) -> inf.Policy:
    """Everything on the drive, in the least RAM."""
    place.mkdir(exist_ok=True)
    return inf.Policy(
        **{"params": "nvme", "optim": "nvme", "nvme": place, "ram": "min", **values}
    )


def net(seed: int = 0) -> nn.Module:
    """A classifier of 1,000 parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3)
    )


def loader(batch: int = 4) -> torch.utils.data.DataLoader[Any]:
    """Four batches of a rank's own rows, if it is alone."""
    numbers = torch.Generator().manual_seed(1)
    rows = torch.randn(ROWS, 12, generator=numbers)
    labels = torch.randint(0, 3, (ROWS,), generator=numbers)
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(rows, labels), batch_size=batch
    )


def warmed(optimizer: Any) -> Any:
    """A schedule that changes the rate in each of its first steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 9))


@contextlib.contextmanager
def accelerator(**values: Any) -> Iterator[Accelerator]:
    """An Accelerator on the CPU, of all ranks if there is a group; its process-wide state ends with
    the block."""
    named = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    before = {name: os.environ.get(name) for name in named}
    if dist.is_initialized():
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(zip(named, (rank, world, rank, world), strict=True))
    try:
        yield Accelerator(cpu=True, **values)
    finally:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        PartialState._reset_state()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@dataclasses.dataclass
class Prepared:
    """State of a script after prepare."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any
    losses: list[float] = dataclasses.field(default_factory=list)

    def train(
        self, epochs: int, *, clip: float | None = None, clip_value: float | None = None
    ) -> None:
        """Train, and note the losses."""
        for _ in range(epochs):
            for rows, labels in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = nn.functional.cross_entropy(self.model(rows), labels)
                    self.accelerator.backward(loss)
                    if clip is not None and self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                    if clip_value is not None and self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_value_(self.model.parameters(), clip_value)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.losses.append(loss.item())


def prepared(
    own: Accelerator,
    under: inf.Policy | None,
    *,
    kind: Any = torch.optim.AdamW,
    batch: int = 4,
    **settings: Any,
) -> Prepared:
    """The script up to its loop: with a policy, two lines are added."""
    model = net()
    if under is not None:
        attach(own)
        inf.offload(model, under)
    optimizer = kind(model.parameters(), **{"lr": 1e-2, **settings})
    made = own.prepare(model, optimizer, loader(batch), warmed(optimizer))
    return Prepared(own, *made)


def losses_of(
    under: inf.Policy | None,
    *,
    epochs: int = 2,
    clip: float | None = None,
    clip_value: float | None = None,
    settings: dict[str, Any] | None = None,
    **values: Any,
) -> list[float]:
    """The losses of a whole script."""
    with accelerator(**values) as own:
        run = prepared(own, under, **(settings or {}))
        run.train(epochs, clip=clip, clip_value=clip_value)
        own.free_memory()
        return run.losses


def states(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every bit from which training continues. Collective."""
    handle = inf.handle(model)
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        for key, value in handle.optimizer_state(param).items():
            found[f"{name}/{key}"] = torch.as_tensor(value).clone()
    return found


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Both have the same names, and the same bits for each."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
