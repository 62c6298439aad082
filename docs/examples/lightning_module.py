"""Lightning's Trainer: `strategy=InfinityStrategy(policy)`, and infinity's optimizer in the module.

    python docs/examples/lightning_module.py --nvme /mnt/nvme0 --out out
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import infinity as inf
from infinity.integrations.lightning import InfinityStrategy

EPOCHS, VOCABULARY, WIDTH, LENGTH = 4, 64, 64, 16


class Module(L.LightningModule):
    """A language model: blocks between an embedding and a head."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.losses: list[float] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.head(x)
        return logits

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        (ids,) = batch
        loss = F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return inf.AdamW(self.parameters(), lr=3e-3)  # in place of torch.optim.AdamW


def loader() -> DataLoader[Any]:
    """Load sequences in which each token follows from the one before."""
    sequence = [torch.randint(0, VOCABULARY, (96, 1), generator=torch.Generator().manual_seed(0))]
    for _ in range(LENGTH):
        sequence.append((5 * sequence[-1] + 1) % VOCABULARY)
    return DataLoader(TensorDataset(torch.cat(sequence, dim=1)), batch_size=8)


def fit(options: argparse.Namespace, resume: str | None = None) -> Module:
    """Train, or resume from a checkpoint."""
    L.seed_everything(0)
    module = Module()
    policy = inf.Policy(params="nvme", optim="nvme", nvme=options.nvme, ram="min")
    every_epoch = ModelCheckpoint(f"{options.out}/checkpoints", "{epoch}", save_top_k=-1)
    trainer = L.Trainer(
        strategy=InfinityStrategy(policy),  # the new line
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,
        max_epochs=EPOCHS,
        callbacks=[every_epoch],
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, loader(), ckpt_path=resume)
    return module


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvme", required=True, nargs="+", help="directories on NVMe drives")
    parser.add_argument("--out", required=True, help="directory for checkpoints and weights")
    options = parser.parse_args()

    module = fit(options)
    inf.export_safetensors(module, f"{options.out}/weights")  # for programs without infinity
    inf.handle(module).close()
    losses = module.losses

    half = EPOCHS // 2
    resumed = fit(options, resume=f"{options.out}/checkpoints/epoch={half - 1}.ckpt")
    inf.handle(resumed).close()
    steps = len(losses) * half // EPOCHS
    assert resumed.losses == losses[steps:], "a resumed run has the bits of the uninterrupted one"
    assert losses[-1] < losses[0] / 4
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; the resumed run has the same losses")


if __name__ == "__main__":
    main()
