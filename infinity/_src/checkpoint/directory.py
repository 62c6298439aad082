"""A checkpoint's directory: names of files, whole generations, and crash-safe writes, which leave a
file whole or not at all.

    manifest-<generation>.rank<r>   data-<generation>.rank<r>
    buffers-<generation>.rank<r>    extra-<generation>.rank<r>    table-<generation>.rank<r>

A save writes the files of a new generation, the manifests last, and removes older generations when
every rank's manifest exists. So after the first save the directory always has a whole generation.
The bytes of a file reach the drive before its name does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import xxhash

from infinity._src.base.atomic_file import fsync_directory, open_new, write_all
from infinity._src.base.paths import check_link
from infinity._src.checkpoint.manifest import (
    FileEntry,
    Head,
    Manifest,
    check_head,
    check_manifest,
    manifest_name,
)
from infinity.errors import AioError, ChecksumError, DeviceFailedError, SwapFullError

log = logging.getLogger("infinity")

_NAME = re.compile(r"(manifest|table|data\d*|buffers|extra)-(\d{8,})\.rank(\d+)(\.partial)?")
_Kind = TypeVar("_Kind", bound=Head)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def file_name(kind: str, generation: int, rank: int) -> str:
    """Name a file of a checkpoint."""
    return f"{kind}-{generation:08d}.rank{rank}"


def files_of(directory: Path) -> Iterator[tuple[Path, int]]:
    """Yield the files of saves in the directory, each with its generation."""
    for path in directory.iterdir():
        found = _NAME.fullmatch(path.name)
        if found is not None:
            yield path, int(found.group(2))


def is_of(path: Path, rank: int) -> bool:
    """Return whether a rank made that file of a save."""
    return path.name.removesuffix(".partial").endswith(f".rank{rank}")


def next_generation(directory: Path) -> int:
    """Return an unused generation number."""
    # Files without a manifest count, too: a new save must not mix with a dead save's files.
    return max((generation for _, generation in files_of(directory)), default=0) + 1


def generations(directory: Path) -> list[int]:
    """List the generations that have a manifest, whole or not, newest first."""
    found = {
        generation for path, generation in files_of(directory) if path.name.startswith("manifest-")
    }
    return sorted(found, reverse=True)


def begun_commits(directory: Path) -> list[int]:
    """List the generations in which at least one rank's manifest has its final name, newest first.

    Running and interrupted saves have only partial names, and are omitted.
    """
    found = {
        number
        for path, number in files_of(directory)
        if path.name.startswith("manifest-") and path.suffix != ".partial"
    }
    return sorted(found, reverse=True)


def read_generation(directory: Path, generation: int) -> list[Manifest]:
    """Read the manifests of all ranks of one generation.

    Raises: AioError with ENOENT for a missing manifest (`newest_generation` then tries an older
    generation); AioError without an errno for a manifest of another save (`newest_generation`
    raises it); ChecksumError for a damaged manifest. The error names the manifest.
    """
    return _of_all_ranks(directory, generation, read_manifest)


def read_heads(directory: Path, generation: int) -> list[Head]:
    """Read the heads of all ranks' manifests of one generation, without tables of chunks, in a
    fraction of the memory. `optimizers` is equal in all manifests: only the first head has it.

    Raises: as `read_generation`, but does not detect damage inside of a table.
    """
    return _of_all_ranks(directory, generation, _read_lean)


def _of_all_ranks(directory: Path, generation: int, read: Callable[[Path], _Kind]) -> list[_Kind]:
    # Every save has rank 0, whose manifest gives the number of ranks.
    first = read(directory / manifest_name(generation, 0))
    manifests = [first]
    for rank in range(1, first.world):
        path = directory / manifest_name(generation, rank)
        other = read(path)
        # Two saves may have the same number, if the first was interrupted.
        if (other.save, other.world, other.rank) != (first.save, first.world, rank):
            raise AioError(
                "the manifest is of another save than rank 0's", path=str(path), op="read"
            )
        manifests.append(other)
    return manifests


def newest_generation(directory: Path) -> list[Manifest]:
    """Read the manifests of the newest whole generation. A generation that lacks a rank's manifest
    was never committed.

    Raises: AioError (ENOENT) without a whole generation; ChecksumError for a damaged manifest, for
    which no older generation is read.
    """
    return _newest(directory, read_generation)


def newest_heads(directory: Path) -> list[Head]:
    """Read the heads of the newest whole generation, as `read_heads`. Raises: as
    `newest_generation`, but does not detect damage inside of a table.
    """
    return _newest(directory, read_heads)


def readable_heads(directory: Path) -> list[Head] | None:
    """Read the heads of the newest undamaged generation; None if there is none."""
    for generation in generations(directory):
        with contextlib.suppress(AioError, ValueError):
            return read_heads(directory, generation)
    return None


def _newest(directory: Path, read: Callable[[Path, int], list[_Kind]]) -> list[_Kind]:
    if not directory.is_dir():
        raise AioError("there is no checkpoint", errno=errno.ENOENT, path=str(directory), op="open")
    missing: AioError | None = None
    # A newer generation may lack manifests: its save is running, or was interrupted.
    for generation in generations(directory):
        try:
            return read(directory, generation)
        except AioError as error:
            # Raise damage: reading an older generation would silently lose steps.
            if error.errno != errno.ENOENT:
                raise
            # Keep the error of the newest generation, which helps the user most.
            missing = missing or error
    raise AioError(
        "there is no whole checkpoint" + (f" ({missing})" if missing else ""),
        errno=errno.ENOENT,
        path=str(directory),
        op="open",
    ) from missing


def read_manifest(path: Path) -> Manifest:
    """Read one manifest. Raises: AioError, ChecksumError, ValueError."""
    manifest = Manifest.decode(_read(path), str(path), lambda file: _named(path, file))
    # The digest shows that the bytes are unchanged, not that an engine wrote them.
    check_manifest(manifest, str(path))
    return manifest


def read_head(path: Path) -> Head:
    """Read one manifest without its chunks, and check the length of its table. Raises: AioError,
    ChecksumError, ValueError.
    """
    head = Head.decode(_read(path), str(path))
    check_head(head, str(path))
    if head.table is not None:
        with _needed(path, head.table):
            check_length(path.parent / head.table.name, head.table)
    return head


def _read_lean(path: Path) -> Head:
    head = read_head(path)
    # `optimizers` has an entry for each parameter, and is equal in all ranks' heads: keep one.
    return head if head.rank == 0 else dataclasses.replace(head, optimizers=())


def _named(manifest: Path, file: FileEntry) -> bytes:
    with _needed(manifest, file):
        return read_attachment(manifest.parent, file)


@contextlib.contextmanager
def _needed(manifest: Path, file: FileEntry) -> Iterator[None]:
    """Replace ENOENT of a missing file that a manifest names by an error without errno: the
    generation is damaged, not absent.
    """
    try:
        yield
    except AioError as error:
        if error.errno != errno.ENOENT:
            raise
        raise AioError(
            f"a file that {manifest.name} names is missing",
            path=str(manifest.parent / file.name),
            op="open",
        ) from error


def read_attachment(directory: Path, file: FileEntry) -> bytes:
    """Read a whole small file. Raises: AioError if the file is missing or too short, ChecksumError
    if it is damaged.
    """
    path = directory / file.name
    data = _read(path, file.size_bytes)
    if xxhash.xxh3_128_hexdigest(data) != file.digest:
        raise ChecksumError(
            "the contents have changed since they were written",
            path=str(path),
            op="read",
            length=len(data),
        )
    return data


def check_length(path: Path, file: FileEntry) -> None:
    """Raise AioError for a file that is missing, or shorter than its entry."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise AioError(
            "a file of a checkpoint is missing", errno=error.errno or 0, path=str(path), op="open"
        ) from error
    # A longer file is valid: a run's file may have grown since the commit.
    if size < file.size_bytes:
        raise AioError(
            f"the file was cut short: it has {size} bytes of {file.size_bytes}",
            path=str(path),
            op="read",
            offset=size,
            length=file.size_bytes - size,
        )


