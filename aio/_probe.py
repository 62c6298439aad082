"""Probe of this machine for `infinity doctor`: capabilities for an executor, with reasons for
missing ones.

Each capability is tried, never inferred from a version: containers forbid io_uring on any kernel
(seccomp: EPERM). The backend of a training run is chosen in `_open_executor.py`.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path

from infinity._src.cabi import native
from infinity._src.cabi.records import PoolSpec
from infinity.aio._file_system import DriveLimits, direct_alignments, file_system_type, limits_of
from infinity.aio._handles import load_uring
from infinity.aio._open_executor import open_executor
from infinity.aio._slab import HUGE_PAGE_BYTES, Slab
from infinity.aio._swap_file import SwapFile
from infinity.errors import AioError

#: Default request size and depth of training.
BLOCK_BYTES, DEPTH = 1 << 20, 32

_PROC = Path("/proc")
# errno of io_uring_setup -> cause; `_forbidden` finds that of EPERM and EACCES.
_WHY_NO_RING = {
    errno.ENOSYS: "the kernel was built without it, or a seccomp filter hides it",
    errno.ENOMEM: "RLIMIT_MEMLOCK is too small for a ring; raise it (ulimit -l)",
    errno.EMFILE: "too many open files; raise RLIMIT_NOFILE (ulimit -n)",
    errno.EINVAL: "the kernel knows none of the flags that are needed",
}


@dataclass(frozen=True)
class EngineProbe:
    """Result for extension, io_uring and memory. `native_reason`, `io_uring_reason`: why the
    extension or io_uring does not work, or "".
    """

    native: bool
    native_reason: str
    io_uring: bool
    io_uring_reason: str
    memlock_bytes: int | None
    """RLIMIT_MEMLOCK; None: no limit (root is always exempt)."""
    huge_pages: str
    """The kernel's setting: always, madvise or never; "" if it cannot be read."""
    huge_pages_work: bool
    """True if a trial slab got a huge page."""


@dataclass(frozen=True)
class DirectoryProbe:
    """Result for a swap directory. `reason`: why it is not usable, or ""."""

    path: str
    usable: bool
    reason: str
    file_system: str
    direct: bool
    """True if a trial of O_DIRECT succeeded."""
    direct_reason: str
    """Reason why O_DIRECT failed, or ""."""
    memory_alignment: int
    offset_alignment: int
    """O_DIRECT's alignments in bytes (statx); 0: not reported. infinity aligns to 4096."""
    free_bytes: int
    preallocates: bool
    """True if the file system can reserve space for a file (fallocate)."""
    limits: DriveLimits
    block_bytes: int
    depth: int
    """Requests of training there: BLOCK_BYTES and DEPTH, reduced to the limits."""


@dataclass(frozen=True)
class ExecutorProbe:
    """Resources of training's executor in one directory. `error`: why opening failed, or "".

    `registered_reason`: why the pools are not registered with io_uring, or "".
    """

    error: str = ""
    backend: str = ""
    backend_reason: str = ""
    pool_bytes: int = 0
    huge_bytes: int = 0
    registered: bool = False
    registered_reason: str = ""


def probe_engine() -> EngineProbe:
    """Try the C extension, a ring, and huge pages."""
    native_reason, ring_reason = "", ""
    try:
        ffi, lib = native.load()
    except ImportError as error:
        native_reason = ring_reason = str(error)
    else:
        try:
            load_uring(ffi, lib)
        except OSError as error:
            ring_reason = _carrier_reason(error)
        else:
            ring_reason = _ring_reason(-lib.inf_uring_probe())
    # Registered buffers of io_uring count against this limit.
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    try:
        with Slab(HUGE_PAGE_BYTES) as slab:
            # The setting may allow huge pages although the kernel has none free.
            works = slab.huge_bytes() >= HUGE_PAGE_BYTES
    except MemoryError: # not enough for one huge page
        works = False
    return EngineProbe(
        native=not native_reason,
        native_reason=native_reason,
        io_uring=not ring_reason,
        io_uring_reason=ring_reason,
        memlock_bytes=None if limit == resource.RLIM_INFINITY else limit,
        huge_pages=_huge_page_setting(),
        huge_pages_work=works,
    )


