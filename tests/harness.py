"""One training, twice: as the plain loop, and offloaded under a policy; and their comparison, bit
by bit.

    wanted = trained(None, steps=4)                                # the plain loop
    run = trained(policy(tmp_path), steps=4, faults=Seam(...))     # the engine
    assert_same(run, wanted)

For a test's own model and optimizer: `step`, `train`, `values_of`, `states_of`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.distributed.transport import Transport
from infinity._src.engine.handle import offload
from infinity._src.kernels.newton_schulz import product_dtype
from infinity._src.kernels.tiling.tiled_module import whole_name
from infinity.aio import Seam
from infinity.errors import BudgetError
from tests import models
from tests.reference import (
    Delayed,
    ReferenceAdamW,
    ReferenceLion,
    ReferenceMuon,
    ReferenceScaler,
    ReferenceSGD,
    ReferenceTorch,
)

Between = Callable[[nn.Module, int], Any]
"""Action on the model between micro-batches, or before a step; returned numbers are compared."""


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
    delayed: int | None = None  # the plain loop lags one update behind after so many steps
    states: bool = False  # the runs hold the optimizer states (of AdamW)

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
        """Return a fresh model, on the computing device unless it was made on meta."""
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
        made: Any = {
            "AdamW": ReferenceAdamW,
            "SGD": ReferenceSGD,
            "Lion": ReferenceLion,
            "Muon": ReferenceMuon,
        }.get(self.optimizer)
        options = dict(self.options)
        if self.optimizer == "Muon":
            device = torch.device(self.device)
            options.update(matrices=hidden_matrices(model), product_dtype=product_dtype(device))
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
        if self.optimizer in ("AdamW", "SGD", "Lion", "Muon"):
            made: torch.optim.Optimizer = getattr(inf, self.optimizer)(
                self.param_groups(model), **values
            )
            return made
        return inf.Elementwise(
            getattr(torch.optim, self.optimizer), self.param_groups(model), **values
        )

    def clip_value(self, model: nn.Module, optimizer: Any) -> None:
        if self.max_value is not None:
            if hasattr(optimizer, "clip_value"):
                optimizer.clip_value(self.max_value)
            else:
                torch.nn.utils.clip_grad_value_(model.parameters(), self.max_value)

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the trained parameters, in one group or two."""
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


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the tests' models that Muon updates."""
    others = {
        id(param)
        for name, module in model.named_modules()
        for param in module.parameters(recurse=False)
        if isinstance(module, nn.Embedding) or name.rpartition(".")[2] in ("head", "lm_head")
    }
    return [p for p in model.parameters() if p.ndim in (2, 3) and id(p) not in others]


States = dict[str, dict[str, Any]]
"""Optimizer states by the parameter's name, then by the state's: "master", "exp_avg", "step"."""


@dataclasses.dataclass
class Run:
    """Results of a training. `assert_same` compares all but the stats, which are the engine's."""

    losses: list[float]
    norms: list[float]
    seen: list[Any]  # what `before` and `between` returned
    params: dict[str, torch.Tensor]
    stats: Any = None
    states: States | None = None  # if Training.states asks for them


def policy(place: Path | None = None, **values: Any) -> inf.Policy:
    """Return a policy with all states on NVMe in `place`, and the least memory; without `place` all
    in memory. `values` override fields."""
    if place is not None:
        values = {"params": "nvme", "optim": "nvme", "nvme": place, "ram": "min"} | values
    return inf.Policy(**values)


def trained(
    chosen: inf.Policy | None,
    factory: Callable[[], nn.Module] = models.Small,
    *,
    faults: Seam | None = None,
    load: Any = None,
    **training: Any,
) -> Run:
    """Train a fresh model as `training` says (fields of Training), under a policy, or, without one,
    as the plain loop. Plain runs are cached: do not change their tensors."""
    if chosen is None:
        return reference(Training(factory, **training))
    return offloaded(Training(factory, **training), chosen, seam=faults, load=load)


def step(
    model: nn.Module,
    optimizer: Any,
    batch: Any,
    *,
    clip: float | None = None,
    loss_of: Callable[[Any, Any], torch.Tensor] = models.loss_of,
) -> float:
    """One step of the engine's optimizer or of a reference one. Returns the loss."""
    loss = loss_of(model, batch)
    loss.backward()
    if clip is not None and isinstance(optimizer, ReferenceAdamW):
        optimizer.clip(clip)
    elif clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(
    model: nn.Module, optimizer: Any, batches: int | Iterable[Any] = 3, **options: Any
) -> list[float]:
    """Take one `step` per batch; a number means that many of `models.token_batches`. Returns the
    losses."""
    if isinstance(batches, int):
        batches = models.token_batches(batches)
    return [step(model, optimizer, batch, **options) for batch in batches]


