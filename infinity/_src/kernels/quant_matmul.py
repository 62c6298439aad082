"""Matmul straight from weights that are kept in fewer bits: int8 in groups, or 24-bit masters. Differentiable by what they meet.

    q = groups.quantize(weight, bits=8, group_numel=128)
    y = int8_matmul(x, q.codes.view(q.shape), q.scales, group_numel=128, bias=bias)     # a frozen base in int8 under LoRA
    y = compact_matmul(x, hi, lo, bias)                                 # the `compact` state's master, all 24 bits of it

    forward    y  = x @ W^T + bias         W is dequantized block by block in the load: it never exists as a whole
    backward   dx = dy @ W                 nothing but the codes is kept for it; W gets no gradient

**What multiplies.** int8: code * scale, rounded to the dtype of x, as if W had been dequantized to it first. 24-bit masters:
bf16 x meets W = hi + low, where `low`, what lo adds to hi, has 8 significant bits and so is a bf16 exactly; two products, summed
in fp32, use all of the master. fp16 x meets W rounded to fp16, fp32 x meets W. (Whoever wants the bf16 parameter alone
multiplies by `hi.view(torch.bfloat16)`: that is a plain matmul.) Sums are fp32 and, with the bias, rounded once, to the dtype
of x.

The reference dequantizes W as a whole and calls torch's matmul. Which of the two runs: infinity/_src/kernels/choice.py, as
`int8_matmul` and `compact_matmul`. They add in another order, so they round alike only where sums are exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch.autograd.function import once_differentiable

from infinity._src.kernels import choice
from infinity._src.kernels.tile_matmul import wide_product

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUP_STEP = 32
"""Groups are multiples of this many elements, so that a step of the kernel meets one scale per row."""


class Int8Weight(NamedTuple):
    """W [out, in] as codes int8 [out, in] and scales [out, ceil(in / group_numel)], bf16 or fp32: W = code * scale."""

    codes: torch.Tensor
    scales: torch.Tensor
    group_numel: int

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """W in `dtype`, [out, in]: one rounding of the fp32 product."""
        scales = self.scales.float().repeat_interleave(self.group_numel, dim=1)[:, : self.codes.shape[1]]
        return scales.mul_(self.codes).to(dtype)


class CompactWeight(NamedTuple):
    """W [out, in] as `hi` int16 (the bits of a bf16) and `lo` int8, both [out, in]: bits of W = (hi << 16) + (lo << 8)."""

    hi: torch.Tensor
    lo: torch.Tensor

    def master(self) -> torch.Tensor:
        """W in fp32, [out, in], exactly: `codec.decode_sections` of a 24-bit master."""
        return ((self.hi.int() << 16) + (self.lo.int() << 8)).view(torch.float32)

    def parts(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """What x of `dtype` is multiplied by: tensors [out, in] of it, whose sum is W (fp16: W rounded)."""
        master = self.master()
        if dtype != torch.bfloat16:
            return [master.to(dtype)]
        high = self.hi.view(torch.bfloat16)
        # Where lo is 0 so is the difference, and infinity less infinity is not asked for.
        low = torch.where(self.lo == 0, 0.0, master - high.float())
        return [high, low.to(torch.bfloat16)]


Weight = Int8Weight | CompactWeight


def int8_matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    group_numel: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ W^T + bias, for W in int8: [..., out] in the dtype of x, which under autocast is autocast's.

    x: [..., in], bf16, fp16 or fp32, any strides. codes: int8 [out, in], any strides. scales: bf16 or fp32, per `group_numel`
    (a multiple of 32) elements along a row: [out, ceil(in / group_numel)], or the same flat where groups fill rows exactly.
    bias: [out] of any float dtype. Gradients: x and bias. Raises: ValueError for what is none of these.
    """
    weight = _int8_weight(codes, scales, group_numel)
    x = _autocast(x)
    _check(x, codes, scales, bias)
    out: torch.Tensor = _QuantMatmul.apply(x, bias, "int8_matmul", *weight)
    return out


