"""Tiles: a weight as a grid of parameters, each a module of its own, so that each is gathered and
released alone.

    TiledModule  (TiledLinear, TiledEmbedding)          state_dict:  weight [rows, columns], one
      +- tile_0_0.weight  tile_0_1.weight                            tensor with the untiled key
      +- tile_1_0.weight  tile_1_1.weight               parameters:  the tiles

Inside the module tree are the tiles. Out of it and into it (state_dict, load_state_dict, exports)
goes the whole weight, under the key that it had before. `whole_name` and `Place` translate.
"""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from infinity._src._torch_compat import (
    METADATA,
    DisableTorchFunctionSubclass,
    dynamo_disable,
    make_wrapper,
)
from infinity.errors import ParameterReleased

Tiles = int | tuple[int, int]
"""Number of tiles: along the rows of the weight (output features), or (along rows, along columns
(input features)).
"""

ALIGNED_FEATURES = 64
"""Tiles begin at multiples of this where the size of the weight is one: matmuls are fastest on
aligned slices.
"""

_TENSOR: Any = torch.Tensor

_TILE_NAME = re.compile(r"(?P<module>(?:.*\.)?)tile_(?P<row>\d+)_(?P<column>\d+)\.weight")


@dataclasses.dataclass(frozen=True)
class Place:
    """Position of a tile in the weight: [first, last) row and column, and the weight's shape."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    whole_shape: tuple[int, int]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The tile's part of a tensor of the whole's shape, as a view."""
        return whole[self.rows[0] : self.rows[1], self.columns[0] : self.columns[1]]


@dataclasses.dataclass(frozen=True)
class Grid:
    """Cuts of a weight.

    row_ends, column_ends: bounds of the tiles, 0 first and the whole size last.
    """

    row_ends: tuple[int, ...]
    column_ends: tuple[int, ...]

    @classmethod
    def of(cls, rows: int, columns: int, tiles: Tiles) -> Grid:
        """Cut [rows, columns] as evenly as alignment allows.

        Raises: ValueError for a number of tiles that cannot be.
        """
        row_count, column_count = parse_tiles(tiles)
        for count, size, what in ((row_count, rows, "output"), (column_count, columns, "input")):
            if count > size:
                raise ValueError(
                    f"tiles={tiles!r}: {count} tiles of {size} {what} features; use {size} at most"
                )
        return cls(_ends(rows, row_count), _ends(columns, column_count))

    @property
    def rows(self) -> int:
        """Number of tiles along the rows."""
        return len(self.row_ends) - 1

    @property
    def columns(self) -> int:
        """Number of tiles along the columns."""
        return len(self.column_ends) - 1

    @property
    def whole_shape(self) -> tuple[int, int]:
        """The shape of the whole weight."""
        return self.row_ends[-1], self.column_ends[-1]

    def place(self, row: int, column: int) -> Place:
        """Return the position of a tile."""
        return Place(
            (self.row_ends[row], self.row_ends[row + 1]),
            (self.column_ends[column], self.column_ends[column + 1]),
            self.whole_shape,
        )

    def names(self) -> Iterator[tuple[str, int, int]]:
        """(name of the tile's module, row, column), row after row: the order in which tiles are
        used.
        """
        for row in range(self.rows):
            for column in range(self.columns):
                yield f"tile_{row}_{column}", row, column


def parse_tiles(tiles: Tiles) -> tuple[int, int]:
    """(tiles along rows, along columns).

    Raises: ValueError for what is not one or two positive whole numbers.
    """
    pair = (tiles, 1) if isinstance(tiles, int) else tiles
    whole = (
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and all(type(count) is int and count > 0 for count in pair)
    )
    if not whole:
        raise ValueError(
            f"tiles={tiles!r} is not a positive whole number, or a pair (output tiles, input "
            "tiles) of such"
        )
    return pair[0], pair[1]


