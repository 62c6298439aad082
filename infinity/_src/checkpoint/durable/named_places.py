"""Places of a durable run's chunks that must not be overwritten, because the manifest of a
checkpoint or of an older commit names them.

A chunk has two places (extents of a file): the *live* place has the newest commit, and the next
step writes the *other* place. A *layer* is one file on each drive.

`PinnedLayers`: checkpoints by hard links, without copies of data.

    save      makes hard links to the files of the live places in the checkpoint; the layers of
              these files are *pinned*
    commits   give a chunk whose other place is pinned a new place, in a layer without links
    then      a layer without places of the run is closed and unlinked from the run's directory; the
              checkpoint's link keeps the file

A linked file may also hold outdated chunks: only the places that the manifest names belong to the
checkpoint.

`OlderCommits`: commits that are retained in addition to the newest one (`Policy.generations` of 3
and more). Each chunk has additional places, through which commits rotate.

    generations=3    places of a chunk:   A newest commit   B commit before   C written by the step
    next commit      A commit before      B free            C newest commit

After a commit, a chunk whose other place is named by a manifest swaps that place for a free
additional place. One is free, since the oldest commit was just removed. Chunks that no step updates
need no additional place, since all commits name the same place. If the drives lack the capacity,
fewer older commits are retained; the newest commit always is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from infinity._src.base.sizes import MIB, format_size
from infinity._src.checkpoint.directory import remove, typed_errors
from infinity._src.checkpoint.durable.files import RunFiles
from infinity._src.memory.swap_space import ExtentRequest, SwapSpace
from infinity._src.params.state_store import ShardRecords, StateStore
from infinity._src.params.unit import Flat
from infinity.aio import Executor, Format
from infinity.aio._validate import FILE_MAX
from infinity.errors import SwapFullError

log = logging.getLogger("infinity")

_CANNOT = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOTSUP})
"""Errors of `os.link` after which a save copies: another file system, no or too many links."""


def link_all(sources: Sequence[Path], targets: Sequence[Path]) -> bool:
    """Make a hard link to every source. Returns False, without any link, if the file system cannot
    make one. Raises: AioError.
    """
    made: list[Path] = []
    for source, target in zip(sources, targets, strict=True):
        try:
            with typed_errors(target, "link", 0):
                # The data exist until both the run and the checkpoint have unlinked them.
                os.link(source, target)
        except OSError as error:
            # Make all links or none.
            remove(made)
            if error.errno in _CANNOT:
                return False
            raise
        made.append(target)
    return True


class PinnedLayers:
    """Layers of swap files that checkpoints share with the run. Calls must not overlap."""

    def __init__(
        self, files: RunFiles, space: SwapSpace, store: StateStore, executor: Executor
    ) -> None:
        self._files = files
        self._space = space
        self._store = store
        self._executor = executor
        self._layers: set[int] = set()

    @property
    def layers(self) -> frozenset[int]:
        """The layers whose files have hard links in checkpoints; the run does not write to them."""
        return frozenset(self._layers)

    @property
    def newest(self) -> int:
        """The newest layer whose files have no links in checkpoints."""
        return [layer for layer in self._files.layers if layer not in self._layers][-1]

    def layer_for_more(self) -> int:
        """Return a layer for additional places: a new layer, or the newest layer without links if
        the executor would exceed FILE_MAX files. Blocks. Raises: AioError.
        """
        # Leave a file number free for the layer that the next save adds.
        return self._new_layer() if len(self._files.layers) < FILE_MAX - 2 else self.newest

    def link(
        self,
        now: npt.NDArray[np.void],
        targets: dict[tuple[int, int], Path],
        *,
        spare: bool = False,
    ) -> bool:
        """Hard-link each file (layer, drive) of `targets` to its path, and pin those layers.
        Returns False if the file system cannot make links, or if no layer can be added.

        now: the chunks' records, all committed. spare: the chunks have additional places, so a
        drive that is too full to grow is not an error. Also preallocates, in a new layer, the
        places that replace the pinned places at the next commit. Blocks for the file system.
        Raises: SwapFullError, AioError; then no layer is pinned.
        """
        # Chunks that no step updates keep old layers in use, and an executor has at most FILE_MAX
        # files.
        if len(self._files.layers) >= FILE_MAX - 1:
            return False
        sources = [Path(self._files.layers[layer][drive].path) for layer, drive in targets]
        # Link first: if that fails, no layer has been allocated.
        if not link_all(sources, list(targets.values())):
            return False
        try:
            # Preallocate now, so that a full drive raises in the save and not in a later step.
            fresh = self._files.layers[self._new_layer()]
            with contextlib.suppress(SwapFullError) if spare else contextlib.nullcontext():
                for drive, file in enumerate(fresh):
                    size_bytes = int(now["other_bytes"][now["drive"] == drive].sum())
                    # The reserved extents are allocated again in this layer, before the chunks.
                    file.grow(size_bytes + self._store.spare_bytes_wanted)
        except BaseException:
            # The layers are not pinned, so the run will overwrite their files: remove the links.
            remove(list(targets.values()))
            raise
        # From now on the run must not write to these files, whose places the checkpoint names.
        for layer in {layer for layer, _ in targets}:
            self._layers.add(layer)
            # The swap space reserves no places in a frozen layer, and does not truncate its files.
            self._space.freeze_layer(layer)
        self._set_layers()
        return True

    def make_way(self, flats: Sequence[Flat], named: AbstractSet[int] = frozenset()) -> None:
        """Replace each chunk's other place if that place is pinned. Call it when everything is
        committed. Blocks for the file system. named: layers in which older commits have places.

        Raises: SwapFullError; then chunks with a pinned other place must not be written.
        """
        if not self._layers:
            return
        for flat in flats:
            now = self._executor.look(self._store[flat].ids)
            # The next step writes the other place; the live place is only read.
            pinned = np.isin(now["other_file"], sorted(self._layers)) & (now["other_bytes"] > 0)
            # `_other_layer` chooses a layer that differs from the live place's.
            for live in np.unique(now["file"][pinned]):
                self._move(
                    flat,
                    now,
                    np.flatnonzero(pinned & (now["file"] == live)),
                    self._other_layer(int(live)),
                )
        self._release(flats, named)
        self._set_layers()

    def _set_layers(self) -> None:
        """Set the state store's layers for new places: layers without links."""
        # New live places go to the oldest such layer, new other places to the newest, which may be
        # the same layer.
        mine = [layer for layer in self._files.layers if layer not in self._layers]
        self._store.place_in((mine[0], mine[-1]))

    def _other_layer(self, live: int) -> int:
        """Return a layer without links that differs from `live`, the layer of the live places."""
        found = [
            layer for layer in self._files.layers if layer not in self._layers and layer != live
        ]
        # The newest layer, in which `link` has preallocated.
        return found[-1] if found else self._new_layer()

    def _new_layer(self) -> int:
        files = self._files.add()
        layer = self._space.add_layer(files)
        self._files.layers[layer] = files
        for drive, file in enumerate(files):
            added = self._executor.add_file(drive, file)
            assert added == layer, "a layer's number is that of its files in the executor"
        return layer

    def _move(
        self, flat: Flat, now: npt.NDArray[np.void], chunks: npt.NDArray[np.int64], layer: int
    ) -> None:
        records = self._store[flat]
        wants = [ExtentRequest(int(size), layer) for size in now["other_bytes"][chunks]]
        # Same drives, so that the distribution over drives does not change.
        places = self._space.reserve_on(now["other_drive"][chunks].tolist(), wants)
        offsets = np.array([place.offset for place in places], dtype=np.int64)
        # No copy: the next step writes the whole place before any read of it.
        self._executor.relocate(
            records.ids[chunks],
            now["other_drive"][chunks],
            np.full(len(chunks), layer, dtype=np.int32),
            offsets,
        )
        gone = {
            (int(one["other_drive"]), int(one["other_offset"]), int(one["other_file"]))
            for one in now[chunks]
        }
        # The size is not compared: a place may be larger than its chunk.
        kept = [
            place
            for place in records.places
            if (place.drive, place.offset, place.layer) not in gone
        ]
        records.places[:] = kept + places

    def _release(self, flats: Sequence[Flat], named: AbstractSet[int]) -> None:
        """Close each pinned layer that no chunk and no older commit uses, and unlink its files from
        the run's directory.
        """
        used = {place.layer for flat in flats for place in self._store[flat].places}
        # Also keep layers whose reserved extents replace failed ones.
        used |= self._space.exchanged_layers
        for layer in sorted(self._layers - used - named):
            files = self._files.layers.pop(layer)
            # Remove the files from the executor first, which must not use a closed file.
            for drive in range(len(files)):
                self._executor.remove_file(drive, layer)
            self._space.remove_layer(layer)
            self._files.release(files)
            self._layers.discard(layer)


