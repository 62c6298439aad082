"""Whether a gradient is finite, in one pass at memory speed (torch: 5 to 30 times slower on bf16)."""

from __future__ import annotations

import torch

from infinity._src import native
from infinity.aio.plan import GradDtype

_DTYPES = {torch.bfloat16: GradDtype.BF16, torch.float16: GradDtype.FP16, torch.float32: GradDtype.FP32}


def all_finite(values: torch.Tensor) -> bool:
    """Whether every element is finite. values: bf16, fp16 or fp32, any shape and device. Blocks; the GIL is released."""
    code = _DTYPES.get(values.dtype)
    if native.available() and code is not None and values.device.type == "cpu" and values.is_contiguous():
        address = native.ffi.cast("void *", values.data_ptr())
        return bool(native.lib.inf_all_finite(address, int(code), values.numel()))
    return bool(torch.isfinite(values).all())
