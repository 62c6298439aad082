"""Copies of parameters, which gathers read instead of the tier.

    DelayedParams     values from before the running update, in RAM
    SecondaryShards   shards stored after an earlier gather, on the device or in RAM

Delayed parameters: a step computes with them while the update before it is still running.

    opt.step() t     waits for update t-1, then for each unit
                         reads hi into its delayed parameters   (step t+1 computes with these)
                         updates t in place                     (step t+2 computes with the result)
    step t+1         gathers from the delayed parameters, in RAM

With separate device memory, delayed parameters are pinned, and only a gather of the unit waits for
the copy to the device: the executor copies on one rank, the gather stream on several.

Source: Ren et al., "ZeRO-Offload" (arXiv 2101.06840), section 5.2, one-step delayed parameter
update (update="delayed").
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence

import torch

from infinity._src.memory.device import Device
from infinity._src.params.ram_buffers import FlatBuffers, flat_bytes
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Unit
from infinity.aio import Priority, Ticket
from infinity.errors import AioError


class DelayedCopy:
    """Copy of a unit's delayed shards into its gathered flats; a ticket (`infinity.aio.Ticket`) on
    one rank.

    parts: for each flat the read that fills its delayed shard, the target range of the gathered
    flat, and the delayed shard. One thread uses the object at a time. A communication stream calls
    only `run`.
    """

    def __init__(
        self, device: Device, parts: Sequence[tuple[Ticket, torch.Tensor, torch.Tensor]]
    ) -> None:
        self._device = device
        self._parts = list(parts)
        # Parts whose copies have begun: an interrupt or a fault may occur between two parts.
        self._begun = 0
        self._copies: list[Ticket] = []
        self._cancelled = False

    @property
    def reads(self) -> list[Ticket]:
        return [read for read, _, _ in self._parts]

    def run(self) -> None:
        """Copy on the current stream. Blocks for reads in flight: a communication stream launches
        only after they have ended. Raises: the AioError of a read.
        """
        for read, target, shard in self._parts:
            read.wait_filled()
            # Queued on the CUDA stream of the following all_gather. The shard is pinned.
            target.copy_(shard, non_blocking=True)

    def advance(self) -> None:
        """Begin the copies if all shards are read. Never blocks."""
        # On the CPU the thread that needs the unit copies, in `wait_filled`.
        if self._device.copies and all(read.filled for read, _, _ in self._parts):
            self._begin()

    def _begin(self) -> None:
        """Begin the copies that have not begun."""
        for _, target, shard in [] if self._cancelled else self._parts[self._begun :]:
            if self._device.copies:
                size_bytes = shard.numel() * shard.element_size()
                self._copies.append(
                    self._device.copy(target.data_ptr(), shard.data_ptr(), size_bytes, out=True)
                )
            else:
                with torch.no_grad():
                    target.copy_(shard)
            # Count it after the copy: after an interrupt a copy may be repeated, but not skipped.
            self._begun += 1

    @property
    def filled(self) -> bool:
        """True when the unit's flats hold the shards, or the copy has failed."""
        begun = self._cancelled or self._begun == len(self._parts)
        return begun and all(copy.filled for copy in self._copies)

    done = filled

    @property
    def failed(self) -> bool:
        tickets = [*self.reads, *self._copies]
        return any(ticket.failed for ticket in tickets)

    def wait_filled(
        self, timeout: float | None = None, *, check: Callable[[], None] | None = None
    ) -> None:
        """Block until the flats hold the shards; `timeout` is for each part, and `check` as in
        `Ticket.wait`. Raises: the AioError of a read, or of a copy.
        """
        if not self._cancelled and self._begun < len(self._parts):
            for read in self.reads:
                read.wait_filled(timeout, check=check)
            self._begin()
        for copy in self._copies:
            copy.wait_filled(timeout, check=check)

    wait = wait_filled

    def cancel(self) -> None:
        """Do not begin the copies. The reads into the delayed parameters continue."""
        self._cancelled = True

    def end(self) -> None:
        """Block until no copy is in flight. Copies may begin afterwards."""
        for copy in self._copies:
            # `wait_filled` raises the fault.
            with contextlib.suppress(AioError):
                copy.wait_filled()


