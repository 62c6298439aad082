"""`install()`: makes `import deepspeed` import these modules. Called on request only.

It puts a finder in front of all others: `import deepspeed...` imports the modules of `names.TABLE`,
`importlib.util.find_spec("deepspeed")` finds them, and `importlib.metadata.version("deepspeed")`
returns the DeepSpeed release that they implement.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from infinity._embedding import check_methods
from infinity.compat.deepspeed import _transformers
from infinity.compat.deepspeed.accelerator import get_accelerator
from infinity.compat.deepspeed.errors import DeepSpeedRefusal
from infinity.compat.deepspeed.names import TABLE, VERSION, contents

_METADATA = f"""Metadata-Version: 2.1
Name: deepspeed
Version: {VERSION}
Author: The infinity authors
Summary: infinity's stand-in, infinity.compat.deepspeed
"""

_TESTED_ACCELERATE = "1.15.0"

Adapt = Callable[[Any], None]

_ANY = importlib.metadata.DistributionFinder.Context()


class _StandIn(types.ModuleType):
    """A module of `names.TABLE`. Access to a submodule imports it."""

    def __setattr__(self, name: str, value: Any) -> None:
        # importlib sets an imported submodule as an attribute here. It must not replace a function:
        # `deepspeed.utils.z3_leaf_module` is both.
        if not (isinstance(value, _StandIn) and name in vars(self)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        if full in TABLE:
            return importlib.import_module(full)
        raise AttributeError(
            f"infinity's stand-in for DeepSpeed has no {full} "
            "(infinity/compat/deepspeed/names.py lists what there is)"
        )


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(contents(module.__name__))


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        return {"METADATA": _METADATA, "top_level.txt": "deepspeed\n"}.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        # No file is installed under this name.
        return Path(__file__).parent / path


class _Finder(importlib.metadata.DistributionFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: types.ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in TABLE:
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(), is_package=True)

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context = _ANY
    ) -> Iterable[importlib.metadata.Distribution]:
        return [_Distribution()] if context.name in (None, "deepspeed") else []


def install() -> None:
    """Make `import deepspeed` import these modules in this process. Call it before the import of
    any library that looks for DeepSpeed (transformers, accelerate). A second call does nothing.

    Raises: DeepSpeedRefusal if DeepSpeed itself is already imported.
    """
    if is_installed():
        return
    loaded = sys.modules.get("deepspeed")
    if loaded is not None:
        where = getattr(loaded, "__file__", None)
        raise DeepSpeedRefusal(
            f"install(): DeepSpeed itself is imported already, from {where}; call install() before "
            "anything imports it, or do not import it"
        )
    sys.meta_path.insert(0, _Finder())
    _after_import("accelerate.state", _name_cpu_backend)
    _after_import("transformers.modeling_utils", _transformers.adapt)


def is_installed() -> bool:
    """Return whether `install` was called."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def real_version() -> str | None:
    """Return the version of the installed DeepSpeed itself; None if there is none."""
    for found in importlib.metadata.distributions(name="deepspeed"):
        if not isinstance(found, _Distribution):
            return found.version
    return None


def _after_import(name: str, adapt: Adapt) -> None:
    """Call `adapt(module)`: now if the module is imported, else at the end of its import."""
    module = sys.modules.get(name)
    if module is not None:
        adapt(module)
    else:
        sys.meta_path.insert(0, _FinderWithHook(name, adapt))


class _FinderWithHook(importlib.abc.MetaPathFinder):
    """Finds one module as PathFinder does, and wraps its loader: `adapt` runs after the import."""

    def __init__(self, name: str, adapt: Adapt) -> None:
        self._name, self._adapt = name, adapt

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderWithHook(spec.loader, self._adapt)
        return spec


class _LoaderWithHook(importlib.abc.Loader):
    def __init__(self, loader: Any, adapt: Adapt) -> None:
        self._loader, self._adapt = loader, adapt

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        made: types.ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        self._adapt(module)

    def __getattr__(self, name: str) -> Any:
        # Other methods (`get_source`, resource access) are those of the wrapped loader.
        return getattr(self._loader, name)


def _name_cpu_backend(state: Any) -> None:
    """Make `PartialState` use gloo if accelerate's DeepSpeed mode is on and there is no GPU.

    Accelerate chooses no backend then, and each rank would consider itself the only one: all would
    train on the same rows. state: the module accelerate.state. Raises: ImportError for a release
    without the method.
    """
    check_methods(state.PartialState, ("_prepare_backend",), "accelerate", _TESTED_ACCELERATE)
    own = state.PartialState._prepare_backend
    if hasattr(own, "infinity_names"):
        return

    @functools.wraps(own)
    def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend, kind = own(self, *args, **kwargs)
        asked = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        if backend is None and asked and "LOCAL_RANK" in os.environ:
            backend = get_accelerator().communication_backend_name()
        return backend, kind

    prepare_backend.infinity_names = True  # type: ignore[attr-defined]
    state.PartialState._prepare_backend = prepare_backend
