"""LM head and its loss in one, without the logits, forward and backward.

    linear_cross_entropy(hidden, weight, target)       a weight that is a tensor: slices of its rows
    LinearCrossEntropy(head)(hidden, target)           a torch.nn.Linear, or a TiledLinear, of
                                                       which each tile is gathered alone
    tile_loss(model)                                   a model that computes its loss itself

The tiles of a head are links of a chain, as in [Note: the chain of tokens]
(`infinity._src.kernels.tiling.tiled_linear`). In backward the gradient of the first token is the
sum that becomes the hidden states' gradient; the gradient of the second carries what each tile
needs of the whole vocabulary: the rows' log-sum-exp, and the gradient that arrives at their losses.

Numerics: logits are fp32; tiles are merged in order; the hidden states' gradient is summed in fp32
over tiles, the last first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from infinity._src.kernels.linear_cross_entropy import (
    VOCABULARY_TILE,
    Partials,
    Settings,
    merge,
    row_losses,
    tile_dlogits,
    tile_partials,
)
from infinity._src.kernels.tile_matmul import sum_dtype, tile_matmul
from infinity._src.kernels.tiling.tiled_linear import TiledLinear, first_order, token


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    vocabulary_tile: int = VOCABULARY_TILE,
) -> torch.Tensor:
    """Return `cross_entropy(hidden @ weight.t() + bias, target)` without the full logits: at most
    [rows, vocabulary_tile] of them exist at a time.

    hidden: [..., features]; weight: [vocabulary, features]; bias: [vocabulary]; target: int64
    [...], class indices. The other arguments are those of torch's cross_entropy; a mean over
    ignored rows alone is NaN, as in torch. vocabulary_tile affects rounding. Returns fp32 (fp64 for
    fp64 hidden states): a scalar, or with reduction="none" [...]. Computes in the dtype of
    `hidden`, or autocast's.

    Raises: ValueError for shapes, dtypes or settings that do not fit; IndexError, on the CPU, for a
    target that is no class (on a GPU its loss is NaN); SecondOrderUnsupported in a backward with
    create_graph=True.
    """
    settings = Settings(weight.shape[0], ignore_index, label_smoothing, reduction)
    if vocabulary_tile < 1:
        raise ValueError(f"vocabulary_tile={vocabulary_tile} is not a positive number of classes")
    rows, targets = check_call(hidden, target, weight.shape[-1], settings)
    # One node of autograd for all tiles: the weight is one tensor, gathered as a whole.
    loss: torch.Tensor = _Loss.apply(rows, weight, bias, targets, settings, vocabulary_tile)
    return loss.view(target.shape) if reduction == "none" else loss


def check_call(
    hidden: torch.Tensor,
    target: torch.Tensor,
    features: int,
    settings: Settings,
    *,
    cast: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check a call; return hidden [rows, features] in the compute dtype, and target int64 [rows].

    Raises: as `linear_cross_entropy`.
    """
    settings.check()
    if hidden.dim() == 0 or hidden.shape[-1] != features or hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and target {tuple(target.shape)} do not fit a weight of "
            f"{features} features: they are [..., features] and [...]"
        )
    if target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(
            f"target is {target.dtype}; give class indices (int64): class probabilities are not "
            "supported"
        )
    # As in torch's linear: autocast does not convert fp64.
    if cast and torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    targets = target.reshape(-1).long()
    # On a GPU the check would block; `row_losses` returns NaN there.
    if targets.device.type == "cpu":
        wrong = targets[
            (targets != settings.ignore_index) & ((targets < 0) | (targets >= settings.vocabulary))
        ]
        if wrong.numel():
            raise IndexError(f"Target {int(wrong[0])} is out of bounds.")
    return hidden.reshape(-1, features), targets


