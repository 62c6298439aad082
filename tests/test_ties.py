"""Masters half-way between two bf16 values: parameters are rounded as torch rounds them, and with
AdamW masters and moments keep every bit, wherever they go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import infinity as inf
from infinity._src.cli.main import main
from infinity._src.engine.handle import Handle
from tests import harness, models
from tests.harness import Training
from tests.marks import mostly_slow
from tests.reference import held
from tests.test_bitwise import policy

NVME = {"params": "nvme", "optim": "nvme", "ram": "min"}
SHAPE = (4, 8)


def ties() -> torch.Tensor:
    """Masters around 1.0, -3.0 and the smallest: all of them half-way but for the last column."""
    bits = torch.arange(32, dtype=torch.int32).view(SHAPE) << 16
    start = torch.tensor([0x3F7C0000, -0x3FC00000, 0, -0x80000000], dtype=torch.int64)
    bits = bits + start.to(torch.int32)[:, None] + 0x8000
    bits[:, -1] += 0x1234
    return bits.view(torch.float32)


@contextmanager
def weight(place: Path, make: Any = inf.AdamW, **values: Any) -> Iterator[tuple[Any, ...]]:
    """A model of one weight, its optimizer, handle and parameter."""
    net = nn.Linear(8, 4, bias=False).bfloat16()
    model = inf.offload(net, policy(place, **values))
    handle: Handle = inf.handle(model)
    try:
        yield model, make(model.parameters()), handle, next(iter(model.parameters()))
    finally:
        handle.close()


def adamw(params: Any) -> Any:
    """A step of it leaves masters where they are."""
    return inf.AdamW(params, lr=0.0, weight_decay=0.0)


def value_of(handle: Handle, param: Any) -> torch.Tensor:
    with handle.gather(param):
        return param.detach().clone()


def step(model: nn.Module, opt: Any) -> None:
    model(torch.ones(1, 8).bfloat16()).float().sum().backward()
    opt.step()
    opt.zero_grad()


def assert_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(found.float().view(torch.int32), wanted.float().view(torch.int32))


@pytest.mark.parametrize("values", [{}, {**NVME, "generations": 2}], ids=str)
def test_adamw_keeps_masters_half_way_through_steps_writes_and_windows(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """The master is written before any moment exists, and the moments over the signs in them."""
    master = ties()
    with weight(tmp_path, adamw, **values) as (model, opt, handle, param):
        state = handle.optimizer_state(param)
        state["master"] = master
        assert_bits(state["exp_avg_sq"], torch.zeros(SHAPE))
        for _ in range(2):
            assert_bits(value_of(handle, param), master.bfloat16())
            assert_bits(state["master"], master)
            step(model, opt)
        second = state["exp_avg_sq"]
        assert (second > 0).all()
        state["exp_avg_sq"] = second * 3
        state["exp_avg"] = second
        assert_bits(state["master"], master)
        assert_bits(state["exp_avg_sq"], second * 3)
        with handle.gather(param), torch.no_grad():
            param[:2].fill_(0.5)
        master[:2] = 0.5
        assert_bits(state["master"], master)
        assert_bits(state["exp_avg_sq"], second * 3)
        step(model, opt)
        assert_bits(state["master"], master)


def test_a_second_moment_below_zero_keeps_its_sign(tmp_path: Path) -> None:
    """No AdamW makes one, and classes of torch do."""
    master, second = ties(), torch.full(SHAPE, 2.0)
    second[:, ::2] = -2.0
    with weight(tmp_path) as (_, _, handle, param):
        state = handle.optimizer_state(param)
        state["exp_avg_sq"] = second
        state["master"] = master
        assert_bits(state["exp_avg_sq"], second)
        assert_bits(state["master"], held(master, second))
        assert_bits(value_of(handle, param), master.bfloat16())


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda params: inf.SGD(params, lr=0.0), {}),
        (lambda params: inf.SGD(params, lr=0.0, momentum=0.9), NVME),
        (lambda params: inf.Lion(params, lr=0.0), {}),
        (lambda params: inf.Elementwise(torch.optim.Adagrad, params, lr=0.0), {}),
        (adamw, {"state": "bf16"}),
    ],
)
def test_elsewhere_the_parameter_is_right_and_the_master_one_unit_nearer(
    make: Any, values: dict[str, Any], tmp_path: Path
) -> None:
    master = ties()
    with weight(tmp_path, make, **values) as (model, opt, handle, param):
        handle.optimizer_state(param)["master"] = master
        for _ in range(2):
            assert_bits(value_of(handle, param), master.bfloat16())
            assert_bits(handle.optimizer_state(param)["master"], held(master, None))
            step(model, opt)


@pytest.mark.parametrize("lr", [2.0**-8, 3 * 2.0**-8])
def test_one_step_of_sgd_onto_a_tie_rounds_as_torch_does(lr: float, tmp_path: Path) -> None:
    with weight(tmp_path, lambda params: inf.SGD(params, lr=lr)) as (model, opt, handle, param):
        with handle.gather(param), torch.no_grad():
            param.fill_(1.0)
        (-model(torch.eye(8).bfloat16()).float().sum()).backward()
        opt.step()
        assert_bits(value_of(handle, param), torch.full(SHAPE, 1 + lr).bfloat16())


def test_checkpoints_and_exports_have_masters_and_moments_of_their_own(tmp_path: Path) -> None:
    master = ties()
    saved, other, tensors = (tmp_path / name for name in ("saved", "other", "tensors"))
    with weight(tmp_path, adamw) as (model, opt, handle, param):
        handle.optimizer_state(param)["master"] = master
        step(model, opt)
        second = handle.optimizer_state(param)["exp_avg_sq"]
        inf.save(model, opt, saved).wait()
    assert not main(["checkpoint", "reshard", "--world", "2", str(saved), str(other)])
    assert not main(
        ["checkpoint", "export", "--to", "safetensors", "--masters", str(other), str(tensors)]
    )
    (exported,) = safetensors.torch.load_file(next(tensors.glob("*.safetensors"))).values()
    assert_bits(exported, master)
    universal = tmp_path / "universal"
    command = ["checkpoint", "export", "--to", "deepspeed-universal", str(saved), str(universal)]
    assert not main(command)
    for name, wanted in (("fp32", master), ("exp_avg_sq", second)):
        (file,) = universal.rglob(f"{name}.pt")
        assert_bits(torch.load(file)["param"], wanted)
    for state, kept in (("exact", master), ("bf16", held(master, None))):
        with weight(tmp_path, adamw, state=state) as (model, opt, handle, param):
            inf.restore(model, opt, other)
            assert_bits(value_of(handle, param), master.bfloat16())
            assert_bits(handle.optimizer_state(param)["master"], kept)
            if state == "exact":
                assert_bits(handle.optimizer_state(param)["exp_avg_sq"], second)


def test_restoring_parameters_alone_leaves_no_sign_in_the_moments(tmp_path: Path) -> None:
    with weight(tmp_path, adamw) as (model, opt, handle, param):
        value = value_of(handle, param)
        inf.save(model, opt, tmp_path / "saved").wait()
        handle.optimizer_state(param)["master"] = ties()
        step(model, opt)
        second = handle.optimizer_state(param)["exp_avg_sq"]
        inf.restore(model, None, tmp_path / "saved")
        assert_bits(handle.optimizer_state(param)["master"], value)
        assert_bits(handle.optimizer_state(param)["exp_avg_sq"], second)


def values_at(model: nn.Module, _: int) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def gathered_at(model: nn.Module, _: int) -> list[torch.Tensor]:
    with inf.handle(model).gather(list(model.parameters())):
        return values_at(model, 0)


@pytest.mark.parametrize(
    "steps", [8, pytest.param(200, marks=pytest.mark.slow)], ids=lambda steps: f"{steps} steps"
)
@pytest.mark.parametrize("factory", mostly_slow([models.llama, models.mixtral], models.mixtral))
def test_every_step_is_a_plain_loop_with_masters_in_fp32(
    factory: Any, steps: int, tmp_path: Path
) -> None:
    training = Training(factory, steps=steps, accumulation=1, lr=2e-3)
    found = []
    with harness.one_thread():
        plain = training.model()
        model = inf.offload(training.model(), policy(tmp_path, **NVME))
        for each, make in ((plain, training.make_reference), (model, training.make_optimizer)):
            stepper: Any = make(each)
            shown = gathered_at if each is model else values_at
            found.append([])
            for batch in training.batches:
                models.loss_of(each, batch).backward()
                stepper.step()
                stepper.zero_grad()
                found[-1].append(shown(each, 0))
        inf.handle(model).close()
    for at, (theirs, ours) in enumerate(zip(*found, strict=True)):
        assert all(map(torch.equal, ours, theirs)), at
