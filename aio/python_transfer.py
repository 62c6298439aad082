"""What the Python executor does to bytes: transfers with results checked, checksums, copies, updates.

Large requests are what makes Python keep up (16 MiB comes within 7 % of C, 1 MiB does not), so a transfer takes the slots
of several chunks whose runs are neighbours in the file as one request.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity.aio import checks, plan
from infinity.aio.executor import DriveStats, Seam
from infinity.aio.swap_file import SwapFile

try:
    import xxhash
except ImportError:  # checksums live in RAM only, so which one it is does not matter to anyone
    xxhash = None  # type: ignore[assignment, unused-ignore]

Kernel = Callable[[int, list[npt.NDArray[Any]], npt.NDArray[Any], Any], None]
"""(format, sections, grad, hyper): update the sections in place. SPLIT: uint16, int16, float32, float32; FP32: three
float32; all [numel]. grad [numel]: float32, or uint16 with the bits of bfloat16. hyper: one plan.HYPER record."""

TRIES_MAX = 256
SECTOR_BYTES = 512
_PASSING = (errno.EAGAIN, errno.EINTR)
_NO_SPACE = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_SECTION_DTYPES = {
    int(plan.Format.SPLIT): (np.uint16, np.int16, np.float32, np.float32),
    int(plan.Format.FP32): (np.float32, np.float32, np.float32),
}


class TransferError(Exception):
    """A transfer that retries did not mend; `record` says why."""

    def __init__(self, record: checks.FaultRecord) -> None:
        super().__init__(record)
        self.record = record


def memory_at(address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """The caller's memory as bytes. It must live as long as the array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


class DriveChannel:
    """Transfers of one drive, with the seam of tests in between. Safe from any thread."""

    def __init__(self, index: int, file: SwapFile, seam: Seam | None, counter: RequestCounter) -> None:
        self.index = index
        self.file = file
        self._seam = seam
        self._counter = counter
        self._lock = threading.Lock()
        self._random = random.Random((seam.seed if seam else 0) * 1000 + index)
        self._clock = 0.0
        self._in_flight = 0
        self._stats = dict.fromkeys(
            (
                "bytes_read",
                "bytes_written",
                "reads",
                "writes",
                "retries",
                "short_transfers",
                "errors",
                "in_flight_max",
            ),
            0,
        )

    def stats(self) -> DriveStats:
        """Counters so far."""
        with self._lock:
            return DriveStats(path=self.file.path, **self._stats)

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._stats[name] += number

    def transfer(self, op: int, views: Sequence[memoryview], offset: int) -> None:
        """Move all bytes of `views` from (op 0) or to (op 1) the file at `offset`. Blocks.

        Raises TransferError.
        """
        rest = [view for view in views if view.nbytes]
        tries = 0
        while rest:
            asked = sum(view.nbytes for view in rest)
            moved = self._once(op, rest, offset)
            if moved < 0 and -moved in _PASSING and tries < TRIES_MAX:
                tries += 1
                self._count("retries")
                continue
            if moved <= 0:
                self._fail(op, moved, offset, asked)
            if moved < asked:
                self._count("short_transfers")
                moved -= moved % SECTOR_BYTES
                tries += moved == 0
                if tries > TRIES_MAX:
                    self._count("errors")
                    raise TransferError(self._record(checks.FAULT_SHORT, op, 0, offset, asked))
            self._count("bytes_written" if op else "bytes_read", moved)
            offset += moved
            rest = _after(rest, moved)

    def _fail(self, op: int, result: int, offset: int, length: int) -> None:
        self._count("errors")
        code = -result
        kind = checks.FAULT_ERRNO
        if result == 0:
            kind, code = (checks.FAULT_NO_SPACE, errno.ENOSPC) if op else (checks.FAULT_SHORT, 0)
        elif code in _NO_SPACE:
            kind = checks.FAULT_NO_SPACE
        raise TransferError(self._record(kind, op, code, offset, length))

    def _record(self, kind: int, op: int, code: int, offset: int, length: int) -> checks.FaultRecord:
        return checks.FaultRecord(
            kind=kind, op=op, drive=self.index, error=code, offset=offset, length=length
        )

    def _once(self, op: int, views: list[memoryview], offset: int) -> int:
        """One request: bytes moved, or a negative errno."""
        with self._lock:
            self._stats["writes" if op else "reads"] += 1
            self._in_flight += 1
            self._stats["in_flight_max"] = max(self._stats["in_flight_max"], self._in_flight)
        try:
            return self._call(op, views, offset)
        except OSError as error:
            return -(error.errno or errno.EIO)
        finally:
            with self._lock:
                self._in_flight -= 1

    def _call(self, op: int, views: list[memoryview], offset: int) -> int:
        seam = self._seam
        inject = self._counter.inject(op) if seam and seam.fault else ""
        if inject == "errno":
            assert seam is not None
            assert seam.fault is not None
            return -seam.fault.errno
        if inject == "zero":
            return 0
        if inject == "short":
            views = _half(views)
        if inject == "bitflip" and op == 1:
            _flip(views[0])
        moved = os.pwritev(self.file.fd, views, offset) if op else os.preadv(self.file.fd, views, offset)
        if inject == "short" and moved <= SECTOR_BYTES:
            moved //= 2
        if inject == "bitflip" and op == 0:
            _flip(views[0])
        if seam is not None:
            self._hold(seam, op, moved)
        return moved

    def _hold(self, seam: Seam, op: int, moved: int) -> None:
        speed = seam.write_bytes_per_s if op else seam.read_bytes_per_s
        with self._lock:
            now = time.monotonic()
            pause = self._random.random() * seam.delay_us_max / 1e6
            if speed > 0:
                self._clock = max(self._clock, now) + moved / speed
                pause += self._clock - now
        if pause > 0:
            time.sleep(pause)


