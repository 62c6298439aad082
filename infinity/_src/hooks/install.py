"""Putting parameters at rest into a module tree, and taking the engine's dicts out again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from infinity._src._torch_compat import DisableTorchFunctionSubclass, dynamo_disable
from infinity._src.hooks.module_params import ModuleParameters
from infinity._src.params import unsharded_param as gathered
from infinity._src.params.sharded_param import ShardedParameter
from infinity._src.params.unit import Param, Unit

if TYPE_CHECKING:
    from infinity._src.hooks.forward import Lifecycle


Hook = Callable[[torch.Tensor], None]
_CAPTURE_DEPTH = 3
"""How deep in containers a captured parameter is looked for."""


@dataclasses.dataclass(eq=False)
class Installed:
    """What was put where."""

    owned: dict[torch.nn.Module, ModuleParameters] = dataclasses.field(default_factory=dict)
    modules_of: dict[Unit, list[torch.nn.Module]] = dataclasses.field(default_factory=dict)
    # Users' hooks from before: to be registered after the one that drains, so that they find the stand-in.
    post_accumulate: dict[Param, list[Hook]] = dataclasses.field(default_factory=dict)


def install(model: torch.nn.Module, units: list[Unit], lifecycle: Lifecycle) -> Installed:
    """Make at-rest and gathered parameters for all of `units` and put the at-rest ones into their slots."""
    installed = Installed()
    replaced: dict[int, ShardedParameter] = {}
    originals: list[torch.Tensor] = []  # alive until the end, so that an id names one object
    for unit in units:
        for param in unit.params:
            module, attr = param.sites[0]
            if module._parameters[attr] is not None and module._parameters[attr].grad is not None:  # type: ignore[union-attr]
                raise ValueError(
                    f"{param.name} has a gradient, which offloading would lose: call `model.zero_grad()` first"
                )
    for unit in units:
        _install_unit(unit, lifecycle, installed, replaced, originals)
    _replace_captured(model, replaced)
    in_forward = dynamo_disable(lifecycle.in_forward)
    for unit in units:
        modules = list({module: None for param in unit.params for module, _ in param.sites})
        installed.modules_of[unit] = modules
        for module in modules:
            if module not in installed.owned:
                installed.owned[module] = ModuleParameters(module._parameters, in_forward, lifecycle.unsharder.read)
                module.__dict__["_parameters"] = installed.owned[module]
    return installed


def _install_unit(
    unit: Unit,
    lifecycle: Lifecycle,
    installed: Installed,
    replaced: dict[int, ShardedParameter],
    originals: list[torch.Tensor],
) -> None:
    first = {param: _original(param) for param in unit.params}
    gathered.bind(unit, requires_grad={param: original.requires_grad for param, original in first.items()})
    for param, original in first.items():
        at_rest = ShardedParameter(param, param.flat.tensor.device, original.requires_grad, lifecycle)
        hooks = _carry_over(original, at_rest, param)
        if hooks:
            installed.post_accumulate[param] = hooks
        param.at_rest = at_rest
        for module, attr in param.sites:
            site = module._parameters[attr]
            assert site is not None
            originals.append(site)
            replaced[id(site)] = at_rest
            setattr(module, attr, at_rest)  # not by the dict: nn.RNNBase keeps a list of its own


def _original(param: Param) -> torch.nn.Parameter:
    module, attr = param.sites[0]
    original = module._parameters[attr]
    assert original is not None, f"{param.name} is not in its module"
    return original


def _carry_over(original: torch.nn.Parameter, at_rest: ShardedParameter, param: Param) -> list[Hook]:
    """Attributes and hooks that users put on the original parameter. Returns its post-accumulate hooks."""
    for target in (at_rest, param.gathered):
        target.__dict__.update(original.__dict__)
    hooks: Any = original
    for hook in (hooks._backward_hooks or {}).values():
        at_rest.register_hook(hook)
    return list((hooks._post_accumulate_grad_hooks or {}).values())


def _replace_captured(model: torch.nn.Module, replaced: dict[int, ShardedParameter]) -> None:
    """Modules that keep lists, tuples or dicts of their parameters get those at rest: else they train old copies."""
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if name.startswith("_parameters") or name == "_modules":
                continue
            swapped = _swap(value, replaced)
            if swapped is not value:
                module.__dict__[name] = swapped


def _swap(value: Any, replaced: dict[int, ShardedParameter], depth: int = 0) -> Any:
    if isinstance(value, torch.Tensor):
        return replaced.get(id(value), value)
    if depth == _CAPTURE_DEPTH:
        return value
    if type(value) is list:
        for index, item in enumerate(value):
            value[index] = _swap(item, replaced, depth + 1)
    elif type(value) is tuple:
        parts = [_swap(item, replaced, depth + 1) for item in value]
        if any(new is not old for new, old in zip(parts, value, strict=True)):
            return tuple(parts)
    elif type(value) is dict:
        for key, item in list(value.items()):
            value[key] = _swap(item, replaced, depth + 1)
    return value


def uninstall(installed: Installed) -> None:
    """Put ordinary dicts back; the at-rest parameters stay in their slots."""
    for module, parameters in installed.owned.items():
        if module.__dict__.get("_parameters") is parameters:
            module.__dict__["_parameters"] = parameters.copy()


def part(params: Iterable[Param]) -> None:
    """Take from parameters what would outlive the engine, or keep the model alive."""
    for param in params:
        if param.grad is not None:
            param.grad.empty()
            param.grad.guard(None)
            param.grad.move_to(torch.empty(0, dtype=param.grad.dtype), None)
            param.at_rest.grad = None
        for leaf in (param.gathered, param.at_rest):
            # These hooks hold the engine from C++, where the garbage collector does not look.
            with DisableTorchFunctionSubclass():
                hooks: Any = leaf._post_accumulate_grad_hooks
            if hooks:
                hooks.clear()
