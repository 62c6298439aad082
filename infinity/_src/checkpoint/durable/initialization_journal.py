"""Journal of the initialization of a durable run: it lists the flats whose first values are on the
drives, so that the next process can resume an interrupted initialization.

    <home>/fill.rank<r>     HEAD    the states files: their id and directories
                            START   places of all chunks, source, shares, states files
                            FLAT    a flat on the drives, with the checksums of its chunks
                            FLAT    ...

A flat is recorded when its values are on the drives. The first commit, which names the states
files, removes the journal. The first write after the initialization changes the described values,
so it truncates the journal to its head. The head stays until a commit, so that the next process can
find states files that no manifest names, and free their space.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, final

import xxhash

from infinity._src.checkpoint.directory import sync_directory, typed_errors
from infinity.errors import AioError

log = logging.getLogger("infinity")

_RECORD = struct.Struct("<QQ")  # kind, bytes of the payload; payload and xxh3_64 of all follow
_FLAT = struct.Struct("<QQ")  # index, digest; checksums follow
_SUM_BYTES = 8
_HEAD, _START, _WRITTEN = range(3)
_ID = re.compile(r"[0-9a-f]{16}")
_BYTES_MAX = (64 << 20, 64 << 20, 1 << 28)
"""Largest record of each kind, in bytes. Larger records are damage, and are never read."""


class InitializedFlat(NamedTuple):
    """A flat that is on the drives. digest: digest of all its values; 0 if they were read in parts.
    sums: the checksums of this rank's chunks, as bytes."""

    digest: int
    sums: bytes


