"""2-norm in fp32 of bf16 gradients, by one native pass, with the bits of torch's norm.

torch would convert the gradient to fp32 in memory, and sum that copy in one thread: three passes
over memory, with the copy to the accumulator. The bits of a sum depend on the order of its terms,
and torch's order depends on its build and on the processor. So the first use compares the kernel's
norms of samples with torch's; if they differ, torch computes all norms.
"""

from __future__ import annotations

import functools

import torch

from infinity._src.cabi import native

_SUMS = 8
_TRIAL_ROWS = 16
_TRIAL_NUMELS = (2 * _SUMS, 129 * _SUMS)
_TRIAL_SCALES = (1.0, 1e-20)  # squares of the second one are denormal


def bf16_norm(values: torch.Tensor, copy_to: torch.Tensor | None = None) -> float | None:
    """Return the norm of a tensor; also copy its values to `copy_to`, of the same size. None: the
    kernel does not apply, and nothing is copied. Blocks; releases the GIL.
    """
    if not (_applies(values) and (copy_to is None or _applies(copy_to)) and _has_torchs_bits()):
        return None
    return _norm(values, copy_to)


def _applies(tensor: torch.Tensor) -> bool:
    # is_cpu, not device.type: it makes no object.
    return (
        tensor.dtype is torch.bfloat16
        and tensor.is_cpu
        and tensor.numel() % _SUMS == 0
        and tensor.is_contiguous()
    )


def _norm(values: torch.Tensor, copy_to: torch.Tensor | None) -> float:
    void = native.ffi.typeof("void *")
    to = native.ffi.NULL if copy_to is None else native.ffi.cast(void, copy_to.data_ptr())
    source = native.ffi.cast(void, values.data_ptr())
    return float(native.lib.inf_bf16_norm(source, to, values.numel()))


@functools.cache
def _has_torchs_bits() -> bool:
    """Return whether the extension is loaded, and its sums have torch's bits."""
    if not native.available():
        return False
    # Not random: drawing from torch's generator would change the user's training.
    numbers = torch.arange(_TRIAL_ROWS * max(_TRIAL_NUMELS), device="cpu", dtype=torch.float64)
    values = numbers.square_().sin_()
    rows = (
        row
        for scale in _TRIAL_SCALES
        for numel in _TRIAL_NUMELS
        for row in (values * scale).to(torch.bfloat16)[: _TRIAL_ROWS * numel].view(-1, numel)
    )
    return all(_norm(row, None) == float(torch.linalg.vector_norm(row.float())) for row in rows)
