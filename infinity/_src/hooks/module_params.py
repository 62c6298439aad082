"""Module parameters: the dict that a module with offloaded parameters has as `_parameters`, and its
installation.

Iteration (`parameters()`, `state_dict`, `load_state_dict`) yields the sharded parameters. Lookup by
name inside forward (`self.weight`) yields the gathered one, gathered on the spot if no frame holds
its unit: a parent that uses `self.wte.weight` directly needs no registration. While a frame holds a
unit its gathered parameters lie in the dict itself, so that torch.compile, which reads dicts in C,
sees the tensors that forward uses.

Forward may take a parameter out of its slot for a time: `torch.nn.utils.parametrize` moves it into
a module of its own, as PEFT does around each call of a layer with `target_parameters`, and
`torch.func.functional_call` puts another tensor in its place. The same parameter must be back when
forward leaves the unit, or `UnitRefs.release` raises. Outside of forward taking one out raises at
once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, ItemsView, Iterable, ValuesView
from typing import Any, NoReturn

import torch

from infinity._src._torch_compat import DisableTorchFunctionSubclass, dynamo_disable
from infinity._src.params import unsharded_param as gathered
from infinity._src.params.sharded_param import ParamHost, ShardedParameter
from infinity._src.params.unit import Param, Unit
from infinity.errors import ReplacedOutsideEngine

OnDemand = Callable[[Param], "torch.Tensor | None"]
Read = Callable[[Param], torch.Tensor]

# `UnitRefs` goes past the methods below: as fast as a plain dict.
look = dict.get
put = dict.__setitem__


class ModuleParameters(dict[str, Any]):
    """Parameters of a module by attribute name (see the module's docstring).

    on_demand: returns the gathered parameter inside forward, None elsewhere. read: returns a CPU
    copy of a parameter's value.
    """

    __slots__ = ("at_rest", "load_next", "on_demand", "read", "save_next", "taken")

    def __init__(self, slots: dict[str, Any], on_demand: OnDemand, read: Read) -> None:
        super().__init__(slots)
        self.on_demand = on_demand  # the gathered parameter inside forward; None elsewhere
        self.read = read  # a CPU copy of a parameter's value
        self.at_rest: dict[str, ShardedParameter] = {
            name: value for name, value in slots.items() if isinstance(value, ShardedParameter)
        }
        self.taken: set[str] = set()  # names in `at_rest` whose slots forward has emptied or lent
        # One-shot: the next iteration is torch's, over what to save or to load.
        self.save_next = False
        self.load_next = False

    # -- the dictionary as modules and users see it ------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        # A gathered parameter lies in the dict itself: no look-up is needed then.
        if type(value) is ShardedParameter:
            gathered = self.on_demand(value.infinity_link.param)
            if gathered is not None:
                return gathered
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """Return `self[name]`, or `default`."""
        return self[name] if name in self else default  # noqa: SIM401  `self[name]` may gather

    def _outside(self) -> dict[str, Any]:
        # At-rest parameters over gathered ones: iteration must not depend on a running forward.
        slots = {name: dict.__getitem__(self, name) for name in self}
        return {**slots, **self._in_place()}

    def _in_place(self) -> dict[str, ShardedParameter]:
        """Return the sharded parameters but for those that forward has taken out."""
        if not self.taken:
            return self.at_rest
        return {name: value for name, value in self.at_rest.items() if name not in self.taken}

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Return pairs (name, sharded parameter); once after `save_next`, (name, CPU copy)."""
        outside = self._outside()
        saves, self.save_next = self.save_next, False
        if saves:
            outside.update(
                {
                    name: self.read(value.infinity_link.param)
                    for name, value in self._in_place().items()
                }
            )
        if self.load_next:
            self.load_next = False
            for value in self.at_rest.values():
                value.infinity_link.loading = True
        return outside.items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """Return the sharded parameters."""
        return self._outside().values()

    def copy(self) -> dict[str, Any]:
        """Return an ordinary dict of the sharded parameters."""
        return self._outside()

    def __setitem__(self, name: str, value: Any) -> None:
        mine = self.at_rest.get(name)
        if mine is None:
            if isinstance(value, ShardedParameter):
                # Tied to a parameter of another module; `__torch_function__` serves it.
                self.at_rest[name] = value
            put(self, name, value)
        elif value is not mine and value is not mine.infinity_link.param.gathered:
            self._take(name, "assigning")
            put(self, name, value)
        elif name in self.taken:
            self.taken.discard(name)
            # Not the gathered one, which only `UnitRefs` may put here: it takes it away again.
            put(self, name, mine)

    def __delitem__(self, name: str) -> None:
        if name in self.at_rest:
            self._take(name, "deleting")
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a parameter that is not offloaded, or, in forward, take one out."""
        if name in self.at_rest:
            self._take(name, "removing")
        value = self.get(name)  # the gathered one
        found = super().pop(name, *default)
        return found if value is None else value

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Assign one by one."""
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def clear(self) -> None:
        """Raise while a parameter is offloaded."""
        for name in self.at_rest:
            self._refuse(name, "removing")
        super().clear()

    def _take(self, name: str, verb: str) -> None:
        """Note that forward takes a parameter out of its slot. Raises: ReplacedOutsideEngine where
        no forward runs."""
        param = self.at_rest[name].infinity_link.param
        # Holds the unit, so that it is released, and the slot looked at, when forward leaves it.
        if self.on_demand(param) is None:
            self._refuse(name, verb)
        self.taken.add(name)
        param.unit.taken = True

    def _refuse(self, name: str, verb: str) -> NoReturn:
        raise ReplacedOutsideEngine(
            f"{verb} {self.at_rest[name].infinity_link.param.name}: it would be replaced outside "
            "the engine, which would go on training the old one; change the module before "
            "`inf.offload`, call torch.func.functional_call inside of the forward of a module "
            "around it, or write values with `with inf.handle(model).gather(parameter): "
            "parameter.copy_(...)`"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        for value in self.at_rest.values():
            value.__reduce_ex__(protocol)  # raises, with the name
        return dict(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        for value in self.at_rest.values():
            value.__deepcopy__(memo)  # raises, with the name
        raise AssertionError("a ModuleParameters without offloaded parameters")


Hook = Callable[[torch.Tensor], None]
_CAPTURE_DEPTH = 3
"""Depth of nested containers to which captured parameters are searched for."""


@dataclasses.dataclass(eq=False)
class Installed:
    """Record of the installation: the dicts that were replaced, and the hooks that users had."""

    owned: dict[torch.nn.Module, ModuleParameters] = dataclasses.field(default_factory=dict)
    modules_of: dict[Unit, list[torch.nn.Module]] = dataclasses.field(default_factory=dict)
    # Hooks that users had registered. They are registered again after the engine's own, so that
    # they find the proxy in `p.grad`.
    post_accumulate: dict[Param, list[Hook]] = dataclasses.field(default_factory=dict)


def install(
    model: torch.nn.Module, units: list[Unit], *, owner: ParamHost, on_demand: OnDemand, read: Read
) -> Installed:
    """Make sharded and gathered parameters for all of `units`, and put the sharded ones into their
    modules. on_demand, read: see `ModuleParameters`."""
    installed = Installed()
    replaced: dict[int, ShardedParameter] = {}
    originals: list[torch.Tensor] = []  # kept alive to the end: `replaced` is keyed by id()
    # All are checked before the first is replaced: an error leaves the model as it was.
    for unit in units:
        for param in unit.params:
            module, attr = param.sites[0]
            original = module._parameters[attr]
            if original is not None and original.grad is not None:
                raise ValueError(
                    f"{param.name} has a gradient, which offloading would lose: call "
                    "`model.zero_grad()` first"
                )
    for unit in units:
        _install_unit(unit, owner, installed, replaced, originals)
    _replace_captured(model, replaced)
    on_demand = dynamo_disable(on_demand)
    for unit in units:
        modules = list({module: None for param in unit.params for module, _ in param.sites})
        installed.modules_of[unit] = modules
        for module in modules:
            if module not in installed.owned:
                installed.owned[module] = ModuleParameters(module._parameters, on_demand, read)
                module.__dict__["_parameters"] = installed.owned[module]
    return installed


def _install_unit(
    unit: Unit,
    owner: ParamHost,
    installed: Installed,
    replaced: dict[int, ShardedParameter],
    originals: list[torch.Tensor],
) -> None:
    first = {param: _original(param) for param in unit.params}
    gathered.bind(
        unit, requires_grad={param: original.requires_grad for param, original in first.items()}
    )
    for param, original in first.items():
        at_rest = ShardedParameter(param, param.flat.tensor.device, original.requires_grad, owner)
        hooks = _carry_over(original, at_rest, param)
        if hooks:
            installed.post_accumulate[param] = hooks
        param.at_rest = at_rest
        for module, attr in param.sites:
            site = module._parameters[attr]
            assert site is not None
            originals.append(site)
            replaced[id(site)] = at_rest
            setattr(module, attr, at_rest)  # not in the dict: nn.RNNBase keeps a list besides


def _original(param: Param) -> torch.nn.Parameter:
    module, attr = param.sites[0]
    original = module._parameters[attr]
    assert original is not None, f"{param.name} is not in its module"
    return original


def _carry_over(
    original: torch.nn.Parameter, at_rest: ShardedParameter, param: Param
) -> list[Hook]:
    """Copy attributes and hooks that users put on the original parameter. Returns its
    post-accumulate hooks."""
    for target in (at_rest, param.gathered):
        target.__dict__.update(original.__dict__)
    hooks: Any = original
    for hook in (hooks._backward_hooks or {}).values():
        at_rest.register_hook(hook)
    return list((hooks._post_accumulate_grad_hooks or {}).values())


def _replace_captured(model: torch.nn.Module, replaced: dict[int, ShardedParameter]) -> None:
    """Replace parameters in lists, tuples and dicts that modules keep. A module would train the old
    ones otherwise."""
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
    """Put ordinary dicts back; the sharded parameters stay in them."""
    for module, parameters in installed.owned.items():
        if module.__dict__.get("_parameters") is parameters:
            module.__dict__["_parameters"] = parameters.copy()


def detach_params(params: Iterable[Param]) -> None:
    """Empty the gradient accumulators and the hooks of parameters, which would outlive the engine
    or keep the model alive."""
    for param in params:
        if param.grad is not None:
            param.grad.empty()
            param.grad.guard(None)
            # The loop may hold the proxy, and through it the accumulator: its memory must not live
            # on.
            param.grad.move_to(torch.empty(0, dtype=param.grad.dtype), None)
            param.at_rest.grad = None
        for leaf in (param.gathered, param.at_rest):
            # These hooks hold the engine from C++, where the garbage collector does not look.
            with DisableTorchFunctionSubclass():
                hooks: Any = leaf._post_accumulate_grad_hooks
            if hooks:
                hooks.clear()
