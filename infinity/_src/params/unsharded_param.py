"""Unsharded parameters: leaf parameters on a flat's storage, which is allocated and freed.

    flat.tensor     [ param 0 | pad | param 1 | pad | ... ]   storage: full size, or 0 bytes
    param.gathered  an nn.Parameter over its range of that storage, made once, for the model's life

Autograd saves the unsharded parameters (and views of them) by their storage, so evicting frees the
memory although the graph still exists, and backward only needs the same storage loaded again.

Each unsharded parameter has a version counter, set to its unit's generation at the first use after
a gather or a change. Loading does not count as a modification. An optimizer step or a write raises
the generation. An earlier graph then gets torch's "modified by an inplace operation" error instead
of new values. An evicted parameter has a version that no graph has saved.
"""

from __future__ import annotations

import itertools
from typing import Any, NoReturn

import torch

from infinity._src.base.torch_compat import (
    is_resizable,
    resize_storage,
    separate_version,
    set_data,
    set_versions,
    storage_size,
)
from infinity._src.memory.device import Device
from infinity._src.memory.flat_layout import FlatLayout
from infinity._src.params.unit import SHARDED, STALE, Flat, Param, Unit
from infinity.errors import WeightWritten

_EVICTED_VERSIONS = itertools.count(0xC000_0000)
"""Version counters have 32 bits; the range above this exceeds a process's number of parameters."""


