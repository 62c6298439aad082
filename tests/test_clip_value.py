"""Clipping by value (torch.nn.utils.clip_grad_value_): the bits of the plain loop, wherever
gradients wait and whenever updates run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from tests import harness, models
from tests.device import simulated
from tests.harness import Training
from tests.test_fp16 import SCALED

SMALL = Training(models.Small, steps=3, max_value=0.003)
MIN = {"params": "nvme", "optim": "nvme", "ram": "min"}
POLICIES: dict[str, dict[str, Any]] = {
    "deferred": MIN,
    "spilled": {
        "grads": "nvme",
        "unit_bytes_max": 4096,
        "resident": {"params": 0.0, "optim": 0.0},
        **MIN,
    },
    "ahead of the step": {"update": "backward", "generations": 2, **MIN},
}


def offloaded(training: Training, tmp_path: Path, **values: Any) -> harness.Run:
    values = {"grad_dtype": training.grad_dtype, **values}
    if values.get("grads") == "nvme":
        least = harness.offloaded(training, inf.Policy(nvme=tmp_path, **values)).stats
        # Room for a part of the gradients only.
        values["ram"] = least.ram_min_bytes - least.grad_bytes // 6
    if "nvme" in values.values():
        values["nvme"] = tmp_path
    found = harness.offloaded(training, inf.Policy(**values))
    assert bool(found.stats.spilled_bytes) == (values.get("grads") == "nvme")
    return found


@pytest.mark.parametrize("name", POLICIES)
def test_the_bits_are_those_of_the_plain_loop_under_every_policy(
    name: str, tmp_path: Path
) -> None:
    found = offloaded(SMALL, tmp_path, **POLICIES[name])
    harness.assert_same(found, harness.reference(SMALL))
    # The bound is one that gradients pass: else nothing was tested.
    assert found.norms != harness.reference(dataclasses.replace(SMALL, max_value=None)).norms


@pytest.mark.parametrize("update_on", ["cpu", "device"])
def test_the_bits_are_those_of_the_plain_loop_for_a_device_with_memory_of_its_own(
    update_on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = harness.reference(SMALL)
    with simulated(monkeypatch):
        found = offloaded(SMALL, tmp_path, update_on=update_on, **MIN)
    harness.assert_same(found, expected)
    assert (found.stats.terms is None) == (update_on == "device")


def test_a_gradient_that_was_unscaled_is_clipped_in_fp32(tmp_path: Path) -> None:
    training = dataclasses.replace(SCALED, max_value=0.003)
    found = offloaded(training, tmp_path, **MIN)
    harness.assert_same(found, harness.reference(training))


def test_a_bound_of_one_is_no_factor_of_one(tmp_path: Path) -> None:
    """Factors of 1 are left out of what the update replays."""
    steep = dataclasses.replace(SMALL, max_value=1.0, between=steepen)
    found = offloaded(steep, tmp_path, **POLICIES["ahead of the step"])
    harness.assert_same(found, harness.reference(steep))
    loose = dataclasses.replace(steep, max_value=None)
    assert found.norms != harness.reference(loose).norms


def steepen(model: torch.nn.Module, _step: int) -> None:
    """Make gradients as large as those of a steep loss; a power of two, which rounds nothing."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(1024.0)
