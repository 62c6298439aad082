"""Search for the fastest way: its bound, its result against ways drawn at random, its limits."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
from collections.abc import Collection, Iterator

import pytest
import torch

from infinity._src.base.sizes import GIB
from infinity._src.config.choices import OPTIMIZERS
from infinity._src.plan.machine import KINDS, Machine, describe_machine
from infinity._src.plan.memory import gpu_need
from infinity._src.plan.predict import Prediction, predict
from infinity._src.plan.search import (
    PENALTY,
    SPLITS,
    Ranked,
    _kind,
    _Search,
    axes_of,
    is_exact,
    search,
    tilings_of,
    upgrades,
    weight_of,
)
from infinity._src.plan.workload import (
    FlatShape,
    Job,
    LinearShape,
    ModelShape,
    StackShape,
    UnitShape,
)
from tests.plans import job_of

WIDTHS = {"small": (1024, 8), "middle": (4096, 16), "large": (8192, 40)}
"""Width and layers of the models. Sizes matter, and not how many units there are."""


def model_of(size: str, experts: int = 0, words: int = 32000) -> ModelShape:
    width, layers = WIDTHS[size]
    bf16 = torch.bfloat16
    hidden = 4 * width
    square, mlp = ((width, width),) * 4, ((width, hidden),) * 3
    stack = (experts, 3 * hidden // 8, width)
    linears = tuple(LinearShape(f"q{index}.weight", 0, width, width) for index in range(4))
    units = [UnitShape("embed", (FlatShape((words * width,), bf16, True),))]
    for layer in range(layers):
        matrices = (*square, stack) if experts else square + mlp
        flat = FlatShape(tuple(map(math.prod, matrices)), bf16, True, matrices)
        stacks = (StackShape(0, math.prod(stack), experts),) if experts else ()
        units.append(UnitShape(f"layers.{layer}", (flat,), linears, (), stacks))
    head = LinearShape("head.weight", 0, words, width)
    units.append(UnitShape("head", (FlatShape((words * width,), bf16, True),), (head,)))
    shape = ModelShape(size, tuple(units), 0, layers, width, width, hidden, words, 8192)
    routed = layers * math.prod(stack) * 2 // max(experts, 1)
    dense = layers * (4 * width * width + (0 if experts else 3 * width * hidden))
    active = words * width + dense + (routed if experts else 0)
    chosen = {"experts": experts, "chosen": 2} if experts else {}
    return dataclasses.replace(shape, active_params=active, **chosen)


MODELS = [
    model_of(size, experts, words)
    for size in WIDTHS
    for experts in (0, 16)
    for words in (32000, 128000)
]


def drawn_machine(chance: random.Random) -> Machine:
    gpus = chance.choice([0, 1, 1, 1, 2, 8])
    drives = chance.choice([0, 1, 2, 4])
    rates = {"read_bytes_per_s": 6e9 * drives, "write_bytes_per_s": 4e9 * drives} if drives else {}
    return describe_machine(
        gpus=gpus,
        gpu=chance.choice(list(KINDS)) if gpus else None,
        ram_bytes=chance.choice([16, 64, 128, 512, 2048]) * GIB,
        drives=drives,
        nvme_bytes=chance.choice([None, 1e12, 4e12]) if drives else None,
        nodes=chance.choice([1, 1, 1, 2]) if gpus else 1,
        **rates,
    )


def drawn_job(chance: random.Random, machine: Machine) -> Job:
    sequence = chance.choice([512, 4096])
    return job_of(
        tokens=sequence * machine.world * chance.choice([1, 4, 32]), sequence=sequence,
        **({} if machine.drives else {"params": "cpu", "optim": "cpu"}),
    )  # fmt: skip


def predicted(shape: ModelShape, machine: Machine, job: Job) -> Prediction | None:
    """Predict a way; None if it does not fit."""
    # The cheaper half first.
    if not gpu_need(shape, machine, job).fits:
        return None
    found = predict(shape, machine, job)
    return found if found.fits else None


def cost(found: Prediction) -> float:
    return found.step_s * weight_of(found.job)


def check_against(
    found: Ranked, shape: ModelShape, machine: Machine, ways: Iterator[Job] | list[Job]
) -> None:
    """Check that none of these ways fits and is faster than the first that was found."""
    best = cost(found.ways[0]) if found.ways else float("inf")
    for job in ways:
        other = predicted(shape, machine, job)
        # A tiling that gathers less by no more than PENALTY is not worth more tiles.
        assert other is None or cost(other) >= best * (1 - 2 * PENALTY), job


def every_way(
    shape: ModelShape, machine: Machine, job: Job, fixed: Collection[str] = (), *, exact: bool
) -> Iterator[Job]:
    """Yield each way of the space, with each tiling, whether it fits or not."""
    axes = [
        *axes_of(shape, machine, job, fixed, exact=exact).values(),
        [each for tilings in tilings_of(shape, job, fixed).values() for each in tilings],
    ]
    for values in itertools.product(*axes):
        fields = {name: value for each in values for name, value in each.items()}
        with contextlib.suppress(ValueError):
            way = job.replace(**fields)
            if not way.refusal:
                yield way


def ways_of(shape: ModelShape, machine: Machine, job: Job, exact: bool, count: int) -> list[Job]:
    """Draw ways, half of them among those that change one axis of the first."""
    chance = random.Random(count)
    every = list(every_way(shape, machine, job, exact=exact))
    return chance.sample(every, min(count, len(every)))


QUICK = [(1, "adamw"), (2, "muon")]


@pytest.mark.parametrize(
    ("seed", "optimizer"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
     for each in itertools.product(range(3), OPTIMIZERS)],
)
def test_no_way_drawn_at_random_is_faster_and_no_bound_is_above_its_way(
    seed: int, optimizer: str
) -> None:
    chance = random.Random(seed)
    shape, machine = MODELS[seed], drawn_machine(chance)
    job, exact = drawn_job(chance, machine).replace(optimizer=optimizer), seed == 1
    found = search(shape, machine, job, exact=exact)
    ways = ways_of(shape, machine, job, exact, 40)
    check_against(found, shape, machine, ways)
    bounds = _Search(shape, machine, job, (), exact=exact)
    for way in ways:
        real = predict(shape, machine, way)
        rough, sharp = bounds._bound_s(way, 1), bounds._bound_s(way, SPLITS)
        assert rough <= sharp * (1 + 1e-9)
        if real.fits:
            assert sharp <= cost(real) * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_a_brute_force_search_finds_nothing_faster(seed: int) -> None:
    chance = random.Random(1000 + seed)
    machine = drawn_machine(chance)
    job = drawn_job(chance, machine).replace(optimizer=OPTIMIZERS[seed % 3 == 2])
    for shape in MODELS:
        found = search(shape, machine, job, exact=seed % 2 == 1)
        check_against(found, shape, machine, ways_of(shape, machine, job, seed % 2 == 1, 300))


def test_what_is_fixed_stays_and_exact_rounds_nothing() -> None:
    shape, machine = MODELS[0], describe_machine(gpus=1, gpu="rtx4090", ram_bytes=16 * GIB)
    job = job_of(tokens=8 * 4096, sequence=4096, update="delayed", grads="nvme", micro_batches=8)
    fixed = {"update", "grads", "micro_batches"}
    ways = search(shape, machine, job, fixed, exact=True, count=2).ways
    assert ways
    for way in ways:
        policy = way.job.policy
        assert (policy.update, policy.grads, way.job.micro_batches) == ("delayed", "nvme", 8)
        assert is_exact(way.job)
    durable = job_of(tokens=8 * 4096, sequence=4096, durable=True)
    ways = search(shape, machine, durable, {"durable"}, count=3).ways
    assert ways
    assert all(way.job.policy.durable for way in ways)
    # Unless it is fixed, no update comes one step late.
    assert all(way.job.policy.update != "delayed" for way in ways)


def test_the_second_way_is_of_another_kind_and_more_of_the_machine_is_never_slower() -> None:
    shape, machine = MODELS[4], describe_machine(gpus=1, gpu="h100", ram_bytes=16 * GIB)
    job = job_of(tokens=4 * 4096, sequence=4096)
    first, second = search(shape, machine, job, count=2).ways
    assert _kind(first.job) != _kind(second.job)
    assert cost(first) <= cost(second)
    more = upgrades(shape, machine, job, best=first)
    assert set(more) == {"one more drive", "32 GiB more RAM"}
    assert more["one more drive"] is not None, "the drives bound it"
    for way in more.values():
        assert way is None or cost(way) < cost(first)
    assert not search(shape, machine, job, below_s=cost(first)).ways


def test_a_machine_that_fits_nothing_has_no_way() -> None:
    machine = describe_machine(gpus=1, gpu_mem_bytes=GIB, ram_bytes=1 << 20)
    assert search(MODELS[8], machine, job_of(tokens=4096, sequence=4096)) == Ranked((), 0)


def test_smaller_tiles_are_tried_where_ram_is_too_small_for_whole_stacks() -> None:
    shape = model_of("middle", 16)
    machine = describe_machine(gpus=1, gpu="h100", ram_bytes=64 * GIB)
    job = job_of(tokens=4096, sequence=4096)
    whole = search(shape, machine, job, {"expert_tile"}, exact=True).ways[0]
    # Less than whole stacks need, and more than tiles do.
    least = dataclasses.replace(machine, ram_bytes=1 << 20)
    need, tiled = (
        min(
            predict(shape, least, whole.job.replace(expert_tile=tile, grads=grads)).ram.bytes
            for grads in ("cpu", "nvme")
        )
        for tile in (0, 1)
    )
    assert tiled < need
    small = dataclasses.replace(machine, ram_bytes=(need + tiled) / 2)
    (found,) = search(shape, small, job).ways
    assert found.job.expert_tile


def test_fewer_tokens_than_devices_are_refused() -> None:
    machine = describe_machine(gpus=2, gpu="h100", ram_bytes=64 * GIB)
    with pytest.raises(ValueError, match="1 tokens per step leave nothing for 2 devices"):
        search(MODELS[0], machine, job_of(tokens=1, sequence=1))


def test_a_value_that_a_user_fixes_leaves_the_rest_of_its_axis_open() -> None:
    machine = describe_machine(gpus=2, gpu="h100", ram_bytes=64 * GIB, nodes=2)
    job = job_of(tokens=12 * 4096, sequence=4096, micro_batches=3, params="cpu")
    axes = axes_of(MODELS[0], machine, job, {"micro_batches", "params"})
    passes = {(each["micro_batches"], each["schedule"]) for each in axes["passes"]}
    assert passes == {(3, "horizontal"), (3, "vertical")}
    assert {each["params"] for each in axes["params"]} == {"cpu"}
    assert any(each["qwz"] and each["hpz"] for each in axes["params"])
    # Values that no search would try leave the rest open, too.
    durable = job.replace(params="nvme", durable=True, generations=3)
    updates = axes_of(MODELS[0], machine, durable, {"durable", "generations"})["updates"]
    assert {each["generations"] for each in updates} == {3}
    assert {each["update"] for each in updates} == {"deferred", "backward"}
    one = axes_of(MODELS[0], machine, job, {"generations"})["updates"]
    assert {each["update"] for each in one} == {"deferred", "backward"}, "delayed is asked for"
    coded = axes_of(MODELS[0], machine, job.replace(qgz=True), {"qgz"})["params"]
    assert {(each["zero"], each["qgz"]) for each in coded} == {(3, True), (2, True)}
