"""A tile of the LM head with its loss, in Triton: logits exist only in registers.

    tile_partials    hidden @ weight^T + bias -> per row: max, sum of exp, target's logit, sum
    tile_dlogits     the same logits again    -> their gradient, in the dtype of `hidden`

`tile_partials` reads the tile once.

infinity/_src/kernels/linear_cross_entropy.py has the contract, the torch reference and the loop
over tiles.

**Order of sums.** A program processes _SPAN columns, _BLOCK at a time, with a running maximum and
sum; `row_sums` adds columns within a block, torch adds spans. _BLOCK, _SPAN and BLOCK_K are fixed,
so all tuned configurations give the same bits. Spans provide enough programs: 1,024 rows by 8,192
columns are 64 or 128.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from infinity._src.kernels import choice
from infinity._src.kernels.triton.tuning import (
    MatrixUnit,
    Tuned,
    block_k,
    block_of,
    configs,
    loop_end,
    operand,
    precision,
    rounded,
    row_sums,
    shape_key,
    widened,
)

# Fixed, not tuned, since they determine the order of sums.
_LOG2_BLOCK = 7
_BLOCK = 1 << _LOG2_BLOCK
# Spans of this size give a GPU enough programs: see the module's docstring.
_SPAN = 8 * _BLOCK


@triton.jit
def _logits(
    hidden_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    row_count: tl.tensor,
    column_count: tl.tensor,
    features: tl.tensor,
    stride_hm: tl.tensor,
    stride_hk: tl.tensor,
    stride_wn: tl.tensor,
    stride_wk: tl.tensor,
    stride_bias: tl.tensor,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """fp32 [BLOCK_M, BLOCK_N] logits of int64 rows and columns. Rows outside have the bias alone,
    columns outside 0.
    """
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    hidden_ptrs = hidden_ptr + rows[:, None] * stride_hm + inner[None, :] * stride_hk
    weight_ptrs = weight_ptr + inner[:, None] * stride_wk + columns[None, :] * stride_wn
    hidden_step = tl.cast(stride_hk, tl.int64) * BLOCK_K
    weight_step = tl.cast(stride_wk, tl.int64) * BLOCK_K
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Steps of BLOCK_K, the same for every configuration: they order the sum.
    for start in range(0, loop_end(features, INTERPRETED), BLOCK_K):
        left = inner < features - start
        h = tl.load(hidden_ptrs, mask=(rows < row_count)[:, None] & left[None, :], other=0.0)
        w = tl.load(weight_ptrs, mask=left[:, None] & (columns < column_count)[None, :], other=0.0)
        total = tl.dot(
            operand(h, INTERPRETED), operand(w, INTERPRETED), total, input_precision=PRECISION
        )
        hidden_ptrs += hidden_step
        weight_ptrs += weight_step
    if BIAS:
        bias = tl.load(bias_ptr + columns * stride_bias, mask=columns < column_count, other=0.0)
        total += widened(bias, INTERPRETED)[None, :]
    return total


@triton.jit(do_not_specialize=["start", "shape_key"])
def _partials(
    hidden_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    target_ptr: tl.tensor,
    found_ptr: tl.tensor,
    target_logit_ptr: tl.tensor,
    row_count: tl.tensor,
    column_count: tl.tensor,
    features: tl.tensor,
    start: tl.tensor,
    stride_hm: tl.tensor,
    stride_hk: tl.tensor,
    stride_wn: tl.tensor,
    stride_wk: tl.tensor,
    stride_bias: tl.tensor,
    stride_target: tl.tensor,
    shape_key: tl.tensor,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPAN: tl.constexpr,
    LOG2_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    """found[span, 0..2, row] = max, sum of exp and sum of the logits of a span; target_logit[row],
    only if the span contains the row's target."""
    BLOCK_N: tl.constexpr = 1 << LOG2_BLOCK
    # Consecutive programs take the row blocks of one span: they read the same rows of the weight,
    # from L2.
    blocks = tl.cdiv(row_count, BLOCK_M)
    block, span = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    rows = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    target = tl.load(target_ptr + rows * stride_target, mask=rows < row_count, other=-1) - start
    first = span.to(tl.int64) * SPAN
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum_exp = tl.zeros((BLOCK_M,), tl.float32)
    logit_sum = tl.zeros((BLOCK_M,), tl.float32)
    target_logit = tl.zeros((BLOCK_M,), tl.float32)
    width = tl.minimum(tl.cast(column_count, tl.int64) - first, SPAN)
    for offset in range(0, loop_end(width, INTERPRETED), BLOCK_N):
        columns = first + offset + tl.arange(0, BLOCK_N)
        logits = _logits(
            hidden_ptr, weight_ptr, bias_ptr, rows, columns, row_count, column_count, features,
            stride_hm, stride_hk, stride_wn, stride_wk, stride_bias,
            BIAS, PRECISION, INTERPRETED, BLOCK_K, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        # Columns outside of the tile have no logits; every use below masks them.
        inside = (columns < column_count)[None, :]
        hit = inside & (columns[None, :] == target[:, None])
        target_logit += tl.sum(tl.where(hit, logits, 0.0), axis=1)
        # `row_sums`: `tl.sum` over a row adds in an order that depends on the layout over lanes.
        logit_sum += row_sums(tl.where(inside, logits, 0.0), BLOCK_M, LOG2_BLOCK)
        logits = tl.where(inside, logits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, axis=1))
        # -inf - -inf would be NaN, and exp(-inf) is 0.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        found = row_sums(tl.exp(logits - shift[:, None]), BLOCK_M, LOG2_BLOCK)
        # Rescale the sum to the new maximum, so that exponentials do not overflow.
        row_sum_exp = row_sum_exp * tl.exp(row_max - shift) + found
        row_max = new_max
    there = rows < row_count
    found_ptrs = found_ptr + span.to(tl.int64) * 3 * row_count + rows
    tl.store(found_ptrs, row_max, mask=there)
    tl.store(found_ptrs + row_count, row_sum_exp, mask=there)
    tl.store(found_ptrs + 2 * tl.cast(row_count, tl.int64), logit_sum, mask=there)
    # At most one program has a row's target; the others keep the initial zero.
    mine = (target >= first) & (target < first + SPAN) & (target < column_count)
    tl.store(target_logit_ptr + rows, target_logit, mask=there & mine)


