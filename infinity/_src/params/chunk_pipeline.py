"""Chunks of states that pass through ordinary memory: read ahead, changed, written behind.

    read chunks k+1, k+2    |  transform chunk k  |  write chunk k-1       ChunkPipeline: the loop
    (executor's threads)    |  (this thread)      |  (executor's threads)  ChunkBuffer: one chunk

Saves, restores, resharding, verification and optimizers computed by a torch class use a pipeline.
Reads and writes of a single state use only a ChunkBuffer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.base.sizes import round_up
from infinity._src.params.state_store import ShardRecords, StateStore
from infinity._src.params.unit import Param
from infinity.aio import JobKind, Priority, Slab, Ticket
from infinity.errors import AioError, RankFailed

Bytes = npt.NDArray[np.uint8]
ItemT = TypeVar("ItemT")
BufferT = TypeVar("BufferT")

BUFFERS = 4
"""Chunks in memory at once, in every pipeline: one that is transformed, two that are read, one that
is written.
"""
GROUP_BYTES = 4 << 20
"""Small chunks are copied in groups of about so many bytes."""
_KEPT: list[object] = []  # pipelines with transfers that may never end, and their buffers
READ_AHEAD = BUFFERS // 2
"""Reads that are started ahead. More would leave no buffer for a write."""


class ChunkPipeline(Generic[ItemT, BufferT]):
    """Read ahead, transform, write behind. `run` passes items through in order, and is called once.

    `run` calls for each item, in this order:

        read(item, buffer)        starts reading into the buffer, up to `ahead` items early
        transform(item, buffer)   changes the buffer after its read
        write(item, buffer)       starts writing; without `write` the buffer is free at once
        finish(item, buffer)      reports progress, checks; if it raises, `run` waits for the write

    With `look_ahead` instead of `read`, the caller starts its reads into other memory: `look_ahead`
    gets the next `ahead` items, and `run` acquires a buffer only when it transforms an item.
    `reusable` waits until a write has copied the buffer's bytes, `wait_read` until a read has
    ended. `read_failed` gets an item whose read failed; the item is neither transformed nor
    written. Without `read_failed`, `run` raises.

    `run` takes items from their iterator as late as reads allow, so the iterator can decide late
    which item is next.
    """

    def __init__(
        self,
        buffers: Iterable[BufferT],
        *,
        ahead: int,
        transform: Callable[[ItemT, BufferT], object],
        read: Callable[[ItemT, BufferT], Ticket] | None = None,
        look_ahead: Callable[[Sequence[ItemT]], object] = lambda _items: None,
        write: Callable[[ItemT, BufferT], Ticket] | None = None,
        finish: Callable[[ItemT, BufferT], object] = lambda _item, _buffer: None,
        reusable: Callable[[Ticket], None] = lambda ticket: ticket.wait(),
        wait_read: Callable[[ItemT, Ticket], None] = lambda _item, ticket: ticket.wait(),
        read_failed: Callable[[ItemT, AioError], object] | None = None,
    ) -> None:
        # With `ahead=0`, `run` would end before its first item.
        assert ahead > 0, ahead
        self._ahead = ahead
        self._transform = transform
        self._read = read
        self._look_ahead = look_ahead
        self._write = write
        self._finish = finish
        self._reusable = reusable
        self._wait_read = wait_read
        self._read_failed = read_failed
        self._free = deque(buffers)
        assert self._free, "a pipeline has a buffer"
        # Queues, oldest first. However `run` ends, it waits for all transfers in them.
        self._waiting: deque[ItemT] = deque()  # known to `look_ahead`
        self._reading: deque[tuple[ItemT, BufferT, Ticket]] = deque()
        self._writing: deque[tuple[BufferT, Ticket]] = deque()

    def run(self, items: Iterable[ItemT]) -> None:
        """Pass all items through. Blocks until the last write has taken its bytes.

        Raises: the first fault of a read, a write or a callback, when no transfer is in flight any
        more.
        """
        source = iter(items)
        try:
            while (coming := self._next(source)) is not None:
                item, buffer, read_ok = coming
                if read_ok:
                    self._transform(item, buffer)
                if read_ok and self._write is not None:
                    # Queue it before anything can raise: the buffer is not free until the write has
                    # ended.
                    self._writing.append((buffer, self._write(item, buffer)))
                else:
                    self._free.append(buffer)
                # After the write has started, so that progress and checks overlap it.
                self._finish(item, buffer)
            while self._writing:
                self._reclaim()
        finally:
            # Also after a fault or Ctrl-C: the caller frees the buffers next.
            self._wait_for_all()

    def _next(self, source: Iterator[ItemT]) -> tuple[ItemT, BufferT, bool] | None:
        """Return the next item, its buffer, and whether its read succeeded; None at the end."""
        if self._read is None:
            # Take at most `ahead` items, so that the iterator decides late which one is next.
            self._waiting.extend(itertools.islice(source, self._ahead - len(self._waiting)))
            if not self._waiting:
                return None
            # Start reads first: acquiring the buffer may wait for a write.
            self._look_ahead(tuple(self._waiting))
            return self._waiting.popleft(), self._acquire(), True
        # Take an item only if a buffer will be available: a taken item must be read.
        while len(self._reading) < self._ahead and (self._free or self._writing):
            # At most one iteration; the `else` runs at the end of the source.
            for item in itertools.islice(source, 1):
                buffer = self._acquire()
                self._reading.append((item, buffer, self._read(item, buffer)))
                break
            else:
                break
        return self._await_read() if self._reading else None

    def _await_read(self) -> tuple[ItemT, BufferT, bool]:
        # Peek only: the read leaves the queue below, after the wait.
        item, buffer, ticket = self._reading[0]
        read_ok = True
        try:
            self._wait_read(item, ticket)
        except AioError as error:
            # A verification reports all damage and continues; other uses stop at the first fault.
            if self._read_failed is None:
                raise
            self._read_failed(item, error)
            read_ok = False
        # Removed after the wait: after Ctrl-C during the wait, the end of `run` still waits for the
        # read.
        self._reading.popleft()
        return item, buffer, read_ok

    def _acquire(self) -> BufferT:
        """Return a free buffer, or wait until the oldest write's buffer is reusable."""
        # Only if none is free: an earlier wait would delay the reads.
        if not self._free:
            self._reclaim()
        return self._free.popleft()

    def _reclaim(self) -> None:
        # Removed after the wait, as in `_await_read`.
        buffer, ticket = self._writing[0]
        self._reusable(ticket)
        self._writing.popleft()
        self._free.append(buffer)

    def _wait_for_all(self) -> None:
        """Return when no transfer is in flight. Drops errors: the caller gets the first one."""
        # `wait`, not `reusable`: nothing may be in flight, the write-back included.
        for ticket in [each[-1] for each in self._reading] + [each[-1] for each in self._writing]:
            try:
                with contextlib.suppress(AioError):
                    ticket.wait()
            except RankFailed:
                # The device hangs, so this transfer may never end: keep its buffers allocated.
                _KEPT.append(self)


