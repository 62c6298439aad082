"""update="backward" and update="delayed": the reference loop's bits, wherever states rest and
however I/O is timed."""

from __future__ import annotations

import contextlib
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
from tests import harness, models
from tests.harness import Training
from tests.marks import alternating
from tests.reference import ReferenceAdamW

PLACEMENTS = {
    "nvme min": {"params": "nvme", "optim": "nvme", "ram": "min"},
    "nvme generous": {"params": "nvme", "optim": "nvme"},
    "cpu": {"params": "cpu", "optim": "cpu"},
    "device": {"params": "device", "optim": "nvme", "ram": "min"},
    "parameters in cpu": {"params": "cpu", "optim": "nvme", "ram": "min"},
    "small units": {"params": "nvme", "optim": "nvme", "ram": "min", "unit_bytes_max": 8192},
    "threads": {"params": "nvme", "optim": "nvme", "ram": "min", "io_backend": "threads"},
}
SMALL = Training(models.Small, steps=6, accumulation=1, max_norm=None)


def policy(tmp_path: Path, **values: Any) -> inf.Policy:
    if "nvme" in values.values():
        values.setdefault("nvme", tmp_path)
    return inf.Policy(**values)


@functools.cache
def reference(training: Training, *, warmup: int | None = None) -> harness.Run:
    """The plain loop; with `warmup`, delayed by one step after so many."""
    with harness.one_thread():
        model = training.model()
        optimizer = ReferenceAdamW(
            training.param_groups(model),
            lr=training.lr,
            weight_decay=training.weight_decay,
            grad_dtype=training.grad_dtype,
            order=model.parameters(),
        )
        newest = values_of(model)
        losses, norms, batches = [], [], iter(training.batches)
        for step in range(training.steps):
            for group in optimizer.param_groups:
                group["lr"] = training.lr_at(step)
            for _ in range(training.accumulation):
                loss = models.loss_of(model, next(batches)) / training.accumulation
                loss.backward()
                losses.append(loss.item())
            training.clip_value(model, optimizer)
            if training.max_norm is not None:
                norms.append(optimizer.clip(training.max_norm).item())
            set_values(model, newest)
            before, _ = newest, optimizer.step()
            newest = values_of(model)
            if warmup is not None and step >= warmup:
                set_values(model, before)
            optimizer.zero_grad()
        return harness.Run(losses, norms, [], newest)


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().to("cpu", copy=True)
        for name, parameter in model.named_parameters()
    }


def set_values(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


def offloaded(training: Training, chosen: inf.Policy, seam: Seam | None = None) -> harness.Run:
    """The same through the engine; all micro-batches but the last in `no_sync`."""
    with harness.one_thread():
        model = offload(training.model(), chosen, _seam=seam)
        handle = inf.handle(model)
        try:
            optimizer = inf.AdamW(
                training.param_groups(model), lr=training.lr, weight_decay=training.weight_decay
            )
            losses, norms, batches = [], [], iter(training.batches)
            for step in range(training.steps):
                for group in optimizer.param_groups:
                    group["lr"] = training.lr_at(step)
                for micro in range(training.accumulation):
                    last = micro == training.accumulation - 1
                    with contextlib.nullcontext() if last else handle.no_sync():
                        loss = models.loss_of(model, next(batches)) / training.accumulation
                        loss.backward()
                    losses.append(loss.item())
                training.clip_value(model, optimizer)
                if training.max_norm is not None:
                    norms.append(
                        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_norm).item()
                    )
                optimizer.step()
                optimizer.zero_grad()
            state = model.state_dict()
            names = [name for name, _ in model.named_parameters()]
            handle.flush()
            return harness.Run(
                losses, norms, [], {name: state[name].clone() for name in names}, handle.stats()
            )
        finally:
            handle.close()


# -- backward --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLACEMENTS)
def test_updates_in_backward_are_the_reference_loops_bits(name: str, tmp_path: Path) -> None:
    result = offloaded(SMALL, policy(tmp_path, update="backward", **PLACEMENTS[name]))
    harness.assert_same(result, reference(SMALL))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_delays_change_no_bits_of_updates_in_backward(
    seed: int, backend: str, tmp_path: Path
) -> None:
    chosen = policy(
        tmp_path, params="nvme", optim="nvme", ram="min", update="backward", io_backend=backend
    )
    harness.assert_same(
        offloaded(SMALL, chosen, Seam(delay_us_max=2000, seed=seed)), reference(SMALL)
    )


VARIANTS = {
    "accumulation": Training(models.Small, steps=3, accumulation=3, max_norm=None),
    "gradients in fp32": Training(
        models.Small, steps=3, accumulation=2, max_norm=None, grad_dtype=torch.float32
    ),
    "fp32": Training(models.Small, steps=3, accumulation=1, max_norm=None, dtype=torch.float32),
    "tied": Training(models.gpt2, steps=3, accumulation=2, max_norm=None, groups=False),
    "checkpointing": Training(
        models.Small, steps=3, accumulation=2, max_norm=None, checkpointing=False
    ),
    "reentrant": Training(models.Small, steps=3, accumulation=2, max_norm=None, checkpointing=True),
    "shared blocks": Training(models.albert, steps=3, accumulation=1, max_norm=None),
    "encoder and decoder": Training(models.t5, steps=3, accumulation=1, max_norm=None),
    "experts": Training(models.mixtral, steps=3, accumulation=1, max_norm=None),
}


