"""Files that are written anew below a name for the time being, and renamed when they are whole.

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


def open_new(path: Path) -> BinaryIO:
    """Open a new file of this name to write; a file that had the name before loses it. Raises:
    OSError naming the path, also for a device or a directory, which stays."""
    with contextlib.suppress(FileNotFoundError):
        kind = path.lstat().st_mode
        if stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
            raise FileExistsError(errno.EEXIST, "a device has this name", str(path))
        path.unlink()
    # O_EXCL: made here, or not opened.
    return path.open("xb")


def write_new(path: Path, data: bytes | str) -> None:
    """Write a new file of this name whole, text as UTF-8. Raises: as `open_new`."""
    with open_new(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


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
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file beside `path`, open to write, which takes the place of `path` when the block
    has ended well; after an error nothing is left of it. Each process has a name of its own.
    Raises: as `open_new`.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    file = open_new(partial)
    try:
        with file:
            yield file
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
