"""Rig for the tests of the life cycle: a residency in RAM, units by hand, and a plain loop to
compare with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from infinity._src.hooks.forward import Lifecycle
from infinity._src.memory.flat_layout import plan_flat
from infinity._src.params import unsharded_param as gathered
from infinity._src.params.prefetch_schedule import PassTracker
from infinity._src.params.sharded_param import ShardedParameter
from infinity._src.params.unit import Flat, Param, Unit, UnitState

CPU = torch.device("cpu")


class DrainedGrad(torch.Tensor):
    """Stands for the proxy: an accumulated gradient that is not a plain tensor."""


class RamUnsharder:
    """A real residency that keeps CPU copies, and takes gradients.

    eager: a unit is evicted the moment it is idle (the harshest there is); else never.
    """

    def __init__(self, units: Sequence[Unit], *, eager: bool = True) -> None:
        self.units = list(units)
        self.eager = eager
        self.copies: dict[Param, torch.Tensor] = {}
        self.filled: dict[Unit, int] = {}  # the generation that the flats hold
        self.events: list[str] = []
        self.done: list[str] = []
        self.peak_numel = 0
        self.writes = 0

    def adopt(self) -> None:
        for unit in self.units:
            for param in unit.params:
                module, attr = param.sites[0]
                self.copies[param] = module._parameters[attr].detach().clone()

    @property
    def gathered_numel(self) -> int:
        return sum(
            param.numel
            for unit in self.units
            if unit.state is UnitState.UNSHARDED
            for param in unit.params
        )

    def unshard(self, unit: Unit) -> None:
        self.events.append(f"demand {unit.name}")
        if unit.state is UnitState.UNSHARDED and self.filled.get(unit) == unit.generation:
            return
        gathered.allocate(unit)
        unit.move_to(UnitState.PENDING)
        with torch.no_grad():
            for param in unit.params:
                target = param.flat.tensor[param.offset : param.offset + param.numel]
                target.copy_(self.copies[param].reshape(-1))
        unit.move_to(UnitState.UNSHARDED)
        self.filled[unit] = unit.generation
        self.peak_numel = max(self.peak_numel, self.gathered_numel)

    def mixes(self, unit: Unit, *, window: bool) -> bool:
        return False

    def trains_on_rest(self, unit: Unit) -> bool:
        return True

    def release(self, unit: Unit) -> None:
        self.events.append(f"idle {unit.name}")
        if self.eager:
            self.invalidate(unit)

    def invalidate(self, unit: Unit) -> None:
        if unit.state is not UnitState.SHARDED:
            gathered.evict(unit)

    def accumulate_grad(self, param: Param, grad: torch.Tensor) -> None:
        assert grad.shape == param.shape
        have = param.at_rest.grad
        total = grad.clone() if have is None else have.as_subclass(torch.Tensor).add_(grad)
        param.at_rest.grad = total.as_subclass(DrainedGrad)

    def assign(self, param: Param, grad: torch.Tensor) -> None:
        param.at_rest.grad = None
        self.accumulate_grad(param, grad)

    def unit_done(self, unit: Unit) -> None:
        self.done.append(unit.name)

    def read(self, param: Param) -> torch.Tensor:
        return self.copies[param].clone()

    def written(self, here: list[bool]) -> list[bool]:
        return here

    def write_alike(self, param: Param, value: torch.Tensor) -> None:
        self.writes += 1
        with torch.no_grad():
            self.copies[param] = value.detach().to(param.dtype, copy=True).reshape(param.shape)
        param.unit.generation += 1

    def expect_forward(self, follows: bool) -> None:
        """Nothing is prefetched."""

    def unfrozen(self, _param: Param) -> None:
        """Nothing: no optimizer of the engine waits for it."""

    def forward_start(self) -> None:
        self.events.append("forward_start")

    def forward_end(self) -> None:
        self.events.append("forward_end")

    def backward_start(self) -> None:
        self.events.append("backward_start")

    def backward_end(self) -> None:
        self.events.append("backward_end")

    def broke(self, where: str, error: BaseException) -> None:
        """Do nothing: there are no other ranks to notify."""

    def reset(self) -> None:
        self.events.append("reset")


def make_units(model: nn.Module, groups: dict[str, Sequence[nn.Module]]) -> list[Unit]:
    """Units by hand: name -> modules. Parameters in none of them form a last unit without
    modules."""
    sites: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    names: dict[nn.Parameter, list[str]] = {}
    for prefix, module in model.named_modules():
        for attr, parameter in module._parameters.items():
            if parameter is not None:
                sites.setdefault(parameter, []).append((module, attr))
                names.setdefault(parameter, []).append(f"{prefix}.{attr}" if prefix else attr)
    members: list[tuple[str, tuple[nn.Module, ...], list[nn.Parameter]]] = []
    taken: set[nn.Parameter] = set()
    for name, modules in groups.items():
        mine = [p for module in modules for p in module.parameters() if p not in taken]
        mine = list(dict.fromkeys(mine))
        taken.update(mine)
        members.append((name, tuple(modules), mine))
    rest = [p for p in sites if p not in taken]
    if rest:
        members.append(("rest", (), rest))
    units = []
    index = 0
    for name, modules, parameters in members:
        if not parameters:
            continue
        unit = Unit(len(units), name, modules)
        units.append(unit)
        kinds = dict.fromkeys((p.dtype, p.requires_grad) for p in parameters)
        for dtype, trainable in kinds:
            mine = [p for p in parameters if (p.dtype, p.requires_grad) == (dtype, trainable)]
            layout = plan_flat(tuple(p.numel() for p in mine), dtype.itemsize)
            flat = Flat(
                unit,
                len(unit.flats),
                dtype,
                trainable,
                layout,
                gathered.empty_flat(layout, dtype, CPU),
            )
            unit.flats.append(flat)
            for slot, p in enumerate(mine):
                param = Param(
                    index, names[p][0], tuple(names[p]), sites[p], p.shape, dtype, p.numel(),
                    layout.offsets[slot], flat, unit, slot,
                )  # fmt: skip
                index += 1
                flat.params.append(param)
                unit.params.append(param)
    return units


class Rig:
    """An offloaded model and a plain copy of it, and steps for both."""

    def __init__(
        self,
        model: nn.Module,
        groups: Callable[[nn.Module], dict[str, Sequence[nn.Module]]],
        *,
        eager: bool = True,
        **options: Any,
    ) -> None:
        self.plain = copy.deepcopy(model)
        self.model = model
        self.units = make_units(model, groups(model))
        self.unsharder = RamUnsharder(self.units, eager=eager)
        self.unsharder.adopt()
        self.lifecycle: Lifecycle = Lifecycle(
            model,
            self.units,
            self.unsharder,
            self.unsharder,
            PassTracker(),
            tier="nvme",
            **options,
        )
        self.params = {param.name: param for unit in self.units for param in unit.params}

    def check_idle(self) -> None:
        """Nothing is held and, if eviction is eager, nothing is gathered."""
        for unit in self.units:
            assert unit.refs == 0, f"{unit.name} is still held {unit.refs} times"
            if self.unsharder.eager:
                assert unit.state is UnitState.SHARDED, unit.name
        for param in self.params.values():
            for module, attr in param.sites:
                assert dict.get(module._parameters, attr) is param.at_rest

    def check_grads(self) -> None:
        """Every gradient is bit-equal to the plain model's."""
        plain = dict(self.plain.named_parameters(remove_duplicate=False))
        for name, param in self.params.items():
            expected = plain[name].grad
            got = param.at_rest.grad
            assert (expected is None) == (got is None), f"{name}: {expected is None} {got is None}"
            if expected is not None:
                same = torch.equal(got.as_subclass(torch.Tensor), expected)
                assert same, f"the gradient of {name} differs"

    def step(self, lr: float = 0.1) -> None:
        """One step of gradient descent on both."""
        with torch.no_grad():
            for p in self.plain.parameters():
                if p.grad is not None:
                    p -= lr * p.grad
        for unit in self.units:
            changed = False
            for param in unit.params:
                grad = param.at_rest.grad
                if grad is not None:
                    self.unsharder.copies[param] -= lr * grad.as_subclass(torch.Tensor)
                    changed = True
            unit.generation += changed

    def zero_grad(self) -> None:
        self.plain.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)

    def train(
        self, loss_of: Callable[[nn.Module, int], torch.Tensor], steps: int = 2, micro: int = 2
    ) -> None:
        """Train both and compare every loss, gradient and, in the end, parameter bit by bit."""
        for step in range(steps):
            for batch in range(micro):
                torch.manual_seed(100 * step + batch)
                expected = loss_of(self.plain, 100 * step + batch)
                assert torch.isfinite(expected), "a comparison of NaNs proves nothing"
                expected.backward()
                torch.manual_seed(100 * step + batch)
                loss = loss_of(self.model, 100 * step + batch)
                loss.backward()
                assert torch.equal(loss, expected), f"step {step}: {loss} and {expected}"
                self.check_idle()
            self.check_grads()
            self.step()
            self.zero_grad()
        self.check_values()

    def check_values(self) -> None:
        plain = dict(self.plain.named_parameters(remove_duplicate=False))
        for name, param in self.params.items():
            assert torch.equal(self.unsharder.copies[param], plain[name]), name

    @property
    def largest_unit(self) -> int:
        return max(sum(param.numel for param in unit.params) for unit in self.units)


def at_rest(model: nn.Module, name: str) -> ShardedParameter:
    """The at-rest parameter `name`."""
    found = dict(model.named_parameters())[name]
    assert isinstance(found, ShardedParameter)
    return found
