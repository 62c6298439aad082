"""The manifest describes the states of one rank, and the places of their chunks. It is the file
`manifest-<generation>.rank<r>`, without tensors.

    magic, version, lengths | layout (JSON) | state (JSON) | rows (ROW) | checksums (uint32)
    | xxh3_128 of all before

`layout` changes only with the model, its formats or its ranks, and is encoded once. `state` changes
with every step. A row gives the place of one chunk of the rank's shard, or of some of the chunk's
sections (section_at >= 0), in one extent of one file. The sections of a chunk may be divided over
several rows, which together have every section once.

A generation of a directory is valid when all its ranks have a readable manifest of the same save.
There is no other commit record.

A manifest of a durable run (version 3) has no layout, and its chunks are described in two parts:

    magic, version, lengths | state (JSON) | marks (Marks) | xxh3_128 of all before
    table-<generation>.rank<r>:   magic, version, lengths | layout (JSON) | TABLE

`state` has the name and the xxh3_128 of the table, which is written when a place changes.

The checksum proves that the bytes are unchanged, not that an engine wrote them, and numbers in a
manifest become addresses and lengths. So `check_manifest` refuses every number that would lead out
of its file, its table of checksums or its shard.

Small values of optimizers are stored exactly, as JSON, which is never executed. None, bool, int,
float, str and lists are plain JSON (floats to the last bit); other types are tagged:

    {"tuple": [...]}   {"dict": [[key, value], ...]}
    {"tensor": "float32", "shape": [...], "hex": "..."}
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from infinity._src.base.dtypes import bytes_of, dtype_name, dtype_of, from_bytes
from infinity._src.cabi import native
from infinity._src.cabi.records import ALIGNMENT_BYTES, PIECE_NUMEL, SECTION_MAX, Section
from infinity._src.memory.flat_layout import sections_of
from infinity.aio import Format
from infinity.errors import AioError, ChecksumError

VERSION: Final = 3
"""Version of manifests with a separate table. A manifest without a table has version 2 if a row has
`zeros`, and otherwise version 1, which earlier releases can read."""
PIECE_BYTES: Final = 65536
"""Bytes per checksum of a padded row."""
TENSOR_BYTES_MAX = 4096
"""Bytes of the largest tensor that is a small value."""
RANKS_MAX = 1 << 20
# Bounds for numbers in a damaged or hostile manifest; no engine writes larger ones.
_ELEMENTS_MAX = 1 << 56
_CHUNK_NUMEL_MAX = 1 << 26
_MAGIC: Final = b"inf-ckpt"
_HEADER: Final = struct.Struct("<8sQQQQQ")
_DIGEST_BYTES: Final = 16
_BLOCK_ROWS: Final = 4096
Part = bytes | memoryview
"""Bytes of one part of a file."""
_TABLE_MAGIC: Final = b"inf-tabl"
_TABLE_HEADER: Final = struct.Struct("<8sQQQ")


@dataclasses.dataclass(frozen=True)
class _Named:
    """A parameter's shape, and all its names in the module tree, in the order of the tree."""

    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class ParamEntry(_Named):
    """One parameter, and its place in its flat."""

    offset: int


@dataclasses.dataclass(frozen=True)
class FlatEntry:
    """Parameters of one flat, which is divided over the ranks into shards of `shard_numel`."""

    unit: str
    dtype: str
    trainable: bool
    format: int
    shard_numel: int
    params: tuple[ParamEntry, ...]

    @property
    def state_format(self) -> Format:
        return _format_of(self.format)

    @property
    def sections(self) -> tuple[Section, ...]:
        return _sections_of(self.format, self.dtype)

    @property
    def widths(self) -> tuple[list[int], list[int]]:
        """itemsize and group_numel of SECTION_MAX sections, including sections that the format
        lacks.
        """
        return _widths_of(self.format, self.dtype)


# Cached, since a model has few formats and thousands of flats.
_format_of = functools.lru_cache(Format.of)


@functools.lru_cache
def _sections_of(code: int, dtype: str) -> tuple[Section, ...]:
    return sections_of(_format_of(code), dtype_of(dtype).itemsize)


