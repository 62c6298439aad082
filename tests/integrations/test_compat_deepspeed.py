"""infinity.compat.deepspeed: the engine's losses and values against the native loop, accumulation,
clipping, optimizers, and what is refused."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import infinity as inf
from infinity.compat import deepspeed
from infinity.compat.deepspeed import DeepSpeedRefusal, ops
from infinity.compat.deepspeed.zero.access import safe_get_full_grad
from tests import models
from tests.data.deepspeed import make
from tests.integrations.deepspeed_runs import (
    ROWS,
    WIDTH,
    alone,
    assert_same,
    batches,
    built,
    config,
    native,
    net,
    train,
    values_of,
)
from tests.integrations.test_peft import adapted


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # What init_distributed sets goes with the test.
    monkeypatch.setenv("LOCAL_RANK", "0")
    with alone():
        yield


# -- the same bits as the native loop --------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "on_nvme", "dtype", "clip"),
    [
        (3, True, torch.float32, 0.3),
        (3, True, torch.bfloat16, 0.0),
        (3, False, torch.bfloat16, 0.3),
        (2, False, torch.float32, 0.0),
        (1, False, torch.bfloat16, 0.3),
    ],
)
def test_losses_and_values_are_those_of_the_native_loop(
    stage: int, on_nvme: bool, dtype: torch.dtype, clip: float, tmp_path: Path
) -> None:
    settings = config(
        stage,
        tmp_path if on_nvme else None,
        gradient_accumulation_steps=3,
        gradient_clipping=clip,
        bf16={"enabled": dtype is torch.bfloat16},
    )
    data = batches(12, dtype)
    plain = native(settings, data, dtype=dtype, steps=3, clip=clip)
    engine = built(net(), settings)
    assert train(engine, data) == plain.losses
    assert_same(values_of(engine.module), plain.values)
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (4, 12, 0)
    assert engine.global_samples == 4 * 3 * ROWS
    engine.destroy()


def test_adapters_of_experts_have_the_bits_of_the_loop(tmp_path: Path) -> None:
    plain: Any = adapted("experts")
    engine = built(
        copy.deepcopy(plain),
        config(place=tmp_path, optimizer={"type": "SGD", "params": {"lr": 0.125}})
        | {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True},
    )
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.125)
    for batch in models.token_batches(2):
        loss, expected = engine(**batch).loss, plain(**batch).loss
        assert torch.equal(loss, expected)
        engine.backward(loss)
        engine.step()
        expected.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)  # what DeepSpeed does unasked
        optimizer.step()
        optimizer.zero_grad()
    assert_same(values_of(engine.module), dict(plain.state_dict()))
    engine.destroy()


def test_stage_0_has_the_numbers_of_stage_1() -> None:
    data = batches(4)
    losses = []
    for stage in (0, 1):
        engine = built(net(), config(stage, gradient_clipping=0.2))
        losses.append(train(engine, data))
        assert engine.zero_optimization_stage() == stage
        engine.destroy()
    assert losses[0] == losses[1]


def test_a_forward_under_autocast() -> None:
    settings = config(torch_autocast={"enabled": True, "dtype": "bfloat16"})
    engine = built(net(), settings)
    seen = []
    engine.module.layers[1].register_forward_hook(lambda _module, _args, out: seen.append(out))
    loss = engine(*batches(1)[0])
    assert seen[0].dtype is torch.bfloat16
    engine.backward(loss)
    engine.step()
    assert all(param.dtype is torch.float32 for param in engine.module.parameters())
    engine.destroy()


def test_autocast_of_the_script_does_not_reach_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data, bf16 = batches(2), {"enabled": True, "dtype": "bfloat16"}
    for settings in (config(), config(torch_autocast=bf16)):
        losses = []
        for around in (False, True):
            engine = built(net(), settings)
            with torch.autocast("cpu", torch.float16, enabled=around):
                losses.append([engine(*each).item() for each in data])
                assert torch.is_autocast_enabled("cpu") is around
            engine.destroy()
        assert losses[0] == losses[1]
    assert caplog.text.count("torch.autocast around the engine has no effect") == 1


# -- backward, accumulation ------------------------------------------------------------------------


def test_backward_returns_the_loss_of_a_micro_batch() -> None:
    engine = built(net(), config(gradient_accumulation_steps=4))
    loss = engine(*batches(1)[0])
    assert engine.backward(loss).item() == (loss / 4).item()
    loss = engine(*batches(1)[0])
    assert engine.backward(loss, scale_wrt_gas=False) is loss
    engine.destroy()


def test_a_backward_of_the_script_itself_has_the_same_gradients() -> None:
    data = batches(4)
    settings = config(gradient_accumulation_steps=2)
    engine = built(net(), settings)
    losses = train(engine, data)
    values = values_of(engine.module)
    engine.destroy()
    engine = built(net(), settings)
    by_hand = []
    for x, y in data:
        loss = engine(x, y)
        loss.backward()
        engine.step()
        by_hand.append(loss.item())
    assert by_hand == losses
    assert_same(values_of(engine.module), values)
    engine.destroy()


def test_outputs_in_containers_take_their_part_of_a_gradient() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            out = self.linear(x)
            return {"out": (out, [out * 2]), "name": "pairs"}

    def grad(backward: Any) -> torch.Tensor:
        torch.manual_seed(0)
        engine = built(Pairs(), config(gradient_accumulation_steps=2))
        outputs = engine(batches(1)[0][0])["out"]
        backward(engine, outputs[0].sum() + outputs[1][0].sum())
        found = inf.handle(engine.module).full_grad(engine.module.linear.weight)
        engine.destroy()
        assert found is not None
        return found

    whole = grad(lambda engine, loss: engine.backward(loss, scale_wrt_gas=False))
    assert torch.equal(grad(lambda engine, loss: loss.backward()), whole / 2)
    assert torch.equal(grad(lambda engine, loss: engine.backward(loss)), whole / 2)


def test_the_boundary_is_the_scripts_when_it_sets_it() -> None:
    engine = built(net(), config(gradient_accumulation_steps=2))
    assert not engine.is_gradient_accumulation_boundary()
    engine.set_gradient_accumulation_boundary(True)
    train(engine, batches(3))
    assert engine.global_steps == 3
    engine.set_gradient_accumulation_boundary(False)
    train(engine, batches(2))
    assert (engine.global_steps, engine.micro_steps) == (3, 5)
    assert not engine.was_step_applied()
    engine.destroy()


def test_each_step_is_one_without_managed_accumulation() -> None:
    engine = built(net(), config(managed_gradient_accumulation=False))
    for x, y in batches(3):
        engine.backward(engine(x, y))
    engine.step()
    assert (engine.global_steps, engine.global_samples) == (1, 3 * ROWS)
    assert engine.was_step_applied()
    with pytest.raises(DeepSpeedRefusal, match="step\\(\\) is the boundary"):
        engine.set_gradient_accumulation_boundary(True)
    with (
        pytest.raises(AssertionError, match="coalesce_grad_reduction with managed_gradient"),
        engine.coalesce_grad_reduction(),
    ):
        pass
    engine.destroy()


def test_batch_sizes_and_their_change() -> None:
    engine = built(net(), config(gradient_accumulation_steps=2))
    assert engine.get_batch_info() == (2 * ROWS, ROWS, 2)
    engine.set_train_batch_size(5 * ROWS)
    assert engine.gradient_accumulation_steps() == 5
    with pytest.raises(ValueError, match=f"train_batch_size={ROWS + 1}"):
        engine.set_train_batch_size(ROWS + 1)
    engine.destroy()


def test_no_sync_is_for_stages_that_do_not_split_gradients() -> None:
    engine = built(net(), config(2))
    with pytest.raises(AssertionError, match="ZeRO stage 2"), engine.no_sync():
        pass
    engine.destroy()
    engine = built(net(), config(1))
    with engine.no_sync():
        engine.backward(engine(*batches(1)[0]))
        with pytest.raises(AssertionError, match="illegal to call"):
            engine.step()
        with pytest.raises(AssertionError, match="reentry"), engine.no_sync():
            pass
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()


def test_the_norm_is_that_before_clipping() -> None:
    engine = built(net(), config(gradient_clipping=1e-3))
    assert engine.get_global_grad_norm() is None
    (x, y), model = batches(1)[0], net()
    model(x, y).backward()
    wanted = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
    train(engine, [(x, y)])
    assert engine.get_global_grad_norm() == pytest.approx(wanted.item(), rel=1e-6)
    engine.destroy()


# -- optimizers and schedules ----------------------------------------------------------------------


def test_an_optimizer_of_torch_becomes_the_engines_with_its_groups() -> None:
    data, settings = batches(4), config()
    del settings["optimizer"]

    def groups(model: Any) -> list[dict[str, Any]]:
        params = list(model.parameters())
        return [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.ndim < 2], "lr": 1e-3, "name": "vectors"},
        ]

    model = net()
    client = torch.optim.AdamW(groups(model), lr=1e-2, weight_decay=0.0)
    schedule = LambdaLR(client, lambda step: 1 / (step + 1))
    engine, optimizer, _, returned = deepspeed.initialize(
        model=model, config=settings, optimizer=client, lr_scheduler=schedule
    )
    assert isinstance(optimizer.optimizer, inf.AdamW)
    assert returned is schedule
    # One list of groups: a script that changes a rate in its own changes the engine's.
    assert client.param_groups == optimizer.param_groups
    assert optimizer.param_groups[1]["name"] == "vectors"
    train(engine, data)
    assert engine.get_lr() == pytest.approx([1e-2 / 5, 1e-3 / 5])
    engine.destroy()


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda params: torch.optim.AdamW(params, lr=1e-3), "AdamW"),
        (lambda params: torch.optim.Adam(params, lr=1e-3), "AdamW"),
        (lambda params: torch.optim.Adam(params, weight_decay=0.1), "Elementwise(Adam)"),
        (lambda params: torch.optim.AdamW(params, amsgrad=True), "Elementwise(AdamW)"),
        (lambda params: torch.optim.Adagrad(params), "Elementwise(Adagrad)"),
        (lambda params: ops.FusedAdam(params, weight_decay=0.1), "AdamW"),
        (lambda params: ops.DeepSpeedCPUAdam(params), "AdamW"),
        (
            lambda params: ops.DeepSpeedCPUAdam(params, weight_decay=0.1, adamw_mode=False),
            "Elementwise(Adam)",
        ),
        (lambda params: ops.DeepSpeedCPUAdagrad(params), "Elementwise(Adagrad)"),
        (lambda params: ops.FusedLion(params), "Lion"),
    ],
)
def test_each_class_has_its_twin(make: Any, kind: str) -> None:
    settings = config(2)
    del settings["optimizer"]
    model, plain = net(), net()
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, config=settings, optimizer=make(model.parameters())
    )
    assert optimizer.optimizer.title == kind
    # And its rule: two steps give the values that torch gives.
    alone_ = make(plain.parameters())
    data = batches(2)
    train(engine, data)
    for x, y in data:
        plain(x, y).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), engine.gradient_clipping() or 1e9)
        alone_.step()
        alone_.zero_grad()
    for name, value in values_of(engine.module).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=2e-5, atol=2e-6)
    engine.destroy()


def test_a_function_makes_optimizer_and_schedule() -> None:
    settings = config()
    given = []

    def make(params: Any) -> torch.optim.Optimizer:
        given.append(len(params))
        return torch.optim.AdamW(params, lr=0.5)

    model = net()
    engine, optimizer, _, schedule = deepspeed.initialize(
        model=model,
        model_parameters=list(model.layers[1].parameters()),
        optimizer=make,
        lr_scheduler=lambda made: LambdaLR(made, lambda step: 0.5**step),
        config_params=settings,
    )
    assert given == [2]
    # It overrides the configuration's.
    assert engine.get_lr() == [0.5]
    before = values_of(engine.module)
    train(engine, batches(1))
    assert engine.get_lr() == [0.25]
    assert isinstance(schedule, LambdaLR)
    changed = {name for name, value in values_of(engine.module).items()
               if not torch.equal(value, before[name])}  # fmt: skip
    assert changed == {"layers.1.weight", "layers.1.bias"}
    assert optimizer is engine.optimizer
    engine.destroy()


def test_groups_of_model_parameters_for_the_configurations_optimizer() -> None:
    model = net()
    groups = [
        {"params": model.layers[0].parameters(), "lr": 0.5},
        {"params": model.layers[1].parameters()},
        {"params": []},
    ]
    engine = built(model, config(), model_parameters=groups)
    assert engine.get_lr() == [0.5, 1e-2]
    assert engine.get_mom() == [(0.9, 0.999)] * 2
    engine.destroy()


def test_muon_splits_groups_by_names_and_shapes() -> None:
    chosen = {"type": "Muon", "params": {"lr": 0.1, "adam_lr": 0.5, "ns_method": "standard"}}
    model, plain = net(), net()
    parts = [list(model.layers[0].parameters()), list(model.layers[1].parameters())]
    engine = built(
        model,
        config(optimizer=chosen, gradient_clipping=0),
        model_parameters=[{"params": parts[0], "momentum": 0.5}, {"params": parts[1], "lr": 0.2}],
    )
    assert isinstance(engine.basic_optimizer, inf.Muon)
    groups = engine.optimizer.param_groups
    for group in groups:
        assert {param.ndim > 1 for param in group["params"]} == {group["matrixwise"]}
    assert [group["name"] for group in groups][:2] == ["group0-muon-params", "group0-adam-params"]
    assert engine.get_lr() == [0.1, 0.5, 0.2, 0.2]
    assert [group["momentum"] for group in groups[::2]] == [0.5, 0.95]
    train(engine, batches(1))
    (x, y), = batches(1)
    plain(x, y).backward()
    matrix = plain.layers[1].weight
    torch.optim.Muon([matrix], lr=0.2, weight_decay=0.0).step()
    torch.testing.assert_close(
        values_of(engine.module)["layers.1.weight"], matrix.detach(), atol=1e-5, rtol=1e-5
    )
    engine.destroy()


def test_a_run_of_deepspeeds_muon_goes_on_with_its_configuration(tmp_path: Path) -> None:
    chosen = {"type": "Muon", "params": {"lr": 0.1, "momentum": 0.5, "ns_method": "standard"}}
    settings = {**config(2, optimizer=chosen, gradient_clipping=0), "bf16": {"enabled": True}}
    model = make.Net().bfloat16()
    engine = built(model, settings, model_parameters=make.groups_of(model))
    optimizer = engine.basic_optimizer
    run = inf.load_deepspeed(engine.module, make.unpack("muon_zero2", tmp_path), opt=optimizer)
    assert (run, run.notes) == (((), ()), ())
    assert engine.optimizer.param_groups[0]["momentum"] == 0.9
    assert [group["adam_eps"] for group in engine.optimizer.param_groups[1:]] == [1e-7, 1e-7]
    engine.destroy()


@pytest.mark.parametrize("decay", [0.5, 0.0])
def test_adam_of_the_configuration_with_the_decay_of_a_group(decay: float) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        matrices = [param for param in model.parameters() if param.dim() > 1]
        others = [param for param in model.parameters() if param.dim() == 1]
        return [{"params": matrices, "weight_decay": decay}, {"params": others}]

    adam = {"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False}}
    model, plain = net(), net()
    engine = built(
        model, config(optimizer=adam, gradient_clipping=0.0), model_parameters=groups(model)
    )
    assert isinstance(engine.basic_optimizer, inf.Elementwise if decay else inf.AdamW)
    reference = torch.optim.Adam(groups(plain), lr=1e-2)
    train(engine, batches(3))
    for x, y in batches(3):
        plain(x, y).backward()
        reference.step()
        reference.zero_grad()
    for name, found in values_of(engine.module).items():
        torch.testing.assert_close(found, plain.state_dict()[name], atol=1e-5, rtol=1e-5)
    engine.destroy()


@pytest.mark.parametrize(
    ("kind", "arguments", "key"),
    [
        ("StepLR", {"step_size": "auto"}, "step_size"),
        ("ExponentialLR", {"gamma": "auto"}, "gamma"),
    ],
)
def test_an_open_auto_of_a_schedule_of_torch_is_refused(
    kind: str, arguments: dict[str, Any], key: str
) -> None:
    model = net()
    settings = config(scheduler={"type": kind, "params": arguments})
    with pytest.raises(DeepSpeedRefusal, match=rf'scheduler\.params\.{key}="auto" of {kind}'):
        built(model, settings)
    assert inf.offloaded_modules(model) == []


def test_a_schedule_that_the_scripts_own_replaces_is_not_tried() -> None:
    auto = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    engine = built(
        net(),
        config(scheduler=auto),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )
    train(engine, batches(1))
    assert engine.get_lr() == [5e-3]
    engine.destroy()


def test_a_model_without_an_optimizer_computes_only() -> None:
    settings = config()
    del settings["optimizer"]
    engine, optimizer, loader, schedule = deepspeed.initialize(model=net(), config=settings)
    assert (optimizer, loader, schedule) == (None, None, None)
    (x, y), plain = batches(1)[0], net()
    assert engine(x, y).item() == plain(x, y).item()
    with pytest.raises(AssertionError, match="must provide optimizer"):
        engine.backward(engine(x, y))
    engine.destroy()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_that_has_computed_gets_its_optimizer_later(stage: int, tmp_path: Path) -> None:
    """As TRL does, which takes a reference's logits from the model before it trains it."""
    settings = config(stage, tmp_path if stage == 3 else None)
    without = {key: value for key, value in settings.items() if key != "optimizer"}
    model = net()
    model.layers[2].requires_grad_(False)
    first = built(model, without)
    with torch.no_grad():
        first(*batches(1)[0])
    assert [name for name, param in model.named_parameters() if not param.requires_grad] == [
        "layers.2.weight", "layers.2.bias",
    ]  # fmt: skip
    losses = train(built(model, settings), batches(4))
    first.destroy()
    plain = net()
    plain.layers[2].requires_grad_(False)
    engine = built(plain, settings)
    assert train(engine, batches(4)) == losses
    with pytest.raises(DeepSpeedRefusal, match="trains in another engine"):
        built(plain, settings)
    # The engine is as it was.
    train(engine, batches(1))
    engine.destroy()


