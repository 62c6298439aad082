"""The files of a durable run: paths, locks, and the removal of an earlier run's files.

    <nvme[0]>/infinity-run/
        manifest-<generation>.rank<r>, buffers-…, extra-…, table-…    (directory.py)
        states-<id>-<n>.rank<r>                  this rank's chunks; linked saves add files
        bad-<id>-<n>.rank<r>                     a retired states file, reduced to its bad ranges
        drive1 -> <nvme[1]>/infinity-run/        a link to each further drive, with any number
        fill.rank<r>                             until the first commit (initialization_journal.py)
        lock.rank<r>
    <nvme[1]>/infinity-run/
        states-<id>-<n>.rank<r>
        home-<sum> -> <nvme[0]>/infinity-run/    the home of the states here
        copy-<sum>/                              copies of the manifests (copies.py)

Each rank has two states files on each drive; linked saves add more. Each process gives new names to
its states files, and so never overwrites a file of an earlier process. A process that resumes an
interrupted initialization continues with the states files of that initialization.

States files that no manifest names are removed. When a rank begins, it removes such files of this
rank, whose space it needs; rank 0 also removes those of ranks that only an earlier, larger run had.
After the first commit of a process, rank 0 removes all remaining ones, except files that another
process holds or that another run may name.

An id begins with a checksum of the path of the run's home. A directory may also hold files of other
runs: of the original, if this run's directory is a copy; in the home, of runs that use the
directory as a further drive.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from infinity._src.checkpoint.directory import (
    files_of,
    generations,
    is_of,
    next_generation,
    read_head,
    remove,
    sync_directory,
    typed_errors,
)
from infinity._src.checkpoint.durable.copies import (
    RUN_DIRECTORY,
    SeveralRunsError,
    copy_in,
    lead,
    link_to,
    make_copy,
    newest_run,
    readable_run,
    remove_copy,
    sum_of,
)
from infinity._src.checkpoint.durable.initialization_journal import (
    InitializationJournal,
    described,
    ids_of_journals,
    states_of,
)
from infinity._src.checkpoint.manifest import Head
from infinity._src.memory.swap_space import SwapExtent
from infinity.aio import SwapFile
from infinity.aio._swap_owner import lock
from infinity.errors import AioError

log = logging.getLogger("infinity")

# The first 8 digits are a checksum of the home's path. Each process draws the next 8 at random.
_STATES = re.compile(r"states-([0-9a-f]{8})[0-9a-f]{8}-\d+\.rank\d+")
_DRIVE = re.compile(r"drive\d+")


def _real(path: Path) -> Path:
    # Path.resolve raises RuntimeError for a loop of links.
    return Path(os.path.realpath(path))


def check_no_run(directory: Path) -> None:
    """Raise ValueError for a directory that holds a durable run: a restore would not find a
    checkpoint in that directory, or the checkpoint would replace the run's manifests.
    """
    if (directory / RUN_DIRECTORY).is_dir() or _real(directory).name == RUN_DIRECTORY:
        raise ValueError(
            f"directory={str(directory)!r} holds a durable run, which inf.restore would read "
            "instead of the checkpoint: name another directory (on the same file system a save "
            "makes hard links)"
        )


class RunFiles:
    """One rank's files of a durable run in these directories.

    world: number of ranks that the run has now; rank 0 removes files of ranks from `world` on.
    released: the user released the run in these directories, so its manifests may be damaged.

    Raises: AioError (EWOULDBLOCK) while another process holds the run, ChecksumError for a damaged
    manifest, ValueError for directories of another user, or if a directory after the first is the
    home of a run.
    """

    def __init__(
        self, directories: Sequence[Path], rank: int, world: int, *, released: bool = False
    ) -> None:
        self.rank = rank
        self.directories = [directory / RUN_DIRECTORY for directory in directories]
        self.layers: dict[int, list[SwapFile]] = {}
        """The states files, by layer of the swap space, then by drive. The caller of `add` sets an
        entry when it adds the layer to the swap space."""
        self._made: list[list[SwapFile]] = []
        # Includes released files, so that each file gets a new name.
        self._made_count = 0
        # Checksum of the home's path. It distinguishes runs that share one infinity-run directory
        # on a further drive.
        self._sum = sum_of(self.home)
        self.copies = [copy_in(run, self.home) for run in self.directories[1:]]
        """The places of the copies of the manifests."""
        self._links: list[str] = []
        self._named = False
        self._id = ""
        with contextlib.ExitStack() as undo:
            # Lock first, so that this process neither reads nor changes a run of another process.
            self._lock = undo.enter_context(SwapFile.durable(self.home, f"lock.rank{rank}"))
            self.journal = InitializationJournal(self.home / f"fill.rank{rank}")
            # Runs before the lock is released: another process may begin at that moment.
            undo.callback(self._remove_states)
            for run, copy in zip(self.directories[1:], self.copies, strict=True):
                _check_no_home(run, copy)
            self.source = self.home
            """The place of the manifests of `before`: the home, or a copy."""
            self.before = self._newest(directories, released)
            # Equal on all ranks: no rank removes a manifest before all ranks have read this.
            newest = self.before[0].generation if self.before else 0
            self._older = any(number < newest for number in generations(self.source))
            self._id = self._adopted()
            # Before `_link`, which then reuses the mended links.
            self._find_moved()
            self._take_links()
            self._links += [_link(self.home, run.absolute()) for run in self.directories[1:]]
            self._remove_unnamed(world)
            self._undo = undo.pop_all()

    @property
    def home(self) -> Path:
        return self.directories[0]

    def add(self) -> list[SwapFile]:
        """Make new states files, one on each drive. Raises: AioError, SwapFullError."""
        self._made.append([])
        self._made_count += 1
        for drive, directory in enumerate(self.directories):
            name = f"states-{self._id}-{self._made_count}.rank{self.rank}"
            self._made[-1].append(SwapFile.durable(directory, name))
            # `directory` may be new: its name, too, must survive a crash.
            sync_directory(directory.parent)
            if directory != self.home:
                self._name_home(directory / f"home-{self._sum}")
                here = self._links[drive - 1]
                make_copy(self.copies[drive - 1], self.home, self._drives(), self.rank, here=here)
        return self._made[-1]

    def release(self, files: Sequence[SwapFile]) -> None:
        # This removes the run's names only: hard links in a checkpoint keep the bytes.
        unlink_states(Path(file.path) for file in files)
        self._made = [made for made in self._made if made is not files]

    def check_place(self) -> None:
        """Raise AioError if the home's path now leads to another directory than the locked one, in
        which another run may have begun.
        """
        with typed_errors(self.home, "open", 0):
            there = os.lstat(self._lock.path)
        if not os.path.samestat(there, os.fstat(self._lock.fd)):
            raise AioError(
                "the run's directory was replaced by another while it was in use: move it back, or "
                "end this job",
                path=str(self.home),
                op="open",
            )

    @property
    def places(self) -> list[Path]:
        """The directories of manifests, in the order in which a commit writes them: copies, then
        the home, whose manifest commits the generation."""
        return [*self.copies, self.home]

    def next_generation(self) -> int:
        return max(next_generation(place) for place in self.places if place.is_dir())

    def sync(self) -> None:
        """Block until all writes to the states files are on the drives. Raises: DeviceFailedError.
        """
        for files in self._made:
            for file in files:
                file.fsync()

    def remember_bad(self, place: SwapExtent) -> None:
        """Record a range with a failed write, so that no later file of the drive gets the range.
        Blocks for the drive. If the record cannot be written, log a warning.
        """
        # Layer 0 has files without a name, which end with the process.
        if place.layer not in self.layers:
            return
        path = Path(self.layers[place.layer][place.drive].path)
        try:
            remember_bad(path, place.offset, place.size_bytes)
        except AioError as error:
            log.warning("%s: a bad range will be forgotten when this process ends: %s", path, error)

    def states(self) -> list[tuple[int, int]]:
        return described([Path(file.path) for files in self._made for file in files])

    def _adopted(self) -> str:
        """Return the id for the states files: the id of an interrupted initialization if all of its
        files exist, else a new id.
        """
        head, start = self.journal.head, self.journal.started
        mine = self._sum + secrets.token_hex(4)
        directories = [str(_real(directory)) for directory in self.directories]
        found = head["id"] if head is not None else ""
        states = [
            directory / f"states-{found}-{layer}.rank{self.rank}"
            for layer in (1, 2)
            for directory in self.directories
        ]
        # If this directory is a copy of another run's, files with the checksum of another home
        # belong to the original. Files that a manifest names belong to a commit, even if there is
        # still a journal.
        if found.startswith(self._sum) and not self._may_be_named(states):
            with contextlib.suppress(OSError):
                whole = start is not None and described(states) == states_of(start)
                if head is not None and head["directories"] == directories and whole:
                    return found
            # No manifest names these files, and this process cannot resume their initialization:
            # free their space.
            with typed_errors(self.home, "unlink", 0):
                unlink_states(states)
        # `mine` is random, so that a new process overwrites no file of an earlier process.
        self.journal.begin({"id": mine, "directories": directories})
        return mine

    def _may_be_named(self, states: Sequence[Path]) -> bool:
        try:
            named = {path.name for path in self._all_named(self.rank)}
        except (OSError, ValueError):
            return True
        # Compare names, not paths: another drive may be mounted at the earlier process's path now.
        return any(path.name in named for path in states)

    def _name_home(self, link: Path) -> None:
        with typed_errors(link, "open", 0), contextlib.suppress(FileExistsError):
            # A link from the further drive to the home, by which `_of_others` of another run finds
            # this run's manifests.
            link.symlink_to(_real(self.home))

    def name(self, layer: int, drive: int) -> str:
        """Return the name of a states file in manifests, relative to `home`."""
        file = Path(self.layers[layer][drive].path).name
        return f"{self._links[drive - 1]}/{file}" if drive else file

    def _newest(self, directories: Sequence[Path], released: bool) -> list[Head] | None:
        try:
            found = newest_run(directories)
        except (AioError, ValueError) as error:
            # The user has released this run, so its damage does not matter.
            if released:
                return None
            if isinstance(error, SeveralRunsError):
                raise
            # Training can resume from an older commit; the restore reports the damage.
            found = readable_run(directories)
            if found is None:
                raise
        if found is None:
            return None
        self.source = found.place
        return found.heads

    def _find_moved(self) -> None:
        """Mend the links of the earlier run: make each link lead to the directory of this run that
        now has the link's files.

        Since the last commit, drives may have been mounted at other paths, or copied together with
        the first drive.
        """
        mine = {_real(run): run for run in self.directories if run != self.source}
        names = {entry.name for manifest in self.before or () for entry in manifest.files}
        files = {each[0]: each[2] for each in sorted(name.rpartition("/") for name in names)}
        files = {link: file for link, file in files.items() if _DRIVE.fullmatch(link)}
        # A states file has the same name on all drives, so `link_to` reads the name of the link to
        # each drive; "" if an earlier release used the drive.
        targets = {
            link: place
            for link, file in files.items()
            if (self.source / link / file).exists()
            and (place := _real(self.source / link)) in mine
            and link_to(place, file) in (link, "")
        }
        for link, file in files.items():
            unused = (run for place, run in mine.items() if place not in targets.values())
            found = next(
                (
                    run
                    for run in unused
                    if (run / file).is_file() and link_to(run, file) in (link, "")
                ),
                None,
            )
            if link not in targets and found is not None:
                targets[link] = _real(found)
                with typed_errors(self.source / link, "rename", 0):
                    lead(self.source / link, found.absolute(), self.rank)

    def _take_links(self) -> None:
        """Give a new home the links of the copy that this run resumes from. The earlier manifests
        name files by these links, and `add` gives every copy the home's links."""
        if self.source in self.copies:
            for link in self.source.glob("drive*"):
                with typed_errors(link, "open", 0):
                    if link.name != "drive0":
                        lead(self.home / link.name, link.readlink(), self.rank)

    def _drives(self) -> list[Path]:
        return [
            path
            for path in self.home.iterdir()
            if _DRIVE.fullmatch(path.name) and path.is_symlink()
        ]

    def _all_named(self, rank: int | None = None) -> set[Path]:
        """Return the files (as `_named_in`) that the manifests of this run name, and those of the
        run from whose copy this run resumes."""
        return set[Path]().union(*(_named_in(place, rank) for place in self._all_places()))

    def _all_places(self) -> set[Path]:
        """Return the directories that may have manifests of this run, or of the run from whose copy
        this run resumes."""
        # If `source` is a copy of another run, that run's copies have this name on all drives.
        places = {*self.places, *(run / self.source.name for run in self.directories)}
        return {place for place in places if place.is_dir()}

    def keep(self) -> None:
        """Keep the files when the process ends: a manifest is about to name them."""
        if not self._named:
            # A process must not resume an initialization in files that a manifest names, so forget
            # the journal's records before. The journal's head stays until the manifests of all
            # ranks name their files (`committed`).
            self.journal.forget()
        self._named = True

    def committed(self) -> None:
        """Remove the journal: the manifests of all ranks name the states files now. Blocks, once.
        Raises: AioError."""
        if self.journal.head is not None:
            self.journal.remove()

    def release_older(self, world: int) -> bool:
        """Remove this rank's part of an earlier process's commits, except the newest commit, to
        free space. Returns whether there were such commits, which is equal on all ranks. Blocks.
        """
        if not self._older or self.before is None:
            return False
        self._older = False
        log.warning(
            "%s: the drives lack space, so only the newest commit of an earlier process stays, "
            "step %d",
            self.home,
            self.before[0].step,
        )
        newest = self.before[0].generation
        tables = {head.table.name for head in self.before if head.table is not None}
        # Rank 0 also removes the parts of ranks that only the earlier run had.
        ranks = {self.rank} | set(range(world, self.before[0].world) if self.rank == 0 else ())
        gone = [
            path
            for place in self._all_places()
            for path, number in files_of(place)
            if number < newest
            and path.name not in tables
            and any(is_of(path, rank) for rank in ranks)
        ]
        # Manifests first: no manifest may outlive a file that it names.
        remove(sorted(gone, key=lambda path: not path.name.startswith("manifest-")))
        self._remove_unnamed(world)
        return True

    def _remove_unnamed(self, world: int) -> None:
        """Remove this rank's states files that no manifest names, such as those of a killed
        process, to free space. Rank 0 also removes such files of ranks that only an earlier, larger
        run had.
        """
        try:
            # This process holds this rank's lock, so no other process adds manifests of the rank.
            keep = self._all_named(self.rank)
            gone = [
                path
                for path in self._states_here()
                if path.suffix == f".rank{self.rank}"
                # Keep the files of an initialization that this process resumes.
                and not path.name.startswith(f"states-{self._id}-")
                and self._is_own(path)
                and _real(path) not in keep
            ]
            unlink_states(gone)
            if self.rank == 0:
                self._remove_unnamed_beyond(world)
        except (OSError, ValueError) as error:
            # A released run may have a damaged manifest, whose files are unknown.
            log.warning(
                "%s: states that no manifest names stay until a commit: %s", self.home, error
            )

    def _remove_unnamed_beyond(self, world: int) -> None:
        """Remove the states files of ranks from `world` on that no manifest names and no process
        holds. Raises: OSError, ValueError for a manifest that cannot be read."""
        free = [
            path
            for path in self._states_here()
            if int(path.suffix.removeprefix(".rank")) >= world
            and self._is_own(path)
            and not _is_held(path)
        ]
        if free:
            # Read manifests after the check of locks: an ended process writes no more manifests.
            keep = self._all_named()
            unlink_states(path for path in free if _real(path) not in keep)

    def _states_here(self) -> Iterator[Path]:
        for directory in self.directories:
            for path in directory.iterdir() if directory.is_dir() else ():
                found = _STATES.fullmatch(path.name)
                if found is None or not (
                    directory == self.home or found.group(1) == self._sum
                ):
                    continue
                if _is_ordinary(path):
                    yield path

    def _is_own(self, path: Path) -> bool:
        if path.name.startswith(f"states-{self._sum}"):
            return True
        # The name has the checksum of another path. A file in the home is this run's, since the
        # directory was moved, unless there is a link home-<sum>: then the directory was a further
        # drive of the file's run.
        return _real(path.parent) == _real(self.home) and not _home_link(path).is_symlink()

    def remove_strangers(self, named: Iterable[str]) -> None:
        """Remove states files that no manifest names and no process holds: files of the earlier
        run and of dead processes. Files that another run may name stay (`_of_others`). Also remove
        links to drives without named files.

        named: names of files in manifests, relative to `home`.
        """
        names = set(named)
        # Paths are resolved, since several links may lead to the same file.
        keep = {_real(self.home / name) for name in names}
        gone = {
            _real(self.source / entry.name)
            for manifest in self.before or ()
            for entry in manifest.files
        }
        gone |= {_real(path) for path in self._states_here()}
        # A manifest names only files with its chunks. The same process may have made more files in
        # the same directories.
        gone |= {
            each
            for path in gone
            for each in path.parent.glob(path.name.rpartition("-")[0] + "-*.rank*")
        }
        # Files of this process are in use before a manifest names them.
        keep |= {_real(Path(file.path)) for files in self._made for file in files}
        gone = {path for path in gone if _STATES.fullmatch(path.name) and _is_ordinary(path)}
        gone -= keep
        # This process holds this rank's lock, so no other process uses the rank's files. The
        # processes of other ranks and of other runs hold locks on their files.
        mine = f".rank{self.rank}"
        gone = {
            path
            for path in gone
            if (path.suffix == mine and self._is_own(path)) or not _is_held(path)
        }
        # If this run's home is a copy of another run's home, its links may still lead to the
        # original's drives, whose states must stay.
        gone -= self._of_others(gone)
        unlink_states(gone)
        # A link stays while a manifest or this process uses it.
        links = {name.partition("/")[0] for name in names} | set(self._links)
        unused = [path for path in self._drives() if path.name not in links]
        self._remove_copies(unused)
        remove(unused)
        # Remove a link home-<sum> with the last states file of this sum in the link's directory.
        homes = {_home_link(path) for path in gone}
        remove(
            [
                link
                for link in homes
                if not any(link.parent.glob(f"states-{link.name.removeprefix('home-')}*"))
            ]
        )

    def _remove_copies(self, unused: Sequence[Path]) -> None:
        """Remove copies of manifests that are no longer needed: copies of other runs without states
        files in the copy's directory, such as the run from which this run resumed; and this run's
        copies on drives that it no longer uses. unused: the links to those drives. Raises: OSError.
        """
        mine = {_real(run) for run in self.directories}
        for link in unused:
            if _real(link) not in mine:
                remove_copy(copy_in(_real(link), self.home))
            remove([copy / link.name for copy in self.copies])
        for run in self.directories:
            for copy in run.glob("copy-*"):
                begin = copy.name.removeprefix("copy-")
                if begin != self._sum and not any(run.glob(f"states-{begin}*")):
                    remove_copy(copy)

    def _of_others(self, states: Iterable[Path]) -> set[Path]:
        """Return those of these files, resolved, that another run names, or whose initialization it
        may resume, or that it may name because the run cannot be read.

        For example, a copy of a run's first directory still has links to the original's further
        drives.
        """
        found = set()
        by_link: dict[Path, list[Path]] = {}
        for path in states:
            if not self._is_own(path):
                by_link.setdefault(_home_link(path), []).append(path)
        for link, paths in by_link.items():
            # This run resumes from a copy of that run, whose home is unreadable.
            if link.name.removeprefix("home-") == self.source.name.removeprefix("copy-"):
                continue
            try:
                # The directory is the home of another run, which removes such files.
                if link.parent != _real(self.home) and generations(link.parent):
                    found.update(paths)
                    continue
                home = link.readlink() if link.is_symlink() else None
                # A run without a home is lost, and names no file.
                if home is None or not home.is_dir():
                    continue
                kept, journals = _named_in(home), ids_of_journals(home)
            except (OSError, ValueError):
                # An unreadable run may name all of these files.
                found.update(paths)
                continue
            found |= {path for path in paths if path in kept or _id_of(path) in journals}
        return found

    def _remove_states(self) -> None:
        # Close all files. Keep them for the next process if a manifest names them, or if the
        # journal lets that process resume the initialization.
        stays = self._named or self.journal.resumes
        if self._made and not self._named and stays:
            log.warning(
                "%s: loading the model was interrupted; inf.offload of the same model from the "
                "same files resumes it. Remove the directory to discard it",
                self.home,
            )
        for files in self._made:
            for file in files:
                file.close()
                if not stays:
                    unlink_states([Path(file.path)])
        self.journal.close()
        # Without an id `_adopted` has failed, and the journal may belong to an earlier process.
        if not stays and self._id:
            self.journal.remove()

    def close(self) -> None:
        self._undo.close()


