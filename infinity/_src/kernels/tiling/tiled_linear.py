"""TiledLinear: a linear whose weight is gathered, multiplied and released one tile at a time,
forward and backward.

    forward    for each row of tiles:
                   for each tile:  gather, sum += x[:, columns] @ tile.t(), release
                   y[:, rows] = sum
    backward   for each tile, in reverse:
                   gather, dtile = dy[:, rows].t() @ x[:, columns]
                   dx[:, columns] += dy[:, rows] @ tile, release

[Note: the chain of tokens] Autograd orders backward, and each tile must be one node that only needs
its tile's weight. So the tiles are links of a chain: each has two tokens as inputs and two as
outputs, tensors with shape and dtype but one element of memory, whose values are not read. In
forward they only connect the links (results are written directly to the output). In backward their
gradients carry the shared data: the first is the sum that becomes dx, to which each link adds its
part in place, in fp32; the second is dy, passed through. So the sum has one fixed order, and is
rounded once.

    x -> Enter -> (dx token, dy token) -> link -> link -> ... -> Leave -> y

A token is an output of the previous link, so its gradient is complete before that link's backward:
the engine then releases one tile before it gathers the next.

Numerics: with one tile along the inputs, an output equals torch's linear with the same rows of the
weight. With several, the products of the tiles are summed in order in fp32 (fp64 for fp64), the
bias is added, and the sum is rounded once. The input's gradient is summed in fp32 over rows of
tiles, the last first. Gradients of weights and bias equal torch's. The results do not depend on the
weights' tier.
Source: ZeRO-Infinity §5.1.3; there the tiles' outputs are rounded before they are summed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from infinity._src.kernels.tile_matmul import sum_dtype, tile_matmul
from infinity._src.kernels.tiling.tiled_module import Grid, TiledMatrix, Tiles, copy_tiles
from infinity.errors import SecondOrderUnsupported


class TiledLinear(TiledMatrix):
    """A torch.nn.Linear in tiles: y = x @ weight.t() + bias. x: [..., in_features]; y: [...,
    out_features], of x's dtype.

    tiles: how many, along the output features, or (along outputs, along inputs). `parameters()` are
    the tiles and the bias; `state_dict()` has `weight` and `bias` as the untiled module. Works
    without offloading, too. Under autocast it computes in autocast's dtype, as torch's linear does.
    A backward with create_graph=True raises SecondOrderUnsupported.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        tiles: Tiles,
    ) -> None:
        """Initialize like torch.nn.Linear (uniform, bound 1 / sqrt(in_features)), with other random
        numbers.

        Raises: ValueError for more tiles than features.
        """
        grid = Grid.of(out_features, in_features, tiles)
        places = [grid.place(row, column) for _, row, column in grid.names()]
        shapes = [
            (place.rows[1] - place.rows[0], place.columns[1] - place.columns[0]) for place in places
        ]
        weights = [nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) for shape in shapes]
        self._setup(
            weights,
            grid,
            nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None,
        )
        self.reset_parameters()

    def _setup(self, weights: list[nn.Parameter], grid: Grid, bias: nn.Parameter | None) -> None:
        super().__init__(weights, grid)
        self.out_features, self.in_features = grid.whole_shape
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)

    @classmethod
    def of_tiles(
        cls, weights: list[nn.Parameter], grid: Grid, bias: nn.Parameter | None
    ) -> TiledLinear:
        """Create a tiled linear on these parameters, without copies; other modules may share them.

        weights: row after row of the grid.
        """
        made = cls.__new__(cls)
        made._setup(weights, grid, bias)
        return made

    @classmethod
    def from_linear(cls, linear: nn.Linear, tiles: Tiles) -> TiledLinear:
        """Return `linear` in tiles. The tiles are copies of its weight; the bias is shared.

        Raises: ValueError for more tiles than features.
        """
        grid = Grid.of(linear.out_features, linear.in_features, tiles)
        return cls.of_tiles(copy_tiles(linear.weight, grid), grid, linear.bias).train(
            linear.training
        )

    def reset_parameters(self) -> None:
        """Draw new values for weight and bias, from the distribution of torch.nn.Linear."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self, x: torch.Tensor, *, instead: Callable[[], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """x: [..., in_features] of the weight's dtype. Returns [..., out_features].

        instead: another computation with these tiles (the loss), made inside this module's call,
        whose result is returned. Raises: RuntimeError for another dtype or number of features, as
        torch's linear does.
        """
        return instead() if instead is not None else self.multiply(self.entering(x))

    def call(self, x: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the result of `compute`, made inside a call of this module with `x`.

        Hooks' changes of the output are ignored, since it is not the linear's output.
        """
        found: list[torch.Tensor] = []

        def instead() -> torch.Tensor:
            found.append(compute())
            return found[0]

        # Call the module, since the engine's hooks gather around its calls.
        self(x, instead=instead)
        return found[0]

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product. x: [..., in_features] in the compute dtype."""
        rows = x.reshape(-1, self.in_features)
        bias = self.bias
        out = torch.empty(rows.shape[0], self.out_features, dtype=x.dtype, device=x.device)
        # Detached: the results reach the graph through `_Leave`, not through the matmuls.
        values = rows.detach()
        call = _Call(
            values,
            bias.detach() if bias is not None else None,
            out,
            self._total(out),
            self.grid,
            rows.requires_grad,
        )
        sums, outs = _Enter.apply(rows, self.anchor(rows), call)
        # In the order of the grid: each link takes the tokens of the one before.
        for tile, row, column in self.tiles():
            sums, outs = tile(_LinearTileStep(call, row, column), sums, outs)
        y: torch.Tensor = _Leave.apply(sums, outs, out, bias)
        return y.view(*x.shape[:-1], self.out_features)

    def _total(self, out: torch.Tensor) -> torch.Tensor | None:
        """Return a buffer for the sum of a row of tiles; None if the output itself holds the sum.
        """
        wide = sum_dtype(out.dtype)
        if self.grid.columns == 1 or out.dtype == wide:
            # One tile per row has nothing to sum; an output of the sum's dtype holds the sum.
            return None
        # One buffer for all rows of tiles, of the size of the widest.
        widest = max(last - first for first, last in itertools.pairwise(self.grid.row_ends))
        return torch.empty(out.shape[0], widest, dtype=wide, device=out.device)

    def entering(self, x: torch.Tensor) -> torch.Tensor:
        """Cast `x` to the compute dtype. Raises: RuntimeError for another dtype or shape."""
        dtype = self.tile_parameters()[0].dtype
        # As in torch's linear: autocast does not convert fp64.
        if (
            torch.is_autocast_enabled(x.device.type)
            and x.is_floating_point()
            and x.dtype != torch.float64
        ):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        elif x.dtype != dtype:
            raise RuntimeError(
                f"a TiledLinear of {dtype} was given {x.dtype}; convert the input, or use autocast"
            )
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise RuntimeError(
                f"a TiledLinear of {self.in_features} input features was given an input "
                f"{tuple(x.shape)}"
            )
        return x

    def anchor(self, x: torch.Tensor) -> torch.Tensor | None:
        """Create a leaf that puts the chain into the graph, also if only weights need gradients.
        None if nothing needs a gradient."""
        wanted = torch.is_grad_enabled() and (
            x.requires_grad or any(param.requires_grad for param in self.parameters())
        )
        return torch.empty(0, device=x.device, requires_grad=True) if wanted else None

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, tiles=({self.grid.rows}, {self.grid.columns})"
        )


class _Call(NamedTuple):
    """One forward of a tiled linear.

    x [rows, in], bias [out], out [rows, out] and total (see `_total`) are without a graph.
    """

    x: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor
    total: torch.Tensor | None
    grid: Grid
    input_grad: bool  # whether the input wants a gradient


class _LinearTileStep:
    """Computation of a tile, as a function of its weight and the tokens."""

    def __init__(self, call: _Call, row: int, column: int) -> None:
        self._call, self._row, self._column = call, row, column

    def __call__(self, weight: torch.Tensor, sums: torch.Tensor, outs: torch.Tensor) -> Any:
        return _Step.apply(sums, outs, weight, self._call.x, self._call, self._row, self._column)


def token(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a tensor of `shape` over one element of memory; see [Note: the chain of tokens]."""
    # Strides of 0: the full shape with one element of memory.
    return torch.empty_strided(shape, (0,) * len(shape), dtype=dtype, device=device)


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse gradients of this `backward`.

    torch's once_differentiable silently ignores gradients that only depend on the weights: a
    gradient penalty would lose a part.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        # Grad is enabled in a backward only with create_graph=True.
        if torch.is_grad_enabled():
            raise SecondOrderUnsupported(
                "backward with create_graph=True through a tiled module: its tiles are released "
                "before the second backward"
            )
        return backward(ctx, *grads)

    return checked


