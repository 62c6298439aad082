"""Chunks on drives, and one stream of jobs per drive over them.

Every drive has a separate stream, so that a slow drive does not delay a fast one, and each drive's
share is measured. With one drive the stream runs in the calling thread.

The data are random, so that no drive can compress them. `Content.renew` replaces them between
writes, so that no drive can deduplicate them.
"""

from __future__ import annotations

import dataclasses
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from infinity import aio
from infinity._src.cabi import records
from infinity._src.cabi.records import piece_count
from infinity.aio._executor import RING_BLOCK_BYTES

# -- Chunks and streams ----------------------------------------------------------------------------


CHUNK_BYTES = records.CHUNK_BYTES
"""Bytes of a full chunk of the `exact` state (393,216 elements of 12 bytes), and of one staging
buffer (slot) of the executor.
"""

_PIECE_BYTES = 65_536
_WAVES = 3

Step = Callable[[float], None]
"""A function that a phase calls with its completed share, 0 to 1."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One phase of one round: bytes and seconds of each drive, and the CPU seconds of all threads.
    """

    drive_bytes: tuple[int, ...]
    drive_s: tuple[float, ...]
    cpu_s: float

    @property
    def drive_rates(self) -> tuple[float, ...]:
        """Bytes per second of each drive, while all drives work."""
        return tuple(
            count / max(took, 1e-9)
            for count, took in zip(self.drive_bytes, self.drive_s, strict=True)
        )

    @property
    def rate(self) -> float:
        """Bytes per second of all drives together."""
        return sum(self.drive_rates)

    @property
    def cpu_s_per_gb(self) -> float:
        """Seconds of CPU (user and system, all threads) per 10^9 bytes."""
        return self.cpu_s / max(sum(self.drive_bytes), 1) * 1e9


