"""update="backward" where several forwards come before a backward, or a graph is run twice: a unit
is updated when backward is done with all of its uses, so the numbers are those of the plain
loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity as inf
from infinity._src.engine.handle import offload
from infinity._src.params.prefetch_schedule import PassTracker
from tests import harness
from tests.harness import assert_same, policy, values_of
from tests.reference import ReferenceAdamW

WIDTH = 16
Loop = Callable[[nn.Module, Any, int], None]


class Block(nn.Module):
    """Two matrices and two experts; kind: which of them take part, and whether one is used without
    a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3) for _ in range(2))
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor, kind: int) -> torch.Tensor:
        first = self.first.detach() if kind == 1 else self.first
        out: torch.Tensor = self.experts[kind](torch.tanh(x @ first + x @ self.second))
        return out


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.start = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor, kind: int = 0) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            if self.how == "plain":
                x = x + block(x, kind)
            else:
                x = x + checkpoint(block, x, kind, use_reentrant=self.how == "reentrant")
        return x


def sample(index: int) -> torch.Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(index)).bfloat16()


def loss_of(model: nn.Module, index: int, kind: int = 0) -> torch.Tensor:
    loss: torch.Tensor = model(sample(index), kind).float().square().mean()
    return loss


def two_forwards(model: nn.Module, waits: Any, step: int) -> None:
    (loss_of(model, step) + loss_of(model, step + 9, 1)).backward()


def two_forwards_two_backwards(model: nn.Module, waits: Any, step: int) -> None:
    first, second = loss_of(model, step), loss_of(model, step + 9, 1)
    with waits():
        first.backward()
    second.backward()


def a_forward_in_between(model: nn.Module, waits: Any, step: int) -> None:
    loss = loss_of(model, step)
    loss_of(model, step + 9, 1)
    loss.backward()


def the_same_graph_twice(model: nn.Module, waits: Any, step: int) -> None:
    loss = loss_of(model, step) + loss_of(model, step + 9, 1)
    with waits():
        loss.backward(retain_graph=True)
    loss.backward()


def a_kept_graph_beside_another(model: nn.Module, waits: Any, step: int) -> None:
    loss = loss_of(model, step, 1)
    with waits():
        loss.backward(retain_graph=True)
    (loss + loss_of(model, step + 9)).backward()


LOOPS: list[Loop] = [
    two_forwards,
    two_forwards_two_backwards,
    a_forward_in_between,
    the_same_graph_twice,
    a_kept_graph_beside_another,
]


CASES = [
    pytest.param(loop, how, id=f"{loop.__name__}-{how}")
    for loop in LOOPS
    for how in ("plain", "checkpoint", "reentrant")
    # torch frees what a reentrant checkpoint saved, whatever retain_graph says: the plain loop
    # raises
    if how != "reentrant" or loop not in (the_same_graph_twice, a_kept_graph_beside_another)
]


@pytest.mark.parametrize(("loop", "how"), CASES)
def test_a_unit_is_updated_when_backward_is_done_with_it(
    loop: Loop, how: str, tmp_path: Path
) -> None:
    def trained(update: str) -> dict[str, torch.Tensor]:
        model = offload(Net(how), policy(tmp_path, update=update, units=["Block"]))
        optimizer = inf.AdamW(model.parameters(), lr=1e-2)
        handle = inf.handle(model)
        for step in range(3):
            loop(model, handle.no_sync, step)
            optimizer.step()
            optimizer.zero_grad()
        values = values_of(model)
        handle.close()
        return values

    with harness.one_thread():
        plain = Net(how)
        reference = ReferenceAdamW([{"params": list(plain.parameters())}], lr=1e-2)
        for step in range(3):
            loop(plain, torch.enable_grad, step)
            reference.step()
            reference.zero_grad()
        for update in ("backward", "deferred"):
            assert_same(trained(update), values_of(plain))


UNITS: list[Any] = ["a", "b"]


PASSES = st.lists(
    st.tuples(
        st.lists(st.sampled_from(UNITS), max_size=4),
        st.integers(0, 15),
        st.booleans(),
        st.booleans(),
    ),
    max_size=8,
)


@given(PASSES)
def test_a_unit_is_never_done_with_while_a_use_is_left(
    rounds: list[tuple[list[Any], int, bool, bool]],
) -> None:
    """Each round: the Uses of a forward; which of the open graphs a backward runs, if one does, and
    whether it keeps them."""
    passes = PassTracker()
    graphs: list[list[Any]] = []
    ran = False
    for uses, chosen, runs, kept in rounds:
        passes.forward_start(trains=True)
        for unit in uses:
            passes.expect_use(unit)
        passes.forward_end()
        graphs.append(uses)
        run = [graph for index, graph in enumerate(graphs) if runs and chosen >> index & 1]
        if not run:
            continue
        first = len(run) == len(graphs) and not ran
        ran = True
        passes.backward_start(retain_graph=kept)
        left = [unit for graph in reversed(run) for unit in reversed(graph)]
        while left:
            unit = left.pop(0)
            passes.use_ended(unit)
            if unit in left:
                assert not passes.all_ended(unit)
            elif first:  # and not late where nothing was left over
                assert passes.all_ended(unit)
        passes.backward_end()
        graphs = (
            graphs
            if kept
            else [graph for graph in graphs if not any(graph is each for each in run)]
        )
