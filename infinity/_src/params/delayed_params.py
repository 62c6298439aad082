"""Delayed parameters: a step computes with them while the update before it is still running.

    opt.step() t     waits for update t-1, then for each unit
                         reads hi into its delayed parameters   (step t+1 computes with these)
                         updates t in place                     (step t+2 computes with the result)
    step t+1         gathers from the delayed parameters, in RAM

Source: Ren et al., "ZeRO-Offload" (arXiv 2101.06840), section 5.2, one-step delayed parameter
update (update="delayed").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity._src.params.flat_buffers import FlatBuffers, flat_bytes
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Unit
from infinity.aio import Priority, Ticket


class DelayedParams:
    """A second copy in RAM of this rank's shards of the parameters that an optimizer holds.

    active: training computes with them; until then they only have the memory. One thread uses it at
    a time.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
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
        # New memory has no values: `refresh` reads them before training computes with them.
        self._stale.update(self._shards.allocate(flats))

    @property
    def memory_bytes(self) -> int:
        """Bytes of the copy."""
        return self._shards.size_bytes

    def __contains__(self, flat: Flat) -> bool:
        """True when training computes with delayed values of the flat. A flat that an optimizer
        took since the last step has none yet, and no update either.
        """
        return flat in self._tickets

    def computes(self, unit: Unit) -> bool:
        """True when training computes with delayed values of some of the unit."""
        return self.active and any(flat in self._tickets for flat in unit.flats)

    def refresh(self, unit: Unit) -> bool:
        """Start reading the unit's values at rest, before its next update is submitted. Returns
        whether they had changed.

        Earlier updates must have been waited for. Does not block.
        """
        # Reads are submitted before the update, and the executor keeps the order of a chunk's jobs.
        stale = [flat for flat in unit.flats if flat in self._stale]
        for flat in stale:
            address = self._shards[flat].data_ptr()
            self._tickets[flat] = self._store.fetch(flat, 0, address, priority=Priority.PREFETCH)
            self._stale.discard(flat)
        return bool(stale)

    def outdated(self, unit: Unit) -> None:
        """Note that an update of the unit was submitted: values at rest are newer from the next
        step.
        """
        # Only marked: the step that is about to run still computes with the values before.
        self._stale.update(flat for flat in unit.flats if flat in self._shards)

    def copy_to(self, unit: Unit, rank: int) -> None:
        """Copy the shards of a unit into its gathered flats, which are allocated. Blocks until they
        have been read.

        Raises: the AioError of the read.
        """
        with torch.no_grad():
            for flat in unit.flats:
                # The other flats have no delayed values; `Unsharder._fill` reads them from their
                # tier.
                if flat in self._tickets:
                    self._tickets[flat].wait_filled()
                    start = rank * flat.layout.shard_numel
                    flat.tensor[start : start + flat.layout.shard_numel].copy_(self._shards[flat])

    def write(self, flat: Flat, start: int, values: torch.Tensor) -> None:
        """Replace elements [start, start + len) of a shard, after the values at rest were replaced.
        Blocks until a read has ended. Does nothing for a flat without delayed values.
        """
        if not self.active or flat not in self._tickets:
            return
        # A read that is under way would write the old value over the new one.
        self._tickets[flat].wait()
        with torch.no_grad():
            self._shards[flat][start : start + values.numel()].copy_(values)

    def close(self) -> None:
        """Free the memory. Pending reads must have been waited for."""
        self._tickets.clear()
        self._stale.clear()
        self._shards.close()
        self.active = False
