"""Copies of a durable run's manifests: one on each further drive, so that the loss of the first
drive costs no more than the loss of another drive.

    <nvme[k]>/infinity-run/copy-<sum>/
        manifest-<generation>.rank<r>, buffers-…, extra-…, table-…    same as in the home
        drive0 -> the home, drive1 -> …                               links
        here -> drive<k>                                              the link to this drive

The *home* is the run's directory on its first drive. A commit writes the copies, then the home: a
generation is committed when the home has its manifest. A copy is read if the home has no manifest,
or a damaged one. A copy's manifest names every file through one of the links: drive0/<name> is a
file of the home.

A copy is *orphaned* when the home has no readable manifest, because the first drive is lost or was
replaced; or when another run now has its home at that path. Every commit contains the run's number,
which identifies the run; a path does not, since another run may use the path later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import secrets
import shutil
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from infinity._src.checkpoint.directory import (
    generations,
    newest_heads,
    read_head,
    readable_heads,
    sync_directory,
    typed_errors,
)
from infinity._src.checkpoint.manifest import FileEntry, Head, manifest_name
from infinity.errors import AioError

log = logging.getLogger("infinity")

RUN_DIRECTORY = "infinity-run"
_HOME = "drive0"
_HERE = "here"
_SAVE_BITS = 24
"""Number of low bits of `Head.save`, which are drawn at random whenever training begins or resumes.
The high bits are the run's number."""


class FoundRun(NamedTuple):
    """The newest whole generation of a run. place: the directory with the manifests."""

    place: Path
    heads: list[Head]


class SeveralRunsError(ValueError):
    """The given directories hold manifests of several runs instead of one."""


def save_number(before: Head | None) -> int:
    """Make `Head.save` for future commits. before: the head of a manifest of the run that the
    commits continue; None for a new run."""
    run = before.save >> _SAVE_BITS if before is not None else secrets.randbits(_SAVE_BITS)
    return run << _SAVE_BITS | secrets.randbits(_SAVE_BITS)


def sum_of(home: Path) -> str:
    """Return the digits that mark a run's files on drives that several runs share: a checksum of
    the path of the run's home."""
    # Path.resolve raises RuntimeError for a loop of links.
    return f"{zlib.crc32(os.fsencode(os.path.realpath(home))):08x}"


def copy_in(run: Path, home: Path) -> Path:
    """Return the path of the copy for the run with this home. run: the directory infinity-run of
    the copy's drive."""
    return run / f"copy-{sum_of(home)}"


def for_copy(head: Head) -> Head:
    """Return a manifest's head for the copies: with drive0/<name> for a file of the home."""
    files = (
        entry if "/" in entry.name else FileEntry(f"{_HOME}/{entry.name}", entry.size_bytes)
        for entry in head.files
    )
    return dataclasses.replace(head, files=tuple(files))


def make_copy(place: Path, home: Path, links: Iterable[Path], rank: int, *, here: str) -> None:
    """Make the directory of a copy, with its links. links: the home's links to further drives.
    here: the name of the link to the copy's drive, such as drive1. Blocks. Raises: AioError."""
    with typed_errors(place, "open", 0):
        place.mkdir(mode=0o700, exist_ok=True)
        lead(place / _HOME, home.resolve(), rank)
        for link in links:
            lead(place / link.name, link.readlink(), rank)
        lead(place / _HERE, Path(here), rank)
    # The links and the copy's own name reach the drive before any manifest that names files through
    # the links.
    sync_directory(place)
    sync_directory(place.parent)


def others_of(place: Path) -> list[Path]:
    """Return all other directories with manifests of the run whose manifests are in `place`: the
    run's home and copies, if they exist. [] for the directory of a checkpoint."""
    here, found = Path(os.path.realpath(place)), list[Path]()
    for link in sorted(here.glob("drive*")):
        run = Path(os.path.realpath(link))
        if not here.name.startswith("copy-"):
            found.append(copy_in(run, here))
        else:
            found.append(run if link.name == _HOME else run / here.name)
    return [each for each in dict.fromkeys(found) if each != here and each.is_dir()]


def link_to(run: Path, states: str) -> str:
    """Return the name (drive<k>) of the link to this drive in the run that owns a states file; ""
    if the run has no copy on this drive, as in the home. run: the directory infinity-run of the
    drive."""
    # The id in the file's name begins with the checksum of the home's path at the file's creation.
    here = run / f"copy-{states.split('-')[1][:8]}" / _HERE
    return str(here.readlink()) if here.is_symlink() else ""


def lead(link: Path, target: Path, rank: int) -> None:
    """Make a symbolic link lead to a target. Raises: OSError."""
    if link.is_symlink() and link.readlink() == target:
        return
    # The name has the rank, since other ranks may repair the same link at the same time.
    new = link.with_name(f".{link.name}.rank{rank}")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    # Atomic: there is always the old or the new link.
    new.replace(link)


