"""The files of a durable run: their places, their locks, and the files that an earlier run left.

    <nvme[0]>/infinity-run/
        manifest-<generation>.rank<r>, buffers-…, extra-…, table-…    (directory.py)
        states-<id>-<n>.rank<r>                  this rank's chunks; more after linked saves
        drive1 -> <nvme[1]>/infinity-run/        for each further drive (or another number)
        fill.rank<r>                             until the first commit (fill_journal.py)
        lock.rank<r>
    <nvme[1]>/infinity-run/
        states-<id>-<n>.rank<r>
        home-<sum> -> <nvme[0]>/infinity-run/    the home of the states here

A run's states lie in two files on each drive, named anew for each process, so one that has just
begun overwrites nothing; but one goes on with those of a fill that broke off. Files that no
manifest names are removed: a rank's own when it begins, since their room is wanted, with those of
ranks that an earlier run had and this one has not, and all when a step was committed. An id begins
with a sum of the run's first directory: the files of other runs may lie beside these, also of the
run that this one is a copy of, and in the home those of runs to which it is a further drive.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from infinity._src.checkpoint.directory import (
    files_of,
    generations,
    is_of,
    newest_heads,
    read_head,
    remove,
    sync_directory,
    typed_errors,
)
from infinity._src.checkpoint.fill_journal import (
    FillJournal,
    described,
    ids_of_fills,
    states_of,
)
from infinity._src.checkpoint.manifest import Head
from infinity.aio import SwapFile
from infinity.aio._swap_owner import lock
from infinity.errors import AioError

log = logging.getLogger("infinity")

RUN_DIRECTORY = "infinity-run"

# The first 8 digits are a sum of the run's first directory, the others the process's own.
_STATES = re.compile(r"states-([0-9a-f]{8})[0-9a-f]{8}-\d+\.rank\d+")
_DRIVE = re.compile(r"drive\d+")


def _real(path: Path) -> Path:
    """Resolve a path. A loop of links stays as it is, and is refused where it is opened."""
    # Path.resolve raises RuntimeError for one.
    return Path(os.path.realpath(path))


def run_directory(directory: str | os.PathLike[str]) -> Path:
    """Return the place of the manifests: the durable run in this directory, or the directory itself
    (a checkpoint).
    """
    # So that one path means the run, whether the user names its parent or itself.
    inside = Path(directory) / RUN_DIRECTORY
    return inside if inside.is_dir() else Path(directory)


def check_no_run(directory: Path) -> None:
    """Raise ValueError for a directory that holds a durable run: a checkpoint saved there would not
    be found, or would replace the run's manifests.
    """
    if (directory / RUN_DIRECTORY).is_dir() or _real(directory).name == RUN_DIRECTORY:
        raise ValueError(
            f"directory={str(directory)!r} holds a durable run, which inf.restore would take for "
            "the checkpoint: name another (one on the same file system is made by hard links)"
        )


class RunFiles:
    """One rank's files of a durable run in these directories.

    world: how many ranks the run has now; files of others are nobody's but rank 0's to remove.
    give_up: the run that lies there is given up, so its manifests may be damaged.

    Raises: AioError (EWOULDBLOCK) while another process holds the run, ChecksumError for a damaged
    manifest, ValueError for directories that are not this user's, or of which another one than the
    first has a run's manifests.
    """

    def __init__(
        self, directories: Sequence[Path], rank: int, world: int, *, give_up: bool = False
    ) -> None:
        self.rank = rank
        self.directories = [directory / RUN_DIRECTORY for directory in directories]
        self.layers: dict[int, list[SwapFile]] = {}
        """The states files, by layer of the swap space and drive. Set with the layers."""
        self._made: list[list[SwapFile]] = []
        # By the first directory: on other drives several runs may share one infinity-run.
        self._sum = f"{zlib.crc32(os.fsencode(_real(self.home))):08x}"
        self._links: list[str] = []
        self._named = False
        self._id = ""
        with contextlib.ExitStack() as undo:
            # First: nothing below is read or changed while another process has the run.
            self._lock = undo.enter_context(SwapFile.durable(self.home, f"lock.rank{rank}"))
            self.fill = FillJournal(self.home / f"fill.rank{rank}")
            # Before the lock goes: another process may begin the moment it does.
            undo.callback(self._remove_states)
            for run in self.directories[1:]:
                _check_no_home(run)
            self.before = self._newest(give_up)
            self._id = self._adopted()
            # Before `_link`, which then finds the mended links instead of making others.
            self._find_moved()
            self._links += [_link(self.home, run.absolute()) for run in self.directories[1:]]
            self._remove_unnamed(world)
            self._undo = undo.pop_all()

    @property
    def home(self) -> Path:
        """The directory of the manifests."""
        return self.directories[0]

    def add(self) -> list[SwapFile]:
        """Make new states files, one on each drive. Raises: AioError, SwapFullError."""
        self._made.append([])
        for directory in self.directories:
            name = f"states-{self._id}-{len(self._made)}.rank{self.rank}"
            self._made[-1].append(SwapFile.durable(directory, name))
            # `directory` may have been made just now: its own name must survive a crash, too.
            sync_directory(directory.parent)
            if directory != self.home:
                self._name_home(directory / f"home-{self._sum}")
        return self._made[-1]

    def check_place(self) -> None:
        """Raise AioError where the home is no longer the directory whose lock is held here: another
        run may have begun in the one that has its name now.
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

    def sync(self) -> None:
        """Return when what was written to the states files is on the drives. Raises:
        DeviceFailedError."""
        for files in self._made:
            for file in files:
                file.fsync()

    def states(self) -> list[tuple[int, int]]:
        """Return the inode and length of each states file."""
        return described([Path(file.path) for files in self._made for file in files])

    def _adopted(self) -> str:
        """Return the id of the states files: that of a fill that broke off, whose files are all
        here, or a new one.
        """
        head, start, mine = self.fill.head, self.fill.started, self._sum + secrets.token_hex(4)
        directories = [str(_real(directory)) for directory in self.directories]
        found = head["id"] if head is not None else ""
        states = [
            directory / f"states-{found}-{layer}.rank{self.rank}"
            for layer in (1, 2)
            for directory in self.directories
        ]
        # Files with the sum of another directory are those of the run that this is a copy of; and
        # what a manifest names is a commit's, however the journal came to outlive it.
        if found.startswith(self._sum) and not self._may_be_named(states):
            with contextlib.suppress(OSError):
                whole = start is not None and described(states) == states_of(start)
                if head is not None and head["directories"] == directories and whole:
                    return found
            # Nobody else knows of them, and their room is wanted.
            with typed_errors(self.home, "unlink", 0):
                _unlink_states(states)
        # Random: a process that has just begun overwrites nothing of the run before.
        self.fill.begin({"id": mine, "directories": directories})
        return mine

    def _may_be_named(self, states: Sequence[Path]) -> bool:
        """Return whether a manifest of this rank names one of these, or may, as it is damaged."""
        try:
            named = {path.name for path in _named_in(self.home, self.rank)}
        except (OSError, ValueError):
            return True
        # By name: where the earlier process had them, another drive may be mounted now.
        return any(path.name in named for path in states)

    def _name_home(self, link: Path) -> None:
        with typed_errors(link, "open", 0), contextlib.suppress(FileExistsError):
            # Leads back from a further drive: `_of_others` asks that run what it names.
            link.symlink_to(_real(self.home))

    def name(self, layer: int, drive: int) -> str:
        """Return the name of a states file in manifests, relative to `home`."""
        file = Path(self.layers[layer][drive].path).name
        return f"{self._links[drive - 1]}/{file}" if drive else file

    def _newest(self, give_up: bool) -> list[Head] | None:
        try:
            return newest_heads(self.home)
        except (AioError, ValueError) as error:
            # A damaged run is never passed over: only no run at all is, or one that the user gives
            # up.
            if not (give_up or (isinstance(error, AioError) and error.errno == errno.ENOENT)):
                raise
            return None

    def _find_moved(self) -> None:
        """Mend the links of the earlier run: lead each to the directory, among these, in which its
        files are now.

        Drives may be mounted elsewhere than when it was committed, or copied together with the
        first.
        """
        mine = {_real(run) for run in self.directories}
        for name in sorted(
            {entry.name for manifest in self.before or () for entry in manifest.files}
        ):
            link, _, file = name.rpartition("/")
            found = next((run for run in self.directories[1:] if (run / file).is_file()), None)
            if not _DRIVE.fullmatch(link) or found is None:
                continue
            # The link leads to a directory of this run already.
            if (self.home / name).exists() and _real(self.home / link) in mine:
                continue
            with typed_errors(self.home / link, "rename", 0):
                # A name of this rank's: other ranks may mend the same link at the same time.
                new = self.home / f".{link}.rank{self.rank}"
                new.unlink(missing_ok=True)
                new.symlink_to(found.absolute())
                # Atomic: at any moment there is the old link or the new one.
                new.replace(self.home / link)

    def keep(self) -> None:
        """Keep the files when the process ends: a manifest is about to name them."""
        if not self._named:
            # Before they are named: what they hold is the fill's no more. The head stays until all
            # ranks have named theirs (`committed`).
            self.fill.forget()
        self._named = True

    def committed(self) -> None:
        """Note that manifests of all ranks name their files: nobody asks the journal for them.
        Blocks, once. Raises: AioError."""
        if self.fill.head is not None:
            self.fill.remove()

    def _remove_unnamed(self, world: int) -> None:
        """Remove this rank's states files that no manifest names: the generation that a killed
        process was about to write. The new process wants their room. Rank 0 removes those of ranks
        that a larger run had before, too.
        """
        try:
            # No more of this rank will come, as its lock is held here.
            keep = _named_in(self.home, self.rank)
            gone = [
                path
                for path in self._states_here()
                if path.suffix == f".rank{self.rank}"
                # Those of a fill that goes on.
                and not path.name.startswith(f"states-{self._id}-")
                and self._is_own(path)
                and _real(path) not in keep
            ]
            _unlink_states(gone)
            if self.rank == 0:
                self._remove_unnamed_beyond(world)
        except (OSError, ValueError) as error:
            # Nobody knows what a damaged manifest names; a run that is given up may have one.
            log.warning(
                "%s: states that nothing names stay until a commit: %s", self.home, error
            )

    def _remove_unnamed_beyond(self, world: int) -> None:
        """Remove states files that no manifest names of ranks from `world` on, whose processes are
        gone. Raises: OSError, ValueError for a manifest that cannot be read."""
        free = [
            path
            for path in self._states_here()
            if int(path.suffix.removeprefix(".rank")) >= world
            and self._is_own(path)
            and not _is_held(path)
        ]
        if free:
            # Read after that: a process that is gone has named all that it ever will.
            keep = _named_in(self.home)
            _unlink_states(path for path in free if _real(path) not in keep)

    def _states_here(self) -> Iterator[Path]:
        """Yield the states files in these directories that are of this run."""
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
        """Return whether a states file is of this run, and of no other, by its name and place."""
        if path.name.startswith(f"states-{self._sum}"):
            return True
        # In the home, as after a move of the run; but a link beside it says that it is of a run to
        # which this directory was a further drive.
        return _real(path.parent) == _real(self.home) and not _home_link(path).is_symlink()

    def remove_strangers(self, named: Iterable[str]) -> None:
        """Remove states files that no manifest names and no process holds: files of the earlier
        run, and of processes that died; those of another run only once that is gone. Also remove
        links to drives on which no named file lies.

        named: names of files as manifests have them.
        """
        names = set(named)
        # Resolved: the same file may be reached by links of several numbers.
        keep = {_real(self.home / name) for name in names}
        gone = {
            _real(self.home / entry.name)
            for manifest in self.before or ()
            for entry in manifest.files
        }
        gone |= {_real(path) for path in self._states_here()}
        # A manifest names the files that it points into; beside them lie others of the same
        # process.
        gone |= {
            each
            for path in gone
            for each in path.parent.glob(path.name.rpartition("-")[0] + "-*.rank*")
        }
        # Files of this process that no manifest names yet are in use all the same.
        keep |= {_real(Path(file.path)) for files in self._made for file in files}
        gone = {path for path in gone if _STATES.fullmatch(path.name) and _is_ordinary(path)}
        gone -= keep
        # The lock of this rank is held here, so no other process has its files; other ranks hold
        # theirs, and other runs.
        mine = f".rank{self.rank}"
        gone = {
            path
            for path in gone
            if (path.suffix == mine and self._is_own(path)) or not _is_held(path)
        }
        # A copy of the first directory alone must not remove the original's states.
        gone -= self._of_others(gone)
        _unlink_states(gone)
        # A link stays while a manifest, or this process, goes through it.
        links = {name.partition("/")[0] for name in names} | set(self._links)
        drives = [
            path
            for path in self.home.iterdir()
            if _DRIVE.fullmatch(path.name) and path.is_symlink()
        ]
        remove([path for path in drives if path.name not in links])
        # The way back goes with the last states file that it is for.
        homes = {_home_link(path) for path in gone}
        remove(
            [
                link
                for link in homes
                if not any(link.parent.glob(f"states-{link.name.removeprefix('home-')}*"))
            ]
        )

    def _of_others(self, states: Iterable[Path]) -> set[Path]:
        """Return those of these files, resolved, that a run elsewhere names or goes on with.

        A copy of a run's first directory alone still has links to the original's other drives.
        """
        found = set()
        by_link: dict[Path, list[Path]] = {}
        for path in states:
            if not self._is_own(path):
                by_link.setdefault(_home_link(path), []).append(path)
        for link, paths in by_link.items():
            try:
                # The directory that they lie in is the home of a run itself, which clears it.
                if link.parent != _real(self.home) and generations(link.parent):
                    found.update(paths)
                    continue
                home = link.readlink() if link.is_symlink() else None
                # Only a run that is gone has none of them.
                if home is None or not home.is_dir():
                    continue
                kept, filling = _named_in(home), ids_of_fills(home)
            except (OSError, ValueError):
                # A run that cannot be read may name them all.
                found.update(paths)
                continue
            found |= {path for path in paths if path in kept or _id_of(path) in filling}
        return found

    def _remove_states(self) -> None:
        """Close the states files; remove those that no manifest names: no run can use them."""
        # Closed in any case; a file that a manifest names stays for the next process, and so does
        # one of a fill that broke off.
        stays = self._named or self.fill.goes_on
        if self._made and not self._named and stays:
            log.warning(
                "%s: loading the model broke off; inf.offload of the same model from the same "
                "files goes on there. Remove the directory to give that up",
                self.home,
            )
        for files in self._made:
            for file in files:
                file.close()
                if not stays:
                    remove([Path(file.path)])
        self.fill.close()
        # Without an id nothing was begun, and the journal is as it was found.
        if not stays and self._id:
            self.fill.remove()

    def close(self) -> None:
        """Let go of the run. The executor must be closed. Idempotent."""
        self._undo.close()


