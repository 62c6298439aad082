"""Trials of the bitwise operations in the most common forms."""

from __future__ import annotations

import torch

from infinity._src.cabi.records import Algorithm, Format, GradDtype
from infinity._src.kernels.comm_codec import decode_trial, encode_trial, sum_trial
from infinity._src.kernels.quantize import dequantize_trial, quantize_trial
from infinity._src.kernels.trial import Trial
from infinity._src.kernels.update import update_trial


def trials_of_usual_forms() -> dict[str, Trial]:
    """Return a trial of each bitwise operation, by its name in `choice.OPS`."""
    bf16 = torch.bfloat16
    return {
        "group_quantize": quantize_trial(bf16, 8, 256, True, False),
        "group_dequantize": dequantize_trial(bf16, 8, 256, True),
        "wire_encode": encode_trial(bf16, 4, 128, True, bf16),
        "wire_decode": decode_trial(bf16, 4, 128, True),
        "ordered_sum": sum_trial(bf16, bf16, True),
        "update": update_trial(Format.SPLIT, Algorithm.ADAMW, GradDtype.BF16),
    }
