"""`tile_linears` and `tile_loss`: cut a model's linears into tiles, and compute its loss without
logits, both in place.

A weight that several modules share stays shared: each of them is replaced by a module on the same
tiles (TiledLinear, TiledEmbedding).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from infinity._src.kernels.linear_cross_entropy import VOCABULARY_TILE
from infinity._src.kernels.tiling.deferred_logits import as_head, default_tiles, find_head
from infinity._src.kernels.tiling.tiled_embedding import TiledEmbedding
from infinity._src.kernels.tiling.tiled_linear import TiledLinear
from infinity._src.kernels.tiling.tiled_module import (
    Grid,
    TiledMatrix,
    Tiles,
    copy_tiles,
    parse_tiles,
    refuse_microbatched,
)

M = TypeVar("M", bound=nn.Module)

_HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Hooks of users, which a replaced module would silently lose."""


def tile_linears(model: M, *, tiles: Tiles, names: str | Sequence[str] | None = None) -> M:
    """Cut linears of `model` into tiles, in place, and return it: before the optimizer is made and
    before `inf.offload`.

    Each tile is gathered, computed and released alone, so such a linear takes the memory of a few
    tiles. The model's `state_dict` has the same keys, shapes and values; `parameters()` yields the
    tiles. Works on the meta device and without offloading. Tiles may change rounding; `tiles` alone
    determines how (`infinity._src.kernels.tiling.tiled_linear`).

    tiles: how many along the output features, or (along outputs, along inputs); a load from files
    reads a weight about once for each tile along the inputs. names: which linears, by qualified
    name or the end of one ("lm_head", "mlp.down_proj"); None: every torch.nn.Linear that has at
    least that many features, subclasses left out. A weight that other linears or embeddings share
    (tied weights) is tiled in all of them.

    Raises: ValueError for names that match nothing or no torch.nn.Linear; for more tiles than
    features; for an offloaded model; for a chosen module with gradients or hooks; and for a weight
    shared with a module that cannot be tiled. On an error the model is unchanged.
    """
    parse_tiles(tiles)
    refuse_microbatched(model, "inf.tile_linears(model, ...)")
    if "_infinity_handle" in model.__dict__:
        raise ValueError(
            "this model is offloaded already; call inf.tile_linears(model, ...) before "
            "inf.offload(model, ...)"
        )
    if type(model) is nn.Linear:
        raise ValueError(
            "the model is a torch.nn.Linear itself, and cannot be replaced in place; use "
            "inf.ops.TiledLinear"
        )
    chosen = _chosen(model, tiles, [names] if isinstance(names, str) else names)
    # Make the whole plan first, so that an error leaves the model unchanged.
    plan = list(_plan(model, tiles, chosen))
    for group in plan:
        _replace(model, group)
    return model


