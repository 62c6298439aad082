"""FETCH, STORE and UPDATE of whole chunks on null drives, for one number of drives, block size and
batch (batch 0: real drives, by io_uring); prints one JSON line.

executor.py starts it once without and once with lock_meter.c preloaded. Chunks are those of the
`exact` state (4.5 MiB). "without" kernels: jobs pass through slots, drives and workers as usual,
but no bytes are copied, updated or summed.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import meter
from arm_verify import CHUNK_BYTES, MEMORY_CHUNKS, Pass, cpu_s, states

from infinity import aio

SLOTS_PER_DRIVE = 8
DEPTH = 32
KINDS = (aio.JobKind.STORE, aio.JobKind.FETCH, aio.JobKind.UPDATE)


class LockFigures(ctypes.Structure):
    """The struct `lock_figures` of lock_meter.c."""

    _fields_ = (
        ("holds", ctypes.c_uint64),
        ("contended", ctypes.c_uint64),
        ("long_holds", ctypes.c_uint64),
        ("hold_ns", ctypes.c_int64),
        ("long_ns", ctypes.c_int64),
        ("waited_ns", ctypes.c_int64),
    )


class LockMeter:
    """Measures the executor's mutex, if lock_meter.c is preloaded."""

    def __init__(self, executor: aio.Executor) -> None:
        self._library: Any = ctypes.CDLL(None)
        self.there = hasattr(self._library, "lock_meter_watch")
        if self.there:
            # The first member of struct inf_executor.
            self._library.lock_meter_watch(ctypes.c_void_p(executor._core.address))

    def read(self) -> dict[str, int]:
        """Return the figures so far; none without the meter."""
        if not self.there:
            return {}
        figures = LockFigures()
        self._library.lock_meter_read(ctypes.byref(figures))
        return {name: int(getattr(figures, name)) for name, *_ in LockFigures._fields_}

    def close(self) -> None:
        """Stop measuring."""
        if self.there:
            self._library.lock_meter_watch(None)


def requests(executor: aio.Executor) -> tuple[int, int]:
    """Return requests and bytes of all drives so far."""
    drives = executor.stats().drives
    return (
        sum(drive.reads + drive.writes for drive in drives),
        sum(drive.bytes_read + drive.bytes_written for drive in drives),
    )


def measure(passes: Pass, lock: LockMeter, kind: aio.JobKind, seconds: float) -> dict[str, float]:
    """Run passes over all chunks for the given time; return their cost."""
    passes.run(kind)
    before, locked = requests(passes.executor), lock.read()
    cpu, start, count = cpu_s(), time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        passes.run(kind)
        count += 1
    took, used = time.perf_counter() - start, cpu_s() - cpu
    after, now = requests(passes.executor), lock.read()
    found = {
        "s": took,
        "cpu_s": used,
        "chunks": passes.count * count,
        "requests": after[0] - before[0],
        "bytes": after[1] - before[1],
    }
    return {**found, **{name: value - locked[name] for name, value in now.items()}}


def run(
    directory: Path, *, drives: int, block: int, batch: int, workers: int, kernels: bool,
    chunks: int, seconds: float,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Measure each kind of job, for so many seconds. Blocks until done."""
    with ExitStack() as stack:
        make = aio.SwapFile.sparse if batch else aio.SwapFile.create
        files = [make(directory) for _ in range(drives)]
        for file in files:
            stack.callback(file.close)
            file.grow(-(-chunks // drives) * CHUNK_BYTES)
        memory = stack.enter_context(aio.Slab(MEMORY_CHUNKS * CHUNK_BYTES))
        if kernels:
            states(memory)
        executor = aio.open_executor(
            files,
            small=aio.PoolSpec(0, 0),
            large=aio.PoolSpec(SLOTS_PER_DRIVE * drives, CHUNK_BYTES),
            verify="off",
            workers=workers,
            block_bytes=block,
            depth=DEPTH,
            seam=aio.Seam(null=batch, null_computes=int(kernels)) if batch else None,
        )
        stack.callback(executor.close, wait=False)
        lock = LockMeter(executor)
        # Before the executor closes and frees the mutex.
        stack.callback(lock.close)
        passes = Pass(executor, chunks, memory.address, drives=drives)
        return {kind.name.lower(): measure(passes, lock, kind, seconds) for kind in KINDS}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="directory for the sparse files")
    for name in ("drives", "block", "batch", "workers", "chunks"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--kernels", action="store_true")
    args = vars(parser.parse_args())
    meter.report(run(args.pop("dir"), **args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
