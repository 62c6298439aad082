"""Swap files: private, preallocated, opened past the page cache.

Two kinds of swap space:

- ephemeral (`SwapFile.create`): without a name (O_TMPFILE), so a killed process leaves no file and
  no other user can open it. Its contents end with the process, so it is never fsynced.
- durable (`SwapFile.durable`): named and locked, for runs that outlive their process. This module
  never removes it.

This module does no transfers: infinity/_src/params/state_store.py swaps sections in and out
(`fetch`, `store`) by jobs of the executor (`_executor.py`), whose native threads read and write.

`SwapFile.new` and `SwapFile.existing` open ordinary files for the same executors: a checkpoint's
data, in any directory, with ordinary permissions.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import resource
import stat
import sys
import time
import weakref
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import final

from infinity._src.base.paths import absolute, check_link
from infinity.aio._file_system import IN_MEMORY, direct_refusal, file_system_type, set_buffered
from infinity.aio._swap_owner import Life, Owner, PrivateDirectory, clear_dead, lock
from infinity.errors import AioError, DeviceFailedError, SwapFullError

log = logging.getLogger("infinity.aio")

# Errors of open if O_TMPFILE is not supported; EINVAL may also mean that O_DIRECT is not.
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})
_NO_ROOM = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT})
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_OPEN = os.O_RDWR | os.O_CLOEXEC
# No slash, and no leading dot, with which names of owner files begin.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LOCK_WAIT_S = {Life.LIVES: 0.1, Life.ENDS: 60.0, Life.GONE: 2.0}
"""Seconds to wait for a durable file's lock, by the state of its holder. An ending process may
first free tens of GB. A live one may just have been killed, which becomes visible a moment
later.
"""
_logged: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _logged:
        _logged.add(text)
        log.warning("%s", text)


@final
class SwapFile:
    """Open swap file, from `SwapFile.create` or `SwapFile.durable`. A forked child's copy is
    closed.

    `fd`: the descriptor. `directory`: the file's directory. `path`: the path in errors; for an
    unnamed file its directory. `direct_reason`: why I/O uses the page cache, or "". `size_bytes`:
    the file's length. `preallocated`: whether the file system has reserved space for all of it.
    """

    def __init__(self, fd: int, directory: str, *, direct_reason: str, name: str = "") -> None:
        self.fd = fd
        self.directory = directory
        self.path = str(Path(directory) / name) if name else directory
        self.direct_reason = direct_reason
        # `grow` sets it to False if the file system cannot preallocate.
        self.preallocated = True
        # Punched ranges (start, end), by offset.
        self._holes: list[tuple[int, int]] = []
        self._sparse = False
        self._stays_open = False
        self.size_bytes = os.fstat(fd).st_size
        self._private: PrivateDirectory | None = None
        self._sidecar: Path | None = None
        self._sync_failed: DeviceFailedError | None = None
        # Weak references, used at a fork: an unreferenced file is closed.
        _FILES.add(self)

    @property
    def direct(self) -> bool:
        """True if I/O bypasses the page cache."""
        return not self.direct_reason

    @classmethod
    def create(cls, directory: str | os.PathLike[str], *, direct: bool = True) -> SwapFile:
        """Create an unnamed file in `directory`, mode 0600. Removes swap files of dead processes
        there.

        O_DIRECT is tried; if it fails, the file uses the page cache, with the reason in
        `direct_reason` and logged once. Raises ValueError for a missing directory or one in memory,
        SwapFullError on a full drive, AioError when the file cannot be created.
        """
        path = str(absolute(directory, "directory"))
        in_memory = _check_directory(path)
        try:
            # First, since this frees space.
            clear_dead(path)
            if in_memory or not direct:
                reason = (
                    f"{in_memory} has no drive below it"
                    if in_memory
                    else "buffered I/O was asked for"
                )
                return cls._ephemeral(path, 0, reason)
            try:
                # A trial, since the file system's type does not show whether O_DIRECT works.
                file = cls._ephemeral(path, os.O_DIRECT, "")
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                file = cls._ephemeral(
                    path,
                    0,
                    f"the file system ({file_system_type(path)}) refuses to open it with O_DIRECT",
                )
            else:
                # Some file systems accept O_DIRECT on opening, and fail the first transfer.
                file._try_direct(file.fd)
            file._warn_if_buffered()
            return file
        except OSError as error:
            raise _cannot_make(path, error) from error

    @classmethod
    def sparse(cls, directory: str | os.PathLike[str]) -> SwapFile:
        """Create a file as `create`, but without space on the drive: for null drives, which do not
        write (`aio.testing.Seam`).
        """
        file = cls.create(directory)
        file._sparse, file.preallocated = True, False
        return file

    @classmethod
    def _ephemeral(cls, path: str, flags: int, reason: str) -> SwapFile:
        fd, private = _open_nameless(path, flags)
        file = cls(fd, path, direct_reason=reason)
        file._private = private
        return file

    @classmethod
    def durable(
        cls,
        directory: str | os.PathLike[str],
        name: str,
        *,
        create: bool = True,
        direct: bool = True,
    ) -> SwapFile:
        """Open or create the file `name` in `directory`, mode 0600, and lock it. An existing file
        retains its contents and length.

        The directory is created with mode 0700; an existing one must be this user's and not
        accessible to others. create=False: the file must exist. Blocks up to 60 s while the lock's
        holder ends. Raises the errors of `create`, ValueError for an invalid name or directory,
        AioError with EWOULDBLOCK, which names the lock's holder, or with ENOENT if the file is
        missing.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"durable swap file {name!r}: a name is made of letters, digits, dots, dashes and "
                "underscores"
            )
        path = str(absolute(directory, "directory"))
        try:
            if create:
                _make_private_directory(Path(path))
            in_memory = _check_directory(path)
            _check_private(Path(path))
            file = cls(
                _open_file(Path(path) / name, create=create), path, direct_reason="", name=name
            )
            try:
                # Locked first: the file may belong to another process.
                file._hold()
                file._go_direct(in_memory, direct)
            except BaseException:
                file.close()
                raise
        except AioError:
            raise
        except OSError as error:
            raise _cannot_make(str(Path(path) / name), error) from error
        return file

    @classmethod
    def new(cls, path: str | os.PathLike[str], *, direct: bool = True) -> SwapFile:
        """Create a file at `path`, with the umask's permissions, without a lock, on any file
        system.

        Raises AioError (EEXIST if it exists), SwapFullError, DeviceFailedError.
        """
        # O_EXCL: an existing file is never overwritten.
        return cls._ordinary(absolute(path, "path"), os.O_RDWR | os.O_CREAT | os.O_EXCL, direct)

    @classmethod
    def existing(cls, path: str | os.PathLike[str], *, direct: bool = True) -> SwapFile:
        """Open the file at `path` for reading, without a lock. It may belong to another user.

        Raises AioError (ENOENT if it is missing, EINVAL if it is not a regular file).
        """
        return cls._ordinary(absolute(path, "path"), os.O_RDONLY, direct)

    @classmethod
    def _ordinary(cls, path: Path, flags: int, direct: bool) -> SwapFile:
        writes = flags != os.O_RDONLY
        try:
            in_memory = file_system_type(str(path.parent))
            # O_NONBLOCK: opening a FIFO must not block.
            fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
            file = cls(fd, str(path.parent), direct_reason="", name=path.name)
            try:
                # By descriptor: another process may replace the path.
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file")
                # A checkpoint in memory is allowed, unlike a swap file.
                if in_memory in IN_MEMORY or not direct:
                    file.direct_reason = (
                        f"{in_memory} has no drive below it"
                        if direct
                        else "buffered I/O was asked for"
                    )
                else:
                    file._try_ordinary_direct(write=writes)
            except BaseException:
                file.close()
                raise
        except OSError as error:
            if writes and (
                error.errno in _NO_ROOM or error.errno in (errno.EIO, errno.ENXIO, errno.EROFS)
            ):
                raise _cannot_make(str(path), error) from error
            raise AioError(
                f"cannot {'make' if writes else 'open'} the file",
                errno=error.errno or 0,
                path=str(path),
                op="open",
            ) from error
        return file

    def _try_ordinary_direct(self, *, write: bool) -> None:
        try:
            # Set after opening: if it is refused, the file stays open, with the page cache.
            set_buffered(self.fd, False)
            self.direct_reason = direct_refusal(self.fd, write=write)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct_reason = (
                f"the file system ({file_system_type(self.directory)}) refuses O_DIRECT"
            )
        if self.direct_reason:
            set_buffered(self.fd, True)

    def _lock(self, sidecar: Path) -> bool:
        """Lock the file, waiting up to LOCK_WAIT_S: a job is often restarted while the kernel still
        closes the files of its killed predecessor. Returns False if the lock is still held.
        """
        before: Life | None = None
        end_s = 0.0
        while not lock(self.fd):
            # Read in each iteration: another process may have locked the file meanwhile.
            owner = Owner.read(sidecar)
            life = owner.life() if owner is not None else Life.LIVES
            if life is not before:
                before, end_s = life, time.monotonic() + LOCK_WAIT_S[life]
                if life is Life.ENDS:
                    log.info("%s: waiting for %s, which ends", self.path, owner)
            elif time.monotonic() > end_s:
                return False
            time.sleep(0.01)
        return True

    def _hold(self) -> None:
        """Lock a named file, and write its owner file."""
        status, path = os.fstat(self.fd), Path(self.path)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise AioError(
                "not a regular file of this user: remove it, or name another directory",
                path=self.path,
                op="open",
            )
        sidecar = path.with_name(f".{path.name}.owner")
        if not self._lock(sidecar):
            # The owner file names the holder of the lock.
            owner = Owner.read(sidecar)
            who = "this process" if owner == Owner.this() else str(owner or "another process")
            raise AioError(
                f"the durable swap file is held by {who}; end that job, or give this one another "
                "directory",
                errno=errno.EWOULDBLOCK,
                path=self.path,
                op="open",
            )
        # The path may have been replaced before the lock; then another process could lock the new
        # file.
        if not os.path.samestat(status, path.lstat()):
            raise AioError("the file was replaced while it was opened", path=self.path, op="open")
        # The umask or an older version may have left another mode.
        if stat.S_IMODE(status.st_mode) != 0o600:
            if status.st_nlink > 1:
                # A hard link: the other path may not be a swap file.
                raise AioError(
                    f"the file has mode {stat.S_IMODE(status.st_mode):04o} and another hard link, "
                    "so its mode is not changed here: remove it, or chmod 600 it",
                    path=self.path,
                    op="open",
                )
            os.fchmod(self.fd, 0o600)
        self._sidecar = sidecar
        try:
            Owner.this().write_atomically(sidecar)
        except OSError as error:
            # On a full drive, go on without the owner file, which is only for messages.
            if error.errno not in _NO_ROOM:
                raise
        # The file's name is durable only after an fsync of its directory.
        folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _go_direct(self, in_memory: str, direct: bool) -> None:
        """Set O_DIRECT on an open named file, after a trial with a new unnamed file: this file's
        contents must not change.
        """
        if in_memory or not direct:
            self.direct_reason = (
                f"{in_memory} has no drive below it" if in_memory else "buffered I/O was asked for"
            )
            return
        try:
            with SwapFile.create(self.directory) as neighbour:
                self.direct_reason = neighbour.direct_reason
        except SwapFullError:
            # A full drive: try only to read, below.
            pass
        if not self.direct_reason:
            set_buffered(self.fd, False)
            self.direct_reason = direct_refusal(self.fd, write=False)
            if self.direct_reason:
                set_buffered(self.fd, True)
                self._warn_if_buffered()

    def _try_direct(self, fd: int) -> None:
        """Try O_DIRECT on this new, empty file; if it fails, use the page cache."""
        try:
            self.direct_reason = direct_refusal(fd)
            if self.direct_reason:
                set_buffered(fd, True)
        except BaseException:
            self.close()
            raise

    def _warn_if_buffered(self) -> None:
        if self.direct_reason:
            _warn_once(
                f"{self.path}: swapping through the page cache, which costs memory and bandwidth: "
                f"{self.direct_reason}"
            )

    def grow(self, size_bytes: int) -> None:
        """Preallocate space up to a length of `size_bytes`; no effect if the file is that long.
        Blocks.

        Raises SwapFullError, which says how many bytes are missing; AioError. The length is then
        unchanged.
        """
        if size_bytes <= self.size_bytes:
            return
        more = size_bytes - self.size_bytes
        if self._sparse:
            os.ftruncate(self.fd, size_bytes)
            self.size_bytes = size_bytes
            return
        # For the error of a failed preallocation: it reports the bytes that were allocated.
        before = os.fstat(self.fd).st_blocks
        # Check first: a preallocation that fails would briefly fill the drive.
        if self.free_bytes() < more:
            raise self._full(more, errno.ENOSPC, 0)
        try:
            os.posix_fallocate(self.fd, self.size_bytes, more)
        except OSError as error:
            got = max(os.fstat(self.fd).st_blocks - before, 0) * 512
            # Free the blocks that the failed preallocation got. Suppress errors, so that they do
            # not replace the first one.
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, self.size_bytes)
            if error.errno in _NO_ROOM:
                raise self._full(more, error.errno or 0, got) from error
            # EOPNOTSUPP and EINVAL: the file system cannot preallocate. Set the length only.
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise AioError(
                    "preallocation failed",
                    errno=error.errno or 0,
                    path=self.path,
                    op="allocate",
                    offset=self.size_bytes,
                    length=more,
                ) from error
            os.ftruncate(self.fd, size_bytes)
            self.preallocated = False
            _warn_once(
                f"{self.path}: the file system cannot preallocate, so a write fails later if the "
                "drive fills up"
            )
        except BaseException:
            os.ftruncate(self.fd, self.size_bytes)
            raise
        self.size_bytes = size_bytes

    def shrink(self, size_bytes: int) -> None:
        """Truncate the file to `size_bytes`; no effect if it is that short. The caller no longer
        uses the range from `size_bytes` on.
        """
        if size_bytes < self.size_bytes:
            os.ftruncate(self.fd, size_bytes)
            self.size_bytes = size_bytes

    def punch(self, offset: int, size_bytes: int) -> None:
        """Free the space of a range, without changing the length. Before the range is used again,
        call `back`. If the file system cannot punch holes, the file keeps the space.
        """
        # 3: FALLOC_FL_PUNCH_HOLE, which requires FALLOC_FL_KEEP_SIZE.
        if _LIBC.fallocate(self.fd, 3, offset, size_bytes) == 0:
            at = bisect_left(self._holes, (offset, 0))
            self._holes.insert(at, (offset, offset + size_bytes))
        elif (code := ctypes.get_errno()) not in (errno.EOPNOTSUPP, errno.ENOSYS):
            _warn_once(f"{self.path}: unused space cannot be freed: {os.strerror(code)}")

    def back(self, offset: int, size_bytes: int) -> None:
        """Reserve space again for the punched parts of a range. Raises SwapFullError, AioError."""
        end = offset + size_bytes
        at = max(bisect_left(self._holes, (offset, 0)) - 1, 0)
        while at < len(self._holes) and self._holes[at][0] < end:
            start, stop = self._holes[at]
            if stop <= offset:
                at += 1
                continue
            # Parts of the hole outside the range remain holes.
            rest = [(start, min(stop, offset)), (max(start, end), stop)]
            self._allocate(max(start, offset), min(stop, end) - max(start, offset))
            self._holes[at : at + 1] = [hole for hole in rest if hole[0] < hole[1]]
            at += rest[0][0] < rest[0][1]

    def _allocate(self, offset: int, size_bytes: int) -> None:
        if self._sparse:
            return
        try:
            os.posix_fallocate(self.fd, offset, size_bytes)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise self._full(size_bytes, error.errno or 0, 0) from error
            raise AioError(
                "preallocation failed",
                errno=error.errno or 0,
                path=self.path,
                op="allocate",
                offset=offset,
                length=size_bytes,
            ) from error

    def fsync(self) -> None:
        """Block until all written data is on the drive. Raises DeviceFailedError, and after one
        failure always.

        The kernel drops data that it failed to write, so a later success would prove nothing.
        """
        if self._sync_failed is None:
            try:
                os.fsync(self.fd)
            except OSError as error:
                # Stored, so that every later call raises it.
                self._sync_failed = DeviceFailedError(
                    "written data may be lost",
                    errno=error.errno or 0,
                    path=self.path,
                    op="fsync",
                )
        if self._sync_failed is not None:
            raise self._sync_failed

    def free_bytes(self) -> int:
        """Free bytes of the file system for this user; sys.maxsize if it does not report them."""
        space = os.fstatvfs(self.fd)
        # ramfs, FUSE and network file systems may report no size.
        return space.f_bavail * space.f_frsize if space.f_blocks else sys.maxsize

    def _full(self, more: int, code: int, got: int) -> SwapFullError:
        wanted = self.size_bytes + more
        # EFBIG: the process's limit, which the user can raise, or the file system's limit.
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        advice = "add a directory to Policy.nvme"
        if code == errno.EDQUOT:
            text = (
                f"the quota at {self.path!r} has space for {got} of {more} more bytes: up to "
                f"{more - got} are missing; raise the quota"
            )
        elif code == errno.EFBIG and limit not in (resource.RLIM_INFINITY, -1) and limit < wanted:
            text = (
                f"{self.path!r}: a file may have {limit} bytes (RLIMIT_FSIZE): {wanted - limit} "
                "are missing; raise `ulimit -f`"
            )
        elif code == errno.EFBIG:
            text = (
                f"{self.path!r}: the file system cannot have a file of {wanted} bytes: {more} are "
                "missing; use another file system"
            )
        else:
            free = self.free_bytes()
            # The file system needs space for metadata, or another process wrote meanwhile: report
            # the bytes that the preallocation got.
            if free >= more:
                free = got
            text = (
                f"{self.path!r} has space for {free} of {more} more bytes: {more - free} are "
                "missing; free space"
            )
        return SwapFullError(
            f"{text}, or {advice}",
            errno=code,
            path=self.path,
            op="allocate",
            offset=self.size_bytes,
            length=more,
        )

    def close(self) -> None:
        """Close the file; this frees an unnamed file's space. Idempotent. Close the executor first.
        """
        if self.fd < 0 or self._stays_open:
            return
        if self._sidecar is not None:
            # Before the unlock: afterwards the owner file may belong to the next holder.
            with contextlib.suppress(OSError):
                self._sidecar.unlink()
            # An explicit unlock: a child that has just been forked may still have a copy of the
            # descriptor.
            with contextlib.suppress(OSError):
                fcntl.flock(self.fd, fcntl.LOCK_UN)
        os.close(self.fd)
        self.fd = -1
        if self._private is not None:
            self._private.remove()

    def keep_open(self) -> None:
        """Disable `close`: requests in flight use the descriptor."""
        # After a close the next opened file could get the descriptor, and receive those requests.
        self._stays_open = True

    def _disown(self) -> None:
        """In a forked child, close the copied descriptor, which would keep the parent's space and
        lock."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._private is not None:
            self._private.disown()

    def __enter__(self) -> SwapFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # `fd` is missing if the constructor failed.
        if getattr(self, "fd", -1) >= 0:
            self.close()

    def __repr__(self) -> str:
        return f"SwapFile({self.path!r}, size_bytes={self.size_bytes}, direct={self.direct})"


_FILES: weakref.WeakSet[SwapFile] = weakref.WeakSet()


def _disown_all() -> None:
    # A copy: garbage collection may change the set.
    for file in list(_FILES):
        file._disown()


os.register_at_fork(after_in_child=_disown_all)


def _check_directory(path: str) -> str:
    """Raise ValueError unless `path` is a valid swap directory. Returns the type of its file system
    if that is in memory, else "".
    """
    check_link(Path(path))
    if not Path(path).is_dir():
        what = "is not a directory" if Path(path).exists() else "does not exist"
        raise ValueError(
            f"swap directory {path!r} {what}; create it, or name another in Policy.nvme"
        )
    kind = file_system_type(path)
    if kind not in IN_MEMORY:
        return ""
    if os.environ.get("INFINITY_ALLOW_TMPFS") != "1":
        raise ValueError(
            f"swap directory {path!r} is on {kind}, which is in memory and so saves none; name a "
            "directory on a drive, or set INFINITY_ALLOW_TMPFS=1 (meant for tests)"
        )
    return kind


def _make_private_directory(path: Path) -> None:
    """Create a directory of mode 0700 if it is missing. Raises: OSError."""
    # Another rank may create it at the same time.
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        # The umask may have removed this user's permissions.
        if stat.S_IMODE(path.lstat().st_mode) != 0o700:
            path.chmod(0o700)


def _check_private(path: Path) -> None:
    """Raise ValueError for a directory of another user, or accessible to others. Warn if other
    users may replace it.
    """
    status, name = path.stat(), path.lstat()
    # The weights are not encrypted: no other user may have access.
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(
            f"directory {str(path)!r} of a durable swap file must be this user's, mode 0700: "
            "chmod 700 it"
        )
    # Another user's link could point to any of this user's directories.
    if stat.S_ISLNK(name.st_mode) and name.st_uid not in (os.geteuid(), 0):
        raise ValueError(
            f"directory {str(path)!r} of a durable swap file is a symbolic link that belongs to "
            f"another user (uid {name.st_uid}): remove it"
        )
    if reason := _replaceable(path):
        _warn_once(
            f"{path}: other users may replace this directory: {reason}; name a directory whose "
            "parent only this user may write to, or chmod +t the parent"
        )


def _replaceable(path: Path) -> str:
    """Return why users other than this one and root may rename a directory or an ancestor, or "".
    """
    for above in path.resolve().parents:
        status = above.stat()
        if status.st_uid not in (os.geteuid(), 0):
            return f"{str(above)!r} belongs to uid {status.st_uid}"
        if status.st_mode & stat.S_ISVTX:
            continue
        if status.st_mode & 0o002:
            return f"all users may write to {str(above)!r}"
        # A user's private group has the user's number.
        if status.st_mode & 0o020 and status.st_gid not in (0, status.st_uid):
            return f"the group (gid {status.st_gid}) may write to {str(above)!r}"
    return ""


def _cannot_make(path: str, error: OSError) -> AioError:
    code = error.errno or 0
    if code in (errno.ENOSPC, errno.EDQUOT):
        text = (
            f"{path!r} has no space for a single block (4096 bytes are missing); free space, or "
            "name another directory"
        )
        return SwapFullError(text, errno=code, path=path, op="allocate", length=4096)
    if code in (errno.EIO, errno.ENXIO, errno.EROFS):
        text = f"no swap file can be made in {path!r}: the drive or its file system fails"
        return DeviceFailedError(text, errno=code, path=path, op="open")
    if code == errno.ENOENT:
        return AioError(f"there is no file {path!r}", errno=code, path=path, op="open")
    if code == errno.ELOOP:
        return AioError(
            f"{path!r} is a symbolic link, which is not followed", errno=code, path=path, op="open"
        )
    return AioError(
        f"cannot make a swap file in {path!r}; name a directory that this user may write to",
        errno=code,
        path=path,
        op="open",
    )


def _open_nameless(path: str, flags: int) -> tuple[int, PrivateDirectory | None]:
    """Open an unnamed file in directory `path`. Returns the descriptor, and a directory to remove
    on close, if any.

    Raises OSError with EINVAL if the file system refuses `flags` (O_DIRECT).
    """
    try:
        # O_EXCL: the file cannot be linked later.
        return os.open(path, _OPEN | os.O_TMPFILE | os.O_EXCL | flags, 0o600), None
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    # Without O_TMPFILE: create a file in a private directory, then remove both names.
    private = PrivateDirectory(path)
    try:
        fd = os.open(private.path, _OPEN | os.O_CREAT | os.O_EXCL | flags, 0o600)
    except BaseException:
        private.remove()
        raise
    # The open file remains usable without its name. NFS renames it instead of removing it.
    return fd, None if private.remove() else private


def _open_file(path: Path, *, create: bool) -> int:
    # O_NOFOLLOW: another user's symbolic link must not select the file.
    return os.open(path, _OPEN | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o600)


# ---- directories that differ by rank ----
#
# "/mnt/nvme{local_rank}" is /mnt/nvme0 on the first rank of a node.
# A pattern is checked when a policy is created, and resolved when a model is offloaded: the rank
# may be unknown before.

_RANK_FIELDS = re.compile(r"\{(rank|local_rank)\}")


def check_directory_pattern(path: Path) -> None:
    """Raise ValueError for braces that are neither {rank} nor {local_rank}."""
    if re.search(r"[{}]", _RANK_FIELDS.sub("", str(path))):
        raise ValueError(
            f"nvme={str(path)!r} has unknown braces; '{{rank}}' stands for a rank's number, and "
            "'{local_rank}' for its number within its node"
        )


def is_directory_pattern(path: Path) -> bool:
    """Return whether a directory depends on the rank."""
    return _RANK_FIELDS.search(str(path)) is not None


def resolve_directories(paths: Sequence[Path], *, rank: int, local_rank: int) -> tuple[Path, ...]:
    """Resolve the directories of one rank. A path without a pattern is returned unchanged, and
    checked on opening.

    Raises: ValueError, naming pattern and directory, if a resolved directory is missing or two are
    the same.
    """
    numbers = {"rank": rank, "local_rank": local_rank}
    found: list[Path] = []
    for path in paths:
        # Not by str.format: `check_directory_pattern` has refused other braces.
        place = Path(_RANK_FIELDS.sub(lambda field: str(numbers[field[1]]), str(path)))
        if place != path and not place.is_dir():
            what = "is not a directory" if place.exists() else "does not exist"
            raise ValueError(
                f"nvme={str(path)!r} is {str(place)!r} on rank {rank} (local rank {local_rank}), "
                f"which {what}; create it, or give each rank a directory that it has"
            )
        # By resolved path: a directory with two names would count as two drives.
        earlier = next(
            (index for index, other in enumerate(found) if other.resolve() == place.resolve()), None
        )
        if earlier is not None:
            raise ValueError(
                f"nvme={str(paths[earlier])!r} and {str(path)!r} are both {str(place.resolve())!r} "
                f"on rank {rank} (local rank {local_rank}): name each directory once"
            )
        found.append(place)
    return tuple(found)
