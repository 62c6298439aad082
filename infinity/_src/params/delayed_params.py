"""The parameters that compute while the update of the step before is still on its way: update="delayed".

    opt.step() t     waits for update t-1, then for each unit:  read hi -> shadow     (what step t+1 computes with)
                                                                update t in place     (what step t+2 computes with)
    step t+1         gathers from the shadow, in RAM

Source: Ren et al., "ZeRO-Offload" (arXiv 2101.06840), section 5.2, one-step delayed parameter update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity._src.params.flat_buffers import FlatBuffers, flat_bytes
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Unit
from infinity.aio import Priority, Ticket


class DelayedParams:
    """A second copy in RAM of the parameters that an optimizer holds; this rank's shards. One thread uses it at a time.

    active: whether computing takes the parameters from here; until then it only has the memory.
    """

    def __init__(self, rest: StateStore) -> None:
        self._rest = rest
        self._shards = FlatBuffers(lambda flat: flat.layout.shard_numel, lambda flat: flat.dtype)
        self._tickets: dict[Flat, Ticket] = {}
        self._stale: set[Flat] = set()
        self.active = False

    @staticmethod
    def shard_bytes(flat: Flat) -> int:
        """Bytes that one flat takes."""
        return flat_bytes(flat.layout.shard_numel, flat.dtype)

    def allocate(self, flats: Sequence[Flat]) -> None:
        """Make room for those of these flats that have none yet."""
        self._stale.update(self._shards.allocate(flats))

    @property
    def memory_bytes(self) -> int:
        """Bytes of the copy."""
        return self._shards.size_bytes

    def __contains__(self, flat: Flat) -> bool:
        """Whether computing takes the flat from here. What an optimizer took since the last step is not here yet, nor updated."""
        return flat in self._tickets

    def computes(self, unit: Unit) -> bool:
        """Whether passes take some of the unit from here, which may be older than what rests."""
        return self.active and any(flat in self._tickets for flat in unit.flats)

    def refresh(self, unit: Unit) -> bool:
        """Start reading what rests of the unit now, before an update that is submitted later. Returns whether it had changed.

        The updates before must have been waited for. Does not block.
        """
        stale = [flat for flat in unit.flats if flat in self._stale]
        for flat in stale:
            address = self._shards[flat].data_ptr()
            self._tickets[flat] = self._rest.fetch(flat, 0, address, priority=Priority.PREFETCH)
            self._stale.discard(flat)
        return bool(stale)

    def outdated(self, unit: Unit) -> None:
        """An update of the unit was submitted: what rests is newer from the next step on."""
        self._stale.update(flat for flat in unit.flats if flat in self._shards)

    def copy_to(self, unit: Unit, rank: int) -> None:
        """Copy the shards of a unit into its gathered flats, which are allocated. Blocks until they have been read.

        Raises: the AioError of the read.
        """
        with torch.no_grad():
            for flat in unit.flats:
                if flat in self._tickets:
                    self._tickets[flat].wait_filled()
                    start = rank * flat.layout.shard_numel
                    flat.tensor[start : start + flat.layout.shard_numel].copy_(self._shards[flat])

    def write(self, flat: Flat, start: int, values: torch.Tensor) -> None:
        """Replace elements [start, start + len) of a shard, which rests so already; nothing if computing does not take the flat
        from here. Blocks until a read has ended."""
        if not self.active or flat not in self._tickets:
            return
        self._tickets[flat].wait()
        with torch.no_grad():
            self._shards[flat][start : start + values.numel()].copy_(values)

    def close(self) -> None:
        """Free the memory. Pending reads must have been waited for."""
        self._tickets.clear()
        self._stale.clear()
        self._shards.close()
        self.active = False
