"""Muon over states at rest: the bits of torch.optim.Muon on fp32 masters, at every placement, and
the same bits at every placement in the other formats."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import infinity as inf
from infinity._src.engine.handle import offload
from infinity._src.kernels import newton_schulz
from infinity._src.kernels.newton_schulz import (
    flops,
    orthogonalize,
    product_dtype,
    scratch_numel,
)
from infinity._src.memory.device import Device
from infinity._src.optim.whole_matrices import Matrix, device_bytes, is_hidden_matrix
from infinity._src.plan.machine import describe_machine
from infinity._src.plan.predict import predict
from infinity._src.plan.workload import shape_of
from infinity.aio import Fault, Format, Seam
from infinity.errors import MemoryLimitError, StateInvalid, StepUndone
from tests import harness, models
from tests.device import simulated
from tests.forks import FORKSERVER
from tests.harness import Training, assert_same
from tests.plans import job_of
from tests.reference import newton_schulz_of_torch
from tests.test_bitwise import policy, wide_llama

MIN = {"params": "nvme", "optim": "nvme", "ram": "min"}
SMALL = Training(models.Small, steps=4, lr=0.02, optimizer="Muon")
WIDE = Training(wide_llama, accumulation=1, lr=0.02, optimizer="Muon")
CASES = {
    "clipped, accumulated": SMALL,
    "units of several chunks": WIDE,
    "experts": Training(models.qwen3_moe, lr=0.02, optimizer="Muon", max_norm=None),
    "fp32": dataclasses.replace(SMALL, dtype=torch.float32),
    "fp16, scaled": dataclasses.replace(
        SMALL, dtype=torch.float16, scaler=(1024.0, 2), poisoned=(1,)
    ),
    "gradients in fp32": dataclasses.replace(
        SMALL, grad_dtype=torch.float32, options=(("adjust_lr_fn", "original"),)
    ),
    "groups, checkpointed": dataclasses.replace(SMALL, groups=True, checkpointing=False),
    "the rates of AdamW": dataclasses.replace(
        SMALL,
        options=(("adjust_lr_fn", "match_rms_adamw"), ("nesterov", False), ("momentum", 0.4)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_torch_on_masters_in_memory(name: str, tmp_path: Path) -> None:
    chosen = CASES[name]
    run = harness.offloaded(chosen, policy(tmp_path, **MIN, grad_dtype=chosen.grad_dtype))
    assert_same(run, harness.reference(chosen))
    assert run.losses[-1] != run.losses[1]


@pytest.mark.parametrize("state", ["exact", "bf16", "compact"])
def test_every_placement_gives_the_same_bits(state: str, tmp_path: Path) -> None:
    places: list[dict[str, Any]] = [{"params": "cpu", "optim": "cpu"}, MIN]
    if state == "exact":
        places += [{**MIN, "ram": "40MB"}, {**MIN, "params": "cpu", "verify": "sample"}]
    chosen = dataclasses.replace(WIDE, steps=2)
    runs = [
        harness.offloaded(chosen, policy(tmp_path, state=state, **values)) for values in places
    ]
    for run in runs[1:]:
        assert_same(run, runs[0])


@pytest.mark.parametrize(
    "values",
    [
        {"generations": 2},
        {"durable": True},
        {"update": "backward"},
        {"update": "backward", "params": "cpu", "grad_dtype": torch.float32},
        {"update": "backward", "params": "cpu", "grad_dtype": torch.float16},
        {"update": "backward", "generations": 2},
        {"update": "backward", "generations": 2, "grad_dtype": torch.float16},
        {"update": "delayed", "delayed_warmup": 1},
    ],
    ids=str,
)
def test_update_modes_give_the_bits_of_the_plain_loop(
    values: dict[str, Any], tmp_path: Path
) -> None:
    chosen = dataclasses.replace(
        WIDE,
        accumulation=2,
        steps=3 if "delayed_warmup" in values else 2,
        max_norm=None,
        no_sync=True,
        delayed=values.get("delayed_warmup"),
        grad_dtype=values.get("grad_dtype"),
        dtype=torch.float16 if torch.float16 in values.values() else torch.bfloat16,
    )
    run = harness.offloaded(chosen, policy(tmp_path, **{**MIN, **values}))
    assert_same(run, harness.reference(chosen))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"update": "delayed", "delayed_warmup": 1},
        {"update": "backward"},
        {"update": "backward", "generations": 2},
    ],
    ids=str,
)
def test_spilled_gradients_give_the_same_bits(values: dict[str, Any], tmp_path: Path) -> None:
    deep = functools.partial(models.llama, layers=5)
    chosen = Training(
        deep, steps=3, accumulation=2, max_norm=None, no_sync=True, lr=0.02, optimizer="Muon"
    )
    nowhere: dict[str, Any] = {"params": "nvme", "optim": "nvme", "grads": "nvme"}
    nowhere |= {"resident": {"params": 0.0, "optim": 0.0}, "unit_bytes_max": 4096}
    # Without a first micro-batch update="backward" has no gradients that could spill.
    planned = nowhere if values == {"update": "backward"} else {**nowhere, **values}
    ram = harness.least_to_train(chosen, policy(tmp_path, **planned))
    run = harness.offloaded(chosen, policy(tmp_path, **{**nowhere, "ram": ram, **values}))
    assert run.stats.spilled_bytes > 0
    wanted = dataclasses.replace(chosen, delayed=values.get("delayed_warmup"))
    assert_same(run, harness.reference(wanted))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 80), st.integers(1, 80), st.integers(0, 6), st.integers(0, 2**31))
def test_newton_schulz_is_that_of_torch(rows: int, columns: int, steps: int, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=made).bfloat16()
    ours = orthogonalize(matrix, steps=steps)
    assert ours.shape == matrix.shape
    if product_dtype(matrix.device) is torch.bfloat16:
        wanted = newton_schulz_of_torch(matrix.clone(), (3.4445, -4.7750, 2.0315), steps, 1e-7)
        assert torch.equal(ours, wanted)
    assert flops(rows, columns, steps) == flops(columns, rows, steps)
    if steps > 3:
        # Its constants bring a singular value that is not too small to 0.68 ... 1.13.
        assert torch.linalg.matrix_norm(ours.float(), 2) < 1.3


@pytest.mark.parametrize("kept", [{}, {"generations": 2}, {"durable": True}])
@pytest.mark.parametrize("bias", [False, True])
def test_a_step_reads_and_writes_eight_bytes_of_a_matrix(
    bias: bool, kept: dict[str, Any], tmp_path: Path
) -> None:
    """In `exact`: the momentum (4), hi and lo; and a backward gathers hi again. So says the plan,
    also of a chunk with a bias, in which all moves, and the momentum twice."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512, bias=bias) for _ in range(4)]).bfloat16()
    shape, nothing = shape_of(model), {"params": 0.0, "optim": 0.0}
    inf.offload(model, policy(tmp_path, **MIN, **kept))
    handle = inf.handle(model)
    optimizer = inf.Muon(model.parameters(), lr=0.02)
    moved = []
    for _ in range(4):
        drives = handle.parts.tiers.executor.stats().drives
        moved.append([sum(d.bytes_read for d in drives), sum(d.bytes_written for d in drives)])
        model(torch.randn(2, 512).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        handle.flush()
    handle.close()
    read, written = (after - before for before, after in zip(*moved[-2:], strict=True))
    numel = 4 * 512 * 512
    assert written == 8 * numel if not bias else written > 8 * numel
    assert written <= read <= written + 4 * numel
    # A durable run keeps nothing resident.
    resident = {} if "durable" in kept else {"resident": nothing}
    job = job_of(4, 4, optimizer="muon", **resident, **kept)
    assert predict(shape, describe_machine(gpus=0), job).moved.total.written == written


def test_torchs_two_optimizers_are_two_here(tmp_path: Path) -> None:
    """Matrices in one optimizer, the rest of their units in another, as torch.optim.Muon needs."""
    runs = []
    for together in (True, False):
        model = inf.offload(models.make(models.Small), policy(tmp_path, **MIN))
        matrices = harness.hidden_matrices(model)
        others = [p for p in model.parameters() if all(p is not each for each in matrices)]
        options = {"lr": 0.02, "weight_decay": 0.1}
        made: list[torch.optim.Optimizer] = [
            inf.Muon([*matrices, *others] if together else matrices, **options)
        ]
        if not together:
            made.append(inf.AdamW(others, betas=(0.9, 0.95), **options))
        losses = []
        for batch in models.token_batches(3):
            loss = models.loss_of(model, batch)
            loss.backward()
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        runs.append((losses, harness.values_of(model)))
        inf.handle(model).close()
    assert_same(runs[1], runs[0])


def test_products_are_in_fp32_on_cpus_without_bf16_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrix = torch.randn(24, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    monkeypatch.setattr(newton_schulz, "bf16_instructions", lambda: ("amx_bf16",))
    coarse = orthogonalize(matrix)
    monkeypatch.setattr(newton_schulz, "bf16_instructions", lambda: ())
    assert product_dtype(torch.device("cuda")) is torch.bfloat16
    fine = orthogonalize(matrix)
    # Only the result is rounded to bf16.
    exact = newton_schulz_of_torch_in(torch.float64, matrix)
    assert (fine - exact).norm() < 0.2 * (coarse - exact).norm()


def newton_schulz_of_torch_in(dtype: torch.dtype, matrix: torch.Tensor) -> torch.Tensor:
    with mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor.to(dtype)):
        return newton_schulz_of_torch(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)


def test_a_matrix_that_is_unfrozen_later_is_transformed() -> None:
    model = inf.offload(models.make(models.Small), inf.Policy())
    up = model.blocks[0].up.weight  # type: ignore[union-attr]
    up.requires_grad_(False)
    optimizer = inf.Muon(model.parameters(), lr=0.02)
    for batch in models.token_batches(2):
        models.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        up.requires_grad_(True)
    assert inf.handle(model).optimizer_state(up)["momentum_buffer"].norm() > 0
    inf.handle(model).close()


class Mixed(nn.Module):
    """One parameter of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 16)
        self.positions = nn.Parameter(torch.zeros(1, 4, 16))
        self.experts = nn.Parameter(torch.zeros(2, 16, 16))
        self.experts_bias = nn.Parameter(torch.zeros(2, 16))
        self.conv = nn.Conv1d(16, 16, 3)
        self.linear = nn.Linear(16, 16)
        self.head = nn.Sequential(nn.Linear(16, 8))
        self.score = nn.Linear(16, 8, bias=False)
        self.lm_head = nn.Linear(16, 8, bias=False)
        self.lm_head.weight = self.embed.weight


@pytest.mark.parametrize("chosen", [None, True, False])
def test_which_parameters_are_matrices(chosen: bool | None) -> None:
    model = inf.offload(Mixed(), inf.Policy())
    params = dict(model.named_parameters())
    able = ["embed.weight", "experts", "linear.weight", "head.0.weight", "score.weight"]
    others = [param for name, param in params.items() if name not in able]
    group = {"params": [params[name] for name in able], "matrixwise": chosen}
    optimizer = inf.Muon([group, {"params": others}])
    found = {p.name for p in optimizer.params_with_states if optimizer.updates_matrix(p)}
    hidden = {"experts", "linear.weight", "head.0.weight"}
    assert found == {None: hidden, True: set(able), False: set()}[chosen]
    inf.handle(model).close()


def test_tiles_of_whole_experts_have_whole_matrices_and_others_have_not() -> None:
    sites = [(nn.Identity(), "down_proj")]
    for shape, whole, hidden in (
        ((1, 16, 8), (4, 16, 8), True),
        ((2, 16, 8), (4, 16, 8), True),
        ((4, 8, 8), (4, 16, 8), False),
        ((1, 16, 8), (1, 16, 8), False),
        ((8, 16), (16, 16), False),
        ((16, 16), (16, 16), True),
    ):
        assert is_hidden_matrix(shape, whole, ["block.down_proj"], sites) == hidden, shape


def test_the_step_consumes_the_gradients_of_matrices() -> None:
    model = inf.offload(models.make(models.Small), inf.Policy())
    optimizer = inf.Muon(model.parameters())
    batch = models.token_batches(1)[0]
    models.loss_of(model, batch).backward()
    assert inf.handle(model).stats().matrices_s == 0
    optimizer.step()
    assert inf.handle(model).stats().matrices_s > 0
    up, norm = model.blocks[0].up.weight, model.blocks[0].norm.weight  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="the update took it"):
        up.grad.norm()
    assert norm.grad.norm() > 0
    with pytest.raises(RuntimeError, match=r"call zero_grad\(\)"):
        models.loss_of(model, batch).backward()
    inf.handle(model).close()


@pytest.mark.parametrize(
    ("values", "options", "match"),
    [
        ({}, {"momentum": 1.0}, r"momentum=1\.0"),
        ({}, {"ns_steps": 100}, "ns_steps=100"),
        ({}, {"adjust_lr_fn": "none"}, "adjust_lr_fn='none'"),
        ({}, {"ns_coefficients": (1, 2)}, "ns_coefficients"),
        ({}, {"matrixwise": True}, r"norm.* of shape \(32,\)"),
    ],
)
def test_what_it_does_not_do_is_refused(
    values: dict[str, Any], options: dict[str, Any], match: str, tmp_path: Path
) -> None:
    model = inf.offload(models.make(models.Small), policy(tmp_path, **values))
    group = {"params": list(model.parameters()), **options}
    with pytest.raises(ValueError, match=match):
        inf.Muon([group])
    inf.handle(model).close()


@pytest.mark.parametrize(("op", "more"), [("read", 1), ("write", 1), ("write", 20)])
def test_a_fault_in_either_update_stays(op: str, more: int, tmp_path: Path) -> None:
    def begun(seam: Seam | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = offload(models.make(wide_llama), policy(tmp_path, **MIN), _seam=seam)
        optimizer = inf.Muon(model.parameters())
        models.loss_of(model, models.token_batches(1)[0]).backward()
        return model, optimizer

    model, _ = begun(None)
    drives = inf.handle(model).parts.tiers.executor.stats().drives
    inf.handle(model).close()
    nth = sum(d.reads if op == "read" else d.writes for d in drives) + more
    model, optimizer = begun(Seam(fault=Fault(op=op, nth=nth, persistent=True)))
    with pytest.raises(StateInvalid, match="errno 5"):
        optimizer.step()
        inf.handle(model).flush()
    with pytest.raises(StateInvalid):
        models.loss_of(model, models.token_batches(1)[0])
    with pytest.raises(StateInvalid):
        inf.handle(model).close()


def test_a_momentum_that_is_not_finite_is_an_error() -> None:
    model = inf.offload(models.make(models.Small), inf.Policy())
    optimizer = inf.Muon(model.parameters())
    weight = model.blocks[1].up.weight  # type: ignore[union-attr]
    state = inf.handle(model).optimizer_state(weight)
    state["momentum_buffer"] = torch.full_like(state["momentum_buffer"], torch.inf)
    models.loss_of(model, models.token_batches(1)[0]).backward()
    with pytest.raises(StateInvalid, match=r"blocks\.1\.up\.weight is not finite"):
        optimizer.step()
    with pytest.raises(StateInvalid):
        inf.handle(model).close()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("lr", "fast"), ("momentum", 2), ("ns_steps", "5"), ("matrixwise", True)],
)
def test_a_value_that_is_wrong_changes_nothing(name: str, wrong: Any) -> None:
    model = inf.offload(models.make(models.Small), inf.Policy())
    optimizer = inf.Muon(model.parameters())
    models.loss_of(model, models.token_batches(1)[0]).backward()
    before = harness.states_of(model)
    right = optimizer.param_groups[0][name]
    optimizer.param_groups[0][name] = wrong
    with pytest.raises(ValueError, match=f"{name}={wrong!r}"):
        optimizer.step()
    assert_same(harness.states_of(model), before)
    optimizer.param_groups[0][name] = right
    optimizer.step()
    inf.handle(model).close()


def test_a_simulated_device_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = dataclasses.replace(SMALL, steps=2)
    expected = harness.offloaded(chosen, inf.Policy())
    with simulated(monkeypatch) as device:
        found = harness.offloaded(chosen, policy(tmp_path, **MIN))
        assert device.live() == (0, 0, 0)
    assert_same(found, expected)


def test_a_device_without_room_for_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The free memory is what a GPU might answer; here nothing else depends on it."""
    # [64, 32] in bf16: itself, and two of it and two of [32, 32] as scratch.
    needed = 2 * (3 * 64 * 32 + 2 * 32 * 32)
    others = [(64, 32), (2, 4, 4)]
    assert device_bytes((64, 32), others, itemsize=4, world=1) == needed
    # Three units' gradients are exchanged at once.
    assert device_bytes((3, 64, 32), others, itemsize=4, world=2) == needed + 3 * 4 * (2048 + 32)
    free = needed
    monkeypatch.setattr(Device, "free_bytes", lambda _: free)
    model = inf.offload(models.make(models.Small), inf.Policy())
    optimizer = inf.Muon(model.parameters(), lr=0.02)
    models.loss_of(model, models.token_batches(1)[0]).backward()
    before = harness.states_of(model)
    free = needed - 1
    says = r"blocks\.0\.up\.weight, of shape \(64, 32\), needs 16 KiB on cpu"
    with pytest.raises(MemoryLimitError, match=says) as caught:
        optimizer.step()
    assert (caught.value.needed_bytes, caught.value.left_bytes) == (needed, free)
    assert_same(harness.states_of(model), before)
    optimizer.param_groups[0]["transform_on"] = "cpu"
    optimizer.step()
    after = harness.values_of(model)
    inf.handle(model).close()
    model = inf.offload(models.make(models.Small), inf.Policy())
    with pytest.raises(MemoryLimitError, match=says):
        inf.Muon(model.parameters())
    free = needed
    optimizer = inf.Muon(model.parameters(), lr=0.02)
    models.loss_of(model, models.token_batches(1)[0]).backward()
    optimizer.step()
    assert_same(harness.values_of(model), after)
    inf.handle(model).close()


def test_where_a_matrix_is_transformed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = inf.offload(nn.Sequential(nn.Linear(8, 8, bias=False)), inf.Policy())
    (param,) = (optimizer := inf.Muon(model.parameters())).params_with_states
    monkeypatch.setattr(param.flat, "tensor", torch.empty(0, device="meta"))
    whole = torch.randn(64)
    with pytest.raises(RuntimeError, match="meta"):
        optimizer._transform_matrix(Matrix(param, 0, (8, 8), 0), whole)
    optimizer.param_groups[0]["transform_on"] = "cpu"
    wanted = orthogonalize(whole.view(8, 8).bfloat16())
    optimizer._transform_matrix(Matrix(param, 0, (8, 8), 0), whole)
    assert torch.equal(whole.view(8, 8), wanted.float())
    monkeypatch.undo()
    inf.handle(model).close()


def test_where_the_second_engine_fails_the_first_one_has_taken_the_step() -> None:
    batch = models.token_batches(1)[0]
    values = []
    for engines in (1, 2):
        made = [inf.offload(models.make(models.Small), inf.Policy()) for _ in range(engines)]
        optimizer = inf.Muon([param for model in made for param in model.parameters()])
        for model in made[1:]:
            weight = model.blocks[1].up.weight  # type: ignore[union-attr]
            state = inf.handle(model).optimizer_state(weight)
            state["momentum_buffer"] = torch.full_like(state["momentum_buffer"], torch.inf)
        for model in made:
            models.loss_of(model, batch).backward()
        with contextlib.nullcontext() if engines == 1 else pytest.raises(StateInvalid):
            optimizer.step()
        values.append((harness.values_of(made[0]), harness.states_of(made[0])))
        inf.handle(made[0]).close()
        for model in made[1:]:
            with pytest.raises(StateInvalid):
                inf.handle(model).close()
    assert_same(values[1], values[0])


def test_a_function_of_ones_own(tmp_path: Path) -> None:
    """The sign of a matrix is Lion's direction without its second factor, elementwise."""
    values = []
    for where in ({"params": "cpu", "optim": "cpu"}, MIN):
        model = inf.offload(models.make(models.Small), policy(tmp_path, **where))
        optimizer = inf.Matrixwise(torch.sign, model.parameters(), lr=0.01, weight_decay=0.0)
        before = harness.values_of(model)
        models.loss_of(model, models.token_batches(1)[0]).backward()
        optimizer.step()
        values.append(harness.values_of(model))
        moved = values[-1]["blocks.0.up.weight"].float() - before["blocks.0.up.weight"].float()
        assert (moved.abs() < 0.0125).all()
        assert (moved.abs() > 0.0075).float().mean() > 0.9
        inf.handle(model).close()
    assert_same(values[1], values[0])


@pytest.mark.parametrize(
    ("function", "made"),
    [
        (torch.sum, r"\(torch.bfloat16, \(\)\)"),
        (torch.isnan, r"\(torch.bool, \(64, 32\)\)"),
        (id, r"int"),
    ],
)
@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_a_function_that_returns_no_such_matrix_is_named(
    function: Any, made: str, update: Any
) -> None:
    model = inf.offload(models.make(models.Small), inf.Policy(update=update))
    with pytest.raises(TypeError, match="nestrov"):
        inf.Matrixwise(function, model.parameters(), nestrov=False)  # type: ignore[call-arg]
    optimizer = inf.Matrixwise(function, model.parameters())
    title = f"Matrixwise({function.__name__})"
    assert optimizer.state_dict()["infinity_optimizer"] == title
    loss = models.loss_of(model, models.token_batches(1)[0])
    with pytest.raises(ValueError, match=rf"\({function.__name__}\) made {made} of blocks\.\d\."):
        loss.backward()
        optimizer.step()
    with pytest.raises(StateInvalid):
        inf.handle(model).close()


def test_a_function_may_return_its_argument_transposed() -> None:
    values = []
    for function in (lambda matrix: matrix.T, lambda matrix: matrix.T.clone()):
        torch.manual_seed(0)
        model = inf.offload(nn.Sequential(nn.Linear(8, 8)).bfloat16(), inf.Policy())
        optimizer = inf.Matrixwise(function, model.parameters(), lr=0.1)
        model(torch.randn(4, 8).bfloat16()).float().square().sum().backward()
        optimizer.step()
        values.append(harness.values_of(model))
        inf.handle(model).close()
    assert_same(values[0], values[1])


def test_the_plan_counts_no_scratch_for_embeddings_and_no_traffic_of_second_moments(
    tmp_path: Path,
) -> None:
    block = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
    # Most of its elements have second moments.
    table = nn.Sequential(nn.Embedding(512, 64), nn.Linear(64, 64))
    blocks = nn.ModuleList([block, table])
    model = nn.ModuleDict({"embed": nn.Embedding(512, 64), "blocks": blocks})
    inf.offload(model.bfloat16(), policy(tmp_path, **MIN))
    optimizer = inf.Muon(model.parameters())
    parts = inf.handle(model).parts
    flats = parts.split.flats
    assert optimizer.scratch_bytes(dict.fromkeys(flats, Format.SPLIT)) == 4 * scratch_numel(64, 64)
    idle = {flat.params[0].name: parts.tiers.planner.idle_masks[flat] for flat in flats}
    assert idle.pop("embed.weight") == idle.pop("blocks.1.0.weight") == 0
    assert set(idle.values()) == {0b1000}
    inf.handle(model).close()


def test_saved_and_restored_it_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def begun(place: str) -> tuple[nn.Module, Any]:
        model = inf.offload(models.make(wide_llama), policy(tmp_path / place, **MIN))
        return model, inf.Muon(model.parameters(), lr=0.02)

    def train(model: nn.Module, optimizer: Any, batches: list[Any]) -> None:
        for batch in batches:
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    for place in ("first", "second"):
        (tmp_path / place).mkdir()
    batches = models.token_batches(4)
    model, optimizer = begun("first")
    train(model, optimizer, batches[:2])
    inf.save(model, optimizer, tmp_path / "saved").wait()
    train(model, optimizer, batches[2:])
    wanted = harness.values_of(model), harness.states_of(model)
    inf.handle(model).close()
    model, optimizer = begun("second")
    inf.restore(model, optimizer, tmp_path / "saved")
    train(model, optimizer, batches[2:])
    assert_same((harness.values_of(model), harness.states_of(model)), wanted)
    inf.handle(model).close()


@pytest.mark.parametrize("state", ["exact", "bf16", "compact"])
@pytest.mark.parametrize("values", [{"params": "cpu", "optim": "cpu"}, {**MIN, "generations": 2}])
def test_matrices_keep_their_states_while_vectors_join_their_unit_and_leave(
    state: Any, values: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*[nn.Linear(32, 32) for _ in range(2)]).bfloat16()
    inf.offload(model, policy(tmp_path, units=[""], state=state, **values))
    model.requires_grad_(False)
    model[1].weight.requires_grad_(True)
    optimizer = inf.Muon([layer.weight for layer in model], lr=0.02)
    rows = torch.randn(4, 32).bfloat16()
    for _ in range(2):
        model(rows).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    name = "1.weight"
    before = harness.states_of(model)[name]
    model[1].bias.requires_grad_(True)
    vectors = inf.AdamW([model[1].bias])
    assert_same(harness.states_of(model)[name], before)
    del vectors
    model[1].bias.requires_grad_(False)
    model[0].weight.requires_grad_(True)
    model(rows)
    assert_same(harness.states_of(model)[name], before)
    inf.handle(model).close()


@pytest.mark.parametrize("state", ["exact", "compact"])
@pytest.mark.parametrize("units", [([""], ["0", "1"]), (["0", "1"], [""])], ids=str)
def test_a_checkpoint_is_restored_into_units_with_and_without_vectors(
    units: tuple[list[str], list[str]], state: Any, tmp_path: Path
) -> None:
    def begun(chosen: list[str]) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        layers = [nn.Linear(32, 32, bias=False), nn.LayerNorm(32)]
        chosen_policy = inf.Policy(units=chosen, state=state)
        model = inf.offload(nn.Sequential(*layers).bfloat16(), chosen_policy)
        return model, inf.Muon(model.parameters(), lr=0.02)

    model, optimizer = begun(units[0])
    rows = torch.randn(4, 32).bfloat16()
    for _ in range(2):
        (model(rows).float() ** 4).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    inf.save(model, optimizer, tmp_path / "saved").wait()
    wanted = harness.states_of(model)
    inf.handle(model).close()
    model, optimizer = begun(units[1])
    inf.restore(model, optimizer, tmp_path / "saved")
    assert_same(harness.states_of(model), wanted)
    inf.handle(model).close()


def test_an_interrupt_undoes_the_updates_that_ran_ahead_of_their_step(tmp_path: Path) -> None:
    batches, found = models.token_batches(5), []
    for interrupted in (True, False):
        values = {**MIN, "update": "backward", "generations": 2}
        model = inf.offload(models.make(models.Small), policy(tmp_path, **values))
        optimizer = inf.Muon(model.parameters(), lr=0.02)
        harness.train(model, optimizer, batches[:3])
        transform, count = optimizer.transform, itertools.count(1)

        def stops(matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
            if next(count) == 3:  # noqa: B023
                raise KeyboardInterrupt
            return transform(matrix, group)  # noqa: B023

        if interrupted:
            optimizer.transform = stops  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                models.loss_of(model, batches[3]).backward()
            with pytest.raises(StepUndone, match=r"\(KeyboardInterrupt\)"):
                optimizer.step()
            optimizer.zero_grad()
        harness.train(model, optimizer, batches[3:])
        found.append((harness.values_of(model), harness.states_of(model)))
        inf.handle(model).close()
    assert_same(found[0], found[1])


def durable(place: Path) -> tuple[nn.Module, inf.Muon]:
    model = inf.offload(models.make(models.Small), policy(place, **MIN, durable=True))
    return model, inf.Muon(model.parameters(), lr=0.02)


def steps(model: nn.Module, optimizer: Any, first: int) -> None:
    for batch in models.token_batches(4)[first:]:
        models.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def killed_between_its_updates(place: Path) -> None:
    """Train, and die in the third step, when some matrices are transformed and others not."""
    model, optimizer = durable(place)
    matrices = len(harness.hidden_matrices(model))
    transform, count = optimizer.transform, itertools.count(1)

    def dies(matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        if next(count) == 2 * matrices + 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return transform(matrix, group)

    optimizer.transform = dies  # type: ignore[method-assign]
    steps(model, optimizer, 0)


def test_killed_between_the_two_updates_it_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    process = FORKSERVER.Process(target=killed_between_its_updates, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    model, optimizer = durable(tmp_path)
    found = inf.restore(model, optimizer, [tmp_path / "a", tmp_path / "b"]).step
    assert found in (1, 2)
    steps(model, optimizer, found)
    plain = inf.offload(models.make(models.Small), inf.Policy())
    undisturbed = inf.Muon(plain.parameters(), lr=0.02)
    steps(plain, undisturbed, 0)
    for read in (harness.values_of, harness.states_of):
        assert_same(read(model), read(plain))
    inf.handle(model).close()
    inf.handle(plain).close()


TIERS = {"device": ["device", "cpu", "nvme"], "cpu": ["cpu", "nvme"], "nvme": ["nvme"]}


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_placement_and_mode_has_the_bits_of_the_plain_loop(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    params = data.draw(st.sampled_from(list(TIERS)))
    values = {
        "params": params,
        "optim": data.draw(st.sampled_from(TIERS[params])),
        "ram": data.draw(st.sampled_from(["min", "60MB", "1GB"])),
        "unit_bytes_max": data.draw(st.sampled_from([4096, 1 << 20])),
        "generations": data.draw(st.sampled_from([1, 2])),
        "grad_dtype": data.draw(st.sampled_from([None, torch.float32])),
        "verify": data.draw(st.sampled_from(["full", "off"])),
    }
    chosen = dataclasses.replace(
        SMALL,
        steps=2,
        factory=functools.partial(models.Small, layers=1, hidden=data.draw(st.integers(1, 40))),
        grad_dtype=values["grad_dtype"],
        dtype=data.draw(st.sampled_from([torch.bfloat16, torch.float32])),
        options=(("nesterov", data.draw(st.booleans())),),
    )
    run = harness.offloaded(chosen, policy(tmp_path_factory.mktemp("nvme"), **values))
    assert_same(run, harness.reference(chosen))
