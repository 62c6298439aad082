"""Costs that no budget has, as a plan tells them and as the engine has them."""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.memory.footprint import held_bytes, passing_bytes
from infinity._src.perf.plan.machine import describe_machine
from infinity._src.perf.plan.outside import Outside, outside
from infinity._src.perf.plan.predict import Prediction, predict
from infinity._src.perf.plan.workload import Job, ModelShape, shape_of
from infinity._src.sizes import GIB
from tests import models

NONE = {"params": 0.0, "optim": 0.0}


@functools.cache
def large() -> Any:
    """To be copied: giving it random values takes longer than all that is done with it."""
    return models.llama(layers=4, hidden=512).bfloat16()


def planned(shape: ModelShape, *, gpus: int = 0, **fields: Any) -> tuple[Outside, Prediction]:
    fields = {"params": "nvme", "optim": "nvme", "nvme": ["."], **fields}
    machine = describe_machine(
        gpus=gpus, ram_bytes=4 * GIB, read_bytes_per_s=2e9, write_bytes_per_s=1e9
    )
    job = Job(inf.Policy(**fields), tokens=64, sequence=64)
    found = predict(shape, machine, job)
    return outside(shape, found), found


def on_drives(place: Path, model: Any) -> int:
    """Bytes of all files below, and of swap files without a name; of several names once."""
    space = inf.handle(model).parts.tiers.storage.space
    found = [os.fstat(file.fd) for layer in space.layers for file in layer]
    found += [path.stat() for path in place.rglob("*") if path.is_file()]
    return sum({each.st_ino: each.st_blocks * 512 for each in found}.values())


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
    most = on_drives(tmp_path, model)
    inf.handle(model).close()
    assert most == pytest.approx(costs.disk["with a checkpoint by links"], rel=0.01)


def test_a_killed_run_that_is_restored_takes_a_third_copy(tmp_path: Path) -> None:
    shape = shape_of(large())
    for turn in range(2):
        model = copy.deepcopy(large())
        policy = inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, durable=True)
        inf.offload(model, policy)
        optimizer = inf.AdamW(model.parameters())
        most = on_drives(tmp_path, model)
        if not turn:
            step(model, optimizer)
        # As a killed process: nothing more is committed.
        inf.handle(model).end(commit=False)
    costs, _ = planned(shape, durable=True)
    assert most == pytest.approx(costs.disk["while a killed run is restored"], rel=0.01)


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
    # A save may go on beside a step.
    passing = passing_bytes(one.ram.chunks, deferred=True, durable=False)
    assert one.ram.peak == one.ram.held + passing["step"] + passing["save"]
    # RAM is pinned for GPUs.
    assert one.set_up.seconds > alone.ram.bytes * 1e-10
    backward, _ = planned(shape, gpus=1, resident=NONE, update="backward")
    assert backward.ram.passing["step"] == 0
