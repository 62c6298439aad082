"""Matmul straight from int8 groups and 24-bit masters, on Triton: dequantized in registers, between the load and the product.

Of each weight the GPU reads its bytes at rest: 1 and the share of a scale, or 3, instead of 2 written and 2 read again for a bf16
copy. infinity/_src/kernels/quant_matmul.py has the contract and the torch reference.

The weight is the product's first operand (out^T = W @ x^T): on Hopper that one may come from registers, where it has just been
dequantized, and few rows of x then waste little, since the second operand's side of the matrix instruction may be 8 wide.

For the input gradient W is read by columns: out^T = W^T @ dy^T, summed over W's rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from infinity._src.kernels import choice
from infinity._src.kernels.quant_matmul import Int8Weight, Weight
from infinity._src.kernels.triton.tuning import (
    Tuned,
    block_k,
    block_of,
    loop_end,
    operand,
    precision,
    rounded,
    shape_key,
    widened,
)


@triton.jit
def _scales(
    scale_ptr: tl.tensor,
    features: tl.tensor,
    inner: tl.tensor,
    feature_count: tl.tensor,
    inner_count: tl.tensor,
    first_feature: tl.tensor,
    first_inner: tl.tensor,
    stride_feature: tl.tensor,
    stride_inner: tl.tensor,
    GROUP: tl.constexpr,
    BY_ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """fp32 scales of codes [features, inner], as [features, 1] or [1, inner] where one scale serves all of the other side.

    BY_ROWS: groups lie along `inner`, of which there is no more than one here; else along the features. Strides: of the scales,
    per feature and per inner element where that side is not grouped, per group where it is.
    """
    feature_inside, inner_inside = features < feature_count, inner < inner_count
    # One return at the end: Triton wants the same shape of all.
    if BY_ROWS:
        pointers = scale_ptr + features * stride_feature + first_inner // GROUP * stride_inner
        found = tl.load(pointers, mask=feature_inside, other=0.0)
        scale = widened(found, INTERPRETED)[:, None]
    elif GROUP % BLOCK_N == 0:
        pointers = scale_ptr + inner * stride_inner + first_feature // GROUP * stride_feature
        found = tl.load(pointers, mask=inner_inside, other=0.0)
        scale = widened(found, INTERPRETED)[None, :]
    else:
        pointers = scale_ptr + (features // GROUP)[:, None] * stride_feature + inner[None, :] * stride_inner
        found = tl.load(pointers, mask=feature_inside[:, None] & inner_inside[None, :], other=0.0)
        scale = widened(found, INTERPRETED)
    return scale


@triton.jit(do_not_specialize=["shape_key"])
def _multiply(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    more_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    token_count: tl.tensor,
    feature_count: tl.tensor,
    inner_count: tl.tensor,
    stride_xm: tl.tensor,
    stride_xk: tl.tensor,
    stride_cn: tl.tensor,
    stride_ck: tl.tensor,
    stride_mn: tl.tensor,
    stride_mk: tl.tensor,
    stride_bias: tl.tensor,
    shape_key: tl.tensor,
    COMPACT: tl.constexpr,
    GROUP: tl.constexpr,
    BY_ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """out[token, feature] = sum over inner of weight[feature, inner] * x[token, inner] + bias[feature]; out is contiguous.

    codes: int8 codes or int16 `hi`, by (feature, inner). more: scales (see `_scales`) or int8 `lo` by (feature, inner).
    """
    block_n, block_m = block_of(tl.program_id(0), feature_count, token_count, BLOCK_N, BLOCK_M, 8)
    # 64-bit from here on: a row times its stride may pass 2^31 elements.
    features = block_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = block_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    dtype = x_ptr.dtype.element_ty
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in range(0, loop_end(inner_count, INTERPRETED), BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K).to(tl.int64)
        inside = (features < feature_count)[:, None] & (inner < inner_count)[None, :]
        x_inside = (inner < inner_count)[:, None] & (tokens < token_count)[None, :]
        x = tl.load(x_ptr + inner[:, None] * stride_xk + tokens[None, :] * stride_xm, mask=x_inside, other=0.0)
        x = operand(x, INTERPRETED)
        codes = tl.load(codes_ptr + features[:, None] * stride_cn + inner[None, :] * stride_ck, mask=inside, other=0)
        if COMPACT:
            lo = tl.load(more_ptr + features[:, None] * stride_mn + inner[None, :] * stride_mk, mask=inside, other=0)
            high_bits = codes.to(tl.int32) << 16
            weight = (high_bits + (lo.to(tl.int32) << 8)).to(tl.float32, bitcast=True)
            if dtype == tl.bfloat16:
                high = codes.to(tl.bfloat16, bitcast=True)
                total = tl.dot(operand(high, INTERPRETED), x, total, input_precision=PRECISION)
                # What is left has 8 significant bits, exactly a bf16. Infinity less infinity is not asked for.
                weight = tl.where(lo == 0, 0.0, weight - high_bits.to(tl.float32, bitcast=True))
        else:
            scale = _scales(
                more_ptr, features, inner, feature_count, inner_count, block_n * BLOCK_N, start,
                stride_mn, stride_mk, GROUP, BY_ROWS, INTERPRETED, BLOCK_N,
            )  # fmt: skip
            weight = codes.to(tl.float32) * scale
        total = tl.dot(operand(rounded(weight, dtype, INTERPRETED), INTERPRETED), x, total, input_precision=PRECISION)
    if BIAS:
        bias = tl.load(bias_ptr + features * stride_bias, mask=features < feature_count, other=0.0)
        total += widened(bias, INTERPRETED)[:, None]
    out_ptrs = out_ptr + tokens[None, :] * feature_count + features[:, None]
    inside = (features < feature_count)[:, None] & (tokens < token_count)[None, :]
    tl.store(out_ptrs, rounded(total, out_ptr.dtype.element_ty, INTERPRETED), mask=inside)


def weight_configs(dtype: torch.dtype) -> list[Any]:
    """`triton.Config`s for x of this dtype; BLOCK_N: features, never below 64. The first takes no more than 48 KiB."""
    sizes = [(64, 64, 4, 2), (64, 16, 4, 3), (64, 128, 4, 3)]
    if dtype != torch.float32:
        sizes += [(128, 16, 4, 4), (128, 64, 4, 3), (128, 128, 4, 3), (128, 128, 8, 3), (128, 256, 8, 3)]
    return [
        triton.Config({"BLOCK_N": features, "BLOCK_M": tokens}, num_warps=warps, num_stages=stages)
        for features, tokens, warps, stages in sizes
    ]


_wide = Tuned(_multiply, weight_configs(torch.float32))
_narrow = Tuned(_multiply, weight_configs(torch.bfloat16))


def multiply(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, transposed: bool = False) -> torch.Tensor:
    """`quant_matmul.multiply`: x [rows, in] @ W^T + bias, or x [rows, out] @ W if `transposed`; contiguous, in the dtype of x."""
    quantized = isinstance(weight, Int8Weight)
    codes, more = weight[0], weight[1]
    group = weight.group_numel if isinstance(weight, Int8Weight) else 1
    if transposed:
        codes, more = codes.t(), more.t()
    tokens, (features, inner) = x.shape[0], codes.shape
    assert x.shape[1] == inner, (x.shape, codes.shape)
    out = torch.empty((tokens, features), dtype=x.dtype, device=x.device)
    if not tokens or not features:
        return out
    step = block_k(x.dtype)
    if quantized and not transposed and group % step:
        step = 32  # a step of the kernel meets one scale per row

    def grid(meta: dict[str, Any]) -> tuple[int, ...]:
        return (triton.cdiv(features, meta["BLOCK_N"]) * triton.cdiv(tokens, meta["BLOCK_M"]),)

    tuned = _wide if x.dtype == torch.float32 else _narrow
    tuned(
        grid,
        x.device,
        x,
        codes,
        more,
        x if bias is None else bias,
        out,
        tokens,
        features,
        inner,
        *x.stride(),
        *codes.stride(),
        *more.stride(),
        0 if bias is None else bias.stride(0),
        shape_key(tokens, features, inner, form=(quantized, transposed, x.stride(1) == 1)),
        COMPACT=not quantized,
        GROUP=group,
        BY_ROWS=not transposed,
        BIAS=bias is not None,
        PRECISION=precision(x.dtype),
        INTERPRETED=choice.interpreted(),
        BLOCK_K=step,
    )
    return out
