"""infinity.aio: chunks between drives, pinned memory and the update kernels, without the GIL.

    files = [aio.SwapFile.create("/mnt/nvme0")]
    executor = aio.open_executor(files, small=aio.PoolSpec(16, 768 << 10), large=aio.PoolSpec(16, 4608 << 10))
    ids = executor.define(chunks)                                   # plan.CHUNK records
    executor.submit(jobs, priority=aio.Priority.DEMAND).wait()      # plan.JOB records

Read `executor.py` first: it has the words, the promises and the protocol. `plan.py` has the records, `native/executor.h`
the native inside. Nothing here knows torch.
"""

from __future__ import annotations

from infinity.aio.device import DeviceDriver
from infinity.aio.executor import (
    MASK_COPY_OUT,
    MASK_DEVICE,
    MASK_GIVEN,
    MASK_MOVE_ONLY,
    SPAN,
    TRACK_COPY,
    TRACK_FROM_DEVICE,
    TRACK_READ,
    TRACK_TO_DEVICE,
    TRACK_UPDATE,
    TRACK_WRITE,
    Executor,
    Fault,
    Gate,
    PoolSpec,
    Priority,
    Seam,
    Ticket,
)
from infinity.aio.extents import ExtentAllocator
from infinity.aio.opening import BACKENDS, open_executor
from infinity.aio.plan import CHUNK, HYPER, JOB, SEG, Format, GradDtype, JobKind, LogKind
from infinity.aio.settings import IoSettings
from infinity.aio.slab import Slab
from infinity.aio.stats import DriveStats, ExecutorStats
from infinity.aio.swap_file import SwapFile

__all__ = [
    "BACKENDS",
    "CHUNK",
    "HYPER",
    "JOB",
    "MASK_COPY_OUT",
    "MASK_DEVICE",
    "MASK_GIVEN",
    "MASK_MOVE_ONLY",
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
