"""Small modules that are gathered with a neighbour: the same bits, whatever calls them and when."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity as inf
from infinity._src.params import discover
from tests import harness, models
from tests.device import simulated
from tests.distributed.ranks import on_ranks
from tests.harness import Training
from tests.marks import mostly_slow

SMALL, UNIT = 300, 2000
"""Norms are small; blocks are split into linears."""
policy = functools.partial(harness.policy, unit_bytes_max=UNIT)


@pytest.fixture(autouse=True)
def norms_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "SMALL_BYTES", SMALL)


def folded(model: nn.Module) -> int:
    """Count the units with modules of which none is in another."""
    return sum(len(unit.modules) > 1 for unit in inf.handle(model).units)


def trained(training: Training, chosen: inf.Policy) -> harness.Run:
    counts: list[int] = []

    def count(model: nn.Module, _step: int) -> None:
        counts.append(folded(model))

    result = harness.offloaded(dataclasses.replace(training, before=count), chosen)
    assert min(counts) > 0
    return dataclasses.replace(result, seen=[])


FAMILIES = {
    "llama": Training(models.Small),
    "checkpoints": Training(models.Small, checkpointing=False),
    "reentrant": Training(models.Small, checkpointing=True, accumulation=1),
    "t5": Training(models.t5),
    "mixtral": Training(models.mixtral),
    "lora": Training(models.lora, checkpointing=False),
}


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, "llama", "reentrant", "t5"))
def test_every_model_has_the_bits_of_the_plain_loop(name: str, tmp_path: Path) -> None:
    training = FAMILIES[name]
    harness.assert_same(trained(training, policy(tmp_path)), harness.reference(training))


ONE = Training(models.Small, accumulation=1, max_norm=None)
WAYS: dict[str, dict[str, Any]] = {
    "in RAM": {"params": "cpu", "optim": "cpu"},
    "backward": {"update": "backward"},
    "speculating": {"update": "backward", "generations": 2},
}


@pytest.mark.parametrize("way", mostly_slow(WAYS, "backward"))
@pytest.mark.parametrize("copies", [False, True])
def test_every_way_of_updating_has_them(
    way: str, copies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = policy(tmp_path, **WAYS[way])
    if copies:
        with simulated(monkeypatch):
            found = trained(ONE, chosen)
    else:
        found = trained(ONE, chosen)
    harness.assert_same(found, harness.reference(ONE))


class Unforeseen(nn.Module):
    """Blocks that call their children in an order that no source tells, and some of them never."""

    def __init__(self, orders: tuple[str, ...]) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, 32)
        self.blocks = nn.ModuleList([Block(order) for order in orders])
        self.head = nn.Linear(32, models.VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"loss": models.next_token_loss(self.head(x), labels)}


class Block(nn.Module):
    """The source says: norm, wide, narrow, after."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.norm, self.after = nn.LayerNorm(32), nn.LayerNorm(32)
        self.wide, self.narrow = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = {
            "n": lambda x: self.norm(x),
            "w": lambda x: x + self.wide(x).tanh(),
            "m": lambda x: x + self.narrow(x).tanh(),
            "a": lambda x: self.after(x),
            # Parameters that a parent looks up itself.
            "d": lambda x: nn.functional.layer_norm(x, (32,), self.norm.weight, self.norm.bias),
        }
        for step in self.order:
            x = steps[step](x)
        return x


@pytest.mark.parametrize(
    "orders",
    [("nwma", "nwma"), ("amwn", "nn", "wnma"), ("wm", "nawmna", "dwn", "mda")],
    ids=lambda orders: "-".join(orders),
)
def test_calls_in_another_order_than_was_expected_have_them(
    orders: tuple[str, ...], tmp_path: Path
) -> None:
    training = Training(functools.partial(Unforeseen, orders))
    harness.assert_same(trained(training, policy(tmp_path)), harness.reference(training))


def test_units_that_the_user_names_stay_as_they_are(tmp_path: Path) -> None:
    model = inf.offload(
        Unforeseen(("nwma",)).bfloat16(), policy(tmp_path, units=["Linear", "LayerNorm"])
    )
    assert folded(model) == 0
    assert {unit.name for unit in inf.handle(model).units} >= {"blocks.0.norm", "blocks.0.wide"}
    inf.handle(model).close()


def test_a_small_module_is_read_once_with_its_neighbour(tmp_path: Path) -> None:
    """Nothing is gathered twice for being used twice: in a forward and backward each unit is read
    as often as without small modules."""
    model = inf.offload(Unforeseen(("nwma",) * 6).bfloat16(), policy(tmp_path))
    handle = inf.handle(model)
    handle.unsharder.gathered_bytes_max = 3 * max(unit.size_bytes for unit in handle.units)
    reads = []
    for batch in models.token_batches(4):
        before = handle.stats().params_read_bytes
        models.loss_of(model, batch).backward()
        for parameter in model.parameters():
            parameter.grad = None
        reads.append(handle.stats().params_read_bytes - before)
    sizes = sum(unit.size_bytes for unit in handle.units)
    assert max(reads[1:]) <= 2 * sizes
    handle.close()


@dataclasses.dataclass(frozen=True)
class Folded:
    """Trains on a rank, with small modules folded and without."""

    def __call__(self, rank: int, directory: Path) -> list[harness.Run]:
        found = []
        before = discover.SMALL_BYTES
        try:
            for number, discover.SMALL_BYTES in enumerate((SMALL, 1)):
                drive = directory / f"{rank}-{number}"
                drive.mkdir()
                ways: list[dict[str, Any]] = [{}, {"update": "backward"}]
                found += [harness.offloaded(ONE, policy(drive, **values)) for values in ways]
        finally:
            discover.SMALL_BYTES = before
        return found


@pytest.mark.ranks
def test_ranks_reduce_folded_units_once_and_to_the_same_bits(tmp_path: Path) -> None:
    for found in on_ranks(Folded(), tmp_path / "run", 2):
        assert found[0].stats.demands > 0
        for other in found[1:]:
            harness.assert_same(found[0], other)
