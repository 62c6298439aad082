"""Reserved extents, and the record of a failed write that was moved to a reserved extent.

When a write fails, the executor writes the chunk to a reserved extent on the same drive, or else on
another drive (native/executor/failed_writes.c). The caller reserves the extents beforehand, fetches
the records of moved writes afterwards, and never reuses a range where a write has failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from infinity.errors import AioError

SPARE: Final = np.dtype(
    [("drive", "<i4"), ("file", "<i4"), ("offset", "<i8"), ("bytes", "<i8")],
)
"""`inf_spare`. `file`: index among the drive's files. offset, bytes: multiples of 4096."""


@dataclass(frozen=True)
class MovedWrite:
    """A moved write: the chunk's old place, where the write failed, its new place, and the error.

    chunk: its id; key: the chunk's key, since ids are reused. size_bytes: of either place.
    """

    chunk: int
    key: int
    drive: int
    file: int
    offset: int
    to_drive: int
    to_file: int
    to_offset: int
    size_bytes: int
    error: AioError
