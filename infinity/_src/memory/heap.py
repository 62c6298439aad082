"""C heap of a process whose tensors come and go by the unit.

When the CPU computes, gathered flats and fresh gradients are ordinary heap memory, allocated and
freed once per use of a unit. Both ways in which glibc can treat them are bad:

- A mapping for each large block: every page of every flat is faulted in and zeroed anew, on two
  cores a seventh of the step of a 171 M model whose states rest in RAM.
- Blocks on the heap, which glibc ends with by itself (it raises the size from which it maps, up to
  32 MiB, each time such a block is freed): flats lie among small blocks that outlive them, and the
  holes they leave grow with the number of layers, 125 MiB for 24 more layers of 10 MiB. And
  glibc gives free memory at the heap's end back by itself, in the midst of a step.

So they stay on the heap, glibc gives nothing back by itself, and the heap's holes are given back
when they make the process larger than it has to be. Free memory that it needed a moment ago does
not: what was in use at once in this step or the one before will be again. Given back, it would be
faulted in and zeroed anew, activations and gradients of a whole step with it: a fifth of the time
of that step.

Blocks that go in another order than they came leave holes, too, in the midst of a step, and those
fill again before it ends. To give them back takes all free memory along, so the process may be
larger than what is in use by as much as use rises in a step: holes are of that size at most.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Iterable

SPARE_UNITS = 16
"""Free memory that the heap may keep, in sizes of the largest unit. Holes are not all of the right
size: with 2, a use of a unit still faults in most of its memory; with 8 one in six of the flats of
eight micro-batches; with 16 hardly any (measured, with flats and gradients of 26 MB).
"""

SPARE_BYTES_MAX = 384 << 20

STREAM_SPARE_BYTES = 8 << 20
"""Free memory that the heap may keep while all values of a model pass through memory once, whatever
device computes.
"""

SHARE_MAX = 0.02
"""Share of the time for checks that take longer than BRIEF_S. glibc walks every free block: some 80
microseconds where they are few, and a quarter of a second where the program has left half a
million.
"""

BRIEF_S = 0.5e-3
"""Time of a check that may be made after each use of a unit; ten times of that after a flat that is
filled, once, from a drive.
"""

RISE_BYTES_MAX = 512 << 20
"""The most that holes of a step may take. To give them back whenever most was in use cost a
twentieth of the time of a step, for a process up to an eighth smaller (bench/README.md).
"""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h

MAPPED_FROM_BYTES = 32 << 20
"""Size of blocks from which glibc maps each by itself: the largest that it allows."""

ORDINARY_TRIM_BYTES = 2 * MAPPED_FROM_BYTES
"""Free memory at the heap's end from which glibc gives it back: where its own rule ends, twice the
size from which it maps. In force again when no heap is limited here any more.
"""

GIVE_BACK_STEPS = 64
"""Steps after which all free memory is given back, so that errors of the estimate end."""


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h, all in bytes or counts. uordblks: in use on heaps; hblkhd: in
    mappings of their own."""

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
    # A user who tuned malloc has chosen, and the limit stays out of the way.
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

    The process may be as large as the memory that was in use at once, in this step or the one
    before, and `spare_bytes` more, and more again by as much as use rose in the step before, 512
    MiB at most. `freed` checks it, and `step_begins` moves on by a step. repeats: what was needed
    at once will be again; without it only what is in use now counts.

    glibc does not report the memory that is free and resident: its free bytes include those that
    went back to the system. So they are estimated, as the growth of the process beyond the growth
    of memory in use, since all was last given back. Memory in use that was not written yet makes
    the estimate too small, by as much as is not yet resident. Memory that does not come from malloc
    makes it too large, which costs a superfluous call. Both end when all is given back.

    glibc always maps blocks above 32 MiB one by one, so they are faulted in anew at each use.

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
        # Bytes of the process with what was in use at least, and at most: in this step, and in the
        # one before.
        self._used_now: list[int] = []
        self._used_before: list[int] = []
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        # The descriptor is the object's: it must not leak with each model.
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
        """Make the heap's limit for a fill, an export or a load, which use no memory twice. Gives
        back all that is free now."""
        return cls(STREAM_SPARE_BYTES, repeats=False)

    def step_begins(self) -> None:
        """Move on by a step; the first of `GIVE_BACK_STEPS` gives all free memory back, and blocks
        while the kernel takes it."""
        if self._library is None:
            return
        self._used_before, self._used_now = self._used_now, []
        if self._steps % GIVE_BACK_STEPS == 0 and time.monotonic() >= self._not_before_s:
            self._restart(self._library)
        self._steps += 1

    def freed(self) -> None:
        """Give free memory back if it makes the process too large; call this after freeing large
        blocks.

        Takes tens of microseconds if nothing is to be given back.
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
        # In a whole step: one that is under way has not shown what goes and comes again.
        rise = max(self._used_before, default=0) - min(self._used_before, default=0)
        surplus = resident - most - self.spare_bytes
        if surplus > min(rise, RISE_BYTES_MAX):
            self._restart(self._library)

    def _restart(self, library: ctypes.CDLL) -> None:
        # First, so that the base is measured with nothing kept.
        library.malloc_trim(ctypes.c_size_t(0))
        began_s = time.thread_time()
        self._base = self._resident() - self._used(library)
        self._rest_after(began_s)

    def _rest_after(self, began_s: float) -> None:
        # This thread's own time. On a busy machine a brief check may last long by the clock, and
        # then the pause after it would be long, and cost memory.
        took_s = time.thread_time() - began_s
        rest_s = took_s / SHARE_MAX if took_s > self._brief_s else 0.0
        self._not_before_s = time.monotonic() + rest_s

    def _used(self, library: ctypes.CDLL) -> int:
        info = library.mallinfo2()
        return int(info.uordblks) + int(info.hblkhd)

    def _resident(self) -> int:
        return int(os.pread(self._statm, 128, 0).split()[1]) * mmap.PAGESIZE


_LIMITED: weakref.WeakSet[Heap] = weakref.WeakSet()
"""Heaps of this process that look after the memory that malloc keeps."""


def _keep_free_memory(library: ctypes.CDLL) -> None:
    # Its own rules would give the heap's end back in the midst of a step, and map blocks until one
    # of their size was freed. Twice what any heap keeps: the limit here comes first.
    library.mallopt(_M_TRIM_THRESHOLD, 2 * (SPARE_BYTES_MAX + RISE_BYTES_MAX))
    library.mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)


def _ordinary_again(library: ctypes.CDLL) -> None:
    if next(iter(_LIMITED), None) is None:
        library.mallopt(_M_TRIM_THRESHOLD, ORDINARY_TRIM_BYTES)


def give_back(address: int, size_bytes: int) -> int:
    """Give the whole pages of a range of private anonymous memory back to the system.

    They read as zeros from then on. Returns the bytes given back: 0 where the C library or the
    kernel refuses, and the memory stays as it is.
    """
    page = mmap.PAGESIZE
    # Whole pages only: the bytes beside the range on its first and last page are someone else's.
    start = -(-address // page) * page
    size = (address + size_bytes) // page * page - start
    library = ctypes.CDLL(None)
    if size <= 0 or not hasattr(library, "madvise"):
        return 0
    refused = library.madvise(
        ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(mmap.MADV_DONTNEED)
    )
    return 0 if refused else size
