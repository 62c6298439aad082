"""The manifest: what one rank's states are, and where they lie. One file, `manifest-<generation>.rank<r>`; no tensors.

    magic, version, lengths | layout (JSON) | state (JSON) | rows (ROW) | checksums (uint32) | xxh3_128 of all before

`layout` changes only when the model, its formats or its ranks do, and is encoded once. `state` is what a step changes.
A row says where one chunk of the rank's shard lies, or a part of its sections: those with section_at >= 0, in a run of one
file. Several rows may share a chunk (some sections here, some there); together they have every section once.

A generation of a directory is valid when all its ranks have a readable manifest of the same save: nothing else commits it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import struct
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from infinity._src.checkpoint.json_values import dtype_of
from infinity._src.memory.layout import sections_of
from infinity.aio import Format
from infinity.aio._records import ALIGNMENT_BYTES, PIECE_NUMEL, SECTION_MAX, Section
from infinity.errors import AioError, ChecksumError

VERSION: Final = 1
PIECE_BYTES: Final = 65536
"""Bytes per checksum of a padded row."""

_MAGIC: Final = b"inf-ckpt"
_HEAD: Final = struct.Struct("<8sQQQQQ")
_DIGEST_BYTES: Final = 16

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
        ("unused", "<i4"),
    ]
)
"""`start`: of the chunk in the shard. `sums_at`: of its first checksum. `padded`: how the checksums were taken.

0: as an executor takes those of a CHUNK, of all its sections, in pieces of PIECE_NUMEL elements, from `key` and `generation`.
1: of each section that is here, as a chunk of its own: of its bytes up to the next multiple of 4096, in pieces of
PIECE_BYTES, from `key` + the section's index. Then no byte of a file is without a checksum.
"""


@dataclasses.dataclass(frozen=True)
class ParamEntry:
    """One parameter: every name that it has in the module tree, the first one first; where it lies in its flat."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    offset: int

    @property
    def name(self) -> str:
        """The name by which messages call it."""
        return self.names[0]

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class FlatEntry:
    """Parameters that lie together, split over the ranks in shards of `shard_numel`."""

    unit: str
    dtype: str
    trainable: bool
    format: int
    shard_numel: int
    params: tuple[ParamEntry, ...]

    @functools.cached_property
    def state_format(self) -> Format:
        """How its states are encoded."""
        return Format.of(self.format)

    @functools.cached_property
    def sections(self) -> tuple[Section, ...]:
        """Its sections, spilled gradients never among them."""
        return sections_of(self.state_format, dtype_of(self.dtype).itemsize)


@dataclasses.dataclass(frozen=True)
class Layout:
    """What stays the same from step to step. `numerics`: what of the policy decides about rounding."""

    flats: tuple[FlatEntry, ...]
    numerics: dict[str, Any]

    @functools.cached_property
    def encoded(self) -> bytes:
        """As JSON."""
        return _dumps({"flats": [dataclasses.asdict(flat) for flat in self.flats], "numerics": self.numerics})

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        """What `encoded` was made of."""
        raw = json.loads(data)
        flats = []
        for flat in raw["flats"]:
            params = tuple(
                ParamEntry(tuple(entry["names"]), tuple(entry["shape"]), entry["offset"]) for entry in flat.pop("params")
            )
            flats.append(FlatEntry(**flat, params=params))
        return cls(tuple(flats), raw["numerics"])


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """A file beside the manifest. digest: xxh3_128 of the whole; "" where rows have the checksums."""

    name: str
    size_bytes: int
    digest: str = ""


