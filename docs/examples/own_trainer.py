"""A trainer in one file, with everything offloaded: an example for authors of trainers.

    torchrun --nproc-per-node 2 docs/examples/own_trainer.py --nvme /mnt/nvme0 --out out

On one rank without torchrun: `python docs/examples/own_trainer.py ...`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import infinity as inf

Batch = dict[str, torch.Tensor]


class Trainer:
    """build() makes the model in the ordinary way; batch(step, n) is micro-batch n of this rank."""

    def __init__(
        self, build: Callable[[], torch.nn.Module], policy: inf.Policy, batch: Callable[..., Batch],
        *, steps: int, lr: float, accumulate: int = 1, max_norm: float | None = None,
    ) -> None:  # fmt: skip
        if "RANK" in os.environ and not dist.is_initialized():
            dist.init_process_group()  # before inf.offload, which asks it for the ranks
        with torch.device("meta"):
            model = build()  # with its adapters, if it has any
        self.model = inf.offload(model, policy, init=build)  # same module; wrap it in no DDP
        self.handle = inf.handle(self.model)
        self.optimizer = inf.AdamW(self.model.parameters(), lr=lr)  # after inf.offload
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, steps)
        self.batch, self.steps, self.done = batch, steps, 0
        self.accumulate, self.max_norm = accumulate, max_norm

    def step(self) -> float:
        """Train one step; the mean loss of this rank."""
        self.model.train()
        total = 0.0
        for n in range(self.accumulate):
            last = n == self.accumulate - 1
            with contextlib.nullcontext() if last else self.handle.no_sync():
                loss = self.model(**self.batch(self.done, n)).loss / self.accumulate
                loss.backward()  # the engine takes the mean over the ranks
            total += loss.item()
        if self.max_norm is not None:  # on all ranks
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.done += 1
        return total

    def evaluate(self, batches: list[Batch]) -> float:
        """Return the mean loss of this rank; all ranks give as many batches."""
        self.model.eval()
        with torch.no_grad():
            return sum(self.model(**batch).loss.item() for batch in batches) / len(batches)

    def save(self, directory: Path) -> None:
        """Save everything from which training continues; all ranks call it."""
        extra = {"done": self.done, "scheduler": self.scheduler.state_dict()}
        extra["rng"] = torch.get_rng_state()
        inf.save(self.model, self.optimizer, directory, extra=extra).wait()

    def resume(self, directory: Path) -> None:
        """Resume from a save, on any number of ranks."""
        extra = inf.restore(self.model, self.optimizer, directory).extra
        self.done = extra["done"]
        self.scheduler.load_state_dict(extra["scheduler"])
        torch.set_rng_state(extra["rng"])

    def finish(self, directory: Path) -> None:
        """Export the weights, which `from_pretrained` reads, and free everything."""
        inf.export_safetensors(self.model, directory)
        self.handle.close()


def tiny_model() -> torch.nn.Module:
    """Build a Llama of 150,000 parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip


def rows_of_this_rank(step: int, n: int) -> Batch:
    """Return other rows on each rank; each token follows from the one before."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    drawn = torch.Generator().manual_seed(1000 * rank + 10 * step + n)
    sequence = [torch.randint(0, 64, (4, 1), generator=drawn)]
    for _ in range(16):
        sequence.append((5 * sequence[-1] + 1) % 64)
    ids = torch.cat(sequence, dim=1)
    return {"input_ids": ids, "labels": ids}


def build(options: argparse.Namespace) -> Trainer:
    torch.manual_seed(0)  # the same values on all ranks
    policy = inf.Policy(params="nvme", optim="nvme", nvme=options.nvme, ram="min")
    return Trainer(
        tiny_model, policy, rows_of_this_rank, steps=20, lr=1e-2, accumulate=2, max_norm=1.0
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvme", required=True, nargs="+", help="directories on NVMe drives")
    parser.add_argument("--out", required=True, type=Path, help="for checkpoint and weights")
    options = parser.parse_args()

    trainer = build(options)
    losses = [trainer.step() for _ in range(trainer.steps // 2)]
    trainer.save(options.out / "states")
    losses += [trainer.step() for _ in range(trainer.steps // 2)]
    held_out = trainer.evaluate([rows_of_this_rank(100, n) for n in range(2)])
    trainer.finish(options.out / "weights")

    again = build(options)
    again.resume(options.out / "states")  # on any number of ranks
    resumed = [again.step() for _ in range(again.steps - again.done)]
    again.handle.close()
    assert resumed == losses[trainer.steps // 2 :], "a resumed run has the same bits"
    assert losses[-1] < losses[0] - 1
    assert abs(held_out - losses[-1]) < 1
    rank = f"rank {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else "one"
    print(f"{rank}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, held out {held_out:.4f}\n", end="")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
