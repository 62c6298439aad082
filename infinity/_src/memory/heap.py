"""The C heap of a process whose tensors come and go by the unit.

When the CPU computes, gathered flats and fresh gradients are ordinary heap memory, allocated and freed once per use of a
unit. Both things that glibc can do with them are bad. With a mapping for each large block, every page of every flat is
faulted in and zeroed anew: on two cores a seventh of the step of a 171 M model whose states rest in RAM. Left on the heap
(what glibc comes to by itself: it raises the size from which it maps, up to 32 MiB, each time such a block is freed),
flats lie among small blocks that outlive them, and the holes they leave grow with the number of layers: 125 MiB for 24
more layers of 10 MiB. So they stay on the heap, and it is told to give its holes back when too much lies in them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Iterable

SPARE_UNITS = 8
"""So many of the largest unit may lie free, in holes that are not all of the right size. With 2, a unit's use still faults
in most of its memory; with 8 it hardly does (measured, with flats and gradients of 26 MB)."""

SPARE_BYTES_MAX = 256 << 20

SHARE_MAX = 0.02
"""Of the time, for looks that take longer than BRIEF_S: glibc walks every free block, which takes some 80 microseconds where they
are few, and a quarter of a second where the program has left half a million of them."""

BRIEF_S = 0.5e-3


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h, all in bytes or counts. uordblks: in use on heaps; hblkhd: in mappings of their own."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
    )


def _library() -> ctypes.CDLL | None:
    """The C library if it is one that can be watched (glibc 2.33) and that the user did not set otherwise."""
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2") or not hasattr(library, "malloc_trim"):
        return None
    library.mallinfo2.restype = _Mallinfo
    return library


class Heap:
    """Keeps what malloc holds of freed memory to about `spare_bytes`, checked by `freed`; `restart` once per step.

    What lies free and resident is not told by glibc, whose free bytes count what went back to the system too. It is estimated
    as the growth of the process beyond the growth of what is in use, since the last time all was given back. Memory in use
    that nobody has written yet makes the estimate too small, by as much as is missing from the process meanwhile; memory that
    does not come from malloc makes it too large, which costs a superfluous call. Both end with the next `restart`.
    Blocks above 32 MiB glibc maps one by one whatever it holds free: those are faulted in anew at each use. For one thread.
    Does nothing (spare_bytes is 0) when given nothing, under other C libraries, and when the user set malloc in the environment:
    it is theirs then.
    """

    def __init__(self, spare_bytes: int) -> None:
        self._library = _library() if spare_bytes else None
        self.spare_bytes = 0
        if self._library is None:
            return
        self.spare_bytes = spare_bytes
        self._not_before_s = 0.0
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._statm)
        self._restart(self._library)

    @classmethod
    def for_units(cls, size_bytes: Iterable[int], device_type: str) -> Heap:
        """For a model whose gathered units have these sizes. On another device than the CPU they are not on the heap."""
        return cls(min(SPARE_UNITS * max(size_bytes, default=0), SPARE_BYTES_MAX) if device_type == "cpu" else 0)

    def restart(self) -> None:
        """Give all back and measure from here. Blocks, for as long as the kernel takes to free what there is."""
        if self._library is not None and time.monotonic() >= self._not_before_s:
            self._restart(self._library)

    def freed(self) -> None:
        """Large blocks were freed: give back what is free if it is too much. Tens of microseconds if it is not."""
        if self._library is None or time.monotonic() < self._not_before_s:
            return
        began_s = time.thread_time()
        excess = self._resident() - self._used(self._library) - self._base
        self._rest_after(began_s)
        if excess > self.spare_bytes:
            self._restart(self._library)

    def _restart(self, library: ctypes.CDLL) -> None:
        library.malloc_trim(ctypes.c_size_t(0))
        began_s = time.thread_time()
        self._base = self._resident() - self._used(library)
        self._rest_after(began_s)

    def _rest_after(self, began_s: float) -> None:
        # This thread's own time: on a busy machine a brief look may last long, and none for so much longer would cost memory.
        took_s = time.thread_time() - began_s
        self._not_before_s = time.monotonic() + (took_s / SHARE_MAX if took_s > BRIEF_S else 0.0)

    def _used(self, library: ctypes.CDLL) -> int:
        info = library.mallinfo2()
        return int(info.uordblks) + int(info.hblkhd)

    def _resident(self) -> int:
        return int(os.pread(self._statm, 128, 0).split()[1]) * mmap.PAGESIZE


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
