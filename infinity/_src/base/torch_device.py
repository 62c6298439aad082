"""Parts of every launch: the current CUDA device, and small tables on it.

torch's own operations run on the device of their tensors. Three things run on the thread's current
device instead, whatever their tensors are on: Triton's kernels, memory pools, and questions about
"the current stream".
"""

from __future__ import annotations

import contextlib

import numpy as np
import numpy.typing as npt
import torch

_HERE: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` the thread's current CUDA device inside the block, and put back the one before.

    Does nothing where it is current already, or is no GPU (Triton's interpreter).
    """
    # Most launches come here, on the device that is current: no context is entered for them.
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _HERE
    return torch.cuda.device(device)


def table_on(device: torch.device, words: npt.NDArray[np.generic]) -> torch.Tensor:
    """Copy a flat table, of integers, to `device` on the current stream, without waiting for it.

    On a GPU the table travels through pinned memory of torch's allocator of such: the driver copies
    pageable memory in pieces, and may wait for the stream before it does. That allocator is a ring
    for all threads. It hands memory out again only behind the event of the copy that has read it,
    and has as much as copies are under way at once.
    """
    table = torch.from_numpy(words)
    if device.type == "cuda":
        pinned = torch.empty(table.shape, dtype=table.dtype, device="cpu", pin_memory=True)
        table = pinned.copy_(table)
    return table.to(device, non_blocking=True)
