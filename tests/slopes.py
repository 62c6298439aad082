"""CPU time, memory and calls of each phase of the engine per chunk, with chunks so small that a
laptop has as many of them as a model of hundreds of billions of parameters.

    python -m tests.slopes DIRECTORY '{"chunks": 9, "flats": 1, "drives": 1, "units": ["us"]}' ...

Prints a JSON line for each, with the units per chunk by phase:

    us       CPU microseconds of all threads of the process (of phases on a device, of the main
             thread), the least of two turns
    bytes    the most that Python and numpy have allocated beyond what was there before
    calls    functions of Python and C that the main thread has called, and threads that it started
             (on a device, the main thread alone): the same on every machine, busy or not. Loops
             inside of C are not seen
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import itertools
import json
import shutil
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.checkpoint import reshard as resharding
from infinity._src.checkpoint.durable.copies import run_directory
from infinity._src.checkpoint.reader import Checkpoint
from infinity._src.checkpoint.reshard import ReshardJob
from infinity._src.checkpoint.verify import VerifyJob
from infinity._src.engine import build
from infinity.errors import AioError, StepUndone
from tests.device import simulated

CHUNK_NUMEL = 2048
TURNS = 2


class Rows(nn.Module):
    """Matrices of as many chunks each; computing with them takes next to nothing."""

    def __init__(self, chunks: int, flats: int) -> None:
        super().__init__()
        rows = -(-chunks // flats)
        self.layers = nn.ModuleList(
            [nn.Linear(CHUNK_NUMEL, rows, bias=False, dtype=torch.bfloat16) for _ in range(flats)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Each row, and so each chunk, gets a gradient of its own.
        found = []
        for number, layer in enumerate(self.layers, 1):
            rows = layer(x).float()
            found.append((rows * torch.linspace(number, number + 1, rows.shape[1])).sum())
        return torch.stack(found).sum()


def _us(action: Callable[[], Any], *, on_device: bool) -> tuple[float, Any]:
    # The simulated device looks for races in threads of its own, which no device does.
    clock = time.thread_time if on_device else time.process_time
    began_s = clock()
    result = action()
    return 1e6 * (clock() - began_s), result


def _bytes(action: Callable[[], Any], *, on_device: bool) -> tuple[float, Any]:
    tracemalloc.start()
    try:
        result = action()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def _calls(action: Callable[[], Any], *, on_device: bool) -> tuple[float, Any]:
    count = itertools.count()

    def event(_frame: object, kind: str, _of: object) -> None:
        if kind in ("call", "c_call"):
            next(count)

    threading.setprofile(None if on_device else event)
    sys.setprofile(event)
    try:
        result = action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return next(count), result


COSTS = {"us": _us, "bytes": _bytes, "calls": _calls}
"""Cost of an action in each unit, with its result."""


class Meter:
    """The phases of one model, in one unit."""

    def __init__(self, chunks: int, unit: str) -> None:
        self.found: dict[str, float] = {}
        self._chunks = chunks
        self._cost = COSTS[unit]
        # What is counted is the same each time.
        self._again = unit == "us"

    def phase(
        self,
        name: str,
        action: Callable[[], Any],
        turns: int = TURNS,
        before: Callable[[], Any] = lambda: None,
    ) -> Any:
        """Run it so many times, and note what the cheapest turn takes per chunk. before: what comes
        before each turn, and is not measured.
        """
        costs = []
        for _ in range(turns if self._again else 1):
            before()
            gc.collect()
            cost, result = self._cost(action, on_device=name.startswith("device"))
            costs.append(cost)
        self.found[name] = min(costs) / self._chunks
        return result


@contextlib.contextmanager
def tiny_chunks() -> Iterator[pytest.MonkeyPatch]:
    """Models that are offloaded inside have chunks of CHUNK_NUMEL elements."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (build, resharding):
            patch.setattr(module, "chunk_numel_of", lambda _state, _dtype: CHUNK_NUMEL)
        yield patch


