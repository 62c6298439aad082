"""Ownership of named swap files: lock files, private directories, and removal of dead owners'
files.

A lock (flock) ends with its process, however that ends, so a free lock means a dead owner. The JSON
beside it (host, boot, pid, start time) is for people, and for the one case in which a lock says
nothing: a network file system seen from another host.
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

from infinity._src.base.new_file import replaced
from infinity.aio._file_system import file_system_type

log = logging.getLogger("infinity.aio")

PREFIX = "infinity-swap-"
_OWNER, _SWAP = "owner.json", "swap"
# Attempts at making a directory: a process that clears away may take it before it is locked.
_ATTEMPTS = 20
# On these a lock of another host may not show, so a free lock proves nothing about its process.
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "9p", "glusterfs", "afs"}
)
_OWNER_BYTES_MAX = 4096
_HOST_CHARACTERS_MAX = 255
# PF_EXITING of the kernel's task flags, field 9 of /proc/<pid>/stat: set until it is reaped.
_EXITING = 0x4


class Life(enum.Enum):
    """State of a process, as far as this one can see it."""

    LIVES = "lives"
    ENDS = "ends"
    """Killed, exiting, or a zombie. Memory goes before files are closed, so locks go late."""
    GONE = "gone"


@dataclasses.dataclass(frozen=True)
class Owner:
    """Identity of a process, unique across reboots, hosts and reused pids."""

    host: str
    boot_id: str
    pid: int
    start_time: int
    """Clock ticks from boot to the start of the process, as /proc/<pid>/stat has them."""

    @classmethod
    def this(cls) -> Owner:
        """Return this process."""
        # A pid alone is reused; with its start time and the boot it is one process for ever.
        return cls(platform.node(), this_boot(), os.getpid(), start_time_of(os.getpid()))

    @classmethod
    def read(cls, path: Path) -> Owner | None:
        """Read the owner at `path`; None where it is missing, cut short or not one."""
        try:
            # The file may be cut short by a crash while it was written.
            said = json.loads(_small_file(path))
            found = cls(*(said[field.name] for field in dataclasses.fields(cls)))
            found._check()
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return found

    def _check(self) -> None:
        """Raise ValueError for values that no process has."""
        texts, numbers = (self.host, self.boot_id), (self.pid, self.start_time)
        # They go into messages, and the pid into a path.
        if not all(type(text) is str and text.isprintable() for text in texts) or not all(
            type(number) is int and 0 <= number < 1 << 63 for number in numbers
        ):
            raise ValueError("no owner of a swap file")
        if len(self.host) > _HOST_CHARACTERS_MAX:
            raise ValueError("no name of a host")

    def write(self, fd: int) -> None:
        """Replace what `fd` holds by this owner, as JSON."""
        text = json.dumps(dataclasses.asdict(self)).encode()
        # A shorter owner must not leave the end of a longer one behind.
        os.ftruncate(fd, 0)
        os.pwrite(fd, text, 0)

    def leave_word(self, path: Path) -> None:
        """Write this owner to `path`, whole or not at all. Only the holder of the lock may."""
        # One name for all: whoever was killed here held the lock, and the next one takes it over.
        with replaced(path, 0o600, partial=path.with_name(f"{path.name}.new")) as file:
            self.write(file.fileno())

    def life(self) -> Life:
        """Look the process up. GONE also means one that this process cannot see."""
        fields = _stat_of(self.pid) if self.boot_id == this_boot() else []
        # A start time of 0 is a process whose /proc could not be read.
        if not fields or self.start_time <= 0 or int(fields[19]) != self.start_time:
            return Life.GONE
        return Life.ENDS if _ends(fields) or _is_killed(_status_of(self.pid)) else Life.LIVES

    def alive(self) -> bool:
        """Say whether it is a process that this one can see, and that does not end."""
        return self.life() is Life.LIVES

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _small_file(path: Path) -> bytes:
    """Read a regular file of a few bytes. Raises: OSError, ValueError for what is none."""
    # O_NONBLOCK: a FIFO of that name must not hold the reader.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _OWNER_BYTES_MAX:
            raise ValueError(f"{path} is no small file")
        return os.read(fd, _OWNER_BYTES_MAX)
    finally:
        os.close(fd)


def lock(fd: int) -> bool:
    """Take the file's lock if it is free; it is held until the descriptor, and every copy of it, is
    closed.
    """
    try:
        # flock belongs to the open file, so the kernel ends it with the process, however that ends.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Held by another. Anything else is a fault.
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


class PrivateDirectory:
    """A directory of mode 0700 below `parent` that belongs to this process, with its locked owner
    file.

    For file systems without nameless files. `path`: the name that the swap file may take.
    """

    def __init__(self, parent: str) -> None:
        for _ in range(_ATTEMPTS):
            # mkdtemp: mode 0700 from the start, and a name that cannot be guessed.
            self._folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._fd = self._lock_owner()
            if self._fd >= 0:
                self.path = self._folder / _SWAP
                return
        raise OSError(errno.EAGAIN, "other processes keep removing new directories", parent)

    def _lock_owner(self) -> int:
        """Make and lock the owner file; -1 when a process that clears away was faster."""
        path = self._folder / _OWNER
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return -1
        try:
            # Between open and lock a process that clears away may have unlinked it.
            # Then the lock is on a file that has no name any more, and protects nothing.
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
        """Remove the names; open files live on. The lock is held as long as the directory exists.

        Returns False where the directory has to stay (NFS renames an open file instead): call it
        again when the file is closed.
        """
        if self._fd < 0:
            return True
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        with contextlib.suppress(FileNotFoundError):
            # A .nfs* file: NFS renames what is open instead of removing it.
            if any(entry.name != _OWNER for entry in self._folder.iterdir()):
                return False
        self._remove()
        # Last: the lock is held as long as the directory exists.
        os.close(self._fd)
        self._fd = -1
        return True

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._folder / _OWNER).unlink()
        with contextlib.suppress(FileNotFoundError):
            self._folder.rmdir()

    def disown(self) -> None:
        """Close the copy in a forked child. The parent keeps the directory and its lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def clear_dead(parent: str) -> list[str]:
    """Remove the private directories below `parent` whose owners are dead; returns their names.

    Only directories with our prefix, of this user, mode 0700, with nothing in them but what a
    PrivateDirectory holds, and whose lock is free. Never fails: a directory that cannot be removed
    stays, and is logged.
    """
    removed = []
    try:
        # Nothing but our prefix: the directory may be shared with anything.
        names = [entry.name for entry in os.scandir(parent) if entry.name.startswith(PREFIX)]
    except OSError as error:
        log.warning(
            "%s: cannot look for swap directories that dead processes left: %s", parent, error
        )
        return []
    for name in names:
        folder = Path(parent) / name
        try:
            # Looked at first: those of other users are not to be told of at each start.
            if _is_private(folder.lstat()) and _clear(folder):
                removed.append(name)
                log.info("%s: removed, its owner is dead", folder)
        except OSError as error:
            # Another process that clears away may have been faster.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                log.warning("%s: left by a dead process, and cannot be removed: %s", folder, error)
    return removed


