"""Memory is bounded: at ram="min" only what is stated grows with the number of layers."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.base.rss import peak_rss_bytes
from infinity._src.hooks import activation_offload as activations
from infinity.aio import Slab
from infinity.errors import BudgetError
from tests import forks, harness, models
from tests.marks import alternating

MIB = 1 << 20
HIDDEN = 512
LAYERS = 6


def measure(directory: Path, layers: int) -> dict[str, float]:
    """Train a Llama of `layers` layers, made on the meta device, in a process of its own; its peak
    and its plan."""
    output = forks.in_a_fork("tests.test_memory", str(directory), str(layers))
    found: dict[str, float] = json.loads(output.strip().splitlines()[-1])
    return found


def fill(name: str, out: torch.Tensor) -> None:
    """Small random weights, ones for norms."""
    if out.ndim == 1:
        out.fill_(1.0)
    else:
        out.normal_(std=0.02)


def train(directory: str, layers: int) -> None:
    """Three steps; prints a JSON record."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = models.llama(layers=layers, hidden=HIDDEN).to(torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    model.train()
    inf.offload(
        model, inf.Policy(params="nvme", optim="nvme", nvme=directory, ram="min"), load=fill
    )
    optimizer = inf.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for batch in models.token_batches(3):
        loss = models.loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    inf.handle(model).flush()
    stats = inf.handle(model).stats()
    record = {
        "peak": peak_rss_bytes(),
        "params": stats.params,
        "grads": stats.grad_bytes,
        "ram": stats.ram_bytes,
        "pool": stats.pool_bytes,
        "gathered": stats.gathered_bytes_peak,
        "nvme": stats.nvme_bytes,
        "spare": stats.heap_spare_bytes,
        "finite": all(loss == loss for loss in losses),
    }
    inf.handle(model).close()
    print(json.dumps(record))


@pytest.mark.slow
def test_peak_memory_grows_by_the_gradients_only_with_five_times_the_layers(tmp_path: Path) -> None:
    few, many = measure(tmp_path, LAYERS), measure(tmp_path, 5 * LAYERS)
    assert few["finite"]
    assert many["finite"]
    states = many["nvme"] - few["nvme"]
    grads = many["grads"] - few["grads"]
    grown = many["peak"] - few["peak"]
    assert states > 10 * (
        many["params"] - few["params"]
    )  # what did not grow RAM is a lot more than the slack below
    assert many["pool"] == few["pool"]
    assert many["gathered"] == few["gathered"]
    assert many["ram"] - few["ram"] < grads + 1 * MIB  # and checksums
    assert many["spare"] == few["spare"]
    # activations at the checkpoints, Python objects, the allocator's leftovers; and how full the
    # heap's allowance happens to be
    slack = 12 * MIB + few["spare"]
    assert slack < states / 8
    assert grown < grads + slack, (
        f"grew by {grown / MIB:.1f} MiB, of which {grads / MIB:.1f} MiB are gradients"
    )


def test_models_of_one_process_share_its_budget(tmp_path: Path) -> None:
    policy = inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram="4MiB")
    held = []
    with pytest.raises(BudgetError):
        for _ in range(8):
            held.append(inf.offload(models.make(models.llama), policy))
            inf.AdamW(held[-1].parameters())
    assert held
    for model in held:
        inf.handle(model).close()
    again = inf.offload(models.make(models.llama), policy)  # what was closed is free again
    inf.AdamW(again.parameters())
    inf.handle(again).close()


def tensor_bytes() -> int:
    """Bytes of CPU memory behind all tensors of this process."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def test_a_closed_engine_holds_nothing_beside_its_model(tmp_path: Path) -> None:
    before = tensor_bytes()
    model = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 64)).bfloat16()
    inf.offload(model, inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram="min"))
    optimizer = inf.AdamW(model.parameters())
    model(torch.ones(2, 1024, dtype=torch.bfloat16)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert tensor_bytes() - before > 8 * MIB  # gradients, and the scratch of the norm in fp32
    inf.handle(model).close()
    assert tensor_bytes() - before < MIB
    del optimizer


class Allocations:
    """Memory prepared for transfers in this process: bytes that forked children do not get (all
    that the engine pins, native code included), bytes locked or pinned, and the number of slabs
    ever made, freed ones included."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        make = Slab.__init__

        def counting(slab: Slab, size_bytes: int, **more: Any) -> None:
            self.made += 1
            make(slab, size_bytes, **more)

        monkeypatch.setattr(Slab, "__init__", counting)

    def now(self) -> dict[str, int]:
        """Bytes, and the count."""
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        found = {name: int(status[name].split()[0]) * 1024 for name in ("VmLck", "VmPin")}
        kept = size = 0
        for line in Path("/proc/self/smaps").read_text(errors="replace").splitlines():
            if line.startswith("Size:"):
                size = int(line.split()[1]) * 1024
            elif line.startswith("VmFlags:") and "dc" in line.split():
                kept += size
        return found | {"not inherited": kept, "slabs made": self.made}


MODES: dict[str, dict[str, Any]] = {
    "deferred": {},
    "backward": {"update": "backward"},
    "delayed": {"update": "delayed", "delayed_warmup": 0, "state": "compact"},
    "activations": {"activations": "nvme"},
    "threads": {"io_backend": "threads"},
}


@pytest.mark.parametrize("mode", alternating(MODES))
def test_no_step_after_the_first_two_allocates_for_the_engine(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 256)
    allocations = Allocations(monkeypatch)
    with harness.one_thread():
        before = allocations.now()
        values = {"params": "nvme", "optim": "nvme", "nvme": tmp_path, "ram": "min", **MODES[mode]}
        model: Any = models.make(models.llama)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        inf.offload(model, inf.Policy(**values))
        handle, optimizer = inf.handle(model), inf.AdamW(model.parameters())
        seen = []
        for batch in models.token_batches(6):
            models.loss_of(model, batch).backward()
            if mode != "backward":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(allocations.now())  # before flush() as well as after
            handle.flush()
            stats = handle.stats()
            seen.append(
                allocations.now()
                | {"planned": stats.ram_bytes, "gathered": stats.gathered_bytes_peak}
            )
        assert seen[4::2] == seen[4:5] * 4
        assert seen[5::2] == seen[5:6] * 4
        assert seen[-1]["not inherited"] - before["not inherited"] >= stats.pool_bytes
        assert not stats.registered or seen[-1]["VmPin"] >= stats.pool_bytes
        with Slab(1 << 20):  # or it would prove nothing
            held = allocations.now()
            assert held["not inherited"] >= seen[-2]["not inherited"] + (1 << 20)
        assert allocations.now()["slabs made"] == seen[-1]["slabs made"] + 1
        handle.close()
        assert allocations.now()["not inherited"] == before["not inherited"]


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]))
