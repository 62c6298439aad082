"""`zero.Init`: builds a model of any size before it is offloaded.

Constructors and initialisers run unchanged, and their values are kept. If the configuration puts
parameters on NVMe, a parameter moves to a mapped file on the drive when a module registers it, so
the whole model is never in memory:

    self.weight = Parameter(torch.empty(...))   registration maps the parameter to the file
    reset_parameters(self)                      writes to the mapping; dirty pages are written out
    deepspeed.initialize(model=...)             reads the file unit by unit; then it is deleted

Otherwise parameters stay in ordinary memory until `initialize`. In both cases they are ordinary
tensors, readable and writable with or without `GatheredParameters`.
"""

from __future__ import annotations

import contextlib
import contextvars
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from infinity._src.base.paths import absolute
from infinity.compat.deepspeed import comm
from infinity.compat.deepspeed.errors import DeepSpeedRefusal
from infinity.compat.deepspeed.parameters import is_zero_param, note_zero_param
from infinity.compat.deepspeed.settings import written

# -- Memory in a file ------------------------------------------------------------------------------


DIRTY_BYTES_MAX = 64 << 20
"""Bytes of new tensors after which pages are written out."""

SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX = 64 << 20, 1 << 30
"""Bytes of one mapping. Each mapping duplicates the file descriptor, and a process has few."""


