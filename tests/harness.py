"""One training, twice: as the plain reference loop, and offloaded under a policy; and their
comparison, bit by bit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.distributed.transport import Transport
from infinity._src.engine.handle import offload
from infinity._src.kernels.tiling.tiled_module import whole_name
from infinity.aio import Seam
from infinity.errors import BudgetError
from tests import models
from tests.reference import (
    ReferenceAdamW,
    ReferenceLion,
    ReferenceScaler,
    ReferenceSGD,
    ReferenceTorch,
)

Between = Callable[[nn.Module, int], Any]
"""Something done to the model between micro-batches, or before a step; numbers that it returns are
compared."""


@dataclasses.dataclass(frozen=True)
class Training:
    """Description of a training: model, data, optimizer and loop. Hashable: reference runs are
    cached."""

    factory: Callable[[], nn.Module]
    steps: int = 3
    accumulation: int = 2
    max_norm: float | None = 1.0
    lr: float = 1e-2
    weight_decay: float = 0.1
    dtype: torch.dtype = torch.bfloat16
    grad_dtype: torch.dtype | None = None
    checkpointing: bool | None = None  # use_reentrant
    groups: bool = False  # no weight decay on vectors, as trainers do
    before: Between | None = None  # called before every step; gradients are cleared after it
    between: Between | None = None  # called after every micro-batch
    rows: int = 2
    optimizer: str = "AdamW"  # or SGD, Lion, or a class of torch.optim
    options: tuple[tuple[str, Any], ...] = ()  # of the optimizer
    scaler: tuple[float, int] | None = None  # GradScaler's init_scale and growth_interval
    poisoned: tuple[int, ...] = ()  # steps whose loss is infinite
    device: str = "cpu"  # what computes
    no_sync: bool = False  # micro-batches that are not the last of a step are marked as such
    autocast: str = ""  # forward in bf16: "cached" as torch does it, or "uncached"
    together: bool = False  # the engine runs a step's micro-batches by `handle.accumulate`
    max_value: float | None = None  # gradients are clipped by value first

    @property
    def batches(self) -> list[models.Batch]:
        """One batch per micro-batch."""
        return models.token_batches(self.steps * self.accumulation, rows=self.rows)

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        """The context of a forward."""
        if not self.autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.device, torch.bfloat16, cache_enabled=self.autocast == "cached")

    def lr_at(self, step: int) -> float:
        """A schedule that changes the rate at every step: warm-up, then decay."""
        return self.lr * min(1.0, (step + 1) / 3) * 0.97**step

    def model(self) -> nn.Module:
        """The fresh model, on the device that computes unless it was made on meta."""
        model: Any = models.make(self.factory, dtype=self.dtype)
        if not any(parameter.is_meta for parameter in model.parameters()):
            model.to(self.device)
        if self.checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": self.checkpointing})
            if any(not parameter.requires_grad for parameter in model.parameters()):
                model.enable_input_require_grads()
        return model

    def make_reference(self, model: nn.Module) -> ReferenceAdamW:
        """The optimizer of the plain loop."""
        made: Any = {"AdamW": ReferenceAdamW, "SGD": ReferenceSGD, "Lion": ReferenceLion}.get(
            self.optimizer
        )
        options = dict(self.options)
        if made is None:
            settings = {"lr": self.lr, "weight_decay": self.weight_decay, **options}
            options = {"torch_class": getattr(torch.optim, self.optimizer), "settings": settings}
            made = ReferenceTorch
        optimizer: ReferenceAdamW = made(
            self.param_groups(model),
            lr=self.lr,
            weight_decay=self.weight_decay,
            grad_dtype=self.grad_dtype,
            order=model.parameters(),
            **options,
        )
        return optimizer

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the offloaded model."""
        values = {"lr": self.lr, "weight_decay": self.weight_decay, **dict(self.options)}
        if self.optimizer in ("AdamW", "SGD", "Lion"):
            made: torch.optim.Optimizer = getattr(inf, self.optimizer)(
                self.param_groups(model), **values
            )
            return made
        return inf.Elementwise(
            getattr(torch.optim, self.optimizer), self.param_groups(model), **values
        )

    def clip_value(self, model: nn.Module, optimizer: Any) -> None:
        """Clip by value, if that is asked for."""
        if self.max_value is not None:
            if isinstance(optimizer, ReferenceAdamW):
                optimizer.clip_value(self.max_value)
            else:
                torch.nn.utils.clip_grad_value_(model.parameters(), self.max_value)

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """The parameters that are trained, in one group or two."""
        params = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self.groups:
            return [{"params": params}]
        return [
            {"params": [parameter for parameter in params if parameter.ndim > 1], "lr": 1.0},
            {
                "params": [parameter for parameter in params if parameter.ndim <= 1],
                "lr": 1.0,
                "weight_decay": 0.0,
            },
        ]


