"""Side effects of modules that run in slices: changes that a call makes besides its output.

In modules:

    buffers      running statistics: the last slice would write first, and backward would write
                 again when it recomputes a slice
    attributes   a loss in `self.aux_loss`: only the loss of one slice would remain; a tensor that a
                 call writes to, or a generator: each slice would change it, and backward again when
                 it recomputes a slice

In arguments:

    lists, dicts    each slice has a copy, so a write would be lost
    UserDicts       blocks pass them on: each slice has separate items (`HandedOn`)
    tensors         backward recomputes a slice, from the values after a write
    other objects   all slices share them

A loop over micro-batches would leave other values. So each of these raises a SlicesError that names
it, with two exceptions: UserDicts work, and an attribute whose number or tensor a call replaces
without a graph gives one warning.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import random
import types
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from infinity._src.base.torch_compat import dynamo_disable, version_of
from infinity._src.microbatch.rows import DICTS, PerSlice, mapped, per_slice
from infinity.errors import SlicesError

log = logging.getLogger("infinity")

_OF_MODULES = frozenset(nn.Module().__dict__)
_LOSSES = (type(None), torch.Tensor, int, float, list)
"""Types of attributes that may be, or become, a loss."""


class SideEffects:
    """Watch over a module and the modules inside of it, none of which may be replaced.

    first_time: returns whether it is called with a text for the first time.
    """

    @dynamo_disable
    def __init__(self, module: nn.Module, first_time: Callable[[str], bool]) -> None:
        # Refer to attributes, not to modules, which this object must not keep alive.
        self._attributes = [(name, inner.__dict__) for name, inner in module.named_modules()]
        # Reading every attribute at each call would cost more than all else here.
        self._listed = [_names(attributes) for _, attributes in self._attributes]
        self._first_time = first_time

    @contextlib.contextmanager
    def refused(self, owner: str, *, several: bool, again: bool) -> Iterator[None]:
        """Run the module inside the context. several: there are several slices. again: the module's
        code runs more than once.

        Raises, at the end: SlicesError for buffers that were written. With `again` also for tensors
        in attributes that were written to, for generators that were drawn from, and, if there are
        several slices, for attributes that got a tensor with a graph.
        """
        buffers, before = self._buffers(), self._kept() if again else {}
        yield
        for name, (buffer, version, persistent) in self._buffers().items():
            known = buffers.get(name, (buffer, version, persistent))
            written = known[1] != version if known[0] is buffer else persistent
            if written:
                raise SlicesError(
                    f"{owner} writes to its buffer {name} in forward, and inf.microbatched calls "
                    "it for each slice, the last first: the values would not be those of a loop "
                    "over micro-batches; call .eval() on that module, or take another norm"
                )
        graphs = {id(value) for value, _ in before.values() if _has_graph(value)}
        for name, (value, mark) in (self._kept() if again else {}).items():
            if _has_graph(value):
                if several and id(value) not in graphs:
                    raise SlicesError(
                        f"{owner} keeps a tensor with a graph in its attribute {name}, and "
                        "inf.microbatched calls it for each slice: only the tensor of the last "
                        "call would remain; return the tensor with the output, or keep a detached "
                        "copy if no loss needs it"
                    )
            elif name in before and before[name][1] != mark:
                self._changed(owner, name, value, before[name][0])

    def _changed(self, owner: str, name: str, value: Any, before: Any) -> None:
        """Raise SlicesError if a call wrote to the tensor, or drew from the generator, in an
        attribute; warn once if it replaced the value."""
        if value is before and not isinstance(value, float):
            what = "draws from the generator" if _is_generator(value) else "writes to the tensor"
            raise SlicesError(
                f"{owner} {what} in its attribute {name}, and inf.microbatched calls it for each "
                "slice, the last first, and once more in backward: the values would not be those "
                "of a loop over micro-batches; draw from torch's generator, or keep no state there"
            )
        if self._first_time(f"{owner} {name}"):
            log.warning(
                "%s keeps a value in its attribute %s. inf.microbatched calls it for each slice, "
                "the last first, and once more in backward: if a call reads the value of an "
                "earlier call, its results are not those of a loop over micro-batches",
                owner,
                name,
            )

    def _buffers(self) -> dict[str, tuple[torch.Tensor, int, bool]]:
        """Return each buffer, its version, and whether it is persistent. A call may replace a
        buffer that is not persistent, such as a table of positions that grows."""
        return {
            _joined(prefix, name): (
                buffer,
                0 if buffer.is_inference() else version_of(buffer),
                name not in attributes["_non_persistent_buffers_set"],
            )
            for prefix, attributes in self._attributes
            for name, buffer in attributes["_buffers"].items()
            if buffer is not None
        }

    @dynamo_disable
    def _kept(self) -> dict[str, tuple[Any, Any]]:
        """Return tensors, floats and generators in attributes, each with its mark (`_mark`). Of a
        list only the last item is watched."""
        found = {}
        for index, (prefix, attributes) in enumerate(self._attributes):
            # If an attribute has been added or removed, list the names again.
            if len(attributes) != self._listed[index][0]:
                self._listed[index] = _names(attributes)
            for name in self._listed[index][1]:
                value = attributes.get(name)
                if type(value) is list and value:
                    value = value[-1]
                mark = _mark(value)
                if mark is not None:
                    found[_joined(prefix, name)] = (value, mark)
        return found


def _mark(value: Any) -> object:
    """Return a mark that changes when a value does; None for a value that is not watched."""
    if isinstance(value, torch.Tensor):
        return id(value), 0 if value.is_inference() else version_of(value)
    if type(value) is float:
        return value
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    return pickle.dumps(value) if _is_generator(value) else None


def _is_generator(value: Any) -> bool:
    ours = isinstance(value, (torch.Generator, random.Random))
    return ours or type(value).__module__.startswith("numpy.random")


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _names(attributes: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Return the number of a module's attributes, and the names of the watched ones."""
    names = (
        name
        for name, value in attributes.items()
        if name not in _OF_MODULES
        and (isinstance(value, _LOSSES) or _is_generator(value))
        # Not a weight that each call computes from parameters `weight_g` and `weight_v`.
        and not any(param.startswith(f"{name}_") for param in attributes["_parameters"])
    )
    return len(attributes), tuple(names)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


