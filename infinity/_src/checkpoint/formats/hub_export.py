"""Exports of a model of transformers under the hub's names.

    parameters, buffers  ->  groups that are converted back together  ->  tensors of files

A group is read, converted back by transformers, and written: what was fused of many tensors is many
again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from infinity._src.base.dtypes import copied
from infinity._src.checkpoint.formats.hub_conversion import (
    ReverseGroup,
    can_convert,
    has_conversions,
    plan_reverse,
    saved_conversions,
    too_old,
)
from infinity._src.checkpoint.formats.safetensors import (
    Exporter,
    ExportPart,
    Whole,
    check_written,
    module_parts,
    read_value,
    whole_bytes,
    wholes_of,
)
from infinity._src.checkpoint.metadata import persistent_buffers


def hub_parts(model: Any, of: Exporter, *, masters: bool) -> list[ExportPart]:
    """Return what is written of a model of transformers, one part for each group. Nothing is read.

    Tensors that transformers does not save are left out. Raises: ValueError where a conversion has
    no way back, or where the release of transformers cannot convert.
    """
    if not can_convert():
        _refuse_conversions(model)
        return module_parts(model, of, masters=masters)
    likes: dict[str, torch.Tensor] = {}
    readers: dict[str, Callable[[], torch.Tensor]] = {}
    sizes: dict[str, int] = {}
    read = functools.partial(read_value, of, masters=masters)
    wholes = wholes_of(param for unit in of.units for param in unit.params)
    check_written(of, wholes, persistent_buffers(model), masters=masters)
    for whole in wholes:
        name = _saved_name(model, whole)
        likes[name] = torch.empty(whole.shape, dtype=whole.params[0].dtype, device="meta")
        readers[name] = functools.partial(whole.merged, read)
        sizes[name] = whole_bytes(of, whole, masters=masters)
    for name, buffer in persistent_buffers(model).items():
        likes[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
        readers[name] = functools.partial(copied, buffer)
        sizes[name] = buffer.nbytes
    for name in model._keys_to_ignore_on_save or ():
        likes.pop(name, None)
    parts = []
    for group in plan_reverse(model, likes, saved_conversions(model)):
        size = sum(sizes[name] for _, name in group.sources)
        # What is converted is there twice: as it was read, and as it is written.
        beside = 0 if group.renamed else size
        parts.append(ExportPart(size, functools.partial(_converted, group, readers), beside))
    return parts


def _refuse_conversions(model: Any) -> None:
    if has_conversions(model):
        raise ValueError(f"{too_old()}, or export with names='modules'")


def _converted(
    group: ReverseGroup, readers: Mapping[str, Callable[[], torch.Tensor]]
) -> dict[str, torch.Tensor]:
    return group.convert(lambda name: readers[name]())


def _saved_name(model: Any, whole: Whole) -> str:
    """Return the name under which transformers saves a weight: of several, the one to which the
    others are tied.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return next((name for name in whole.keys if name not in tied), whole.name)
