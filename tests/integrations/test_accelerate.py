"""Accelerate: a script with an attached Accelerator trains, saves and resumes an offloaded model
as it does with torch's optimizer and the model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration
from torch import nn

import infinity as inf
from infinity._embedding import check_methods
from infinity._src.kernels.newton_schulz import product_dtype
from infinity.integrations.accelerate import attach
from tests import models
from tests.integrations.accelerate_script import (
    ROWS,
    accelerator,
    assert_same,
    loader,
    losses_of,
    net,
    policy,
    prepared,
    states,
    warmed,
)

ULPS = 1e-6
"""Relative difference of losses: the engine's optimizers round in fp32 once for each operation,
torch's join some of them."""


slow = pytest.mark.integrations
SGD = {"kind": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "foreach": False}


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({}, id="plain"),
        pytest.param({"gradient_accumulation_steps": 2}, id="accumulation", marks=slow),
        pytest.param({"mixed_precision": "bf16"}, id="bf16", marks=slow),
        pytest.param({"dynamo_backend": "eager"}, id="compiled", marks=slow),
        pytest.param({"settings": SGD}, id="sgd", marks=slow),
    ],
)
def test_losses_are_those_of_the_script_without_the_two_lines(
    values: dict[str, Any], tmp_path: Path
) -> None:
    plain = losses_of(None, **values)
    assert losses_of(policy(tmp_path), **values) == pytest.approx(plain, rel=ULPS)


@slow
def test_a_script_has_the_bits_of_a_loop_of_the_engine(tmp_path: Path) -> None:
    model = inf.offload(net(), policy(tmp_path))
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    scheduler = warmed(optimizer)
    losses = []
    for _ in range(2):
        for index, (rows, labels) in enumerate(loader()):
            loss = nn.functional.cross_entropy(model(rows), labels)
            (loss / 2).backward()
            losses.append(loss.item())
            if index % 2:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    inf.handle(model).close()
    assert losses_of(policy(tmp_path), gradient_accumulation_steps=2) == losses


@slow
def test_clipped_losses_are_those_of_the_script(tmp_path: Path) -> None:
    plain = losses_of(None, clip=0.05)
    assert losses_of(policy(tmp_path), clip=0.05) == pytest.approx(plain, rel=2e-6)
    assert plain != losses_of(None)


def test_gradients_are_clipped_by_value(tmp_path: Path) -> None:
    plain = losses_of(None, clip_value=1e-3)
    assert losses_of(policy(tmp_path), clip_value=1e-3) == pytest.approx(plain, rel=ULPS)
    assert plain != losses_of(None)


@slow
def test_an_update_in_backward_knows_its_micro_batches(tmp_path: Path) -> None:
    """`accumulate` enters no_sync on one rank, too: a second backward would raise."""
    values = {"gradient_accumulation_steps": 2}
    under = policy(tmp_path, update="backward", ram="64MiB")
    assert losses_of(under, **values) == losses_of(policy(tmp_path), **values)


def optimizer_of(kind: Any, place: Path, **settings: Any) -> Any:
    with accelerator() as own:
        run = prepared(own, policy(place), kind=kind, **settings)
        own.free_memory()
        return run.optimizer.optimizer


@slow
def test_optimizers_of_torch_become_those_of_the_engine_of_the_same_rule(tmp_path: Path) -> None:
    adam = optimizer_of(torch.optim.Adam, tmp_path)
    assert isinstance(adam, inf.AdamW)
    assert adam.param_groups[0]["weight_decay"] == 0
    assert "foreach" not in adam.param_groups[0]
    decayed = optimizer_of(torch.optim.Adam, tmp_path, weight_decay=0.1)
    assert decayed.title == "Elementwise(Adam)"
    nesterov = optimizer_of(torch.optim.SGD, tmp_path, momentum=0.9, nesterov=True)
    assert isinstance(nesterov, inf.SGD)
    assert nesterov.param_groups[0]["nesterov"] is True
    uphill = optimizer_of(torch.optim.SGD, tmp_path, maximize=True)
    assert uphill.title == "Elementwise(SGD)"


