"""Buffers in RAM where gradients wait for the update.

    GradBuffers      this rank's shard of each gradient, where accumulators have their storage
    UnreducedGrads   whole gradients of this rank, until micro-batches inside `no_sync` are over
    DevicePrefetch   sums that go back to the device, where further gradients are added to them

Building an optimizer allocates memory for the gradients of its parameters, so a step allocates
nothing. A trainable parameter without an optimizer gets memory at its first gradient; on a GPU its
whole flat gets pinned memory. Flats that spill have no buffer: `infinity._src.params.spill` stores
their gradients on NVMe.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch

from infinity._src.memory.device import Device, GradOffload
from infinity._src.params.cleanup import cancel_and_wait
from infinity._src.params.ram_buffers import FlatBuffers, flat_bytes
from infinity._src.params.spill import SpilledGradients
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Param, Unit
from infinity.aio import Ticket


class GradBuffers:
    """Gradient storage of a model on this rank. Elements are of `grad_dtype`, or of the parameter's
    dtype."""

    def __init__(
        self, rank: int, grad_dtype: torch.dtype | None, device: Device | None = None
    ) -> None:
        self._rank = rank
        self._device = device or Device(torch.device("cpu"))
        self._grad_dtype = grad_dtype
        self._shards = FlatBuffers(
            lambda flat: flat.layout.shard_numel, self.dtype, self._device, shown=rank == 0
        )
        self._placed: set[Param] = set()  # parameters whose accumulators have their final storage
        self._unheld: set[Param] = set()  # parameters without optimizer, which `hold` has placed
        self.spilled: SpilledGradients | None = None

    def dtype(self, flat: Flat) -> torch.dtype:
        return self._grad_dtype or flat.dtype

    def shard_bytes(self, flat: Flat) -> int:
        return self._shards.bytes_of(flat)

    @property
    def size_bytes(self) -> int:
        return self._shards.size_bytes

    def allocate(self, flats: Sequence[Flat]) -> None:
        """Allocate memory for the flats without memory. Other flats keep memory and gradients."""
        # A flat that spills has windows instead (`SpilledGradients`).
        self._shards.allocate([flat for flat in flats if not self.spills(flat)])

    def spill(
        self, flats: Sequence[Flat], store: StateStore, *, staging_bytes: int
    ) -> None:
        """Store the gradients of these flats on NVMe, in their sections of `store`, through this
        much staging memory in RAM.

        Raises: AioError, MemoryError; before anything has changed.
        """
        dtypes = {flat: self.dtype(flat) for flat in flats}
        if not dtypes:
            return
        if self.spilled is None:
            self.spilled = SpilledGradients(
                store,
                self._rank,
                dtypes,
                size_bytes=staging_bytes,
                device=self._device,
            )
        else:
            self.spilled.extend(dtypes, size_bytes=staging_bytes)

    def spills(self, flat: Flat) -> bool:
        return self.spilled is not None and flat in self.spilled

    def shard_of(self, param: Param) -> torch.Tensor:
        """Return the gradient memory of this rank's part of a parameter [part], possibly empty.
        Spilled: on "meta"."""
        start, _, numel = param.flat.layout.shard_range(param.param_index, self._rank)
        if self.spills(param.flat):
            # The accumulator reads size and dtype from this tensor; the values are in windows.
            return torch.empty(numel, dtype=self.dtype(param.flat), device="meta")
        shard = self._shards.get(param.flat)
        if shard is None:
            # No optimizer holds the parameter: separate memory until `place_accumulator` or `hold`
            # moves it. Untouched pages cost nothing.
            return torch.empty(numel, dtype=self.dtype(param.flat))
        return shard[start : start + numel]

    def hold(self, param: Param) -> None:
        """Allocate pinned memory for the whole flat of a parameter without an optimizer, at its
        first gradient, if the device has separate memory. Blocks then.

        Raises: MemoryError, DeviceCopyError.
        """
        if self._device.copies and param not in self._placed:
            assert param.grad is not None
            # A copy to pageable memory would stall the device.
            self._shards.allocate([param.flat])
            param.grad.move_to(self.shard_of(param), None)
            self._placed.add(param)
            self._unheld.add(param)

    def unheld_bytes(self, planned: Container[Flat]) -> int:
        """Return the bytes of gradients in RAM of flats that a plan does not include."""
        return sum(self.shard_bytes(flat) for flat in self._shards if flat not in planned)

    def place_accumulator(self, param: Param) -> None:
        """Move the storage of a parameter's accumulator to the memory of `shard_of`, with its
        values. Blocks.

        Raises: AioError; then the accumulator is unchanged.
        """
        assert param.grad is not None
        # Once only: the accumulator's values are in the buffer from then on.
        if param in self._placed and not (param in self._unheld and self.spills(param.flat)):
            self._unheld.discard(param)
            return
        if not (param.flat in self._shards or self.spills(param.flat)):
            return
        accumulator = param.grad
        backing, before = accumulator.backing, accumulator.tensor
        try:
            if self.spilled is not None and param.flat in self.spilled:
                # Before the move, which writes through the window of this accumulator.
                self.spilled.add_accumulator(param, accumulator)
                accumulator.move_to(self.shard_of(param), self.spilled)
            else:
                accumulator.move_to(self.shard_of(param), None)
        except BaseException:
            # No window was free: the values are still at the old place.
            accumulator.undo_move(before, backing)
            raise
        self._placed.add(param)
        self._free_spilled(param)

    def _free_spilled(self, param: Param) -> None:
        """Free the memory in RAM of a flat whose gradients spill from now on."""
        self._unheld.discard(param)
        flat = param.flat
        left = self._unheld.intersection(flat.params)
        if flat in self._shards and self.spills(flat) and not left:
            for each in flat.params:
                if each.grad is not None:
                    # Wait also for a cleared gradient: its copy still writes there.
                    each.grad.wait_d2h()
            self._shards.free(flat)

    def close(self) -> None:
        """Free the memory. Memory with views of accumulators is freed with the last view."""
        if self.spilled is not None:
            self.spilled.close()
        self.spilled = None
        self._placed.clear()
        self._unheld.clear()
        self._shards.close()


class UnreducedGrads:
    """Sums of one rank's whole gradients. Micro-batches inside `no_sync` add to them; the last
    micro-batch of the step reduces them over the ranks.

    For ZeRO stage 1, and every stage with accumulate="local": a step then has one reduction, at the
    cost of memory for the whole model's gradients. One thread uses the object at a time. dtype_of:
    accumulation dtype of a flat.

    offload: None on the CPU. With separate device memory the sums rest in pinned memory; when
    backward reaches a unit, its sums are copied to the device, which adds the new gradients.
    """

    def __init__(
        self,
        dtype_of: Callable[[Flat], torch.dtype],
        device: Device,
        offload: GradOffload | None,
    ) -> None:
        self._sums = FlatBuffers(lambda flat: flat.layout.numel, dtype_of, device)
        self._device = device
        self._offload = offload
        self._present: dict[Unit, set[Param]] = {}  # parameters with a sum
        self._zeroed: dict[Unit, set[Param]] = {}  # parameters whose sum the loop set to zeros
        self._d2h: dict[Param, Ticket] = {}  # copies from the device that fill sums
        # Sums on their way to the device, where the next gradient is added to them.
        self._h2d: dict[Param, tuple[Ticket, torch.Tensor]] = {}

    def allocate(self, flats: Sequence[Flat]) -> None:
        self._sums.allocate(flats)

    @property
    def size_bytes(self) -> int:
        return self._sums.size_bytes

    @staticmethod
    def needs_bytes(flats: Sequence[Flat], dtype_of: Callable[[Flat], torch.dtype]) -> int:
        return sum(flat_bytes(flat.layout.numel, dtype_of(flat)) for flat in flats)

    def add(self, param: Param, grad: torch.Tensor) -> None:
        """Add a fresh gradient [param.shape]; the first since `pop` is copied."""
        # An unfrozen flat without an optimizer has no memory yet.
        self.allocate([param.flat])
        total = self._sum_of(param)
        present = self._present.setdefault(param.unit, set())
        with torch.no_grad():
            # Convert first: a plain loop adds in the dtype of the sum.
            source = grad.detach().reshape(-1).to(total.dtype)
            if self._offload is not None and param.numel:
                if param in present:
                    ticket, there = self._to_device(param)
                    self._device.wait_filled(ticket)
                    source = there.add_(source)
                    del self._h2d[param]
                self._d2h[param] = self._offload.copy_out(source, total)
            # Copy the first gradient, so that clearing a sum needs no pass over memory.
            elif param in present:
                total.add_(source)
            else:
                total.copy_(source)
        present.add(param)
        self._zeroed.get(param.unit, set()).discard(param)

    def prefetch(self, unit: Unit) -> None:
        """Start copying the unit's sums to the device, since backward has reached it. Does not
        block."""
        for param in self._present.get(unit, ()) if self._offload is not None else ():
            # A sum that is being copied to RAM has just got a gradient, and rarely gets a second.
            if param.numel and (param not in self._d2h or self._d2h[param].filled):
                self._to_device(param)

    def cancel_prefetch(self, unit: Unit | None = None) -> None:
        """Drop a unit's (None: all) prefetched sums that got no gradient. The sums in RAM stay.
        Blocks while they are being copied."""
        gone = [param for param in self._h2d if unit in (None, param.unit)]
        for param in gone:
            self._cancel(param)

    def _to_device(self, param: Param) -> tuple[Ticket, torch.Tensor]:
        found = self._h2d.get(param)
        if found is None:
            source = self._sum_of(param)
            # H2D and D2H copies use two streams, which do not wait for each other.
            if param in self._d2h:
                self._device.wait_filled(self._d2h[param])
                del self._d2h[param]
            there = torch.empty(param.numel, dtype=source.dtype, device=self._device.torch_device)
            size_bytes = source.numel() * source.element_size()
            ticket = self._device.copy(there.data_ptr(), source.data_ptr(), size_bytes, out=True)
            found = self._h2d[param] = (ticket, there)
        return found

    def _cancel(self, param: Param) -> None:
        if param in self._h2d:
            interrupt = cancel_and_wait([self._h2d[param][0]])
            del self._h2d[param]
            if interrupt is not None:
                raise interrupt

    def zero(self, param: Param) -> None:
        """Set the sum of a parameter to zeros. The parameter still takes part in the reduction,
        even if it is not used again: either all ranks have a gradient of it, or none has."""
        self.drop(param)
        self._zeroed.setdefault(param.unit, set()).add(param)

    def has(self, param: Param) -> bool:
        return param in self._present.get(param.unit, ())

    def any(self, unit: Unit) -> bool:
        return bool(self._present.get(unit) or self._zeroed.get(unit))

    def drop(self, param: Param) -> None:
        self._cancel(param)
        for waiting in (self._present, self._zeroed):
            waiting.get(param.unit, set()).discard(param)

    def pop(self, unit: Unit) -> tuple[dict[Param, list[torch.Tensor]], list[Ticket]]:
        """Remove and return the sums of the unit, each a list of one [numel] tensor (an empty list
        for zeros), and the tickets of the copies to the device. On the CPU the tensors are views,
        which the caller must read before the next `add`."""
        found: dict[Param, list[torch.Tensor]] = {
            param: [] for param in self._zeroed.pop(unit, set())
        }
        tickets: list[Ticket] = []
        try:
            for param in self._present.pop(unit, set()):
                if self._offload is None or not param.numel:
                    found[param] = [self._sum_of(param)]
                    continue
                ticket, there = self._to_device(param)
                found[param] = [there]
                tickets.append(ticket)
                del self._h2d[param]
        except BaseException:
            # torch reuses the memory of these copies, so wait for them.
            cancel_and_wait(tickets)
            raise
        return found, tickets

    def clear(self) -> None:
        """Forget all sums. Blocks while some are being copied to the device."""
        self.cancel_prefetch()
        self._present.clear()
        self._zeroed.clear()

    def close(self) -> None:
        """Free the memory. No copy may be in flight."""
        self.clear()
        self._d2h.clear()
        self._sums.close()

    def _sum_of(self, param: Param) -> torch.Tensor:
        return self._sums[param.flat][param.offset : param.offset + param.numel]


class DevicePrefetch:
    """Prefetch of earlier micro-batches' sums to the device, where backward adds new gradients to
    them. One thread uses the object at a time.

    A unit's sums stay until a use of the *next* unit ends: a unit's last gradient may come shortly
    after its use has ended.
    """

    def __init__(self, offload: GradOffload) -> None:
        self.offload = offload
        # For each unit with prefetched sums: whether one of its uses has ended.
        self._use_ended: dict[Unit, bool] = {}

    def start(self, unit: Unit) -> None:
        """Start copying the unit's sums to the device, since backward has reached it. Does not
        block."""
        self._use_ended[unit] = False
        for param in unit.params:
            # An empty `.grad` means that the loop has cleared the sum.
            if param.grad is not None and param.at_rest.grad is not None:
                param.grad.prefetch_to_device(self.offload)

    def unit_done(self, unit: Unit) -> None:
        """Record that a use of the unit has ended. Drops prefetched sums of earlier units that got
        no gradient, such as idle experts: they would exhaust the device's memory. Blocks while they
        are being copied."""
        if unit not in self._use_ended:
            return
        ended = [each for each, is_ended in self._use_ended.items() if is_ended]
        for other in ended:
            if other is not unit:
                self._cancel(other)
        self._use_ended[unit] = True

    def backward_end(self) -> None:
        """End a backward, also an aborted one. Blocks as `unit_done` does."""
        # Accumulators compare this number to know whether the running backward has already produced
        # their gradient.
        self.offload.backward_count += 1
        for unit in list(self._use_ended):
            self._cancel(unit)

    def _cancel(self, unit: Unit) -> None:
        for param in unit.params:
            if param.grad is not None:
                param.grad.cancel_prefetch()
        del self._use_ended[unit]
