"""Descriptions of a step that ranks send each other: equal if an update does the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import infinity as inf
from infinity._src.optim.step_consensus import StepDescription, describe_registration, describe_step
from infinity._src.params.unit import Param


def built(
    groups: Sequence[tuple[Sequence[int], dict[str, Any]]] = (((0, 1, 2, 3), {}),),
) -> tuple[inf.AdamW, list[Param]]:
    """An optimizer over groups of the four parameters of a model, in this order, and these
    parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    found = list(inf.offload(model).parameters())
    optimizer = inf.AdamW(
        [{"params": [found[index] for index in chosen], **values} for chosen, values in groups],
        lr=0.1,
    )
    model(torch.ones(1, 4)).sum().backward()
    return optimizer, [
        param.infinity_link.param for group in optimizer.param_groups for param in group["params"]
    ]


def said(*groups: tuple[Sequence[int], dict[str, Any]]) -> tuple[StepDescription, list[str]]:
    optimizer, params = built(groups) if groups else built()
    return describe_step(optimizer, params), describe_registration(optimizer, params)


ALL = (0, 1, 2, 3)


def test_what_updates_do_not_take_is_not_told() -> None:
    optimizer, params = built()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    optimizer.param_groups[0]["name"] = "of one rank"
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, dtype=torch.float64)
    assert (describe_step(optimizer, params), describe_registration(optimizer, params)) == said()


def test_neither_is_the_order_of_parameters_or_of_groups() -> None:
    assert said(((3, 0, 2, 1), {})) == said()
    apart = ((0, 2), {"weight_decay": 0.5}), ((1, 3), {"weight_decay": 0.0})
    assert said(*apart) == said(*reversed(apart))


def test_where_a_group_ends_is_told() -> None:
    one = said(((0, 1), {"weight_decay": 0.5}), ((2, 3), {"weight_decay": 0.0}))
    other = said(((0, 1, 2), {"weight_decay": 0.5}), ((3,), {"weight_decay": 0.0}))
    assert one[0].what != other[0].what
    assert one[0].numbers == other[0].numbers
    assert one[1] != other[1]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"lr": 0.2}, "lr"),
        ({"betas": (0.9, 0.99)}, "betas"),
        ({"weight_decay": 0.0}, "weight_decay"),
    ],
)
def test_numbers_are_told_with_their_names(values: dict[str, Any], name: str) -> None:
    (plain, held), (other, held_other) = said(), said((ALL, values))
    assert plain.what == other.what
    apart = [
        which
        for which, mine, theirs in zip(plain.names, plain.numbers, other.numbers, strict=True)
        if mine != theirs
    ]
    assert apart == [name]
    assert held != held_other


def test_what_the_loop_did_to_gradients_is_told() -> None:
    optimizer, params = built()
    before = describe_step(optimizer, params)
    torch.nn.utils.clip_grad_norm_([param.at_rest for param in params], 1e-3)
    after = describe_step(optimizer, params)
    assert len(after.numbers) == len(before.numbers) + len(params)
    assert after.names[-1] == f"the gradient of {max(param.name for param in params)} times"
    assert after.what != before.what


def test_of_what_is_no_data_the_type_is_told() -> None:
    """An address is another one in every process."""
    names = []
    for value in (lambda given: given, lambda given: -given, None):
        optimizer, params = built()
        optimizer.defaults["decay"] = None
        optimizer.param_groups[0]["decay"] = value
        names.append(describe_step(optimizer, params).what)
    assert names[0] == names[1] != names[2]
