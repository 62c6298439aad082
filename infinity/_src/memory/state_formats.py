"""The format at rest of states, by `Policy.state` and the dtype of the parameters."""

from __future__ import annotations

import torch

from infinity._src.cabi.records import Format, Master, Moments, chunk_numel

_MASTERS = {torch.bfloat16: Master.SPLIT, torch.float32: Master.FP32, torch.float16: Master.FP16}
_MOMENTS = {"exact": Moments.FP32, "bf16": Moments.BF16, "compact": Moments.Q8}


def state_format(state: str, dtype: torch.dtype, moments: int = 2) -> Format | None:
    """Choose the format of states by `Policy.state`, dtype and moments; None for a dtype without
    states."""
    if dtype not in _MASTERS:
        return None
    # A 24-bit master is a bf16 parameter and one more byte, so only bf16 parameters have one.
    master = Master.SPLIT8 if state == "compact" and dtype is torch.bfloat16 else _MASTERS[dtype]
    # Without moments there is nothing to encode, and `Format` refuses Q8 without moments.
    return Format(master, _MOMENTS[state] if moments else Moments.FP32, moments)


def chunk_numel_of(state: str, dtype: torch.dtype) -> int:
    """Elements per chunk of flats that may get states: as for two moments, chosen before an
    optimizer exists."""
    return chunk_numel(state_format(state, dtype) or Format.RAW)
