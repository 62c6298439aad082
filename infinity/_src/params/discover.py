"""Finding units: from a module tree to the groups of parameters that are unsharded together.

    blocks     the classes of `_no_split_modules` (Hugging Face); else the children of the outermost
               ModuleLists; else none. `units=` names them instead.
    others     every largest subtree without a block that fits `unit_bytes_max`: an embedding, a
               norm, a head. A module's direct parameters outside of blocks (`cls_token`) are a unit
               of that module.
    too large  a block of more than `unit_bytes_max` is split. The children of the ModuleLists
               inside it become units (the experts of a ModuleList MoE, so that only routed ones are
               unsharded), then, if the remaining part is still too large, its children. A module
               that cannot be split is one unit of any size, which streams in chunks. A child that
               is no larger than the largest parameter of its block is not split: that would save no
               memory.
    small      a module of less than SMALL_BYTES that is no block (a norm) joins the unit of the
               next module called (`call_order`), else of the previous one, in the same block.
    tiles      every tile of a tiled linear, a tiled embedding or a stack of experts is a separate
               unit of any size.

A parameter belongs to one unit: that of the first module, in registration order, that holds it.
Other modules that hold it too (tied weights) are served by the same unit, which is unsharded for
each of them. The module tree is read, never changed.

The module tree cannot split a parameter that is too large for one unit; `inf.tile_linears` and
`inf.tile_experts` can. `check_gatherable` refuses a model whose units exceed the memory of the
device (`memory/device_capacity.py`), and names the function that helps, with its number of tiles
or of experts. Linears that exceed `unit_bytes_max` but fit the device are logged.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import logging
import textwrap
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import psutil
import torch
from torch import nn

from infinity._src.base.dtypes import why_not_bits
from infinity._src.base.sizes import format_size
from infinity._src.base.wording import listed
from infinity._src.cabi.records import CHUNK_NUMEL
from infinity._src.kernels.tiling.tile_experts import is_stack
from infinity._src.kernels.tiling.tiled_experts import ExpertsTile
from infinity._src.kernels.tiling.tiled_module import Grid, Tile, tile_modules, whole_name
from infinity._src.memory.constants import AHEAD
from infinity._src.memory.device_capacity import (
    Passes,
    SliceGrads,
    UnitBytes,
    fresh_capacity,
    gathered_capacity,
)
from infinity._src.memory.flat_layout import plan_flat
from infinity._src.params.sharded_param import ShardedParameter
from infinity._src.params.unit import Flat, Param, Unit, keys_of, place_at
from infinity._src.params.unsharded_param import empty_flat
from infinity.aio._memory_limits import cgroup_limit_bytes

log = logging.getLogger("infinity")

SMALL_BYTES = 1 << 20
"""Smaller modules join another unit: a separate gather, gate and update would cost more."""


@dataclasses.dataclass(eq=False)
class FoundParameter:
    """One distinct parameter: every name and every (module, attribute) that holds it, in
    registration order.
    """

    parameter: nn.Parameter
    names: list[str] = dataclasses.field(default_factory=list)
    sites: list[tuple[nn.Module, str]] = dataclasses.field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return self.parameter.numel() * self.parameter.element_size()

    @property
    def keys(self) -> tuple[str, ...]:
        """Names in state dicts; for a tile those of the whole weight."""
        return keys_of(self.names, place_at(self.sites))

    @property
    def whole_shape(self) -> tuple[int, ...]:
        place = place_at(self.sites)
        return tuple(self.parameter.shape) if place is None else place.whole_shape


@dataclasses.dataclass(eq=False)
class UnitSpec:
    """Plan of a unit: the modules whose forward needs it, and its parameters in registration
    order. around: indices of units that are in use whenever this one is. block: number of the
    enclosing module that runs in slices (`inf.microbatched`), if any.
    """

    name: str
    modules: list[nn.Module]
    entries: list[FoundParameter]
    around: tuple[int, ...] = ()
    block: int | None = None

    @property
    def size(self) -> UnitBytes:
        return UnitBytes(
            sum(entry.size_bytes for entry in self.entries),
            tuple(entry.size_bytes for entry in self.entries if entry.parameter.requires_grad),
            self.around,
            block=self.block,
        )


def find_units(
    model: nn.Module,
    *,
    units: Named | None = None,
    unit_bytes_max: int,
    nested: bool = True,
) -> list[UnitSpec]:
    """Partition the parameters of `model` into units (the module's docstring has the rules).

    units: the blocks, as modules, classes, class names or qualified names. nested: whether too
    large blocks may be split at the ModuleLists inside them. Not with several ranks: these route
    tokens to different experts, but must gather the same units in the same order.

    Raises: ValueError if `units` names something that the model does not have, and for parameters
    that a flat cannot hold.
    """
    entries = find_parameters(model)
    for entry in entries:
        _check_holdable(model, entry)
    return _Finder(model, entries, unit_bytes_max, nested).find(units)


def check_modules(model: nn.Module) -> None:
    """Raise ValueError for a model with parameters of another or a closed engine, and for modules
    whose calls hooks cannot see."""
    for prefix, module in model.named_modules():
        name = f"{type(model).__name__}.{prefix}" if prefix else type(model).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{name} is a {type(module).__name__} of torch.jit, whose parameters and hooks "
                "belong to TorchScript; give inf.offload the original module (hooks gather "
                "parameters, and TorchScript does not call them)"
            )
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{name} is a DistributedDataParallel, which would wait for gradients that it "
                "never gets; offload its `.module` (the engine reduces gradients over the ranks "
                "itself)"
            )
        for attr, parameter in module._parameters.items():
            if isinstance(parameter, ShardedParameter):
                _refuse_held(f"{name}.{attr}", parameter)


def _refuse_held(name: str, parameter: ShardedParameter) -> NoReturn:
    link = parameter.infinity_link
    held = f"the engine of {type(link.owner.model).__name__}, as {link.param.name}"
    if link.owner.closed:
        raise ValueError(
            f"{name} has no values: {held}, held it, and was closed; build that module again "
            "(inf.export_safetensors before close() saves the values, and load= reads them)"
        )
    raise ValueError(
        f"{name} is offloaded already: {held}, holds it. A parameter has one engine: offload one "
        "module that has both as children (a torch.nn.ModuleList), or make a copy of the shared "
        "module before inf.offload (copy.deepcopy)"
    )


def find_parameters(model: nn.Module) -> list[FoundParameter]:
    """Return the distinct parameters of a model in registration order. Tied weights are one entry:
    parameters that are the same object, or that a Hugging Face model declares tied, also on the
    meta device.
    """
    by_id: dict[int, FoundParameter] = {}
    by_name: dict[str, FoundParameter] = {}
    declared: dict[int, tuple[str, dict[str, str]]] = {}
    seen_sites: set[tuple[int, str]] = set()
    # Duplicates too: a shared module has a name under each parent.
    for prefix, module in model.named_modules(remove_duplicate=False):
        ties = getattr(module, "all_tied_weights_keys", None)
        if isinstance(ties, dict):
            declared.setdefault(id(module), (f"{prefix}." if prefix else "", ties))
        for attr, parameter in module._parameters.items():
            if parameter is None:
                continue
            entry = by_id.setdefault(id(parameter), FoundParameter(parameter))
            name = f"{prefix}.{attr}" if prefix else attr
            entry.names.append(name)
            by_name[name] = entry
            # A shared module appears under several names, and is one site.
            if (id(module), attr) not in seen_sites:
                seen_sites.add((id(module), attr))
                entry.sites.append((module, attr))
    _merge_declared_ties(declared.values(), by_name)
    kept = dict.fromkeys(by_name.values())
    return list(kept)


def _merge_declared_ties(
    declared: Iterable[tuple[str, dict[str, str]]], by_name: dict[str, FoundParameter]
) -> None:
    """Merge entries that a module's `all_tied_weights_keys` (target name -> source name) declares
    tied. declared: these dicts, each with the prefix of its names.
    """
    for start, ties in declared:
        for target, source in ties.items():
            kept, dropped = by_name.get(f"{start}{source}"), by_name.get(f"{start}{target}")
            if kept is None or dropped is None or kept is dropped or not dropped.parameter.is_meta:
                # With real values two objects are two parameters, even if declared tied.
                continue
            if kept.parameter.shape != dropped.parameter.shape:
                continue
            kept.sites.extend(dropped.sites)
            kept.names.extend(dropped.names)
            for name in dropped.names:
                by_name[name] = kept


class _Finder:
    """One run of `find_units`: assigns every parameter to the first unit that claims it."""

    def __init__(
        self, model: nn.Module, entries: list[FoundParameter], unit_bytes_max: int, nested: bool
    ) -> None:
        self._model = model
        self._unit_bytes_max = unit_bytes_max
        self._nested = nested
        self._entry_at = {
            (id(module), attr): entry for entry in entries for module, attr in entry.sites
        }
        self._order = {id(entry): index for index, entry in enumerate(entries)}
        self._claimed: set[int] = set()
        self._names: dict[int, str] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._names.setdefault(id(module), name)
        self._blocks: set[int] = set()
        self._specs: list[UnitSpec] = []

    def find(self, units: Named | None) -> list[UnitSpec]:
        blocks = find_blocks(self._model, units, argument="units")
        self._blocks = {id(block) for block in blocks}
        # Before the walk: a tile is a separate unit, also inside of a block.
        self._claim_tiles(blocks)
        self._visit(self._model, self._model, self._unit_bytes_max)
        self._serve_other_sites()
        self._fold_small()
        # A parameter outside of all units would be neither gathered nor stored.
        assert sum(len(spec.entries) for spec in self._specs) == len(self._order)
        # Tiles were claimed first; units are numbered in registration order.
        order = self._order
        self._specs.sort(key=lambda spec: order[id(spec.entries[0])])
        self._nest()
        self._note_slices()
        return self._specs

    def _note_slices(self) -> None:
        """Record for each unit the enclosing module that runs in slices."""
        blocks = (part for part in self._model.modules() if isinstance(part, RunsInSlices))
        inside: dict[int, int] = {}
        for number, block in enumerate(blocks):
            assert isinstance(block, nn.Module)
            for part in block.modules():
                # A module shared by several blocks belongs to the first.
                inside.setdefault(id(part), number)
        for spec in self._specs:
            spec.block = inside.get(id(spec.modules[0]))

    def _nest(self) -> None:
        """Record for each unit the units whose modules contain its modules."""
        users: dict[int, list[int]] = {}
        for index, spec in enumerate(self._specs):
            for module in spec.modules:
                users.setdefault(id(module), []).append(index)
        around: list[set[int]] = [set() for _ in self._specs]
        for index, spec in enumerate(self._specs):
            for part in {part for module in spec.modules for part in module.modules()}:
                for inside in users.get(id(part), ()):
                    around[inside].add(index)
        for index, spec in enumerate(self._specs):
            spec.around = tuple(sorted(around[index] - {index}))

    # -- the walk ----------------------------------------------------------------------------------

    def _visit(self, module: nn.Module, caller: nn.Module, bytes_max: int) -> None:
        """Make units below `module`, of at most `bytes_max`. `caller`: the nearest enclosing module
        that is called.
        """
        if not isinstance(module, CONTAINERS):
            caller = module
            if id(module) in self._blocks or not self._has_block(module):
                self._emit(module, bytes_max)
                return
        # A container is never called, so its own parameters are gathered for `caller`.
        self._claim(module, caller, self._own(module))
        for child in module.children():
            self._visit(child, caller, bytes_max)

    def _claim_tiles(self, blocks: list[nn.Module]) -> None:
        if not self._nested:
            for block in blocks:
                for inner in block.modules():
                    tile = (
                        next(tile_modules(inner), None) if isinstance(inner, CONTAINERS) else None
                    )
                    if tile is not None:
                        raise ValueError(
                            f"{self._names[id(tile)]} is a tile of one of several modules in a "
                            "list (an expert): ranks may call them in different orders, and would "
                            "wait for each other; omit them from inf.tile_linears(names=...) or "
                            "inf.tile_experts(names=...), or train on one rank"
                        )
        for tile in tile_modules(self._model):
            self._claim(tile, tile, self._own(tile))

    def _has_block(self, module: nn.Module) -> bool:
        return any(id(child) in self._blocks for child in module.modules())

    def _emit(self, module: nn.Module, bytes_max: int) -> None:
        """Make one unit of a module, or several if it is too large and can be split."""
        subtree = self._subtree(module)
        if self._bytes(subtree) <= bytes_max or not self._may_split(module):
            self._claim(module, module, subtree)
            return
        # Experts first: each is a unit, so that only routed ones are gathered.
        if self._nested:
            for child in list(list_children(module)):
                self._emit(child, self._unit_bytes_max)
            if self._bytes(subtree) <= bytes_max:
                self._claim(module, module, subtree)
                return
        if id(module) in self._blocks:
            # The block's largest parameter cannot be split, and determines the memory.
            largest = max((self._bytes([entry]) for entry in subtree), default=0)
            bytes_max = max(bytes_max, largest)
        self._claim(module, module, self._own(module))
        for child in module.children():
            self._visit(child, module, bytes_max)

    def _may_split(self, module: nn.Module) -> bool:
        """True when all ranks call the module's submodules in the same order."""
        return self._nested or not any(
            isinstance(child, CONTAINERS) for child in module.children()
        )

    def _claim(self, module: nn.Module, caller: nn.Module, entries: list[FoundParameter]) -> None:
        fresh = [entry for entry in entries if id(entry) not in self._claimed]
        if not fresh:
            return
        self._claimed.update(id(entry) for entry in fresh)
        name = self._names[id(module)] or type(module).__name__
        self._specs.append(UnitSpec(name, [caller], fresh))

    def _own(self, module: nn.Module) -> list[FoundParameter]:
        return [
            self._entry_at[(id(module), attr)]
            for attr, value in module._parameters.items()
            if value is not None
        ]

    def _subtree(self, module: nn.Module) -> list[FoundParameter]:
        found = {id(entry): entry for part in module.modules() for entry in self._own(part)}
        return sorted(found.values(), key=lambda entry: self._order[id(entry)])

    def _bytes(self, entries: list[FoundParameter]) -> int:
        return sum(entry.size_bytes for entry in entries if id(entry) not in self._claimed)

    # -- small modules -----------------------------------------------------------------------------

    def _fold_small(self) -> None:
        """Merge small modules into a neighbour's unit: gathering them separately would only add
        latency.
        """
        calls, scopes = call_order(self._model), self._scopes()
        run: list[UnitSpec] = []
        gone: set[int] = set()
        for spec in sorted(
            (spec for spec in self._specs if spec.modules[0] in calls),
            key=lambda spec: calls[spec.modules[0]].place,
        ):
            # Merging a module inside a loop with one outside would gather the outer one in each
            # iteration.
            last, this = run[-1].modules[0] if run else None, spec.modules[0]
            same = last is not None and (scopes[id(last)], calls[last].looped) == (
                scopes[id(this)],
                calls[this].looped,
            )
            is_piece = self._is_piece(spec)
            if not (same and is_piece):
                gone |= self._fold(run)
                run = []
            if is_piece:
                run.append(spec)
        gone |= self._fold(run)
        # One pass over the units: a model may have thousands.
        self._specs = [spec for spec in self._specs if id(spec) not in gone]

    def _fold(self, run: list[UnitSpec]) -> set[int]:
        """Merge small units that are called in sequence into the next large unit, else into the
        last. Returns the ids of the merged units.
        """
        large = [index for index, spec in enumerate(run) if spec.size.gathered >= SMALL_BYTES]
        gone: set[int] = set()
        begin = 0
        for index in large:
            host, small = run[index], run[begin:index]
            if index == large[-1]:
                small += run[index + 1 :]
            host.modules[:0] = [module for spec in small for module in spec.modules]
            host.entries += [entry for spec in small for entry in spec.entries]
            host.entries.sort(key=lambda entry: self._order[id(entry)])
            gone.update(map(id, small))
            begin = index + 1
        return gone

    def _is_piece(self, spec: UnitSpec) -> bool:
        """True for a unit of exactly one whole module that is neither block nor tile."""
        module = spec.modules[0]
        return (
            len(spec.modules) == 1
            and id(module) not in self._blocks
            and not isinstance(module, Tile)
            and {id(entry) for entry in self._subtree(module)}
            == {id(entry) for entry in spec.entries}
        )

    def _scopes(self) -> dict[int, int]:
        """Return for each module the nearest enclosing block or list member (or itself): the
        modules that may be called several times, or never.
        """
        found: dict[int, int] = {}

        def visit(module: nn.Module, scope: int) -> None:
            found.setdefault(id(module), scope)
            for child in module.children():
                alone = id(child) in self._blocks or is_list(module)
                visit(child, id(child) if alone else scope)

        visit(self._model, 0)
        return found

    # -- tied weights ------------------------------------------------------------------------------

    def _serve_other_sites(self) -> None:
        """Let every unit serve all modules that hold one of its parameters."""
        parents: dict[int, nn.Module] = {}
        for module in self._model.modules():
            for child in module.children():
                parents.setdefault(id(child), module)
        for spec in self._specs:
            inside = {id(part) for part in spec.modules[0].modules()}
            for entry in spec.entries:
                for module, _ in entry.sites:
                    # Hooks on a container never run, so the enclosing module gets them.
                    while isinstance(module, CONTAINERS) and id(module) in parents:
                        module = parents[id(module)]
                    if id(module) not in inside and all(
                        module is not known for known in spec.modules
                    ):
                        spec.modules.append(module)


def build(
    specs: Sequence[UnitSpec],
    device: torch.device,
    world: int,
    chunk_numel: Callable[[torch.dtype], int] = lambda _dtype: CHUNK_NUMEL,
    *,
    engine: Any = None,
) -> list[Unit]:
    """Make the units of `specs`: their flats (one per dtype and `requires_grad`, evicted, on
    `device`) and parameters.

    chunk_numel: elements per chunk of a trainable flat of a dtype. engine: see `Unit`. Does not
    make at-rest or gathered parameters, and leaves the model unchanged.
    """
    units: list[Unit] = []
    count = 0
    for spec in specs:
        unit = Unit(
            len(units), spec.name, tuple(spec.modules), spec.around, spec.block, engine=engine
        )
        groups: dict[tuple[torch.dtype, bool], list[FoundParameter]] = {}
        for entry in spec.entries:
            kind = entry.parameter.dtype, entry.parameter.requires_grad
            groups.setdefault(kind, []).append(entry)
        for (dtype, trainable), entries in groups.items():
            numels = tuple(entry.parameter.numel() for entry in entries)
            layout = plan_flat(
                numels, dtype.itemsize, world, chunk_numel(dtype) if trainable else CHUNK_NUMEL
            )
            flat = Flat(
                unit, len(unit.flats), dtype, trainable, layout, empty_flat(layout, dtype, device)
            )
            unit.flats.append(flat)
            for param_index, entry in enumerate(entries):
                flat.params.append(_make_param(entry, flat, param_index))
        # Parameters are numbered in registration order within the unit, not flat by flat.
        placed = {param.name: param for flat in unit.flats for param in flat.params}
        for entry in spec.entries:
            param = placed[entry.names[0]]
            param.index = count
            count += 1
            unit.params.append(param)
        units.append(unit)
    return units


def _make_param(entry: FoundParameter, flat: Flat, param_index: int) -> Param:
    return Param(
        index=-1,
        name=entry.names[0],
        names=tuple(entry.names),
        sites=list(entry.sites),
        shape=entry.parameter.shape,
        dtype=flat.dtype,
        numel=entry.parameter.numel(),
        offset=flat.layout.offsets[param_index],
        flat=flat,
        unit=flat.unit,
        param_index=param_index,
    )


def _check_holdable(model: nn.Module, entry: FoundParameter) -> None:
    parameter, name = entry.parameter, f"{type(model).__name__}.{entry.names[0]}"
    if nn.parameter.is_lazy(parameter):
        raise ValueError(f"{name} is lazy and has no shape yet; run one forward before inf.offload")
    if (
        why_not_bits(parameter)
        or type(parameter) not in (nn.Parameter, torch.Tensor)
    ):
        raise ValueError(
            f"{name} is a {type(parameter).__name__} of {parameter.dtype} and layout "
            f"{parameter.layout}; the engine offloads ordinary dense parameters (quantized and "
            "distributed tensor subclasses are not built yet)"
        )


GATHERED_AT_ONCE = 1 + AHEAD
"""Tiles that must fit at once: the one in use, and the prefetched ones."""


def _check_room(
    model: nn.Module,
    specs: Sequence[UnitSpec],
    device: torch.device,
    device_bytes: int,
    passes: Passes,
    slices: SliceGrads | None,
) -> None:
    sizes = [spec.size for spec in specs]
    gathered, fresh = gathered_capacity(sizes, passes), fresh_capacity(sizes, passes)
    # With slices only one gradient at a time is fresh, beside the sums of the block.
    made = fresh if slices is None else slices.capacity_bytes(passes)
    if gathered + made <= device_bytes:
        return
    largest = max(specs, key=lambda spec: spec.size.gathered)
    one_pass = [dataclasses.replace(size, block=None) for size in sizes]
    if passes.whole:
        fix = f"all parameters stay gathered, {format_size(gathered)}: use zero=3"
    elif gathered_capacity(one_pass, passes) + fresh_capacity(one_pass, passes) <= device_bytes:
        fix = (
            "inf.microbatched adds up the gradients of a block on the device, "
            f"{format_size(made)}, until the block's last slice: name smaller modules in "
            "inf.microbatched(blocks=...), use a narrower grad_dtype, or a loop over "
            "micro-batches without inf.microbatched"
        )
    else:
        # At most half of the unit: the quotient ignores that nested units need memory together.
        room_bytes = min(device_bytes // times_at_once(passes), largest.size.gathered // 2)
        fix = _refusal(model, largest, room_bytes)
    raise ValueError(
        f"{fix}. The device ({device.type}) has {format_size(device_bytes)}; gathered parameters "
        f"take up to {format_size(gathered)} of it, and fresh gradients {format_size(made)}"
    )


def times_at_once(passes: Passes) -> int:
    """Return the number of equal tiles, with their gradients, that must fit at once."""
    one = UnitBytes(1, (1,))
    return GATHERED_AT_ONCE + fresh_capacity([one] * 8, passes)


def device_memory_bytes(device: torch.device) -> int:
    """Return the device's total memory; for the CPU, the limit of the machine and of this process's
    cgroups.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    total = int(psutil.virtual_memory().total)
    return min(total, cgroup_limit_bytes() or total)


def check_gatherable(
    model: nn.Module,
    specs: Sequence[UnitSpec],
    unit_bytes_max: int,
    device: torch.device,
    device_bytes: int,
    passes: Passes,
    slices: SliceGrads | None = None,
) -> None:
    """Refuse units that the device can never hold, and warn of linears larger than
    `unit_bytes_max`, which are gathered whole.

    device_bytes: total memory of the computing device. passes: its use. slices: gradients that
    slices add up. Raises: ValueError naming the largest parameter, its size, the bytes of gathers
    and gradients, and the fix.
    """
    _check_room(model, specs, device, device_bytes, passes, slices)
    # Only linears can be tiled, so only these are worth a warning.
    large = [
        (entry, name)
        for spec in specs
        for entry in spec.entries
        if (name := _linear_name(model, entry)) is not None
    ]
    large = [(entry, name) for entry, name in large if entry.size_bytes > unit_bytes_max]
    if large:
        names = [name for _, name in large]
        log.warning(
            "%s: larger than unit_bytes_max (%s; the largest has %s), and gathered whole; "
            "inf.tile_linears(model, tiles=%d, "
            "names=%r) before inf.offload gathers a tile at a time",
            listed(names, 3),
            format_size(unit_bytes_max),
            format_size(max(entry.size_bytes for entry, _ in large)),
            max(
                tiles_needed(entry.parameter.shape, entry.size_bytes, unit_bytes_max)
                for entry, _ in large
            ),
            names,
        )


def tiles_needed(shape: Sequence[int], size_bytes: int, tile_bytes_max: int) -> int:
    """Return the smallest number of tiles along the output features of a weight [out, in] with
    which no tile is larger than `tile_bytes_max`.

    size_bytes: of the weight. If a single row is larger, the result is the number of rows.
    """
    rows, columns = shape
    tiles = max(1, -(-size_bytes // max(tile_bytes_max, 1)))
    # Alignment makes tiles uneven, so use the largest one.
    while tiles < rows:
        ends = Grid.of(rows, columns, tiles).row_ends
        largest = max(last - first for first, last in itertools.pairwise(ends))
        if largest * (size_bytes // rows) <= tile_bytes_max:
            return tiles
        tiles += 1
    return rows


def _refusal(model: nn.Module, spec: UnitSpec, room_bytes: int) -> str:
    """Return the message: the part that is too large, and how to divide it into units of
    `room_bytes`."""
    entry = max(spec.entries, key=lambda each: each.size_bytes)
    stack = _experts_name(model, entry)
    if stack is not None:
        return _refused_experts(stack, model, spec, room_bytes)
    if entry.size_bytes <= room_bytes:
        return (
            f"the unit {spec.name} takes {format_size(spec.size.gathered)} gathered: set "
            f"unit_bytes_max='{format_size(room_bytes)}' or less, or name smaller modules in units="
        )
    name = _linear_name(model, entry)
    largest = f"{entry.names[0]} takes {format_size(entry.size_bytes)} gathered whole"
    if whole_name(entry.names[0]) is not None:
        times = -(-entry.size_bytes // max(room_bytes, 1))
        return (
            f"{largest}: it is a tile already; give inf.tile_linears {times} times as many tiles, "
            "or more"
        )
    if name is None:
        return (
            f"{largest}: only a torch.nn.Linear (and an embedding tied to one) can be gathered in "
            "tiles; make it smaller"
        )
    tiles = tiles_needed(entry.parameter.shape, entry.size_bytes, room_bytes)
    return (
        f"{largest}: inf.tile_linears(model, tiles={tiles}, names=[{name!r}]) before inf.offload "
        "gathers a tile at a time"
    )


def _refused_experts(stack: str, model: nn.Module, spec: UnitSpec, room_bytes: int) -> str:
    found = [entry for entry in spec.entries if _experts_name(model, entry) == stack]
    experts, size_bytes = len(found[0].parameter), sum(entry.size_bytes for entry in found)
    text = f"{experts} experts of {stack} take {format_size(size_bytes)} gathered at once"
    fitting = min(experts - 1, experts * room_bytes // max(size_bytes, 1))
    if fitting < 1:
        return f"{text}: a single one needs more memory than there is"
    return (
        f"{text}: inf.tile_experts(model, experts={fitting}, names=[{stack!r}]) before inf.offload "
        "gathers a few at a time"
    )


def _experts_name(model: nn.Module, entry: FoundParameter) -> str | None:
    """Return the name of the stack of experts that contains the parameter, also in a tile; None: no
    experts.
    """
    path, _, _ = entry.names[0].rpartition(".")
    if isinstance(model.get_submodule(path), ExpertsTile):
        return path.rpartition(".")[0]
    return path if is_stack(model.get_submodule(path)) else None


def _linear_name(model: nn.Module, entry: FoundParameter) -> str | None:
    for name in entry.names:
        module, _, attr = name.rpartition(".")
        if attr == "weight" and type(model.get_submodule(module)) is nn.Linear:
            return module
    return None


# -- blocks ----------------------------------------------------------------------------------------


CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Containers are never called, so hooks on them never run, and no unit can belong to one."""

Named = Sequence[nn.Module | type[nn.Module] | str]
"""Blocks as modules, classes, class names or qualified names."""


class RunsInSlices:
    """Marker of module classes that run their forward once for each slice of a batch
    (`inf.microbatched`): units inside are needed again by the next slice.
    """


def is_list(module: nn.Module) -> bool:
    """True for a ModuleList, or a ModuleDict of several (a dict of one holds a LoRA adapter, not a
    list of experts).
    """
    return isinstance(module, nn.ModuleList) or (
        isinstance(module, nn.ModuleDict) and len(module) > 1
    )


def find_blocks(
    model: nn.Module, named: Named | None, *, argument: str, dicts: bool = True
) -> list[nn.Module]:
    """Find the blocks of `model`, nested blocks included.

    named: use these instead of the model's blocks. argument: name of the user's argument, for the
    error. dicts: children of a ModuleDict may be blocks, too. Raises: ValueError if it names
    something that the model does not have, or a container.
    """
    if named is not None:
        return _named_blocks(model, named, argument)
    return _no_split_blocks(model) or list(list_children(model, dicts=dicts))


def _no_split_blocks(model: nn.Module) -> list[nn.Module]:
    modules, names = list(model.modules()), set[str]()
    for module in modules:
        names |= set(getattr(module, "_no_split_modules", None) or ())
    return [module for module in modules if type(module).__name__ in names]


def _named_blocks(model: nn.Module, named: Named, argument: str) -> list[nn.Module]:
    modules = dict(model.named_modules(remove_duplicate=False))
    known = {id(module) for module in modules.values()}
    blocks: list[nn.Module] = []
    for wanted in named:
        if isinstance(wanted, nn.Module):
            found = [wanted] if id(wanted) in known else []
        elif isinstance(wanted, type):
            found = [module for module in modules.values() if isinstance(module, wanted)]
        elif wanted in modules:
            # Before class names: a qualified name identifies one module.
            found = [modules[wanted]]
        else:
            found = [module for module in modules.values() if type(module).__name__ == wanted]
        if not found:
            text = type(wanted).__name__ if isinstance(wanted, nn.Module) else repr(wanted)
            raise ValueError(
                f"{argument}: the model has no {text}; give modules of this model, their classes, "
                "the classes' names, or qualified names as model.named_modules() lists them"
            )
        if any(isinstance(module, CONTAINERS) for module in found):
            raise ValueError(
                f"{argument}: {wanted!r} is a container, which is never called; name its children"
            )
        blocks += found
    return blocks


def list_children(module: nn.Module, *, dicts: bool = True) -> Iterator[nn.Module]:
    """Yield the children with parameters of the outermost lists of modules below `module`. dicts:
    ModuleDicts of several are lists, too."""
    for child in module.children():
        if is_list(child) if dicts else isinstance(child, nn.ModuleList):
            yield from _members(child)
        else:
            yield from list_children(child, dicts=dicts)


def _members(container: nn.Module) -> Iterator[nn.Module]:
    for member in container.children():
        if is_list(member):
            yield from _members(member)
        elif isinstance(member, CONTAINERS):
            yield from list_children(member)
        elif any(True for _ in member.parameters()):
            yield member


# -- order of calls --------------------------------------------------------------------------------
# The order is read from the source of each `forward`, which usually names the children that it
# calls. If `forward` calls methods of its module, their source is read, too.
#
#     class Block: mlp, attn, norm are registered in this order
#         def forward(self, x): return x + self.mlp(self.attn(self.norm(x)))     norm, attn, mlp
#
# No code runs, so every rank finds the same order before the first step. A wrong order costs only
# time.


_IN_TURN = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules whose children are called in the order in which they are registered."""


class Call(NamedTuple):
    """First call of a module: its position, and whether a loop repeats it (a loop over a list of
    modules calls each once, and does not count)."""

    place: int
    looped: bool


def call_order(model: nn.Module) -> dict[nn.Module, Call]:
    """Return the first call of each module of the model. Modules that no forward names are missing,
    with all modules inside them."""
    calls: dict[nn.Module, Call] = {}

    def place(module: nn.Module, looped: bool) -> None:
        if module in calls:
            return
        calls[module] = Call(len(calls), looped)
        children = dict(module.named_children())
        if isinstance(module, _IN_TURN):
            used = dict.fromkeys(children, False)
        else:
            used = _used_by(type(module)) if children else {}
        for name, repeated in used.items():
            if name in children:
                child = children[name]
                place(child, looped or (repeated and not isinstance(child, _IN_TURN)))

    place(model, False)
    return calls


_USED: weakref.WeakKeyDictionary[type[nn.Module], tuple[Any, dict[str, bool]]] = (
    weakref.WeakKeyDictionary()
)
"""Results of `_used_by`, each with the code of its forward. A process may offload many models of
the same few classes."""


def _used_by(kind: type[nn.Module]) -> dict[str, bool]:
    """Return the attributes that a class's forward uses, and whether a loop uses them."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    known, found = _USED.get(kind, (None, {}))
    # A user may have replaced the class's forward since the last call.
    if code is None or known is not code:
        found = {}
        for name, repeated in _used(kind, "forward", set()):
            found[name] = found.get(name, False) or repeated
        _USED[kind] = (code, found)
    return found


def _used(kind: type[nn.Module], method: str, seen: set[str]) -> Iterator[tuple[str, bool]]:
    """Yield the attributes that a method uses, and whether in a loop. In place of another method of
    the class, yields the attributes that the other method uses. Yields nothing if the method has no
    Python source."""
    seen.add(method)
    try:
        source = inspect.getsource(inspect.unwrap(getattr(kind, method)))
        function = ast.parse(textwrap.dedent(source)).body[0]
    except (OSError, TypeError, SyntaxError):
        return
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        return
    for statement in function.body:
        for name, repeated in _attributes(statement, function.args.args[0].arg):
            # Methods of torch.nn.Module, such as `__call__`, name no children.
            found = None if hasattr(nn.Module, name) else inspect.getattr_static(kind, name, None)
            if not isinstance(found, FunctionType):
                yield name, repeated
            elif name not in seen:
                for inner, again in _used(kind, name, seen):
                    yield inner, repeated or again


def _attributes(node: ast.AST, own: str, *, repeated: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the attributes of the variable `own`, in the order of evaluation (a call comes after
    its arguments), and whether a loop repeats them."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id == own:
            yield node.attr, repeated
        return
    parts = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Call):
        parts = [*node.args, *node.keywords, node.func]
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
        parts = [*node.generators, node.elt]
    loops = isinstance(node, ast.For | ast.While | ast.ListComp | ast.SetComp | ast.GeneratorExp)
    for part in parts:
        # The loop's iterable is evaluated once.
        again = loops and part is not getattr(node, "iter", None)
        yield from _attributes(part, own, repeated=repeated or again)
