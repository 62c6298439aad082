"""Copies of a durable run's manifests: one beside the states on each further drive, so that the
loss of the first drive loses no more than that of any other.

    <nvme[k]>/infinity-run/copy-<sum>/
        manifest-<generation>.rank<r>, buffers-…, extra-…, table-…    as in the home
        drive0 -> the home, drive1 -> …                               as the links of the home
        here -> drive<k>                                              this drive among them

A commit writes the copies, then the home: a generation counts when the home has it. Copies are
read where the home has none, or a damaged one. Names of files begin with a link there, also of
those in the home.

A copy is *orphaned* when its home has no manifest that can be read: its drive is gone, or was
replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import shutil
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from infinity._src.checkpoint.directory import (
    generations,
    newest_heads,
    sync_directory,
    typed_errors,
)
from infinity._src.checkpoint.manifest import FileEntry, Head
from infinity.errors import AioError

log = logging.getLogger("infinity")

RUN_DIRECTORY = "infinity-run"
_HOME = "drive0"
_HERE = "here"


class FoundRun(NamedTuple):
    """The newest whole generation of a run. place: the directory of its manifests."""

    place: Path
    heads: list[Head]


def sum_of(home: Path) -> str:
    """Return the digits by which a run's files are known on drives that several runs share."""
    # Path.resolve raises RuntimeError for a loop of links.
    return f"{zlib.crc32(os.fsencode(os.path.realpath(home))):08x}"


def copy_in(run: Path, home: Path) -> Path:
    """Return the place of the copy in the run directory of a further drive."""
    return run / f"copy-{sum_of(home)}"


def for_copy(head: Head) -> Head:
    """Return a manifest's head with the names of files as copies have them."""
    files = (
        entry if "/" in entry.name else FileEntry(f"{_HOME}/{entry.name}", entry.size_bytes)
        for entry in head.files
    )
    return dataclasses.replace(head, files=tuple(files))


def make_copy(place: Path, home: Path, links: Iterable[Path], rank: int, *, here: str) -> None:
    """Make the directory of a copy, with links that lead where those of the home do. here: the one
    to this drive. Blocks. Raises: AioError."""
    with typed_errors(place, "open", 0):
        place.mkdir(mode=0o700, exist_ok=True)
        lead(place / _HOME, home.resolve(), rank)
        for link in links:
            lead(place / link.name, link.readlink(), rank)
        lead(place / _HERE, Path(here), rank)
    # Its name, and those in it: a manifest that names files through them is written later.
    sync_directory(place)
    sync_directory(place.parent)


def others_of(place: Path) -> list[Path]:
    """Return the other places that have the manifests of the run of which these are: its home, or
    copies. None of a checkpoint's directory."""
    here, found = Path(os.path.realpath(place)), list[Path]()
    for link in sorted(here.glob("drive*")):
        run = Path(os.path.realpath(link))
        if not here.name.startswith("copy-"):
            found.append(copy_in(run, here))
        else:
            found.append(run if link.name == _HOME else run / here.name)
    return [each for each in dict.fromkeys(found) if each != here and each.is_dir()]


def link_to(run: Path, states: str) -> str:
    """Return the link by which the run that has a states file knows this drive; "" where nothing
    says so, as in the home."""
    # The name begins with the sum of the home, as it was then.
    here = run / f"copy-{states.split('-')[1][:8]}" / _HERE
    return str(here.readlink()) if here.is_symlink() else ""


def lead(link: Path, target: Path, rank: int) -> None:
    """Make a symbolic link lead to a target. Raises: OSError."""
    if link.is_symlink() and link.readlink() == target:
        return
    # A name of this rank's: other ranks may mend the same link at the same time.
    new = link.with_name(f".{link.name}.rank{rank}")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    # Atomic: at any moment there is the old link or the new one.
    new.replace(link)


