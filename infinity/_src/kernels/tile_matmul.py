"""Matmul for tiled linears: adds a product to the sum of earlier tiles, and rounds once, after the
bias.

    out = round(accumulator + a @ b + bias)

    forward           a = x [rows, in]          b = weight.t() [in, out]     out [rows, out]
    input gradient    a = dy [rows, out]        b = weight [out, in]         out [rows, in]
    weight gradient   a = dy.t() [out, rows]    b = x [rows, in]             out [out, in]

Sums over several tiles are fp32 (fp64 for fp64 operands), and tiles are added in the order of the
calls, so the result only depends on the tiling. A single tile is torch's matmul.
Source: ZeRO-Infinity §5.1.3 (memory-centric tiling).
"""

from __future__ import annotations

import torch

from infinity._src.kernels import choice

NAME = "tile_matmul"


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tiles of `dtype` operands are summed: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tile_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    accumulator: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """Write `accumulator + a @ b + bias`, rounded once to `out`'s dtype, into `out`.

    a: [rows, inner] and b: [inner, columns], of one dtype (fp32, bf16, fp16; fp64 on the CPU), any
    strides, transposed views included. out: [rows, columns], any strides (a slice of columns), of
    the operands' dtype or of `sum_dtype`. accumulator: None, or [rows, columns] of `sum_dtype`; it
    may be `out` itself, else its contents are undefined afterwards. bias: [columns] of any floating
    dtype, added before rounding. `out` overlaps neither operand. Records no graph.

    Runs torch or Triton by `choice.implementation("tile_matmul", device)`. They add products in
    different orders within a tile, so results may differ by rounding.
    """
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    assert out.dtype in (a.dtype, sum_dtype(a.dtype)), (a.dtype, out.dtype)
    assert accumulator is None or accumulator.dtype == sum_dtype(a.dtype), accumulator.dtype
    with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
        # The Triton kernel does not support fp64.
        if choice.implementation(NAME, a.device) == "triton" and a.dtype != torch.float64:
            from infinity._src.kernels.triton import tile_matmul as tile_matmul_triton

            tile_matmul_triton.tile_matmul(a, b, out, accumulator=accumulator, bias=bias)
        else:
            reference(a, b, out, accumulator=accumulator, bias=bias)


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    *,
    accumulator: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """Compute `tile_matmul` with torch.

    On the CPU half-precision operands of a sum are converted to fp32, one tile at a time.
    """
    # A single tile: torch's matmul, with its rounding.
    if accumulator is None and out.dtype == a.dtype:
        if bias is None:
            torch.mm(a, b, out=out)
        else:
            torch.addmm(bias.to(a.dtype), a, b, out=out)
        return
    total = accumulator
    if total is None:
        total = wide_product(a, b)
    elif a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)
    else:
        total.add_(wide_product(a, b))
    if bias is not None:
        total.add_(bias)
    # Rounded once, after the bias.
    if total is not out:
        out.copy_(total)


def wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return `a @ b` in `sum_dtype`, not rounded to the operands' dtype: a new [rows, columns]."""
    wide = sum_dtype(a.dtype)
    if a.dtype == wide:
        return torch.mm(a, b)
    # cuBLAS can return fp32 sums of 16-bit operands; on the CPU operands are converted first.
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=wide)
    return torch.mm(a.to(wide), b.to(wide))
