"""Module parameters: the dict that a module with offloaded parameters has as `_parameters`, and its
installation.

Iteration (`parameters()`, `state_dict`, `load_state_dict`) yields the sharded parameters. Lookup by
name inside forward (`self.weight`) yields the gathered parameter. If no frame holds its unit, the
lookup gathers the unit: a parent that uses `self.wte.weight` directly needs no registration. While
a frame holds a unit, its gathered parameters lie in the dict itself, so that torch.compile, which
reads dicts in C, sees the tensors that forward uses.

Forward may take a parameter out of the dict for a time: `torch.nn.utils.parametrize` moves it into
a separate module, as PEFT does around each call of a layer with `target_parameters`, and
`torch.func.functional_call` puts another tensor in its place. The same parameter must be back when
forward leaves the unit, or `UnitRefs.release` raises. Outside of forward, to take a parameter out
raises at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, ItemsView, Iterable, ValuesView
from typing import Any, NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from infinity._src.base.sizes import format_size
from infinity._src.base.torch_compat import (
    DisableTorchFunctionSubclass,
    dynamo_disable,
    gradient_node,
)
from infinity._src.memory.ledger import memory_left_bytes
from infinity._src.params import unsharded_param as gathered
from infinity._src.params.aliases import find_aliases
from infinity._src.params.sharded_param import ParamHost, Rollback, ShardedParameter, ShardedView
from infinity._src.params.unit import Param, Unit, objects_at
from infinity.errors import ParameterReleased, ReplacedOutsideEngine

OnDemand = Callable[[Param], "torch.Tensor | None"]
Read = Callable[[Param], torch.Tensor]

# With these `UnitRefs` bypasses the methods of `ModuleParameters`, at the speed of a plain dict.
look = dict.get
put = dict.__setitem__


class ModuleParameters(dict[str, Any]):
    """Parameters of a module by attribute name.

    on_demand: returns the gathered parameter inside forward, None elsewhere. read: returns a CPU
    copy of a parameter's value.
    """

    __slots__ = ("at_rest", "load_next", "on_demand", "read", "save_next", "taken")

    def __init__(self, slots: dict[str, Any], on_demand: OnDemand, read: Read) -> None:
        super().__init__(slots)
        self.on_demand = on_demand
        self.read = read
        self.at_rest: dict[str, ShardedParameter] = {
            name: value for name, value in slots.items() if isinstance(value, ShardedParameter)
        }
        self.taken: set[str] = set()  # names in `at_rest` that forward has taken out or replaced
        # Set for one iteration: torch's state_dict or load_state_dict iterates next.
        self.save_next = False
        self.load_next = False

    # -- the dictionary as modules and users see it ------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        # While a frame holds the unit, the dict has the gathered parameter instead.
        if type(value) is ShardedParameter:
            gathered = self.on_demand(value.infinity_link.param)
            if gathered is not None:
                return gathered
        return value

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  `self[name]` may gather

    def _outside(self) -> dict[str, Any]:
        # Sharded parameters replace gathered ones: iteration must not depend on a running forward.
        slots = {name: dict.__getitem__(self, name) for name in self}
        return {**slots, **self._in_place()}

    def _in_place(self) -> dict[str, ShardedParameter]:
        if not self.taken:
            return self.at_rest
        return {name: value for name, value in self.at_rest.items() if name not in self.taken}

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Return pairs (name, sharded parameter); the first time after `save_next` was set, pairs
        (name, CPU copy)."""
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
        return self._outside().values()

    def copy(self) -> dict[str, Any]:
        return self._outside()

    def __setitem__(self, name: str, value: Any) -> None:
        mine = self.at_rest.get(name)
        if mine is None:
            if isinstance(value, ShardedParameter):
                # Tied to a parameter of another module; `__torch_function__` serves lookups of it.
                self.at_rest[name] = value
            put(self, name, value)
        elif value is not mine and value is not mine.infinity_link.param.gathered:
            self._take(name, "assigning")
            put(self, name, value)
        elif name in self.taken:
            self.taken.discard(name)
            # Not the gathered parameter: only `UnitRefs` puts that here, and removes it again.
            put(self, name, mine)

    def __delitem__(self, name: str) -> None:
        if name in self.at_rest:
            self._take(name, "deleting")
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a parameter that is not offloaded, or, inside forward, take an offloaded one out.
        """
        if name in self.at_rest:
            self._take(name, "removing")
        value = self.get(name)  # the gathered one
        found = super().pop(name, *default)
        return found if value is None else value

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def clear(self) -> None:
        for name in self.at_rest:
            self._refuse(name, "removing")
        super().clear()

    def _take(self, name: str, verb: str) -> None:
        """Record that forward takes a parameter out of the dict. Raises: ReplacedOutsideEngine if
        no forward runs."""
        param = self.at_rest[name].infinity_link.param
        # `on_demand` holds the unit, so that its release checks for the parameter.
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


@dataclasses.dataclass(eq=False)
class Installed:
    """Record of the installation: the dicts that were replaced, and the hooks that users had."""

    owned: dict[torch.nn.Module, ModuleParameters] = dataclasses.field(default_factory=dict)
    modules_of: dict[Unit, list[torch.nn.Module]] = dataclasses.field(default_factory=dict)
    # Functions that run the users' hooks. They are registered after the engine's hook, so that
    # users' hooks find the proxy in `p.grad`.
    post_accumulate: dict[Param, Hook] = dataclasses.field(default_factory=dict)


def install(
    model: torch.nn.Module,
    units: list[Unit],
    *,
    owner: ParamHost,
    on_demand: OnDemand,
    read: Read,
    rollback: Rollback,
) -> Installed:
    """Turn the parameters of all `units` into sharded parameters, and tensors that share their
    memory into views of these, in place: the Python objects stay. Make the gathered parameters.
    on_demand, read: see `ModuleParameters`. Raises: as `find_aliases` and `Rollback.replace`."""
    installed = Installed()
    # Autocast's cache has weak references to the weights, which would prevent the exchange of
    # objects. The next use casts a weight again.
    torch.clear_autocast_cache()
    aliases = find_aliases(model)
    for unit in units:
        _install_unit(unit, owner, installed, rollback)
    for alias in aliases:
        sharded = alias.of
        assert isinstance(sharded, ShardedParameter)
        rollback.replace(alias.tensor, ShardedView(alias, sharded))
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
    unit: Unit, owner: ParamHost, installed: Installed, rollback: Rollback
) -> None:
    first = {param: objects_at(param.sites)[0] for param in unit.params}
    gathered.bind(
        unit, requires_grad={param: original.requires_grad for param, original in first.items()}
    )
    for param in unit.params:
        for original in objects_at(param.sites):
            hooks = _carry_over(original, param)
            if hooks is not None and original is first[param]:
                installed.post_accumulate[param] = hooks
            _refuse_backward(original, param.name, rollback)
            device, requires_grad = param.flat.tensor.device, original.requires_grad
            rollback.replace(original, ShardedParameter(param, device, requires_grad, owner))
        at_rest: Any = first[param]
        param.at_rest = at_rest
        for module, attr in param.sites:
            if module._parameters[attr] is not at_rest:
                # `setattr` instead of the dict: nn.RNNBase also has its weights in a list.
                setattr(module, attr, at_rest)


def _carry_over(original: torch.nn.Parameter, param: Param) -> Hook | None:
    """Give the gathered parameter the attributes that users set on the original, and the original's
    dict of hooks, from which users' handles remove hooks. Returns a function that runs the
    original's post-accumulate hooks, or None."""
    hooks: Any = original
    param.gathered.__dict__.update(original.__dict__)
    if hooks._backward_hooks is not None:
        param.gathered._backward_hooks = hooks._backward_hooks
    after: dict[int, Hook] | None = hooks._post_accumulate_grad_hooks
    if after is None:
        return None

    def run(parameter: torch.Tensor) -> None:
        for hook in tuple(after.values()):
            hook(parameter)

    return run


