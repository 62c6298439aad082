"""Small durable runs for tests of faults."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
    """Make the run in these directories: its model and its optimizer, nothing restored."""
    for each in (place, *more):
        each.mkdir(exist_ok=True)
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
        # Given: on a busy machine a drive may measure as slow, and get no chunks.
        tiers["io"] = IoSettings(bandwidths={str(each): (1e9, 1e9) for each in (place, *more)})
    offload(model, inf.Policy(**{"unit_bytes_max": 4096, **tiers, **values}), _seam=seam)
    return model, inf.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def read(place: Path) -> int:
    """Restore a checkpoint into memory, and check that it is a step of `undisturbed`. Returns the
    step."""
    torch.manual_seed(1)
    model: Any = offload(Net().bfloat16(), inf.Policy(unit_bytes_max=4096))
    found = restored(model, inf.AdamW(model.parameters(), lr=1e-2), place)
    close(model)
    return found


def close(model: Any) -> None:
    inf.handle(model).close()


def die(model: Any) -> None:
    """End a model as a killed process does: release its files, and commit nothing."""
    inf.handle(model).end(commit=False)


def run_files(place: Path) -> list[str]:
    return sorted(path.name for path in (place / "infinity-run").iterdir())


@functools.cache
def undisturbed(state: str = "exact") -> tuple[str, ...]:
    """Return digests of an undisturbed run, before its first step and after each."""
    torch.manual_seed(0)
    model: Any = offload(Net().bfloat16(), inf.Policy(unit_bytes_max=4096, state=state))
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    found = [digest(model)]
    for index in range(STEPS):
        step(model, optimizer, index, 0)
        found.append(digest(model))
    close(model)
    return tuple(found)


def restored(model: Any, optimizer: Any, source: Path | Sequence[Path], **values: Any) -> int:
    """Restore a run, and check that it equals `undisturbed`. Returns the step."""
    found = inf.restore(model, optimizer, source, **values)
    assert found.extra == ({"next": found.step} if found.step else None)
    assert digest(model) == undisturbed()[found.step]
    return found.step


def train(model: Any, optimizer: Any, first: int, until: int) -> None:
    """Take steps [first, until), after which the model is that of `undisturbed`."""
    for index in range(first, until):
        step(model, optimizer, index, 0)
    assert digest(model) == undisturbed()[until]


def live(
    *drives: Path,
    until: int = 0,
    source: Path | Sequence[Path] | None = None,
    end: Callable[[Any], None] = close,
    **values: Any,
) -> int:
    """Be one process of a run: restore it, train up to step `until`, and end. Returns the restored
    step."""
    model, optimizer = made(*drives, **values)
    found = restored(model, optimizer, source or drives[0])
    train(model, optimizer, found, max(found, until))
    end(model)
    return found
