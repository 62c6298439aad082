"""Predictions of `infinity plan`: the engine's own placement, terms that follow from sizes,
properties of any plan."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")

import infinity as inf  # noqa: E402
from infinity._src.base.sizes import GIB, MIB, parse_size  # noqa: E402
from infinity._src.plan.changes import fewest_micro_batches, one_change  # noqa: E402
from infinity._src.plan.machine import (  # noqa: E402
    UPDATES_PER_CORE,
    Machine,
    describe_machine,
    read_updates,
)
from infinity._src.plan.predict import PASS_SHARE, Prediction, predict  # noqa: E402
from infinity._src.plan.ranks import bytes_of_rank  # noqa: E402
from infinity._src.plan.workload import (  # noqa: E402
    FlatShape,
    Job,
    ModelShape,
    UnitShape,
    shape_of,
)
from tests import models  # noqa: E402
from tests.marks import mostly_slow  # noqa: E402
from tests.plans import job_of, with_budget  # noqa: E402


def machine_of(ram_bytes: float, gpus: int = 1) -> Machine:
    return describe_machine(
        gpus=gpus,
        gpu_mem_bytes=8 * GIB,
        ram_bytes=ram_bytes,
        read_bytes_per_s=2e9,
        write_bytes_per_s=1e9,
    )


def shape_1b(dtype: torch.dtype = torch.bfloat16) -> ModelShape:
    """Sixteen units of 64M elements, and words."""
    units = tuple(
        UnitShape(str(index), (FlatShape((1 << 26,), dtype, True),)) for index in range(16)
    )
    return ModelShape("1B", units, 1 << 30, 16, 2048, 2048, 8192, 32000, 4096, dtype.itemsize)


def terms(job: Job, **machine: Any) -> dict[str, float]:
    given_ = {
        "gpus": 1, "ram_bytes": 64 * GIB, "pcie_per_gpu": 1e10, "dram_bytes_per_s": 1e11,
    } | machine  # fmt: skip
    return predict(shape_1b(), describe_machine(**given_), job).terms_s


JOB = job_of(tokens=8 * 4096, sequence=4096, micro_batches=4)
NOTHING = {"params": 0.0, "optim": 0.0}
BOUNDARY = 2 * 16 * 2048 * 8192  # of a micro-batch


# -- what it is planned from -----------------------------------------------------------------------


def test_experts_that_are_not_routed_to_cost_no_operations_but_all_are_moved() -> None:
    with torch.device("meta"):
        dense, sparse = shape_of(models.llama()), shape_of(models.mixtral())
    # the input embedding is looked up
    assert dense.active_params == dense.params - dense.vocabulary * dense.width
    assert sparse.active_params < sparse.params - sparse.vocabulary * sparse.width
    assert sum(flat.numel for flat in sparse.flats) == sparse.params


def test_tied_words_count_once_and_compute() -> None:
    with torch.device("meta"):
        shape = shape_of(models.gpt2())
    assert shape.active_params >= shape.vocabulary * shape.width
    assert shape.params == sum(p.numel() for p in models.make(models.gpt2).parameters())


@functools.cache
def large() -> Any:
    """To be copied: giving it random values takes longer than all that is done with it."""
    return models.llama(layers=12, hidden=512).bfloat16()


def disk_of(model: Any) -> tuple[int, int]:
    """Bytes that the swap files take on their drives, and of them those kept for faults."""
    tiers = inf.handle(model).parts.tiers
    files = [file for layer in tiers.storage.space.layers for file in layer]
    whole = sum(os.fstat(file.fd).st_blocks * 512 for file in files)
    return whole, tiers.store.spare_bytes


def states_bytes(found: Prediction) -> float:
    """Room on the drives for all but spare ranges."""
    return found.nvme.bytes - found.nvme.parts.get("spare ranges", 0.0)


@pytest.mark.parametrize("state", ["exact", "bf16", "compact", "exact muon"])
@pytest.mark.parametrize("ram", mostly_slow(["min", "150MiB", "250MiB", "1GiB"], "min", "250MiB"))
def test_the_plan_is_the_engine_s_own(tmp_path: Path, state: str, ram: str) -> None:
    model = copy.deepcopy(large())
    shape = shape_of(model)
    state, _, optimizer = state.partition(" ")
    inf.offload(model, inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram=ram, state=state))
    (inf.Muon if optimizer else inf.AdamW)(model.parameters())
    stats, (disk_bytes, spare_bytes) = inf.handle(model).stats(), disk_of(model)
    inf.handle(model).close()
    size = stats.ram_min_bytes if ram == "min" else parse_size(ram)
    machine = describe_machine(gpus=0, read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    job = job_of(tokens=64, sequence=64, state=state, optimizer=optimizer or "adamw")
    found = predict(shape, with_budget(machine, shape, job, size), job)
    assert found.policy_ram == size
    assert found.budget_bytes == stats.ram_bytes
    # blocks are rounded up to 4096 bytes on the drive
    assert states_bytes(found) == pytest.approx(stats.nvme_bytes, rel=0.01)
    assert found.nvme.parts.get("spare ranges", 0) == spare_bytes
    assert found.nvme.bytes == pytest.approx(disk_bytes, rel=0.01)
    assert found.fits


@pytest.mark.parametrize("values", [
    {"resident": {"params": 0.5, "optim": 0.25}, "ram": 300 * MIB},
    {"grad_dtype": torch.float32, "ram": 300 * MIB},
    {"grads": "nvme", "ram": 90 * MIB},
    {"grads": "nvme", "grad_dtype": torch.float32, "update": "delayed", "ram": 220 * MIB},
    {"generations": 2, "ram": 300 * MIB},
    {"generations": 2, "update": "backward", "ram": 250 * MIB},
    {"generations": 2, "update": "backward", "grads": "nvme", "ram": 90 * MIB},
    {"generations": 2, "resident": {"params": 0.5, "optim": 0.25}, "ram": 400 * MIB},
    {"durable": True, "ram": 300 * MIB},
    {"durable": True, "ram": 300 * MIB, "drives": 2},
], ids=str)  # fmt: skip
def test_it_is_so_with_every_part_of_the_policy(tmp_path: Path, values: dict[str, Any]) -> None:
    model = copy.deepcopy(large())
    shape = shape_of(model)
    values = dict(values)
    drives = [tmp_path / str(number) for number in range(values.pop("drives", 1))]
    for drive in drives:
        drive.mkdir()
    inf.offload(model, inf.Policy(params="nvme", optim="nvme", nvme=drives, **values))
    inf.AdamW(model.parameters())
    stats, (disk_bytes, spare_bytes) = inf.handle(model).stats(), disk_of(model)
    inf.handle(model).close()
    job = job_of(
        tokens=64, sequence=64, **{name: value for name, value in values.items() if name != "ram"}
    )
    machine = with_budget(machine_of(GIB, gpus=0), shape, job, values["ram"])
    found = predict(shape, dataclasses.replace(machine, drives=len(drives)), job)
    assert found.budget_bytes == stats.ram_bytes
    assert bool(stats.spilled_bytes) == ("grads" in values)
    assert found.on_nvme.grads == pytest.approx(stats.spilled_bytes, rel=0.01)
    assert states_bytes(found) - found.on_nvme.grads == pytest.approx(stats.nvme_bytes, rel=0.01)
    assert found.nvme.parts["spare ranges"] == spare_bytes
    assert found.nvme.bytes == pytest.approx(disk_bytes, rel=0.01)


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_node_has_room_for_what_lies_beside_the_budgets(gpus: int) -> None:
    least = predict(shape_1b(), machine_of(1, gpus), JOB)
    assert not least.fits
    beside = least.ram_beside.peak
    assert least.ram.parts["beside the budget"] == beside > 0
    assert least.ram.bytes == sum(least.ram.parts.values())
    assert least.ram.bytes == gpus * least.policy_ram + beside
    assert predict(shape_1b(), machine_of(least.ram.bytes, gpus), JOB).fits
    # The budgets alone are not enough.
    assert not predict(shape_1b(), machine_of(gpus * least.policy_ram, gpus), JOB).fits
    assert not predict(shape_1b(), machine_of(least.ram.bytes - gpus, gpus), JOB).fits
    # States that do not rest in RAM pass through it: a plan that uses all RAM must leave space for
    # both.
    full = predict(shape_1b(), machine_of(least.ram.bytes + GIB, gpus), JOB)
    assert full.ram.bytes <= full.machine.ram_bytes
    assert full.ram.parts["resident states"] > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_the_cpu_computes_device_memory_is_a_part_of_the_ram(ranks: int) -> None:
    shape, job = shape_1b(), job_of(tokens=16_384, sequence=4096, micro_batches=2)
    machine = describe_machine(gpus=0, ranks=ranks, ram_bytes=24 * GIB)
    found = predict(shape, machine, job)
    assert found.gpu.there_is == 24 * GIB / ranks
    assert found.ram.parts["device memory"] == ranks * found.gpu.bytes
    assert found.fits
    used = ranks * (found.policy_ram + found.gpu.bytes) + found.ram_beside.peak
    assert used == pytest.approx(24 * GIB)
    # The number of micro-batches (of two) that leaves RAM for the states.
    least = predict(shape, dataclasses.replace(machine, ram_bytes=MIB), job).ram.bytes
    tight = dataclasses.replace(machine, ram_bytes=least + ranks * MIB)
    fewest = fewest_micro_batches(shape, tight, job.replace(micro_batches=1))
    assert fewest.micro_batches == 2
    assert predict(shape, tight, fewest).fits


def test_two_generations_take_twice_the_room_and_move_no_more() -> None:
    kept = JOB.replace(resident={"params": 0.0, "optim": 0.0})
    machine = dataclasses.replace(machine_of(64 * GIB), nvme_bytes=13.0 * (1 << 30))
    one, two = (
        predict(shape_1b(), machine, kept),
        predict(shape_1b(), machine, kept.replace(generations=2)),
    )
    assert states_bytes(two) == 2 * states_bytes(one) == 24 * (1 << 30)
    assert (two.moved, two.step_s, two.days) == (one.moved, one.step_s, one.days)
    assert one.fits
    assert "one generation" in two.why_not[0]
    ahead = predict(shape_1b(), machine, kept.replace(update="backward", generations=2))
    early = predict(shape_1b(), machine, kept.replace(update="backward"))
    assert (ahead.moved, ahead.limits) == (early.moved, early.limits)
    assert any(
        change.name == "one generation" and change.prediction.fits
        for change in one_change(shape_1b(), two)
    )


def test_durable_runs_keep_frozen_parameters_twice_and_nothing_resident() -> None:
    frozen = ModelShape(
        "frozen",
        tuple(
            UnitShape(str(index), (FlatShape((1 << 20,), torch.bfloat16, index % 2 == 0),))
            for index in range(4)
        ),
        1 << 22,
        4,
        64,
        64,
        128,
        1000,
        512,
    )
    found = predict(frozen, machine_of(64 * GIB), JOB.replace(durable=True))
    assert found.job.policy.generations == 2
    assert found.at_rest == found.on_nvme
    assert states_bytes(found) == 2 * (found.on_nvme.states + found.on_nvme.frozen)
    of_rank = bytes_of_rank(frozen, found.machine, found.job).total.nvme
    assert of_rank == pytest.approx(states_bytes(found), rel=0.01)
    with pytest.raises(
        ValueError, match="durable=True keeps all states on the drives: set params='nvme'"
    ):
        predict(frozen, machine_of(64 * GIB), JOB.replace(durable=True, params="cpu"))
    with pytest.raises(ValueError, match="keeps one generation"):
        predict(frozen, machine_of(64 * GIB), JOB.replace(generations=2, update="delayed"))


def test_activations_that_leave_the_device_go_through_the_cpu_s_memory() -> None:
    here = terms(JOB)
    for where in ("cpu", "nvme"):
        there = terms(JOB.replace(activations=where))
        drives = 2 * 4 * BOUNDARY if where == "nvme" else 0
        assert there["CPU memory"] - here["CPU memory"] == pytest.approx(
            (2 * 4 * BOUNDARY + drives) / 1e11
        )
        assert there["PCIe"] - here["PCIe"] == pytest.approx(4 * BOUNDARY / 1e10)


def test_parameters_that_stay_on_the_device_go_there_once_when_updated() -> None:
    params = 2 * (1 << 30)
    stay = terms(JOB.replace(params="device", optim="cpu"), gpu_mem_bytes=80 * GIB)
    # the gradients of four micro-batches come back
    assert stay["PCIe"] == pytest.approx(4 * params / 1e10)
    # Two gathers for each micro-batch; and the sum of gradients goes up again to be added to, three
    # times.
    assert terms(JOB.replace(optim="cpu"))["PCIe"] == pytest.approx((2 * 4 + 3) * params / 1e10)


def test_activations_are_as_wide_as_what_computes() -> None:
    half, whole = shape_1b(), shape_1b(torch.float32)
    assert whole.boundary_bytes_per_token == 2 * half.boundary_bytes_per_token
    with torch.device("meta"):
        assert (
            shape_of(models.llama().bfloat16()).itemsize,
            shape_of(models.llama()).itemsize,
        ) == (2, 4)


def test_an_encoder_and_a_decoder_both_have_layers() -> None:
    config = transformers.T5Config(
        d_model=64, d_ff=128, num_layers=3, num_decoder_layers=5, num_heads=4, vocab_size=256
    )
    with torch.device("meta"):
        assert shape_of(transformers.T5ForConditionalGeneration(config)).layers == 8


# -- properties ------------------------------------------------------------------------------------

FLATS = st.builds(
    lambda numels, trainable: FlatShape(tuple(numels), torch.bfloat16, trainable),
    st.lists(st.integers(1, 3_000_000), min_size=1, max_size=3),
    st.booleans(),
)


def model_of(*numels: int) -> ModelShape:
    """A model of so many units of one trainable flat."""
    units = tuple(
        UnitShape(str(n), (FlatShape((numel,), torch.bfloat16, True),))
        for n, numel in enumerate(numels)
    )
    return ModelShape("drawn", units, sum(numels), 4, 64, 64, 128, 1000, 512)


SHAPES = st.lists(FLATS, min_size=1, max_size=8).map(
    lambda flats: ModelShape(
        "drawn", tuple(UnitShape(str(index), (flat,)) for index, flat in enumerate(flats)),
        sum(flat.numel for flat in flats), 4, 64, 64, 128, 1000, 512,
    )
)  # fmt: skip
JOBS = st.builds(
    job_of,
    tokens=st.integers(64, 100_000),
    sequence=st.just(64),
    micro_batches=st.integers(1, 8),
    state=st.sampled_from(["exact", "bf16", "compact"]),
    update=st.sampled_from(["deferred", "backward", "delayed"]),
    params=st.sampled_from(["cpu", "nvme"]),
    optim=st.sampled_from(["cpu", "nvme"]),
    grads=st.sampled_from(["cpu", "nvme"]),
    activations=st.sampled_from(["device", "cpu", "nvme"]),
)


@settings(max_examples=60, deadline=None)
@given(SHAPES, JOBS, st.integers(1 << 20, 400_000_000), st.integers(0, 2))
# in coarse pieces spilled gradients need more RAM than there is; in the engine's chunks they fit
@example(
    model_of(1, 1_150_977, 1_988_609),
    job_of(tokens=64, sequence=64, update="delayed", params="cpu", grads="nvme"),
    1 << 20,
    0,
)
# the large flat spills, and the small one beside it takes less in RAM than a window for it
@example(
    ModelShape(
        "two flats",
        (
            UnitShape("0", (FlatShape((1,), torch.bfloat16, True),)),
            UnitShape("1", (FlatShape((1_572_737, 1_572_865), torch.bfloat16, True),)),
        ),
        3_145_603, 4, 64, 64, 128, 1000, 512, 2,
    ),
    job_of(tokens=64, sequence=64, update="delayed", params="cpu", optim="cpu", grads="nvme"),
    1 << 20,
    0,
)  # fmt: skip
def test_a_plan_that_fits_is_within_every_budget_and_deterministic(
    shape: ModelShape, job: Job, ram_bytes: int, gpus: int
) -> None:
    found = predict(shape, machine_of(ram_bytes, gpus), job)
    assert found == predict(shape, machine_of(ram_bytes, gpus), job)
    if found.fits:
        assert found.ram.bytes <= ram_bytes
        assert found.gpu.bytes <= 8 * GIB
    elif not found.ram.fits:  # the least that works does, and less does not
        assert predict(shape, machine_of(found.ram.bytes, gpus), job).ram.fits
        assert not predict(shape, machine_of(found.ram.bytes - gpus - 1, gpus), job).ram.fits
    if not found.fits:
        assert all(
            reason.partition(":")[0] in ("GPU memory", "RAM", "NVMe") or "CPU" in reason
            for reason in found.why_not
        )
    assert found.step_s > 0
    assert found.limits.floor_s <= found.limits.schedule_s * (1 + 1e-9)
    assert found.on_nvme.total <= found.at_rest.total + 1


@settings(max_examples=60, deadline=None)
@given(SHAPES, JOBS, st.integers(1 << 20, 400_000_000), st.integers(0, 400_000_000))
def test_more_ram_never_predicts_slower_nor_fits_less(
    shape: ModelShape, job: Job, ram_bytes: int, more: int
) -> None:
    few, many = (
        predict(shape, machine_of(ram_bytes), job),
        predict(shape, machine_of(ram_bytes + more), job),
    )
    if few.fits:
        assert many.fits
        assert many.step_s <= few.step_s * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(SHAPES, JOBS)
def test_another_drive_never_predicts_slower(shape: ModelShape, job: Job) -> None:
    machine = machine_of(1e9)
    assert predict(shape, machine.with_drives(2), job).step_s <= predict(
        shape, machine, job
    ).step_s * (1 + 1e-9)


def test_changes_are_sorted_and_each_changes_one_thing() -> None:
    shape = ModelShape(
        "m",
        (UnitShape("u", (FlatShape((50_000_000,), torch.bfloat16, True),)),),
        50_000_000,
        4,
        64,
        64,
        128,
        1000,
        512,
    )
    now = predict(shape, machine_of(400 * MIB), job_of(tokens=4096, sequence=512))
    changes = one_change(shape, now)
    gains = [change.prediction.tokens_per_s for change in changes if change.prediction.fits]
    assert gains == sorted(gains, reverse=True)
    by_name = {change.name: change.prediction for change in changes}
    assert by_name["one more drive"].machine.drives == 2
    assert by_name["one more drive"].step_s < now.step_s
    assert by_name["state compact (rounds)"].moved.total.written < now.moved.total.written / 2
    more = by_name["twice the RAM"]
    assert dataclasses.replace(more.machine, ram_bytes=now.machine.ram_bytes) == now.machine
    assert more.job == now.job


def test_the_fewest_micro_batches_are_those_whose_activations_fit() -> None:
    flat = FlatShape((1_000_000,), torch.bfloat16, True)
    shape = ModelShape(
        "m", (UnitShape("u", (flat,)),), 1_000_000, 100, 1024, 1024, 4096, 1000, 4096
    )
    machine = dataclasses.replace(machine_of(1e9), gpu_mem_bytes=4 * GIB)
    job = job_of(tokens=1 << 16, sequence=512)
    chosen = fewest_micro_batches(shape, machine, job)
    assert predict(shape, machine, chosen).gpu.fits
    fewer = chosen.replace(micro_batches=chosen.micro_batches // 2)
    assert chosen.micro_batches > 1
    assert not predict(shape, machine, fewer).gpu.fits


# -- update kernels beside GPUs --------------------------------------------------------------------

KERNELS = JOB.replace(state="compact", verify="off", update_threads=4)


def test_kernels_of_updates_take_cores_beside_a_gpu() -> None:
    alone = terms(KERNELS, cores=64)["update kernels"]
    assert alone == pytest.approx((1 << 30) / (4 * UPDATES_PER_CORE["compact"]))
    assert terms(KERNELS.replace(update_threads=8), cores=64)["update kernels"] == alone / 2
    # Threads beyond the cores bring nothing.
    assert terms(KERNELS.replace(update_threads=8), cores=4)["update kernels"] == alone
    found = terms(KERNELS.replace(update_threads=None), cores=33)["update kernels"]
    assert found == pytest.approx(alone * 4 / 32)
    # Each rank leaves one core to Python.
    found = terms(KERNELS.replace(update_threads=None), cores=16, gpus=4)["update kernels"]
    assert found == pytest.approx(alone * 4 / 12)


def test_checksums_count_where_they_are_compared() -> None:
    off, sample, full = (
        terms(KERNELS.replace(verify=verify), ram_bytes=4 * GIB)["update kernels"]
        for verify in ("off", "sample", "full")
    )
    assert off < sample < full
    assert (sample - off) / (full - off) == pytest.approx((1 + 1 / 16) / 2)


def test_updates_on_a_gpu_or_beside_passes_of_the_cpu_have_no_such_term() -> None:
    assert "update kernels" not in terms(JOB.replace(update_on="device"))
    assert "update kernels" not in terms(JOB, gpus=0)


def test_the_slower_of_kernels_and_memory_is_the_time_of_an_update_on_a_cpu() -> None:
    job = JOB.replace(verify="off", update_threads=4)

    def compute_s(rate: float, **fields: Any) -> float:
        rates = {**UPDATES_PER_CORE, "exact": rate}
        found = terms(job.replace(**fields), gpus=0, cores=4, updates_per_core=rates)
        return found["compute"]

    # 12 bytes of states are read and written, and 2 of a gradient read.
    memory_s = 26 * (1 << 30) / (PASS_SHARE * 1e11)
    kernels_s = (1 << 30) / (4 * 1e7)
    for update in ("deferred", "backward", "delayed"):
        more_s = compute_s(1e7, update=update) - compute_s(1e15, update=update)
        assert more_s == pytest.approx(kernels_s - memory_s)
    # The default there are a quarter of the processors.
    assert compute_s(1e7, update_threads=None) - compute_s(1e7) == pytest.approx(3 * kernels_s)


def test_the_rate_of_kernels_is_that_of_a_record(tmp_path: Path) -> None:
    row = {"name": "update", "isa": "avx2", "state": "exact", "where": "memory"}
    others = [{**row, "isa": "avx512"}, {**row, "where": "cache"}, {**row, "state": "fp32"}]
    rows = [{**row, "gparam_per_s": 2.028}, *({**other, "gparam_per_s": 9.0} for other in others)]
    path = tmp_path / "adam.json"
    path.write_text(json.dumps({"threads": 2, "isa": "avx2", "rows": rows}))
    rates = read_updates(path)
    assert rates["exact"] == pytest.approx(1.014e9)  # twice the rate that is assumed
    assert rates["compact"] == pytest.approx(2 * UPDATES_PER_CORE["compact"])
    # A record of all states says what each of them takes.
    rows.append({**row, "state": "compact", "gparam_per_s": 1.0})
    path.write_text(json.dumps({"threads": 2, "isa": "avx2", "rows": rows}))
    assert read_updates(path) == {**rates, "compact": pytest.approx(0.5e9)}
    rows[-1]["gparam_per_s"] = 0.0
    path.write_text(json.dumps({"threads": 2, "isa": "avx2", "rows": rows}))
    with pytest.raises(ValueError, match="positive rates only"):
        read_updates(path)
    twice = terms(KERNELS, updates_per_core=rates, updates_name="adam.json")["update kernels"]
    assert twice == pytest.approx(terms(KERNELS)["update kernels"] / 2)
    for wrong in ("[]", "{}", "no json", json.dumps({"threads": 1, "isa": "x", "rows": []})):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            read_updates(path)
