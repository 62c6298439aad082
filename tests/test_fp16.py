"""fp16 parameters with torch's GradScaler: the bits of a plain loop with fp16 parameters and fp32
masters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import infinity as inf
from infinity.errors import NonFiniteGradient
from tests import harness, models
from tests.harness import Training, assert_same, policy

# Skips at 1 and 4, grows after two good steps: 512, 256, 256, 512, 256, 256, 512
SCALED = Training(
    models.Small,
    steps=7,
    dtype=torch.float16,
    lr=1e-3,
    scaler=(512.0, 2),
    poisoned=(1, 4),
    accumulation=2,
)


def test_a_scaled_fp16_loop_skips_backs_off_and_grows_as_torch_does(tmp_path: Path) -> None:
    """test_matrix.py has the scaler with each model, optimizer and policy."""
    result = harness.offloaded(SCALED, policy(tmp_path))
    expected = harness.reference(SCALED)
    assert expected.seen == [512.0, 256.0, 256.0, 512.0, 256.0, 256.0, 512.0]
    assert_same(result, expected)


def test_a_scale_that_overflows_fp16_backs_off_until_it_fits(tmp_path: Path) -> None:
    """No loss is infinite here; the gradients are, where they no longer fit fp16."""
    training = Training(
        models.Small, steps=12, dtype=torch.float16, lr=1e-3, scaler=(2.0**24, 50), accumulation=1
    )
    result = harness.offloaded(training, policy(tmp_path))
    expected = harness.reference(training)
    assert expected.seen[0] == 2.0**23
    assert expected.seen[-1] == expected.seen[-2] < 2.0**22
    assert_same(result, expected)


def test_without_a_scaler_an_overflow_is_raised_or_skipped(tmp_path: Path) -> None:
    for mode in ("raise", "skip"):
        model = inf.offload(
            models.make(models.Small, dtype=torch.float16),
            policy(tmp_path, on_nonfinite=mode),
        )
        optimizer = inf.AdamW(model.parameters())
        before = {name: value.clone() for name, value in model.state_dict().items()}
        (models.loss_of(model, models.token_batches(1)[0]) * 1e30).backward()
        if mode == "raise":
            with pytest.raises(NonFiniteGradient, match="not finite"):
                optimizer.step()
        else:
            optimizer.step()
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert inf.handle(model).optimizer_state(next(model.parameters()))["step"] == 0
        inf.handle(model).close()


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_a_loss_with_a_fixed_scale_may_be_updated_in_backward(
    grad_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    """The learning rate is divided by the scale, instead of the gradients."""
    scale = 256.0
    training = Training(
        models.Small,
        dtype=torch.float16,
        lr=0.5 / scale,
        weight_decay=0.0,
        optimizer="SGD",
        grad_dtype=grad_dtype,
    )
    with harness.one_thread():
        model = inf.offload(
            training.model(), policy(tmp_path, update="backward", grad_dtype=grad_dtype)
        )
        plain = training.model()
        both = ((model, training.make_optimizer(model)), (plain, training.make_reference(plain)))
        for batch in training.batches:
            for each, optimizer in both:
                (models.loss_of(each, batch) * scale).backward()
                optimizer.step()
                optimizer.zero_grad()
        states = model.state_dict()
        assert all(torch.equal(states[name], value) for name, value in plain.state_dict().items())
        inf.handle(model).close()


def test_a_scaler_is_refused_where_backward_updates_and_one_that_is_off_is_not(
    tmp_path: Path,
) -> None:
    model = inf.offload(
        models.make(models.Small, dtype=torch.float16), policy(tmp_path, update="backward")
    )
    optimizer = inf.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(models.loss_of(model, models.token_batches(1)[0])).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert inf.handle(model).optimizer_state(next(model.parameters()))["step"] == 1
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(models.loss_of(model, models.token_batches(1)[0])).backward()
    with pytest.raises(RuntimeError, match=r"GradScaler.*need update='deferred'"):
        scaler.step(optimizer)
    inf.handle(model).close()


def test_an_ordinary_fp16_tensor_may_be_a_gradient(tmp_path: Path) -> None:
    model = inf.offload(models.make(models.Small, dtype=torch.float16), policy(tmp_path))
    optimizer = inf.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.full(param.shape, 0.25, dtype=torch.float16)
        assert param.grad is not None
        assert param.grad.dtype is torch.float32  # a proxy: what is done to it is done in fp32
    assert torch.equal(inf.handle(model).full_grad(param), torch.full(param.shape, 0.25))
    optimizer.step()
    inf.handle(model).close()


def test_masters_are_finer_than_fp16(tmp_path: Path) -> None:
    """Steps far below the last bit of fp16 add up."""
    model = inf.offload(models.make(models.Small, dtype=torch.float16), policy(tmp_path))
    optimizer = inf.SGD(model.parameters(), lr=1.0)
    handle = inf.handle(model)
    param = next(model.parameters())
    start = handle.optimizer_state(param)["master"]
    for _ in range(3):
        handle.set_full_grad(param, torch.full(param.shape, 2.0**-20))
        optimizer.step()
    master = handle.optimizer_state(param)["master"]
    assert torch.equal(master, ((start - 2.0**-20) - 2.0**-20) - 2.0**-20)
    with handle.gather(param):
        assert torch.equal(param.detach(), master.half())
    handle.close()
