"""Arguments of one slice of a module: what a checkpoint gets of them, and what a call writes to
them.

    lists, dicts    each slice has its own, so what is written would be lost: refused
    UserDicts       handed on from block to block: each slice has its own items (`HandedOn`)
    tensors         backward computes a slice again, of what the tensor then has: refused
    other objects   all slices share them: refused
"""

from __future__ import annotations

import types
from collections import UserDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from infinity._src.base.torch_compat import dynamo_disable, version_of
from infinity._src.microbatch.rows import DICTS, PerSlice, mapped, per_slice
from infinity.errors import SlicesError

_DEEP = 4
"""Objects inside of objects that are looked at: a cache has layers, which have tensors."""

_NO_STATE = (nn.Module, type, types.FunctionType, types.ModuleType)


class _Place:
    """Place of a tensor that was taken out of the arguments."""

    def __init__(self, index: int) -> None:
        self.index = index


class Arguments:
    """Arguments of a slice, without the tensors that `take_out` has returned."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._places: Any = (args, kwargs)

    def take_out(self) -> list[torch.Tensor]:
        """Take out the first tensor and all with gradients. They go through the checkpoint: its
        inputs may leave memory (`activations=`), and tell it the device whose random numbers it
        keeps."""
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
        """Return the arguments, with `tensors` in place of those that were taken out."""
        filled: tuple[tuple[Any, ...], dict[str, Any]] = mapped(
            self._places, lambda leaf: tensors[leaf.index] if isinstance(leaf, _Place) else leaf
        )
        return filled


class Untouched:
    """Watch over the arguments of a call that must not write to them.

    before: a copy of their containers.
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
                "gives each slice one of its own: what it writes would be lost; return it with the "
                "output"
            )
        # Of the copy: a UserDict may have got items.
        if _all_marks(self.before) != self._marks:
            raise SlicesError(
                f"{owner} writes to a tensor or to an object among its arguments: slices share it, "
                "or have a copy, and backward computes a slice again, so the next module and "
                "backward would see other values than in a loop; write to a copy (`x = x * y` for "
                "`x *= y`), or return it with the output"
            )


def same_items(value: Any, before: Any) -> bool:
    """True where tuples, lists and dicts have the items that they had. UserDicts may have more."""
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
    """UserDicts among the arguments of a module in slices: later modules get what earlier ones have
    put in. Each slice has a copy with its parts; what it writes comes back as `PerSlice`.

    arguments: of the whole batch.
    """

    def __init__(self, arguments: Any, count: int) -> None:
        self._whole = list(_user_dicts(arguments))
        self._written: list[list[dict[str, Any]]] = [[] for _ in range(count)]

    def note(self, index: int, now: Any, before: Any) -> None:
        """Note what a slice has written to its dicts. Nothing is noted once it was given back:
        backward computes the same again."""
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
        """Write what all slices have written to the dicts of the whole batch.

        Raises: SlicesError for slices that wrote other items.
        """
        for whole, *written in zip(self._whole, *self._written, strict=True):
            if any(each.keys() != written[0].keys() for each in written):
                raise SlicesError(
                    f"{owner}: slices write different items to the {type(whole).__name__} among "
                    "its arguments, and inf.microbatched cannot tell which belong together; return "
                    "them with the output"
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
