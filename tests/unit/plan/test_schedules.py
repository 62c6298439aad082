"""Plans of the vertical schedule: any number of micro-batches moves what one does, and holds more
on the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.base.sizes import GIB, MIB
from infinity._src.kernels import choice
from infinity._src.plan.changes import one_change
from infinity._src.plan.machine import Machine, describe_machine
from infinity._src.plan.memory import gpu_need
from infinity._src.plan.predict import Prediction, predict
from infinity._src.plan.workload import (
    FlatShape,
    Job,
    LinearShape,
    ModelShape,
    StackShape,
    UnitShape,
    cut_experts,
)
from tests.plans import job_of, with_budget

LAYERS, WIDTH, TOKENS = 4, 1024, 8 * 4096
MEBI = 1 << 20


def flat(*numels: int) -> FlatShape:
    return FlatShape(numels, torch.bfloat16, True)


def shape_of_blocks() -> ModelShape:
    """Words, four blocks of two units each, and a head."""
    units = [UnitShape("model.embed_tokens", (flat(2 * MEBI),))]
    for layer in range(LAYERS):
        units += [
            UnitShape(f"model.layers.{layer}.self_attn", (flat(MEBI),)),
            UnitShape(f"model.layers.{layer}.mlp", (flat(3 * MEBI),)),
        ]
    units.append(UnitShape("lm_head", (flat(2 * MEBI),)))
    params = sum(unit.flats[0].numel for unit in units)
    return ModelShape(
        "blocks", tuple(units), params, LAYERS, WIDTH, WIDTH, 2 * WIDTH, 2048, 4096
    )


def machine(gpus: int = 1, **given_: Any) -> Machine:
    return describe_machine(
        **{"gpus": gpus, "ram_bytes": GIB, "read_bytes_per_s": 2e9, "write_bytes_per_s": 1e9,
           "gpu_mem_bytes": 8 * GIB, "dram_bytes_per_s": 1e11, **given_},
    )  # fmt: skip


JOB = job_of(
    tokens=TOKENS, sequence=4096, micro_batches=8, resident={"params": 0.0, "optim": 0.0}
)
VERTICAL = JOB.replace(schedule="vertical")


def moved_and_held(found: Prediction) -> tuple[Any, ...]:
    """All of a prediction that passes decide, device memory and time apart."""
    return (
        found.moved, found.copied, found.exchanged, found.budget_bytes, found.policy_ram,
        found.at_rest, found.on_nvme, found.nvme,
    )  # fmt: skip


def predicted(shape: ModelShape, where: Machine, job: Job) -> Prediction:
    """Predict with the machine's RAM for budgets alone."""
    budget_bytes = where.ram_bytes // where.ranks
    return predict(shape, with_budget(where, shape, job, budget_bytes), job)


@pytest.mark.parametrize("gpus", [0, 1, 2])
@pytest.mark.parametrize("update", ["deferred", "backward", "delayed"])
def test_eight_micro_batches_move_what_one_does(update: str, gpus: int) -> None:
    shape, where = shape_of_blocks(), machine(gpus)
    one = predicted(shape, where, JOB.replace(micro_batches=1, update=update))
    vertical = predicted(shape, where, VERTICAL.replace(update=update))
    assert moved_and_held(vertical) == moved_and_held(one)
    horizontal = predicted(shape, where, JOB.replace(update=update))
    # The passes of delayed updates compute from a copy in memory.
    more = 0 if update == "delayed" else 2 * 7 * one.on_nvme.params
    assert horizontal.moved.params_read - vertical.moved.params_read == pytest.approx(more)
    if gpus:
        params = 2 * shape.params
        # Further micro-batches gather twice each, and add to sums that go up and come back.
        assert horizontal.copied.h2d - vertical.copied.h2d >= 7 * 3 * params
        assert horizontal.copied.d2h - vertical.copied.d2h >= 7 * params


