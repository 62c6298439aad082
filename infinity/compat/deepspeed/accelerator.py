"""The device that computes, as scripts ask for it: `get_accelerator()`.

A GPU where torch sees one, else the CPU; DS_ACCELERATOR=cpu or cuda chooses.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import psutil
import torch

from infinity.compat.deepspeed.errors import DeepSpeedRefusal


class Accelerator:
    """A kind of device: "cpu" or "cuda". Further attributes are those of torch's module of the kind
    (`torch.cuda`, `torch.cpu`).
    """

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._torch: Any = torch.cuda if kind == "cuda" else torch.cpu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    # -- the device --------------------------------------------------------------------------------

    def device_name(self, device_index: int | str | None = None) -> str:
        """Return "cuda" or "cuda:1"; "cpu" whatever the index."""
        if device_index is None or self._name == "cpu":
            return self._name
        return f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """Return the device of an index, the current one by default."""
        if self._name == "cpu":
            return torch.device("cpu")
        return torch.device(
            self.device_name(self.current_device() if device_index is None else device_index)
        )

    def current_device(self) -> int | str:
        """Return the index of the current GPU; "cpu" for the CPU."""
        return torch.cuda.current_device() if self._name == "cuda" else "cpu"

    def current_device_name(self) -> str:
        """Return the current device, "cuda:0"."""
        return f"cuda:{self.current_device()}" if self._name == "cuda" else "cpu"

    def set_device(self, device_index: Any) -> None:
        """Make a GPU the current one. Nothing for the CPU."""
        if self._name == "cuda":
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        """Return the number of GPUs; of the CPU, the ranks that the launcher started here."""
        if self._name == "cuda":
            return torch.cuda.device_count()
        return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)

    def is_available(self) -> bool:
        """Return whether the kind is there."""
        return self._name == "cpu" or torch.cuda.is_available()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on this kind of device."""
        return tensor.device.type == self._name

    def visible_devices_envs(self) -> list[str]:
        """Return the environment variables that choose devices."""
        return ["CUDA_VISIBLE_DEVICES"]

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed for this kind."""
        return "nccl" if self._name == "cuda" else "gloo"

    # -- what it computes --------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        """Return whether bf16 computes."""
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Return whether fp16 computes. It does on the CPU, slowly."""
        return True

    def is_triton_supported(self) -> bool:
        """Return whether Triton's kernels run."""
        return self._name == "cuda"

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of gradients that can be reduced."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_synchronized_device(self) -> bool:
        """Return whether operations end before they return."""
        return self._name == "cpu"

    resolves_data_dependency = use_host_timers = handles_memory_backpressure = (
        is_synchronized_device
    )

    # -- memory and streams of the CPU, which torch.cpu has not ------------------------------------

    def synchronize(self, device_index: Any = None) -> None:
        """Wait for the device."""
        if self._name == "cuda":
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        """Give free cached memory of the device back."""
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: Any = None) -> int:
        """Return the bytes in use: of the GPU by torch, of the CPU by this process."""
        if self._name == "cuda":
            return torch.cuda.memory_allocated(device_index)
        return int(psutil.Process().memory_info().rss)

    def max_memory_allocated(self, device_index: Any = None) -> int:
        """Return the most bytes that were in use; of the CPU, those in use now."""
        if self._name == "cuda":
            return torch.cuda.max_memory_allocated(device_index)
        return self.memory_allocated()

    def memory_reserved(self, device_index: Any = None) -> int:
        """Return the bytes that torch holds on the GPU; of the CPU, those in use."""
        if self._name == "cuda":
            return torch.cuda.memory_reserved(device_index)
        return self.memory_allocated()

    memory_cached, max_memory_reserved, max_memory_cached = (
        memory_reserved, max_memory_allocated, max_memory_allocated,
    )  # fmt: skip

    def reset_peak_memory_stats(self, device_index: Any = None) -> None:
        """Begin to note the most bytes in use anew."""
        if self._name == "cuda":
            torch.cuda.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def total_memory(self, device_index: Any = None) -> int:
        """Return the bytes of the device."""
        if self._name == "cuda":
            index = self.current_device() if device_index is None else device_index
            return int(torch.cuda.get_device_properties(index).total_memory)
        return int(psutil.virtual_memory().total)

    def available_memory(self, device_index: Any = None) -> int:
        """Return the bytes that are free."""
        if self._name == "cuda":
            return self.total_memory(device_index) - self.memory_allocated(device_index)
        return int(psutil.virtual_memory().available)

    def range_push(self, message: str) -> None:
        """Begin a range in a profile of the GPU."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(message)

    def range_pop(self) -> None:
        """End it."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return the tensor in pinned memory; as it is where the CPU computes. align_bytes: torch
        aligns to more.
        """
        del align_bytes
        return tensor.pin_memory() if self._name == "cuda" else tensor

    # -- random numbers ----------------------------------------------------------------------------

    def random(self) -> Any:
        """Return torch's module of random numbers."""
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        """Seed the generators of the device."""
        return torch.cuda.manual_seed(seed) if self._name == "cuda" else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        """Seed the generators of all devices of the kind."""
        if self._name == "cuda":
            return torch.cuda.manual_seed_all(seed)
        return torch.manual_seed(seed)

    def get_rng_state(self, device_index: Any = None) -> torch.Tensor:
        """Return the state of the device's generator."""
        if self._name == "cuda":
            return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device_index: Any = None) -> None:
        """Set the state of the device's generator."""
        if self._name == "cuda":
            torch.cuda.set_rng_state(state, "cuda" if device_index is None else device_index)
        else:
            torch.set_rng_state(state)

    def initial_seed(self) -> int:
        """Return the seed of the device's generator."""
        return torch.cuda.initial_seed() if self._name == "cuda" else torch.initial_seed()


@functools.cache
def get_accelerator() -> Accelerator:
    """Return the device that computes. Raises: DeepSpeedRefusal for a DS_ACCELERATOR that is
    neither "cpu" nor "cuda".
    """
    wanted = os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu")
    if wanted not in ("cpu", "cuda"):
        raise DeepSpeedRefusal(f"DS_ACCELERATOR={wanted!r}: the engine computes on cpu or cuda")
    return Accelerator(wanted)


def is_current_accelerator_supported() -> bool:
    """Return True: `get_accelerator` gives no other."""
    return True
