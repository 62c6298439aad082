"""Claims of docs/embedding.md about the engine that no other test holds."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import infinity as inf
from infinity.errors import ParameterReleased
from tests import models


@pytest.fixture
def model(tmp_path: Path) -> Iterator[torch.nn.Module]:
    torch.manual_seed(0)
    made = inf.offload(
        models.llama(), inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram="min")
    )
    yield made
    inf.handle(made).close()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> float:
    loss = model(**models.token_batches(1, seed=seed)[0]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def test_parameters_are_the_same_objects_at_all_times(
    model: torch.nn.Module, tmp_path: Path
) -> None:
    before = [id(param) for param in model.parameters()]
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    inf.save(model, optimizer, tmp_path / "states").wait()
    inf.restore(model, optimizer, tmp_path / "states")
    assert [id(param) for param in model.parameters()] == before
    head = model.lm_head.weight
    assert (head.shape, head.dtype, head.requires_grad) == ((96, 32), torch.float32, True)
    with pytest.raises(ParameterReleased, match="gather"):
        head.sum()


def test_values_are_there_inside_of_forward(model: torch.nn.Module) -> None:
    sums = []
    model.lm_head.register_forward_hook(lambda module, *_: sums.append(float(module.weight.sum())))
    with torch.no_grad():
        model(**models.token_batches(1)[0])
    with inf.handle(model).gather([model.lm_head.weight]):
        assert sums == [float(model.lm_head.weight.sum())]


def test_writes_in_gather_are_kept(model: torch.nn.Module) -> None:
    head, whole = model.lm_head, model.state_dict()["lm_head.weight"]
    with inf.handle(model).gather([head.weight]), torch.no_grad():
        head.weight.mul_(0.5)
    assert torch.equal(model.state_dict()["lm_head.weight"], whole * 0.5)


def test_what_moves_or_copies_a_model_raises(model: torch.nn.Module) -> None:
    for attempt in (model.half, lambda: model.to("meta"), lambda: copy.deepcopy(model)):
        with pytest.raises((RuntimeError, ValueError)):
            attempt()
    with pytest.raises((RuntimeError, ValueError)):
        model.resize_token_embeddings(100)


def test_adapters_that_come_later_are_ordinary_parameters(model: torch.nn.Module) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert inf.offloaded_modules(adapted) == [model]
    trained = [param for param in adapted.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    assert step(adapted, optimizer) > step(adapted, optimizer)


def test_gradients_answer_what_loops_ask(model: torch.nn.Module) -> None:
    model(**models.token_batches(1)[0]).loss.backward()
    param, handle = model.lm_head.weight, inf.handle(model)
    values = handle.full_grad(param)
    assert values is not None
    assert float(param.grad.norm()) == pytest.approx(float(values.norm()), rel=1e-6)
    param.grad.mul_(0.5)
    halved = handle.full_grad(param)
    assert halved is not None
    assert torch.equal(halved, values * 0.5)
    with pytest.raises(RuntimeError, match=r"lm_head\.weight"):
        param.grad.abs()
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    clipped = handle.full_grad(param)
    assert clipped is not None
    assert torch.equal(clipped, halved.clamp(-1e-3, 1e-3))
    param.grad = None
    assert handle.full_grad(param) is None
    model.zero_grad()


def test_ranks_without_a_group_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    policy = inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram="min")
    with pytest.raises(ValueError, match="init_process_group"):
        inf.offload(models.llama(), policy)


def test_a_manifest_loads_after_a_restore(tmp_path: Path, model: torch.nn.Module) -> None:
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    step(model, optimizer)
    inf.save(model, optimizer, tmp_path / "states").wait()
    manifest = optimizer.state_dict()
    (tmp_path / "other").mkdir()
    again = inf.offload(
        models.llama(),
        inf.Policy(params="nvme", optim="nvme", nvme=tmp_path / "other", ram="min"),
    )
    fresh = inf.AdamW(again.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="manifest"):
        fresh.load_state_dict(manifest)
    inf.restore(again, fresh, tmp_path / "states")
    fresh.load_state_dict(manifest)
    assert step(again, fresh, seed=1) == step(model, optimizer, seed=1)
    inf.handle(again).close()


def test_the_best_model_sets_masters_and_keeps_moments(
    tmp_path: Path, model: torch.nn.Module
) -> None:
    optimizer, handle = inf.AdamW(model.parameters(), lr=1e-2), inf.handle(model)
    step(model, optimizer)
    inf.save(model, optimizer, tmp_path / "best").wait()
    best = handle.optimizer_state(model.lm_head.weight)["master"]
    step(model, optimizer, seed=1)
    moment = handle.optimizer_state(model.lm_head.weight)["exp_avg"]
    inf.restore(model, None, tmp_path / "best")
    state = handle.optimizer_state(model.lm_head.weight)
    assert torch.equal(state["master"], best)
    assert torch.equal(state["exp_avg"], moment)


def test_training_goes_on_after_an_exception_in_forward(model: torch.nn.Module) -> None:
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    first = step(model, optimizer)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("as a GPU says")

    hook = model.model.layers[1].register_forward_hook(full)
    with pytest.raises(torch.OutOfMemoryError):
        step(model, optimizer)
    hook.remove()
    assert step(model, optimizer) < first
