"""References to one unit: its count, the `_parameters` of its modules, and the checks on both.

    add_ref / drop_ref   count a reference; the first gathers the unit, the last lets it be evicted
    acquire / release    the same for a running forward or an active use; meanwhile the gathered
                         parameters lie in the modules' `_parameters`, where recompute, which may
                         call `forward` past all hooks, finds them
    lend / undo_lend     put the gathered parameters into `_parameters` without a reference, for a
                         call that makes gradients for them and does not read them

`acquire` checks that every module still has the sharded parameter that the engine put there.
`release` checks that every parameter that forward took out of a module is back, and that no version
counter has moved: a weight written in forward would be lost at the next eviction.
"""

from __future__ import annotations

import weakref

import torch
from torch.nn import Parameter

from infinity._src.base.torch_compat import (
    bump_version,
    separate_version,
    set_versions,
    storage_refs,
    tensor_refs,
    version_of,
)
from infinity._src.hooks.module_params import ModuleParameters, look, put
from infinity._src.params import unsharded_param as gathered
from infinity._src.params.sharded_param import ShardedParameter
from infinity._src.params.unit import UNSHARDED, ClosedWindow, Param, Unit
from infinity._src.params.unshard import Unsharder
from infinity.errors import ReplacedOutsideEngine, WeightWritten


class WeightWindow:
    """Parameter inside of `gather()`: a leaf on the gathered storage with a separate version
    counter, which shows writes.
    """

    def __init__(self, param: Param) -> None:
        self.param = param
        with torch.inference_mode(False), torch.no_grad():
            self.tensor = torch.nn.Parameter(
                separate_version(param.gathered), requires_grad=param.gathered.requires_grad
            )
        self.written = False
        self._seen_version = version_of(self.tensor)

    def closes(self, *, outlives: bool) -> None:
        """End the window, and set its version counter for the graphs that still refer to it.

        outlives: such a graph may run backward later; otherwise its backward raises.
        """
        param, unit = self.param, self.param.unit
        if not outlives:
            set_versions([self.tensor], [param.evicted_version])
            return
        closed = ClosedWindow(
            param, weakref.ref(self.tensor), version_of(self.tensor), unit.generation
        )
        unit.closed_windows = [
            *(window for window in unit.closed_windows if window.tensor() is not None), closed
        ]  # fmt: skip

    def poll_write(self) -> bool:
        version = version_of(self.tensor)
        changed = version != self._seen_version
        self._seen_version = version
        self.written = self.written or changed
        return changed