# -- arguments -------------------------------------------------------------------------------------


_DEEP = 4
"""Depth to which objects inside of objects are searched: a cache has layers, which have tensors."""

_NO_STATE = (nn.Module, type, types.FunctionType, types.ModuleType)


class _Place:
    """Placeholder of a tensor that `take_out` has removed from the arguments."""

    def __init__(self, index: int) -> None:
        self.index = index


class Arguments:
    """Arguments of a slice, from which `take_out` removes tensors."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._places: Any = (args, kwargs)

    def take_out(self) -> list[torch.Tensor]:
        """Remove and return the first tensor and all tensors with gradients, to be inputs of the
        checkpoint. The engine may offload its inputs (`activations=`), and the checkpoint learns
        from them the device whose random state it saves."""
        tensors: list[torch.Tensor] = []

        def take(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or (tensors and not leaf.requires_grad):
                return leaf
            tensors.append(leaf)
            return _Place(len(tensors) - 1)

        self._places = mapped(self._places, take)
        return tensors

    def with_tensors(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with `tensors` in place of the removed ones."""
        filled: tuple[tuple[Any, ...], dict[str, Any]] = mapped(
            self._places, lambda leaf: tensors[leaf.index] if isinstance(leaf, _Place) else leaf
        )
        return filled


class Untouched:
    """Watch over the arguments of a call, which must not write to them.

    before: the arguments, with copies of their containers.
    """

    def __init__(self, arguments: Any) -> None:
        self._now = arguments
        self.before = mapped(arguments, lambda leaf: leaf)
        self._marks = _all_marks(self.before)

    def check(self, owner: str) -> None:
        """Raise SlicesError for arguments that were written to."""
        if not same_items(self._now, self.before):
            raise SlicesError(
                f"{owner} writes to a list or a dict among its arguments, and inf.microbatched "
                "gives each slice a copy: the written items would be lost; return them with the "
                "output"
            )
        # Compare the copy's marks: the call may have added items to a UserDict.
        if _all_marks(self.before) != self._marks:
            raise SlicesError(
                f"{owner} writes to a tensor or to an object among its arguments: slices share it, "
                "or have a copy, and backward computes a slice again, so the next module and "
                "backward would see other values than in a loop; write to a copy (`x = x * y` for "
                "`x *= y`), or return it with the output"
            )