def _named_in(home: Path, rank: int | None = None) -> set[Path]:
    """Return the files, resolved, that the manifests in a home name. rank: those of one alone.
    Raises: OSError, ValueError for a manifest that cannot be read.

    Each manifest that is there counts, also one of a commit that broke off: another rank of the
    dead run may be about to write its part, and then that generation is whole.
    """
    return {
        _real(home / entry.name)
        for path, _ in files_of(home)
        if path.name.startswith("manifest-")
        and path.suffix != ".partial"
        and (rank is None or is_of(path, rank))
        for entry in read_head(path).files
    }


def _unlink_states(states: Iterable[Path]) -> None:
    """Remove states files, and the words of their owners."""
    # The file last: one that is there is found again.
    remove([each for path in states for each in (_sidecar(path), path)])


def _id_of(states: Path) -> str:
    """Return the id of the process that made a states file."""
    return states.name.split("-")[1]


def _home_link(states: Path) -> Path:
    """Return the link from an additional drive back to the home directory of the run that a states
    file belongs to.
    """
    found = _STATES.fullmatch(states.name)
    assert found is not None
    return states.with_name(f"home-{found.group(1)}")


def _sidecar(states: Path) -> Path:
    """Return the file that names the owner of a states file."""
    return states.with_name(f".{states.name}.owner")


