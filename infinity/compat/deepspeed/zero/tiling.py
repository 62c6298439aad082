"""`deepspeed.zero.TiledLinear`: a linear layer split into tiles, each a module.

A script builds it in place of `torch.nn.Linear`. `inf.tile_linears` instead splits the layers of an
existing model, and keeps the names of its weights and its results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity.compat.deepspeed.parameters import GatheredParameters


def bounds(numel: int, parts: int) -> list[int]:
    """Return [parts + 1] boundaries, from 0 to `numel`, of `parts` nearly equal parts. If sizes
    differ, the first parts are longer by one.
    """
    least, longer = divmod(numel, parts)
    sizes = [least + 1] * longer + [least] * (parts - longer)
    return [0, *itertools.accumulate(sizes)]


class TiledLinear(torch.nn.Module):
    """A linear layer of `out_splits` x `in_splits` tiles.

    linears: [out_splits][in_splits] layers of class `linear_cls`, built with `kwargs`; the last one
    of a row has the bias. input_is_already_split: forward expects a sequence of `in_splits`
    tensors. combine_out_splits: False: forward returns a list of `out_splits` tensors. init_linear:
    a layer whose values are copied to the tiles.

    Raises: RuntimeError for splits out of range.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., torch.nn.Module] = torch.nn.Linear,
        init_linear: torch.nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (
            ("in_splits", in_splits, in_features),
            ("out_splits", out_splits, out_features),
        ):
            if not 1 <= splits <= features:
                raise RuntimeError(f"{name}={splits}: must be 1 to {features} (features)")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_parts = bounds(in_features, in_splits)
        self.out_parts = bounds(out_features, out_splits)
        self.linears = torch.nn.ModuleList(
            torch.nn.ModuleList(
                linear_cls(columns, rows, bias=bias and index == in_splits - 1, **kwargs)
                for index, columns in enumerate(_sizes(self.in_parts))
            )
            for rows in _sizes(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """Return the layer's output [..., out_features], or a list of its parts."""
        parts = self._inputs_of(input_)
        outputs = []
        for row, tiles in enumerate(self._tiles):
            output = None
            # DeepSpeed's method and argument names: scripts override them in subclasses.
            for column, (tile, part) in enumerate(zip(tiles, parts, strict=True)):
                output = self._reduce_local_output(
                    in_id=column, out_id=row, current_out=output, new_out=tile(part)
                )
            outputs.append(output)
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    @property
    def _tiles(self) -> list[Any]:
        return list(self.linears)

    def _inputs_of(self, input_: Any) -> Sequence[Any]:
        if self.in_splits == 1:
            return [input_]
        if not self.input_is_already_split:
            return self._split_global_input(input_, _sizes(self.in_parts))
        if len(input_) != self.in_splits:
            raise RuntimeError(
                f"TiledLinear got an input in {len(input_)} parts, and has in_splits="
                f"{self.in_splits}: give {self.in_splits} parts, or input_is_already_split=False"
            )
        return list(input_)

    def _split_global_input(self, input_: Any, split_sizes: list[int]) -> Sequence[Any]:
        return input_.split(split_sizes, dim=-1)  # type: ignore[no-any-return]

    def _reduce_local_output(
        self,
        in_id: int,  # noqa: ARG002 - for subclasses
        out_id: int,  # noqa: ARG002
        current_out: Any,
        new_out: Any,
    ) -> Any:
        """Add a tile's output to the sum of the row's earlier tiles."""
        return new_out if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        return torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: torch.nn.Linear) -> None:
        """Copy the values of an unsplit layer [out_features, in_features]. With several ranks, rank
        0's values are used. Collective. Raises: ValueError for another shape, or if only one of the
        two layers has a bias.
        """
        shape = (self.out_features, self.in_features)
        if tuple(other.weight.shape) != shape or (other.bias is not None) != self.use_bias:
            raise ValueError(
                f"copy_params_from wants a layer of weight {shape}, "
                f"{'with' if self.use_bias else 'without'} a bias"
            )
        for tiles, rows in zip(self._tiles, _slices(self.out_parts), strict=True):
            for tile, columns in zip(tiles, _slices(self.in_parts), strict=True):
                with GatheredParameters(tile.weight, modifier_rank=0):
                    tile.weight.copy_(other.weight[rows, columns])
                if tile.bias is not None:
                    with GatheredParameters(tile.bias, modifier_rank=0):
                        tile.bias.copy_(other.bias[rows])


class TiledLinearReturnBias(TiledLinear):
    """TiledLinear for layers that return (output, bias), such as Megatron-LM's. Returns the joined
    biases instead of adding them."""

    def _reduce_local_output(
        self, in_id: int, out_id: int, current_out: Any, new_out: Any
    ) -> tuple[Any, Any]:
        before, bias = (None, None) if current_out is None else current_out
        output, own = new_out
        total = super()._reduce_local_output(in_id, out_id, before, output)
        return total, bias if own is None else own

    def _combine_output_splits(self, outputs: list[Any]) -> tuple[Any, Any]:
        biases = [bias for _, bias in outputs if bias is not None]
        joined = super()._combine_output_splits(biases) if biases else None
        return super()._combine_output_splits([output for output, _ in outputs]), joined


def _sizes(ends: list[int]) -> list[int]:
    return [end - start for start, end in itertools.pairwise(ends)]


def _slices(ends: list[int]) -> list[slice]:
    return [slice(start, end) for start, end in itertools.pairwise(ends)]
