"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"), with decoupled weight decay.

    p = p * (1 - lr * weight_decay);  p = p - lr * sign(m * beta1 + g * (1 - beta1));  m = m * beta2 + g * (1 - beta2)

The sign of zero is zero, that of NaN is NaN. Each operation rounds once to fp32, in that order: the bits of
native/update_body.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity._src.kernels.hyper import Log, blank_row
from infinity.aio.plan import Algorithm


def hyper_row_lion(
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    log: Log = (),
    key: int = 0,
) -> npt.NDArray[np.void]:
    """The HYPER record of one parameter's step, shape (). Raises: ValueError for a log that is too long."""
    row = blank_row(Algorithm.LION, log, key)
    row["decay"], row["step_size"] = 1.0 - lr * weight_decay, lr
    row["beta1"], row["one_minus_beta1"] = betas[0], 1.0 - betas[0]
    row["beta2"], row["one_minus_beta2"] = betas[1], 1.0 - betas[1]
    return row


def lion_(
    param: npt.NDArray[Any], moments: Sequence[npt.NDArray[Any]], grad: npt.NDArray[Any], row: Any
) -> None:
    """The update of fp32 arrays [numel] in place; `moments` holds the one moment."""
    moment = moments[0]
    direction = np.sign(moment * row["beta1"] + grad * row["one_minus_beta1"])
    param *= row["decay"]
    param -= direction * row["step_size"]
    moment[:] = moment * row["beta2"] + grad * row["one_minus_beta2"]
