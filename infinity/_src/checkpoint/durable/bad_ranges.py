"""Ranges of a durable run's states files that refused a write: remembered after the process.

    .states-<id>-<n>.rank<r>.bad     one line of JSON for each bad range, beside the file
    bad-<id>-<n>.rank<r>             that file when its run has left it: all but those ranges is
                                     given back to the file system

The blocks below a bad range stay those of that file, so that no other file gets them. Remove
`bad-*` after the drive was replaced.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from infinity._src.checkpoint.directory import sync_directory, typed_errors

log = logging.getLogger("infinity")

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_KEEP_SIZE_AND_PUNCH = 3


def list_of(states: Path) -> Path:
    """Return the file that lists the bad ranges of a states file."""
    return states.with_name(f".{states.name}.bad")


def remember(states: Path, offset: int, size_bytes: int) -> None:
    """Add a range to the list of a states file. Blocks for the drive. Raises: AioError."""
    path = list_of(states)
    line = json.dumps({"offset": offset, "size_bytes": size_bytes}).encode() + b"\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    with typed_errors(path, "write", offset):
        fd = os.open(path, flags, 0o600)
        try:
            os.write(fd, line)
            os.fsync(fd)
        finally:
            os.close(fd)
    sync_directory(path.parent)


def known(states: Path) -> list[tuple[int, int]]:
    """Return the bad ranges of a states file, [start, stop) each, ascending and disjoint."""
    try:
        lines = list_of(states).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return list(_joined(sorted(_ranges(lines))))


def _ranges(lines: Iterable[bytes]) -> Iterator[tuple[int, int]]:
    for line in lines:
        try:
            found = json.loads(line)
            start, stop = int(found["offset"]), int(found["offset"]) + int(found["size_bytes"])
        except (ValueError, KeyError, TypeError):
            # The last line of a process that was killed. The range is tried once more, no worse.
            continue
        if 0 <= start < stop:
            yield start, stop


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    start = stop = -1
    for first, last in ranges:
        if first > stop:
            if stop > start:
                yield start, stop
            start, stop = first, last
        stop = max(stop, last)
    if stop > start:
        yield start, stop


def retire(states: Path) -> bool:
    """Give all of a states file back to the file system but its bad ranges, under a name of its
    own. Returns False if it has none, the file system cannot, or a checkpoint has a link to the
    file and keeps all of it: this name may be removed then.
    """
    bad = known(states)
    if not bad:
        return False
    starts, stops = [start for start, _ in bad], [stop for _, stop in bad]
    try:
        fd = os.open(states, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        status = os.fstat(fd)
        if status.st_nlink > 1:
            # What would be given back here is the checkpoint's.
            return False
        end = status.st_size
        for start, stop in zip([0, *stops], [*starts, end], strict=True):
            if stop > start and _LIBC.fallocate(fd, _KEEP_SIZE_AND_PUNCH, start, stop - start):
                code = ctypes.get_errno()
                log.warning("%s: bad ranges are forgotten: %s", states, os.strerror(code))
                return False
    finally:
        os.close(fd)
    # The name last: one that is killed before finds the file, and its list, again.
    states.rename(states.with_name(f"bad-{states.name.removeprefix('states-')}"))
    return True
