"""Cross-entropy of `hidden @ weight.t() + bias`, tile by tile of the vocabulary: one tile's
contribution and its gradient.

    forward    for each tile of rows of the weight:
                   logits of the tile -> (max, sum of exp, target's logit, sum), merged in order
    backward   for each tile:
                   the logits again -> their gradient -> the weight's, and the hidden states'

At most [rows, vocabulary_tile] logits exist at a time. They are fp32 (fp64 for fp64 hidden states)
and never rounded to the hidden states' dtype, so the loss is more accurate than with bf16 logits.
The hidden states' gradient is summed in fp32. `tile_partials` and `tile_dlogits` have Triton
implementations (infinity/_src/kernels/triton/linear_cross_entropy.py);
`infinity._src.kernels.tiling.tiled_loss` combines them to a loss.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from infinity._src.kernels import choice
from infinity._src.kernels.tile_matmul import wide_product

NAME = "linear_cross_entropy"

VOCABULARY_TILE = 8192
"""Rows of the weight per tile by default.

It determines the order of sums, and so affects the results.
"""

REDUCTIONS = ("none", "mean", "sum")


class Partials(NamedTuple):
    """Contribution of a part of the vocabulary to the loss of each row: four tensors [rows] of
    `sum_dtype`.

    row_max: the largest logit (-inf for an empty part); row_sum_exp: sum of exp(logit - row_max);
    target_logit: the target's logit if it is in this part, else 0; logit_sum: sum of the logits.
    """

    row_max: torch.Tensor
    row_sum_exp: torch.Tensor
    target_logit: torch.Tensor
    logit_sum: torch.Tensor


class Settings(NamedTuple):
    """Settings of the loss: `ignore_index`, `label_smoothing` and `reduction` of torch's
    cross_entropy.
    """

    vocabulary: int
    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "mean"

    def check(self) -> None:
        """Check the settings. Raises: ValueError for an unknown reduction, or a wrong smoothing."""
        if self.reduction not in REDUCTIONS:
            raise ValueError(
                f"reduction={self.reduction!r} is not known; use one of "
                f"{', '.join(map(repr, REDUCTIONS))}"
            )
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing={self.label_smoothing} is not between 0 and 1")


# -- one tile of the vocabulary: operations with a Triton implementation ---------------------------


def tile_partials(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *,
    start: int,
) -> Partials:
    """Compute the contribution of one tile of the vocabulary. Records no graph.

    hidden: [rows, features]; weight: [tile, features] of the same dtype, any strides; bias: [tile]
    or None; target: int64 [rows], indices into the whole vocabulary (ignored rows hold any number);
    start: the tile's first index.
    """
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        if choice.implementation(NAME, hidden.device) == "triton" and hidden.dtype != torch.float64:
            from infinity._src.kernels.triton import (
                linear_cross_entropy as linear_cross_entropy_triton,
            )

            found = linear_cross_entropy_triton.tile_partials(
                hidden, weight, bias, target, start=start
            )
            return Partials(*found)
        return reference_partials(hidden, weight, bias, target, start=start)


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
    """Compute the gradient of the loss by one tile of the logits. Records no graph.

    Returns [rows, tile], rounded to the dtype of `hidden`:

        (exp(logit - lse) - (1 - label_smoothing) * [index is target]
         - label_smoothing / vocabulary) * scale

    lse: [rows] of `sum_dtype`, log-sum-exp over the whole vocabulary. scale: [rows] of `sum_dtype`,
    the gradient of each row's loss, 0 for ignored rows. The gradient of such a row is 0; torch
    returns NaN instead if the row has logits that are not finite. The other arguments are those of
    `tile_partials`.
    """
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        settings: dict[str, Any] = {"label_smoothing": label_smoothing, "vocabulary": vocabulary}
        if choice.implementation(NAME, hidden.device) == "triton" and hidden.dtype != torch.float64:
            from infinity._src.kernels.triton import (
                linear_cross_entropy as linear_cross_entropy_triton,
            )

            found: torch.Tensor = linear_cross_entropy_triton.tile_dlogits(
                hidden, weight, bias, target, start=start, lse=lse, scale=scale, **settings
            )
            return found
        return reference_dlogits(
            hidden, weight, bias, target, start=start, lse=lse, scale=scale, **settings
        )


def reference_partials(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *,
    start: int,
) -> Partials:
    """Compute `tile_partials` with torch."""
    logits = _logits(hidden, weight, bias)
    row_max = logits.amax(1)
    logit_sum = logits.sum(1)
    # Read the target's logit before the exponentials overwrite the logits.
    inside, index = _place(target, start, weight.shape[0])
    target_logit = torch.where(inside, logits.gather(1, index[:, None])[:, 0], 0.0)
    row_sum_exp = logits.sub_(_shift(row_max)[:, None]).exp_().sum(1)
    return Partials(row_max, row_sum_exp, target_logit, logit_sum)


def reference_dlogits(
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
    """Compute `tile_dlogits` with torch."""
    found = _logits(hidden, weight, bias).sub_(lse[:, None]).exp_()
    inside, index = _place(target, start, weight.shape[0])
    taken = inside.to(found.dtype) * (label_smoothing - 1.0)
    # One index per row: gather, add and scatter are deterministic on a GPU; scatter_add_ is not.
    found.scatter_(1, index[:, None], found.gather(1, index[:, None]) + taken[:, None])
    if label_smoothing:
        found.sub_(label_smoothing / vocabulary)
    return found.mul_(scale[:, None]).to(hidden.dtype)


def merge(first: Partials, second: Partials) -> Partials:
    """Merge the partials of two parts of the vocabulary."""
    row_max = torch.maximum(first.row_max, second.row_max)
    shift = _shift(row_max)
    row_sum_exp = (
        first.row_sum_exp * (first.row_max - shift).exp()
        + second.row_sum_exp * (second.row_max - shift).exp()
    )
    return Partials(
        row_max,
        row_sum_exp,
        first.target_logit + second.target_logit,
        first.logit_sum + second.logit_sum,
    )


def row_losses(
    found: Partials, target: torch.Tensor, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's loss and log-sum-exp, both [rows] of `sum_dtype`, from the partials of the
    whole vocabulary.

    The loss of an ignored row is 0. The loss of a row whose target is outside of the vocabulary is
    NaN, since raising an error would have to wait for the GPU.
    """
    smoothing = settings.label_smoothing
    lse = found.row_max + found.row_sum_exp.log()
    losses = lse - (1.0 - smoothing) * found.target_logit
    if smoothing:
        losses -= smoothing / settings.vocabulary * found.logit_sum
    losses.masked_fill_((target < 0) | (target >= settings.vocabulary), float("nan"))
    # Set the losses of ignored rows last: their targets may be out of range.
    return losses.masked_fill_(target == settings.ignore_index, 0.0), lse


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    logits = wide_product(hidden, weight.t())
    return logits if bias is None else logits.add_(bias)


def _shift(row_max: torch.Tensor) -> torch.Tensor:
    """Return the number to subtract before exp: the maximum, or 0 where all logits are -inf."""
    # -inf - -inf would be NaN; exp(-inf) is 0, as it should be.
    return row_max.masked_fill(row_max == float("-inf"), 0.0)


def _place(target: torch.Tensor, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mask of the targets in the tile, and their indices in it (clamped for others)."""
    index = target - start
    return (index >= 0) & (index < count), index.clamp(0, count - 1)
