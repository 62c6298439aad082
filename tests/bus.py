"""Detects copies between host and device that bypass the executor.

On a simulated device both memories are the host's, so nothing but the program tells them apart. In
the engine's code host memory is a slab, or made without a device or with "cpu" by name; what is
made on a `torch.device`, and all that autograd makes, is the device's. The watch sees each call of
torch that the engine makes, in every thread, and finds those that would use the bus on a GPU:

    copies     between the two, by `copy_`, `to`, `tensor(..., device=...)` or an index of numbers
    reads      of a device tensor's values by Python, which wait for all kernels before them
    kernels    that are given host memory, which they would read over the bus, or refuse

Copies by the executor are no calls of torch. The simulated driver sees them, and takes host memory
that is not pinned for a fault (`Simulated.races`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

import infinity
from infinity._src.memory.device import Device
from infinity._src.params.accumulator import GradProxy
from infinity._src.params.unshard import Unsharder
from infinity.aio import Slab

ENGINE = str(Path(infinity.__file__).parent)
TORCH = str(Path(torch.__file__).parent)
READS = {
    "item", "tolist", "numpy", "__array__", "equal", "allclose", "nonzero",
    "__float__", "__int__", "__bool__", "__index__",
}  # fmt: skip
"""Functions that return a tensor's values to Python."""
KERNELS = {"kernels/update.py: run"}
"""Functions whose kernels read pinned memory by its address."""
_UNSEEN = {"__get__", "__set__", "data_ptr", "untyped_storage", "is_pinned", "backward"}


@dataclasses.dataclass(frozen=True)
class Crossing:
    """Use of the bus past the executor.

    where: file and function of the engine. what: "copy", "read" or "kernel", and torch's function.
    pinned: whether the host memory is. waits: whether the thread waits for the device.
    in_comm_stream: not on the training thread.
    """

    where: str
    what: str
    pinned: bool
    waits: bool
    in_comm_stream: bool

    @property
    def smooth(self) -> bool:
        """True if it stalls nothing: an asynchronous copy of pinned memory, on a communication
        stream's CUDA stream."""
        copies = self.what.startswith("copy") and self.pinned
        return copies and not self.waits and self.in_comm_stream


