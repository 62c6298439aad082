"""Model and job of a plan: units and FlatParameters as the engine would make them, without tensors,
and how they are trained.

Units come from `params.discover`, layouts from `memory.flat_layout`. Activations and floating-point
operations are estimated from the sizes that a configuration names:

    parameters that compute     all except a table that is only looked up (an untied input
                                embedding); of experts, those that a token is routed to
    boundary activations        layers x width x itemsize per token: inputs of checkpointed blocks
    activations of a block      (12 x width + 4 x MLP width x experts) x itemsize per token, with
                                the experts routed to and shared: recomputed, or retained for every
                                layer
    logits                      10 B per token and word: as computed in 2 B, their fp32 copy, its
                                gradient; 8 B if computed in fp32, without the copy. With the loss
                                in tiles: the words of one tile, and 4 B x width for the hidden
                                states' gradient in fp32

A stack of experts [experts, ...] is gathered whole, however few of its experts compute.
`inf.tile_experts` cuts it into tiles, each a separate unit. A tile is not gathered for a
micro-batch whose tokens chose none of its experts. Tokens are assumed to choose all experts equally
often, which touches the most tiles.
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
    """A FlatParameter as the engine would make it. numels: elements of its parameters, in order.
    trainable: an optimizer will hold it. matrices: for each parameter its shape if an optimizer of
    whole matrices updates it so, else (); empty: no parameter is.
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
        """Moments for which a flat has space: one if all its parameters are matrices."""
        return 1 if self.matrices and all(self.matrices) else 2

    def without(self, numels: Iterable[int]) -> FlatShape:
        """Return the flat without a parameter of each of these numbers of elements."""
        left, matrices = list(self.numels), list(self.matrices)
        for numel in numels:
            place = left.index(numel)
            del left[place], matrices[place : place + 1]
        return dataclasses.replace(self, numels=tuple(left), matrices=tuple(matrices))

    def gathered_bytes(self, world: int = 1) -> int:
        """Count the bytes of the gathered values, with the padding between and behind them in the
        layout for `world` ranks.
        """
        return _layout_of(self.numels, self.dtype.itemsize, world)[0]

    def shard_numel(self, world: int) -> int:
        """Count the elements of a rank's shard, with padding."""
        return _layout_of(self.numels, self.dtype.itemsize, world)[1]


class LinearShape(NamedTuple):
    """Weight of a linear that can be tiled; linears and embeddings may share it. flat: index of its
    FlatParameter in the unit.
    """

    name: str
    flat: int
    out_features: int
    in_features: int


@dataclasses.dataclass(frozen=True)
class StackShape:
    """Parameter that holds all experts of a layer, [experts, ...]. flat: index of its FlatParameter
    in the unit. numel: elements of all experts.
    """

    flat: int
    numel: int
    experts: int


