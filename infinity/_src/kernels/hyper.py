"""What the HYPER records of all algorithms share: the random-rounding key and the log of operations on the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from infinity.aio.plan import HYPER, LOG_MAX, Algorithm, LogKind

Log: TypeAlias = Sequence[tuple[LogKind | str, float]]
"""Operations done to a gradient since it was drained, oldest first: ("mul" | "div" or a LogKind, factor)."""


def blank_row(algorithm: Algorithm, log: Log, key: int) -> npt.NDArray[np.void]:
    """A HYPER record, shape (), with everything but the algorithm's own scalars.

    Raises: ValueError for a log longer than the kernels replay.
    """
    if len(log) > LOG_MAX:
        raise ValueError(
            f"{len(log)} operations were done to one gradient between two steps; at most {LOG_MAX} are replayed: "
            "multiply the factors first, or call opt.step() more often"
        )
    row = np.zeros((), dtype=HYPER)
    row["algorithm"], row["key"], row["log_count"] = algorithm, key, len(log)
    with np.errstate(over="ignore"):  # a factor beyond fp32 becomes inf, as it does in torch
        for index, (kind, factor) in enumerate(log):
            row["log_kind"][index] = LogKind[kind.upper()] if isinstance(kind, str) else int(kind)
            row["log_value"][index] = factor
    return row


def replay_log(grad: npt.NDArray[Any], row: Any) -> npt.NDArray[np.float32]:
    """The gradient in fp32 with the log replayed, a new array. grad: fp32, fp16, or uint16 with the bits of bf16; [numel]."""
    if grad.dtype == np.uint16:
        g: npt.NDArray[np.float32] = (grad.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        g = grad.astype(np.float32)
    for index in range(int(row["log_count"])):
        value = row["log_value"][index]
        g = g * value if int(row["log_kind"][index]) == LogKind.MUL else g / value
    return g
