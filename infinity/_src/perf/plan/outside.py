"""Costs of a plan that no budget has: RAM beside `Policy.ram`, the drives' peak, and set-up.

RAM beside     records of chunks and units, and what a step, a save, a commit and a restore have
               for each chunk (`memory.footprint`). Not the interpreter, torch, CUDA's host
               memory, or what a loop holds itself
drives         the states, and checkpoints that lie on the same drives
set-up         parameters are read from their source and written to the drives. Moments that
               begin as zeros are not written. Ranks that see the same files each read a part
"""

from __future__ import annotations

import dataclasses

from infinity._src.memory.footprint import held_bytes, passing_bytes
from infinity._src.memory.layout import plan_flat
from infinity._src.memory.planner import state_format
from infinity._src.perf.plan.experts import cut_experts
from infinity._src.perf.plan.machine import Machine
from infinity._src.perf.plan.memory import Need
from infinity._src.perf.plan.predict import Prediction
from infinity._src.perf.plan.workload import Job, ModelShape
from infinity._src.perf.roofline import AtRest, Moved
from infinity.aio import Format
from infinity.aio._records import chunk_numel

PIN_S_PER_BYTE = 0.1e-9
"""Seconds in which a GPU's driver pins a byte of RAM: 0.1 s for a GB (assumed, from reports)."""

CHUNK_S = 60e-6
"""Processor seconds that set-up takes for a chunk, I/O apart: 32e-6 for the model and 29e-6 for its
optimizer (tests/slopes.py, states in RAM, 2 cores)."""


@dataclasses.dataclass(frozen=True)
class RamBeside:
    """RAM of all ranks of a node beside the budget, in bytes. chunks: of one rank.

    held: from set-up on. passing: the most in each phase. peak: of these that may come together, a
    step beside a save.
    """

    chunks: int
    held: int
    passing: dict[str, int]

    @property
    def peak(self) -> int:
        """The most at any time."""
        phases = dict(self.passing)
        together = phases.pop("step") + phases.pop("save")
        return self.held + max(together, *phases.values())


@dataclasses.dataclass(frozen=True)
class SetUp:
    """Set-up of one rank, in bytes and seconds. read: of the source of parameters; written: on the
    drives. seconds: of all ranks together, which share drives and cores.
    """

    read: float
    written: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Outside:
    """Costs of one job on one machine. disk: bytes on a node's drives at their most, by case."""

    ram: RamBeside
    disk: dict[str, float]
    set_up: SetUp


def outside(shape: ModelShape, found: Prediction) -> Outside:
    """Count what a predicted job takes besides. Pure."""
    machine, job = found.machine, found.job
    shape = cut_experts(shape, job.expert_tile)
    ram = _ram_beside(shape, machine, job)
    return Outside(
        ram,
        _disk_peaks(found.nvme, found.at_rest, job),
        _set_up(shape, machine, ram.chunks, found.on_nvme, found.ram.bytes),
    )


def chunk_count(shape: ModelShape, world: int, state: str) -> int:
    """Count the chunks of one rank, as the engine cuts them."""
    found = 0
    for flat in shape.flats:
        held = state_format(state, flat.dtype) if flat.trainable else None
        size = chunk_numel(held or Format.RAW)
        found += len(plan_flat(flat.numels, flat.dtype.itemsize, world, size).chunks)
    return found


def _ram_beside(shape: ModelShape, machine: Machine, job: Job) -> RamBeside:
    ranks, policy = machine.ranks, job.policy
    chunks = chunk_count(shape, machine.world, policy.state)
    passing = passing_bytes(
        chunks, deferred=policy.update == "deferred", durable=bool(policy.durable)
    )
    return RamBeside(
        chunks,
        ranks * held_bytes(chunks, len(shape.units), policy.generations),
        {name: ranks * size for name, size in passing.items()},
    )


def _disk_peaks(nvme: Need, at_rest: AtRest, job: Job) -> dict[str, float]:
    states = at_rest.states + at_rest.frozen
    if job.policy.durable:
        # A linked checkpoint takes nothing, and the next step leaves its places alone. What a
        # killed run has committed stays until the new process has, which keeps two generations.
        return {
            "training": nvme.bytes,
            "while a killed run is restored": nvme.bytes + states,
            "with a checkpoint by links": nvme.bytes + states,
        }
    return {
        "training": nvme.bytes,
        "with a checkpoint": nvme.bytes + states,
        "while the next one is written": nvme.bytes + 2 * states,
    }


def _set_up(
    shape: ModelShape, machine: Machine, chunks: int, on_nvme: AtRest, ram_bytes: float
) -> SetUp:
    # on_nvme, ram_bytes: of a node; chunks: of a rank. The source is taken to be on these drives.
    # Each value of the model is read once, by one of the ranks.
    read = sum(flat.numel * flat.dtype.itemsize for flat in shape.flats) / machine.world
    written = (on_nvme.params + on_nvme.frozen) / machine.ranks
    drives = machine.bandwidths
    moved = Moved(machine.ranks * read, machine.ranks * written)
    seconds = drives.io_s(moved) if drives is not None else 0.0
    seconds += CHUNK_S * chunks
    if machine.gpus:
        seconds += PIN_S_PER_BYTE * ram_bytes
    return SetUp(read, written, seconds)
