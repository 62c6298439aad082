"""A training in the shape of R1 (bench/r1.py), as the plain loop and on a drive. Each step has its
own tokens and learning rate, so that it can be taken again."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any

import torch

import infinity as inf
from bench.r1 import Workload, build_on_meta, fill
from infinity._src.engine.handle import offload
from tests.reference import ReferenceAdamW

SMALLER = Workload(hidden=512, layers=6, vocab=4096)
"""R1's shape with a seventh of its parameters."""


@dataclasses.dataclass(frozen=True)
class Course:
    """The model, and the batches and rates of its steps."""

    workload: Workload = SMALLER

    def batch(self, index: int) -> torch.Tensor:
        """Tokens of a step."""
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, self.workload.vocab, (1, self.workload.tokens), generator=generator)

    def rate(self, index: int) -> float:
        """The learning rate of a step: it goes up and down."""
        return self.workload.lr * (0.1 + abs(1 - index % 400 / 200))


class Plain:
    """The plain loop, its losses, and its parameters after the last step."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self.model = build_on_meta(course.workload)
        for name, param in self.model.named_parameters():
            value = torch.empty_like(param, device="cpu")
            fill(name, value)
            owner, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(owner), leaf, torch.nn.Parameter(value))
        self._optimizer = ReferenceAdamW(
            [{"params": list(self.model.parameters())}],
            lr=course.workload.lr,
            weight_decay=course.workload.weight_decay,
            order=self.model.parameters(),
        )
        self.losses: list[float] = []

    def loss(self, index: int) -> float:
        """The loss of a step; it is taken if it is the next one."""
        if index == len(self.losses):
            ids = self._course.batch(index)
            for group in self._optimizer.param_groups:
                group["lr"] = self._course.rate(index)
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self._optimizer.clip(self._course.workload.clip)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.losses.append(loss.item())
        return self.losses[index]


class Offloaded:
    """The same training on the drive. A step that is undone is taken again by the next call."""

    def __init__(self, course: Course, directory: Path, **values: Any) -> None:
        self._course = course
        tiers: dict[str, Any] = {"params": "nvme", "optim": "nvme", "nvme": directory, "ram": "min"}
        policy = inf.Policy(**{**tiers, **values})
        self.model: Any = offload(build_on_meta(course.workload), policy, load=fill)
        self.handle = inf.handle(self.model)
        self._optimizer = inf.AdamW(
            self.model.parameters(),
            lr=course.workload.lr,
            weight_decay=course.workload.weight_decay,
        )
        self.index = 0
        self.losses: list[float] = []

    @property
    def executor(self) -> Any:
        return self.handle.parts.tiers.executor

    def step(self) -> float:
        """Take step `index`. Returns its loss. Raises: StepUndone, AioError."""
        ids = self._course.batch(self.index)
        for group in self._optimizer.param_groups:
            group["lr"] = self._course.rate(self.index)
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._course.workload.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.index += 1
        return float(loss.item())

    def back(self) -> None:
        """Return to the last step that was not undone, after an error."""
        self._optimizer.zero_grad()
        counts = {state["step"] for state in self._optimizer.state_dict()["state"].values()}
        assert len(counts) == 1, f"parameters are at steps {counts}"
        self.index = int(counts.pop())

    def counters(self) -> collections.Counter[str]:
        """Traces that faults leave, and requests."""
        stats = self.executor.stats()
        found = collections.Counter[str](
            rereads=stats.rereads, moved_writes=stats.moved_writes
        )
        for drive in stats.drives:
            for name in ("reads", "writes", "retries", "short_transfers", "errors"):
                found[name] += getattr(drive, name)
            found["bytes"] += drive.bytes_read + drive.bytes_written
        return found


def compare(plain: Plain, ours: Offloaded) -> None:
    """Parameters are the same bits."""
    state = ours.model.state_dict()
    different = [
        name
        for name, value in plain.model.state_dict().items()
        if not torch.equal(value.view(torch.uint8), state[name].view(torch.uint8))
    ]
    assert not different, f"after step {ours.index}: {different}"