class RequestCounter:
    """Counts the requests of all drives and says which get the seam's fault."""

    def __init__(self, seam: Seam | None) -> None:
        self._fault = seam.fault if seam else None
        self._seen = [0, 0]
        self._lock = threading.Lock()

    def inject(self, op: int) -> str:
        """The kind of fault for the next request; empty for none."""
        fault = self._fault
        with self._lock:
            nth = self._seen[op]
            self._seen[op] += 1
        if fault is None or (fault.op == "write") != bool(op):
            return ""
        return fault.kind if nth == fault.nth or (fault.persistent and nth > fault.nth) else ""


def _after(views: list[memoryview], moved: int) -> list[memoryview]:
    rest = []
    for view in views:
        skip = min(moved, view.nbytes)
        moved -= skip
        if skip < view.nbytes:
            rest.append(view[skip:])
    return rest


def _half(views: list[memoryview]) -> list[memoryview]:
    half = sum(view.nbytes for view in views) // 2
    half = max(SECTOR_BYTES, half - half % SECTOR_BYTES)  # O_DIRECT
    kept = []
    for view in views:
        kept.append(view[: min(half, view.nbytes)])
        half -= kept[-1].nbytes
        if half <= 0:
            break
    return kept


def _flip(view: memoryview) -> None:
    view[view.nbytes // 3] ^= 0x10


# ---- checksums, copies, updates -------------------------------------------------------------------------------------


def _sum(data: memoryview, seed: int) -> int:
    if xxhash is not None:
        return int(xxhash.xxh3_64_intdigest(data, seed)) & 0xFFFFFFFF
    return zlib.crc32(data, seed)


class Sections:
    """The sections of one chunk where they lie now: in a slot, or resident. Bytes, one array each."""

    def __init__(self, chunk: Any, slot: npt.NDArray[np.uint8] | None, slot_at: Sequence[int]) -> None:
        self.chunk = chunk
        self.numel = int(chunk["numel"])
        self.count = int(chunk["section_count"])
        self.itemsizes = [int(size) for size in chunk["itemsize"]]
        self.arrays: list[npt.NDArray[np.uint8] | None] = []
        for section in range(self.count):
            size = self.numel * self.itemsizes[section]
            if chunk["section_at"][section] < 0:
                self.arrays.append(memory_at(int(chunk["section_ptr"][section]), size))
            elif slot is not None and slot_at[section] >= 0:
                self.arrays.append(slot[slot_at[section] : slot_at[section] + size])
            else:
                self.arrays.append(None)
        self.pieces = plan.piece_count(self.numel, int(chunk["piece_numel"]))
        self.sums: npt.NDArray[np.uint32] | None = None
        if chunk["sums_ptr"]:
            words = memory_at(int(chunk["sums_ptr"]), 4 * self.count * self.pieces).view(np.uint32)
            self.sums = words.reshape(self.count, self.pieces)

    def _piece_sum(self, section: int, piece: int) -> int:
        array = self.arrays[section]
        assert array is not None
        step = int(self.chunk["piece_numel"]) * self.itemsizes[section]
        seed = plan.sum_seed(int(self.chunk["generation"]), int(self.chunk["key"]), section, piece)
        return _sum(array[piece * step : (piece + 1) * step].data, seed)

    def verify(self, section: int) -> int:
        """The first piece that is not what was written, or -1. Resident sections are not verified."""
        if self.sums is None or self.chunk["section_at"][section] < 0:
            return -1
        for piece in range(self.pieces):
            if self._piece_sum(section, piece) != self.sums[section, piece]:
                return piece
        return -1

    def seal(self, section: int) -> None:
        """Set the section's checksums to what it holds now."""
        if self.sums is not None:
            for piece in range(self.pieces):
                self.sums[section, piece] = self._piece_sum(section, piece)

    def update(self, kernel: Kernel, segs: npt.NDArray[np.void], hypers: npt.NDArray[np.void]) -> bool:
        """Run the kernel on every segment; False (and nothing touched) when a segment is out of range."""
        for seg in segs:
            start, numel = int(seg["start"]), int(seg["numel"])
            if start < 0 or numel < 0 or start + numel > self.numel or not 0 <= seg["hyper"] < len(hypers):
                return False
        dtypes = _SECTION_DTYPES[int(self.chunk["format"])]
        typed = [
            array.view(dtype) for array, dtype in zip(self.arrays, dtypes, strict=True) if array is not None
        ]
        for seg in segs:
            start, numel = int(seg["start"]), int(seg["numel"])
            bf16 = seg["grad_dtype"] == plan.GradDtype.BF16
            grad = memory_at(int(seg["grad"]), numel * (2 if bf16 else 4)).view(
                np.uint16 if bf16 else np.float32
            )
            kernel(
                int(self.chunk["format"]),
                [section[start : start + numel] for section in typed],
                grad,
                hypers[int(seg["hyper"])],
            )
        return True