def _refuse_backward(original: torch.Tensor, name: str, rollback: Rollback) -> None:
    """Make backward raise in graphs that were made with the original parameter."""
    node = gradient_node(original)
    if node is None:
        return

    def refuse(*_grads: object) -> None:
        raise ParameterReleased(
            f"backward of a graph that was made before inf.offload: the gradient of {name} would "
            "reach memory that the parameter no longer has; run forward again, after inf.offload"
        )

    rollback.refuse(node, refuse)


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
            # The loop may hold the proxy, and so the accumulator, whose memory must be freed.
            param.grad.move_to(torch.empty(0, dtype=param.grad.dtype), None)
            param.at_rest.grad = None
        for leaf in (param.gathered, param.at_rest):
            # These hooks refer to the engine from C++, which the garbage collector does not see.
            with DisableTorchFunctionSubclass():
                hooks: Any = leaf._post_accumulate_grad_hooks
            if hooks:
                hooks.clear()


# -- state_dict and load_state_dict ----------------------------------------------------------------
# `model.state_dict()`, and everything that calls it (`save_pretrained`,
# `torch.save(model.state_dict(), ...)`), gets an ordinary CPU copy of every parameter, read one by
# one; tied names share one copy. With `keep_vars=True` it gets the sharded parameters themselves.
# `load_state_dict` writes every parameter to its tier, with torch's checks of names and shapes;
# `assign=True` is refused, as it would replace the parameters outside the engine.


