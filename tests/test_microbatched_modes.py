"""`inf.microbatched` in every way of training: clipping, scaled losses, delayed updates,
checkpoints of the user's own, devices, faults in the middle of a slice, torch.compile; its cost."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity as inf
from infinity._src.engine.handle import offload
from infinity._src.hooks import activation_offload as activations
from infinity.aio import Fault, Seam
from infinity.errors import AioError, SlicesError, StepUndone
from tests import harness, models
from tests.device import simulated
from tests.harness import Training
from tests.marks import mostly_slow
from tests.sliced import Microbatched, assert_is_the_loop, differing, grads_of, whole
from tests.slopes import COSTS
from tests.test_bitwise import policy
from tests.test_microbatched import LLAMA, NVME, SPECULATIVE

# -- trainings -------------------------------------------------------------------------------------

POISONED = dataclasses.replace(
    LLAMA, dtype=torch.float16, scaler=(1024.0, 2), steps=3, poisoned=(1,), max_norm=None
)
LOOPS: dict[str, tuple[Training, dict[str, Any]]] = {
    "clipped, updated ahead": (dataclasses.replace(LLAMA, max_norm=0.05), SPECULATIVE),
    "a scaled loss that is infinite": (POISONED, {}),
    "a scaled loss that is infinite, updated ahead": (POISONED, SPECULATIVE),
    "fp32 parameters under autocast": (
        dataclasses.replace(LLAMA, dtype=torch.float32, autocast="cached"),
        {},
    ),
}


@pytest.mark.parametrize(
    "name",
    mostly_slow(LOOPS, "clipped, updated ahead", "a scaled loss that is infinite, updated ahead"),
)
def test_any_loop_has_the_bits_of_its_micro_batches(name: str, tmp_path: Path) -> None:
    training, values = LOOPS[name]
    result = harness.offloaded(whole(training), policy(tmp_path, **{**NVME, **values}))
    assert_is_the_loop(result, training)
    ahead = result.stats.updates_ahead + result.stats.updates_withdrawn
    assert bool(ahead) == bool(values.get("generations"))


@pytest.mark.parametrize("tier", mostly_slow(["cpu", "nvme"], "cpu"))
def test_inputs_of_slices_leave_a_device(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 1)
    training = dataclasses.replace(LLAMA, factory=functools.partial(models.llama, 4), steps=1)
    with simulated(monkeypatch) as device:
        found = harness.offloaded(
            whole(training), policy(tmp_path, **NVME, **SPECULATIVE, activations=tier)
        )
        assert device.live() == (0, 0, 0)
    assert_is_the_loop(found, training)
    # An input that is wanted before it has left is not fetched.
    assert 0 < found.stats.activations.fetched_bytes <= found.stats.activations.stored_bytes


# -- checkpoints of the user's own -----------------------------------------------------------------


class Own(nn.Module):
    """A model with checkpoints of its own around its blocks. `reentrant`: None for none."""

    def __init__(self, reentrant: bool | None, dropout: float = 0.0, hidden: int = 16) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embed = nn.Embedding(models.VOCAB, hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, hidden), nn.Dropout(dropout), nn.GELU())
            for _ in range(3)
        )
        self.head = nn.Linear(hidden, models.VOCAB)

    @property
    def loss_function(self) -> Callable[..., torch.Tensor]:
        """As models of transformers have it, so that it runs in slices."""
        return models.next_token_loss

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            if self.reentrant is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return {"loss": self.loss_function(self.head(x), labels)}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_blocks_keeps_the_bits(reentrant: bool, tmp_path: Path) -> None:
    training = Training(functools.partial(Own, reentrant), steps=2, accumulation=3)
    result = harness.offloaded(whole(training), policy(tmp_path, **NVME, **SPECULATIVE))
    assert_is_the_loop(result, training)


def test_a_forward_behind_a_reentrant_checkpoint_runs_in_slices_too() -> None:
    """Without gradients, but these are the activations of the step."""
    model: Any = models.make(Microbatched(functools.partial(Own, True), 2))
    rows: list[int] = []
    model.blocks[1][0].register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    models.loss_of(model, models.token_batches(1, rows=5)[0])
    assert rows == [2, 3], "the last slice first"


# -- faults ----------------------------------------------------------------------------------------


def failing(error: type[Exception]) -> Callable[[nn.Module, int], Any]:
    """A step before the first one, with a batch of another size, that fails."""

    def fail(model: nn.Module, step: int) -> None:
        if not step:
            with pytest.raises(error):
                models.loss_of(model, models.token_batches(1, rows=6, seed=9)[0]).backward()
            inf.handle(model).parts.tiers.executor.set_seam(Seam())

    return fail


FAULTS: dict[str, tuple[Fault, dict[str, Any]]] = {
    # The second slice of the second block.
    "a slice's input is written": (
        Fault("write", 4, lasting=True),
        {"params": "cpu", "optim": "cpu", "activations": "nvme"},
    ),
    "weights are read inside of a slice": (
        Fault("read", 9, persistent=True),
        {**NVME, "unit_bytes_max": 4096},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_good_step_follows_a_fault_in_the_middle_of_a_slice(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activations, "SMALLEST_BYTES", 256)
    fault, values = FAULTS[name]
    training = dataclasses.replace(whole(LLAMA), before=failing(AioError))
    result = harness.offloaded(training, policy(tmp_path, **values), seam=Seam(fault=fault))
    assert_is_the_loop(dataclasses.replace(result, seen=[]), LLAMA)


def test_a_step_that_a_fault_met_is_undone_and_comes_again(tmp_path: Path) -> None:
    """A write of an update that runs ahead of its step, while other slices are in backward."""
    training = whole(LLAMA)

    def trained(seam: Seam | None) -> tuple[list[float], dict[str, torch.Tensor], Any]:
        model = training.model()
        offload(model, policy(tmp_path, **NVME, **SPECULATIVE), _seam=seam)
        optimizer: Any = inf.AdamW(model.parameters(), lr=1e-2)
        handle, losses = inf.handle(model), []
        while len(losses) < training.steps:
            taken = len(losses)
            try:
                loss = models.loss_of(model, training.batches[taken])
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                handle.flush()
            except StepUndone:
                del losses[taken:]
                optimizer.zero_grad()
        values, stats = harness.values_of(model), handle.stats()
        writes = sum(drive.writes for drive in handle.parts.tiers.executor.stats().drives)
        handle.close()
        return losses, values, (stats.steps_undone, writes)

    with harness.one_thread():
        losses, values, (_, writes) = trained(None)
        again, others, (undone, _) = trained(Seam(fault=Fault("write", writes - 3, lasting=True)))
    assert undone == 1
    assert again == losses
    assert all(torch.equal(others[name], value) for name, value in values.items())


# -- cost ------------------------------------------------------------------------------------------

SLOPE_MAX = 1.1


@pytest.mark.parametrize(
    ("unit", "few"), [("calls", 2), pytest.param("bytes", 4, marks=pytest.mark.slow)]
)
def test_one_more_slice_costs_the_same_however_many_there_are(
    unit: str, few: int, tmp_path: Path
) -> None:
    """Calls and memory of Python, counted; weights are gathered as often as for one slice."""
    # Far apart: how often a thread waits for the drive, and so what it calls, varies by a percent.
    counts = (few, 4 * few, 8 * few, 16 * few)
    costs, read = [], set()
    for count in counts:
        model = models.make(Microbatched(functools.partial(Own, None, 0.1), count))
        offload(model, policy(tmp_path, **NVME, update="backward"))
        optimizer: Any = inf.AdamW(model.parameters(), lr=1e-2)
        batches = models.token_batches(2, rows=count)

        def step(batch: Any, model: Any = model, optimizer: Any = optimizer) -> None:
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            inf.handle(model).flush()

        step(batches[0])
        before = inf.handle(model).stats()
        cost, _ = COSTS[unit](functools.partial(step, batches[1]), on_device=False)
        after = inf.handle(model).stats()
        read.add((after.bytes_read - before.bytes_read, after.demands - before.demands))
        inf.handle(model).close()
        costs.append(cost)
    first, last = (
        (costs[place + 1] - costs[place]) / (counts[place + 1] - counts[place]) for place in (0, 2)
    )
    assert 0 < last <= SLOPE_MAX * first
    assert len(read) == 1


# -- torch.compile ---------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_compiled_block_runs_in_slices(fresh_compiler: None) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model, plain = (models.make(Microbatched(functools.partial(Own, None), 2)) for _ in range(2))
    model.blocks[0].compile(backend=counter)  # type: ignore[index, operator, union-attr]
    batch = models.token_batches(1, rows=4)[0]
    for each in (model, plain):
        models.loss_of(each, batch).backward()
    assert counter.frame_count > 0
    assert not differing(grads_of(model), grads_of(plain))


def compiled_before(way: str) -> nn.Module:
    model: Any = models.make(functools.partial(Own, None))
    if way == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
    elif way == "compile":
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "way", mostly_slow(["torch.compile", "compile", "forward"], "torch.compile")
)
def test_a_model_that_is_compiled_as_a_whole_is_refused(way: str, fresh_compiler: None) -> None:
    model: Any = models.make(Microbatched(functools.partial(Own, None), 2))
    batch = models.token_batches(1, rows=4)[0]
    if way == "compile":
        model.compile(backend="eager")
    if way == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
    compiled = torch.compile(model, backend="eager") if way == "torch.compile" else model
    with pytest.raises(ValueError, match=r"not compiled as a whole.*block\.compile\(\)"):
        compiled(**batch)
    with torch.no_grad():
        assert compiled(**batch)["loss"].item() > 0
    with pytest.raises(SlicesError, match=r"not compiled as a whole.*block\.compile\(\)"):
        inf.microbatched(compiled_before(way), 2)