class FileMemory:
    """A file that tensors are mapped from; the last tensor's deletion frees it.

    directory: created if it does not exist. Raises: OSError.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # Unnamed: a killed process leaves no file, and other users cannot open it.
        with tempfile.TemporaryFile(dir=directory) as file:
            self._file = os.dup(file.fileno())
        # Mappings keep the file alive; without this object the descriptor has no user.
        weakref.finalize(self, os.close, self._file)
        self._size_bytes = 0
        self._segment: mmap.mmap | None = None
        self._start = self._used = 0
        self._mapped: list[tuple[weakref.ref[mmap.mmap], int]] = []
        self._dirty_bytes = 0

    def copy_of(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a mapped tensor with the values of `tensor`, cast to `dtype`. May block while
        pages are written out. Raises: OSError if the drive is full.
        """
        wanted = tensor.dtype if dtype is None else dtype
        out = self._empty(tensor.shape, wanted)
        with torch.no_grad():
            out.copy_(tensor)
        self._dirty_bytes += out.nbytes
        if self._dirty_bytes >= DIRTY_BYTES_MAX:
            self.write_out()
        return out

    def write_out(self) -> None:
        """Write dirty pages out, and drop all pages from memory. Blocks."""
        kept = []
        for reference, offset in self._mapped:
            mapping = reference()
            if mapping is None:
                continue
            mapping.flush()
            # The pages are file-backed: the next access reads them again.
            mapping.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(self._file, offset, len(mapping), os.POSIX_FADV_DONTNEED)
            kept.append((reference, offset))
        self._mapped, self._dirty_bytes = kept, 0

    def _empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        numel = shape.numel()
        size_bytes = -(-max(1, numel * dtype.itemsize) // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._segment is None or self._used + size_bytes > len(self._segment):
            self._map(size_bytes)
        assert self._segment is not None
        # Allocate the file's blocks: writing to a hole on a full drive kills the process (SIGBUS).
        os.posix_fallocate(self._file, self._start + self._used, size_bytes)
        # The tensor keeps the segment alive.
        out = torch.frombuffer(self._segment, dtype=dtype, count=numel, offset=self._used)
        self._used += size_bytes
        return out.view(shape)

    def _map(self, size_bytes: int) -> None:
        """Map a new segment of at least `size_bytes` at the end of the file."""
        wanted = min(max(self._size_bytes, SEGMENT_BYTES_MIN), SEGMENT_BYTES_MAX)
        size_bytes = max(size_bytes, wanted)
        self._start, self._used = self._size_bytes, 0
        self._size_bytes += size_bytes
        os.ftruncate(self._file, self._size_bytes)
        self._segment = mmap.mmap(self._file, size_bytes, offset=self._start)
        self._mapped.append((weakref.ref(self._segment), self._start))


FILE_BYTES_MIN = 1 << 20
"""Smaller parameters stay in memory: a mapping of whole pages costs more than it saves."""

_DEVICES = (None, "none", "cpu", "nvme", "cuda")

_RESERVING: contextvars.ContextVar[bool] = contextvars.ContextVar("reserving", default=False)


class Init(contextlib.ContextDecorator):
    """A context in which a model is built; in bounded memory if its parameters go to NVMe.

    module: an existing model whose parameters the constructor processes at once. remote_device:
    "cpu" or "nvme"; used if the configuration has no offload_param.device. config_dict_or_path: the
    configuration that `initialize` gets, read for drive and dtype; config: its older name. dtype:
    floating-point parameters are cast to it when the context ends; None: the configuration's dtype,
    else no cast. enabled: False: the context does nothing.

    Every rank builds the model; `initialize` uses rank 0's values. Blocks while pages are written
    out. Raises: DeepSpeedRefusal for a group that lacks some ranks, quantized weights, an unknown
    device, "nvme" without a path, and an unreadable configuration.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,  # noqa: ARG002 - of DeepSpeed's own kernels
        remote_device: str | None = None,
        pin_memory: bool = False,  # noqa: ARG002 - the engine pins its own buffers
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,  # noqa: ARG002
        zero_param_parallel_group: Any = None,  # noqa: ARG002 - hpz of the configuration
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,  # noqa: ARG002
        tensor_overrides: Any = None,  # noqa: ARG002
    ) -> None:
        self.enabled = enabled
        if not enabled:
            return
        for name, value in (
            ("zero_quantized_weights", zero_quantized_weights),
            ("zero_quantized_nontrainable_weights", zero_quantized_nontrainable_weights),
        ):
            if value:
                raise DeepSpeedRefusal(
                    f"zero.Init({name}=True): set quantized gathers of weights in the "
                    "configuration (zero_optimization.zero_quantized_weights)"
                )
        for group in (data_parallel_group, sequence_data_parallel_group):
            if group is not None and comm.get_world_size(group) != comm.get_world_size():
                raise DeepSpeedRefusal(
                    f"zero.Init(data_parallel_group=) of {comm.get_world_size(group)} of "
                    f"{comm.get_world_size()} ranks: the engine splits states over all ranks; "
                    "leave the group out"
                )
        given = config_dict_or_path if config_dict_or_path is not None else config
        settings = {} if given is None else written(given)
        self.dtype = dtype if dtype is not None else _dtype_of(settings)
        self.remote_device, path = _place_of(settings, remote_device)
        self.memory = FileMemory(path) if path is not None else None
        self._built: list[torch.nn.Parameter] = []
        self._hooks = contextlib.ExitStack()
        # Ranks of a launcher may call collectives while they build the model.
        if comm.is_launched():
            comm.init_distributed()
        if module is not None:
            for param in module.parameters():
                self._take(param)
            self._finish()

    def __enter__(self) -> Init:  # noqa: PYI034
        if self.enabled:
            hook = register_module_parameter_registration_hook(self._registered)
            self._hooks.callback(hook.remove)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.enabled:
            self._hooks.close()
            self._finish()

    def _registered(
        self, _module: torch.nn.Module, _name: str, param: torch.nn.Parameter | None
    ) -> None:
        if param is not None:
            self._take(param)

    def _take(self, param: torch.nn.Parameter) -> None:
        """Move a parameter's values to the file, unless another Init or an engine holds them."""
        if is_zero_param(param) or hasattr(param, "infinity_link"):
            return
        note_zero_param(param)
        self._built.append(param)
        in_ram = param.device.type == "cpu"
        if self.memory is not None and in_ram and param.nbytes >= FILE_BYTES_MIN:
            # For `cast` and `set_values`.
            param.ds_memory = self.memory  # type: ignore[attr-defined]
        if _RESERVING.get():
            param.ds_reserved = True  # type: ignore[attr-defined]
        else:
            set_values(param, param.data)

    def _finish(self) -> None:
        built, self._built = self._built, []
        if self.dtype is not None:
            for param in built:
                cast(param, self.dtype)
        if self.memory is not None:
            self.memory.write_out()


@contextlib.contextmanager
def reserving() -> Iterator[None]:
    """Enter a context in which `Init` discards constructors' values: a loader will set the values
    of each parameter that `is_reserved`. Until then its memory is never written, and takes no RAM.
    """
    token = _RESERVING.set(True)
    try:
        yield
    finally:
        _RESERVING.reset(token)


def is_reserved(param: torch.Tensor) -> bool:
    """Return whether a parameter still needs `set_values`."""
    return getattr(param, "ds_reserved", False)


def set_values(param: torch.nn.Parameter, values: torch.Tensor, *, mapped: bool = False) -> None:
    """Set a parameter's values [param.shape], in its dtype and its kind of memory (RAM or file).

    mapped: `values` is mapped from a file; if it is contiguous and of the parameter's dtype, that
    mapping becomes the parameter's memory. May block while pages are written out.
    """
    param.ds_reserved = False  # type: ignore[attr-defined]
    memory: FileMemory | None = getattr(param, "ds_memory", None)
    if memory is None or (mapped and values.dtype == param.dtype and values.is_contiguous()):
        param.data = values.to(param.dtype).contiguous()
    else:
        param.data = memory.copy_of(values, param.dtype)


def cast(param: torch.nn.Parameter, dtype: torch.dtype) -> None:
    """Cast a floating-point parameter in place; a parameter in a file stays in the file."""
    if not param.is_floating_point() or param.dtype == dtype or param.is_meta:
        return
    memory: FileMemory | None = getattr(param, "ds_memory", None)
    if is_reserved(param):
        param.data = torch.empty_like(param.data, dtype=dtype)
    elif memory is None:
        param.data = param.data.to(dtype)
    else:
        param.data = memory.copy_of(param.data, dtype)


def _dtype_of(settings: Mapping[str, Any]) -> torch.dtype | None:
    for key, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16),
                       ("fp16", torch.float16)):  # fmt: skip
        if (settings.get(key) or {}).get("enabled") == 1:
            return dtype
    return None


def _place_of(
    settings: Mapping[str, Any], remote_device: str | None
) -> tuple[str | None, Path | None]:
    """Return the device of parameters until `initialize`, and for "nvme" the file's directory."""
    offload = (settings.get("zero_optimization") or {}).get("offload_param") or {}
    device = offload.get("device", remote_device)
    if device not in _DEVICES:
        raise DeepSpeedRefusal(f"remote_device={device!r}: give 'cpu', 'nvme' or None")
    if device != "nvme":
        return device, None
    path = offload.get("nvme_path")
    if not path:
        raise DeepSpeedRefusal(
            "zero.Init(remote_device='nvme') without a drive: give config_dict_or_path with "
            "zero_optimization.offload_param.nvme_path"
        )
    return device, absolute(str(path), "nvme_path")