@pytest.mark.parametrize("of_config", [True, False])
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"weight_decay": 0.3, "betas": (0.5, 0.9)}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_a_group_that_is_added_later_has_the_numbers_of_torchs(
    kind: Any, given: dict[str, Any], of_config: bool
) -> None:
    model, plain = net(), net()
    first, (*theirs, their_last) = list(model.parameters())[:-1], plain.parameters()
    arguments = {"lr": 1e-2, **given}
    if of_config:
        mode = {"adam_w_mode": False} if kind is torch.optim.Adam else {}
        named = {"type": kind.__name__, "params": {**arguments, **mode}}
        settings = config(optimizer=named, gradient_clipping=0.0)
        engine = built(model, settings, model_parameters=first)
    else:
        settings = config(gradient_clipping=0.0, zero_allow_untested_optimizer=True)
        engine = built(model, settings, optimizer=kind(first, **arguments))
    reference = kind(theirs, **arguments)
    added = list(engine.module.parameters())[-1]
    own = {"weight_decay": 0.5} if given.get("weight_decay") else {}
    assert engine.optimizer is not None
    # With separate settings, and with those of the optimizer.
    engine.optimizer.add_param_group({"params": [added], **own})
    reference.add_param_group({"params": [their_last], **own})
    assert engine.get_lr() == [1e-2, 1e-2]
    train(engine, batches(3))
    for x, y in batches(3):
        plain(x, y).backward()
        reference.step()
        reference.zero_grad()
    for name, found in values_of(engine.module).items():
        torch.testing.assert_close(found, plain.state_dict()[name], atol=1e-5, rtol=1e-5)
    engine.destroy()


