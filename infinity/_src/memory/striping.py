"""What share of the bytes each drive gets: in proportion to its bandwidth, so that a slow drive does not hold up a fast one.

Given (a sweep of `infinity.bench`), or measured when the space is set up: all drives at once, since they may share a bus,
reading about as much as they write, since training does; through an executor of the backend and seam that will run.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity import aio
from infinity._src.sizes import MIB, format_size
from infinity.errors import DeviceFailedError

log = logging.getLogger("infinity._src.memory")

MEASURE_S = 0.2
_WARM_UP_S = 0.05
_ANSWER_S = 10.0
"""A drive that has hardly moved anything by then is taken for dead."""
_CHUNK_BYTES = MIB // 2
_CHUNKS = 32
_WAVE = 4
_WAVES = 4
"""Waves in flight per drive: 16 requests, half of them writes. Shorter than training's, so that a slow drive ends more."""


def choose_shares(
    files: Sequence[aio.SwapFile],
    *,
    bandwidths: Mapping[str, tuple[float, float]],
    backend: str = "auto",
    seam: aio.Seam | None = None,
) -> tuple[float, ...]:
    """The share of each drive, from `bandwidths` (absolute directory -> (read, write) bytes/s) if it has them all.

    Else measured, with two drives or more; blocks for about a quarter of a second after writing 16 MiB to each. The result
    is logged.
    Raises: SwapFullError, AioError that names the path that fails.
    """
    if len(files) < 2:
        return (1.0,) * len(files)
    by_place = {Path(directory).resolve(): pair for directory, pair in bandwidths.items()}
    known = [by_place[place] for file in files if (place := Path(file.directory).resolve()) in by_place]
    buffered = [file for file in files if not file.direct]
    if len(known) == len(files):
        source, speeds = "given", tuple(2 / (1 / read + 1 / write) for read, write in known)
    elif buffered:
        # The page cache answers for the drive, so that measuring tells nothing.
        log.info(
            "striping over %d drives in equal parts: %s cannot be measured (%s)",
            len(files), buffered[0].path, buffered[0].direct_reason,
        )  # fmt: skip
        return (1 / len(files),) * len(files)
    else:
        source = "measured" if not bandwidths else "measured (the settings do not have all of these directories)"
        speeds = measure_shares(files, backend=backend, seam=seam)
    total = sum(speeds)
    shares = tuple(speed / total for speed in speeds)
    parts = ", ".join(
        f"{file.path} {share:.1%} ({format_size(speed)}/s)" for file, share, speed in zip(files, shares, speeds, strict=True)
    )
    log.info("striping over %d drives by their bandwidth, %s: %s", len(files), source, parts)
    return shares


def measure_shares(
    files: Sequence[aio.SwapFile], *, backend: str = "auto", seam: aio.Seam | None = None
) -> tuple[float, ...]:
    """Bytes per second of each drive, read and written in about equal parts, all drives at once. Blocks as `choose_shares` does.

    The files' contents are lost; their lengths stay. Faults of the seam are left for the executor that will train.
    Raises: SwapFullError, AioError that names the path that fails.
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
            seam=dataclasses.replace(seam, fault=None) if seam is not None else None,
        )
        try:
            return _Measurement(executor, files).run()
        finally:
            executor.close(wait=False)
    finally:
        for file, length in zip(files, lengths, strict=True):
            file.shrink(length)


class _Measurement:
    """Waves of mixed reads and writes over a few chunks of each drive."""

    def __init__(self, executor: aio.Executor, files: Sequence[aio.SwapFile]) -> None:
        self._executor = executor
        self._files = files
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
        """When each drive was seen to have moved how many bytes."""

    def run(self) -> tuple[float, ...]:
        self._fill()
        for drive in range(len(self._files)):
            for _ in range(_WAVES):
                self._send(drive)
        self._feed(_WARM_UP_S)
        for seen in self._seen:
            del seen[:-1]
        start = time.monotonic()
        while True:
            self._feed(MEASURE_S)
            # From completion to completion: a slow drive has so few that the time before and after would count.
            if all(len(seen) > 2 for seen in self._seen):
                pairs = [(seen[1], seen[-1]) for seen in self._seen]
                return tuple((size - earlier) / (end - begin) for (begin, earlier), (end, size) in pairs)
            if time.monotonic() - start > _ANSWER_S:
                path = self._files[[len(seen) > 2 for seen in self._seen].index(False)].path
                text = f"the drive moved next to nothing in {_ANSWER_S:.0f} s"
                raise DeviceFailedError(text, errno=errno.ETIMEDOUT, path=path, op="read")

    def _fill(self) -> None:
        """Random bytes onto the fresh extents. Untimed: a first write there is slower than all later ones."""
        with aio.Slab(2 * _CHUNK_BYTES) as source:
            words = source.array(np.uint64)
            words[:] = np.random.default_rng().integers(0, 2**64, size=len(words), dtype=np.uint64)
            jobs = self._jobs(self._ids.reshape(-1), aio.JobKind.STORE, 1)
            # Each from another byte on, so that no two chunks are equal.
            jobs["ptr"][:, 0] = np.uint64(source.address) + np.arange(len(jobs), dtype=np.uint64) * np.uint64(4096 + 64)
            ticket = self._executor.submit(jobs, priority=aio.Priority.DEMAND)
            try:
                ticket.wait()
            except BaseException:
                self._executor.close(wait=False)  # before the source goes
                raise

    def _feed(self, seconds: float) -> None:
        """Keep every drive busy for a while."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for drive, flying in enumerate(self._flying):
                while flying[0].done:
                    flying.popleft().wait()  # raises what failed
                    self._send(drive)
            for seen, stats in zip(self._seen, self._executor.stats().drives, strict=True):
                moved = stats.bytes_read + stats.bytes_written
                if moved != seen[-1][1]:
                    seen.append((time.monotonic(), moved))
            time.sleep(0.0005)

    def _send(self, drive: int) -> None:
        """A wave: reads from one half of the chunks, writes to the other."""
        half = _CHUNKS // 2
        picks = (np.arange(_WAVE // 2) + self._turn[drive]) % half
        self._turn[drive] += _WAVE // 2
        mask = 1 | aio.MASK_MOVE_ONLY
        reads = self._jobs(self._ids[drive, picks], aio.JobKind.FETCH, mask)
        writes = self._jobs(self._ids[drive, half + picks], aio.JobKind.STORE, mask)
        jobs = np.stack([reads, writes], axis=1).reshape(-1)
        self._flying[drive].append(self._executor.submit(jobs, priority=aio.Priority.DEMAND))

    def _jobs(self, ids: npt.NDArray[np.int32], kind: aio.JobKind, mask: int) -> npt.NDArray[Any]:
        jobs = np.zeros(len(ids), dtype=aio.JOB)
        jobs["chunk"], jobs["kind"], jobs["mask"], jobs["base"] = ids, kind, mask, -1
        return jobs