@settings(max_examples=40, deadline=None)
@given(
    numels=st.lists(st.integers(1, 3_000_000), min_size=1, max_size=6),
    tokens=st.integers(64, 100_000),
    count=st.integers(2, 8),
    ram_bytes=st.integers(1 << 20, 400_000_000),
    gpus=st.integers(0, 2),
    fields=st.fixed_dictionaries(
        {
            "update": st.sampled_from(["deferred", "backward", "delayed"]),
            "grads": st.sampled_from(["cpu", "nvme"]),
            "state": st.sampled_from(["exact", "compact"]),
        }
    ),
)
def test_it_is_so_for_any_model_budget_and_mode(
    numels: list[int], tokens: int, count: int, ram_bytes: int, gpus: int, fields: dict[str, Any]
) -> None:
    units = tuple(UnitShape(f"h.{n}", (flat(numel),)) for n, numel in enumerate(numels))
    shape = ModelShape("drawn", units, sum(numels), len(numels), 64, 64, 128, 1000, 512)
    job = job_of(tokens=tokens, sequence=64, **fields)
    where = machine(gpus, ram_bytes=ram_bytes)
    vertical = predicted(shape, where, job.replace(micro_batches=count, schedule="vertical"))
    assert moved_and_held(vertical) == moved_and_held(predicted(shape, where, job))


def test_no_gradient_takes_ram_where_backward_updates() -> None:
    shape, backward = shape_of_blocks(), {"update": "backward"}
    held = predict(shape, machine(), JOB.replace(**backward)).ram.parts
    assert held["gradients"] >= 2 * shape.params
    assert "gradients" not in predict(shape, machine(), VERTICAL.replace(**backward)).ram.parts


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_inputs_of_blocks_of_all_micro_batches_wait_and_move_as_often(tier: str) -> None:
    shape, all_of_them = shape_of_blocks(), 2 * LAYERS * WIDTH * TOKENS
    found = predict(shape, machine(), VERTICAL.replace(activations=tier))
    of_one = predict(shape, machine(), JOB.replace(activations=tier))
    kept, kept_of_one = (
        (each.ram if tier == "cpu" else each.nvme).parts["activations"] for each in (found, of_one)
    )
    assert (kept, kept_of_one) == (all_of_them, all_of_them / 8)
    assert found.moved.activations == of_one.moved.activations
    assert found.moved.activations.written == (all_of_them if tier == "nvme" else 0)


def test_a_plan_counts_what_triton_takes_to_measure_tiles() -> None:
    """Only where it computes them, and there are any."""
    linears = (LinearShape("model.layers.0.mlp", 0, 3 * WIDTH, WIDTH),)
    shape = shape_of_blocks()
    unit = dataclasses.replace(shape.units[2], linears=linears)
    shape = dataclasses.replace(shape, units=(*shape.units[:2], unit, *shape.units[3:]))
    tiled = JOB.replace(tiles=2)
    name = "tuning of tiles"
    assert name not in gpu_need(shape, machine(), tiled).parts
    with choice.forced(tile_matmul="triton"):
        found = gpu_need(shape, machine(), tiled).parts[name]
        others = [
            gpu_need(shape, where, job).parts.get(name)
            for where, job in ((machine(), JOB), (machine(0), tiled))
        ]
    # The output of a tile of 1,536 rows, of the 4,096 tokens of a micro-batch, in fp32.
    assert found == 256 * MIB + 4 * 4096 * 3 * WIDTH // 2
    assert others == [None, None]


@pytest.mark.parametrize(
    ("figures", "may"),
    [({}, False), ({("tile_matmul", (9, 0)): 0.9}, False), ({("tile_matmul", (9, 0)): 1.1}, True)],
)
def test_figures_of_any_gpu_may_make_tiles_tritons(
    figures: dict[tuple[str, tuple[int, int]], float], may: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "MEASURED", figures)
    assert choice.may_be_triton("tile_matmul") is may
    assert not choice.may_be_triton("linear_cross_entropy")
    with choice.forced(tile_matmul="torch"):
        assert not choice.may_be_triton("tile_matmul")


