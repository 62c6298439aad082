"""Leaf modules: flags on modules whose parameters DeepSpeed gathers together.

The engine finds its units, and experts in them, by itself. Flags are kept for the scripts that ask
for them, and nothing else depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from infinity.compat.deepspeed.errors import DeepSpeedRefusal

Module = torch.nn.Module


def z3_leaf_module(model: Module) -> bool:
    """Return whether a module is flagged."""
    return bool(getattr(model, "_z3_leaf", False))


def z3_leaf_parameter(param: torch.nn.Parameter) -> bool:
    """Return whether a parameter belongs to a flagged module, as noted on it."""
    return hasattr(param, "ds_z3_leaf_module")


def get_z3_leaf_modules(model: Module) -> list[Module]:
    """Return the flagged modules of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: Module, flag: bool) -> None:
    """Set the flag of one module."""
    model._z3_leaf = flag  # type: ignore[assignment]


def set_z3_leaf_modules(
    model: Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[Module]:
    """Flag the modules of these classes (or their names), and return them. Raises: ValueError if
    there is none.
    """
    return _set(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[Module]:
    """Remove the flags of the modules of these classes, and return them."""
    return _set(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[Module], list[str]]:
    """Flag modules by their qualified names. Returns them, and the names that no module has."""
    return _set_by(model, module_names, lambda name, key: name == key, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: Module,
    module_name_suffixes: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[Module], list[str]]:
    """Flag modules by the ends of their qualified names. Returns them, and the ends that no name
    has.
    """
    return _set_by(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def _set(
    model: Module, classes: Sequence[type | str], flag: bool, raise_if_not_found: bool
) -> list[Module]:
    wrong = [each for each in classes if not isinstance(each, (type, str))]
    if wrong:
        raise DeepSpeedRefusal(f"leaf_module_classes={wrong!r}: give classes, or their names")
    found = [module for module in model.modules() if any(_is(module, each) for each in classes)]
    if not found and raise_if_not_found:
        raise DeepSpeedRefusal(f"No modules of type {classes} found in model {model}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is(module: Module, wanted: type | str) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    kind = type(module)
    return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")


def _set_by(
    model: Module,
    keys: Sequence[str],
    fits: Callable[[str, str], bool],
    flag: bool,
    raise_if_not_found: bool,
) -> tuple[list[Module], list[str]]:
    named = list(model.named_modules())
    found: dict[int, Module] = {}
    missing = []
    for key in keys:
        fitting = [module for name, module in named if fits(name, key)]
        found.update({id(module): module for module in fitting})
        if not fitting:
            missing.append(key)
    if missing and raise_if_not_found:
        raise DeepSpeedRefusal(f"No modules named {missing} found in model {model}")
    for module in found.values():
        set_z3_leaf_module(module, flag)
    return list(found.values()), missing