def write_attachment(directory: Path, name: str, *parts: bytes | memoryview) -> FileEntry:
    """Write a small file, and return when the file is on the drive. parts: the file's bytes.
    Raises: SwapFullError, DeviceFailedError, AioError.
    """
    path = directory / name
    size, digest = sum(len(part) for part in parts), xxhash.xxh3_128()
    # `open_new` unlinks a file of this name that an interrupted save left, and gives the new file
    # default permissions.
    with typed_errors(path, "write", size), open_new(path) as file:
        for part in parts:
            digest.update(part)
            write_all(file, part)
        # Flush before a manifest names the file: a crash must not keep only the manifest.
        os.fsync(file.fileno())
    return FileEntry(name, size, digest.hexdigest())


def sync_directory(directory: Path) -> None:
    """Block until the names in a directory are on the drive. Raises: DeviceFailedError,
    AioError.
    """
    with typed_errors(directory, "fsync", 0):
        fsync_directory(directory)


def make_directory(directory: Path) -> None:
    """Make a directory with a durable name. Raises: ValueError for a path that is a file,
    AioError.
    """
    check_link(directory)
    if directory.exists() and not directory.is_dir():
        raise ValueError(
            f"directory={str(directory)!r} is a file, and a checkpoint is a directory: name "
            "another path"
        )
    with typed_errors(directory, "open", 0):
        # Only a new name must be flushed.
        made = not directory.exists()
        directory.mkdir(parents=True, exist_ok=True)
    # Without the flush, a crash could remove the directory with the checkpoint.
    if made:
        sync_directory(directory.parent)


