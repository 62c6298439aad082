"""Whole matrices on several ranks: an owner assembles each from the parts of all ranks, transforms
it, and returns parts of the result.

    every rank     part of each matrix     -->   owner: whole matrix
                                                 owner: transforms it
    every rank     part of each result     <--   owner: whole result

The owners are a pure function of shapes: matrix after matrix goes to the rank with the fewest flops
so far. So a matrix crosses the links once in each direction, 2 B per parameter in bf16.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from infinity._src.distributed.transport import Message
from infinity._src.kernels.newton_schulz import flops, scratch_numel
from infinity._src.memory.constants import UNITS_AHEAD
from infinity._src.params.unit import Param

HEADS = ("lm_head", "embed_out", "output", "head", "score", "classifier")
"""Names of modules whose weight maps hidden states to outputs."""

UNITS_EXCHANGED = 3
"""Units with whole matrices in memory: one receives parts, one is transformed, and the results of
one are sent."""

Shape = tuple[int, ...]


def is_shaped(shape: Sequence[int]) -> bool:
    """Return whether a parameter of this shape is a matrix [m, n], or a stack [experts, m, n]."""
    return len(shape) in (2, 3) and min(shape[-2:]) > 0


def is_cut(shape: Sequence[int], whole_shape: Sequence[int]) -> bool:
    """Return whether a parameter of this shape is a tile with only a part of a matrix (a tile of
    whole experts is not). whole_shape: of the tiled weight; without tiling equal to `shape`."""
    at = 0 if len(shape) == 2 else 1
    return tuple(shape[at:]) != tuple(whole_shape[at:])


def is_hidden_matrix(
    shape: Sequence[int],
    whole_shape: Sequence[int],
    names: Iterable[str],
    sites: Iterable[tuple[nn.Module, str]],
) -> bool:
    """Return whether a parameter is updated as matrices unless its group decides otherwise: see
    `Matrixwise`. whole_shape: as in `is_cut`. names, sites: all of the parameter's."""
    # [1, n, d] is a table of positions, and no stack of experts; a tile may have one expert.
    if not is_shaped(shape) or is_cut(shape, whole_shape) or whole_shape[:-2] == (1,):
        return False
    # A bias of a stack of experts is [experts, n].
    heads = [[head] for head in HEADS]
    parts = [name.split(".") for name in names]
    others = any(name[-1].endswith("bias") or name[-2:-1] in heads for name in parts)
    tables = nn.Embedding | nn.modules.conv._ConvNd
    return not others and not any(isinstance(module, tables) for module, _ in sites)


def scratch_bytes(shapes: Sequence[Shape], itemsize: int, world: int) -> tuple[int, int, int]:
    """Return the bytes of the scratch of one matrix on a CPU, in fp32; of the whole matrices of the
    flats that `world` ranks exchange at once; and of the copies of gradients that updates ahead of
    their step read. shapes: of a flat's parameters that are matrices. itemsize: of gradients."""
    scratch = max((4 * scratch_numel(*shape[-2:]) for shape in shapes), default=0)
    whole = itemsize * sum(map(math.prod, shapes))
    exchanged = UNITS_EXCHANGED * whole if world > 1 else 0
    return scratch, exchanged, UNITS_AHEAD * -(-whole // world)


def device_bytes(shape: Sequence[int], others: Sequence[Shape], itemsize: int, world: int) -> int:
    """Return the bytes of a matrix of this shape in bf16, and of its scratch, on a device, plus the
    matrices exchanged meanwhile (others, itemsize, world: as in `scratch_bytes`)."""
    rows, columns = shape[-2:]
    exchanged = scratch_bytes(others, itemsize, world)[1]
    return 2 * (rows * columns + scratch_numel(rows, columns)) + exchanged


class Matrix(NamedTuple):
    """One matrix: a parameter, or one of a stack [experts, m, n]. start: its first element in the
    parameter."""

    param: Param
    start: int
    shape: tuple[int, int]
    owner: int

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def part_of(self, rank: int) -> tuple[int, int]:
        """Return a rank's part of the matrix: its first element, and the number of elements."""
        param = self.param
        _, element, numel = param.flat.layout.shard_range(param.param_index, rank)
        low = max(element, self.start)
        high = min(element + numel, self.start + self.numel)
        return (low - self.start, high - low) if high > low else (0, 0)


def matrices_of(params: Sequence[Param], world: int) -> dict[Param, list[Matrix]]:
    """Return the matrices of each parameter, with their owners among `world` ranks."""
    found: dict[Param, list[Matrix]] = {}
    loads = [(0, rank) for rank in range(world)]
    for param in params:
        rows, columns = param.shape[-2:]
        found[param] = []
        for start in range(0, param.numel, rows * columns):
            load, owner = loads[0]
            heapq.heapreplace(loads, (load + flops(rows, columns), owner))
            found[param].append(Matrix(param, start, (rows, columns), owner))
    return found


class UnitMatrices:
    """The matrices of one unit, on one of the ranks.

    parts: this rank's part of each parameter, 1-D, in RAM; `store` replaces the parts of matrices
    there by the parts of their results. device: where matrices are transformed.

    The caller exchanges `messages`, transforms `owned`, exchanges the reversed messages, and calls
    `store`. With one rank there are no messages, and `device` is the CPU.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        parts: Mapping[Param, torch.Tensor],
        *,
        rank: int,
        world: int,
        device: torch.device,
    ) -> None:
        self._rank, self._world, self._parts = rank, world, parts
        # On a device this is a copy, in RAM the same memory.
        there = {matrix: self._mine(matrix).to(device) for matrix in matrices}
        self.owned: dict[Matrix, torch.Tensor] = {}
        for matrix in matrices:
            if matrix.owner != rank:
                continue
            self.owned[matrix] = whole = there.pop(matrix)
            if whole.numel() < matrix.numel:
                start, numel = matrix.part_of(rank)
                self.owned[matrix] = torch.empty(matrix.numel, dtype=whole.dtype, device=device)
                self.owned[matrix][start : start + numel] = whole
        self._sent = there

    def _mine(self, matrix: Matrix) -> torch.Tensor:
        """Return this rank's part of a matrix, in the memory of the parameter's part."""
        part, param = self._parts[matrix.param], matrix.param
        start, numel = matrix.part_of(self._rank)
        _, element, _ = param.flat.layout.shard_range(param.param_index, self._rank)
        at = matrix.start + start - element
        return part[at : at + numel]

    def messages(self) -> tuple[list[Message], list[Message]]:
        """Return the messages that bring parts to their owners: to send, and to receive."""
        sends = [
            (matrix.owner, part.view(torch.uint8))
            for matrix, part in self._sent.items()
            if part.numel()
        ]
        receives = [
            (rank, whole[start : start + numel].view(torch.uint8))
            for matrix, whole in self.owned.items()
            for rank in range(self._world)
            for start, numel in [matrix.part_of(rank)]
            if rank != self._rank and numel
        ]
        return sends, receives

    def store(self) -> None:
        """Put this rank's parts of the results into the parameters' parts."""
        for matrix, part in self._sent.items():
            _copy(self._mine(matrix), part)
        for matrix, whole in self.owned.items():
            start, numel = matrix.part_of(self._rank)
            _copy(self._mine(matrix), whole[start : start + numel])


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    # In RAM source and target may be the same memory.
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
