"""TiledEmbedding: an embedding whose weight is cut into tiles, so that it can share the tiles of a
tiled LM head (tied weights).

Each tile looks up the indices that fall into its rows, and writes its columns of the output. The
tiles are links of a chain, as in [Note: the chain of tokens]
(`infinity._src.kernels.tiling.tiled_linear`); the gradient of the output passes through every link.

Numerics: forward copies values, so it equals torch's embedding bit for bit. A tile's gradient has
the bits of torch's gradient of the same rows and columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from infinity._src.base.torch_compat import assert_async
from infinity._src.kernels.tiling.tiled_linear import first_order, token
from infinity._src.kernels.tiling.tiled_module import Grid, TiledMatrix


class TiledEmbedding(TiledMatrix):
    """A torch.nn.Embedding in tiles. indices: any shape, int32 or int64; returns [*indices.shape,
    embedding_dim].

    tiles: parameters, row after row of the grid; other modules may share them. padding_idx: as in
    torch.nn.Embedding. `state_dict()` has one `weight` [num_embeddings, embedding_dim].
    """

    def __init__(
        self, tiles: list[nn.Parameter], grid: Grid, padding_idx: int | None = None
    ) -> None:
        super().__init__(tiles, grid)
        self.num_embeddings, self.embedding_dim = grid.whole_shape
        self.padding_idx = padding_idx

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """Look up the rows of the weight at `indices`.

        Raises: RuntimeError for indices that are not int32 or int64; on the CPU, IndexError for an
        index out of range. On a GPU such an index fails a device-side assertion, as in torch.
        """
        if indices.dtype not in (torch.int32, torch.int64):
            raise RuntimeError(
                f"the indices of an embedding are {indices.dtype}: give int32 or int64"
            )
        flat = indices.reshape(-1).long()
        message = f"index out of range: this embedding has {self.num_embeddings} rows"
        if flat.device.type != "cpu":
            # Check without blocking on the device. An index out of range would leave its row of
            # `out` uninitialized.
            assert_async(((flat >= 0) & (flat < self.num_embeddings)).all(), message)
        elif flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self.num_embeddings:
            raise IndexError(message)
        weights = self.tile_parameters()
        # Every element is written, since each valid index is in one row of tiles.
        out = torch.empty(
            flat.numel(), self.embedding_dim, dtype=weights[0].dtype, device=flat.device
        )
        wanted = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
        outs = _Enter.apply(
            # A leaf with requires_grad puts the chain into the graph, since indices have no
            # gradient.
            torch.empty(0, device=out.device, requires_grad=True) if wanted else None, out
        )
        for tile, row, column in self.tiles():
            outs = tile(_EmbeddingTileStep(self, flat, out, row, column), outs)
        found: torch.Tensor = _Leave.apply(outs, out)
        return found.view(*indices.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        padding = f", padding_idx={self.padding_idx}" if self.padding_idx is not None else ""
        tiles = f"tiles=({self.grid.rows}, {self.grid.columns})"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, {tiles}"


class _EmbeddingTileStep:
    """Computation of a tile, as a function of its weight and the token.

    indices: [n]; out: [n, embedding_dim].
    """

    def __init__(
        self, of: TiledEmbedding, indices: torch.Tensor, out: torch.Tensor, row: int, column: int
    ) -> None:
        self._indices, self._out, self._place, self._padding = (
            indices,
            out,
            of.grid.place(row, column),
            of.padding_idx,
        )

    def __call__(self, weight: torch.Tensor, outs: torch.Tensor) -> Any:
        return _Step.apply(outs, weight, self._indices, self._out, self._place, self._padding)


class _Enter(torch.autograd.Function):
    """Start of the chain."""

    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return token(tuple(out.shape), out.dtype, out.device)

    @staticmethod
    def backward(_ctx: Any, _dy: torch.Tensor | None) -> tuple[None, None]:
        return None, None


class _Step(torch.autograd.Function):
    """Link of the chain: one tile."""

    @staticmethod
    def forward(
        ctx: Any,
        outs: torch.Tensor,
        weight: torch.Tensor,
        indices: torch.Tensor,
        out: torch.Tensor,
        place: Any,
        padding: int | None,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices)
        ctx.place, ctx.padding, ctx.shape = place, padding, weight.shape
        columns = out[:, place.columns[0] : place.columns[1]]
        # A tile with all rows of the weight has all indices, so no mask is needed.
        if weight.shape[0] == place.whole_shape[0]:
            columns.copy_(torch.embedding(weight, indices))
        else:
            inside, index = _inside(indices, place)
            columns.copy_(torch.where(inside[:, None], torch.embedding(weight, index), columns))
        return token(tuple(outs.shape), outs.dtype, outs.device)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[Any, ...]:
        dweight = None
        if dy is not None and ctx.needs_input_grad[1]:
            (indices,) = ctx.saved_tensors
            place = ctx.place
            inside, index = _inside(indices, place)
            # The padding row has no gradient, as in torch.
            if ctx.padding is not None:
                inside = inside & (indices != ctx.padding)
            # Indices of other tiles are mapped to an extra row, which is dropped. So no shape
            # depends on the indices, a GPU call does not block, and rows are summed as in torch.
            count = ctx.shape[0]
            index = torch.where(inside, index, count)
            part = dy[:, place.columns[0] : place.columns[1]].contiguous()
            dweight = torch.ops.aten.embedding_dense_backward(part, index, count + 1, count, False)[
                :count
            ]
        return dy, dweight, None, None, None, None


class _Leave(torch.autograd.Function):
    """End of the chain: the output takes its place in the graph."""

    @staticmethod
    def forward(ctx: Any, _outs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        # The output is written by the tiles, in place, before it enters the graph.
        ctx.mark_dirty(out)
        return out

    @staticmethod
    @first_order
    def backward(_ctx: Any, dy: torch.Tensor | None) -> tuple[Any, None]:
        return dy, None


def _inside(indices: torch.Tensor, place: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mask of the indices in the tile's rows, and the row of the tile for each index,
    clamped for indices of other tiles.
    """
    first, last = place.rows
    return (indices >= first) & (indices < last), (indices - first).clamp(0, last - first - 1)
