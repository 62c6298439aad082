"""Small durable runs for tests of what befalls them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import infinity as inf
from infinity._src.engine.handle import offload
from infinity.aio import IoSettings, Seam
from tests.crashes import Net, digest, step

STEPS = 5


def made(
    place: Path, *more: Path, seam: Seam | None = None, model: Any = None, **values: Any
) -> tuple[Any, Any]:
    place.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = model or Net().bfloat16()
    tiers: dict[str, Any] = {
        "params": "nvme",
        "optim": "nvme",
        "ram": "min",
        "nvme": [place, *more],
        "durable": True,
    }
    if more:
        # Given: a busy machine measures one as slow, and gives it nothing.
        tiers["io"] = IoSettings(bandwidths={str(each): (1e9, 1e9) for each in (place, *more)})
    offload(model, inf.Policy(**{"unit_bytes_max": 4096, **tiers, **values}), _seam=seam)
    return model, inf.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def close(model: Any) -> None:
    inf.handle(model).close()


def die(model: Any) -> None:
    """End a model as a killed process does: release its files, and commit nothing."""
    inf.handle(model).end(commit=False)


def run_files(place: Path) -> list[str]:
    return sorted(path.name for path in (place / "infinity-run").iterdir())


def undisturbed() -> list[str]:
    """Digests of a run that nothing disturbs, before its first step and after each."""
    torch.manual_seed(0)
    model: Any = offload(Net().bfloat16(), inf.Policy(unit_bytes_max=4096))
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    found = [digest(model)]
    for index in range(STEPS):
        step(model, optimizer, index, 0)
        found.append(digest(model))
    close(model)
    return found