def test_a_device_holds_a_block_its_sums_and_one_boundary_of_all() -> None:
    shape, boundary = shape_of_blocks(), 2 * WIDTH * TOKENS
    parts = gpu_need(shape, machine(), VERTICAL).parts
    assert parts == {
        # The whole block, and two more blocks.
        "gathered units": 3 * 8 * MIB,
        "fresh gradients": 6 * MIB,
        "sums of gradients": 3 * 8 * MIB,
        "inputs of blocks": LAYERS * boundary,
        "one boundary (estimated)": 3 * boundary,
        # For one micro-batch, and larger than its logits.
        "one block at work (estimated)": 4096 * 2 * (12 * WIDTH + 4 * 2 * WIDTH),
        "CUDA and libraries (assumed)": 640 * MIB,
    }
    wide = gpu_need(shape, machine(), VERTICAL.replace(grad_dtype=torch.float32)).parts
    assert wide["sums of gradients"] == 2 * parts["sums of gradients"]
    # A slice makes gradients in the parameters' dtype; a copy has the dtype of the sum.
    assert wide["fresh gradients"] == (1 + 2) * parts["fresh gradients"]
    away = gpu_need(shape, machine(), VERTICAL.replace(activations="cpu")).parts
    one = 2 * WIDTH * 4096
    # Inputs of two calls stay; others are in flight.
    assert away["inputs of blocks"] == 2 * one + 32 * MIB
    assert away["one boundary (estimated)"] == 3 * boundary
    # Tiles that do not stay gathered are gathered for each micro-batch.
    tiled = VERTICAL.replace(tiles=4, loss_tiles=2)
    assert gpu_need(shape, machine(), tiled).parts["gathered units"] == 3 * 8 * MIB


def test_units_for_which_a_device_has_no_room_are_gathered_for_each_micro_batch() -> None:
    shape, one = shape_of_blocks(), JOB.replace(micro_batches=1)
    # Memory for single units, their gradients, and half of the rest of the block.
    where = machine(gpu_mem_bytes=(18 + 30 + 2 * 3) * MIB)
    found = predict(shape, where, VERTICAL)
    assert found.gpu.parts["gathered units"] == 21 * MIB
    assert found.again == 0, "a block of 8 MiB has room"
    large = dataclasses.replace(
        shape,
        units=tuple(
            dataclasses.replace(unit, name=f"model.layers.0.{number}")
            for number, unit in enumerate(shape.units)
        ),
    )
    where = machine(gpu_mem_bytes=(18 + 46 + 2 * 9) * MIB)
    found, alike = (
        predict(large, where, job.replace(update="backward")) for job in (VERTICAL, one)
    )
    whole = predict(large, machine(), VERTICAL.replace(update="backward"))
    assert found.again == 32 / 40, "4, 2 and 2 MiB stay"
    assert (alike.again, whole.again) == (0, 0)
    assert found.gpu.parts["gathered units"] < whole.gpu.parts["gathered units"]
    # Eight in forward, eight where backward computes again, eight in backward.
    more = (3 * 8 - 2) * found.again
    params = found.on_nvme.params
    assert found.moved.params_read - alike.moved.params_read == pytest.approx(more * params)
    assert found.copied.h2d - whole.copied.h2d == pytest.approx(more * 2 * shape.params)
    assert found.step_s > whole.step_s


def test_one_micro_batch_is_the_same_in_both_orders() -> None:
    one = JOB.replace(micro_batches=1)
    found = predict(shape_of_blocks(), machine(), one.replace(schedule="vertical"))
    assert dataclasses.replace(found, job=one) == predict(shape_of_blocks(), machine(), one)