def _named_in(home: Path, rank: int | None = None) -> set[Path]:
    """Return the files, resolved, that the manifests in a home name. rank: the rank whose manifests
    are read; None: all ranks. Raises: OSError, ValueError for an unreadable manifest.

    Manifests of interrupted commits count, too: another rank of the dead run may still write its
    part, which makes the generation whole.
    """
    return {
        _real(home / entry.name)
        for path, _ in files_of(home)
        if path.name.startswith("manifest-")
        and path.suffix != ".partial"
        and (rank is None or is_of(path, rank))
        for entry in read_head(path).files
    }


def unlink_states(states: Iterable[Path]) -> None:
    """Remove states files, the .owner files beside them, and their lists of bad ranges. A file that
    has bad ranges is retired to bad-… instead."""
    for path in states:
        kept = retire_states(path)
        # The states file last, so that after a kill the next process finds the file.
        remove([_sidecar(path), list_of_bad(path), *([] if kept else [path])])


def _id_of(states: Path) -> str:
    return states.name.split("-")[1]


def _home_link(states: Path) -> Path:
    """Return the link from a further drive to the home of the run that owns a states file."""
    found = _STATES.fullmatch(states.name)
    assert found is not None
    return states.with_name(f"home-{found.group(1)}")


def _sidecar(states: Path) -> Path:
    return states.with_name(f".{states.name}.owner")


