"""References for training on N ranks, in plain torch, in two forms.

`modelled`: one process plays all ranks with one model. Every rank's gradient is raised to fp32; the
gradients are summed in the order of ranks, divided by their number and rounded once; then the
reference update follows. The engine equals it bit for bit, but for the norm that clips: the ranks
add up squares of their own parts first.

`Ddp`: torch's own DistributedDataParallel over gloo with the same update. The engine equals it
within the rounding of DDP's reduction.

Shares no code with the engine but the quantized formats, which have tests of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from infinity._src.kernels.quantize import dequantize, quantize
from tests import harness, models
from tests.distributed.ranks import shard_of
from tests.harness import Result, Training
from tests.reference import ReferenceAdamW

Gradients = dict[nn.Parameter, torch.Tensor]
NORM_TOLERANCE = 2e-6
"""Relative: a few roundings of fp32 sums of squares."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """Rules by which the ranks exchange parameters and gradients.

    local: micro-batches add up on their rank, and the last is reduced with them. wire: the dtype in
    which gradients travel. nodes: the number of nodes that the ranks, in order, belong to; sums of
    nodes travel too. qwz, qgz, feedback: ZeRO++.
    """

    local: bool = False
    wire: torch.dtype | None = None
    nodes: int = 1
    qwz: bool = False
    qgz: bool = False
    feedback: bool = False


def coarse(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantize the values to `bits` bits in groups of 64 and return them dequantized, fp32."""
    return dequantize(quantize(values, bits=bits, group_numel=64), dtype=torch.float32)


class Mean:
    """The mean over ranks by the engine's rule; a rank without a gradient counts zeros."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        # rounding errors, by parameter, level and sender; bf16
        self._lost: dict[Any, torch.Tensor] = {}

    def of(
        self, name: Any, grads: Sequence[torch.Tensor | None], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return the means in the accumulation dtype `dtype`; None if no rank has a gradient."""
        shape = next((grad.shape for grad in grads if grad is not None), None)
        if shape is None:
            return None
        wire = self._rules.wire or dtype
        pieces = [
            torch.zeros(shape, dtype=wire) if grad is None else grad.to(dtype).to(wire)
            for grad in grads
        ]
        if 1 < self._rules.nodes < len(pieces):
            each = len(pieces) // self._rules.nodes
            sums = [
                self._sum(name, 0, pieces[at : at + each], at) for at in range(0, len(pieces), each)
            ]
            if self._rules.qgz:
                return (self._sum(name, 1, sums, 0) / len(grads)).to(dtype)
            return (
                self._sum(name, 1, [(one / each).to(wire) for one in sums], 0) / self._rules.nodes
            ).to(dtype)
        return (self._sum(name, 0, pieces, 0) / len(grads)).to(dtype)

    def _sum(
        self, name: Any, turn: int, pieces: Sequence[torch.Tensor], first: int
    ) -> torch.Tensor:
        total = None
        for sender, piece in enumerate(pieces, first):
            said = self._said((name, turn, sender), piece) if self._rules.qgz else piece.float()
            total = said.clone() if total is None else total + said
        assert total is not None
        return total

    def _said(self, sender: Any, piece: torch.Tensor) -> torch.Tensor:
        if not self._rules.feedback:
            return coarse(piece, 4)
        meant = (
            piece.float() + self._lost[sender].float() if sender in self._lost else piece.float()
        )
        said = coarse(meant, 4)
        self._lost[sender] = (meant - said).to(torch.bfloat16)
        return said


@dataclasses.dataclass(frozen=True)
class Modelled:
    """losses: by rank, then by micro-batch."""

    losses: list[list[float]]
    norms: list[float]
    params: dict[str, torch.Tensor]


PLAIN = Rules()


def modelled(
    training: Training, world: int, rules: Rules = PLAIN, *, norms: Sequence[float] | None = None
) -> Modelled:
    """The training on `world` ranks. norms: the ranks' own, by which gradients are clipped here,
    too; the plain norms must be near them."""
    with harness.one_thread():
        model = training.model()
        # Gradients are converted to fp32 here, not by hooks.
        optimizer = dataclasses.replace(training, grad_dtype=None).make_reference(model)
        batches = [iter(shard_of(training, rank, world).batches) for rank in range(world)]
        losses: list[list[float]] = [[] for _ in range(world)]
        found, mean = [], Mean(rules)
        for step in range(training.steps):
            for group in optimizer.param_groups:
                group["lr"] = training.lr_at(step)
            parts: list[list[Gradients]] = []
            fine = _made_coarse(model) if rules.qwz else {}
            for _ in range(training.accumulation):
                micro = []
                for rank in range(world):
                    loss, grads = _backward(training, model, next(batches[rank]))
                    losses[rank].append(loss)
                    micro.append(grads)
                parts.append(micro)
            for param, value in fine.items():
                param.data = value
            if rules.local:
                parts = [[_added([micro[rank] for micro in parts]) for rank in range(world)]]
            _assign(training, model, optimizer, parts, mean)
            if training.max_norm is not None:
                given = None if norms is None else norms[step]
                found.append(_clip(optimizer, training.max_norm, given))
            optimizer.step()
            optimizer.zero_grad()
        return Modelled(losses, found, harness.values_of(model))


