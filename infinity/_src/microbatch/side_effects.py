"""Side effects of modules that run in slices: what a call leaves behind beside its output.

    buffers      running statistics: written by the last slice first, and once more where backward
                 computes a slice again
    attributes   a loss in `self.aux_loss`: that of one slice is left; a tensor that is written to,
                 and a generator that is drawn from, for each slice and again in backward

None of these is what a loop over micro-batches leaves. Each is refused by name. Writes to
arguments are told in `infinity._src.microbatch.arguments`.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from infinity._src.base.torch_compat import dynamo_disable, version_of
from infinity.errors import SlicesError

log = logging.getLogger("infinity")

_OF_MODULES = frozenset(nn.Module().__dict__)
_LOSSES = (type(None), torch.Tensor, int, float, list)
"""Types of attributes that may be, or become, a loss."""


class SideEffects:
    """Watch over a module and those inside of it. Their number must not change.

    first_time: tells whether something has not been said yet.
    """

    @dynamo_disable
    def __init__(self, module: nn.Module, first_time: Callable[[str], bool]) -> None:
        # Attributes, not modules: these must go with their last other reference.
        self._attributes = [(name, inner.__dict__) for name, inner in module.named_modules()]
        # Reading every attribute at each call would cost more than all else here.
        self._listed = [_names(attributes) for _, attributes in self._attributes]
        self._first_time = first_time

    @contextlib.contextmanager
    def refused(self, owner: str, *, several: bool, again: bool) -> Iterator[None]:
        """Run the module inside. several: slices. again: its own code runs more than once.

        Raises: SlicesError, at the end, for buffers that were written, with several slices for
        attributes that got a tensor with a graph, and where it runs again for tensors in attributes
        that were written to, and generators that were drawn from.
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
                        "inf.microbatched calls it for each slice: only that of the last call "
                        "would be left; return it with the output, or keep a detached copy if no "
                        "loss needs it"
                    )
            elif name in before and before[name][1] != mark:
                self._changed(owner, name, value, before[name][0])

    def _changed(self, owner: str, name: str, value: Any, before: Any) -> None:
        """Say, or raise, that an attribute has another value than before a call."""
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
                "the last first, and once more in backward: if a call reads what the call before "
                "has left, its numbers are not those of a loop over micro-batches",
                owner,
                name,
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

    @dynamo_disable
    def _kept(self) -> dict[str, tuple[Any, Any]]:
        """Find tensors, floats and generators in attributes, each with what changes when it does.
        Of a list the last item counts."""
        found = {}
        for index, (prefix, attributes) in enumerate(self._attributes):
            # An attribute has been added or removed, so the names are listed anew.
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
    """Return what is another one when a value changes; None for a value that is not watched."""
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
    """Return the number of a module's attributes, and the names of those that are watched."""
    names = (
        name
        for name, value in attributes.items()
        if name not in _OF_MODULES
        and (isinstance(value, _LOSSES) or _is_generator(value))
        # A weight that is computed of parameters `weight_g` and `weight_v` at each call.
        and not any(param.startswith(f"{name}_") for param in attributes["_parameters"])
    )
    return len(attributes), tuple(names)


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
