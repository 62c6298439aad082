"""Current CUDA device and small tables for kernel launches.

torch's operations run on the device of their tensors. Triton kernels, memory pools and
`torch.cuda.current_stream()` use the thread's current device instead.
"""

from __future__ import annotations

import contextlib

import numpy as np
import numpy.typing as npt
import torch

_HERE: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` the thread's current CUDA device inside the block, then restore the previous
    one.

    No effect if it is already current, or not a GPU (Triton's interpreter).
    """
    # The common case: avoid a context manager per launch.
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _HERE
    return torch.cuda.device(device)


def table_on(device: torch.device, words: npt.NDArray[np.generic]) -> torch.Tensor:
    """Copy a flat integer table to `device` on the current stream. Never blocks.

    On a GPU the copy is staged through torch's pinned-memory allocator, since a copy from pageable
    memory may block on the stream. The allocator reuses a block only after the copy that reads it
    has ended.
    """
    table = torch.from_numpy(words)
    if device.type == "cuda":
        pinned = torch.empty(table.shape, dtype=table.dtype, device="cpu", pin_memory=True)
        table = pinned.copy_(table)
    return table.to(device, non_blocking=True)
