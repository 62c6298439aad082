"""Tensors that share the memory of a model's parameters, found before the model is offloaded.

The offload gives a parameter other memory. A tensor that shares the old memory (`weight.t()`,
`weight.detach()`, an entry of a `state_dict()`) must follow the parameter, or be refused by name:

    followed   a tensor over a range of one parameter becomes a view of the sharded parameter
               (`Alias`)
    refused    two parameters, or a parameter and a buffer, over the same memory; a separate leaf
               that requires a gradient; a tensor of another dtype, or with elements outside of the
               parameter; a numpy array

Tensors that only C++ code holds do not follow: a graph that was recorded earlier keeps the old
values, and `hooks.module_params` refuses a backward through it. The engine rebuilds the graph of a
followed view at each use, so gradients may be summed in another order than in a plain loop, which
makes the view once.

Tied weights, one parameter under several names, are found by `infinity._src.params.discover`.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from infinity._src.base.torch_compat import gradient_node, storage_of, storage_uses
from infinity._src.params.discover import FoundParameter, find_parameters
from infinity._src.params.materialize import find_buffers
from infinity._src.params.sharded_param import Alias
from infinity._src.params.unit import objects_at


@dataclasses.dataclass(frozen=True)
class _Place:
    """Bytes [start, stop) that a tensor occupies: addresses on a device, or offsets in a storage on
    meta."""

    where: object
    start: int
    stop: int
    name: str
    is_buffer: bool


def find_aliases(model: nn.Module) -> list[Alias]:
    """Find the tensors that follow parameters of `model`. Changes nothing.

    Takes microseconds for each parameter; if memory is shared, it also searches all objects of the
    process. If `gc.freeze()` hides objects, all objects are unfrozen for the search, and frozen
    afterwards. Raises: ValueError for tensors that cannot follow, with their holders, and for
    gradients.
    """
    entries = find_parameters(model)
    for entry in entries:
        if entry.parameter.grad is not None:
            raise ValueError(
                f"{entry.names[0]} has a gradient, which offloading would lose: call "
                "`model.zero_grad()` first"
            )
    buffers = [(each.names[0], each.value) for each in find_buffers(model)]
    _check_apart(_places(entries, buffers))
    known: dict[int, torch.Tensor] = {
        id(tensor): tensor for entry in entries for tensor in objects_at(entry.sites)
    }
    known |= {id(buffer): buffer for _, buffer in buffers}
    shared = _users_unknown(known.values(), entries)
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    reduced = ranks and any(gradient_node(entry.parameter) is not None for entry in entries)
    if not shared and not reduced:
        return []
    misfit = ""
    for _ in range(2):
        found, missed = _living_aliases(gc.get_objects(), entries, known, shared)
        # A storage has more users than were found: `gc.freeze()` may hide them. (A graph in C++ may
        # be the user, too; no search finds that.)
        if (missed or reduced) and gc.get_freeze_count():
            found, _ = _living_aliases(_objects_and_frozen(), entries, known, shared)
        misfit = next(filter(None, (_misfit(pair, model) for pair in found)), "")
        if not misfit:
            return [_alias(pair) for pair in found]
        # The tensor may be garbage in a reference cycle: collect it, and search again.
        del found
        gc.collect()
    raise ValueError(misfit)


def _objects_and_frozen() -> list[Any]:
    """Return all objects that the garbage collector tracks, including those hidden from
    `gc.get_objects()` by `gc.freeze()`. All objects are frozen afterwards, so collect first."""
    gc.collect()
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        gc.freeze()


def _places(
    entries: Iterable[FoundParameter], buffers: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[_Place]:
    for entry in entries:
        for parameter in objects_at(entry.sites):
            yield from _place_of(entry.names[0], parameter, is_buffer=False)
    for name, tensor in buffers:
        yield from _place_of(name, tensor, is_buffer=True)


def _place_of(name: str, tensor: torch.Tensor, *, is_buffer: bool) -> Iterator[_Place]:
    # The set-up refuses nested tensors by name.
    storage = None if tensor.is_nested else storage_of(tensor)
    if storage is None or tensor.numel() == 0:
        return
    start, stop = (each * tensor.element_size() for each in _span(tensor))
    where: object = ("meta", storage._cdata)
    if not tensor.is_meta:
        # Compare addresses: two storages may share a mapped file, or a numpy array.
        where, base = str(tensor.device), storage.data_ptr()
        start, stop = base + start, base + stop
    yield _Place(where, start, stop, name, is_buffer)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the tensor's range of its storage: first element, and one past the last."""
    first = int(tensor.storage_offset())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return first, first + 1 + sum((size - 1) * stride for size, stride in steps)


