"""Products of tiled linears, in Triton: each adds to the sum of earlier tiles; the last one adds
the bias and rounds in its epilogue.

    forward       out[M, N]  (+)= x[M, K] @ w[N, K]^T  (+ bias[N])
    input grad    dx[M, K]   (+)= dy[M, N] @ w[N, K]
    weight grad   dw[N, K]   (+)= dy[M, N]^T @ x[M, K]

cuBLAS can only add to an output of the operands' dtype, which rounds the running sum once per tile.
Here the sum is fp32 from the first tile to the last; bias and rounding are applied once, in
registers.

Each tile continues the previous sum in steps of BLOCK_K elements: tiles with a multiple of BLOCK_K
(64; fp32: 32) give the bits of one product over all of them. No two programs write the same output
element, so there are no atomics and one order.
Source: memory-centric tiling, ZeRO-Infinity §5.1.3.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from infinity._src.kernels import choice
from infinity._src.kernels.triton.tuning import (
    Tuned,
    block_k,
    block_of,
    configs,
    loop_end,
    operand,
    precision,
    rounded,
    shape_key,
    widened,
)


@triton.jit(do_not_specialize=["shape_key"])
def _product(
    a_ptr: tl.tensor,
    b_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    stride_am: tl.tensor,
    stride_ak: tl.tensor,
    stride_bk: tl.tensor,
    stride_bn: tl.tensor,
    stride_sm: tl.tensor,
    stride_sn: tl.tensor,
    stride_bias: tl.tensor,
    stride_om: tl.tensor,
    stride_on: tl.tensor,
    shape_key: tl.tensor,
    ACCUMULATE: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """out[m, n] = sum[m, n] + a[m, k] @ b[k, n] + bias[n], summed in fp32, a block of out per
    program.
    """
    # 8 adjacent row blocks share the columns' data in L2.
    block_m, block_n = block_of(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, 8)
    # 64-bit from here on: a row times its stride may pass 2^31 elements.
    rows = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    # Continue the previous tile's sum, in fp32, without rounding between tiles.
    if ACCUMULATE:
        total = tl.load(
            sum_ptr + rows[:, None] * stride_sm + columns[None, :] * stride_sn,
            mask=inside,
            other=0.0,
        )
        # The interpreter's bf16 casts truncate: `widened` works on bits there.
        total = widened(total, INTERPRETED)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    a_ptrs = a_ptr + rows[:, None] * stride_am + inner[None, :] * stride_ak
    b_ptrs = b_ptr + inner[:, None] * stride_bk + columns[None, :] * stride_bn
    a_step = tl.cast(stride_ak, tl.int64) * BLOCK_K
    b_step = tl.cast(stride_bk, tl.int64) * BLOCK_K
    # Steps of BLOCK_K, the same for every configuration: they order the sum.
    for start in range(0, loop_end(k, INTERPRETED), BLOCK_K):
        left = inner < k - start
        a = tl.load(a_ptrs, mask=(rows < m)[:, None] & left[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=left[:, None] & (columns < n)[None, :], other=0.0)
        total = tl.dot(
            operand(a, INTERPRETED), operand(b, INTERPRETED), total, input_precision=PRECISION
        )
        a_ptrs += a_step
        b_ptrs += b_step
    # Only the last tile adds the bias, in registers.
    if BIAS:
        bias = tl.load(bias_ptr + columns * stride_bias, mask=columns < n, other=0.0)
        total += widened(bias, INTERPRETED)[None, :]
    # No two programs share an element of the output: no atomics, and one order.
    out_ptrs = out_ptr + rows[:, None] * stride_om + columns[None, :] * stride_on
    tl.store(out_ptrs, rounded(total, out_ptr.dtype.element_ty, INTERPRETED), mask=inside)


# Measurements restore `out` between runs, since the kernel may add to it.
_wide = Tuned(_product, partial(configs, torch.float32), restore=("out_ptr",))
_narrow = Tuned(_product, partial(configs, torch.bfloat16), restore=("out_ptr",))


def tile_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    accumulator: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """out = accumulator + a @ b + bias, summed in fp32 and rounded once, to out's dtype:
    infinity/_src/kernels/tile_matmul.py's contract.

    Shapes: a [M, K], b [K, N], out and accumulator [M, N], bias [N], any strides (transposes are
    strides). a and b have one dtype, bf16, fp16 or fp32; the others may have any of these.
    accumulator may be `out` itself; None: zero. Raises: ValueError for shapes, dtypes or devices
    that do not agree.
    """
    _check(a, b, out, accumulator, bias)
    (m, k), n = a.shape, b.shape[1]
    # Triton launches no empty grid.
    if not m or not n:
        return
    # An unused argument still needs a tensor; ACCUMULATE is a constant, so it is not read.
    added = a if accumulator is None else accumulator
    tuned = _wide if a.dtype == torch.float32 else _narrow

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        return (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),)

    tuned(
        grid,
        a.device,
        a,
        b,
        added,
        a if bias is None else bias,
        out,
        m,
        n,
        k,
        *a.stride(),
        *b.stride(),
        *added.stride(),
        0 if bias is None else bias.stride(0),
        *out.stride(),
        shape_key(m, n, k, form=(a.stride(1) == 1, b.stride(1) == 1, accumulator is not None)),
        ACCUMULATE=accumulator is not None,
        BIAS=bias is not None,
        PRECISION=precision(a.dtype),
        INTERPRETED=choice.interpreted(),
        BLOCK_K=block_k(a.dtype),
    )


def _check(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    accumulator: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a product of {tuple(a.shape)} and {tuple(b.shape)}: pass [M, K] and [K, N]"
        )
    if a.dtype != b.dtype or a.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"a product of {a.dtype} and {b.dtype}: pass two bf16, two fp16 or two fp32 tensors"
        )
    shape = (a.shape[0], b.shape[1])
    for name, tensor, expected in (
        ("out", out, shape),
        ("accumulator", accumulator, shape),
        ("bias", bias, shape[1:]),
    ):
        if tensor is not None and tuple(tensor.shape) != expected:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; this product needs {expected}"
            )
    for tensor in (b, out, accumulator, bias):
        if tensor is not None and tensor.device != a.device:
            raise ValueError(
                f"a product of tensors on {a.device} and {tensor.device}: bring them together first"
            )
