"""Where gradients wait: slabs, laid out like the shards they belong to.

Every parameter that an optimizer holds has its place from the moment the optimizer is built, so a step allocates
nothing. A parameter that requires a gradient and that no optimizer holds gets memory when its first gradient comes.
Flats that spill have no slab: `infinity._src.grads.spill` has their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from infinity._src.grads.spill import SpilledGradients
from infinity._src.memory.device import Device, GradOffload
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Param, Unit
from infinity._src.sizes import round_up
from infinity.aio import Slab


class GradBuffers:
    """Gradient storage of a model on this rank. Elements are of `grad_dtype`, or of the parameter's dtype."""

    def __init__(
        self,
        rank: int,
        grad_dtype: torch.dtype | None,
        device: Device | None = None,
        *,
        grad_offload: GradOffload | None = None,
    ) -> None:
        self._rank = rank
        self._device = device or Device(torch.device("cpu"))
        self._grad_dtype = grad_dtype
        self._slabs: list[Slab] = []
        self._shards: dict[Flat, torch.Tensor] = {}
        self._spilled: SpilledGradients | None = None
        self._settled: set[Param] = set()  # whose slots rest in what was allocated
        self.size_bytes = 0
        self.grad_offload = grad_offload  # where the device has memory of its own, and adds gradients up
        self._back: dict[Unit, bool] = {}  # whose sums were wanted back on the device, and whether a Use of the unit has ended

    def dtype(self, flat: Flat) -> torch.dtype:
        """The dtype in which gradients of this flat are accumulated and wait."""
        return self._grad_dtype or flat.dtype

    def shard_bytes(self, flat: Flat) -> int:
        """Bytes of this rank's gradients of a flat."""
        return round_up(flat.layout.shard_numel * self.dtype(flat).itemsize, 64)

    def allocate(self, flats: Sequence[Flat]) -> None:
        """Make room for those of these flats that have none yet. What has memory keeps it, and what waits in it."""
        fresh = [flat for flat in flats if flat not in self._shards and not self.spills(flat)]
        size_bytes = sum(self.shard_bytes(flat) for flat in fresh)
        if not size_bytes:
            return
        slab = Slab(size_bytes)
        self._slabs.append(slab)
        self._device.pin(slab)
        self.size_bytes += size_bytes
        # By way of numpy, whose arrays keep the slab mapped while a view lives; torch.frombuffer's do not.
        memory = torch.from_numpy(slab.array(np.uint8))
        start = 0
        for flat in fresh:
            dtype = self.dtype(flat)
            part = memory[start : start + flat.layout.shard_numel * dtype.itemsize]
            self._shards[flat] = part.view(dtype)
            start += self.shard_bytes(flat)

    def spill(self, flats: Sequence[Flat], rest: StateStore, *, window_count: int, window_bytes: int) -> None:
        """Let the gradients of these flats rest on NVMe, in sections that `rest` has for them.

        Raises: AioError, MemoryError; before anything has changed.
        """
        dtypes = {flat: self.dtype(flat) for flat in flats}
        if not dtypes:
            return
        if self._spilled is None:
            self._spilled = SpilledGradients(
                rest, self._rank, dtypes, count=window_count, size_bytes=window_bytes, device=self._device
            )
        else:
            self._spilled.extend(dtypes, count=window_count, size_bytes=window_bytes)

    def spills(self, flat: Flat) -> bool:
        """Whether the gradients of a flat rest on NVMe."""
        return self._spilled is not None and flat in self._spilled

    def of(self, param: Param) -> torch.Tensor:
        """The gradient memory of this rank's part of a parameter, one-dimensional (possibly empty). Spilled: on "meta"."""
        start, _, numel = param.flat.layout.shard_range(param.slot_index, self._rank)
        if self.spills(param.flat):
            return torch.empty(numel, dtype=self.dtype(param.flat), device="meta")
        shard = self._shards.get(param.flat)
        if shard is None:
            return torch.empty(numel, dtype=self.dtype(param.flat))
        return shard[start : start + numel]

    def take_in(self, param: Param) -> None:
        """Let the slot of a parameter, which has one, rest where `of` says; its values go along. Blocks.

        Raises: AioError; the slot then is as it was.
        """
        assert param.grad is not None
        if param in self._settled or not (param.flat in self._shards or self.spills(param.flat)):
            return
        slot = param.grad
        home, before = slot.home, slot.tensor
        try:
            if self._spilled is not None and param.flat in self._spilled:
                self._spilled.adopt(param, slot)
                slot.move_to(self.of(param), self._spilled)
            else:
                slot.move_to(self.of(param), None)
        except BaseException:
            slot.stay(before, home)  # no window could be had: the values wait where they are
            raise
        self._settled.add(param)

    # -- what backward tells, for those that spill, or that a device adds up ----------------------------------------------

    def ahead(self, unit: Unit) -> None:
        """Backward will come to this unit. Does not block."""
        if self._spilled is not None:
            self._spilled.ahead(unit)
        if self.grad_offload is not None:
            self._back[unit] = False
            for param in unit.params:
                if param.grad is not None and param.at_rest.grad is not None:  # else the loop has cleared it
                    param.grad.prefetch_to_device(self.grad_offload)

    def unit_done(self, unit: Unit) -> None:
        """A Use of the unit has ended, and its gradients are in their slots. Blocks for sums on their way to the device that no
        gradient came for: without, experts that got no tokens would fill the device."""
        if unit in self._back:
            for other in [each for each, ended in self._back.items() if ended and each is not unit]:
                self._leave_here(other)
            self._back[unit] = True  # the last of its gradients may come a little later
        if self._spilled is not None:
            self._spilled.unit_done(unit)

    def backward_end(self) -> None:
        """A backward has ended. Blocks as `unit_done` does."""
        self._count_backward()
        if self._spilled is not None:
            self._spilled.backward_end()

    def reset(self) -> None:
        """A backward broke off. Blocks as `unit_done` does."""
        self._count_backward()
        if self._spilled is not None:
            self._spilled.reset()

    def _count_backward(self) -> None:
        if self.grad_offload is not None:
            self.grad_offload.backward_count += 1
        for unit in list(self._back):
            self._leave_here(unit)

    def _leave_here(self, unit: Unit) -> None:
        """No gradient comes to the unit any more: sums of it that went to the device for that go from there."""
        for param in unit.params:
            if param.grad is not None:
                param.grad.cancel_prefetch()
        del self._back[unit]

    def settle(self, unit: Unit | None = None) -> None:
        """Return when updates (of a unit; None: of all) may read what spilled. Raises: AioError of a write that failed."""
        if self._spilled is not None:
            self._spilled.settle(unit)

    def close(self) -> None:
        """Forget the slabs; their memory goes with the last view of it that a slot holds."""
        if self._spilled is not None:
            self._spilled.close()
        self._spilled = None
        self._settled.clear()
        self._shards.clear()
        for slab in self._slabs:
            self._device.unpin(slab)
            slab.close()
        self._slabs.clear()
        self.size_bytes = 0