@dataclasses.dataclass(frozen=True)
class OptimizerEntry:
    """One optimizer: groups of hyper-parameters (`values`) and names of parameters; what it keeps for each parameter besides
    tensors (`state`), and the names of those (`moments`). Values are those of `infinity._src.checkpoint.json_values`."""

    title: str
    groups: list[dict[str, Any]]
    params: dict[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """One rank's part of one generation. `save`: what all ranks of a save have in common. `step`: steps completed.

    `files`: those that rows point into. `buffers`, `extra`: whole files of their own. `algorithm`: of the rows' checksums.
    """

    layout: Layout
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
    rows: npt.NDArray[np.void]
    sums: npt.NDArray[np.uint32]

    @property
    def name(self) -> str:
        """The name of its file."""
        return manifest_name(self.generation, self.rank)

    def encode(self) -> bytes:
        """The file's bytes."""
        given = ("generation", "save", "rank", "world", "step", "algorithm")
        state = {name: getattr(self, name) for name in given}
        state["files"] = [dataclasses.asdict(file) for file in self.files]
        state["buffers"] = dataclasses.asdict(self.buffers) if self.buffers is not None else None
        state["extra"] = dataclasses.asdict(self.extra) if self.extra is not None else None
        state["optimizers"] = [vars(optimizer) for optimizer in self.optimizers]
        texts = (self.layout.encoded, _dumps(state))
        head = _HEAD.pack(_MAGIC, VERSION, len(texts[0]), len(texts[1]), len(self.rows), len(self.sums))
        parts = [head, *texts, self.rows.astype(ROW, copy=False).tobytes(), self.sums.astype("<u4", copy=False).tobytes()]
        whole = b"".join(parts)
        return whole + xxhash.xxh3_128_digest(whole)

    @classmethod
    def decode(cls, data: bytes, path: str) -> Manifest:
        """What `encode` was made from. Raises: ChecksumError naming `path` for damage, AioError for a file that is cut short or
        something else, ValueError for a later version."""
        body = len(data) - _DIGEST_BYTES
        if body < _HEAD.size or not data.startswith(_MAGIC):
            raise AioError("this is no whole manifest of a checkpoint", path=path, op="read", length=len(data))
        _, version, *lengths, row_count, sum_count = _HEAD.unpack_from(data)
        if version > VERSION:
            raise ValueError(f"{path} is a manifest of version {version}, this release reads up to {VERSION}; use a later one")
        if xxhash.xxh3_128_digest(data[:body]) != data[body:]:
            raise ChecksumError("the manifest is not what was written", path=path, op="read", length=len(data))
        at = _HEAD.size
        texts = []
        for length in lengths:
            texts.append(data[at : at + length])
            at += length
        try:
            rows = np.frombuffer(data, dtype=ROW, count=row_count, offset=at)
            sums = np.frombuffer(data, dtype="<u4", count=sum_count, offset=at + rows.nbytes).astype(np.uint32)
            state = json.loads(texts[1])
            state["files"] = tuple(_file(entry) for entry in state["files"])
            for key in ("buffers", "extra"):
                state[key] = _file(state[key]) if state[key] is not None else None
            state["optimizers"] = tuple(OptimizerEntry(**entry) for entry in state["optimizers"])
            return cls(layout=Layout.decode(texts[0]), rows=rows, sums=sums, **state)
        except (KeyError, TypeError, AttributeError, ValueError) as error:  # a sum that is right, of something else
            raise ValueError(f"{path} is no manifest that an engine wrote: {error}") from error


def manifest_name(generation: int, rank: int) -> str:
    """The name of a manifest's file."""
    return f"manifest-{generation:08d}.rank{rank}"


def section_bytes(rows: npt.NDArray[np.void], flats: Sequence[FlatEntry]) -> npt.NDArray[np.int64]:
    """Bytes of every section of rows in a run, a multiple of 4096: [rows, SECTION_MAX], 0 for those that a format has not."""
    items: npt.NDArray[np.int64] = np.zeros((len(flats), SECTION_MAX), dtype=np.int64)
    groups: npt.NDArray[np.int64] = np.ones((len(flats), SECTION_MAX), dtype=np.int64)
    for index, flat in enumerate(flats):
        for s, section in enumerate(flat.sections):
            items[index, s], groups[index, s] = section.itemsize, section.group_numel
    sizes = -(-rows["numel"][:, None] // groups[rows["flat"]]) * items[rows["flat"]]
    padded: npt.NDArray[np.int64] = -(-sizes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return padded


def pieces_of(rows: npt.NDArray[np.void], flats: Sequence[FlatEntry]) -> npt.NDArray[np.int64]:
    """How many checksums every section of rows has, [rows, SECTION_MAX], in the order in which they lie."""
    counts = np.array([len(flat.sections) for flat in flats], dtype=np.int64)[rows["flat"]]
    chunked = np.where(np.arange(SECTION_MAX) < counts[:, None], -(-rows["numel"][:, None] // PIECE_NUMEL), 0)
    padded = np.where(rows["section_at"] >= 0, -(-section_bytes(rows, flats) // PIECE_BYTES), 0)
    pieces: npt.NDArray[np.int64] = np.where(rows["padded"][:, None] != 0, padded, chunked)
    return pieces


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _file(entry: dict[str, Any]) -> FileEntry:
    """Raises: ValueError for a name that leads out of the directory."""
    found = FileEntry(**entry)
    path = PurePosixPath(found.name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in found.name:
        raise ValueError(f"a manifest names the file {found.name!r}, which is not in the checkpoint's directory")
    return found