@functools.lru_cache
def _widths_of(code: int, dtype: str) -> tuple[list[int], list[int]]:
    sections = _sections_of(code, dtype)
    lacks = SECTION_MAX - len(sections)
    items, groups = zip(*((each.itemsize, each.group_numel) for each in sections), strict=True)
    return [*items, *[0] * lacks], [*groups, *[1] * lacks]


@dataclasses.dataclass(frozen=True)
class LeftOutEntry(_Named):
    """A frozen parameter that the save left out, with its shape in state dicts: that of the whole
    weight if the model has tiles.
    """

    dtype: str


@dataclasses.dataclass(frozen=True)
class Layout:
    """The part of a manifest that stays the same from step to step. numerics: fields of the policy
    that determine rounding. left_out: parameters of the model that the save does not contain.
    """

    flats: tuple[FlatEntry, ...]
    numerics: dict[str, Any]
    left_out: tuple[LeftOutEntry, ...] = ()

    @functools.cached_property
    def encoded(self) -> bytes:
        raw: dict[str, Any] = {
            # `asdict` would copy every number of every shape.
            "flats": [{**vars(flat), "params": [*map(vars, flat.params)]} for flat in self.flats],
            "numerics": self.numerics,
        }
        # Earlier releases do not know this key. They report these parameters as missing, and refuse
        # the restore.
        if self.left_out:
            raw["left_out"] = [dataclasses.asdict(entry) for entry in self.left_out]
        return _dumps(raw)

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        raw = json.loads(data)
        flats = []
        for flat in raw["flats"]:
            params = tuple(
                ParamEntry(tuple(entry["names"]), tuple(entry["shape"]), entry["offset"])
                for entry in flat.pop("params")
            )
            flats.append(FlatEntry(**flat, params=params))
        left_out = tuple(
            LeftOutEntry(tuple(entry["names"]), tuple(entry["shape"]), entry["dtype"])
            for entry in raw.get("left_out", ())
        )
        return cls(tuple(flats), raw["numerics"], left_out)


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """A file that the manifest names. digest: xxh3_128 of the file's bytes; "" if rows have
    checksums of them.
    """

    name: str
    size_bytes: int
    digest: str = ""