def _check_apart(places: Iterable[_Place]) -> None:
    """Raise ValueError for two parameters, or a parameter and a buffer, that share memory."""
    last: dict[object, _Place] = {}
    last_parameter: dict[object, _Place] = {}
    for place in sorted(places, key=lambda each: (each.start, each.stop)):
        seen = (last_parameter if place.is_buffer else last).get(place.where)
        if seen is not None and place.start < seen.stop:
            raise ValueError(_shared_text(seen, place))
        if not place.is_buffer:
            last_parameter[place.where] = _further(last_parameter.get(place.where), place)
        last[place.where] = _further(last.get(place.where), place)


def _further(one: _Place | None, other: _Place) -> _Place:
    return other if one is None or other.stop > one.stop else one


def _shared_text(one: _Place, other: _Place) -> str:
    if not one.is_buffer and not other.is_buffer:
        return (
            f"{one.name} and {other.name} are two parameters over the same memory; inf.offload "
            "gives each separate memory, so their values would diverge. Before inf.offload, make "
            "them one Parameter (`module.weight = other.weight`), or give one separate memory "
            "(`parameter.data = parameter.data.clone()`)"
        )
    buffer, parameter = (one.name, other.name) if one.is_buffer else (other.name, one.name)
    return (
        f"the buffer {buffer} shares the memory of the parameter {parameter}; inf.offload moves "
        "the parameter, and the buffer would keep the present values. Before inf.offload, register "
        "a copy as the buffer (`.clone()`), or compute it in forward from the parameter"
    )


def _users_unknown(
    known: Iterable[torch.Tensor], entries: Iterable[FoundParameter]
) -> dict[int, int]:
    """Return the storages of parameters that unknown tensors use, and the number of these tensors.
    Storages that only buffers use do not matter: buffers do not move."""
    storages = {
        storage._cdata: storage
        for entry in entries
        if (storage := storage_of(entry.parameter)) is not None
    }
    users = Counter(
        storage._cdata for tensor in known if (storage := storage_of(tensor)) is not None
    )
    unknown = {key: storage_uses(storage) - users[key] for key, storage in storages.items()}
    return {key: count for key, count in unknown.items() if count > 0}


def _living_aliases(
    objects: Sequence[Any],
    entries: Iterable[FoundParameter],
    known: dict[int, Any],
    shared: dict[int, int],
) -> tuple[list[tuple[torch.Tensor, FoundParameter]], bool]:
    """Return the tensors among `objects` that share elements with a parameter, each with that
    parameter, and whether some storage has users that are not among `objects`. shared: each
    storage, with the number of its unknown users. Raises: ValueError for parameters that a
    DistributedDataParallel reduces."""
    by_storage: dict[int, list[tuple[int, int, FoundParameter]]] = {}
    for entry in entries:
        storage = storage_of(entry.parameter)
        if storage is not None and storage._cdata in shared:
            size = entry.parameter.element_size()
            start, stop = (each * size for each in _span(entry.parameter))
            by_storage.setdefault(storage._cdata, []).append((start, stop, entry))
    found: list[tuple[torch.Tensor, FoundParameter]] = []
    missing = Counter(shared)
    # A process has up to millions of objects and few types, so each type is examined once.
    wanted = (nn.parallel.DistributedDataParallel, torch.Tensor)
    # By id and identity: a metaclass may make its types unhashable, and issubclass hashes them.
    kinds = {id(kind): kind for kind in map(type, objects)}
    ids = {
        number
        for number, kind in kinds.items()
        if any(base is each for base in kind.__mro__ for each in wanted)
    }
    for each in [each for each in objects if id(type(each)) in ids]:
        if isinstance(each, nn.parallel.DistributedDataParallel):
            if any(id(parameter) in known for parameter in each.parameters()):
                raise ValueError(DDP)
            continue
        if id(each) in known:
            continue
        storage = storage_of(each)
        if storage is None:
            continue
        if storage._cdata in shared:
            missing[storage._cdata] -= 1
        if each.numel() == 0:
            continue
        for start, stop, entry in by_storage.get(storage._cdata, ()):
            first, last = (bound * each.element_size() for bound in _span(each))
            if first < stop and start < last:
                found.append((each, entry))
                break
    return found, any(count > 0 for count in missing.values())


