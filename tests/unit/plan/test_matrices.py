"""Plans of an optimizer of whole matrices: what its two updates move, what it takes, and what it
refuses. `tests/test_floor.py` and `tests/test_muon.py` compare the bytes with the engine's."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import infinity as inf
from infinity._src.base.sizes import GIB
from infinity._src.cabi.records import CHUNK_BYTES
from infinity._src.kernels.newton_schulz import flops, scratch_numel
from infinity._src.plan.changes import one_change, where_updates_run
from infinity._src.plan.machine import describe_machine
from infinity._src.plan.predict import NEWTON_SCHULZ, predict
from infinity._src.plan.search import search
from infinity._src.plan.workload import (
    FlatShape,
    LinearShape,
    ModelShape,
    StackShape,
    UnitShape,
    shape_in,
)
from tests.plans import job_of

ALONE = {"resident": {"params": 0.0, "optim": 0.0}}
JOB = job_of(tokens=64, sequence=64, optimizer="muon", **ALONE)


def flat(*shapes: tuple[int, ...]) -> FlatShape:
    matrices = tuple(shape if len(shape) > 1 else () for shape in shapes)
    return FlatShape(tuple(map(math.prod, shapes)), torch.bfloat16, True, matrices)


def model_of(*flats: FlatShape, **sizes: Any) -> ModelShape:
    units = tuple(UnitShape(f"layers.{index}", (each,)) for index, each in enumerate(flats))
    params = sum(each.numel for each in flats)
    return ModelShape("m", units, params, len(flats), 64, 64, 128, 1000, 512, **sizes)


def machine(gpus: int = 1, **given_: Any) -> Any:
    figures = {"ram_bytes": 64 * GIB, "read_bytes_per_s": 2e9, "write_bytes_per_s": 1e9}
    return describe_machine(gpus=gpus, **figures | given_)


DRAWN = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 900), st.integers(1, 900)),
        st.tuples(st.integers(2, 4), st.integers(1, 500), st.integers(1, 500)),
        st.tuples(st.integers(1, 400_000)),
    ),
    min_size=1,
    max_size=4,
).map(lambda shapes: flat(*shapes))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(DRAWN, min_size=1, max_size=4),
    st.sampled_from(["exact", "bf16", "compact"]),
    st.sampled_from(["deferred", "backward", "delayed"]),
    st.sampled_from([1, 3]),
    st.sampled_from([0, 1, 2]),
)
def test_muon_moves_no_more_but_for_chunks_that_it_shares_with_vectors(
    flats: list[FlatShape], state: str, update: str, micro_batches: int, gpus: int
) -> None:
    job = JOB.replace(state=state, update=update, micro_batches=micro_batches, tokens=512)
    shape, where = model_of(*flats), machine(gpus)
    muon, adamw = predict(shape, where, job), predict(shape, where, job.replace(optimizer="adamw"))
    # A momentum moves twice in a chunk with a part of a matrix and a part of another parameter:
    # where the two are neighbours.
    of_chunk = CHUNK_BYTES * {"exact": 4 / 12, "bf16": 2 / 8, "compact": 1.0625 / 5.0625}[state]
    borders = [bool(a) != bool(b) for each in flats for a, b in itertools.pairwise(each.matrices)]
    shared = 1 + 1.01 * of_chunk * sum(borders)
    assert muon.moved.total.read <= adamw.moved.total.read + shared
    assert muon.moved.total.written <= adamw.moved.total.written + shared
    assert muon.nvme.bytes <= adamw.nvme.bytes
    if not any(borders) and any(any(each.matrices) for each in flats):
        assert muon.moved.total.written < adamw.moved.total.written
    assert muon.limits.floor_s <= muon.limits.schedule_s * (1 + 1e-9)
    assert muon.moved.rest.read >= -1
    assert dataclasses.replace(adamw, job=job) == predict(
        shape.without_matrices, where, job
    ), "without matrices it is AdamW"


@pytest.mark.parametrize(
    ("state", "at_rest", "moved"), [("exact", 8, 8), ("bf16", 6, 6), ("compact", 4.03125, 4.03125)]
)
def test_a_matrix_alone_rests_and_moves_as_its_sections_do(
    state: str, at_rest: float, moved: float
) -> None:
    shape = model_of(*[flat((4096, 4096))] * 4)
    found = predict(shape, machine(), JOB.replace(state=state))
    assert found.at_rest.states == pytest.approx(at_rest * shape.params, rel=1e-3)
    assert found.moved.total.written == pytest.approx(moved * shape.params, rel=1e-3)
    assert found.moved.total.read == pytest.approx((moved + 2) * shape.params, rel=1e-3)
    # Beside vectors, of which each chunk of 4.5 MiB is a small part, it has their space.
    mixed = model_of(*[flat((4096, 4096), (128,))] * 4)
    beside = predict(mixed, machine(), JOB.replace(state=state))
    adamw = predict(mixed, machine(), JOB.replace(state=state, optimizer="adamw"))
    assert beside.at_rest.states == adamw.at_rest.states
    assert moved <= beside.moved.total.written / mixed.params < moved * 1.05


def test_a_second_generation_moves_no_more_bytes() -> None:
    shape = model_of(*[flat((4096, 4096))] * 4)
    found = predict(shape, machine(), JOB.replace(generations=2))
    assert found.moved.total.written == 8 * shape.params
    assert found.moved.total.read == 10 * shape.params


def test_the_first_updates_are_before_all_else_but_in_backward() -> None:
    shape = model_of(*[flat((4096, 4096))] * 4)
    for update in ("deferred", "delayed", "backward"):
        found = predict(shape, machine(), JOB.replace(update=update))
        first = found.moved.matrices
        assert (first.read, first.written) == ((0, 0) if update == "backward" else (
            4 * shape.params, 4 * shape.params))  # fmt: skip
        drives = found.machine.bandwidths
        apart_s = max(drives.io_s(first), found.terms_s[NEWTON_SCHULZ])
        if update == "deferred":
            parts = found.moved.beside_states, found.moved.rest
            assert found.limits.schedule_s == pytest.approx(apart_s + sum(map(drives.io_s, parts)))


@pytest.mark.parametrize(("gpus", "nodes"), [(0, 1), (1, 1), (2, 1), (2, 2)])
def test_matrices_take_flops_links_and_room(gpus: int, nodes: int) -> None:
    rows, columns, experts = 1024, 256, 6
    shape = model_of(*[flat((experts, rows, columns), (rows, columns), (rows,))] * 3)
    where, numel = machine(gpus, nodes=nodes), 3 * 7 * rows * columns
    found = predict(shape, where, JOB)
    adamw = predict(shape, where, JOB.replace(optimizer="adamw"))
    work = found.matrices
    assert (work.numel, work.grad_bytes) == (numel, 2 * numel)
    assert work.flops == 3 * 7 * flops(rows, columns)
    seconds = work.flops / where.world / where.flops_per_gpu
    if gpus:
        assert found.terms_s[NEWTON_SCHULZ] == pytest.approx(seconds)
        assert found.copied.h2d - adamw.copied.h2d == 2 * numel / nodes
        assert found.copied.d2h - adamw.copied.d2h == 2 * numel / nodes
        # What the engine wants free: a matrix, scratch, and the matrices of three units.
        room = 2 * (rows * columns + scratch_numel(rows, columns)) + 2 * numel * (gpus > 1)
        assert found.gpu.parts["matrices in update"] == room
        assert found.gpu.bytes - adamw.gpu.bytes == room
    else:
        # Where the CPU computes, its scratch is in the budget.
        scratch = found.ram.parts["scratch"] - adamw.ram.parts["scratch"]
        assert scratch == 4 * scratch_numel(rows, columns)
        assert found.terms_s[NEWTON_SCHULZ] > seconds
    sent = found.exchanged.inside - adamw.exchanged.inside
    sent += found.exchanged.across - adamw.exchanged.across
    # Of all ranks together 2 B for each parameter that another rank owns, in each direction.
    assert where.world * sent == pytest.approx(2 * 2 * numel * (where.world - 1) / where.world)
    assert NEWTON_SCHULZ not in adamw.terms_s


def test_it_plans_exactly_the_policies_that_muon_takes() -> None:
    shape, jobs = model_of(flat((512, 512))), []
    axes = {
        "update": ["deferred", "backward", "delayed"], "generations": [1, 2],
        "update_on": ["cpu", "device"], "grads": ["cpu", "nvme"],
    }  # fmt: skip
    for values in itertools.product(*axes.values()):
        # Some no policy takes.
        with contextlib.suppress(ValueError):
            jobs.append(JOB.replace(**dict(zip(axes, values, strict=True))))
    refused = [job for job in jobs if job.refusal]
    for job in refused:
        with pytest.raises(ValueError, match="optimizer='muon'") as error:
            inf.Muon.check_policy(job.policy, "optimizer='muon'")
        assert job.refusal == str(error.value)
        with pytest.raises(ValueError, match=re.escape(job.refusal)):
            predict(shape, machine(), job)
    for job in jobs:
        if job not in refused:
            inf.Muon.check_policy(job.policy, "")
            assert predict(shape, machine(), job).step_s > 0
    with pytest.raises(ValueError, match="needs whole matrices, and tiles=2 cuts them"):
        predict(shape, machine(), JOB.replace(tiles=2))
    with pytest.raises(ValueError, match="optimizer='sgd' is not known; use adamw or muon"):
        predict(shape, machine(), JOB.replace(optimizer="sgd"))


def test_the_search_and_the_changes_name_only_ways_that_muon_takes() -> None:
    linear = LinearShape("q", 0, 4096, 4096)
    unit = UnitShape("layers.0", (flat((4096, 4096), (64, 4096, 4096)),), (linear,), (), (
        StackShape(0, 64 * 4096 * 4096, 64),
    ))  # fmt: skip
    shape = dataclasses.replace(model_of(), units=(unit,), experts=64, chosen=2, layers=1)
    job = job_of(tokens=8192, sequence=512, optimizer="muon")
    where = machine(ram_bytes=8 * GIB)
    ways = search(shape, where, job, exact=True, count=3).ways
    assert ways
    assert all(way.job.optimizer == "muon" and not way.job.refusal for way in ways)
    assert not any(change.prediction.job.refusal for change in one_change(shape, ways[0]))
    sides = where_updates_run(shape, predict(shape, where, job))
    assert not any(side.job.refusal for side in sides)
    plain = search(shape, where, job.replace(optimizer="adamw"), exact=True).ways
    assert ways[0].step_s < plain[0].step_s


def test_tiles_of_experts_are_whole_matrices_and_rest_without_second_moments() -> None:
    stack = StackShape(0, 6 * 512 * 256, 6)
    unit = UnitShape("layers.0", (flat((256, 256), (6, 512, 256), (256,)),), (), (), (stack,))
    shape = dataclasses.replace(model_of(), units=(unit,), experts=6, chosen=1)
    cut = shape_in(JOB.replace(expert_tile=4), shape)
    assert [[each.matrices for each in part.flats] for part in cut.units] == [
        [((256, 256), ())], [((4, 512, 256),)], [((2, 512, 256),)],
    ]  # fmt: skip
    assert [part.flats[0].moments for part in cut.units] == [2, 1, 1]
    assert shape_in(JOB.replace(expert_tile=4), cut) is cut
    plain = shape_in(JOB.replace(expert_tile=4, optimizer="adamw"), shape)
    assert [part.flats[0].moments for part in plain.units] == [2, 2, 2]
    assert plain.params == cut.params == shape.params
