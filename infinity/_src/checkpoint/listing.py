"""What lies in a directory of checkpoints: every generation, whole or not, from its manifests and the lengths of its files."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from pathlib import Path

from infinity._src.checkpoint.directory import check_length, generations, read_manifest
from infinity._src.checkpoint.manifest import FileEntry, Manifest, manifest_name
from infinity._src.checkpoint.run_files import RUN_DIRECTORY, run_directory
from infinity.errors import AioError


@dataclasses.dataclass(frozen=True)
class ListedFile:
    """A file that a manifest names, or a manifest. disk_bytes: what it takes on the drive; None: it is missing."""

    rank: int
    name: str
    size_bytes: int
    disk_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generation of a directory. why_not: why it is not whole, "" if it is; then the rest is what its manifests say.

    formats: elements by state format. written_s: when the last manifest was, in seconds since 1970.
    """

    number: int
    why_not: str
    step: int | None
    world: int | None
    params: int
    state: str
    formats: dict[str, int]
    optimizers: tuple[str, ...]
    disk_bytes: int
    written_s: float | None
    files: tuple[ListedFile, ...]

    @property
    def whole(self) -> bool:
        """Whether it can be restored, as far as it shows without reading the states."""
        return not self.why_not


def find_checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a directory: itself or the durable run in it, and those of its sub-directories."""
    found: list[Path] = []
    if not directory.is_dir():
        return found
    below = sorted(path for path in directory.iterdir() if path.is_dir() and path.name != RUN_DIRECTORY)
    for path in (directory, *below):
        place = run_directory(path)
        if generations(place):
            found.append(place)
    return found


def list_generations(directory: Path) -> list[Generation]:
    """All generations there that have a manifest, newest first. Reads manifests, and no states."""
    return [_describe(directory, number) for number in generations(directory)]


def _describe(directory: Path, number: int) -> Generation:
    manifests: list[Manifest] = []
    problems: list[str] = []
    world, rank = 1, 0
    while rank < world:
        path = directory / manifest_name(number, rank)
        try:
            manifest = read_manifest(path)
        except (AioError, ValueError) as error:
            how = f"damaged: {error}" if path.exists() else "missing"
            problems.append(f"the manifest of rank {rank} is {how}")
        else:
            if manifests and (manifest.save, manifest.world) != (manifests[0].save, manifests[0].world):
                problems.append(f"the manifest of rank {rank} is of another save")
            manifests.append(manifest)
            world = max(world, manifest.world)
        rank += 1
    files = [file for manifest in manifests for file in _files_of(directory, manifest, problems)]
    first = manifests[0] if manifests else None
    formats: Counter[str] = Counter()
    for flat in first.layout.flats if first is not None else ():
        numel = sum(param.numel for param in flat.params)
        held = flat.state_format
        formats[f"{flat.dtype} {held.master.name} {held.count} x {held.moments.name}" if held else f"{flat.dtype} alone"] += numel
    return Generation(
        number=number,
        why_not="; ".join(problems),
        step=first.step if first is not None else None,
        world=first.world if first is not None else None,
        params=sum(formats.values()),
        state=str(first.layout.numerics.get("state", "")) if first is not None else "",
        formats=dict(formats),
        optimizers=tuple(entry.title for entry in first.optimizers) if first is not None else (),
        disk_bytes=sum(file.disk_bytes or 0 for file in {file.name: file for file in files}.values()),
        written_s=_written(directory, number, world),
        files=tuple(files),
    )


def _files_of(directory: Path, manifest: Manifest, problems: list[str]) -> list[ListedFile]:
    """The files of one rank; what is wrong with one goes to `problems`."""
    used = {int(index) for index in manifest.rows["file"]}
    entries = [file for index, file in enumerate(manifest.files) if index in used]
    entries += [file for file in (manifest.buffers, manifest.extra) if file is not None]
    own = directory / manifest.name
    found = [_listed(directory, manifest.rank, FileEntry(own.name, own.stat().st_size))]
    for file in entries:
        try:
            check_length(directory / file.name, file)
        except AioError as error:
            problems.append(str(error))
        found.append(_listed(directory, manifest.rank, file))
    return found


def _listed(directory: Path, rank: int, file: FileEntry) -> ListedFile:
    taken = None
    with contextlib.suppress(OSError):
        taken = (directory / file.name).stat().st_blocks * 512
    return ListedFile(rank, file.name, file.size_bytes, taken)


def _written(directory: Path, number: int, world: int) -> float | None:
    times = []
    for rank in range(world):
        with contextlib.suppress(OSError):
            times.append((directory / manifest_name(number, rank)).stat().st_mtime)
    return max(times, default=None)
