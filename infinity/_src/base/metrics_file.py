"""metrics.jsonl: the record of a training run, one JSON object per line.

    kind        one line for
    run         each process that trains the run: versions, the model, the drives as measured
    step        each step: loss, times, bytes, memory
    held_out    each measurement of the held-out loss
    summary     the end of `infinity train`

Each line is appended and flushed, so that an interrupted run loses no earlier line; a kill may
truncate the last one. NaN and infinities are written as Python's `json` writes them.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from infinity._src.base.atomic_file import replaced

FILE_NAME: Final = "metrics.jsonl"

SCHEMA: Final = "infinity.train/1"
"""The `schema` field of "run" lines; it changes when the meaning of a field changes."""

TORN: Final = "torn"
"""The kind that `read_rows` returns for a truncated last line."""

LINE_BYTES_MAX: Final = 1 << 20
"""Bytes of the longest line that is read; written lines have a few thousand."""


class MetricsFile:
    """Writer of a metrics.jsonl. path: None for a rank that writes no file. keeps: append to an
    existing file. Otherwise the first step replaces an existing file; if no step comes before
    `close`, the existing file stays, and the new one is removed.
    """

    def __init__(self, path: Path | None, *, keeps: bool = False) -> None:
        self._path = path
        # Path of an earlier run's record until the first step of this run replaces it; else None.
        self._earlier: Path | None = None
        if path is not None:
            earlier = path.with_name(path.name + ".earlier")
            if earlier.is_file():
                # A run was killed before its first step: its predecessor's record counts.
                earlier.replace(path)
            if keeps and path.is_file():
                _mend(path)
            elif not keeps:
                self._earlier = earlier
                if path.is_file():
                    path.rename(earlier)
        mode = "a" if keeps else "w"
        self._file: IO[str] = (path or Path(os.devnull)).open(mode, encoding="utf-8", buffering=1)

    def cut(self, step: int) -> None:
        """Drop truncated lines and records of later steps."""
        if self._path is None:
            return
        self._file.close()
        partial = self._path.with_name(self._path.name + ".partial")
        with (
            self._path.open(encoding="utf-8", errors="replace") as lines,
            replaced(self._path, partial=partial) as kept,
        ):
            for line in lines:
                row = _row(line)
                # Drop the held-out losses of `step`, too: the resumed run measures them again.
                if (
                    row is not None
                    and row["kind"] != "summary"
                    and row.get("step", -1) < step + (row["kind"] == "step")
                ):
                    kept.write((line.rstrip("\n") + "\n").encode())
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def add(self, kind: str, record: dict[str, Any]) -> None:
        if kind == "step" and self._earlier is not None:
            self._earlier.unlink(missing_ok=True)
            self._earlier = None
        try:
            self._file.write(json.dumps({"kind": kind, **record}) + "\n")
        except OSError as error:
            # The error of a write has no path.
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        self._file.close()
        if self._earlier is None or self._path is None:
            return
        self._path.unlink(missing_ok=True)
        if self._earlier.exists():
            self._earlier.rename(self._path)
        self._earlier = None


def _mend(path: Path) -> None:
    """Remove a truncated last line, or end a complete one, so that the next line begins anew."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - LINE_BYTES_MAX, 0))
        tail = file.read().rpartition(b"\n")[2]
        if tail and _row(tail) is None:
            file.truncate(end - len(tail))
        elif tail:
            file.write(b"\n")


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, record) line by line. A truncated last line becomes a record of kind
    TORN; empty lines are skipped.

    Raises: ValueError for any other invalid line; OSError.
    """
    with path.open("rb") as file:
        for number in itertools.count(1):
            # Bounded, so that a file without line ends is not read into memory.
            line = file.readline(LINE_BYTES_MAX + 1)
            if not line:
                return
            if len(line) > LINE_BYTES_MAX:
                raise ValueError(
                    f"{path}, line {number} has more than {LINE_BYTES_MAX} bytes, so infinity has "
                    "not written it; remove the line"
                )
            if not line.strip():
                continue
            row = _row(line)
            if row is not None:
                yield number, row
            elif line.endswith(b"\n"):
                raise ValueError(
                    f'{path}, line {number} is not a JSON object with a "kind": '
                    f"{line[:60].decode(errors='replace')!r}; remove the line"
                )
            else:
                yield number, {"kind": TORN}
                return


def _row(line: str | bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    # ValueError: not JSON, not UTF-8, or an integer with thousands of digits.
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("kind"), str) else None
