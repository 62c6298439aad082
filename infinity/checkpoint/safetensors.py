"""Leaving the engine: weights as safetensors files, streamed unit by unit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file

from infinity.checkpoint.agreement import agreed
from infinity.checkpoint.describing import buffers_of
from infinity.checkpoint.incoming import has_master
from infinity.checkpoint.syncing import publish, sync_directory
from infinity.comm.collectives import Comm
from infinity.optim.state import States
from infinity.params.unit import Param, Unit
from infinity.sizes import format_size, parse_size

INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


class Exporter(Protocol):
    """What writing a model out needs of its engine."""

    units: list[Unit]
    states: States

    def read(self, param: Param) -> torch.Tensor:
        """The current value of one parameter on the CPU; collective on several ranks."""


def read_value(of: Exporter, param: Param, *, masters: bool) -> torch.Tensor:
    """The parameter on the CPU: its fp32 master if that is wanted and there is one, else what computes. Collective. Blocks."""
    return of.states.read(param, 0) if masters and has_master(of.states, param) else of.read(param)


def write_safetensors(
    model: torch.nn.Module,
    of: Exporter,
    directory: str | os.PathLike[str],
    *,
    shard_bytes_max: int | str,
    masters: bool = False,
) -> None:
    """Write parameters and persistent buffers in the layout of Hugging Face, one shard in memory at a time. Blocks.

    Files appear under their names only when they are whole and on the drive, the index last. On several ranks all call it, and
    rank 0 writes. Raises: OSError naming the path, PeerFailed where another rank had one.
    """
    target, comm = Path(directory), Comm()
    writes = comm.rank == 0
    sizes = [_unit_bytes(of, unit, masters=masters) for unit in of.units]
    groups = group_units(sizes, parse_size(shard_bytes_max))
    with agreed(comm, f"making {target}"):
        if writes:
            target.mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = {}
    total = 0
    for index, group in enumerate(groups):
        tensors = {param.name: read_value(of, param, masters=masters) for unit in group for param in of.units[unit].params}
        if index == 0:
            tensors.update(buffers_of(model))
        file = shard_name(index, len(groups))
        names.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
        with agreed(comm, f"writing {file}"):
            if writes and tensors:
                _write(tensors, target / file)
    with agreed(comm, f"finishing {target}"):
        if writes:
            finish(target, names, total)


def finish(target: Path, names: dict[str, str], total: int) -> None:
    """Write the index, if there are several files, and remove what an earlier export left. What is named is on the drive."""
    sync_directory(target)
    if len(set(names.values())) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2, sort_keys=True)
        partial = target / (INDEX + ".partial")
        partial.write_text(text + "\n")
        publish(partial, target / INDEX)
        sync_directory(target)
    _remove_stale(target, set(names.values()))
    sync_directory(target)
    sync_directory(target.absolute().parent)


def _remove_stale(target: Path, written: set[str]) -> None:
    """Remove what an earlier export into this directory left: readers would take it for a part of this one."""
    stale = [path for path in target.glob("model*.safetensors") if _OURS.fullmatch(path.name)]
    for path in stale:
        if path.name not in written:
            path.unlink()
    if len(written) == 1:
        (target / INDEX).unlink(missing_ok=True)


def group_units(sizes: Sequence[int], shard_bytes_max: int) -> list[list[int]]:
    """Consecutive units, by number, as many as fit one shard. sizes: bytes of each."""
    groups: list[list[int]] = [[]]
    size = 0
    for index, size_bytes in enumerate(sizes):
        if groups[-1] and size + size_bytes > shard_bytes_max:
            groups.append([])
            size = 0
        groups[-1].append(index)
        size += size_bytes
    return groups


def shard_name(index: int, count: int) -> str:
    """The name of file `index` of `count`."""
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _unit_bytes(of: Exporter, unit: Unit, *, masters: bool) -> int:
    return sum(
        param.numel * (4 if masters and has_master(of.states, param) else param.dtype.itemsize) for param in unit.params
    )


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        save_file(tensors, str(partial), metadata={"format": "pt"})
        publish(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise
        if isinstance(error, Exception) and "No space" in str(error):
            size = sum(tensor.nbytes for tensor in tensors.values())
            raise OSError(28, f"no room for {format_size(size)}", str(path)) from error
        raise