class LinearCrossEntropy(nn.Module):
    """LM head and its loss in one: `LinearCrossEntropy(model.lm_head)(hidden, labels)`.

    head: a TiledLinear with one tile along its inputs, whose tiles are then gathered one at a time,
    in an offloaded model or not; or a torch.nn.Linear, whose weight is used as it is (in an
    offloaded model inside its forward, or within `gather`). The head stays where it is in the
    model: this module has no parameters. The other arguments and the result are those of
    `linear_cross_entropy`; a TiledLinear's tiles replace vocabulary_tile.

    Raises: ValueError for another kind of head, or one with several tiles along its inputs.
    """

    def __init__(
        self,
        head: nn.Linear | TiledLinear,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        vocabulary_tile: int = VOCABULARY_TILE,
    ) -> None:
        super().__init__()
        self.settings = Settings(head_rows(head), ignore_index, label_smoothing, reduction)
        self.settings.check()
        self.vocabulary_tile = vocabulary_tile
        # In a tuple, so that the head is no submodule, and its parameters have one name in the
        # model.
        self._head = (head,)

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """hidden: [..., features]; target: int64 [...]. Returns the loss."""
        (head,) = self._head
        if isinstance(head, TiledLinear):
            return head_loss(head, hidden, target, self.settings)
        # `linear_cross_entropy` takes the vocabulary from the weight.
        options = self.settings._asdict()
        del options["vocabulary"]
        return linear_cross_entropy(
            hidden, head.weight, target, head.bias, vocabulary_tile=self.vocabulary_tile, **options
        )


def head_rows(head: nn.Module) -> int:
    """Return the number of classes of a head. Raises: ValueError for an unsuitable module."""
    # The softmax needs whole logits, so a tile must have all input features.
    if isinstance(head, TiledLinear) and head.grid.columns > 1:
        raise ValueError(
            f"this head has {head.grid.columns} tiles along its inputs, but the logits of a tile "
            f"need all inputs: use inf.tile_linears(model, tiles=({head.grid.rows}, 1), names=[its "
            "name])"
        )
    if not isinstance(head, (nn.Linear, TiledLinear)):
        raise ValueError(
            f"the head is a {type(head).__name__}; a tiled loss takes a torch.nn.Linear or an "
            "inf.ops.TiledLinear"
        )
    return head.out_features


def head_loss(
    head: TiledLinear,
    hidden: torch.Tensor,
    target: torch.Tensor,
    settings: Settings,
    *,
    cast: bool = True,
) -> torch.Tensor:
    """Compute the loss of a tiled head inside a call of the head, so that hooks on it see one call.

    cast: False if the hidden states already have the compute dtype.
    """
    return head.call(hidden, lambda: _chain(head, hidden, target, settings, cast=cast))


def _chain(
    head: TiledLinear, hidden: torch.Tensor, target: torch.Tensor, settings: Settings, *, cast: bool
) -> torch.Tensor:
    rows, targets = check_call(
        head.entering(hidden) if cast else hidden, target, head.in_features, settings, cast=cast
    )
    # Detached: the tokens carry the hidden states' gradient, in one fixed order.
    running = _Running(rows.detach(), targets, settings)
    sums, lines = _Enter.apply(rows, head.anchor(rows))
    input_grad = rows.requires_grad
    for tile, row, _ in head.tiles():
        first, last = head.grid.row_ends[row], head.grid.row_ends[row + 1]
        # A slice within the graph: autograd assembles the bias's gradient from the tiles'.
        bias = head.bias[first:last] if head.bias is not None else None
        sums, lines = tile(
            _LossTileStep(running, bias, first, row == head.grid.rows - 1, input_grad), sums, lines
        )
    loss: torch.Tensor = _Leave.apply(sums, lines, running)
    return loss.view(target.shape) if settings.reduction == "none" else loss


