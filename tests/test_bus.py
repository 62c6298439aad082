"""No pageable memory, and no copy that blocks, on any training path of a device with memory of its
own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import infinity as inf
from infinity._src.cabi.records import HYPER, SEG, Algorithm, Format, GradDtype
from infinity._src.kernels.update import UpdatePlan
from tests import harness, models
from tests.bus import assert_smooth, watched
from tests.device import simulated
from tests.marks import mostly_slow
from tests.test_device import NVME, POLICIES, alike, train

QUICK = ("device", "spilled", "speculative", "delayed", "updated there, compact")


@pytest.mark.parametrize("name", mostly_slow(POLICIES, *QUICK))
def test_training_uses_the_bus_by_the_executor_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched() as bus, simulated(monkeypatch):
        train(alike(POLICIES[name]), POLICIES[name], tmp_path)
    assert_smooth(bus)


@pytest.mark.parametrize("optimizer", mostly_slow(["SGD", "Lion", "Adagrad"], "SGD", "Adagrad"))
@pytest.mark.parametrize("checkpointing", [None, True])
def test_other_loops(
    optimizer: str, checkpointing: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = harness.Training(
        models.Small, optimizer=optimizer, lr=1e-3, checkpointing=checkpointing, scaler=(4.0, 2)
    )
    with watched() as bus, simulated(monkeypatch):
        train(training, {**NVME, "ram": "min"}, tmp_path)
    assert_smooth(bus)


def unheld(**given: Any) -> list[torch.Tensor]:
    """Sums of gradients before there is an optimizer, and the parameters after steps with one."""
    model = inf.offload(models.make(models.Small), inf.Policy(**given))
    batches: Any = models.token_batches(4)
    with harness.one_thread():
        for batch in batches[:2]:
            models.loss_of(model, batch).backward()
        found = [param.grad.materialize() for param in model.parameters()]
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        for batch in batches[2:]:
            models.loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    found += [value.clone() for value in model.state_dict().values()]
    inf.handle(model).close()
    return found


def test_norms_are_read_once_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = alike(POLICIES["min"])
    with watched() as bus, simulated(monkeypatch):
        train(training, POLICIES["min"], tmp_path)
    reads = [
        count
        for one, count in bus.found.items()
        if one.where == "params/accumulator.py: read_device_norms"
    ]
    assert reads == [training.steps]


@pytest.mark.parametrize("grads", ["nvme", "cpu"])
def test_gradients_may_come_before_there_is_an_optimizer(
    grads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients without an optimizer wait in pinned memory, and move to where its own wait."""
    given = {**NVME, "nvme": tmp_path, "ram": "2800KiB" if grads == "nvme" else "min"}
    expected = unheld(**given, grads=grads)
    with watched() as bus, simulated(monkeypatch) as device:
        found = unheld(**given, grads=grads)
        assert device.live() == (0, 0, 0)
    assert_smooth(bus)
    assert all(torch.equal(mine, other) for mine, other in zip(found, expected, strict=True))


class _Reads(TorchDispatchMode):
    """Counts the operations that read some memory."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self.low, self.high = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = [one for one in args if isinstance(one, torch.Tensor) and one.numel()]
        # Views read nothing.
        if not func.is_view:
            self.count += any(self.low <= one.data_ptr() < self.high for one in given)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_on_the_device_reads_the_gradient_once(dtype: torch.dtype) -> None:
    """Each kernel that reads pinned memory reads over the bus."""
    grad, hypers = torch.randn(256).to(dtype), np.zeros(1, HYPER)
    hypers["algorithm"], hypers["eps"], hypers["bc2_sqrt"] = Algorithm.ADAMW, 1e-8, 1.0
    hypers["log_count"], hypers["log_kind"][:, 0], hypers["log_value"][:, 0] = 1, 0, 0.5
    seg = np.zeros(1, SEG)
    seg["numel"], seg["grad"] = 256, grad.data_ptr()
    seg["grad_dtype"] = GradDtype.FP32 if dtype is torch.float32 else GradDtype.BF16
    plan = UpdatePlan(Format.SPLIT, [seg], hypers, device=torch.device("cpu"))
    sections = [
        torch.zeros(section.size_bytes(256), dtype=torch.uint8)
        for section in Format.of(Format.SPLIT).sections
    ]
    with _Reads(grad) as reads:
        plan.run(0, sections)
    assert reads.count == 1
