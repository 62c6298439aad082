"""Functions that run right after the import of a module, and do not import it themselves."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

Adapt = Callable[[Any], None]


def after_import(name: str, adapt: Adapt) -> None:
    """Call `adapt(module)`: now if the module is imported, else when it is."""
    module = sys.modules.get(name)
    if module is not None:
        adapt(module)
    else:
        sys.meta_path.insert(0, _Finder(name, adapt))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, as it would be found without this, with a loader that calls `adapt`."""

    def __init__(self, name: str, adapt: Adapt) -> None:
        self._name, self._adapt = name, adapt

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._adapt)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, adapt: Adapt) -> None:
        self._loader, self._adapt = loader, adapt

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        made: types.ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        self._adapt(module)

    def __getattr__(self, name: str) -> Any:
        # Of the loader itself: `get_source`, resources of the module.
        return getattr(self._loader, name)
