"""Units, flats and parameters: the nouns that hooks, unsharding, gradients and the step share.

A unit is unsharded and evicted as a whole. It has one flat per (dtype, trainable): a
one-dimensional device tensor whose storage is resized to nothing when the unit is evicted, and
filled again when it is unsharded. `Param.gathered`, which modules compute with, is a view of the
flat. `Param.at_rest`, which module and optimizer hold, has no storage.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from infinity._src.kernels.tiling.tiled_module import Place, Tile, whole_name
from infinity._src.memory.layout import FlatLayout

if TYPE_CHECKING:
    from infinity._src.grads.slot import GradSlot
    from infinity._src.params.sharded_param import ShardedParameter
    from infinity._src.params.unsharded_param import UnshardedParameter


class UnitState(enum.Enum):
    """State of a unit: its memory on the device, and the values in it.

        SHARDED --allocate--> STALE --begin--> PENDING --waited for--> UNSHARDED
                              STALE <--cancel-- PENDING
                              STALE <--------- values changed -------- UNSHARDED
        SHARDED <--evict----- STALE, PENDING, UNSHARDED, while nobody uses the unit

    `Unsharder` moves a unit along the arrows; `TRANSITIONS` lists them, and tests watch that no
    unit takes another way. The values at rest on their tier are there in every state.

    Orthogonal to it: `Unit.refs`, how many forwards, backwards and windows use the unit (it is not
    evicted before 0); `Unsharder._gathered`, the `ParamVersion` in the memory of each unit that has
    some; `PendingUnshards`, the tickets and collectives of each unit that is PENDING.
    """

    SHARDED = "sharded"
    """No memory: the values rest on their tier (device, RAM or NVMe), each rank's shard apart."""
    STALE = "stale"
    """Memory, and no values: they were never filled in, have changed since, or were taken back. The
    next `unshard` fills it."""
    PENDING = "pending"
    """Memory that is being filled: by reads and an all_gather, or by the update that computes the
    new values. A fill that an interrupt broke off stays PENDING, and `unshard` begins it again."""
    UNSHARDED = "unsharded"
    """Memory that holds the values of the unit's generation: modules may use them."""


SHARDED, STALE, PENDING, UNSHARDED = UnitState
"""The states by themselves: on Python 3.10 `UnitState.SHARDED` is a Python call, and hooks read
these for every module."""

TRANSITIONS = frozenset(
    {
        (SHARDED, STALE),  # allocate
        (STALE, PENDING),  # begin
        (PENDING, UNSHARDED),  # waited for
        (PENDING, STALE),  # cancel
        (UNSHARDED, STALE),  # values changed, or another version is wanted
        (STALE, SHARDED),  # evict, from here on
        (PENDING, SHARDED),
        (UNSHARDED, SHARDED),
    }
)
"""The arrows between different states. Writing in place keeps UNSHARDED."""


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
    slot_index: int  # position in flat.params
    at_rest: ShardedParameter = dataclasses.field(init=False)
    gathered: UnshardedParameter = dataclasses.field(init=False)
    grad: GradSlot | None = None

    # Without tensors: to print one without storage would crash the interpreter.
    def __repr__(self) -> str:
        return f"Param({self.name!r})"

    @property
    def place(self) -> Place | None:
        """Its place in the weight that it is a tile of; None for an ordinary parameter."""
        return place_at(self.sites)

    @property
    def keys(self) -> tuple[str, ...]:
        """Its names in state dicts and files: those of the whole weight if it is a tile."""
        return keys_of(self.names, self.place)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of what has these keys."""
        place = self.place
        return tuple(self.shape) if place is None else place.whole_shape


def place_at(sites: list[tuple[torch.nn.Module, str]]) -> Place | None:
    """The place of a parameter that these (module, attribute) hold, if it is a tile."""
    module = sites[0][0]
    return module.place if isinstance(module, Tile) else None


def keys_of(names: Iterable[str], place: Place | None) -> tuple[str, ...]:
    """The names in state dicts of a parameter with these names in the module tree; place: see
    `place_at`.
    """
    return tuple(names) if place is None else tuple(whole_name(name) or name for name in names)


@dataclasses.dataclass(eq=False, repr=False)
class Flat:
    """The parameters of a unit that share a dtype and are trainable or not, as one tensor.

    trainable: they required a gradient when the model was offloaded, by which memory is planned.
    learns: one of them requires one now, or did at some time; several ranks reduce its gradients.
    """

    unit: Unit
    index: int
    dtype: torch.dtype
    trainable: bool
    layout: FlatLayout
    tensor: torch.Tensor  # [layout.numel] of dtype on the compute device
    params: list[Param] = dataclasses.field(default_factory=list)
    learns: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.learns = self.trainable

    def __repr__(self) -> str:
        return f"Flat({self.unit.name!r}, {self.index})"

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole flat, as it is unsharded."""
        return self.layout.numel * self.layout.itemsize


@dataclasses.dataclass(eq=False, repr=False)
class Unit:
    """Parameters that are unsharded and evicted together."""

    index: int
    name: str
    modules: tuple[torch.nn.Module, ...]
    flats: list[Flat] = dataclasses.field(default_factory=list)
    params: list[Param] = dataclasses.field(default_factory=list)
    state: UnitState = SHARDED
    refs: int = 0  # uses: forwards, backwards and windows; it may be evicted only at 0
    generation: int = 0  # counts the optimizer steps and writes that changed its values
    engine: Any = None  # the handle that owns it; layers below pass it on and never look inside

    def __repr__(self) -> str:
        return f"Unit({self.name!r})"

    @property
    def size_bytes(self) -> int:
        """Bytes of all its flats, as they are unsharded."""
        return sum(flat.size_bytes for flat in self.flats)


class UnsharderInterface(Protocol):
    """`Unsharder` as hooks see it: they tell it what happens, and it decides which units have
    memory.

    All calls come from the thread that runs forward or backward.
    """

    def unshard(self, unit: Unit) -> None:
        """Block until the unit is UNSHARDED: its memory holds its current values."""

    def mixes(self, unit: Unit, *, window: bool) -> bool:
        """Whether the unit, which is in use, holds another version than this pass computes with;
        with `window`, another than `gather()` shows.
        """

    def release(self, unit: Unit) -> None:
        """Let the unit, whose reference count fell to 0, be evicted, now or later."""

    def accumulate_grad(self, param: Param, grad: torch.Tensor) -> None:
        """Take one fresh gradient [param.shape] and make its proxy the `.grad` of `at_rest`."""

    def assign_gradient(self, param: Param, grad: torch.Tensor) -> None:
        """Make `grad` [param.shape] the at-rest parameter's whole gradient."""

    def use_left(self, unit: Unit) -> None:
        """Count a use of the unit that a forward call left for backward."""

    def unit_done(self, unit: Unit) -> None:
        """Count a use of the unit that has ended: no further gradient comes from it."""

    def read(self, param: Param) -> torch.Tensor:
        """The current value as an ordinary CPU tensor; waits for pending updates."""

    def written(self, here: list[bool]) -> list[bool]:
        """Tell which of the windows that all ranks close now some rank has written to; `here`: this
        rank.
        """

    def write_alike(self, param: Param, value: torch.Tensor) -> None:
        """Set the value, master included, when all ranks have come to it with the same; waits for
        pending updates.

        Raises: RanksDiverged; then nothing is written.
        """

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
