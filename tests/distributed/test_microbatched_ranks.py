"""`inf.microbatched` on several ranks: each reduces once what a loop over its own micro-batches
adds up, with the same bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import infinity as inf
from infinity.aio import Seam
from tests import harness, models
from tests.distributed.ranks import assert_ranks_agree, on_ranks, shard_of
from tests.harness import Result, Training
from tests.marks import THREE
from tests.sliced import Microbatched, of_steps
from tests.test_microbatched_moe import mixtral

NVME: dict[str, Any] = {"params": "nvme", "optim": "nvme", "ram": "min"}
SLICES = 3


@dataclasses.dataclass(frozen=True)
class Split(Training):
    """The micro-batches of each batch of `of`."""

    of: Training | None = None

    @property
    def batches(self) -> list[models.Batch]:
        assert self.of is not None
        found = []
        for batch in self.of.batches:
            parts = {name: value.tensor_split(SLICES) for name, value in batch.items()}
            found += [
                {name: part[index] for name, part in parts.items()} for index in range(SLICES)
            ]
        return found


@dataclasses.dataclass(frozen=True)
class LoopAndSlices:
    """A rank's results of the loop over micro-batches, and of one batch in slices."""

    training: Training
    values: dict[str, Any]

    def __call__(self, rank: int, place: Path) -> tuple[Result, Result]:
        shard = shard_of(self.training, rank, dist.get_world_size())
        fields = {each.name: getattr(shard, each.name) for each in dataclasses.fields(Training)}
        loop = Split(**{**fields, "accumulation": SLICES, "no_sync": True}, of=shard)
        sliced = dataclasses.replace(shard, factory=Microbatched(self.training.factory, SLICES))
        values = {**self.values, "nvme": place}
        return (
            _told(
                harness.offloaded(loop, inf.Policy(params="cpu", optim="cpu", accumulate="local"))
            ),
            _told(
                harness.offloaded(
                    sliced, inf.Policy(**values), seam=Seam(delay_us_max=500, seed=rank)
                )
            ),
        )


def _told(result: Result) -> Result:
    return dataclasses.replace(result, stats=None)


@pytest.mark.parametrize("world", [2, THREE])
def test_slices_have_the_bits_of_each_ranks_micro_batches(world: int, tmp_path: Path) -> None:
    """Five rows for each rank, in slices of two, two and one; on three ranks of a mixture of
    experts with the losses of its routers."""
    factory = models.llama if world == 2 else mixtral
    training = Training(factory, steps=2, accumulation=1, rows=5 * world)
    speculative = {**NVME, "update": "backward", "generations": 2}
    found = on_ranks(LoopAndSlices(training, speculative), tmp_path / "run", world)
    assert_ranks_agree([sliced for _, sliced in found])
    for loop, sliced in found:
        harness.assert_equal(sliced, of_steps(loop, SLICES))