def tile_loss(model: M, *, tiles: int | None = None, head: str | None = None) -> M:
    """Have `model` compute its loss without the logits, in place, and return it: before the
    optimizer and before `inf.offload`.

    The head becomes a tiled linear whose output is computed only when it is needed. If the model,
    or the training loop, passes that output to `cross_entropy` (casts, shifts and views on the way
    included), the loss is computed a tile of the vocabulary at a time, forward and backward:
    `infinity._src.kernels.tiling.tiled_loss` has the numerics. Any other use computes the logits in
    full, as before (`generate`, metrics); the first such use in a training pass logs a warning.
    Works with the causal LMs of Hugging Face without changes.

    tiles: along the vocabulary; None: as many as make a tile 8,192 classes or less. head: the name
    of the head; None: `model.get_output_embeddings()`. A head that is tiled already keeps its
    tiles.

    Raises: ValueError for a head that is not found or cannot be tiled (see `tile_linears`), has
    tiles along its inputs, or has another number of tiles already; and for an offloaded model.
    """
    refuse_microbatched(model, "inf.tile_loss(model)")
    if "_infinity_handle" in model.__dict__:
        raise ValueError(
            "this model is offloaded already; call inf.tile_loss(model) before inf.offload(model, "
            "...)"
        )
    # `type`, not isinstance: True is an int.
    if tiles is not None and (type(tiles) is not int or tiles < 1):
        raise ValueError(
            f"tiles={tiles!r} is not a positive whole number: a tiled loss has tiles along the "
            "vocabulary only"
        )
    modules = dict(model.named_modules())
    found = find_head(model) if head is None else modules.get(head)
    name = next((name for name, module in modules.items() if module is found), None)
    if found is None or not name:
        raise ValueError(
            f"head={head!r}: the model has no such module" if head is not None
            else "the model does not say which module is its head; "
            "name it: inf.tile_loss(model, head='lm_head')"
        )  # fmt: skip
    if not isinstance(found, TiledLinear):
        if type(found) is not nn.Linear:
            raise ValueError(
                f"{name} is a {type(found).__name__}; a tiled loss takes a torch.nn.Linear"
            )
        tile_linears(
            model,
            tiles=default_tiles(found.out_features, VOCABULARY_TILE) if tiles is None else tiles,
            names=name,
        )
        found = model.get_submodule(name)
        assert isinstance(found, TiledLinear)
    elif tiles is not None and tiles != found.grid.rows:
        raise ValueError(f"{name} has {found.grid.rows} tiles already; leave tiles= out")
    put(model, found, as_head(found))
    return model


@dataclasses.dataclass(frozen=True)
class _Group:
    weight: torch.Tensor
    grid: Grid
    modules: list[tuple[str, nn.Module]]


def _chosen(model: nn.Module, tiles: Tiles, names: Iterable[str] | None) -> dict[str, nn.Linear]:
    modules = dict(model.named_modules())
    # torch's class alone: a subclass may compute something else.
    linears = {name: module for name, module in modules.items() if type(module) is nn.Linear}
    if names is None:
        rows, columns = parse_tiles(tiles)
        return {
            name: linear
            for name, linear in linears.items()
            if linear.out_features >= rows and linear.in_features >= columns
        }
    hint = (
        "give the names of torch.nn.Linear modules, or ends of them, as model.named_modules() "
        "lists them"
    )
    return choose_by_name(linears, modules, names, hint)


def choose_by_name(
    offered: Mapping[str, M],
    modules: Mapping[str, nn.Module],
    names: Iterable[str],
    hint: str,
) -> dict[str, M]:
    """Return the offered modules whose qualified name is, or ends in, one of `names`.

    modules: all modules of the model. Raises: ValueError for a name that no offered module has; the
    message tells which modules have it, and ends in `hint`.
    """

    def matches(name: str, wanted: str) -> bool:
        return name == wanted or name.endswith(f".{wanted}")

    chosen: dict[str, M] = {}
    for wanted in names:
        found = {name: module for name, module in offered.items() if matches(name, wanted)}
        if not found:
            others = [
                f"{name} is a {type(module).__name__}"
                for name, module in modules.items()
                if matches(name, wanted)
            ]
            what = "; ".join(others[:3]) if others else "the model has no such module"
            raise ValueError(f"names={wanted!r}: {what}; {hint}")
        chosen.update(found)
    return chosen


def _plan(model: nn.Module, tiles: Tiles, chosen: dict[str, nn.Linear]) -> Iterator[_Group]:
    """Check and yield the replacements, without changing the model."""
    # By identity: tied weights are one parameter with several holders.
    holders: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules():
        for attr, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((name, module, attr))
    declared = _declared_ties(model)
    done: set[int] = set()
    for name, linear in chosen.items():
        weight = linear.weight
        if id(weight) in done:
            continue
        sites = list(holders[id(weight)])
        # On the meta device tied weights are still separate parameters, so use the model's
        # declaration.
        for other in declared.get(f"{name}.weight", ()) if weight.is_meta else ():
            sites += [
                site
                for at in holders.values()
                for site in at
                if f"{site[0]}.{site[2]}" == other and site not in sites
            ]
        # A weight that two chosen linears share is tiled once.
        done.update(id(module._parameters[attr]) for _, module, attr in sites)
        # All holders are checked before any is replaced.
        for site_name, module, attr in sites:
            _check(site_name, module, attr, name)
        grid = Grid.of(linear.out_features, linear.in_features, tiles)
        yield _Group(weight, grid, [(site_name, module) for site_name, module, _ in sites])