@dataclasses.dataclass(frozen=True)
class OptimizerEntry:
    """One optimizer. groups: hyper-parameters (`values`) and names of parameters (`params`) of each
    group. params: small state (`state`) and names of the moments (`moments`) of each parameter.
    Values are in the JSON of `to_json`.
    """

    title: str
    groups: list[dict[str, Any]]
    params: dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """One rank's part of one generation, without its chunks. save: a number that all ranks of a
    save share. step: number of completed steps.

    files: files with the rows' extents. buffers, extra: files of the model's buffers and of the
    caller's values. algorithm: algorithm of the rows' checksums. table: in a durable run, the file
    with the chunks' places. numbers: the numbers of `files` in that table.
    """

    generation: int
    save: int
    rank: int
    world: int
    step: int
    algorithm: str
    files: tuple[FileEntry, ...]
    buffers: FileEntry | None
    extra: FileEntry | None
    optimizers: tuple[OptimizerEntry, ...]
    table: FileEntry | None = None
    numbers: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return manifest_name(self.generation, self.rank)

    @property
    def attached(self) -> list[FileEntry]:
        found = (self.buffers, self.extra, self.table)
        return [file for file in found if file is not None]

    def state(self) -> bytes:
        """Return the part that changes with every step, as JSON."""
        given = ("generation", "save", "rank", "world", "step", "algorithm")
        state: dict[str, Any] = {name: getattr(self, name) for name in given}
        state["files"] = [dataclasses.asdict(file) for file in self.files]
        for key in ("buffers", "extra", "table"):
            file = getattr(self, key)
            state[key] = dataclasses.asdict(file) if file is not None else None
        if self.table is None:
            del state["table"]
        else:
            state["numbers"] = self.numbers
        state["optimizers"] = [vars(optimizer) for optimizer in self.optimizers]
        return _dumps(state)

    @classmethod
    def decode(cls, data: bytes, path: str) -> Head:
        """Read a manifest from the bytes of its file, without its chunks. Raises: as
        `Manifest.decode`.
        """
        _, layout_bytes, state_bytes, _, _ = _lengths(data, path)
        at = _HEADER.size + layout_bytes
        with _as_written(path):
            return Head(**_state(data[at : at + state_bytes]))

    def parts_with(self, marks: Marks) -> list[Part]:
        """Return the bytes of a durable run's manifest, in parts."""
        assert self.table is not None
        text = self.state()
        header = _HEADER.pack(_MAGIC, VERSION, 0, len(text), len(marks.flags), len(marks.folded))
        return _sealed([header, text, *marks.parts()])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest(Head):
    """One rank's part of one generation."""

    layout: Layout
    rows: npt.NDArray[np.void]
    sums: npt.NDArray[np.uint32]

    def parts(self) -> list[Part]:
        # Readers of versions 1 and 2 would take folded checksums for checksums of pieces.
        assert not (self.rows["padded"] == FOLDED).any(), "these rows need a table"
        # `encoded` is cached, since a model of 20,000 parameters has a long layout.
        texts = (self.layout.encoded, self.state())
        version = 2 if self.rows["zeros"].any() else 1
        header = _HEADER.pack(
            _MAGIC, version, len(texts[0]), len(texts[1]), len(self.rows), len(self.sums)
        )
        rows = np.ascontiguousarray(self.rows.astype(ROW, copy=False))
        sums = np.ascontiguousarray(self.sums.astype("<u4", copy=False))
        return _sealed([header, *texts, rows.view(np.uint8).data, sums.view(np.uint8).data])

    @classmethod
    def decode(
        cls, data: bytes, path: str, read: Callable[[FileEntry], bytes] | None = None
    ) -> Manifest:
        """Read a manifest from the bytes of its file. read: returns the verified bytes of a file
        that the manifest names.

        Raises: ChecksumError naming `path` for damage; AioError for a file that is too short or not
        a manifest; ValueError for a later version, or for values that no engine writes.
        """
        version, layout_bytes, state_bytes, row_count, sum_count = _lengths(data, path)
        at = _HEADER.size + layout_bytes
        with _as_written(path):
            state = _state(data[at : at + state_bytes])
            at += state_bytes
            if version < VERSION:
                layout = Layout.decode(data[_HEADER.size : _HEADER.size + layout_bytes])
                rows = np.frombuffer(data, dtype=ROW, count=row_count, offset=at)
                sums = np.frombuffer(data, "<u4", sum_count, at + rows.nbytes).astype(np.uint32)
                return cls(layout=layout, rows=rows, sums=sums, **state)
            if read is None or state["table"] is None:
                raise ValueError("it has no table of chunks")
            marks = Marks.decode(data, at, row_count, sum_count)
            layout, table = _read_table(read(state["table"]))
            counts = [len(flat.sections) for flat in layout.flats]
            rows = joined(table, marks, counts, state["numbers"])
        with _as_written(path):
            return cls(layout=layout, rows=rows, sums=marks.folded, **state)


def _lengths(data: bytes, path: str) -> tuple[int, int, int, int, int]:
    """Check the bytes of a manifest's file. Returns (version, bytes of the layout, bytes of the
    state, number of rows, number of checksums).
    """
    # The digest covers all bytes before the digest.
    body = len(data) - _DIGEST_BYTES
    # Checked first, since the version is in the header.
    if body < _HEADER.size or not data.startswith(_MAGIC):
        raise AioError(
            "the file is not a complete manifest of a checkpoint",
            path=path, op="read", length=len(data)
        )
    _, version, *lengths = _HEADER.unpack_from(data)
    if version > VERSION:
        raise ValueError(
            f"{path} is a manifest of version {version}, and this release reads up to version "
            f"{VERSION}; use a later release"
        )
    # Checked after the version, since a later version may have another checksum.
    if xxhash.xxh3_128_digest(memoryview(data)[:body]) != data[body:]:
        raise ChecksumError(
            "the manifest has changed since it was written",
            path=path,
            op="read",
            length=len(data),
        )
    layout_bytes, state_bytes, row_count, sum_count = lengths
    return version, layout_bytes, state_bytes, row_count, sum_count


@contextlib.contextmanager
def _as_written(path: str) -> Iterator[None]:
    """Raise ValueError naming `path` for values that no engine writes."""
    try:
        yield
    # The digest matches, so the bytes are intact, but no engine wrote them.
    except (
        KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError, struct.error
    ) as error:  # fmt: skip
        raise ValueError(f"{path} is not a manifest that an engine wrote: {error}") from error


