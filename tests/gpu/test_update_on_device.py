"""States are updated on the device: the bits of an update on the CPU, by torch and by Triton.

The model computes on the same device in both runs, so only the place of the update differs. On the
simulated device the twin of this is in tests/test_device.py, for more policies.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.kernels import choice
from infinity._src.kernels.update import UpdatePlan
from tests import harness, models
from tests.test_device import NVME, POLICIES

TWINS_ON_CPU = True

UPDATED_THERE = {name: given for name, given in POLICIES.items() if "update_on" in given}
EXACT = {**NVME, "ram": "min", "update_on": "device"}


@pytest.fixture
def updated_there(device: str, request: pytest.FixtureRequest) -> str:
    """The device, where it is not the CPU: updates on the CPU are where it computes."""
    if request.node.callspec.params["device"] == "cpu":
        pytest.skip("update_on='device' is for models that compute on another device")
    return device


def trained(given: dict[str, Any], device: str, directory: Path, **values: Any) -> harness.Run:
    """Three steps, as test_device trains, on this device."""
    training = harness.Training(models.llama, steps=3, device=device)
    nvme = {"nvme": directory} if "nvme" in given.values() else {}
    return harness.offloaded(dataclasses.replace(training, **values), inf.Policy(**given, **nvme))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The implementation of each chunk that is updated on the device."""
    found: list[str] = []
    run = UpdatePlan.run

    def seen_run(self: UpdatePlan, *arguments: Any, **named: Any) -> Any:
        found.append("torch" if self._launches is None else "triton")
        return run(self, *arguments, **named)

    monkeypatch.setattr(UpdatePlan, "run", seen_run)
    return found


@pytest.mark.parametrize("implementation", choice.IMPLEMENTATIONS)
@pytest.mark.parametrize("name", UPDATED_THERE)
def test_the_bits_of_an_update_on_the_cpu(
    name: str, implementation: str, updated_there: str, tmp_path: Path, seen: list[str]
) -> None:
    given = UPDATED_THERE[name]
    expected = trained({**given, "update_on": "cpu"}, updated_there, tmp_path)
    assert not seen
    with choice.forced(update=implementation):
        found = trained(given, updated_there, tmp_path)
    harness.assert_same(found, expected)
    assert set(seen) == {implementation}  # or nothing was updated there


@pytest.mark.parametrize("optimizer", ["SGD", "Lion"])
def test_other_optimizers(
    optimizer: str, updated_there: str, tmp_path: Path, seen: list[str]
) -> None:
    options = (("momentum", 0.9),) if optimizer == "SGD" else ()
    values = {"optimizer": optimizer, "options": options, "lr": 1e-3}
    expected = trained({**EXACT, "update_on": "cpu"}, updated_there, tmp_path, **values)
    found = trained(EXACT, updated_there, tmp_path, **values)
    harness.assert_same(found, expected)
    assert seen


def test_gradients_in_fp32_are_read_where_they_are_pinned(
    updated_there: str, tmp_path: Path, seen: list[str]
) -> None:
    given = {**EXACT, "grad_dtype": torch.float32}
    values = {"grad_dtype": torch.float32}
    expected = trained({**given, "update_on": "cpu"}, updated_there, tmp_path, **values)
    harness.assert_same(trained(given, updated_there, tmp_path, **values), expected)
    assert seen


def test_the_environment_chooses_the_implementation(
    updated_there: str, tmp_path: Path, seen: list[str]
) -> None:
    """With INFINITY_OPS=update=triton Triton updates, without a change of the code."""
    expected = trained({**EXACT, "update_on": "cpu"}, updated_there, tmp_path)
    harness.assert_same(trained(EXACT, updated_there, tmp_path), expected)
    forced = os.environ.get(choice.VARIABLE, "").rpartition("=")[2]
    assert set(seen) == {forced or choice.implementation("update", torch.device(updated_there))}
