"""A plain loop: everything on NVMe, a checkpoint halfway, and a run that resumes from it.

    python docs/examples/plain_loop.py --nvme /mnt/nvme0 --out out

Three lines differ from a loop without offloading: `inf.Policy`, `inf.offload`, `inf.AdamW`.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import infinity as inf

STEPS, VOCABULARY, WIDTH, LENGTH = 60, 64, 64, 16


class Model(nn.Module):
    """A language model: blocks between an embedding and a head."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def batch_of(step: int) -> torch.Tensor:
    """Return sequences in which each token follows from the one before."""
    token = torch.randint(0, VOCABULARY, (8, 1), generator=torch.Generator().manual_seed(step))
    sequence = [token]
    for _ in range(LENGTH):
        sequence.append((5 * sequence[-1] + 1) % VOCABULARY)
    return torch.cat(sequence, dim=1)


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Train the steps from `first` to before `last`; return their losses."""
    losses = []
    for step in range(first, last):
        ids = batch_of(step)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvme", required=True, nargs="+", help="directories on NVMe drives")
    parser.add_argument("--out", required=True, help="directory for checkpoint and weights")
    options = parser.parse_args()
    policy = inf.Policy(params="nvme", optim="nvme", nvme=options.nvme, ram="min")

    model = inf.offload(build(), policy)  # in place: the same module, of the same class
    optimizer = inf.AdamW(model.parameters(), lr=3e-3)  # after inf.offload
    losses = train(model, optimizer, 0, STEPS // 2)
    saving = inf.save(model, optimizer, f"{options.out}/states", extra={"step": STEPS // 2})
    losses += train(model, optimizer, STEPS // 2, STEPS)  # while the checkpoint is written
    saving.wait()
    inf.export_safetensors(model, f"{options.out}/weights")
    stats = inf.handle(model).stats()
    inf.handle(model).close()

    # Another process would go on from the checkpoint in the same way.
    again = inf.offload(build(), policy)
    optimizer = inf.AdamW(again.parameters(), lr=3e-3)
    step = inf.restore(again, optimizer, f"{options.out}/states").extra["step"]
    resumed = train(again, optimizer, step, STEPS)
    inf.handle(again).close()
    assert resumed == losses[step:], "a resumed run has the bits of the uninterrupted one"

    # The same loop without offloading.
    plain = build()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), 0, STEPS)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-4, atol=0)
    assert losses[0] == expected[0]
    assert losses[-1] < losses[0] / 4

    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, without offloading {expected[-1]:.4f}")
    print(f"{stats.bytes_written / 1e6:.1f} MB written to {', '.join(options.nvme)}")


if __name__ == "__main__":
    main()
