"""Two ranks, each on a simulated device: the same bits as on the CPU, nothing unordered, nothing
pinned left behind, and nothing on the bus that holds the device up.

What this covers: copies of the executor (fetches into gathered units, gradients on their way out)
against what the communication streams read and write. The simulation counts a communication
stream's work as done by the host, on that stream's thread, which is true here: gloo, ordinary
memory. What this does not cover: with CUDA a communication stream launches kernels and NCCL on a
CUDA stream (infinity/_src/distributed/comm_streams.py), which the simulation does not know. Nor
does it distinguish threads of the host. Order between streams, and between threads, needs a GPU.
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
from torch.distributed.device_mesh import init_device_mesh

import infinity as inf
from infinity._src.distributed.collectives import Collectives, Parts
from infinity._src.params.param_copies import SecondaryShards
from infinity._src.params.unit import Unit
from infinity.aio import Seam
from tests import harness, models
from tests.bus import assert_smooth, watched
from tests.device import simulated
from tests.distributed.ranks import assert_ranks_agree, named, on_ranks, shard_of
from tests.harness import Result, Training
from tests.marks import mostly_ranks
from tests.simulated import Simulated

MIN = {"ram": "min"}
EARLY = {"update": "backward", "generations": 2}
LLAMA = Training(functools.partial(models.llama, 1), steps=2, rows=4, lr=2e-3, max_norm=0.7)
DEEP = dataclasses.replace(LLAMA, no_sync=True)
WIDE = dataclasses.replace(LLAMA, grad_dtype=torch.float32)

STAGES: dict[str, dict[str, Any]] = {
    "3": {"params": "nvme", "optim": "nvme", **MIN},
    "3, cpu": {"params": "cpu", "optim": "cpu"},
    "3, device": {"params": "device", "optim": "nvme", **MIN},
    "2": {"zero": 2, "params": "device", "optim": "nvme", **MIN},
    "1": {"zero": 1, "params": "device", "optim": "cpu"},
}
RUNS: dict[str, list[tuple[Training, dict[str, Any]]]] = {
    "deferred": [(LLAMA, stage) for stage in STAGES.values()],
    "backward": [(LLAMA, {**stage, **EARLY}) for stage in STAGES.values()],
    "accumulate": [
        (DEEP, {**stage, **early, "accumulate": accumulate})
        for stage, early, accumulate in [
            (STAGES["3"], {}, "shard"),
            (STAGES["3, cpu"], {}, "local"),
            (STAGES["3"], EARLY, "local"),
            (STAGES["2"], {}, "shard"),
            (STAGES["2"], EARLY, "local"),
            (STAGES["1"], {}, "local"),
            (STAGES["1"], EARLY, None),
        ]
    ],
    "zero++": [
        (LLAMA, {**STAGES["3"], "hpz": "cpu"}),
        (LLAMA, {**STAGES["3"], "hpz": "cpu", "mesh": (2, 1)}),
        (LLAMA, {**STAGES["3"], "hpz": "device", **EARLY}),
        (LLAMA, {**STAGES["3"], "qwz": True}),
        (LLAMA, {**STAGES["2"], "qwz": True, **EARLY}),
        (LLAMA, {**STAGES["3, device"], "qwz": True, "hpz": "cpu"}),
        (LLAMA, {**STAGES["3"], "qgz": True, "error_feedback": True}),
        (DEEP, {**STAGES["1"], "qgz": True, "error_feedback": True}),
        (
            LLAMA,
            {
                **STAGES["3, cpu"],
                "qwz": True,
                "hpz": "cpu",
                "qgz": True,
                "error_feedback": True,
                **EARLY,
            },
        ),
    ],
    "others": [
        (WIDE, {**STAGES["3"], "grad_dtype": torch.float32, "reduce_dtype": torch.bfloat16}),
        (LLAMA, {**STAGES["3"], "update": "delayed", "delayed_warmup": 1}),
        (LLAMA, {**STAGES["2"], "update": "delayed", "delayed_warmup": 1}),
        (LLAMA, {**STAGES["3"], "state": "compact", "update_on": "device"}),
        (LLAMA, {**STAGES["2"], "update_on": "device"}),
        (LLAMA, {**STAGES["3"], "grads": "nvme"}),
        (LLAMA, {**STAGES["2"], "find_unused_parameters": True}),
        (DEEP, {**STAGES["1"], "find_unused_parameters": True}),
    ],
}


def shards(secondary: SecondaryShards, unit: Unit) -> Iterator[torch.Tensor]:
    """Each node rank's shard of a gathered unit."""
    for flat in unit.flats:
        for rank in secondary.ranks:
            yield flat.tensor.view(-1, flat.layout.shard_numel)[rank]


