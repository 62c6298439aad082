"""Tests the engine's assumptions about CUDA on this machine, without a model.

    versions     torch, CUDA, the driver, NCCL, Triton, numpy
    attributes   of the device, by the driver; 91 must be 1 for updates on the device to read
                 gradients where they are pinned
    pinning      seconds to pin, and to unpin, 1 and 16 GiB of a slab, where RAM has twice that left
    pinned read  a kernel reads pinned memory through the interface for foreign memory: bits equal
    copies       the driver's copies of 768 KiB (a chunk of parameters) and 8 MiB, one mark and one
                 event for each as the executor makes them, 1, 8 and 32 in flight, and without
                 events: GB/s, and microseconds of a blocking wait
    waiting      microseconds of a blocking wait for an event whose work was done long ago
    allocator    whether gather buffers get memory that torch has cached, under a limit of 2 GiB:
                 torch 2.10 to 2.12 are out of memory there, and the engine must retry

Each part is recorded when it ends. A failure does not stop the other parts; parts that need a GPU
report that. The simulated device runs the parts that call the driver, on small sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import importlib.metadata
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import accelerator
import torch

from infinity._src.memory.ledger import memory_left_bytes
from infinity.aio import DeviceDriver, Slab

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
ATTRIBUTES = {
    "can use host pointer for registered memory": 91,
    "host register supported": 99,
    "async engine count": 40,
    "unified addressing": 41,
    "can map host memory": 19,
    "pageable memory access": 88,
    "concurrent kernels": 31,
    "stream priorities supported": 78,
    "multiprocessors": 16,
    "compute mode": 20,
}
PACKAGES = ("torch", "triton", "numpy", "transformers", "cffi", "liburing", "accelerate", "peft")
EVENT_FLAGS = 1 | 2  # a blocking wait, without a time stamp: what the executor asks for
ATTEMPTS = 200


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements."""

    pin_bytes: tuple[int, ...]
    pieces: tuple[int, ...]
    total_bytes: int


SIZES = {
    "cuda": Sizes((GIB, 16 * GIB), (768 * KIB, 8 * MIB), GIB),
    "simulated": Sizes((MIB,), (16 * KIB, 64 * KIB), 512 * KIB),
}


class Gpu:
    """The driver, by name, with its context current."""

    def __init__(self, driver: DeviceDriver) -> None:
        self.driver = driver

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver. Raises: DeviceCopyError; NotRun without that function."""
        try:
            self.driver._call(name, *arguments)
        except AttributeError:
            raise accelerator.NotRun(f"this driver has no {name}") from None

    def make(self, name: str, flags: int) -> ctypes.c_void_p:
        """A new stream or event."""
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), ctypes.c_uint(flags))
        return made

    @contextlib.contextmanager
    def pinned(self, size_bytes: int) -> Iterator[Slab]:
        """A slab that is pinned."""
        slab = Slab(size_bytes)
        try:
            self.driver.pin(slab.address, slab.size_bytes)
            yield slab
        finally:
            self.driver.unpin(slab.address)
            slab.close()


def needs_cuda(device: str) -> None:
    """Raise NotRun without a real GPU."""
    if device != "cuda":
        raise accelerator.NotRun(f"a {device} device has nothing to ask")


# -- the parts -------------------------------------------------------------------------------------


def versions(device: str, _gpu: Gpu) -> dict[str, Any]:
    """Versions of all software that is used."""
    found: dict[str, Any] = {"python": platform.python_version(), "kernel": platform.release()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found["torch built for CUDA"] = torch.version.cuda
    if torch.version.cuda is not None:
        import torch.distributed as dist

        built = dist.is_available() and dist.is_nccl_available()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if built else "not built"
        found["cudnn"] = torch.backends.cudnn.version()
    if device == "cuda":
        found["allocator"] = torch.cuda.get_allocator_backend()
    return found


def attributes(device: str, gpu: Gpu) -> dict[str, Any]:
    """The driver's version, and what it says of the device."""
    needs_cuda(device)
    value, handle = ctypes.c_int(), ctypes.c_int()
    gpu.call("cuDriverGetVersion", ctypes.byref(value))
    found = {"driver version": value.value}
    gpu.call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(0))
    for name, number in ATTRIBUTES.items():
        gpu.call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), handle)
        found[f"{number} {name}"] = value.value
    return found


def pinning(device: str, gpu: Gpu) -> dict[str, Any]:
    """Seconds to pin and to unpin."""
    found = {}
    for size in SIZES[device].pin_bytes:
        left = memory_left_bytes()
        if left < 2 * size:
            found[f"{size / GIB:g} GiB"] = f"not tried: {left / GIB:.1f} GiB of RAM are left"
            continue
        slab = Slab(size)
        began = time.perf_counter()
        gpu.driver.pin(slab.address, size)
        pinned = time.perf_counter()
        gpu.driver.unpin(slab.address)
        found[f"{size / GIB:g} GiB pinned, s"] = pinned - began
        found[f"{size / GIB:g} GiB unpinned, s"] = time.perf_counter() - pinned
        slab.close()
    return found


