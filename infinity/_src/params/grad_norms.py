"""Norms of gradients, in fp32: of one tensor, of its pieces, and over ranks.

`torch.nn.utils.clip_grad_norm_` asks `p.grad`, a proxy, for norms. `GradRegistry.norms`
(accumulator.py) answers with these functions.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import torch

NORM_PIECE_NUMEL = 1 << 24  # 64 MiB of fp32 scratch per model, however large its embedding is


def norm_there(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's norm as a scalar on the gradient's device, in pieces as
    `GradAccumulator` computes it. Launches kernels and does not wait for them."""
    if gradient.numel() <= NORM_PIECE_NUMEL:
        norm: torch.Tensor = torch.linalg.vector_norm(gradient.float())
        return norm
    pieces = gradient.reshape(-1).split(NORM_PIECE_NUMEL)
    whole: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(piece.float()) for piece in pieces])
    )
    return whole


def to_fp32(value: float) -> float:
    """Round a number to fp32."""
    return float(torch.tensor(value, dtype=torch.float32))


def norm_of_norms(norms: Sequence[float], order: float, dtype: torch.dtype) -> float:
    """Compute the norm of a tensor from those of its parts. dtype: that of the sum."""
    if len(norms) == 1:
        return norms[0]
    # The norm of order 0 counts nonzero elements.
    if order == 0:
        return float(sum(norms))
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=dtype), order))


def norm_over_ranks(parts: Sequence[float], order: float) -> float:
    """Compute the norm of a gradient from those of the ranks' parts, for another order than 2."""
    return to_fp32(norm_of_norms(parts, order, torch.float64))


def norm_of_squares(squares: Sequence[float]) -> float:
    """Compute the 2-norm of a gradient from the squared 2-norms of the ranks' parts."""
    # `sum` compensates rounding errors from Python 3.12 on; `reduce` never does.
    total = functools.reduce(operator.add, squares)
    return to_fp32(math.sqrt(total)) if total >= 0 else math.nan