def table_parts(layout: Layout, table: npt.NDArray[np.void]) -> list[Part]:
    """Return the bytes of the file of a durable run's table, in parts. table: TABLE [chunks]."""
    header = _TABLE_HEADER.pack(_TABLE_MAGIC, VERSION, len(layout.encoded), len(table))
    return [header, layout.encoded, table.view(np.uint8).data]


def _read_table(data: bytes) -> tuple[Layout, npt.NDArray[np.void]]:
    magic, version, layout_bytes, count = _TABLE_HEADER.unpack_from(data)
    if (magic, version) != (_TABLE_MAGIC, VERSION):
        raise ValueError("its table of chunks has another format")
    at = _TABLE_HEADER.size + layout_bytes
    return Layout.decode(data[_TABLE_HEADER.size : at]), np.frombuffer(data, TABLE, count, at)


def _sealed(parts: list[Part]) -> list[Part]:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return [*parts, digest.digest()]


def _state(text: bytes) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(text)
    state["files"] = tuple(_file(entry) for entry in state["files"])
    for key in ("buffers", "extra", "table"):
        entry = state.get(key)
        state[key] = _file(entry) if entry is not None else None
    state["optimizers"] = tuple(OptimizerEntry(**entry) for entry in state["optimizers"])
    state["numbers"] = tuple(state.get("numbers", ()))
    return state


def manifest_name(generation: int, rank: int) -> str:
    """Name the file of a manifest."""
    return f"manifest-{generation:08d}.rank{rank}"


