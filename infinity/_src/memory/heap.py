"""C heap of a process that allocates and frees tensors unit by unit.

When the CPU computes, gathered flats and fresh gradients are ordinary heap memory, allocated and
freed once per use of a unit. glibc can allocate them in two ways, both bad:

- As a mapping for each large block. Then the kernel faults in and zeroes every page of every flat
  again, which took a seventh of the step of a 171 M model with states in RAM on two cores.
- As blocks on the heap, which glibc eventually chooses: each free of a mapped block raises its
  mapping threshold, up to 32 MiB. Then flats lie between small blocks that live longer, and
  fragmentation grows with the number of layers: 125 MiB for 24 more layers of 10 MiB. glibc also
  trims the heap's end during a step.

So flats stay on the heap, automatic trimming by glibc is off, and this module trims the heap when
its holes make the process too large. It retains the peak of memory in use in this step or the step
before, because the next step needs as much: faulting in and zeroing a whole step's activations and
gradients takes a fifth of the step's time.

If blocks are freed in a different order than allocated, holes arise that are reused within the
step. A trim would return these, too. So the process may exceed the memory in use by the rise of use
within a step, the most bytes that such holes can have.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Iterable

SPARE_UNITS = 16
"""Free memory that the heap may retain, as a multiple of the largest unit. Holes vary in size: with
2, most of a unit's memory is still faulted in at each use; with 8, that of one in six flats (eight
micro-batches); with 16, hardly any (measured with flats and gradients of 26 MB).
"""

SPARE_BYTES_MAX = 384 << 20

STREAM_SPARE_BYTES = 8 << 20
"""Free memory that the heap may retain while the values of a model are loaded, on any device."""

SHARE_MAX = 0.02
"""Share of the time that checks longer than BRIEF_S may take. In a check glibc walks every free
block: some 80 microseconds for few blocks, a quarter of a second for half a million.
"""

BRIEF_S = 0.5e-3
"""A check may run after each use of a unit if it takes no longer than this; after each load of a
flat from a drive, no longer than ten times this.
"""

RISE_BYTES_MAX = 512 << 20
"""Limit of the holes that a step may retain. Returning them at each peak took a twentieth of the
step's time, and made the process up to an eighth smaller (bench/README.md).
"""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h

MAPPED_FROM_BYTES = 32 << 20
"""Mapping threshold of glibc: the largest that it allows."""

ORDINARY_TRIM_BYTES = 2 * MAPPED_FROM_BYTES
"""The largest trim threshold that glibc chooses by itself: twice the mapping threshold. Set again
when the last `Heap` is gone.
"""

GIVE_BACK_STEPS = 64
"""Steps between two complete trims, which reset the errors of the estimate (see `Heap`)."""


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h. uordblks: bytes in use on heaps; hblkhd: bytes in separate
    mappings."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    )


def _library() -> ctypes.CDLL | None:
    """Load the C library; None if it does not report its heap (glibc before 2.33), or if the user
    has tuned malloc in the environment."""
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return None
    # None: the C library that the process has loaded.
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2") or not hasattr(library, "malloc_trim"):
        return None
    library.mallinfo2.restype = _Mallinfo
    return library


class Heap:
    """Limit on the freed memory that malloc retains. For one thread.

    The process may be as large as the peak of memory in use, in this step or the step before, plus
    `spare_bytes`, plus the rise of use in the step before (RISE_BYTES_MAX at most). `freed` checks
    this, and `step_begins` begins a step. repeats: later steps need the peak again; False: only the
    present use counts, not the peak.

    glibc does not report how much free memory is resident: its count of free bytes includes pages
    that it has returned to the system. So this class estimates free resident memory: the growth of
    the process since the last complete trim, less the growth of memory in use. The estimate is too
    small if allocated memory is not written yet, and too large if memory is allocated outside of
    malloc, which costs a superfluous trim. Each complete trim resets both errors.

    glibc always maps blocks above 32 MiB separately, so these are faulted in at each use.

    Does nothing (`spare_bytes` is 0) for a limit of 0, under other C libraries, and where the user
    has tuned malloc in the environment.
    """

    def __init__(self, spare_bytes: int, *, repeats: bool = True) -> None:
        self._library = _library() if spare_bytes else None
        self.spare_bytes = 0
        if self._library is None:
            return
        self.spare_bytes = spare_bytes
        self._not_before_s = 0.0
        self._repeats = repeats
        self._brief_s = BRIEF_S if repeats else 10 * BRIEF_S
        self._steps = 0
        # [least, most] memory in use, as bytes of the process: in this step, in the step before.
        self._used_now: list[int] = []
        self._used_before: list[int] = []
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        # Close the descriptor with the object, so that models do not leak descriptors.
        weakref.finalize(self, os.close, self._statm)
        _LIMITED.add(self)
        _keep_free_memory(self._library)
        weakref.finalize(self, _ordinary_again, self._library)
        self._restart(self._library)

    @classmethod
    def for_units(cls, size_bytes: Iterable[int], device_type: str) -> Heap:
        """Make the heap's limit for a model whose gathered units have these sizes."""
        # Only on the CPU are units on the heap.
        return cls(
            min(SPARE_UNITS * max(size_bytes, default=0), SPARE_BYTES_MAX)
            if device_type == "cpu"
            else 0
        )

    @classmethod
    def for_stream(cls) -> Heap:
        """Make the heap's limit for an initialization, an export or a load, which never need freed
        memory again. Returns all free memory to the system."""
        return cls(STREAM_SPARE_BYTES, repeats=False)

    def step_begins(self) -> None:
        """Begin a step. Every `GIVE_BACK_STEPS` steps this returns all free memory, and blocks
        meanwhile."""
        if self._library is None:
            return
        self._used_before, self._used_now = self._used_now, []
        if self._steps % GIVE_BACK_STEPS == 0 and time.monotonic() >= self._not_before_s:
            self._restart(self._library)
        self._steps += 1

    def freed(self) -> None:
        """Return free memory to the system if it makes the process too large. Call after freeing
        large blocks.

        Takes tens of microseconds if nothing is returned.
        """
        if self._library is None or time.monotonic() < self._not_before_s:
            return
        began_s = time.thread_time()
        resident = self._resident()
        in_use = self._used(self._library) + self._base
        kept = self._used_now if self._repeats else []
        self._used_now = [min([in_use, *kept]), max([in_use, *kept])]
        self._rest_after(began_s)
        most = max(self._used_now + self._used_before)
        # Of the step before: the running step may not have reached its peak.
        rise = max(self._used_before, default=0) - min(self._used_before, default=0)
        surplus = resident - most - self.spare_bytes
        if surplus > min(rise, RISE_BYTES_MAX):
            self._restart(self._library)

    def _restart(self, library: ctypes.CDLL) -> None:
        # First, so that the process has no free memory when the base is measured.
        library.malloc_trim(ctypes.c_size_t(0))
        began_s = time.thread_time()
        self._base = self._resident() - self._used(library)
        self._rest_after(began_s)

    def _rest_after(self, began_s: float) -> None:
        # CPU time of this thread: on a busy machine elapsed time would make the pauses too long.
        took_s = time.thread_time() - began_s
        rest_s = took_s / SHARE_MAX if took_s > self._brief_s else 0.0
        self._not_before_s = time.monotonic() + rest_s

    def _used(self, library: ctypes.CDLL) -> int:
        info = library.mallinfo2()
        return int(info.uordblks) + int(info.hblkhd)

    def _resident(self) -> int:
        return int(os.pread(self._statm, 128, 0).split()[1]) * mmap.PAGESIZE