@dataclasses.dataclass(frozen=True)
class UnitShape:
    """FlatParameters that are gathered together.

    linears: weights in the unit that can be tiled. stacks: parameters in the unit that hold all
    experts of a layer. around: indices of the units that are in use whenever this unit is. tiles:
    the unit is a tile of a stack.
    """

    name: str
    flats: tuple[FlatShape, ...]
    linears: tuple[LinearShape, ...] = ()
    around: tuple[int, ...] = ()
    stacks: tuple[StackShape, ...] = ()
    tiles: bool = False

    @property
    def alike(self) -> tuple[object, ...]:
        """Key that tiles of one layer have in common, unless the last has fewer experts."""
        return self.name.partition("[")[0], self.around, self.flats

    def gathered_bytes(self, world: int = 1) -> int:
        """Bytes of the unit's gathered values on each of `world` ranks."""
        return sum(flat.gathered_bytes(world) for flat in self.flats)

    def tiled(
        self, tiles_of: Callable[[LinearShape], int], world: int = 1
    ) -> tuple[UnitBytes, list[UnitBytes]]:
        """Return (bytes of the unit without its tiled linears, bytes of the tiles of each). Every
        tile is a separate unit. The results have no `around` yet.

        tiles_of: number of tiles of a linear; 1: whole.
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
    """A model: its units in order, and the sizes from which activations and operations are
    estimated (0: not known).

    active_params: elements of the parameters that compute for one token. frozen_params: of these,
    the elements of parameters that are not trained. encoder: it has one and a decoder. layers: of
    encoder and decoder together. mlp_width: summed over the experts that a token computes.
    vocabulary: words. positions: longest sequence in tokens. itemsize: bytes of an element of
    activations. experts: routed experts of a layer; chosen: how many of them a token is routed to;
    shared: further experts, which every token computes.
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
        """Return the result of `make`, which depends on this model and `key` alone. It is computed
        once: a search asks for it thousands of times.
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
        """Return the shape of a model with adapters, which need whole layers: only its head can be
        tiled.
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
        """The model for an optimizer of single elements."""
        # Layers repeat: flats that are alike stay one object.
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
        """Units with the range of their indices: tiles of one layer that are alike and follow each
        other are one entry.
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
        """Distinct FlatParameters, each with its count. Layers repeat, so these are few, and a
        search asks for sums over them thousands of times.
        """
        return tuple(collections.Counter(self.flats).items())

    @functools.cached_property
    def _blocks(self) -> tuple[int, ...]:
        """For each of `runs` the number of its block."""
        numbers: dict[str, int] = {}
        names = (_block_of(unit.name) for unit, _ in self.runs)
        return tuple(numbers.setdefault(name, len(numbers)) for name in names)

    @functools.cached_property
    def _first_runs(self) -> tuple[int, ...]:
        """For each of `runs` the place of the first whose unit has equal FlatParameters and
        linears.
        """
        first: dict[object, int] = {}
        keys = ((unit.flats, tuple(linear[1:] for linear in unit.linears)) for unit, _ in self.runs)
        return tuple(first.setdefault(key, place) for place, key in enumerate(keys))

    @functools.cached_property
    def kinds_of_linears(self) -> tuple[LinearShape, ...]:
        """Linears of distinct sizes, one of each."""
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
        """The model with the units of each block, tiles included, merged into one. Names of
        units tell their block: the part up to the first number, as "model.layers.3".
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
        """Bytes of all units, gathered on each of `world` ranks."""
        flats = self.kinds_of_flats
        return self.remember(
            ("gathered_bytes", world),
            lambda: sum(count * flat.gathered_bytes(world) for flat, count in flats),
        )

    @functools.cached_property
    def trained_bytes(self) -> int:
        """Bytes of all units that are trained, gathered on one rank."""
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
        """Bytes per token of the logits and of the tensors that the loss makes of them, with the
        vocabulary in `loss_tiles` tiles, one at a time.
        """
        # Logits as computed, their fp32 copy for the loss, the gradient in fp32. fp32 logits need
        # no copy.
        per_word = 8 if self.itemsize == 4 else self.itemsize + 8
        if loss_tiles == 1:
            return per_word * self.vocabulary
        return per_word * -(-self.vocabulary // loss_tiles) + 4 * self.width

    def tiles_of(self, linear: LinearShape, *, tiles: int, loss_tiles: int) -> int:
        """Return the number of tiles of a linear. A linear with one output for each word is the
        head, which `inf.tile_loss` cuts, too.
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
        along their outputs. in_slices: each block, and each unit outside of blocks, runs all
        micro-batches before the next one (`inf.microbatched`). Of `runs` one entry stands for all.
        """
        key = tiles, loss_tiles, world, in_slices
        return self.remember(("unit_bytes", *key), lambda: self._count_unit_bytes(*key))

    def _count_unit_bytes(
        self, tiles: int, loss_tiles: int, world: int, in_slices: bool
    ) -> list[UnitBytes]:
        count = functools.partial(self.tiles_of, tiles=tiles, loss_tiles=loss_tiles)
        # Layers repeat: units that are alike are cut once.
        known = {place: self.runs[place][0].tiled(count, world) for place in set(self._first_runs)}
        parts = [known[place] for place in self._first_runs]
        starts = itertools.accumulate((1 + len(cut) for _, cut in parts), initial=0)
        # By the index of the unit. Nothing lies inside of tiles, so no unit refers to one.
        place = {run.start: start for (_, run), start in zip(self.runs, starts, strict=False)}
        found = []
        blocks = zip(self.runs, self._blocks, parts, strict=True)
        for (unit, run), number, (rest, cut) in blocks:
            block = number if in_slices else None
            outer = tuple(place[each] for each in unit.around)
            found.append(UnitBytes(rest.gathered, rest.grads, outer, len(run), block))
            # The rest of the unit stays gathered while its tiles are gathered one by one.
            inner = (*outer, place[run.start])
            found += [UnitBytes(each.gathered, each.grads, inner, each.repeat, block)
                      for each in cut]
        return found


JobShape = NewType("JobShape", ModelShape)
"""A model with its stacks cut into the job's tiles, as the job's optimizer sees it (`shape_in`). A
function that takes a `ModelShape` and a job takes the uncut model."""


@functools.lru_cache(maxsize=65536)  # called often, and a model has few distinct FlatParameters
def _layout_of(numels: tuple[int, ...], itemsize: int, world: int) -> tuple[int, int]:
    """Return (bytes of all shards, elements of one)."""
    layout = plan_flat(numels, itemsize, world)
    return layout.size_bytes, layout.shard_numel


def _block_of(unit: str) -> str:
    """Return the name of the unit's block; the name of the unit if it is in no block."""
    parts = unit.partition("[")[0].split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return unit if number is None else ".".join(parts[: number + 1])


def shape_of(
    model: torch.nn.Module, *, name: str = "", nested: bool = True, frozen: bool = False
) -> ModelShape:
    """Return the shape of a module, usually on the meta device. The module is read and never
    changed.

    nested: find nested units, as the engine does on one rank and not on several. frozen: no
    parameter is trained. Raises: ValueError for parameters that cannot be offloaded.
    """
    specs = find_units(model, unit_bytes_max=UNIT_BYTES_MAX, nested=nested)
    config: Any = getattr(model, "config", None)
    # A multimodal configuration has these sizes in its text configuration.
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    width = _number(text, "hidden_size", "n_embd", "d_model")
    heads = _number(text, "num_attention_heads", "n_head", "num_heads")
    # If a configuration does not name the width of a head, heads divide the model's width.
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
        # Activations have the dtype of the parameters; the first parameter stands for all.
        itemsize=next(
            (entry.parameter.dtype.itemsize for spec in specs for entry in spec.entries), 2
        ),
    )


