"""Models that run a batch in slices (`inf.microbatched`), and the loop over micro-batches to
compare with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import infinity as inf
from tests import harness, models
from tests.harness import Run, Training

Factory = Callable[[], nn.Module]
Loss = Callable[[Any], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Microbatched:
    """A factory of models that run in n slices."""

    factory: Factory
    n: int
    checkpoint: bool = True

    def __call__(self) -> nn.Module:
        return inf.microbatched(self.factory(), self.n, checkpoint=self.checkpoint)


def whole(training: Training, *, checkpoint: bool = True) -> Training:
    """Return the same training with one batch of all micro-batches, on a model that runs in slices.
    """
    count = training.accumulation
    made = dataclasses.replace(
        training,
        factory=Microbatched(training.factory, count, checkpoint),
        accumulation=1,
        no_sync=False,
        rows=count * training.rows,
    )
    ids = [batch["input_ids"] for batch in training.batches]
    assert torch.equal(torch.cat([batch["input_ids"] for batch in made.batches]), torch.cat(ids))
    return made


def of_steps(loop: Run, count: int) -> Run:
    """The results of a loop with one loss for each step: the sum over its micro-batches."""
    losses = []
    for first in range(0, len(loop.losses), count):
        total = torch.tensor(loop.losses[first])
        for loss in loop.losses[first + 1 : first + count]:
            total = total + torch.tensor(loss)
        losses.append(total.item())
    return dataclasses.replace(loop, losses=losses)


def assert_is_the_loop(ours: Run, training: Training, loop: Run | None = None) -> None:
    """Fail unless a training in slices has the bits of the plain loop, or of `loop`."""
    loop = harness.reference(training) if loop is None else loop
    harness.assert_same(ours, of_steps(loop, training.accumulation))


# -- gradients of one step -------------------------------------------------------------------------


def sliced(factory: Factory, n: int = 2, **values: Any) -> Any:
    """A model that runs in slices, in training mode."""
    return models.make(lambda: inf.microbatched(factory(), n, **values))


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the gradients, by name."""
    return {
        name: param.grad.clone()
        for name, param in model.named_parameters()
        if param.grad is not None
    }


def loop_grads(
    model: nn.Module, batches: Sequence[dict[str, Any]], loss_of: Loss = lambda out: out.loss
) -> dict[str, torch.Tensor]:
    """Gradients of the plain loop."""
    for batch in batches:
        (loss_of(model(**batch)) / len(batches)).backward()
    return grads_of(model)


def cut(batch: dict[str, Any], n: int) -> list[dict[str, Any]]:
    """The micro-batches of a batch."""
    parts = {name: torch.tensor_split(value, n) for name, value in batch.items()}
    return [{name: part[index] for name, part in parts.items()} for index in range(n)]


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """The names of tensors that are not the same."""
    assert ours.keys() == theirs.keys()
    return [name for name, value in theirs.items() if not torch.equal(ours[name], value)]


def assert_is_its_loop(
    factory: Factory,
    batch: dict[str, Any],
    n: int = 2,
    *,
    loss_of: Loss = lambda out: out.loss,
    apart: frozenset[str] = frozenset(),
    **values: Any,
) -> None:
    """Fail unless one step in slices gives the loop's gradients. The names `apart`, which several
    modules or calls use, need only be close."""
    model = sliced(factory, n, **values)
    loss_of(model(**batch)).backward()
    ours, loop = grads_of(model), loop_grads(models.make(factory), cut(batch, n), loss_of)
    assert set(differing(ours, loop)) <= apart
    for name in apart & loop.keys():
        torch.testing.assert_close(ours[name].float(), loop[name].float(), rtol=5e-2, atol=1e-3)
