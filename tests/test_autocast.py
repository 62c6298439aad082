"""fp32 parameters under autocast: a plain loop's bits, and no 16-bit copy of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import infinity as inf
from infinity._src.engine.handle import offload
from infinity._src.params.unsharded_param import UnshardedParameter
from tests import harness, models
from tests.harness import policy

WIDTH, LAYERS = 32, 6
COPY_BYTES = 2 * WIDTH * WIDTH
"""A layer's weight in 16 bits."""


class Casts(TorchDispatchMode):
    """The 16-bit copies of gathered parameters that live."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[int, StorageWeakRef]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], UnshardedParameter):
            assert result.dtype is torch.bfloat16
            self._made.append((result.nbytes, StorageWeakRef(result.untyped_storage())))
        return result

    @property
    def count(self) -> int:
        return len(self._made)

    @property
    def live_bytes(self) -> int:
        return sum(size for size, storage in self._made if not storage.expired())


class Layer(nn.Module):
    """A unit that uses its weight twice, and raises where `fails` is set."""

    def __init__(self, casts: Casts) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.casts = casts
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x) + self.linear(x).tanh()
        if self.fails:
            raise RuntimeError("no such luck")
        return x


class Stack(nn.Module):
    """Layers, checkpointed or not; `seen` has the bytes of copies after each."""

    def __init__(self, casts: Casts, *, reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(casts) for _ in range(LAYERS))
        self.casts = casts
        self.reentrant = reentrant
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
            self.seen.append(self.casts.live_bytes)
        return x


@pytest.fixture
def casts() -> Casts:
    return Casts()


def stack(casts: Casts, tmp_path: Path, *, reentrant: bool | None = False) -> Stack:
    model = Stack(casts, reentrant=reentrant)
    offload(model, inf.Policy(nvme=tmp_path, params="nvme", optim="nvme", units=["Layer"]))
    return model


def run(model: Stack, casts: Casts) -> torch.Tensor:
    x = torch.randn(2, WIDTH, requires_grad=True)
    with casts:
        result: torch.Tensor = model(x)
        return result


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_copies_of_a_checkpointed_layer_go_with_the_layer(
    reentrant: bool, casts: Casts, tmp_path: Path
) -> None:
    model = stack(casts, tmp_path, reentrant=reentrant)
    with torch.autocast("cpu", torch.bfloat16):
        loss = run(model, casts).float().sum()
        assert model.seen == [0] * LAYERS
        assert casts.count == LAYERS, "one copy for both uses inside a layer"
        # Also the recomputation, and the backward inside of the user's region.
        with casts:
            loss.backward()
        assert casts.live_bytes == 0
        assert casts.count == 2 * LAYERS
        assert torch.is_autocast_cache_enabled()
    inf.handle(model).close()


def test_a_forward_without_gradients_keeps_no_copies(casts: Casts, tmp_path: Path) -> None:
    model = stack(casts, tmp_path, reentrant=None)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        run(model, casts)
    assert model.seen == [0] * LAYERS
    assert casts.count >= LAYERS
    inf.handle(model).close()


def test_without_checkpoints_autograd_alone_keeps_the_copies(casts: Casts, tmp_path: Path) -> None:
    """The remainder that docs/guide-gpu.md describes."""
    model = stack(casts, tmp_path, reentrant=None)
    with torch.autocast("cpu", torch.bfloat16):
        loss = run(model, casts).float().sum()
        assert casts.live_bytes == LAYERS * COPY_BYTES
        loss.backward()
    assert casts.live_bytes == 0
    inf.handle(model).close()


def test_a_forward_that_raises_keeps_no_copies(casts: Casts, tmp_path: Path) -> None:
    model = stack(casts, tmp_path)
    model.layers[3].fails = True
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match="no such luck"):
            run(model, casts)
        assert casts.live_bytes == 0
    inf.handle(model).close()


@pytest.mark.parametrize("enabled", [False, True])
def test_the_users_setting_of_the_cache_stays(enabled: bool, casts: Casts, tmp_path: Path) -> None:
    model = stack(casts, tmp_path)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=enabled):
        run(model, casts)
        assert torch.is_autocast_cache_enabled() is enabled
    assert casts.count == (LAYERS if enabled else 2 * LAYERS)
    inf.handle(model).close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_cache_is_cleared_for_fp32_weights_alone(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared = 0
    clear = torch.clear_autocast_cache

    def counted() -> None:
        nonlocal cleared
        cleared += 1
        clear()

    model = models.make(models.Small, dtype=dtype)
    offload(model, policy(tmp_path))
    monkeypatch.setattr(torch, "clear_autocast_cache", counted)
    batch = models.token_batches(1)[0]
    models.loss_of(model, batch)
    assert cleared == 0, "no region is open"
    with torch.autocast("cpu", torch.bfloat16):
        models.loss_of(model, batch)
    # torch's own at the end of the region, and one for each unit of fp32 weights.
    units = len(inf.handle(model).units)
    assert cleared == (1 if dtype is torch.bfloat16 else 1 + units)
    inf.handle(model).close()


def test_a_layer_that_runs_several_times_adds_its_gradients_in_fp32(tmp_path: Path) -> None:
    """A plain loop adds them in bf16 where its cache is on, and in fp32 where it is off."""
    training = harness.Training(models.albert, dtype=torch.float32, autocast="uncached")
    ours = harness.offloaded(
        harness.Training(models.albert, dtype=torch.float32, autocast="cached"),
        policy(tmp_path),
    )
    harness.assert_same(ours, harness.reference(training))


def test_a_region_around_several_steps_computes_with_the_newest_weights(tmp_path: Path) -> None:
    """A plain loop computes with the copies of its first step there: torch's cache does not see
    that weights change."""
    training = harness.Training(models.Small, dtype=torch.float32, autocast="cached", steps=2)
    inside = harness.Training(models.Small, dtype=torch.float32, steps=2)
    with torch.autocast("cpu", torch.bfloat16):
        ours = harness.offloaded(inside, policy(tmp_path))
    harness.assert_same(ours, harness.reference(training))