def compact_matmul(x: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ W^T + bias, for W as a 24-bit master: [..., out] in the dtype of x, which under autocast is autocast's.

    x: [..., in], bf16, fp16 or fp32, any strides. hi: [out, in], bf16 or its bits as int16 or uint16; lo: int8 [out, in]; any
    strides. bias: [out] of any float dtype. Gradients: x and bias. Raises: ValueError for what is none of these.
    """
    if hi.dtype not in (torch.bfloat16, torch.int16, torch.uint16) or lo.dtype != torch.int8:
        raise ValueError(f"hi is {hi.dtype} and lo is {lo.dtype}: pass bfloat16 (or its bits as int16 or uint16) and int8")
    if hi.dim() != 2 or hi.shape != lo.shape:
        raise ValueError(f"hi is {list(hi.shape)} and lo {list(lo.shape)}: both are [out, in]")
    x = _autocast(x)
    _check(x, hi, lo, bias)
    out: torch.Tensor = _QuantMatmul.apply(x, bias, "compact_matmul", hi.detach().view(torch.int16), lo)
    return out


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype in which a linear would compute here."""
    if x.dtype in DTYPES and torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _int8_weight(codes: torch.Tensor, scales: torch.Tensor, group_numel: int) -> Int8Weight:
    if group_numel < GROUP_STEP or group_numel % GROUP_STEP:
        raise ValueError(f"group_numel={group_numel}: use a multiple of {GROUP_STEP}")
    if codes.dtype != torch.int8 or scales.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"codes are {codes.dtype} and scales {scales.dtype}: pass int8, and bfloat16 or float32")
    if codes.dim() != 2:
        raise ValueError(f"codes are {list(codes.shape)}: pass [out, in]")
    rows, inner = codes.shape
    groups = -(-inner // group_numel)
    if scales.dim() == 1 and inner % group_numel == 0 and scales.numel() == rows * groups:
        scales = scales.view(rows, groups)
    if scales.shape != (rows, groups):
        raise ValueError(
            f"scales are {list(scales.shape)}: codes {list(codes.shape)} in groups of {group_numel} along rows take "
            f"[{rows}, {groups}]; "
            "groups that run on from one row into the next cannot be multiplied, quantize with a group that divides the row"
        )
    return Int8Weight(codes, scales.detach(), group_numel)


def _check(x: torch.Tensor, codes: torch.Tensor, more: torch.Tensor, bias: torch.Tensor | None) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}: pass bfloat16, float16 or float32")
    if x.dim() < 1 or x.shape[-1] != codes.shape[1]:
        raise ValueError(f"x is {list(x.shape)} and the weight {list(codes.shape)}: pass [..., {codes.shape[1]}]")
    if bias is not None and (bias.shape != codes.shape[:1] or not bias.is_floating_point()):
        raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}: pass floating point [{codes.shape[0]}]")
    for tensor in (codes, more, bias):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"x is on {x.device}, and a part of weight or bias on {tensor.device}: bring them together first")


class _QuantMatmul(torch.autograd.Function):
    """The product and its gradients by x and bias. weight: the fields of `Int8Weight` or `CompactWeight`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, name: str, *weight: Any) -> torch.Tensor:
        ctx.save_for_backward(*weight[:2])
        ctx.name, ctx.settings, ctx.bias_dtype = name, weight[2:], None if bias is None else bias.dtype
        flat = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
        return multiply(name, flat, _weight(name, weight), bias).view(*x.shape[:-1], weight[0].shape[0])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flat = dy.reshape(-1, dy.shape[-1]) if dy.dim() != 2 else dy
        weight = _weight(ctx.name, (*ctx.saved_tensors, *ctx.settings))
        dx = dbias = None
        if ctx.needs_input_grad[0]:
            dx = multiply(ctx.name, flat, weight, transposed=True).view(*dy.shape[:-1], weight[0].shape[1])
        if ctx.needs_input_grad[1]:
            dbias = flat.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return (dx, dbias, None, None, None, *(None for _ in ctx.settings))


def _weight(name: str, fields: tuple[Any, ...]) -> Weight:
    return Int8Weight(*fields) if name == "int8_matmul" else CompactWeight(*fields)


def multiply(
    name: str, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, transposed: bool = False
) -> torch.Tensor:
    """x [rows, in] @ W^T + bias, or x [rows, out] @ W if `transposed`, in the dtype of x, by what `choice` says. No graph."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        if choice.implementation(name, x.device) == "triton":
            from infinity._src.kernels.triton import quant_matmul as quant_matmul_triton

            return quant_matmul_triton.multiply(x, weight, bias, transposed=transposed)
        return reference(x, weight, bias, transposed=transposed)


def reference(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, transposed: bool = False) -> torch.Tensor:
    """`multiply` with torch: W dequantized as a whole, then torch's matmul."""
    if isinstance(weight, Int8Weight):
        whole = weight.dequantized(x.dtype)
        return F.linear(x, whole.t() if transposed else whole, None if bias is None else bias.to(x.dtype))
    parts = [part if transposed else part.t() for part in weight.parts(x.dtype)]
    total = wide_product(x, parts[0])
    for part in parts[1:]:
        total += wide_product(x, part)
    return (total if bias is None else total + bias).to(x.dtype)
