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
replaced; or when another run has its home there now. Runs are told apart by their numbers, which
all commits of one have in common: paths say where a run is, and not which it is.
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
"""Bits of `Head.save` of a process; those above are its run's number."""


class FoundRun(NamedTuple):
    """The newest whole generation of a run. place: the directory of its manifests."""

    place: Path
    heads: list[Head]


class SeveralRunsError(ValueError):
    """Manifests of several runs lie where one is looked for."""


def save_number(before: Head | None) -> int:
    """Make the number by which the manifests of this process's commits are known. before: of the
    run that it continues with; None for a new one."""
    run = before.save >> _SAVE_BITS if before is not None else secrets.randbits(_SAVE_BITS)
    return run << _SAVE_BITS | secrets.randbits(_SAVE_BITS)


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
    """Return the other places that have the manifests of the run that these belong to: its home, or
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
        # Manifests first: without one, nothing refers to the rest.
        for path in place.glob("manifest-*"):
            path.unlink(missing_ok=True)
        shutil.rmtree(place)


def newest_of(home: Path, copies: Sequence[Path]) -> FoundRun | None:
    """Return the newest whole generation of a run, from its home if that has one, else from a copy;
    None where there is none.

    Raises: ChecksumError, AioError, ValueError for a damaged manifest, unless a copy has the same
    generation, or a later one; SeveralRunsError.
    """
    copies = _check_one_run(home, copies)
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

    Raises: as `newest_of`; SeveralRunsError where several runs have lost their homes.
    """
    runs = [directory / RUN_DIRECTORY for directory in directories]
    home, *copies = _own(runs)
    found = newest_of(home, copies)
    # Parts of a first commit hold nothing: the run that was to be gone on with counts.
    if found is None and (orphans := _orphans(runs)):
        found = newest_of(orphans[0], orphans[1:])
    return found


def readable_run(directories: Sequence[Path]) -> FoundRun | None:
    """Return the newest generation that can be read of a run for which `newest_run` raises; None
    where there is none. Its place has the newest manifest, whose damage a restore tells. Raises:
    SeveralRunsError.
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
    # The first of equals: the home, if it has one.
    return max(found, key=lambda each: each.heads[0].generation, default=None)


def _own(runs: Sequence[Path]) -> list[Path]:
    return [runs[0], *(copy_in(run, runs[0]) for run in runs[1:])]


def _orphans(runs: Sequence[Path]) -> list[Path]:
    """Return the orphaned copies with manifests in these run directories, the newest first: its
    damage is reported, not skipped. Raises: SeveralRunsError where they are of several runs."""
    found: dict[str, list[Path]] = {}
    for run in runs:
        for copy in sorted(run.glob("copy-*")):
            if _manifests_in(copy) and not _is_home_of(copy / _HOME, copy):
                found.setdefault(copy.name, []).append(copy)
    orphans = [places for alike in found.values() for places in _by_run(alike)]
    if len(orphans) > 1:
        raise SeveralRunsError(
            "several durable runs have lost their first drive, and copies of their manifests lie "
            f"in {', '.join(str(places[0]) for places in orphans)}. Name the drives of one of them "
            "alone in Policy.nvme to go on with it; for a new run name other directories of these "
            "drives"
        )
    return sorted(
        (place for places in orphans for place in places),
        key=lambda place: -max(generations(place)),
    )


def _check_one_run(home: Path, copies: Sequence[Path]) -> list[Path]:
    """Return those of the copies of a home that may be of its run. Raises: SeveralRunsError where
    some are of another, which had its home at the same path."""
    if _manifests_in(home) and not _runs_in(home):
        # Nothing says which run has its home here. One that wrote a copy has a link to it.
        copies = [copy for copy in copies if _leads_to(home, copy)]
    several = _by_run([place for place in (home, *copies) if _manifests_in(place)])
    if len(several) > 1:
        (first, *_), (second, *_), *_ = several
        raise SeveralRunsError(
            f"{first} and {second} have manifests of two durable runs that began at the same path. "
            f"Nothing was changed. To continue the run in {first}, leave the drive of {second} out "
            f"of Policy.nvme, or name another directory of that drive. To continue the run in "
            f"{second}, name a directory without a run first in Policy.nvme, then its drives. "
            "Policy(durable='new') gives both up"
        )
    return list(copies)


def _leads_to(home: Path, copy: Path) -> bool:
    here = copy / _HERE
    return not here.is_symlink() or (home / here.readlink()).is_symlink()


def are_of_one_run(one: Path, other: Path) -> bool:
    """Return whether the manifests in both places are of one run, as far as they can be read."""
    return len(_by_run([one, other])) == 1


def _by_run(places: Iterable[Path]) -> list[list[Path]]:
    """Sort places into runs, by the numbers in the manifests there. One of which no manifest can be
    read is of the first."""
    found: list[tuple[set[int], list[Path]]] = []
    for place in places:
        runs = _runs_in(place)
        alike = [each for each in found if each[0] & runs or not each[0]] if runs else found[:1]
        joined = (runs.union(*(known for known, _ in alike)), [p for _, ps in alike for p in ps])
        joined[1].append(place)
        found = [*(each for each in found if each not in alike), joined]
    return [there for _, there in found]


def _runs_in(place: Path) -> set[int]:
    """Return the numbers of the runs whose manifests in a place can be read: of one, but in those
    of an earlier release. Rank 0's are read, or any rank's where none of them can be."""
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
    return _told_by(copies[0]) if copies else inside


def _told_by(copy: Path) -> Path:
    """Return the place to read a run in that has a copy: its home, authoritative as long as it is
    there, or the copy."""
    home = copy / _HOME
    return home.resolve() if _is_home_of(home, copy) else copy


def run_among(directories: Sequence[str | os.PathLike[str]]) -> Path:
    """Return the place of the newest manifest of the run that has all these directories as drives.
    Of several such runs it is the one with its home in the first, as in Policy.nvme. One directory:
    `run_directory`.

    Raises: ValueError naming two where they are of several runs, or checkpoints.
    """
    if not directories:
        raise ValueError("directory=[]: name a checkpoint, or the directories of a durable run")
    first, *others = directories
    if not others:
        return run_directory(first)
    there = [found for each in directories if (found := _manifests_of(Path(each)))]
    # Separate homes are separate runs: one run may have begun as a copy of another.
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
        told = [run[0] for run in (shared or runs)]
        if len(shared) == 1:
            told = [place for place in shared[0] if place in homes]
        raise SeveralRunsError(
            f"directory={[str(each) for each in directories]}: {told[0]} and {told[1]} are of "
            "different runs; name the directories of one"
        )
    return max(shared[0], key=lambda place: (max(_manifests_in(place)), place in homes))


def _manifests_of(directory: Path) -> list[Path]:
    """Return the places of manifests of the runs that a directory is a drive of, resolved; or
    itself, for a checkpoint."""
    inside = directory / RUN_DIRECTORY
    if not inside.is_dir():
        found = [directory]
    else:
        copies = [copy for copy in sorted(inside.glob("copy-*")) if _manifests_in(copy)]
        found = [inside, *map(_told_by, copies)]
    return [Path(os.path.realpath(place)) for place in found if _manifests_in(place)]


def _is_home_of(home: Path, copy: Path) -> bool:
    return _is_readable(home) and are_of_one_run(home, copy)


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
    """Return the generations that have a manifest; none of a place that is gone or does not
    answer."""
    try:
        return generations(place)
    except OSError:
        return []
