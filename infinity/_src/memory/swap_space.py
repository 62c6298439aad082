"""Swap space over one or several drives, striped by their bandwidth.

Each chunk is on one drive. A gather reads consecutive chunks, so every range of chunks must be
distributed in proportion to the shares, not only all chunks together. Smooth weighted round robin
does this, over bytes.

The shares of the drives are in proportion to their bandwidth, so that a fast drive does not wait
for a slow one. The policy gives the bandwidths (from a sweep of `infinity.bench`), or set-up
measures them: on all drives at once, since these may share a bus; with as many reads as writes, as
in training; and through an executor with the same backend and fault injector.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from infinity import aio
from infinity._src.base.sizes import MIB, format_size
from infinity.aio import ExtentAllocator, SwapFile
from infinity.errors import DeviceFailedError, SwapFullError

log = logging.getLogger("infinity.memory")

_UNIT = 1 << 20
"""Sum of the drives' integer weights: shares are exact to about a millionth."""


@dataclasses.dataclass(frozen=True, slots=True)
class SwapExtent:
    """Bytes [offset, offset + size) of the swap file of `layer` on one drive."""

    drive: int
    offset: int
    size_bytes: int
    layer: int = 0


class ExtentRequest(NamedTuple):
    """Request for bytes in a file of `layer`; 0 bytes: no extent."""

    size_bytes: int
    layer: int = 0


class WeightedRoundRobin:
    """Smooth weighted round robin: distributes chunks over drives in proportion to `shares`, by
    bytes.

    Every drive earns its share of each chunk as credit. The drive with the most credit takes the
    chunk and pays for it. Over any range of chunks, the bytes of each of n drives deviate by at
    most n chunks of the largest size.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        total = sum(shares)
        if not shares or not all(share > 0 for share in shares) or not math.isfinite(total):
            raise ValueError(f"shares={list(shares)}: give one positive number for each drive")
        # Integers, so that equal shares stay equal after any number of chunks. At least 1, so that
        # a very slow drive earns credit, too.
        self._weights = [max(round(share / total * _UNIT), 1) for share in shares]
        self.credits = [0] * len(self._weights)

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of the bytes that each drive gets."""
        return tuple(weight / sum(self._weights) for weight in self._weights)

    def next_drive(self, size_bytes: int) -> int:
        """Choose the drive for the next chunk, and charge it."""
        # All drives together earn what the chosen drive pays, so the sum of credits is constant.
        for drive, weight in enumerate(self._weights):
            self.credits[drive] += weight * size_bytes
        # Of equal credits the first drive wins, so that every run makes the same choices.
        drive = max(range(len(self.credits)), key=lambda index: (self.credits[index], -index))
        self.credits[drive] -= sum(self._weights) * size_bytes
        return drive


class NoRoomError(SwapFullError):
    """The file systems lack space for all ranks together. Raised on all ranks."""


Room = Callable[[Sequence[SwapFile], Sequence[int]], None]
"""Check that takes files, and the bytes by which each is to grow. Raises NoRoomError if they
cannot."""


