"""Descriptions of a run for its manifest: flats and parameters, optimizers, buffers, and the
policy's fields that affect numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from infinity._src.base.dtypes import check_kept, converts, copied, copy_, dtype_name
from infinity._src.base.wording import listed
from infinity._src.cabi.records import GradSection
from infinity._src.checkpoint.formats.safetensors_reader import decode_tensors, encode_tensors
from infinity._src.checkpoint.manifest import (
    FlatEntry,
    Layout,
    LeftOutEntry,
    OptimizerEntry,
    ParamEntry,
    to_json,
)
from infinity._src.config.policy import Policy
from infinity._src.optim.base import Optimizer
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat, Param, Unit

NUMERICS = ("state", "seed", "update", "grad_dtype", "reduce_dtype")
"""Fields of the policy that affect numbers. A restore notes differences from the saved run's."""


def numerics_of(policy: Policy) -> dict[str, Any]:
    """Return the values of NUMERICS, as JSON."""
    values = {name: getattr(policy, name) for name in NUMERICS}
    return {
        name: dtype_name(value) if isinstance(value, torch.dtype) else value
        for name, value in values.items()
    }


def layout_of(
    flats: Sequence[Flat], store: StateStore, policy: Policy, left_out: Sequence[Flat] = ()
) -> Layout:
    """Describe the flats with their present state formats. left_out: flats that are not saved."""
    entries = []
    for flat in flats:
        state_format = store[flat].format
        # A checkpoint does not contain spilled gradients.
        if state_format.grad:
            state_format = state_format.with_grad(GradSection.NONE)
        params = tuple(
            ParamEntry(param.names, tuple(param.shape), param.offset) for param in flat.params
        )
        entries.append(
            FlatEntry(
                unit=flat.unit.name,
                dtype=dtype_name(flat.dtype),
                trainable=flat.trainable,
                format=state_format.code,
                shard_numel=flat.layout.shard_numel,
                params=params,
            )
        )
    return Layout(tuple(entries), numerics_of(policy), _left_out(left_out))


def _left_out(flats: Sequence[Flat]) -> tuple[LeftOutEntry, ...]:
    found: dict[str, LeftOutEntry] = {}
    for param in (param for flat in flats for param in flat.params):
        # All tiles of a weight have the weight's name, which is reported once.
        found.setdefault(
            param.keys[0],
            LeftOutEntry(tuple(param.keys), tuple(param.whole_shape), dtype_name(param.dtype)),
        )
    return tuple(found.values())


def optimizers_of(given: object, units: Sequence[Unit]) -> list[Optimizer]:
    """List the optimizers that the user gave. Raises: ValueError for an optimizer that is not
    infinity's, or that holds parameters of another model.
    """
    optimizers: list[Any] = (
        [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    )
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} is not an optimizer of infinity: give the inf.AdamW "
                "(SGD, Lion, Elementwise) that holds the model's parameters, a list of such "
                "optimizers, or None"
            )
    # A checkpoint is of one model, so an optimizer of two models would be saved in part.
    engine = units[0].engine if units else None
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(param_of(at_rest).unit.engine is not engine for at_rest in group["params"]):
                raise ValueError(
                    f"the {optimizer.title} also holds parameters of another model: a checkpoint "
                    "is of one model; give each model a separate optimizer"
                )
    return optimizers


def check_all_held(
    units: Sequence[Unit], optimizers: Sequence[Optimizer], optimizer_of: Callable[[Param], object]
) -> None:
    """Raise ValueError if an optimizer that the user did not give holds a parameter."""
    for unit in units:
        for param in unit.params:
            holder = optimizer_of(param)
            if holder is not None and all(holder is not optimizer for optimizer in optimizers):
                raise ValueError(
                    f"{param.name} belongs to an optimizer that was not given, and its states "
                    "would be lost: give a list of all optimizers"
                )


def param_of(at_rest: Any) -> Param:
    """Return the record of a parameter that `model.parameters()` yields."""
    record: Param = at_rest.infinity_link.param
    return record


def describe_optimizer(
    optimizer: Optimizer, optimizer_of: Callable[[Param], object]
) -> OptimizerEntry:
    """Describe the groups and the small state of each parameter. Raises: ValueError naming a value
    that cannot be retained.
    """
    groups, params = [], {}
    for index, group in enumerate(optimizer.param_groups):
        records = [param_of(at_rest) for at_rest in group["params"]]
        values = {}
        for key, value in group.items():
            # Parameters are listed by name, separately from the values.
            if key != "params":
                try:
                    values[key] = to_json(value)
                except ValueError as error:
                    raise ValueError(f"{key!r} of parameter group {index}: {error}") from None
        groups.append({"values": values, "params": [record.name for record in records]})
        for record in records:
            # A frozen parameter in a group may have no states.
            if optimizer_of(record) is optimizer:
                kept = dict(optimizer.state.get(record.at_rest, {}))
                params[record.name] = {
                    "moments": list(optimizer.moments_of(record)),
                    "state": to_json(kept),
                }
    return OptimizerEntry(optimizer.title, groups, params)


def buffer_bytes(model: torch.nn.Module) -> bytes | None:
    """Encode the persistent buffers as safetensors; None without buffers. Raises: ValueError for a
    buffer that its shape and its bits do not determine, such as a quantized tensor.
    """
    check_kept(persistent_buffers(model).items(), "a checkpoint")
    found = buffers_of(model)
    return encode_tensors(found) if found else None


def buffers_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copy the persistent buffers to the CPU, contiguous, by their first names."""
    # Copies, since training may change the buffers while the save writes.
    return {name: copied(buffer) for name, buffer in persistent_buffers(model).items()}


def persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Find persistent buffers, by their first names."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            # Compared by identity, so that a buffer of several modules is saved once.
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def read_buffers(data: bytes) -> dict[str, torch.Tensor]:
    """Decode the bytes of `buffer_bytes`. Raises: ValueError for bytes that no engine wrote."""
    try:
        return decode_tensors(data)
    except ValueError as error:
        raise ValueError(f"the buffers of a checkpoint are refused: {error}") from error


def check_buffers(
    model: torch.nn.Module, saved: dict[str, torch.Tensor], directory: str, *, strict: bool
) -> list[str]:
    """Raise ValueError unless the saved buffers are the model's persistent buffers. Buffers that
    only the model or only the checkpoint has raise if `strict`, and are else noted in the result.
    """
    mine = persistent_buffers(model)
    alone = sorted(mine.keys() ^ saved.keys())
    both = sorted(mine.keys() & saved.keys())
    wrong = (alone if strict else []) or [
        name for name in both if mine[name].shape != saved[name].shape
    ]
    if wrong:
        raise ValueError(
            f"the persistent buffers in {directory} are not those of the model: "
            f"{', '.join(wrong[:5])} {'is' if len(wrong) == 1 else 'are'} missing in one of them, "
            "or of another shape"
        )
    for name in both:
        there, here = saved[name].dtype, mine[name].dtype
        if not converts(there, here):
            raise ValueError(
                f"the buffer {name} is {there} in {directory}, but {here} in the model: register "
                f"it in {there} before inf.offload"
            )
    return [f"buffers only in model or checkpoint: {listed(alone)}"] if alone else []


def write_buffers(model: torch.nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Copy these values into the buffers, in place. Buffers without a value stay unchanged."""
    with torch.no_grad():
        for name, buffer in persistent_buffers(model).items():
            # In place, since several modules may share the tensor.
            if name in saved:
                copy_(buffer, saved[name])
