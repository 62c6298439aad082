"""metrics.jsonl: the record of a training run, one JSON object on a line.

    kind        a line for
    run         each process that trains the run: versions, the model, the drives as measured
    step        each step: loss, times, bytes, memory
    held_out    each measurement of the held-out loss
    summary     the end of `infinity train`

Lines are appended and flushed one by one, so that an interrupted run keeps what it had; a kill may
tear the last one. NaN and infinities are written as Python's `json` writes them.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from infinity._src.base.new_file import open_new

FILE_NAME: Final = "metrics.jsonl"

SCHEMA: Final = "infinity.train/1"
"""The `schema` of a line of the kind "run"; it changes when a field changes its meaning."""

TORN: Final = "torn"
"""The kind that `read_rows` gives to a last line that a kill has torn."""

LINE_BYTES_MAX: Final = 1 << 20
"""Longest line that is read: those that are written have a few thousand bytes."""


class MetricsFile:
    """A metrics.jsonl that is being written. path: None for a rank that writes none. keeps: lines
    that are there already stay.
    """

    def __init__(self, path: Path | None, *, keeps: bool = False) -> None:
        self._path = path
        mode = "a" if keeps else "w"
        if path is not None and keeps and path.is_file():
            _mend(path)
        self._file: IO[str] = (path or Path(os.devnull)).open(mode, encoding="utf-8", buffering=1)

    def cut(self, step: int) -> None:
        """Drop what was recorded after that step, and lines that a kill tore."""
        if self._path is None:
            return
        self._file.close()
        # In a file of its own first: a kill in between leaves the one or the other.
        partial = self._path.with_name(self._path.name + ".partial")
        with (
            self._path.open(encoding="utf-8", errors="replace") as lines,
            open_new(partial) as kept,
        ):
            for line in lines:
                row = _row(line)
                # Held-out losses of that step itself are measured once more.
                if (
                    row is not None
                    and row["kind"] != "summary"
                    and row.get("step", -1) < step + (row["kind"] == "step")
                ):
                    kept.write((line.rstrip("\n") + "\n").encode())
        partial.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def add(self, kind: str, record: dict[str, Any]) -> None:
        self._file.write(json.dumps({"kind": kind, **record}) + "\n")

    def close(self) -> None:
        self._file.close()


def _mend(path: Path) -> None:
    """Remove a last line that a kill has torn: a line that is appended would go on with it."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - LINE_BYTES_MAX, 0))
        tail = file.read().rpartition(b"\n")[2]
        if tail and _row(tail) is None:
            file.truncate(end - len(tail))
        elif tail:
            file.write(b"\n")


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each line's number and record, one line at a time. A last line that is torn comes as a
    record of the kind TORN; empty lines are passed over.

    Raises: ValueError for a line that is no record; OSError.
    """
    with path.open("rb") as file:
        for number in itertools.count(1):
            # Bounded: a file without line ends must not be read whole.
            line = file.readline(LINE_BYTES_MAX + 1)
            if not line:
                return
            if len(line) > LINE_BYTES_MAX:
                raise ValueError(
                    f"{path}, line {number} has more than {LINE_BYTES_MAX} bytes, and is none of "
                    "infinity's; remove the line"
                )
            if not line.strip():
                continue
            row = _row(line)
            if row is not None:
                yield number, row
            elif line.endswith(b"\n"):
                raise ValueError(
                    f'{path}, line {number} is no JSON object with a "kind": '
                    f"{line[:60].decode(errors='replace')!r}; remove the line"
                )
            else:
                yield number, {"kind": TORN}
                return


def _row(line: str | bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    # ValueError: no JSON, no UTF-8, or a number of thousands of digits.
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("kind"), str) else None
