"""Leaving the engine: weights as safetensors files, streamed unit by unit."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from infinity.params.unit import Param, Unit
from infinity.sizes import format_size, parse_size

INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


class Exporter(Protocol):
    """What writing a model out needs of its engine."""

    units: list[Unit]
    rank: int

    def read(self, param: Param) -> torch.Tensor:
        """The current value of one parameter on the CPU; collective on several ranks."""


def write_safetensors(
    model: torch.nn.Module, of: Exporter, directory: str | os.PathLike[str], *, shard_bytes_max: int | str
) -> None:
    """Write parameters and persistent buffers in the layout of Hugging Face, one shard in memory at a time.

    Files appear under their names only when they are whole, the index last. On several ranks all call it; rank 0 writes.
    Raises: OSError naming the path.
    """
    target = Path(directory)
    writes = of.rank == 0
    if writes:
        target.mkdir(parents=True, exist_ok=True)
    groups = _groups(of.units, parse_size(shard_bytes_max))
    names: dict[str, str] = {}
    total = 0
    for index, group in enumerate(groups):
        tensors = {param.name: of.read(param) for unit in group for param in unit.params}
        if index == 0:
            tensors.update(_buffers(model))
        file = (
            "model.safetensors"
            if len(groups) == 1
            else f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors"
        )
        names.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
        if writes and tensors:
            _write(tensors, target / file)
    if writes and len(groups) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2, sort_keys=True)
        partial = target / (INDEX + ".partial")
        partial.write_text(text + "\n")
        partial.replace(target / INDEX)
    if writes:
        _remove_stale(target, set(names.values()))


def _remove_stale(target: Path, written: set[str]) -> None:
    """Remove what an earlier export into this directory left: readers would take it for a part of this one."""
    stale = [path for path in target.glob("model*.safetensors") if _OURS.fullmatch(path.name)]
    for path in stale:
        if path.name not in written:
            path.unlink()
    if len(written) == 1:
        (target / INDEX).unlink(missing_ok=True)


def _groups(units: list[Unit], shard_bytes_max: int) -> list[list[Unit]]:
    """Consecutive units, as many as fit one shard."""
    groups: list[list[Unit]] = [[]]
    size = 0
    for unit in units:
        if groups[-1] and size + unit.size_bytes > shard_bytes_max:
            groups.append([])
            size = 0
        groups[-1].append(unit)
        size += unit.size_bytes
    return groups


def _buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Persistent buffers by name, without aliases."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found[f"{prefix}.{name}" if prefix else name] = buffer.detach().to("cpu", copy=True).contiguous()
    return found


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    metadata: dict[str, Any] = {"format": "pt"}
    try:
        save_file(tensors, str(partial), metadata=metadata)
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise
        if isinstance(error, Exception) and "No space" in str(error):
            size = sum(tensor.nbytes for tensor in tensors.values())
            raise OSError(28, f"no room for {format_size(size)}", str(path)) from error
        raise