def remove(paths: list[Path]) -> None:
    """Remove files that no checkpoint needs."""
    for path in paths:
        path.unlink(missing_ok=True)


class DirectoryLock:
    """A lock of the directory of a checkpoint that is being written.

    Without the lock a second writer would use the same numbers, and remove the first writer's
    files. Raises: AioError (EWOULDBLOCK) while another save on this machine holds the lock. On a
    file system without locks nothing is locked.
    """

    def __init__(self, directory: Path) -> None:
        with typed_errors(directory, "open", 0):
            self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Lock the directory itself: no lock file stays, and the lock ends with the process.
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise AioError(
                "another save into this directory is running: wait for its end, or give each model "
                "a separate directory",
                errno=errno.EWOULDBLOCK, path=str(directory), op="open",
            ) from error  # fmt: skip
        except OSError as error:
            # On a file system without locks the save continues without a lock.
            log.debug("%s cannot be locked: %s", directory, error)

    def release(self) -> None:
        # Closing is not enough: a forked process may also have the directory open.
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)


@contextlib.contextmanager
def typed_errors(path: Path, op: str, length: int) -> Iterator[None]:
    """Turn an OSError of the body into an AioError that names path and length."""
    try:
        yield
    except AioError:
        raise
    except OSError as error:
        # The class implies the fix. SwapFullError: free space; DeviceFailedError: check the drive.
        code = error.errno or 0
        kind: type[AioError] = AioError
        if code in _NO_ROOM:
            kind = SwapFullError
        elif code in (errno.EIO, errno.ENXIO, errno.EROFS):
            kind = DeviceFailedError
        raise kind(
            "a file of a checkpoint", errno=code, path=str(path), op=op, length=length
        ) from error


def _read(path: Path, size_bytes: int | None = None) -> bytes:
    """Read a whole regular file. size_bytes: the required size; None: unknown. Raises: AioError."""
    try:
        # O_NONBLOCK: a FIFO with the file's name must not block the reader.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as opened:
            status = os.fstat(fd)
            # Reading a device may never end.
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            # Checked before reading, so that a user's interrupted copy is reported as too short,
            # not as damaged.
            if size_bytes is not None and status.st_size != size_bytes:
                raise AioError(
                    f"the file has {status.st_size} bytes, not {size_bytes}",
                    path=str(path),
                    op="read",
                    length=status.st_size,
                )
            return opened.read()
    except AioError:
        raise
    except MemoryError as error:
        raise AioError(
            "a file of a checkpoint does not fit in memory", path=str(path), op="read"
        ) from error
    except OSError as error:
        raise AioError(
            "a file of a checkpoint cannot be read",
            errno=error.errno or 0,
            path=str(path),
            op="open",
        ) from error
