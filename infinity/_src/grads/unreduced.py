"""Whole gradients of one rank, which micro-batches inside `no_sync` add up and the last one reduces over the ranks.

That is what stage 1 does, and any stage with accumulate="local": one reduction for a step, for the memory of the whole model's
gradients. They are added in the dtype in which gradients wait, as a plain loop would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from infinity._src.params.unit import Flat, Param, Unit
from infinity._src.sizes import round_up
from infinity.aio import Slab


class UnreducedGrads:
    """The sums of one model's flats, in CPU memory. One thread uses it at a time. dtype_of: in which gradients of a flat wait."""

    def __init__(self, dtype_of: Callable[[Flat], torch.dtype]) -> None:
        self._slabs: list[Slab] = []
        self._dtype_of = dtype_of
        self._sums: dict[Flat, torch.Tensor] = {}
        self._present: dict[Unit, set[Param]] = {}
        self._zeroed: dict[Unit, set[Param]] = {}  # of what waited

    def allocate(self, flats: Sequence[Flat]) -> None:
        """Make room for those of these flats that have none yet. Raises: MemoryError."""
        fresh = [flat for flat in flats if flat not in self._sums]
        if not fresh:
            return
        slab = Slab(self.needs_bytes(fresh, self._dtype_of))
        self._slabs.append(slab)
        memory = torch.from_numpy(slab.array(np.uint8))
        start = 0
        for flat in fresh:
            dtype = self._dtype_of(flat)
            self._sums[flat] = memory[start : start + flat.layout.numel * dtype.itemsize].view(dtype)
            start += round_up(flat.layout.numel * dtype.itemsize, 64)

    @property
    def size_bytes(self) -> int:
        """Bytes of all sums."""
        return sum(total.numel() * total.element_size() for total in self._sums.values())

    @staticmethod
    def needs_bytes(flats: Sequence[Flat], dtype_of: Callable[[Flat], torch.dtype]) -> int:
        """Bytes that the sums of these flats take."""
        return sum(round_up(flat.layout.numel * dtype_of(flat).itemsize, 64) for flat in flats)

    def add(self, param: Param, grad: torch.Tensor) -> None:
        """Add a fresh gradient [param.shape]; the first since `take` is copied."""
        self.allocate([param.flat])
        total = self._sums[param.flat][param.offset : param.offset + param.numel]
        present = self._present.setdefault(param.unit, set())
        source = grad.detach().reshape(-1).to("cpu")
        with torch.no_grad():
            total.add_(source.to(total.dtype)) if param in present else total.copy_(source)
        present.add(param)
        self._zeroed.get(param.unit, set()).discard(param)

    def zero(self, param: Param) -> None:
        """Set what waits of a parameter to zeros. As a gradient that other ranks are told of it goes on waiting, also where the
        parameter is used no more before the reduction: they all have one then, or none."""
        self.drop(param)
        self._zeroed.setdefault(param.unit, set()).add(param)

    def has(self, param: Param) -> bool:
        """Whether something of the parameter waits, other than zeros."""
        return param in self._present.get(param.unit, ())

    def any(self, unit: Unit) -> bool:
        """Whether something of the unit waits."""
        return bool(self._present.get(unit) or self._zeroed.get(unit))

    def drop(self, param: Param) -> None:
        """Forget what waits of a parameter."""
        for waiting in (self._present, self._zeroed):
            waiting.get(param.unit, set()).discard(param)

    def pop(self, unit: Unit) -> dict[Param, list[torch.Tensor]]:
        """What waits of the unit, each [numel], nothing for zeros: whoever takes it reads it before anything is added again."""
        found: dict[Param, list[torch.Tensor]] = {param: [] for param in self._zeroed.pop(unit, set())}
        for param in self._present.pop(unit, set()):
            found[param] = [self._sums[param.flat][param.offset : param.offset + param.numel]]
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._present.clear()
        self._zeroed.clear()

    def close(self) -> None:
        """Free the memory. Nothing may be under way."""
        self.clear()
        self._sums.clear()
        for slab in self._slabs:
            slab.close()
        self._slabs.clear()
