"""torch.compile of a block's forward, or of the whole model, computes what eager code computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing

from tests.unit.hooks import models
from tests.unit.hooks.rig import Rig


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("backend", "eager"), [("eager", False), ("aot_eager", True)])
def test_fullgraph_compile_of_every_blocks_forward(backend: str, eager: bool) -> None:
    rig = Rig(models.stack(inplace=False), models.stack_groups, eager=eager)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    for model in (rig.plain, rig.model):
        for block in model.blocks:
            block.forward = torch.compile(block.forward, backend=counter, fullgraph=True)
    rig.train(models.stack_loss)
    # Guards hold: no recompilation in the second step, which would mean that compile sees other
    # tensors.
    frames = counter.frame_count
    models.stack_loss(rig.model, 0).backward()
    assert counter.frame_count == frames


def test_a_whole_model_whose_root_looks_a_parameter_up_is_compiled_around_the_hooks() -> None:
    class Parent(models.Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) @ self.head.weight

    torch.manual_seed(0)
    rig = Rig(Parent([models.Block(inplace=False) for _ in range(2)]), models.stack_groups)
    compiled = {
        id(model): torch.compile(model, backend="aot_eager") for model in (rig.plain, rig.model)
    }
    rig.train(lambda model, seed: models.stack_loss(compiled[id(model)], seed))