class SwapSpace:
    """Swap files in `directories`, and the extents in use: in layers of one file on each drive.

    Layer 0 is ephemeral: its files have no name, so they vanish with the process. The files of the
    other layers are made by the caller of `add_layer`. A layer's number is also the number of its
    files in an executor.

    shares: share of the bytes that each drive gets, in any unit (None: equal); set before the first
    `reserve`. room: checks that the files can grow, together with the files of other ranks on the
    same drives; `grow_together` calls it. make_room: releases dispensable space, a part at each
    call, and returns whether it has released any; all ranks return the same. make: makes the file
    of a directory. Raises: the errors of SwapFile for a directory that is missing, read-only, full
    or on tmpfs.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        shares: Sequence[float] | None = None,
        *,
        room: Room | None = None,
        make_room: Callable[[], bool] = lambda: False,
        make: Callable[[Path], SwapFile] = SwapFile.create,
    ) -> None:
        self.layers: list[list[SwapFile]] = [[]]
        self._room = room
        self._make_room = make_room
        # Layers whose files a checkpoint has hard links to: their extents and lengths must stay.
        self._frozen: set[int] = set()
        self._grows_later = False
        # (layer, drive, offset) of a place with a failed write -> the extent that replaces it. The
        # owner still names the old place.
        self._exchanged: dict[tuple[int, int, int], SwapExtent] = {}
        try:
            for directory in directories:
                self.files.append(make(directory))
            # 1 without drives: with all states in RAM the space has no files.
            self._turns = WeightedRoundRobin([1.0] * max(len(self.files), 1))
            if shares is not None:
                self.shares = tuple(shares)
        except BaseException:
            # The caller gets no object to close.
            self.close()
            raise
        self._extents = [ExtentAllocator(max(len(self.files), 1))]

    @property
    def files(self) -> list[SwapFile]:
        """Files of layer 0, by drive."""
        return self.layers[0]

    def add_layer(self, files: Sequence[SwapFile]) -> int:
        """Add a layer of empty files, one on each drive. Returns its number; `close` closes the
        files."""
        assert len(files) == len(self.files)
        # Reuse the number of a removed layer, as executors do with their files.
        layer = next(
            (index for index, held in enumerate(self.layers) if index and not held),
            len(self.layers),
        )
        self.layers[layer:] = [list(files), *self.layers[layer + 1 :]]
        self._extents[layer:] = [ExtentAllocator(len(files)), *self._extents[layer + 1 :]]
        return layer

    def freeze_layer(self, layer: int) -> None:
        """Keep a layer's extents and file lengths from now on: a checkpoint has hard links to the
        files."""
        self._frozen.add(layer)

    def remove_layer(self, layer: int) -> None:
        """Close the files of a layer without extents in use. `add_layer` may reuse its number."""
        for file in self.layers[layer]:
            file.close()
        # Emptied, not deleted: the numbers of later layers must not change.
        self.layers[layer] = []
        self._frozen.discard(layer)

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of the bytes that each drive gets; shares add up to 1."""
        return self._turns.shares

    @shares.setter
    def shares(self, shares: Sequence[float]) -> None:
        if len(shares) != len(self.files):
            raise ValueError(f"shares={list(shares)}: there are {len(self.files)} swap directories")
        # Without the credits, which depend on the old weights.
        self._turns = WeightedRoundRobin(shares)

    @property
    def size_bytes(self) -> int:
        # Of all layers, which are on the same drives.
        return sum(file.size_bytes for layer in self.layers for file in layer)

    def growth(self, layer: int, drive: int, size_bytes: int) -> int:
        """Return the most bytes by which a file grows for additional extents of `size_bytes`."""
        used = self._extents[layer].file_bytes(drive)
        return max(used + size_bytes - self.layers[layer][drive].size_bytes, 0)

    def reserve(self, sizes: Sequence[int]) -> list[SwapExtent]:
        """Reserve extents in layer 0 for chunks of `sizes` bytes (multiples of 4096).

        Raises: SwapFullError; see `reserve_together`.
        """
        return [
            place
            for group in self.reserve_together([(ExtentRequest(size),) for size in sizes])
            for place in group
            if place
        ]

    def reserve_together(
        self, groups: Sequence[Sequence[ExtentRequest]]
    ) -> list[list[SwapExtent | None]]:
        """Reserve extents for groups of requests, each group on one drive, and grow the files.

        Groups go to drives in proportion to the shares.
        Raises: SwapFullError with the directory that lacks space, and the missing bytes; then
        no extent was reserved, and no file has grown. The chunks of a full drive do not move to
        other drives, which would slow those down.
        """
        found: list[list[SwapExtent | None]] = []
        # For undoing: a failed reservation changes neither credits nor files.
        credits_before = list(self._turns.credits)
        lengths_before = [[file.size_bytes for file in files] for files in self.layers]
        try:
            for wants in groups:
                # The largest request of the group counts.
                drive = self._turns.next_drive(max(want.size_bytes for want in wants))
                found.append([])
                for want in wants:
                    found[-1].append(self._allocate(drive, want))
            # Once for all groups: files grow in few large steps.
            self._grow()
        except BaseException:
            for place in (place for group in found for place in group if place):
                self.free(place)
            self._turns.credits = credits_before
            self._shrink(lengths_before)
            raise
        return found

    def reserve_on(self, drives: Sequence[int], wants: Sequence[ExtentRequest]) -> list[SwapExtent]:
        """Reserve an extent for each of `wants` (not of 0 bytes) on the given drive, and grow the
        files.

        Raises: SwapFullError, as `reserve_together`.
        """
        found: list[SwapExtent] = []
        lengths = [[file.size_bytes for file in files] for files in self.layers]
        try:
            for drive, want in zip(drives, wants, strict=True):
                place = self._allocate(drive, want)
                assert place is not None
                found.append(place)
            self._grow()
        except BaseException:
            for place in found:
                self.free(place)
            self._shrink(lengths)
            raise
        return found

    @contextlib.contextmanager
    def grow_together(self) -> Iterator[None]:
        """Grow the files once, at the end of this context, for all extents reserved inside. Either
        all files grow, or none.

        Calls `room` before, even if no file needs to grow, since `room` is collective. If the files
        cannot grow, the extents stay reserved, and the caller releases them. Raises: SwapFullError.
        """
        self._grows_later = True
        try:
            yield
        finally:
            self._grows_later = False
        lengths = [[file.size_bytes for file in files] for files in self.layers]
        # By drive: the files of all layers on a drive grow together.
        more = [0] * len(self.files)
        for files, extents in zip(self.layers, self._extents, strict=True):
            for drive, file in enumerate(files):
                more[drive] += max(extents.file_bytes(drive) - file.size_bytes, 0)
        while True:
            try:
                self._grow_by(more)
                return
            except SwapFullError:
                self._shrink(lengths)
                if not self._make_room():
                    raise
            except BaseException:
                self._shrink(lengths)
                raise

    def _grow_by(self, more: Sequence[int]) -> None:
        # Before any file grows, since it raises on all ranks or on none.
        if self._room is not None:
            self._room(self.files, more)
        self._grow()

    def _grow(self) -> None:
        # `grow_together` does it at the end of its context.
        if self._grows_later:
            return
        for files, extents in zip(self.layers, self._extents, strict=True):
            for drive, file in enumerate(files):
                file.grow(extents.file_bytes(drive))

    def _shrink(self, lengths: Sequence[Sequence[int]]) -> None:
        for layer, (files, before) in enumerate(zip(self.layers, lengths, strict=True)):
            for file, length in zip(files, before, strict=True):
                if layer not in self._frozen:
                    file.shrink(length)

    def _allocate(self, drive: int, want: ExtentRequest) -> SwapExtent | None:
        if not want.size_bytes:
            return None
        assert want.layer not in self._frozen, f"layer {want.layer} is shared with a checkpoint"
        offset = self._extents[want.layer].allocate(want.size_bytes, drive=drive)[1]
        file = self.layers[want.layer][drive]
        if offset < file.size_bytes:
            try:
                file.back(offset, min(want.size_bytes, file.size_bytes - offset))
            except BaseException:
                self._extents[want.layer].free(drive, offset)
                raise
        return SwapExtent(drive, offset, want.size_bytes, want.layer)

    def free(self, place: SwapExtent) -> None:
        """Release an extent; its file keeps its length for later extents."""
        # The place with the failed write stays reserved; its replacement, or that one's, is freed.
        while (key := (place.layer, place.drive, place.offset)) in self._exchanged:
            place = self._exchanged.pop(key)
        # A checkpoint may still use the extents of a frozen layer.
        if place.layer not in self._frozen:
            self._extents[place.layer].free(place.drive, place.offset)

    def exchange(self, bad: SwapExtent, place: SwapExtent) -> None:
        """Record that `place` replaces `bad`. The owner will still call `free` with `bad`."""
        self._exchanged[bad.layer, bad.drive, bad.offset] = place

    @property
    def exchanged_layers(self) -> set[int]:
        """Layers of replacement extents."""
        return {place.layer for place in self._exchanged.values()}

    def place_of(self, place: SwapExtent) -> SwapExtent:
        """Return the replacement of `place` after a failed write, else `place`."""
        while (key := (place.layer, place.drive, place.offset)) in self._exchanged:
            place = self._exchanged[key]
        return place

    def trim(self, place: SwapExtent) -> None:
        """Shorten the extent at the offset of `place` to `place.size_bytes`, and return its end to
        the file system. Does nothing if the extent is not longer.
        """
        if place.layer in self._frozen:
            return
        gone = self._extents[place.layer].trim(place.drive, place.offset, place.size_bytes)
        if gone:
            self.layers[place.layer][place.drive].punch(place.offset + place.size_bytes, gone)

    def release(self, places: Sequence[SwapExtent]) -> None:
        """Release extents, and return the unused ends of files to the file system."""
        for place in places:
            self.free(place)
        self._shrink(
            [
                [extents.file_bytes(drive) for drive in range(len(files))]
                for files, extents in zip(self.layers, self._extents, strict=True)
            ]
        )

    def close(self) -> None:
        """Close the files; ephemeral ones vanish. Idempotent."""
        for files in self.layers:
            for file in files:
                file.close()
            files.clear()


