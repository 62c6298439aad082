"""Two models in one process: trained in turns, in one graph, one budget between them; each is what
it would be alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.engine.handle import offload
from infinity.aio import Seam
from infinity.errors import BudgetError
from tests import harness, models
from tests.harness import Training
from tests.test_bitwise import policy

BUDGET = 64 << 20
MIN: dict[str, Any] = {"params": "nvme", "optim": "nvme", "ram": "min"}
FIRST = Training(models.llama, steps=4)
SECOND = Training(models.gpt2, steps=4, lr=3e-3, max_norm=0.5)
PLACES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "both on nvme": (MIN, MIN),
    "one on nvme, one in memory": (MIN, {"params": "cpu", "optim": "cpu"}),
    "one budget": ({**MIN, "ram": BUDGET}, {**MIN, "ram": BUDGET}),
    "another update mode": (MIN, {**MIN, "update": "delayed", "delayed_warmup": 99}),
}


@dataclasses.dataclass
class Arm:
    """One of the models, its loop taken apart into parts of a step."""

    training: Training
    model: Any
    optimizer: Any
    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)

    def loss(self, number: int) -> torch.Tensor:
        """Forward of one micro-batch."""
        loss = (
            models.loss_of(self.model, self.training.batches[number]) / self.training.accumulation
        )
        self.losses.append(loss.item())
        return loss

    def step(self, step: int) -> None:
        """Clip and step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.lr_at(step)
        assert self.training.max_norm is not None
        self.norms.append(
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.training.max_norm).item()
        )
        self.optimizer.step()
        self.optimizer.zero_grad()

    def result(self) -> harness.Run:
        """Return the losses, norms, final state and stats of the training."""
        names = [name for name, _ in self.model.named_parameters()]
        state = self.model.state_dict()
        stats = inf.handle(self.model).stats()
        return harness.Run(
            self.losses, self.norms, [], {name: state[name].clone() for name in names}, stats
        )


def arms(device: str, *chosen: inf.Policy) -> list[Arm]:
    """Both models, offloaded, each with separate delays."""
    found = []
    for number, (training, one) in enumerate(zip((FIRST, SECOND), chosen, strict=True)):
        training = dataclasses.replace(training, device=device)
        model = offload(training.model(), one, _seam=Seam(delay_us_max=1000, seed=number))
        found.append(Arm(training, model, training.make_optimizer(model)))
    return found


def finish(found: list[Arm]) -> list[harness.Run]:
    """Compare with what each model is alone, and close."""
    results = [arm.result() for arm in found]
    for arm, result in zip(found, results, strict=True):
        harness.assert_same(result, harness.reference(arm.training))
        inf.handle(arm.model).close()
    return results


@pytest.mark.parametrize("place", PLACES)
def test_models_trained_in_turns_are_each_what_they_are_alone(
    place: str, device: str, tmp_path: Path
) -> None:
    with harness.one_thread():
        found = arms(device, *(policy(tmp_path, **values) for values in PLACES[place]))
        for step in range(FIRST.steps):
            for micro in range(FIRST.accumulation):
                number = step * FIRST.accumulation + micro
                # Every forward of one lies between a forward and the backward of the other.
                losses = [arm.loss(number) for arm in found]
                for loss in losses if micro else reversed(losses):
                    loss.backward()
            for arm in found:
                arm.step(step)
        results = finish(found)
    if place == "one budget":
        assert sum(result.stats.ram_bytes for result in results) <= BUDGET


def test_one_graph_may_go_through_both(device: str, tmp_path: Path) -> None:
    """A sum of losses has one backward: each model's hooks fire in the other's graph task."""
    with harness.one_thread():
        found = arms(device, policy(tmp_path, **MIN), policy(tmp_path, **MIN))
        for step in range(FIRST.steps):
            for micro in range(FIRST.accumulation):
                number = step * FIRST.accumulation + micro
                first, second = (arm.loss(number) for arm in found)
                (first + second).backward()
            for arm in found:
                arm.step(step)
        finish(found)


def test_a_teacher_without_gradients_beside_its_student(device: str, tmp_path: Path) -> None:
    """Distillation: the teacher rests at 2 B per parameter, and its forward runs between the
    student's."""

    def train(student: Any, teacher: Any, optimizer: Any) -> list[float]:
        losses = []
        for batch in models.token_batches(3):
            ids = models.beside(student, batch)["input_ids"]
            with torch.no_grad():
                target = teacher(input_ids=ids).logits.float().softmax(-1)
            logits = student(input_ids=ids).logits.float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(0, 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    training = dataclasses.replace(FIRST, device=device)
    with harness.one_thread():
        student, teacher = training.model(), models.make(models.llama, seed=5).to(device)
        expected = train(student, teacher.requires_grad_(False), training.make_reference(student))
        student, teacher = training.model(), models.make(models.llama, seed=5).to(device)
        inf.offload(student, policy(tmp_path, **MIN))
        inf.offload(teacher.requires_grad_(False), policy(tmp_path, **MIN))
        assert train(student, teacher, training.make_optimizer(student)) == expected
        assert inf.handle(teacher).stats().grad_bytes == 0
        for model in (student, teacher):
            inf.handle(model).close()


def test_a_second_model_that_does_not_fit_is_refused_and_the_first_goes_on(
    device: str, tmp_path: Path
) -> None:
    with harness.one_thread():
        first = inf.offload(FIRST.model().to(device), policy(tmp_path, **MIN))
        optimizer = inf.AdamW(first.parameters())
        least = inf.handle(first).stats().ram_bytes
        small = policy(tmp_path, **{**MIN, "ram": least + (64 << 10)})
        second = SECOND.model().to(device)
        with pytest.raises(BudgetError):
            inf.offload(second, small)
            inf.AdamW(second.parameters())
        loss = models.loss_of(first, FIRST.batches[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert models.loss_of(first, FIRST.batches[0]).item() != loss.item()
        inf.handle(first).close()
