"""The device that computes: where gathered units live, and how bytes get there and back.

    CPU   device memory is the host's: the executor's threads copy, and gradients are added where they wait
    GPU   copies have streams of their own, in the executor (native/executor_device.c); host memory of copies is pinned

What computes is the current stream of torch at the time of a call; one stream at a time, as with FSDP2.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

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


class Device:
    """The device of one model. driver None: it is the CPU, and copies are the executor's own.

    stream: gives the handle of the stream that computes now.
    """

    def __init__(
        self, torch_device: torch.device, driver: DeviceDriver | None = None, *, stream: Callable[[], int] = lambda: 0
    ) -> None:
        self.torch_device = torch_device
        self.driver = driver
        self._stream = stream
        self._executor: Executor | None = None
        self._told = 0
        self._pool: Any = None
        if torch_device.type == "cuda":
            self._pool = torch.cuda.MemPool()

    @property
    def copies(self) -> bool:
        """Whether device memory is not host memory."""
        return self.driver is not None

    @property
    def mask(self) -> int:
        """What jobs have in their mask whose addresses are in device memory."""
        return MASK_DEVICE if self.copies else 0

    def attach(self, executor: Executor) -> None:
        """Let the executor copy to and from this device. Blocks while its slab is pinned. Raises: DeviceCopyError, ValueError."""
        self._executor = executor
        if self.driver is not None:
            executor.attach_device(self.driver)
            self._told = 0

    def behind(self) -> None:
        """Copies that are submitted from here on come behind the kernels that torch has launched so far. Never blocks."""
        if self.driver is None:
            return
        stream = self._stream()
        if stream != self._told:
            assert self._executor is not None
            self._executor.compute_stream(stream)
            self._told = stream

    def allocation(self) -> contextlib.AbstractContextManager[Any]:
        """Inside, torch's allocator takes memory from the gather buffers' own pool: among activations they would leave holes
        of sizes that nothing else fits into."""
        return contextlib.nullcontext() if self._pool is None else torch.cuda.use_mem_pool(self._pool, self.torch_device)

    def pin(self, slab: Slab) -> None:
        """Pin a slab, until `unpin` or `close`. Blocks. Raises: DeviceCopyError."""
        if self.driver is not None:
            self.driver.pin(slab.address, slab.size_bytes)

    def unpin(self, slab: Slab) -> None:
        """End what `pin` did, if it did."""
        if self.driver is not None:
            self.driver.unpin(slab.address)

    def copy(self, to: int, source: int, size_bytes: int, *, out: bool) -> Ticket:
        """Start copying pinned host memory to the device (out) or device memory to pinned host memory. Never blocks.

        Source and target must live until the ticket is `filled`.
        """
        assert self._executor is not None
        self.behind()
        job = np.zeros(1, dtype=JOB)
        job["kind"], job["chunk"], job["base"] = JobKind.COPY, -1, -1
        job["mask"] = MASK_DEVICE | (MASK_COPY_OUT if out else 0)
        job["ptr"][0, :3] = to, source, size_bytes
        return self._executor.submit(job, priority=Priority.DEMAND)

    def close(self) -> None:
        """Unpin everything. The executor must be closed."""
        if self.driver is not None:
            self.driver.close()
        self._pool = None


OFFLOADING_UNITS = 2
"""Fresh gradients of so many of the largest units may be on their way from the device; then backward waits."""


class GradOffload:
    """Gradients on their way from the device into host memory, while backward goes on. One thread uses it at a time.

    bytes_max: of gradients that may be held for that; then backward waits for the oldest.
    """

    def __init__(self, device: Device, bytes_max: int) -> None:
        self.device = device
        self._bytes_max = bytes_max
        self._flights: deque[tuple[Ticket, torch.Tensor]] = deque()
        self._bytes = 0
        self.bytes_peak = 0
        self.backwards = 0  # that have ended

    def copy_out(self, source: torch.Tensor, target: torch.Tensor) -> Ticket:
        """Start copying `source` (on the device) to `target` (pinned, contiguous), both of one dtype and size.

        Blocks while too much is on its way. `source` may be changed by nobody from here on.
        """
        source = source.detach().reshape(-1).contiguous()
        assert source.dtype is target.dtype
        assert source.numel() == target.numel()
        size_bytes = source.numel() * source.element_size()
        self._make_room(size_bytes)
        ticket = self.device.copy(target.data_ptr(), source.data_ptr(), size_bytes, out=False)
        self._flights.append((ticket, source))
        self._bytes += size_bytes
        self.bytes_peak = max(self.bytes_peak, self._bytes)
        return ticket

    def _make_room(self, size_bytes: int) -> None:
        self.free_done()
        while self._flights and self._bytes + size_bytes > self._bytes_max:
            ticket, source = self._flights[0]
            ticket.wait_filled()
            self._flights.popleft()
            self._free(source)

    def free_done(self) -> None:
        """Free what has arrived. Never blocks."""
        while self._flights and self._flights[0][0].filled:
            _, source = self._flights.popleft()
            self._free(source)

    def _free(self, source: torch.Tensor) -> None:
        """It has arrived: its memory is the allocator's again, for kernels that are launched from here on."""
        self._bytes -= source.numel() * source.element_size()

    def close(self) -> None:
        """Let go of what has arrived. Nothing may be under way."""
        self._flights.clear()
        self._bytes = 0


def compute_device(model: torch.nn.Module, wanted: Any) -> torch.device:
    """The device that computes: the one that is wanted, or where the model is.

    Raises: ValueError when it is none that the engine knows, or that is not there.
    """
    if wanted is not None:
        device = torch.device(wanted)
    else:
        parameters = {tensor.device for tensor in model.parameters() if not tensor.is_meta}
        devices = parameters or {tensor.device for tensor in model.buffers() if not tensor.is_meta}
        if len(devices) > 1:
            raise ValueError(
                f"the model's parameters are on {', '.join(sorted(map(str, devices)))}; an offloaded model computes on one "
                "device: name it with Policy(device=...)"
            )
        device = next(iter(devices), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the engine computes on 'cpu' and 'cuda' devices, not on {device}; move the model with model.to(...)")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r}: torch finds no CUDA device here; use device='cpu', or see `infinity doctor`")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def open_device(torch_device: torch.device) -> Device:
    """The device of that name. Raises: DeviceCopyError when its driver cannot be had."""
    if torch_device.type != "cuda":
        return Device(torch_device)
    index = torch_device.index if torch_device.index is not None else torch.cuda.current_device()
    there = torch.device("cuda", index)
    torch.cuda.init()
    return Device(there, DeviceDriver(index), stream=lambda: int(torch.cuda.current_stream(there).cuda_stream))
