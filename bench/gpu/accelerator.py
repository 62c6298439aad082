"""The measured device: its description, matrix rate and bus bandwidth, and the results file.

Every script also accepts `--device cpu` and `--device simulated`, with small sizes: this only shows
that the script runs. "simulated" is the CPU, which the engine treats as a device with separate
memory (tests/device.py).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_path
import harness
import torch

DEVICES = ("cuda", "simulated", "cpu")
NOT_RUN = 3  # exit status
MATMUL_SIDE = {"cuda": 8192, "cpu": 256}
COPY_BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what all of them take."""
    parser.add_argument(
        "--device", default="cuda", choices=DEVICES, help="what computes (%(default)s)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=harness.RESULTS / "gpu" / "results.jsonl",
        help="file to append to (%(default)s)",
    )


class NotRun(Exception):
    """A script, or a part of it, cannot run here; the message says why."""


@contextlib.contextmanager
def computing(device: str) -> Iterator[str]:
    """Torch's name of the device. Inside, models that are offloaded compute on it. Raises: NotRun
    where there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise NotRun(
            "torch finds no CUDA device; --device cpu shows whether the script runs, on tiny sizes"
        )
    if device != "simulated":
        yield device
        return
    if str(bench_path.ROOT) not in sys.path:
        sys.path.append(str(bench_path.ROOT))
    import pytest

    from tests.device import simulated

    with pytest.MonkeyPatch.context() as patch, simulated(patch):
        yield "cpu"


def synchronise(device: str) -> None:
    """Return when all that was launched is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def clear(device: str) -> None:
    """Release unused memory, and reset the peaks."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: str) -> int:
    """The most device memory that tensors had since `clear`; 0 on the CPU."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def reserved_bytes(device: str) -> int:
    """The most that torch's allocator had from the driver since `clear`; 0 on the CPU."""
    return torch.cuda.max_memory_reserved() if device == "cuda" else 0


def memory_bytes(device: str) -> int:
    """All memory of the device."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return int(harness.machine()["memory_bytes"])


def describe(device: str) -> dict[str, Any]:
    """The device and what drives it."""
    found: dict[str, Any] = {"device": device, "torch": str(torch.__version__)}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": list(torch.cuda.get_device_capability(0)),
            "cuda": torch.version.cuda,
        }
    return found


def matmul_flops(device: str, *, rounds: int = 10) -> float:
    """FLOP/s of a square bf16 product of random matrices: what MFU is measured against. Blocks for
    less than a second.

    Random values, because a GPU multiplies zeros faster: its clock follows the power that the bits
    need.
    """
    side = MATMUL_SIDE[device]
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        left @ right
    synchronise(device)
    began = time.perf_counter()
    for _ in range(rounds):
        left @ right
    synchronise(device)
    return rounds * 2 * side**3 / (time.perf_counter() - began)


class PlainCopies:
    """Copies between pinned torch tensors and the device, each way on a separate stream, and
    nothing else.

    The bus bandwidth of the simplest program: cudaMemcpyAsync of large pieces, and one wait.
    """

    def __init__(self, device: str, *, piece_bytes: int = 0) -> None:
        self.device = device
        self.piece_bytes = piece_bytes or COPY_BYTES[device]
        shape, kind = (self.piece_bytes,), torch.uint8
        self._host = [torch.ones(shape, dtype=kind, pin_memory=device == "cuda") for _ in range(2)]
        self._there = [torch.ones(shape, dtype=kind, device=device) for _ in range(2)]
        self._streams = [torch.cuda.Stream() for _ in range(2)] if device == "cuda" else []

    def seconds(self, *, to_bytes: float, from_bytes: float) -> float:
        """Seconds that it takes to move so much each way, both at once. Blocks."""
        counts = [
            max(round(size / self.piece_bytes), 1) if size else 0 for size in (to_bytes, from_bytes)
        ]
        synchronise(self.device)
        began = time.perf_counter()
        for number in range(max(counts)):
            for way, count in enumerate(counts):
                if number < count:
                    self._copy(way)
        synchronise(self.device)
        taken = time.perf_counter() - began
        moved, wanted = sum(counts) * self.piece_bytes, to_bytes + from_bytes
        return taken * wanted / moved

    def _copy(self, way: int) -> None:
        source, target = (
            (self._host[0], self._there[0]) if way == 0 else (self._there[1], self._host[1])
        )
        if not self._streams:
            target.copy_(source)
            return
        with torch.cuda.stream(self._streams[way]):
            target.copy_(source, non_blocking=True)

    def rates(self, *, moved_bytes: float = 0.0) -> dict[str, float]:
        """Bytes per second to the device, from it, and of both together when both ways are busy."""
        size = moved_bytes or 16 * self.piece_bytes
        self.seconds(to_bytes=self.piece_bytes, from_bytes=self.piece_bytes)
        return {
            "to": size / self.seconds(to_bytes=size, from_bytes=0.0),
            "from": size / self.seconds(to_bytes=0.0, from_bytes=size),
            "both": 2 * size / self.seconds(to_bytes=size, from_bytes=size),
        }


def record(script: str, device: str, found: dict[str, Any], results: Path) -> None:
    """Append what was found, with what it was found on."""
    about = {
        "script": script,
        "run": harness.now(),
        "commit": harness.commit(),
        "machine": harness.machine(),
    }
    harness.append_line(results, {**about, "on": describe(device), **found})


def main(script: Any) -> int:
    """Run a script's main; errors that the user can fix are shown without a traceback."""
    try:
        return harness.run_main(script)
    except NotRun as why:
        note(f"NOT RUN: {Path(sys.argv[0]).name}: {why}")
        return NOT_RUN


def note(text: str) -> None:
    """Show progress on standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