def _mlp(config: Any, width: int) -> tuple[int, int, int, int]:
    """Return (routed experts of a layer, how many of them a token is routed to, shared experts,
    summed width of the MLPs that a token computes). width: the model's.
    """
    # DBRX has these sizes in a separate part of its configuration.
    parts = (config, getattr(config, "ffn_config", None))

    def number(*names: str) -> int:
        return next((found for part in parts if (found := _number(part, *names))), 0)

    # Width of the MLP, which experts have, too, unless their width is named below. GPT-2 leaves
    # n_inner at None, which means four times the model's width.
    mlp = number("intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size") or 4 * width
    experts = number("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if not experts:
        return 0, 0, 0, mlp
    mlp = number("moe_intermediate_size") or mlp
    chosen = number("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk")
    # Width of all shared experts together. Qwen2-MoE has one, and names only its width.
    width_shared = number(
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
    )
    shared = number("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    shared = shared or int(width_shared > 0)
    # Backward needs a token's activations in every expert that it is routed to, and in every shared
    # expert.
    return experts, chosen, shared, mlp * max(chosen, 1) + (width_shared or mlp * shared)


def _layers(config: Any) -> int:
    # T5's num_layers counts the encoder alone.
    if getattr(config, "is_encoder_decoder", False):
        decoder = _number(config, "num_decoder_layers", "decoder_layers")
        return _number(config, "encoder_layers", "num_layers", "num_hidden_layers") + decoder
    return _number(config, "num_hidden_layers", "n_layer", "num_layers")


def _unit(
    spec: UnitSpec, linears: set[str], embeddings: set[str], frozen: bool, experts: int
) -> UnitShape:
    """Group a unit's parameters as `discover.build` does: by dtype and by whether they are trained.
    linears, embeddings: names of the modules of these classes. experts: of a layer.
    """
    groups: dict[tuple[torch.dtype, bool], list[tuple[int, tuple[int, ...]]]] = {}
    found, stacks = [], []
    for entry in spec.entries:
        parameter = entry.parameter
        key = (parameter.dtype, parameter.requires_grad and not frozen)
        params = groups.setdefault(key, [])
        holders = {name.removesuffix(".weight") for name in entry.names}
        # A weight that a module of another class shares cannot be tiled: that module needs it
        # whole.
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
    """Count the elements of the parameters that compute for a token; frozen: of those alone that
    are not trained.
    """
    # By identity: two modules with a tied weight have one parameter.
    lookups = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    total = 0.0
    for spec in specs:
        for entry in spec.entries:
            if frozen and entry.parameter.requires_grad:
                continue
            tied = len(entry.names) > 1
            # An embedding is only looked up, unless it is tied: then it is also the head's matrix.
            if id(entry.parameter) in lookups and not tied:
                continue
            # A token computes only with the experts that it is routed to.
            routed = any(part in ("experts", "expert") for part in entry.names[0].split("."))
            total += entry.parameter.numel() * (routed_share if routed else 1.0)
    return round(total)


def _number(config: Any, *names: str) -> int:
    """Return the first of these fields that is a positive number; 0 if there is none."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 0


# -- The job ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
    """Training of a model under a policy: tokens per step, and how its passes compute.

    policy: where states may rest and how a step runs. Sizes in `resident` are bytes of each
        process. A plan takes RAM and drives from the machine, and ignores `ram` and `nvme`.
    tokens: of a step, over all devices and micro-batches. sequence: tokens of one sequence.
    micro_batches: of each device in a step.
    checkpointing: recompute the activations of blocks in backward.
    schedule: order of the micro-batches, of `config.choices.SCHEDULES`. The vertical schedule
        requires checkpointing.
    compute_s: measured (forward, backward) seconds of one micro-batch; None: from FLOP/s.
    tiles: of every linear (`inf.tile_linears`). loss_tiles: of the head and its loss along the
        vocabulary (`inf.tile_loss`); 1: whole logits. expert_tile: experts in a tile of a stack
        (`inf.tile_experts`); 0: whole stacks.
    optimizer: of `config.choices.OPTIMIZERS`; "muon" updates hidden matrices whole.
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
        """Return a copy with some fields changed; fields that a job does not have are the policy's.

        Raises: ValueError for values that the policy refuses.
        """
        own = {name: fields.pop(name) for name in _JOB_FIELDS & fields.keys()}
        if not fields:
            return dataclasses.replace(self, **own)
        # A policy with a tier on NVMe must name a directory. A plan opens none, so any name works.
        fields.setdefault("nvme", self.policy.nvme or ["."])
        return dataclasses.replace(self, policy=dataclasses.replace(self.policy, **fields), **own)

    @property
    def refusal(self) -> str:
        """Reason why the optimizer cannot step under the policy, or with these tiles; "": it can.
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
        """Forwards of the whole model in one step, and as many backwards. Each pass gathers every
        unit once; each backward produces one gradient of each parameter.
        """
        return 1 if self.vertical else self.micro_batches

    @property
    def gathers_again(self) -> int:
        """Gathers in one step, in addition to those of `passes`, of a unit that does not stay
        gathered from one micro-batch to the next in the vertical schedule. Each micro-batch gathers
        it in forward, in recomputation and in backward: 3 gathers, of which `passes` counts 2.
        """
        return 3 * self.micro_batches - 2 if self.vertical else 0

    @property
    def stores_gradients(self) -> bool:
        """True if gradients wait for the step."""
        # With update="backward" the update consumes the gradient of the only pass at once.
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
        """Yield the numbers of micro-batches that a step may have: powers of two, until one has
        fewer tokens than a sequence. The first may have fewer: a device may have less than a
        sequence in all.
        """
        count = 1
        while count <= MICRO_BATCHES_MAX and self.tokens >= count * ranks:
            tokens = -(-self.tokens // (count * ranks))
            if count > 1 and tokens < self.sequence:
                return
            yield count
            count *= 2

    def pass_tokens(self, ranks: int) -> int:
        """Tokens of one pass on one device. The inputs of blocks for all of them are in memory at
        once.
        """
        return self.micro_batch_tokens(ranks) * self.micro_batches // self.passes

    def grad_itemsize(self, dtype: torch.dtype) -> int:
        """Bytes of an element of a gradient that waits, for a parameter of `dtype`."""
        return int((self.policy.grad_dtype or dtype).itemsize)


MICRO_BATCHES_MAX = 1024
"""Most micro-batches that a plan tries."""

_JOB_FIELDS = frozenset(field.name for field in dataclasses.fields(Job))


# -- Stacks of experts in tiles --------------------------------------------------------------------


def shape_in(job: Job, shape: ModelShape) -> JobShape:
    """Return the model with its stacks cut into the job's tiles, and with matrices if the job's
    optimizer updates them; such a shape is returned as is."""
    seen = shape.without_matrices if job.optimizer == "adamw" else shape
    return JobShape(cut_experts(seen, job.expert_tile))


def cut_experts(shape: ModelShape, tile: int) -> ModelShape:
    """Return the model with its stacks in tiles of `tile` experts; 0: unchanged.

    The first part of a cut unit takes the unit's place. The other parts follow all units, so every
    other unit keeps its index.
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
    """Return the unit without its stacks, unless nothing remains of it, followed by the tiles."""
    if not unit.stacks:
        return [unit]
    rest = tuple(
        flat.without(stack.numel for stack in unit.stacks if stack.flat == index_of)
        for index_of, flat in enumerate(unit.flats)
    )
    found, around = [], unit.around
    if any(flat.numels for flat in rest):
        # The rest stays gathered while its tiles are gathered one by one.
        around = (*around, index)
        # Empty FlatParameters keep their place: linears refer to FlatParameters by index.
        found.append(dataclasses.replace(unit, flats=rest, stacks=()))
    experts = max(stack.experts for stack in unit.stacks)
    # Tiles have the same FlatParameters, but for the last, which may have fewer experts.
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
    """Return the expected share of tiles with at least one expert that a token chose. Each of
    `tokens` tokens chooses `chosen` of `experts` experts, all equally likely; a tile has `tile`.
    """
    left = experts - tile
    if left < chosen:
        return 1.0
    # A token misses a tile if it chooses only experts outside the tile.
    missed = math.comb(left, chosen) / math.comb(experts, chosen)
    return 1.0 - missed**tokens


def gathered_share(shape: JobShape, tile: int, tokens: int) -> float:
    """Return the share of all parameters that a pass of `tokens` tokens, over all ranks, gathers.
    """
    if not shape.tiled_bytes:
        return 1.0
    touched = touched_share(shape.experts, shape.chosen, min(tile, shape.experts), tokens)
    return 1.0 - (1.0 - touched) * shape.tiled_bytes / shape.gathered_bytes()
