"""Identity of the files that a model's values are read from, and of their conversion.

Ranks that read the same files, converted alike, have the same values, so each reads its own part
and nothing is compared. A fill that was killed goes on where both are still the same.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import xxhash

from infinity._src.memory.ledger import machine

HEAD_BYTES = 64 * 1024
"""Bytes of a file's beginning that are part of its identity: where headers are."""


@dataclasses.dataclass(frozen=True)
class SourceFiles:
    """The files that say all values of a source; false where there are none. conversion: names what
    turns their tensors into those of the model, beyond a cast.
    """

    paths: tuple[Path, ...] = ()
    conversion: str = ""

    def __bool__(self) -> bool:
        return bool(self.paths)


def place_of(files: SourceFiles) -> str:
    """Name these very files, by machine and inode, and their conversion. Empty for no files.
    Raises: OSError.
    """
    if not files:
        return ""
    found = [(path.stat(), path) for path in files.paths]
    rows = [(at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, path.name) for at, path in found]
    return f"{machine()} {xxhash.xxh3_128_hexdigest(repr((rows, files.conversion)).encode())}"


def identity_of(files: SourceFiles) -> str:
    """Name what these files hold, as far as paths, sizes, times and headers tell; the same after a
    restart of the machine. Empty for no files. Raises: OSError.
    """
    if not files:
        return ""
    found = xxhash.xxh3_128()
    for path in files.paths:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            row = (str(path.resolve()), status.st_size, status.st_mtime_ns)
            found.update(repr(row).encode())
            found.update(file.read(HEAD_BYTES))
    return found.hexdigest()
