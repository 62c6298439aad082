"""Placement never changes the numbers, over many steps, pauses and models that are filled from a
checkpoint. test_matrix.py has each pair of models, loops and policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity.aio import Seam
from tests import harness, models
from tests.harness import Training

TWENTY = Training(models.Small, steps=20)


def wide_llama() -> nn.Module:
    """Two layers whose units take several chunks each."""
    return models.llama(layers=2, hidden=288)


def policy(tmp_path: Path, **values: Any) -> inf.Policy:
    """A policy, with two NVMe directories if a tier needs them; io=None: the drives are measured at
    set-up."""
    if "nvme" in values.values():
        places = [tmp_path / "a", tmp_path / "b"]
        for place in places:
            place.mkdir(exist_ok=True)
        values.setdefault("nvme", places)
        values.setdefault(
            "io", {"bandwidths": {str(places[0]): (3e9, 2e9), str(places[1]): (2e9, 1e9)}}
        )
    return inf.Policy(**values)


def test_many_steps_are_the_reference_loops_bits_on_drives_that_were_measured(
    tmp_path: Path,
) -> None:
    chosen = policy(tmp_path, params="nvme", optim="nvme", ram="min", io=None)
    result = harness.offloaded(TWENTY, chosen, seam=Seam(delay_us_max=1500, seed=0))
    harness.assert_same(result, harness.reference(TWENTY))
    assert min(result.norms) < max(result.norms)


class MixedDtypes(models.ListMoe):
    """A model that keeps its norms and router in fp32, whatever it is cast to."""

    def __init__(self) -> None:
        super().__init__(hidden=16, experts=4)
        for block in self.blocks:
            block.gate.register_forward_pre_hook(lambda module, args: (args[0].float(),))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        for block in self.blocks:
            block.gate.float()  # type: ignore[union-attr, operator]
        return self


@pytest.mark.parametrize("kind", ["directory", "mapping", "callable"])
def test_a_model_filled_from_the_meta_device_trains_as_one_that_was_in_memory(
    kind: str, tmp_path: Path
) -> None:
    training = Training(models.llama, steps=2)
    real = training.model()
    state = real.state_dict()
    real.save_pretrained(tmp_path / "checkpoint")  # type: ignore[operator]
    load: Any = {
        "directory": tmp_path / "checkpoint",
        "mapping": state,
        "callable": lambda name, out: out.copy_(state[name]),
    }[kind]
    result = harness.offloaded(
        training, policy(tmp_path, params="nvme", optim="nvme", ram="min"), load=load
    )
    harness.assert_same(result, harness.reference(training))


def test_the_loop_stays_near_torch_adamw_on_fp32_masters() -> None:
    """The one difference is rounding: torch fuses operations."""
    training = Training(models.Small, steps=20, lr=1e-3)
    with harness.one_thread():
        model = training.model()
        masters = [nn.Parameter(parameter.detach().float()) for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(masters, lr=training.lr, weight_decay=training.weight_decay)
        losses = []
        batches = iter(training.batches)
        for step in range(training.steps):
            optimizer.param_groups[0]["lr"] = training.lr_at(step)
            for _ in range(training.accumulation):
                loss = models.loss_of(model, next(batches)) / training.accumulation
                loss.backward()
                losses.append(loss.item())
            for master, parameter in zip(masters, model.parameters(), strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.float()
                parameter.grad = None
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.data.copy_(master.data)
    ours = harness.offloaded(training, inf.Policy(params="cpu", optim="cpu"))
    assert ours.losses == pytest.approx(losses, rel=2e-3)
    for name, parameter in model.named_parameters():
        difference = (ours.params[name].float() - parameter.float()).abs()
        assert difference.mean() < 1e-3, name