def test_a_decay_that_comes_later_is_refused_where_adamw_stands_for_adam() -> None:
    optimizer = {"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False}}
    engine = built(net(), config(2, optimizer=optimizer))
    assert engine.optimizer is not None
    train(engine, batches(1))
    engine.optimizer.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(DeepSpeedRefusal, match="Adam adds a decay to the gradient"):
        train(engine, batches(1))
    engine.destroy()


def test_unused_parameters_raise_where_the_configuration_asks_for_it() -> None:
    settings = config(2)
    settings["zero_optimization"]["ignore_unused_parameters"] = False
    model = net()
    model.spare = torch.nn.Linear(2, 2)
    engine = built(model, settings)
    with pytest.raises(AssertionError, match=r"spare\.weight.*ignore_unused_parameters"):
        train(engine, batches(1))
    engine.destroy()
    engine = built(net(), settings)
    train(engine, batches(1))
    engine.destroy()


def test_nvme_without_a_path_names_the_key() -> None:
    settings = config(3)
    settings["zero_optimization"]["offload_param"] = {"device": "nvme"}
    with pytest.raises(DeepSpeedRefusal, match=r'offload_param.device="nvme" without nvme_path'):
        built(net(), settings)


def test_a_backward_that_raised_leaves_no_trace_on_the_next() -> None:
    engine = built(net(), config(2, gradient_accumulation_steps=2))
    (x, y), broken = batches(1)[0], True

    def raises(grad: torch.Tensor) -> None:
        if broken:
            raise ZeroDivisionError

    loss = engine(x, y)
    loss.register_hook(raises)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    engine.zero_grad()
    engine(x, y).backward()
    found = safe_get_full_grad(next(engine.module.parameters()))
    plain = net()
    (plain(x, y) / 2).backward()
    torch.testing.assert_close(found, next(plain.parameters()).grad)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_are_read_outside_of_forward(stage: int) -> None:
    engine = built(net(), config(stage, gradient_accumulation_steps=2))
    plain = net()
    assert_same(
        {name: param.detach().clone() for name, param in engine.module.named_parameters()},
        {name: param.detach() for name, param in plain.named_parameters()},
    )
    train(engine, batches(2))
    saved = values_of(engine.module)
    for name, param in engine.module.named_parameters():
        assert torch.equal(param.data, saved[name])
    engine.destroy()


# -- the rest of what initialize returns and takes -------------------------------------------------


def test_the_loader_gives_micro_batches_of_all_samples() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10))
    engine, _, loader, _ = deepspeed.initialize(
        model=net(), config=config(), training_data=data, collate_fn=lambda rows: len(rows)
    )
    assert len(loader) == 3
    assert [*loader] == [4, 4, 2]
    assert next(loader.__iter__()) == 4
    repeated = deepspeed.utilities.RepeatingLoader(loader)
    assert [next(repeated) for _ in range(4)] == [4, 4, 2, 4]
    engine.destroy()