def _is_ordinary(path: Path) -> bool:
    """Return whether a path with the name of a states file is a regular file, not a link, a FIFO or
    a directory. True if the file no longer exists.
    """
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return True


def _is_held(path: Path) -> bool:
    try:
        # O_NONBLOCK: opening a FIFO must not block this process.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        # Closing the descriptor releases the lock if the test acquired it.
        return not lock(fd)
    finally:
        os.close(fd)


def _check_no_home(directory: Path, copy: Path) -> None:
    """Raise ValueError if a directory after the first holds a run's manifests: it is the home of
    that run, which `newest_run` would not find. copy: the path of this run's copy in the directory.
    """
    # This run's copy exists, so the directory is no home of another run.
    if copy.is_dir() and generations(copy):
        return
    if directory.is_dir() and generations(directory):
        raise ValueError(
            f"{str(directory.parent)!r} holds the manifests of a durable run, and is not the first "
            "directory in Policy.nvme: name it first to resume that run, or name another directory "
            "of that drive here to keep both"
        )


def _link(home: Path, target: Path) -> str:
    """Make a symbolic link drive<n> to `target` in `home`, unless one exists. Returns the name of
    the link.
    """
    number = 1
    while True:
        # Find the first number without a link, or with a link to `target`.
        path = home / f"drive{number}"
        with typed_errors(path, "open", 0):
            try:
                path.symlink_to(target)
            except FileExistsError:
                # A manifest of the earlier run may name files by this link, so it stays.
                if not path.is_symlink() or path.readlink() != target:
                    number += 1
                    continue
        return path.name


