"""Stages 1, 2 and 3 at one world size: the same bits wherever states rest, and those of a plain
model of all ranks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import harness, models
from tests.distributed.plain_ranks import Rules, assert_modelled
from tests.distributed.rank_models import Odd, Routed, RoutedTraining
from tests.distributed.ranks import Train, assert_ranks_agree, named, on_ranks
from tests.harness import Result, Training
from tests.marks import THREE, mostly_ranks

SPECULATING = {"update": "backward", "generations": 2}
MIN = {"ram": "min"}

# Each pair of choices of (stage, parameters, optimizer, update, generations, backend) that goes
# together is in some row.
PLACES: tuple[dict[str, Any], ...] = (
    {"zero": 3, "params": "cpu", "optim": "cpu"},
    {"zero": 3, "params": "nvme", "optim": "nvme", **MIN},
    {"zero": 3, "params": "device", "optim": "nvme", **MIN, **SPECULATING},
    {"zero": 3, "params": "cpu", "optim": "nvme", "io_backend": "threads", "generations": 2},
    {"zero": 3, "params": "nvme", "optim": "cpu", **SPECULATING},
    {"zero": 3, "params": "device", "optim": "device"},
    {"zero": 2, "params": "device", "optim": "cpu"},
    {"zero": 2, "params": "device", "optim": "nvme", **MIN},
    {"zero": 2, "params": "device", "optim": "cpu", **SPECULATING},
    {"zero": 2, "params": "device", "optim": "nvme", "io_backend": "threads", "generations": 2},
    {"zero": 1, "params": "device", "optim": "cpu"},
    {"zero": 1, "params": "device", "optim": "nvme", **MIN, **SPECULATING},
    {"zero": 1, "params": "device", "optim": "nvme", "io_backend": "threads"},
)
LLAMA = Training(functools.partial(models.llama, 2), steps=2, rows=6, lr=2e-3, max_norm=0.7)
STATES = ("exact", "bf16", "compact")



def trained(
    runs: Sequence[tuple[Training, dict[str, Any]]], place: Path, world: int
) -> list[list[Result]]:
    """The results of each run, by rank; ranks agree."""
    found = [
        list(results) for results in zip(*on_ranks(Train(tuple(runs)), place, world), strict=True)
    ]
    for (_, chosen), results in zip(runs, found, strict=True):
        with named(chosen):
            assert_ranks_agree(results)
    return found


@pytest.mark.parametrize(
    ("world", "begin"),
    [(2, 0), *(pytest.param(*each, marks=pytest.mark.ranks) for each in ((2, 1), (3, 0)))],
)
def test_every_stage_and_place_gives_the_same_bits(tmp_path: Path, world: int, begin: int) -> None:
    """Two micro-batches per step, each of which is reduced, and a norm that clips every step. Tests
    every second place, beginning with number `begin`."""
    places = {
        "exact": PLACES[begin::2],
        "bf16": PLACES[2::5],
        "compact": PLACES[1::5],
    }
    runs = [(LLAMA, {**place, "state": state}) for state in STATES for place in places[state]]
    found = trained(runs, tmp_path / "run", world)
    first: dict[str, list[Result]] = {}
    for (_, chosen), results in zip(runs, found, strict=True):
        base = first.setdefault(chosen["state"], results)
        for ours, theirs in zip(results, base, strict=True):
            with named(chosen):
                harness.assert_equal(ours, theirs)
    assert all(norm > 0.7 for norm in first["exact"][0].norms)
    assert_modelled(first["exact"], LLAMA)


DEEP = dataclasses.replace(LLAMA, accumulation=3, no_sync=True)


@pytest.mark.parametrize(
    ("world", "step"),
    [(2, 2), *(pytest.param(world, 1, marks=pytest.mark.ranks) for world in (2, 3))],
)
def test_micro_batches_without_reduction_add_up_in_shards_or_on_their_rank(
    tmp_path: Path, world: int, step: int
) -> None:
    """Numbers depend on the choice between the two. By default each rank of stage 1 adds up its own
    micro-batches."""
    unclipped = dataclasses.replace(DEEP, max_norm=None)
    wide = dataclasses.replace(DEEP, grad_dtype=torch.float32)
    cpu, nvme = {"params": "cpu", "optim": "cpu"}, {"params": "nvme", "optim": "nvme", **MIN}
    device = {"params": "device", "optim": "nvme", **MIN}
    runs: list[tuple[Training, dict[str, Any], bool]] = [
        (DEEP, {"zero": 1, **device}, True),
        (DEEP, {"zero": 2, **device}, False),
        (DEEP, {"zero": 2, **device, "accumulate": "local"}, True),
        (DEEP, {"zero": 3, **nvme}, False),
        (DEEP, {"zero": 3, **nvme, "accumulate": "local"}, True),
        (DEEP, {"zero": 3, **nvme, **SPECULATING}, False),
        (DEEP, {"zero": 1, **device, **SPECULATING}, True),
        (unclipped, {"zero": 1, **device, "update": "backward"}, True),
        (unclipped, {"zero": 3, **cpu, "update": "backward"}, False),
        (wide, {"zero": 1, **device, "grad_dtype": torch.float32}, True),
        (wide, {"zero": 3, **cpu, "grad_dtype": torch.float32}, False),
    ][::step]
    # Nothing is added up: an update takes the gradient itself.
    single = dataclasses.replace(unclipped, accumulation=1)
    runs.append((single, {"zero": 3, **nvme, "update": "backward"}, False))
    found = trained([(training, chosen) for training, chosen, _ in runs], tmp_path / "run", world)
    for (training, chosen, local), results in zip(runs, found, strict=True):
        with named(chosen):
            assert_modelled(results, training, Rules(local=local))


@pytest.mark.parametrize("world", [2, THREE])
def test_a_delayed_update_is_the_same_wherever_states_rest(tmp_path: Path, world: int) -> None:
    delayed = {"update": "delayed", "delayed_warmup": 1}
    training = dataclasses.replace(LLAMA, steps=3, accumulation=1)
    places = [PLACES[index] for index in (0, 1, 7, 10)]
    found = trained([(training, {**place, **delayed}) for place in places], tmp_path / "run", world)
    for place, results in zip(places, found, strict=True):
        with named(place):
            harness.assert_equal(results[0], found[0][0])
    plain = trained([(training, PLACES[0])], tmp_path / "plain", world)[0]
    assert found[0][0].losses != plain[0].losses


@pytest.mark.parametrize("world", mostly_ranks([2, 3], 3))
def test_gradients_travel_in_reduce_dtype_and_are_summed_in_fp32_in_the_order_of_ranks(
    tmp_path: Path, world: int
) -> None:
    """Reduced in bf16, gradients in fp32 are rounded; reduced in fp32, gradients in bf16 stay
    exact."""
    fp32 = dataclasses.replace(LLAMA, dtype=torch.float32)
    wide = dataclasses.replace(LLAMA, grad_dtype=torch.float32)
    runs: list[tuple[Training, dict[str, Any], torch.dtype | None]] = [
        (fp32, {"zero": 2, "params": "device"}, torch.bfloat16),
        (LLAMA, {"zero": 3}, torch.float32),
        (wide, {"zero": 3, "grad_dtype": torch.float32}, torch.bfloat16),
        (wide, {"zero": 2, "params": "device", "grad_dtype": torch.float32}, None),
        (fp32, {"zero": 3}, None),
        (LLAMA, {"zero": 1, "params": "device"}, torch.bfloat16),
    ][: 4 if world == 3 else 6]
    chosen = [(training, {**values, "reduce_dtype": wire}) for training, values, wire in runs]
    for (training, values, wire), results in zip(
        runs, trained(chosen, tmp_path / "run", world), strict=True
    ):
        with named(training.dtype, values, wire):
            assert_modelled(results, training, Rules(wire=wire))


ROUTED = RoutedTraining(Routed, steps=2, rows=6, lr=2e-3)
STAGES: tuple[dict[str, Any], ...] = (
    {"zero": 3, "params": "nvme", "optim": "nvme", **MIN},
    {"zero": 2, "params": "device", "optim": "cpu"},
    {"zero": 1, "params": "device", "optim": "nvme"},
)


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, THREE])
def test_experts_without_tokens_on_some_ranks_count_as_zero_there_and_elsewhere_not_at_all(
    tmp_path: Path, world: int
) -> None:
    """An expert that only one rank uses has the mean with zeros; one that none uses is left alone,
    its moments and steps too."""
    runs = [
        (ROUTED, {**stage, **more}) for stage in STAGES for more in ({}, {"unit_bytes_max": 2048})
    ]
    runs += [(dataclasses.replace(ROUTED, no_sync=True), stage) for stage in STAGES]
    runs.append((ROUTED, {"params": "cpu", "optim": "cpu", **SPECULATING}))
    for (training, chosen), results in zip(
        runs, trained(runs, tmp_path / "run", world), strict=True
    ):
        with named(training.no_sync, chosen):
            assert_modelled(
                results, training, Rules(local=training.no_sync and chosen.get("zero") == 1)
            )


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_numbers_of_parameters_that_no_world_divides_and_units_of_a_few_elements(
    tmp_path: Path, world: int
) -> None:
    """Also tied weights, and scalars; the last ranks have nothing of the smallest units."""
    odd = Training(Odd, steps=2, rows=6, lr=2e-3)
    assert sum(param.numel() for param in odd.model().parameters()) % 2 == 1
    runs = [
        (odd, {**stage, **more})
        for stage in STAGES
        for more in ({}, {"unit_bytes_max": 256}, SPECULATING)
    ]
    # The gradients of both modules that share a weight are complete when the rank's sum receives
    # them.
    summed = [
        (dataclasses.replace(odd, no_sync=True), {**STAGES[2], **more})
        for more in ({}, SPECULATING)
    ]
    summed.append((dataclasses.replace(odd, no_sync=True), {**STAGES[0], "accumulate": "local"}))
    runs += summed
    for (training, chosen), results in zip(
        runs, trained(runs, tmp_path / "run", world), strict=True
    ):
        with named(training.no_sync, chosen):
            assert_modelled(results, training, Rules(local=training.no_sync))


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, THREE])
def test_frozen_tied_and_checkpointed_models_in_every_stage(tmp_path: Path, world: int) -> None:
    llama = Training(functools.partial(models.llama, 2), steps=2, rows=6, lr=2e-3, accumulation=1)
    trainings = [
        Training(functools.partial(models.lora, 2), steps=2, rows=6, lr=2e-3, accumulation=1),
        Training(models.gpt2, steps=2, rows=6, lr=2e-3, accumulation=1),
        dataclasses.replace(llama, checkpointing=False),
        dataclasses.replace(llama, checkpointing=True),
        dataclasses.replace(llama, optimizer="SGD", options=(("momentum", 0.9),)),
    ]
    runs = [(training, stage) for training in trainings for stage in STAGES]
    if world == 3:
        runs = runs[::2]
    for (training, chosen), results in zip(
        runs, trained(runs, tmp_path / "run", world), strict=True
    ):
        with named(training, chosen):
            assert_modelled(results, training)
