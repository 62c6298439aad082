"""The current CUDA device of a launch.

torch's own operations run on the device of their tensors. Three things run on the thread's current
device instead, whatever their tensors are on: Triton's kernels, memory pools, and questions about
"the current stream".
"""

from __future__ import annotations

import contextlib

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
