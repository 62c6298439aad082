"""HYPER records: the scalars of one parameter's update, for AdamW, SGD, Lion and Muon.

    AdamW   p = p * (1 - lr * weight_decay)
            m = m * beta1 + g * (1 - beta1);  v = v * beta2 + g * g * (1 - beta2)
            p = p - step_size * m / (sqrt(v) / bc2_sqrt + eps)
    SGD     g = g + p * weight_decay
            b = b * momentum + g * (1 - dampening), in the first step b = g
            p = p - lr * b, with nesterov p - lr * (g + b * momentum), without momentum p - lr * g
    Lion    p = p * (1 - lr * weight_decay);  p = p - lr * sign(m * beta1 + g * (1 - beta1))
            m = m * beta2 + g * (1 - beta2)
    Muon    m = lerp(m, g, 1 - momentum);  u = lerp(g, m, momentum) with nesterov, else m
            p = p * (1 - lr * weight_decay);  p = p - step_size * o, o from u as a bf16 matrix

SGD: torch.optim.SGD. Lion: Chen et al. 2023 ("Symbolic Discovery of Optimization Algorithms") with
decoupled weight decay; sign(0) is 0, sign(NaN) is NaN. Muon: torch.optim.Muon. Scalars are
computed in fp64 and rounded once to fp32, as torch rounds a Python float. Each operation of an
update rounds once to fp32, in the order above, with the same bits as
native/kernels/optimizer_kernels.h.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from infinity._src.cabi.records import HYPER, LOG_MAX, Algorithm, HyperFlag, LogKind

Log: TypeAlias = Sequence[tuple[LogKind | str, float]]
"""Scalings of a gradient since it was accumulated, oldest first: ("mul" | "div" or a LogKind,
factor).
"""


def hyper_row_adamw(
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    log: Log = (),
    key: int = 0,
) -> npt.NDArray[np.void]:
    """Return the HYPER record of an AdamW step, shape (). step: 1 for the first. key: for
    stochastic rounding.

    Raises: ValueError for a step below 1 or a log longer than the kernels replay.
    """
    if step < 1:
        raise ValueError(f"step={step}: the first update is step 1")
    beta1, beta2 = betas
    row = _blank_row(Algorithm.ADAMW, log, key)
    # A learning rate beyond fp32 silently becomes inf, as in torch.
    with np.errstate(over="ignore"):
        row["decay"] = 1.0 - lr * weight_decay
        row["beta1"] = beta1
        row["one_minus_beta1"] = 1.0 - beta1
        row["beta2"] = beta2
        row["one_minus_beta2"] = 1.0 - beta2
        row["eps"] = eps
        # Computed in fp64 and rounded to fp32 once, as torch rounds a Python float.
        row["bc2_sqrt"] = math.sqrt(1.0 - beta2**step)
        row["step_size"] = lr / (1.0 - beta1**step)
    return row


def hyper_row_sgd(
    *,
    lr: float,
    first: bool,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    log: Log = (),
    key: int = 0,
) -> npt.NDArray[np.void]:
    """Return the HYPER record of an SGD step, shape (). first: the first step, which initializes
    the momentum buffer with the gradient.

    Raises: ValueError for values that torch.optim.SGD refuses, or a log that is too long.
    """
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError("nesterov needs a momentum and no dampening")
    row = _blank_row(Algorithm.SGD, log, key)
    # Stored in the fields of Lion's and AdamW's first moment.
    row["beta1"], row["one_minus_beta1"] = momentum, 1.0 - dampening
    row["step_size"], row["weight_decay"] = lr, weight_decay
    row["flags"] = HyperFlag.NESTEROV * nesterov | HyperFlag.FIRST * first
    return row


def hyper_row_lion(
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    log: Log = (),
    key: int = 0,
) -> npt.NDArray[np.void]:
    """Return the HYPER record of a Lion step, shape ().

    Raises: ValueError for a log that is too long.
    """
    row = _blank_row(Algorithm.LION, log, key)
    row["decay"], row["step_size"] = 1.0 - lr * weight_decay, lr
    row["beta1"], row["one_minus_beta1"] = betas[0], 1.0 - betas[0]
    row["beta2"], row["one_minus_beta2"] = betas[1], 1.0 - betas[1]
    return row


def hyper_row_muon_momentum(
    *, momentum: float, nesterov: bool, log: Log = (), key: int = 0
) -> npt.NDArray[np.void]:
    """Return the HYPER record of the first update of a Muon step, shape (), which computes the
    momentum. log: scalings of the gradient.

    Raises: ValueError for a log that is too long.
    """
    row = _blank_row(Algorithm.MUON_MOMENTUM, log, key)
    row["beta1"], row["one_minus_beta1"] = momentum, 1.0 - momentum
    row["flags"] = HyperFlag.NESTEROV * nesterov
    return row


def hyper_row_muon(*, step_size: float, decay: float, key: int = 0) -> npt.NDArray[np.void]:
    """Return the HYPER record of the second update of a Muon step, shape (). decay: the factor of
    the master, 1 - lr * weight_decay.
    """
    row = _blank_row(Algorithm.MUON, (), key)
    with np.errstate(over="ignore"):
        row["step_size"], row["decay"] = step_size, decay
    return row


def _blank_row(algorithm: Algorithm, log: Log, key: int) -> npt.NDArray[np.void]:
    """Return a HYPER record, shape (), without the algorithm's scalars.

    Raises: ValueError for a log longer than the kernels replay.
    """
    # The record's capacity; a truncated log would give a wrong gradient.
    if len(log) > LOG_MAX:
        raise ValueError(
            f"one gradient was scaled or clamped {len(log)} times between two steps; an update "
            f"replays at most {LOG_MAX}: multiply the factors first, or call opt.step() more often"
        )
    row = np.zeros((), dtype=HYPER)
    row["algorithm"], row["key"], row["log_count"] = algorithm, key, len(log)
    with np.errstate(over="ignore"):  # a factor beyond fp32 becomes inf, as in torch
        for index, (kind, factor) in enumerate(log):
            row["log_kind"][index] = LogKind[kind.upper()] if isinstance(kind, str) else int(kind)
            row["log_value"][index] = factor
    return row
