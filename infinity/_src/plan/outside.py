"""Costs of a plan that no budget has: RAM beside `Policy.ram`, the drives' peak, and set-up.

RAM beside     `perf.plan.ram_beside`
drives         the states, and checkpoints that lie on the same drives
set-up         parameters are read from their source and written to the drives. Moments that
               begin as zeros are not written. The ranks of one node each read a part; of several
               nodes each rank reads the whole, since nothing says that their files are the same.
               `init=` reads nothing: each rank draws all values on a core of its own
"""

from __future__ import annotations

import dataclasses

from infinity._src.memory.roofline import AtRest, Moved
from infinity._src.plan.machine import Machine
from infinity._src.plan.memory import Need
from infinity._src.plan.predict import Prediction
from infinity._src.plan.ram_beside import RamBeside, reads_in_parts
from infinity._src.plan.workload import Job, ModelShape

PIN_S_PER_BYTE = 0.1e-9
"""Seconds in which a GPU's driver pins a byte of RAM: 0.1 s for a GB (assumed, from reports)."""

CHUNK_S = 60e-6
"""Processor seconds that set-up takes for a chunk, I/O apart: 32e-6 for the model and 29e-6 for its
optimizer (tests/slopes.py, states in RAM, 2 cores)."""


DRAW_S = 22e-9
"""Seconds in which one core draws an element's initial value, twice, as `init=` does: 8.03 billion
of them in a set-up of 183 s (docs/performance.md)."""


@dataclasses.dataclass(frozen=True)
class SetUp:
    """Set-up of one rank, in bytes and seconds. read: of the source of parameters; written: on the
    drives. seconds: of all ranks together, which share drives and cores. init_seconds: the same
    where `init=` draws the values, and nothing is read.
    """

    read: float
    written: float
    seconds: float
    init_seconds: float


@dataclasses.dataclass(frozen=True)
class Outside:
    """Costs of one job on one machine. disk: bytes on a node's drives at their most, by case."""

    ram: RamBeside
    disk: dict[str, float]
    set_up: SetUp


def outside(shape: ModelShape, found: Prediction) -> Outside:
    """Count what a predicted job takes besides. Pure."""
    machine, job = found.machine, found.job
    return Outside(
        found.ram_beside,
        _disk_peaks(found.nvme, found.at_rest, job),
        _set_up(shape, machine, found),
    )


def _disk_peaks(nvme: Need, at_rest: AtRest, job: Job) -> dict[str, float]:
    states = at_rest.states + at_rest.frozen
    if job.policy.durable:
        # A linked checkpoint takes nothing, and the next step leaves its places alone. What a
        # killed run has committed stays until the new process has, which keeps two generations;
        # amid a commit either of both may be the one that counts.
        return {
            "training": nvme.bytes,
            "while a killed run is restored": nvme.bytes + states,
            "while one killed amid a commit is": nvme.bytes + 2 * states,
            "with a checkpoint by links": nvme.bytes + states,
        }
    return {
        "training": nvme.bytes,
        "with a checkpoint": nvme.bytes + states,
        "while the next one is written": nvme.bytes + 2 * states,
    }


def _set_up(shape: ModelShape, machine: Machine, found: Prediction) -> SetUp:
    # What is found is of a node, but chunks, which are of a rank. The source is taken to be on
    # these drives.
    whole = sum(flat.numel * flat.dtype.itemsize for flat in shape.flats)
    read = whole / (machine.world if reads_in_parts(machine) else 1)
    written = (found.on_nvme.params + found.on_nvme.frozen) / machine.ranks
    drives = machine.bandwidths

    def io_s(read: float) -> float:
        moved = Moved(machine.ranks * read, machine.ranks * written)
        return drives.io_s(moved) if drives is not None else 0.0

    seconds = CHUNK_S * found.ram_beside.chunks
    if machine.gpus:
        seconds += PIN_S_PER_BYTE * (found.ram.bytes - found.ram_beside.peak)
    drawn_s = DRAW_S * shape.params
    return SetUp(read, written, seconds + io_s(read), seconds + drawn_s + io_s(0.0))