def section_bytes(rows: npt.NDArray[np.void], flats: Sequence[FlatEntry]) -> npt.NDArray[np.int64]:
    """Compute the size of every section of rows, padded to a multiple of 4096 bytes: int64 [rows,
    SECTION_MAX], 0 for sections that a format lacks.
    """
    return -(-content_bytes(rows, flats) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def content_bytes(rows: npt.NDArray[np.void], flats: Sequence[FlatEntry]) -> npt.NDArray[np.int64]:
    """Compute the size of every section of rows, as `section_bytes` without padding."""
    return _in_blocks(_content_bytes, rows, flats)


def _content_bytes(
    rows: npt.NDArray[np.void], flats: Sequence[FlatEntry]
) -> npt.NDArray[np.int64]:
    # Only the flats of these rows, since some callers pass a single row.
    numbers, of_row = np.unique(rows["flat"], return_inverse=True)
    widths = section_widths([flats[number] for number in numbers.tolist()])[of_row]
    return extent_bytes(rows["numel"], widths)


def section_widths(flats: Sequence[FlatEntry]) -> npt.NDArray[np.int64]:
    """Return itemsize and group_numel of the sections of flats: int64 [flats, 2, SECTION_MAX]. A
    section that a format lacks has no bytes.
    """
    found = np.array([flat.widths for flat in flats], dtype=np.int64)
    return found.reshape(-1, 2, SECTION_MAX)


def extent_bytes(
    numels: npt.NDArray[np.int64], widths: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Compute the bytes of `numels` elements in each section: [numels, SECTION_MAX]. widths: the
    widths (`section_widths`) of the flat of each number.
    """
    found: npt.NDArray[np.int64] = -(-numels[:, None] // widths[:, 1]) * widths[:, 0]
    return found


def pieces_of(rows: npt.NDArray[np.void], flats: Sequence[FlatEntry]) -> npt.NDArray[np.int64]:
    """Count the checksums of every section of rows: int64 [rows, SECTION_MAX]. A row's checksums
    are in the order of its sections.
    """
    return _in_blocks(_pieces_of, rows, flats)


def _pieces_of(rows: npt.NDArray[np.void], flats: Sequence[FlatEntry]) -> npt.NDArray[np.int64]:
    numbers, of_row = np.unique(rows["flat"], return_inverse=True)
    counts = np.array([len(flats[each].sections) for each in numbers.tolist()], np.int64)[of_row]
    folded = (np.arange(SECTION_MAX) < counts[:, None]).astype(np.int64)
    chunked = folded * -(-rows["numel"][:, None] // PIECE_NUMEL)
    padded = np.where(rows["section_at"] >= 0, -(-section_bytes(rows, flats) // PIECE_BYTES), 0)
    pieces: npt.NDArray[np.int64] = np.select(
        [rows["padded"][:, None] == kind for kind in (PADDED, FOLDED)], [padded, folded], chunked
    )
    return pieces


def _in_blocks(
    count: Callable[[npt.NDArray[np.void], Sequence[FlatEntry]], npt.NDArray[np.int64]],
    rows: npt.NDArray[np.void],
    flats: Sequence[FlatEntry],
) -> npt.NDArray[np.int64]:
    """Call `count` for blocks of rows: a checkpoint may have a million rows, and temporaries take
    several times the memory of the result.
    """
    found: npt.NDArray[np.int64] = np.empty((len(rows), SECTION_MAX), dtype=np.int64)
    for begin in range(0, len(rows), _BLOCK_ROWS):
        part = slice(begin, begin + _BLOCK_ROWS)
        found[part] = count(rows[part], flats)
    return found


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _file(entry: dict[str, Any]) -> FileEntry:
    found = FileEntry(**entry)
    path = PurePosixPath(found.name)
    # A hostile manifest must not lead to files outside of its directory.
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in found.name:
        raise ValueError(
            f"a manifest names the file {found.name!r}, which is not in the checkpoint's directory"
        )
    return found


# -- checking --------------------------------------------------------------------------------------


def check_manifest(manifest: Manifest, path: str) -> None:
    """Raise ValueError naming `path` for a manifest that no engine writes."""
    _refuse(_problems(manifest), path)


def check_head(head: Head, path: str) -> None:
    """Raise ValueError naming `path` for a head that no engine writes."""
    _refuse(_wrong_head(head), path)


def _refuse(problems: Iterator[str], path: str) -> None:
    try:
        found = next(problems, "")
    # A value has a type that no engine writes.
    except (TypeError, AttributeError, KeyError, ValueError, OverflowError) as error:
        found = str(error) or type(error).__name__
    if found:
        raise ValueError(f"{path} is not a manifest that an engine wrote: {found}")


def _problems(manifest: Manifest) -> Iterator[str]:
    yield from _wrong_head(manifest)
    yield from _wrong_flats(manifest)
    yield from _wrong_left_out(manifest)
    yield from _wrong_rows(manifest)


def _wrong_head(head: Head) -> Iterator[str]:
    for name in ("generation", "save", "rank", "world", "step"):
        if type(getattr(head, name)) is not int or getattr(head, name) < 0:
            yield f"{name} is {getattr(head, name)!r}"
    if not head.rank < head.world <= RANKS_MAX:
        yield f"it is of rank {head.rank} of {head.world}"
    files = (*head.files, *head.attached)
    yield from (
        f"the file {file.name!r} has {file.size_bytes!r} bytes"
        for file in files
        if not _is_size(file)
    )
    for entry in head.optimizers:
        if any(
            not isinstance(group["values"], dict) or not isinstance(group["params"], list)
            for group in entry.groups
        ):
            yield f"a group of {entry.title} is damaged"
        if any(
            not isinstance(kept["moments"], list) or "state" not in kept
            for kept in entry.params.values()
        ):
            yield f"a parameter of {entry.title} is damaged"


def _is_size(file: FileEntry) -> bool:
    return type(file.size_bytes) is int and 0 <= file.size_bytes < 1 << 62


def _wrong_flats(manifest: Manifest) -> Iterator[str]:
    for flat in manifest.layout.flats:
        if (
            type(flat.shard_numel) is not int
            or not 0 <= flat.shard_numel < _ELEMENTS_MAX
            or not flat.sections
        ):
            yield f"unit {flat.unit!r} has {flat.shard_numel!r} elements"
        for param in flat.params:
            numbers = (*param.shape, param.offset)
            if not param.names or not all(isinstance(name, str) for name in param.names):
                yield f"a parameter of unit {flat.unit!r} has no name"
            elif any(type(number) is not int or number < 0 for number in numbers):
                yield f"{param.name} is of shape {param.shape} at {param.offset}"
            elif param.offset + param.numel > flat.shard_numel * manifest.world:
                yield f"{param.name} is larger than unit {flat.unit!r}"


def _wrong_left_out(manifest: Manifest) -> Iterator[str]:
    for entry in manifest.layout.left_out:
        if not entry.names or not all(isinstance(name, str) for name in entry.names):
            yield "an omitted parameter has no name"
        elif any(type(number) is not int or number < 0 for number in entry.shape):
            yield f"{entry.name}, which was omitted, is of shape {entry.shape}"


def _wrong_rows(manifest: Manifest) -> Iterator[str]:
    rows, flats = manifest.rows, manifest.layout.flats
    # The order matters: later checks compute with numbers that earlier checks have passed.
    counts = {"flat": len(flats), "file": len(manifest.files), "padded": FOLDED + 1}
    for name, count in counts.items():
        if ((rows[name] < 0) | (rows[name] >= count)).any():
            yield f"a row has a {name} that does not exist"
    if ((rows["numel"] <= 0) | (rows["numel"] > _CHUNK_NUMEL_MAX)).any():
        yield "a row has an impossible length"
    yield from _gaps(manifest)
    if len(rows) and len(flats):
        sizes = np.array([file.size_bytes for file in manifest.files], dtype=np.int64)[rows["file"]]
        # Subtract: the sum of an offset near 2^63 and a length would wrap around.
        room = sizes - rows["file_offset"]
        here = rows["section_at"] >= 0
        ends = np.where(here, section_bytes(rows, flats), 0)
        if ((rows["file_offset"] < 0) | (room < 0)).any() or (
            here & (rows["section_at"] > room[:, None] - ends)
        ).any():
            yield "a row lies outside of its file"
        bits = here.astype(np.int64) @ (1 << np.arange(SECTION_MAX))
        if (rows["zeros"] & ~np.where(rows["padded"] == PADDED, 0, bits)).any():
            yield "a row has zeros in missing sections"
        # Addresses are computed from `sums_at`, so it must stay inside of the table.
        last = len(manifest.sums) - pieces_of(rows, flats).sum(axis=1)
        if ((rows["sums_at"] < 0) | (rows["sums_at"] > last)).any():
            yield "a row has missing checksums"


def _gaps(manifest: Manifest) -> Iterator[str]:
    """Find shards that chunks do not cover without gaps, from the start of the shard to the end of
    its parameters.
    """
    flats, table = manifest.layout.flats, manifest.rows
    order = np.lexsort((table["start"], table["flat"]))
    flat_of, starts, numels = (table[name][order] for name in ("flat", "start", "numel"))
    # Several rows may share a chunk, each with some of its sections.
    new = (np.diff(flat_of, prepend=-1) != 0) | (np.diff(starts, prepend=-1) != 0)
    flat_of, starts, ends = flat_of[new], starts[new], (starts + numels)[new]
    begins = np.diff(flat_of, prepend=-1) != 0
    joined = starts == np.where(begins, 0, np.roll(ends, 1))
    stops: npt.NDArray[np.int64] = np.zeros(len(flats), dtype=np.int64)
    np.maximum.at(stops, flat_of, ends)
    apart = set(flat_of[~joined].tolist())
    for index, (flat, end) in enumerate(zip(flats, stops.tolist(), strict=True)):
        used = (
            max((param.offset + param.numel for param in flat.params), default=0)
            - manifest.rank * flat.shard_numel
        )
        if index in apart or not min(used, flat.shard_numel) <= end <= flat.shard_numel:
            yield f"the chunks of unit {flat.unit!r} do not cover its shard"


# -- small values as JSON --------------------------------------------------------------------------


def to_json(value: Any) -> Any:
    """Convert a small value to JSON (the module's docstring describes the form). Raises: ValueError
    naming the type of a value that this form cannot represent.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) in (int, float):
        return value
    if isinstance(value, list):
        return [to_json(each) for each in value]
    # JSON has no tuples, and an optimizer's betas are a tuple.
    if isinstance(value, tuple):
        return {"tuple": [to_json(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[to_json(key), to_json(each)] for key, each in value.items()]}
    if isinstance(value, torch.Tensor) and value.nbytes <= TENSOR_BYTES_MAX:
        # Hexadecimal bytes preserve every bit, also of NaNs, unlike decimal numbers.
        data = bytes_of(value).cpu().numpy().tobytes()
        return {"tensor": dtype_name(value.dtype), "shape": list(value.shape), "hex": data.hex()}
    if isinstance(value, torch.Tensor):
        raise ValueError(
            f"a tensor of {value.nbytes} bytes is too large: {TENSOR_BYTES_MAX} bytes at most"
        )
    # Convert numpy's numbers to Python's.
    item = getattr(value, "item", None)
    if callable(item) and type(item()) in (bool, int, float):
        return item()
    raise ValueError(
        f"{value!r} of type {type(value).__name__} cannot be saved; supported are numbers, text, "
        "None, small tensors, and lists, tuples and dicts of them"
    )


def from_json(value: Any) -> Any:
    """Convert JSON of `to_json` back to the value. Raises: ValueError for other JSON."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"tuple"}:
        return tuple(from_json(each) for each in value["tuple"])
    if value.keys() == {"dict"}:
        return {from_json(key): from_json(each) for key, each in value["dict"]}
    if value.keys() == {"tensor", "shape", "hex"}:
        return from_bytes(
            bytearray.fromhex(value["hex"]), dtype_of(value["tensor"]), tuple(value["shape"])
        )
    raise ValueError(f"a value with the keys {sorted(value)} is not known")


# -- rows and marks --------------------------------------------------------------------------------
# Tables of the places of a rank's chunks: rows for checkpoints; for a durable run, a table and
# marks, so that a commit writes little.
#
#     TABLE   both places of each chunk; written again when a place changes, which steps do not do
#     Marks   changed by steps: which place is live, its generation, its checksums
#     ROW     table and marks joined, for readers
#
# Marks have one checksum for each section of a chunk, computed from the checksums of the section's
# pieces (`folded`): 25 bytes for a chunk of four sections; checksums of all pieces would take 888.


ROW: Final = np.dtype(
    [
        ("start", "<i8"),
        ("numel", "<i8"),
        ("key", "<u8"),
        ("generation", "<u8"),
        ("file_offset", "<i8"),
        ("run_bytes", "<i8"),
        ("section_at", "<i8", (SECTION_MAX,)),
        ("sums_at", "<i8"),
        ("flat", "<i4"),
        ("file", "<i4"),
        ("padded", "<i4"),
        ("zeros", "<i4"),
    ]
)
"""`start`: index in the shard of the chunk's first element. `sums_at`: index of the row's first
checksum. `zeros`: bit s: section s of this row is all zeros and was never written; its bytes and
checksums have no meaning. `padded`: how the checksums were computed:

CHUNKED: as an executor computes them for a CHUNK: for all sections, in pieces of PIECE_NUMEL
elements, seeded by `key` and `generation`. PADDED: for each section of this row as a separate
chunk: for the section's bytes up to the next multiple of 4096, in pieces of PIECE_BYTES, seeded by
`key` + the section's index. So every byte of a file has a checksum. FOLDED: as CHUNKED, but with
one checksum for each section: the checksum of the pieces' checksums in order.
"""
CHUNKED, PADDED, FOLDED = range(3)

TABLE: Final = np.dtype(
    [
        ("start", "<i8"),
        ("numel", "<i8"),
        ("key", "<u8"),
        ("run_bytes", "<i8"),
        ("file_offset", "<i8", (2,)),
        ("section_at", "<i8", (SECTION_MAX,)),
        ("flat", "<i4"),
        ("file", "<i4", (2,)),
    ]
)
"""A chunk of a durable run, with both of its places. `file`: numbers of the run's files, which
manifests map to names."""

_SECOND: Final = 1 << 7
"""Bit in a mark's flags: the second place is the live one. The lower bits are ROW's `zeros`."""


@dataclasses.dataclass(frozen=True)
class Marks:
    """Record of one commit on the chunks of TABLE, in the order of the table.

    generations: generations of the live places, uint64 [chunks]. flags: uint8 [chunks]. folded: one
    checksum per section of each chunk, uint32.
    """

    generations: npt.NDArray[np.uint64]
    flags: npt.NDArray[np.uint8]
    folded: npt.NDArray[np.uint32]

    @classmethod
    def join(cls, parts: Sequence[Marks]) -> Marks:
        return cls(
            np.concatenate([part.generations for part in parts]),
            np.concatenate([part.flags for part in parts]),
            np.concatenate([part.folded for part in parts]),
        )

    def parts(self) -> list[memoryview]:
        """Return the bytes of each array, little-endian."""
        arrays = (
            self.generations.astype("<u8", copy=False),
            self.flags,
            self.folded.astype("<u4", copy=False),
        )
        return [array.view(np.uint8).data for array in arrays]

    @classmethod
    def decode(cls, data: bytes, offset: int, chunks: int, sums: int) -> Marks:
        """Read the bytes of `parts` at `offset`. Raises: ValueError if `data` is too short."""
        generations = np.frombuffer(data, "<u8", chunks, offset)
        flags = np.frombuffer(data, np.uint8, chunks, offset + generations.nbytes)
        folded = np.frombuffer(data, "<u4", sums, offset + generations.nbytes + flags.nbytes)
        return cls(generations, flags, folded.astype(np.uint32))


def marks_of(
    now: npt.NDArray[np.void],
    second: npt.NDArray[np.bool_],
    pieces: npt.NDArray[np.int64],
    sections: int,
) -> Marks:
    """Make the marks of chunks of one format from their CHUNK records. second: whether the second
    place is live, [chunks]. pieces: pieces per section, [chunks]. sections: number of sections that
    hold states.
    """
    zeros = now["zeros"] & np.uint16((1 << sections) - 1)
    return Marks(
        now["generation"].astype(np.uint64),
        (zeros | np.where(second, np.uint16(_SECOND), np.uint16(0))).astype(np.uint8),
        _fold(now["sums_ptr"], pieces, sections).reshape(-1),
    )


def joined(
    table: npt.NDArray[np.void],
    marks: Marks,
    sections: Sequence[int],
    files: Sequence[int],
) -> npt.NDArray[np.void]:
    """Return the chunks as rows, whose checksums are `marks.folded`. sections: number of sections
    of each flat. files: numbers of the files; rows["file"] is an index into `files`.

    Raises: ValueError if table and marks do not match.
    """
    if len(table) != len(marks.flags):
        raise ValueError(f"its table has {len(table)} chunks, not {len(marks.flags)}")
    if ((table["flat"] < 0) | (table["flat"] >= len(sections))).any():
        raise ValueError("a row has a flat that does not exist")
    rows = np.zeros(len(table), dtype=ROW)
    for name in ("start", "numel", "key", "run_bytes", "section_at", "flat"):
        rows[name] = table[name]
    live = (marks.flags >= _SECOND).astype(np.intp)
    at = np.arange(len(table))
    rows["file_offset"] = table["file_offset"][at, live]
    rows["generation"] = marks.generations
    rows["zeros"] = marks.flags & np.uint8(_SECOND - 1)
    rows["padded"] = FOLDED
    counts = np.array(sections, dtype=np.int64)[table["flat"]]
    rows["sums_at"] = np.cumsum(counts) - counts
    known = np.array(files, dtype=np.int64)
    wanted = table["file"][at, live]
    order = np.argsort(known, kind="stable")
    found = np.searchsorted(known, wanted, sorter=order)
    # -1 marks a file without a name, which `check_manifest` refuses.
    rows["file"] = -1
    inside = np.flatnonzero(found < len(known))
    inside = inside[known[order[found[inside]]] == wanted[inside]]
    rows["file"][inside] = order[found[inside]]
    return rows


def _fold(
    sums: npt.NDArray[np.uint64], pieces: npt.NDArray[np.int64], sections: int
) -> npt.NDArray[np.uint32]:
    """Compute one checksum for each section of chunks, from the checksums of the section's pieces:
    uint32 [chunks, sections]. sums: address of each chunk's checksums, uint32 [sections, pieces].
    """
    ffi, lib = native.load()
    folded: npt.NDArray[np.uint32] = np.zeros((len(sums), sections), dtype=np.uint32)
    addresses = np.ascontiguousarray(sums, dtype=np.uint64)
    counts = np.ascontiguousarray(pieces, dtype=np.int64)
    assert len(counts) == len(addresses), (len(counts), len(addresses))
    lib.inf_fold_sums(
        ffi.from_buffer("uint64_t[]", addresses),
        ffi.from_buffer("int64_t[]", counts),
        len(addresses),
        sections,
        ffi.from_buffer("uint32_t[]", folded, require_writable=True),
    )
    return folded