@final
class InitializationJournal:
    """One rank's journal. One thread uses it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self.head: Mapping[str, Any] | None = None
        # START record of this process or an earlier process; None if there is nothing to resume.
        self.started: Mapping[str, Any] | None = None
        self._written: dict[int, InitializedFlat] = {}
        self._pending: list[bytes] = []
        # Bytes of the head, and of all complete records.
        self._head_bytes = self._whole_bytes = 0
        self._ended = False
        self.refused = ""
        """Reason for refusing the existing journal, which no initialization wrote; else ""."""
        try:
            if self._open():
                self._read()
        except ValueError as error:
            # Ignore the contents; `begin` writes a new journal.
            self.refused = str(error)
            log.warning("%s: ignoring a journal that no initialization wrote: %s", path, error)
            self.head = self.started = None
            self._written.clear()

    @property
    def resumes(self) -> bool:
        return self.started is not None and not self._ended and bool(self._written)

    def begin(self, head: Mapping[str, Any]) -> None:
        """Write a new journal that has only this head. Blocks. Raises: AioError, SwapFullError."""
        self.close()
        self.head, self.started, self._written = head, None, {}
        self._pending.clear()
        # The new file is empty.
        self._head_bytes = self._whole_bytes = 0
        record = _packed(_HEAD, json.dumps(head).encode())
        with typed_errors(self._path, "write", len(record)):
            # A new file, since an existing one may be a symbolic or hard link to another file.
            self._path.unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
            self._append(record)
        self._head_bytes = self._whole_bytes
        # The journal's name must be on the drive before the names of the states files.
        sync_directory(self._path.parent)

    def start(self, start: Mapping[str, Any], *, known: bool) -> list[str]:
        """Begin an initialization, or resume the interrupted one. Returns the names of the fields
        that differ; if any differ, the initialization begins anew. known: False records nothing,
        since the source is unknown. Blocks. Raises: AioError, SwapFullError.
        """
        before, self._ended = self.started, False
        different = [
            name for name in start if before is not None and before.get(name) != start[name]
        ]
        if before is None or different or not known:
            self.forget()
        if known and self.started is None:
            with typed_errors(self._path, "write", 0):
                self._append(_packed(_START, json.dumps(start).encode()))
            self.started = start
        return different

    def take(self, index: int) -> InitializedFlat | None:
        """Return the record of a flat that is on the drives, otherwise None. Only the first call
        returns the checksums, which the journal then drops.
        """
        found = self._written.get(index)
        if found is not None:
            self._written[index] = found._replace(sums=b"")
        return found

    def add(self, index: int, flat: InitializedFlat) -> None:
        """Record a flat that is on the drives; the next `flush` writes the record."""
        if self.started is not None:
            self._pending.append(_packed(_WRITTEN, _FLAT.pack(index, flat.digest) + flat.sums))
            self._written[index] = flat._replace(sums=b"")

    def flush(self) -> None:
        """Write the added records to the drive. Blocks. Raises: AioError, SwapFullError."""
        if self._pending:
            records = b"".join(self._pending)
            with typed_errors(self._path, "write", len(records)):
                self._append(records)
            # Cleared only after the write, so that after an error the next call tries again.
            self._pending.clear()

    def end(self) -> None:
        """Note that all flats are on the drives: later writes do not belong to the initialization.
        """
        self._ended = True

    def before_write(self) -> None:
        """Forget the flats before a write of states, if the initialization has ended. Only the
        first such call blocks. Raises: AioError."""
        if self._ended and self.started is not None:
            self.forget()

    def forget(self) -> None:
        """Forget the flats; the head stays. Blocks. Raises: AioError."""
        self.started, self._written = None, {}
        self._pending.clear()
        self._cut(self._head_bytes)

    def remove(self) -> None:
        """Remove the journal. Raises: AioError."""
        self.close()
        self.head = self.started = None
        with typed_errors(self._path, "unlink", 0):
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> bool:
        """Open an existing journal. Returns False if there is none. Raises: AioError; ValueError
        for a file that no initialization made."""
        # O_NONBLOCK: a FIFO must not block the reader.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with typed_errors(self._path, "open", 0):
            try:
                self._fd = os.open(self._path, flags)
            except FileNotFoundError:
                return False
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise ValueError("it is not a regular file, or has another hard link")
        return True

    def _read(self) -> None:
        """Read the journal. Raises: AioError; ValueError for contents that no initialization wrote.
        """
        with (
            typed_errors(self._path, "read", 0),
            os.fdopen(self._fd, "rb", closefd=False) as file,
        ):
            for kind, payload, end in _records(file):
                if kind == _HEAD:
                    self.head, self._head_bytes = _head_of(payload), end
                elif kind == _START:
                    self.started = _start_of(payload)
                elif len(payload) < _FLAT.size:
                    raise ValueError(f"a flat has {len(payload)} bytes")
                else:
                    index, digest = _FLAT.unpack_from(payload)
                    self._written[index] = InitializedFlat(digest, payload[_FLAT.size :])
                self._whole_bytes = end
        if self.head is None and self.started is not None:
            raise ValueError("it has no head")

    def _cut(self, size_bytes: int) -> None:
        with typed_errors(self._path, "write", 0):
            os.ftruncate(self._fd, size_bytes)
            os.fsync(self._fd)
        self._whole_bytes = size_bytes

    def _append(self, data: bytes) -> None:
        # Cut off an incomplete record of a killed process.
        os.ftruncate(self._fd, self._whole_bytes)
        view, at = memoryview(data), self._whole_bytes
        while view:
            count = os.pwrite(self._fd, view, at)
            view, at = view[count:], at + count
        os.fsync(self._fd)
        self._whole_bytes = at


def _packed(kind: int, payload: bytes) -> bytes:
    record = _RECORD.pack(kind, len(payload)) + payload
    return record + xxhash.xxh3_64_digest(record)


def _records(file: IO[bytes]) -> Iterator[tuple[int, bytes, int]]:
    """Yield kind, payload and end offset of each record up to the first incomplete or damaged one.
    """
    left = os.fstat(file.fileno()).st_size
    while len(head := file.read(_RECORD.size)) == _RECORD.size:
        kind, length = _RECORD.unpack(head)
        left -= _RECORD.size + length + _SUM_BYTES
        # Checked before reading, since the length of a torn record may be any number.
        if left < 0 or kind > _WRITTEN or length > _BYTES_MAX[kind]:
            return
        record = head + file.read(length)
        if file.read(_SUM_BYTES) != xxhash.xxh3_64_digest(record):
            return
        yield kind, record[_RECORD.size :], file.tell()


def _mapping_of(payload: bytes) -> dict[str, Any]:
    try:
        found = json.loads(payload)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__} instead of an object of values")
    return found


def _head_of(payload: bytes) -> dict[str, Any]:
    """Decode a head. Raises: ValueError for values that no head has."""
    head = _mapping_of(payload)
    # The id becomes part of the names of files that may be removed.
    if not isinstance(head.get("id"), str) or not _ID.fullmatch(head["id"]):
        raise ValueError(f"its id is {head.get('id')!r:.100}")
    if not isinstance(head.get("directories"), list):
        raise ValueError("its directories are not a list")
    return head


def _start_of(payload: bytes) -> dict[str, Any]:
    """Decode a START record. Raises: ValueError for values that no such record has."""
    start = _mapping_of(payload)
    states = start.get("states")
    if not isinstance(states, list) or not all(
        isinstance(each, list) and len(each) == 2 and all(type(n) is int for n in each)
        for each in states
    ):
        raise ValueError("its states files are not a list of inodes and lengths")
    return start


def ids_of_journals(home: Path) -> set[str]:
    """Return the ids of the states files that the journals in a run's home name. Raises: AioError;
    ValueError for a journal that no initialization wrote.
    """
    found = set()
    for path in home.glob("fill.rank*"):
        journal = InitializationJournal(path)
        journal.close()
        if journal.refused:
            raise ValueError(f"{path}: {journal.refused}")
        if journal.head is not None:
            found.add(str(journal.head["id"]))
    return found


def states_of(start: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return inode and bytes of each states file in a START record."""
    return [(inode, size) for inode, size in start["states"]]


def described(paths: Sequence[Path]) -> list[tuple[int, int]]:
    """Return inode and bytes of each states file. Raises: OSError; AioError for a file that is a
    link or has a second hard link, since a write would change another file."""
    found = []
    for path in paths:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise AioError(
                "the file is a link, or has another hard link", path=str(path), op="open"
            )
        found.append((status.st_ino, status.st_size))
    return found
