"""Two processes on one device, whose tensors go over gloo through host memory: communication
streams, streams, events and allocators of two ranks, where NCCL would refuse the second rank.

The bits are those of a plain loop that plays both ranks on the same device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import infinity as inf
from infinity._src.distributed.transport import Message, StagedTransport
from infinity.aio import Seam
from tests import harness, models
from tests.device import simulated
from tests.distributed.plain_ranks import Rules, assert_modelled
from tests.distributed.ranks import assert_ranks_agree, named, on_ranks, shard_of
from tests.distributed.test_device_ranks import streams_announced
from tests.harness import Result, Training
from tests.marks import mostly_slow

WORLD, LAYERS = 2, 2
TIMEOUT_S = 300.0  # the first use of a GPU takes its time, in each process
MIN = {"ram": "min"}
EARLY = {"update": "backward", "generations": 2}
LLAMA = Training(functools.partial(models.llama, LAYERS), steps=3, rows=4, lr=2e-3, max_norm=0.7)
DEEP = dataclasses.replace(LLAMA, accumulation=3, no_sync=True)

Run = tuple[Training, dict[str, Any], Rules]
STAGE_3 = {"zero": 3, "params": "nvme", "optim": "nvme", **MIN}
STAGE_2 = {"zero": 2, "params": "device", "optim": "nvme", **MIN}
STAGE_1 = {"zero": 1, "params": "device", "optim": "cpu"}
RUNS: dict[str, list[Run]] = {
    "stages": [
        (LLAMA, STAGE_3, Rules()),
        (LLAMA, {"zero": 3, "params": "device", "optim": "cpu"}, Rules()),
        (LLAMA, STAGE_2, Rules()),
        (LLAMA, STAGE_1, Rules()),
    ],
    "updates in backward": [(LLAMA, {**place, **EARLY}, Rules()) for place in (STAGE_3, STAGE_2)],
    "accumulation": [
        (DEEP, {**STAGE_3, "accumulate": "shard"}, Rules()),
        (DEEP, {**STAGE_2, "accumulate": "local"}, Rules(local=True)),
        (DEEP, STAGE_1, Rules(local=True)),
    ],
    "zero++": [
        (LLAMA, {**STAGE_3, "qwz": True, "hpz": "cpu"}, Rules(qwz=True)),
        (LLAMA, {**STAGE_3, "qgz": True, "error_feedback": True}, Rules(qgz=True, feedback=True)),
    ],
}


class Counted(StagedTransport):
    """Staging that counts its exchanges, in the process of a rank."""

    exchanges = 0

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        Counted.exchanges += 1
        super().exchange(sends, receives)


@dataclasses.dataclass(frozen=True)
class Staged:
    """Trainings on this rank's rows, on a device that all ranks have."""

    runs: tuple[Run, ...]
    device: str

    def __call__(self, rank: int, place: Path) -> list[Result]:
        return [self.trained(index, rank, place) for index in range(len(self.runs))]

    def trained(self, index: int, rank: int, place: Path) -> Result:
        training, chosen, _ = self.runs[index]
        shard = shard_of(training, rank, dist.get_world_size())
        nvme = {"nvme": place} if "nvme" in chosen.values() else {}
        before = Counted.exchanges
        with self.on_device(10 * index + rank):
            result = harness.offloaded(
                shard,
                inf.Policy(**chosen, **nvme),
                seam=Seam(seed=index + rank, delay_us_max=800),
                transport=Counted,
            )
        # A reduction of each unit at least: nothing went another way.
        assert Counted.exchanges - before >= shard.steps * LAYERS
        return dataclasses.replace(result, stats=None)

    @contextlib.contextmanager
    def on_device(self, seed: int) -> Iterator[None]:
        """Sums in one order on a GPU; on a simulated device, every access announced."""
        if self.device == "simulated":
            with simulated(pytest.MonkeyPatch(), seed=seed) as device, streams_announced(device):
                yield
            return
        torch.use_deterministic_algorithms(self.device == "cuda", warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", mostly_slow(RUNS, "stages"))
def test_two_ranks_on_one_device_have_the_bits_of_a_plain_loop_there(
    name: str, device: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    runs = tuple(
        (dataclasses.replace(training, device=device), chosen, rules)
        for training, chosen, rules in RUNS[name]
    )
    job = Staged(runs, request.node.callspec.params["device"])
    ranks = on_ranks(job, tmp_path / "run", WORLD, timeout_s=TIMEOUT_S)
    for (training, chosen, rules), results in zip(runs, zip(*ranks, strict=True), strict=True):
        with named(chosen):
            assert_ranks_agree(results)
            assert_modelled(results, training, rules)