class _Memory:
    """Bytes for torch to see as a tensor on the GPU, without a copy."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def pinned_read(device: str, gpu: Gpu) -> dict[str, Any]:
    """A kernel reads pinned memory of the host: the same bits as a copy of them."""
    needs_cuda(device)
    if not gpu.driver.host_pointers:
        # A kernel that did it all the same would end the context, and all parts after this one.
        raise accelerator.NotRun(
            "attribute 91 is 0: kernels cannot read pinned memory at its address here"
        )
    with gpu.pinned(64 * MIB) as slab:
        host = torch.frombuffer(slab.memory, dtype=torch.uint8)
        host.copy_(torch.randint(0, 256, (slab.size_bytes,), dtype=torch.uint8))
        there = torch.as_tensor(_Memory(slab.address, slab.size_bytes), device="cuda")
        read = there + 0
        torch.cuda.synchronize()
        assert there.data_ptr() == slab.address, "torch made a copy of it"
        assert torch.equal(read.cpu(), host), "a kernel read other bytes than the host wrote"
        began = time.perf_counter()
        for _ in range(4):
            there + 0
        torch.cuda.synchronize()
        rate = 4 * slab.size_bytes / (time.perf_counter() - began)
        # Views of a slab that is closed would be views of nothing.
        del host, there
    return {"bits": "equal", "read by a kernel, GB/s": rate / 1e9}


@dataclasses.dataclass
class Pipe:
    """Copies in one direction, on a separate stream."""

    gpu: Gpu
    stream: ctypes.c_void_p
    host: int
    there: int
    out: bool
    size_bytes: int

    def copy(self, start: int, size_bytes: int) -> None:
        """Submit a copy of a piece."""
        host, there = ctypes.c_void_p(self.host + start), ctypes.c_uint64(self.there + start)
        size = ctypes.c_size_t(size_bytes)
        if self.out:
            self.gpu.call("cuMemcpyHtoDAsync_v2", there, host, size, self.stream)
        else:
            self.gpu.call("cuMemcpyDtoHAsync_v2", host, there, size, self.stream)

    def run(self, piece_bytes: int, in_flight: int) -> tuple[float, float]:
        """Seconds for all of it in pieces, and microseconds of a wait. in_flight 0: no events."""
        gpu, waits = self.gpu, []
        mark = gpu.make("cuEventCreate", EVENT_FLAGS)
        free = [gpu.make("cuEventCreate", EVENT_FLAGS) for _ in range(in_flight)]
        under_way: deque[ctypes.c_void_p] = deque()
        gpu.call("cuStreamSynchronize", self.stream)
        began = time.perf_counter()
        for start in range(0, self.size_bytes - piece_bytes + 1, piece_bytes):
            if in_flight:
                if not free:
                    waits.append(self._wait(under_way[0]))
                    free.append(under_way.popleft())
                gpu.call("cuEventRecord", mark, None)
                gpu.call("cuStreamWaitEvent", self.stream, mark, ctypes.c_uint(0))
            self.copy(start, piece_bytes)
            if in_flight:
                event = free.pop()
                gpu.call("cuEventRecord", event, self.stream)
                under_way.append(event)
        gpu.call("cuStreamSynchronize", self.stream)
        taken = time.perf_counter() - began
        for event in [mark, *free, *under_way]:
            gpu.call("cuEventDestroy_v2", event)
        return taken, 1e6 * sum(waits) / len(waits) if waits else 0.0

    def _wait(self, event: ctypes.c_void_p) -> float:
        began = time.perf_counter()
        self.gpu.call("cuEventSynchronize", event)
        return time.perf_counter() - began


def copies(device: str, gpu: Gpu) -> dict[str, Any]:
    """Rates by size, way and number in flight."""
    sizes, rows = SIZES[device], []
    torch_name = "cuda" if device == "cuda" else "cpu"
    there = torch.ones(sizes.total_bytes, dtype=torch.uint8, device=torch_name)
    accelerator.synchronise(torch_name)
    with gpu.pinned(sizes.total_bytes) as slab, gpu.driver._current():
        stream = gpu.make("cuStreamCreate", 1)
        for out in (True, False):
            pipe = Pipe(gpu, stream, slab.address, there.data_ptr(), out, sizes.total_bytes)
            pipe.run(max(sizes.pieces), 0)  # the first copies set things up
            for piece in sizes.pieces:
                for in_flight in (1, 8, 32, 0):
                    taken, wait_us = pipe.run(piece, in_flight)
                    moved = sizes.total_bytes // piece * piece
                    rows.append(
                        {
                            "way": "to" if out else "from",
                            "piece_kib": piece // KIB,
                            "in_flight": in_flight or "no events",
                            "gbps": round(moved / taken / 1e9, 2),
                            "us_per_copy": round(1e6 * taken / (moved / piece), 1),
                            "us_per_wait": round(wait_us, 1),
                        }
                    )
        gpu.call("cuStreamDestroy_v2", stream)
    return {"rows": rows}


def waiting(_device: str, gpu: Gpu) -> dict[str, Any]:
    """Microseconds of the calls that surround a copy, with nothing to wait for."""
    found = {}
    with gpu.driver._current():
        stream = gpu.make("cuStreamCreate", 1)
        event = gpu.make("cuEventCreate", EVENT_FLAGS)
        for name, action in (
            ("record, us", lambda: gpu.call("cuEventRecord", event, stream)),
            (
                "stream waits for it, us",
                lambda: gpu.call("cuStreamWaitEvent", stream, event, ctypes.c_uint(0)),
            ),
            ("blocking wait for what is done, us", lambda: gpu.call("cuEventSynchronize", event)),
        ):
            action()
            gpu.call("cuStreamSynchronize", stream)
            began = time.perf_counter()
            for _ in range(ATTEMPTS):
                action()
            found[name] = round(1e6 * (time.perf_counter() - began) / ATTEMPTS, 2)
        gpu.call("cuEventDestroy_v2", event)
        gpu.call("cuStreamDestroy_v2", stream)
    return found


def allocator(device: str, _gpu: Gpu) -> dict[str, Any]:
    """Try whether a separate pool gets memory that torch has cached and no tensor uses."""
    needs_cuda(device)
    limit, size = 2 * GIB, 3 * GIB // 2
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / accelerator.memory_bytes("cuda"))
    pool, found = torch.cuda.MemPool(), {}
    try:
        cached = torch.empty(size, dtype=torch.uint8, device="cuda")
        del cached  # torch keeps the memory
        for name in ("at once", "after empty_cache()"):
            try:
                with torch.cuda.use_mem_pool(pool):
                    made = torch.empty(size, dtype=torch.uint8, device="cuda")
                del made
                found[name] = "allocated"
            except torch.OutOfMemoryError:
                found[name] = "OutOfMemoryError"
            torch.cuda.empty_cache()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        del pool
        torch.cuda.empty_cache()
    return found


PARTS: dict[str, Callable[[str, Gpu], dict[str, Any]]] = {
    "versions": versions,
    "attributes": attributes,
    "pinned read": pinned_read,
    "waiting": waiting,
    "copies": copies,
    "allocator": allocator,
    "pinning": pinning,  # last: a machine whose memory grows as it is used may end the process
}


def open_gpu(device: str) -> Gpu:
    """The driver of the device."""
    if device == "cuda":
        torch.cuda.init()
        torch.ones(1, device="cuda")
        return Gpu(DeviceDriver(0))
    from tests.simulated import library  # `computing` has made it importable

    return Gpu(DeviceDriver(0, library()))


def probe(device: str, parts: list[str], record: Callable[[dict[str, Any]], None]) -> list[str]:
    """Run the parts; returns how each ended: "", "failed" or "not run"."""
    gpu, ends = open_gpu(device), []
    for name in parts:
        began = time.perf_counter()
        found: dict[str, Any] = {"part": name}
        try:
            found["found"] = PARTS[name](device, gpu)
        except accelerator.NotRun as why:
            found["not_run"] = str(why)
            accelerator.note(f"NOT RUN: probe/{name}: {why}")
        except Exception as error:  # noqa: BLE001 - it is recorded, shown, and the status tells
            found["failed"] = f"{type(error).__name__}: {error}"
            accelerator.note(f"probe/{name} FAILED: {found['failed']}")
        found["seconds"] = round(time.perf_counter() - began, 3)
        record(found)
        show(found)
        ends.append("failed" if "failed" in found else "not run" if "not_run" in found else "")
    return ends


def show(found: dict[str, Any]) -> None:
    """Print the results."""
    lines = [f"{found['part']} ({found['seconds']} s)"]
    values = dict(found.get("found", {}))
    lines += [
        "  " + "  ".join(f"{k} {v}" for k, v in row.items()) for row in values.pop("rows", [])
    ]
    lines += [f"  {name}: {value}" for name, value in values.items()]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    accelerator.add_arguments(parser)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    if args.device == "cpu":
        raise accelerator.NotRun("the CPU has no driver to ask; --device simulated has one")
    with accelerator.computing(args.device):
        ends = probe(
            args.device,
            args.parts,
            lambda found: accelerator.record("probe", args.device, found, args.results),
        )
    return 1 if "failed" in ends else accelerator.NOT_RUN if "not run" in ends else 0


if __name__ == "__main__":
    sys.exit(accelerator.main(main))