class _Enter(torch.autograd.Function):
    """Start of the chain: backward rounds the sum over the tiles to the input's dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, _anchor: torch.Tensor | None, call: _Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # A missing gradient stays None, not zeros: a link without a gradient adds nothing.
        ctx.set_materialize_grads(False)
        ctx.dtype = x.dtype
        # With one row of tiles each element of the input's gradient is one tile's product: nothing
        # is summed, and torch's matmul rounds.
        dtype = sum_dtype(x.dtype) if call.grid.rows > 1 else x.dtype
        return token(tuple(x.shape), dtype, x.device), token(
            tuple(call.out.shape), x.dtype, x.device
        )

    @staticmethod
    @first_order
    def backward(
        ctx: Any, dx: torch.Tensor | None, _dy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None]:
        return dx.to(ctx.dtype) if dx is not None and ctx.needs_input_grad[0] else None, None, None


class _Step(torch.autograd.Function):
    """Link of the chain: one tile."""

    @staticmethod
    def forward(
        ctx: Any,
        sums: torch.Tensor,
        outs: torch.Tensor,
        weight: torch.Tensor,
        x: torch.Tensor,
        call: _Call,
        row: int,
        column: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        # The weight is a view of gathered storage, which is gathered again for backward.
        ctx.save_for_backward(x, weight)
        ctx.place, ctx.grid, ctx.input_grad = (
            call.grid.place(row, column),
            call.grid,
            call.input_grad,
        )
        _multiply(call, weight, row, column)
        return token(tuple(sums.shape), sums.dtype, sums.device), token(
            tuple(outs.shape), outs.dtype, outs.device
        )

    @staticmethod
    @first_order
    def backward(ctx: Any, dx: torch.Tensor | None, dy: torch.Tensor | None) -> tuple[Any, ...]:
        # No gradient for this output: the sum of the other tiles passes through.
        if dy is None:
            return (dx, *(None,) * 6)
        x, weight = ctx.saved_tensors
        place, dweight = ctx.place, None
        dy_rows = dy[:, place.rows[0] : place.rows[1]]
        if ctx.needs_input_grad[2]:
            # Under autocast the weight has another dtype: compute in the gradient's, then convert.
            dweight = torch.empty(weight.shape, dtype=dy.dtype, device=weight.device)
            tile_matmul(dy_rows.t(), x[:, place.columns[0] : place.columns[1]], dweight)
            dweight = dweight.to(weight.dtype)
        if ctx.input_grad:
            # Backward begins with the last row of tiles, which writes; the others add.
            first = place.rows[1] == ctx.grid.row_ends[-1]
            # The first link of backward gets no gradient through its token: the sum begins here.
            if dx is None:
                dtype = sum_dtype(x.dtype) if ctx.grid.rows > 1 else x.dtype
                dx = torch.empty(x.shape, dtype=dtype, device=x.device)
            part = dx[:, place.columns[0] : place.columns[1]]
            # In place, in fp32, in the order of the chain: one fixed order, and one rounding.
            tile_matmul(dy_rows, weight.to(x.dtype), part, accumulator=None if first else part)
        return dx, dy, dweight, None, None, None, None


class _Leave(torch.autograd.Function):
    """End of the chain: the output takes its place in the graph; backward hands its gradient to
    the tiles.
    """

    @staticmethod
    def forward(
        ctx: Any,
        _sums: torch.Tensor,
        _outs: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        # The tiles have written into `out`: autograd takes it as an output of this function.
        ctx.mark_dirty(out)
        ctx.bias_dtype = bias.dtype if bias is not None else None
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[Any, ...]:
        if dy is None:
            return None, None, None, None
        dy = dy.contiguous()  # an expanded gradient would be copied by every tile
        dbias = dy.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[3] else None
        return None, dy, None, dbias


def _multiply(call: _Call, weight: torch.Tensor, row: int, column: int) -> None:
    """Add one tile's product to the sum of its row of tiles.

    The last tile of the row adds the bias and rounds into the output.
    """
    place = call.grid.place(row, column)
    x, bias = call.x[:, place.columns[0] : place.columns[1]], call.bias
    out = call.out[:, place.rows[0] : place.rows[1]]
    total = out if call.total is None else call.total[:, : out.shape[1]]
    ends = column == call.grid.columns - 1
    # Only the last tile has the whole sum, to which the bias is added before rounding.
    bias = bias[place.rows[0] : place.rows[1]] if bias is not None and ends else None
    # The first tile of a row writes, the others add.
    accumulator = None if column == 0 else total
    tile_matmul(
        x, weight.to(x.dtype).t(), out if ends else total, accumulator=accumulator, bias=bias
    )