class Bus:
    """The detected crossings, and the known host memory."""

    def __init__(self) -> None:
        self.found: Counter[Crossing] = Counter()
        self.training = False  # from the first forward on
        self._lock = threading.Lock()
        self._slabs: dict[int, int] = {}
        self._pinned: dict[int, int] = {}
        self._host: dict[int, StorageWeakRef] = {}
        self._main = threading.get_ident()

    def slab(self, slab: Slab) -> None:
        """Record a slab as host memory."""
        self._slabs[slab.address] = slab.size_bytes

    def freed(self, slab: Slab) -> None:
        """Forget a slab."""
        self._slabs.pop(slab.address, None)

    def pin(self, slab: Slab) -> None:
        """Record a slab as pinned."""
        self._pinned[slab.address] = slab.size_bytes

    def unpin(self, slab: Slab) -> None:
        """Record a slab as pageable again."""
        self._pinned.pop(slab.address, None)

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory is the host's."""
        return (
            _inside(self._slabs, tensor.data_ptr())
            or tensor.untyped_storage()._cdata in self._host
        )

    def made(self, tensor: torch.Tensor) -> None:
        """Record the memory of a new tensor as the host's."""
        storage = tensor.untyped_storage()
        # Weak, and kept: no other storage gets this address as long as the reference lives.
        self._host[storage._cdata] = StorageWeakRef(storage)

    def crossed(self, name: str, where: str, host: list[torch.Tensor], *, waits: bool) -> None:
        """Note a crossing."""
        pinned = bool(host) and all(_inside(self._pinned, one.data_ptr()) for one in host)
        if self.training:
            in_comm_stream = threading.get_ident() != self._main
            with self._lock:
                self.found[Crossing(where, name, pinned, waits, in_comm_stream)] += 1

    def saw(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Examine a call of torch that has returned."""
        name = getattr(func, "__name__", str(func))
        where = _caller()
        if where is None or name in _UNSEEN:
            return
        given = _tensors((args, kwargs))
        host = [one for one in given if self.is_host(one)]
        there = [one for one in given if not self.is_host(one)]
        wanted = kwargs.get("device")
        if wanted is None and name == "to":
            wanted = next((arg for arg in args[1:] if isinstance(arg, (str, torch.device))), None)
        to_device = isinstance(wanted, torch.device) and wanted.type != "meta"
        # A GPU's kernel makes it from an address, which is the host's.
        to_device = to_device or where in KERNELS
        to_host = name == "cpu" or (isinstance(wanted, str) and wanted == "cpu")
        waits = not kwargs.get("non_blocking", False)
        if name == "tensor" and to_device:
            self.crossed("copy: tensor", where, [], waits=True)
        elif name == "to" and to_device and host:
            self.crossed("copy: to the device", where, host, waits=waits)
        elif to_host and there:
            self.crossed("copy: to the host", where, [], waits=waits)
        elif name == "copy_" and host and there:
            self.crossed("copy: copy_", where, host, waits=waits)
        elif name in READS and there:
            self.crossed(f"read: {name}", where, [], waits=True)
        elif name in ("__getitem__", "__setitem__") and there and isinstance(args[1], list):
            self.crossed("copy: indices", where, [], waits=True)
        elif there and any(one.dim() for one in host):
            self.crossed(f"kernel: {name}", where, host, waits=False)
        if to_host or not (to_device or there):
            for one in _tensors(result):
                # `to` returns the tensor itself where nothing is to be done: simulated devices.
                if not any(_same(one, other) for other in there):
                    self.made(one)


class _Watch(TorchFunctionMode):
    def __init__(self, bus: Bus) -> None:
        super().__init__()
        self._bus = bus

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._bus.saw(func, args, kwargs or {}, result)
        return result


@contextlib.contextmanager
def watched() -> Iterator[Bus]:
    """Watch the bus inside. Enter it before the simulated device, and offload inside."""
    bus, patch = Bus(), pytest.MonkeyPatch()
    made, freed, pin, unpin = Slab.__init__, Slab.close, Device.pin, Device.unpin
    run, dispatch = threading.Thread.run, GradProxy.__torch_dispatch__
    backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    forward = Unsharder.forward_start

    def slab_made(self: Slab, size_bytes: int, **more: Any) -> None:
        made(self, size_bytes, **more)
        bus.slab(self)

    def slab_freed(self: Slab) -> None:
        bus.freed(self)
        freed(self)

    def pinned(self: Device, slab: Slab) -> None:
        pin(self, slab)
        bus.pin(slab)

    def unpinned(self: Device, slab: Slab) -> None:
        bus.unpin(slab)
        unpin(self, slab)

    def ran(self: threading.Thread) -> None:
        with _Watch(bus):
            run(self)

    def dispatched(cls: Any, *args: Any, **kwargs: Any) -> Any:
        with _Watch(bus):
            return dispatch(*args, **kwargs)

    def went_back(*args: Any, **kwargs: Any) -> Any:
        # The watch is off in a call that it looks at, and a backward has the engine's hooks.
        with _Watch(bus):
            return backward(*args, **kwargs)

    def begins(self: Unsharder) -> None:
        bus.training = True
        forward(self)

    patch.setattr(Slab, "__init__", slab_made)
    patch.setattr(Slab, "close", slab_freed)
    patch.setattr(Device, "pin", pinned)
    patch.setattr(Device, "unpin", unpinned)
    patch.setattr(threading.Thread, "run", ran)
    patch.setattr(GradProxy, "__torch_dispatch__", classmethod(dispatched))
    patch.setattr(torch.autograd, "_engine_run_backward", went_back)
    patch.setattr(Unsharder, "forward_start", begins)
    try:
        with _Watch(bus):
            yield bus
    finally:
        patch.undo()


def _inside(ranges: dict[int, int], address: int) -> bool:
    return any(low <= address < low + size for low, size in list(ranges.items()))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _tensors(values: Any) -> list[torch.Tensor]:
    """The tensors with memory among nested values."""
    if isinstance(values, torch.Tensor):
        # Subclasses of the engine have no storage, and say so.
        plain = type(values).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        if isinstance(values, GradProxy) or not plain or values.is_meta or not values.numel():
            return []
        return [values] if values.untyped_storage().nbytes() else []
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        return [one for value in values for one in _tensors(value)]
    return []


def _caller() -> str | None:
    """File and function of the engine that called torch; None for other callers."""
    frame = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or not frame.f_code.co_filename.startswith(ENGINE):
        return None
    path = Path(frame.f_code.co_filename).relative_to(ENGINE).as_posix()
    return f"{path.removeprefix('_src/')}: {frame.f_code.co_name}"


ALLOWED: dict[str, str] = {
    "params/accumulator.py: read_device_norms": "norms, one read for all, when the loop asks",
    "params/accumulator.py: factor": "the factor of clipping, made of these norms, once a step",
    "params/accumulator.py: _foreach_norm": "norms as the loop wants them, when it has just waited",
    "kernels/update.py: run": "a kernel reads the gradient in pinned memory, once",
    "kernels/random_bits.py: sqrt_exact": "the CPU's way; on a GPU it is a kernel",
    "optim/elementwise.py: _step": "a class of torch.optim computes on the CPU",
    "optim/state_access.py: encode_values": "the same",
    "params/unshard.py: read": "state_dict() and single values, between steps",
}
"""Functions of the engine that may use the bus directly, with the reason."""


def assert_smooth(bus: Bus, *, beside: str = "") -> None:
    """Assert that no copy that bypassed the executor stalled the device. beside: a function that
    may, too."""
    assert bus.training, "nothing was trained"
    rough = sorted(
        f"{one.where}: {one.what}, pinned {one.pinned}, waits {one.waits}"
        for one in bus.found
        if not one.smooth and one.where not in (*ALLOWED, beside)
    )
    assert not rough, "\n".join(rough)
