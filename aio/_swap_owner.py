"""Ownership of named swap files: locks, private directories, and removal of dead processes' files.

The kernel releases a lock (flock) when its process ends, so a free lock means a dead owner. A
network file system may hide the locks of other hosts. For that case, and for messages, a JSON file
names the owner (host, boot, pid, start time).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import fcntl
import json
import logging
import os
import platform
import signal
import stat
import tempfile
from pathlib import Path

from infinity._src.base.atomic_file import replaced
from infinity.aio._file_system import file_system_type

log = logging.getLogger("infinity.aio")

PREFIX = "infinity-swap-"
_OWNER, _SWAP = "owner.json", "swap"
# Attempts to create a directory: another process's `clear_dead` may remove it before it is locked.
_ATTEMPTS = 20
# File systems on which the locks of other hosts may be invisible.
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "9p", "glusterfs", "afs"}
)
_OWNER_BYTES_MAX = 4096
_HOST_CHARACTERS_MAX = 255
# PF_EXITING of the kernel's task flags, field 9 of /proc/<pid>/stat: set while a process exits.
_EXITING = 0x4


class Life(enum.Enum):
    """State of a process, as far as this process can see it."""

    LIVES = "lives"
    ENDS = "ends"
    """Killed, exiting, or a zombie. The kernel frees its memory first, and its locks last."""
    GONE = "gone"


@dataclasses.dataclass(frozen=True)
class Owner:
    """Identity of a process, unique across reboots, hosts and reused pids."""

    host: str
    boot_id: str
    pid: int
    start_time: int
    """Clock ticks from boot to the start of the process, from /proc/<pid>/stat."""

    @classmethod
    def this(cls) -> Owner:
        """Return the current process."""
        # Pids are reused; pid, start time and boot together are unique.
        return cls(platform.node(), this_boot(), os.getpid(), start_time_of(os.getpid()))

    @classmethod
    def read(cls, path: Path) -> Owner | None:
        """Read the owner at `path`; None if the file is missing, truncated or invalid."""
        try:
            # A crash during the write may have truncated the file.
            said = json.loads(_small_file(path))
            found = cls(*(said[field.name] for field in dataclasses.fields(cls)))
            found._check()
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return found

    def _check(self) -> None:
        """Raise ValueError for values that no process has."""
        texts, numbers = (self.host, self.boot_id), (self.pid, self.start_time)
        # Messages show the texts, and the pid is part of a path.
        if not all(type(text) is str and text.isprintable() for text in texts) or not all(
            type(number) is int and 0 <= number < 1 << 63 for number in numbers
        ):
            raise ValueError("no owner of a swap file")
        if len(self.host) > _HOST_CHARACTERS_MAX:
            raise ValueError("no name of a host")

    def write(self, fd: int) -> None:
        """Replace the contents of `fd` by this owner, as JSON."""
        text = json.dumps(dataclasses.asdict(self)).encode()
        # Truncated first: the old contents may be longer.
        os.ftruncate(fd, 0)
        os.pwrite(fd, text, 0)

    def write_atomically(self, path: Path) -> None:
        """Write this owner to `path` atomically. The caller holds the lock."""
        # A fixed temporary name: only the lock's holder writes that file, and so it replaces the
        # file of a holder that was killed.
        with replaced(path, 0o600, partial=path.with_name(f"{path.name}.new")) as file:
            self.write(file.fileno())

    def life(self) -> Life:
        """Return the process's state; GONE also if it is not visible from here."""
        fields = _stat_of(self.pid) if self.boot_id == this_boot() else []
        # A start time of 0: /proc could not be read.
        if not fields or self.start_time <= 0 or int(fields[19]) != self.start_time:
            return Life.GONE
        return Life.ENDS if _ends(fields) or _is_killed(_status_of(self.pid)) else Life.LIVES

    def alive(self) -> bool:
        """Return whether the process is visible from here and not ending."""
        return self.life() is Life.LIVES

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _small_file(path: Path) -> bytes:
    """Read a small regular file. Raises: OSError; ValueError for other files."""
    # O_NONBLOCK: opening a FIFO must not block.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _OWNER_BYTES_MAX:
            raise ValueError(f"{path} is no small file")
        return os.read(fd, _OWNER_BYTES_MAX)
    finally:
        os.close(fd)


def lock(fd: int) -> bool:
    """Try to lock the file; returns False if the lock is held. Held until all copies of `fd` are
    closed.
    """
    try:
        # flock: the kernel releases it when the process ends for any reason.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Held by another process; any other error is a fault.
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


