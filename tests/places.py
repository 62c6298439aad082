"""Places of chunks on a drive, to damage them or make them fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import infinity as inf


class Place(NamedTuple):
    """The bytes of a chunk's section at its live place, and the elements of a parameter in them."""

    layer: int
    offset: int
    size_bytes: int
    name: str
    start: int
    stop: int


def executor_of(model: Any) -> Any:
    return inf.handle(model).parts.tiers.executor


def first_flat(model: Any) -> Any:
    """The first flat of the second unit."""
    return inf.handle(model).parts.split.units[1].flats[0]


def place_of(model: Any, section: int, *, unit: int = 1, chunk: int = -1) -> Place:
    return place_in(inf.handle(model), section, unit=unit, chunk=chunk)


def place_in(handle: Any, section: int, *, unit: int = 1, chunk: int = -1) -> Place:
    """A section of a chunk of a unit's first flat, in its live place."""
    parts = handle.parts
    (flat, *_) = parts.split.units[unit].flats
    shard = parts.tiers.store[flat]
    record = parts.tiers.executor.look(shard.ids)[chunk]
    # The last parameter of the chunk: its elements there, from `at` on.
    param, at, start, numel = [
        (param, *span)
        for param in flat.params
        for index, *span in flat.layout.spans(param.param_index, 0)
        if index == range(len(shard.ids))[chunk]
    ][-1]
    item = shard.sections[section].itemsize
    offset = int(record["file_offset"] + record["section_at"][section]) + at * item
    return Place(int(record["file"]), offset, numel * item, param.name, start, start + numel)


def spoil(model: Any, place: Place) -> None:
    """Change the bytes of a place, as a misdirected write does."""
    (file,) = inf.handle(model).parts.tiers.storage.space.layers[place.layer]
    with Path(f"/proc/self/fd/{file.fd}").open("r+b") as written:
        written.seek(place.offset)
        written.write(b"spoilt" * (place.size_bytes // 6))
        os.fsync(written.fileno())