def remove_copy(place: Path) -> None:
    """Remove a copy, if it is there. Raises: OSError."""
    if place.is_dir():
        # Manifests first: the rest is nobody's without one.
        for path in place.glob("manifest-*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(place)


def newest_of(home: Path, copies: Sequence[Path]) -> FoundRun | None:
    """Return the newest whole generation of a run, from its home if that has one, else from a copy;
    None where there is none.

    Raises: ChecksumError, AioError, ValueError for a damaged manifest, unless a copy has the same
    generation, or a later one.
    """
    problem: AioError | ValueError | None = None
    try:
        return FoundRun(home, newest_heads(home))
    except (AioError, ValueError) as error:
        if not (isinstance(error, AioError) and error.errno == errno.ENOENT):
            problem = error
    # A damaged run is never stepped over for an older one: that would lose steps in silence.
    least = 0
    with contextlib.suppress(OSError):
        least = max(generations(home), default=0) if problem is not None else 0
    found: list[FoundRun] = []
    for copy in copies:
        try:
            found.append(FoundRun(copy, newest_heads(copy)))
        except (AioError, ValueError) as error:
            if not (isinstance(error, AioError) and error.errno == errno.ENOENT):
                problem = problem or error
    best = max(found, key=lambda each: each.heads[0].generation, default=None)
    if best is None or best.heads[0].generation < least:
        if problem is not None:
            raise problem
        return None
    log.warning(
        "%s: %s; going by the copy of its manifests in %s",
        home,
        problem or "there is no manifest of the run any more",
        best.place,
    )
    return best


def newest_run(directories: Sequence[Path]) -> FoundRun | None:
    """Return the newest whole generation of the run in these directories (of the policy), the first
    of which is or was its home; or else of the run that has a copy there and lost its home. None
    where there is none. Writes nothing.

    Raises: as `newest_of`; ValueError where several runs have lost their homes.
    """
    runs = [directory / RUN_DIRECTORY for directory in directories]
    home = runs[0]
    own = newest_of(home, [copy_in(run, home) for run in runs[1:]])
    if own is not None:
        return own
    orphans = _orphans(runs)
    if len(orphans) > 1:
        raise ValueError(
            "several durable runs have lost their first drive, and copies of their manifests lie "
            f"in {', '.join(str(places[0]) for places in orphans.values())}: remove those that "
            "shall not go on"
        )
    for places in orphans.values():
        return newest_of(places[0], places[1:])
    return None


def _orphans(runs: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the orphaned copies with manifests in these run directories, by name."""
    found: dict[str, list[Path]] = {}
    for run in runs:
        for copy in sorted(run.glob("copy-*")):
            if _manifests_in(copy) and not _is_readable(copy / _HOME):
                found.setdefault(copy.name, []).append(copy)
    # The newest first: its damage is told, not stepped over.
    for places in found.values():
        places.sort(key=lambda place: -max(generations(place)))
    return found


def run_directory(directory: str | os.PathLike[str]) -> Path:
    """Return the place of the manifests: of the durable run in this directory, first or further
    drive of it; or the directory itself (a checkpoint).

    Raises: ValueError where the directory is a further drive of several runs.
    """
    # So that one path means the run, whether the user names its parent or itself.
    inside = Path(directory) / RUN_DIRECTORY
    if not inside.is_dir():
        return Path(directory)
    if _manifests_in(inside):
        return inside
    copies = [copy for copy in sorted(inside.glob("copy-*")) if _manifests_in(copy)]
    if len(copies) > 1:
        raise ValueError(
            f"{str(directory)!r} is a drive of several durable runs: name one of "
            f"{', '.join(map(str, copies))}"
        )
    for copy in copies:
        # Authoritative as long as it is there.
        home = copy / _HOME
        return home.resolve() if _is_readable(home) else copy
    return inside


def run_among(directories: Sequence[str | os.PathLike[str]]) -> Path:
    """Return `run_directory` of that of these directories which has the newest manifest."""
    if not directories:
        raise ValueError("directory=[]: name a checkpoint, or the directories of a durable run")
    places = [run_directory(directory) for directory in directories]
    return max(places, key=lambda place: max(_manifests_in(place), default=0))


def _is_readable(home: Path) -> bool:
    """Return whether a home has a whole generation. Names alone say nothing: the kernel may know
    those of a drive that is gone."""
    try:
        return bool(newest_heads(home))
    except AioError:
        return False
    except ValueError:
        # Of a later release.
        return True


def _manifests_in(place: Path) -> list[int]:
    """Return the generations of which a manifest is there; none of a place that is gone or does not
    answer."""
    try:
        return generations(place)
    except OSError:
        return []
