"""Loops that the matrix does not have: two forwards before a backward, a graph that is kept,
gradients and flags that the loop changes, an exception in recompute; and parameters of odd shapes.

`evaluate` and `fail_in_*` are values of the matrix.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from tests import harness, models
from tests.harness import Training

BATCH = models.token_batches(1, seed=99)[0]


@pytest.fixture
def nvme(tmp_path: Path) -> inf.Policy:
    """Everything on NVMe with the least RAM."""
    return harness.policy(tmp_path)


def evaluate(model: nn.Module, step: int) -> list[Any]:
    """Evaluation between forward and the next one: eval mode, no_grad, and generation where the
    model has it."""
    seen: list[Any] = []
    model.eval()
    with torch.no_grad():
        seen.append(models.loss_of(model, BATCH).item())
    generate = getattr(model, "generate", None)
    if generate is not None and hasattr(getattr(model, "config", None), "vocab_size"):
        tokens = generate(
            input_ids=models.beside(model, BATCH)["input_ids"],
            max_new_tokens=2,
            do_sample=False,
            num_beams=1 + step % 2,
        )
        seen.append(tokens.tolist())
    with torch.inference_mode():
        seen.append(models.loss_of(model, BATCH).item())
    model.train()
    return seen


def evaluate_only(model: nn.Module, step: int) -> list[float]:
    """Evaluation without generation."""
    model.eval()
    with torch.no_grad():
        seen = [models.loss_of(model, BATCH).item()]
    model.train()
    return seen


class Planned(Exception):
    """Raised on purpose."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated layers, in order; experts inside of them are not."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child.children()) if isinstance(child, nn.ModuleList) else blocks_of(child)
    return found


def fail_in_forward(model: nn.Module, step: int) -> None:
    """A forward that raises in the middle of the model."""

    def explode(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        raise KeyboardInterrupt if step % 2 else Planned

    handle = blocks_of(model)[-1].register_forward_hook(explode, with_kwargs=True)
    try:
        with pytest.raises((Planned, KeyboardInterrupt)):
            models.loss_of(model, BATCH)
    finally:
        handle.remove()


def fail_in_backward(model: nn.Module, step: int) -> None:
    """A backward that raises in the middle of the model."""

    def explode(grad: torch.Tensor) -> None:
        raise Planned

    def arm(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        tensor.register_hook(explode)

    handle = blocks_of(model)[0].register_forward_hook(arm, with_kwargs=True)
    try:
        loss = models.loss_of(model, BATCH)
        with pytest.raises(Planned):
            loss.backward()
    finally:
        handle.remove()


def fail_under_checkpointing(model: nn.Module, step: int) -> None:
    """A backward that raises while a block is recomputed."""
    calls = 0

    def explode(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Planned

    handle = blocks_of(model)[1].mlp.register_forward_pre_hook(explode)  # type: ignore[union-attr, operator]
    try:
        loss = models.loss_of(model, BATCH)
        with pytest.raises(Planned):
            loss.backward()
    finally:
        handle.remove()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_exception_in_recompute_leaves_a_clean_state(
    use_reentrant: bool, nvme: inf.Policy
) -> None:
    training = Training(
        models.llama, steps=3, checkpointing=use_reentrant, before=fail_under_checkpointing
    )
    harness.assert_same(harness.offloaded(training, nvme), harness.reference(training))


def test_two_forwards_then_two_backwards_in_either_order(nvme: inf.Policy) -> None:
    for turned in (False, True):

        def both(model: nn.Module, optimizer: Any, turned: bool = turned) -> list[float]:
            batches = models.token_batches(2, seed=5)
            losses = [models.loss_of(model, batch) for batch in batches]
            for loss in reversed(losses) if turned else losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return [loss.item() for loss in losses]

        assert train_by_hand(both, nvme) == train_by_hand(both, None)


def test_a_loss_summed_over_forwards_and_a_retained_graph(nvme: inf.Policy) -> None:
    def summed(model: nn.Module, optimizer: Any) -> list[float]:
        batches = models.token_batches(2, seed=6)
        loss = models.loss_of(model, batches[0]) + models.loss_of(model, batches[1])
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [loss.item()]

    assert train_by_hand(summed, nvme) == train_by_hand(summed, None)


def test_a_step_between_forward_and_backward_raises_as_in_torch(nvme: inf.Policy) -> None:
    def stale(model: nn.Module, optimizer: Any) -> list[float]:
        models.loss_of(model, BATCH).backward()
        loss = models.loss_of(model, BATCH)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
        return [models.loss_of(model, BATCH).item()]

    with harness.one_thread():
        model = inf.offload(models.make(models.llama), nvme)
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            stale(model, optimizer)
        inf.handle(model).close()


def train_by_hand(one_step: Any, policy: inf.Policy | None) -> list[list[float]]:
    """Three calls of `one_step(model, optimizer)` on a Llama, offloaded or plain; what they return,
    then a loss."""
    from tests.reference import ReferenceAdamW

    with harness.one_thread():
        model = models.make(models.llama)
        if policy is None:
            plain = ReferenceAdamW([{"params": model.parameters()}], lr=1e-2)
            return [one_step(model, plain) for _ in range(3)]
        inf.offload(model, policy)
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        try:
            return [one_step(model, optimizer) for _ in range(3)]
        finally:
            inf.handle(model).close()


def test_a_gradient_is_scaled_zeroed_and_replaced_as_in_torch(nvme: inf.Policy) -> None:
    def edited(model: nn.Module, optimizer: Any) -> list[float]:
        models.loss_of(model, BATCH).backward()
        params = dict(model.named_parameters())
        plain = not isinstance(optimizer, inf.AdamW)
        params["lm_head.weight"].grad = (
            torch.full_like(params["lm_head.weight"].grad, 0.5, device="cpu")
            if plain
            else torch.full(params["lm_head.weight"].shape, 0.5, dtype=torch.bfloat16)
        )
        params["model.norm.weight"].grad = None
        params["model.embed_tokens.weight"].grad *= 0.5  # a power of two: exact in bf16 as well
        params["model.layers.0.mlp.up_proj.weight"].grad.zero_()
        optimizer.step()
        optimizer.zero_grad()
        return [models.loss_of(model, BATCH).item()]

    assert train_by_hand(edited, nvme) == train_by_hand(edited, None)


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
    nvme: inf.Policy,
) -> None:
    model = inf.offload(Bytes(), nvme)
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
