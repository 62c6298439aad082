"""Plans of several ranks: bytes that each holds under each stage, and bytes that they exchange."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.base.sizes import GIB
from infinity._src.kernels.quantized import wire_bytes
from infinity._src.memory.flat_layout import plan_flat
from infinity._src.plan.changes import one_change
from infinity._src.plan.machine import Machine, describe_machine
from infinity._src.plan.memory import TierBytes
from infinity._src.plan.predict import predict
from infinity._src.plan.ranks import Exchanges, bytes_of_rank, exchanges, stages
from infinity._src.plan.workload import FlatShape, JobShape, ModelShape, UnitShape
from tests.plans import job_of


def model_of(*units: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> ModelShape:
    """A unit for each of these, of parameters with so many elements."""
    made = tuple(
        UnitShape(str(index), (FlatShape(numels, dtype, True),))
        for index, numels in enumerate(units)
    )
    return ModelShape(
        "model", made, sum(map(sum, units)), len(units), 64, 64, 128, 1000, 4096, dtype.itemsize
    )


EVEN = model_of(*[(1 << 24,)] * 8)  # 2^27 elements, which 16 ranks divide without padding
P = 2.0 * (1 << 27)
JOB = job_of(tokens=1 << 16, sequence=1024)


def machine(ranks: int = 4, nodes: int = 1, **more: Any) -> Machine:
    return describe_machine(gpus=ranks, ram_bytes=256 * GIB, nodes=nodes, **more)


def held(shape: ModelShape, where: Machine, **job: Any) -> dict[str, TierBytes]:
    return bytes_of_rank(shape, where, JOB.replace(**job)).states


# -- what each rank holds --------------------------------------------------------------------------


def test_stages_split_what_their_names_say() -> None:
    tiers = {"params": "cpu", "optim": "cpu"}
    three, two = (
        held(EVEN, machine(), **tiers),
        held(EVEN, machine(), zero=2, params="device", optim="cpu"),
    )
    assert three["parameters at rest"] == two["parameters at rest"] == TierBytes(cpu=P / 4)
    assert three["optimizer states"] == two["optimizer states"] == TierBytes(cpu=5 * P / 4)
    assert three["gradients"] == two["gradients"] == TierBytes(cpu=P / 4)
    assert three["parameters gathered, at most"] == TierBytes(device=3 * P / 8)  # of eight units
    assert two["parameters on the device"] == TierBytes(device=P)
    one = held(EVEN, machine(), zero=1, params="device", optim="cpu")
    assert one == two | {"whole sums of gradients": TierBytes(cpu=P)}
    assert held(EVEN, machine(), zero=1, params="device", optim="cpu", accumulate="local") == one
    assert held(EVEN, machine(), zero=2, params="device", optim="cpu", accumulate="local") == one


def test_what_rests_on_nvme_is_the_same_shard() -> None:
    nothing = {"params": 0.0, "optim": 0.0}
    found = held(EVEN, machine(), resident=nothing)
    assert found["parameters at rest"] == TierBytes(nvme=P / 4)
    assert found["optimizer states"] == TierBytes(nvme=5 * P / 4)
    twice = held(EVEN, machine(), resident=nothing, generations=2)
    assert twice["parameters at rest"] == TierBytes(nvme=P / 2)
    assert twice["gradients"] == found["gradients"]


def test_copies_of_a_node_and_errors_fed_back_take_what_the_policy_says() -> None:
    where = machine(ranks=4, nodes=2)
    name = "the node's copy (hpZ)"
    assert held(EVEN, where, hpz="cpu")[name] == TierBytes(cpu=P / 4)
    assert held(EVEN, where, hpz="device")[name] == TierBytes(device=P / 4)
    assert held(EVEN, where, qgz=True, error_feedback=True)["errors fed back (qgZ)"] == TierBytes(
        cpu=P + P / 4
    )
    # On one node the reduction has one level, so gradients are rounded once.
    assert held(EVEN, machine(4), qgz=True, error_feedback=True)[
        "errors fed back (qgZ)"
    ] == TierBytes(cpu=P)
    assert name not in held(EVEN, where)


def test_parameters_that_stay_under_stage_3_are_shards() -> None:
    found = held(EVEN, machine(), params="device", optim="cpu")
    assert found["shards kept on the device"] == TierBytes(device=P / 4)
    assert found["parameters gathered, at most"] == TierBytes(device=3 * P / 8)


def test_every_hole_of_a_shape_counts() -> None:
    shape, where = model_of((3,), (70, 1), (4099, 5, 333)), machine(ranks=3, nodes=2)
    shards = [plan_flat(flat.numels, 2, 6).shard_numel for flat in shape.flats]
    assert shards == [2048, 2048, 2048]
    found = held(shape, where, zero=1, params="device", optim="cpu", qgz=True, error_feedback=True)
    assert found["parameters on the device"] == TierBytes(device=2 * 6 * sum(shards))
    assert found["whole sums of gradients"] == TierBytes(cpu=2 * 6 * sum(shards))
    assert found["optimizer states"] == TierBytes(cpu=10 * sum(shards))
    assert found["errors fed back (qgZ)"] == TierBytes(cpu=2 * (6 + 2) * sum(shards))


def test_the_plan_s_ram_is_what_its_ranks_hold() -> None:
    where = machine(ranks=4, nodes=2)
    for job in (JOB, JOB.replace(zero=1, params="device", optim="cpu"), JOB.replace(hpz="cpu")):
        found = predict(EVEN, where, job)
        assert found.ram.bytes == 4 * bytes_of_rank(EVEN, where, job).total.cpu
        assert (
            found.gpu.parts["gathered units"] + found.gpu.parts.get("the node's copy (hpZ)", 0)
            == bytes_of_rank(EVEN, where, job).total.device
        )


def test_activations_that_wait_in_ram_leave_less_for_the_states_of_each_rank() -> None:
    job = JOB.replace(activations="cpu")
    roomy = predict(EVEN, machine(), job)
    waiting = roomy.ram.parts["activations"]
    assert waiting == JOB.tokens * EVEN.boundary_bytes_per_token
    # All states would find room without them.
    where = dataclasses.replace(machine(), ram_bytes=roomy.ram.bytes - waiting / 2)
    found, of_rank = predict(EVEN, where, job), bytes_of_rank(EVEN, where, job).total
    assert found.ram.bytes == 4 * of_rank.cpu + waiting
    states = found.nvme.bytes - found.nvme.parts["spare ranges"]
    assert states == pytest.approx(4 * of_rank.nvme, rel=0.001)
    assert of_rank.nvme > 0


def test_what_does_not_fit_beside_whole_sums_says_so() -> None:
    job = JOB.replace(zero=1, params="device", optim="cpu")
    least = predict(EVEN, dataclasses.replace(machine(), ram_bytes=1.0), job).ram.bytes
    assert predict(EVEN, dataclasses.replace(machine(), ram_bytes=least), job).fits
    assert (
        "RAM"
        in predict(EVEN, dataclasses.replace(machine(), ram_bytes=least - 4096), job).why_not[0]
    )


def test_whole_sums_leave_less_ram_for_the_states() -> None:
    job = JOB.replace(zero=1, params="device", optim="nvme")
    least = predict(EVEN, dataclasses.replace(machine(), ram_bytes=1.0), job).ram.bytes
    where = dataclasses.replace(machine(), ram_bytes=least + P)
    found = predict(EVEN, where, job)
    assert found.ram.parts["resident states"] > 0
    assert found.ram.bytes <= where.ram_bytes


def test_all_stages_are_shown_beside_the_one_that_is_planned() -> None:
    shown = stages(EVEN, machine(), JOB)
    assert [each.stage for each in shown] == [1, 2, 3]
    assert shown[2].states == held(EVEN, machine())
    assert shown[0].total.cpu == shown[1].total.cpu + P
    assert shown[1].total.device == P
    # Beside stage 2, stage 3 has parameters where the optimizer's states are.
    other = stages(EVEN, machine(), JOB.replace(zero=2, params="device", optim="cpu"))
    assert other[2].states == held(EVEN, machine(), params="cpu", optim="cpu")
    durable = stages(EVEN, machine(), JOB.replace(durable=True, optim="nvme"))
    assert durable[2].states == held(EVEN, machine(), durable=True)


# -- what they have from each other ----------------------------------------------------------------


def planned(where: Machine, shape: ModelShape = EVEN, **job: Any) -> Exchanges:
    return exchanges(JobShape(shape), where, JOB.replace(**job), 0.0)


def test_one_rank_exchanges_nothing() -> None:
    assert planned(machine(1)) == Exchanges((), P, 1, 1)
    assert planned(machine(1)).volume == 0


def test_plain_stage_3_moves_three_times_the_parameters_and_zeropp_a_quarter_of_it() -> None:
    where, flags = machine(ranks=4, nodes=2), 8
    plain = planned(where)
    # Eight ranks: three others of the node have two shards each, and one counterpart has one.
    assert plain.inside == 3 * (6 / 8 * P) + 3 * flags
    assert plain.across == 3 * (1 / 8 * P) + flags
    assert plain.volume == pytest.approx(3, rel=1e-6)
    code, half_code = 1 + 2 / 64, 0.5 + 2 / 64  # bytes of an element, with its share of a scale
    for switches, volume in (
        ({"qwz": True}, 1 + code),
        ({"hpz": "cpu"}, 2),
        ({"qgz": True}, 2 + half_code / 2),
        ({"qwz": True, "hpz": "cpu", "qgz": True}, code / 2 + half_code / 2),
    ):
        assert planned(where, **switches).volume == pytest.approx(volume, rel=1e-6), switches
    assert planned(where, qwz=True, hpz="cpu", qgz=True).volume < 0.79


def test_stages_1_and_2_gather_once_and_stage_1_reduces_once() -> None:
    where = machine(ranks=4)
    counts = {
        (1, None): {"gather of what was updated": 1, "reduction of gradients": 1},
        (2, None): {"gather of what was updated": 1, "reduction of gradients": 3},
        (2, "local"): {"gather of what was updated": 1, "reduction of gradients": 1},
    }
    for (zero, accumulate), expected in counts.items():
        found = planned(where, zero=zero, params="device", micro_batches=3, accumulate=accumulate)
        assert {each.name: each.count for each in found.each} == expected
        assert found.volume == pytest.approx(sum(expected.values()), rel=1e-6)
    three = planned(where, params="device", micro_batches=3)
    assert [each.count for each in three.each] == [3, 3, 3]


def test_a_node_s_copy_is_asked_until_the_update() -> None:
    found = planned(machine(ranks=4, nodes=2), hpz="cpu", micro_batches=3)
    assert {each.name: (each.count, each.across > 0) for each in found.each} == {
        "gather in forward": (1, True),
        "gather from the node's copy": (5, False),
        "reduction of gradients": (3, True),
    }


@pytest.mark.parametrize(
    ("update", "beside"), [("deferred", [1, 0, 0]), ("backward", [1, 1, 1]), ("delayed", [3, 3, 3])]
)
def test_what_goes_beside_updates_depends_on_when_they_run(update: str, beside: list[int]) -> None:
    found = planned(machine(), update=update, micro_batches=3)
    assert [each.beside_updates for each in found.each] == beside
    whole = found.copies()
    assert whole.total.h2d == whole.total.d2h == found.inside
    assert whole.rest.h2d >= 0


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.lists(st.integers(1, 9000), min_size=1, max_size=4).map(tuple), min_size=1, max_size=4
    ),
    st.integers(1, 4),
    st.integers(1, 4),
    st.booleans(),
)
def test_what_all_ranks_receive_of_a_gather_completes_each_of_them(
    units: list[tuple[int, ...]], ranks: int, nodes: int, qwz: bool
) -> None:
    """Every rank holds one of N equal shards, and has the N - 1 others afterwards, each as it
    travels."""
    where, shape = machine(ranks, nodes), model_of(*units)
    shards = [plan_flat(flat.numels, 2, where.world).shard_numel for flat in shape.flats]
    found = planned(where, shape, qwz=qwz)
    size = sum(wire_bytes(numel, 8, 64) if qwz else 2 * numel for numel in shards)
    for each in found.each[:2]:
        assert each.inside + each.across == (where.world - 1) * size
    if where.world > 1:
        assert found.plain_bytes == 2 * where.world * sum(shards)


# -- the step --------------------------------------------------------------------------------------


def test_a_slow_link_between_nodes_bounds_the_step_and_zeropp_relieves_it() -> None:
    where = machine(ranks=4, nodes=2, link_bytes_per_s=1e9 / 8)
    plain = predict(EVEN, where, JOB)
    # Half of the parameters come to a node with each of three collectives.
    assert plain.terms_s["link between nodes"] == pytest.approx(1.5 * P / (1e9 / 8), rel=1e-6)
    assert plain.bottleneck == "link between nodes"
    assert plain.limits.floor_s >= plain.terms_s["link between nodes"]
    every = JOB.replace(qwz=True, hpz="cpu", qgz=True)
    assert predict(EVEN, where, every).step_s < 0.3 * plain.step_s
    names = {change.name: change for change in one_change(EVEN, plain)}
    assert (
        names["ZeRO++ with all of it (rounds)"].prediction.step_s
        == predict(EVEN, where, every).step_s
    )
    assert {"qwZ (rounds)", "qgZ (rounds)", "hpZ, copies in CPU memory", "one more node"} <= set(
        names
    )
    assert "one more node" not in {
        change.name for change in one_change(EVEN, predict(EVEN, machine(), JOB))
    }


def test_nodes_share_the_work_and_the_states() -> None:
    one, two = (
        predict(EVEN, machine(4), JOB),
        predict(EVEN, machine(4, 2, link_bytes_per_s=1e15), JOB),
    )
    assert two.at_rest.states == one.at_rest.states / 2
    assert two.terms_s["compute"] == pytest.approx(one.terms_s["compute"] / 2)
    assert two.model_flops == one.model_flops
    assert two.mfu == pytest.approx(
        two.model_flops / two.step_s / 8 / two.machine.flops_peak_per_gpu
    )


def test_a_node_s_copy_spares_the_drives() -> None:
    nothing = JOB.replace(resident={"params": 0.0, "optim": 0.0}, micro_batches=3)
    where = machine(4, 2)
    plain, copy = predict(EVEN, where, nothing), predict(EVEN, where, nothing.replace(hpz="cpu"))
    assert plain.moved.total.read - copy.moved.total.read == 5 * P / 2
    assert copy.moved.rest.read == 0
    early = nothing.replace(update="backward", micro_batches=1)
    plain, copy = predict(EVEN, where, early), predict(EVEN, where, early.replace(hpz="cpu"))
    assert plain.moved.total.read - copy.moved.total.read == P / 2
    assert copy.moved.rest.read == 0


@pytest.mark.parametrize(
    ("job", "ranks", "message"),
    [
        ({"zero": 2}, 4, "use params='device', or zero=3"),
        ({"zero": 4}, 4, "zero=4 is not known; use 1 or 2 or 3"),
        (
            {"zero": 1, "params": "device", "hpz": "cpu"},
            4,
            "with zero=1 every rank has all parameters",
        ),
        ({"zero": 1, "params": "device", "accumulate": "shard"}, 4, "which is zero=2"),
        ({"error_feedback": True}, 4, "set qgz"),
        ({"hpz": "nvme"}, 4, "hpz='nvme' is not known"),
        ({"qwz": True}, 1, "has one rank: leave them out"),
    ],
)
def test_jobs_of_ranks_that_make_no_sense_name_the_fix(
    job: dict[str, Any], ranks: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        predict(EVEN, machine(ranks), JOB.replace(**job))


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"gpus": 2, "ranks": 4}, "--ranks 4 beside --gpus 2"),
        ({"gpus": 0, "ranks": 0}, "--ranks 0: give a number"),
        ({"nodes": 0}, "--nodes 0"),
        ({"link_bytes_per_s": 1e9}, "add --nodes"),
        ({"nodes": 2, "link_bytes_per_s": 0.0}, "link_bytes_per_s=0.0: give a positive number"),
    ],
)
def test_machines_that_make_no_sense_name_the_fix(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        describe_machine(**given_)


def test_ranks_on_a_cpu_share_it() -> None:
    where = describe_machine(gpus=0, ranks=4, ram_bytes=64 * GIB)
    assert (where.ranks, where.world, where.flops) == (4, 4, describe_machine(gpus=0).flops)
    assert describe_machine(gpus=0, ranks=2, nodes=3).world == 6
    assert describe_machine(gpus=4, ranks=4).world == 4