def trained_by_muon(under: inf.Policy | None) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and values of a script with torch's Muon for an embedding, a matrix, and a head that
    is added later."""
    with accelerator() as own:
        torch.manual_seed(0)
        linears = [nn.Linear(12, size, bias=False) for size in (12, 16)]
        model = nn.Sequential(nn.Embedding(16, 12), *linears)
        if under is not None:
            attach(own)
            inf.offload(model, under)
        *matrices, head = model.parameters()
        muon = torch.optim.Muon(matrices, lr=0.25, momentum=0.5)
        made, prepared_muon = own.prepare(model, muon)
        prepared_muon.optimizer.add_param_group({"params": [head], "nesterov": False})
        losses = []
        for _ in range(4):
            loss = nn.functional.cross_entropy(made(torch.arange(16)), torch.arange(16) // 2)
            own.backward(loss)
            prepared_muon.step()
            prepared_muon.zero_grad()
            losses.append(loss.item())
        values = [value.clone() for value in model.state_dict().values()]
        own.free_memory()
    return losses, values


def test_muon_of_torch_becomes_muon_of_the_engine_for_all_its_matrices(tmp_path: Path) -> None:
    losses, values = trained_by_muon(None)
    found, ours = trained_by_muon(policy(tmp_path))
    if product_dtype(torch.device("cpu")) is torch.bfloat16:
        assert found == losses
        assert all(map(torch.equal, ours, values))
    else:
        # The engine's products are in fp32 there.
        assert found == pytest.approx(losses, rel=0.05)


@slow
def test_any_elementwise_optimizer_of_torch_is_taken_over(tmp_path: Path) -> None:
    settings = {"kind": torch.optim.RMSprop, "foreach": False}
    plain = losses_of(None, settings=settings)
    assert losses_of(policy(tmp_path), settings=settings) == pytest.approx(plain, rel=ULPS)


@pytest.mark.parametrize("steps", [pytest.param(1, marks=slow), 2])
def test_a_resumed_run_is_the_uninterrupted_one(steps: int, tmp_path: Path) -> None:
    """Every state, the schedule and the accumulation's place."""
    with accelerator(gradient_accumulation_steps=steps) as own:
        run = prepared(own, policy(tmp_path / "a"))
        run.train(1)
        own.save_state(tmp_path / "ckpt")
        files = {path.name for path in (tmp_path / "ckpt").iterdir()}
        saved = states(run.model)
        run.train(2)
        whole, ended = run.losses[ROWS // 4 :], states(run.model)
        own.free_memory()
    assert not any(name.startswith("model") for name in files), files
    with accelerator(gradient_accumulation_steps=steps) as own:
        run = prepared(own, policy(tmp_path / "b", optim="cpu"))
        run.train(1)
        own.load_state(tmp_path / "ckpt")
        assert_same(states(run.model), saved)
        run.losses.clear()
        run.train(2)
        assert run.losses == whole
        assert_same(states(run.model), ended)
        own.free_memory()


@slow
def test_hooks_of_the_script_see_one_entry_for_each_model(tmp_path: Path) -> None:
    """Scripts save in a format of their own from a pre-hook, and pop the weights."""
    seen: list[int] = []

    def keep(found: list[Any], weights: list[Any], _directory: str) -> None:
        seen.append(len(found))
        while weights:
            weights.pop()

    def take(found: list[Any], _directory: str) -> None:
        while found:
            found.pop()

    with accelerator() as own:
        run = prepared(own, policy(tmp_path))
        own.register_save_state_pre_hook(keep)
        own.register_load_state_pre_hook(take)
        run.train(1)
        own.save_state(tmp_path / "ckpt")
        saved = states(run.model)
        run.train(1)
        own.load_state(tmp_path / "ckpt")
        assert seen == [1]
        assert_same(states(run.model), saved)
        own.free_memory()


def test_several_models_are_saved_beside_each_other_and_one_that_is_not_offloaded(
    tmp_path: Path,
) -> None:
    with accelerator() as own:
        attach(own)
        nets = [net(seed) for seed in range(3)]
        for index in (0, 2):
            inf.offload(nets[index], policy(tmp_path, ram="8MiB"))
        opts = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in nets]
        nets, opts = map(list, (own.prepare(*nets), own.prepare(*opts)))

        def step() -> None:
            for each, opt in zip(nets, opts, strict=True):
                own.backward(each(torch.ones(2, 12)).square().mean())
                opt.step()
                opt.zero_grad()

        step()
        own.save_state(tmp_path / "ckpt")
        saved = [states(nets[0]), states(nets[2])]
        plain = {name: value.clone() for name, value in nets[1].state_dict().items()}
        step()
        assert not torch.equal(nets[1].state_dict()["0.weight"], plain["0.weight"])
        own.load_state(tmp_path / "ckpt")
        assert_same(states(nets[0]), saved[0])
        assert_same(states(nets[2]), saved[1])
        assert_same(nets[1].state_dict(), plain)
        names = {path.name for path in (tmp_path / "ckpt").iterdir()}
        assert {"infinity", "infinity_1", "model.safetensors"} <= names, names
        own.free_memory()
        assert all(inf.offloaded_modules(each) == [] for each in nets)


