"""Files that are written under a temporary name, and renamed when they are whole.

    replaced, write_named    the name has the old file or the new one, whenever the process ends
    write_durably            the same after a power cut: bytes reach the drive before the name does

The directory may be shared: what another user has put there under that name is not written through
(a link), and not waited for (a FIFO).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def open_new(path: Path, mode: int = 0o666) -> BinaryIO:
    """Open a new file of this name to write; a file that had the name before loses it. mode: its
    rights, less the umask. Raises: OSError naming the path, also for a device or a directory, which
    stays."""
    with contextlib.suppress(FileNotFoundError):
        kind = path.lstat().st_mode
        if stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
            raise FileExistsError(errno.EEXIST, "a device has this name", str(path))
        path.unlink()
    # "x": made here, or not opened. By path and not by descriptor: writers ask the file its name.
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))


def write_all(file: BinaryIO, *parts: bytes | memoryview) -> None:
    """Write bytes behind those that were written like this before. Raises: OSError."""
    for part in parts:
        view = memoryview(part)
        # A write may be short.
        while view:
            view = view[os.write(file.fileno(), view) :]


def write_new(path: Path, data: bytes | str) -> None:
    """Write a new file of this name whole, text as UTF-8. Raises: as `open_new`."""
    with open_new(path) as file:
        write_all(file, data.encode() if isinstance(data, str) else data)


def write_named(path: Path, data: bytes | str) -> None:
    """Write a file that a user has named for a result, whole or not at all. A device or a pipe, as
    /dev/stdout, is written to, and stays. Raises: OSError naming the path.
    """
    stays = path.exists() and not path.is_file()
    try:
        with path.open("wb") if stays else replaced(path) as file:
            file.write(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        # A write knows no name, and the name of a partial file says less.
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def replaced(
    path: Path, mode: int = 0o666, *, partial: Path | None = None, durable: bool = False
) -> Iterator[BinaryIO]:
    """Yield a new file in the directory of `path`, open to write. It replaces `path` when the block
    ends well, and is removed after an error. mode: as `open_new`. partial: its name until then;
    None gives one with the process's number. durable: it survives a crash from the return on.
    Raises: as `open_new`.
    """
    partial = partial or path.with_name(f".{path.name}.{os.getpid()}.partial")
    file = open_new(partial, mode)
    try:
        with file:
            yield file
        if durable:
            publish(partial, path)
        else:
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if durable:
        fsync_directory(path.parent)


def write_durably(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file whole, under `path` with ".partial" until it is. It survives a crash from the
    return on; before, the name has the old file or the new one. Blocks for the drive. Raises: as
    `open_new`.
    """
    partial = path.with_name(path.name + ".partial")
    with replaced(path, partial=partial, durable=True) as file:
        write_all(file, *parts)


def publish(partial: Path, path: Path) -> None:
    """Give a file that is whole its name, replacing one that had it; durable after
    `fsync_directory`. Blocks. Raises: OSError naming the path."""
    # Before the rename: else a crash may leave the name with an empty file behind it.
    fsync_file(partial)
    # Atomic: a reader sees the old file or the new one.
    partial.replace(path)


def fsync_file(path: Path) -> None:
    """Return when the file's bytes are on the drive. Blocks. Raises: OSError naming the path."""
    _fsync(path, os.O_RDONLY)


def fsync_directory(path: Path) -> None:
    """Return when the names in a directory are on the drive. Blocks. Raises: OSError naming the
    path."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    # Any descriptor will do: fsync is of the file, not of what this one wrote.
    opened = os.open(path, flags)
    try:
        os.fsync(opened)
    except OSError as error:
        # fsync knows a descriptor only; the message has to name the file.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(opened)
