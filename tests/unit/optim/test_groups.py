"""The name of a step: alike where an update does the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infinity.optim.groups import Grouped, step_name


def name_of(optimizer: Grouped) -> str:
    return step_name(optimizer, [])


def adamw(**values: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], **{"lr": 0.1, **values})


def test_what_updates_do_not_take_is_not_in_the_name() -> None:
    scheduled = adamw()
    torch.optim.lr_scheduler.LambdaLR(scheduled, lambda _: 1.0)
    scheduled.param_groups[0]["name"] = "of one rank"
    assert name_of(scheduled) == name_of(adamw()) == name_of(adamw(lr=torch.tensor(0.1, dtype=torch.float64)))


@pytest.mark.parametrize("values", [{"lr": 0.1 + 1e-16}, {"betas": (0.9, 0.99)}, {"weight_decay": 0.0}, {"maximize": True}])
def test_any_other_value_is_another_name(values: dict[str, Any]) -> None:
    assert name_of(adamw(**values)) != name_of(adamw())


def test_what_is_no_data_has_the_name_of_its_type() -> None:
    """An address is another one in every process."""
    first, second = adamw(), adamw()
    for optimizer in (first, second):
        optimizer.defaults["decay"] = None
        optimizer.param_groups[0]["decay"] = lambda value: value
    assert name_of(first) == name_of(second)
    first.param_groups[0]["decay"] = 0.5
    assert name_of(first) != name_of(second)


def test_it_tells_a_few_rates() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.4, 0.3, 0.2, 0.1, 0.1)]
    assert "AdamW with lr 0.1, 0.2, 0.3 ... for 0 parameters (" in name_of(torch.optim.AdamW(groups))
