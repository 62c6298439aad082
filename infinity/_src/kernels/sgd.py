"""SGD as torch.optim.SGD has it: momentum, dampening, nesterov, weight decay added to the gradient.

    g = g + p * weight_decay;  b = b * momentum + g * (1 - dampening), in the first step b = g
    p = p - lr * b, with nesterov p - lr * (g + b * momentum), without momentum p - lr * g

Each operation rounds once to fp32, in that order: the bits of native/update_body.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity._src.kernels.hyper import Log, blank_row
from infinity.aio.plan import Algorithm, HyperFlag


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
    """The HYPER record of one parameter's step, shape (). first: its buffer is not there yet, and becomes the gradient.

    Raises: ValueError for what torch.optim.SGD refuses, or a log that is too long.
    """
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError("nesterov needs a momentum and no dampening")
    row = blank_row(Algorithm.SGD, log, key)
    row["beta1"], row["one_minus_beta1"] = momentum, 1.0 - dampening
    row["step_size"], row["weight_decay"] = lr, weight_decay
    row["flags"] = HyperFlag.NESTEROV * nesterov | HyperFlag.FIRST * first
    return row


def sgd_(
    param: npt.NDArray[Any], moments: Sequence[npt.NDArray[Any]], grad: npt.NDArray[Any], row: Any
) -> None:
    """The update of fp32 arrays [numel] in place; `moments` holds the momentum buffer, or nothing."""
    g = grad + param * row["weight_decay"] if row["weight_decay"] else grad
    flags = int(row["flags"])
    if moments:
        buffer = moments[0]
        buffer[:] = g if flags & HyperFlag.FIRST else buffer * row["beta1"] + g * row["one_minus_beta1"]
        g = g + buffer * row["beta1"] if flags & HyperFlag.NESTEROV else buffer
    param -= g * row["step_size"]
