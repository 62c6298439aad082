"""Values of models on the meta device: they come when `initialize` offloads the model.

    set_source(module, source)     a loader leaves a module without values, and says where they are
    load_of(model)                 `initialize` asks for the values of the whole model: those of its
                                   own tensors, and of each module's source under its names
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch

import infinity as inf

_SOURCES: weakref.WeakKeyDictionary[torch.nn.Module, inf.TensorSource] = (
    weakref.WeakKeyDictionary()
)


def set_source(module: torch.nn.Module, source: inf.TensorSource) -> None:
    """Say where the values of a module on the meta device are. source: has the names of the
    module's state dict.
    """
    _SOURCES[module] = source


def load_of(model: torch.nn.Module) -> inf.TensorSource | None:
    """Return the values of a model some of whose modules have sources; None where none has: the
    model holds its values.
    """
    sources = {
        prefix: _SOURCES[module] for prefix, module in model.named_modules() if module in _SOURCES
    }
    return _ModelValues(model, sources) if sources else None


class _ModelValues:
    """Tensors of a model, by the names of its state dict: its own, or those of a source."""

    def __init__(
        self, model: torch.nn.Module, sources: dict[str, inf.TensorSource]
    ) -> None:
        # Own tensors go first: adapters lie under the prefix of the base's source.
        self._own = {
            name: tensor
            for name, tensor in model.state_dict(keep_vars=True).items()
            if not tensor.is_meta
        }
        self._sources: dict[str, tuple[inf.TensorSource, str]] = {}
        for prefix, source in sources.items():
            for name in source.names():
                whole = f"{prefix}.{name}" if prefix else name
                if whole not in self._own:
                    self._sources[whole] = source, name

    def names(self) -> Iterable[str]:
        """Return all names."""
        return [*self._own, *self._sources]

    def shape(self, name: str) -> Sequence[int]:
        """Return the shape of one tensor."""
        if name in self._own:
            return tuple(self._own[name].shape)
        source, inner = self._sources[name]
        return source.shape(inner)

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        if name in self._own:
            own: torch.Tensor = self._own[name].detach()
            return own
        source, inner = self._sources[name]
        return source.read(inner)
