"""TiledExperts: a stack of fused experts (transformers >= 5), gathered, computed and released a few
experts at a time, forward and backward.

    sum = zeros
    for each tile of k experts that some token chose, ascending:
        gather
        for each of its experts that some token chose, ascending:
            sum[tokens] += down(gate(up(hidden[tokens]))) * routing weights
        release

Numerics: bitwise equal to the uncut module's eager implementation. An expert's operations are the
same autograd nodes, created in the same order, with the same edges to the hidden states and the
routing weights; so their gradients are added in the same order, too. A tile's gradient has the rows
of the whole stack's gradient.

Backward needs a tile after the gradient of the sum that the tile returned, and until the gradient
of the sum that the tile received: all nodes of the tile's experts lie in between.

If no token chose an expert of a tile, the tile is not gathered. The uncut stack has one gradient,
with zeros for unused experts (so weights and moments decay). So the tile gets a gradient of zeros,
by an empty expert call: a link in the chain of sums that does not read its parameters (`Tile`,
`idle`). On several ranks all ranks gather a tile if one of them needs it (`ChosenTiles`).

Low-rank changes (LoRA): `TiledExperts.changed` adds them to stacks inside a block. An expert's
changed weight is computed for its product, and again for the product's backward, so one changed
weight is in memory at a time, except under autocast, which caches casts. The bits are those of
`baddbmm` over the whole stack, or for several changes of W + (D1 + D2); the gradients of several
changes of rank 1 may differ by rounding.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    weights are [in, out], for `x @ weight`. implementation: returns the implementation that the
    model's configuration selects, or None if the module has only one.
    """

    activate: Callable[[torch.Tensor], torch.Tensor]
    transposed: bool
    implementation: Callable[[], str | None] = lambda: None

    def product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        changes: Sequence[LowRank] = (),
    ) -> torch.Tensor:
        """Return the product of `x` with one expert's weight, plus its changes, and add its bias.
        """
        if not changes:
            y = x @ weight if self.transposed else nn.functional.linear(x, weight)
        elif torch.is_autocast_enabled(x.device.type):
            weight = _changed(weight, changes)
            y = x @ weight if self.transposed else nn.functional.linear(x, weight)
        else:
            scalings = tuple(change.scaling for change in changes)
            factors = [factor for change in changes for factor in (change.lhs, change.rhs)]
            y = _ChangedProduct.apply(x, weight, self.transposed, scalings, *factors)
        # Not the bias of F.linear, which rounds once where the uncut module rounds twice.
        return y if bias is None else y + bias


@dataclasses.dataclass(frozen=True)
class LowRank:
    """A change of a stack: scaling * lhs [experts, rows, rank] @ rhs [experts, rank, columns]. A
    change of one expert's weight lacks the first dimension."""

    lhs: torch.Tensor
    rhs: torch.Tensor
    scaling: float

    def of_each(self) -> list[LowRank]:
        """Return the change of each expert."""
        parts = zip(self.lhs.unbind(0), self.rhs.unbind(0), strict=True)
        return [LowRank(lhs, rhs, self.scaling) for lhs, rhs in parts]


class Changes:
    """Changes of each expert, by stack.

    Not a tuple, list or dict, in which the engine's hooks look for arguments of a tile: the
    gradients of these tensors are complete before the tile's backward has ended.
    """

    def __init__(self, by_stack: Mapping[str, Sequence[LowRank]]) -> None:
        self._parts = {name: [one.of_each() for one in each] for name, each in by_stack.items()}

    def of(self, stack: str, expert: int) -> list[LowRank]:
        """Return the changes of one expert's part of a stack."""
        return [each[expert] for each in self._parts.get(stack, ())]


