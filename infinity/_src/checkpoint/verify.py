"""Inspection of checkpoints without a model: list the generations of a directory, and verify every
byte of a generation against its checksums.

    list_generations    manifests and the lengths of files; reads no states
    VerifyJob           reads all files, and names all damage: file, range, parameter

If the manifest of one rank is damaged, both still read the manifests of all other ranks. If the
checksums of a chunk do not match, `VerifyJob` checks the chunk piece by piece.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from infinity._src.cabi import native
from infinity._src.cabi.records import PIECE_NUMEL, SECTION_MAX, sum_seed
from infinity._src.checkpoint.directory import (
    begun_commits,
    check_length,
    generations,
    read_attachment,
    read_manifest,
)
from infinity._src.checkpoint.durable.copies import RUN_DIRECTORY, run_directory
from infinity._src.checkpoint.manifest import (
    FOLDED,
    PADDED,
    PIECE_BYTES,
    FileEntry,
    Manifest,
    manifest_name,
    pieces_of,
    section_bytes,
)
from infinity._src.checkpoint.reader import DataReader
from infinity._src.params.chunk_pipeline import Bytes, ChunkPipeline, slab_buffers
from infinity.aio import Ticket
from infinity.errors import AioError, ChecksumError


@dataclasses.dataclass(frozen=True)
class ListedFile:
    """A manifest, or a file that a manifest names. disk_bytes: allocated bytes on the drive; None
    for a missing file.
    """

    rank: int
    name: str
    size_bytes: int
    disk_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generation of a directory. why_not: why the generation is not whole, "" if it is whole. All
    other fields come from the readable manifests.

    params: elements of the saved parameters. formats: these elements by state format. left_out:
    elements of frozen parameters that were not saved. written_s: the time of the last written
    manifest, in seconds since 1970.
    """

    number: int
    why_not: str
    step: int | None
    world: int | None
    params: int
    left_out: int
    state: str
    formats: dict[str, int]
    optimizers: tuple[str, ...]
    disk_bytes: int
    written_s: float | None
    files: tuple[ListedFile, ...]

    @property
    def whole(self) -> bool:
        return not self.why_not


def find_checkpoints(directory: Path) -> list[Path]:
    """Find checkpoints and durable runs in a directory and in its direct sub-directories."""
    found: list[Path] = []
    if not directory.is_dir():
        return found
    # `run_directory` finds a run through the run's parent, so the run itself is not listed again.
    below = sorted(
        path for path in directory.iterdir() if path.is_dir() and path.name != RUN_DIRECTORY
    )
    for path in (directory, *below):
        place = run_directory(path)
        if generations(place):
            found.append(place)
    return found


def list_generations(directory: Path) -> list[Generation]:
    """List the generations of a directory that have a manifest, newest first. Reads manifests, but
    no states.
    """
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
            # Read all other ranks' manifests, too: they show which parts remain.
            how = f"damaged: {error}" if path.exists() else "missing"
            problems.append(f"the manifest of rank {rank} is {how}")
        else:
            if manifests and (manifest.save, manifest.world) != (
                manifests[0].save,
                manifests[0].world,
            ):
                problems.append(f"the manifest of rank {rank} is of another save")
            manifests.append(manifest)
            world = max(world, manifest.world)
        rank += 1
    files = [file for manifest in manifests for file in _files_of(directory, manifest, problems)]
    first = manifests[0] if manifests else None
    # One manifest is enough, since all ranks have the same layout.
    formats: Counter[str] = Counter()
    for flat in first.layout.flats if first is not None else ():
        numel = sum(param.numel for param in flat.params)
        held = flat.state_format
        formats[
            f"{flat.dtype} {held.master.name} {held.count} x {held.moments.name}"
            if held
            else f"{flat.dtype} alone"
        ] += numel
    return Generation(
        number=number,
        why_not="; ".join(problems),
        step=first.step if first is not None else None,
        world=first.world if first is not None else None,
        params=sum(formats.values()),
        left_out=sum(entry.numel for entry in first.layout.left_out) if first is not None else 0,
        state=str(first.layout.numerics.get("state", "")) if first is not None else "",
        formats=dict(formats),
        optimizers=tuple(entry.title for entry in first.optimizers) if first is not None else (),
        disk_bytes=sum(
            file.disk_bytes or 0 for file in {file.name: file for file in files}.values()
        ),
        written_s=_written(directory, number, world),
        files=tuple(files),
    )


