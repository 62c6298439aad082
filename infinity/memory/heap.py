"""The C heap of a process whose tensors come and go by the unit.

When the CPU computes, gathered flats and fresh gradients are ordinary heap memory. glibc serves a large request with
its own mapping, but raises the size from which it does so (up to 32 MiB) each time such a block is freed; from then on
flats lie on the heap, among small blocks that outlive them, and the holes that they leave grow with the number of
layers: 125 MiB for 24 more layers of 10 MiB (measured; 11 MiB with a fixed threshold, at no cost in time).
"""

from __future__ import annotations

import ctypes
import mmap
import os

MMAP_THRESHOLD_BYTES = 1 << 20

_M_MMAP_THRESHOLD = -3  # malloc.h


def keep_large_blocks_apart() -> bool:
    """Let the C library give every block of at least `MMAP_THRESHOLD_BYTES` back to the system when it is freed.

    For the whole process, from now on. Leaves alone what the user set (`MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`) and
    other C libraries. Returns whether it took effect.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "malloc.mmap_threshold" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version") or not hasattr(library, "mallopt"):
        return False
    return bool(library.mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES))


def give_back(address: int, size_bytes: int) -> int:
    """Give the whole pages of a range of private anonymous memory back to the system; they read as zeros from then on.

    Returns the bytes given back: 0 where the C library or the kernel refuses, and the memory stays as it is.
    """
    page = mmap.PAGESIZE
    start = -(-address // page) * page
    size = (address + size_bytes) // page * page - start
    library = ctypes.CDLL(None)
    if size <= 0 or not hasattr(library, "madvise"):
        return 0
    refused = library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(mmap.MADV_DONTNEED))
    return 0 if refused else size
