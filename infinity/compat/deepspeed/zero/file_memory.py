"""Memory in a file, for the values of a model that is built before it is offloaded.

Tensors are mapped from a file without a name, in a directory on a drive. They are ordinary tensors.
Their pages are written out and dropped when some have been made, so a model of any size is built in
bounded memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from pathlib import Path

import torch

DIRTY_BYTES_MAX = 64 << 20
"""Bytes of new tensors after which pages are written out."""

SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX = 64 << 20, 1 << 30
"""Bytes that are mapped at once: each mapping takes an open file, and a process has few."""


class FileMemory:
    """A file that tensors are mapped from; it goes with the last of them.

    directory: made if it is not there. Raises: OSError.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # No name: a killed process leaves nothing, and no other user can open it.
        with tempfile.TemporaryFile(dir=directory) as file:
            self._file = os.dup(file.fileno())
        # Mappings keep the file; its number is not used when this object has gone.
        weakref.finalize(self, os.close, self._file)
        self._size_bytes = 0
        self._segment: mmap.mmap | None = None
        self._start = self._used = 0
        self._mapped: list[tuple[weakref.ref[mmap.mmap], int]] = []
        self._dirty_bytes = 0

    def copy_of(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a mapped tensor with the values of `tensor`, cast to `dtype`. May block while
        pages are written out. Raises: OSError where the drive is full.
        """
        wanted = tensor.dtype if dtype is None else dtype
        out = self._empty(tensor.shape, wanted)
        with torch.no_grad():
            out.copy_(tensor)
        self._dirty_bytes += out.nbytes
        if self._dirty_bytes >= DIRTY_BYTES_MAX:
            self.write_out()
        return out

    def write_out(self) -> None:
        """Write changed pages, and drop all. Blocks."""
        kept = []
        for reference, offset in self._mapped:
            mapping = reference()
            if mapping is None:
                continue
            mapping.flush()
            # Of a file's pages, which are read again when they are wanted.
            mapping.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(self._file, offset, len(mapping), os.POSIX_FADV_DONTNEED)
            kept.append((reference, offset))
        self._mapped, self._dirty_bytes = kept, 0

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        numel = shape.numel()
        size_bytes = -(-max(1, numel * dtype.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._segment is None or self._used + size_bytes > len(self._segment):
            self._map(size_bytes)
        assert self._segment is not None
        # With its blocks: a write to a hole of a full drive would end the process (SIGBUS).
        os.posix_fallocate(self._file, self._start + self._used, size_bytes)
        # The tensor holds the segment.
        out = torch.frombuffer(self._segment, dtype=dtype, count=numel, offset=self._used)
        self._used += size_bytes
        return out.view(shape)

    def _map(self, size_bytes: int) -> None:
        """Map a segment at the end of the file, of this size at least."""
        wanted = min(max(self._size_bytes, SEGMENT_BYTES_MIN), SEGMENT_BYTES_MAX)
        size_bytes = max(size_bytes, wanted)
        self._start, self._used = self._size_bytes, 0
        self._size_bytes += size_bytes
        os.ftruncate(self._file, self._size_bytes)
        self._segment = mmap.mmap(self._file, size_bytes, offset=self._start)
        self._mapped.append((weakref.ref(self._segment), self._start))
