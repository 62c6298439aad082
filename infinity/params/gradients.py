"""Where gradients wait: one slab, laid out like the shards they belong to.

Every parameter that an optimizer holds has its place from the moment the optimizer is built, so a step allocates
nothing. A parameter that requires a gradient and that no optimizer holds gets memory when its first gradient comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.aio import Slab
from infinity.params.unit import Flat, Param
from infinity.sizes import round_up


class GradientMemory:
    """Gradient storage of a model on this rank. Elements are of `grad_dtype`, or of the parameter's dtype."""

    def __init__(self, rank: int, grad_dtype: torch.dtype | None) -> None:
        self._rank = rank
        self._grad_dtype = grad_dtype
        self._slab: Slab | None = None
        self._shards: dict[Flat, torch.Tensor] = {}
        self.size_bytes = 0

    def dtype(self, flat: Flat) -> torch.dtype:
        """The dtype in which gradients of this flat are accumulated and wait."""
        return self._grad_dtype or flat.dtype

    def shard_bytes(self, flat: Flat) -> int:
        """Bytes of this rank's gradients of a flat."""
        return round_up(flat.layout.shard_numel * self.dtype(flat).itemsize, 64)

    def allocate(self, flats: Sequence[Flat]) -> None:
        """Make room for these flats, once and for all. Gradients that wait are lost: call it before training."""
        self.close()
        size_bytes = sum(self.shard_bytes(flat) for flat in flats)
        if not size_bytes:
            return
        self._slab = Slab(size_bytes)
        self.size_bytes = size_bytes
        memory = torch.frombuffer(self._slab.memory, dtype=torch.uint8)
        start = 0
        for flat in flats:
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
        """Free the slab; slots made from it must be gone."""
        self._shards.clear()
        if self._slab is not None:
            self._slab.close()
            self._slab = None
        self.size_bytes = 0
