"""AdamW, SGD, Lion and classes of torch.optim over states at rest: the reference loop's bits in
every exact format, the same bits everywhere in the others."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.engine.handle import offload
from infinity._src.optim.elementwise import STEPS
from infinity.aio import Fault, Seam
from infinity.errors import StateInvalid
from tests import harness, models, test_spill
from tests.harness import Training, assert_same
from tests.marks import alternating, mostly_slow
from tests.test_bitwise import policy, wide_llama

MIN = {"params": "nvme", "optim": "nvme", "ram": "min"}

# name -> (optimizer, its options, learning rate)
ALGORITHMS: dict[str, tuple[str, dict[str, Any], float]] = {
    "SGD": ("SGD", {}, 0.1),
    "SGD momentum": ("SGD", {"momentum": 0.9}, 0.05),
    "SGD dampening": ("SGD", {"momentum": 0.8, "dampening": 0.3}, 0.05),
    "SGD nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}, 0.05),
    "Lion": ("Lion", {"betas": (0.9, 0.98)}, 1e-3),
    "AdamW": ("AdamW", {}, 1e-2),
}
GENERIC: dict[str, tuple[str, dict[str, Any], float]] = {
    "Adagrad": ("Adagrad", {"initial_accumulator_value": 0.1}, 1e-2),
    "RMSprop centered": ("RMSprop", {"centered": True}, 1e-3),
    "Adadelta": ("Adadelta", {}, 1.0),
    "Adamax": ("Adamax", {}, 1e-2),
    "NAdam": ("NAdam", {}, 1e-2),
    "RAdam": ("RAdam", {}, 1e-2),
    "ASGD": ("ASGD", {"t0": 1, "lambd": 1e-3}, 1e-2),
    "Adam": ("Adam", {}, 1e-2),
}


def training(name: str, **values: Any) -> Training:
    optimizer, options, lr = (ALGORITHMS | GENERIC)[name]
    values = {"steps": 4, "accumulation": 1, "lr": lr, "weight_decay": 0.01, **values}
    return Training(
        values.pop("factory", models.Small),
        optimizer=optimizer,
        options=tuple(options.items()),
        **values,
    )


@pytest.mark.parametrize("name", ["SGD", "SGD momentum", "SGD dampening"])
def test_exact_states_are_the_reference_loops_bits(name: str, tmp_path: Path) -> None:
    chosen = training(name)
    result = harness.offloaded(chosen, policy(tmp_path, **MIN))
    assert_same(result, harness.reference(chosen))
    assert result.losses[-1] != result.losses[1]


# -- the generic path ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", alternating(GENERIC))
def test_classes_of_torch_give_the_bits_that_they_give_on_masters_in_memory(
    name: str, tmp_path: Path
) -> None:
    chosen = training(name)
    result = harness.offloaded(chosen, policy(tmp_path, **MIN), seam=Seam(delay_us_max=500, seed=1))
    assert_same(result, harness.reference(chosen))


def test_so_they_do_in_slices(tmp_path: Path) -> None:
    chosen = training("NAdam", steps=2, accumulation=2, factory=wide_llama)
    assert_same(harness.offloaded(chosen, policy(tmp_path, **MIN)), harness.reference(chosen))


@pytest.mark.parametrize("factory", mostly_slow([models.Small, wide_llama], models.Small))
def test_rprop_which_has_no_weight_decay_is_torchs_too(factory: Any, tmp_path: Path) -> None:
    values: dict[str, Any] = {"lr": 1e-3, "etas": (0.4, 1.3), "step_sizes": (1e-5, 0.1)}
    plain, model = models.make(factory), inf.offload(models.make(factory), policy(tmp_path, **MIN))
    theirs = harness.ReferenceTorch(
        [{"params": list(plain.parameters())}],
        torch_class=torch.optim.Rprop,
        settings=values,
        lr=1e-3,
        weight_decay=0.0,
    )
    ours = inf.Elementwise(torch.optim.Rprop, model.parameters(), **values)
    with harness.one_thread():
        assert harness.train(model, ours, 5) == harness.train(plain, theirs, 5)
    state, weight = (
        inf.handle(model).optimizer_state(next(model.parameters())),
        next(plain.parameters()),
    )
    inner = theirs.states[weight].inner
    assert inner is not None
    for name in ("prev", "step_size"):
        assert torch.equal(state[name], inner.state[theirs.states[weight].master][name])
    assert_same(model, plain)
    inf.handle(model).close()


def test_three_states_for_each_element_rest_in_memory_and_on_nvme(tmp_path: Path) -> None:
    chosen = Training(models.Small, steps=3, optimizer="Adam", options=(("amsgrad", True),))
    result = harness.offloaded(chosen, policy(tmp_path, params="nvme", optim="cpu", ram="min"))
    assert_same(result, harness.reference(chosen))
    wide = dataclasses.replace(chosen, factory=wide_llama)
    # Its chunks with three moments are larger than the pool was made for: the pool grows.
    result = harness.offloaded(wide, policy(tmp_path, **MIN))
    assert_same(result, harness.reference(wide))


def test_gradients_that_spilled_reach_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # else no small budget would spill
    monkeypatch.setattr(inf.Elementwise, "scratch_bytes", lambda self, formats: 0)
    chosen = training("Adagrad", factory=test_spill.deep, steps=3)
    result = test_spill.run(chosen, tmp_path)
    assert_same(result, harness.reference(chosen))
    assert result.stats.spilled_bytes > 0


class Normalised(torch.optim.SGD):
    """Looks at the whole gradient: divides it by its norm, from a step on."""

    since = 1

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                if state["step"] >= self.since:
                    param.grad = param.grad / param.grad.norm()
        return super().step(closure)


class NormalisedSoon(Normalised):
    """The same from the last trial step of a class on."""

    since = STEPS


class LargestMoves(torch.optim.SGD):
    """Looks at the whole gradient, but changes only where it is largest."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = torch.where(
                    param.grad.abs() == param.grad.abs().max(), param.grad, 0.0
                )
        return super().step(closure)