@contextlib.contextmanager
def streams_announced(device: Simulated) -> Iterator[None]:
    """Announce to the simulation each read and write by communication streams of gathered units."""
    patch = pytest.MonkeyPatch()

    def touch(tensor: torch.Tensor, writes: bool, what: str) -> None:
        device.host(
            tensor.data_ptr(), tensor.numel() * tensor.element_size(), writes=writes, what=what
        )

    spread, coded, put, keep = (
        Collectives.all_gather,
        Collectives.all_gather_quantized,
        SecondaryShards.load,
        SecondaryShards.store,
    )

    def spreads(self: Collectives, wholes: Sequence[Parts], *, across: bool = True) -> None:
        for parts in wholes:
            touch(parts[self.topology.rank], False, "a stream sends this rank's shard")
            for rank in range(self.topology.world):
                if rank != self.topology.rank and (across or rank in self.topology.node_ranks):
                    touch(parts[rank], True, "a communication stream receives a shard")
        spread(self, wholes, across=across)

    def spreads_coded(self: Collectives, wholes: Sequence[Parts]) -> None:
        coded(self, wholes)
        for parts in wholes:
            for part in parts:
                touch(part, True, "a communication stream decodes a shard")

    def puts(self: SecondaryShards, unit: Unit) -> Any:
        work = put(self, unit)

        def announced() -> None:
            work()
            for shard in shards(self, unit):
                touch(shard, True, "a communication stream loads a secondary shard")

        return announced

    def keeps(self: SecondaryShards, unit: Unit, age: Any) -> Any:
        work = keep(self, unit, age)

        def announced() -> None:
            for shard in shards(self, unit):
                touch(shard, False, "a communication stream stores a secondary shard")
            work()

        return announced

    patch.setattr(Collectives, "all_gather", spreads)
    patch.setattr(Collectives, "all_gather_quantized", spreads_coded)
    patch.setattr(SecondaryShards, "load", puts)
    patch.setattr(SecondaryShards, "store", keeps)
    try:
        yield
    finally:
        patch.undo()


@dataclasses.dataclass(frozen=True)
class OnBoth:
    """Each training on the CPU, and on a simulated device."""

    runs: tuple[tuple[Training, dict[str, Any]], ...]

    def __call__(self, rank: int, place: Path) -> list[tuple[Result, Result]]:
        found = []
        for index, (training, chosen) in enumerate(self.runs):
            try:
                on_cpu = self.trained(index, {**chosen, "update_on": "cpu"}, training, rank, place)
                with (
                    watched() as bus,
                    simulated(pytest.MonkeyPatch(), seed=7 * index + rank) as device,
                    streams_announced(device),
                ):
                    there = self.trained(index, chosen, training, rank, place)
                    to_device, from_device = device.copied()
                    assert to_device > 0
                    assert from_device > 0
                    assert device.live() == (0, 0, 0)
                assert_smooth(bus)
            except Exception as error:
                raise RuntimeError(f"run {index}, {chosen}: {error}") from error
            found.append((on_cpu, there))
        return found

    def trained(
        self, index: int, chosen: dict[str, Any], training: Training, rank: int, place: Path
    ) -> Result:
        nvme: dict[str, Any] = {"nvme": place} if "nvme" in chosen.values() else {}
        if "mesh" in chosen:
            nvme["mesh"] = init_device_mesh("cpu", chosen["mesh"], mesh_dim_names=("node", "rank"))
        shard = shard_of(training, rank, dist.get_world_size())
        result = harness.offloaded(
            shard, inf.Policy(**{**chosen, **nvme}), seam=Seam(seed=index + rank, delay_us_max=800)
        )
        return dataclasses.replace(result, stats=None)


@pytest.mark.parametrize("name", mostly_ranks(RUNS))
def test_two_ranks_on_a_device_have_the_bits_of_two_on_the_cpu(name: str, tmp_path: Path) -> None:
    """Copies come late, drives too; the driver reports accesses that nothing orders, and what stays
    pinned."""
    ranks = on_ranks(OnBoth(tuple(RUNS[name])), tmp_path / "run", 2)
    for (_, chosen), results in zip(RUNS[name], zip(*ranks, strict=True), strict=True):
        with named(chosen):
            for on_cpu, there in results:
                harness.assert_equal(there, on_cpu)
            assert_ranks_agree([there for _, there in results])