def _is_ordinary(path: Path) -> bool:
    """Return whether a states file is none of what no run makes: a link, which leads elsewhere, a
    FIFO, a directory. One that is gone is ordinary.
    """
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return True


def _is_held(path: Path) -> bool:
    """Return whether a process has the file open as swap space."""
    try:
        # O_NONBLOCK: a FIFO of that name must not hold this process.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        # A lock taken for the test goes with the descriptor.
        return not lock(fd)
    finally:
        os.close(fd)


def _check_no_home(directory: Path) -> None:
    """Raise ValueError where a run's manifests lie in what is not the first directory now: its
    states would be overwritten.
    """
    if directory.is_dir() and generations(directory):
        raise ValueError(
            f"{str(directory.parent)!r} holds the manifests of a durable run, and is not the first "
            "directory in Policy.nvme: name it first to go on with that run, or remove "
            f"{str(directory)!r}"
        )


def _link(home: Path, target: Path) -> str:
    """Make a symbolic link to `target` in `home`. Returns its name, or that of one that is there
    already.
    """
    number = 1
    while True:
        # The first number that is free, or that leads there already.
        path = home / f"drive{number}"
        with typed_errors(path, "open", 0):
            try:
                path.symlink_to(target)
            except FileExistsError:
                # States of the run before are on this drive: its link stays as it is.
                if not path.is_symlink() or path.readlink() != target:
                    number += 1
                    continue
        return path.name
