"""Where gradients wait: slabs, laid out like the shards they belong to.

Every parameter that an optimizer holds has its place from the moment the optimizer is built, so a step allocates
nothing. A parameter that requires a gradient and that no optimizer holds gets memory when its first gradient comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from infinity.aio import Slab
from infinity.params.unit import Flat, Param
from infinity.sizes import round_up


class GradientMemory:
    """Gradient storage of a model on this rank. Elements are of `grad_dtype`, or of the parameter's dtype."""

    def __init__(self, rank: int, grad_dtype: torch.dtype | None) -> None:
        self._rank = rank
        self._grad_dtype = grad_dtype
        self._slabs: list[Slab] = []
        self._shards: dict[Flat, torch.Tensor] = {}
        self.size_bytes = 0

    def dtype(self, flat: Flat) -> torch.dtype:
        """The dtype in which gradients of this flat are accumulated and wait."""
        return self._grad_dtype or flat.dtype

    def shard_bytes(self, flat: Flat) -> int:
        """Bytes of this rank's gradients of a flat."""
        return round_up(flat.layout.shard_numel * self.dtype(flat).itemsize, 64)

    def allocate(self, flats: Sequence[Flat]) -> None:
        """Make room for those of these flats that have none yet. What has memory keeps it, and what waits in it."""
        fresh = [flat for flat in flats if flat not in self._shards]
        size_bytes = sum(self.shard_bytes(flat) for flat in fresh)
        if not size_bytes:
            return
        slab = Slab(size_bytes)
        self._slabs.append(slab)
        self.size_bytes += size_bytes
        # By way of numpy, whose arrays keep the slab mapped while a view lives; torch.frombuffer's do not.
        memory = torch.from_numpy(slab.array(np.uint8))
        start = 0
        for flat in fresh:
            dtype = self.dtype(flat)
            part = memory[start : start + flat.layout.shard_numel * dtype.itemsize]
            self._shards[flat] = part.view(dtype)
            start += self.shard_bytes(flat)

    def shard(self, flat: Flat) -> torch.Tensor | None:
        """The gradients [shard_numel] of a flat, or None when no optimizer holds it."""
        return self._shards.get(flat)

    def of(self, param: Param) -> torch.Tensor:
        """The gradient memory of this rank's part of a parameter, one-dimensional (possibly empty)."""
        start, _, numel = param.flat.layout.shard_range(param.slot_index, self._rank)
        shard = self._shards.get(param.flat)
        if shard is None:
            return torch.empty(numel, dtype=self.dtype(param.flat))
        return shard[start : start + numel]

    def close(self) -> None:
        """Forget the slabs; their memory goes with the last view of it that a slot holds."""
        self._shards.clear()
        for slab in self._slabs:
            slab.close()
        self._slabs.clear()
        self.size_bytes = 0