_LIMITED: weakref.WeakSet[Heap] = weakref.WeakSet()
"""Heaps of this process with a limit."""


def _keep_free_memory(library: ctypes.CDLL) -> None:
    # By default glibc trims during a step, and maps large blocks until it has freed one of their
    # size. The trim threshold is twice what a `Heap` retains, so that the `Heap` trims first.
    library.mallopt(_M_TRIM_THRESHOLD, 2 * (SPARE_BYTES_MAX + RISE_BYTES_MAX))
    library.mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)


def _ordinary_again(library: ctypes.CDLL) -> None:
    if next(iter(_LIMITED), None) is None:
        library.mallopt(_M_TRIM_THRESHOLD, ORDINARY_TRIM_BYTES)


def give_back(address: int, size_bytes: int) -> int:
    """Return the whole pages of a range of private anonymous memory to the system.

    They read as zeros afterwards. Returns the number of bytes: 0 if the C library or the kernel
    refuses, which changes nothing.
    """
    page = mmap.PAGESIZE
    # Whole pages only: the first and last page also have bytes outside the range.
    start = -(-address // page) * page
    size = (address + size_bytes) // page * page - start
    library = ctypes.CDLL(None)
    if size <= 0 or not hasattr(library, "madvise"):
        return 0
    refused = library.madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(mmap.MADV_DONTNEED)
    )
    return 0 if refused else size
