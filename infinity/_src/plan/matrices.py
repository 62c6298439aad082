"""Work of an optimizer of whole matrices in a plan: `inf.Muon`.

    drives          `moves_of`: the first update of a step moves the momentum of each chunk with a
                    part of a matrix. The second one moves the masters, and all of a chunk with a
                    part of another parameter.
    compute         Newton-Schulz, each matrix on its owner: an even part of the flops on each rank,
                    and no less than the largest matrix takes
    links           to a GPU each matrix goes up and comes down, in the dtype of its gradient; among
                    ranks each part goes to the owner, and the result's part comes back
    device memory   on a GPU: what the engine wants free (`whole_matrices.device_bytes`): a matrix
                    and scratch, on several ranks also whole matrices of the units that are
                    exchanged at once. The budget (`Policy.ram`) has the memory of a CPU that
                    computes.

The update's kernels are assumed to take as long for a parameter as those of AdamW.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from infinity._src.cabi.records import Algorithm
from infinity._src.kernels.newton_schulz import flops
from infinity._src.memory.flat_layout import plan_flat
from infinity._src.memory.roofline import Moves
from infinity._src.optim.update_jobs import sections_updated
from infinity._src.optim.whole_matrices import device_bytes
from infinity._src.plan.machine import Machine
from infinity._src.plan.workload import FlatShape, Job, JobShape
from infinity.aio import Format


class ChunkShares(NamedTuple):
    """Shares of a flat that lie in chunks with a part of a matrix, of another parameter, of both.
    """

    matrices: float
    others: float
    both: float


@functools.lru_cache(maxsize=4096)
def chunk_shares(flat: FlatShape, world: int, size: int) -> ChunkShares:
    """Return the shares of a flat in chunks of `size` elements, on `world` ranks together."""
    layout = plan_flat(flat.numels, flat.dtype.itemsize, world, size)
    of_matrix = np.array([bool(shape) for shape in flat.matrices])
    numels = layout.chunks.numels
    found = np.zeros(3)
    for rank in range(world):
        parts = layout.segments(rank)
        matrices, others = np.zeros((2, len(numels)), dtype=bool)
        matrices[parts.chunk[of_matrix[parts.owner]]] = True
        others[parts.chunk[~of_matrix[parts.owner]]] = True
        found += [numels[each].sum() for each in (matrices, others, matrices & others)]
    return ChunkShares(*(found / layout.numel).tolist())


def moves_of(held: Format, shares: ChunkShares) -> Moves:
    """Return how often a step's two updates move each section of a flat."""
    momentum = sections_updated(held, Algorithm.MUON_MOMENTUM)
    masters = sections_updated(held, Algorithm.MUON)
    found = []
    for section in range(held.written_count):
        first = shares.matrices if momentum >> section & 1 else 0.0
        found.append((first, 1.0 if masters >> section & 1 else shares.others))
    return found


class MatrixWork(NamedTuple):
    """Work of one step on whole matrices; zeros where the optimizer has none.

    numel: elements of all matrices. flops: of Newton-Schulz, over all nodes; largest_flops: of one
    matrix. grad_bytes: of the matrices' gradients, in whose memory matrices lie. device_bytes: of
    memory of one GPU.
    """

    numel: int = 0
    flops: int = 0
    largest_flops: int = 0
    grad_bytes: int = 0
    device_bytes: int = 0

    def seconds(self, machine: Machine) -> float:
        """Return the time of Newton-Schulz."""
        return max(self.flops / machine.world, self.largest_flops) * machine.ranks / machine.flops

    def received(self, machine: Machine) -> tuple[float, float]:
        """Return the bytes that one rank receives of the matrices that it owns, or of its parts of
        the results: (from its node, from other nodes)."""
        of_rank = self.grad_bytes / machine.world**2
        return (machine.ranks - 1) * of_rank, (machine.world - machine.ranks) * of_rank


def matrix_work(shape: JobShape, machine: Machine, job: Job) -> MatrixWork:
    """Count the work on whole matrices under the job's optimizer."""
    key = "matrix_work", machine.world, bool(machine.gpus), job.policy.grad_dtype
    return shape.remember(key, lambda: _count(shape, machine, job))


def _count(shape: JobShape, machine: Machine, job: Job) -> MatrixWork:
    numel = total = largest = grad_bytes = room = 0
    for unit, run in shape.runs:
        of_unit = [matrix for flat in unit.flats for matrix in flat.matrices if matrix]
        for flat in unit.flats:
            itemsize = job.grad_itemsize(flat.dtype)
            numel += len(run) * flat.matrix_numel
            grad_bytes += len(run) * itemsize * flat.matrix_numel
            for matrix in filter(None, flat.matrices):
                each = flops(*matrix[-2:])
                total += len(run) * math.prod(matrix[:-2]) * each
                largest = max(largest, each)
                room = max(room, device_bytes(matrix, of_unit, itemsize, machine.world))
    return MatrixWork(numel, total, largest, grad_bytes, room if machine.gpus else 0)
