"""Files written under a temporary name and renamed when complete.

    replaced, write_named    after a kill the name has the old or the new file
    write_durably            after a power cut, too: the bytes are on the drive before the rename

The directory may be shared: if another user has created a link or FIFO under the name, it is
replaced, and neither followed nor opened.
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
    """Create a file for writing, and unlink an existing file of that name. mode: permissions,
    before the umask. Raises: OSError naming the path, also if the name is a device or a directory.
    """
    with contextlib.suppress(FileNotFoundError):
        kind = path.lstat().st_mode
        if stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
            raise FileExistsError(errno.EEXIST, "a device has this name", str(path))
        path.unlink()
    # "x": fail if another process has created the name. By path, since writers use the file's name.
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))


def write_all(file: BinaryIO, *parts: bytes | memoryview) -> None:
    """Write all bytes at the file's position. Raises: OSError."""
    for part in parts:
        view = memoryview(part)
        # A write may be short.
        while view:
            view = view[os.write(file.fileno(), view) :]


def write_new(path: Path, data: bytes | str) -> None:
    """Write a new file, text as UTF-8. Raises: as `open_new`."""
    with open_new(path) as file:
        write_all(file, data.encode() if isinstance(data, str) else data)


def write_named(path: Path, data: bytes | str) -> None:
    """Write a result to a user's path, atomically. An existing device or pipe, such as /dev/stdout,
    is written to directly. Raises: OSError naming the path.
    """
    stays = path.exists() and not path.is_file()
    try:
        with path.open("wb") if stays else replaced(path) as file:
            file.write(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        # A write error has no path, or the partial file's path.
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def replaced(
    path: Path, mode: int = 0o666, *, partial: Path | None = None, durable: bool = False
) -> Iterator[BinaryIO]:
    """Yield a new file in the directory of `path`, open for writing. It replaces `path` when the
    block succeeds, and is removed after an error. mode: as `open_new`. partial: the temporary path;
    None: one with the process's number. durable: fsync file and directory, so that the new file
    survives a crash after the return. Raises: as `open_new`.
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
    """Write a file under `path` + ".partial", then rename it. It survives a crash after the return;
    a crash before leaves the old or the new file. Blocks on fsync. Raises: as `open_new`.
    """
    partial = path.with_name(path.name + ".partial")
    with replaced(path, partial=partial, durable=True) as file:
        write_all(file, *parts)


def publish(partial: Path, path: Path) -> None:
    """Fsync a complete file and rename it to `path`; durable after `fsync_directory`. Blocks.
    Raises: OSError naming the path.
    """
    # Before the rename: otherwise a crash may leave an empty file under the name.
    fsync_file(partial)
    # Atomic: readers see the old or the new file.
    partial.replace(path)


def fsync_file(path: Path) -> None:
    """Block until the file's bytes are on the drive. Raises: OSError naming the path."""
    _fsync(path, os.O_RDONLY)


def fsync_directory(path: Path) -> None:
    """Block until a directory's entries are on the drive. Raises: OSError naming the path."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    # Any descriptor: fsync flushes all data of the file.
    opened = os.open(path, flags)
    try:
        os.fsync(opened)
    except OSError as error:
        # The error of a descriptor names no file.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(opened)
