"""Search for the tensors in a module's arguments, output and attributes."""

from __future__ import annotations

import types
from typing import Any

import torch

_ATOMS = frozenset(
    {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, type}
)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
_OBJECTS_MAX = 10_000  # objects searched per output, which may refer to a whole object graph


def in_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return tensors among the arguments and in their tuples, lists and dicts.

    Other objects are not searched: every block would search the KV cache, and a missed input only
    delays a release.
    """
    found: list[torch.Tensor] = []
    pending: list[Any] = [*args, *kwargs.values()]
    for value in pending:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            pending.extend(value)
        elif isinstance(value, dict):
            pending.extend(value.values())
    return found


def in_output(output: Any) -> list[torch.Tensor]:
    """Return every tensor in a module's output: containers, dataclasses and objects with a
    `__dict__` are searched.

    No tensor may be missed: backward gathers the unit when it reaches one of the found tensors.
    """
    # The usual output, without the search below.
    if type(output) is torch.Tensor:
        return [output]
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    pending: list[Any] = [output]
    for value in pending:
        if isinstance(value, torch.Tensor):
            # Deferred logits have no graph yet; the tensors that they are computed from have one.
            found.extend(getattr(value, "infinity_inputs", (value,)))
            continue
        if type(value) in _ATOMS or id(value) in seen or len(seen) > _OBJECTS_MAX:
            continue
        seen.add(id(value))
        pending.extend(_parts(value))
    return found


def _parts(value: Any) -> list[Any]:
    """Return the items of a container and the attributes of an object. Attributes of modules,
    classes and functions are left out."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(value)
    parts: list[Any] = []
    if isinstance(value, dict):
        parts.extend(value.values())
    if isinstance(value, (torch.nn.Module, type, *_FUNCTIONS)):
        return parts
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        parts.extend(attributes.values())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        parts.extend(getattr(value, name) for name in names if hasattr(value, name))
    return parts


class AttributeWatch:
    """Finder of tensors with a graph that modules hold as attributes (`self.aux_loss = ...`), and
    that forward does not return.

    Reading every attribute of every module at each call would cost more than all other hooks. So
    the names of attributes that hold None or a tensor are listed once for each module, and only
    these are read. A module whose number of attributes changed is listed again.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._watched = [self._list(inner.__dict__) for inner in module.modules()]

    @staticmethod
    def _list(attributes: dict[str, Any]) -> tuple[dict[str, Any], int, tuple[str, ...]]:
        names = tuple(
            name
            for name, value in attributes.items()
            if name not in _MODULE_ATTRIBUTES and (value is None or isinstance(value, torch.Tensor))
        )
        return attributes, len(attributes), names

    def found(self) -> list[torch.Tensor]:
        found = []
        for index, (attributes, count, names) in enumerate(self._watched):
            if len(attributes) != count:
                self._watched[index] = self._list(attributes)
                names = self._watched[index][2]
            for name in names:
                value = attributes.get(name)
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    found.append(value)
        return found


_MODULE_ATTRIBUTES = frozenset(torch.nn.Module().__dict__)