_LEFT_FREE = 64 * MIB
"""Free space that additional places must leave on a drive, for manifests and other processes."""


class _Places(NamedTuple):
    """Places of chunks: drive, file on the drive (-1: no place) and offset, each [chunks]."""

    drives: npt.NDArray[np.int32]
    files: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]

    def alike(self, other: _Places) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = (
            (self.drives == other.drives)
            & (self.files == other.files)
            & (self.offsets == other.offsets)
        )
        return found

    def put(self, chunks: npt.NDArray[np.bool_], other: _Places) -> None:
        self.drives[chunks], self.files[chunks] = other.drives[chunks], other.files[chunks]
        self.offsets[chunks] = other.offsets[chunks]


@dataclasses.dataclass(frozen=True)
class _Commit:
    generation: int
    table: str
    shards: tuple[ShardRecords, ...]
    places: tuple[_Places, ...]


class OlderCommits:
    """One rank's older commits, and the additional places of its chunks. Calls must not overlap.

    count: the number of commits to retain in addition to the newest one.
    """

    def __init__(
        self,
        count: int,
        flats: Sequence[Flat],
        *,
        store: StateStore,
        executor: Executor,
        space: SwapSpace,
        pinned: PinnedLayers,
    ) -> None:
        self._flats = list(flats)
        self._store = store
        self._executor = executor
        self._space = space
        self._pinned = pinned
        # Newest first.
        self._kept: list[_Commit] = []
        self._spares: list[list[_Places]] = [[] for _ in self._flats]
        self._wanted = count
        self._layer = 0
        self.capacity = count
        """The number of older commits for which this rank has capacity."""

    @property
    def generations(self) -> set[int]:
        return {commit.generation for commit in self._kept}

    @property
    def tables(self) -> set[str]:
        return {commit.table for commit in self._kept}

    @property
    def layers(self) -> set[int]:
        found: set[int] = set()
        for commit in self._kept if self._wanted else ():
            for places in commit.places:
                found.update(np.unique(places.files).tolist())
        return found

    def committed(self, generation: int, table: str, count: int) -> None:
        """Record a commit that all ranks have completed, before the manifests of older commits are
        removed. count: the number of older commits that every rank can retain; older ones are
        dropped.
        """
        shards = tuple(self._store[flat] for flat in self._flats)
        moved = not self._kept or any(
            mine is not other for mine, other in zip(shards, self._kept[0].shards, strict=True)
        )
        if moved:
            # A flat with new records has moved: its earlier places were freed, and may hold other
            # data.
            before = self._kept[0].shards if self._kept else shards
            for index, (mine, other) in enumerate(zip(shards, before, strict=True)):
                if mine is not other:
                    self._spares[index].clear()
            self._kept.clear()
            self.capacity = self._wanted
        live = tuple(self._live(shard) for shard in shards) if self._wanted else ()
        self._kept.insert(0, _Commit(generation, table, shards, live))
        del self._kept[1 + count :]

    def _live(self, shard: ShardRecords) -> _Places:
        now = self._executor.look(shard.ids)
        return _Places(now["drive"].copy(), now["file"].copy(), now["file_offset"].copy())

    def make_way(self) -> bool:
        """Swap each chunk's other place for an unnamed place, if an older commit or a checkpoint
        names the other place. Call it when everything is committed. Blocks for the file system.

        Returns True if commits were dropped for lack of space: their manifests must be removed
        before the next write. Raises: AioError.
        """
        if not (self._wanted and self._kept):
            return False
        for index, flat in enumerate(self._flats):
            self._forget_pinned(index, self._store[flat])
        self._reserve_capacity()
        cut = len(self._kept) > 1 + self.capacity
        del self._kept[1 + self.capacity :]
        while True:
            try:
                for index, flat in enumerate(self._flats):
                    self._exchange(index, self._store[flat])
                return cut
            except SwapFullError as error:
                self._warn(min(self.capacity, len(self._kept) - 1) - 1, error)
                # Only the newest commit remains, so a checkpoint names the other place, for which
                # `PinnedLayers.make_way` raises.
                if len(self._kept) == 1:
                    return cut
                cut = True
                self._kept.pop()

    # -- capacity ----------------------------------------------------------------------------------

    def _reserve_capacity(self) -> None:
        """Reserve an additional place for each chunk with states, for one older commit after
        another. Stops at the first commit that does not fit.
        """
        for row in range(self.capacity):
            wanted: list[tuple[int, npt.NDArray[np.void], npt.NDArray[np.intp]]] = []
            for index, flat in enumerate(self._flats):
                shard = self._store[flat]
                # Parameters without states rarely change: `_exchange` reserves places when needed.
                if shard.format is Format.RAW:
                    continue
                held = sum((spare.files >= 0).astype(np.int64) for spare in self._spares[index])
                lacks = np.broadcast_to(held <= row, len(shard.ids))
                if lacks.any():
                    now = self._executor.look(shard.ids)
                    lacking = np.flatnonzero(lacks & (now["other_bytes"] > 0))
                    wanted.append((index, now, lacking))
            try:
                self._reserve([each for each in wanted if each[2].size])
            except SwapFullError as error:
                self._warn(row, error)
                return

    def _reserve(
        self, wanted: Sequence[tuple[int, npt.NDArray[np.void], npt.NDArray[np.intp]]]
    ) -> None:
        """Reserve a place for each of these chunks, or for none. Raises: SwapFullError."""
        if not wanted:
            return
        drives = np.concatenate([now["other_drive"][chunks] for _, now, chunks in wanted]).tolist()
        sizes = np.concatenate([now["other_bytes"][chunks] for _, now, chunks in wanted]).tolist()
        layer = self._additional_layer()
        self._check_free(layer, drives, sizes)
        places = self._space.reserve_on(drives, [ExtentRequest(size, layer) for size in sizes])
        self._store.nvme_bytes += sum(sizes)
        at = 0
        for index, _, chunks in wanted:
            mine = places[at : at + len(chunks)]
            at += len(chunks)
            # Added to the flat's places, so that freeing the flat also frees them.
            self._store[self._flats[index]].places.extend(mine)
            spare = _none(len(self._store[self._flats[index]].ids))
            self._spares[index].append(spare)
            spare.drives[chunks] = [place.drive for place in mine]
            spare.files[chunks] = layer
            spare.offsets[chunks] = [place.offset for place in mine]

    def _check_free(self, layer: int, drives: Sequence[int], sizes: Sequence[int]) -> None:
        """Raise SwapFullError if less than `_LEFT_FREE` would stay free on a drive."""
        wants = np.bincount(drives, weights=sizes, minlength=len(self._space.files))
        for drive, size in enumerate(wants.astype(np.int64).tolist()):
            file = self._space.layers[layer][drive]
            more = self._space.growth(layer, drive, size) if size else 0
            if more and file.free_bytes() < more + _LEFT_FREE:
                raise SwapFullError(
                    f"additional places must leave {format_size(_LEFT_FREE)} free on the drive",
                    path=file.path, op="allocate", length=more,
                )  # fmt: skip

    def _additional_layer(self) -> int:
        if not self._layer:
            self._layer = self._pinned.layer_for_more()
        elif self._layer in self._pinned.layers:
            # A checkpoint has linked this layer: use the layer that `PinnedLayers.link` added.
            self._layer = self._pinned.newest
        return self._layer

    def _warn(self, count: int, error: SwapFullError) -> None:
        if count >= self.capacity:
            return
        self.capacity = max(count, 0)
        log.warning(
            "the drives lack space for %d commits of the durable run in addition to the step being "
            "written: this process keeps %d. Free space before the next start, or give "
            "Policy(generations=%d) (%s)",
            self._wanted + 1, self.capacity + 1, self.capacity + 2, error,
        )  # fmt: skip

    # -- swaps of places ---------------------------------------------------------------------------

    def _exchange(self, index: int, shard: ShardRecords) -> None:
        """Swap those other places of a flat's chunks that must not be overwritten. Raises:
        SwapFullError; then only some places are swapped, and all records are consistent.
        """
        now = self._executor.look(shard.ids)
        other = _Places(
            now["other_drive"].copy(), now["other_file"].copy(), now["other_offset"].copy()
        )
        pinned = sorted(self._pinned.layers)
        needs = (now["other_bytes"] > 0) & (
            self._named(index, other) | np.isin(other.files, pinned)
        )
        if not needs.any():
            return
        # Use free additional places first; reserve new ones for the remaining chunks.
        needs &= ~self._take(index, shard, needs, other)
        if needs.any():
            self._reserve([(index, now, np.flatnonzero(needs))])
            self._take(index, shard, needs, other)
        self._forget_pinned(index, shard)
        self._spares[index] = _packed(self._spares[index])

    def _take(
        self, index: int, shard: ShardRecords, needs: npt.NDArray[np.bool_], other: _Places
    ) -> npt.NDArray[np.bool_]:
        """Swap `other` of each chunk in `needs` with an additional place that may be written.
        Returns a mask of the swapped chunks.
        """
        pinned, done = sorted(self._pinned.layers), np.zeros(len(needs), dtype=np.bool_)
        for spare in self._spares[index]:
            # Places in pinned layers must not be written.
            free = (spare.files >= 0) & ~np.isin(spare.files, pinned)
            chosen = needs & ~done & free & ~self._named(index, spare)
            if not chosen.any():
                continue
            chunks = np.flatnonzero(chosen)
            self._executor.relocate(
                shard.ids[chunks],
                spare.drives[chunks],
                spare.files[chunks],
                spare.offsets[chunks],
            )
            spare.put(chosen, other)
            done |= chosen
        return done

    def _named(self, index: int, places: _Places) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = np.zeros(len(places.files), dtype=np.bool_)
        for commit in self._kept:
            found |= places.alike(commit.places[index])
        return found

    def _forget_pinned(self, index: int, shard: ShardRecords) -> None:
        """Drop additional places that only checkpoints name, since the run never writes to them
        again.
        """
        gone: set[tuple[int, int, int]] = set()
        pinned = sorted(self._pinned.layers)
        for spare in self._spares[index] if pinned else ():
            lost = np.isin(spare.files, pinned) & ~self._named(index, spare)
            columns = (spare.files[lost], spare.drives[lost], spare.offsets[lost])
            gone.update(zip(*(column.tolist() for column in columns), strict=True))
            spare.files[lost] = -1
        if not gone:
            return
        kept = [
            place for place in shard.places if (place.layer, place.drive, place.offset) not in gone
        ]
        self._store.nvme_bytes -= sum(place.size_bytes for place in shard.places)
        self._store.nvme_bytes += sum(place.size_bytes for place in kept)
        shard.places[:] = kept


def _none(count: int) -> _Places:
    none = np.full(count, -1, dtype=np.int32)
    return _Places(none, none.copy(), np.zeros(count, dtype=np.int64))


def _packed(spares: Sequence[_Places]) -> list[_Places]:
    if not spares:
        return []
    order = np.argsort(np.stack([spare.files for spare in spares]) < 0, axis=0, kind="stable")
    columns = [
        np.take_along_axis(np.stack(column), order, axis=0) for column in zip(*spares, strict=True)
    ]
    rows = (_Places(*(column[row].copy() for column in columns)) for row in range(len(spares)))
    return [places for places in rows if (places.files >= 0).any()]
