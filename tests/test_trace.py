"""Orders of units that change during training: the cost of a deviation, which changes no bit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.params.unit import UnitState
from infinity._src.params.unshard import PendingUnshards
from tests import harness, models
from tests.harness import policy

LAYERS = 10
STEPS = 12
Order = Callable[[int], list[int]]


class Stack(nn.Module):
    """Blocks with an order per forward: `order` returns it for a forward's number."""

    def __init__(self, order: Order, hidden: int = 32, rows: int = models.VOCAB) -> None:
        super().__init__()
        self.order = order
        self.calls = 0
        self.embed = nn.Embedding(rows, hidden)
        self.blocks = nn.ModuleList([models.Expert(hidden) for _ in range(LAYERS)])
        self.head = nn.Linear(hidden, models.VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for index in self.order(self.calls):
            x = x + self.blocks[index](x)
        self.calls += 1
        return {"loss": models.next_token_loss(self.head(x), labels)}


@pytest.fixture(autouse=True)
def evicts_what_is_being_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one rank evict no pending unit: otherwise prefetches would depend on the drive."""
    monkeypatch.setattr(PendingUnshards, "filled", lambda self, unit: True)


@dataclasses.dataclass(frozen=True)
class Counted:
    """Counts of one step, from the backward before it to its own."""

    demands: int
    demand_reads: int
    deviations: int


def counted(order: Order, directory: Path) -> list[Counted]:
    """Train and compare with the plain loop, bit for bit. Returns each step's counts."""
    totals = [Counted(0, 0, 0)]

    def count(model: nn.Module, _step: int) -> None:
        stats = inf.handle(model).stats()
        totals.append(Counted(stats.demands, stats.demand_reads, stats.deviations))

    training = harness.Training(
        functools.partial(Stack, order), steps=STEPS, accumulation=1, between=lambda *_: None
    )
    ours = harness.offloaded(dataclasses.replace(training, between=count), policy(directory))
    harness.assert_same(ours, harness.reference(training))
    return [
        Counted(
            *(
                now - then
                for now, then in zip(
                    dataclasses.astuple(after), dataclasses.astuple(before), strict=True
                )
            )
        )
        for before, after in itertools.pairwise(totals)
    ]


EVERY = list(range(LAYERS))


def without(layer: int) -> list[int]:
    return [each for each in EVERY if each != layer]


def test_a_module_called_early_costs_its_own_read(tmp_path: Path) -> None:
    steps = counted(lambda call: [LAYERS - 1, *EVERY[:-1]] if call == 5 else EVERY, tmp_path)
    assert steps[0].deviations == 0  # no trace yet
    assert all((step.demand_reads, step.deviations) == (0, 0) for step in steps[1:5] + steps[6:])
    # Forward: the unit. Backward: it is late, so at its usual place, and at its new one.
    assert steps[5].deviations <= 3
    assert steps[5].demand_reads <= 2


def test_a_layer_left_out_of_some_steps_costs_no_read(tmp_path: Path) -> None:
    """The next unit was prefetched; but while the skipped unit's read is pending, its memory is not
    free."""
    steps = counted(lambda call: without(4) if call in (3, 4, 7, 10) else EVERY, tmp_path)
    assert sum(step.demand_reads for step in steps[1:]) <= 2
    assert all(
        step.deviations <= (2 if number in (3, 4, 7, 10) else 0)
        for number, step in enumerate(steps)
    )


def test_layers_dropped_at_random_cost_no_read(tmp_path: Path) -> None:
    """No step has all layers, nor the same layers as the step before."""
    steps = counted(lambda call: without(7 * call % LAYERS), tmp_path)
    assert sum(step.demand_reads for step in steps[1:]) <= 4
    assert all(step.deviations <= 2 for step in steps[2:])


def test_an_early_exit_costs_a_read_in_each_pass(tmp_path: Path) -> None:
    steps = counted(lambda call: EVERY[:4] if call in (4, 7) else EVERY, tmp_path)
    for number, step in enumerate(steps[1:], 1):
        assert step.deviations <= (2 if number in (4, 7) else 0)
        assert step.demand_reads <= (3 if number in (4, 7) else 0)


def test_two_forwards_that_take_turns_are_both_followed(tmp_path: Path) -> None:
    steps = counted(lambda call: EVERY[:5] if call % 2 else EVERY[5:], tmp_path)
    assert steps[2].deviations <= 1  # the alternation is not known yet
    assert all((step.demand_reads, step.deviations) == (0, 0) for step in steps[3:])


def with_memory(handle: Any) -> int:
    """Count the units that have memory now."""
    return sum(unit.state is not UnitState.SHARDED for unit in handle.units)


@pytest.mark.parametrize(
    ("rows", "least", "most"),
    [(models.VOCAB, 3, 4), (8 * models.VOCAB, 7, 12)],
    ids=["even", "uneven"],
)
def test_how_far_is_read_ahead_is_room_in_bytes(
    tmp_path: Path, rows: int, least: int, most: int
) -> None:
    """Two of the largest units, or several small ones. `ram` does not count device memory, so it
    does not change the depth: more `ram` keeps parameters in RAM, whose gathers are copies."""
    counts = []
    for ram in ("min", "1GiB"):
        model = inf.offload(Stack(lambda _: EVERY, rows=rows), policy(tmp_path, ram=ram))
        handle, counted_units = inf.handle(model), []
        for block in model.blocks:
            block.register_forward_pre_hook(
                lambda *_: counted_units.append(with_memory(handle))  # noqa: B023
            )
        for batch in models.token_batches(2):
            models.loss_of(model, batch).backward()
        assert handle.stats().gathered_bytes_peak <= handle.unsharder.gathered_bytes_max
        counts.append(max(counted_units[LAYERS:]))  # no order is known in the first forward
        handle.close()
    assert counts[0] == counts[1]
    assert least <= counts[0] <= most


def test_a_demand_that_failed_leaves_a_unit_that_may_be_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = inf.offload(Stack(lambda _: EVERY), policy(tmp_path))
    unsharder = inf.handle(model).unsharder
    last = unsharder.units[-1]
    ahead = unsharder.prefetch_ahead

    def no_memory() -> None:
        if last.state is not UnitState.SHARDED:
            raise MemoryError
        ahead()

    monkeypatch.setattr(unsharder, "prefetch_ahead", no_memory)
    with pytest.raises(MemoryError):
        models.loss_of(model, models.token_batches(1)[0])
    assert last.state is not UnitState.SHARDED
    unsharder.read(last.params[0])  # its fill has ended
    for unit in unsharder.units[:3]:
        unsharder.read(unit.params[0])
    assert last.state is UnitState.SHARDED
    inf.handle(model).close()
