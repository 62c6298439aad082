"""`get_accelerator()`: DeepSpeed's interface to the compute device.

The device is a GPU if torch sees one, else the CPU; DS_ACCELERATOR=cpu or cuda overrides that.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import psutil
import torch

from infinity.compat.deepspeed.errors import DeepSpeedRefusal

Functions = tuple[Callable[..., Any], Callable[..., Any]]
"""The implementation for a GPU, and that for the CPU."""


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _nothing(*_args: Any, **_settings: Any) -> None:
    """Do nothing: the CPU has no cache, stream or memory peak to act on."""


def _resident_bytes(_index: Any) -> int:
    return int(psutil.Process().memory_info().rss)


def _gpu_bytes(index: Any) -> int:
    index = torch.cuda.current_device() if index is None else index
    return int(torch.cuda.get_device_properties(index).total_memory)


def _local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)


_TRUE, _FALSE = _constant(True), _constant(False)

_CALLS: dict[str, Functions] = {
    "current_device": (torch.cuda.current_device, _constant("cpu")),
    "current_device_name": (lambda: f"cuda:{torch.cuda.current_device()}", _constant("cpu")),
    "set_device": (torch.cuda.set_device, _nothing),
    # On the CPU: one device for each rank that the launcher started on this node.
    "device_count": (torch.cuda.device_count, _local_ranks),
    "is_available": (torch.cuda.is_available, _TRUE),
    "is_bf16_supported": (torch.cuda.is_bf16_supported, _TRUE),
    # The CPU computes in fp16, slowly.
    "is_fp16_supported": (_TRUE, _TRUE),
    "is_triton_supported": (_TRUE, _FALSE),
    "is_synchronized_device": (_FALSE, _TRUE),
    "resolves_data_dependency": (_FALSE, _TRUE),
    "use_host_timers": (_FALSE, _TRUE),
    "handles_memory_backpressure": (_FALSE, _TRUE),
    "random": (_constant(torch.random), _constant(torch.random)),
    "initial_seed": (torch.cuda.initial_seed, torch.initial_seed),
    "manual_seed": (torch.cuda.manual_seed, torch.manual_seed),
    "manual_seed_all": (torch.cuda.manual_seed_all, torch.manual_seed),
    "range_push": (torch.cuda.nvtx.range_push, _nothing),
    "range_pop": (torch.cuda.nvtx.range_pop, _nothing),
}

_CALLS_OF_DEVICE: dict[str, Functions] = {
    "synchronize": (torch.cuda.synchronize, _nothing),
    "memory_allocated": (torch.cuda.memory_allocated, _resident_bytes),
    "max_memory_allocated": (torch.cuda.max_memory_allocated, _resident_bytes),
    "max_memory_reserved": (torch.cuda.max_memory_reserved, _resident_bytes),
    "max_memory_cached": (torch.cuda.max_memory_reserved, _resident_bytes),
    "memory_reserved": (torch.cuda.memory_reserved, _resident_bytes),
    "memory_cached": (torch.cuda.memory_reserved, _resident_bytes),
    "reset_peak_memory_stats": (torch.cuda.reset_peak_memory_stats, _nothing),
    "reset_max_memory_allocated": (torch.cuda.reset_peak_memory_stats, _nothing),
    "reset_max_memory_cached": (torch.cuda.reset_peak_memory_stats, _nothing),
    "total_memory": (_gpu_bytes, lambda _index: int(psutil.virtual_memory().total)),
    "available_memory": (
        lambda index: _gpu_bytes(index) - torch.cuda.memory_allocated(index),
        lambda _index: int(psutil.virtual_memory().available),
    ),
    "get_rng_state": (
        # torch.cuda names the current device "cuda" and refuses None.
        lambda index: torch.cuda.get_rng_state("cuda" if index is None else index),
        lambda _index: torch.get_rng_state(),
    ),
}
"""Functions whose one argument, `device_index`, is optional."""


class Accelerator:
    """A kind of device: "cpu" or "cuda". Attributes resolve to the functions of the two tables, and
    then to torch's module of that kind (`torch.cuda`, `torch.cpu`).
    """

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._torch: Any = torch.cuda if kind == "cuda" else torch.cpu

    def __getattr__(self, name: str) -> Any:
        column = 0 if self._name == "cuda" else 1
        if name in _CALLS:
            return _CALLS[name][column]
        if name in _CALLS_OF_DEVICE:
            call = _CALLS_OF_DEVICE[name][column]
            return lambda device_index=None: call(device_index)
        return getattr(self._torch, name)

    def device_name(self, device_index: int | str | None = None) -> str:
        """Return "cuda" or "cuda:1"; "cpu" whatever the index."""
        if device_index is None or self._name == "cpu":
            return self._name
        return f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """Return the torch.device of an index; by default the current device."""
        index = self.current_device() if device_index is None else device_index
        return torch.device(self.device_name(index))

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed for this kind."""
        return "nccl" if self._name == "cuda" else "gloo"

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on this kind of device."""
        return tensor.device.type == self._name

    def visible_devices_envs(self) -> list[str]:
        """Return the environment variables that choose devices."""
        return ["CUDA_VISIBLE_DEVICES"]

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of gradients that can be reduced."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def empty_cache(self) -> None:
        """Release cached memory of the GPU."""
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return the tensor in pinned memory; on the CPU, the tensor itself. align_bytes: ignored.
        """
        del align_bytes
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def set_rng_state(self, state: torch.Tensor, device_index: Any = None) -> None:
        """Set the state of the device's generator."""
        if self._name == "cuda":
            torch.cuda.set_rng_state(state, "cuda" if device_index is None else device_index)
        else:
            torch.set_rng_state(state)


@functools.cache
def get_accelerator() -> Accelerator:
    """Return the compute device. Raises: DeepSpeedRefusal if DS_ACCELERATOR is neither "cpu" nor
    "cuda".
    """
    wanted = os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu")
    if wanted not in ("cpu", "cuda"):
        raise DeepSpeedRefusal(f"DS_ACCELERATOR={wanted!r}: the engine computes on cpu or cuda")
    return Accelerator(wanted)


def is_current_accelerator_supported() -> bool:
    """Return True: `get_accelerator` returns supported devices only."""
    return True
