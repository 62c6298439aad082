"""Placement never changes the numbers: every optimizer, state format and update mode, over units of
several chunks, with random delays. What rounds at random has no reference that shares no code with
the engine, so it is held against everything in RAM; exact states are held against the plain loop
besides."""

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
from infinity._src.engine.handle import offload
from infinity.aio import Seam
from tests import harness, models, reference
from tests.marks import alternating, pairwise
from tests.test_update_modes import set_values, values_of

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "SGD": {"lr": 1e-1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Lion": {"lr": 1e-3, "betas": (0.9, 0.98), "weight_decay": 0.1},
}
STATES = ("exact", "bf16", "compact")
UPDATES = ("deferred", "backward", "delayed")
STEPS, MICRO_BATCHES, WARMUP = 3, 2, 1
Outcome = tuple[list[float], dict[str, torch.Tensor]]
"""Losses and final parameters."""


def wide_llama() -> nn.Module:
    """Units of several chunks in every state format."""
    return models.llama(layers=2, hidden=320)


def train(
    factory: Callable[[], nn.Module],
    optimizer_name: str,
    policy: inf.Policy,
    seam: Seam | None = None,
) -> Outcome:
    """All micro-batches but the last in `no_sync`; clipped where the mode allows it."""
    with harness.one_thread():
        torch.manual_seed(0)
        model = offload(factory().bfloat16(), policy, _seam=seam)
        handle = inf.handle(model)
        try:
            optimizer = getattr(inf, optimizer_name)(
                model.parameters(), **OPTIMIZERS[optimizer_name]
            )
            if factory is wide_llama and policy.unit_bytes_max is None:
                # both layers
                assert sum(len(flat.layout.chunks) > 1 for flat in handle.parts.split.flats) >= 2
            batches = iter(models.token_batches(STEPS * MICRO_BATCHES, rows=1, length=6))
            losses = []
            for _ in range(STEPS):
                for micro in range(MICRO_BATCHES):
                    with (
                        handle.no_sync() if micro < MICRO_BATCHES - 1 else contextlib.nullcontext()
                    ):
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
def in_ram(
    factory: Callable[[], nn.Module], optimizer: str, state: str, update: str, seed: int = 0
) -> Outcome:
    """Everything in RAM, nothing delayed."""
    policy = inf.Policy(state=state, update=update, delayed_warmup=WARMUP, seed=seed)
    return train(factory, optimizer, policy)


@functools.cache
def plain(factory: Callable[[], nn.Module], optimizer_name: str, update: str) -> Outcome:
    """The reference loop in plain torch. "delayed": from WARMUP on it computes with the parameters
    before the last update."""
    with harness.one_thread():
        torch.manual_seed(0)
        model = factory().bfloat16()
        made = getattr(reference, f"Reference{optimizer_name}")
        optimizer = made([{"params": list(model.parameters())}], **OPTIMIZERS[optimizer_name])
        newest, losses, batches = (
            values_of(model),
            [],
            iter(models.token_batches(STEPS * MICRO_BATCHES, rows=1, length=6)),
        )
        for step in range(STEPS):
            for _ in range(MICRO_BATCHES):
                loss = models.loss_of(model, next(batches)) / MICRO_BATCHES
                loss.backward()
                losses.append(loss.item())
            if update != "backward":
                optimizer.clip(1.0)
            before = newest
            set_values(model, newest)
            optimizer.step()
            newest = values_of(model)
            if update == "delayed" and step >= WARMUP:
                set_values(model, before)
            optimizer.zero_grad()
        return losses, newest


def assert_same(ours: Any, theirs: Any) -> None:
    assert ours[0] == theirs[0]
    different = [name for name, value in theirs[1].items() if not torch.equal(ours[1][name], value)]
    assert not different, different


@pytest.mark.parametrize(
    ("optimizer", "state", "update"), pairwise(list(OPTIMIZERS), STATES, UPDATES)
)
def test_nvme_with_delays_is_ram_and_exact_is_the_plain_loop(
    optimizer: str, state: str, update: str, tmp_path: Path
) -> None:
    policy = inf.Policy(
        params="nvme",
        optim="nvme",
        nvme=tmp_path,
        ram="min",
        state=state,
        update=update,
        delayed_warmup=WARMUP,
    )
    seam = Seam(delay_us_max=1500, seed=len(optimizer + state + update))
    found = train(wide_llama, optimizer, policy, seam)
    assert_same(found, in_ram(wide_llama, optimizer, state, update))
    if state == "exact":
        assert_same(found, plain(wide_llama, optimizer, update))
    assert found[0][-1] != found[0][1]


PLACEMENTS: dict[str, dict[str, Any]] = {
    "threads": {"params": "nvme", "optim": "nvme", "ram": "min", "io_backend": "threads"},
    "parameters in ram": {"params": "cpu", "optim": "nvme", "ram": "min"},
    "optimizer in ram": {"params": "nvme", "optim": "cpu", "ram": "min"},
    "parameters on the device": {"params": "device", "optim": "nvme", "ram": "min"},
    "half of everything": {
        "params": "nvme",
        "optim": "nvme",
        "ram": "min",
        "resident": {"params": 0.5, "optim": 0.5},
    },
    "small units": {"params": "nvme", "optim": "nvme", "ram": "min", "unit_bytes_max": 16384},
}


@pytest.mark.parametrize(("update", "place"), alternating(UPDATES, PLACEMENTS))
def test_other_placements_with_delays_are_ram(update: str, place: str, tmp_path: Path) -> None:
    """Every placement with every update mode and with every state format; every mode with every
    format."""
    number = list(PLACEMENTS).index(place)
    state = STATES[(number + UPDATES.index(update)) % len(STATES)]
    chosen = PLACEMENTS[place]
    policy = inf.Policy(state=state, update=update, delayed_warmup=WARMUP, nvme=tmp_path, **chosen)
    seam = Seam(delay_us_max=1500, seed=number)
    assert_same(
        train(wide_llama, "AdamW", policy, seam), in_ram(wide_llama, "AdamW", state, update)
    )


@pytest.mark.parametrize("state", ["bf16", "compact"])
def test_early_updates_round_as_deferred_ones(state: str) -> None:
    """Without clipping the modes are one computation: the rounding's key is the step and the
    parameter, not the time."""
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
