"""Slab: host memory for sections in RAM, gradients, activations and windows.

native/memory/slab.c maps the slab of the executor's slots in the same way. A slab is 2 MiB aligned,
on the chosen NUMA node (`_numa_node.py`), backed by transparent huge pages if the kernel has any,
touched on creation, and not inherited by forked children (a page under DMA must not become
copy-on-write). Huge pages speed up drives: 3.9 instead of 1.7 GB/s on a virtio disk, because a 1
MiB request of 4 KiB pages has 256 segments.

`Device.pin` (infinity/_src/memory/device.py) pins a slab, through `_cuda_driver.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from infinity.aio import _numa_node
from infinity.aio._memory_limits import check_slab

HUGE_PAGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_PART_BYTES = 1 << 30
_TOUCH_THREADS = 8
# ctypes releases the GIL during the call; mmap.madvise does not.
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _populate(address: int, size_bytes: int) -> int:
    """Touch a range of pages. Returns its bytes. Raises: MemoryError."""
    if _LIBC.madvise(address, size_bytes, _MADV_POPULATE_WRITE) == 0:
        return size_bytes
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise MemoryError(f"no memory for a slab of {size_bytes} bytes: {os.strerror(code)}")
    # An older kernel: touch the pages one by one.
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    np.ctypeslib.as_array(memory)[:: mmap.PAGESIZE] = 0
    return size_bytes


@final
class Slab:
    """`size_bytes` of zeroed memory at `address`, 2 MiB aligned.

    Views keep the memory alive: after `close`, the memory is freed with the last view. A forked
    child does not inherit the memory, so `memory` raises there. Raises MemoryError, before
    allocating, when the machine or the process's cgroup lacks memory. Blocks while it touches the
    pages; progress: called with the bytes of each touched part.
    """

    def __init__(
        self, size_bytes: int, *, progress: Callable[[int], object] = lambda _size_bytes: None
    ) -> None:
        if size_bytes <= 0:
            raise ValueError(f"Slab(size_bytes={size_bytes}): must be > 0")
        self.size_bytes = size_bytes
        self._closed = False
        self._forked = False
        # Whole huge pages, since the kernel fills a part of one with 4 KiB pages; and one more, to
        # align the start.
        rounded = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        check_slab(rounded)
        try:
            self._map = mmap.mmap(
                -1, rounded + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:
            raise MemoryError(
                f"no address space for a slab of {size_bytes} bytes: {error}"
            ) from error
        start = np.frombuffer(self._map, dtype=np.uint8, count=1).ctypes.data
        offset = -start % HUGE_PAGE_BYTES
        self.address = start + offset
        # A kernel without huge pages fails this call; the slab is then slower, and `infinity
        # doctor` reports that.
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE, offset, rounded)
        # After a fork pages would be copy-on-write: the parent's next write would move to a copied
        # page, and DMA in flight would reach the old page.
        self._map.madvise(mmap.MADV_DONTFORK, offset, rounded)
        _numa_node.prefer(self.address, rounded)  # before the first touch
        self._touch(self.address, rounded, progress)
        self._memory: memoryview | None = memoryview(self._map)[offset : offset + size_bytes]
        # Weak references, used to mark slabs in a forked child.
        _SLABS.add(self)

    @staticmethod
    def _touch(address: int, size_bytes: int, progress: Callable[[int], object]) -> None:
        """Touch all pages with several threads: one thread clears 5 to 10 GB/s, and a slab may have
        hundreds of GB.
        """
        parts = [
            (at, min(_PART_BYTES, address + size_bytes - at))
            for at in range(address, address + size_bytes, _PART_BYTES)
        ]
        threads = min(len(parts), _TOUCH_THREADS, os.cpu_count() or 1)
        if threads == 1:
            for part in parts:
                progress(_populate(*part))
            return
        with ThreadPoolExecutor(threads, "infinity-slab") as pool:
            try:
                for future in [pool.submit(_populate, *part) for part in parts]:
                    progress(future.result())
            finally:
                # After an error, touch no further parts.
                pool.shutdown(cancel_futures=True)

    @property
    def memory(self) -> memoryview:
        """The slab as a writable memoryview. Raises ValueError after `close` and in a forked
        child.
        """
        if self._forked:
            raise ValueError(
                "this slab belongs to the parent of this process; make a new one after the fork"
            )
        if self._memory is None:
            raise ValueError("the slab is closed")
        return self._memory

    def array(
        self, dtype: npt.DTypeLike, *, offset: int = 0, count: int | None = None
    ) -> npt.NDArray[Any]:
        """Return a writable view of `count` elements (None: up to the slab's end) of `dtype` from
        byte `offset` on.
        """
        kind = np.dtype(dtype)
        number = (self.size_bytes - offset) // kind.itemsize if count is None else count
        if offset < 0 or offset + number * kind.itemsize > self.size_bytes:
            raise ValueError(
                f"{number} x {kind} at byte {offset} is outside the slab of {self.size_bytes} bytes"
            )
        array: npt.NDArray[Any] = np.frombuffer(
            self.memory, dtype=kind, count=number, offset=offset
        )
        return array

    def huge_bytes(self) -> int:
        """Bytes backed by huge pages; -1 if /proc/self/smaps cannot be read."""
        return huge_page_bytes(self.address, self.size_bytes)

    def close(self) -> None:
        """Free the memory, or let the last view free it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._memory is not None and not self._forked:
            try:
                # The memoryview first: a mapping with a live view cannot be closed.
                self._memory.release()
                self._map.close()
            except BufferError:
                # Views exist: the mapping is freed with the last one.
                pass
        self._memory = None

    def __enter__(self) -> Slab:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_SLABS: weakref.WeakSet[Slab] = weakref.WeakSet()


def _mark_forked() -> None:
    for slab in _SLABS:
        slab._forked = True


os.register_at_fork(after_in_child=_mark_forked)


def huge_page_bytes(address: int, size_bytes: int) -> int:
    """Bytes of the range backed by transparent huge pages; -1 if /proc/self/smaps cannot be read.
    """
    end = address + size_bytes
    huge = 0
    inside = False
    try:
        with Path("/proc/self/smaps").open(encoding="ascii", errors="replace") as maps:
            for line in maps:
                head = line.split(maxsplit=1)[0]
                # A mapping's first line begins with its range, "7f..-7f.."; names of fields end
                # with a colon.
                if "-" in head and not head.endswith(":"):
                    low, high = (int(part, 16) for part in head.split("-"))
                    # Ranges ascend. Stop early, since the kernel counts the pages of each mapping.
                    if low >= end:
                        break
                    inside = high > address
                elif inside and head == "AnonHugePages:":
                    huge += int(line.split()[1]) * 1024
    except OSError:
        return -1
    # A mapping may extend beyond the range.
    return min(huge, size_bytes)
