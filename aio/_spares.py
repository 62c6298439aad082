"""Reserved extents, and the record of a failed write that went to one.

When a write fails, the executor writes the chunk to a reserved extent: of the same drive first,
then of another drive (native/executor/failed_writes.c). The caller reserves the extents beforehand,
takes the records of moved writes afterwards, and never uses a range again where a write failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from infinity.errors import AioError

SPARE: Final = np.dtype(
    [("drive", "<i4"), ("file", "<i4"), ("offset", "<i8"), ("bytes", "<i8")],
)
"""`inf_spare`. `file`: of the drive's files in the executor. offset, bytes: multiples of 4096."""


@dataclass(frozen=True)
class MovedWrite:
    """A chunk's place that refused a write, the range that is its place now, and the error.

    chunk: its id; key: of the chunk, since an id may be given again. size_bytes: of the place.
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
