"""Replay of a forward for one slice: the model's code runs again, but calls of modules and of the
loss compute nothing; they return recorded results of the forward of the whole batch.

    Record     outputs of modules that contain sliced modules, and losses of the slices
    Replay     one slice: the slice's part of each `PerSlice`, and the slice's losses
    Unneeded   all other tensors: every result that is computed from one is an Unneeded, too

So a result that depends only on values of the slice equals the result of a micro-batch, and a
result that depends on anything else is an Unneeded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from infinity._src.microbatch.rows import PerSlice, mapped


class Unneeded:
    """Placeholder for a tensor that no result of a replay may depend on. Every operation on it
    returns a placeholder."""

    def _itself(self, *_args: Any, **_kwargs: Any) -> Unneeded:
        return self

    def _refuse(self, *_args: Any) -> NoReturn:
        # TypeError, as Python raises for every other operation that this class lacks.
        raise TypeError("an unneeded tensor has no value")

    def __getattr__(self, name: str) -> Unneeded:
        # `copy` looks up optional methods, and expects AttributeError if they are missing.
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Unneeded:
        """Return a placeholder for the result."""
        return cls()

    __call__ = __getitem__ = __setitem__ = _itself
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _itself
    __truediv__ = __rtruediv__ = __pow__ = __matmul__ = __neg__ = _itself
    __bool__ = __len__ = __iter__ = __int__ = __float__ = __index__ = _refuse


UNNEEDED = Unneeded()


@dataclasses.dataclass
class Record:
    """Outputs and losses of a forward of the whole batch.

    outputs: for each module that contains sliced modules, its outputs in the order of its calls.
    losses: for each call of the model's loss, the losses of the slices; placeholders if the loss
    was computed for the whole batch.
    """

    outputs: dict[nn.Module, list[Any]] = dataclasses.field(default_factory=dict)
    losses: list[Sequence[torch.Tensor | Unneeded]] = dataclasses.field(default_factory=list)

    def add_output(self, module: nn.Module, output: Any) -> None:
        self.outputs.setdefault(module, []).append(output)


class Replay:
    """Recorded results for one slice, in the order of the record."""

    def __init__(self, record: Record, index: int) -> None:
        self._outputs = {module: iter(calls) for module, calls in record.outputs.items()}
        self._losses = iter(record.losses)
        self._index = index

    def output(self, module: nn.Module) -> Any:
        """Return a module's next recorded output for this slice: its part of each `PerSlice`, and
        placeholders for tensors."""
        return mapped(next(self._outputs.get(module, iter(())), UNNEEDED), self._of_slice)

    def loss(self, *_args: Any, **_kwargs: Any) -> Any:
        """Return the loss of this slice, whatever the arguments."""
        losses = next(self._losses, None)
        return UNNEEDED if losses is None else losses[self._index]

    def _of_slice(self, leaf: Any) -> Any:
        if isinstance(leaf, PerSlice):
            return leaf.parts[self._index]
        return UNNEEDED if isinstance(leaf, torch.Tensor) else leaf
