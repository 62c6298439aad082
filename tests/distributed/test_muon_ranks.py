"""Muon on several ranks: every matrix is whole on one of them, and the bits are those of one rank
where gradients are."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.optim.whole_matrices import matrices_of
from infinity.errors import RankFailed, StateInvalid, StepUndone
from tests import harness, models
from tests.distributed.ranks import on_ranks
from tests.harness import assert_same

POLICIES: list[dict[str, Any]] = [
    {"params": "nvme", "optim": "nvme", "ram": "min"},
    {"params": "device", "optim": "cpu", "zero": 2, "find_unused_parameters": True},
    {"params": "cpu", "optim": "cpu", "state": "compact"},
    {"params": "nvme", "optim": "nvme", "ram": "min", "update": "backward"},
    {"params": "nvme", "optim": "nvme", "ram": "min", "generations": 2, "update": "backward"},
    {
        "params": "nvme", "optim": "nvme", "grads": "nvme", "generations": 2,
        "resident": {"params": 0.0, "optim": 0.0}, "unit_bytes_max": 4096,
    },
]


def trained(rank: int, place: Path) -> list[Any]:
    """Losses, parameters and states under each policy. All ranks have the same batches, so the mean
    of their gradients is each one's."""
    torch.set_num_threads(1)
    found = []
    for index, values in enumerate(POLICIES):
        nvme = place / f"nvme {index} {rank}"
        nvme.mkdir(parents=True)
        policy = inf.Policy(**values, **({"nvme": nvme} if "nvme" in values.values() else {}))
        spills = policy.grads == "nvme"
        # 17 rows, so that ranks have parts of rows; and stacks of experts.
        factory: Any = models.qwen3_moe
        if spills:
            factory = functools.partial(models.llama, layers=4)
            whole = inf.offload(models.make(factory), dataclasses.replace(policy, ram="min"))
            _, stats = inf.Muon(whole.parameters()), inf.handle(whole).stats()
            ram = stats.ram_min_bytes - stats.grad_bytes // 2
            inf.handle(whole).close()
            policy = dataclasses.replace(policy, ram=ram)
        model = inf.offload(models.make(factory), policy)
        optimizer = inf.Muon(model.parameters(), lr=0.02)
        losses = []
        for batch in models.token_batches(3):
            loss = models.loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        (engine,) = optimizer._engines
        held = [p for p in optimizer.params_with_states if optimizer.updates_matrix(p)]
        by_param = matrices_of(held, engine.pipeline.world).values()
        owners = {matrix.owner for each in by_param for matrix in each}
        assert owners == set(range(engine.pipeline.world))
        assert (inf.handle(model).stats().spilled_bytes > 0) == spills
        found.append((losses, harness.values_of(model), harness.states_of(model)))
        inf.handle(model).close()
    return found


def spoiled(rank: int, place: Path, generations: int = 1) -> str:
    """Return the error of a rank when a momentum, which one rank transforms, is infinite."""
    model = inf.offload(models.make(models.Small), inf.Policy(generations=generations))
    optimizer = inf.Muon(model.parameters())
    weight = model.blocks[1].up.weight  # type: ignore[union-attr]
    state = inf.handle(model).optimizer_state(weight)
    state["momentum_buffer"] = torch.full_like(state["momentum_buffer"], torch.inf)
    kinds = (StateInvalid, RankFailed) if generations == 1 else (StepUndone,)
    with pytest.raises(kinds) as caught:
        for batch in models.token_batches(2):
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    with contextlib.suppress(StateInvalid, RankFailed):
        inf.handle(model).close()
    return str(caught.value)


def spoiled_twice(rank: int, place: Path) -> list[str]:
    return [spoiled(rank, place, generations) for generations in (2, 1)]


def test_no_rank_waits_for_a_matrix_that_cannot_be_transformed(tmp_path: Path) -> None:
    for texts in on_ranks(spoiled_twice, tmp_path / "ranks", 2):
        assert all("blocks.1.up.weight is not finite" in text for text in texts), texts


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.ranks)])
def test_the_bits_are_those_of_one_rank(world: int, tmp_path: Path) -> None:
    with harness.one_thread():
        wanted = trained(0, tmp_path / "one")
    for results in on_ranks(trained, tmp_path / "several", world):
        assert_same(results, wanted)


def saved_halfway(rank: int, place: Path) -> Any:
    """Save after two of four steps, and return parameters and states after all."""
    torch.set_num_threads(1)
    model = inf.offload(models.make(models.qwen3_moe), inf.Policy())
    optimizer = inf.Muon(model.parameters(), lr=0.02)
    for index, batch in enumerate(models.token_batches(4)):
        if index == 2:
            inf.save(model, optimizer, place.parent / "saved").wait()
        models.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = harness.values_of(model), harness.states_of(model)
    inf.handle(model).close()
    return found


@pytest.mark.ranks
def test_a_checkpoint_of_two_ranks_goes_on_with_one(tmp_path: Path) -> None:
    wanted = on_ranks(saved_halfway, tmp_path / "ranks", 2)[0]
    with harness.one_thread():
        values = {"params": "nvme", "optim": "nvme", "ram": "min", "nvme": tmp_path}
        model = inf.offload(models.make(models.qwen3_moe), inf.Policy(**values))
        optimizer = inf.Muon(model.parameters(), lr=0.02)
        inf.restore(model, optimizer, tmp_path / "saved")
        for batch in models.token_batches(4)[2:]:
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same((harness.values_of(model), harness.states_of(model)), wanted)
        inf.handle(model).close()
