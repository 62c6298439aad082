"""What this machine gives an executor, and why it does not give more. For `infinity doctor`.

A capability is tried, never inferred from a version: containers forbid io_uring with any kernel (seccomp: EPERM).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from infinity.aio.native_core import load_native, load_uring
from infinity.aio.slab import HUGE_PAGE_BYTES, Slab
from infinity.aio.swap_file import SwapFile, file_system_type
from infinity.errors import AioError

_WHY_NO_RING = {
    errno.EPERM: "forbidden by a seccomp filter (as in most containers) or by kernel.io_uring_disabled",
    errno.ENOSYS: "the kernel was built without it, or a seccomp filter hides it",
    errno.ENOMEM: "RLIMIT_MEMLOCK is too small for a ring; raise it (ulimit -l)",
    errno.EMFILE: "too many open files; raise RLIMIT_NOFILE (ulimit -n)",
    errno.EINVAL: "the kernel knows none of the flags that are needed",
}


@dataclass(frozen=True)
class EngineProbe:
    """io_uring and memory. `native_reason`, `io_uring_reason`: why not; empty when it works."""

    native: bool
    native_reason: str
    io_uring: bool
    io_uring_reason: str
    memlock_bytes: int | None
    """RLIMIT_MEMLOCK; None without limit (root is exempt in any case)."""
    huge_pages: str
    """The kernel's setting: always, madvise or never; empty where it cannot be read."""
    huge_pages_work: bool
    """A slab that was tried got them."""


@dataclass(frozen=True)
class DirectoryProbe:
    """A directory as a place to swap. `reason`: why it cannot be one; empty when it can."""

    path: str
    usable: bool
    reason: str
    file_system: str
    direct: bool
    """O_DIRECT works there."""
    memory_alignment: int
    offset_alignment: int
    """What O_DIRECT wants (statx); 0 where the kernel does not tell. infinity lays everything out at 4096."""
    free_bytes: int


def probe_engine() -> EngineProbe:
    """Try the native extension, a ring, and huge pages."""
    native_reason, ring_reason = "", ""
    try:
        ffi, lib = load_native()
    except ImportError as error:
        native_reason = ring_reason = f"the native extension is not built: {error}"
    else:
        try:
            load_uring(ffi, lib)
        except OSError as error:
            ring_reason = str(error)
        else:
            ring_reason = _ring_reason(-lib.inf_uring_probe())
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    with Slab(HUGE_PAGE_BYTES) as slab:
        works = slab.huge_bytes() >= HUGE_PAGE_BYTES
    return EngineProbe(
        native=not native_reason,
        native_reason=native_reason,
        io_uring=not ring_reason,
        io_uring_reason=ring_reason,
        memlock_bytes=None if limit == resource.RLIM_INFINITY else limit,
        huge_pages=_huge_page_setting(),
        huge_pages_work=works,
    )


def _ring_reason(code: int) -> str:
    if code == 0:
        return ""
    return f"io_uring: {os.strerror(code)}: {_WHY_NO_RING.get(code, 'no ring can be made')}"


def _huge_page_setting() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def probe_directory(path: str | os.PathLike[str]) -> DirectoryProbe:
    """Try to swap in a directory: makes a nameless file, writes and reads 4 KiB, leaves nothing."""
    name = os.fspath(path)
    kind, free, reason, direct = "", 0, "", False
    alignments = (0, 0)
    try:
        with SwapFile.create(name) as file:
            kind = file_system_type(name)
            space = os.fstatvfs(file.fd)
            free = space.f_bavail * space.f_frsize
            file.grow(mmap.PAGESIZE)
            direct = file.direct
            alignments = direct_alignments(file.fd)
            page = mmap.mmap(-1, mmap.PAGESIZE)
            if os.pwritev(file.fd, [page], 0) != len(page) or os.preadv(file.fd, [page], 0) != len(page):
                reason = "a transfer of 4 KiB came back short"
    except (AioError, ValueError, OSError) as error:
        reason = str(error)
    return DirectoryProbe(
        path=name,
        usable=not reason,
        reason=reason,
        file_system=kind,
        direct=direct,
        memory_alignment=alignments[0],
        offset_alignment=alignments[1],
        free_bytes=free,
    )


_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000


def direct_alignments(fd: int) -> tuple[int, int]:
    """(memory, offset) alignment that O_DIRECT wants of an open file, in bytes; zeros where statx does not tell."""
    # struct statx: stx_mask at 0 (u32), stx_dio_mem_align and stx_dio_offset_align at 0x98 (two u32); 256 bytes in all.
    record = (ctypes.c_uint32 * 64)()
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, record):
        return 0, 0
    if not record[0] & _STATX_DIOALIGN:
        return 0, 0
    return int(record[38]), int(record[39])