class Centralised(torch.optim.SGD):
    """Looks at the rows of a matrix: takes the mean from each; vectors stay."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.ndim > 1:
                    param.grad = param.grad - param.grad.mean(dim=-1, keepdim=True)
        return super().step(closure)


@pytest.mark.parametrize(
    ("torch_class", "reason"),
    [
        (torch.optim.LBFGS, "closure"),
        (torch.optim.Adafactor, "uses other elements"),
        (torch.optim.SparseAdam, "dense"),
        (getattr(torch.optim, "Muon", torch.optim.LBFGS), "2D|closure"),
        (Normalised, "uses other elements"),
        (NormalisedSoon, "uses other elements"),
        (LargestMoves, "uses other elements"),
        (Centralised, "or the shape"),
        (nn.Linear, "no torch.optim.Optimizer"),
    ],
)
def test_a_class_that_looks_further_than_an_element_is_refused_with_the_reason(
    torch_class: Any, reason: str
) -> None:
    model = inf.offload(models.make(models.Small))
    with pytest.raises(ValueError, match=reason):
        inf.Elementwise(torch_class, model.parameters(), lr=1e-3)
    inf.AdamW(model.parameters())  # nothing is held
    inf.handle(model).close()


@pytest.mark.parametrize(
    "values", [{"state": "compact"}, {"update": "backward"}, {"update": "delayed"}], ids=str
)
def test_what_the_generic_path_does_not_do_is_refused(values: dict[str, Any]) -> None:
    model = inf.offload(models.make(models.Small), inf.Policy(**values))
    with pytest.raises(ValueError, match=next(iter(values))):
        inf.Elementwise(torch.optim.Adagrad, model.parameters())
    inf.handle(model).close()


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_fault_in_a_generic_step_is_raised_by_it_and_stays(op: str, tmp_path: Path) -> None:
    def begun(seam: Seam | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = offload(
            models.make(models.Small), policy(tmp_path, **MIN, nvme=tmp_path), _seam=seam
        )
        optimizer = inf.Elementwise(torch.optim.Adagrad, model.parameters())
        models.loss_of(model, models.token_batches(1)[0]).backward()
        return model, optimizer

    model, _ = begun(None)
    drive = inf.handle(model).parts.tiers.executor.stats().drives[0]
    inf.handle(model).close()
    nth = (drive.reads if op == "read" else drive.writes) + 2
    model, optimizer = begun(Seam(fault=Fault(op=op, nth=nth, persistent=True)))
    with pytest.raises(StateInvalid, match="errno 5"):
        optimizer.step()
    with pytest.raises(StateInvalid):
        models.loss_of(model, models.token_batches(1)[0])
    with pytest.raises(StateInvalid):
        inf.handle(model).close()


# -- holding, groups, manifests --------------------------------------------------------------------


def test_different_optimizers_hold_different_parameters_of_a_model(tmp_path: Path) -> None:
    def halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        of_layers = [param for name, param in model.named_parameters() if "blocks." in name]
        return of_layers, [
            param for name, param in model.named_parameters() if "blocks." not in name
        ]

    model = inf.offload(models.make(models.Small), policy(tmp_path, **MIN))
    first, second = halves(model)
    with pytest.raises(ValueError, match=r"another optimizer|different numbers of moments"):
        inf.SGD(first[:3], momentum=0.9), inf.AdamW(first[2:])
    optimizers = [inf.Lion(first, lr=1e-3), inf.AdamW(second, lr=1e-2)]
    with pytest.raises(ValueError, match="another optimizer"):
        inf.SGD(first[:1])
    plain = models.make(models.Small)
    theirs = [
        harness.ReferenceLion(
            [{"params": halves(plain)[0]}], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0
        ),
        harness.ReferenceAdamW([{"params": halves(plain)[1]}], lr=1e-2, weight_decay=0.01),
    ]
    with harness.one_thread():
        for batch in models.token_batches(3):
            for each, steppers in ((model, optimizers), (plain, theirs)):
                models.loss_of(each, batch).backward()
                for stepper in steppers:
                    stepper.step()
                    stepper.zero_grad()
    assert_same(model, plain)
    inf.handle(model).close()


def test_optimizers_with_as_many_moments_share_a_unit_and_others_do_not(tmp_path: Path) -> None:
    model = inf.offload(models.make(models.Small), policy(tmp_path, **MIN))
    layer = [param for name, param in model.named_parameters() if "blocks.0." in name]
    with pytest.raises(ValueError, match=r"different numbers of moments.*Policy\(units"):
        inf.SGD([{"params": layer[:2], "momentum": 0.9}, {"params": layer[2:]}])
    lion = inf.Lion(layer[:2])
    with pytest.raises(ValueError, match="different numbers of moments"):
        inf.AdamW(layer[2:])
    sgd = inf.SGD(layer[2:], momentum=0.9)
    models.loss_of(model, models.token_batches(1)[0]).backward()
    lion.step()
    sgd.step()
    del lion, sgd
    inf.AdamW(layer)  # those are gone, and their format with them
    inf.handle(model).close()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda params: inf.SGD(params, lr=-1), "lr=-1"),
        (lambda params: inf.SGD(params, momentum=-0.1), r"momentum=-0\.1"),
        (lambda params: inf.SGD(params, nesterov=True), "Nesterov"),
        (lambda params: inf.Lion(params, betas=(1.0, 0.9)), r"betas=\(1\.0"),
        (lambda params: inf.Lion(params, weight_decay=-1), "weight_decay=-1"),
        (lambda params: inf.AdamW(params, eps=-1), "eps=-1"),
        (
            lambda params: inf.Elementwise(torch.optim.Adagrad, params, lr=-1),
            "[Ii]nvalid learning rate: -1",
        ),
    ],
)
def test_values_out_of_range_name_value_and_range(make: Any, match: str) -> None:
    model = inf.offload(models.make(models.Small))
    with pytest.raises(ValueError, match=match):
        make(model.parameters())
    inf.handle(model).close()


def test_momentum_cannot_begin_or_end_later() -> None:
    model = inf.offload(models.make(models.Small))
    optimizer = inf.SGD(model.parameters(), momentum=0.9)
    optimizer.param_groups[0]["momentum"] = 0.5
    batch = models.token_batches(1)[0]
    models.loss_of(model, batch).backward()
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.0
    with pytest.raises(ValueError, match=r"momentum=0\.0"):
        optimizer.step()
    inf.handle(model).close()


@pytest.mark.parametrize("name", ["SGD momentum", "Lion", "NAdam"])
def test_manifests_schedulers_groups_and_copies(name: str) -> None:
    chosen = training(name)
    model = inf.offload(chosen.model())
    params = list(model.parameters())
    optimizer, lr = chosen.make_optimizer(model), chosen.lr
    held = optimizer.param_groups[0]["params"]
    assert [id(param) for param in held] == [id(param) for param in params]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for batch in models.token_batches(2):
        models.loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(lr / 4)
    manifest = json.loads(json.dumps(optimizer.state_dict()))
    manifest["state"] = {int(index): entry for index, entry in manifest["state"].items()}
    assert {entry["step"] for entry in manifest["state"].values()} == {2}
    if "betas" in optimizer.param_groups[0]:
        manifest["param_groups"][0]["betas"] = tuple(manifest["param_groups"][0]["betas"])
    optimizer.param_groups[0]["lr"] = 7.0
    optimizer.load_state_dict(manifest)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(lr / 4)
    with pytest.raises(ValueError, match="manifest of infinity"):
        optimizer.load_state_dict({**manifest, "infinity_optimizer": "Other"})
    with pytest.raises(ValueError, match=r"no manifest of infinity.*optimizer_state"):
        optimizer.load_state_dict(torch.optim.SGD([nn.Parameter(torch.zeros(2))]).state_dict())
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(optimizer)
    inf.handle(model).close()


def test_a_group_that_is_added_later_gets_its_states_then() -> None:
    model = inf.offload(models.make(models.Small))
    params = list(model.parameters())
    optimizer = inf.Lion(params[:1], lr=1e-3)
    optimizer.add_param_group({"params": params[1:], "lr": 1e-4})
    assert set(inf.handle(model).optimizer_state(params[5])) == {"master", "exp_avg", "step"}
    models.loss_of(model, models.token_batches(1)[0]).backward()
    optimizer.step()
    assert inf.handle(model).optimizer_state(params[5])["step"] == 1
    inf.handle(model).close()
