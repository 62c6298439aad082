"""Collectives over torch.distributed, as the engine needs them: all-gather of shards, mean of gradients, agreement.

With one rank nothing is called. Every rank calls the same collectives in the same order; shards are equal in size by
layout, so no rank waits for another's shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 renamed both; the floor is 2.10.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Comm:
    """This process's place among the ranks that share a model.

    reduce_dtype: gradients are summed over ranks in this dtype (None: as they are).
    """

    def __init__(self, *, reduce_dtype: torch.dtype | None = None) -> None:
        live = dist.is_available() and dist.is_initialized()
        self.world = dist.get_world_size() if live else 1
        self.rank = dist.get_rank() if live else 0
        self._reduce_dtype = reduce_dtype
        self._group: Any = None

    def aside(self) -> Comm:
        """The same ranks in a group of their own, whose collectives another thread may call. Blocks; all ranks ask at once."""
        other = Comm(reduce_dtype=self._reduce_dtype)
        if self.world > 1:
            other._group = dist.new_group(backend="gloo")
        return other

    def all_gather(self, flat: torch.Tensor, shard_numel: int) -> None:
        """Complete `flat` [world * shard_numel] in place from the shards that the ranks hold in it. Blocks."""
        if self.world == 1:
            return
        with torch.no_grad():
            shard = flat[self.rank * shard_numel : (self.rank + 1) * shard_numel].clone()
            _all_gather(flat, shard)

    def reduce_mean(self, whole: torch.Tensor, shard_numel: int) -> torch.Tensor:
        """The mean over ranks of `whole` [world * shard_numel]; returns this rank's shard in the same dtype. Blocks.

        The sum is taken in `reduce_dtype`; `whole` is used up.
        """
        dtype = self._reduce_dtype or whole.dtype
        source = whole.to(dtype)
        shard = torch.empty(shard_numel, dtype=dtype)
        _reduce_scatter(shard, source, op=dist.ReduceOp.SUM)
        return shard.div_(self.world).to(whole.dtype)

    def assemble(self, part: torch.Tensor, start: int, numel: int) -> torch.Tensor:
        """The whole [numel] of an fp32 vector of which every rank holds one part, from `start` on; bits are kept. Blocks."""
        if part.numel() == numel:
            start = 0
        whole = torch.zeros(numel, dtype=torch.float32)
        whole[start : start + part.numel()] = part
        if self.world > 1:
            dist.all_reduce(whole.view(torch.int32))  # every element is one rank's and nothing elsewhere
        return whole

    def sum_floats(self, values: list[float]) -> list[float]:
        """The sum over ranks of each value, in double, in the order of ranks: the same on every rank. Blocks."""
        if self.world == 1:
            return values
        mine = torch.tensor(values, dtype=torch.float64)
        everyone = torch.empty(self.world * len(values), dtype=torch.float64)
        _all_gather(everyone, mine, group=self._group)
        total = torch.zeros(len(values), dtype=torch.float64)
        for row in everyone.view(self.world, -1):
            total += row
        return [float(value) for value in total]

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank. Blocks."""
        if self.world == 1 or not flags:
            return list(flags)
        mine = torch.tensor(list(flags), dtype=torch.uint8)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in mine]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            dist.barrier(group=self._group)
