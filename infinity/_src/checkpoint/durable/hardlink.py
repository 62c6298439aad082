"""Checkpoints of a durable run by hard links: its files get second names, nothing is copied, and
the run writes to other places from then on.

    save      the files of the live places are linked into the checkpoint; these places are *pinned*
    commits   a chunk whose pinned place is no longer live gets another, in a fresh layer of files
    then      a layer in which no chunk has a place is given up: the checkpoint's name keeps it

So what a checkpoint names is never written again, and no byte of it is copied. A file may hold more
than the checkpoint needs, where chunks were not updated for steps: only the places that the
manifest names count.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

import numpy as np
import numpy.typing as npt

from infinity._src.checkpoint.directory import remove, typed_errors
from infinity._src.checkpoint.durable.files import RunFiles
from infinity._src.memory.swap_space import ExtentRequest, SwapSpace
from infinity._src.params.state_store import StateStore
from infinity._src.params.unit import Flat
from infinity.aio import Executor
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

        now: the chunks' records, all committed. spare: they have further places, which will do
        where a drive has no room for more. Also makes room for the other places that these
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
        self._give_up(flats, named)
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

    def _give_up(self, flats: Sequence[Flat], named: AbstractSet[int]) -> None:
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
            self._files.give_up(files)
            self._layers.discard(layer)


__all__ = ["PinnedLayers", "link_all"]