def measure(place: Path, chunks: int, flats: int, drives: int, unit: str) -> dict[str, float]:
    """The cost of each phase per chunk."""
    meter = Meter(chunks, unit)
    folders = [place / "run" / str(drive) for drive in range(drives)]
    states = {"params": "nvme", "optim": "nvme", "ram": "min", "units": ["Linear"], "nvme": folders}
    if drives > 1:
        # Else they would be measured.
        states["io"] = {"bandwidths": {str(folder): (1e9, 1e9) for folder in folders}}
    with tiny_chunks() as patch:
        _train(meter, place, chunks, flats, "", generations=1, **states)
        _train(meter, place, chunks, flats, "durable ", durable="new", **states)
        _train(meter, place, chunks, flats, "generations ", generations=2, **states)
        _train(meter, place, chunks, flats, "delayed ", update="delayed", **states)
        with simulated(patch, delay_us=0):
            _train(meter, place, chunks, flats, "device ", update_on="device", **states)
    return meter.found


def _train(meter: Meter, place: Path, chunks: int, flats: int, kind: str, **chosen: Any) -> None:
    shutil.rmtree(place / "run", ignore_errors=True)
    for folder in chosen["nvme"]:
        folder.mkdir(parents=True)
    policy = inf.Policy(**chosen)
    torch.manual_seed(0)
    model = Rows(chunks, flats)
    meter.phase(f"{kind}offload", lambda: inf.offload(model, policy), turns=1)
    optimizer: Any = meter.phase(
        f"{kind}optimizer", lambda: inf.AdamW(model.parameters(), lr=1e-3), turns=1
    )
    handle = inf.handle(model)
    x = torch.randn(2, CHUNK_NUMEL, dtype=torch.bfloat16)

    def update() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        handle.pipeline.wait()

    def step() -> None:
        update()
        handle.flush()

    step()
    meter.phase(f"{kind}step", step)
    if "durable" in chosen:
        meter.phase(f"{kind}commit", handle.flush, before=update)
        meter.phase(f"{kind}undo", lambda: _undo(handle), before=update)
    if not kind:
        _checkpoint(meter, place, model, optimizer)
    meter.phase(f"{kind}close", handle.close, turns=1)
    if "durable" in chosen:
        run = policy.directories[0]
        meter.phase(f"{kind}verify", VerifyJob(run_directory(run)).verify, turns=1)
        _go_on(meter, Rows(chunks, flats), dataclasses.replace(policy, durable=True), kind)


def _undo(handle: Any) -> None:
    """Undo the last step for a gather's read of a flat, which can be read by now."""
    (unit, *_) = handle.parts.split.units
    (chunk, *_) = handle.parts.tiers.store.chunks_of(unit.flats[0])
    error = AioError("read", errno=errno.EIO, path="drive", op="read", chunk=chunk.id)
    with contextlib.suppress(StepUndone):
        handle.pipeline.read_failed(error)


def _go_on(meter: Meter, model: nn.Module, policy: inf.Policy, kind: str) -> None:
    """Restore a durable run as the next process does."""
    meter.phase(f"{kind}offload again", lambda: inf.offload(model, policy), turns=1)
    optimizer: Any = inf.AdamW(model.parameters(), lr=1e-3)
    run = policy.directories[0]
    restored = meter.phase(f"{kind}restore", lambda: inf.restore(model, optimizer, run), turns=1)
    assert restored.step
    inf.handle(model).close()


def _checkpoint(meter: Meter, place: Path, model: nn.Module, optimizer: Any) -> None:
    saved, resharded = place / "saved", place / "resharded"
    meter.phase("save", lambda: inf.save(model, optimizer, saved).wait())
    meter.phase("restore", lambda: inf.restore(model, optimizer, saved))
    meter.phase("verify", VerifyJob(saved).verify)

    def to_two() -> None:
        shutil.rmtree(resharded, ignore_errors=True)
        with Checkpoint.open(saved) as checkpoint:
            ReshardJob(checkpoint, world=2).write(resharded)

    meter.phase("reshard", to_two, turns=1)


def main() -> None:
    """Measure what the arguments say."""
    torch.set_num_threads(1)
    for spec in sys.argv[2:]:
        values = json.loads(spec)
        place = Path(sys.argv[1]) / "slopes"
        found = {
            unit: measure(place, values["chunks"], values["flats"], values["drives"], unit)
            for unit in values["units"]
        }
        shutil.rmtree(place)
        print(json.dumps({**values, **found}), flush=True)


if __name__ == "__main__":
    main()
