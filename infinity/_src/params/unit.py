"""Units, flats and parameters: the types that hooks, unsharding, gradients and the step share.

A unit is unsharded and evicted as a whole. It has one flat per (dtype, trainable): a
one-dimensional device tensor whose storage is resized to nothing when the unit is evicted, and
filled again when it is unsharded. `Param.gathered`, which modules compute with, is a view of the
flat. `Param.at_rest`, which module and optimizer hold, has no storage.
"""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from infinity._src.kernels.tiling.tiled_module import Tile, TilePlace, whole_name
from infinity._src.memory.device_capacity import UnitBytes
from infinity._src.memory.flat_layout import FlatLayout

if TYPE_CHECKING:
    from infinity._src.params.accumulator import GradAccumulator


class UnitState(enum.Enum):
    """State of a unit: its memory on the device, and the values in it.

        SHARDED --allocate--> STALE --begin---> PENDING --waited for--> UNSHARDED
        SHARDED <----evict--- STALE <--cancel-- PENDING
                              STALE <---------- values changed -------- UNSHARDED
        SHARDED <--------------------- evict -------------------------- UNSHARDED

    `Unit.move_to` makes only transitions along the arrows, which `TRANSITIONS` lists. The values at
    rest exist in every state.

    Independent of the state: `Unit.refs` counts forwards, backwards and windows that use the unit
    (evicted only at 0). Data of a state: the `ParamVersion` of the unit's memory (`Unsharder`), and
    tickets and collectives while PENDING (`PendingUnshards`).
    """

    SHARDED = "sharded"
    """No memory: each rank's shard rests on its tier (device, RAM or NVMe)."""
    STALE = "stale"
    """Memory without values: never loaded, changed since, or undone. The next `unshard` loads them.
    """
    PENDING = "pending"
    """Memory that reads and an all_gather, or the update that computes new values, are writing. No
    gather has waited for it yet."""
    UNSHARDED = "unsharded"
    """Memory that holds the values of the unit's generation: modules may use them."""


SHARDED, STALE, PENDING, UNSHARDED = UnitState
"""Constants for the states: on Python 3.10 `UnitState.SHARDED` is a Python call, and hooks use
these for every module."""

TRANSITIONS = (
    (SHARDED, STALE),  # allocate
    (STALE, PENDING),  # begin
    (PENDING, UNSHARDED),  # waited for
    (PENDING, STALE),  # cancel
    (UNSHARDED, STALE),  # values changed, or another version is wanted
    (STALE, SHARDED),  # evict
    (UNSHARDED, SHARDED),  # evict
)
"""The arrows. A write in place makes no transition: the unit stays UNSHARDED. A tuple, since each
gather searches it, and a set would call the Python hash of enums."""


# Compared by identity: these are dict keys, and comparing fields would compare tensors.
@dataclasses.dataclass(eq=False, repr=False)
class Param:
    """One distinct parameter of a model; tied weights are one Param with several sites."""

    index: int
    name: str
    names: tuple[str, ...]  # every qualified name in the module tree
    sites: list[tuple[torch.nn.Module, str]]
    shape: torch.Size
    dtype: torch.dtype
    numel: int
    offset: int  # elements from the start of its flat
    flat: Flat
    unit: Unit
    param_index: int  # position in flat.params
    # A ShardedParameter and an UnshardedParameter, whose files import this one.
    # `hooks.module_params.install` sets both, when the values are on their tier.
    at_rest: torch.nn.Parameter = dataclasses.field(init=False)
    gathered: torch.nn.Parameter = dataclasses.field(init=False)
    # Version counter of `gathered` while it has no memory, higher than any generation. Set
    # together with `gathered`.
    evicted_version: int = dataclasses.field(init=False)
    # None until the first call of `GradReducer.accumulator`.
    grad: GradAccumulator | None = None

    # Print no tensors: printing one without storage would crash the interpreter.
    def __repr__(self) -> str:
        return f"Param({self.name!r})"

    @property
    def place(self) -> TilePlace | None:
        """A tile's place in its weight; None for an ordinary parameter."""
        return place_at(self.sites)

    @property
    def keys(self) -> tuple[str, ...]:
        """Names in state dicts and files; for a tile those of the whole weight."""
        return keys_of(self.names, self.place)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole weight that has `keys` in state dicts."""
        # State dicts and files have the whole weight, so shapes are compared with that.
        place = self.place
        return tuple(self.shape) if place is None else place.whole_shape


def place_at(sites: list[tuple[torch.nn.Module, str]]) -> TilePlace | None:
    """Return the place of a parameter with these (module, attribute) sites, if it is a tile."""
    module, attr = sites[0]
    return module.places[attr] if isinstance(module, Tile) else None


def objects_at(sites: list[tuple[torch.nn.Module, str]]) -> list[torch.nn.Parameter]:
    """Return the Parameter objects at the sites of one parameter: several only if a model on meta
    declares them tied."""
    held = (module._parameters[attr] for module, attr in sites)
    return list({id(each): each for each in held if each is not None}.values())


def keys_of(names: Iterable[str], place: TilePlace | None) -> tuple[str, ...]:
    """Return the state dict names of a parameter with these module tree names; place: see
    `place_at`.
    """
    # Only a tile's names differ from state dict names.
    return tuple(names) if place is None else tuple(whole_name(name) or name for name in names)


class ClosedWindow(NamedTuple):
    """A leaf on a parameter's gathered storage that `gather()` returned, and that a graph may hold.
    version: the leaf's version counter while the unit has the values of `generation`."""

    param: Param
    tensor: weakref.ref[torch.Tensor]
    version: int
    generation: int