class PrivateDirectory:
    """A directory of mode 0700 below `parent`, owned by this process, with a locked owner file.

    For file systems without O_TMPFILE. `path`: the path for the swap file.
    """

    def __init__(self, parent: str) -> None:
        for _ in range(_ATTEMPTS):
            # mkdtemp: created with mode 0700 and an unpredictable name.
            self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._fd = self._lock_owner()
            if self._fd >= 0:
                self.path = self._folder / _SWAP
                return
        raise OSError(errno.EAGAIN, "other processes keep removing new directories", parent)

    def _lock_owner(self) -> int:
        """Create and lock the owner file; -1 if another process's `clear_dead` removed it first."""
        path = self._folder / _OWNER
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return -1
        try:
            # If `clear_dead` has unlinked the file before the lock, the lock protects nothing.
            if lock(fd) and os.fstat(fd).st_nlink:
                Owner.this().write(fd)
                return fd
        except BaseException:
            os.close(fd)
            self._remove()
            raise
        os.close(fd)
        return -1

    def remove(self) -> bool:
        """Remove directory and files; open files remain usable. Releases the lock last.

        Returns False if NFS has renamed an open file instead of removing it: call `remove` again
        after the file is closed.
        """
        if self._fd < 0:
            return True
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        with contextlib.suppress(FileNotFoundError):
            # A .nfs* file: NFS renames open files instead of removing them.
            if any(entry.name != _OWNER for entry in self._folder.iterdir()):
                return False
        self._remove()
        # The lock must be held while the directory exists.
        os.close(self._fd)
        self._fd = -1
        return True

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._folder / _OWNER).unlink()
        with contextlib.suppress(FileNotFoundError):
            self._folder.rmdir()

    def disown(self) -> None:
        """In a forked child, close the inherited descriptor. The parent keeps directory and
        lock.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def clear_dead(parent: str) -> list[str]:
    """Remove the private directories below `parent` whose owners are dead. Returns their names.

    Removes only directories with PREFIX, of this user, of mode 0700, with a free lock, and with no
    other files than those of a PrivateDirectory. Never raises OSError: failures are logged.
    """
    removed = []
    try:
        # Only PREFIX: other programs may use the directory.
        names = [entry.name for entry in os.scandir(parent) if entry.name.startswith(PREFIX)]
    except OSError as error:
        log.warning(
            "%s: cannot look for swap directories that dead processes left: %s", parent, error
        )
        return []
    for name in names:
        folder = Path(parent) / name
        try:
            # Check first, so that other users' directories cause no warning.
            if _is_private(folder.lstat()) and _clear(folder):
                removed.append(name)
                log.info("%s: removed, its owner is dead", folder)
        except OSError as error:
            # Another process may have removed it first.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                log.warning("%s: left by a dead process, and cannot be removed: %s", folder, error)
    return removed


def _is_private(status: os.stat_result) -> bool:
    # `status` is of lstat: symbolic links are not followed.
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and stat.S_IMODE(status.st_mode) == 0o700
    )


def _clear(folder: Path) -> bool:
    # By descriptor from here on: another user may rename the path.
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return _is_private(os.fstat(inside)) and _clear_opened(folder, inside)
    finally:
        os.close(inside)


def _clear_opened(folder: Path, inside: int) -> bool:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(_OWNER, flags, dir_fd=inside)
    except FileNotFoundError:
        # The creator died before it wrote the owner file; a creator that is alive tries again.
        folder.rmdir()
        return True
    try:
        # Lock first: a live owner may still be writing the file.
        if not lock(fd) or not _dead(Owner.read(folder / _OWNER), folder):
            return False
        if any(name not in (_OWNER, _SWAP) for name in os.listdir(inside)):
            # .nfs*: an open file that NFS renamed, and removes when it is closed.
            return False
        with contextlib.suppress(FileNotFoundError):
            # The owner file, which has the lock, is removed last.
            os.unlink(_SWAP, dir_fd=inside)
        os.unlink(_OWNER, dir_fd=inside)
        folder.rmdir()
    finally:
        os.close(fd)
    return True


def _dead(owner: Owner | None, folder: Path) -> bool:
    """Return whether the owner of a free lock is dead."""
    # Truncated by a crash, and no process holds the lock.
    if owner is None:
        return True
    # Same boot: the process can be looked up.
    if owner.boot_id == this_boot():
        return not owner.alive()
    # An earlier boot of this host is over. A process on another host can only be alive on a network
    # file system.
    return owner.host == platform.node() or file_system_type(folder) not in _NETWORK


def this_boot() -> str:
    """Return the kernel's id of this boot, or ""."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def start_time_of(pid: int) -> int:
    """Read the start time of a process, in clock ticks since boot; 0 if it is gone, or a zombie."""
    fields = _stat_of(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else 0


def _stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the third (the state) on; [] if it cannot be read.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The name in parentheses may contain spaces.
    return text.rpartition(")")[2].split()


def _ends(fields: list[str]) -> bool:
    """Return whether these /proc/<pid>/stat fields are of a zombie or an exiting process."""
    return fields[0] in "ZX" or bool(int(fields[6]) & _EXITING)


def _status_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _is_killed(status: str) -> bool:
    """Return whether /proc/<pid>/status shows a pending SIGKILL (in an uninterruptible
    system call).
    """
    masks = (
        int(line.split()[1], 16)
        for line in status.splitlines()
        if line.startswith(("SigPnd:", "ShdPnd:"))
    )
    return any(mask >> (signal.SIGKILL - 1) & 1 for mask in masks)
