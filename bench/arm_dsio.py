"""Measures DeepSpeed's I/O engine (`aio_handle`, as its tool ds_io does) on one file; prints one
JSON line.

compare_io.py starts it inside DeepSpeed's own environment. The engine uses blocks of 1 MiB and a
depth of 32. It submits blocks together (single_submit False), and overlaps submission with
completion (overlap_events True). The page-locked buffer is as large as the file.

A mixed pass reads one half of the file and writes the other at the same time, through two handles,
as DeepSpeed's own pipelined swapper does: one handle would run its operations one after the other.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]
import meter
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-not-found,import-untyped,unused-ignore]

BLOCK_BYTES = 1 << 20
DEPTH = 32
KINDS = ("read", "write", "mixed")
MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ")


def huge_share(address: int, size: int) -> float:
    """Return the share of [address, address + size) on huge pages, by /proc/self/smaps."""
    huge, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = MAPPING.match(line)
        if found:
            start, end = (int(part, 16) for part in found.groups())
            inside = start < address + size and end > address
        elif inside and line.startswith("AnonHugePages:"):
            huge += int(line.split()[1]) * 1024
    return min(huge / size, 1.0)


def cpu_s() -> float:
    """CPU seconds of this process so far, user and system, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Engine:
    """A reading and a writing handle that share a page-locked buffer; a method for each kind of
    pass."""

    def __init__(
        self, parallel: int, buffer: torch.Tensor, handles: Sequence[Any], file: str
    ) -> None:
        self.parallel = parallel
        self.reader, self.writer = handles
        self.buffer = buffer
        self.file = file

    def check(self, results: Sequence[int]) -> None:
        """Exit if aio_handle has refused a request: it returns 0 for each that it accepts."""
        if any(result != 0 for result in results):
            raise SystemExit(f"aio_handle refused a request: it returned {list(results)}")

    def read(self) -> None:
        self.check([self.reader.async_pread(self.buffer, self.file, 0)])
        self.reader.wait()

    def write(self) -> None:
        self.check([self.writer.async_pwrite(self.buffer, self.file, 0)])
        self.writer.wait()

    def mixed(self) -> None:
        half = self.buffer.numel() // 2
        read = self.reader.async_pread(self.buffer[:half], self.file, 0)
        self.check([read, self.writer.async_pwrite(self.buffer[half:], self.file, half)])
        self.reader.wait()
        self.writer.wait()


def timed(work: Callable[[], None], size: int) -> dict[str, float]:
    """GB/s and CPU seconds per GB of one pass over `size` bytes."""
    before, start = cpu_s(), time.perf_counter()
    work()
    took = time.perf_counter() - start
    return {"gbps": size / took / 1e9, "cpu_s_per_gb": (cpu_s() - before) / size * 1e9}


def run(file: str, size: int, parallel: dict[str, list[int]], passes: int) -> dict[str, Any]:
    """Run `passes` passes of every kind and parallelism, alternating. Blocks until done."""
    library = AsyncIOBuilder().load(verbose=False)
    sizes = sorted({number for numbers in parallel.values() for number in numbers})

    def handle(number: int) -> Any:
        return library.aio_handle(BLOCK_BYTES, DEPTH, False, True, number)

    handles = {number: (handle(number), handle(number)) for number in sizes}
    owner = handles[sizes[0]][0]
    buffer = owner.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
    try:
        # Random, so that no drive can compress it. Filled before the clock starts: filling
        # allocates every page.
        buffer.random_(generator=torch.Generator().manual_seed(1))
        engines = {number: Engine(number, buffer, handles[number], file) for number in sizes}
        found: dict[str, dict[str, list[dict[str, float]]]] = {kind: {} for kind in KINDS}
        for _ in range(passes):
            for kind in KINDS:
                for number in parallel[kind]:
                    sample = timed(getattr(engines[number], kind), size)
                    found[kind].setdefault(str(number), []).append(sample)
        huge = huge_share(buffer.data_ptr(), size)
    finally:
        owner.free_cpu_locked_tensor(buffer)
    return {
        "arm": "deepspeed",
        "version": deepspeed.__version__,
        "huge_page_share": round(huge, 3),
        "passes": found,
    }


def numbers(text: str) -> list[int]:
    """ "1,2,4" as numbers."""
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--file", required=True, help="an existing file of --size bytes; its contents are lost"
    )
    parser.add_argument("--size", type=int, required=True, help="bytes of the file")
    parser.add_argument("--passes", type=int, default=1)
    for kind in KINDS:
        parser.add_argument(
            f"--{kind}",
            type=numbers,
            default=[1],
            help="values of intra_op_parallelism to try, as 1,2,4",
        )
    args = parser.parse_args()
    if os.stat(args.file).st_size != args.size:  # noqa: PTH116
        parser.error(f"{args.file} does not have {args.size} bytes")
    parallel = {kind: getattr(args, kind) for kind in KINDS}
    meter.report(run(args.file, args.size, parallel, args.passes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
