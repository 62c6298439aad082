"""Unusual loops, in each update mode: a backward or a step that is aborted, gradients that are
assigned, optimizers that do not step, groups that are added late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.engine.handle import offload
from infinity.aio import Seam
from infinity.errors import SecondOrderUnsupported, StateInvalid
from tests import models
from tests.harness import assert_same, policy, train, values_of
from tests.reference import Delayed, ReferenceAdamW

BATCHES = models.token_batches(12)


def loss_of(model: nn.Module, index: int = 0) -> torch.Tensor:
    return models.loss_of(model, BATCHES[index])


def make(tmp_path: Path, update: str, *, seam: Seam | None = None, **values: Any) -> nn.Module:
    return offload(models.make(models.llama), policy(tmp_path, update=update, **values), _seam=seam)


def plain() -> tuple[nn.Module, ReferenceAdamW]:
    model = models.make(models.llama)
    params = list(model.parameters())
    return model, ReferenceAdamW(
        [{"params": params}], lr=1e-2, weight_decay=1e-2, order=iter(params)
    )


def break_off(model: nn.Module, parameter: torch.Tensor) -> None:
    """A backward that ends with Ctrl-C at the gradient of `parameter`."""

    def stop(_grad: torch.Tensor) -> None:
        raise KeyboardInterrupt

    handle = parameter.register_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        loss_of(model).backward()
    handle.remove()


def test_a_step_right_after_a_half_taken_backward_is_not_silent(tmp_path: Path) -> None:
    model = make(tmp_path, "backward")
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    break_off(model, model.get_input_embeddings().weight)  # type: ignore[operator]
    with pytest.raises(StateInvalid, match="half done"):
        optimizer.step()
    with pytest.raises(StateInvalid):
        inf.handle(model).close()


def test_gradients_that_a_broken_backward_lost_are_not_left_out_silently(tmp_path: Path) -> None:
    """With one unit an interrupted backward has updated no parameter, but some gradients have come,
    and are dropped."""
    model = make(tmp_path, "backward", units=[""])
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    break_off(model, model.get_input_embeddings().weight)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=r"lost the gradient of .*zero_grad\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    reference, reference_optimizer = plain()
    for module in (model, reference):
        loss_of(module).backward()
    optimizer.step()
    reference_optimizer.step()
    assert_same(model, reference)
    inf.handle(model).close()


@pytest.mark.parametrize("update", ["deferred", "backward"])
def test_gradients_that_the_loop_assigns_are_stepped_with(update: str, tmp_path: Path) -> None:
    model, (reference, reference_optimizer) = make(tmp_path, update), plain()
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            theirs.grad = torch.randn(theirs.shape).to(theirs.dtype)
            ours.grad = theirs.grad.clone()
        optimizer.step()
        reference_optimizer.step()
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
    assert_same(model, reference)
    inf.handle(model).close()


@pytest.mark.parametrize("update", ["deferred", "delayed"])
def test_a_loop_that_zeroes_no_gradient_adds_to_those_of_the_steps_before(
    update: str, tmp_path: Path
) -> None:
    """With a delayed update the sum continues in other memory than the memory that the update
    reads."""
    model, (reference, reference_optimizer) = make(tmp_path, update, delayed_warmup=1), plain()
    delayed = Delayed(reference_optimizer, reference, 1 if update == "delayed" else 4)
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    for index in range(4):
        losses = [loss_of(module, index) for module in (model, reference)]
        for loss in losses:
            loss.backward()
        assert losses[0].item() == losses[1].item()
        optimizer.step()
        delayed.step()
    delayed.catch_up()
    assert_same(values_of(model), values_of(reference))
    inf.handle(model).close()


@pytest.mark.parametrize("update", ["deferred", "backward", "delayed"])
def test_a_model_may_be_moved_to_where_it_is_with_its_gradients(
    update: str, tmp_path: Path
) -> None:
    """Lightning's teardown calls `.cpu()`; torch assigns `.data` of what that gave."""
    models_, losses = [], []
    for moves in (False, True):
        (place := tmp_path / str(moves)).mkdir()
        model = make(place, update)
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        for index in range(3):
            loss = loss_of(model, index)
            loss.backward()
            if moves:
                assert all(each.grad is not None for each in model.cpu().parameters())
                model.to("cpu", torch.bfloat16)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        models_.append(values_of(model))
        inf.handle(model).close()
    assert losses[:3] == losses[3:]
    assert_same(*models_)


def test_an_optimizer_that_does_not_step_is_noticed_in_backward(tmp_path: Path) -> None:
    """Backward has updated all parameters; only a second gradient shows that no optimizer stepped
    them."""
    model = make(tmp_path, "backward")
    params = list(model.parameters())
    one, other = inf.AdamW(params[:5], lr=1e-2), inf.AdamW(params[5:], lr=1e-2)
    for optimizers in ((one, other), (other, one), (one,)):
        loss_of(model).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    with pytest.raises(RuntimeError, match=r"second gradient of .* before opt\.step\(\)"):
        loss_of(model).backward()
    assert other.state[params[5]]["step"] == 3
    inf.handle(model).close()


@pytest.mark.parametrize("clear", [False, True])
def test_micro_batches_after_the_last_one_raise(clear: bool, tmp_path: Path) -> None:
    model = make(tmp_path, "backward")
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    loss_of(model).backward()
    if clear:
        model.zero_grad()  # and no step
    else:
        optimizer.step()  # and no zero_grad
    match = (
        r"second gradient .* before opt\.step\(\)" if clear else r"zero_grad\(\) after opt\.step"
    )
    with pytest.raises(RuntimeError, match=match), inf.handle(model).no_sync():
        loss_of(model).backward()
    inf.handle(model).close()


