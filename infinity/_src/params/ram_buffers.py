"""Buffers in RAM with one tensor for each flat: slabs, cut into tensors.

    slab   [ flat 0 | pad | flat 1 | pad | ...          ]   each from a multiple of 64 bytes on

They hold gradients, delayed parameters and secondary shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from infinity._src.base.sizes import round_up
from infinity._src.memory import constants
from infinity._src.memory.device import Device, make_slabs, split_by_size
from infinity._src.params.unit import Flat
from infinity.aio import Slab

ALIGN_BYTES = 64
"""Tensors start at multiples of a cache line, which also suits every vector load."""


def flat_bytes(numel: int, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor in a slab, padding included."""
    return round_up(numel * dtype.itemsize, ALIGN_BYTES)


class FlatBuffers:
    """One-dimensional CPU tensors of flats. One thread uses it at a time.

    numel_of, dtype_of: size and dtype of a flat's tensor. device: pins the slabs, for copies to and
    from the device; None: they stay pageable. shown: whether long waits show progress.
    """

    def __init__(
        self,
        numel_of: Callable[[Flat], int],
        dtype_of: Callable[[Flat], torch.dtype],
        device: Device | None = None,
        *,
        shown: bool = False,
    ) -> None:
        self._numel_of = numel_of
        self._dtype_of = dtype_of
        self._device = device
        self._shown = shown
        self._slabs: list[Slab] = []
        self._tensors: dict[Flat, torch.Tensor] = {}
        self._own: dict[Flat, Slab] = {} # flats with a separate slab

    def allocate(self, flats: Iterable[Flat]) -> list[Flat]:
        """Allocate memory for the flats without memory, and return these flats. Other flats keep
        memory and contents.

        Raises: MemoryError, before anything has changed; DeviceCopyError.
        """
        # Existing memory never moves: gradient accumulators hold views of it.
        fresh = [flat for flat in flats if flat not in self._tensors]
        if not sum(self.bytes_of(flat) for flat in fresh):
            return []
        parts = split_by_size(fresh, self.bytes_of, constants.SLAB_BYTES_MAX)
        made = make_slabs(
            [sum(self.bytes_of(flat) for flat in part) for part in parts], shown=self._shown
        )
        # Listed before pinning, so that `close` frees them if pinning fails.
        self._slabs += made
        if self._device is not None:
            self._device.pin_all(made, shown=self._shown)
        for part, slab in zip(parts, made, strict=True):
            self._cut(slab, part)
        if len(fresh) == 1:
            self._own[fresh[0]] = made[0]
        return fresh

    def _cut(self, slab: Slab, flats: Iterable[Flat]) -> None:
        # Numpy arrays keep the slab mapped while a view lives; torch.frombuffer's do not.
        memory = torch.from_numpy(slab.array(np.uint8))
        start = 0
        for flat in flats:
            dtype = self._dtype_of(flat)
            part = memory[start : start + self._numel_of(flat) * dtype.itemsize]
            self._tensors[flat] = part.view(dtype)
            # Padding included, so that the next tensor is aligned, too.
            start += self.bytes_of(flat)

    def __contains__(self, flat: Flat) -> bool:
        return flat in self._tensors

    def __getitem__(self, flat: Flat) -> torch.Tensor:
        return self._tensors[flat]

    def get(self, flat: Flat) -> torch.Tensor | None:
        return self._tensors.get(flat)

    def bytes_of(self, flat: Flat) -> int:
        return flat_bytes(self._numel_of(flat), self._dtype_of(flat))

    def __iter__(self) -> Iterator[Flat]:
        return iter(self._tensors)

    def free(self, flat: Flat) -> None:
        """Free a flat's memory if its `allocate` call allocated no other flat; other memory stays
        until `close`. No transfer may be in flight."""
        slab = self._own.pop(flat, None)
        if slab is not None:
            del self._tensors[flat]
            self._slabs.remove(slab)
            self._free(slab)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list(self._tensors.values())

    @property
    def size_bytes(self) -> int:
        return sum(slab.size_bytes for slab in self._slabs)

    def close(self) -> None:
        """Free the memory, at the latest with its last view. No transfer may be in flight."""
        # Drop tensors first: a slab is unmapped only without views.
        self._tensors.clear()
        self._own.clear()
        for slab in self._slabs:
            self._free(slab)
        self._slabs.clear()

    def _free(self, slab: Slab) -> None:
        if self._device is not None:
            self._device.unpin(slab)
        slab.close()
