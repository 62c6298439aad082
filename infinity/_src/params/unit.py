"""Units, flats and parameters: the nouns that hooks, unsharding, gradients and the step share.

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

    `Unit.move_to` takes a unit along an arrow, and along no other way: `TRANSITIONS` lists them.
    The values at rest on their tier are there in every state.

    Orthogonal to it: `Unit.refs`, how many forwards, backwards and windows use the unit (it is not
    evicted before 0). The payload of a state lies beside it: the `ParamVersion` in the unit's
    memory while it has some (`Unsharder`), and the tickets and collectives while it is PENDING
    (`PendingUnshards`).
    """

    SHARDED = "sharded"
    """No memory: the values rest on their tier (device, RAM or NVMe), each rank's shard apart."""
    STALE = "stale"
    """Memory, and no values: they were never filled in, have changed since, or were undone. The
    next `unshard` fills it."""
    PENDING = "pending"
    """Memory that is being filled: by reads and an all_gather, or by the update that computes the
    new values. No gather has waited for it yet."""
    UNSHARDED = "unsharded"
    """Memory that holds the values of the unit's generation: modules may use them."""


SHARDED, STALE, PENDING, UNSHARDED = UnitState
"""The states by themselves: on Python 3.10 `UnitState.SHARDED` is a Python call, and hooks read
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
"""The arrows. Writing in place takes none: the unit stays UNSHARDED. A tuple, since each gather
looks here, and a set would call the hash of two enums, which is Python."""


# Equal by identity: these are keys of dicts, and equality of fields would compare tensors.
@dataclasses.dataclass(eq=False, repr=False)
class Param:
    """One distinct parameter of a model; tied weights are one Param with several sites."""

    index: int
    name: str
    names: tuple[str, ...]  # every qualified name under which the module tree holds it
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
    # Version counter of `gathered` while it has no memory; set with it. No generation is as high.
    evicted_version: int = dataclasses.field(init=False)
    # None until `GradReducer.slot` is first asked for it.
    grad: GradAccumulator | None = None

    # Without tensors: to print one without storage would crash the interpreter.
    def __repr__(self) -> str:
        return f"Param({self.name!r})"

    @property
    def place(self) -> TilePlace | None:
        """Its place in the weight that it is a tile of; None for an ordinary parameter."""
        return place_at(self.sites)

    @property
    def keys(self) -> tuple[str, ...]:
        """Its names in state dicts and files: those of the whole weight if it is a tile."""
        return keys_of(self.names, self.place)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of what has these keys."""
        # State dicts and files know the whole weight, so shapes are compared with that.
        place = self.place
        return tuple(self.shape) if place is None else place.whole_shape


def place_at(sites: list[tuple[torch.nn.Module, str]]) -> TilePlace | None:
    """The place of a parameter that these (module, attribute) hold, if it is a tile."""
    module, attr = sites[0]
    return module.places[attr] if isinstance(module, Tile) else None


def keys_of(names: Iterable[str], place: TilePlace | None) -> tuple[str, ...]:
    """The names in state dicts of a parameter with these names in the module tree; place: see
    `place_at`.
    """
    # A name that is no tile's is a key as it is.
    return tuple(names) if place is None else tuple(whole_name(name) or name for name in names)


class ClosedWindow(NamedTuple):
    """A leaf on a parameter's gathered storage that `gather()` has shown, and that a graph may
    hold. version: its version counter while the unit has the values of `generation`."""

    param: Param
    tensor: weakref.ref[torch.Tensor]
    version: int
    generation: int


@dataclasses.dataclass(eq=False, repr=False)
class Flat:
    """The parameters of a unit that share a dtype and are trainable or not, as one tensor.

    trainable: they required a gradient when the model was offloaded, by which memory is planned.
    learns: one of them requires one now, or did at some time; several ranks reduce its gradients.
    stream: the compute stream under which its memory was allocated, which the allocator gives it
    back to.
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
        # With padding: the flat is allocated, read and gathered as a whole.
        return self.layout.size_bytes


@dataclasses.dataclass(eq=False, repr=False)
class Unit:
    """Parameters that are unsharded and evicted together."""

    index: int
    name: str
    modules: tuple[torch.nn.Module, ...]
    around: tuple[int, ...] = ()  # indices of units in use whenever it is: see `UnitBytes`
    block: int | None = None  # number of the module around it that runs in slices
    # In the order in which all ranks read, gather and reduce them.
    flats: list[Flat] = dataclasses.field(default_factory=list)
    # In registration order, which differs from that of the flats where dtypes alternate.
    params: list[Param] = dataclasses.field(default_factory=list)
    # `move_to` alone writes it, along `TRANSITIONS`.
    state: UnitState = SHARDED
    refs: int = 0  # uses: forwards, backwards and windows; it may be evicted only at 0
    taken: bool = False  # forward has taken a parameter out of its module since it got the unit
    # A collective that does not return may still write to its memory, which is never freed.
    stuck: bool = False
    generation: int = 0  # counts the optimizer steps and writes that changed its values
    # The generation that the version counters of its gathered parameters show, if any.
    stamped_generation: int | None = None
    closed_windows: list[ClosedWindow] = dataclasses.field(default_factory=list)
    engine: Any = None  # the handle that owns it; layers below pass it on and never look inside

    def __repr__(self) -> str:
        return f"Unit({self.name!r})"

    def move_to(self, state: UnitState) -> None:
        """Take the unit to another state, along an arrow that `UnitState` draws."""
        assert (self.state, state) in TRANSITIONS, f"{self.name}: {self.state} -> {state}"
        self.state = state

    @property
    def size_bytes(self) -> int:
        return sum([flat.layout.size_bytes for flat in self.flats])

    @property
    def on_device(self) -> UnitBytes:
        """Bytes that it takes on the device."""
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
    """Mark of the engine's hooks on modules: they gather and release, and change neither arguments
    nor outputs."""
