"""Costs outside of every budget: as a plan counts them, and as the engine has them."""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.base.sizes import GIB
from infinity._src.checkpoint.directory import files_of
from infinity._src.memory import host_overhead
from infinity._src.memory.host_overhead import held_bytes, passing_bytes
from infinity._src.plan.machine import describe_machine
from infinity._src.plan.predict import DRAW_S, Outside, Prediction, outside, predict
from infinity._src.plan.workload import Job, ModelShape, shape_of
from tests import models

NONE = {"params": 0.0, "optim": 0.0}


@functools.cache
def large() -> Any:
    """To be copied: giving it random values takes longer than all that is done with it."""
    return models.llama(layers=4, hidden=512).bfloat16()


def planned(
    shape: ModelShape, *, gpus: int = 0, nodes: int = 1, drives: int = 1, **fields: Any
) -> tuple[Outside, Prediction]:
    fields = {"params": "nvme", "optim": "nvme", "nvme": ["."], **fields}
    machine = describe_machine(
        gpus=gpus, ram_bytes=4 * GIB, read_bytes_per_s=2e9, write_bytes_per_s=1e9, nodes=nodes,
        drives=drives,
    )  # fmt: skip
    job = Job(inf.Policy(**fields), tokens=64, sequence=64)
    found = predict(shape, machine, job)
    return outside(shape, found), found


def on_drives(place: Path, model: Any, spares: int = 1) -> int:
    """Bytes of all files below, and of swap files without a name; of several names once. With the
    ranges that are kept for faults once of so many times: an earlier run's files have them, too.
    """
    space = inf.handle(model).parts.tiers.storage.space
    found = [os.fstat(file.fd) for layer in space.layers for file in layer]
    found += [path.stat() for path in place.rglob("*") if path.is_file()]
    kept = (spares - 1) * inf.handle(model).parts.tiers.store.spare_bytes
    return sum({each.st_ino: each.st_blocks * 512 for each in found}.values()) - kept


def step(model: Any, optimizer: Any) -> None:
    ids = torch.arange(16)[None] % 64
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    inf.handle(model).flush()


@pytest.mark.parametrize(
    "values",
    [{}, {"state": "compact"}, {"durable": True}, {"generations": 2}],
    ids=str,
)
def test_set_up_writes_the_parameters_alone_and_makes_so_many_chunks(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    model = copy.deepcopy(large())
    shape = shape_of(model)
    resident = {} if values.get("durable") else {"resident": NONE}
    given = {"params": "nvme", "optim": "nvme", "nvme": tmp_path, **resident, **values}
    inf.offload(model, inf.Policy(**given))
    inf.AdamW(model.parameters())
    handle = inf.handle(model)
    handle.flush()
    written = handle.stats().bytes_written
    store = handle.parts.tiers.store
    chunks = sum(len(store[flat].ids) for unit in handle.units for flat in unit.flats)
    units = len(handle.units)
    handle.close()
    costs, found = planned(shape, **{**resident, **values})
    assert costs.ram.chunks == chunks
    assert len(shape.units) == units
    assert costs.ram.held == held_bytes(chunks, units, found.job.policy.generations)
    # Runs are rounded up to 4096 bytes on the drive.
    assert costs.set_up.written == pytest.approx(written, rel=0.01)
    assert costs.set_up.read == 2 * shape.params
    io_s = costs.set_up.read / 2e9 + costs.set_up.written / 1e9
    assert io_s < costs.set_up.seconds < io_s + 0.1


def test_a_checkpoint_beside_the_states_is_in_the_drives_peak(tmp_path: Path) -> None:
    model = copy.deepcopy(large())
    shape = shape_of(model)
    (tmp_path / "swap").mkdir()
    given = {"resident": NONE, "state": "bf16"}
    inf.offload(model, inf.Policy(params="nvme", optim="nvme", nvme=tmp_path / "swap", **given))
    optimizer = inf.AdamW(model.parameters())
    step(model, optimizer)
    costs, _ = planned(shape, **given)
    assert on_drives(tmp_path, model) == pytest.approx(costs.disk["training"], rel=0.01)
    inf.save(model, optimizer, tmp_path / "saved").wait()
    most = on_drives(tmp_path, model)
    inf.handle(model).close()
    assert most == pytest.approx(costs.disk["with a checkpoint"], rel=0.01)
    states = costs.disk["with a checkpoint"] - costs.disk["training"]
    assert costs.disk["while the next one is written"] == costs.disk["with a checkpoint"] + states


def test_a_linked_checkpoint_of_a_durable_run_costs_a_third_copy_with_the_next_step(
    tmp_path: Path,
) -> None:
    model = copy.deepcopy(large())
    shape = shape_of(model)
    policy = inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, durable=True)
    inf.offload(model, policy)
    optimizer = inf.AdamW(model.parameters())
    for _ in range(2):
        step(model, optimizer)
    costs, _ = planned(shape, durable=True)
    assert on_drives(tmp_path, model) == pytest.approx(costs.disk["training"], rel=0.01)
    inf.save(model, optimizer, tmp_path / "saved").wait()
    for _ in range(2):
        step(model, optimizer)
    most = on_drives(tmp_path, model, 2)
    inf.handle(model).close()
    assert most == pytest.approx(costs.disk["with a checkpoint by links"], rel=0.01)


