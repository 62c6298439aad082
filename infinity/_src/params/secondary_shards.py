"""Secondary shards: copies of gathered weights from which the next all_gather takes them.

    params="device", stage 3    this rank's own shard, on the device; others' from the other ranks
    hpz (ZeRO++, section 3.2)   shards of this rank and its counterparts; others' from this node

They hold the bits that were gathered, quantized ones included, so the values do not depend on the
source. Whether a unit is stored follows the program alone: all ranks must gather from the same
place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from infinity._src.memory.device import Device
from infinity._src.params.flat_buffers import FlatBuffers, flat_bytes
from infinity._src.params.unit import Flat, Unit


class SecondaryShards:
    """The secondary shards of one model, on the device or in RAM (where: "device" or "cpu").

    ranks: the ranks whose shards this one stores. One thread uses it at a time, except that the
    gather stream calls the functions that `store` and `load` return, in its order. On a device with
    memory of its own these wait for nothing: copies of pinned memory follow each other on the
    communication stream's stream, and the communication stream's next collective is launched
    meanwhile.
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
        # Noted before the communication stream has copied: `load` runs behind `store` in the same
        # communication stream.
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
        """For each of the ranks the stored shard, and the one in the gathered flat."""
        shards = flat.tensor.view(-1, flat.layout.shard_numel)
        # One by one: a list of indices would travel to the device, and the communication stream
        # wait for it.
        return [(self._parts[flat][place], shards[rank]) for place, rank in enumerate(self.ranks)]

    def forget(self, unit: Unit) -> None:
        """Forget the shards of the unit, whose weights have changed."""
        self._stored.pop(unit, None)

    def close(self) -> None:
        """Free the memory. Nothing may be under way: the last collective of the communication
        stream that uses it has finished."""
        self._stored.clear()
        # Views go before the memory: a slab is unmapped only once no view of it is left.
        self._parts.clear()
        self._buffers.close()
