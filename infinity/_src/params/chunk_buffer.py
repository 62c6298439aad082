"""Stages: the sections of one chunk in ordinary memory, fetched from where they rest and stored back.

What reads or writes states outside of the update kernels goes through them: single states by name, and the optimizers that a
class of torch computes. A stage is as large as the largest chunk that it has held.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.params.state_store import ShardRecords, StateStore
from infinity._src.params.unit import Param
from infinity._src.sizes import round_up
from infinity.aio import JobKind, Priority, Ticket


@dataclasses.dataclass(frozen=True)
class Span:
    """The part of a parameter that lies in one chunk of this rank's shard.

    start: its first element in the chunk; element: that element's index in the parameter; numel: how many.
    """

    param: Param
    chunk: int
    start: int
    element: int
    numel: int


def spans_of(param: Param, rank: int) -> Iterator[Span]:
    """The parts of a parameter in the chunks of this rank's shard, in order."""
    for chunk, start, element, numel in param.flat.layout.spans(param.slot_index, rank):
        yield Span(param, chunk, start, element, numel)


class ChunkBuffer:
    """Memory for the sections of one chunk. `fetch` and `store` start transfers; wait for one before the next."""

    def __init__(self, rest: StateStore) -> None:
        self._rest = rest
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._at: list[int] = []
        self._held: ShardRecords | None = None
        self._chunk = 0

    @property
    def held(self) -> ShardRecords:
        """The flat whose chunk the stage holds."""
        assert self._held is not None, "nothing was fetched"
        return self._held

    def fetch(self, rest: ShardRecords, chunk: int, sections: Sequence[int]) -> Ticket:
        """Start reading these sections of one chunk. Does not block."""
        self.hold(rest, chunk)
        return self._move(JobKind.FETCH, sections)

    def hold(self, rest: ShardRecords, chunk: int) -> None:
        """Make room for all sections of one chunk, whose bytes are undefined until they are written here."""
        self._held, self._chunk = rest, chunk
        numel = rest.flat.layout.chunks[chunk].numel
        self._at, size = [], 0
        for section in rest.sections:
            self._at.append(size)
            size += round_up(section.size_bytes(numel), 64)
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8)

    def store(self, sections: Sequence[int]) -> Ticket:
        """Start writing these sections back. Does not block."""
        return self._move(JobKind.STORE, sections)

    def section(self, index: int, start: int, numel: int) -> npt.NDArray[np.uint8]:
        """Elements [start, start + numel) of a section as bytes, writable. A begun group of elements counts whole."""
        section = self.held.sections[index]
        low = self._at[index] + section.size_bytes(start)
        memory: npt.NDArray[np.uint8] = self._memory.numpy()
        return memory[low : self._at[index] + section.size_bytes(start + numel)]

    def _move(self, kind: JobKind, sections: Sequence[int]) -> Ticket:
        base = self._memory.data_ptr()
        addresses = {section: base + self._at[section] for section in sections}
        return self._rest.move_chunk(self.held.flat, self._chunk, kind, addresses, priority=Priority.DEMAND)
