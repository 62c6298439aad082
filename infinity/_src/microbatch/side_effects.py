"""Side effects of modules that run in slices: what a call leaves behind beside its output.

    buffers      running statistics: written by the last slice first, and once more where backward
                 computes a slice again
    attributes   a loss in `self.aux_loss`: that of one slice is left
    arguments    a list that is appended to: each slice has lists of its own

None of these is what a loop over micro-batches leaves. Each is refused by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from infinity._src._torch_compat import version_of
from infinity.errors import SlicesError

_OF_MODULES = frozenset(nn.Module().__dict__)
_LOSSES = (type(None), torch.Tensor, int, float, list)
"""Types of attributes that may be, or become, a loss."""


class SideEffects:
    """Watch over a module and those inside of it. Their number must not change."""

    def __init__(self, module: nn.Module) -> None:
        # Attributes, not modules: these must go as soon as nobody else has them.
        self._attributes = [(name, inner.__dict__) for name, inner in module.named_modules()]
        # Reading every attribute at each call would cost more than all else here.
        self._listed = [_names(attributes) for _, attributes in self._attributes]

    @contextlib.contextmanager
    def refused(self, owner: str, *, several: bool) -> Iterator[None]:
        """Run the module inside. several: slices.

        Raises: SlicesError, at the end, for buffers that were written, and with several slices for
        attributes that got a tensor with a graph.
        """
        buffers, losses = self._buffers(), self._losses()
        yield
        for name, (buffer, version, persistent) in self._buffers().items():
            before = buffers.get(name, (buffer, version, persistent))
            written = before[1] != version if before[0] is buffer else persistent
            if written:
                raise SlicesError(
                    f"{owner} writes to its buffer {name} in forward, and inf.microbatched calls "
                    "it for each slice, the last first: the values would not be those of a loop "
                    "over micro-batches; call .eval() on that module, or take another norm"
                )
        known = {id(loss) for loss in losses.values()}
        for name, loss in (self._losses() if several else {}).items():
            if id(loss) not in known:
                raise SlicesError(
                    f"{owner} keeps a tensor with a graph in its attribute {name}, and "
                    "inf.microbatched calls it for each slice: only that of the last call would "
                    "be left; return it with the output, or keep a detached copy if no loss needs "
                    "it"
                )

    def _buffers(self) -> dict[str, tuple[torch.Tensor, int, bool]]:
        """Return buffers, with their versions, and whether checkpoints have them: one that they
        have not (a table of places that grows) may be replaced."""
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

    def _losses(self) -> dict[str, torch.Tensor]:
        """Find tensors with a graph in attributes."""
        found = {}
        for index, (prefix, attributes) in enumerate(self._attributes):
            # An attribute has been added or removed, so the names are listed anew.
            if len(attributes) != self._listed[index][0]:
                self._listed[index] = _names(attributes)
            for name in self._listed[index][1]:
                value = attributes.get(name)
                if type(value) is list and value:
                    value = value[-1]
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    found[_joined(prefix, name)] = value
        return found


def _names(attributes: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Return the number of a module's attributes, and the names of those that may be losses."""
    names = (
        name
        for name, value in attributes.items()
        if name not in _OF_MODULES
        and isinstance(value, _LOSSES)
        # A weight that is computed of parameters `weight_g` and `weight_v` at each call.
        and not any(param.startswith(f"{name}_") for param in attributes["_parameters"])
    )
    return len(attributes), tuple(names)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def same_items(value: Any, before: Any) -> bool:
    """True where tuples, lists and dicts have the items that they had."""
    if isinstance(value, dict):
        return value.keys() == before.keys() and all(
            same_items(item, before[key]) for key, item in value.items()
        )
    if isinstance(value, (tuple, list)):
        return len(value) == len(before) and all(map(same_items, value, before))
    return value is before