class UnitRefs:
    """References to one unit, and the `_parameters` entries where its parameters lie."""

    def __init__(
        self,
        unit: Unit,
        unsharder: Unsharder,
        modules: list[tuple[torch.nn.Module, ModuleParameters]],
    ) -> None:
        self.unit = unit
        self.windows: list[WeightWindow] = []
        self._unsharder = unsharder
        self._acquired = 0  # references of running forwards and active uses
        self._versions: list[int] = []
        self._spoilt = False
        self._gathered = [param.gathered for param in unit.params]
        self._modules = [(module.__dict__, parameters) for module, parameters in modules]
        # Count before any graph or window refers to the parameters.
        self._refs_at_rest = self._count_refs()
        found = dict(modules)
        self._sites: list[tuple[ModuleParameters, str, Parameter, Parameter]] = [
            (found[module], attr, param.at_rest, param.gathered)
            for param in unit.params
            for module, attr in param.sites
        ]

    def _count_refs(self) -> int:
        return sum(map(tensor_refs, self._gathered)) + sum(
            storage_refs(flat.tensor) for flat in self.unit.flats
        )

    @property
    def in_graph(self) -> bool:
        """True when a graph refers to parameters of the unit, or a view of one is held."""
        return self._count_refs() > self._refs_at_rest

    @property
    def acquired(self) -> bool:
        """True when the gathered parameters lie in the modules' `_parameters`."""
        return self._acquired > 0

    def add_ref(self) -> None:
        """Count a reference; blocks until the unit is gathered."""
        unit = self.unit
        # A unit in use is gathered already, but maybe in another version than this pass needs.
        if unit.refs == 0:
            self._unsharder.unshard(unit)
            assert unit.state is UNSHARDED, f"{unit.name} was unsharded and is {unit.state}"
        else:
            self.check_version(window=False)
        # Version counters change with the generation, that is with the values, not with a gather.
        if unit.stamped_generation != unit.generation:
            self._versions = gathered.stamp(unit)
        if self.windows:
            self.note_window_writes()
        # Count last: an error above must not change the count.
        unit.refs += 1

    def check_version(self, *, window: bool) -> None:
        """Raise RuntimeError if a training pass would compute with the values of `gather()`.
        window: raise if `gather()` would show the values of training instead."""
        if self._unsharder.mixes(self.unit, window=window):
            raise RuntimeError(
                f"a training forward or backward inside of handle.gather() of {self.unit.name}, or "
                "gather() inside of it: gather() shows the newest parameters, but training "
                "computes with those from before the update (update='delayed'), or with quantized "
                "ones (qwz=True); run forward and backward outside of gather() (evaluation without "
                "gradients may be inside)"
            )

    def drop_ref(self) -> None:
        """Drop a reference; at the last one the unit may be evicted."""
        unit = self.unit
        assert unit.refs > 0, f"{unit.name} was released more often than it was held"
        unit.refs -= 1
        if unit.refs == 0:
            # Forward wrote to a gathered weight: the next gather reads the values at rest again.
            if self._spoilt:
                self._spoilt = False
                self._unsharder.invalidate(unit)
            self._unsharder.release(unit)

    def acquire(self) -> None:
        """Add a reference, and put the gathered parameters into the modules."""
        if self._acquired == 0:
            # Check before the gather that no module has replaced a parameter: the engine would
            # go on training one that the module no longer uses.
            self._check_modules()
            self.add_ref()
            for parameters, attr, _, tensor in self._sites:
                put(parameters, attr, tensor)
        else:
            self.add_ref()
        self._acquired += 1

    def release(self, *, check: bool = True) -> None:
        """Undo `acquire`. check: after that, raise WeightWritten if the module wrote to a
        parameter, or ReplacedOutsideEngine if forward did not put a parameter back that it took out
        of its module.
        """
        self._acquired -= 1
        written: list[str] = []
        missing: list[str] = []
        if self._acquired == 0:
            if self.unit.taken:
                missing = self._recall()
            # Put them back before `drop_ref`, after which the unit may be evicted.
            for parameters, attr, at_rest, _ in self._sites:
                put(parameters, attr, at_rest)
            versions = [tensor._version for tensor in self._gathered]
            # A write bumps the tensor's version counter. Eviction would discard the written value.
            if versions != self._versions:
                written = [
                    param.name
                    for param, now, then in zip(
                        self.unit.params, versions, self._versions, strict=True
                    )
                    if now != then
                ]
                self._spoilt = True
                self.unit.stamped_generation = None
        # Drop the reference before the errors below, which must not leave the unit in use.
        self.drop_ref()
        if written and check:
            raise WeightWritten(
                f"forward or backward wrote to {', '.join(written)}: a write to an offloaded "
                "parameter inside of them is lost. Write between steps, with "
                "`with torch.no_grad(), inf.handle(model).gather(parameter): parameter.clamp_(...)`"
            )
        if missing and check:
            raise ReplacedOutsideEngine(
                f"forward took {', '.join(missing)} out of its module, and did not put it back: "
                "put the same parameter back in the same call, or change the module before "
                "`inf.offload`"
            )

    def _recall(self) -> list[str]:
        """Return the names of the parameters that are missing in their modules. If forward moved a
        gathered parameter into a submodule, put the sharded parameter in its place."""
        self.unit.taken = False
        missing = []
        for param in self.unit.params:
            for module, attr in param.sites:
                parameters = module._parameters
                if isinstance(parameters, ModuleParameters) and attr in parameters.taken:
                    parameters.taken.discard(attr)
                    missing.append(param.name)
                    # The gathered parameter may lose its memory next: reading it would crash.
                    for holder in module.modules():
                        for name, value in list(dict.items(holder._parameters)):
                            if value is param.gathered:
                                put(holder._parameters, name, param.at_rest)
        return missing

    def lend(self) -> None:
        """Put the gathered parameters into the modules for a call that makes gradients for them and
        does not read them. They may have no memory."""
        if self._acquired == 0:
            self._check_modules()
            for parameters, attr, _, tensor in self._sites:
                put(parameters, attr, tensor)

    def undo_lend(self) -> None:
        if self._acquired == 0:
            for parameters, attr, at_rest, _ in self._sites:
                put(parameters, attr, at_rest)

    def passed(self) -> None:
        """End a use that held no reference: release the unit if nothing else uses it."""
        if self.unit.refs == 0:
            self._unsharder.release(self.unit)

    def note_window_writes(self) -> None:
        """Bump the version of gathered parameters that were written through windows, so that
        autograd raises where a graph has saved the old values."""
        for window in self.windows:
            if window.poll_write():
                bump_version(window.param.gathered)
        self._versions = [version_of(tensor) for tensor in self._gathered]

    def _check_modules(self) -> None:
        for attributes, parameters in self._modules:
            if attributes.get("_parameters") is not parameters:
                raise ReplacedOutsideEngine(
                    f"the parameters of a module of {self.unit.name} {_REPLACED}"
                )
        for parameters, attr, at_rest, _ in self._sites:
            if look(parameters, attr) is not at_rest or type(at_rest) is not ShardedParameter:
                raise ReplacedOutsideEngine(f"{self._name(parameters, attr)} {_REPLACED}")

    def _name(self, parameters: ModuleParameters, attr: str) -> str:
        found = (param.name for param in self.unit.params for module, name in param.sites
                 if module._parameters is parameters and name == attr)  # fmt: skip
        return next(found, attr)


_REPLACED = (
    "was replaced outside the engine, which would go on training the old one; change the module "
    "before `inf.offload`, or write values with `with inf.handle(model).gather(parameter): "
    "parameter.copy_(...)`"
)