Check = Callable[[int], None]
"""Called with the bytes of the CPU copies before any is made. Raises, with the alternative, when
they do not fit into memory."""


def check_copies(size_bytes: int) -> None:
    """Raise MemoryError when the CPU copies of a `state_dict()` do not fit into the free memory."""
    left = memory_left_bytes()
    if size_bytes > left:
        raise MemoryError(
            f"state_dict() would copy {format_size(size_bytes)} of parameters into memory and "
            f"{format_size(left)} are left; inf.export_safetensors(model, directory) streams them "
            "to files"
        )


def hook_state_dict(
    model: torch.nn.Module,
    owned: dict[torch.nn.Module, ModuleParameters],
    params: Iterable[Param],
    check: Check | None,
) -> list[RemovableHandle]:
    """Install the hooks on the modules that own offloaded parameters. Returns their handles."""
    handles: list[RemovableHandle] = []
    total_bytes = sum(param.numel * param.dtype.itemsize for param in params)

    def before_root(_module: torch.nn.Module, _prefix: str, keep_vars: bool) -> None:
        # Before the first copy, so that no partial state dict fills the memory.
        if check is not None and not keep_vars:
            check(total_bytes)

    def before_root_load(_module: torch.nn.Module, *args: Any) -> None:
        # torch passes (state_dict, prefix, local_metadata, ...).
        _refuse_assign(args[2])

    handles.append(model.register_state_dict_pre_hook(before_root))
    handles.append(model.register_load_state_dict_pre_hook(before_root_load))
    for module, parameters in owned.items():
        handles.extend(_hook_module(module, parameters, check))
    return handles


def _refuse_assign(local_metadata: dict[str, Any]) -> None:
    if local_metadata.get("assign_to_params_buffers", False):
        raise ValueError(
            "load_state_dict(assign=True) would replace the offloaded parameters outside the "
            "engine; without `assign=True` the values are written to the parameters' tiers"
        )


def _hook_module(
    module: torch.nn.Module, parameters: ModuleParameters, check: Check | None
) -> list[RemovableHandle]:
    own_bytes = sum(
        value.infinity_link.param.numel * value.dtype.itemsize
        for value in parameters.at_rest.values()
    )
    tied = {
        name: value.infinity_link.param
        for name, value in parameters.at_rest.items()
        if len(value.infinity_link.param.names) > 1
    }

    def before_save(_module: torch.nn.Module, _prefix: str, keep_vars: bool) -> None:
        if keep_vars:
            return
        # The root's hook does not run when a submodule is saved alone.
        if check is not None:
            check(own_bytes)
        parameters.save_next = True

    def after_save(
        _module: torch.nn.Module, destination: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        for name, param in tied.items():
            _share_copy(destination, prefix + name, param)

    def before_load(_module: torch.nn.Module, *args: Any) -> None:
        _refuse_assign(args[2])
        parameters.load_next = True

    def after_load(_module: torch.nn.Module, _incompatible: Any) -> None:
        # For a parameter that the state dict lacks the flag is still set, and the next `copy_` to
        # it will be the user's.
        parameters.load_next = False
        for value in parameters.at_rest.values():
            value.infinity_link.loading = False

    handles = [
        module.register_state_dict_pre_hook(before_save),
        module.register_load_state_dict_pre_hook(before_load),
        module.register_load_state_dict_post_hook(after_load),
    ]
    if tied:
        handles.append(module.register_state_dict_post_hook(after_save))
    return handles


def _share_copy(destination: dict[str, Any], key: str, param: Param) -> None:
    """Replace the tensor at `key` by the copy under another name of the parameter: tied names share
    one tensor, as in any state dict."""
    for own in param.names:
        # `key` may have a prefix: the model can be a part of the model that is saved.
        if not key.endswith(own):
            continue
        root = key[: len(key) - len(own)]
        for other in param.names:
            if other != own and root + other in destination:
                destination[key] = destination[root + other]
                return