# -- bad ranges ------------------------------------------------------------------------------------
# Lists of the byte ranges of states files where a write failed. A list outlives its process.
#
#     .states-<id>-<n>.rank<r>.bad     a line of JSON for each bad range, beside the states file
#     bad-<id>-<n>.rank<r>             a states file that no run uses any more, with holes in place
#                                      of all its ranges except the bad ones
#
# The device blocks under a bad range stay allocated to that file, so that the file system does not
# give them to another file. Users remove `bad-*` after they have replaced the drive.


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_KEEP_SIZE_AND_PUNCH = 3


def list_of_bad(states: Path) -> Path:
    """Return the file that lists the bad ranges of a states file."""
    return states.with_name(f".{states.name}.bad")


def remember_bad(states: Path, offset: int, size_bytes: int) -> None:
    """Add a range to the list of a states file. Blocks for the drive. Raises: AioError."""
    path = list_of_bad(states)
    # The record begins with a newline, since a kill may have torn the last line.
    line = b"\n" + json.dumps({"offset": offset, "size_bytes": size_bytes}).encode() + b"\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    with typed_errors(path, "write", len(line)):
        fd = os.open(path, flags, 0o600)
        try:
            os.write(fd, line)
            os.fsync(fd)
        finally:
            os.close(fd)
    sync_directory(path.parent)


