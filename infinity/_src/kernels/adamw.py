"""AdamW in torch: the scalars, the master encoding, and the update that the native kernels must match bit for bit.

It is the reference of AdamW in native/update_body.h and what runs where there is no compiler. Every line below is one operation
that rounds once to fp32; fused forms (`addcmul_`, `add_(alpha=)`) are avoided because they may contract to an FMA, and
`torch.sqrt` because it does not round correctly (`sqrt_exact`). CPU only: a GPU divides by a scalar through its
reciprocal. Denormals are kept unless torch.set_flush_denormal is on; the native kernels keep them always.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.kernels.hyper import Log, blank_row
from infinity.aio.plan import Algorithm, LogKind

NAN_BITS = 0x7FC00000


@dataclass(frozen=True)
class Hyper:
    """What one AdamW update depends on besides the states, in Python doubles.

    `step` counts from 1 (the update about to happen). `log` holds the operations done to the gradient since it was
    drained, oldest first, as ("mul" | "div" or a LogKind, factor); they are replayed in fp32 before the update.
    """

    lr: float
    step: int
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    log: tuple[tuple[LogKind | str, float], ...] = ()
    key: int = 0

    def row(self) -> npt.NDArray[np.void]:
        """The HYPER record; see `hyper_row`."""
        return hyper_row(
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            step=self.step,
            log=self.log,
            key=self.key,
        )


def hyper_row(
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    log: Log = (),
    key: int = 0,
) -> npt.NDArray[np.void]:
    """The HYPER record, shape (): scalars computed in double, then rounded once to fp32. key: of random rounding.

    Raises: ValueError for a step below 1 or a log longer than the kernels replay.
    """
    if step < 1:
        raise ValueError(f"step={step}: the first update is step 1")
    beta1, beta2 = betas
    row = blank_row(Algorithm.ADAMW, log, key)
    with np.errstate(over="ignore"):
        row["decay"] = 1.0 - lr * weight_decay
        row["beta1"] = beta1
        row["one_minus_beta1"] = 1.0 - beta1
        row["beta2"] = beta2
        row["one_minus_beta2"] = 1.0 - beta2
        row["eps"] = eps
        row["bc2_sqrt"] = math.sqrt(1.0 - beta2**step)
        row["step_size"] = lr / (1.0 - beta1**step)
    return row


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [numel] -> (hi bf16, lo int16): bits32 = (hi << 16) + lo, hi rounded to nearest, ties away from zero.

    NaN becomes 0x7FC00000: 0x7FFFFFFF would round up into the sign and come back as -0.0.
    """
    hi, lo = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    _split_into(master, hi.view(torch.int16), lo)
    return hi, lo


def join_master(hi: torch.Tensor, lo: torch.Tensor) -> torch.Tensor:
    """(hi bf16 or its int16 view, lo int16) -> the fp32 master, a new tensor."""
    high = hi.view(torch.int16).to(torch.int32) << 16
    return (high + lo.to(torch.int32)).view(torch.float32)


def sqrt_exact(value: torch.Tensor) -> torch.Tensor:
    """The correctly rounded square root of a CPU fp32 tensor of one dimension or more, a new tensor.

    torch.sqrt on CPU is MKL's, off by one unit in the last place for 0.6 % of values (torch 2.13); the CPU's own
    instruction, which numpy and the native kernels use, never is.
    """
    with np.errstate(invalid="ignore"):  # a negative number gives NaN, as in torch
        return torch.from_numpy(np.sqrt(value.detach().numpy()))


def _split_into(master: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor) -> None:
    bits = master.view(torch.int32).masked_fill(master.isnan(), NAN_BITS)
    # int32 -> int16 keeps the low half; >> on int32 is arithmetic, and the wrap of bits + 0x8000 is the one we want
    # (0xFFFFxxxx cannot occur: it is a NaN).
    hi.copy_((bits + 0x8000) >> 16)
    lo.copy_(bits)


def _gradient(grad: torch.Tensor, row: Any) -> torch.Tensor:
    """The gradient in fp32 with the log replayed; a new tensor unless there is nothing to do."""
    g = grad.to(torch.float32, copy=bool(row["log_count"]))
    for index in range(int(row["log_count"])):
        value = float(row["log_value"][index])
        if int(row["log_kind"][index]) == LogKind.MUL:
            g.mul_(value)
        else:
            g.div_(value)
    return g


def _update(
    param: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad: torch.Tensor, row: Any
) -> None:
    """The update of fp32 states, in place; the order of operations is the specification."""
    g = _gradient(grad, row)
    param.mul_(float(row["decay"]))
    exp_avg.mul_(float(row["beta1"])).add_(g * float(row["one_minus_beta1"]))
    exp_avg_sq.mul_(float(row["beta2"])).add_((g * g).mul_(float(row["one_minus_beta2"])))
    denom = sqrt_exact(exp_avg_sq).div_(float(row["bc2_sqrt"])).add_(float(row["eps"]))
    param.sub_(torch.div(exp_avg, denom, out=denom).mul_(float(row["step_size"])))


def _row(hyper: Hyper | Any) -> Any:
    return hyper.row() if isinstance(hyper, Hyper) else hyper


def adamw_fp32_(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    hyper: Hyper | Any,
) -> None:
    """AdamW on fp32 states, in place. All [numel]; grad bf16 or fp32; hyper a Hyper or a HYPER record."""
    with torch.no_grad():
        _update(param, exp_avg, exp_avg_sq, grad, _row(hyper))


def adamw_split_(
    hi: torch.Tensor,
    lo: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    hyper: Hyper | Any,
) -> None:
    """AdamW on a split master, in place.

    All [numel]: hi bf16 (or its int16 view), lo int16, moments fp32, grad bf16 or fp32; hyper a Hyper or a HYPER
    record.
    """
    with torch.no_grad():
        master = join_master(hi, lo)
        _update(master, exp_avg, exp_avg_sq, grad, _row(hyper))
        _split_into(master, hi.view(torch.int16), lo)
