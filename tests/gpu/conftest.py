"""The device that computes, for tests that run on a GPU and, with the same code, on the CPU.

`device` is "cpu", "simulated" and "cuda". The last has the marker `gpu` and is skipped where there
is none; "simulated" (tests/device.py) computes on the CPU, and the engine takes that for a device
with memory of its own; it is run by `make slow` only. So is "cpu" in a module whose tests have
twins that run on the CPU already (`TWINS_ON_CPU = True`).

On a GPU only what is deterministic can be compared bit by bit: torch is told to use such algorithms
where it has them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

# cuBLAS reads it when its first handle is made; without it, products on several streams may be
# summed in another order.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from tests.device import simulated

NO_GPU = "torch finds no CUDA device here"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise `device` and `cuda`."""
    there = torch.cuda.is_available()
    cuda = pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not there, reason=NO_GPU)]
    )
    twins = getattr(metafunc.module, "TWINS_ON_CPU", False)
    if "device" in metafunc.fixturenames:
        cpu = pytest.param("cpu", marks=[pytest.mark.slow] if twins else [])
        simulated = pytest.param("simulated", marks=pytest.mark.slow)
        metafunc.parametrize("device", [cpu, simulated, cuda], indirect=True)
    if "cuda" in metafunc.fixturenames:
        metafunc.parametrize("cuda", [cuda])


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Torch's name of the device. In the end of a test on a simulated one, nothing may have
    raced."""
    if request.param != "simulated":
        yield request.param
        return
    with simulated(monkeypatch, seed=len(request.node.name)):
        yield "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Torch warns of operations that it has no deterministic algorithm for; comparisons fail where
    that matters."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:.*deterministic.*:UserWarning"))


@pytest.fixture(autouse=True)
def deterministic(request: pytest.FixtureRequest) -> Iterator[None]:
    """Deterministic algorithms on a GPU, and nothing of a test left on it."""
    names = ("device", "cuda")
    if not any(
        request.node.callspec.params.get(name) == "cuda"
        for name in names
        if hasattr(request.node, "callspec")
    ):
        yield
        return
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    settings: Any = torch.utils.deterministic  # type: ignore[attr-defined]
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # what the engine allocates is tested as it is
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled
        gc.collect()
        # a fault of this test's kernels is this test's, not the next one's
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