@pytest.mark.parametrize(("update", "name"), alternating(["backward", "delayed"], VARIANTS))
def test_models_and_loops_keep_their_bits(name: str, update: str, tmp_path: Path) -> None:
    training = VARIANTS[name]
    chosen = policy(
        tmp_path,
        params="nvme",
        optim="nvme",
        ram="min",
        update=update,
        grad_dtype=training.grad_dtype,
        delayed_warmup=1,
    )
    expected = reference(training, warmup=1 if update == "delayed" else None)
    harness.assert_same(offloaded(training, chosen), expected)


def small(tmp_path: Path, update: str = "backward", **values: Any) -> tuple[nn.Module, inf.AdamW]:
    torch.manual_seed(0)
    chosen = inf.Policy(
        params="nvme", optim="nvme", nvme=tmp_path, ram="min", update=update, **values
    )
    model = inf.offload(models.Small(layers=4).bfloat16(), chosen)
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
    before = values_of_handle(model)
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()
    assert any(
        not torch.equal(before[name], value) for name, value in values_of_handle(model).items()
    )
    inf.handle(model).close()


def values_of_handle(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


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
    torch.manual_seed(0)
    chosen = inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram="min", update="backward")
    model = inf.offload(models.Small(layers=4).bfloat16(), chosen)
    inf.AdamW(model.parameters())
    set_up = inf.handle(model).parts.tiers.executor.stats().drives[0].writes
    inf.handle(model).close()
    torch.manual_seed(0)
    seam = Seam(fault=Fault("write", set_up + 2, persistent=True))
    model = offload(models.Small(layers=4).bfloat16(), chosen, _seam=seam)
    optimizer = inf.AdamW(model.parameters())
    with pytest.raises(StateInvalid):
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(StateInvalid):
        inf.handle(model).close()


def test_no_sync_wants_room_for_gradients(tmp_path: Path) -> None:
    """A model larger than its pools: what is left of the least budget holds no gradients."""

    def offload_with(ram: int | str) -> tuple[nn.Module, inf.AdamW]:
        torch.manual_seed(0)
        chosen = inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram=ram, update="backward")
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


@pytest.mark.parametrize(("warmup", "name"), alternating([0, 2], PLACEMENTS))
def test_the_delayed_update_is_the_delayed_reference_loops_bits(
    name: str, warmup: int, tmp_path: Path
) -> None:
    training = Training(models.Small, steps=6, accumulation=2)
    chosen = policy(tmp_path, update="delayed", delayed_warmup=warmup, **PLACEMENTS[name])
    harness.assert_same(offloaded(training, chosen), reference(training, warmup=warmup))


def test_clipping_by_value_keeps_the_bits_of_the_delayed_update(tmp_path: Path) -> None:
    training = Training(models.Small, steps=5, accumulation=2, max_value=0.003)
    chosen = policy(
        tmp_path, params="nvme", optim="nvme", ram="min", update="delayed", delayed_warmup=1
    )
    harness.assert_same(offloaded(training, chosen), reference(training, warmup=1))


@pytest.mark.parametrize("seed", [0, 1])
def test_delays_change_no_bits_of_the_delayed_update(seed: int, tmp_path: Path) -> None:
    training = Training(models.Small, steps=6, accumulation=2)
    chosen = policy(
        tmp_path, params="nvme", optim="nvme", ram="min", update="delayed", delayed_warmup=1
    )
    result = offloaded(training, chosen, Seam(delay_us_max=2000, seed=seed))
    harness.assert_same(result, reference(training, warmup=1))


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
        results.append(values_of_handle(model))
        handle.close()
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())


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
        results.append(values_of_handle(model))
        inf.handle(model).close()
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())


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
    assert torch.equal(
        model.state_dict()["embed.weight"], torch.full(weight.shape, 0.5).bfloat16()
    )
    with handle.gather(weight), torch.no_grad():
        weight.fill_(0.25)
    with torch.no_grad():
        assert loss_of(model).item() != seen
    handle.close()


def test_a_second_optimizer_is_refused_by_the_delayed_update(tmp_path: Path) -> None:
    torch.manual_seed(0)
    chosen = inf.Policy(params="nvme", optim="nvme", nvme=tmp_path, ram="min", update="delayed")
    model = inf.offload(models.Small(layers=4).bfloat16(), chosen)
    params = list(model.parameters())
    inf_a = inf.AdamW(params[:3])
    with pytest.raises(ValueError, match="one optimizer"):
        inf.AdamW(params[3:])
    assert inf_a is not None
    inf.handle(model).close()