class UnshardedParameter(torch.nn.Parameter):
    """An unsharded parameter. It overrides `.data` and `set_`, because torch's would let a write go
    undetected, and be lost.
    """

    infinity_name: str

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """A detached view, which shares the version counter: a write through it in forward is
        detected, and raises.
        """
        return self.detach()

    @data.setter
    def data(self, _value: torch.Tensor) -> None:
        self._refuse("`.data =`")

    def set_(  # type: ignore[override]
        self, source: Any = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Copy the values of a similar tensor, as parametrizations do. The end of forward detects
        this write; `set_` of itself writes nothing.
        """
        if source is not self:
            if args or kwargs or not isinstance(source, torch.Tensor) or not _alike(source, self):
                self._refuse("`set_`")
            with torch.no_grad():
                self.copy_(source)
        return self

    def _refuse(self, operation: str) -> NoReturn:
        raise WeightWritten(
            f"{operation} on {self.infinity_name} inside forward is lost. Write between steps, "
            "with `with torch.no_grad(), inf.handle(model).gather(parameter): "
            "parameter.copy_(...)`"
        )


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def empty_flat(layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make an evicted flat of `layout` on `device`, outside of inference mode, whose tensors cannot
    be refilled."""
    with torch.inference_mode(False):
        flat = torch.empty(layout.numel, dtype=dtype, device=device)
    resize_storage(flat, 0)
    return flat


def bind(unit: Unit, *, requires_grad: dict[Param, bool]) -> None:
    """Make the unit's gathered parameters. Flats are allocated temporarily, because views need
    bounds.
    """
    was_evicted = any(storage_size(flat.tensor) != flat.size_bytes for flat in unit.flats)
    # Without `allocate`, so that the unit's state does not change.
    for flat in unit.flats:
        resize_storage(flat.tensor, flat.size_bytes)
    with torch.inference_mode(False), torch.no_grad():
        for param in unit.params:
            # Separate counters: a write to one parameter must not count as one to its unit.
            view = param.flat.tensor[param.offset : param.offset + param.numel].view(param.shape)
            param.gathered = UnshardedParameter(
                separate_version(view), requires_grad=requires_grad[param]
            )
            param.gathered.infinity_name = param.name
            param.evicted_version = next(_EVICTED_VERSIONS)
    if was_evicted:
        _free(unit)


def allocate(unit: Unit, device: Device | None = None, *, insist: bool = True) -> None:
    """Allocate memory for the unit's flats, with undefined contents: the unit becomes STALE. Blocks
    only if memory is short. insist: retry after emptying torch's cache. Raises:
    torch.OutOfMemoryError. After any error on a device no flat has memory.
    """
    if device is None:
        _grow(unit)
    else:
        try:
            _allocate_on(unit, device)
        except torch.OutOfMemoryError:
            if not insist:
                raise
            # Outside of the pool's context, inside which torch 2.10 to 2.12 frees none of its cache
            # (pytorch#159674): a gather could not use memory freed by activations.
            device.free_cache()
            _allocate_on(unit, device)
    unit.move_to(STALE)


def _allocate_on(unit: Unit, device: Device) -> None:
    try:
        # From a separate pool: between activations units would fragment the memory.
        with device.allocation():
            _grow(unit)
    except BaseException:
        # The unit stays SHARDED, without memory. No kernel has used the memory, so no stream needs
        # to be recorded.
        _free(unit)
        raise
    stream = device.stream
    for flat in unit.flats:
        flat.stream = stream


def _grow(unit: Unit) -> None:
    for flat in unit.flats:
        resize_storage(flat.tensor, flat.size_bytes)


def note_use(unit: Unit, device: Device) -> None:
    """Record the end of a use on another stream than the memory was allocated on. Otherwise the
    allocator would reuse the memory before this stream's kernels are done.
    """
    stream = device.stream
    for flat in unit.flats:
        if flat.stream != stream:
            device.note_use(flat.tensor)


def evict(unit: Unit, device: Device | None = None) -> None:
    """Free the memory of the unit's flats. The unit must be neither in use nor being loaded."""
    if not unit.stuck:
        assert unit.refs == 0, f"evicting {unit.name}, which {unit.refs} uses hold"
        if device is not None:
            note_use(unit, device)
        unit.move_to(SHARDED)
        # Autograd compares versions before it reads a saved tensor, so a backward raises instead of
        # reading freed memory.
        unit.stamped_generation = None
        set_versions(
            [param.gathered for param in unit.params],
            [param.evicted_version for param in unit.params],
        )
        for window in unit.closed_windows:
            if (tensor := window.tensor()) is not None:
                set_versions([tensor], [window.param.evicted_version])
        _free(unit)
    else:
        # Not freed: a collective may still write to this memory.
        unit.move_to(SHARDED)


def _free(unit: Unit) -> None:
    for flat in unit.flats:
        # An exported storage, for instance to numpy, can never be resized.
        if not is_resizable(flat.tensor):
            _renew(flat)
        resize_storage(flat.tensor, 0)


def _renew(flat: Flat) -> None:
    """Move the flat to a new storage. The old one was exported, and lives as long as its numpy
    array.

    Graphs that saved the old storage also hold it, with values that are right for them.
    """
    with torch.inference_mode(False), torch.no_grad():
        flat.tensor.data = torch.empty_like(flat.tensor)
        for param in flat.params:
            view = flat.tensor[param.offset : param.offset + param.numel].view(param.shape)
            # Keep the object: modules hold it, and it has hooks.
            set_data(param.gathered, separate_version(view))


def stamp(unit: Unit) -> list[int]:
    """Set the version counters of the unit's gathered parameters to its generation, and return
    them.
    """
    # The counter is the generation: gathering the same values again is no modification.
    if unit.closed_windows:
        _stamp_windows(unit)
    versions = [unit.generation] * len(unit.params)
    set_versions([param.gathered for param in unit.params], versions)
    unit.stamped_generation = unit.generation
    return versions


def _stamp_windows(unit: Unit) -> None:
    """Set the version counters of leaves that `gather()` returned: restore them if the unit has the
    same values, else forget the leaves, so that their graphs raise.
    """
    kept = []
    for window in unit.closed_windows:
        tensor = window.tensor()
        if tensor is None:
            continue
        current = window.generation == unit.generation
        set_versions([tensor], [window.version + (not current)])
        if current:
            kept.append(window)
    unit.closed_windows = kept
