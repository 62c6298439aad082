"""A trainer in one file, with everything offloaded: an example for whoever embeds the engine."""

from __future__ import annotations

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
        """Save everything that training goes on from; all ranks call it."""
        extra = {"done": self.done, "scheduler": self.scheduler.state_dict()}
        extra["rng"] = torch.get_rng_state()
        inf.save(self.model, self.optimizer, directory, extra=extra).wait()

    def resume(self, directory: Path) -> None:
        """Go on from there, on any number of ranks."""
        extra = inf.restore(self.model, self.optimizer, directory).extra
        self.done = extra["done"]
        self.scheduler.load_state_dict(extra["scheduler"])
        torch.set_rng_state(extra["rng"])

    def finish(self, directory: Path) -> None:
        """Export the weights, which `from_pretrained` reads, and free everything."""
        inf.export_safetensors(self.model, directory)
        self.handle.close()