@dataclasses.dataclass
class Result:
    """Results of a training: losses, norms, values seen in the loop, final parameters, stats."""

    losses: list[float]
    norms: list[float]
    seen: list[Any]  # what `before` and `between` returned
    params: dict[str, torch.Tensor]
    stats: Any = None


def in_a_process(module: str, *arguments: object, **environment: str) -> str:
    """Standard output of `python -m module arguments`, which must succeed; for what must be alone
    in its process."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Sums are ordered by the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.lru_cache(maxsize=64)
def reference(training: Training) -> Result:
    """The plain loop."""
    with one_thread():
        model = training.model()
        optimizer = training.make_reference(model)
        scaler = ReferenceScaler(*training.scaler) if training.scaler is not None else None
        losses, norms, seen = run_loop(
            training, model, optimizer, lambda: optimizer.clip(training.max_norm or 0.0), scaler
        )
        return Result(losses, norms, seen, values_of(model))


def offloaded(
    training: Training,
    policy: inf.Policy,
    *,
    seam: Seam | None = None,
    load: Any = None,
    transport: type[Transport] | None = None,
) -> Result:
    """The same training through the engine. load: the model is made on the meta device and filled
    from it."""
    with one_thread():
        with torch.device("meta") if load is not None else contextlib.nullcontext():
            model = training.model()
        offload(model, policy, load=load, _seam=seam, _transport=transport)
        handle = inf.handle(model)
        try:
            optimizer = training.make_optimizer(model)
            clip = functools.partial(_clip, model, training.max_norm)
            scaler = None
            if training.scaler is not None:
                scale, interval = training.scaler
                scaler = torch.amp.GradScaler(
                    training.device, init_scale=scale, growth_interval=interval
                )
            losses, norms, seen = run_loop(
                training,
                model,
                optimizer,
                clip,
                scaler,
                handle.no_sync,
                handle.accumulate if training.together else None,
            )
            values = values_of(model)
            handle.flush()  # what is still being written is not counted yet
            return Result(losses, norms, seen, values, handle.stats())
        finally:
            handle.close()


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters by their names in the state dict, where the tiles of a weight are one."""
    state = model.state_dict()
    names = dict.fromkeys(whole_name(name) or name for name, _ in model.named_parameters())
    return {name: state[name].detach().to("cpu", copy=True) for name in names}


def least_ram(model: nn.Module, policy: inf.Policy) -> int:
    """The smallest `ram` that works, as the error says of one that does not."""
    with pytest.raises(BudgetError) as caught:
        offload(model, policy)
    return int(str(caught.value).split("works is ")[1].split(" bytes")[0])


def _clip(model: nn.Module, max_norm: float | None) -> torch.Tensor:
    assert max_norm is not None
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def run_loop(
    training: Training,
    model: nn.Module,
    optimizer: Any,
    clip: Callable[[], torch.Tensor],
    scaler: Any = None,
    no_sync: Callable[[], Any] = contextlib.nullcontext,
    accumulate: Callable[..., Any] | None = None,
) -> tuple[list[float], list[float], list[Any]]:
    losses, norms, seen = [], [], []
    batches = iter(training.batches)
    base = [group["lr"] if training.groups else 1.0 for group in optimizer.param_groups]
    for step in range(training.steps):
        for group, scale in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = training.lr_at(step) * scale
        if training.before is not None:
            seen.append(training.before(model, step))
            optimizer.zero_grad()

        def losses_of(batch: models.Batch, step: int = step) -> tuple[torch.Tensor, torch.Tensor]:
            with training.casting():
                loss = models.loss_of(model, batch) / training.accumulation
            if step in training.poisoned:
                loss = loss * float("inf")
            return (loss if scaler is None else scaler.scale(loss)), loss

        if accumulate is not None:
            micro_batches = [next(batches) for _ in range(training.accumulation)]
            losses += [loss.item() for _, loss in accumulate(micro_batches, losses_of)]
        for micro in range(training.accumulation if accumulate is None else 0):
            marked = training.no_sync and micro + 1 < training.accumulation
            with no_sync() if marked else contextlib.nullcontext():
                scaled, loss = losses_of(next(batches))
                scaled.backward()
            losses.append(loss.item())
            if training.between is not None:
                seen.append(training.between(model, step))
        if scaler is not None:
            scaler.unscale_(optimizer)
        training.clip_value(model, optimizer)
        if training.max_norm is not None:
            norms.append(clip().item())
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
        optimizer.zero_grad()
    return losses, norms, seen


def assert_equal(ours: Result, theirs: Result) -> None:
    """Losses, norms and final parameters are the same bits."""
    assert ours.losses == theirs.losses
    assert ours.norms == theirs.norms
    assert ours.seen == theirs.seen
    different = [
        name
        for name, value in theirs.params.items()
        if not torch.equal(_bits(ours.params[name]), _bits(value))
    ]
    assert ours.params.keys() == theirs.params.keys()
    assert not different, (
        f"{len(different)} of {len(theirs.params)} parameters differ: {different[:5]}"
    )


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.int16 if value.element_size() == 2 else torch.int32)
