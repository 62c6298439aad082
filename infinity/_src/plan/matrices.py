"""Work that an optimizer of whole matrices (`inf.Muon`) adds to a step.

    drives          `moves_of`: the first update of a step reads and writes the momentum of chunks
                    with a part of a matrix. The second update reads and writes the masters, and
                    every section of a chunk with a part of another parameter.
    compute         the owner of a matrix runs Newton-Schulz: each rank has an even part of the
                    flops, and at least the flops of the largest matrix
    links           a GPU receives each matrix from the CPU and sends it back, in the dtype of the
                    gradient; among ranks, each rank sends its part to the owner, and the owner
                    sends that part of the result back
    device memory   on a GPU, the bytes of `whole_matrices.device_bytes`: a matrix and scratch; on
                    several ranks also the whole matrices of the units that are exchanged at the
                    same time. If the CPU computes, this memory is in the budget (`Policy.ram`).

A plan assumes that the update's kernels take as long for a parameter as AdamW's.
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
    """Shares of a FlatParameter in chunks with a part of a matrix, in chunks with a part of another
    parameter, and in chunks with both (which the first two shares include).
    """

    matrices: float
    others: float
    both: float


@functools.lru_cache(maxsize=4096)
def chunk_shares(flat: FlatShape, world: int, size: int) -> ChunkShares:
    """Return the shares of a FlatParameter in chunks of `size` elements, on all `world` ranks."""
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
    """Return the share of each section that the first and the second update of a step move."""
    momentum = sections_updated(held, Algorithm.MUON_MOMENTUM)
    masters = sections_updated(held, Algorithm.MUON)
    found = []
    for section in range(held.written_count):
        first = shares.matrices if momentum >> section & 1 else 0.0
        found.append((first, 1.0 if masters >> section & 1 else shares.others))
    return found


class MatrixWork(NamedTuple):
    """Work of one step on whole matrices; zeros if the optimizer updates none.

    numel: elements of all matrices. flops: floating-point operations of Newton-Schulz, over all
    nodes. largest_flops: the same for the largest matrix. grad_bytes: bytes of the matrices'
    gradients, which the matrices overwrite. device_bytes: memory of one GPU.
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
        """Return the bytes that a rank receives when ranks send matrices to their owners: (from its
        node, from other nodes). Owners send the same number of bytes back."""
        of_rank = self.grad_bytes / machine.world**2
        return (machine.ranks - 1) * of_rank, (machine.world - machine.ranks) * of_rank


def matrix_work(shape: JobShape, machine: Machine, job: Job) -> MatrixWork:
    """Count the work on whole matrices under the job's optimizer."""
    key = "matrix_work", machine.world, bool(machine.gpus), job.policy.grad_dtype
    return shape.remember(key, lambda: _count(shape, machine, job))


def _count(shape: JobShape, machine: Machine, job: Job) -> MatrixWork:
    numel = total = largest = grad_bytes = memory = 0
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
                memory = max(memory, device_bytes(matrix, of_unit, itemsize, machine.world))
    return MatrixWork(numel, total, largest, grad_bytes, memory if machine.gpus else 0)
