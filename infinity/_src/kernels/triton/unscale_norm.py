"""`unscale_norm` in Triton: the bits of infinity/_src/kernels/unscale_norm.py, which says in what order it sums.

Two launches: one over the gradient, which leaves a partial sum and a flag per block, and one program that adds these up. A sum of
two numbers has no order, so a tree of such sums has the same bits however Triton lays it out; neighbours first, because
these are in one thread, then in one warp. `enable_fp_fusion=False` keeps a square and the sum of two apart.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from infinity._src.kernels.triton.quantize import addressed, place, raw
from infinity._src.kernels.triton.random import INFINITY_BITS, bf16_bits, bits_of, float_of_bf16, load_float
from infinity._src.kernels.unscale_norm import BLOCK_NUMEL, PARTIALS


def unscale_norm_triton(
    grad: torch.Tensor, out: torch.Tensor, factor: float | torch.Tensor, divide: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of squares and the finiteness; arguments as `unscale_norm` has checked them."""
    source, columns, source_row, source_column = addressed(grad)
    target, target_columns, target_row, target_column = addressed(out)
    numel, device = grad.numel(), grad.device
    blocks = -(-numel // BLOCK_NUMEL)
    partials = torch.empty(blocks, dtype=torch.float32, device=device)
    infinite = torch.empty(blocks, dtype=torch.int32, device=device)
    squares = torch.empty((), dtype=torch.float32, device=device)
    finite = torch.empty((), dtype=torch.bool, device=device)
    if blocks:
        _unscale[(blocks,)](
            raw(source), raw(target), factor, partials, infinite,
            numel, columns, source_row, source_column, target_columns, target_row, target_column,
            DIVIDE=divide, IN_MEMORY=isinstance(factor, torch.Tensor),
            FROM_BF16=grad.dtype is torch.bfloat16, TO_BF16=out.dtype is torch.bfloat16,
            FROM_STRIDED=columns != 0, TO_STRIDED=target_columns != 0, BLOCK=BLOCK_NUMEL,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    _add_up[(1,)](
        partials, infinite, squares, finite.view(torch.uint8), blocks,
        PARTIALS=PARTIALS, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))
    return squares, finite


@triton.jit
def _by_pairs(values: tl.tensor, NUMEL: tl.constexpr) -> tl.tensor:
    """fp32 [NUMEL], a power of two up to 2048, to its sum."""
    tl.static_assert(NUMEL <= 2048)
    if NUMEL > 1024:
        values = tl.sum(tl.reshape(values, (NUMEL // 2, 2)), axis=1)
    for size in tl.static_range(9, -1, -1):  # from 2 << size numbers to 1 << size
        if (2 << size) <= NUMEL:
            values = tl.sum(tl.reshape(values, (1 << size, 2)), axis=1)
    return values


@triton.jit
def _unscale(
    grad_ptr: tl.tensor, out_ptr: tl.tensor, factor: tl.tensor, partials_ptr: tl.tensor, infinite_ptr: tl.tensor,
    numel: tl.tensor, columns: tl.tensor, source_row: tl.tensor, source_column: tl.tensor,
    target_columns: tl.tensor, target_row: tl.tensor, target_column: tl.tensor,
    DIVIDE: tl.constexpr, IN_MEMORY: tl.constexpr, FROM_BF16: tl.constexpr, TO_BF16: tl.constexpr,
    FROM_STRIDED: tl.constexpr, TO_STRIDED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    value = load_float(grad_ptr + place(index, columns, source_row, source_column, FROM_STRIDED), mask, FROM_BF16)
    if IN_MEMORY:
        by = tl.load(factor)
    else:
        by = factor
    if DIVIDE:
        value = tl.div_rn(value, tl.zeros_like(value) + by)
    else:
        value = value * by
    target = out_ptr + place(index, target_columns, target_row, target_column, TO_STRIDED)
    if TO_BF16:
        rounded = bf16_bits(value)
        written = float_of_bf16(rounded)
    else:
        rounded = value.to(out_ptr.dtype.element_ty)
        written = rounded.to(tl.float32)
    tl.store(target, rounded, mask=mask)
    written = tl.where(mask, written, 0.0)  # 0 / 0, past the end
    tl.store(partials_ptr + tl.program_id(0), tl.sum(_by_pairs(written * written, BLOCK), axis=0))
    infinite = (bits_of(written) & 0x7FFFFFFF) >= INFINITY_BITS
    tl.store(infinite_ptr + tl.program_id(0), tl.max(infinite.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["blocks"])
def _add_up(
    partials_ptr: tl.tensor, infinite_ptr: tl.tensor, squares_ptr: tl.tensor, finite_ptr: tl.tensor, blocks: tl.tensor,
    PARTIALS: tl.constexpr,
) -> None:  # fmt: skip
    column = tl.arange(0, PARTIALS)
    total = tl.zeros((PARTIALS,), tl.float32)
    infinite = tl.zeros((PARTIALS,), tl.int32)
    first = blocks * 0
    while first < blocks:
        mask = column < blocks - first
        total += tl.load(partials_ptr + first + column, mask=mask, other=0.0)
        infinite |= tl.load(infinite_ptr + first + column, mask=mask, other=0)
        first += PARTIALS
    tl.store(squares_ptr, tl.sum(_by_pairs(total, PARTIALS), axis=0))
    tl.store(finite_ptr, (tl.max(infinite, axis=0) == 0).to(tl.uint8))