def test_tiles_of_experts_belong_to_their_block() -> None:
    stack = FlatShape((64, 8 * MEBI), torch.bfloat16, True)
    units = (
        UnitShape("embed", (flat(64),)),
        UnitShape("layers.0", (stack,), around=(0,), stacks=(StackShape(0, 8 * MEBI, 8),)),
        UnitShape("layers.1", (stack,), around=(0,), stacks=(StackShape(0, 8 * MEBI, 8),)),
        UnitShape("head", (flat(64),), around=(0,)),
    )
    shape = ModelShape("experts", units, 100, 2, 64, 64, 128, 100, 512, experts=8, chosen=2)
    cut = cut_experts(shape, 2)
    assert len(cut.units) == 4 + 2 * 4
    blocks = cut.in_blocks.units
    assert [(block.name, block.around) for block in blocks] == [
        ("embed", ()), ("layers.0", (0,)), ("layers.1", (0,)), ("head", (0,)),
    ]  # fmt: skip
    numels = [sum(each.numel for each in block.flats) for block in blocks]
    assert numels == [64, 8 * MEBI + 64, 8 * MEBI + 64, 64]


def test_all_tokens_of_a_step_choose_the_experts_that_a_pass_gathers() -> None:
    stack = FlatShape((64 * MEBI,), torch.bfloat16, True)
    unit = UnitShape("layers.0.experts", (stack,), stacks=(StackShape(0, 64 * MEBI, 64),))
    shape = ModelShape("experts", (unit,), 100, 1, 64, 64, 128, 100, 512, experts=64, chosen=2)
    job = job_of(tokens=64, sequence=8, micro_batches=8, expert_tile=1)
    horizontal = predict(shape, machine(), job)
    vertical = predict(shape, machine(), job.replace(schedule="vertical"))
    assert horizontal.touched == pytest.approx(1 - (62 / 64) ** 8)
    assert vertical.touched == pytest.approx(1 - (62 / 64) ** 64)


def test_compute_is_the_same_but_for_sums_that_a_cpu_adds() -> None:
    shape = shape_of_blocks()
    alone = [
        predict(shape, machine(), job).terms_s["compute"] for job in (JOB, VERTICAL)
    ]
    assert alone[0] == pytest.approx(alone[1])
    measured = VERTICAL.replace(compute_s=(1.0, 2.0))
    whole = JOB.replace(micro_batches=1, compute_s=(8.0, 16.0))
    eight, one = (
        predict(shape, machine(0), job).limits.compute_s for job in (measured, whole)
    )
    # Two are read and one is written, seven times, 2 bytes each.
    assert eight - one == pytest.approx(7 * 3 * 2 * shape.params / 1e11)


def test_the_first_forward_of_all_hides_more_of_the_update() -> None:
    slow = JOB.replace(compute_s=(0.05, 0.15))
    shape = shape_of_blocks()
    horizontal = predict(shape, machine(), slow)
    vertical = predict(shape, machine(), slow.replace(schedule="vertical"))
    states_s = machine().bandwidths.io_s(vertical.moved.states)
    assert 0.05 < states_s < 8 * 0.05
    assert vertical.limits.schedule_s == pytest.approx(8 * 0.2)
    assert horizontal.limits.schedule_s == pytest.approx(states_s + 7 * 0.2 + 0.15)


def test_the_other_order_is_offered_with_each_tier_that_inputs_may_wait_on() -> None:
    shape = shape_of_blocks()

    def offered(job: Job, gpus: int = 1) -> list[str]:
        changes = one_change(shape, predict(shape, machine(gpus), job))
        return sorted(each.name for each in changes if each.name.startswith("vertical"))

    on_cpu, on_drives = (
        f"vertical schedule, activations on the {place}" for place in ("CPU", "drives")
    )
    assert offered(JOB) == ["vertical schedule", on_cpu, on_drives]
    assert offered(JOB.replace(activations="nvme")) == ["vertical schedule"]
    assert offered(JOB, gpus=0) == ["vertical schedule", on_drives]
    for none in (VERTICAL, JOB.replace(micro_batches=1), JOB.replace(checkpointing=False)):
        assert offered(none) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "diagonal"}, "schedule='diagonal' is not known; use horizontal or vertical"),
        ({"schedule": "vertical", "checkpointing": False}, "checkpoints each block"),
    ],
)
def test_a_schedule_that_makes_no_sense_names_the_fix(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        predict(shape_of_blocks(), machine(), JOB.replace(**fields))