def _is_private(status: os.stat_result) -> bool:
    # Of lstat: a link to another directory is not ours to clear.
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and stat.S_IMODE(status.st_mode) == 0o700
    )


def _clear(folder: Path) -> bool:
    # By its descriptor from here on: where others may rename, the path may lead elsewhere next.
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
        # Its maker died before it wrote anything; a live one that is about to write tries again.
        folder.rmdir()
        return True
    try:
        # The lock first: without it the owner file may be half written.
        if not lock(fd) or not _dead(Owner.read(folder / _OWNER), folder):
            return False
        if any(name not in (_OWNER, _SWAP) for name in os.listdir(inside)):
            # .nfs*: an open file that NFS renamed; it goes when its process does.
            return False
        with contextlib.suppress(FileNotFoundError):
            # The owner file stays until the end: it carries the lock that keeps others out.
            os.unlink(_SWAP, dir_fd=inside)
        os.unlink(_OWNER, dir_fd=inside)
        folder.rmdir()
    finally:
        os.close(fd)
    return True


def _dead(owner: Owner | None, folder: Path) -> bool:
    """Say whether a free lock means a dead owner."""
    # Cut short by a crash while it was written, and no process has the lock.
    if owner is None:
        return True
    # Same boot: the process can be looked up, whatever the lock says.
    if owner.boot_id == this_boot():
        return not owner.alive()
    # Another boot of this host is over. Another host is alive somewhere only if it can reach this
    # file system.
    return owner.host == platform.node() or file_system_type(folder) not in _NETWORK


def this_boot() -> str:
    """Return the kernel's name of this boot; empty where it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def start_time_of(pid: int) -> int:
    """Read the start time of a process, in clock ticks since boot; 0 if it is gone, or a zombie."""
    fields = _stat_of(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else 0


def _stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the third on, which is the state; none where it
    cannot be read.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The name in parentheses may hold blanks.
    return text.rpartition(")")[2].split()


def _ends(fields: list[str]) -> bool:
    """Say whether these fields are those of a zombie, or of a process that frees its memory."""
    return fields[0] in "ZX" or bool(int(fields[6]) & _EXITING)


def _status_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _is_killed(status: str) -> bool:
    """Say whether a process with this /proc/<pid>/status has a SIGKILL that it has not obeyed yet,
    as in a system call that nothing interrupts.
    """
    masks = (
        int(line.split()[1], 16)
        for line in status.splitlines()
        if line.startswith(("SigPnd:", "ShdPnd:"))
    )
    return any(mask >> (signal.SIGKILL - 1) & 1 for mask in masks)
