"""Boundary activations on NVMe: the reference loop's bits, less memory, faults that name the block,
refusals with a reason."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity as inf
from infinity._src.base.rss import peak_rss_bytes
from infinity._src.engine.handle import offload
from infinity._src.hooks import activation_offload as activations
from infinity._src.hooks import activation_store as shelf
from infinity.aio import Fault, Seam
from infinity.errors import AioError
from tests import forks, harness, models
from tests.distributed.test_two_ranks import on_two_ranks

MIB = 1 << 20
LAYERS = 32
ROWS, WIDTH = 2048, 1024  # a boundary of 4 MiB in bf16

deep_llama = functools.partial(models.llama, 6)


@pytest.fixture(autouse=True)
def _tiny_models_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 256)


def policy(directory: Path, **values: Any) -> inf.Policy:
    return harness.policy(directory, **{"activations": "nvme", **values})


class SharedBlocks(nn.Module):
    """One block applied several times, as in ALBERT, and another one, each behind torch's own
    checkpoint."""

    def __init__(self, hidden: int = 32, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embed = nn.Embedding(models.VOCAB, hidden)
        self.blocks = nn.ModuleList([models.Expert(hidden), models.Expert(hidden)])
        self.head = nn.Linear(hidden, models.VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        first = x
        for turn in range(8):
            x = x + checkpoint(
                self._segment, turn % 2, x.transpose(0, 1), first, use_reentrant=self.reentrant
            )
        return {"loss": models.next_token_loss(self.head(x), labels)}

    def _segment(self, index: int, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.blocks[index](x.transpose(0, 1)) + 0.1 * first)


# -- the same numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "reentrant"), [("llama", False), ("lora", True)])
def test_all_boundaries_but_the_last_go_and_come_back(
    name: str, reentrant: bool, tmp_path: Path
) -> None:
    factory = functools.partial(getattr(models, name), 5)
    training = harness.Training(factory, checkpointing=reentrant, steps=2)
    run = harness.offloaded(training, policy(tmp_path), seam=Seam(delay_us_max=3000, seed=7))
    harness.assert_same(run, harness.reference(training))
    # The first input of adapters is a leaf that requires a gradient, and stays.
    calls = training.steps * training.accumulation
    gone = 5 - (name == "lora") - activations.HELD_CALLS
    figures = run.stats.activations
    assert figures.calls == calls * 5
    assert figures.stored_bytes == figures.fetched_bytes == calls * gone * (2 * 12 * 32 * 2)


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_blocks_that_are_shared_and_checkpointed_by_hand_are_bit_equal(
    reentrant: bool, tmp_path: Path
) -> None:
    training = harness.Training(functools.partial(SharedBlocks, reentrant=reentrant), steps=2)
    result = harness.offloaded(training, policy(tmp_path), seam=Seam(delay_us_max=3000, seed=3))
    harness.assert_same(result, harness.reference(training))
    assert result.stats.activations.calls == 4 * 8
    assert result.stats.activations.stored_bytes == 4 * 6 * 2 * 12 * 32 * 2


def train_on_rank(rank: int, place: Path) -> list[harness.Run]:
    """Activations that stay, and that go, on one of two ranks."""
    activations.SMALLEST_BYTES = 256
    results = []
    for tier in ("device", "nvme"):
        training = harness.Training(deep_llama, checkpointing=False, steps=2)
        seam = Seam(delay_us_max=2000, seed=rank)
        results.append(harness.offloaded(training, policy(place, activations=tier), seam=seam))
        results[-1].stats = results[-1].stats.activations.stored_bytes
    return results


@pytest.mark.ranks
def test_on_two_ranks_each_puts_its_own_away(tmp_path: Path) -> None:
    for stay, go in on_two_ranks(train_on_rank, tmp_path / "run"):
        harness.assert_same(go, stay)
        assert stay.stats == 0
        assert go.stats > 0


# -- less memory -----------------------------------------------------------------------------------


class Narrow(nn.Module):
    """A block whose input is large and whose weights and work are not."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.down(x))