class TiledExperts(TiledModule):
    """A stack of experts in tiles of a few experts each.

    stacks: each parameter [experts, ...] of the uncut module; the tiles are copies of its parts.
    ends: the first expert of each tile, then the number of experts.

    Called as the uncut module: `(hidden_states [tokens, hidden], top_k_index [tokens, k],
    top_k_weights [tokens, k])` returns [tokens, hidden]. An index equal to the number of experts
    means an expert on another device, and is skipped.
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
        self._changes: dict[str, Sequence[LowRank]] = {}

    @contextmanager
    def changed(self, stack: str, changes: Sequence[LowRank]) -> Iterator[None]:
        """Add changes to a stack (`gate_up_proj`, `down_proj`) in the forwards inside."""
        before = self._changes
        self._changes = {**before, stack: [*before.get(stack, ()), *changes]}
        try:
            yield
        finally:
            self._changes = before

    def stack(self, name: str) -> torch.Tensor:
        """Return a placeholder with the shape, dtype, device and `requires_grad` of a whole stack.
        It reads as zeros: the values are in the tiles."""
        first = self.tile_parameters(name)[0]
        with torch.no_grad():
            found = torch.zeros((), dtype=first.dtype, device=first.device)
        return found.expand(self.whole_shapes[name]).requires_grad_(first.requires_grad)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the experts that tokens chose. Blocks on the device, to read the choices.

        Raises: RuntimeError for an invalid index, or if the configuration selects another
        implementation than eager.
        """
        check_eager(self._function.implementation(), "these tiles of experts")
        routed = route(top_k_index, self.num_experts)
        tiles = [tile for _, tile in self.named_tiles() if isinstance(tile, ExpertsTile)]
        used: list[bool] = self.chosen([routed.any(tile.first, tile.last) for tile in tiles])
        total = torch.zeros_like(hidden_states)
        changes = Changes(self._changes)
        # If tokens chose no expert, the stack gets no gradient (not zeros), as in the uncut module.
        if not any(used):
            return total
        for tile, is_used in zip(tiles, used, strict=True):
            # In training mode, compute unused tiles also if gradients are off: the first forward of
            # a reentrant checkpoint must use the same tiles as its second forward.
            learns = tile.learns and (self.training or torch.is_grad_enabled())
            if is_used or learns:
                total = tile(
                    routed, total, hidden_states, top_k_weights, changes, idle=not is_used
                )
        return total

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, tiles={len(self._tile_names)}"


class ChosenTiles(nn.Module):
    """Agreement of the ranks on the tiles that a forward computes. A call gets and returns a flag
    for each tile: whether a token chose one of its experts.

    On several ranks the engine hooks the call, and returns the tiles that tokens of any rank chose.
    """

    def forward(self, used: list[bool]) -> list[bool]:
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
        """True when a parameter of the tile requires a gradient."""
        return any(parameter.requires_grad for parameter in at_rest_parameters(self).values())

    def forward(
        self,
        routed: Routed,
        total: torch.Tensor,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        changes: Changes,
        *,
        idle: bool = False,
    ) -> torch.Tensor:
        """Add the outputs of the tile's experts to `total` [tokens, hidden] in place; return it.

        hidden [tokens, hidden] and weights [tokens, k] are the uncut module's arguments. changes:
        the changes of the whole stacks. idle: see `Tile`.
        """
        if idle or not routed.any(self.first, self.last):
            # The parameters are leaves that get gradients. In an empty expert call they may have no
            # memory, and are not read.
            if torch.is_grad_enabled():
                leaves = [self._parameters[name] for name in self.places]
                # If the tile is not idle, only tokens of other ranks chose it. Those ranks save
                # tensors here, and a checkpoint around the experts recomputes its forward when the
                # first saved tensor is unpacked. Save one here, too, so that all ranks recompute in
                # the backward of the same tile.
                saved = None if idle else routed.tokens
                total = _Untouched.apply(total, hidden, weights, saved, *leaves)
            return total
        up_name = "gate_up_proj" if "gate_up_proj" in self.places else "up_proj"
        up, down = self._rows(up_name), self._rows("down_proj")
        up_bias, down_bias = self._rows(f"{up_name}_bias"), self._rows("down_proj_bias")
        product = self._function.product
        for expert in range(self.first, self.last):
            places, tokens = routed.of(expert)
            if not len(tokens):
                continue
            index = expert - self.first
            # The uncut module's operations, in the same order: autograd adds gradients in the
            # order in which nodes were created.
            state = hidden[tokens]
            bias = up_bias[index] if up_bias else None
            state = product(state, up[index], bias, changes.of(up_name, expert))
            state = self._function.activate(state)
            bias = down_bias[index] if down_bias else None
            state = product(state, down[index], bias, changes.of("down_proj", expert))
            state = state * weights[tokens, places, None]
            total.index_add_(0, tokens, state.to(total.dtype))
        return total

    def _rows(self, name: str) -> tuple[torch.Tensor, ...]:
        """Return each expert's part of a stack; nothing if the experts have no such stack."""
        if name not in self.places:
            return ()
        stack: torch.Tensor = getattr(self, name)
        # `unbind` is one node for all experts: a selection per expert would create a gradient of
        # the whole tile for each. A stack of one expert is viewed, since the gradient of `unbind`
        # is a copy. Both keep a -0.0 in a gradient, where the uncut module's sum of selections
        # gives 0.0. AdamW computes the same bits from -0.0 and 0.0; plain SGD may leave another
        # sign on a weight that is -0.0.
        return (stack.squeeze(0),) if stack.shape[0] == 1 else stack.unbind(0)


