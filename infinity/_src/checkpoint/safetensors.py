"""Leaving the engine: weights as safetensors files, streamed unit by unit."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file

from infinity._src.checkpoint.incoming import has_master
from infinity._src.checkpoint.metadata import buffers_of
from infinity._src.checkpoint.syncing import publish, sync_directory, sync_file
from infinity._src.checkpoint.tiled import Whole, wholes_of
from infinity._src.distributed.collectives import Comm
from infinity._src.distributed.rendezvous import Rendezvous
from infinity._src.optim.state_access import States
from infinity._src.params.unit import Param, Unit
from infinity._src.sizes import format_size, parse_size

INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


class Exporter(Protocol):
    """What writing a model out needs of its engine."""

    units: list[Unit]
    states: States
    comm: Comm

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

    Files appear under their names only when all are whole and on the drive, the index last; an earlier export in the directory
    stays until then. On several ranks all call it, and rank 0 writes. Raises: OSError naming the path, PeerFailed where another
    rank had one.
    """
    comm = of.comm
    files = WeightFiles(Path(directory), writes=comm.rank == 0)
    parts = _parts(of)
    groups = group_units([_part_bytes(of, part, masters=masters) for part in parts], parse_size(shard_bytes_max))

    def read(param: Param) -> torch.Tensor:
        return read_value(of, param, masters=masters)

    with files:
        with Rendezvous(comm, f"making {directory}"):
            files.begin()
        for index, group in enumerate(groups):
            tensors = {whole.name: whole.merged(read) for part in group for whole in parts[part]}
            if index == 0:
                tensors.update(buffers_of(model))
            file = shard_name(index, len(groups))
            with Rendezvous(comm, f"writing {file}"):
                if tensors:
                    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
                    files.put(file, tensors, size_bytes, functools.partial(_write, tensors))
        with Rendezvous(comm, f"finishing {directory}"):
            files.finish()


class WeightFiles:
    """The files of one export. They get their names together, when all are whole and on the drive; leaving the context before
    that leaves an earlier export in the directory as it was. writes: False does nothing (ranks that do not write)."""

    def __init__(self, target: Path, *, writes: bool = True) -> None:
        self._target = target
        self._writes = writes
        self._names: dict[str, str] = {}  # by tensor
        self._size_bytes = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for file in (*self.files, INDEX):
            if self._writes:
                with contextlib.suppress(OSError):  # what broke off is raised, not this
                    self._partial(file).unlink(missing_ok=True)

    @property
    def files(self) -> tuple[str, ...]:
        """The names that they get, in order."""
        return tuple(dict.fromkeys(self._names.values()))

    def begin(self) -> None:
        """Make the directory; remove what an export that was killed left. Raises: OSError."""
        if not self._writes:
            return
        self._target.mkdir(parents=True, exist_ok=True)
        for path in self._target.glob("model*.partial"):
            if path.stem == INDEX or _OURS.fullmatch(path.stem):
                path.unlink()

    def put(self, file: str, names: Iterable[str], size_bytes: int, write: Callable[[Path], object]) -> None:
        """Have `write` write the tensors of these names to a path. Blocks until it is on the drive. Raises: OSError."""
        self._names.update(dict.fromkeys(names, file))
        self._size_bytes += size_bytes
        if self._writes:
            write(self._partial(file))
            sync_file(self._partial(file))

    def finish(self) -> None:
        """Name the files, and the index last if there are several; remove what an earlier export left. Blocks. Raises: OSError.

        A crash in here may leave files without an index, never an index of other files.
        """
        if not self._writes:
            return
        index = self._target / INDEX
        if len(self.files) > 1:
            text = json.dumps({"metadata": {"total_size": self._size_bytes}, "weight_map": self._names}, indent=2, sort_keys=True)
            index.unlink(missing_ok=True)
            sync_directory(self._target)
        for file in self.files:
            self._partial(file).replace(self._target / file)
        sync_directory(self._target)
        if len(self.files) > 1:
            partial = self._partial(INDEX)
            partial.write_text(text + "\n")
            publish(partial, index)
            sync_directory(self._target)
        _remove_stale(self._target, set(self.files))
        sync_directory(self._target)
        sync_directory(self._target.absolute().parent)

    def _partial(self, file: str) -> Path:
        return self._target / (file + ".partial")


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


def _parts(of: Exporter) -> list[list[Whole]]:
    """The tensors of each unit; the tiles of a weight, units of their own, are one part together."""
    wholes = {whole.params[0]: whole for whole in wholes_of(param for unit in of.units for param in unit.params)}
    parts = [[wholes[param] for param in unit.params if param in wholes] for unit in of.units]
    return [part for part in parts if part] or [[]]


def _part_bytes(of: Exporter, part: Sequence[Whole], *, masters: bool) -> int:
    return sum(
        param.numel * (4 if masters and has_master(of.states, param) else param.dtype.itemsize)
        for whole in part
        for param in whole.params
    )


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, str(path), metadata={"format": "pt"})
    except Exception as error:
        if not isinstance(error, OSError) and "No space" in str(error):
            size = sum(tensor.nbytes for tensor in tensors.values())
            raise OSError(errno.ENOSPC, f"no room for {format_size(size)}", str(path)) from error
        raise