def remove_copy(place: Path) -> None:
    """Remove a copy, if it exists. Raises: OSError."""
    if place.is_dir():
        # Manifests first: then no manifest names the remaining files of the copy.
        for path in place.glob("manifest-*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(place)


def newest_of(home: Path, copies: Sequence[Path]) -> FoundRun | None:
    """Return the newest whole generation of a run: the home's, or a copy's if the home has no whole
    generation. None if neither home nor copies have a whole generation.

    Raises: ChecksumError, AioError, ValueError for a damaged manifest: in the home, if no copy has
    that generation or a later one; in a copy, if neither home nor copies have a whole generation.
    SeveralRunsError.
    """
    copies = _check_one_run(home, copies)
    problem: AioError | ValueError | None = None
    try:
        return FoundRun(home, newest_heads(home))
    except (AioError, ValueError) as error:
        if not (isinstance(error, AioError) and error.errno == errno.ENOENT):
            problem = error
    # Never replace a damaged generation by an older one, which would silently lose steps.
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
        "%s: %s; using the copy of its manifests in %s",
        home,
        problem or "the run has lost its manifests",
        best.place,
    )
    return best


def newest_run(directories: Sequence[Path]) -> FoundRun | None:
    """Return the newest whole generation of the run whose home is, or was, in the first of these
    directories (Policy.nvme); else, of the run with orphaned copies in the directories. None if
    there is no generation. Writes nothing.

    Raises: as `newest_of`; SeveralRunsError if the directories have orphaned copies of several
    runs.
    """
    runs = [directory / RUN_DIRECTORY for directory in directories]
    home, *copies = _own(runs)
    found = newest_of(home, copies)
    # A new home may have parts of an interrupted first commit, which are not a generation: continue
    # the orphaned run.
    if found is None and (orphans := _orphans(runs)):
        found = newest_of(orphans[0], orphans[1:])
    return found


def readable_run(directories: Sequence[Path]) -> FoundRun | None:
    """Return the newest readable generation of a run for which `newest_run` raises; None without
    one. `place` of the result also has the run's newest manifest, so that a restore from `place`
    reports the damage of that manifest. Raises: SeveralRunsError.
    """
    runs = [directory / RUN_DIRECTORY for directory in directories]
    home, *copies = _own(runs)
    try:
        newest_of(home, copies)
    except (AioError, ValueError):
        return _readable_of(home, copies)
    first, *others = _orphans(runs)
    return _readable_of(first, others)


def _readable_of(home: Path, copies: Sequence[Path]) -> FoundRun | None:
    places = [home, *_check_one_run(home, copies)]
    newest = max((max(_manifests_in(place), default=0) for place in places), default=0)
    found = [
        FoundRun(place, heads)
        for place in places
        if newest in _manifests_in(place) and (heads := readable_heads(place)) is not None
    ]
    # Of equal generations `max` returns the first one found, so the home's takes precedence.
    return max(found, key=lambda each: each.heads[0].generation, default=None)


def _own(runs: Sequence[Path]) -> list[Path]:
    return [runs[0], *(copy_in(run, runs[0]) for run in runs[1:])]


def _orphans(runs: Sequence[Path]) -> list[Path]:
    """Return the orphaned copies with manifests in these run directories. The copy with the newest
    manifest is first, since `newest_of` treats the first as the home, whose damage it reports.
    Raises: SeveralRunsError if the copies belong to several runs."""
    found: dict[str, list[Path]] = {}
    for run in runs:
        for copy in sorted(run.glob("copy-*")):
            if _manifests_in(copy) and not _is_home_of(copy / _HOME, copy):
                found.setdefault(copy.name, []).append(copy)
    orphans = [places for alike in found.values() for places in _by_run(alike)]
    if len(orphans) > 1:
        raise SeveralRunsError(
            "several durable runs have lost their first drive, and copies of their manifests are "
            f"in {', '.join(str(places[0]) for places in orphans)}. To resume a run, name only its "
            "drives in Policy.nvme; for a new run name other directories of these drives"
        )
    return sorted(
        (place for places in orphans for place in places),
        key=lambda place: -max(generations(place)),
    )


def _check_one_run(home: Path, copies: Sequence[Path]) -> list[Path]:
    """Return the copies that may belong to the run of this home. Raises: SeveralRunsError if a copy
    belongs to another run, which had its home at the same path."""
    if _manifests_in(home) and not _runs_in(home):
        # No manifest in the home is readable, so only links identify its run: the home of the run
        # that wrote a copy has a link to the copy's drive.
        copies = [copy for copy in copies if _leads_to(home, copy)]
    several = _by_run([place for place in (home, *copies) if _manifests_in(place)])
    if len(several) > 1:
        (first, *_), (second, *_), *_ = several
        raise SeveralRunsError(
            f"{first} and {second} have manifests of two durable runs that began at the same path. "
            f"Nothing was changed. To continue the run in {first}, leave the drive of {second} out "
            f"of Policy.nvme, or name another directory of that drive. To continue the run in "
            f"{second}, name a directory without a run first in Policy.nvme, then its drives. "
            "Policy(durable='new') discards both"
        )
    return list(copies)


def _leads_to(home: Path, copy: Path) -> bool:
    """Return whether the home has the link that the copy's `here` names; True for a copy without
    `here`."""
    here = copy / _HERE
    return not here.is_symlink() or (home / here.readlink()).is_symlink()


