"""C heap of a process that allocates and frees tensors unit by unit.

When the CPU computes, gathered flats and fresh gradients are ordinary heap memory, allocated and
freed once per use of a unit. glibc has two ways to treat them, both bad:

- A mapping for each large block: every page of every flat is faulted in and zeroed again: on two
  cores a seventh of the step of a 171 M model with states in RAM.
- Blocks on the heap, which glibc eventually chooses (each free of a mapped block raises its mapping
  threshold, up to 32 MiB): flats lie between small blocks that live longer, and fragmentation grows
  with the number of layers, 125 MiB for 24 more layers of 10 MiB. glibc also trims the heap's end
  during a step.

So flats stay on the heap, glibc never trims by itself, and this module returns the heap's holes
when they make the process too large. Memory that was in use at once in this step or the one before
is kept, because it will be needed again: faulting in and zeroing a whole step's activations and
gradients takes a fifth of its time.

Freeing blocks in another order also leaves holes during a step, which are reused before it ends.
Trimming returns all free memory, so the process may exceed the memory in use by as much as use
rises in a step, the most that such holes can be.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Iterable

SPARE_UNITS = 16
"""Free memory that the heap may keep, in sizes of the largest unit. Holes vary in size: with 2, a
use of a unit still faults in most of its memory; with 8, one in six flats of eight micro-batches;
with 16, hardly any (measured with flats and gradients of 26 MB).
"""

SPARE_BYTES_MAX = 384 << 20

STREAM_SPARE_BYTES = 8 << 20
"""Free memory that the heap may keep while all values of a model are loaded, on any device."""

SHARE_MAX = 0.02
"""Share of the time for checks that take longer than BRIEF_S. glibc walks every free block: some 80
microseconds for few blocks, a quarter of a second for half a million.
"""

BRIEF_S = 0.5e-3
"""Duration of a check that may run after each use of a unit; ten times that after a flat is loaded
from a drive.
"""

RISE_BYTES_MAX = 512 << 20
"""The most bytes of a step's holes. Returning them at each peak took a twentieth of the step's
time, for a process up to an eighth smaller (bench/README.md).
"""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h

MAPPED_FROM_BYTES = 32 << 20
"""Mapping threshold of glibc: the largest that it allows."""

ORDINARY_TRIM_BYTES = 2 * MAPPED_FROM_BYTES
"""glibc's default limit of its trim threshold, twice the mapping threshold. Restored when this
module limits no heap any more.
"""

GIVE_BACK_STEPS = 64
"""Steps after which all free memory is returned, which resets errors of the estimate."""


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h, all in bytes or counts. uordblks: in use on heaps; hblkhd: in
    separate mappings."""

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
    """Load the C library, if it reports its heap (glibc 2.33) and the user did not tune malloc."""
    # Respect a user's malloc settings.
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return None
    # The process's own malloc: the C library that is loaded already.
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2") or not hasattr(library, "malloc_trim"):
        return None
    library.mallinfo2.restype = _Mallinfo
    return library


class Heap:
    """Limit on the freed memory that malloc keeps. For one thread.

    The process may have the peak of memory in use, of this step or the one before, plus
    `spare_bytes`, plus the rise of use in the step before, 512 MiB at most. `freed` checks this,
    and `step_begins` begins a step. repeats: the peak will be needed again; without it only the
    present use counts.

    glibc does not report the memory that is free and resident: its free bytes include those that
    went back to the system. So they are estimated as the growth of the process beyond the growth of
    memory in use since the last complete trim. Memory in use that was not yet written makes the
    estimate too small. Memory outside malloc makes it too large, which costs a superfluous call. A
    complete trim ends both errors.

    glibc always maps blocks above 32 MiB separately, so they are faulted in at each use.

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
        # Bytes of the process at the least and at the most memory in use: in this step, and in the
        # one before.
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
        # On another device than the CPU units are not on the heap.
        return cls(
            min(SPARE_UNITS * max(size_bytes, default=0), SPARE_BYTES_MAX)
            if device_type == "cpu"
            else 0
        )

    @classmethod
    def for_stream(cls) -> Heap:
        """Make the heap's limit for an initialization, an export or a load, which use no memory
        twice. Returns all free memory to the system."""
        return cls(STREAM_SPARE_BYTES, repeats=False)

    def step_begins(self) -> None:
        """Begin a step; each `GIVE_BACK_STEPS`-th returns all free memory, and blocks meanwhile."""
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
        # Growth of the process beyond that of memory in use: glibc's own free bytes include pages
        # that went back to the system.
        resident = self._resident()
        in_use = self._used(self._library) + self._base
        kept = self._used_now if self._repeats else []
        self._used_now = [min([in_use, *kept]), max([in_use, *kept])]
        self._rest_after(began_s)
        most = max(self._used_now + self._used_before)
        # Of a complete step: the running one has not reached its peak.
        rise = max(self._used_before, default=0) - min(self._used_before, default=0)
        surplus = resident - most - self.spare_bytes
        if surplus > min(rise, RISE_BYTES_MAX):
            self._restart(self._library)

    def _restart(self, library: ctypes.CDLL) -> None:
        # First, so that the base is measured without free memory.
        library.malloc_trim(ctypes.c_size_t(0))
        began_s = time.thread_time()
        self._base = self._resident() - self._used(library)
        self._rest_after(began_s)

    def _rest_after(self, began_s: float) -> None:
        # CPU time of this thread. On a busy machine a check may take long by the clock, and the
        # pause after it would be long, too.
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
    # Otherwise glibc would trim during a step, and map blocks until one of their size was freed.
    # The threshold is twice what any heap keeps, so this module's limit applies first.
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
