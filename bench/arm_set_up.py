"""Measures one set-up (`inf.offload`) in a fresh process, or a limit of it; prints one JSON line.

    write         write a file of the model's weights, which the others read
    offload       the engine on NVMe, with values from that file, or of a module in RAM
    limit         the parameters' chunks alone, written by the engine's executor from a few buffers
                  to new places, as far apart as those of set-up
    load_file     the weights in RAM, by safetensors' load_file

compare_versions.py starts each arm as a separate process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meter
import numpy as np
import r1
import torch
from safetensors.torch import load_file, save_file

import infinity as inf
from infinity import aio
from infinity._src.cabi.records import CHUNK_BYTES, CHUNK_NUMEL
from infinity._src.measure.streams import Chunks, Streams

BUFFERS = 8


def write(file: Path, workload: r1.Workload) -> None:
    """Write random weights, and sync them."""
    block = torch.randn(workload.largest_parameter).bfloat16()
    shapes = r1.build_on_meta(workload).state_dict().items()
    save_file(
        {name: block[: like.numel()].clone().view(like.shape) for name, like in shapes}, file
    )
    with file.open("rb") as target:
        os.fsync(target.fileno())


def in_cache(file: Path, *, cached: bool) -> None:
    """Read a file into the page cache, or drop it from there."""
    with file.open("rb") as source:
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while cached and source.read(16 << 20):
            pass


def offload(args: argparse.Namespace, workload: r1.Workload) -> Callable[[], object]:
    """Build the model of the case. Returns the call that offloads it."""
    policy = inf.Policy(params="nvme", optim="nvme", nvme=args.dir, ram="min")
    model = r1.build_on_meta(workload)
    if args.case in ("cached", "dropped"):
        return lambda: inf.offload(model, policy, load=args.file)
    values = {name: value.clone() for name, value in load_file(args.file).items()}
    if args.case == "mapping":
        return lambda: inf.offload(model, policy, load=values)
    if args.case == "function":
        return lambda: inf.offload(model, policy, load=lambda name, out: out.copy_(values[name]))
    model.load_state_dict(values, assign=True)
    return lambda: inf.offload(model, policy)


def limit(
    workload: r1.Workload, directory: Path, stack: contextlib.ExitStack
) -> Callable[[], object]:
    """Make the chunks. Returns the call that writes them."""
    file = aio.SwapFile.create(directory)
    stack.callback(file.close)
    size, count = 2 * CHUNK_NUMEL, -(-workload.parameters // CHUNK_NUMEL)
    # With space for the states of AdamW.
    places = np.arange(count, dtype=np.int64) * CHUNK_BYTES
    chunks = Chunks([file], count, chunk_bytes=size, offsets=places)
    streams = Streams(chunks, block_bytes=None, depth=32, backend="auto", verify="full")
    stack.enter_context(streams)
    memory = stack.enter_context(aio.Slab(BUFFERS * size))
    memory.array(np.uint8)[:] = np.random.default_rng(0).integers(0, 256, BUFFERS * size)
    (jobs,) = streams.jobs(
        aio.JobKind.STORE, pointers=[memory.address + index * size for index in range(BUFFERS)]
    )
    return lambda: streams.executor.submit(jobs, priority=aio.Priority.DEMAND).wait()


def timed(call: Callable[[], object]) -> dict[str, Any]:
    """Call, and return seconds, CPU seconds, page faults and bytes."""
    os.sync()
    meter.reset_peak_rss()
    rss, moved = meter.rss_bytes(), meter.io_bytes()
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    kept = call()
    took, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    read, written = (b - a for a, b in zip(moved, meter.io_bytes(), strict=True))
    del kept
    return {
        "s": took,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "faults": after.ru_minflt - before.ru_minflt,
        "read_bytes": read,
        "written_bytes": written,
        "peak_rss_bytes": meter.peak_rss_bytes() - rss,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, required=True, help="swap directory")
    parser.add_argument("--file", type=Path, required=True, help="the model's weights")
    parser.add_argument(
        "--arm", choices=("write", "offload", "limit", "load_file"), default="offload"
    )
    parser.add_argument(
        "--case",
        choices=("cached", "dropped", "module", "mapping", "function"),
        default="cached",
        help="where the values are: a file in the page cache or only on the drive, or RAM; there a "
        "module has them, a mapping, or a function that fills tensors",
    )
    r1.add_arguments(parser)
    args = parser.parse_args()
    workload = r1.from_arguments(args)
    with contextlib.ExitStack() as stack:
        if args.arm == "write":
            write(args.file, workload)
            return 0
        call: Callable[[], object]
        if args.arm == "limit":
            call = limit(workload, args.dir, stack)
        elif args.arm == "offload":
            call = offload(args, workload)
        else:
            call = lambda: [value.clone() for value in load_file(args.file).values()]  # noqa: E731
        in_cache(args.file, cached=args.case != "dropped")
        meter.report(timed(call))
    return 0


if __name__ == "__main__":
    sys.exit(main())