def same_items(value: Any, before: Any) -> bool:
    """Return whether tuples, lists and dicts have the same items as before. UserDicts may differ.
    """
    if isinstance(value, UserDict):
        return True
    if isinstance(value, dict):
        return value.keys() == before.keys() and all(
            same_items(item, before[key]) for key, item in value.items()
        )
    if isinstance(value, (tuple, list)):
        return len(value) == len(before) and all(map(same_items, value, before))
    return value is before


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the version counters of tensors."""
    # Inference tensors have none.
    return [0 if tensor.is_inference() else version_of(tensor) for tensor in tensors]


@dynamo_disable
def _all_marks(value: Any) -> list[tuple[int, int]]:
    return list(_marks(value))


def _marks(value: Any, deep: int = _DEEP) -> Iterator[tuple[int, int]]:
    """Yield what a write changes: identity and version of each tensor in containers and objects."""
    if isinstance(value, torch.Tensor):
        yield id(value), versions_of([value])[0]
    elif isinstance(value, (tuple, list, set)):
        for item in value:
            yield from _marks(item, deep)
    elif isinstance(value, DICTS):
        for item in value.values():
            yield from _marks(item, deep)
    elif deep and hasattr(value, "__dict__") and not isinstance(value, (_NO_STATE, PerSlice)):
        yield from _marks(vars(value), deep - 1)


class HandedOn:
    """UserDicts among the arguments of a module in slices, through which modules pass values to
    later modules. Each slice has a copy with its parts; `give_back` writes the slices' new items to
    the dict of the whole batch, as `PerSlice`.

    arguments: of the whole batch. count: number of slices.
    """

    def __init__(self, arguments: Any, count: int) -> None:
        self._whole = list(_user_dicts(arguments))
        self._written: list[list[dict[str, Any]]] = [[] for _ in range(count)]

    def note(self, index: int, now: Any, before: Any) -> None:
        """Record the items that a slice has written to its dicts. After `give_back` this does
        nothing: backward recomputes the same items."""
        if not self._whole:
            return
        pairs = zip(_user_dicts(now), _user_dicts(before), strict=True)
        self._written[index] = [
            {
                key: item
                for key, item in mine.items()
                if key not in given
                or type(item) is not type(given[key])
                or not same_items(item, given[key])
            }
            for mine, given in pairs
        ]

    def give_back(self, owner: str) -> None:
        """Write the items of all slices to the dicts of the whole batch.

        Raises: SlicesError if slices wrote different keys.
        """
        for whole, *written in zip(self._whole, *self._written, strict=True):
            if any(each.keys() != written[0].keys() for each in written):
                raise SlicesError(
                    f"{owner}: slices write different items to the {type(whole).__name__} among "
                    "its arguments, and inf.microbatched cannot tell which to combine; return them "
                    "with the output"
                )
            for key in written[0]:
                whole[key] = per_slice([each[key] for each in written], owner)
        self._whole.clear()
        self._written.clear()


def _user_dicts(value: Any) -> Iterator[UserDict[str, Any]]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _user_dicts(item)
    elif isinstance(value, UserDict):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _user_dicts(item)
