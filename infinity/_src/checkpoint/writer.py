"""Writing one rank's part of a new generation: data file, small files, and a manifest that gets its name last.

    write_part     data-…  buffers-…  extra-…  manifest-….partial      all on the drive
    commit_part    manifest-….partial -> manifest-…                    when the parts of all ranks are written
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from infinity._src.checkpoint.data_file import ALGORITHM, DataWriter
from infinity._src.checkpoint.directory import (
    file_name,
    files_of,
    is_of,
    remove,
    sync_directory,
    typed_errors,
    write_attachment,
)
from infinity._src.checkpoint.manifest import FileEntry, Layout, Manifest, OptimizerEntry, manifest_name

_KINDS = ("data", "buffers", "extra")


@dataclasses.dataclass(frozen=True)
class NewPart:
    """What a rank's part holds; the fields of `Manifest`. rows: without places. buffers, extra: the bytes of these files."""

    layout: Layout
    generation: int
    save: int
    rank: int
    world: int
    step: int
    optimizers: tuple[OptimizerEntry, ...]
    rows: npt.NDArray[np.void]
    buffers: bytes | None
    extra: bytes | None


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where the states of a part are: its files, rows and checksums."""

    files: tuple[FileEntry, ...]
    rows: npt.NDArray[np.void]
    sums: npt.NDArray[np.uint32]


def write_part(
    directory: Path, part: NewPart, fill: Callable[[DataWriter], None], *, backend: str, placed: Placed | None = None
) -> None:
    """Write all files of a part; `fill` stores every row, unless the states are `placed` already. Blocks.

    Raises: SwapFullError, AioError, what `fill` raises; then `remove_part` clears away what is there.
    """
    names = {kind: file_name(kind, part.generation, part.rank) for kind in _KINDS}
    placed = placed or _written(directory / names["data"], part, fill, backend)
    attached: list[FileEntry | None] = [
        write_attachment(directory, names[kind], data) if data is not None else None
        for kind, data in (("buffers", part.buffers), ("extra", part.extra))
    ]
    manifest = Manifest(
        layout=part.layout,
        generation=part.generation,
        save=part.save,
        rank=part.rank,
        world=part.world,
        step=part.step,
        algorithm=ALGORITHM,
        files=placed.files,
        buffers=attached[0],
        extra=attached[1],
        optimizers=part.optimizers,
        rows=placed.rows,
        sums=placed.sums,
    )
    write_attachment(directory, _partial(manifest.name), manifest.encode())


def _written(path: Path, part: NewPart, fill: Callable[[DataWriter], None], backend: str) -> Placed:
    writer = DataWriter(path, part.rows, part.layout.flats, backend=backend)
    try:
        fill(writer)
        writer.finish()
    finally:
        writer.close()
    return Placed((writer.entry,), writer.rows, writer.sums)


def commit_part(directory: Path, generation: int, rank: int) -> None:
    """Give a part's manifest its name, durably. Raises: AioError."""
    manifest = directory / manifest_name(generation, rank)
    with typed_errors(manifest, "open", 0):
        (directory / _partial(manifest.name)).rename(manifest)
    sync_directory(directory)


def remove_part(directory: Path, generation: int, rank: int) -> None:
    """Clear away after a fault, which is what the user is told."""
    manifest = directory / manifest_name(generation, rank)
    with contextlib.suppress(OSError):
        mine = [path for path, number in files_of(directory) if number == generation and is_of(path, rank)]
        remove([manifest, *mine])


def remove_others(directory: Path, generation: int) -> None:
    """Remove what belongs to other generations. Raises: OSError."""
    # Manifests first: data without one is nobody's, a manifest without data would be a damaged checkpoint.
    older = [path for path, number in files_of(directory) if number != generation]
    remove(sorted(older, key=lambda path: not path.name.startswith("manifest-")))


def _partial(name: str) -> str:
    return name + ".partial"
