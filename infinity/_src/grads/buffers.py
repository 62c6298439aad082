"""Where gradients wait: slabs, laid out like the shards they belong to.

Every parameter that an optimizer holds has its place from the moment the optimizer is built, so a step allocates
nothing. A parameter that requires a gradient and that no optimizer holds gets memory when its first gradient comes.
Flats that spill have no slab: `infinity._src.grads.spill` has their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        offload: GradOffload | None = None,
    ) -> None:
        self._rank = rank
        self._device = device or Device(torch.device("cpu"))
        self._grad_dtype = grad_dtype
        self._slabs: list[Slab] = []
        self._shards: dict[Flat, torch.Tensor] = {}
        self._spilled: SpilledGradients | None = None
        self._placed: set[Param] = set()  # whose slots rest in what was allocated
        self.size_bytes = 0
        self.offload = offload  # where the device has memory of its own, and adds gradients up
        self._prefetched: dict[Unit, bool] = {}  # whose sums were wanted back on the device, and whether a Use of the unit has ended

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

    def spill(self, flats: Sequence[Flat], store: StateStore, *, window_count: int, window_bytes: int) -> None:
        """Let the gradients of these flats rest on NVMe, in sections that `rest` has for them.

        Raises: AioError, MemoryError; before anything has changed.
        """
        dtypes = {flat: self.dtype(flat) for flat in flats}
        if not dtypes:
            return
        if self._spilled is None:
            self._spilled = SpilledGradients(
                store, self._rank, dtypes, count=window_count, size_bytes=window_bytes, device=self._device
            )
        else:
            self._spilled.extend(dtypes, count=window_count, size_bytes=window_bytes)

    def spills(self, flat: Flat) -> bool:
        """Whether the gradients of a flat rest on NVMe."""
        return self._spilled is not None and flat in self._spilled

    def shard_of(self, param: Param) -> torch.Tensor:
        """The gradient memory of this rank's part of a parameter, one-dimensional (possibly empty). Spilled: on "meta"."""
        start, _, numel = param.flat.layout.shard_range(param.slot_index, self._rank)
        if self.spills(param.flat):
            return torch.empty(numel, dtype=self.dtype(param.flat), device="meta")
        shard = self._shards.get(param.flat)
        if shard is None:
            return torch.empty(numel, dtype=self.dtype(param.flat))
        return shard[start : start + numel]

    def place_slot(self, param: Param) -> None:
        """Let the slot of a parameter, which has one, rest where `of` says; its values go along. Blocks.

        Raises: AioError; the slot then is as it was.
        """
        assert param.grad is not None
        if param in self._placed or not (param.flat in self._shards or self.spills(param.flat)):
            return
        slot = param.grad
        backing, before = slot.backing, slot.tensor
        try:
            if self._spilled is not None and param.flat in self._spilled:
                self._spilled.add_slot(param, slot)
                slot.move_to(self.shard_of(param), self._spilled)
            else:
                slot.move_to(self.shard_of(param), None)
        except BaseException:
            slot.undo_move(before, backing)  # no window could be had: the values wait where they are
            raise
        self._placed.add(param)

    # -- what backward tells, for those that spill, or that a device adds up ----------------------------------------------

    def prefetch(self, unit: Unit) -> None:
        """Backward will come to this unit. Does not block."""
        if self._spilled is not None:
            self._spilled.prefetch(unit)
        if self.offload is not None:
            self._prefetched[unit] = False
            for param in unit.params:
                if param.grad is not None and param.at_rest.grad is not None:  # else the loop has cleared it
                    param.grad.prefetch_to_device(self.offload)

    def unit_done(self, unit: Unit) -> None:
        """A Use of the unit has ended, and its gradients are in their slots. Blocks for sums on their way to the device that no
        gradient came for: without, experts that got no tokens would fill the device."""
        if unit in self._prefetched:
            for other in [each for each, ended in self._prefetched.items() if ended and each is not unit]:
                self._cancel(other)
            self._prefetched[unit] = True  # the last of its gradients may come a little later
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
        if self.offload is not None:
            self.offload.backwards += 1
        for unit in list(self._prefetched):
            self._cancel(unit)

    def _cancel(self, unit: Unit) -> None:
        """No gradient comes to the unit any more: sums of it that went to the device for that go from there."""
        for param in unit.params:
            if param.grad is not None:
                param.grad.cancel_prefetch()
        del self._prefetched[unit]

    def flush(self, unit: Unit | None = None) -> None:
        """Return when updates (of a unit; None: of all) may read what spilled. Raises: AioError of a write that failed."""
        if self._spilled is not None:
            self._spilled.flush(unit)

    def close(self) -> None:
        """Forget the slabs; their memory goes with the last view of it that a slot holds."""
        if self._spilled is not None:
            self._spilled.close()
        self._spilled = None
        self._placed.clear()
        self._shards.clear()
        for slab in self._slabs:
            self._device.unpin(slab)
            slab.close()
        self._slabs.clear()
        self.size_bytes = 0


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