@contextlib.contextmanager
def slab_buffers(size_bytes: int, count: int = BUFFERS) -> Iterator[list[Bytes]]:
    """Allocate buffers in one slab, each a multiple of 4096 bytes. No transfer may use them when
    the context ends.
    """
    # O_DIRECT needs buffers that begin at multiples of 4096, as the slab does.
    size = round_up(size_bytes, 4096)
    # One slab has huge pages, which a drive's speed depends on, and needs one check of free memory.
    with Slab(count * size) as slab:
        buffers: list[Bytes] = [
            slab.array(np.uint8, offset=k * size, count=size) for k in range(count)
        ]
        try:
            yield buffers
        finally:
            # A live view would keep the slab's memory.
            buffers.clear()


@dataclasses.dataclass(frozen=True)
class ParamSpan:
    """The part of a parameter that lies in one chunk of this rank's shard.

    start: its first element in the chunk; element: that element's index in the parameter; numel:
    how many.
    """

    param: Param
    chunk: int
    start: int
    element: int
    numel: int


def spans_of(param: Param, rank: int) -> Iterator[ParamSpan]:
    """Yield the parts of a parameter in the chunks of this rank's shard, in order."""
    for chunk, start, element, numel in param.flat.layout.spans(param.param_index, rank):
        yield ParamSpan(param, chunk, start, element, numel)


class ChunkBuffer:
    """Memory for the sections of one chunk at a time; it grows to the largest chunk so far.

    `fetch` and `store` start transfers. The caller waits for one before it starts the next.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._at: list[int] = []
        self._records: ShardRecords | None = None
        self._chunk = 0

    @property
    def records(self) -> ShardRecords:
        assert self._records is not None, "nothing was fetched"
        return self._records

    def assign(self, records: ShardRecords, chunk: int) -> None:
        """Allocate memory for all sections of one chunk, with undefined contents."""
        self._records, self._chunk = records, chunk
        numel = records.flat.layout.chunks[chunk].numel
        self._at, size = [], 0
        for section in records.sections:
            self._at.append(size)
            # Sections begin at multiples of 64, so they are aligned for every dtype.
            size += round_up(section.size_bytes(numel), 64)
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8)

    def fetch(self, records: ShardRecords, chunk: int, sections: Sequence[int]) -> Ticket:
        """Start reading these sections of one chunk. Does not block."""
        self.assign(records, chunk)
        return self._move(JobKind.FETCH, sections)

    def store(self, sections: Sequence[int]) -> Ticket:
        """Start writing these sections back. Does not block."""
        return self._move(JobKind.STORE, sections)

    def section(self, index: int, start: int, numel: int) -> Bytes:
        """Return elements [start, start + numel) of a section as writable bytes, rounded up to
        whole groups of its encoding."""
        section = self.records.sections[index]
        low = self._at[index] + section.size_bytes(start)
        memory: Bytes = self._memory.numpy()
        return memory[low : self._at[index] + section.size_bytes(start + numel)]

    def _move(self, kind: JobKind, sections: Sequence[int]) -> Ticket:
        base = self._memory.data_ptr()
        addresses = {section: base + self._at[section] for section in sections}
        flat = self.records.flat
        # DEMAND: the calling thread waits for this transfer.
        return self._store.move_chunk(flat, self._chunk, kind, addresses, priority=Priority.DEMAND)