def test_arguments_of_a_command_line(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config()))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    assert args.deepspeed
    engine = deepspeed.initialize(args=args, model=net())[0]
    assert engine.config == config()
    engine.destroy()


def test_attributes_of_module_and_parameters_stay() -> None:
    model = net()
    model.layers[0].weight.no_decay = True
    engine = built(model, config())
    assert engine.module is model
    assert engine.layers is model.layers
    assert model.layers[0].weight.no_decay
    assert model.tied is model.layers[0]
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        engine.nothing_of_this_name  # noqa: B018
    engine.destroy()


def test_getters_tell_the_configuration(tmp_path: Path) -> None:
    settings = config(3, tmp_path, bf16={"enabled": True}, steps_per_print=7,
                      scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}})  # fmt: skip
    engine = built(net(), settings)
    assert engine.zero_optimization()
    assert engine.zero_optimization_partition_weights()
    assert engine.zero_use_cpu_optimizer()
    assert engine.zero_nvme_offload_optimizer()
    assert engine.get_data_types() == (torch.bfloat16, torch.bfloat16)
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("adamw", "WarmupLR")
    assert engine.scheduler_params() == {"warmup_num_steps": 5}
    assert (engine.steps_per_print(), engine.local_rank, engine.world_size) == (7, 0, 1)
    assert isinstance(engine.lr_scheduler, deepspeed.schedules.WarmupLR)
    assert engine.device == torch.device("cpu")
    assert not engine.fp16_enabled()
    engine.destroy()


