"""Swap files: private, preallocated, opened past the page cache.

Two kinds of swap space:

- ephemeral (`SwapFile.create`): without a name (O_TMPFILE), so a killed process leaves nothing and
  no other user can open it. Its contents die with the process, so it is never fsynced.
- durable (`SwapFile.durable`): named and locked, for runs that outlive their process. Nothing here
  removes it.

Nothing is moved here: infinity/_src/params/state_store.py swaps sections in and out (`fetch`,
`store`), by jobs for the executor (`_executor.py`), whose native threads read and write.

`SwapFile.new` and `SwapFile.existing` open ordinary files for the same executors: the data of a
checkpoint, anywhere, with the rights of an ordinary file.
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

# Answers where O_TMPFILE is not known; EINVAL may also mean that O_DIRECT is refused.
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})
_NO_ROOM = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT})
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_OPEN = os.O_RDWR | os.O_CLOEXEC
# No slash, no leading dot: the name stays in its directory and clear of the owner files.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LET_GO_S = {Life.LIVES: 0.1, Life.ENDS: 60.0, Life.GONE: 2.0}
"""The longest that a durable file's lock is waited for, by the life of the process that holds it.
One that ends may have tens of GB to free first. One that lives may have been killed just now, and
show it a moment later."""
_logged: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _logged:
        _logged.add(text)
        log.warning("%s", text)


@final
class SwapFile:
    """Open swap file; make it with `SwapFile.create` or `SwapFile.durable`. In a forked child it is
    closed.

    `fd`: open for reading and writing. `directory`: where it lies. `path`: the name in errors: the
    directory of a file without a name, the file itself if it has one. `direct_reason`: why it goes
    through the page cache, empty when it does not. `size_bytes`: its length. `preallocated`:
    whether the drive keeps room for all of it.
    """

    def __init__(self, fd: int, directory: str, *, direct_reason: str, name: str = "") -> None:
        self.fd = fd
        self.directory = directory
        self.path = str(Path(directory) / name) if name else directory
        self.direct_reason = direct_reason
        # Until a file system refuses to (`grow`).
        self.preallocated = True
        # Ranges that were punched out, by offset: (start, end).
        self._holes: list[tuple[int, int]] = []
        self._sparse = False
        self._stays_open = False
        self.size_bytes = os.fstat(fd).st_size
        self._private: PrivateDirectory | None = None
        self._sidecar: Path | None = None
        self._sync_failed: DeviceFailedError | None = None
        # Weak: a file without a reference is closed, and a fork finds the others.
        _FILES.add(self)

    @property
    def direct(self) -> bool:
        """True when it goes past the page cache."""
        return not self.direct_reason

    @classmethod
    def create(cls, directory: str | os.PathLike[str], *, direct: bool = True) -> SwapFile:
        """Make a nameless file in `directory`, mode 0600. Removes files of dead processes there,
        never those of live ones.

        O_DIRECT is tried, not assumed; the file is buffered where it does not work, with the reason
        kept, and logged once. Raises ValueError for a missing directory or one in memory,
        SwapFullError when there is no room at all, AioError when the file cannot be made there.
        """
        path = str(absolute(directory, "directory"))
        in_memory = _check_directory(path)
        try:
            # First: the files of dead processes take room that this one may need.
            clear_dead(path)
            if in_memory or not direct:
                reason = (
                    f"{in_memory} has no drive below it"
                    if in_memory
                    else "buffered I/O was asked for"
                )
                return cls._ephemeral(path, 0, reason)
            try:
                # Tried: no type of file system says for sure whether O_DIRECT works.
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
                # Some file systems open with O_DIRECT and refuse the first transfer.
                file._try_direct(file.fd)
            file._tell_buffered()
            return file
        except OSError as error:
            raise _cannot_make(path, error) from error

    @classmethod
    def sparse(cls, directory: str | os.PathLike[str]) -> SwapFile:
        """Make a file as `create` does that grows without taking room, for null drives, which write
        nothing (`aio.testing.Seam`).
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
        """Open the file `name` in `directory`, mode 0600, locked for this process; reopening keeps
        its contents and length.

        The directory is made with mode 0700, or has to be this user's and closed to others.
        create=False: the file must exist. Raises what `create` raises, ValueError for a name or a
        directory that will not do, AioError with EWOULDBLOCK that says who holds the file, with
        ENOENT when it is missing.
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
                # The lock comes first: a file of another process is not to be touched.
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
        """Make a named file at `path`, with the rights that the umask leaves, not locked; on any
        file system.

        Raises AioError (EEXIST where there is one), SwapFullError, DeviceFailedError.
        """
        # O_EXCL: an existing file is never overwritten.
        return cls._ordinary(absolute(path, "path"), os.O_RDWR | os.O_CREAT | os.O_EXCL, direct)

    @classmethod
    def existing(cls, path: str | os.PathLike[str], *, direct: bool = True) -> SwapFile:
        """Open the file at `path` to read it. The file is not locked, and may belong to another
        user.

        Raises AioError (ENOENT where there is none, EINVAL for what is no regular file),
        DeviceFailedError.
        """
        return cls._ordinary(absolute(path, "path"), os.O_RDONLY, direct)

    @classmethod
    def _ordinary(cls, path: Path, flags: int, direct: bool) -> SwapFile:
        writes = flags != os.O_RDONLY
        try:
            in_memory = file_system_type(str(path.parent))
            # O_NONBLOCK: opening a FIFO by mistake must not hang.
            fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
            file = cls(fd, str(path.parent), direct_reason="", name=path.name)
            try:
                # Asked of the open file: its name may lead elsewhere a moment later.
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file")
                # A checkpoint in memory is allowed; only swap there would save nothing.
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
            # Switched on after opening: a refusal then leaves a file that is open and buffered.
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
        """Take the lock; wait for a process that ends, or is gone, but whose files are not closed
        yet: a killed job is often begun again at once."""
        before: Life | None = None
        end_s = 0.0
        while not lock(self.fd):
            # Read anew: another process may have taken it meanwhile.
            owner = Owner.read(sidecar)
            life = owner.life() if owner is not None else Life.LIVES
            if life is not before:
                before, end_s = life, time.monotonic() + LET_GO_S[life]
                if life is Life.ENDS:
                    log.info("%s: waiting for %s, which ends", self.path, owner)
            elif time.monotonic() > end_s:
                return False
            time.sleep(0.01)
        return True

    def _hold(self) -> None:
        """Lock a named file, and write its owner beside it."""
        status, path = os.fstat(self.fd), Path(self.path)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise AioError(
                "not a regular file of this user: remove it, or name another directory",
                path=self.path,
                op="open",
            )
        sidecar = path.with_name(f".{path.name}.owner")
        if not self._lock(sidecar):
            # The lock says only that somebody holds it; the sidecar names who.
            owner = Owner.read(sidecar)
            who = "this process" if owner == Owner.this() else str(owner or "another process")
            raise AioError(
                f"the durable swap file is held by {who}; end that job, or give this one another "
                "directory",
                errno=errno.EWOULDBLOCK,
                path=self.path,
                op="open",
            )
        # Locked, but maybe under a name that leads to another file by now: two would both hold
        # theirs.
        if not os.path.samestat(status, path.lstat()):
            raise AioError("it was replaced while it was opened", path=self.path, op="open")
        # The umask may have taken rights away, or an older file may have more.
        if stat.S_IMODE(status.st_mode) != 0o600:
            if status.st_nlink > 1:
                # Its other name may be of a file that was never meant to be swap.
                raise AioError(
                    f"the file has mode {stat.S_IMODE(status.st_mode):04o} and another name "
                    "elsewhere, whose rights are not changed here: remove it, or chmod 600 it",
                    path=self.path,
                    op="open",
                )
            os.fchmod(self.fd, 0o600)
        self._sidecar = sidecar
        try:
            Owner.this().leave_word(sidecar)
        except OSError as error:
            # On a full drive the lock does without a sidecar, which is for people only.
            if error.errno not in _NO_ROOM:
                raise
        # Unlike the contents, the name lies in the directory, which has to be flushed for itself.
        folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _go_direct(self, in_memory: str, direct: bool) -> None:
        """Give an open named file O_DIRECT, tried on a nameless neighbour: its own contents are not
        to be touched.
        """
        if in_memory or not direct:
            self.direct_reason = (
                f"{in_memory} has no drive below it" if in_memory else "buffered I/O was asked for"
            )
            return
        try:
            # On a file of its own: trying writes a block.
            with SwapFile.create(self.directory) as neighbour:
                self.direct_reason = neighbour.direct_reason
        except SwapFullError:
            # A full drive's file is still to be read, and reading it is tried below.
            pass
        if not self.direct_reason:
            set_buffered(self.fd, False)
            # Read only: this file has contents that must stay.
            self.direct_reason = direct_refusal(self.fd, write=False)
            if self.direct_reason:
                set_buffered(self.fd, True)
                self._tell_buffered()

    def _try_direct(self, fd: int) -> None:
        """Find out whether O_DIRECT works on this new, empty file, and do without where it does
        not.
        """
        try:
            self.direct_reason = direct_refusal(fd)
            if self.direct_reason:
                set_buffered(fd, True)
        except BaseException:
            self.close()
            raise

    def _tell_buffered(self) -> None:
        if self.direct_reason:
            _warn_once(
                f"{self.path}: swapping through the page cache, which costs memory and bandwidth: "
                f"{self.direct_reason}"
            )

    def grow(self, size_bytes: int) -> None:
        """Preallocate up to `size_bytes` in all; does nothing if it is that large. Blocks while the
        file system works.

        Raises SwapFullError that says how much is missing; then nothing has changed.
        """
        if size_bytes <= self.size_bytes:
            return
        more = size_bytes - self.size_bytes
        if self._sparse:
            os.ftruncate(self.fd, size_bytes)
            self.size_bytes = size_bytes
            return
        # For the message: how much a failing preallocation got.
        before = os.fstat(self.fd).st_blocks
        # Asked first: a failing preallocation would fill the drive for a moment.
        if self.free_bytes() < more:
            raise self._full(more, errno.ENOSPC, 0)
        try:
            os.posix_fallocate(self.fd, self.size_bytes, more)
        except OSError as error:
            got = max(os.fstat(self.fd).st_blocks - before, 0) * 512
            # A failed preallocation keeps the blocks that it got. A drive that is gone refuses
            # this, too, and the first error is the one to raise.
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, self.size_bytes)
            if error.errno in _NO_ROOM:
                raise self._full(more, error.errno or 0, got) from error
            # These two: the file system cannot preallocate. The length is set without room behind
            # it.
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
                f"{self.path}: the file system cannot preallocate, so that a drive that fills up "
                "fails a write later"
            )
        except BaseException:
            os.ftruncate(self.fd, self.size_bytes)
            raise
        self.size_bytes = size_bytes

    def shrink(self, size_bytes: int) -> None:
        """Give back the space past `size_bytes`; does nothing if it is that short. Nothing there
        may be in use.
        """
        if size_bytes < self.size_bytes:
            os.ftruncate(self.fd, size_bytes)
            self.size_bytes = size_bytes

    def punch(self, offset: int, size_bytes: int) -> None:
        """Give the space of a range inside the file back; its length stays. A later use of the
        range must `back` it first. The file keeps the space if the file system cannot.
        """
        # 3: FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE, which needs the other.
        if _LIBC.fallocate(self.fd, 3, offset, size_bytes) == 0:
            at = bisect_left(self._holes, (offset, 0))
            self._holes.insert(at, (offset, offset + size_bytes))
        elif (code := ctypes.get_errno()) not in (errno.EOPNOTSUPP, errno.ENOSYS):
            _warn_once(f"{self.path}: space that is no longer used stays: {os.strerror(code)}")

    def back(self, offset: int, size_bytes: int) -> None:
        """Give a range inside the file room on the drive again, where some was punched out. Raises
        SwapFullError."""
        end = offset + size_bytes
        at = max(bisect_left(self._holes, (offset, 0)) - 1, 0)
        while at < len(self._holes) and self._holes[at][0] < end:
            start, stop = self._holes[at]
            if stop <= offset:
                at += 1
                continue
            # Parts of a hole that the range leaves out stay one.
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
        """Return when what was written is on the drive. Raises DeviceFailedError; and from then on
        always.

        The kernel forgets what it could not write, so a later success would mean nothing.
        """
        if self._sync_failed is None:
            try:
                os.fsync(self.fd)
            except OSError as error:
                # Kept, for every later call to raise.
                self._sync_failed = DeviceFailedError(
                    "what was written may be lost",
                    errno=error.errno or 0,
                    path=self.path,
                    op="fsync",
                )
        if self._sync_failed is not None:
            raise self._sync_failed

    def free_bytes(self) -> int:
        """Bytes that the file system has left for this user; sys.maxsize where it does not tell."""
        space = os.fstatvfs(self.fd)
        # Some (ramfs, FUSE, network file systems) report no size at all, so that nothing can be
        # checked in advance.
        return space.f_bavail * space.f_frsize if space.f_blocks else sys.maxsize

    def _full(self, more: int, code: int, got: int) -> SwapFullError:
        wanted = self.size_bytes + more
        # EFBIG has two causes: the process's own limit, which the user can raise, or the file
        # system's.
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        advice = "add a directory to Policy.nvme"
        if code == errno.EDQUOT:
            text = (
                f"the quota at {self.path!r} has room for {got} of {more} more bytes: up to "
                f"{more - got} are missing; raise it"
            )
        elif code == errno.EFBIG and limit not in (resource.RLIM_INFINITY, -1) and limit < wanted:
            text = (
                f"{self.path!r}: a file may have {limit} bytes (RLIMIT_FSIZE): {wanted - limit} "
                "are missing; raise `ulimit -f`"
            )
        elif code == errno.EFBIG:
            text = (
                f"{self.path!r}: the file system takes no file of {wanted} bytes: {more} are "
                "missing; use another file system"
            )
        else:
            free = self.free_bytes()
            # The file system needs some for itself, or somebody else was faster: the free bytes of
            # now are not those of then.
            if free >= more:
                free = got
            text = (
                f"{self.path!r} has room for {free} of {more} more bytes: {more - free} are "
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
        """Close the file; a nameless one's space is free then. Idempotent. Close the executor
        first.
        """
        if self.fd < 0 or self._stays_open:
            return
        if self._sidecar is not None:
            # Before the lock goes: after it, the sidecar may be that of the next holder.
            with contextlib.suppress(OSError):
                self._sidecar.unlink()
            # Closing would not end the lock while a child that was just forked has its copy open.
            with contextlib.suppress(OSError):
                fcntl.flock(self.fd, fcntl.LOCK_UN)
        os.close(self.fd)
        self.fd = -1
        if self._private is not None:
            self._private.remove()

    def keep_open(self) -> None:
        """Turn `close` into a no-op: requests that the drive still holds use the descriptor."""
        # The number would be given to the next file opened, and those requests would write into it.
        self._stays_open = True

    def _disown(self) -> None:
        """Close the copy in a forked child: it must not keep the parent's space or lock."""
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
        # The constructor may have failed before it set `fd`.
        if getattr(self, "fd", -1) >= 0:
            self.close()

    def __repr__(self) -> str:
        return f"SwapFile({self.path!r}, size_bytes={self.size_bytes}, direct={self.direct})"


