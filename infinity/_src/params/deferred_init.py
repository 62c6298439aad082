"""Initialisation of a model from scratch, one parameter in memory at a time: `init=` of `offload`.

The user's function builds the model with torch's constructors and random numbers, as without
offloading, but under a dispatch mode. A tensor of `DEFERRED_BYTES_MIN` or more gets no memory: it
is a FakeTensor, and each operation on it is recorded. A random operation also runs once on a
temporary tensor, so that the generator advances as in RAM; the generator's previous state is
recorded. Later `read_into` repeats the operations of one parameter from the recorded generator
states: the same bits as in RAM, in any order of parameters.

Cost: each random number is drawn twice, and once more where the function reads a value that depends
on it (rejection sampling of `trunc_normal_`). Memory: two of the largest tensors at a time, all
smaller ones, and 5 KB for each random operation.

A model that is already on the meta device gets its values by `load=`
(infinity/_src/params/materialize.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from infinity._src.base.dtypes import copy_
from infinity._src.base.progress import ProgressLine
from infinity._src.base.torch_compat import FAKE_HAS_NO_VALUES, FakeTensor, FakeTensorMode

DEFERRED_BYTES_MIN = 1 << 20
"""Smaller tensors have memory: norms, rotary frequencies, tables whose values constructors read."""

_OVERWRITES = frozenset(
    f"aten::{name}"
    for name in ("normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_")
)
"""Operations that overwrite all earlier values of a tensor."""

_Memory = dict[int, tuple[torch.UntypedStorage, int]]
"""For storages that have values for now: the memory that holds them, and their first byte there."""


class DeferredModel:
    """A model that `build` has built, and the recipe of each of its large tensors.

    Blocks while random numbers are drawn once. shown: whether this rank reports progress.

    Raises: ValueError where the function returns no module or leaves tensors on meta.
    """

    def __init__(self, build: Callable[[], nn.Module], *, shown: bool = True) -> None:
        name = getattr(build, "__qualname__", None) or repr(build)
        self.label = f"the model that init={name} builds"
        # No total: it is unknown how many values the function draws.
        line = ProgressLine("drawing initial values", None, shown=shown)
        self._recorder = _Recorder(line.advance)
        with line, self._recorder:
            self.model = model = build()
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"init={name} returned a {type(model).__name__}; it must build the model and "
                "return it"
            )
        self._tensors: dict[str, torch.Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        on_meta = [key for key, tensor in self._tensors.items() if tensor.device.type == "meta"]
        if on_meta:
            raise ValueError(
                f"init={name} left {on_meta[0]} on the meta device; build the model as for memory, "
                "without torch.device('meta'): nothing large is allocated"
            )

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor that was built, for its shape and dtype: it may have no memory."""
        return self._tensors[name]

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out`, a CPU tensor of the named tensor's shape, with the values, cast to the dtype
        of `out`. Blocks while they are computed."""
        tensor = self._tensors[name].detach()
        if isinstance(tensor, FakeTensor):
            tensor = self._recorder.replay(tensor, out)
        if tensor.data_ptr() != out.data_ptr():
            copy_(out, tensor)


@dataclasses.dataclass(frozen=True)
class _Ref:
    """A tensor without memory, as an operation's argument: a view of a storage."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    size_bytes: int
    """Size of the whole storage."""

    @property
    def whole(self) -> bool:
        """True if the view is all of its storage, in order."""
        numel = self.size.numel()
        contiguous = torch.empty(self.size, device="meta").stride() == self.stride
        return contiguous and numel * self.dtype.itemsize == self.size_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class _Op:
    """One operation that made or changed tensors without memory.

    out: its result, with a `_Ref` in place of each tensor. reads: storages of its arguments. makes:
    new storages. changes: views that it changed in place. state: of `generator` before a random
    operation.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    reads: frozenset[int]
    makes: frozenset[int]
    changes: tuple[_Ref, ...]
    generator: torch.Generator | None
    state: torch.Tensor | None

    @property
    def overwrites(self) -> bool:
        """True if it overwrites all earlier values of the views that it changes."""
        if self.func._schema.name not in _OVERWRITES or not all(ref.whole for ref in self.changes):
            return False
        # A copy from a view of the same storage reads the earlier values.
        given = [leaf for leaf in self.args[1:] if isinstance(leaf, _Ref)]
        return all(leaf.storage != ref.storage for leaf in given for ref in self.changes)

    def feeds_others(self, storage: int) -> bool:
        """True if values of other storages depend on this one."""
        others = self.makes.union(ref.storage for ref in self.changes) - {storage}
        return storage in self.reads and bool(others)


class _Recorder(TorchDispatchMode):
    """Dispatch mode under which large tensors have no memory and operations on them are recorded.

    drawn: gets the bytes of large tensors whose random values were drawn.
    """

    def __init__(self, drawn: Callable[[int], object]) -> None:
        super().__init__()
        self._drawn = drawn
        # An operation may mix small tensors with memory and large ones without
        # (`weight.mul_(scale)`).
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._ops: list[_Op] = []
        # Indices of the operations that made or changed a storage, in order.
        self._history: dict[int, list[int]] = {}
        # Keys are addresses, so these references keep them unique. The storages have no memory.
        self._storages: dict[int, torch.UntypedStorage] = {}
        # One for all draws: freed tensors would fragment malloc's heap.
        self._scratch = torch.UntypedStorage(0)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        fakes = [leaf for leaf in given if isinstance(leaf, FakeTensor)]
        if not fakes and (given or not _makes_large(func, args, kwargs)):
            return func(*args, **kwargs)
        changed = _changed(func, args, kwargs)
        if any(not isinstance(leaf, FakeTensor) for leaf in changed):
            # Tensors with memory get their values now: no later step sets them.
            return self._at_once(func, args, kwargs)
        try:
            with self._fakes:
                out = func(*args, **kwargs)
        except FAKE_HAS_NO_VALUES:
            # The function reads a value, as rejection sampling does: `tensor.any().item()`.
            return self._at_once(func, args, kwargs)
        self._record(func, args, kwargs, out, given, changed)
        return out

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._scratch = torch.UntypedStorage(0)

    def _at_once(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on the current values of large tensors."""
        there: _Memory = {}
        args, kwargs = pytree.tree_map(lambda leaf: self._valued(leaf, there), (args, kwargs))
        return func(*args, **kwargs)

    def _record(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        given: list[torch.Tensor],
        changed: list[torch.Tensor],
    ) -> None:
        reads = {self._ref(leaf).storage for leaf in given if isinstance(leaf, FakeTensor)}
        results = [self._ref(leaf) for leaf in _tensors(out)]
        makes = frozenset(ref.storage for ref in results) - reads
        if not makes and not changed:
            return # a view: references describe it completely
        if not given:
            # torch's defaults may differ when the operation is repeated.
            kwargs = {**kwargs, "device": torch.device("cpu"), "dtype": _tensors(out)[0].dtype}
        args, kwargs = self._refs((args, kwargs))
        generator = state = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = kwargs.get("generator") or torch.default_generator
            state = generator.get_state()
        op = _Op(
            func,
            args,
            kwargs,
            self._refs(out),
            frozenset(reads),
            makes,
            tuple(self._ref(leaf) for leaf in changed),
            generator,
            state,
        )
        if generator is not None:
            self._draw(op)
        for key in makes.union(ref.storage for ref in op.changes):
            self._history.setdefault(key, []).append(len(self._ops))
        self._ops.append(op)

    def _draw(self, op: _Op) -> None:
        """Run a random operation only to advance its generator."""
        # An operation that overwrites its tensor may run on any memory: its random numbers depend
        # only on the number of elements.
        scratch: _Memory = {}
        for ref in op.changes if op.overwrites else ():
            if self._scratch.nbytes() < ref.size_bytes:
                # Free the smaller one first.
                self._scratch = torch.UntypedStorage(0)
                self._scratch = torch.UntypedStorage(ref.size_bytes)
            scratch[ref.storage] = self._scratch, 0
        args, kwargs = self._real((op.args, op.kwargs), scratch)
        op.func(*args, **kwargs)
        refs = [leaf for leaf in pytree.tree_leaves(op.out) if isinstance(leaf, _Ref)]
        self._drawn(sum(ref.size.numel() * ref.dtype.itemsize for ref in refs))

    def _ref(self, tensor: torch.Tensor) -> _Ref:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._storages[key] = storage
        return _Ref(
            key,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            storage.nbytes(),
        )

    def _valued(self, leaf: Any, there: _Memory) -> Any:
        if not isinstance(leaf, FakeTensor):
            return leaf
        ref = self._ref(leaf)
        if ref.storage not in there:
            self._compute(ref.storage, there)
        return _view(ref, there[ref.storage])

    def _refs(self, tree: Any) -> Any:
        """Return the tree with references instead of tensors without memory, and copies of the
        other tensors, which the user may change."""

        def frozen(leaf: Any) -> Any:
            if isinstance(leaf, FakeTensor):
                return self._ref(leaf)
            return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

        return pytree.tree_map(frozen, tree)

    def _real(self, tree: Any, there: _Memory) -> Any:
        """Return the tree with values instead of references: views of storages in `there`, or
        computed now."""

        def value(leaf: Any) -> Any:
            if not isinstance(leaf, _Ref):
                return leaf
            if leaf.storage not in there:
                self._compute(leaf.storage, there)
            return _view(leaf, there[leaf.storage])

        return pytree.tree_map(value, tree)

    def replay(self, tensor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        ref = self._ref(tensor)
        there: _Memory = {}
        with torch.no_grad():
            self._compute(ref.storage, there, out if ref.whole and out.dtype == ref.dtype else None)
        return _view(ref, there[ref.storage])

    def _compute(
        self,
        storage: int,
        there: _Memory,
        out: torch.Tensor | None = None,
    ) -> None:
        """Compute the last values of a storage, and everything that they depend on."""
        # Not in `there`, where other storages have their last values: an operation may have read
        # earlier ones.
        found: _Memory = {}
        for op in self._needed(storage):
            if op.makes == {storage} and out is not None and op.func._schema.name == "aten::empty":
                assert out.is_contiguous()
                found[storage] = out.untyped_storage(), int(out.storage_offset()) * out.itemsize
                continue
            args, kwargs = self._real((op.args, op.kwargs), found)
            with _at(op.generator, op.state):
                result = op.func(*args, **kwargs)
            for ref, each in zip(pytree.tree_leaves(op.out), _tensors(result), strict=True):
                if ref.storage in op.makes:
                    found.setdefault(ref.storage, (each.untyped_storage(), 0))
        there[storage] = found[storage]

    def _needed(self, storage: int) -> list[_Op]:
        for skipping in (True, False):
            wanted = self._closure(storage, skipping=skipping)
            last = self._last_overwrite(storage)
            # Skip overwritten values only if no needed operation has read them before.
            if not any(
                index < last and self._ops[index].feeds_others(storage) for index in wanted
            ):
                break
        return [self._ops[index] for index in sorted(wanted)]

    def _last_overwrite(self, storage: int) -> int:
        history = self._history[storage]
        return next((i for i in reversed(history) if self._ops[i].overwrites), -1)

    def _closure(self, storage: int, *, skipping: bool) -> set[int]:
        last = self._last_overwrite(storage) if skipping else -1
        wanted: set[int] = set()
        # Pairs of a storage and an index: its operations before that index matter.
        to_do, done = [(storage, len(self._ops))], dict[int, int]()
        while to_do:
            key, end = to_do.pop()
            begin = done.get(key, -1)
            if begin >= end:
                continue
            done[key] = end
            for index in self._history[key]:
                op = self._ops[index]
                dead = key == storage and index < last and key not in op.makes
                if index < end and index not in wanted and not dead:
                    wanted.add(index)
                    to_do += [(each, index) for each in op.reads if each != key]
        return wanted


def _view(ref: _Ref, memory: tuple[torch.UntypedStorage, int]) -> torch.Tensor:
    storage, start = memory
    offset = start // ref.dtype.itemsize + ref.offset
    return torch.empty(0, dtype=ref.dtype).set_(storage, offset, ref.size, ref.stride)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


def _makes_large(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if all(argument.name != "device" for argument in func._schema.arguments):
        return False
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    # Run it on meta to learn the size: this needs no memory, and draws no random numbers.
    like = func(*args, **{**kwargs, "device": torch.device("meta")})
    return any(leaf.numel() * leaf.itemsize >= DEFERRED_BYTES_MIN for leaf in _tensors(like))


@contextlib.contextmanager
def _at(generator: torch.Generator | None, state: torch.Tensor | None) -> Iterator[None]:
    """Draw from `generator` in `state`, and restore its current state afterwards."""
    if generator is None or state is None:
        yield
        return
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)