def _declared_ties(model: nn.Module) -> dict[str, list[str]]:
    """Map each parameter's name to the names that a Hugging Face model declares tied to it.

    On the meta device tied parameters are still separate objects.
    """
    ties: dict[str, list[str]] = {}
    for prefix, module in model.named_modules():
        declared = getattr(module, "all_tied_weights_keys", None)
        start = f"{prefix}." if prefix else ""
        for target, source in declared.items() if isinstance(declared, dict) else ():
            ties.setdefault(f"{start}{target}", []).append(f"{start}{source}")
            ties.setdefault(f"{start}{source}", []).append(f"{start}{target}")
    return ties


def _check(name: str, module: nn.Module, attr: str, wanted: str) -> None:
    shared = f"{wanted}.weight is shared with {name}.{attr}, " if name != wanted else ""
    leave = f"; leave {wanted} out of inf.tile_linears(names=...)"
    is_embedding = type(module) is nn.Embedding
    if attr != "weight" or not (type(module) is nn.Linear or is_embedding):
        raise ValueError(
            f"{shared}which is in a {type(module).__name__}, not in a torch.nn.Linear or "
            f"torch.nn.Embedding{leave}, or untie them"
        )
    if isinstance(module, nn.Embedding) and (
        module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    ):
        raise ValueError(
            f"{shared}an embedding with max_norm, scale_grad_by_freq or sparse, which tiles do not "
            f"have{leave}"
        )
    # The gradient would remain on the old parameter.
    if module._parameters["weight"].grad is not None:  # type: ignore[union-attr]
        raise ValueError(
            f"{name}.weight has a gradient, which tiling would lose: call model.zero_grad() first"
        )
    check_unhooked(name, module)


def check_unhooked(name: str, module: nn.Module) -> None:
    """Raise ValueError for a module with hooks or an overridden forward."""
    hooked = [kind for kind in _HOOK_DICTS if getattr(module, kind, None)]
    if hooked or "forward" in module.__dict__:
        raise ValueError(
            f"{name} has {', '.join(hooked) or 'an overridden forward'}, which tiling would lose: "
            "add it after tiling"
        )


def _replace(model: nn.Module, group: _Group) -> None:
    tiles = copy_tiles(group.weight, group.grid)
    for _, module in group.modules:
        made: TiledMatrix
        if isinstance(module, nn.Linear):
            made = TiledLinear.of_tiles(tiles, group.grid, module.bias)
        else:
            assert isinstance(module, nn.Embedding)
            made = TiledEmbedding(tiles, group.grid, module.padding_idx)
        made.train(module.training)
        put(model, module, made)
        with torch.no_grad():
            # Free the whole weight now, not after the last linear.
            module._parameters["weight"] = None


def put(model: nn.Module, module: nn.Module, made: nn.Module) -> None:
    """Replace `module` by `made` everywhere in the model."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is module:
                parent._modules[name] = made
        _replace_attributes(parent, module, made)


def _replace_attributes(parent: nn.Module, module: nn.Module, made: nn.Module) -> None:
    """Replace a module that `parent` refers to outside of the module tree: in `__dict__`, or in a
    list there.
    """
    for name, value in list(parent.__dict__.items()):
        if value is module:
            parent.__dict__[name] = made
        elif type(value) is list and any(item is module for item in value):
            value[:] = [made if item is module else item for item in value]