def are_of_one_run(one: Path, other: Path) -> bool:
    """Return whether the readable manifests in both directories belong to one run."""
    return len(_by_run([one, other])) == 1


def _by_run(places: Iterable[Path]) -> list[list[Path]]:
    """Group directories by the run numbers in their manifests. A directory without a readable
    manifest joins the run of the first directory."""
    found: list[tuple[set[int], list[Path]]] = []
    for place in places:
        runs = _runs_in(place)
        alike = [each for each in found if each[0] & runs or not each[0]] if runs else found[:1]
        joined = (runs.union(*(known for known, _ in alike)), [p for _, ps in alike for p in ps])
        joined[1].append(place)
        found = [*(each for each in found if each not in alike), joined]
    return [group for _, group in found]


def _runs_in(place: Path) -> set[int]:
    """Return the run numbers in the readable manifests of a directory: one number, unless an
    earlier release wrote the manifests. Only rank 0's manifests are read; if none is readable, the
    manifests of all ranks."""
    of_first = (place / manifest_name(number, 0) for number in _manifests_in(place))
    if found := _numbers_in(of_first):
        return found
    with contextlib.suppress(OSError):
        return _numbers_in(path for path in place.glob("manifest-*") if path.suffix != ".partial")
    return set()


def _numbers_in(manifests: Iterable[Path]) -> set[int]:
    found = set()
    for path in manifests:
        with contextlib.suppress(AioError, ValueError):
            found.add(read_head(path).save >> _SAVE_BITS)
    return found


def run_directory(directory: str | os.PathLike[str]) -> Path:
    """Return the directory with the manifests. For a drive of a durable run: the run's home, or the
    copy on this drive if the home cannot be read. For any other directory (a checkpoint): the
    directory itself.

    Raises: ValueError if the directory is a further drive of several runs.
    """
    # The user may name the directory infinity-run or its parent.
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
    return _readable_place(copies[0]) if copies else inside


def _readable_place(copy: Path) -> Path:
    """Return the home of the run that wrote this copy if the home is readable, else the copy."""
    home = copy / _HOME
    return home.resolve() if _is_home_of(home, copy) else copy


def run_among(directories: Sequence[str | os.PathLike[str]]) -> Path:
    """Return the place of the newest manifest of the run that has all these directories as drives.
    If several runs have, choose the run whose home is in the first directory, as for Policy.nvme.
    For one directory, the result is that of `run_directory`.

    Raises: SeveralRunsError naming two places, if the directories belong to different runs or
    checkpoints; ValueError for an empty list; as `run_directory`.
    """
    if not directories:
        raise ValueError("directory=[]: name a checkpoint, or the directories of a durable run")
    first, *others = directories
    if not others:
        return run_directory(first)
    there = [found for each in directories if (found := _manifests_of(Path(each)))]
    # Two homes are two runs, even with one run number: a user may have copied a run's directories
    # and continued both.
    every = dict.fromkeys(place for places in there for place in places)
    runs = _by_run(every)
    shared = [run for run in runs if all(set(run) & set(places) for places in there)]
    homes = [place for place in every if place.name == RUN_DIRECTORY]
    home = Path(os.path.realpath(Path(first) / RUN_DIRECTORY))
    if len(shared) > 1:
        shared = [run for run in shared if home in run] or shared
    if not there:
        return run_directory(first)
    if len(shared) != 1 or len(set(shared[0]) & set(homes)) > 1:
        named = [run[0] for run in (shared or runs)]
        if len(shared) == 1:
            named = [place for place in shared[0] if place in homes]
        raise SeveralRunsError(
            f"directory={[str(each) for each in directories]}: {named[0]} and {named[1]} are of "
            "different runs; name the directories of one run"
        )
    return max(shared[0], key=lambda place: (max(_manifests_in(place)), place in homes))


def _manifests_of(directory: Path) -> list[Path]:
    """Return the resolved places with the manifests of every run that uses this directory as a
    drive; for a checkpoint, the directory itself. [] if there are no manifests."""
    inside = directory / RUN_DIRECTORY
    if not inside.is_dir():
        found = [directory]
    else:
        copies = [copy for copy in sorted(inside.glob("copy-*")) if _manifests_in(copy)]
        found = [inside, *map(_readable_place, copies)]
    return [Path(os.path.realpath(place)) for place in found if _manifests_in(place)]


def _is_home_of(home: Path, copy: Path) -> bool:
    return _is_readable(home) and are_of_one_run(home, copy)


def _is_readable(home: Path) -> bool:
    """Return whether a home has a whole generation. Names of files are no proof, since the kernel
    may still list the names of a lost drive."""
    try:
        return bool(newest_heads(home))
    except AioError:
        return False
    except ValueError:
        # The drive answered, but a later release wrote the manifest.
        return True


def _manifests_in(place: Path) -> list[int]:
    """Return the generations with a manifest in a directory; [] if the directory is gone or its
    drive does not answer."""
    try:
        return generations(place)
    except OSError:
        return []
