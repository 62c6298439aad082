"""Places of a durable run's chunks that must not be written: a checkpoint names them, or an older
commit that is kept.

`PinnedLayers`: checkpoints by hard links. Files get second names, and nothing is copied.

    save      the files of the live places are linked into the checkpoint; these places are *pinned*
    commits   a chunk whose pinned place is no longer live gets another, in a fresh layer of files
    then      a layer in which no chunk has a place is released: the checkpoint's name keeps it

A file may hold more than the checkpoint needs, where chunks were not updated for steps: only the
places that the manifest names count.

`OlderCommits`: commits kept besides the newest one, with `Policy.generations` of 3 and more, by
further places that take turns.

    generations=3    places of a chunk:   A newest commit   B the one before   C written by the step
    next commit      A the one before     B free            C newest

After a commit, a chunk whose other place is named exchanges it for a free one: the oldest commit
was just removed, so there is one. Chunks that no step updates need no further place, and share
theirs between commits. If the drives lack the capacity, fewer commits are kept, down to the newest
alone; never less.
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

_CANNOT = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOTSUP})
"""Errors of `os.link` after which a save copies: another file system, no links, too many."""


def link_all(sources: Sequence[Path], targets: Sequence[Path]) -> bool:
    """Give every source a second name (a hard link). Returns False where the file system makes no
    such link; then no source has one. Raises: AioError.
    """
    made: list[Path] = []
    for source, target in zip(sources, targets, strict=True):
        try:
            with typed_errors(target, "link", 0):
                # A second name, not a copy: the bytes live until the last name goes, run's or
                # checkpoint's.
                os.link(source, target)
        except OSError as error:
            # All have second names, or none has.
            remove(made)
            if error.errno in _CANNOT:
                return False
            raise
        made.append(target)
    return True


class PinnedLayers:
    """Layers of swap files that checkpoints share with the run. One thread uses it at a time."""

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
        """The layers that checkpoints have a part in: nothing is written there."""
        return frozenset(self._layers)

    @property
    def newest(self) -> int:
        """The newest layer that no checkpoint has a part in."""
        return [layer for layer in self._files.layers if layer not in self._layers][-1]

    def layer_for_more(self) -> int:
        """Return a layer for further places of chunks: a new one, or as an executor takes FILE_MAX
        files, the newest that no checkpoint has a part in. Blocks. Raises: AioError.
        """
        # One is left for the next save.
        return self._new_layer() if len(self._files.layers) < FILE_MAX - 2 else self.newest

    def link(
        self,
        now: npt.NDArray[np.void],
        targets: dict[tuple[int, int], Path],
        *,
        spare: bool = False,
    ) -> bool:
        """Give the files of `targets`, by layer and drive, these second names, and pin their
        layers. Returns False where no links can be made, or no further layer.

        now: the chunks' records, all committed. spare: they have further places, which suffice
        where a drive has no capacity for more. Also makes room for the other places that these
        chunks will need. Blocks for the file system. Raises: SwapFullError, AioError; then nothing
        is pinned.
        """
        # Chunks that no step updates keep old layers alive, and an executor takes FILE_MAX files.
        if len(self._files.layers) >= FILE_MAX - 1:
            return False
        sources = [Path(self._files.layers[layer][drive].path) for layer, drive in targets]
        # Names first: a failure to make them then takes no room.
        if not link_all(sources, list(targets.values())):
            return False
        try:
            # Room for all pinned chunks now: a full drive is told by the save, not by a step later.
            fresh = self._files.layers[self._new_layer()]
            with contextlib.suppress(SwapFullError) if spare else contextlib.nullcontext():
                for drive, file in enumerate(fresh):
                    size_bytes = int(now["other_bytes"][now["drive"] == drive].sum())
                    # Spare ranges move there, too, and come first.
                    file.grow(size_bytes + self._store.spare_bytes_wanted)
        except BaseException:
            # Nothing is pinned, so the run goes on writing there: no checkpoint may name it.
            remove(list(targets.values()))
            raise
        # From here on nothing may be written into these files: the checkpoint names their places.
        for layer in {layer for layer, _ in targets}:
            self._layers.add(layer)
            # Nothing is reserved there any more, and the file is not cut shorter.
            self._space.freeze_layer(layer)
        self._tell()
        return True

    def make_way(self, flats: Sequence[Flat], named: AbstractSet[int] = frozenset()) -> None:
        """Give chunks whose other place is pinned another one. Called when everything is committed.
        Blocks for the file system. named: layers in which older commits have places.

        Raises: SwapFullError; then those chunks must not be written.
        """
        if not self._layers:
            return
        for flat in flats:
            now = self._executor.look(self._store[flat].ids)
            # The other place is the one that the next step writes; the live place is only read.
            pinned = np.isin(now["other_file"], sorted(self._layers)) & (now["other_bytes"] > 0)
            # By the layer of the live place, since the new place goes to another one.
            for live in np.unique(now["file"][pinned]):
                self._move(
                    flat,
                    now,
                    np.flatnonzero(pinned & (now["file"] == live)),
                    self._layer_beside(int(live)),
                )
        self._release(flats, named)
        self._tell()

    def _tell(self) -> None:
        """Tell the state store the layers that no checkpoint shares: new places go there. Both
        places of a chunk may lie in the same layer.
        """
        # Oldest and newest of them, for the two places.
        mine = [layer for layer in self._files.layers if layer not in self._layers]
        self._store.place_in((mine[0], mine[-1]))

    def _layer_beside(self, live: int) -> int:
        """Return a layer that no checkpoint has a part in, other than the one where the chunks are
        now.
        """
        found = [
            layer for layer in self._files.layers if layer not in self._layers and layer != live
        ]
        # The newest, which `link` made room in.
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
        # On the drive of the place before: shares of the drives stay as they are.
        places = self._space.reserve_on(now["other_drive"][chunks].tolist(), wants)
        offsets = np.array([place.offset for place in places], dtype=np.int64)
        # Nothing is copied: the place is written anew before anybody reads it.
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
        # Not by size: a place may have room for more than it holds yet.
        kept = [
            place
            for place in records.places
            if (place.drive, place.offset, place.layer) not in gone
        ]
        records.places[:] = kept + places

    def _release(self, flats: Sequence[Flat], named: AbstractSet[int]) -> None:
        """Close the pinned layers in which no chunk has a place any more, and no older commit, and
        take their names from the run.
        """
        # A layer goes only when neither place of any chunk is in it.
        used = {place.layer for flat in flats for place in self._store[flat].places}
        # Nor one of others, which a spare range took there.
        used |= self._space.exchanged_layers
        for layer in sorted(self._layers - used - named):
            files = self._files.layers.pop(layer)
            # The executor first: it must not use a file that the run has given up.
            for drive in range(len(files)):
                self._executor.remove_file(drive, layer)
            self._space.remove_layer(layer)
            self._files.release(files)
            self._layers.discard(layer)


__all__ = ["PinnedLayers", "link_all"]


log = logging.getLogger("infinity")

_LEFT_FREE = 64 * MIB
"""Bytes of a drive that further places leave free: commits write manifests there, and others may
write, too."""


class _Places(NamedTuple):
    """Places of chunks: drive, file there (-1: none) and offset, each [chunks]."""

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
    """The commits of one rank that are kept, and the further places of its chunks. One thread uses
    it at a time.

    count: how many are wanted beside the newest one.
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
        """The number of commits that this rank has capacity for beside the newest one."""

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
        """Note a commit of all ranks, before its manifest is the only one. count: of older ones
        that all ranks have capacity for; others are forgotten.
        """
        shards = tuple(self._store[flat] for flat in self._flats)
        moved = not self._kept or any(
            mine is not other for mine, other in zip(shards, self._kept[0].shards, strict=True)
        )
        if moved:
            # Their places were released with the records, and others will have them.
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
        """Exchange the other places that kept commits name, or checkpoints, for ones that none
        names. Called when everything is committed. Blocks for the file system.

        Returns True if some commits are kept no more, for lack of room: their manifests must go
        before anything is written. Raises: AioError.
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
                self._tell(min(self.capacity, len(self._kept) - 1) - 1, error)
                # With the newest alone a checkpoint may still name the other place, and
                # `PinnedLayers` tells of that.
                if len(self._kept) == 1:
                    return cut
                cut = True
                self._kept.pop()

    # -- capacity ----------------------------------------------------------------------------------

    def _reserve_capacity(self) -> None:
        """Reserve further places for all chunks with states that lack them, for one commit after
        the other.
        """
        for row in range(self.capacity):
            wanted: list[tuple[int, npt.NDArray[np.void], npt.NDArray[np.intp]]] = []
            for index, flat in enumerate(self._flats):
                shard = self._store[flat]
                # Parameters without states change seldom; theirs are taken when they are needed.
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
                self._tell(row, error)
                return

    def _reserve(
        self, wanted: Sequence[tuple[int, npt.NDArray[np.void], npt.NDArray[np.intp]]]
    ) -> None:
        """Reserve a place for each of these chunks: all, or none. Raises: SwapFullError."""
        if not wanted:
            return
        drives = np.concatenate([now["other_drive"][chunks] for _, now, chunks in wanted]).tolist()
        sizes = np.concatenate([now["other_bytes"][chunks] for _, now, chunks in wanted]).tolist()
        layer = self._layer_of_its_own()
        self._check_free(layer, drives, sizes)
        places = self._space.reserve_on(drives, [ExtentRequest(size, layer) for size in sizes])
        self._store.nvme_bytes += sum(sizes)
        at = 0
        for index, _, chunks in wanted:
            mine = places[at : at + len(chunks)]
            at += len(chunks)
            # In the records, so that they are given back together with the chunks.
            self._store[self._flats[index]].places.extend(mine)
            spare = _none(len(self._store[self._flats[index]].ids))
            self._spares[index].append(spare)
            spare.drives[chunks] = [place.drive for place in mine]
            spare.files[chunks] = layer
            spare.offsets[chunks] = [place.offset for place in mine]

    def _check_free(self, layer: int, drives: Sequence[int], sizes: Sequence[int]) -> None:
        """Raise SwapFullError where a drive would have little room left for what is written."""
        wants = np.bincount(drives, weights=sizes, minlength=len(self._space.files))
        for drive, size in enumerate(wants.astype(np.int64).tolist()):
            file = self._space.layers[layer][drive]
            more = self._space.growth(layer, drive, size) if size else 0
            if more and file.free_bytes() < more + _LEFT_FREE:
                raise SwapFullError(
                    f"the drive has to keep {format_size(_LEFT_FREE)} free beside further places",
                    path=file.path, op="allocate", length=more,
                )  # fmt: skip

    def _layer_of_its_own(self) -> int:
        if not self._layer:
            self._layer = self._pinned.layer_for_more()
        elif self._layer in self._pinned.layers:
            # A save has made room there.
            self._layer = self._pinned.newest
        return self._layer

    def _tell(self, count: int, error: SwapFullError) -> None:
        if count >= self.capacity:
            return
        self.capacity = max(count, 0)
        log.warning(
            "there is no room for %d commits of the durable run beside the step that is written: "
            "this process keeps %d. Free space before the next start, or give "
            "Policy(generations=%d) (%s)",
            self._wanted + 1, self.capacity + 1, self.capacity + 2, error,
        )  # fmt: skip

    # -- turns -------------------------------------------------------------------------------------

    def _exchange(self, index: int, shard: ShardRecords) -> None:
        """Exchange the other places of a flat's chunks that must not be written. Raises:
        SwapFullError; then some are exchanged, and each place is still known.
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
        # First those that there are; then new ones for the rest.
        needs &= ~self._take(index, shard, needs, other)
        if needs.any():
            self._reserve([(index, now, np.flatnonzero(needs))])
            self._take(index, shard, needs, other)
        self._forget_pinned(index, shard)
        self._spares[index] = _packed(self._spares[index])

    def _take(
        self, index: int, shard: ShardRecords, needs: npt.NDArray[np.bool_], other: _Places
    ) -> npt.NDArray[np.bool_]:
        """Give chunks that need one a further place that may be written, in exchange for `other`.
        Returns those that got one.
        """
        pinned, done = sorted(self._pinned.layers), np.zeros(len(needs), dtype=np.bool_)
        for spare in self._spares[index]:
            # Of what a checkpoint names nothing is written either.
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
        """Forget further places that only checkpoints name: they are never written again."""
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
