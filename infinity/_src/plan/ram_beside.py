"""RAM that the ranks of a node take beside their budgets, `Policy.ram`: records of chunks and
units, and more in each phase (`memory.host_overhead`).

A node needs room for whole budgets and the peak of this. That is conservative for a fill, which
comes before gradients. Not counted: the interpreter, torch, CUDA's host memory, what a loop
holds itself, and what a source holds that converts tensors: files alone tell that, and
`inf.offload` counts it.
"""

from __future__ import annotations

import dataclasses
import functools

from infinity._src.cabi.records import chunk_numel
from infinity._src.memory.host_overhead import fill_bytes, held_bytes, passing_bytes
from infinity._src.memory.layout import plan_flat, state_format
from infinity._src.plan.machine import Machine
from infinity._src.plan.workload import Job, JobShape
from infinity.aio import Format

BESIDE_BUDGET = "beside the budget"
"""Name of these bytes among the parts of a node's RAM."""


@dataclasses.dataclass(frozen=True)
class RamBeside:
    """RAM of all ranks of a node beside the budget, in bytes. chunks: of one rank.

    held: from set-up on. passing: the most in each phase. peak: of these that may come together, a
    step beside a save. fill_without_files: the most of a fill from `init=`, a callable or a
    `TensorSource`, which give whole weights; in none of the others.
    """

    chunks: int
    held: int
    passing: dict[str, int]
    fill_without_files: int

    @property
    def peak(self) -> int:
        """The most at any time."""
        phases = dict(self.passing)
        together = phases.pop("step") + phases.pop("save")
        return self.held + max(together, *phases.values())


def ram_beside(shape: JobShape, machine: Machine, job: Job) -> RamBeside:
    """Count the bytes. Pure; does not depend on `machine.ram_bytes`."""
    ranks, policy = machine.ranks, job.policy
    chunks, flats = 0, []
    for flat in shape.flats:
        held = state_format(policy.state, flat.dtype) if flat.trainable else None
        size = chunk_numel(held or Format.RAW)
        count, whole, shard = _measure(flat.numels, flat.dtype.itemsize, machine.world, size)
        chunks += count
        flats.append((whole, shard))
    passing = passing_bytes(
        chunks,
        # A speculative update that is withdrawn comes with the step, with all others.
        all_at_once=not policy.consumes_grads,
        durable=bool(policy.durable),
        drives=machine.drives,
        fill=fill_bytes(flats, in_parts=reads_in_parts(machine)),
    )
    return RamBeside(
        chunks,
        ranks * held_bytes(chunks, len(shape.units), policy.generations),
        {name: ranks * size for name, size in passing.items()},
        ranks * fill_bytes(flats, in_parts=False, converting=_tiled_stacks_bytes(shape)),
    )


def _tiled_stacks_bytes(shape: JobShape) -> int:
    """Count the bytes of whole stacks that stay while the tiles of one layer are filled. Linears in
    tiles are whole among the flats, which have more than a fill then."""
    stacks: dict[str, int] = {}
    for unit in shape.units:
        if unit.tiles:
            layer = unit.name.rpartition("[")[0]
            size = sum(flat.numel * flat.dtype.itemsize for flat in unit.flats)
            stacks[layer] = stacks.get(layer, 0) + size
    return max(stacks.values(), default=0)


def reads_in_parts(machine: Machine) -> bool:
    """Return whether each rank reads its own part of the source: all of them see the same files,
    which the engine knows within a node alone.
    """
    return machine.nodes == 1


@functools.lru_cache(maxsize=4096)
def _measure(
    numels: tuple[int, ...], itemsize: int, world: int, size: int
) -> tuple[int, int, int]:
    """Count the chunks of a flat on one rank, the flat's bytes and those of the rank's shard."""
    # Layers repeat: most flats of a model are alike.
    layout = plan_flat(numels, itemsize, world, size)
    return len(layout.chunks), layout.size_bytes, layout.shard_bytes


__all__ = ["BESIDE_BUDGET", "RamBeside", "ram_beside", "reads_in_parts"]
