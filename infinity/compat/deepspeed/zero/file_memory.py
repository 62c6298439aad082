"""File-backed memory for a model's parameters until the model is offloaded.

Ordinary tensors are mapped from an unnamed file in a directory on a drive. After every
DIRTY_BYTES_MAX of new tensors their pages are written out and dropped, so a model of any size is
built in bounded memory.
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
"""Bytes of one mapping. Each mapping duplicates the file descriptor, and a process has few."""


class FileMemory:
    """A file that tensors are mapped from; the last tensor's deletion frees it.

    directory: created if it does not exist. Raises: OSError.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # Unnamed: a killed process leaves no file, and other users cannot open it.
        with tempfile.TemporaryFile(dir=directory) as file:
            self._file = os.dup(file.fileno())
        # Mappings keep the file alive; without this object the descriptor has no user.
        weakref.finalize(self, os.close, self._file)
        self._size_bytes = 0
        self._segment: mmap.mmap | None = None
        self._start = self._used = 0
        self._mapped: list[tuple[weakref.ref[mmap.mmap], int]] = []
        self._dirty_bytes = 0

    def copy_of(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a mapped tensor with the values of `tensor`, cast to `dtype`. May block while
        pages are written out. Raises: OSError if the drive is full.
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
        """Write dirty pages out, and drop all pages from memory. Blocks."""
        kept = []
        for reference, offset in self._mapped:
            mapping = reference()
            if mapping is None:
                continue
            mapping.flush()
            # The pages are file-backed: the next access reads them again.
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
        # Allocate the file's blocks: writing to a hole on a full drive kills the process (SIGBUS).
        os.posix_fallocate(self._file, self._start + self._used, size_bytes)
        # The tensor keeps the segment alive.
        out = torch.frombuffer(self._segment, dtype=dtype, count=numel, offset=self._used)
        self._used += size_bytes
        return out.view(shape)

    def _map(self, size_bytes: int) -> None:
        """Map a new segment of at least `size_bytes` at the end of the file."""
        wanted = min(max(self._size_bytes, SEGMENT_BYTES_MIN), SEGMENT_BYTES_MAX)
        size_bytes = max(size_bytes, wanted)
        self._start, self._used = self._size_bytes, 0
        self._size_bytes += size_bytes
        os.ftruncate(self._file, self._size_bytes)
        self._segment = mmap.mmap(self._file, size_bytes, offset=self._start)
        self._mapped.append((weakref.ref(self._segment), self._start))