def _carrier_reason(error: OSError) -> str:
    """Return why liburing cannot be loaded, and the fix."""
    if platform.machine() != "x86_64":
        return f"{error} (its wheel exists for x86-64 only)"
    return (
        f"{error}: install the version of the package liburing that infinity names, with pip "
        "install --force-reinstall"
    )


def _ring_reason(code: int, proc: Path = _PROC) -> str:
    if code == 0:
        return ""
    why = (
        _forbidden(proc)
        if code in (errno.EPERM, errno.EACCES)
        else _WHY_NO_RING.get(code, "no ring can be made")
    )
    return f"io_uring: {os.strerror(code)}: {why}"


def _forbidden(proc: Path) -> str:
    """Return what forbids io_uring: the sysctl, a seccomp filter, or a security module."""
    mend = "sudo sysctl kernel.io_uring_disabled=0"
    setting = _text(proc / "sys" / "kernel" / "io_uring_disabled").strip()
    if setting == "2":
        return f"kernel.io_uring_disabled=2 forbids it to all users; {mend}"
    if setting == "1":
        return (
            "kernel.io_uring_disabled=1 allows it to kernel.io_uring_group and CAP_SYS_ADMIN "
            f"only; {mend}, or join the group"
        )
    status = dict(line.partition(":")[::2] for line in _text(proc / "self" / "status").splitlines())
    if status.get("Seccomp", "2").strip() != "0":
        return (
            "a seccomp filter forbids it, as container runtimes do by default; "
            "allow io_uring_setup, io_uring_enter and io_uring_register in its profile"
        )
    return "neither the sysctl nor seccomp forbids it: a security module (SELinux, AppArmor) does"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _huge_page_setting() -> str:
    return (
        _text(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
        .partition("[")[2]
        .partition("]")[0]
    )


def probe_directory(path: str | os.PathLike[str]) -> DirectoryProbe:
    """Try a swap directory: creates an unnamed file, writes and reads 4 KiB, and closes it."""
    name = os.fspath(path)
    kind, free, reason, direct_reason, preallocates = "", 0, "", "", False
    alignments, limits = (0, 0), DriveLimits()
    try:
        with SwapFile.create(name) as file:
            kind = file_system_type(name)
            space = os.fstatvfs(file.fd)
            free = space.f_bavail * space.f_frsize
            # Preallocation is tried, too: its support cannot be queried.
            file.grow(mmap.PAGESIZE)
            direct_reason, preallocates = file.direct_reason, file.preallocated
            alignments, limits = direct_alignments(file.fd), limits_of(file)
            # An anonymous mapping is page-aligned, as O_DIRECT requires.
            page = mmap.mmap(-1, mmap.PAGESIZE)
            if os.pwritev(file.fd, [page], 0) != len(page) or os.preadv(file.fd, [page], 0) != len(
                page
            ):
                reason = "a transfer of 4 KiB was short"
    except (AioError, ValueError, OSError) as error:
        reason = str(error)
    block_bytes, depth = limits.fit(BLOCK_BYTES, DEPTH)
    return DirectoryProbe(
        path=name,
        usable=not reason,
        reason=reason,
        file_system=kind,
        direct=not reason and not direct_reason,
        direct_reason=direct_reason,
        memory_alignment=alignments[0],
        offset_alignment=alignments[1],
        free_bytes=free,
        preallocates=preallocates,
        limits=limits,
        block_bytes=block_bytes,
        depth=depth,
    )


def probe_executor(
    path: str | os.PathLike[str], *, small: PoolSpec, large: PoolSpec
) -> ExecutorProbe:
    """Open an executor with training's pools in a directory, and close it again."""
    try:
        with SwapFile.create(path) as file:
            executor = open_executor([file], small=small, large=large)
            try:
                stats = executor.stats()
            finally:
                # No job was submitted.
                executor.close(wait=False)
    except (ImportError, MemoryError, ValueError, OSError) as error:
        return ExecutorProbe(error=str(error))
    return ExecutorProbe(
        backend=stats.backend,
        backend_reason=stats.backend_reason,
        pool_bytes=stats.pool_bytes,
        huge_bytes=max(stats.huge_bytes, 0),
        registered=stats.registered,
        registered_reason=stats.registered_reason,
    )
