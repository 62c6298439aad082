"""A DeepSpeed script, as it is: nothing in it names infinity. The line that starts it is new.

    python -m infinity.compat.deepspeed --nproc-per-node 1 docs/examples/deepspeed_script.py \
        --deepspeed --deepspeed_config docs/examples/ds_config.json --nvme /mnt/nvme0 --out out

With DeepSpeed: `deepspeed --num_gpus 1 docs/examples/deepspeed_script.py ...`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.nn import functional as F

STEPS, VOCABULARY, WIDTH, LENGTH = 60, 64, 64, 16


class Model(nn.Module):
    """A language model: blocks between an embedding and a head. It returns its loss."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids[:, :-1])
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten())


def batch_of(step: int, rank: int) -> torch.Tensor:
    """Return sequences in which each token follows from the one before."""
    drawn = torch.Generator().manual_seed(1000 * rank + step)
    sequence = [torch.randint(0, VOCABULARY, (8, 1), generator=drawn)]
    for _ in range(LENGTH):
        sequence.append((5 * sequence[-1] + 1) % VOCABULARY)
    return torch.cat(sequence, dim=1)


def build(options: argparse.Namespace) -> Any:
    """Return the engine of a new model, by the JSON, with its swap files in `--nvme`."""
    config = json.loads(Path(options.deepspeed_config).read_text(encoding="utf-8"))
    for states in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][states]["nvme_path"] = options.nvme
    torch.manual_seed(0)
    model = Model()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return engine


def train(engine: Any, last: int) -> list[float]:
    """Train to before the step `last`; return the losses."""
    losses = []
    for step in range(engine.global_steps, last):
        loss = engine(batch_of(step, engine.global_rank).to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--nvme", required=True, help="a directory on an NVMe drive")
    parser.add_argument("--out", required=True, help="directory for checkpoints")
    options = deepspeed.add_config_arguments(parser).parse_args()

    engine = build(options)
    losses = train(engine, STEPS // 2)
    engine.save_checkpoint(options.out, tag="half", client_state={"losses": losses})
    losses = losses + train(engine, STEPS)
    engine.destroy()

    again = build(options)
    _, state = again.load_checkpoint(options.out, tag="half")
    resumed = state["losses"] + train(again, STEPS)
    again.destroy()
    assert resumed == losses, "a resumed run has the bits of the uninterrupted one"
    assert losses[-1] < losses[0] / 4
    if engine.global_rank == 0:
        print(f"rank 0 of {engine.world_size}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
