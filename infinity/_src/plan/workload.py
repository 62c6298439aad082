"""Model and job of a plan: the model's units and FlatParameters as the engine would make them, but
without tensors, and the job that trains the model.

`params.discover` finds the units; `memory.flat_layout` lays out the FlatParameters. A plan
estimates activations and floating-point operations from the sizes in the model's configuration:

    parameters that compute     all except an untied input embedding, which is only looked up, and
                                except the experts that a token is not routed to
    boundary activations        layers x width x itemsize per token: inputs of checkpointed blocks
    activations of a block      (12 x width + 4 x MLP width x experts) x itemsize per token, where
                                experts counts a token's routed and shared experts; for one block at
                                a time with checkpointing, else for all layers
    logits                      10 B per token and vocabulary entry: 2 B as computed, 4 B fp32 copy,
                                4 B gradient; 8 B if the model computes in fp32, which needs no
                                copy. A loss in tiles needs this for the entries of one tile, and
                                4 B x width for the hidden states' gradient in fp32

The engine gathers a stack of experts [experts, ...] whole, even if few of the experts compute.
`inf.tile_experts` cuts the stack into tiles, and each tile is a separate unit. The engine does not
gather a tile for a micro-batch if its tokens chose no expert of the tile. A plan assumes that
tokens choose all experts equally often, which touches the most tiles.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NewType, TypeVar

import torch

from infinity._src.config.choices import OPTIMIZERS
from infinity._src.config.policy import Policy
from infinity._src.kernels.tiling.tiled_module import STACK_WEIGHTS
from infinity._src.memory.device_capacity import UnitBytes
from infinity._src.memory.flat_layout import plan_flat
from infinity._src.optim.muon import Matrixwise
from infinity._src.optim.whole_matrices import is_hidden_matrix
from infinity._src.params.discover import UnitSpec, find_units

_Result = TypeVar("_Result")

# -- The model -------------------------------------------------------------------------------------


UNIT_BYTES_MAX = 512 << 20
"""Bytes above which a module is split into several units: the default of `Policy.unit_bytes_max`.
"""


@dataclasses.dataclass(frozen=True)
class FlatShape:
    """A FlatParameter as the engine would make it.

    numels: number of elements of each parameter, in order. trainable: True if an optimizer will
    hold the FlatParameter. matrices: for each parameter, its shape if an optimizer of whole
    matrices updates the parameter as a matrix, else (); empty if there is no such matrix.
    """

    numels: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    matrices: tuple[tuple[int, ...], ...] = ()

    @property
    def numel(self) -> int:
        return sum(self.numels)

    @property
    def matrix_numel(self) -> int:
        """Elements of the parameters that are updated as whole matrices."""
        return sum(math.prod(shape) for shape in self.matrices if shape)

    @property
    def moments(self) -> int:
        """Number of moments with space in the FlatParameter: one if all parameters are matrices."""
        return 1 if self.matrices and all(self.matrices) else 2

    def without(self, numels: Iterable[int]) -> FlatShape:
        """Return the FlatParameter without parameters of these sizes, one for each of `numels`."""
        left, matrices = list(self.numels), list(self.matrices)
        for numel in numels:
            place = left.index(numel)
            del left[place], matrices[place : place + 1]
        return dataclasses.replace(self, numels=tuple(left), matrices=tuple(matrices))

    def gathered_bytes(self, world: int = 1) -> int:
        """Count the bytes of the gathered parameters, including the padding between and after them
        in the layout for `world` ranks.
        """
        return _layout_of(self.numels, self.dtype.itemsize, world)[0]

    def shard_numel(self, world: int) -> int:
        """Count the elements of a rank's shard, with padding."""
        return _layout_of(self.numels, self.dtype.itemsize, world)[1]


class LinearShape(NamedTuple):
    """Weight of a linear that can be tiled; linears and embeddings may share the weight. flat:
    index of the weight's FlatParameter in the unit.
    """

    name: str
    flat: int
    out_features: int
    in_features: int


@dataclasses.dataclass(frozen=True)
class StackShape:
    """Parameter that holds all experts of a layer, [experts, ...]. flat: index of the parameter's
    FlatParameter in the unit. numel: elements of all experts together.
    """

    flat: int
    numel: int
    experts: int


