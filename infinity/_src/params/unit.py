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
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from infinity._src.kernels.tiling.tiled_module import Tile, TilePlace, whole_name
from infinity._src.memory.device_room import UnitBytes
from infinity._src.memory.layout import FlatLayout

if TYPE_CHECKING:
    from infinity._src.grads.accumulator import GradAccumulator
    from infinity._src.params.sharded_param import ShardedParameter
    from infinity._src.params.unsharded_param import UnshardedParameter


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
    """Memory, and no values: they were never filled in, have changed since, or were taken back. The
    next `unshard` fills it."""
    PENDING = "pending"
    """Memory that is being filled: by reads and an all_gather, or by the update that computes the
    new values. Nobody has waited for it yet."""
    UNSHARDED = "unsharded"
    """Memory that holds the values of the unit's generation: modules may use them."""

    # Enum's is a function of Python, and each step of a unit looks up its transition.
    __hash__ = object.__hash__


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
    # `hooks.module_params.install` sets both, when the values are on their tier.
    at_rest: ShardedParameter = dataclasses.field(init=False)
    gathered: UnshardedParameter = dataclasses.field(init=False)
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
        """Bytes of the whole flat, as it is unsharded."""
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
        """Bytes of all its flats, as they are unsharded."""
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


class UnsharderInterface(Protocol):
    """`Unsharder` as hooks see it. They report events; it decides which units have memory.

    All calls come from the thread that runs forward or backward.
    """

    def unshard(self, unit: Unit) -> None:
        """Block until the unit is UNSHARDED: its memory holds its current values."""

    def mixes(self, unit: Unit, *, window: bool) -> bool:
        """True when a unit in use holds another version than this pass computes with; with
        `window`: another version than `gather()` shows.
        """

    def trains_on_rest(self, unit: Unit) -> bool:
        """True when training computes with the values at rest, which `gather()` shows."""

    def release(self, unit: Unit) -> None:
        """Let the unit, whose reference count fell to 0, be evicted, now or later."""

    def unit_done(self, unit: Unit) -> None:
        """Count a use of the unit that has ended: no further gradient comes from it."""

    def borrowed(self, unit: Unit) -> AbstractContextManager[None]:
        """Unshard the unit for a block, with the values at rest."""

    def read(self, param: Param) -> torch.Tensor:
        """The current value as an ordinary CPU tensor; waits for pending updates."""

    def written(self, here: list[bool]) -> list[bool]:
        """Return for each window that all ranks close now whether some rank has written to it.

        here: whether this rank has.
        """

    def chosen(self, here: list[bool]) -> list[bool]:
        """Return which tiles of experts are to be gathered, on all ranks alike.

        here: whether tokens of this rank chose an expert of each.
        """

    def write_alike(self, param: Param, value: torch.Tensor) -> None:
        """Set the value, master included; all ranks pass the same one. Waits for pending updates.

        Raises: RanksDiverged; then nothing is written.
        """

    def expect_forward(self, follows: bool) -> None:
        """Note whether another training forward comes after the next one, or a backward does."""

    def unfrozen(self, param: Param) -> None:
        """Note that a parameter requires a gradient from now on."""

    def forward_start(self) -> None:
        """Begin the outermost forward."""

    def forward_end(self) -> None:
        """End the outermost forward, which has returned or raised."""

    def backward_start(self) -> None:
        """Begin a backward over this model's graph."""

    def backward_end(self) -> None:
        """End a backward over this model's graph."""

    def invalidate(self, unit: Unit) -> None:
        """Forget the unit's values, which were overwritten, while `unit.refs` is 0. The next
        `unshard` fills it again.
        """

    def broke(self, where: str, error: BaseException) -> None:
        """Note that a forward or backward has raised."""

    def reset(self) -> None:
        """Forget what an interrupted forward or backward left."""


class GradientsInterface(Protocol):
    """`GradReducer` as hooks see it. All calls come from the thread that runs backward, or the
    loop.
    """

    def accumulate_grad(self, param: Param, grad: torch.Tensor) -> None:
        """Take one fresh gradient [param.shape] and make its proxy the `.grad` of `at_rest`."""

    def assign(self, param: Param, grad: torch.Tensor) -> None:
        """Make `grad` [param.shape] the at-rest parameter's whole gradient."""
