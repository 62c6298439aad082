"""TiledExperts: a stack of experts, fused as transformers >= 5 has it, which is gathered, computed
and released a few experts at a time, forward and backward.

    sum = zeros
    for each tile of k experts that some token chose, ascending:
        gather
        for each of its experts that some token chose, ascending:
            sum[tokens] += down(gate(up(hidden[tokens]))) * routing weights
        release

Numerics: those of the uncut module's eager implementation, bit by bit. An expert's operations are
the same autograd nodes, made in the same order, with the same edges to the hidden states and the
routing weights; so gradients that meet there are added in the same order, too. A tile's gradient
has the rows of the whole stack's gradient.

Backward needs a tile when it comes to the sum that the tile has returned, and is done with it when
it comes to the sum that the tile was given: between the two lie all nodes of its experts.

Experts that no token chose: a tile of such is not gathered. The uncut stack has one gradient, with
zeros for them (so they decay, and their moments too); so the tile gets a gradient of zeros, by a
link in the chain of sums that does not read its parameters (`Tile`, `idle`). On several ranks a
tile is gathered by all as soon as one of them needs it: `ChosenTiles` is where they agree.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from infinity._src.kernels.tiling.tiled_linear import first_order
from infinity._src.kernels.tiling.tiled_module import (
    Tile,
    TiledModule,
    TilePlace,
    at_rest_parameters,
    copy_tile,
)


@dataclasses.dataclass(frozen=True)
class ExpertFunction:
    """Computation of one expert, as fused experts declare it.

    activate: from the first product [tokens, 2 I] (or [tokens, I]) to [tokens, I]. transposed: the
    weights lie as [in, out], for `x @ weight`. implementation: asks which implementation the
    model's configuration wants now; None where it has no such choice.
    """

    activate: Callable[[torch.Tensor], torch.Tensor]
    transposed: bool
    implementation: Callable[[], str | None] = lambda: None

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute a product with one expert's weight, and add its bias."""
        y = x @ weight if self.transposed else nn.functional.linear(x, weight)
        # Not linear's own bias, which rounds once where this rounds twice.
        return y if bias is None else y + bias


class TiledExperts(TiledModule):
    """A stack of experts in tiles of a few experts each.

    stacks: each parameter [experts, ...] of the uncut module, of which the tiles are copies. ends:
    first expert of each tile, and the number of experts last.

    Called as the uncut module: `(hidden_states [tokens, hidden], top_k_index [tokens, k],
    top_k_weights [tokens, k])` returns [tokens, hidden]. An index equal to the number of experts is
    of an expert elsewhere, and left out.
    """

    def __init__(
        self,
        stacks: Mapping[str, nn.Parameter],
        ends: Sequence[int],
        function: ExpertFunction,
    ) -> None:
        tiles = {}
        for index, (first, last) in enumerate(itertools.pairwise(ends)):
            weights = {}
            for name, stack in stacks.items():
                place = TilePlace((first, last), (0, stack.shape[1]), tuple(stack.shape))
                weights[name] = (copy_tile(stack, place), place)
            tiles[f"tile_{index}_0"] = ExpertsTile(weights, first, last, function)
        super().__init__(tiles)
        self.num_experts = ends[-1]
        self.chosen = ChosenTiles()
        self._function = function

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the experts that tokens chose. Waits for the device: it must know which.

        Raises: RuntimeError for an index of no expert, and where the configuration wants another
        implementation than the eager one.
        """
        check_eager(self._function.implementation(), "these tiles of experts")
        routed = route(top_k_index, self.num_experts)
        tiles = [tile for _, tile in self.named_tiles() if isinstance(tile, ExpertsTile)]
        used: list[bool] = self.chosen([routed.any(tile.first, tile.last) for tile in tiles])
        total = torch.zeros_like(hidden_states)
        # Nothing was computed: the stack has no gradient then, not one of zeros.
        if not any(used):
            return total
        for tile, is_used in zip(tiles, used, strict=True):
            # Also without gradients while training: it may be the first forward of a reentrant
            # checkpoint, which has to use what its second one uses.
            learns = tile.learns and (self.training or torch.is_grad_enabled())
            if is_used or learns:
                total = tile(routed, total, hidden_states, top_k_weights, idle=not is_used)
        return total

    def extra_repr(self) -> str:
        """Sizes, for people."""
        return f"num_experts={self.num_experts}, tiles={len(self._tile_names)}"


class ChosenTiles(nn.Module):
    """Agreement on the tiles that a forward computes: a flag for each, whether a token chose one of
    its experts.

    An engine on several ranks hooks its calls, and returns the tiles that tokens of any rank chose.
    """

    def forward(self, used: list[bool]) -> list[bool]:
        """Return `used`."""
        return used


class ExpertsTile(Tile):
    """Tile of a few experts: rows [first, last) of each stack."""

    def __init__(
        self,
        weights: Mapping[str, tuple[nn.Parameter, TilePlace]],
        first: int,
        last: int,
        function: ExpertFunction,
    ) -> None:
        super().__init__(weights)
        self.first, self.last = first, last
        self._function = function

    @property
    def learns(self) -> bool:
        """True when one of its parameters requires a gradient."""
        return any(parameter.requires_grad for parameter in at_rest_parameters(self).values())

    def forward(
        self,
        routed: Routed,
        total: torch.Tensor,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        *,
        idle: bool = False,
    ) -> torch.Tensor:
        """Add what its experts compute to `total` [tokens, hidden], in place, and return that.

        hidden [tokens, hidden] and weights [tokens, k] are the uncut module's arguments. idle: see
        `Tile`.
        """
        if idle or not routed.any(self.first, self.last):
            # Leaves for gradients: in an idle call they may have no memory, and nothing reads them.
            if torch.is_grad_enabled():
                leaves = [self._parameters[name] for name in self.places]
                # Tokens of another rank chose it: that rank saves tensors here, and a checkpoint
                # around the experts computes them again when the first one is asked for. On all
                # ranks that has to be in the backward of the same tile.
                saved = None if idle else routed.tokens
                total = _Untouched.apply(total, hidden, weights, saved, *leaves)
            return total
        up = self._rows("gate_up_proj") or self._rows("up_proj")
        down = self._rows("down_proj")
        up_bias = self._rows("gate_up_proj_bias") or self._rows("up_proj_bias")
        down_bias = self._rows("down_proj_bias")
        for expert in range(self.first, self.last):
            places, tokens = routed.of(expert)
            if not len(tokens):
                continue
            index = expert - self.first
            # Each operation as the uncut module has it, in its order: autograd adds gradients up in
            # the order in which these were made.
            state = hidden[tokens]
            state = self._function.product(state, up[index], up_bias[index] if up_bias else None)
            state = self._function.activate(state)
            state = self._function.product(
                state, down[index], down_bias[index] if down_bias else None
            )
            state = state * weights[tokens, places, None]
            total.index_add_(0, tokens, state.to(total.dtype))
        return total

    def _rows(self, name: str) -> tuple[torch.Tensor, ...]:
        """Return each expert's part of a stack; nothing if the experts have no such stack."""
        if name not in self.places:
            return ()
        stack: torch.Tensor = getattr(self, name)
        # One node for all: a selection for each would make a gradient of the whole tile for each.
        # A view for one: the gradient of `unbind` is a copy. It keeps a -0.0, of which the sum of
        # selections in the uncut module makes 0.0: AdamW has the same bits of both, and plain SGD
        # may leave another sign on a weight that is -0.0.
        return (stack.squeeze(0),) if stack.shape[0] == 1 else stack.unbind(0)


