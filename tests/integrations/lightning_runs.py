"""A LightningModule of a thousand parameters, and runs of it by Lightning's Trainer: with an
offloaded module, and with the module in memory and an optimizer of torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import infinity as inf
from infinity.integrations.lightning import InfinityStrategy

VOCABULARY, WIDTH, ROWS, LENGTH = 32, 16, 16, 9
_ENVIRONMENT = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE")


def policy(place: Path, **values: Any) -> inf.Policy:
    """Everything on the drive, in the least RAM."""
    place.mkdir(exist_ok=True, parents=True)
    return inf.Policy(**{"params": "nvme", "optim": "nvme", "nvme": place, "ram": "min", **values})


class Net(nn.Module):
    """Two residual layers between an embedding and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(ids)
        for layer in (self.first, self.second):
            hidden = hidden + torch.tanh(layer(hidden))
        logits: torch.Tensor = self.head(hidden)
        return logits


class Module(L.LightningModule):
    """Learns to predict the next number. Notes the loss of each batch.

    optimizer: makes one of parameters. offload: given the module in `configure_model`. seed: of
    the values; None takes the numbers as they come.
    """

    def __init__(
        self,
        optimizer: Callable[..., Any] = torch.optim.AdamW,
        offload: Callable[[L.LightningModule], object] | None = None,
        seed: int | None = 0,
    ) -> None:
        super().__init__()
        self.optimizer, self.offload, self.seed = optimizer, offload, seed
        self.losses: list[float] = []
        self.net: Net | None = None
        if offload is None:
            self.build()

    def build(self) -> None:
        if self.seed is not None:
            torch.manual_seed(self.seed)
        self.net = Net()

    def configure_model(self) -> None:
        if self.net is None:
            self.build()
            assert self.offload is not None
            self.offload(self)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert self.net is not None
        found: torch.Tensor = self.net(ids)
        return found

    def loss(self, batch: Any) -> torch.Tensor:
        (ids,) = batch
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", self.loss(batch))

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self(batch[0]).float()

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Rivals(L.LightningModule):
    """Two nets, each with a separate optimizer, in a hand-written loop. place: of the nets, if
    they are offloaded.
    """

    def __init__(self, optimizer: Any, seed: int = 0, place: Path | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.automatic_optimization = False
        self.optimizer = optimizer
        self.maker, self.judge = nn.Linear(8, 8), nn.Linear(8, 1)
        self.losses: list[float] = []
        self.place = place

    def configure_model(self) -> None:
        if self.place is not None and not inf.offloaded_modules(self):
            inf.offload(self.maker, policy(self.place / "maker"))
            inf.offload(self.judge, policy(self.place / "judge"))

    def training_step(self, batch: Any, index: int) -> None:
        (ids,) = batch
        rows = F.one_hot(ids[:, 0] % 8, 8).float()
        first, second = self.optimizers()
        with first.toggle_model():
            loss = self.judge(torch.tanh(self.maker(rows))).square().mean()
            self.manual_backward(loss)
            first.step()
            first.zero_grad()
        # Two micro-batches.
        with second.toggle_model():
            for part in rows.chunk(2):
                with torch.no_grad():
                    made = self.maker(part)
                other = (self.judge(made) - 1).square().mean() / 2
                self.manual_backward(other)
            second.step()
            second.zero_grad()
        self.losses += [loss.item(), other.item()]

    def configure_optimizers(self) -> Any:
        return [
            self.optimizer(self.maker.parameters(), lr=1e-2),
            self.optimizer(self.judge.parameters(), lr=2e-2),
        ]


def batches(rows: int = ROWS, batch: int = 2) -> DataLoader[Any]:
    """The same batches in the same order, always."""
    numbers = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=numbers)
    return DataLoader(TensorDataset(ids), batch_size=batch)


def trainer(strategy: Any, **values: Any) -> L.Trainer:
    """A trainer on the CPU that prints and keeps nothing."""
    settings: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 2, "logger": False,
        "enable_checkpointing": "callbacks" in values, "enable_progress_bar": False,
        "enable_model_summary": False, "num_sanity_val_steps": 0, "use_distributed_sampler": False,
    }  # fmt: skip
    return L.Trainer(strategy=strategy, **{**settings, **values})


def fit(strategy: Any, module: L.LightningModule, **values: Any) -> L.Trainer:
    """Fit the module on `batches`, and return the trainer."""
    given = {name: values.pop(name, None) for name in ("ckpt_path", "weights_only")}
    loader = values.pop("loader", None)
    made = trainer(strategy, **values)
    made.fit(module, loader or batches(), **given)
    return made


def offloaded_fit(place: Path, module: L.LightningModule, **values: Any) -> L.Trainer:
    """The same with a module that the strategy offloads."""
    return fit(InfinityStrategy(policy(place, **values.pop("policy", {}))), module, **values)


def states(module: nn.Module) -> dict[str, torch.Tensor]:
    """Values, masters and moments of everything that is offloaded."""
    found = {}
    for engine in inf.offloaded_modules(module):
        of = inf.handle(engine)
        found.update({name: value.clone() for name, value in engine.state_dict().items()})
        for name, param in engine.named_parameters():
            state = of.optimizer_state(param)
            found.update(
                {
                    f"{name} {key}": torch.as_tensor(state[key]).clone()
                    for key in ("master", "exp_avg", "exp_avg_sq", "step")
                }
            )
    assert found
    return found


def assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """All bits are the same."""
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


def close(module: nn.Module) -> None:
    """End all engines in a module."""
    for engine in inf.offloaded_modules(module):
        inf.handle(engine).close()


@contextlib.contextmanager
def launched(**environment: str) -> Iterator[None]:
    """Restore what Lightning's launchers and environments set in the process, and end the group
    that they made."""
    before, joined = dict(os.environ), dist.is_initialized()
    for name in _ENVIRONMENT:
        os.environ.pop(name, None)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        if dist.is_initialized() and not joined:
            dist.destroy_process_group()