def bad_ranges(states: Path) -> list[tuple[int, int]]:
    """Return the bad ranges of a states file, [start, stop) each, ascending and disjoint."""
    try:
        lines = list_of_bad(states).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return list(_joined(sorted(_ranges(lines))))


def _ranges(lines: Iterable[bytes]) -> Iterator[tuple[int, int]]:
    for line in lines:
        try:
            found = json.loads(line)
            start, stop = int(found["offset"]), int(found["offset"]) + int(found["size_bytes"])
        except (ValueError, KeyError, TypeError):
            # An empty line, or one that a kill has torn. A write to a range that is lost thus fails
            # once more.
            continue
        if 0 <= start < stop:
            yield start, stop


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    start = stop = -1
    for first, last in ranges:
        if first > stop:
            if stop > start:
                yield start, stop
            start, stop = first, last
        stop = max(stop, last)
    if stop > start:
        yield start, stop


def retire_states(states: Path) -> bool:
    """Free all ranges of a states file except bad ones, and rename it from states-… to bad-….
    Returns False, with the name unchanged, if the file has no bad ranges, if fallocate fails, or if
    a checkpoint has a hard link to the file. The caller may then unlink the file.
    """
    bad = bad_ranges(states)
    if not bad:
        return False
    starts, stops = [start for start, _ in bad], [stop for _, stop in bad]
    try:
        fd = os.open(states, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        status = os.fstat(fd)
        if status.st_nlink > 1:
            # Holes would destroy the checkpoint's data.
            return False
        end = status.st_size
        for start, stop in zip([0, *stops], [*starts, end], strict=True):
            if stop > start and _LIBC.fallocate(fd, _KEEP_SIZE_AND_PUNCH, start, stop - start):
                code = ctypes.get_errno()
                log.warning("%s: bad ranges are forgotten: %s", states, os.strerror(code))
                return False
    finally:
        os.close(fd)
    # Rename last, so that after a kill the next process finds the file and its list.
    states.rename(states.with_name(f"bad-{states.name.removeprefix('states-')}"))
    return True