# -- shares by bandwidth ------------------------------------------------------------------------

MEASURE_S = 0.2
_WARM_UP_S = 0.05
_ANSWER_S = 10.0
"""Seconds after which a drive with fewer than three completions counts as failed."""
_CHUNK_BYTES = MIB // 2
_CHUNKS = 32
_WAVE = 4
_WAVES = 4
"""Waves in flight per drive: 16 requests, half of them writes. Requests are smaller than in
training, so that a slow drive completes enough of them."""


def choose_shares(
    files: Sequence[aio.SwapFile],
    *,
    bandwidths: Mapping[str, tuple[float, float]],
    backend: str = "auto",
    seam: aio.Seam | None = None,
) -> tuple[float, ...]:
    """Choose the share of each drive by its bandwidth, and log it.

    bandwidths: absolute directory -> (read, write) in bytes/s. If any of several drives is missing
    here, all are measured: this writes 16 MiB to each, and then blocks for about a quarter of a
    second. Raises: SwapFullError, AioError, both with the path.
    """
    # A single drive needs no measurement.
    if len(files) < 2:
        return (1.0,) * len(files)
    # Resolved, since a directory may be named through a symbolic link.
    by_place = {Path(directory).resolve(): pair for directory, pair in bandwidths.items()}
    known = [
        by_place[place] for file in files if (place := Path(file.directory).resolve()) in by_place
    ]
    buffered = [file for file in files if not file.direct]
    if len(known) == len(files):
        # Harmonic mean: the bandwidth for as many bytes read as written.
        source, speeds = "given", tuple(2 / (1 / read + 1 / write) for read, write in known)
    elif buffered:
        # A measurement would be of the page cache.
        log.info(
            "striping over %d drives in equal parts: %s cannot be measured (%s)",
            len(files), buffered[0].path, buffered[0].direct_reason,
        )  # fmt: skip
        return (1 / len(files),) * len(files)
    else:
        # All drives at once, also known ones, since they may share a bus.
        source = (
            "measured"
            if not bandwidths
            else "measured (the settings lack some of these directories)"
        )
        speeds = measure_shares(files, backend=backend, seam=seam)
    total = sum(speeds)
    shares = tuple(speed / total for speed in speeds)
    parts = ", ".join(
        f"{file.path} {share:.1%} ({format_size(speed)}/s)"
        for file, share, speed in zip(files, shares, speeds, strict=True)
    )
    log.info("striping over %d drives by their bandwidth, %s: %s", len(files), source, parts)
    return shares