@triton.jit(do_not_specialize=["start", "shape_key"])
def _dlogits(
    hidden_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    target_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_count: tl.tensor,
    column_count: tl.tensor,
    features: tl.tensor,
    start: tl.tensor,
    taken: tl.tensor,
    smooth: tl.tensor,
    stride_hm: tl.tensor,
    stride_hk: tl.tensor,
    stride_wn: tl.tensor,
    stride_wk: tl.tensor,
    stride_bias: tl.tensor,
    stride_target: tl.tensor,
    shape_key: tl.tensor,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """out[row, column] = (exp(logit - lse) - taken * [column is target] - smooth) * scale,
    contiguous; 0 where scale is 0.
    """
    block_m, block_n = block_of(tl.program_id(0), row_count, column_count, BLOCK_M, BLOCK_N, 8)
    rows = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    logits = _logits(
        hidden_ptr, weight_ptr, bias_ptr, rows, columns, row_count, column_count, features,
        stride_hm, stride_hk, stride_wn, stride_wk, stride_bias,
        BIAS, PRECISION, INTERPRETED, BLOCK_K, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    there = rows < row_count
    target = tl.load(target_ptr + rows * stride_target, mask=there, other=-1) - start
    lse = tl.load(lse_ptr + rows, mask=there, other=0.0)
    # Ignored rows have scale 0.
    scale = tl.load(scale_ptr + rows, mask=there, other=0.0)[:, None]
    hit = tl.where(columns[None, :] == target[:, None], taken, 0.0)
    found = (tl.exp(logits - lse[:, None]) - hit - smooth) * scale
    # An ignored row with an infinite logit would give NaN * 0.
    found = tl.where(scale == 0.0, 0.0, found)
    out_ptrs = out_ptr + rows[:, None] * column_count + columns[None, :]
    inside = there[:, None] & (columns < column_count)[None, :]
    tl.store(out_ptrs, rounded(found, out_ptr.dtype.element_ty, INTERPRETED), mask=inside)


def partials_configs(dtype: torch.dtype, unit: MatrixUnit) -> list[Any]:
    """`triton.Config`s of the forward kernel on this unit, whose columns per block are fixed at
    128; the first takes 48 KiB at most.
    """
    # In tensor memory every configuration has 128 rows: `configs` says why.
    sizes = [(128, 8, 1)]
    if unit is not MatrixUnit.TENSOR_MEMORY:
        sizes = [(64, 4, 1), (64, 4, 3), (128, 8, 1)]
    # Where a warp holds its sums in registers, more stages of 128 rows spill 128 bytes and more.
    if dtype != torch.float32 and unit is not MatrixUnit.WARP:
        sizes += [(128, 8, 2), (128, 8, 3), (128, 8, 4)]
    return [
        triton.Config({"BLOCK_M": rows}, num_warps=warps, num_stages=stages)
        for rows, warps, stages in sizes
    ]


_partials_wide = Tuned(_partials, partial(partials_configs, torch.float32))
_partials_narrow = Tuned(_partials, partial(partials_configs, torch.bfloat16))
_dlogits_wide = Tuned(_dlogits, partial(configs, torch.float32))
_dlogits_narrow = Tuned(_dlogits, partial(configs, torch.bfloat16))


def tile_partials(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *,
    start: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(row_max, row_sum_exp, target_logit, logit_sum), fp32 [rows] each:
    `linear_cross_entropy.tile_partials`.

    hidden [rows, features] and weight [tile, features], of one dtype (bf16, fp16, fp32), bias
    [tile], target int64 [rows], any strides. The overhead is 12 bytes per row and span of 1,024
    columns.
    """
    (rows, features), columns = hidden.shape, weight.shape[0]
    _check(hidden, weight, bias, target)
    spans = triton.cdiv(columns, _SPAN)
    # A separate slice for each span, so that no two programs write the same element.
    found = torch.empty((spans, 3, rows), dtype=torch.float32, device=hidden.device)
    # Zeros, since no program writes where the target is in another tile.
    target_logit = torch.zeros(rows, dtype=torch.float32, device=hidden.device)
    if not rows or not columns:
        return (
            target_logit - float("inf"),
            torch.zeros_like(target_logit),
            target_logit,
            torch.zeros_like(target_logit),
        )

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        return (triton.cdiv(rows, meta["BLOCK_M"]) * spans,)

    tuned = _partials_wide if hidden.dtype == torch.float32 else _partials_narrow
    operands, strides, settings = _common(hidden, weight, bias, target)
    key = shape_key(rows, columns, features)
    sizes = (rows, columns, features, start)
    tuned(
        grid,
        hidden.device,
        *operands,
        found,
        target_logit,
        *sizes,
        *strides,
        key,
        SPAN=_SPAN,
        LOG2_BLOCK=_LOG2_BLOCK,
        **settings,
    )
    # Spans are merged by torch, in one fixed order.
    row_max = found[:, 0].amax(0)
    shift = row_max.masked_fill(row_max == float("-inf"), 0.0)
    row_sum_exp = (found[:, 0] - shift).exp_().mul_(found[:, 1]).sum(0)
    logit_sum = found[:, 2].sum(0)
    return row_max, row_sum_exp, target_logit, logit_sum


def tile_dlogits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *,
    start: int,
    lse: torch.Tensor,
    scale: torch.Tensor,
    label_smoothing: float,
    vocabulary: int,
) -> torch.Tensor:
    """[rows, tile] in the dtype of `hidden`, contiguous: `linear_cross_entropy.tile_dlogits`.

    lse, scale: fp32 [rows].
    """
    (rows, features), columns = hidden.shape, weight.shape[0]
    _check(hidden, weight, bias, target)
    out = torch.empty((rows, columns), dtype=hidden.dtype, device=hidden.device)
    if not rows or not columns:
        return out

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        return (triton.cdiv(rows, meta["BLOCK_M"]) * triton.cdiv(columns, meta["BLOCK_N"]),)

    tuned = _dlogits_wide if hidden.dtype == torch.float32 else _dlogits_narrow
    operands, strides, settings = _common(hidden, weight, bias, target)
    # The kernel reads both with stride 1; autograd may pass any strides.
    per_row = [values.to(torch.float32).contiguous() for values in (lse, scale)]
    sizes = (rows, columns, features, start, 1.0 - label_smoothing, label_smoothing / vocabulary)
    tuned(
        grid,
        hidden.device,
        *operands,
        *per_row,
        out,
        *sizes,
        *strides,
        shape_key(rows, columns, features),
        **settings,
    )
    return out


def _common(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...], dict[str, Any]]:
    """Both kernels' operands, strides, and constants."""
    operands = (hidden, weight, hidden if bias is None else bias, target)
    strides = (
        *hidden.stride(),
        *weight.stride(),
        0 if bias is None else bias.stride(0),
        target.stride(0),
    )
    constants = {
        "BIAS": bias is not None,
        "PRECISION": precision(hidden.dtype),
        "INTERPRETED": choice.interpreted(),
        "BLOCK_K": block_k(hidden.dtype),
    }
    return operands, strides, constants


def _check(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor
) -> None:
    assert hidden.dim() == 2, hidden.shape
    assert weight.shape == (weight.shape[0], hidden.shape[1]), (hidden.shape, weight.shape)
    assert hidden.dtype in (torch.bfloat16, torch.float16, torch.float32), hidden.dtype
    assert weight.dtype == hidden.dtype, (hidden.dtype, weight.dtype)
    assert bias is None or bias.shape == weight.shape[:1], bias
    assert target.dtype == torch.int64, target.dtype
    assert target.shape == hidden.shape[:1], (target.shape, hidden.shape)