def _files_of(directory: Path, manifest: Manifest, problems: list[str]) -> list[ListedFile]:
    used = {int(index) for index in manifest.rows["file"]}
    entries = [file for index, file in enumerate(manifest.files) if index in used]
    entries += manifest.attached
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
        # st_blocks counts units of 512 bytes on every file system, without holes of sparse files.
        taken = (directory / file.name).stat().st_blocks * 512
    return ListedFile(rank, file.name, file.size_bytes, taken)


def _written(directory: Path, number: int, world: int) -> float | None:
    times = []
    for rank in range(world):
        with contextlib.suppress(OSError):
            times.append((directory / manifest_name(number, rank)).stat().st_mtime)
    return max(times, default=None)


# -- verifying -------------------------------------------------------------------------------------


AHEAD = 4
"""Chunks that are read at once. The pipeline needs no more buffers, since it writes nothing."""


@dataclasses.dataclass(frozen=True)
class Damage:
    """A damaged range of a file. what: the parameters and the section in that range, or the kind of
    file. reason: a description of the damage.
    """

    path: str
    offset: int
    length: int
    what: str
    reason: str


class VerifyJob:
    """Verification of one generation: the given one; else the newest that has the manifests of all
    ranks; else the newest that has any manifest.

    Raises: AioError (ENOENT) if there is no such generation.
    """

    def __init__(
        self, directory: Path, generation: int | None = None, *, backend: str = "auto"
    ) -> None:
        # `begun_commits` leaves out generations with partial manifests only: a running save is not
        # damage.
        begun = begun_commits(directory) if directory.is_dir() else []
        if generation is not None and generation not in begun:
            known = ", ".join(map(str, begun)) or "none"
            raise AioError(
                f"there is no generation {generation} (existing: {known})",
                errno=errno.ENOENT,
                path=str(directory),
                op="open",
            )
        if not begun:
            raise AioError(
                "there is no checkpoint", errno=errno.ENOENT, path=str(directory), op="open"
            )
        self.directory = directory
        # The generation that a restore would choose. A generation with a damaged manifest counts as
        # committed: otherwise the damage would hide the generation.
        whole = next((number for number in begun if self._is_committed(number)), begun[0])
        self.generation = whole if generation is None else generation
        self._backend = backend
        self.damage: list[Damage] = []
        self.manifests = self._read_manifests()
        self.size_bytes = sum(int(_row_bytes(manifest).sum()) for manifest in self.manifests)
        """Bytes of states that `verify` reads."""

    def verify(
        self, progress: Callable[[str, int], object] = lambda _file, _size: None
    ) -> list[Damage]:
        """Read the whole generation, and return all damage. Blocks. progress: called with the file
        and the bytes of each chunk.
        """
        for manifest in self.manifests:
            for file in manifest.attached:
                self._attachment(file)
            for index in range(len(manifest.files)):
                self._file(manifest, index, progress)
        return self.damage

    def _is_committed(self, generation: int) -> bool:
        """Return whether every rank has a manifest; a damaged manifest counts."""
        names = {path.name for path in self.directory.glob(f"{manifest_name(generation, 0)[:-1]}*")}
        for name in names:
            try:
                world = read_manifest(self.directory / name).world
            except (AioError, ValueError):
                # `_read_manifests` reports the damage.
                continue
            # Every readable manifest has the number of ranks.
            return all(manifest_name(generation, rank) in names for rank in range(world))
        return bool(names)

    def _read_manifests(self) -> list[Manifest]:
        # All manifests are read, even if the first is damaged: the damage of one manifest must not
        # hide the damage of others.
        found: list[Manifest] = []
        world, rank = 1, 0
        while rank < world:
            path = self.directory / manifest_name(self.generation, rank)
            try:
                manifest = read_manifest(path)
            except AioError as error:
                reason = "is missing" if error.errno == errno.ENOENT else "is not what was written"
                # The error names the manifest, or the table that the manifest names.
                where = Path(error.path) if error.path else path
                self._report(where, 0, error.length, f"the manifest of rank {rank}", reason)
                world = max(world, self._ranks())
            # A later release wrote the manifest, the manifest's version is damaged, or no engine
            # wrote it.
            except ValueError as error:
                what = f"the manifest of rank {rank}"
                self._report(path, 0, path.stat().st_size, what, str(error))
                world = max(world, self._ranks())
            else:
                world = max(world, manifest.world)
                # All manifests must be of one save: compare each with the first.
                if found and (manifest.save, manifest.world) != (found[0].save, found[0].world):
                    self._report(
                        path,
                        0,
                        0,
                        f"the manifest of rank {rank}",
                        "is of another save than the first rank's",
                    )
                else:
                    found.append(manifest)
            rank += 1
        return found

    def _ranks(self) -> int:
        # A damaged manifest does not give the number of ranks: use the highest rank in the names of
        # manifests.
        prefix = manifest_name(self.generation, 0).removesuffix("0")
        ranks = [path.name.removeprefix(prefix) for path in self.directory.glob(f"{prefix}*")]
        return 1 + max((int(rank) for rank in ranks if rank.isdigit()), default=0)

    def _report(self, path: Path, offset: int, length: int, what: str, reason: str) -> None:
        self.damage.append(Damage(str(path), offset, length, what, reason))

    def _attachment(self, file: FileEntry) -> None:
        kind = file.name.partition("-")[0]
        try:
            read_attachment(self.directory, file)
        except ChecksumError:
            self._report(
                self.directory / file.name, 0, file.size_bytes, kind, "is not what was written"
            )
        except AioError as error:
            reason = "is missing" if error.errno == errno.ENOENT else str(error)
            self._report(self.directory / file.name, 0, file.size_bytes, kind, reason)

    # -- data files --------------------------------------------------------------------------------

    def _file(self, manifest: Manifest, index: int, progress: Callable[[str, int], object]) -> None:
        file = manifest.files[index]
        path = self.directory / file.name
        # Each file has a separate reader, which gets the rows of this file.
        mine = np.flatnonzero(manifest.rows["file"] == index)
        try:
            size = path.stat().st_size
        except OSError as error:
            if len(mine):
                reason = (
                    "is missing"
                    if error.errno == errno.ENOENT
                    else f"cannot be read: {error.strerror}"
                )
                self._report(path, 0, file.size_bytes, f"states of rank {manifest.rank}", reason)
            return
        sizes = _row_bytes(manifest)
        # Rows before the cut can still be verified.
        ends = manifest.rows["file_offset"][mine] + manifest.rows["run_bytes"][mine]
        if size < file.size_bytes and len(mine) and int(ends.max()) > size:
            self._report(
                path,
                size,
                file.size_bytes - size,
                f"states of rank {manifest.rank}",
                "was cut short",
            )
            mine = mine[ends <= size]
        if not len(mine):
            return
        # The reader refuses a file that is shorter than its entry; the cut has been reported.
        entry = dataclasses.replace(file, size_bytes=min(size, file.size_bytes))
        rows = manifest.rows[mine]
        rows["file"] = 0  # an index into the reader's files
        reader = DataReader(
            self.directory,
            [entry],
            rows,
            manifest.layout.flats,
            manifest.sums,
            algorithm=manifest.algorithm,
            backend=self._backend,
        )
        # The reader's threads and staging buffers end before the next file is opened.
        with contextlib.closing(reader):
            self._rows(
                manifest,
                mine.tolist(),
                reader,
                path,
                lambda row: progress(file.name, int(sizes[row])),
            )

    def _rows(
        self,
        manifest: Manifest,
        mine: list[int],
        reader: DataReader,
        path: Path,
        done: Callable[[int], object],
    ) -> None:
        """Read and check the rows `mine`, which are all rows of the reader."""
        padded = section_bytes(manifest.rows, manifest.layout.flats)
        size = int(padded[mine].sum(axis=1).max(initial=4096))

        def read(item: tuple[int, int], buffer: Bytes) -> Ticket:
            in_file, row = item
            at = np.cumsum(padded[row]) - padded[row] + buffer.ctypes.data
            # Other sections of the chunk are in other rows, which are read separately.
            wanted = np.where(manifest.rows[row]["section_at"] >= 0, at, 0)[None]
            (ticket,) = reader.fetch(np.array([in_file]), wanted.astype(np.uint64))
            return ticket

        def failed(item: tuple[int, int], error: AioError) -> None:
            # The executor reports only the first damaged piece; `_look_closer` reports all.
            if isinstance(error, ChecksumError):
                self._look_closer(manifest, item[1], path, error)
            else:
                what = ", ".join(_places(manifest, item[1]))
                self._report(path, error.offset, error.length, what, f"cannot be read: {error}")

        with slab_buffers(size, AHEAD) as buffers:
            pipeline = ChunkPipeline(
                buffers,
                # All buffers are for reads, since nothing is written.
                ahead=AHEAD,
                read=read,
                # The executor has compared the checksums.
                transform=lambda _item, _buffer: None,
                finish=lambda item, _buffer: done(item[1]),
                read_failed=failed,
            )
            pipeline.run(enumerate(mine))

    def _look_closer(self, manifest: Manifest, row: int, path: Path, error: ChecksumError) -> None:
        """Report every damaged piece of a row. If this second read finds no damage, report the
        first read's error.
        """
        before = len(self.damage)
        # This second read uses the page cache, which the executor's read may have bypassed.
        with path.open("rb") as file:
            for piece in _pieces(manifest, row):
                file.seek(piece.offset)
                if not piece.matches(file.read(piece.length)):
                    what = ", ".join(_places(manifest, row, piece))
                    self._report(path, piece.offset, piece.length, what, "is not what was written")
        # The second read found the right bytes, so the drive returned wrong bytes the first time.
        if len(self.damage) == before:
            what = ", ".join(_places(manifest, row))
            self._report(
                path,
                error.offset,
                error.length,
                what,
                "is not what was written when read from the drive",
            )