class DelayedParams:
    """A second copy in RAM of this rank's shards of the parameters that an optimizer holds.

    active: training computes with delayed parameters; before that, only memory is allocated. One
    thread uses the object at a time.
    """

    def __init__(self, store: StateStore, device: Device) -> None:
        self._store = store
        self._device = device
        # Pinned: gathers copy from it to the device.
        self._shards = FlatBuffers(
            lambda flat: flat.layout.shard_numel, lambda flat: flat.dtype, device
        )
        self._tickets: dict[Flat, Ticket] = {}
        self._stale: set[Flat] = set()
        self.active = False

    @staticmethod
    def shard_bytes(flat: Flat) -> int:
        return flat_bytes(flat.layout.shard_numel, flat.dtype)

    def allocate(self, flats: Sequence[Flat]) -> None:
        # New memory has no values until `refresh` reads them.
        self._stale.update(self._shards.allocate(flats))

    @property
    def memory_bytes(self) -> int:
        return self._shards.size_bytes

    def __contains__(self, flat: Flat) -> bool:
        """Return whether training computes with delayed values of the flat. A flat that was added
        to an optimizer since the last step has no delayed values yet, and no update.
        """
        return flat in self._tickets

    def computes(self, unit: Unit) -> bool:
        """Return whether training computes with delayed values of any of the unit's flats."""
        return self.active and any(flat in self._tickets for flat in unit.flats)

    def refresh(self, unit: Unit) -> bool:
        """Start reading the unit's values at rest, before its next update is submitted. Returns
        whether they changed.

        The caller has waited for earlier updates, and for copies of the unit
        (`Unsharder.end_copies`). Does not block.
        """
        # The reads precede the update, since the executor runs a chunk's jobs in order.
        stale = [flat for flat in unit.flats if flat in self._stale]
        for flat in stale:
            address = self._shards[flat].data_ptr()
            self._tickets[flat] = self._store.fetch(flat, 0, address, priority=Priority.PREFETCH)
            self._stale.discard(flat)
        return bool(stale)

    def outdated(self, unit: Unit) -> None:
        """Record that an update of the unit was submitted: its values at rest will be newer than
        the delayed ones.
        """
        # `refresh` reads them later: the next step still computes with the previous values.
        self._stale.update(flat for flat in unit.flats if flat in self._shards)

    def copy_to(self, unit: Unit, rank: int) -> DelayedCopy:
        """Return a copy, not begun, of the unit's delayed shards into its gathered flats, which
        must have memory.
        """
        parts = []
        for flat in unit.flats:
            # `Unsharder._fill` reads flats without delayed values from their tier.
            if flat in self._tickets:
                start = rank * flat.layout.shard_numel
                target = flat.tensor[start : start + flat.layout.shard_numel]
                parts.append((self._tickets[flat], target, self._shards[flat]))
        return DelayedCopy(self._device, parts)

    def write(self, flat: Flat, start: int, values: torch.Tensor) -> None:
        """Replace elements [start, start + len) of a shard, after the values at rest were replaced.
        Blocks until a read has ended; no copy of the unit may be in flight. Does nothing for a flat
        without delayed values.
        """
        if not self.active or flat not in self._tickets:
            return
        # A read in flight would overwrite the new value with the old one.
        self._tickets[flat].wait()
        with torch.no_grad():
            self._shards[flat][start : start + values.numel()].copy_(values)

    def close(self) -> None:
        """Free the memory. No read may be in flight."""
        self._tickets.clear()
        self._stale.clear()
        self._shards.close()
        self.active = False


# -- secondary shards ------------------------------------------------------------------------------
# Copies of gathered weights, the source of the next all_gather.
#
#     params="device", stage 3    stores this rank's shard, on the device; an all_gather over all
#                                 ranks delivers the others
#     hpz (ZeRO++, section 3.2)   stores shards of this rank and of its counterparts on other nodes;
#                                 an all_gather inside the node delivers the others
#
# Secondary shards hold the gathered bits, also after quantization, so values do not depend on the
# source. Whether a unit is stored depends only on the order of calls, which is equal on all ranks,
# so all ranks gather from the same source.


class SecondaryShards:
    """The secondary shards of one model, on the device or in RAM (where: "device" or "cpu").

    ranks: the ranks whose shards this rank stores. One thread uses the object at a time, except
    that the gather stream calls the functions that `store` and `load` return, in the order of its
    collectives. With separate device memory these functions do not wait: they queue copies on the
    CUDA stream of the collectives.
    """

    def __init__(
        self, units: Sequence[Unit], ranks: Sequence[int], where: str, device: Device
    ) -> None:
        self.ranks = tuple(ranks)
        # Pinned memory, since the gather stream copies from it to the device.
        self._buffers = FlatBuffers(
            lambda flat: len(self.ranks) * flat.layout.shard_numel, lambda flat: flat.dtype, device
        )
        self._stored: dict[Unit, Hashable] = {}  # version; `store` may not have run
        self._parts: dict[Flat, torch.Tensor] = {}  # [ranks, shard]
        flats = [flat for unit in units for flat in unit.flats]
        if where == "device":
            for flat in flats:
                shape = (len(self.ranks), flat.layout.shard_numel)
                self._parts[flat] = torch.empty(shape, dtype=flat.dtype, device=device.torch_device)
            return
        self._buffers.allocate(flats)
        for flat in flats:
            self._parts[flat] = self._buffers[flat].view(len(self.ranks), -1)

    @property
    def size_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self._parts.values())

    @staticmethod
    def needs_bytes(flats: Sequence[Flat], rank_count: int) -> int:
        return sum(flat_bytes(rank_count * flat.layout.shard_numel, flat.dtype) for flat in flats)

    def has(self, unit: Unit, version: Hashable) -> bool:
        return unit in self._stored and self._stored[unit] == version

    def store(self, unit: Unit, version: Hashable) -> Callable[[], None]:
        """Return the function that stores the unit's weights once they are gathered."""
        # Recorded before the copy: `load` runs after `store` in the same communication stream.
        self._stored[unit] = version

        def work() -> None:
            for flat in unit.flats:
                for part, shard in self._both(flat):
                    part.copy_(shard, non_blocking=True)

        return work

    def load(self, unit: Unit) -> Callable[[], None]:
        """Return the function that copies stored shards into the unit's flats."""

        def work() -> None:
            for flat in unit.flats:
                for part, shard in self._both(flat):
                    shard.copy_(part, non_blocking=True)

        return work

    def _both(self, flat: Flat) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return for each rank its stored shard, and its range of the gathered flat."""
        shards = flat.tensor.view(-1, flat.layout.shard_numel)
        # Not `shards[ranks]`: torch would copy the list to the device, and the stream would wait.
        return [(self._parts[flat][place], shards[rank]) for place, rank in enumerate(self.ranks)]

    def forget(self, unit: Unit) -> None:
        """Forget the unit's shards: its weights have changed."""
        self._stored.pop(unit, None)

    def close(self) -> None:
        """Free the memory. The communication stream's last collective that uses it must have ended.
        """
        self._stored.clear()
        # Drop views first: a slab is unmapped only without views.
        self._parts.clear()
        self._buffers.close()