class _Running:
    """Running partials of one forward over the tiles so far."""

    def __init__(self, hidden: torch.Tensor, target: torch.Tensor, settings: Settings) -> None:
        self.hidden, self.target, self.settings = hidden, target, settings
        self._found: Partials | None = None

    def add(self, weight: torch.Tensor, bias: torch.Tensor | None, start: int) -> None:
        # Merge at once, so that only one tile's partials are stored.
        found = tile_partials(self.hidden, weight, bias, self.target, start=start)
        self._found = found if self._found is None else merge(self._found, found)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the reduced loss, log-sum-exp [rows], and d(loss) / d(a row's loss) [rows]."""
        assert self._found is not None
        settings, valid = self.settings, self.target != self.settings.ignore_index
        losses, lse = row_losses(self._found, self.target, settings)
        share = valid.to(losses.dtype)
        if settings.reduction == "none":
            return losses, lse, share
        if settings.reduction == "mean":
            count = share.sum()
            # Without valid rows the loss is NaN and its gradient 0, as in torch: so only the share
            # has a clamp.
            return losses.sum() / count, lse, share.div_(count.clamp(min=1.0))
        return losses.sum(), lse, share


class _Loss(torch.autograd.Function):
    """Loss of a weight that is one tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        settings: Settings,
        tile: int,
    ) -> torch.Tensor:
        running = _Running(hidden, target, settings)
        for start in range(0, weight.shape[0], tile):
            running.add(
                weight[start : start + tile].to(hidden.dtype), _slice(bias, start, tile), start
            )
        loss, lse, share = running.finish()
        # Logits are not saved: backward computes each tile's again.
        ctx.save_for_backward(hidden, weight, bias, target, lse, share)
        ctx.settings, ctx.tile = settings, tile
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, target, lse, share = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dhidden = dbias = dweight = None
        if wants_weight:
            dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
        if wants_bias:
            dbias = torch.empty_like(bias)
        scale = grad.to(lse.dtype) * share
        # From the last tile to the first: the order in which a tiled head's chain sums.
        for start in reversed(range(0, weight.shape[0], ctx.tile)):
            part = weight[start : start + ctx.tile].to(hidden.dtype)
            dlogits = _dlogits(
                ctx.settings, hidden, part, _slice(bias, start, ctx.tile), target, start, lse, scale
            )
            if dweight is not None:
                _weight_grad(dlogits, hidden, dweight[start : start + ctx.tile])
            if dbias is not None:
                dbias[start : start + ctx.tile] = dlogits.sum(0)
            if wants_hidden:
                dhidden = _add_input_grad(dlogits, part, dhidden)
        return (
            (dhidden.to(hidden.dtype) if dhidden is not None else None),
            dweight,
            dbias,
            None,
            None,
            None,
        )


class _LossTileStep(NamedTuple):
    """Computation of a tile of a head, as a function of its weight and the tokens."""

    running: _Running
    bias: torch.Tensor | None
    start: int
    # Whether this is the last tile of forward. Backward begins with it: its part begins the sum.
    last: bool
    input_grad: bool

    def __call__(self, weight: torch.Tensor, sums: torch.Tensor, lines: torch.Tensor) -> Any:
        running = self.running
        return _Step.apply(
            sums, lines, weight, self.bias, running.hidden, running.target, running.add,
            running.settings, self.start,
            self.last, self.input_grad,
        )  # fmt: skip


class _Enter(torch.autograd.Function):
    """Start of the chain: backward rounds the sum over the tiles to the hidden states' dtype."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, _anchor: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # A missing gradient stays None: zeros for a token would take the memory of its full shape.
        ctx.set_materialize_grads(False)
        ctx.dtype = hidden.dtype
        wide = sum_dtype(hidden.dtype)
        return token(tuple(hidden.shape), wide, hidden.device), token(
            (2, hidden.shape[0]), wide, hidden.device
        )

    @staticmethod
    @first_order
    def backward(
        ctx: Any, dhidden: torch.Tensor | None, _lines: torch.Tensor | None
    ) -> tuple[Any, None]:
        return dhidden.to(ctx.dtype) if dhidden is not None and ctx.needs_input_grad[
            0
        ] else None, None


class _Step(torch.autograd.Function):
    """Link of the chain: one tile of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        sums: torch.Tensor,
        lines: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        hidden: torch.Tensor,
        target: torch.Tensor,
        add: Callable[[torch.Tensor, torch.Tensor | None, int], None],
        settings: Settings,
        start: int,
        last: bool,
        input_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        # The weight is a view of gathered storage, which is gathered again for backward.
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.settings, ctx.start, ctx.last, ctx.input_grad = settings, start, last, input_grad
        add(weight.to(hidden.dtype), bias, start)
        return token(tuple(sums.shape), sums.dtype, sums.device), token(
            tuple(lines.shape), lines.dtype, lines.device
        )

    @staticmethod
    @first_order
    def backward(
        ctx: Any, dhidden: torch.Tensor | None, lines: torch.Tensor | None
    ) -> tuple[Any, ...]:
        # No gradient arrives at the loss: the sum of the other tiles passes through.
        if lines is None:
            return dhidden, lines, *(None,) * 9
        hidden, weight, bias, target = ctx.saved_tensors
        values, dweight = weight.to(hidden.dtype), None
        dlogits = _dlogits(
            ctx.settings, hidden, values, bias, target, ctx.start, lines[0], lines[1]
        )
        if ctx.needs_input_grad[2]:
            dweight = torch.empty_like(weight)
            _weight_grad(dlogits, hidden, dweight)
        dbias = dlogits.sum(0).to(bias.dtype) if ctx.needs_input_grad[3] else None
        if ctx.input_grad:
            dhidden = _add_input_grad(dlogits, values, None if ctx.last else dhidden)
        return dhidden, lines, dweight, dbias, *(None,) * 7


class _Leave(torch.autograd.Function):
    """End of the chain: the loss takes its place in the graph."""

    @staticmethod
    def forward(
        ctx: Any, _sums: torch.Tensor, _lines: torch.Tensor, running: _Running
    ) -> torch.Tensor:
        loss, lse, share = running.finish()
        ctx.save_for_backward(lse, share)
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        lse, share = ctx.saved_tensors
        # The log-sum-exp is passed as a gradient: it is known only after the last tile's forward.
        return None, torch.stack((lse, grad.to(lse.dtype) * share)), None


def _dlogits(
    settings: Settings,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    start: int,
    lse: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    options: dict[str, Any] = {
        "label_smoothing": settings.label_smoothing,
        "vocabulary": settings.vocabulary,
    }
    return tile_dlogits(hidden, weight, bias, target, start=start, lse=lse, scale=scale, **options)


def _weight_grad(dlogits: torch.Tensor, hidden: torch.Tensor, out: torch.Tensor) -> None:
    """Write the gradient of a tile's weight, rounded to its dtype, into `out` [tile, features]."""
    if out.dtype == hidden.dtype:
        tile_matmul(dlogits.t(), hidden, out)
    # Under autocast round to the compute dtype first, as torch's linear does.
    else:
        rounded = torch.empty(out.shape, dtype=hidden.dtype, device=out.device)
        tile_matmul(dlogits.t(), hidden, rounded)
        out.copy_(rounded)


def _add_input_grad(
    dlogits: torch.Tensor, weight: torch.Tensor, total: torch.Tensor | None
) -> torch.Tensor:
    """Add a tile's part of the hidden states' gradient to the sum [rows, features].

    total: None for the first tile of backward, which allocates the sum.
    """
    shape = (dlogits.shape[0], weight.shape[1])
    out = (
        torch.empty(shape, dtype=sum_dtype(weight.dtype), device=weight.device)
        if total is None
        else total
    )
    tile_matmul(dlogits, weight, out, accumulator=total)
    return out


def _slice(bias: torch.Tensor | None, start: int, count: int) -> torch.Tensor | None:
    return None if bias is None else bias[start : start + count]