class _Untouched(torch.autograd.Function):
    """Link of the chain of sums for a tile that computes nothing: its parameters get zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        total: torch.Tensor,
        _hidden: torch.Tensor,
        _weights: torch.Tensor,
        saved: torch.Tensor | None,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        if saved is not None:
            ctx.save_for_backward(saved)
        # `_hidden` and `_weights`: this link needs a gradient wherever a tile that computes does.
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(total)
        # Not the parameters, which may be in no memory.
        ctx.like = [(tuple(each.shape), each.dtype, each.device) for each in parameters]
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # Asked for, not read: a checkpoint computes again now, if it has not. Not inside of the
        # assert, which python -O leaves out: ranks would gather in another order.
        saved = ctx.saved_tensors
        assert len(saved) < 2
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if wanted and dy is not None else None
            for (shape, dtype, device), wanted in zip(
                ctx.like, ctx.needs_input_grad[4:], strict=True
            )
        ]
        return (dy, None, None, None, *zeros)


@dataclasses.dataclass(frozen=True)
class Routed:
    """Tokens of each expert.

    places, tokens: the positions in `top_k_index`, by column and row, those of expert 0 first; of
    one expert by place, then by token, as the uncut module finds them. ends: where each expert's
    begin, and the end.
    """

    places: torch.Tensor
    tokens: torch.Tensor
    ends: list[int]

    def any(self, first: int, last: int) -> bool:
        """True when a token chose one of the experts [first, last)."""
        return self.ends[last] > self.ends[first]

    def of(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places and tokens of one expert."""
        part = slice(self.ends[expert], self.ends[expert + 1])
        return self.places[part], self.tokens[part]


def route(top_k_index: torch.Tensor, experts: int) -> Routed:
    """Sort the choices [tokens, k] by expert. Waits for the device.

    Raises: RuntimeError for an index that is no expert's; `experts` itself is one elsewhere.
    """
    with torch.no_grad():
        count = top_k_index.shape[0]
        # By place, then by token: a stable sort keeps that order within each expert.
        choices = top_k_index.t().reshape(-1)
        chosen, order = torch.sort(choices, stable=True)
        bounds = torch.arange(experts + 2, device=chosen.device, dtype=chosen.dtype)
        ends: list[int] = torch.searchsorted(chosen, bounds).tolist()
        if ends[0] or ends[-1] < len(choices):
            # Sorted: one that is too small comes first, one that is too large last.
            wrong = int(chosen[0 if ends[0] else -1])
            raise RuntimeError(
                f"top_k_index has {wrong}, an index of no expert: there are {experts} (and "
                f"{experts} itself is an expert elsewhere)"
            )
        return Routed(order // max(count, 1), order % max(count, 1), ends)


def check_eager(implementation: str | None, what: str) -> None:
    """Raise RuntimeError for an implementation that is not the eager one."""
    if implementation not in (None, "eager"):
        raise RuntimeError(
            f"config._experts_implementation is {implementation!r}, and {what} compute as 'eager' "
            "does: other implementations take all experts at once, and add up in another order. "
            "Call model.set_experts_implementation('eager') first"
        )