class Tower(nn.Module):
    """Many of them, checkpointed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.start = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList([Narrow() for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x.float().mean()


def climb(directory: str, tier: str, reentrant: bool) -> None:
    """Two steps of a tower; prints a JSON record."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Tower(reentrant).to(torch.bfloat16)
    before = peak_rss_bytes()
    offload(model, policy(Path(directory), params="cpu", optim="cpu", activations=tier))
    optimizer = inf.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        loss = model(torch.ones(ROWS, 1, dtype=torch.bfloat16))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    stats = inf.handle(model).stats()
    record = {
        "peak": peak_rss_bytes() - before,
        "ram": stats.ram_bytes,
        "held": stats.activations.held_bytes_peak,
        "rest": stats.activations.rest_bytes_peak,
        "stored": stats.activations.stored_bytes,
        "losses": losses,
    }
    inf.handle(model).close()
    print(json.dumps(record))


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_the_peak_falls_by_what_all_layers_but_a_few_would_hold(
    reentrant: bool, tmp_path: Path
) -> None:
    found: dict[str, dict[str, Any]] = {}
    for tier in ("device", "nvme"):
        output = forks.in_a_fork("tests.test_activations", tmp_path, tier, int(reentrant))
        found[tier] = json.loads(output.strip().splitlines()[-1])
    device, nvme = found["device"], found["nvme"]
    assert device["losses"] == nvme["losses"]
    boundary = 2 * ROWS * WIDTH
    assert nvme["stored"] == 2 * (LAYERS - activations.HELD_CALLS) * boundary
    assert nvme["rest"] == (LAYERS - activations.HELD_CALLS) * boundary
    limit = (
        activations.HELD_CALLS + activations.PREFETCH_CALLS + 1
    ) * boundary + activations.STORING_BYTES_MAX
    assert nvme["held"] <= limit
    pools = nvme["ram"] - device["ram"]
    assert pools <= 16 * shelf.CHUNK_BYTES
    fallen = device["peak"] - (nvme["peak"] - pools)
    # Without the allocator's leftovers (more of them where a busy drive makes calls wait) and what
    # was on its way out.
    assert fallen > LAYERS * boundary - limit - 24 * MIB, {
        tier: one["peak"] / MIB for tier, one in found.items()
    }


def test_a_drive_slower_than_compute_is_waited_for(tmp_path: Path) -> None:
    training = harness.Training(models.Small, checkpointing=False, steps=1)
    slow = Seam(write_bytes_per_s=40_000.0, read_bytes_per_s=40_000.0)
    result = harness.offloaded(training, policy(tmp_path, params="cpu", optim="cpu"), seam=slow)
    harness.assert_same(result, harness.reference(training))
    assert result.stats.activations.wait_s > 0


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["write", "read"])
def test_a_fault_names_the_block_and_the_step_can_be_repeated(op: str, tmp_path: Path) -> None:
    training = harness.Training(
        deep_llama, checkpointing=False, steps=1, accumulation=1, max_norm=None
    )
    batch = training.batches[0]
    with harness.one_thread():
        plain = training.model()
        models.loss_of(plain, batch).backward()
        model: Any = training.model()
        fault = Fault(
            op=op,
            nth=2,
            kind="errno" if op == "write" else "bitflip",
            persistent=op == "read",
            lasting=True,
        )
        offload(model, policy(tmp_path, params="cpu", optim="cpu"), _seam=Seam(fault=fault))
        with pytest.raises(AioError, match=r"the input of model\.layers\.\d cannot be") as caught:
            for _ in range(4):
                model.zero_grad()
                models.loss_of(model, batch).backward()
        assert caught.value.path.startswith(str(tmp_path))
        model.zero_grad()
        if op == "write":
            models.loss_of(model, batch).backward()
            handle = inf.handle(model)
            for (name, ours), theirs in zip(
                model.named_parameters(), plain.parameters(), strict=True
            ):
                param = next(param for param in handle.parts.split.params if param.name == name)
                assert param.grad is not None
                assert torch.equal(param.grad.tensor.view(theirs.shape), theirs.grad), (
                    name,
                    ours.shape,
                )
        inf.handle(model).close()


# -- refusals --------------------------------------------------------------------------------------


def test_the_cpu_tier_is_refused_where_the_cpu_computes(tmp_path: Path) -> None:
    model = models.make(models.llama)
    with pytest.raises(ValueError, match=r"activations='cpu'.*they are in CPU memory already"):
        inf.offload(model, policy(tmp_path, activations="cpu"))
    inf.handle(inf.offload(model, policy(tmp_path))).close()  # the model is as it was


@pytest.mark.parametrize("update", ["deferred", "delayed"])
def test_a_model_without_checkpoints_is_told_once(update: str, tmp_path: Path) -> None:
    training = harness.Training(models.Small, steps=3, accumulation=1, max_norm=None)
    with pytest.warns(UserWarning, match=r"gradient_checkpointing_enable\(\)") as caught:
        result = harness.offloaded(training, policy(tmp_path, update=update))
    assert len([one for one in caught if "activations=" in str(one.message)]) == 1
    harness.assert_same(result, harness.reference(training))


def test_torch_is_as_it_was_when_the_last_engine_is_closed(tmp_path: Path) -> None:
    from torch.utils import checkpoint as of_torch

    def found() -> dict[type, dict[str, Any]]:
        # All classes of that file: releases of torch differ in which of them keeps the inputs.
        here = [
            one
            for one in vars(of_torch).values()
            if getattr(one, "__module__", "") == of_torch.__name__
        ]
        return {one: dict(vars(one)) for one in here if isinstance(one, type)}

    before = found()
    first = inf.offload(models.make(models.llama), policy(tmp_path))
    second = inf.offload(models.make(models.llama), policy(tmp_path))
    inf.handle(first).close()
    assert found() != before
    inf.handle(second).close()
    assert found() == before


if __name__ == "__main__":
    climb(sys.argv[1], sys.argv[2], bool(int(sys.argv[3])))