DDP = (
    "DistributedDataParallel was built around this model, and would wait for gradients that "
    "offloaded parameters never give it: offload the module without it (the engine reduces "
    "gradients over the ranks itself)"
)


def _alias(pair: tuple[torch.Tensor, FoundParameter]) -> Alias:
    tensor, entry = pair
    offset = _span(tensor)[0] - _span(entry.parameter)[0]
    return Alias(tensor, entry.parameter, offset, tracks=not tensor.is_leaf)


def _misfit(pair: tuple[torch.Tensor, FoundParameter], model: nn.Module) -> str:
    tensor, entry = pair
    parameter = entry.parameter
    first, stop = _span(parameter)
    start, last = _span(tensor)
    reason, holders = "", []
    if tensor.is_leaf and tensor.requires_grad and tensor._base is not parameter:
        reason = "it is a leaf of its own, whose values would diverge from the parameter's"
    elif type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_conj() or tensor.is_neg():
        reason = f"it is a {type(tensor).__name__}"
    elif tensor.dtype != parameter.dtype:
        reason = f"it has another dtype, {tensor.dtype}"
    elif not parameter.is_contiguous():
        reason = "the parameter is not contiguous, and inf.offload makes it contiguous"
    elif start < first or last > stop:
        reason = "it goes beyond that parameter"
    elif not tensor.is_leaf and tensor._base is not parameter:
        reason = "it was made by an operation that cannot be repeated"
    if reason or not _resizable(tensor):
        holders = _holders(tensor, model, pair)
    if not reason and not _resizable(tensor) and not holders:
        reason, holders = "its memory cannot move", ["a numpy array"]
    if not reason:
        return ""
    return (
        f"a tensor of shape {tuple(tensor.shape)} shares the memory of {entry.names[0]}, and "
        f"cannot follow the parameter when inf.offload moves it: {reason}. Its holder is "
        f"{', '.join(holders) or 'an object that Python does not show'}: hold the Parameter "
        "itself, or a copy (`.clone()`), or drop the tensor before inf.offload"
    )


def _resizable(tensor: torch.Tensor) -> bool:
    storage: Any = storage_of(tensor)
    return bool(storage.resizable())


def _holders(tensor: torch.Tensor, model: nn.Module, mine: object) -> list[str]:
    """Name the holders of a tensor other than `mine`: attributes of modules and variables of
    running functions; if none is found, other objects. Empty: Python shows no holder."""
    # Compare by id: a comprehension that uses the tensor would hold it in a cell.
    key = id(tensor)
    names = [
        f"{type(model).__name__}.{prefix}{'.' if prefix else ''}{attr}"
        for prefix, module in model.named_modules()
        for attr, value in module.__dict__.items()
        if id(value) == key
    ]
    frame = sys._getframe().f_back
    while frame is not None:
        # Variables of this file's functions do not count.
        if frame.f_globals is not globals():
            names += [
                f"the variable {name} of {frame.f_code.co_name}()"
                for name, value in frame.f_locals.items()
                if id(value) == key
            ]
        frame = frame.f_back
    return names or [
        _named(holder) for holder in gc.get_referrers(tensor) if holder is not mine
    ]


def _named(holder: object) -> str:
    owners = gc.get_referrers(holder) if type(holder) is dict else []
    owner = next((each for each in owners if getattr(each, "__dict__", None) is holder), holder)
    return f"a {type(owner).__name__}"