def measure_shares(
    files: Sequence[aio.SwapFile], *, backend: str = "auto", seam: aio.Seam | None = None
) -> tuple[float, ...]:
    """Measure bytes per second of each drive, all at once, read and written in about equal parts.

    Blocks as `choose_shares` does. The files' contents are lost; their lengths stay.
    Raises: SwapFullError, AioError, both with the path.
    """
    lengths = [file.size_bytes for file in files]
    slots = aio.PoolSpec(_WAVE * _WAVES * len(files), _CHUNK_BYTES)
    try:
        for file in files:
            file.grow(_CHUNKS * _CHUNK_BYTES)
        executor = aio.open_executor(
            files,
            small=aio.PoolSpec(0, 0),
            large=slots,
            backend=backend,
            # The chunks have no checksums.
            verify="off",
            # The fault injector's faults are meant for the training executor.
            seam=dataclasses.replace(seam, fault=None) if seam is not None else None,
        )
        try:
            return _Measurement(executor, files).run()
        finally:
            # Without waiting: after an error a dead drive may never answer.
            executor.close(wait=False)
    finally:
        for file, length in zip(files, lengths, strict=True):
            file.shrink(length)


class _Measurement:
    """Waves of mixed reads and writes over a few chunks of each drive."""

    def __init__(self, executor: aio.Executor, files: Sequence[aio.SwapFile]) -> None:
        self._executor = executor
        self._files = files
        # RAW chunks of one-byte elements, without resident sections.
        chunks = np.zeros((len(files), _CHUNKS), dtype=aio.CHUNK)
        chunks["drive"] = np.arange(len(files))[:, None]
        chunks["file_offset"] = np.arange(_CHUNKS) * _CHUNK_BYTES
        chunks["key"] = np.arange(chunks.size).reshape(chunks.shape) + 1
        chunks["numel"] = chunks["run_bytes"] = _CHUNK_BYTES
        chunks["format"], chunks["section_count"] = aio.Format.RAW, 1
        chunks["piece_numel"] = _CHUNK_BYTES
        chunks["itemsize"][..., 0] = 1
        chunks["section_at"] = -1
        chunks["section_at"][..., 0] = 0
        self._ids = executor.define(chunks.reshape(-1)).reshape(chunks.shape)
        self._flying: list[deque[aio.Ticket]] = [deque() for _ in files]
        self._turn = [0] * len(files)
        self._seen: list[list[tuple[float, int]]] = [[(0.0, 0)] for _ in files]
        """Observations of each drive: (time, bytes moved until then)."""

    def run(self) -> tuple[float, ...]:
        """Return bytes per second of each drive. Blocks."""
        self._fill()
        for drive in range(len(self._files)):
            for _ in range(_WAVES):
                self._send(drive)
        # Not measured: the first waves meet an idle drive.
        self._feed(_WARM_UP_S)
        for seen in self._seen:
            # Only the last observation is part of the measurement.
            del seen[:-1]
        start = time.monotonic()
        while True:
            self._feed(MEASURE_S)
            # Measure from one completion to another: a slow drive has few, so the times before the
            # first and after the last one would distort the rate.
            if all(len(seen) > 2 for seen in self._seen):
                pairs = [(seen[1], seen[-1]) for seen in self._seen]
                return tuple(
                    (size - earlier) / (end - begin) for (begin, earlier), (end, size) in pairs
                )
            if time.monotonic() - start > _ANSWER_S:
                moved = [seen[-1][1] for seen in self._seen]
                path = self._files[moved.index(min(moved))].path
                text = f"the drive transferred almost nothing in {_ANSWER_S:.0f} s"
                raise DeviceFailedError(text, errno=errno.ETIMEDOUT, path=path, op="read")

    def _fill(self) -> None:
        """Write random bytes to the new extents, before the measurement: the first write to an
        extent is slower than later ones."""
        with aio.Slab(2 * _CHUNK_BYTES) as source:
            words = source.array(np.uint64)
            words[:] = np.random.default_rng().integers(0, 2**64, size=len(words), dtype=np.uint64)
            jobs = self._jobs(self._ids.reshape(-1), aio.JobKind.STORE, 1)
            # From different offsets, so that chunks differ.
            jobs["ptr"][:, 0] = np.uint64(source.address) + np.arange(
                len(jobs), dtype=np.uint64
            ) * np.uint64(4096 + 64)
            ticket = self._executor.submit(jobs, priority=aio.Priority.DEMAND)
            try:
                ticket.wait()
            except BaseException:
                # Before `source` is unmapped: jobs in flight still read it.
                self._executor.close(wait=False)
                raise

    def _feed(self, seconds: float) -> None:
        """Keep every drive busy for `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for drive, flying in enumerate(self._flying):
                while flying[0].done:
                    flying.popleft().wait()  # raises what failed
                    self._send(drive)
            for seen, stats in zip(self._seen, self._executor.stats().drives, strict=True):
                moved = stats.bytes_read + stats.bytes_written
                # A new observation only after a completion.
                if moved != seen[-1][1]:
                    seen.append((time.monotonic(), moved))
            time.sleep(0.0005)

    def _send(self, drive: int) -> None:
        """Submit a wave to a drive: reads from one half of its chunks, writes to the other."""
        half = _CHUNKS // 2
        # So that no chunk is read while it is written.
        picks = (np.arange(_WAVE // 2) + self._turn[drive]) % half
        self._turn[drive] += _WAVE // 2
        # Without conversions of dtypes, so that only the drive is measured.
        mask = 1 | aio.MASK_MOVE_ONLY
        reads = self._jobs(self._ids[drive, picks], aio.JobKind.FETCH, mask)
        writes = self._jobs(self._ids[drive, half + picks], aio.JobKind.STORE, mask)
        # Alternate, so that reads and writes are in flight together, as in training.
        jobs = np.stack([reads, writes], axis=1).reshape(-1)
        self._flying[drive].append(self._executor.submit(jobs, priority=aio.Priority.DEMAND))

    def _jobs(self, ids: npt.NDArray[np.int32], kind: aio.JobKind, mask: int) -> npt.NDArray[Any]:
        jobs = np.zeros(len(ids), dtype=aio.JOB)
        jobs["chunk"], jobs["kind"], jobs["mask"], jobs["base"] = ids, kind, mask, -1
        return jobs