def _ends(size: int, count: int) -> tuple[int, ...]:
    step = (
        ALIGNED_FEATURES
        if size % ALIGNED_FEATURES == 0 and size // ALIGNED_FEATURES >= count
        else 1
    )
    return tuple(step * (index * (size // step) // count) for index in range(count + 1))


def whole_name(name: str) -> str | None:
    """The state-dict key of the whole weight that a parameter name is a tile of; None if it is no
    tile's name.
    """
    found = _TILE_NAME.fullmatch(name)
    return f"{found['module']}weight" if found is not None else None


def tile_index(name: str) -> tuple[int, int]:
    """(row, column) in its grid of the tile whose parameter has this name."""
    found = _TILE_NAME.fullmatch(name)
    assert found is not None, name
    return int(found["row"]), int(found["column"])


class Tile(nn.Module):
    """One tile of a weight. weight: [rows, columns] of its place. Calling it runs a function on the
    weight, so that whoever hooks modules (the engine gathers parameters around a module's call)
    sees each tile being used, alone.
    """

    def __init__(self, weight: nn.Parameter, place: Place) -> None:
        super().__init__()
        self.weight = weight
        self.place = place

    def forward(self, compute: Callable[..., Any], *tokens: torch.Tensor) -> Any:
        """`compute(weight, *tokens)`.

        tokens: what ties the call into the graph; hooks look for tensors among arguments.
        """
        return compute(self.weight, *tokens)

    def extra_repr(self) -> str:
        """Its place, for people."""
        return f"rows={self.place.rows}, columns={self.place.columns}"


class TiledWeight(torch.Tensor):
    """Value of `TiledLinear.weight`: shape, dtype and device of the whole weight, which exists as
    tiles only.
    """

    _tiles: list[nn.Parameter]

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer metadata, pass `requires_grad` on to the tiles, refuse the rest: storage that is
        not there crashes in C.
        """
        weight = args[0] if args and isinstance(args[0], TiledWeight) else None
        if weight is not None and func in (_TENSOR.requires_grad_, _TENSOR.requires_grad.__set__):
            flag = bool((kwargs or {}).get("requires_grad", args[1] if len(args) > 1 else True))
            for tile in weight._tiles:
                tile.requires_grad_(flag)
            with DisableTorchFunctionSubclass():
                return func(weight, flag)
        if (
            weight is not None
            and func == _TENSOR.grad.__get__
            and all(tile.grad is None for tile in weight._tiles)
        ):
            return None
        if func in METADATA and func != _TENSOR.grad.__get__:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _refusal(func)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        """The net under `__torch_function__`, for calls from C++ that pass it by."""
        raise _refusal(func)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"TiledWeight(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


def _refusal(func: Any) -> ParameterReleased:
    owner = getattr(func, "__self__", None)  # of a property's getter or setter
    return ParameterReleased(
        f"{getattr(owner if owner is not None else func, '__name__', func)} of the weight of a "
        "tiled module, which exists as tiles only: call the module instead, use "
        "`tile_parameters()` (`.grad` included), read `state_dict()['weight']` for a copy, or "
        "leave the layer out of inf.tile_linears(names=...)"
    )


class TiledModule(nn.Module):
    """A module whose weight is a grid of tiles. Base of TiledLinear and TiledEmbedding."""

    grid: Grid

    def __init__(self, tiles: Sequence[nn.Parameter], grid: Grid) -> None:
        super().__init__()
        self.grid = grid
        self._wrong_shape = False
        for weight, (name, row, column) in zip(tiles, grid.names(), strict=True):
            place = grid.place(row, column)
            assert weight.shape == place.of(torch.empty(grid.whole_shape, device="meta")).shape
            self.add_module(name, Tile(weight, place))
        self.register_load_state_dict_post_hook(_name_whole)

    def tiles(self) -> Iterator[tuple[Tile, int, int]]:
        """(tile, row, column), row after row."""
        for name, row, column in self.grid.names():
            tile = self._modules[name]
            assert isinstance(tile, Tile)
            yield tile, row, column

    def tile_parameters(self) -> list[nn.Parameter]:
        """The tiles' parameters, row after row, as `parameters()` yields them (at rest in an
        offloaded model).
        """
        return [
            parameter
            for tile, _, _ in self.tiles()
            for parameter in tile._parameters.values()
            if parameter is not None
        ]

    @property
    def weight(self) -> TiledWeight:
        """Shape [rows, columns], dtype, device and `requires_grad` of the weight; its values are in
        the tiles.
        """
        first = self.tile_parameters()[0]
        with torch.no_grad():
            made = make_wrapper(
                TiledWeight,
                torch.Size(self.grid.whole_shape),
                first.dtype,
                first.device,
                first.requires_grad,
            )
        assert isinstance(made, TiledWeight)
        made._tiles = self.tile_parameters()
        return made

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Set an attribute.

        Raises: ValueError for "weight", which cannot be replaced or tied once it is tiled.
        """
        if name == "weight":
            raise ValueError(
                f"the weight of this {type(self).__name__} is tiled and cannot be set as a whole: "
                "tie or replace weights before inf.tile_linears; load_state_dict sets values"
            )
        super().register_parameter(name, param)

    # -- the whole weight under its old key --------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the untiled module's state: `weight` is one tensor, a copy.

        With keep_vars=True: the tiles, under their own names.
        """
        destination = super().state_dict(*args, **kwargs)
        if kwargs.get("keep_vars", len(args) > 2 and args[2]):
            return destination
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        found = [
            (f"{prefix}{name}.weight", self.grid.place(row, column))
            for name, row, column in self.grid.names()
        ]
        if all(key in destination for key, _ in found):
            parts = [(destination.pop(key), place) for key, place in found]
            others = {
                key: destination.pop(key) for key in list(destination) if _is_own(key, prefix)
            }
            destination[f"{prefix}weight"] = self._merged(destination, parts)
            destination.update(others)
        return destination

    def _merged(
        self, destination: dict[str, Any], parts: list[tuple[torch.Tensor, Place]]
    ) -> torch.Tensor:
        """The whole weight: a copy; the same tensor for all modules that share the tiles (tied
        weights).
        """
        key = (id(destination), *map(id, self.tile_parameters()))
        known = _merged_tensors.get(key)
        if known is not None and any(value is known for value in destination.values()):
            return known
        first = parts[0][0]
        with torch.no_grad():
            whole = torch.empty(self.grid.whole_shape, dtype=first.dtype, device=first.device)
            for part, place in parts:
                place.of(whole).copy_(part)
        _merged_tensors[key] = whole
        return whole

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Cut `weight` into the tiles that submodules load; torch calls this before them."""
        whole = state_dict.pop(f"{prefix}weight", None)
        if whole is not None and tuple(whole.shape) != self.grid.whole_shape:
            error_msgs.append(
                f"size mismatch for {prefix}weight: copying a param with shape "
                f"{tuple(whole.shape)} from checkpoint, the shape "
                f"in current model is {self.grid.whole_shape}."
            )
            self._wrong_shape = True  # said; not that the tiles are missing, too
        elif whole is not None:
            for name, row, column in self.grid.names():
                state_dict[f"{prefix}{name}.weight"] = (
                    self.grid.place(row, column).of(whole).contiguous()
                )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


_merged_tensors: weakref.WeakValueDictionary[tuple[int, ...], torch.Tensor] = (
    weakref.WeakValueDictionary()
)


def _is_own(key: str, prefix: str) -> bool:
    """Tell whether a key is of the module of this prefix itself (its bias)."""
    return (
        key.startswith(prefix) and "." not in key[len(prefix) :] and key != f"{prefix}_extra_state"
    )


def _name_whole(module: nn.Module, incompatible: Any) -> None:
    """After a load of this module: tiles that had no value are missing as one `weight`, those of a
    wrong shape are not.
    """
    assert isinstance(module, TiledModule)
    missing: list[str] = incompatible.missing_keys
    wrong, module._wrong_shape = module._wrong_shape, False
    # Modules are told one after the other, so the tiles that are listed now are this module's.
    missing[:] = dict.fromkeys(
        whole_name(name) or name for name in missing if not (wrong and whole_name(name))
    )


def tile_modules(model: nn.Module) -> Iterator[Tile]:
    """Every distinct tile of a model, in registration order."""
    return (module for module in model.modules() if isinstance(module, Tile))


def keep_uncompiled(model: nn.Module) -> None:
    """Have torch.compile leave the model's tiled modules alone: what is around them is compiled, up
    to and from them.

    Each tile is gathered by hooks that cannot be compiled, so there is nothing to gain inside. Not
    done where tiled modules are made: it imports torch's compiler, which takes long.
    """
    for kind in {type(module) for module in model.modules() if isinstance(module, TiledModule)}:
        forward: Any = kind.forward
        if not getattr(forward, "_infinity_uncompiled", False):
            disabled: Any = dynamo_disable(forward)
            disabled._infinity_uncompiled = True
            kind.forward = disabled


def copy_tiles(weight: torch.Tensor, grid: Grid) -> list[nn.Parameter]:
    """The tiles of a weight [rows, columns] as parameters of their own, copies with its
    `requires_grad` and attributes.
    """
    tiles: list[nn.Parameter] = []
    for _, row, column in grid.names():
        with torch.no_grad():
            values = (
                grid.place(row, column)
                .of(weight.detach())
                .clone(memory_format=torch.contiguous_format)
            )
        tile = nn.Parameter(values, requires_grad=weight.requires_grad)
        tile.__dict__.update(weight.__dict__)
        tiles.append(tile)
    return tiles