def _made_coarse(model: nn.Module) -> Gradients:
    """Make the model compute with its weights rounded to int8 groups; returns the weights."""
    fine = {param: param.data for param in model.parameters()}
    for param, value in fine.items():
        param.data = coarse(value, 8).to(value.dtype)
    return fine


def _backward(training: Training, model: nn.Module, batch: models.Batch) -> tuple[float, Gradients]:
    """Return loss and gradients of one micro-batch of one rank, in the accumulation dtype."""
    loss = models.loss_of(model, batch) / training.accumulation
    loss.backward()
    grads = {}
    for param in model.parameters():
        if param.grad is not None:
            grads[param] = param.grad.to(training.grad_dtype or param.dtype)
            param.grad = None
    return loss.item(), grads


def _assign(
    training: Training,
    model: nn.Module,
    optimizer: ReferenceAdamW,
    parts: list[list[Gradients]],
    mean: Mean,
) -> None:
    """Give the optimizer the gradients of all ranks' micro-batches. parts: by micro-batch, by rank.
    """
    for param in model.parameters():
        dtype = training.grad_dtype or param.dtype
        total = None
        for micro in parts:
            one = mean.of(param, [grads.get(param) for grads in micro], dtype)
            if one is not None:
                total = one if total is None else total + one
        if total is None:
            continue
        if dtype is param.dtype:
            param.grad = total
        else:
            optimizer._wide[param] = total


def _added(micro: Sequence[Gradients]) -> Gradients:
    """Return one rank's sum over micro-batches, in the accumulation dtype."""
    total: Gradients = {}
    for grads in micro:
        for param, grad in grads.items():
            total[param] = total[param] + grad if param in total else grad
    return total


def _clip(optimizer: ReferenceAdamW, max_norm: float, given: float | None) -> float:
    grads = optimizer.gradients()
    norm = torch.nn.utils.get_total_norm(list(grads.values())).item()
    if given is not None:
        assert given == pytest.approx(norm, rel=NORM_TOLERANCE)
        norm = given
    carriers = [nn.Parameter(torch.empty_like(grad)) for grad in grads.values()]
    for carrier, grad in zip(carriers, grads.values(), strict=True):
        carrier.grad = grad
    torch.nn.utils.clip_grads_with_norm_(
        carriers, max_norm, torch.tensor(norm, dtype=torch.float32)
    )
    optimizer._clipped = grads
    return norm


def assert_modelled(results: Sequence[Result], training: Training, rules: Rules = PLAIN) -> None:
    """The ranks' results are what the plain model of them gives, bit for bit (norms: nearly, and
    then taken as they are).

    Parameters are those that rest, which the state dict shows also where qwz rounds what computes.
    """
    wanted = modelled(training, len(results), rules, norms=results[0].norms or None)
    for rank, result in enumerate(results):
        assert result.losses == wanted.losses[rank], rank
        assert result.norms == results[0].norms, rank
        harness.assert_equal(
            Result(result.losses, [], [], result.params),
            Result(result.losses, [], [], wanted.params),
        )


@dataclasses.dataclass(frozen=True)
class Ddp:
    """Trainings on this rank's rows with DistributedDataParallel, each clipped and updated by the
    reference."""

    trainings: tuple[Training, ...]

    def __call__(self, rank: int, place: Path) -> list[Result]:
        return [self.trained(training, rank) for training in self.trainings]

    def trained(self, training: Training, rank: int) -> Result:
        shard = shard_of(training, rank, dist.get_world_size())
        model = shard.model()
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = shard.make_reference(model)

        def clip() -> torch.Tensor:
            return optimizer.clip(shard.max_norm or 0.0)

        losses, norms, seen = harness.run_loop(
            shard, wrapped, optimizer, clip, no_sync=wrapped.no_sync
        )
        return Result(losses, norms, seen, harness.values_of(model))


def assert_near(
    ours: Result, theirs: Result, *, losses: float, norms: float, share: float, far: float
) -> None:
    """Within rounding. losses, norms: relative; share: of each parameter's elements that are near
    `theirs`, by 2e-3 of their own size or a tenth of `far`; the rest differ by `far` at most.

    AdamW's first steps divide a gradient by its own size: where it is rounding noise, its sign is
    chance, and an element may go the other way by the rate of each step.
    """
    assert ours.losses == pytest.approx(theirs.losses, rel=losses)
    assert ours.norms == pytest.approx(theirs.norms, rel=norms)
    assert ours.params.keys() == theirs.params.keys()
    for name, value in theirs.params.items():
        mine, other = ours.params[name].float(), value.float()
        near = torch.isclose(mine, other, rtol=2e-3, atol=far / 10)
        assert near.float().mean() >= share, (name, near.float().mean())
        assert (mine - other).abs().max() <= far, (name, (mine - other).abs().max())
