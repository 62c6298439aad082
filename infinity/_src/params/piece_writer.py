"""Writer of a flat's values piece by piece, through a few reused buffers.

    fill piece k+1     |  copy piece k to slots, checksums  |  write what is in slots
    (this thread)      |  (executor's threads)              |  (drives)

A buffer for each whole flat would be slower: the kernel would clear and map its memory page by
page, which takes longer than copying the values from the page cache.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

import torch

from infinity._src.memory.host_overhead import PIECES, PIECES_BYTES
from infinity._src.params.chunk_pipeline import slab_buffers
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat
from infinity.aio import Ticket
from infinity.errors import AioError

PIECE_BYTES = PIECES_BYTES // PIECES
"""Bytes that are filled and submitted together."""


def _chunks_together(flat: Flat) -> int:
    return max(1, PIECE_BYTES // (flat.layout.chunk_numel * flat.layout.itemsize))


def _piece_bytes(flat: Flat) -> int:
    layout = flat.layout
    numel = min(_chunks_together(flat) * layout.chunk_numel, layout.shard_numel)
    return numel * layout.itemsize


class PieceWriter:
    """Buffers for pieces of these flats. One thread uses it. Memory is allocated for the first
    piece.
    """

    def __init__(self, store: StateStore, flats: Sequence[Flat]) -> None:
        self._store = store
        self._size = max(map(_piece_bytes, flats), default=1)
        self._memory = contextlib.ExitStack()
        # Oldest first, each with the write that may still read it.
        self._buffers: deque[tuple[torch.Tensor, Ticket | None]] = deque()

    def pass_through(
        self,
        flat: Flat,
        fill: Callable[[int, torch.Tensor], None],
        begin: int,
        tickets: list[Ticket] | None,
    ) -> None:
        """Fill the pieces of a shard, and write them if it is this rank's shard.

        `fill(start, out)` fills a CPU tensor with the elements from `start` on; the shard's first
        element is number `begin`. tickets: gets the ticket of each written piece; None: another
        rank's shard, which is not written. Blocks until the last piece is filled. Raises: AioError;
        errors of `fill`.
        """
        if not self._buffers:
            found = self._memory.enter_context(slab_buffers(self._size, PIECES))
            self._buffers.extend((torch.from_numpy(each), None) for each in found)
        layout, together = flat.layout, _chunks_together(flat)
        for first in range(0, len(layout.chunks), together):
            buffer, busy = self._buffers[0]
            if busy is not None:
                # The buffer is free when the executor has copied its bytes to slots.
                busy.wait_filled()
            start = first * layout.chunk_numel
            numel = min(together * layout.chunk_numel, layout.shard_numel - start)
            fill(begin + start, buffer[: numel * layout.itemsize].view(flat.dtype))
            if tickets is None:
                continue
            chunks = slice(first, first + together)
            tickets.append(self._store.store(flat, 0, buffer.data_ptr(), chunks=chunks))
            self._buffers.popleft()
            self._buffers.append((buffer, tickets[-1]))

    def close(self) -> None:
        """Block until no write reads a buffer, and free them."""
        for _, busy in self._buffers:
            if busy is not None:
                with contextlib.suppress(AioError):
                    busy.wait()
        self._buffers.clear()
        self._memory.close()
