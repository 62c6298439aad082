"""STORE, FETCH and UPDATE of whole chunks through the executor with one setting of `verify`; prints
one JSON line.

Started by cost_of_verify.py. Chunks are those of the `exact` state (4.5 MiB, 12 bytes per
parameter). As in training, the buffers of stored and fetched bytes and of gradients are larger than
any cache.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import meter
import numpy as np
import numpy.typing as npt

from infinity import aio
from infinity._src.cabi.records import CHUNK_NUMEL, PIECE_NUMEL, piece_count

ITEMSIZES = tuple(section.itemsize for section in aio.Format.SPLIT.sections)
CHUNK_BYTES = CHUNK_NUMEL * sum(ITEMSIZES)
SLOTS = 16
MEMORY_CHUNKS = 24
"""Number of chunk buffers that jobs use in rotation: 108 MiB."""


def cpu_s() -> float:
    """CPU seconds of this process so far, user and system, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def hyper() -> npt.NDArray[np.void]:
    """AdamW's tenth step at lr 1e-4."""
    record = np.zeros(1, dtype=aio.HYPER)
    beta1, beta2, step, lr = 0.9, 0.999, 10, 1e-4
    record["decay"] = 1 - lr * 0.01
    record["beta1"], record["one_minus_beta1"] = beta1, 1 - beta1
    record["beta2"], record["one_minus_beta2"] = beta2, 1 - beta2
    record["eps"], record["bc2_sqrt"] = 1e-8, (1 - beta2**step) ** 0.5
    record["step_size"] = lr / (1 - beta1**step)
    return record


class Pass:
    """Chunks on alternating drives, chunk buffers in memory, and passes over all chunks."""

    def __init__(self, executor: aio.Executor, count: int, memory: int, drives: int = 1) -> None:
        self.executor = executor
        self.count = count
        pieces = piece_count(CHUNK_NUMEL)
        self.sums = np.zeros((count, len(ITEMSIZES), pieces), dtype=np.uint32)
        starts = np.cumsum([0, *ITEMSIZES[:-1]]) * CHUNK_NUMEL
        chunks = np.zeros(count, dtype=aio.CHUNK)
        chunks["key"] = np.arange(count) + 1
        chunks["numel"] = CHUNK_NUMEL
        chunks["drive"] = np.arange(count) % drives
        chunks["file_offset"] = np.arange(count) // drives * CHUNK_BYTES
        chunks["run_bytes"] = CHUNK_BYTES
        chunks["format"] = aio.Format.SPLIT
        chunks["section_count"] = len(ITEMSIZES)
        chunks["piece_numel"] = PIECE_NUMEL
        chunks["itemsize"][:, : len(ITEMSIZES)] = ITEMSIZES
        chunks["section_at"] = -1
        chunks["section_at"][:, : len(starts)] = starts
        chunks["sums_ptr"] = self.sums.ctypes.data + np.arange(count) * self.sums[0].nbytes
        self.ids = executor.define(chunks)
        # Each job's memory: one of the chunks of memory, its sections one after the other.
        self.places = (memory + np.arange(count) % MEMORY_CHUNKS * CHUNK_BYTES)[:, None] + starts[
            None, :
        ]

    def jobs(self, kind: aio.JobKind) -> npt.NDArray[np.void]:
        jobs = np.zeros(self.count, dtype=aio.JOB)
        jobs["chunk"], jobs["kind"], jobs["base"] = self.ids, kind, -1
        if kind == aio.JobKind.UPDATE:
            jobs["seg_first"], jobs["seg_count"] = np.arange(self.count), 1
        else:
            jobs["mask"] = (1 << len(ITEMSIZES)) - 1
            jobs["ptr"][:, : len(ITEMSIZES)] = self.places
        return jobs

    def run(self, kind: aio.JobKind) -> dict[str, float]:
        """One job per chunk, all submitted at once. Blocks until all have ended."""
        segs = hypers = None
        if kind == aio.JobKind.UPDATE:
            segs = np.zeros(self.count, dtype=aio.SEG)
            segs["numel"], segs["grad"], segs["grad_dtype"] = (
                CHUNK_NUMEL,
                self.places[:, 0],
                aio.GradDtype.BF16,
            )
            hypers = hyper()
        jobs = self.jobs(kind)
        before, start = cpu_s(), time.perf_counter()
        self.executor.submit(jobs, segs, hypers, priority=aio.Priority.DEMAND).wait()
        took = time.perf_counter() - start
        moved = self.count * CHUNK_BYTES * (2 if kind == aio.JobKind.UPDATE else 1)
        return {"gbps": moved / took / 1e9, "cpu_s_per_gb": (cpu_s() - before) / moved * 1e9}


def states(memory: aio.Slab) -> None:
    """Fill the memory with plausible states: finite parameters, small positive second moments, no
    denormals."""
    rng = np.random.default_rng(0)
    for place in memory.array(np.uint8).reshape(MEMORY_CHUNKS, CHUNK_BYTES):
        hi, lo, first, second = np.split(place, np.cumsum(ITEMSIZES)[:-1] * CHUNK_NUMEL)
        hi.view(np.uint16)[:] = rng.integers(0x3C00, 0x4000, CHUNK_NUMEL)
        lo.view(np.int16)[:] = rng.integers(-32768, 32767, CHUNK_NUMEL)
        first.view(np.float32)[:] = rng.standard_normal(CHUNK_NUMEL, dtype=np.float32) * 0.01
        second.view(np.float32)[:] = rng.random(CHUNK_NUMEL, dtype=np.float32) * 0.01 + 1e-6


def run(directory: Path, size: int, verify: str) -> dict[str, Any]:
    """Run STORE (twice: the first allocates extents and is not recorded), FETCH, UPDATE. Blocks.
    """
    count = max(size // CHUNK_BYTES, 2)
    with ExitStack() as stack:
        file = aio.SwapFile.create(directory)
        stack.callback(file.close)
        file.grow(count * CHUNK_BYTES)
        memory = stack.enter_context(aio.Slab(MEMORY_CHUNKS * CHUNK_BYTES))
        states(memory)
        executor = aio.open_executor(
            [file], small=aio.PoolSpec(0, 0), large=aio.PoolSpec(SLOTS, CHUNK_BYTES), verify=verify
        )
        stack.callback(executor.close, wait=False)
        passes = Pass(executor, count, memory.address)
        passes.run(aio.JobKind.STORE)
        figures = {
            kind.name.lower(): passes.run(kind)
            for kind in (aio.JobKind.STORE, aio.JobKind.FETCH, aio.JobKind.UPDATE)
        }
        return {"backend": executor.backend, "size_bytes": count * CHUNK_BYTES, "figures": figures}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="swap directory")
    parser.add_argument("--size", type=int, required=True, help="bytes of states")
    parser.add_argument("--verify", required=True, choices=("full", "sample", "off"))
    args = parser.parse_args()
    meter.report({"arm": args.verify, **run(args.dir, args.size, args.verify)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
