"""Names of `deepspeed` that its tests import and the adapter does not have.

A test file imports dozens of names, and most of its tests use few of them. A missing name becomes a
placeholder, so that the file can be imported; a test that uses it fails with `NotThere`, which
names it. Queries about the machine (is an operator built, for which CUDA was a release built) are
answered here.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch


class NotThere(Exception):
    """A test used a name that the adapter does not have."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the adapter has no {name}")


class Absent:
    """A placeholder: it may be imported, passed on and be a base class; any use of it raises."""

    def __init__(self, name: str) -> None:
        self._absent = name

    def _raise(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotThere(self._absent)

    __call__ = __getitem__ = __contains__ = __instancecheck__ = __subclasscheck__ = _raise
    __iter__ = __bool__ = __len__ = __int__ = __float__ = __index__ = __mul__ = __rmul__ = _raise

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotThere(f"{self._absent}.{name}")

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (type("AbsentBase", (), {"__init__": lambda *_a, **_k: self._raise()}),)

    def __repr__(self) -> str:
        return f"<{self._absent}: not in the adapter>"


class AbsentModule(types.ModuleType):
    """A module of placeholders."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of some packages that no other finder finds."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, _path: Any = None, _target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec of a module in one of the packages, or None."""
        if fullname.split(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Make a module of placeholders."""
        return AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Run nothing."""


def complete(modules: Sequence[types.ModuleType], packages: Sequence[str]) -> None:
    """Add placeholders for missing names to modules, and for missing modules to packages."""
    sys.meta_path.append(Finder(*packages))
    for module in modules:
        module.__dict__["__getattr__"] = _getattr_of(module)


def provide(values: dict[str, Any], *, over: bool = False) -> None:
    """Set values by their full names; where a value is already, only with `over`."""
    for name, value in values.items():
        home, _, attribute = name.rpartition(".")
        module = importlib.import_module(home)
        if over or isinstance(getattr(module, attribute, Absent(name)), Absent):
            setattr(module, attribute, value)


def _getattr_of(module: types.ModuleType) -> Callable[[str], Any]:
    own = getattr(type(module), "__getattr__", None)

    def get(name: str) -> Any:
        if own is not None:
            with contextlib.suppress(AttributeError):
                return own(module, name)
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{module.__name__}.{name}")

    return get


# -- what tests ask about the machine --------------------------------------------------------------

BUILT_FOR = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": "12.8",
    "nccl_version": "2.27",
    "hip_version": "0.0",
}
"""Pretend to be a release for GPUs: tests of bf16 only ask whether its CUDA is new enough, and
would skip themselves on a CPU, which computes bf16 as well."""


class OffloadDeviceEnum(str, enum.Enum):
    """Devices as tests spell them; in a configuration they are texts."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"

    __str__ = str.__str__


OPERATORS = {"cpu_adam": True, "async_io": True, "fused_adam": True, "lamb": False}


def _builder(name: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(NAME=name)


def _required_torch_version(
    min_version: float | None = None, max_version: float | None = None
) -> bool:
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    for bound, holds in ((min_version, found.__ge__), (max_version, found.__le__)):
        if bound is not None and not holds(tuple(int(part) for part in str(bound).split("."))):
            return False
    return True


def _groups_without_experts(groups: Any) -> list[Any]:
    found = list(groups) if isinstance(groups, (list, tuple)) else [groups]
    if any(getattr(p, "allreduce", True) is False for group in found for p in group["params"]):
        raise NotThere("deepspeed.moe (experts)")
    return found


PROVIDED: dict[str, Any] = {
    "deepspeed.git_version_info.torch_info": BUILT_FOR,
    "deepspeed.ops.__compatible_ops__": OPERATORS,
    "deepspeed.ops.op_builder.CPUAdamBuilder": _builder("cpu_adam"),
    "deepspeed.ops.op_builder.FusedAdamBuilder": _builder("fused_adam"),
    "deepspeed.ops.op_builder.FusedLambBuilder": _builder("lamb"),
    "deepspeed.ops.aio.AsyncIOBuilder": _builder("async_io"),
    "deepspeed.accelerator.is_current_accelerator_supported": lambda: True,
    "deepspeed.utils.torch.required_torch_version": _required_torch_version,
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum": OffloadDeviceEnum,
    "deepspeed.runtime.utils.see_memory_usage": lambda *_args, **_kwargs: None,
    "deepspeed.runtime.swap_tensor.MIN_SWAPPABLE_BYTES": 1 << 20,
    "deepspeed.runtime.config.ADAM_OPTIMIZER": "adam",
    "deepspeed.checkpoint.UNIVERSAL_CHECKPOINT_INFO": "universal_checkpoint_info",
    "deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer": (
        _groups_without_experts
    ),
}
"""Answers about the machine, spellings, and what is the identity for a model without experts.
Used where the adapter has no such name."""

LOOKED_AT_ON_ENGINES: dict[str, Any] = {
    "_get_optimizer_ckpt_name": lambda _self: NotThere("deepspeed.checkpoint (files of states)"),
    "sparse_tensor_module_names": frozenset(),
}
"""Fields of engines that helpers of the tests of checkpoints watch or compare, before they compare
the parameters of two engines: a method that must not be called, and a set that is empty in both."""
