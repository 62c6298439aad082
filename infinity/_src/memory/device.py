"""The device that computes: memory of gathered units, and copies to it (H2D) and from it (D2H).

    CPU   device memory is the host's: executor threads copy, and gradients are added in place
    GPU   copies use separate streams in the executor (native/executor/device.c); their host memory
          is pinned

The compute stream is torch's current stream at the time of a call. If a unit's memory was allocated
under one stream and is used under another, torch's allocator is notified (`note_use`).

All calls name the model's device, because the thread's current device may be a different one.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from infinity._src.base.progress import ProgressLine
from infinity._src.base.torch_compat import make_mem_pool
from infinity._src.base.torch_device import on_device
from infinity.aio import (
    JOB,
    MASK_COPY_OUT,
    MASK_DEVICE,
    DeviceDriver,
    Executor,
    JobKind,
    Priority,
    Slab,
    Ticket,
)
from infinity.errors import GraphCaptureUnsupported

ItemT = TypeVar("ItemT")


class Device:
    """Device of one model.

    driver: None for the CPU, where the executor's threads copy.
    stream: returns the handle of the current compute stream.
    check: raises once another rank is known to have failed.
    """

    def __init__(
        self,
        torch_device: torch.device,
        driver: DeviceDriver | None = None,
        *,
        stream: Callable[[], int] = lambda: 0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.torch_device = torch_device
        self.driver = driver
        self._stream = stream
        self._check = check
        self._executor: Executor | None = None
        self._last_stream = 0
        self._pool: Any = None
        # Other allocators, such as cudaMallocAsync, refuse pools.
        if self._on_gpu and torch.cuda.get_allocator_backend() == "native":
            # A pool belongs to the device that is current at its creation.
            with on_device(torch_device):
                # Without a separate pool, gather buffers between activations fragment the memory.
                self._pool = make_mem_pool()

    @property
    def copies(self) -> bool:
        """True where device memory is not host memory."""
        return self.driver is not None

    @property
    def _on_gpu(self) -> bool:
        """True if torch's CUDA allocator allocates the memory; not for a simulated device."""
        return self.torch_device.type == "cuda"

    @property
    def stream(self) -> int:
        """Handle of the current compute stream; 0 on a device without streams."""
        return self._stream()

    @property
    def mask(self) -> int:
        return MASK_DEVICE if self.copies else 0

    def attach(self, executor: Executor) -> None:
        """Attach the device to the executor for copies. Blocks while its slab is pinned.

        Raises: DeviceCopyError, ValueError.
        """
        self._executor = executor
        if self.driver is not None:
            executor.attach_device(self.driver)
            # The executor is new, and no compute stream has been set on it.
            self._last_stream = 0

    def behind(self) -> None:
        """Make copies that are submitted later run after the kernels launched so far. Never blocks.
        Raises: GraphCaptureUnsupported."""
        if self.driver is None:
            return
        # The event that `compute_stream` records would pull the copy streams into the graph.
        self.refuse_capture("a copy between host and device")
        stream = self._stream()
        # Only if the stream has changed: this runs before every submission of copies.
        if stream != self._last_stream:
            assert self._executor is not None
            self._executor.compute_stream(stream)
            self._last_stream = stream

    def check_host_pointers(self) -> None:
        """Raise ValueError where kernels cannot read pinned host memory. Updates on the device read
        their gradients there."""
        if self.driver is not None and not self.driver.host_pointers:
            raise ValueError(
                f"update_on='device': kernels of {self.torch_device} cannot read pinned memory of "
                "the host at its own address (its driver says 0 for "
                "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM), and gradients wait there; use "
                "update_on='cpu'"
            )

    def allocation(self) -> contextlib.AbstractContextManager[Any]:
        """Make torch's allocator use the pool of gather buffers inside this context."""
        return (
            contextlib.nullcontext()
            if self._pool is None
            else torch.cuda.use_mem_pool(self._pool, self.torch_device)
        )

    def free_cache(self) -> None:
        """Return the unused memory that torch has cached to the device. Blocks until the device's
        kernels have ended."""
        if self._on_gpu:
            torch.cuda.empty_cache()

    def allocated_bytes(self) -> int:
        """Return the bytes of all tensors in torch's CUDA allocator; 0 for other devices."""
        return int(torch.cuda.memory_allocated(self.torch_device)) if self._on_gpu else 0

    def free_bytes(self) -> int | None:
        """Return the bytes that new tensors may take, including torch's cache; None where device
        memory is host memory."""
        if not self._on_gpu:
            return None
        cached = torch.cuda.memory_reserved(self.torch_device) - self.allocated_bytes()
        return int(torch.cuda.mem_get_info(self.torch_device)[0]) + cached

    def note_use(self, tensor: torch.Tensor) -> None:
        """Tell torch's allocator that the current stream uses memory that was allocated under
        another stream. Once freed, the memory is reused only after the present work of this stream.
        """
        if self._on_gpu:
            tensor.record_stream(torch.cuda.current_stream(self.torch_device))

    def refuse_capture(self, what: str) -> None:
        """Raise where the current stream captures a CUDA graph. Raises: GraphCaptureUnsupported."""
        if not self._on_gpu:
            return
        with on_device(self.torch_device):
            capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            raise GraphCaptureUnsupported(
                f"{what} while {self.torch_device} captures a CUDA graph: a graph replays the "
                "addresses that it has seen, and offloaded parameters get others with each gather; "
                "run the offloaded model outside of torch.cuda.graph() and "
                "torch.cuda.make_graphed_callables()"
            )

    def pin(self, slab: Slab) -> None:
        """Pin a slab, until `unpin` or `close`. Blocks. Raises: DeviceCopyError."""
        if self.driver is not None:
            self.driver.pin(slab.address, slab.size_bytes)

    def pin_all(self, slabs: Sequence[Slab], *, shown: bool) -> None:
        """Pin slabs as `pin` does. shown: show progress, since a driver may take 0.1 s per GB."""
        if self.driver is None:
            return
        total = sum(slab.size_bytes for slab in slabs)
        with ProgressLine("pinning memory", total, shown=shown) as line:
            for slab in slabs:
                self.pin(slab)
                line.advance(slab.size_bytes)

    def unpin(self, slab: Slab) -> None:
        if self.driver is not None:
            self.driver.unpin(slab.address)

    def copy(self, to: int, source: int, size_bytes: int, *, out: bool) -> Ticket:
        """Start a copy H2D (out) or D2H, from or to pinned host memory. Never blocks.

        Source and target must live until the ticket is `filled`.
        """
        assert self._executor is not None
        # The copy runs after the kernels that write the source, or read the target.
        self.behind()
        job = np.zeros(1, dtype=JOB)
        job["kind"], job["chunk"], job["base"] = JobKind.COPY, -1, -1
        # "Out" is out of the executor, to the device.
        job["mask"] = MASK_DEVICE | (MASK_COPY_OUT if out else 0)
        job["ptr"][0, :3] = to, source, size_bytes
        return self._executor.submit(job, priority=Priority.DEMAND)

    def wait_filled(self, ticket: Ticket) -> None:
        """Block until a ticket of copies is `filled`.

        The copies run after kernels, and these may run after a collective that waits for another
        rank. Raises: AioError; RankFailed as soon as a rank is known to have failed; then the copy
        may still be in flight.
        """
        ticket.wait_filled(check=self._check)

    def close(self) -> None:
        """Unpin everything. The executor must be closed."""
        if self.driver is not None:
            self.driver.close()
        self._pool = None