def _changed(weight: torch.Tensor, changes: Sequence[LowRank]) -> torch.Tensor:
    dtype = weight.dtype
    if len(changes) == 1:
        (one,) = changes
        lhs, rhs = one.lhs.to(dtype), one.rhs.to(dtype)
        with torch.autocast(weight.device.type, enabled=False):
            return torch.baddbmm(weight[None], lhs[None], rhs[None], alpha=one.scaling)[0]
    first, *others = (
        (torch.bmm(each.lhs[None], each.rhs[None])[0] * each.scaling).to(dtype) for each in changes
    )
    return weight + sum(others, first)


class _ChangedProduct(torch.autograd.Function):
    """Product with a changed weight. The changed weight is not saved: backward recomputes it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        transposed: bool,
        scalings: tuple[float, ...],
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, *factors)
        ctx.transposed, ctx.scalings = transposed, scalings
        changed = _changed(weight, _paired(factors, scalings))
        return x @ changed if transposed else nn.functional.linear(x, changed)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, weight, *factors = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[1], *ctx.needs_input_grad[4:]]
        with torch.enable_grad():
            leaves = [
                one.detach().requires_grad_(needed)
                for one, needed in zip((weight, *factors), wanted, strict=True)
            ]
            changed = _changed(leaves[0], _paired(leaves[1:], ctx.scalings))
        dx = None
        if ctx.needs_input_grad[0]:
            values = changed.detach()
            dx = dy @ (values.t() if ctx.transposed else values)
        grads: list[torch.Tensor | None] = [None] * len(leaves)
        if any(wanted):
            # The operations that autograd runs for the uncut module's product.
            dw = x.t() @ dy if ctx.transposed else dy.t() @ x
            found = iter(
                torch.autograd.grad(changed, [one for one in leaves if one.requires_grad], dw)
            )
            grads = [next(found) if needed else None for needed in wanted]
        return (dx, grads[0], None, None, *grads[1:])


def _paired(factors: Sequence[torch.Tensor], scalings: Sequence[float]) -> list[LowRank]:
    pairs = zip(factors[::2], factors[1::2], scalings, strict=True)
    return [LowRank(lhs, rhs, scaling) for lhs, rhs, scaling in pairs]


class _Untouched(torch.autograd.Function):
    """Link of the chain of sums for an empty expert call: gives the parameters zero gradients."""

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
        # `_hidden` and `_weights` are arguments so that this link requires a gradient wherever a
        # tile that computes its experts requires one.
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(total)
        # Save shapes, not the parameters, which may have no memory.
        ctx.like = [(tuple(each.shape), each.dtype, each.device) for each in parameters]
        return total

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        # Unpack the saved tensor without reading it: a checkpoint that has not yet recomputed does
        # so here. Do not unpack inside the assert: python -O removes asserts, and ranks would then
        # gather in different orders.
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

    places, tokens: columns and rows of `top_k_index`, sorted by expert, then by place, then by
    token, the order of the uncut module. ends: start of each expert's entries, and the end.
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
    """Sort the choices [tokens, k] by expert. Blocks on the device.

    Raises: RuntimeError for an index below 0 or above `experts`. The index `experts` itself means
    an expert on another device.
    """
    with torch.no_grad():
        count = top_k_index.shape[0]
        # By place, then by token: a stable sort keeps that order within each expert.
        choices = top_k_index.t().reshape(-1)
        chosen, order = torch.sort(choices, stable=True)
        bounds = torch.arange(experts + 2, device=chosen.device, dtype=chosen.dtype)
        ends: list[int] = torch.searchsorted(chosen, bounds).tolist()
        if ends[0] or ends[-1] < len(choices):
            # The choices are sorted: the first or the last is the wrong one.
            wrong = int(chosen[0 if ends[0] else -1])
            raise RuntimeError(
                f"top_k_index has {wrong}, an index of no expert: there are {experts} (and "
                f"{experts} stands for an expert on another rank)"
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
