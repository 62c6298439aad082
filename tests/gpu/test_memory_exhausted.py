"""A forward or backward that runs out of memory leaves a clean state: the next steps are the plain
loop's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import harness, models
from tests.harness import Training
from tests.test_bitwise import policy
from tests.test_models import BATCH, blocks_of

MIN: dict[str, Any] = {"params": "nvme", "optim": "nvme", "ram": "min"}
PLACES: dict[str, dict[str, Any]] = {"nvme": MIN, "device": {"params": "device", "optim": "cpu"}}


def too_much(device: torch.device) -> torch.Tensor:
    """More memory than any device has: the allocator says so before it takes any."""
    return torch.empty(1 << 52, dtype=torch.uint8, device=device)


def in_forward(model: nn.Module, step: int) -> None:
    """The last block allocates too much, while other units are gathered or in flight."""

    def ask(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        too_much(next(model.parameters()).device)

    hook = blocks_of(model)[-1].register_forward_hook(ask, with_kwargs=True)
    try:
        with pytest.raises(RuntimeError, match=r"out of memory|can't allocate memory"):
            models.loss_of(model, BATCH)
    finally:
        hook.remove()


def in_backward(model: nn.Module, step: int) -> None:
    """The first block allocates too much in backward, when the gradients of the others were taken.
    """
    device = next(model.parameters()).device

    def arm(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        tensor.register_hook(lambda _grad: too_much(device))

    hook = blocks_of(model)[0].register_forward_hook(arm, with_kwargs=True)
    try:
        loss = models.loss_of(model, BATCH)
        with pytest.raises(RuntimeError, match=r"out of memory|can't allocate memory"):
            loss.backward()
    finally:
        hook.remove()


@pytest.mark.parametrize("where", [in_forward, in_backward], ids=lambda where: where.__name__)
@pytest.mark.parametrize("place", PLACES)
def test_out_of_memory_leaves_a_clean_state(
    place: str, where: Any, device: str, tmp_path: Path
) -> None:
    training = Training(models.llama, before=where, device=device)
    result = harness.offloaded(training, policy(tmp_path, **PLACES[place]))
    harness.assert_same(result, harness.reference(training))