def test_groups_that_a_trainer_replaced_count_in_backward(tmp_path: Path) -> None:
    model, (reference, reference_optimizer) = make(tmp_path, "backward"), plain()
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        rate = 1e-2 / (step + 1)
        optimizer.param_groups = [{**group, "lr": rate} for group in optimizer.param_groups]
        reference_optimizer.param_groups[0]["lr"] = rate
        for module in (model, reference):
            loss_of(module, step).backward()
        optimizer.step()
        reference_optimizer.step()
        optimizer.zero_grad()
        reference_optimizer.zero_grad()
    assert_same(model, reference)
    inf.handle(model).close()


def test_a_group_may_come_while_updates_are_delayed(tmp_path: Path) -> None:
    """The group trains as if it had been there without gradients: it has no delayed values yet."""
    results = []
    for late in (True, False):
        place = tmp_path / str(late)
        place.mkdir()
        model = make(place, "delayed", delayed_warmup=0)
        named = dict(model.named_parameters())
        last = [parameter for name, parameter in named.items() if "layers.2" in name]
        rest = [parameter for name, parameter in named.items() if "layers.2" not in name]
        optimizer = inf.AdamW(rest if late else [{"params": rest}, {"params": last}], lr=1e-2)
        losses = []
        for step in range(5):
            if late and step == 2:
                optimizer.add_param_group({"params": last})
            losses.append(loss_of(model, step))
            losses[-1].backward()
            for parameter in last if step < 2 else []:
                parameter.grad = None
            optimizer.step()
            model.zero_grad()
        results.append(([loss.item() for loss in losses], values_of(model)))
        inf.handle(model).close()
    assert_same(*results)


def test_after_a_broken_backward_delayed_parameters_are_the_newest(tmp_path: Path) -> None:
    model = make(tmp_path, "delayed", delayed_warmup=0)
    optimizer = inf.AdamW(model.parameters(), lr=1e-1)
    train(model, optimizer, BATCHES[:3])
    expected = values_of(model)
    for look in (values_of, gathered_values):
        break_off(model, model.get_input_embeddings().weight)  # type: ignore[operator]
        assert_same(look(model), expected)
    inf.handle(model).close()


def gathered_values(model: nn.Module) -> dict[str, torch.Tensor]:
    with inf.handle(model).gather(model.parameters()):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("update", ["deferred", "backward", "delayed"])
def test_an_interrupt_between_the_units_of_a_step_is_sticky(
    update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(tmp_path, update, delayed_warmup=0)
    optimizer = inf.AdamW(model.parameters(), lr=1e-2)
    pipeline = inf.handle(model).pipeline
    start, count = pipeline.start, iter(range(100))

    def interrupted(*args: Any, **values: Any) -> Any:
        if next(count) == 2:
            raise KeyboardInterrupt
        return start(*args, **values)

    monkeypatch.setattr(pipeline, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loss_of(model).backward()
        optimizer.step()
    with pytest.raises(StateInvalid):
        optimizer.step()
    with pytest.raises(StateInvalid):
        inf.handle(model).close()


def test_an_interrupt_in_an_elementwise_step_is_sticky(tmp_path: Path) -> None:
    calls = iter(range(10_000))
    stop_at = [-1]

    class Adagrad(torch.optim.Adagrad):
        def step(self, closure: Any = None) -> Any:
            if next(calls) == stop_at[0]:
                raise KeyboardInterrupt
            return super().step(closure)

    model = make(tmp_path, "deferred")
    optimizer = inf.Elementwise(Adagrad, model.parameters(), lr=1e-2)
    loss_of(model).backward()
    stop_at[0] = next(calls) + 6
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    with pytest.raises(StateInvalid, match="interrupted"):
        optimizer.step()
    with pytest.raises(StateInvalid):
        inf.handle(model).close()


def test_transforms_of_torch_func_are_right_or_named() -> None:
    func, functional = torch.func, torch.autograd.functional
    plain, model = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    inf.offload(model, inf.Policy())
    x = torch.randn(2, 4)

    def total(net: Any) -> Any:
        return lambda rows: net(rows).sum()

    right: list[Any] = [
        lambda net: func.jvp(net, (x,), (x,))[1],
        lambda net: func.vmap(func.jacfwd(net))(x),
        lambda net: func.vmap(net)(x),
        lambda net: functional.jacobian(net, x),
        lambda net: functional.vjp(net, x, torch.ones_like(net(x)))[1],
    ]
    for call in right:
        assert torch.equal(call(model), call(plain))
    second_order: list[Any] = [
        lambda net: func.grad(total(net))(x),
        lambda net: func.vjp(net, x)[1](x),
        lambda net: func.vmap(func.jacrev(net))(x),
        lambda net: func.hessian(total(net))(x),
        lambda net: functional.hvp(total(net), x, x),
        lambda net: functional.jvp(total(net), x, x),
    ]
    for call in second_order:
        with pytest.raises(SecondOrderUnsupported, match=r"torch\.func\.grad, .* jacfwd"):
            call(model)
    for each in (plain, model):
        each(x).sum().backward()
    assert model[0].weight.grad is not None
    assert torch.equal(model[0].weight.grad.materialize(), plain[0].weight.grad)
    inf.handle(model).close()
