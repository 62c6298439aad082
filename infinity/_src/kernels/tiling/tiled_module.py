"""Tiles: a weight as a grid of parameters in separate modules, so that each is gathered and
released alone.

    TiledMatrix  (TiledLinear, TiledEmbedding)          state_dict:  weight [rows, columns], one
      +- tile_0_0.weight  tile_0_1.weight                            tensor with the untiled key
      +- tile_1_0.weight  tile_1_1.weight               parameters:  the tiles

    TiledExperts                                        state_dict:  gate_up_proj [experts, ...],
      +- tile_0_0.gate_up_proj  tile_0_0.down_proj                   down_proj [experts, ...]
      +- tile_1_0.gate_up_proj  tile_1_0.down_proj

The module tree has the tiles. state_dict, load_state_dict and exports have whole weights, under
their original keys. `whole_name` and `TilePlace` translate.
"""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from infinity._src.base.torch_compat import (
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
"""Tiles begin at multiples of this if the size of the weight is a multiple and large enough:
matmuls are fastest on aligned slices.
"""

_TENSOR: Any = torch.Tensor

STACK_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of the weights [experts, rows, columns] of fused experts in transformers >= 5. A stack has
one of the first two, and the last."""

EXPERT_STACKS = tuple(f"{name}{end}" for name in STACK_WEIGHTS for end in ("", "_bias"))
"""Names of the parameters [experts, ...] that fused experts may have."""

# Parameters of tiles are recognized by name, since exports and loads have only names.
_TILE_NAME = re.compile(
    r"(?P<module>(?:.*\.)?)tile_(?P<row>\d+)_(?P<column>\d+)"
    rf"\.(?P<weight>weight|{'|'.join(EXPERT_STACKS)})"
)


@dataclasses.dataclass(frozen=True)
class TilePlace:
    """Position of a tile in the weight: [first, last) row and column, and the weight's shape. A
    weight of more dimensions is cut along the first two.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    whole_shape: tuple[int, ...]

    @property
    def is_last(self) -> bool:
        """True for the tile in which the weight ends."""
        return (self.rows[1], self.columns[1]) == self.whole_shape[:2]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Slice the tile's part from a tensor of the whole weight's shape, as a view."""
        return whole[self.rows[0] : self.rows[1], self.columns[0] : self.columns[1]]


@dataclasses.dataclass(frozen=True)
class Grid:
    """Division of a weight into tiles.

    row_ends, column_ends: bounds of the tiles, 0 first and the whole size last.
    """

    row_ends: tuple[int, ...]
    column_ends: tuple[int, ...]

    @classmethod
    def of(cls, rows: int, columns: int, tiles: Tiles) -> Grid:
        """Cut [rows, columns] as evenly as alignment allows.

        Raises: ValueError for an impossible number of tiles.
        """
        row_count, column_count = parse_tiles(tiles)
        # More tiles than features would make empty tiles.
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

    def place(self, row: int, column: int) -> TilePlace:
        """Return the position of a tile."""
        return TilePlace(
            (self.row_ends[row], self.row_ends[row + 1]),
            (self.column_ends[column], self.column_ends[column + 1]),
            self.whole_shape,
        )

    def names(self) -> Iterator[tuple[str, int, int]]:
        """Yield (name of the tile's module, row, column), row after row, as tiles are used."""
        for row in range(self.rows):
            for column in range(self.columns):
                yield f"tile_{row}_{column}", row, column


def parse_tiles(tiles: Tiles) -> tuple[int, int]:
    """Parse `tiles` to (along rows, along columns).

    Raises: ValueError for anything but one or two positive whole numbers.
    """
    # Rows by default: a tile of whole rows gives whole outputs, and nothing is summed over tiles.
    pair = (tiles, 1) if isinstance(tiles, int) else tiles
    whole = (
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        # `type`, not isinstance: True is an int.
        and all(type(count) is int and count > 0 for count in pair)
    )
    if not whole:
        raise ValueError(
            f"tiles={tiles!r} is not a positive whole number, or a pair (output tiles, input "
            "tiles) of such"
        )
    return pair[0], pair[1]


def _ends(size: int, count: int) -> tuple[int, ...]:
    # Align only if the size is a multiple and every tile gets at least one step. Otherwise the last
    # tile would have a ragged end, or some tiles would be empty.
    step = (
        ALIGNED_FEATURES
        if size % ALIGNED_FEATURES == 0 and size // ALIGNED_FEATURES >= count
        else 1
    )
    return tuple(step * (index * (size // step) // count) for index in range(count + 1))


def whole_name(name: str) -> str | None:
    """Return the state-dict key of the whole weight for the name of a tile's parameter.

    None for any other name.
    """
    found = _TILE_NAME.fullmatch(name)
    return f"{found['module']}{found['weight']}" if found is not None else None


def tiled_module_name(name: str) -> str | None:
    """Return the name of the tiled module, with a dot behind it, for the name of a tile's
    parameter. None for any other name.
    """
    found = _TILE_NAME.fullmatch(name)
    return found["module"] if found is not None else None


def tile_index(name: str) -> tuple[int, int]:
    """Parse (row, column) of a tile from the name of its parameter."""
    found = _TILE_NAME.fullmatch(name)
    assert found is not None, name
    return int(found["row"]), int(found["column"])


class Tile(nn.Module):
    """Parameters that are gathered and released together: a tile of one weight, or of several.

    The engine gathers parameters around calls of modules, so it gathers each tile alone. A call
    with `idle=True` (an empty expert call) does not read the parameters: the engine does not gather
    them for it. Its backward may still give them gradients.
    """

    def __init__(self, weights: Mapping[str, tuple[nn.Parameter, TilePlace]]) -> None:
        super().__init__()
        self.places = {name: place for name, (_, place) in weights.items()}
        for name, (weight, place) in weights.items():
            # On the meta device, for the shape without the memory of a whole weight.
            assert weight.shape == place.of(torch.empty(place.whole_shape, device="meta")).shape
            self.register_parameter(name, weight)

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}: rows={place.rows}, columns={place.columns}"
            for name, place in self.places.items()
        )


def is_idle_call(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """True for a call of a tile that does not read its parameters; see `Tile`."""
    return isinstance(module, Tile) and bool(kwargs.get("idle"))


class MatrixTile(Tile):
    """Tile of one weight: its parameter `weight`, [rows, columns] of its place.

    A call runs a function on the weight.
    """

    weight: nn.Parameter

    def __init__(self, weight: nn.Parameter, place: TilePlace) -> None:
        super().__init__({"weight": (weight, place)})

    def forward(self, compute: Callable[..., Any], *tokens: torch.Tensor) -> Any:
        """Return `compute(weight, *tokens)`.

        tokens: connect the call to the graph. They are arguments because hooks look for tensors
        among the arguments.
        """
        return compute(self.weight, *tokens)


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
        """Return metadata, and set `requires_grad` of the tiles. Raise ParameterReleased for any
        other operation.

        The wrapper has no storage: an operation that read it would crash in C.
        """
        weight = args[0] if args and isinstance(args[0], TiledWeight) else None
        # A user who freezes `layer.weight` means the tiles, which are the trained parameters.
        if weight is not None and func in (_TENSOR.requires_grad_, _TENSOR.requires_grad.__set__):
            flag = bool((kwargs or {}).get("requires_grad", args[1] if len(args) > 1 else True))
            for tile in weight._tiles:
                tile.requires_grad_(flag)
            # Set it on the wrapper, too, which answers reads of `requires_grad`.
            with DisableTorchFunctionSubclass():
                return func(weight, flag)
        # `.grad` is None while no tile has a gradient. Once one has, reading `.grad` is refused
        # below: a gradient of the whole weight does not exist.
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
        """Refuse calls from C++ that bypass `__torch_function__`."""
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
    """Module whose weights exist as tiles. Base of TiledMatrix and TiledExperts.

    tiles: by their names (`tile_<row>_<column>`), in the order in which they compute. All have
    parts of the same weights.
    """

    def __init__(self, tiles: Mapping[str, Tile]) -> None:
        super().__init__()
        first = next(iter(tiles.values()))
        self._tile_names = tuple(tiles)
        self.whole_shapes = {
            weight: place.whole_shape for weight, place in first.places.items()
        }
        """Shapes of the whole weights, by name."""
        # Weights whose shape the current load has refused: `_name_whole` does not report them
        # again as missing.
        self._wrong_shapes: set[str] = set()
        for name, tile in tiles.items():
            self.add_module(name, tile)
        self.register_load_state_dict_post_hook(_name_whole)

    def named_tiles(self) -> Iterator[tuple[str, Tile]]:
        """Yield (name, tile) in the order in which they compute, which is part of the numerics."""
        for name in self._tile_names:
            tile = self._modules[name]
            if not isinstance(tile, Tile):
                raise ValueError(
                    f"{name} of this {type(self).__name__} was replaced by a "
                    f"{type(tile).__name__}: adapt the model before its weights are tiled "
                    "(get_peft_model, then infinity.integrations.peft.tile_experts)"
                )
            yield name, tile

    def tile_parameters(self, weight: str | None = None) -> list[nn.Parameter]:
        """List the tiles' parameters, tile after tile, as `parameters()` yields them (sharded
        parameters in an offloaded model). weight: the name of one weight; None: all weights.
        """
        return [
            parameter
            for _, tile in self.named_tiles()
            for name, parameter in at_rest_parameters(tile).items()
            if weight is None or name == weight
        ]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, such as the bias.

        Raises: ValueError for a tiled weight, which cannot be replaced or tied.
        """
        if name in self.whole_shapes:
            raise ValueError(
                f"the {name} of this {type(self).__name__} is tiled and cannot be set as a whole: "
                "tie or replace weights before inf.tile_linears or inf.tile_experts; "
                "load_state_dict sets values"
            )
        super().register_parameter(name, param)

    # -- whole weights under their old keys --------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the untiled module's state: each weight is one tensor, a copy.

        With keep_vars=True: the tiles, under their own names.
        """
        destination = super().state_dict(*args, **kwargs)
        # With keep_vars the caller needs the parameters, which are the tiles.
        if kwargs.get("keep_vars", len(args) > 2 and args[2]):
            return destination
        # torch still accepts these arguments by position.
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        merged: dict[str, torch.Tensor] = {}
        for weight in self.whole_shapes:
            found = {
                f"{prefix}{name}.{weight}": tile.places[weight]
                for name, tile in self.named_tiles()
            }
            if all(key in destination for key in found):
                parts = [(destination.pop(key), place) for key, place in found.items()]
                merged[f"{prefix}{weight}"] = self._merged(weight, destination, parts)
        if merged:
            # The module's other entries go behind the weights, as in the untiled module.
            others = {
                key: destination.pop(key) for key in list(destination) if _is_own(key, prefix)
            }
            destination.update(merged)
            destination.update(others)
        return destination

    def _merged(
        self,
        weight: str,
        destination: dict[str, Any],
        parts: list[tuple[torch.Tensor, TilePlace]],
    ) -> torch.Tensor:
        """Merge tiles to the whole weight, a copy.

        Modules that share the tiles (tied weights) get the same tensor.
        """
        # By state dict and tiles: tied weights are one tensor within a state dict, but two state
        # dicts have separate copies.
        key = (id(destination), *map(id, self.tile_parameters(weight)))
        known = _merged_tensors.get(key)
        # The tensor must be in the dict, too: Python reuses the ids of freed objects.
        if known is not None and any(value is known for value in destination.values()):
            return known
        first = parts[0][0]
        with torch.no_grad():
            whole = torch.empty(self.whole_shapes[weight], dtype=first.dtype, device=first.device)
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
        """Cut whole weights into tiles. torch calls this before it loads the submodules."""
        for weight, shape in self.whole_shapes.items():
            whole = state_dict.pop(f"{prefix}{weight}", None)
            if whole is not None and tuple(whole.shape) != shape:
                error_msgs.append(
                    f"size mismatch for {prefix}{weight}: copying a param with shape "
                    f"{tuple(whole.shape)} from checkpoint, the shape "
                    f"in current model is {shape}."
                )
                # Then `_name_whole` does not report the weight as missing, too.
                self._wrong_shapes.add(f"{prefix}{weight}")
            elif whole is not None:
                for name, tile in self.named_tiles():
                    # torch then selects each submodule's entries from this dict, by prefix.
                    part = tile.places[weight].of(whole).contiguous()
                    state_dict[f"{prefix}{name}.{weight}"] = part
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class TiledMatrix(TiledModule):
    """Module whose `weight` is a grid of tiles. Base of TiledLinear and TiledEmbedding."""

    grid: Grid

    def __init__(self, tiles: Sequence[nn.Parameter], grid: Grid) -> None:
        super().__init__(
            {
                name: MatrixTile(weight, grid.place(row, column))
                for weight, (name, row, column) in zip(tiles, grid.names(), strict=True)
            }
        )
        self.grid = grid

    def tiles(self) -> Iterator[tuple[MatrixTile, int, int]]:
        """Yield (tile, row, column), row after row."""
        # Tiles are summed in the order of the grid, which affects rounding.
        for name, row, column in self.grid.names():
            tile = self._modules[name]
            assert isinstance(tile, MatrixTile)
            yield tile, row, column

    @property
    def weight(self) -> TiledWeight:
        """Shape [rows, columns], dtype, device and `requires_grad` of the weight; its values are in
        the tiles.
        """
        # All tiles have one dtype and one device.
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


def at_rest_parameters(tile: Tile) -> dict[str, nn.Parameter]:
    """Return the parameters of a tile by name, as `parameters()` yields them: sharded parameters in
    an offloaded model.
    """
    # Read `_parameters.values()`: reading an attribute would gather an offloaded parameter.
    held = zip(tile._parameters, tile._parameters.values(), strict=True)
    return {name: parameter for name, parameter in held if parameter is not None}


# Weak references: whole weights are freed with the caller's state dict.
_merged_tensors: weakref.WeakValueDictionary[tuple[int, ...], torch.Tensor] = (
    weakref.WeakValueDictionary()
)


def _is_own(key: str, prefix: str) -> bool:
    """Return whether a key is an entry of the module with this prefix itself, such as its bias."""
    return (
        key.startswith(prefix) and "." not in key[len(prefix) :] and key != f"{prefix}_extra_state"
    )


def _name_whole(module: nn.Module, incompatible: Any) -> None:
    """List the missing tiles of a loaded module as missing whole weights.

    Tiles of a weight of a wrong shape are left out: the load has reported the shape.
    """
    assert isinstance(module, TiledModule)
    missing: list[str] = incompatible.missing_keys
    wrong, module._wrong_shapes = module._wrong_shapes, set()
    # torch calls this for one module after the other, so the tiles listed now are this module's.
    names = (whole_name(name) or name for name in missing)
    missing[:] = dict.fromkeys(name for name in names if name not in wrong)


def tile_modules(model: nn.Module) -> Iterator[Tile]:
    """Yield every distinct tile of a model, in registration order."""
    return (module for module in model.modules() if isinstance(module, Tile))


def exclude_from_compile(model: nn.Module) -> None:
    """Keep torch.compile out of the model's tiled modules. Code before and after them is compiled.

    Hooks that cannot be compiled gather each tile, so compilation would gain nothing inside.
    """
    for kind in {type(module) for module in model.modules() if isinstance(module, TiledModule)}:
        forward: Any = kind.forward
        # Once for each class: for a second model this would wrap the wrapper.
        if not getattr(forward, "_infinity_uncompiled", False):
            disabled: Any = dynamo_disable(forward)
            disabled._infinity_uncompiled = True
            kind.forward = disabled


def refuse_microbatched(model: nn.Module, call: str) -> None:
    """Raise ValueError for a model whose modules already run in slices of a batch (micro-batches):
    a module that replaces one of them would not."""
    # Search all modules: a wrapper may be the root (get_peft_model).
    if any(hasattr(type(module), "_infinity_slicing") for module in model.modules()):
        raise ValueError(
            f"this model, or a part of it, is microbatched already; call {call} before "
            "inf.microbatched(model, n)"
        )


def copy_tile(weight: torch.Tensor, place: TilePlace) -> nn.Parameter:
    """Copy a tile of a weight into a new parameter, with the weight's `requires_grad` and
    attributes.
    """
    with torch.no_grad():
        # A clone: a view would keep the whole weight alive as long as one tile lives.
        values = place.of(weight.detach()).clone(memory_format=torch.contiguous_format)
    tile = nn.Parameter(values, requires_grad=weight.requires_grad)
    # Keep attributes that other code has set on the weight.
    tile.__dict__.update(weight.__dict__)
    return tile


def copy_tiles(weight: torch.Tensor, grid: Grid) -> list[nn.Parameter]:
    """Copy all tiles of a weight [rows, columns], row after row, as `copy_tile`."""
    return [copy_tile(weight, grid.place(row, column)) for _, row, column in grid.names()]
