"""A rank of tests/hosts, under torchrun: `python job.py train|endless DIRECTORY`. Results are files
there, one a rank."""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import infinity as inf
from infinity.errors import RankFailed
from tests import models

POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hpz": {"hpz": "cpu"},
    "qwz": {"qwz": True},
    "qgz": {"qgz": True},
    "all": {"qwz": True, "hpz": "cpu", "qgz": True, "error_feedback": True},
}
ROWS = 1
RANK_TIMEOUT_S = 20.0


def make(chosen: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A small Llama over two nodes of two ranks, its optimizer and its handle."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "ranks"))
    policy = inf.Policy(
        params="cpu", optim="cpu", mesh=mesh, rank_timeout_s=RANK_TIMEOUT_S, **chosen
    )
    model = inf.offload(models.make(models.llama), policy)
    return model, inf.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), inf.handle(model)


def step(model: Any, optimizer: Any, batch: models.Batch) -> tuple[float, float]:
    """The loss and the norm of one step."""
    loss = models.loss_of(model, batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), float(norm)


def train(rank: int, place: Path) -> None:
    """The same steps under every policy; losses, norms and parameters."""
    found = {}
    for name, chosen in POLICIES.items():
        model, optimizer, handle = make(chosen)
        batches = models.token_batches(4, seed=rank, rows=ROWS)
        seen = [step(model, optimizer, batch) for batch in batches]
        found[name] = {
            "steps": seen,
            "params": {key: value.clone() for key, value in model.state_dict().items()},
        }
        handle.close()
    torch.save(found, place / f"result{rank}")


def endless(rank: int, place: Path) -> None:
    """Steps until another rank fails; then which, and when."""
    model, optimizer, _ = make({})
    try:
        for number in itertools.count():
            step(model, optimizer, models.token_batches(1, seed=number, rows=ROWS)[0])
            if number == 2:
                (place / f"goes{rank}").touch()
    except RankFailed as error:
        (place / f"failed{rank}.new").write_text(f"{time.monotonic()}\n{error}")
        (place / f"failed{rank}.new").rename(place / f"failed{rank}")
        # If one rank exited, torchrun would end the node's other ranks, and could not reach the
        # other node.
        time.sleep(600)


def main() -> None:
    what, place = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    {"train": train, "endless": endless}[what](int(os.environ["RANK"]), place)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
