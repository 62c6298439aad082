"""Findings of a review: optimizers that come and go, parameters at the edges, leftovers after close
and after errors."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.engine import offload
from infinity._src.memory.layout import plan_flat
from infinity._src.params.unit import UnitState
from infinity._src.params.unshard import AT_REST
from infinity.aio import Priority, Seam
from infinity.errors import NonFiniteGradient
from tests import models
from tests.harness import one_thread
from tests.reference import ReferenceAdamW

BATCHES = models.token_batches(8)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def nvme(tmp_path: Path, **values: Any) -> inf.Policy:
    return inf.Policy(
        **{"params": "nvme", "optim": "nvme", "nvme": tmp_path, "ram": "min", **values}
    )


def moe() -> nn.Module:
    return models.make(models.ListMoe)


def train(pairs: list[tuple[nn.Module, Any]], first: int, last: int) -> None:
    """The same batches through every model, each with its optimizer."""
    for model, optimizer in pairs:
        for batch in BATCHES[first:last]:
            models.loss_of(model, batch).backward()
            optimizer.step()
            model.zero_grad()


def different(model: nn.Module, plain: nn.Module) -> list[str]:
    state = model.state_dict()
    return [name for name, value in plain.named_parameters() if not torch.equal(state[name], value)]


def test_an_optimizer_built_anew_starts_with_masters_and_moments_of_its_own(tmp_path: Path) -> None:
    model, plain = inf.offload(moe(), nvme(tmp_path)), moe()
    for first in (0, 3):
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        theirs = ReferenceAdamW([{"params": list(plain.parameters())}], lr=1e-2)
        train([(model, optimizer), (plain, theirs)], first, first + 3)
        assert not different(model, plain)
        del optimizer
        gc.collect()
    inf.handle(model).close()


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_group_added_in_mid_training_leaves_the_states_of_the_others_alone(
    tmp_path: Path, share: float
) -> None:
    probe = inf.offload(moe(), nvme(tmp_path))
    optimizer = inf.AdamW(probe.parameters())
    needs = inf.handle(probe).parts.tiers.planner.plan
    inf.handle(probe).close()

    ram = needs.min_bytes + int(share * needs.nvme_bytes)
    model, plain = inf.offload(moe(), nvme(tmp_path, ram=ram)), moe()
    mine, theirs = list(model.parameters()), list(plain.parameters())
    optimizer = inf.AdamW(mine[:9], lr=1e-2)
    reference = ReferenceAdamW([{"params": theirs[:9]}], lr=1e-2)
    train([(model, optimizer), (plain, reference)], 0, 2)
    optimizer.add_param_group({"params": mine[9:]})
    reference.param_groups.append({**reference.param_groups[0], "params": theirs[9:]})
    reference.params += theirs[9:]
    train([(model, optimizer), (plain, reference)], 2, 5)
    assert not different(model, plain)
    inf.handle(model).close()


def test_gradients_that_wait_survive_a_second_optimizer(tmp_path: Path) -> None:
    model = inf.offload(moe(), nvme(tmp_path))
    params = [param for param in model.parameters() if param.requires_grad]
    optimizers = [inf.AdamW(params[:3])]
    models.loss_of(model, BATCHES[0]).backward()
    before = [param.grad.materialize() for param in params if param.grad is not None]  # type: ignore[attr-defined]
    optimizers.append(inf.AdamW(params[3:]))
    after = [param.grad.materialize() for param in params if param.grad is not None]  # type: ignore[attr-defined]
    assert len(before) == len(after) > 3
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    inf.handle(model).close()


def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    model = inf.offload(moe(), nvme(tmp_path))
    params = list(model.parameters())
    optimizer = inf.AdamW(params[:3])
    for group in ({"params": params[3:], "lr": -1.0}, {"params": [nn.Parameter(torch.ones(1))]}):
        with pytest.raises(ValueError, match=r"range|offloaded"):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": params[3:]})
    inf.handle(model).close()


def test_frozen_parameters_in_an_optimizer_cost_no_states_and_thawed_ones_raise(
    tmp_path: Path,
) -> None:
    model = moe()
    model.head.weight.requires_grad_(False)  # type: ignore[union-attr]
    inf.offload(model, nvme(tmp_path))
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    before = model.state_dict()["head.weight"]
    train([(model, optimizer)], 0, 2)
    assert torch.equal(model.state_dict()["head.weight"], before)
    model.head.weight.requires_grad_(True)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"head\.weight has a gradient"):
        train([(model, optimizer)], 2, 3)
    inf.handle(model).close()


def test_a_step_over_two_models_happens_to_both_or_to_none(tmp_path: Path) -> None:
    left, right = inf.offload(moe(), nvme(tmp_path)), inf.offload(moe(), nvme(tmp_path))
    optimizer = inf.AdamW([*left.parameters(), *right.parameters()], lr=0.1)
    for model in (left, right):
        models.loss_of(model, BATCHES[0]).backward()
    before = left.state_dict()
    next(right.parameters()).grad.mul_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(NonFiniteGradient):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in left.state_dict().items())
    assert {entry["step"] for entry in optimizer.state_dict()["state"].values()} == {0}
    for model in (left, right):
        inf.handle(model).close()


def test_a_step_that_is_refused_counts_no_step(tmp_path: Path) -> None:
    model = inf.offload(moe(), nvme(tmp_path))
    optimizer = inf.AdamW(model.parameters())
    models.loss_of(model, BATCHES[0]).backward()
    with (
        inf.handle(model).gather(model.parameters()),
        pytest.raises(RuntimeError, match="in use"),
    ):
        optimizer.step()
    assert {entry["step"] for entry in optimizer.state_dict()["state"].values()} == {0}
    inf.handle(model).close()


def test_a_gradient_kept_past_close_raises_and_its_memory_is_free(tmp_path: Path) -> None:
    model = inf.offload(moe(), nvme(tmp_path))
    optimizer = inf.AdamW(model.parameters())
    models.loss_of(model, BATCHES[0]).backward()
    kept = next(model.parameters()).grad
    inf.handle(model).close()
    with pytest.raises(RuntimeError, match="stale"):
        kept.materialize()  # type: ignore[union-attr]
    assert all(param.grad is None for param in model.parameters())
    assert optimizer.param_groups


def test_close_inside_gather_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    model = inf.offload(moe(), nvme(tmp_path))
    handle = inf.handle(model)
    weight = next(model.parameters())
    with torch.no_grad(), handle.gather(weight):
        weight.fill_(2.0)
        with pytest.raises(RuntimeError, match=r"inside handle\.gather"):
            handle.close()
    assert bool((handle.read(weight.infinity_link.param) == 2.0).all())  # type: ignore[attr-defined]
    handle.close()
    with pytest.raises(ValueError, match="was closed"):
        inf.offload(model, nvme(tmp_path))


def test_a_closed_model_can_be_collected(tmp_path: Path) -> None:
    model = inf.offload(moe(), nvme(tmp_path))
    optimizer = inf.AdamW(model.parameters())
    train([(model, optimizer)], 0, 1)
    inf.handle(model).close()
    alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert alive() is None


class Bytes(nn.Module):
    """Frozen parameters of one byte an element, a number, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.codes = nn.Parameter(torch.arange(5000).to(torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale * self.codes.float().mean() + self.none.sum()


def test_parameters_of_one_byte_of_no_dimension_and_of_no_elements_are_carried(
    tmp_path: Path,
) -> None:
    model = inf.offload(Bytes(), nvme(tmp_path))
    optimizer = inf.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 8)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    assert torch.equal(state["codes"], torch.arange(5000).to(torch.uint8))
    assert state["scale"] != 1.5
    assert state["none"].shape == (0, 5)
    inf.handle(model).close()


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("world", [1, 3])
def test_every_shard_starts_where_direct_io_wants_it(itemsize: int, world: int) -> None:
    for numel in (0, 1, 2049, 400_000):
        assert plan_flat((numel,), itemsize, world).shard_numel * itemsize % 4096 == 0


def test_an_export_replaces_an_earlier_one_of_another_size(tmp_path: Path) -> None:
    model = inf.offload(moe(), nvme(tmp_path))
    out = tmp_path / "out"
    inf.export_safetensors(model, out)
    inf.export_safetensors(model, out, shard_bytes_max=20_000)
    files = {path.name for path in out.glob("*.safetensors")}
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert files == set(weight_map.values())
    inf.export_safetensors(model, out)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    inf.handle(model).close()


def test_a_dtype_that_is_none_is_refused_by_field() -> None:
    for field in ("grad_dtype", "reduce_dtype"):
        with pytest.raises(ValueError, match=field):
            inf.Policy(**{field: "fp32"})


def test_an_interrupt_while_a_unit_is_evicted_is_raised_after_its_reads_have_ended(
    tmp_path: Path,
) -> None:
    policy = inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram="min")
    seam = Seam(read_bytes_per_s=3e3)  # some seconds for the smallest unit
    model = offload(models.llama(layers=2).bfloat16(), policy, _seam=seam)
    unsharder = inf.handle(model).unsharder
    unit = unsharder.units[0]

    def busy_s() -> float:
        return unsharder._executor.stats().drives[0].busy_s

    before = busy_s()
    unsharder._allocate_and_fill(unit, Priority.PREFETCH, AT_REST)
    (ticket,) = unsharder._pending._by_unit[unit].tickets
    while busy_s() == before:  # a read that no drive has begun is given up at once
        assert not ticket.filled
        time.sleep(0.001)
    timer = threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        unsharder._evict(unit)
    timer.join()
    assert ticket.filled
    assert unit.state is UnitState.SHARDED
    inf.handle(model).close()
