"""infinity.aio: chunks between drives, pinned memory and the update kernels, without the GIL.

    files = [aio.SwapFile.create("/mnt/nvme0")]
    small, large = aio.PoolSpec(16, 768 << 10), aio.PoolSpec(16, 4608 << 10)
    executor = aio.open_executor(files, small=small, large=large)
    ids = executor.define(chunks)                                   # CHUNK records
    executor.submit(jobs, priority=aio.Priority.DEMAND).wait()      # JOB records

`__all__` is the public API; modules with an underscore are private. Read `_executor.py` first: it
defines the terms and the guarantees. `infinity/_src/cabi/records.py` defines the records,
`native/executor/executor.h` the native types. No module here imports torch.
"""

from __future__ import annotations

from infinity._src.cabi.records import (
    CHUNK,
    HYPER,
    JOB,
    LEAVES_SHIFT,
    MASK_COPY_OUT,
    MASK_DEVICE,
    MASK_FOLDED,
    MASK_MOVE_ONLY,
    MASK_PARAM_IN_MEMORY,
    SEG,
    SPAN,
    TRACK_COPY,
    TRACK_FROM_DEVICE,
    TRACK_READ,
    TRACK_TO_DEVICE,
    TRACK_UPDATE,
    TRACK_WRITE,
    Format,
    GradDtype,
    JobKind,
    LogKind,
    PoolSpec,
    Priority,
)
from infinity.aio._cuda_driver import DeviceDriver
from infinity.aio._executor import Executor
from infinity.aio._extents import ExtentAllocator
from infinity.aio._handles import Gate, Ticket
from infinity.aio._open_executor import BACKENDS, open_executor
from infinity.aio._settings import IoSettings
from infinity.aio._slab import Slab
from infinity.aio._stats import DriveStats, ExecutorStats
from infinity.aio._swap_file import SwapFile
from infinity.aio.testing import Fault, Seam

__all__ = [
    "BACKENDS",
    "CHUNK",
    "HYPER",
    "JOB",
    "LEAVES_SHIFT",
    "MASK_COPY_OUT",
    "MASK_DEVICE",
    "MASK_FOLDED",
    "MASK_MOVE_ONLY",
    "MASK_PARAM_IN_MEMORY",
    "SEG",
    "SPAN",
    "TRACK_COPY",
    "TRACK_FROM_DEVICE",
    "TRACK_READ",
    "TRACK_TO_DEVICE",
    "TRACK_UPDATE",
    "TRACK_WRITE",
    "DeviceDriver",
    "DriveStats",
    "Executor",
    "ExecutorStats",
    "ExtentAllocator",
    "Fault",
    "Format",
    "Gate",
    "GradDtype",
    "IoSettings",
    "JobKind",
    "LogKind",
    "PoolSpec",
    "Priority",
    "Seam",
    "Slab",
    "SwapFile",
    "Ticket",
    "open_executor",
]
