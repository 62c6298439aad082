"""Leaf modules: all parameters of a leaf module are gathered together, whichever of its children
runs.

    flags    the script (`set_z3_leaf_modules`) or zero_optimization.leaf_module flags a leaf
    units    on several ranks each leaf is one unit, in addition to the blocks that the engine
             finds, since ranks may run different children of a leaf
    zeros    if only some of a leaf's parameters have gradients in a step, the remaining ones get
             zeros, as in DeepSpeed
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from infinity._src.params.discover import CONTAINERS, find_blocks
from infinity.compat.deepspeed.errors import DeepSpeedRefusal
from infinity.compat.deepspeed.zero.access import safe_set_full_grad

log = logging.getLogger("infinity")

Module = torch.nn.Module


def z3_leaf_module(model: Module) -> bool:
    """Return whether a module is flagged."""
    return bool(getattr(model, "_z3_leaf", False))


def z3_leaf_parameter(param: torch.nn.Parameter) -> bool:
    """Return whether a parameter has the attribute `ds_z3_leaf_module`."""
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
    """Flag modules by their qualified names. Returns (flagged modules, names without a module)."""
    return _set_by(model, module_names, lambda name, key: name == key, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: Module,
    module_name_suffixes: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[Module], list[str]]:
    """Flag modules by the ends of their qualified names. Returns (flagged modules, suffixes without
    a module).
    """
    return _set_by(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def flag_configured(model: Module, section: Mapping[str, Any]) -> None:
    """Flag the modules that zero_optimization.leaf_module names. Names without a module are only
    logged: one configuration may serve several models.
    """
    missing = [
        kind
        for kind in _listed(section.get("classes"))
        if not _set(model, [kind], True, raise_if_not_found=False)
    ]
    for key, flag in (
        ("names", set_z3_leaf_modules_by_name),
        ("name_suffixes", set_z3_leaf_modules_by_suffix),
    ):
        missing += flag(model, _listed(section.get(key)), raise_if_not_found=False)[1]
    if missing:
        log.warning("zero_optimization.leaf_module: the model has no %s", ", ".join(missing))


def _listed(names: str | Sequence[str] | None) -> Sequence[str]:
    return [names] if isinstance(names, str) else names or ()


def leaf_units(model: Module) -> list[str] | None:
    """Return the qualified names of the blocks that the engine finds and of the leaves, for
    `Policy(units=)`; None without leaves.

    Raises: DeepSpeedRefusal for a leaf that is a container.
    """
    names = {id(module): name for name, module in model.named_modules()}
    leaves = get_z3_leaf_modules(model)
    within = {id(below) for leaf in leaves for below in leaf.modules() if below is not leaf}
    for leaf in leaves:
        if id(leaf) in within:
            continue  # gathered with the leaf around it
        if isinstance(leaf, CONTAINERS):
            raise DeepSpeedRefusal(
                f"leaf module {names[id(leaf)]!r} is a {type(leaf).__name__}, which is never "
                "called: flag the module that contains it"
            )
    if not leaves:
        return None
    called = [leaf for leaf in leaves if not isinstance(leaf, CONTAINERS)]
    blocks = [*find_blocks(model, None, argument="units"), *called]
    return list(dict.fromkeys(names[id(block)] for block in blocks))


def fill_missing_grads(model: Module) -> None:
    """Set a gradient of zeros on a leaf's parameters without one, if other parameters of the leaf
    have gradients. Collective: all ranks then have gradients of the same parameters.
    """
    for leaf in get_z3_leaf_modules(model):
        params = [param for param in leaf.parameters() if param.requires_grad]
        lacking = [param for param in params if param.grad is None]
        if len(lacking) == len(params):
            continue
        for param in lacking:
            safe_set_full_grad(param, torch.zeros(param.shape, dtype=param.dtype))


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
