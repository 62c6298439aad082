"""Record of a long run: a line of JSON for each thing that happened, written at once, and a line of
progress for whoever watches."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Record:
    """Lines of JSON in a file, each with the seconds since the beginning."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Line by line, so that a run that is killed leaves what it knew.
        self._file = path.open("a", buffering=1)
        self._begun_s = time.monotonic()
        self._shown_s = 0.0

    def add(self, kind: str, **values: Any) -> None:
        """Write one line."""
        at = round(time.monotonic() - self._begun_s, 3)
        self._file.write(json.dumps({"kind": kind, "s": at, **values}) + "\n")

    def show(self, text: str) -> None:
        """Show progress: in place on a terminal, else a line every half minute."""
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if now < self._shown_s + (0.2 if terminal else 30.0):
            return
        self._shown_s = now
        print(
            f"\r{text:<100.100}" if terminal else text,
            end="" if terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        if sys.stderr.isatty():
            print(file=sys.stderr)
        self._file.close()


@contextlib.contextmanager
def record_in(path: Path) -> Iterator[Record]:
    """Open a record; at the end write the error that ended the block, if any, and close it."""
    record = Record(path)
    try:
        yield record
    except BaseException as error:
        record.add("failed", error=f"{type(error).__name__}: {error}"[:2000])
        raise
    finally:
        record.close()
