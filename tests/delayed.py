"""The plain loop whose parameters lag one update behind: the reference of update="delayed"."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import infinity as inf
from infinity._src.engine.handle import Handle, offload
from infinity.aio import Seam
from tests import models
from tests.harness import Training, assert_same, values_of
from tests.reference import ReferenceAdamW


def set_values(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


class DelayedReference(ReferenceAdamW):
    """The plain loop, delayed by one step after `warmup` steps: the model holds what computes,
    `newest` what was updated.

    skip: a step whose gradients are not all finite is not taken.
    """

    def __init__(
        self, model: nn.Module, training: Training, warmup: int, *, skip: bool = False
    ) -> None:
        super().__init__(
            training.param_groups(model),
            lr=training.lr,
            weight_decay=training.weight_decay,
            order=model.parameters(),
        )
        self.model, self.warmup, self.skip = model, warmup, skip
        self.newest = values_of(model)
        self.taken = 0

    def step(self) -> None:
        if self.skip and not all(bool(grad.isfinite().all()) for grad in self.gradients().values()):
            return
        before = self.newest
        set_values(self.model, before)
        super().step()
        self.newest = values_of(self.model)
        if self.taken >= self.warmup:
            set_values(self.model, before)
        self.taken += 1

    def write(self, name: str, value: torch.Tensor) -> None:
        """Set a parameter by hand: what computes next, and what the next update changes."""
        param = dict(self.model.named_parameters())[name]
        with torch.no_grad():
            param.copy_(value)
            self.newest[name] = param.detach().clone()
            if param in self.states:
                self.states[param].master.copy_(value)


def opened(
    training: Training, chosen: inf.Policy, seam: Seam | None = None
) -> tuple[nn.Module, Any, Handle]:
    model = offload(training.model(), chosen, _seam=seam)
    return model, training.make_optimizer(model), inf.handle(model)


def reference_of(training: Training, warmup: int) -> tuple[nn.Module, DelayedReference]:
    """The plain model and its loop."""
    plain = training.model()
    return plain, DelayedReference(plain, training, warmup)


def take_step(
    model: nn.Module, optimizer: Any, batch: models.Batch, without: str | None = None
) -> float:
    """One step; without the gradients of parameters whose names begin so."""
    loss = models.loss_of(model, batch)
    loss.backward()
    for name, param in model.named_parameters():
        if without is not None and name.startswith(without):
            param.grad = None
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def assert_same_states(model: nn.Module, handle: Handle, reference: DelayedReference) -> None:
    """Parameters, masters, moments and step counts are those of the reference, bit for bit."""
    states = reference.states_of(reference.model)
    assert_same(values_of(model), reference.newest)
    assert_same(
        {name: dict(handle.optimizer_state(param)) for name, param in model.named_parameters()},
        states,
    )
