"""The `_parameters` of a module whose parameters are offloaded.

What iterates (`parameters()`, `state_dict`, `load_state_dict`) meets the parameters at rest; what looks one up by name
inside forward (`self.weight`) meets the gathered one, gathered on the spot if no frame holds its unit: a parent that
uses `self.wte.weight` directly needs no registration. While a frame holds a unit its gathered parameters lie in the
slots themselves, so that torch.compile, which reads dicts in C, sees what forward uses.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, ValuesView
from typing import Any, NoReturn

import torch

from infinity._src.params.sharded_param import ShardedParameter
from infinity._src.params.unit import Param
from infinity.errors import ReplacedOutsideEngine

OnDemand = Callable[[Param], "torch.Tensor | None"]
Read = Callable[[Param], torch.Tensor]

# The life cycle's own way to a slot, past the methods below and as fast as a plain dict.
look = dict.get
put = dict.__setitem__


class ModuleParameters(dict[str, Any]):
    """A module's parameters by attribute name (see the module's docstring)."""

    __slots__ = ("at_rest", "load_next", "on_demand", "read", "save_next")

    def __init__(self, slots: dict[str, Any], on_demand: OnDemand, read: Read) -> None:
        super().__init__(slots)
        self.on_demand = on_demand  # the gathered parameter inside forward; None elsewhere
        self.read = read  # a CPU copy of a parameter's value
        self.at_rest: dict[str, ShardedParameter] = {
            name: value for name, value in slots.items() if isinstance(value, ShardedParameter)
        }
        # One-shot: the next iteration is torch's, over what to save or to load.
        self.save_next = False
        self.load_next = False

    # -- what modules and their users see ----------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        if type(value) is ShardedParameter:
            gathered = self.on_demand(value.infinity_link.param)
            if gathered is not None:
                return gathered
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """As `self[name]`, or `default`."""
        return self[name] if name in self else default  # noqa: SIM401  `self[name]` may gather

    def _outside(self) -> dict[str, Any]:
        return {**{name: dict.__getitem__(self, name) for name in self}, **self.at_rest}

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """(name, parameter at rest); once after `save_next` was set, (name, CPU copy)."""
        outside = self._outside()
        saves, self.save_next = self.save_next, False
        if saves:
            outside.update({name: self.read(value.infinity_link.param) for name, value in self.at_rest.items()})
        if self.load_next:
            self.load_next = False
            for value in self.at_rest.values():
                value.infinity_link.loading = True
        return outside.items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """The parameters at rest."""
        return self._outside().values()

    def copy(self) -> dict[str, Any]:
        """An ordinary dict of the parameters at rest."""
        return self._outside()

    def __setitem__(self, name: str, value: Any) -> None:
        mine = self.at_rest.get(name)
        if mine is not None and value is not mine and value is not mine.infinity_link.param.gathered:
            self._refuse(name, "assigning")
        if mine is None and isinstance(value, ShardedParameter):
            self.at_rest[name] = value  # tied to a parameter of another module; `__torch_function__` serves it
        if mine is None:
            put(self, name, value)

    def __delitem__(self, name: str) -> None:
        if name in self.at_rest:
            self._refuse(name, "deleting")
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a parameter that is not offloaded."""
        if name in self.at_rest:
            self._refuse(name, "removing")
        return super().pop(name, *default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As assigning one by one."""
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def clear(self) -> None:
        """Refused while a parameter is offloaded."""
        for name in self.at_rest:
            self._refuse(name, "removing")
        super().clear()

    def _refuse(self, name: str, verb: str) -> NoReturn:
        raise ReplacedOutsideEngine(
            f"{verb} {self.at_rest[name].infinity_link.param.name}: it would be replaced outside the engine, which "
            "would go on training the old one; change the module before `inf.offload`, or write values with "
            "`with inf.handle(model).gather(parameter): parameter.copy_(...)`"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        for value in self.at_rest.values():
            value.__reduce_ex__(protocol)  # raises, with the name
        return dict(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        for value in self.at_rest.values():
            value.__deepcopy__(memo)  # raises, with the name
        raise AssertionError("a ModuleParameters without offloaded parameters")