def in_a_process(module: str, *arguments: object, **environment: str) -> str:
    """Standard output of `python -m module arguments`, which must succeed; for code that needs a
    separate process."""
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
def reference(training: Training) -> Run:
    """Run the plain loop."""
    with one_thread():
        model = training.model()
        made = training.make_reference(model)
        optimizer: Any = made
        if training.delayed is not None:
            optimizer = Delayed(made, model, training.delayed)
        scaler = ReferenceScaler(*training.scaler) if training.scaler is not None else None
        losses, norms, seen = run_loop(
            training, model, optimizer, lambda: optimizer.clip(training.max_norm or 0.0), scaler
        )
        if training.delayed is not None:
            optimizer.catch_up()
        states = made.states_of(model) if training.states else None
        return Run(losses, norms, seen, values_of(model), states=states)


def offloaded(
    training: Training,
    policy: inf.Policy,
    *,
    seam: Seam | None = None,
    load: Any = None,
    transport: type[Transport] | None = None,
) -> Run:
    """Run the same training through the engine. load: the model is made on the meta device and
    filled from it."""
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
            run = Run(losses, norms, seen, values, handle.stats())
            run.states = states_of(model) if training.states else None
            return run
        finally:
            handle.close()


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters by their state dict names; the tiles of a weight are one tensor."""
    state = model.state_dict()
    names = dict.fromkeys(whole_name(name) or name for name, _ in model.named_parameters())
    return {name: state[name].detach().to("cpu", copy=True) for name in names}


def least_ram(model: nn.Module, policy: inf.Policy) -> int:
    """Return the smallest `ram` that works, from the error of a smaller one."""
    with pytest.raises(BudgetError) as caught:
        offload(model, policy)
    return int(str(caught.value).split("works is ")[1].split(" bytes")[0])


def least_to_train(training: Training, policy: inf.Policy) -> int:
    """Return the smallest `ram` that the model and its optimizer accept."""
    ram = least_ram(training.model(), dataclasses.replace(policy, ram=1))
    while True:
        model = offload(training.model(), dataclasses.replace(policy, ram=ram))
        try:
            training.make_optimizer(model)
        except BudgetError as error:
            ram = error.smallest_bytes
        else:
            return ram
        finally:
            inf.handle(model).close()


def states_of(model: nn.Module) -> States:
    """Copies of the optimizer states of an offloaded model's trained parameters."""
    handle = inf.handle(model)
    return {
        name: {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in handle.optimizer_state(param).items()
        }
        for name, param in model.named_parameters()
        if param.requires_grad
    }


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


def assert_same(ours: Any, theirs: Any) -> None:
    """Fail unless both have the same bits: runs, models (their parameters), tensors, numbers, dicts
    and lists. The message names the first difference."""
    difference = _difference(_comparable(ours), _comparable(theirs), "")
    assert difference is None, difference


def _comparable(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return values_of(value)
    if not isinstance(value, Run):
        return value
    fields = {"losses": value.losses, "norms": value.norms, "seen": value.seen}
    states = {} if value.states is None else {"states": value.states}
    return {**fields, "params": value.params, **states}


def _difference(ours: Any, theirs: Any, path: str) -> str | None:
    """Name the first place in which two values differ, or return None."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return f"{path or 'names'}: differ by {sorted(map(str, ours.keys() ^ theirs.keys()))}"
        pairs = [(f"{path}.{key}".lstrip("."), ours[key], theirs[key]) for key in theirs]
    elif isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return f"{path}: {len(ours)} values, not {len(theirs)}"
        pairs = [(f"{path}[{i}]", *pair) for i, pair in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor):
        return _unlike(ours, theirs, path)
    elif ours == theirs or _both_nan(ours, theirs):
        return None
    else:
        return f"{path}: {ours!r}, not {theirs!r}"
    found = (_difference(mine, other, where) for where, mine, other in pairs)
    return next(itertools.filterfalse(lambda each: each is None, found), None)


def _both_nan(ours: Any, theirs: Any) -> bool:
    return all(isinstance(value, float) and math.isnan(value) for value in (ours, theirs))


def _unlike(ours: torch.Tensor, theirs: torch.Tensor, path: str) -> str | None:
    """Name the first element whose bits differ."""
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return f"{path}: {ours.dtype} {[*ours.shape]}, not {theirs.dtype} {[*theirs.shape]}"
    mine, other = (value.detach().cpu().contiguous().reshape(-1) for value in (ours, theirs))
    unlike = mine.view(torch.uint8) != other.view(torch.uint8)
    places = unlike.view(-1, ours.element_size()).any(1).nonzero().flatten().tolist()
    if not places:
        return None
    at = places[0]
    return (
        f"{path}: {len(places)} of {mine.numel()} elements differ, the first is element {at}: "
        f"{mine[at].item()!r}, not {other[at].item()!r}"
    )


# Other names of these, which tests use.
Result = Run
assert_equal = assert_same