@dataclasses.dataclass(eq=False, repr=False)
class Flat:
    """The parameters of a unit that share a dtype and are trainable or not, as one tensor.

    trainable: they required a gradient at the offload, which plans memory. learns: one of them
    requires or has required a gradient; several ranks reduce its gradients. stream: the compute
    stream on which its memory was allocated, for the allocator.
    """

    unit: Unit
    index: int
    dtype: torch.dtype
    trainable: bool
    layout: FlatLayout
    tensor: torch.Tensor  # [layout.numel] of dtype on the compute device
    params: list[Param] = dataclasses.field(default_factory=list)
    learns: bool = dataclasses.field(init=False)
    stream: int = 0

    def __post_init__(self) -> None:
        # `Lifecycle._hook_grad` sets it when a frozen parameter is unfrozen; nothing clears it.
        self.learns = self.trainable

    def __repr__(self) -> str:
        return f"Flat({self.unit.name!r}, {self.index})"

    @property
    def size_bytes(self) -> int:
        # With padding, because flats are allocated, read and gathered whole.
        return self.layout.size_bytes


@dataclasses.dataclass(eq=False, repr=False)
class Unit:
    """Parameters that are unsharded and evicted together."""

    index: int
    name: str
    modules: tuple[torch.nn.Module, ...]
    around: tuple[int, ...] = ()  # indices of units in use whenever this one is: see `UnitBytes`
    block: int | None = None  # number of the module around it that runs in slices
    # In the order in which all ranks read, gather and reduce them.
    flats: list[Flat] = dataclasses.field(default_factory=list)
    # In registration order, which differs from the flats' order if dtypes alternate.
    params: list[Param] = dataclasses.field(default_factory=list)
    # Written only by `move_to`.
    state: UnitState = SHARDED
    refs: int = 0  # uses: forwards, backwards and windows; the unit may be evicted only at 0
    # Forward has replaced or deleted an attribute that is a parameter, since the unit was acquired.
    taken: bool = False
    # A collective that does not return may still write to the unit's memory, so it is never freed.
    stuck: bool = False
    generation: int = 0  # counts the optimizer steps and writes that changed its values
    # The generation that the version counters of its gathered parameters show, if any.
    stamped_generation: int | None = None
    closed_windows: list[ClosedWindow] = dataclasses.field(default_factory=list)
    engine: Any = None  # the owning handle, opaque to lower layers

    def __repr__(self) -> str:
        return f"Unit({self.name!r})"

    def move_to(self, state: UnitState) -> None:
        """Change the unit's state along an arrow of `UnitState`."""
        assert (self.state, state) in TRANSITIONS, f"{self.name}: {self.state} -> {state}"
        self.state = state

    @property
    def size_bytes(self) -> int:
        return sum([flat.layout.size_bytes for flat in self.flats])

    @property
    def on_device(self) -> UnitBytes:
        """The unit's bytes on the device."""
        return UnitBytes(
            self.size_bytes,
            tuple(
                param.numel * flat.dtype.itemsize
                for flat in self.flats
                if flat.trainable
                for param in flat.params
            ),
            self.around,
            block=self.block,
        )


class EngineHook:
    """Marker of the engine's hooks on modules, which gather and release, and change neither
    arguments nor outputs."""