@pytest.mark.parametrize("amid", ["step", "commit"])
def test_a_killed_run_that_is_restored_takes_a_third_copy_and_a_fourth_amid_a_commit(
    tmp_path: Path, amid: str
) -> None:
    shape, home = shape_of(large()), tmp_path / "infinity-run"
    for turn in range(2):
        model = copy.deepcopy(large())
        policy = inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, durable=True)
        inf.offload(model, policy)
        optimizer = inf.AdamW(model.parameters())
        most = on_drives(tmp_path, model, 1 + turn)
        older = {path: path.read_bytes() for path, _ in files_of(home)}
        if not turn:
            step(model, optimizer)
        # End as a killed process does: commit nothing more.
        inf.handle(model).end(commit=False)
        if amid == "commit":
            # The state before the commit's last call: the earlier step still has its manifest.
            for path, data in older.items():
                path.write_bytes(data)
    costs, _ = planned(shape, durable=True)
    case = {"step": "while a killed run is restored", "commit": "while one killed amid a commit is"}
    assert most == pytest.approx(costs.disk[case[amid]], rel=0.01)


def test_ranks_share_set_up_and_each_has_records_of_its_own() -> None:
    with torch.device("meta"):
        model = models.llama(layers=4, hidden=512).bfloat16()
    shape = shape_of(model, nested=False)
    (one, alone), (two, _) = (planned(shape, gpus=count, resident=NONE) for count in (1, 2))
    assert two.set_up.read == one.set_up.read / 2
    assert two.set_up.written == pytest.approx(one.set_up.written / 2, rel=0.01)
    chunks = two.ram.chunks
    assert one.ram.chunks / 2 <= chunks < one.ram.chunks
    assert two.ram.held == 2 * held_bytes(chunks, len(shape.units))
    # A save may run during a step.
    fill = one.ram.passing["fill"]
    passing = passing_bytes(one.ram.chunks, all_at_once=True, durable=False, drives=1, fill=fill)
    assert one.ram.passing == passing
    assert one.ram.peak == one.ram.held + passing["step"] + passing["save"]
    # RAM is pinned for GPUs.
    assert one.set_up.seconds > alone.ram.bytes * 1e-10
    backward, _ = planned(shape, gpus=1, resident=NONE, update="backward")
    assert backward.ram.passing["step"] == 0


def shape_of_large(layers: int = 4) -> ModelShape:
    with torch.device("meta"):
        return shape_of(models.llama(layers=layers, hidden=512).bfloat16(), nested=False)


def test_a_save_reads_ahead_on_every_drive() -> None:
    for gpus in (1, 2):
        one, four = (
            planned(shape_of_large(), gpus=gpus, drives=drives)[0].ram.passing["save"]
            for drives in (1, 4)
        )
        assert four - one == gpus * 3 * host_overhead.SAVE_DRIVE_BYTES


@pytest.mark.parametrize(
    ("update", "generations", "all_at_once"),
    [
        ("deferred", 1, True),
        # After its warm-up every step starts the updates of all units; during it, a step is a
        # deferred one.
        ("delayed", 1, True),
        # Updates ahead of a step may be undone, and repeated by the step.
        ("backward", 2, True),
        ("backward", 1, False),
    ],
)
def test_a_step_has_the_jobs_of_all_chunks_where_it_submits_them_at_once(
    update: str, generations: int, all_at_once: bool
) -> None:
    ram = planned(shape_of_large(), update=update, generations=generations)[0].ram
    assert ram.passing["step"] == all_at_once * ram.chunks * host_overhead.STEP_CHUNK_BYTES


def test_a_fill_has_the_pieces_of_each_rank_on_their_way_and_a_weight_without_files() -> None:
    shape = shape_of_large()
    alone, nodes = (
        planned(shape, gpus=gpus, nodes=count)[0].ram for gpus, count in ((1, 1), (2, 2))
    )
    assert alone.passing["fill"] == host_overhead.PIECES_BYTES
    weight = max(numel * 2 for flat in shape.flats for numel in flat.numels)
    assert alone.fill_without_files == alone.passing["fill"] + weight
    # Pieces of a small shard are small.
    shard = max(flat.shard_numel(4) * 2 for flat in shape.flats)
    assert nodes.passing["fill"] == 2 * host_overhead.PIECES * shard
    assert nodes.fill_without_files == nodes.passing["fill"] + 2 * weight


def test_values_that_are_drawn_take_a_core_of_each_rank_and_nothing_is_read() -> None:
    shape = shape_of_large()
    one, two = (planned(shape, gpus=gpus)[0].set_up for gpus in (1, 2))
    read_s = shape.params * 2 / 2e9
    for set_up in (one, two):
        drawn_s = set_up.init_seconds - (set_up.seconds - read_s)
        assert drawn_s == pytest.approx(DRAW_S * shape.params)


def test_ranks_of_several_nodes_each_read_the_whole_source() -> None:
    shape = shape_of_large()
    one, two = (planned(shape, gpus=2, nodes=nodes)[0].set_up for nodes in (1, 2))
    assert (one.read, two.read) == (shape.params, 2 * shape.params)
    assert two.seconds > one.seconds