class GradOffload:
    """Offload of gradients D2H while backward continues. One thread uses it at a time.

    bytes_max: device memory of gradients in flight. Beyond that backward waits for the oldest copy.
    A gradient larger than this is copied alone.
    """

    def __init__(self, device: Device, bytes_max: int) -> None:
        self.device = device
        self._bytes_max = bytes_max
        self._flights: deque[tuple[Ticket, torch.Tensor]] = deque()
        self.leaving_bytes = 0
        self.bytes_peak = 0
        self.backward_count = 0  # backwards that have ended

    def copy_out(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        """Start the copy D2H of `source` to `target` (pinned, contiguous), of the same dtype and
        size.

        Blocks while more than `bytes_max` would be in flight. `source` must not change afterwards.
        """
        # The copy moves bytes: shape and strides must be those of the flat target.
        source = source.detach().reshape(-1).contiguous()
        assert source.dtype is target.dtype
        assert source.numel() == target.numel()
        size_bytes = source.numel() * source.element_size()
        self._await_capacity(size_bytes)
        ticket = self.device.copy(target.data_ptr(), source.data_ptr(), size_bytes, out=False)
        # Keep the source until its copy has ended: autograd may drop it earlier.
        self._flights.append((ticket, source))
        self.leaving_bytes += size_bytes
        self.bytes_peak = max(self.bytes_peak, self.leaving_bytes)
        return ticket

    def _await_capacity(self, size_bytes: int) -> None:
        self.free_done()
        while self._flights and self.leaving_bytes + size_bytes > self._bytes_max:
            ticket, source = self._flights[0]
            self.device.wait_filled(ticket)
            self._flights.popleft()
            self._free(source)

    def free_done(self) -> None:
        """Free the device memory of copies that are done. Never blocks."""
        while self._flights and self._flights[0][0].filled:
            _, source = self._flights.popleft()
            self._free(source)

    def _free(self, source: torch.Tensor) -> None:
        """Count a source as freed. The caller drops its last reference: the copy, on another
        stream, has ended, so the allocator may reuse the memory."""
        self.leaving_bytes -= source.numel() * source.element_size()

    def close(self) -> None:
        """Drop all sources. No copy may be in flight."""
        self._flights.clear()
        self.leaving_bytes = 0


def check_current(device: torch.device) -> None:
    """Raise ValueError unless the model's device is the thread's current one. Several ranks need
    this."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return
    current = torch.device("cuda", torch.cuda.current_device())
    raise ValueError(
        f"the model computes on {device}, and the current CUDA device of this rank is {current}: "
        f"collectives and kernels that name no device would run on {current}, which belongs to "
        "another rank; call torch.cuda.set_device(local_rank) before the model is built, here "
        f"torch.cuda.set_device({device.index})"
    )


def rocm_lacks() -> str:
    """Describe what the engine lacks for AMD's GPUs, which torch calls CUDA devices; empty where
    torch is built for NVIDIA's.
    """
    if torch.version.hip is None:
        return ""
    return (
        f"torch {torch.__version__} is built for AMD's GPUs (ROCm {torch.version.hip}), and the "
        "engine has copies for NVIDIA's driver only (libcuda.so.1)"
    )


def compute_device(model: torch.nn.Module, wanted: Any) -> torch.device:
    """Choose the device that computes: the wanted one, or the model's.

    Raises: ValueError for a kind of device that the engine does not know, or one that is missing.
    """
    if wanted is not None:
        device = torch.device(wanted)
    else:
        parameters = {tensor.device for tensor in model.parameters() if not tensor.is_meta}
        devices = parameters or {tensor.device for tensor in model.buffers() if not tensor.is_meta}
        if len(devices) > 1:
            raise ValueError(
                f"the model's parameters are on {', '.join(sorted(map(str, devices)))}; an "
                "offloaded model computes on one device: name it with Policy(device=...)"
            )
        device = next(iter(devices), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"the engine computes on 'cpu' and 'cuda' devices, not on {device}; move the model "
            "with model.to(...)"
        )
    lacking = rocm_lacks() if device.type == "cuda" else ""
    if lacking:
        raise ValueError(f"device={str(device)!r}: {lacking}; use device='cpu'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={str(device)!r}: torch finds no CUDA device here; use device='cpu', or see "
            "`infinity doctor`"
        )
    # With the index, so that two names of one device compare equal.
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def open_device(torch_device: torch.device, *, check: Callable[[], None]) -> Device:
    """Open a device, with the driver for its copies. Raises: DeviceCopyError without the driver.

    check: as in `Device`.
    """
    if torch_device.type != "cuda":
        return Device(torch_device, check=check)
    index = torch_device.index if torch_device.index is not None else torch.cuda.current_device()
    there = torch.device("cuda", index)
    torch.cuda.init()
    return Device(
        there,
        DeviceDriver(index),
        stream=lambda: int(torch.cuda.current_stream(there).cuda_stream),
        check=check,
    )


def split_by_size(
    items: Sequence[ItemT], bytes_of: Callable[[ItemT], int], bytes_max: int
) -> list[list[ItemT]]:
    """Split items, in order, into runs of `bytes_max` at most. A larger item gets a separate run;
    items of 0 bytes join the current run.
    """
    runs: list[list[ItemT]] = []
    used = 0
    for item in items:
        size = bytes_of(item)
        if not runs or (size and used and used + size > bytes_max):
            runs.append([])
            used = 0
        runs[-1].append(item)
        used += size
    return runs


def make_slabs(sizes: Sequence[int], *, shown: bool) -> list[Slab]:
    """Make slabs of these sizes. Blocks while their pages are touched. shown: show progress.

    Raises: MemoryError; then none is made.
    """
    made: list[Slab] = []
    with ProgressLine("allocating memory", sum(sizes), shown=shown) as line:
        try:
            # `extend` with a generator appends one by one, so that an error closes earlier slabs.
            made.extend(Slab(size, progress=line.advance) for size in sizes)
        except BaseException:
            for slab in made:
                slab.close()
            raise
    return made
