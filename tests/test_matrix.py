"""Placement never changes the numbers, in every state format, update mode and optimizer, with random delays.

Exact formats have a reference loop elsewhere (test_bitwise, test_update_modes, test_optimizers); what rounds at random has
none that shares no code, so here all placements are held against everything in RAM.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity.aio import Seam
from infinity.engine import offload
from tests import harness, models

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": functools.partial(inf.AdamW, lr=1e-2, weight_decay=0.1),
    "SGD": functools.partial(inf.SGD, lr=1e-1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Lion": functools.partial(inf.Lion, lr=1e-3, weight_decay=0.1),
}
STEPS, MICRO_BATCHES = 5, 2


def wide_llama() -> nn.Module:
    """Units of several chunks."""
    return models.llama(layers=2, hidden=288)


def train(
    factory: Callable[[], nn.Module], optimizer_name: str, policy: inf.Policy, seam: Seam | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final parameters; all micro-batches but the last in `no_sync`, clipped where the mode allows it."""
    with harness.one_thread():
        torch.manual_seed(0)
        model = offload(factory().bfloat16(), policy, _seam=seam)
        handle = inf.handle(model)
        try:
            optimizer = OPTIMIZERS[optimizer_name](model.parameters())
            batches = iter(models.token_batches(STEPS * MICRO_BATCHES))
            losses = []
            for _ in range(STEPS):
                for micro in range(MICRO_BATCHES):
                    with handle.no_sync() if micro < MICRO_BATCHES - 1 else contextlib.nullcontext():
                        loss = models.loss_of(model, next(batches)) / MICRO_BATCHES
                        loss.backward()
                    losses.append(loss.item())
                if policy.update != "backward":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            return losses, {name: value.clone() for name, value in model.state_dict().items()}
        finally:
            handle.close()


@functools.cache
def in_ram(factory: Callable[[], nn.Module], optimizer: str, state: str, update: str, seed: int = 0) -> Any:
    policy = inf.Policy(state=state, update=update, delayed_warmup=1, seed=seed)
    return train(factory, optimizer, policy)


def assert_same(ours: Any, theirs: Any) -> None:
    assert ours[0] == theirs[0]
    different = [name for name, value in theirs[1].items() if not torch.equal(ours[1][name], value)]
    assert not different, different


@pytest.mark.parametrize("update", ["deferred", "backward", "delayed"])
@pytest.mark.parametrize("state", ["exact", "bf16", "compact"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nvme_with_delays_is_ram(optimizer: str, state: str, update: str, tmp_path: Path) -> None:
    policy = inf.Policy(
        params="nvme", optim="nvme", nvme=tmp_path, ram="min", state=state, update=update, delayed_warmup=1
    )
    seam = Seam(delay_us_max=1500, seed=len(optimizer + state + update))
    assert_same(
        train(models.llama, optimizer, policy, seam), in_ram(models.llama, optimizer, state, update)
    )


PLACEMENTS: dict[str, dict[str, Any]] = {
    "threads": {"params": "nvme", "optim": "nvme", "ram": "min", "io_backend": "threads"},
    "parameters in ram": {"params": "cpu", "optim": "nvme", "ram": "min"},
    "optimizer in ram": {"params": "nvme", "optim": "cpu", "ram": "min"},
    "parameters on the device": {"params": "device", "optim": "nvme", "ram": "min"},
    "half of everything": {"params": "nvme", "optim": "nvme", "ram": "min", "resident": {"params": 0.5, "optim": 0.5}},
    "small units": {"params": "nvme", "optim": "nvme", "ram": "min", "unit_bytes_max": 16384},
}


@pytest.mark.parametrize("update", ["deferred", "backward"])
@pytest.mark.parametrize("state", ["bf16", "compact"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_units_of_many_chunks_keep_their_bits_wherever_they_rest(
    name: str, state: str, update: str, tmp_path: Path
) -> None:
    policy = inf.Policy(state=state, update=update, nvme=tmp_path, **PLACEMENTS[name])
    assert_same(train(wide_llama, "AdamW", policy), in_ram(wide_llama, "AdamW", state, update))


@pytest.mark.parametrize("state", ["bf16", "compact"])
def test_early_updates_round_as_deferred_ones(state: str) -> None:
    """Without clipping the modes are one computation: the rounding's key is the step and the parameter, not the time."""
    results = []
    for update in ("deferred", "backward"):
        with harness.one_thread():
            torch.manual_seed(0)
            model = inf.offload(models.llama().bfloat16(), inf.Policy(state=state, update=update))
            optimizer = inf.AdamW(model.parameters(), lr=1e-2)
            for batch in models.token_batches(3):
                models.loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append({name: value.clone() for name, value in model.state_dict().items()})
            inf.handle(model).close()
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())


@pytest.mark.parametrize("state", ["bf16", "compact"])
def test_the_seed_is_what_random_rounding_depends_on(state: str) -> None:
    first = in_ram(models.llama, "AdamW", state, "deferred", 0)
    other = in_ram(models.llama, "AdamW", state, "deferred", 1)
    assert any(not torch.equal(first[1][name], value) for name, value in other[1].items())
    exact = in_ram(models.llama, "AdamW", "exact", "deferred", 0)
    for name, value in exact[1].items():
        assert torch.allclose(first[1][name].float(), value.float(), atol=0.05), name
