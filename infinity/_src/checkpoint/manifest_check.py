"""Whether a manifest describes what can be: its checksum says that it is what was written, and not that an engine wrote it.

Its numbers become addresses and lengths. So none is believed that leads out of its file, its table of checksums or its shard.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from infinity._src.checkpoint.manifest import FileEntry, Manifest, pieces_of, section_bytes

RANKS_MAX = 1 << 20
_ELEMENTS_MAX = 1 << 56
_CHUNK_NUMEL_MAX = 1 << 26


def check_manifest(manifest: Manifest, path: str) -> None:
    """Raise ValueError naming `path` for a manifest that no engine writes."""
    try:
        found = next(_problems(manifest), "")
    except (TypeError, AttributeError, KeyError, ValueError) as error:  # values of other types than they should be of
        found = str(error) or type(error).__name__
    if found:
        raise ValueError(f"{path} is no manifest that an engine wrote: {found}")


def _problems(manifest: Manifest) -> Iterator[str]:
    for name in ("generation", "save", "rank", "world", "step"):
        if type(getattr(manifest, name)) is not int or getattr(manifest, name) < 0:
            yield f"{name} is {getattr(manifest, name)!r}"
    if not manifest.rank < manifest.world <= RANKS_MAX:
        yield f"it is of rank {manifest.rank} of {manifest.world}"
    files = (*manifest.files, *(file for file in (manifest.buffers, manifest.extra) if file is not None))
    yield from (f"the file {file.name!r} has {file.size_bytes!r} bytes" for file in files if not _is_size(file))
    yield from _wrong_flats(manifest)
    for entry in manifest.optimizers:
        if any(not isinstance(group["values"], dict) or not isinstance(group["params"], list) for group in entry.groups):
            yield f"a group of {entry.title} is damaged"
        if any(not isinstance(kept["moments"], list) or "state" not in kept for kept in entry.params.values()):
            yield f"a parameter of {entry.title} is damaged"
    yield from _wrong_rows(manifest)


def _is_size(file: FileEntry) -> bool:
    return type(file.size_bytes) is int and 0 <= file.size_bytes < 1 << 62


def _wrong_flats(manifest: Manifest) -> Iterator[str]:
    for flat in manifest.layout.flats:
        if type(flat.shard_numel) is not int or not 0 <= flat.shard_numel < _ELEMENTS_MAX or not flat.sections:
            yield f"unit {flat.unit!r} has {flat.shard_numel!r} elements"
        for param in flat.params:
            numbers = (*param.shape, param.offset)
            if not param.names or not all(isinstance(name, str) for name in param.names):
                yield f"a parameter of unit {flat.unit!r} has no name"
            elif any(type(number) is not int or number < 0 for number in numbers):
                yield f"{param.name} is of shape {param.shape} at {param.offset}"
            elif param.offset + param.numel > flat.shard_numel * manifest.world:
                yield f"{param.name} is larger than unit {flat.unit!r}"


def _wrong_rows(manifest: Manifest) -> Iterator[str]:
    rows, flats = manifest.rows, manifest.layout.flats
    # One kind of number after the other: what follows computes with those before.
    for name, count in (("flat", len(flats)), ("file", len(manifest.files)), ("padded", 2)):
        if ((rows[name] < 0) | (rows[name] >= count)).any():
            yield f"a row has a {name} that there is not"
    if ((rows["numel"] <= 0) | (rows["numel"] > _CHUNK_NUMEL_MAX)).any():
        yield "a row has a length that cannot be"
    yield from _gaps(manifest)
    if len(rows) and len(flats):
        sizes = np.array([file.size_bytes for file in manifest.files], dtype=np.int64)[rows["file"]]
        room = sizes - rows["file_offset"]
        here = rows["section_at"] >= 0
        ends = np.where(here, section_bytes(rows, flats), 0)
        if ((rows["file_offset"] < 0) | (room < 0)).any() or (here & (rows["section_at"] > room[:, None] - ends)).any():
            yield "a row lies outside of its file"
        last = len(manifest.sums) - pieces_of(rows, flats).sum(axis=1)
        if ((rows["sums_at"] < 0) | (rows["sums_at"] > last)).any():
            yield "a row has checksums that are not there"


def _gaps(manifest: Manifest) -> Iterator[str]:
    """The chunks of a shard lie one after the other, from its begin to the end of what there is of parameters."""
    rows = manifest.rows
    for index, flat in enumerate(manifest.layout.flats):
        mine = rows[rows["flat"] == index]
        starts, first = np.unique(mine["start"], return_index=True)
        ends = starts + mine["numel"][first]
        used = max((param.offset + param.numel for param in flat.params), default=0) - manifest.rank * flat.shard_numel
        joined = np.array_equal(starts[1:], ends[:-1]) and (not len(starts) or starts[0] == 0)
        end = int(ends[-1]) if len(ends) else 0
        if not joined or not min(used, flat.shard_numel) <= end <= flat.shard_numel:
            yield f"the chunks of unit {flat.unit!r} do not make up its shard"
