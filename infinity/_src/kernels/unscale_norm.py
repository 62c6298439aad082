"""A gradient unscaled, cast, and looked at, in one pass: what is done to it on a GPU before it leaves for RAM.

    squares, finite = unscale_norm(grad, out, factor=1 / scale)

Written is `grad * factor` (or `/ factor`): raised to fp32, one rounding, then rounded to the dtype of `out`, to nearest, ties to
even. Summed and judged is what was written, so that the optimizer, which sees just that, is clipped by the norm of what it
gets, and an overflow in fp16 is found.

**The sum has one order**, whoever computes it: squares in fp32, blocks of BLOCK_NUMEL elements by pairs of neighbours, then pairs
of pairs; the blocks' sums into PARTIALS columns, row after row, in the order of the blocks; then the columns, by pairs. So
its bits depend on no device, no number of threads, and not on whether torch or Triton computes (infinity/_src/kernels/choice.py); and
it is 22 additions deep, and one more per 4 million elements. No atomics.
"""

from __future__ import annotations

import torch

from infinity._src.kernels import choice

BLOCK_NUMEL = 2048
PARTIALS = 2048
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unscale_norm(
    grad: torch.Tensor, out: torch.Tensor, *, factor: float | torch.Tensor = 1.0, divide: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes grad * factor (divide: grad / factor) to `out`; returns the sum of its squares and whether all of it is finite.

    grad, out: bf16, fp16 or fp32, same shape and device, any strides without overlap; they may be the same tensor. factor: a
    number, rounded to fp32, or a tensor of one element on the same device. Returned: 0-d, fp32 and bool, on the
    device; nothing waits for it. The sum is infinite where squares are too large for fp32, as torch's is.
    Raises: ValueError for other dtypes, shapes or devices.
    """
    if grad.dtype not in DTYPES or out.dtype not in DTYPES:
        raise ValueError(f"grad is {grad.dtype} and out {out.dtype}: use bfloat16, float16 or float32")
    if grad.shape != out.shape or grad.device != out.device:
        raise ValueError(
            f"grad is {list(grad.shape)} on {grad.device}, out {list(out.shape)} on {out.device}: they must agree"
        )
    if isinstance(factor, torch.Tensor):
        if factor.numel() != 1 or factor.device != grad.device:
            raise ValueError(
                f"factor is {list(factor.shape)} on {factor.device}: use one element on {grad.device}, or a number"
            )
        factor = factor.detach().to(torch.float32)
    else:
        factor = float(factor)  # of an integer 1 Triton would make a constant
    grad, out = grad.detach(), out.detach()
    with torch.no_grad():
        if choice.implementation("unscale_norm", grad.device) == "triton":
            from infinity._src.kernels.triton.unscale_norm import unscale_norm_triton

            return unscale_norm_triton(grad, out, factor, divide)
        return _unscale_norm_torch(grad, out, factor, divide)


def _unscale_norm_torch(
    grad: torch.Tensor, out: torch.Tensor, factor: float | torch.Tensor, divide: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(factor, torch.Tensor):
        factor = torch.full((), factor, dtype=torch.float32, device=grad.device)
    factor = factor.reshape(())  # a tensor: by a number, torch divides through its reciprocal on a GPU
    values = grad.to(torch.float32)
    out.copy_(values / factor if divide else values * factor)
    written = out.to(torch.float32).reshape(-1)
    partials = _by_pairs(_rows(written * written, BLOCK_NUMEL))
    columns = torch.zeros(PARTIALS, dtype=torch.float32, device=grad.device)
    for row in _rows(partials, PARTIALS):
        columns = columns + row
    return _by_pairs(columns[None])[0], torch.isfinite(written).all()


def _rows(values: torch.Tensor, columns: int) -> torch.Tensor:
    """[numel] -> [rows, columns], zeros after the end."""
    rows = -(-values.numel() // columns)
    return torch.nn.functional.pad(values, (0, rows * columns - values.numel())).view(rows, columns)


def _by_pairs(values: torch.Tensor) -> torch.Tensor:
    """[rows, power of two] -> [rows]: sums of neighbours, of neighbouring sums, and so on."""
    while values.shape[1] > 1:
        values = values[:, 0::2] + values[:, 1::2]
    return values[:, 0]
