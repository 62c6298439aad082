"""Jobs of updates: the calls that their submission takes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.engine.handle import offload
from infinity._src.optim import step


class Many(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(count))

    def forward(self) -> torch.Tensor:
        return torch.stack(list(self.weights)).sum()


def calls_of_a_step(count: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The functions of Python and C that are called to make the jobs of a unit."""
    model: Any = Many(count)
    offload(model, inf.Policy(params="cpu", optim="cpu", ram="64MB", units=[""]))
    optimizer = inf.AdamW(model.parameters())
    model().backward()
    calls: list[str] = []
    make = step.jobs_of_unit

    def watched(*args: Any) -> Any:
        sys.setprofile(lambda _frame, kind, _of: calls.append(kind))
        try:
            return make(*args)
        finally:
            sys.setprofile(None)

    with monkeypatch.context() as patch:
        patch.setattr(step, "jobs_of_unit", watched)
        optimizer.step()
    inf.handle(model).close()
    return sum("return" not in kind for kind in calls)


def test_a_parameter_takes_few_calls_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (calls_of_a_step(count, monkeypatch) for count in (20, 60))
    assert few < many <= few + 40 * 8
