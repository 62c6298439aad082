"""Files that survive a crash: their bytes reach the drive before their names do."""

from __future__ import annotations

import os
from pathlib import Path


def sync_file(path: Path) -> None:
    """Return when the file's bytes are on the drive. Blocks. Raises: OSError naming the path."""
    _sync(path, os.O_RDONLY)


def sync_directory(path: Path) -> None:
    """Return when the names in a directory are on the drive. Blocks. Raises: OSError naming the path."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def publish(partial: Path, path: Path) -> None:
    """Give a file that is whole its name, replacing one that had it; durable after `sync_directory`. Blocks.

    Raises: OSError naming the path.
    """
    sync_file(partial)
    partial.replace(path)


def _sync(path: Path, flags: int) -> None:
    opened = os.open(path, flags)
    try:
        os.fsync(opened)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(opened)