_FILES: weakref.WeakSet[SwapFile] = weakref.WeakSet()


def _disown_all() -> None:
    # A copy: the collector may change the set meanwhile.
    for file in list(_FILES):
        file._disown()


os.register_at_fork(after_in_child=_disown_all)


def _check_directory(path: str) -> str:
    """Raise ValueError unless `path` is a directory to swap in. Returns its file system's type
    where that is memory.
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
    # Swapping into memory frees none, so it is refused, not slowed down.
    if os.environ.get("INFINITY_ALLOW_TMPFS") != "1":
        raise ValueError(
            f"swap directory {path!r} is on {kind}, which is memory and saves none; name a "
            "directory on a drive, or set INFINITY_ALLOW_TMPFS=1 (meant for tests)"
        )
    return kind


def _make_private_directory(path: Path) -> None:
    """Make a directory of mode 0700, unless it is there. Raises: OSError."""
    # Another rank of the run may make it at the same moment.
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        # An odd umask may have taken this user's rights away, too.
        if stat.S_IMODE(path.lstat().st_mode) != 0o700:
            path.chmod(0o700)


def _check_private(path: Path) -> None:
    """Raise ValueError for a directory that is not this user's, or that others may enter. Warn
    where others may put another one in its place.
    """
    status, name = path.stat(), path.lstat()
    # Weights lie in plain on the drive: no other user may enter.
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(
            f"directory {str(path)!r} of a durable swap file must be this user's, mode 0700: "
            "chmod 700 it"
        )
    # Somebody else's link would choose which of this user's directories is written to.
    if stat.S_ISLNK(name.st_mode) and name.st_uid not in (os.geteuid(), 0):
        raise ValueError(
            f"directory {str(path)!r} of a durable swap file is a symbolic link that belongs to "
            f"another user (uid {name.st_uid}): remove it"
        )
    if reason := _replaceable(path):
        _warn_once(
            f"{path}: other users may put another directory in its place: {reason}; name a "
            "directory below one that only this user may write to, or chmod +t that one"
        )


def _replaceable(path: Path) -> str:
    """Say why users other than this one and root may rename a directory or one above it; empty when
    they may not.
    """
    for above in path.resolve().parents:
        status = above.stat()
        if status.st_uid not in (os.geteuid(), 0):
            return f"{str(above)!r} belongs to uid {status.st_uid}"
        if status.st_mode & stat.S_ISVTX:
            continue
        if status.st_mode & 0o002:
            return f"{str(above)!r} may be written to by everybody"
        # Groups of one user have the number of that user.
        if status.st_mode & 0o020 and status.st_gid not in (0, status.st_uid):
            return f"{str(above)!r} may be written to by its group (gid {status.st_gid})"
    return ""


def _cannot_make(path: str, error: OSError) -> AioError:
    code = error.errno or 0
    if code in (errno.ENOSPC, errno.EDQUOT):
        text = (
            f"{path!r} has no room for a single block (4096 bytes are missing); free space, or "
            "name another directory"
        )
        return SwapFullError(text, errno=code, path=path, op="allocate", length=4096)
    if code in (errno.EIO, errno.ENXIO, errno.EROFS):
        text = f"{path!r} takes no swap file: the drive or its file system fails"
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
    """Open a nameless file in directory `path`; return it with the directory that must stay, if
    any.

    EINVAL means that `flags` (O_DIRECT) are refused.
    """
    try:
        # O_EXCL: it can never be given a name.
        return os.open(path, _OPEN | os.O_TMPFILE | os.O_EXCL | flags, 0o600), None
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    # With a name after all: in a directory that others cannot enter, and only as long as needed.
    private = PrivateDirectory(path)
    try:
        fd = os.open(private.path, _OPEN | os.O_CREAT | os.O_EXCL | flags, 0o600)
    except BaseException:
        private.remove()
        raise
    # The open file lives on without its name, unless NFS had to keep it under another one.
    return fd, None if private.remove() else private


def _open_file(path: Path, *, create: bool) -> int:
    # O_NOFOLLOW: a link placed there by somebody else must not choose the file that is overwritten.
    return os.open(path, _OPEN | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o600)


# ---- directories that differ by rank ----
#
# "/mnt/nvme{local_rank}" is /mnt/nvme0 on the first rank of a node.
#
# A pattern is checked when a policy is made, and resolved when a model is offloaded: ranks may not
# know their number before.

_RANK_FIELDS = re.compile(r"\{(rank|local_rank)\}")


def check_directory_pattern(path: Path) -> None:
    """Raise ValueError for braces that are neither {rank} nor {local_rank}."""
    if re.search(r"[{}]", _RANK_FIELDS.sub("", str(path))):
        raise ValueError(
            f"nvme={str(path)!r} has braces of no known meaning; '{{rank}}' stands for a rank's "
            "number, and '{local_rank}' for its number within its node"
        )


def is_directory_pattern(path: Path) -> bool:
    """Say whether a directory depends on the rank."""
    return _RANK_FIELDS.search(str(path)) is not None


def resolve_directories(paths: Sequence[Path], *, rank: int, local_rank: int) -> tuple[Path, ...]:
    """Resolve the directories of one rank. A path without a pattern stays as it is; opening it
    checks it.

    Raises: ValueError naming pattern and directory, for one that is missing, and for two that are
    the same on this rank.
    """
    numbers = {"rank": rank, "local_rank": local_rank}
    found: list[Path] = []
    for path in paths:
        # By substitution, not str.format: braces of other meanings were refused before.
        place = Path(_RANK_FIELDS.sub(lambda field: str(numbers[field[1]]), str(path)))
        if place != path and not place.is_dir():
            what = "is not a directory" if place.exists() else "does not exist"
            raise ValueError(
                f"nvme={str(path)!r} is {str(place)!r} on rank {rank} (local rank {local_rank}), "
                f"which {what}; create it, or give each rank a directory that it has"
            )
        # Resolved: two names of one directory would make its drive count as two.
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