def test_free_memory_closes_engines_and_a_second_run_has_the_budget(tmp_path: Path) -> None:
    with accelerator() as own:
        for _ in range(2):
            run = prepared(own, policy(tmp_path))
            run.train(1)
            handle = inf.handle(run.model)
            run.model, run.optimizer = own.free_memory(run.model, run.optimizer)
            assert handle.closed
            assert run.model is None
            assert own._models == []


@slow
def test_weights_come_out_whole_streamed_and_unwrapped(tmp_path: Path) -> None:
    from accelerate import load_checkpoint_in_model
    from safetensors.torch import load_file

    batch = models.token_batches(1)[0]
    with accelerator(mixed_precision="bf16") as own:
        attach(own)
        model = inf.offload(models.make(models.llama, dtype=torch.float32), policy(tmp_path))
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, opt = own.prepare(model, opt)
        own.backward(model(**batch).loss)
        opt.step()
        values = model.state_dict()
        assert_same(own.get_state_dict(model), values)
        own.save_model(model, tmp_path / "one")
        assert_same(load_file(tmp_path / "one" / "model.safetensors"), values)
        own.save_model(model, tmp_path / "many", max_shard_size="30KB")
        assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 1
        fresh = models.make(models.llama, seed=7, dtype=torch.float32)
        load_checkpoint_in_model(fresh, str(tmp_path / "many"))
        assert_same(fresh.state_dict(), values)
        with pytest.raises(ValueError, match="safetensors are streamed"):
            own.save_model(model, tmp_path / "no", safe_serialization=False)

        cast = own.unwrap_model(model)(**batch).logits
        plain = own.unwrap_model(model, keep_fp32_wrapper=False)
        assert inf.offloaded_modules(plain) == [plain]
        exact = plain(**batch).logits
        # Autocast computed the former in bf16.
        assert not torch.equal(cast, exact)
        assert torch.equal(exact, fresh(**batch).logits)
        own.free_memory()


@slow
def test_checkpoints_that_accelerate_names_and_removes(tmp_path: Path) -> None:
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    with accelerator(project_config=config) as own:
        run = prepared(own, policy(tmp_path / "nvme"))
        for _ in range(2):
            run.train(1)
            own.save_state()
        saved = states(run.model)
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_1"]
        run.train(1)
        own.load_state()
        assert_same(states(run.model), saved)
        own.free_memory()


def test_a_method_that_an_update_has_renamed_is_an_error_at_import() -> None:
    with pytest.raises(ImportError, match=r"accelerate \S+ has no Accelerator\.gone, .* 1\.15"):
        check_methods(Accelerator, ("prepare", "gone"), "accelerate", "1.15")


def test_what_cannot_work_is_refused_with_the_way_out(tmp_path: Path) -> None:
    from accelerate.utils import DDPCommunicationHookType

    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    with accelerator(kwargs_handlers=[hook]) as own:
        with pytest.raises(ValueError, match="reduce_dtype"):
            attach(own)
    with accelerator() as own:
        assert attach(attach(own)) is own
        model = net()
        early = torch.optim.AdamW(model.parameters(), lr=1e-2)
        inf.offload(model, policy(tmp_path))
        with pytest.raises(ValueError, match="Sequential itself"):
            own.prepare(nn.Sequential(model))
        lbfgs = torch.optim.LBFGS(model.parameters())
        with pytest.raises(ValueError, match="LBFGS"):
            own.prepare(model, lbfgs)
        model.extra = nn.Linear(2, 2)
        with pytest.raises(ValueError, match=r"extra\.weight.* not offloaded"):
            own.prepare(model)
        del model.extra
        (tmp_path / "empty").mkdir()
        # The optimizer was built before the model was offloaded: it holds the same parameters.
        run, stepper = own.prepare(model, early)
        assert type(stepper.optimizer) is inf.AdamW
        with pytest.raises(ValueError, match="has no infinity/"):
            own.load_state(tmp_path / "empty")
        own.free_memory(run)