@dataclasses.dataclass(frozen=True)
class UnitShape:
    """FlatParameters that are gathered together.

    linears: weights in the unit that can be tiled. stacks: parameters in the unit that hold all
    experts of a layer. around: indices of the enclosing units, which stay gathered while this one
    is. tiles: True if the unit is a tile of a stack.
    """

    name: str
    flats: tuple[FlatShape, ...]
    linears: tuple[LinearShape, ...] = ()
    around: tuple[int, ...] = ()
    stacks: tuple[StackShape, ...] = ()
    tiles: bool = False

    @property
    def alike(self) -> tuple[object, ...]:
        """Key, equal for all tiles of a layer; a shorter last tile differs."""
        return self.name.partition("[")[0], self.around, self.flats

    def gathered_bytes(self, world: int = 1) -> int:
        """Bytes of the unit's gathered values on each of `world` ranks."""
        return sum(flat.gathered_bytes(world) for flat in self.flats)

    def tiled(
        self, tiles_of: Callable[[LinearShape], int], world: int = 1
    ) -> tuple[UnitBytes, list[UnitBytes]]:
        """Return (bytes of the unit without the tiled linears, one entry for the tiles of each
        tiled linear). Each tile is a separate unit. The caller adds `around`.

        tiles_of: returns the number of tiles of a linear; 1 leaves the linear whole.
        """
        rest = self.gathered_bytes(world)
        grads = [
            numel * flat.dtype.itemsize
            for flat in self.flats
            if flat.trainable
            for numel in flat.numels
        ]
        found = []
        for linear in self.linears:
            tiles, flat = tiles_of(linear), self.flats[linear.flat]
            if tiles > 1:
                row = linear.in_features * flat.dtype.itemsize
                rest -= linear.out_features * row
                size = -(-linear.out_features // tiles) * row
                if flat.trainable:
                    grads.remove(linear.out_features * row)
                found.append(UnitBytes(size, (size,) if flat.trainable else (), repeat=tiles))
        return UnitBytes(rest, tuple(grads)), found


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A model: the units in order, and the sizes from which a plan estimates activations and
    operations (0: not known).

    active_params: elements of the parameters that compute for one token. frozen_params: the part of
    `active_params` that is not trained. encoder: True if the model has an encoder and a decoder.
    layers: number of layers, of encoder and decoder together. mlp_width: sum of the widths of a
    token's experts. vocabulary: number of entries. positions: longest sequence, in tokens.
    itemsize: bytes of an element of activations. experts: routed experts of a layer. chosen:
    routed experts of a token in a layer. shared: experts of a layer that every token uses.
    """

    name: str
    units: tuple[UnitShape, ...]
    active_params: int
    layers: int = 0
    width: int = 0
    attention_width: int = 0
    mlp_width: int = 0
    vocabulary: int = 0
    positions: int = 0
    itemsize: int = 2
    experts: int = 0
    chosen: int = 0
    shared: int = 0
    frozen_params: int = 0
    encoder: bool = False

    @functools.cached_property
    def _known(self) -> dict[object, Any]:
        return {}

    def remember(self, key: object, make: Callable[[], _Result]) -> _Result:
        """Return the result of `make`, which must depend only on this model and `key`. Later calls
        return the stored result: a search makes thousands of them.
        """
        if key not in self._known:
            self._known[key] = make()
        found: _Result = self._known[key]
        return found

    @functools.cached_property
    def has_stacks(self) -> bool:
        """True if the model has stacks of experts, which `inf.tile_experts` can cut."""
        return any(unit.stacks for unit in self.units)

    @functools.cached_property
    def has_linears(self) -> bool:
        """True if the model has linears besides its head that `inf.tile_linears` can cut."""
        linears = (linear for unit in self.units for linear in unit.linears)
        return any(linear.out_features != self.vocabulary for linear in linears)

    def with_adapters(self) -> ModelShape:
        """Return the shape of the model with adapters. Adapters need whole layers, so only the head
        can be tiled.
        """
        units = (
            dataclasses.replace(
                unit,
                linears=tuple(
                    each for each in unit.linears if each.out_features == self.vocabulary
                ),
                stacks=(),
            )
            for unit in self.units
        )
        return dataclasses.replace(self, units=tuple(units))

    @functools.cached_property
    def without_matrices(self) -> ModelShape:
        """The model for an optimizer that updates each element independently."""
        # Layers repeat: equal FlatParameters stay one object.
        plain = {flat: dataclasses.replace(flat, matrices=()) for flat, _ in self.kinds_of_flats}
        if all(flat.matrices == () for flat in plain):
            return self
        units = (
            dataclasses.replace(unit, flats=tuple(plain[flat] for flat in unit.flats))
            for unit in self.units
        )
        return dataclasses.replace(self, units=tuple(units))

    @functools.cached_property
    def flats(self) -> tuple[FlatShape, ...]:
        return tuple(flat for unit in self.units for flat in unit.flats)

    @functools.cached_property
    def places_of_flats(self) -> tuple[int, ...]:
        """For each FlatParameter, in order, its index in `kinds_of_flats`."""
        index = {flat: place for place, (flat, _) in enumerate(self.kinds_of_flats)}
        return tuple(index[flat] for flat in self.flats)

    @functools.cached_property
    def runs(self) -> tuple[tuple[UnitShape, range], ...]:
        """Runs: each is a unit and a range of unit indices. Consecutive tiles with equal `alike`
        are one run; every other unit is a run of length one.
        """
        found: list[tuple[UnitShape, range]] = []
        for index, unit in enumerate(self.units):
            last, there = found[-1] if found else (None, range(0))
            if last is not None and unit.tiles and last.tiles and unit.alike == last.alike:
                found[-1] = last, range(there.start, index + 1)
            else:
                found.append((unit, range(index, index + 1)))
        return tuple(found)

    @functools.cached_property
    def kinds_of_flats(self) -> tuple[tuple[FlatShape, int], ...]:
        """Distinct FlatParameters, each with its count. Layers repeat, so the list is short; a
        search sums over it thousands of times.
        """
        return tuple(collections.Counter(self.flats).items())

    @functools.cached_property
    def _blocks(self) -> tuple[int, ...]:
        """For each run, the number of its block."""
        numbers: dict[str, int] = {}
        names = (_block_of(unit.name) for unit, _ in self.runs)
        return tuple(numbers.setdefault(name, len(numbers)) for name in names)

    @functools.cached_property
    def _first_runs(self) -> tuple[int, ...]:
        """For each run, the index of the first run with equal FlatParameters and linears."""
        first: dict[object, int] = {}
        keys = ((unit.flats, tuple(linear[1:] for linear in unit.linears)) for unit, _ in self.runs)
        return tuple(first.setdefault(key, place) for place, key in enumerate(keys))

    @functools.cached_property
    def kinds_of_linears(self) -> tuple[LinearShape, ...]:
        """Linears, one for each distinct size."""
        linears = (linear for unit in self.units for linear in unit.linears)
        return tuple({linear[2:]: linear for linear in linears}.values())

    @functools.cached_property
    def params(self) -> int:
        return sum(count * flat.numel for flat, count in self.kinds_of_flats)

    @functools.cached_property
    def trainable(self) -> int:
        """Elements of the parameters that an optimizer will hold."""
        return sum(count * flat.numel for flat, count in self.kinds_of_flats if flat.trainable)

    @property
    def largest_unit_bytes(self) -> int:
        return max((unit.gathered_bytes() for unit in self.units), default=0)

    @functools.cached_property
    def in_blocks(self) -> ModelShape:
        """The model with the units of each block, including tiles, merged into one unit. A block is
        the part of a unit's name up to the first number, as "model.layers.3".
        """
        names = [_block_of(unit.name) for unit in self.units]
        place = {name: index for index, name in enumerate(dict.fromkeys(names))}
        flats: list[list[FlatShape]] = [[] for _ in place]
        around: list[set[int]] = [set() for _ in place]
        for unit, name in zip(self.units, names, strict=True):
            flats[place[name]] += unit.flats
            around[place[name]] |= {place[names[outer]] for outer in unit.around} - {place[name]}
        units = (
            UnitShape(name, tuple(flats[index]), around=tuple(sorted(around[index])))
            for name, index in place.items()
        )
        return dataclasses.replace(self, units=tuple(units))

    def gathered_bytes(self, world: int = 1) -> int:
        """Bytes of all units when each of `world` ranks gathers them."""
        flats = self.kinds_of_flats
        return self.remember(
            ("gathered_bytes", world),
            lambda: sum(count * flat.gathered_bytes(world) for flat, count in flats),
        )

    @functools.cached_property
    def trained_bytes(self) -> int:
        """Bytes of all trained FlatParameters when one rank gathers them."""
        flats = self.kinds_of_flats
        return sum(count * flat.gathered_bytes() for flat, count in flats if flat.trainable)

    @functools.cached_property
    def tiled_bytes(self) -> int:
        """Bytes of the units that are tiles of stacks."""
        return sum(len(run) * unit.gathered_bytes() for unit, run in self.runs if unit.tiles)

    @property
    def boundary_bytes_per_token(self) -> int:
        """Bytes per token of the inputs of all checkpointed blocks."""
        return self.itemsize * self.layers * self.width

    @property
    def block_bytes_per_token(self) -> int:
        """Bytes per token of the activations that a block saves for its backward."""
        return self.itemsize * (12 * self.width + 4 * self.mlp_width)

    def logits_bytes_per_token(self, loss_tiles: int = 1) -> int:
        """Bytes per token of the logits, of their fp32 copy and of their gradient. The loss
        computes the vocabulary in `loss_tiles` tiles, one at a time.
        """
        # Logits as computed, 4 B for the fp32 copy, 4 B for the fp32 gradient. Logits that are
        # computed in fp32 need no copy.
        per_entry = 8 if self.itemsize == 4 else self.itemsize + 8
        if loss_tiles == 1:
            return per_entry * self.vocabulary
        return per_entry * -(-self.vocabulary // loss_tiles) + 4 * self.width

    def tiles_of(self, linear: LinearShape, *, tiles: int, loss_tiles: int) -> int:
        """Return the number of tiles of a linear. A linear with one output for each vocabulary
        entry is the head, which `inf.tile_loss` also cuts.
        """
        if linear.out_features == self.vocabulary:
            return max(tiles, loss_tiles)
        # A linear with fewer outputs than tiles stays whole.
        return tiles if tiles <= linear.out_features else 1

    def unit_bytes(
        self, tiles: int = 1, loss_tiles: int = 1, world: int = 1, *, in_slices: bool = False
    ) -> list[UnitBytes]:
        """Return the bytes of the units on each of `world` ranks, with every linear in `tiles`
        tiles (`inf.tile_linears`) and the head in at least `loss_tiles` (`inf.tile_loss`), cut
        along their outputs. Each run gives one entry, whose `repeat` is its number of units.

        in_slices: True if each block, and each unit outside of blocks, runs all micro-batches
        before the next one (`inf.microbatched`).
        """
        key = tiles, loss_tiles, world, in_slices
        return self.remember(("unit_bytes", *key), lambda: self._count_unit_bytes(*key))

    def _count_unit_bytes(
        self, tiles: int, loss_tiles: int, world: int, in_slices: bool
    ) -> list[UnitBytes]:
        count = functools.partial(self.tiles_of, tiles=tiles, loss_tiles=loss_tiles)
        # Layers repeat: of equal units, only the first is cut.
        known = {place: self.runs[place][0].tiled(count, world) for place in set(self._first_runs)}
        parts = [known[place] for place in self._first_runs]
        starts = itertools.accumulate((1 + len(cut) for _, cut in parts), initial=0)
        # Keys are indices of units. `around` names no tile: a tile encloses no unit.
        place = {run.start: start for (_, run), start in zip(self.runs, starts, strict=False)}
        found = []
        blocks = zip(self.runs, self._blocks, parts, strict=True)
        for (unit, run), number, (rest, cut) in blocks:
            block = number if in_slices else None
            outer = tuple(place[each] for each in unit.around)
            found.append(UnitBytes(rest.gathered, rest.grads, outer, len(run), block))
            # The rest of the unit stays gathered while the engine gathers the tiles one by one.
            inner = (*outer, place[run.start])
            found += [UnitBytes(each.gathered, each.grads, inner, each.repeat, block)
                      for each in cut]
        return found


JobShape = NewType("JobShape", ModelShape)
"""A model as a job trains it (`shape_in`): stacks cut into the job's tiles, and matrices only if
the job's optimizer updates them. A function with a `ModelShape` and a job takes the uncut model."""


@functools.lru_cache(maxsize=65536)  # called often, and a model has few distinct FlatParameters
def _layout_of(numels: tuple[int, ...], itemsize: int, world: int) -> tuple[int, int]:
    """Return (bytes of all shards, elements of one shard)."""
    layout = plan_flat(numels, itemsize, world)
    return layout.size_bytes, layout.shard_numel


def _block_of(unit: str) -> str:
    """Return the name of the unit's block; the unit's name if the unit is in no block."""
    parts = unit.partition("[")[0].split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return unit if number is None else ".".join(parts[: number + 1])


def shape_of(
    model: torch.nn.Module, *, name: str = "", nested: bool = True, frozen: bool = False
) -> ModelShape:
    """Return the shape of a module, usually on the meta device. The module is not changed.

    nested: find nested units, as the engine does on one rank and not on several. frozen: treat
    every parameter as not trained.

    Raises: ValueError for parameters that cannot be offloaded.
    """
    specs = find_units(model, unit_bytes_max=UNIT_BYTES_MAX, nested=nested)
    config: Any = getattr(model, "config", None)
    # A multimodal configuration has these sizes in its text configuration.
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    width = _number(text, "hidden_size", "n_embd", "d_model")
    heads = _number(text, "num_attention_heads", "n_head", "num_heads")
    # If a configuration does not name the width of a head, the heads divide the model's width.
    head = _number(text, "head_dim", "d_kv") or (width // heads if heads else 0)
    experts, chosen, shared, mlp_width = _mlp(text, width)
    routed = chosen / experts if experts else 1.0
    active = _active(model, specs, routed)
    # Exactly these classes: `inf.tile_linears` leaves subclasses whole.
    linears = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    embeddings = {
        name for name, module in model.named_modules() if type(module) is torch.nn.Embedding
    }
    return ModelShape(
        name=name or type(model).__name__,
        units=tuple(_unit(spec, linears, embeddings, frozen, experts) for spec in specs),
        active_params=active,
        layers=_layers(text),
        width=width,
        attention_width=heads * head,
        mlp_width=mlp_width,
        vocabulary=_number(text, "vocab_size"),
        positions=_number(text, "max_position_embeddings", "n_positions", "n_ctx"),
        experts=experts,
        chosen=chosen,
        shared=shared,
        encoder=bool(getattr(text, "is_encoder_decoder", False)),
        frozen_params=active if frozen else _active(model, specs, routed, frozen=True),
        # Activations have the dtype of the parameters; a plan takes the first parameter's.
        itemsize=next(
            (entry.parameter.dtype.itemsize for spec in specs for entry in spec.entries), 2
        ),
    )


def _mlp(config: Any, width: int) -> tuple[int, int, int, int]:
    """Return (routed experts of a layer, routed experts of a token, shared experts, summed width of
    the MLPs that a token uses). width: width of the model.
    """
    # DBRX has these sizes in a separate part of its configuration.
    parts = (config, getattr(config, "ffn_config", None))

    def number(*names: str) -> int:
        return next((found for part in parts if (found := _number(part, *names))), 0)

    # Experts have the width of the MLP unless a field below names theirs. GPT-2 leaves n_inner at
    # None, which means four times the model's width.
    mlp = number("intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size") or 4 * width
    experts = number("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if not experts:
        return 0, 0, 0, mlp
    mlp = number("moe_intermediate_size") or mlp
    chosen = number("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk")
    # Width of all shared experts together. Qwen2-MoE has one shared expert; its configuration names
    # the width, not the number.
    width_shared = number(
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
    )
    shared = number("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    shared = shared or int(width_shared > 0)
    # Backward needs a token's activations in each of its routed experts and in every shared expert.
    return experts, chosen, shared, mlp * max(chosen, 1) + (width_shared or mlp * shared)


def _layers(config: Any) -> int:
    # In T5's configuration num_layers counts only the encoder's layers.
    if getattr(config, "is_encoder_decoder", False):
        decoder = _number(config, "num_decoder_layers", "decoder_layers")
        return _number(config, "encoder_layers", "num_layers", "num_hidden_layers") + decoder
    return _number(config, "num_hidden_layers", "n_layer", "num_layers")


def _unit(
    spec: UnitSpec, linears: set[str], embeddings: set[str], frozen: bool, experts: int
) -> UnitShape:
    """Group a unit's parameters as `discover.build` does: by dtype and by whether they are trained.
    linears, embeddings: names of the modules of these classes. experts: routed experts of a layer.
    """
    groups: dict[tuple[torch.dtype, bool], list[tuple[int, tuple[int, ...]]]] = {}
    found, stacks = [], []
    for entry in spec.entries:
        parameter = entry.parameter
        key = (parameter.dtype, parameter.requires_grad and not frozen)
        params = groups.setdefault(key, [])
        holders = {name.removesuffix(".weight") for name in entry.names}
        # A weight cannot be tiled if a module of another class shares it and needs it whole.
        if holders & linears and holders <= linears | embeddings:
            found.append(
                LinearShape(
                    entry.names[0], list(groups).index(key), parameter.shape[0], parameter.shape[1]
                )
            )
        *_, last = entry.names[0].split(".")
        if experts and parameter.dim() == 3 and len(parameter) == experts and last in STACK_WEIGHTS:
            stacks.append(StackShape(list(groups).index(key), parameter.numel(), experts))
        shape = tuple(parameter.shape)
        hidden = is_hidden_matrix(shape, entry.whole_shape, entry.names, entry.sites)
        params.append((parameter.numel(), shape if hidden and key[1] else ()))
    flats = tuple(
        FlatShape(tuple(n for n, _ in params), *key, tuple(shape for _, shape in params))
        for key, params in groups.items()
    )
    return UnitShape(spec.name, flats, tuple(found), spec.around, tuple(stacks))


def _active(
    model: torch.nn.Module,
    specs: Sequence[UnitSpec],
    routed_share: float,
    *,
    frozen: bool = False,
) -> int:
    """Count the elements of the parameters that compute for a token. frozen: count only parameters
    that are not trained.
    """
    # Ids, not names: two modules with a tied weight share one parameter.
    lookups = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    total = 0.0
    for spec in specs:
        for entry in spec.entries:
            if frozen and entry.parameter.requires_grad:
                continue
            tied = len(entry.names) > 1
            # An untied embedding is only looked up; a tied one is also the head's matrix.
            if id(entry.parameter) in lookups and not tied:
                continue
            # A token computes only with its routed experts.
            routed = any(part in ("experts", "expert") for part in entry.names[0].split("."))
            total += entry.parameter.numel() * (routed_share if routed else 1.0)
    return round(total)


def _number(config: Any, *names: str) -> int:
    """Return the first positive number among these fields of a configuration; 0 if none has one."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 0


# -- The job ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
    """Training of a model under a policy: tokens per step, and how forward and backward compute.

    policy: tiers of the states, and the way a step runs. Sizes in `resident` are bytes of each
        process. A plan takes RAM and drives from the machine, and ignores `ram` and `nvme`.
    tokens: tokens of a step, over all devices and micro-batches. sequence: tokens of one sequence.
    micro_batches: micro-batches of each device in a step.
    checkpointing: True if backward recomputes the activations of blocks.
    schedule: order of the micro-batches, one of `config.choices.SCHEDULES`. The vertical schedule
        requires checkpointing.
    compute_s: measured (forward, backward) seconds of one micro-batch; None: estimate from FLOP/s.
    tiles: number of tiles of each linear (`inf.tile_linears`). loss_tiles: number of tiles of the
        head and the loss, along the vocabulary (`inf.tile_loss`); 1: whole logits. expert_tile:
        experts in a tile of a stack (`inf.tile_experts`); 0: whole stacks.
    optimizer: one of `config.choices.OPTIMIZERS`; "muon" updates hidden matrices whole.
    """

    policy: Policy
    tokens: int
    sequence: int
    micro_batches: int = 1
    checkpointing: bool = True
    compute_s: tuple[float, float] | None = None
    tiles: int = 1
    loss_tiles: int = 1
    expert_tile: int = 0
    schedule: str = "horizontal"
    optimizer: str = OPTIMIZERS[0]

    def replace(self, **fields: Any) -> Job:
        """Return a copy with some fields changed. A name that is no field of a job is taken as a
        field of the policy.

        Raises: ValueError for values that the policy refuses.
        """
        own = {name: fields.pop(name) for name in _JOB_FIELDS & fields.keys()}
        if not fields:
            return dataclasses.replace(self, **own)
        # A policy with a tier on NVMe must name a directory. A plan opens no directory, so any name
        # works.
        fields.setdefault("nvme", self.policy.nvme or ["."])
        return dataclasses.replace(self, policy=dataclasses.replace(self.policy, **fields), **own)

    @property
    def refusal(self) -> str:
        """Reason why the optimizer cannot step under the policy or with these tiles; "" if it can.
        """
        if self.optimizer == "adamw":
            return ""
        name = f"optimizer={self.optimizer!r}"
        if self.tiles > 1:
            return f"{name} needs whole matrices, and tiles={self.tiles} cuts them; leave one out"
        try:
            Matrixwise.check_policy(self.policy, name)
        except ValueError as error:
            return str(error)
        return ""

    @property
    def vertical(self) -> bool:
        """True if several micro-batches pass a block before the next block."""
        return self.schedule == "vertical" and self.micro_batches > 1

    @property
    def passes(self) -> int:
        """Number of forwards of the whole model in one step, and of backwards. Each forward and
        each backward gathers every unit once; each backward produces a gradient of each parameter.
        """
        return 1 if self.vertical else self.micro_batches

    @property
    def gathers_again(self) -> int:
        """Additional gathers in one step of a unit that the vertical schedule gathers separately
        for each micro-batch: in forward, in recomputation and in backward. These are 3 M
        gathers for M micro-batches; `passes` = 1 already counts 2 of them.
        """
        return 3 * self.micro_batches - 2 if self.vertical else 0

    @property
    def stores_gradients(self) -> bool:
        """True if the engine stores gradients until the step."""
        # With update="backward" and one pass, the update consumes each gradient in backward.
        return not self.policy.consumes_grads or self.passes > 1

    @property
    def reductions(self) -> int:
        """Reductions of each gradient over several ranks in one step."""
        return 1 if self.policy.accumulates_locally else self.passes

    def whole_params(self, world: int) -> bool:
        """True if each of `world` ranks keeps all parameters on its device."""
        return self.policy.whole_params(several=world > 1)

    def micro_batch_tokens(self, ranks: int) -> int:
        return -(-self.tokens // (self.micro_batches * ranks))

    def micro_batch_counts(self, ranks: int) -> Iterator[int]:
        """Yield the numbers of micro-batches that a step may have: powers of two, as long as a
        micro-batch has the tokens of a sequence. One micro-batch is always allowed, even if a
        device has less than one sequence.
        """
        count = 1
        while count <= MICRO_BATCHES_MAX and self.tokens >= count * ranks:
            tokens = -(-self.tokens // (count * ranks))
            if count > 1 and tokens < self.sequence:
                return
            yield count
            count *= 2

    def pass_tokens(self, ranks: int) -> int:
        """Tokens of one pass on one device. A pass holds the inputs of blocks for all its tokens at
        the same time.
        """
        return self.micro_batch_tokens(ranks) * self.micro_batches // self.passes

    def grad_itemsize(self, dtype: torch.dtype) -> int:
        """Bytes of an element of a stored gradient, for a parameter of `dtype`."""
        return int((self.policy.grad_dtype or dtype).itemsize)


MICRO_BATCHES_MAX = 1024
"""Largest number of micro-batches that a plan tries."""

_JOB_FIELDS = frozenset(field.name for field in dataclasses.fields(Job))


# -- Stacks of experts in tiles --------------------------------------------------------------------


def shape_in(job: Job, shape: ModelShape) -> JobShape:
    """Return the model with the stacks cut into the job's tiles, and with matrices only if the
    job's optimizer updates whole matrices. A second call changes nothing."""
    seen = shape.without_matrices if job.optimizer == "adamw" else shape
    return JobShape(cut_experts(seen, job.expert_tile))


def cut_experts(shape: ModelShape, tile: int) -> ModelShape:
    """Return the model with the stacks in tiles of `tile` experts; 0: unchanged.

    The first part of a cut unit takes the unit's index. The further parts are appended after all
    units, so uncut units keep their indices.
    """
    if not tile or not shape.has_stacks:
        return shape
    return shape.remember(("cut", tile), lambda: _cut_experts(shape, tile))


def _cut_experts(shape: ModelShape, tile: int) -> ModelShape:
    units, more = [], []
    for index, unit in enumerate(shape.units):
        first, *others = _cut_unit(unit, index, tile)
        units.append(first)
        more += others
    return dataclasses.replace(shape, units=(*units, *more))


def _cut_unit(unit: UnitShape, index: int, tile: int) -> list[UnitShape]:
    """Return the unit without its stacks (left out if it has no other parameters), then the tiles.
    """
    if not unit.stacks:
        return [unit]
    rest = tuple(
        flat.without(stack.numel for stack in unit.stacks if stack.flat == index_of)
        for index_of, flat in enumerate(unit.flats)
    )
    found, around = [], unit.around
    if any(flat.numels for flat in rest):
        # The rest stays gathered while the engine gathers the tiles one by one.
        around = (*around, index)
        # Empty FlatParameters stay in the tuple: linears refer to FlatParameters by index.
        found.append(dataclasses.replace(unit, flats=rest, stacks=()))
    experts = max(stack.experts for stack in unit.stacks)
    # All tiles have equal FlatParameters, except a last tile with fewer experts.
    flats = {
        count: _flats_of_tile(unit, count) for count in {min(tile, experts), experts % tile or tile}
    }
    return found + [
        UnitShape(
            f"{unit.name}[{start}]", flats[min(tile, experts - start)], around=around, tiles=True
        )
        for start in range(0, experts, tile)
    ]


def _flats_of_tile(unit: UnitShape, experts: int) -> tuple[FlatShape, ...]:
    found: dict[int, FlatShape] = {}
    for stack in unit.stacks:
        flat = unit.flats[stack.flat]
        tile = found.setdefault(stack.flat, dataclasses.replace(flat, numels=(), matrices=()))
        place = flat.numels.index(stack.numel)
        # The experts are the first dimension of a stack.
        cut = tuple((experts, *shape[1:]) if shape else () for shape in flat.matrices[place:])
        found[stack.flat] = dataclasses.replace(
            tile,
            numels=(*tile.numels, experts * stack.numel // stack.experts),
            matrices=tile.matrices + cut[:1],
        )
    return tuple(found.values())


def touched_share(experts: int, chosen: int, tile: int, tokens: int) -> float:
    """Return the expected share of tiles with at least one chosen expert. Each of `tokens` tokens
    chooses `chosen` of `experts` experts, all equally likely; a tile has `tile` experts.
    """
    left = experts - tile
    if left < chosen:
        return 1.0
    # A token misses a tile if it chooses only experts outside the tile.
    missed = math.comb(left, chosen) / math.comb(experts, chosen)
    return 1.0 - missed**tokens


def gathered_share(shape: JobShape, tile: int, tokens: int) -> float:
    """Return the share of all parameters that a pass gathers. tokens: tokens of the pass on all
    ranks together.
    """
    if not shape.tiled_bytes:
        return 1.0
    touched = touched_share(shape.experts, shape.chosen, min(tile, shape.experts), tokens)
    return 1.0 - (1.0 - touched) * shape.tiled_bytes / shape.gathered_bytes()