class Chunks:
    """`count` chunks on each drive's file, back to back, or at `offsets`. This object holds the
    chunks' checksums, so that any executor can verify the chunks.

    chunk_bytes: bytes of one chunk. state: the format, which divides each chunk into sections.
    """

    def __init__(
        self,
        drives: Sequence[aio.SwapFile],
        count: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        state: aio.Format = aio.Format.RAW,
        offsets: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.drives = tuple(drives)
        self.count = count
        self.chunk_bytes = chunk_bytes
        total = count * len(drives)
        index = np.arange(total)
        # RAW's single section has no item size: count its items in bytes.
        itemsizes = [section.itemsize or 1 for section in state.sections]
        numel = chunk_bytes // sum(itemsizes)
        pieces = piece_count(numel, _PIECE_BYTES)
        self._sums = np.zeros((total, len(itemsizes), pieces), dtype=np.uint32)
        records = np.zeros(total, dtype=aio.CHUNK)
        records["key"] = index + 1
        records["numel"] = numel
        records["drive"] = index // count
        at = np.arange(count) * chunk_bytes if offsets is None else offsets
        records["file_offset"] = at[index % count]
        records["run_bytes"] = chunk_bytes
        records["format"] = int(state)
        records["section_count"] = len(itemsizes)
        records["piece_numel"] = _PIECE_BYTES
        records["section_at"] = -1
        for section, itemsize in enumerate(itemsizes):
            records["itemsize"][:, section] = itemsize
            records["section_at"][:, section] = numel * sum(itemsizes[:section])
        records["sums_ptr"] = self._sums.ctypes.data + index * (len(itemsizes) * pieces * 4)
        self.records = records
        for drive in drives:
            drive.grow(int(at.max()) + chunk_bytes)

    @property
    def size_bytes(self) -> int:
        return self.count * len(self.drives) * self.chunk_bytes


@final
class Streams:
    """An executor over the chunks, and phases on it. Close it before the chunks' files. Threads may
    not share it.
    """

    def __init__(
        self, chunks: Chunks, *, block_bytes: int | None, depth: int, backend: str, verify: str
    ) -> None:
        self.chunks = chunks
        # Without a block size there must be enough slots both for a ring with the usual blocks and
        # for eight threads that move one chunk each.
        in_flight = -(-depth * (block_bytes or RING_BLOCK_BYTES) // CHUNK_BYTES)
        self._slots = in_flight + max(8, in_flight // 4)
        self.executor = aio.open_executor(
            chunks.drives,
            small=aio.PoolSpec(0, 0),
            large=aio.PoolSpec(self._slots * len(chunks.drives), CHUNK_BYTES),
            backend=backend,
            verify=verify,
            workers=1,
            block_bytes=block_bytes,
            depth=depth,
        )
        self._ids = self.executor.define(chunks.records).reshape(len(chunks.drives), -1)

    @property
    def request_bytes(self) -> int:
        """Bytes of a job's longest request: the block size that the executor chose for the drives,
        at most a chunk.
        """
        return min(max(drive.block_bytes for drive in self.executor.stats().drives), CHUNK_BYTES)

    def close(self) -> None:
        """End the executor; jobs that have not started do not run."""
        self.executor.close(wait=False)

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def jobs(
        self, kind: aio.JobKind, mask: int = 1, pointers: Any = 0
    ) -> list[npt.NDArray[np.void]]:
        """Return each drive's jobs, one per chunk in order. pointers: one address, or several that
        the jobs use in turn.
        """
        count = self.chunks.count
        found = []
        for ids in self._ids:
            jobs = np.zeros(count, dtype=aio.JOB)
            jobs["chunk"] = ids[:count]
            jobs["kind"] = kind
            jobs["mask"] = mask
            # The jobs hold the addresses themselves; no gate supplies them.
            jobs["base"] = -1
            jobs["ptr"][:, 0] = np.resize(np.asarray(pointers, dtype=np.uint64), count)
            found.append(jobs)
        return found

    def warm(self, sections: int = 1) -> None:
        """Read data of the chunks into every slot, so that a write phase of MASK_MOVE_ONLY writes
        this data. Blocks."""
        # A single submission uses every slot; several would reuse the slots that become free first.
        jobs = [
            np.resize(one, self._slots)
            for one in self.jobs(aio.JobKind.FETCH, sections | aio.MASK_MOVE_ONLY)
        ]
        self.executor.submit(np.concatenate(jobs), priority=aio.Priority.DEMAND).wait()

    def run(
        self,
        jobs: Sequence[npt.NDArray[np.void]],
        deadline_s: float,
        step: Step,
        *,
        again: bool = False,
    ) -> Sample:
        """Run each drive's jobs in order until one drive has run all of its jobs or the deadline
        passes; with `again` every drive repeats its jobs until the deadline. Blocks. The sample
        counts whole chunks, even if the jobs move some of their sections only.

        Raises: the error of a failed job, after the streams of all drives have ended.
        """
        stop = threading.Event()
        ended: list[tuple[int, float] | BaseException | None] = [None] * len(jobs)

        def drive(number: int) -> None:
            try:
                ended[number] = self._stream(
                    jobs[number], deadline_s, stop, step if number == 0 else None, again
                )
            except BaseException as error:  # noqa: BLE001 - raised again by the caller
                ended[number] = error
            finally:
                # Stop the other drives: rates count only while all drives work.
                stop.set()

        before_s = _cpu_s()
        if len(jobs) == 1:
            drive(0)
        else:
            threads = [
                threading.Thread(target=drive, args=(number,)) for number in range(len(jobs))
            ]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            finally:
                # Ctrl-C, too, must end the threads before the caller closes their executor.
                stop.set()
                for thread in threads:
                    thread.join()
        cpu_s = _cpu_s() - before_s
        results: list[tuple[int, float]] = []
        for end in ended:
            if isinstance(end, BaseException):
                raise end
            assert end is not None
            results.append(end)
        return Sample(
            tuple(sent * self.chunks.chunk_bytes for sent, _ in results),
            tuple(took for _, took in results),
            cpu_s,
        )

    def _stream(
        self,
        jobs: npt.NDArray[np.void],
        deadline_s: float,
        stop: threading.Event,
        step: Step | None,
        again: bool,
    ) -> tuple[int, float]:
        """Run the stream of one drive. Returns (jobs done, seconds)."""
        # A wave has twice as many jobs as the executor has slots. Each wave wakes this thread once;
        # with small waves the wake-ups would take half of the CPU time. Three waves in flight keep
        # every slot busy while this thread waits for a core, and end soon after a deadline.
        wave = 2 * self._slots
        flying: deque[aio.Ticket] = deque()
        start = time.monotonic()
        sent = 0
        while time.monotonic() - start < deadline_s and not stop.is_set():
            at = sent % len(jobs) if again else sent
            part = jobs[at : at + wave]
            if not len(part):
                break
            flying.append(self.executor.submit(part, priority=aio.Priority.DEMAND))
            sent += len(part)
            if len(flying) >= _WAVES:
                flying.popleft().wait()
            if step is not None:
                step(sent / len(jobs))
        # The rate counts all submitted bytes, so the time includes their completion.
        while flying:
            flying.popleft().wait()
        return sent, time.monotonic() - start


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# -- Content of the chunks -------------------------------------------------------------------------


_CHUNKS_PER_DRIVE = 8
_BLOCK_WORDS = 512


class Content:
    """Two halves of random bytes, `half` chunks each: drives write one half while `renew` changes
    the second half.

    `renew` XORs every word of a half with a random constant: the words stay random, every word
    changes, and the XOR runs at memory bandwidth. (Generating random numbers takes a core per
    GB/s.)
    """

    def __init__(self, drive_count: int) -> None:
        self.half = _CHUNKS_PER_DRIVE * drive_count
        self._slab = aio.Slab(2 * self.half * CHUNK_BYTES)
        self._random = np.random.default_rng()
        words = self._slab.array(np.uint64)
        # Generate 8 MiB at a time: one call would allocate a second array of the slab's size.
        for start in range(0, len(words), 1 << 20):
            part = words[start : start + (1 << 20)]
            part[:] = self._random.integers(0, 2**64, size=len(part), dtype=np.uint64)

    def renew(self, half: int) -> None:
        """Renew half 0 or 1. No write may be reading it."""
        words = self._slab.array(
            np.uint64, offset=half * self.half * CHUNK_BYTES, count=self.half * CHUNK_BYTES // 8
        )
        # From 1 on: XOR with 0 would change nothing.
        words ^= self._random.integers(1, 2**64, dtype=np.uint64)

    def addresses(self, half: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        first = self._slab.address + half * self.half * CHUNK_BYTES
        return np.arange(first, first + self.half * CHUNK_BYTES, CHUNK_BYTES, dtype=np.uint64)

    @property
    def memory(self) -> memoryview:
        return self._slab.memory

    def close(self) -> None:
        """Free the memory. No write may be reading it."""
        self._slab.close()


def is_hole(page: bytes | memoryview) -> bool:
    """Return whether the first 4 KiB of a page repeat one 8-byte word, as in a hole of a file or in
    unwritten memory.
    """
    words = np.frombuffer(page, dtype=np.uint64, count=min(_BLOCK_WORDS, len(page) // 8))
    return bool((words == words[0]).all())
