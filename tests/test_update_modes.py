"""update="backward" and update="delayed": what a loop may not do, and what it sees meanwhile. Their
bits are the matrix's."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.engine.handle import offload
from infinity.aio import Fault, Seam
from infinity.errors import BudgetError, NonFiniteGradient, StateInvalid
from tests import models
from tests.harness import assert_same, policy, trained, values_of

four_layers = functools.partial(models.Small, layers=4)


def small(tmp_path: Path, update: str = "backward", **values: Any) -> tuple[nn.Module, inf.AdamW]:
    model = inf.offload(models.make(four_layers), policy(tmp_path, update=update, **values))
    return model, inf.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module) -> torch.Tensor:
    return models.loss_of(model, models.token_batches(1)[0])


def test_clipping_raises_and_says_what_works(tmp_path: Path) -> None:
    model, _ = small(tmp_path)
    loss_of(model).backward()
    took = r"update took it during backward.*update='deferred'"
    with pytest.raises(RuntimeError, match=took):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(RuntimeError, match=f"clamp_ on the gradient of .*{took}"):
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
    inf.handle(model).close()


def test_a_second_backward_without_no_sync_raises(tmp_path: Path) -> None:
    model, _ = small(tmp_path)
    loss_of(model).backward()
    with pytest.raises(RuntimeError, match=r"second gradient .* before opt.step\(\).*no_sync"):
        loss_of(model).backward()
    inf.handle(model).close()


def test_gradients_left_over_a_step_raise(tmp_path: Path) -> None:
    model, optimizer = small(tmp_path)
    loss_of(model).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) after opt.step"):
        loss_of(model).backward()
    inf.handle(model).close()


def test_a_rate_changed_after_backward_raises(tmp_path: Path) -> None:
    model, optimizer = small(tmp_path)
    loss_of(model).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(StateInvalid, match=r"changed between backward and opt\.step"):
        optimizer.step()
    with pytest.raises(StateInvalid):
        inf.handle(model).close()


def test_the_first_gradient_that_is_not_finite_touches_nothing(tmp_path: Path) -> None:
    model, optimizer = small(tmp_path)
    loss = loss_of(model)
    with pytest.raises(NonFiniteGradient):
        (loss * float("nan")).backward()
    before = values_of(model)
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
    with pytest.raises(AssertionError):
        assert_same(values_of(model), before)
    inf.handle(model).close()


def test_a_backward_that_breaks_off_half_way_is_not_silent(tmp_path: Path) -> None:
    model, optimizer = small(tmp_path)

    def stop(_grad: torch.Tensor) -> None:
        raise KeyboardInterrupt

    embedding = model.embed.weight  # type: ignore[operator]
    handle = embedding.register_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        loss_of(model).backward()
    handle.remove()
    optimizer.zero_grad()
    with pytest.raises(StateInvalid, match="half done"):
        loss_of(model)
        optimizer.step()
    with pytest.raises(StateInvalid):
        inf.handle(model).close()


def test_a_fault_in_an_early_update_is_sticky(tmp_path: Path) -> None:
    model, _ = small(tmp_path)
    set_up = inf.handle(model).parts.tiers.executor.stats().drives[0].writes
    inf.handle(model).close()
    seam = Seam(fault=Fault("write", set_up + 2, persistent=True))
    model = offload(models.make(four_layers), policy(tmp_path, update="backward"), _seam=seam)
    optimizer = inf.AdamW(model.parameters())
    with pytest.raises(StateInvalid):
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(StateInvalid):
        inf.handle(model).close()


def test_no_sync_wants_room_for_gradients(tmp_path: Path) -> None:
    """A model larger than its pools: the rest of the smallest budget cannot hold gradients."""

    def offload_with(ram: int | str) -> tuple[nn.Module, inf.AdamW]:
        chosen = policy(tmp_path, ram=ram, update="backward")
        model = inf.offload(models.llama(layers=8, hidden=288).bfloat16(), chosen)
        return model, inf.AdamW(model.parameters(), lr=1e-2)

    model, _ = offload_with("min")
    least = inf.handle(model).stats().ram_min_bytes
    inf.handle(model).close()
    model, optimizer = offload_with(least)
    with pytest.raises(BudgetError), inf.handle(model).no_sync():
        loss_of(model).backward()
    loss_of(model).backward()
    optimizer.step()
    assert inf.handle(model).stats().grad_bytes == 0
    inf.handle(model).close()


# -- delayed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", [0, 2])
def test_the_first_delayed_step_is_the_one_after_the_warm_up(warmup: int, tmp_path: Path) -> None:
    chosen = policy(tmp_path, update="delayed", delayed_warmup=warmup)
    ours = trained(chosen, steps=4, accumulation=1)
    assert_same(ours, trained(None, steps=4, accumulation=1, delayed=warmup))


def test_looking_at_parameters_changes_no_bits_of_the_delayed_update(tmp_path: Path) -> None:
    results = []
    for look in (False, True):
        place = tmp_path / str(look)
        place.mkdir()
        model, optimizer = small(place, "delayed", delayed_warmup=0)
        handle = inf.handle(model)
        for _ in range(4):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            if look:
                with handle.gather(model.parameters()):
                    total = sum(float(p.detach().float().sum()) for p in model.parameters())
                assert total == sum(
                    float(value.float().sum()) for value in model.state_dict().values()
                )
                handle.flush()
        results.append(values_of(model))
        handle.close()
    assert_same(results[1], results[0])


def test_evaluation_sees_what_an_export_would_write_and_changes_no_bits(tmp_path: Path) -> None:
    results = []
    for evaluates in (False, True):
        place = tmp_path / str(evaluates)
        place.mkdir()
        model, optimizer = small(place, "delayed", delayed_warmup=1)
        for _ in range(4):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluates:
                with torch.no_grad():
                    seen = loss_of(model).item()
                plain = models.Small(layers=4).bfloat16()
                plain.load_state_dict(model.state_dict())
                with torch.no_grad():
                    assert loss_of(plain).item() == seen
        results.append(values_of(model))
        inf.handle(model).close()
    assert_same(results[1], results[0])


def test_a_write_is_kept_by_the_delayed_update(tmp_path: Path) -> None:
    model, optimizer = small(tmp_path, "delayed", delayed_warmup=0)
    handle = inf.handle(model)
    for _ in range(2):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = model.embed.weight  # type: ignore[operator]
    with handle.gather(weight), torch.no_grad():
        weight.fill_(0.5)
    with torch.no_grad():
        seen = loss_of(model).item()
    assert torch.equal(model.state_dict()["embed.weight"], torch.full(weight.shape, 0.5).bfloat16())
    with handle.gather(weight), torch.no_grad():
        weight.fill_(0.25)
    with torch.no_grad():
        assert loss_of(model).item() != seen
    handle.close()


def test_a_second_optimizer_is_refused_by_the_delayed_update(tmp_path: Path) -> None:
    model = inf.offload(models.make(four_layers), policy(tmp_path, update="delayed"))
    params = list(model.parameters())
    inf_a = inf.AdamW(params[:3])
    with pytest.raises(ValueError, match="one optimizer"):
        inf.AdamW(params[3:])
    assert inf_a is not None
    inf.handle(model).close()