def _row_bytes(manifest: Manifest) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Count the bytes that `VerifyJob` reads of each row: its sections except zero sections."""
    sizes = section_bytes(manifest.rows, manifest.layout.flats)
    zeros = manifest.rows["zeros"][:, None] >> np.arange(SECTION_MAX) & 1 != 0
    read: np.ndarray[tuple[int], np.dtype[np.int64]] = np.where(
        (manifest.rows["section_at"] >= 0) & ~zeros, sizes, 0
    ).sum(axis=1)
    return read


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A part of a section that has a checksum: elements [low, high) of the chunk, and their bytes
    in the file. seeds: the seed of the checksum. A folded checksum is the checksum of the checksums
    of every `step` bytes, and `seeds` has the seed of each of these.
    """

    section: int
    low: int
    high: int
    offset: int
    length: int
    seeds: tuple[int, ...]
    step: int
    folded: bool
    expected: int

    def matches(self, data: bytes) -> bool:
        sums = [
            native.crc32c(data[at * self.step :][: self.step], seed)
            for at, seed in enumerate(self.seeds)
        ]
        found = native.crc32c(np.array(sums, dtype="<u4")) if self.folded else sums[0]
        return found == self.expected


def _pieces(manifest: Manifest, row: int) -> Iterator[_Piece]:
    entry = manifest.rows[row]
    flat = manifest.layout.flats[entry["flat"]]
    padded = section_bytes(manifest.rows[[row]], manifest.layout.flats)[0]
    counts = pieces_of(manifest.rows[[row]], manifest.layout.flats)[0]
    first = int(entry["sums_at"]) + np.cumsum(counts) - counts
    numel, how = int(entry["numel"]), int(entry["padded"])
    for s, section in enumerate(flat.sections):
        if entry["section_at"][s] < 0 or entry["zeros"] >> s & 1:
            continue
        start = int(entry["file_offset"]) + int(entry["section_at"][s])
        total = int(padded[s]) if how == PADDED else section.size_bytes(numel)
        # Executors compute checksums of padded rows by bytes, and of a run's rows by elements.
        step = PIECE_BYTES if how == PADDED else section.size_bytes(PIECE_NUMEL)
        # A padded section is a separate chunk, so its key differs and its number is 0.
        key, number = int(entry["key"]) + s * (how == PADDED), s * (how != PADDED)
        inside = -(-total // step) if how == FOLDED else 1
        items = section.group_numel * inside * step // section.itemsize
        for piece in range(int(counts[s])):
            at = piece * inside
            seeds = [
                sum_seed(int(entry["generation"]), key, number, at + each) for each in range(inside)
            ]
            yield _Piece(
                section=s,
                low=min(piece * items, numel),
                high=min((piece + 1) * items, numel),
                offset=start + at * step,
                length=min(inside * step, total - at * step),
                seeds=tuple(seeds),
                step=step,
                folded=how == FOLDED,
                expected=int(manifest.sums[first[s] + piece]),
            )


def _places(manifest: Manifest, row: int, piece: _Piece | None = None) -> list[str]:
    """Name the contents of a piece of a section, or of a whole row: "lo of
    model.norm.weight[0:64]", for each parameter.
    """
    entry = manifest.rows[row]
    flat = manifest.layout.flats[entry["flat"]]
    low, high = (piece.low, piece.high) if piece is not None else (0, int(entry["numel"]))
    # Convert indices of the shard to those of the whole flat, as parameters' offsets are.
    base = manifest.rank * flat.shard_numel + int(entry["start"])
    found = []
    for param in flat.params:
        first, last = max(base + low, param.offset), min(base + high, param.offset + param.numel)
        if first < last:
            place = f"{param.name}[{first - param.offset:,}:{last - param.offset:,}]"
            if piece is not None:
                place = f"{flat.sections[piece.section].name} of {place}"
            found.append(place)
    return found or [f"padding of unit {flat.unit or 'the model'}"]
