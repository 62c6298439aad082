"""Swap files: nameless, private, preallocated, opened past the page cache.

O_TMPFILE makes a file that has no name: a killed process leaves nothing behind and no other user can open it. Contents
die with the process, so nothing is ever fsynced.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import final

from infinity.errors import AioError, SwapFullError

log = logging.getLogger("infinity.aio")
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})


def file_system_type(path: str | os.PathLike[str]) -> str:
    """Type of the file system that holds `path` ("ext4", "tmpfs" ...), "" when /proc does not tell."""
    device = Path(path).stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    kind = ""
    try:
        with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                before, _, after = line.partition(" - ")
                if before.split()[2] == wanted and after:
                    kind = after.split()[0]
    except OSError:
        return ""
    return kind


@final
class SwapFile:
    """One open swap file; make it with `SwapFile.create`.

    `fd`: open for reading and writing. `path`: the directory it lies in (it has no name of its own).
    `direct`: whether it goes past the page cache. `size_bytes`: what is preallocated.
    """

    def __init__(self, fd: int, path: str, *, direct: bool) -> None:
        self.fd = fd
        self.path = path
        self.direct = direct
        self.size_bytes = os.fstat(fd).st_size

    @classmethod
    def create(cls, directory: str | os.PathLike[str], *, direct: bool = True) -> SwapFile:
        """A new nameless file in `directory`, mode 0600.

        Falls back to buffered I/O, with a warning, where the file system refuses O_DIRECT.
        Raises ValueError for a missing directory or one in memory, AioError when the file cannot be made there.
        """
        path = os.fspath(directory)
        if not Path(path).is_dir():
            what = "is not a directory" if Path(path).exists() else "does not exist"
            raise ValueError(f"swap directory {path!r} {what}; create it, or name another in Policy.nvme")
        kind = file_system_type(path)
        if kind in _IN_MEMORY:
            if os.environ.get("INFINITY_ALLOW_TMPFS") != "1":
                raise ValueError(
                    f"swap directory {path!r} is on {kind}, which is memory and saves none; name a directory on a drive, "
                    "or set INFINITY_ALLOW_TMPFS=1 (meant for tests)"
                )
            direct = False  # tmpfs takes O_DIRECT and ignores it
        try:
            return cls._create(path, direct)
        except OSError as error:
            raise AioError(
                f"cannot make a swap file in {path!r}; name a directory that this user may write to",
                errno=error.errno or 0,
                path=path,
                op="open",
            ) from error

    @classmethod
    def _create(cls, path: str, direct: bool) -> SwapFile:
        if not direct:
            return cls(_open_nameless(path, 0), path, direct=False)
        try:
            return cls(_open_nameless(path, os.O_DIRECT), path, direct=True)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        log.warning("%s: the file system refuses O_DIRECT; swapping through the page cache", path)
        return cls(_open_nameless(path, 0), path, direct=False)

    def grow(self, size_bytes: int) -> None:
        """Preallocate up to `size_bytes` in all; does nothing if it is that large. Blocks while the file system works.

        Raises SwapFullError that says how much is missing.
        """
        if size_bytes <= self.size_bytes:
            return
        more = size_bytes - self.size_bytes
        if (
            self._free_bytes() < more
        ):  # asked first: a failing preallocation would fill the drive for a moment
            raise self._full(more, errno.ENOSPC)
        try:
            os.posix_fallocate(self.fd, self.size_bytes, more)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise self._full(more, error.errno) from error
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise AioError(
                    "preallocation failed",
                    errno=error.errno or 0,
                    path=self.path,
                    op="allocate",
                    offset=self.size_bytes,
                    length=more,
                ) from error
            os.ftruncate(self.fd, size_bytes)  # no preallocation here: later writes may still find no room
        self.size_bytes = size_bytes

    def _free_bytes(self) -> int:
        space = os.fstatvfs(self.fd)
        return space.f_bavail * space.f_frsize

    def _full(self, more: int, code: int) -> SwapFullError:
        free = self._free_bytes()
        os.ftruncate(self.fd, self.size_bytes)  # a failed preallocation keeps what it got
        return SwapFullError(
            f"{self.path!r} has room for {free} of {more} more bytes: {max(0, more - free)} are missing; "
            "free space, or add a directory to Policy.nvme",
            errno=code,
            path=self.path,
            op="allocate",
            offset=self.size_bytes,
            length=more,
        )

    def close(self) -> None:
        """Close the file, which frees its space. Idempotent. Close the executor first."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> SwapFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()

    def __repr__(self) -> str:
        return f"SwapFile({self.path!r}, size_bytes={self.size_bytes}, direct={self.direct})"


def _open_nameless(path: str, flags: int) -> int:
    """A file without a name in directory `path`. EINVAL means that `flags` (O_DIRECT) are refused."""
    common = os.O_RDWR | os.O_CLOEXEC
    try:
        # O_EXCL: it can never be given a name.
        return os.open(path, common | os.O_TMPFILE | os.O_EXCL | flags, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    private = Path(tempfile.mkdtemp(prefix="infinity-swap-", dir=path))  # mode 0700
    try:
        return os.open(private / "swap", common | os.O_CREAT | os.O_EXCL | flags, 0o600)
    finally:
        shutil.rmtree(private, ignore_errors=True)