# -- refusals, and nothing half-built after them ---------------------------------------------------


def _params(model: nn.Module) -> list[int]:
    return [id(param) for param in model.parameters()]


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "no model": ({"model": None}, "requires a model"),
    "no configuration": ({"config": None}, "--deepspeed_config"),
    "unknown key": ({"config": config(optimzer={})}, "optimzer"),
    "bad value": ({"config": config(gradient_clipping=-1)}, "gradient_clipping=-1"),
    "no batch": ({"config": {"zero_optimization": {"stage": 3}}}, "train_micro_batch_size_per_gpu"),
    "bad schedule": (
        {"config": config(scheduler={"type": "StepLR", "params": {"gamma": 2}})}, "step_size",
    ),
    "open auto": (
        {"config": config(optimizer={"type": "AdamW", "params": {"lr": "auto"}})},
        r'optimizer.params.lr: a trainer must replace "auto"',
    ),
    "open auto of batches": (
        {"config": config(gradient_accumulation_steps="auto")}, "gradient_accumulation_steps",
    ),
    "open auto of a schedule": (
        {"config": config(scheduler={
            "type": "WarmupLR", "params": {"warmup_max_lr": "auto"},
        })}, r"scheduler.params.warmup_max_lr",
    ),
    "optimizer of a wrong type": ({"optimizer": 3}, "unexpected type int"),
    "no data set": ({"training_data": 3}, "training_data=int"),
    "sequence parallelism": ({"mesh_param": (1, 2)}, "sequence-parallel"),
    "both configurations": (
        {"args": argparse.Namespace(deepspeed_config="x.json")}, "Not sure how to proceed",
    ),
    "missing file": ({"config": "nowhere.json"}, "nowhere.json"),
    "local rank": ({"args": argparse.Namespace(local_rank=5)}, "local_rank=5"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_nothing_is_half_built_after_a_refusal(name: str) -> None:
    arguments, says = REFUSALS[name]
    model = net()
    before, values = _params(model), values_of(model)
    with pytest.raises(DeepSpeedRefusal, match=says):
        deepspeed.initialize(
            **{"model": model, "config": config(bf16={"enabled": True}), **arguments}
        )
    assert not dist.is_initialized()
    assert inf.offloaded_modules(model) == []
    assert _params(model) == before
    assert_same(values_of(model), values)
    # And it can be built then.
    engine = built(model, config())
    train(engine, batches(1))
    engine.destroy()


def test_an_open_auto_of_what_is_not_taken_is_left_alone() -> None:
    settings = config(
        optimizer={"type": "AdamW", "params": {"lr": "auto"}},
        scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
    )
    model = net()
    arguments = {
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "lr_scheduler": lambda opt: LambdaLR(opt, lambda _: 0.5),
    }
    engine = built(model, settings, **arguments)
    assert engine.get_lr() == [5e-3]
    engine.destroy()


class Sgd2(torch.optim.SGD):
    """A class that DeepSpeed has not tested."""


CLIENTS: dict[str, tuple[Any, str]] = {
    "untested": (lambda model: Sgd2(model.parameters(), lr=1.0), "zero_allow_untested_optimizer"),
    "of another model": (lambda _model: torch.optim.AdamW(net(1).parameters()), "not in Net"),
    "not elementwise": (
        lambda model: ops.FusedLion(model.parameters(), betas=(2.0, 0.9)), "betas",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLIENTS)
def test_a_refused_optimizer_keeps_its_groups(name: str) -> None:
    make, says = CLIENTS[name]
    model = net()
    client = make(model)
    before = [dict(group) for group in client.param_groups]
    with pytest.raises(DeepSpeedRefusal, match=says):
        built(model, config(), optimizer=client)
    assert not dist.is_initialized()
    assert inf.offloaded_modules(model) == []
    assert [group.keys() for group in client.param_groups] == [group.keys() for group in before]
    assert all(
        now is then
        for group, kept in zip(client.param_groups, before, strict=True)
        for now, then in zip(group["params"], kept["params"], strict=True)
    )


def test_an_untested_optimizer_is_taken_when_it_is_allowed() -> None:
    model = net()
    client = Sgd2(model.parameters(), lr=0.1)
    engine = built(model, config(zero_allow_untested_optimizer=True), optimizer=client)
    assert engine.optimizer is not None
    assert engine.optimizer.optimizer.title == "Elementwise(Sgd2)"
    engine.destroy()


def test_a_scheduler_without_its_optimizer() -> None:
    model = net()
    schedule = LambdaLR(torch.optim.AdamW(model.parameters()), lambda _step: 1.0)
    with pytest.raises(AssertionError, match="not instantiated"):
        built(model, config(), lr_scheduler=schedule)


def test_model_parallel_ranks() -> None:
    class Mpu:
        def get_model_parallel_world_size(self) -> int:
            return 2

    with pytest.raises(DeepSpeedRefusal, match="get_model_parallel_world_size\\(\\)=2"):
        built(net(), config(), mpu=Mpu())


@pytest.mark.parametrize("loss", [torch.ones(2, requires_grad=True), torch.ones(()), 3.0])
def test_a_loss_that_is_none(loss: Any) -> None:
    engine = built(net(), config())
    with pytest.raises(AssertionError, match="scalar tensor"):
        engine.backward(loss)
    engine.destroy()


def test_an_error_after_offloading_leaves_nothing_open() -> None:
    def schedule(_optimizer: Any) -> Any:
        raise KeyError("a schedule of the script")

    model = net()
    with pytest.raises(KeyError, match="a schedule of the script"):
        built(model, config(), lr_scheduler=schedule)
    assert not dist.is_initialized()
    assert inf.offloaded_modules(model) == []
    engine = built(net(), config())
    train(engine, batches(1))
    engine.destroy()
