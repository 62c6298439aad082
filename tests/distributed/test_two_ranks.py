"""Two ranks over gloo: each unit is split, and reduced once in a step. test_stages.py has the
places of states, test_worlds.py compares with one rank."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity.errors import NonFiniteGradient, RankFailed, StateInvalid
from tests import harness, models
from tests.distributed.ranks import Job, Train, assert_ranks_agree, mean_losses, on_ranks
from tests.harness import Training
from tests.marks import THREE
from tests.sliced import Microbatched

WORLD = 2


def on_two_ranks(job: Job, directory: Path) -> list[Any]:
    """The results of `job(rank, directory)` on each rank. The job must be picklable."""
    return on_ranks(job, directory, WORLD)


LLAMA = Training(models.llama, steps=4, rows=4, lr=2e-3)
PLACEMENTS = {
    "cpu": {"params": "cpu", "optim": "cpu"},
    "nvme": {"params": "nvme", "optim": "nvme", "ram": "min"},
}


ORDERS = (2.0, 1.0, 3.0, 0.5, 0.0, -1.0, float("inf"), float("-inf"))


def norms_of_orders(rank: int, place: Path) -> list[tuple[float, float]]:
    """Norms of all gradients, here and of the same plain model: of each order, and after clipping
    by the largest element."""
    torch.manual_seed(0)
    # Small: a rank may hold no element of a bias.
    plain = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Linear(33, 1))
    model = inf.offload(copy.deepcopy(plain))
    batch = torch.randn(4, 16)
    found = []
    for each in (model, plain):
        each(batch).sum().backward()
        grads = [param.grad for param in each.parameters()]
        norms = [torch.nn.utils.get_total_norm(grads, order).item() for order in ORDERS]
        clipped = [
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1, float("inf"), foreach=foreach)
            for foreach in (None, False)
        ]
        found.append([*norms, *(norm.item() for norm in clipped)])
    inf.handle(model).close()
    return list(zip(*found, strict=True))


def test_norms_of_any_order_on_two_ranks_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    results = on_two_ranks(norms_of_orders, tmp_path / "run")
    assert results[0] == results[1]
    ours, theirs = zip(*results[0], strict=True)
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.ranks
def test_gradients_that_spill_on_two_ranks_keep_their_bits(tmp_path: Path) -> None:
    """Small units, and no state in RAM only because it fits, so that a small model must spill."""
    values = {
        **PLACEMENTS["nvme"],
        "unit_bytes_max": 4096,
        "resident": {"params": 0.0, "optim": 0.0},
    }
    plain = [results[0] for results in on_two_ranks(Train(((LLAMA, values),)), tmp_path / "plain")]
    stats = plain[0].stats
    spilling = {**values, "grads": "nvme", "ram": stats["ram_min_bytes"] - stats["grad_bytes"] // 2}
    spilled = [
        results[0] for results in on_two_ranks(Train(((LLAMA, spilling),)), tmp_path / "spilled")
    ]
    for rank in range(WORLD):
        assert spilled[rank].stats["spilled_bytes"] > 0
        harness.assert_equal(spilled[rank], plain[rank])


@pytest.mark.ranks
def test_updates_ahead_of_their_step_on_two_ranks_keep_its_bits_however_it_clips(
    tmp_path: Path,
) -> None:
    ahead = {**PLACEMENTS["nvme"], "update": "backward", "generations": 2}
    trainings = [
        dataclasses.replace(LLAMA, accumulation=1, max_norm=norm) for norm in (1e6, 0.05, 1.4)
    ]
    runs = tuple(
        (training, chosen) for training in trainings for chosen in (PLACEMENTS["cpu"], ahead)
    )
    found = on_two_ranks(Train(runs), tmp_path / "run")
    for rank in range(WORLD):
        for plain, speculating in zip(found[rank][::2], found[rank][1::2], strict=True):
            harness.assert_equal(speculating, plain)
        assert found[rank][1].stats["updates_ahead"] > 0


def ahead_of_nothing(rank: int, place: Path) -> Any:
    """Rank 1 has a gradient that undoes updates ahead of their step; the result equals a plain
    loop. Then a fault on rank 0 undoes no step, since rank 1 does not know of it."""
    seen = []
    for chosen in (
        PLACEMENTS["cpu"],
        {**PLACEMENTS["nvme"], "update": "backward", "generations": 2, "nvme": place},
    ):
        model = inf.offload(models.make(models.llama), inf.Policy(on_nonfinite="skip", **chosen))
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step, batch in enumerate(models.token_batches(6, seed=rank)):
            loss = models.loss_of(model, batch)
            (loss * (float("nan") if rank == 1 and step == 3 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        seen.append(losses)
        handle = inf.handle(model)
        if handle.policy.generations == 1:
            handle.close()
    handle.flush()
    # The error reaches the other ranks at once, also inside the flush above.
    torch.distributed.barrier()
    handle.pipeline.set_fault(StateInvalid("a drive failed"))
    with pytest.raises((StateInvalid, RankFailed), match="a drive failed"):
        handle.flush()
    with contextlib.suppress(StateInvalid, RankFailed):
        handle.close()
    return seen, handle.pipeline.updates_withdrawn, handle.pipeline.steps_undone


@pytest.mark.parametrize("world", [2, THREE])
def test_a_gradient_of_one_rank_forbids_what_ran_ahead_on_all(tmp_path: Path, world: int) -> None:
    for (plain, speculating), withdrawn, undone in on_ranks(
        ahead_of_nothing, tmp_path / "run", world
    ):
        assert speculating == plain
        assert withdrawn > 0
        assert undone == 0


FAMILIES = (models.llama, models.gpt2, models.t5, models.lora, models.External, models.ListMoe)


@pytest.mark.ranks
def test_in_fp32_model_families_on_two_ranks_are_one_rank_within_rounding(tmp_path: Path) -> None:
    trainings = [
        Training(factory, steps=2, rows=4, dtype=torch.float32, lr=1e-3) for factory in FAMILIES
    ]
    runs = tuple((training, PLACEMENTS["nvme"]) for training in trainings)
    everything = zip(*on_two_ranks(Train(runs), tmp_path / "run"), strict=True)
    for training, results in zip(trainings, everything, strict=True):
        assert_ranks_agree(results)
        if training.factory is models.ListMoe:
            continue  # its penalty is not a mean over rows
        one = harness.reference(training)
        assert mean_losses(results) == pytest.approx(one.losses, rel=1e-4), training.factory
        assert results[0].norms == pytest.approx(one.norms, rel=1e-4), training.factory
        # AdamW's first steps divide a gradient by its own size: elements whose gradient is rounding
        # noise may differ.
        for name, value in one.params.items():
            near = torch.isclose(results[0].params[name], value, rtol=1e-3, atol=2e-5)
            assert near.float().mean() > 0.99, (training.factory, name)


def poisoned(rank: int, place: Path) -> tuple[str, float]:
    """A gradient that is not finite on rank 1 only."""
    model = inf.offload(
        models.make(models.llama), inf.Policy(params="nvme", optim="nvme", nvme=place, ram="min")
    )
    optimizer = inf.AdamW(model.parameters())
    loss = models.loss_of(model, models.token_batches(1, seed=rank)[0])
    (loss * (float("nan") if rank else 1.0)).backward()
    try:
        optimizer.step()
        outcome = "stepped"
    except NonFiniteGradient as error:
        outcome = type(error).__name__
    optimizer.zero_grad()
    again = models.loss_of(model, models.token_batches(1)[0]).item()
    inf.handle(model).close()
    return outcome, again


def scaled(rank: int, place: Path) -> tuple[float, float]:
    """GradScaler where only rank 1 overflows."""
    model = inf.offload(models.make(models.llama), inf.Policy())
    optimizer = inf.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    loss = models.loss_of(model, models.token_batches(1, seed=rank)[0])
    scaler.scale(loss * (float("inf") if rank else 1.0)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    after = models.loss_of(model, models.token_batches(1)[0]).item()
    inf.handle(model).close()
    return scaler.get_scale(), after


def accidents(rank: int, place: Path) -> list[tuple[Any, float]]:
    """Both, in one start of the ranks."""
    return [poisoned(rank, place), scaled(rank, place)]


def test_a_gradient_that_is_not_finite_on_one_rank_stops_the_step_on_both(tmp_path: Path) -> None:
    results = on_two_ranks(accidents, tmp_path / "run")
    assert results[0] == results[1]
    (outcome, _), (scale, _) = results[0]
    assert outcome == "NonFiniteGradient"
    assert scale == 128.0


SMALL = functools.partial(models.llama, 2)
WHOLE = Training(SMALL, accumulation=1, rows=8, steps=2)


def test_two_ranks_reduce_each_unit_once_for_all_slices(tmp_path: Path) -> None:
    sliced = dataclasses.replace(WHOLE, factory=Microbatched(SMALL, 4))
    figures = ("comm_reduce_inside_bytes", "comm_reduce_across_bytes")
    runs: tuple[tuple[Training, dict[str, Any]], ...] = (
        (WHOLE, PLACEMENTS["cpu"]),
        (sliced, PLACEMENTS["cpu"]),
        # With blocks of several units, which stay from slice to slice.
        (
            sliced,
            {**PLACEMENTS["nvme"], "update": "backward", "generations": 2, "unit_bytes_max": 8192},
        ),
    )
    found = on_two_ranks(Train(runs, held=figures), tmp_path / "run")
    one, cpu, nvme = zip(*found, strict=True)
    for results in (cpu, nvme):
        assert_ranks_agree(list(results))
    for rank in range(WORLD):
        harness.assert_equal(nvme[rank], cpu[rank])
        assert cpu[rank].stats == one[rank].stats, "one reduction for each unit and step"
        assert any(cpu[rank].stats.values())
        assert cpu[rank].losses == pytest.approx(one[rank].losses, rel=2e-2)


def test_two_ranks_reduce_each_unit_once_for_all_micro_batches(tmp_path: Path) -> None:
    loop = Training(SMALL, accumulation=4, rows=4, steps=2)
    together = dataclasses.replace(loop, together=True)
    local = dataclasses.replace(loop, no_sync=True)
    figures = ("comm_reduce_inside_bytes", "comm_reduce_across_bytes")
    runs: tuple[tuple[Training, dict[str, Any]], ...] = (
        (dataclasses.replace(loop, accumulation=1), PLACEMENTS["cpu"]),
        (together, PLACEMENTS["cpu"]),
        (local, {**PLACEMENTS["cpu"], "accumulate": "local"}),
    )
    found = on_two_ranks(Train(runs, held=figures), tmp_path / "run")
    one, cpu, summed = zip(*found, strict=True)
    assert_ranks_agree(list(cpu))
    for rank in range(WORLD):
        harness.assert_equal(summed[rank], cpu[rank])
        assert cpu[rank].stats == one[rank].stats, "one reduction for each unit and step"
        assert any(cpu[rank].stats.values())
