"""What moves the Python executor's bytes: requests with every result checked, and the seam of tests in between.

Large requests are what makes Python keep up (16 MiB comes within 7 % of C, 1 MiB does not), so a transfer takes the slots
of several chunks whose runs are neighbours in the file as one request.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import random
import threading
import time
from collections.abc import Sequence

from infinity.aio import checks, plan
from infinity.aio.executor import Seam
from infinity.aio.python_records import FAULT_BROKEN, BrokenRecord, Run
from infinity.aio.python_stats import DriveMeter
from infinity.aio.swap_file import SwapFile

BLOCK_BYTES = 16 << 20
PARTS_MAX = os.sysconf("SC_IOV_MAX")
TRIES_MAX = 256
SECTOR_BYTES = 512
_PASSING = (errno.EAGAIN, errno.EINTR)
_NO_SPACE = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class TransferError(Exception):
    """A transfer that retries did not mend; `record` says why."""

    def __init__(self, record: checks.FaultRecord) -> None:
        super().__init__(record)
        self.record = record


class DriveChannel:
    """Transfers of one drive. Safe from any thread; blocks the one that calls."""

    def __init__(self, index: int, file: SwapFile, seam: Seam | None, counter: RequestCounter) -> None:
        self.index = index
        self.file = file
        self.files: dict[int, SwapFile] = {0: file}
        self.meter = DriveMeter()
        self._seam = seam
        self._speeds = seam.throttle(index) if seam else (0.0, 0.0)
        self._counter = counter
        self._lock = threading.Lock()
        self._random = random.Random((seam.seed if seam else 0) * 1000 + index)
        self._clock = 0.0

    def move(self, op: int, runs: Sequence[Run]) -> dict[Run, checks.FaultRecord]:
        """Read (op 0) or write (op 1) the slots of jobs; returns those that failed, and why.

        Neighbours go in one request. If that fails its parts are moved one by one, which finds out whose fault it was.
        """
        failed: dict[Run, checks.FaultRecord] = {}
        for group in _groups(runs, op):
            try:
                self._move_group(op, group)
                continue
            except TransferError as error:
                if len(group) == 1:
                    failed[group[0]] = error.record
                    continue
            for run in group:
                try:
                    self._move_group(op, [run])
                except TransferError as error:
                    failed[run] = error.record
        return failed

    def _move_group(self, op: int, group: Sequence[Run]) -> None:
        first = group[0].place
        try:
            if len(group) > 1:
                file_at, _, _, file = first.ranges[op][0]
                self.transfer(op, [_view(run, op) for run in group], file_at, file)
                return
            memory = first.memory()
            for file_at, slot_at, size, file in first.ranges[op]:
                self.transfer(op, [memory[slot_at : slot_at + size].data], file_at, file)
        except TransferError:
            raise
        except Exception as error:
            cause = error.with_traceback(None)  # a traceback would hold the slots
            at, size = first.ranges[op][0][0], sum(run.place.moved_bytes(op) for run in group)
            record = BrokenRecord(FAULT_BROKEN, op, self.index, offset=at, length=size, cause=cause)
            raise TransferError(record) from error

    def transfer(self, op: int, views: Sequence[memoryview], offset: int, file: int = 0) -> None:
        """Move all bytes of `views` from (op 0) or to (op 1) one of the drive's files at `offset`. Blocks.

        Raises TransferError.
        """
        total = sum(view.nbytes for view in views)
        done = tries = 0
        while done < total:
            part = _cut(views, done)
            asked = sum(view.nbytes for view in part)
            moved = self._request(op, part, offset + done, file)
            ragged = done % plan.ALIGNMENT_BYTES
            if tries < TRIES_MAX and (-moved in _PASSING or (moved == -errno.EINVAL and ragged)):
                # A drive with large sectors refuses to go on in the middle of one: again from its beginning.
                self.meter.count("retries")
                tries += 1
                done -= ragged if moved == -errno.EINVAL else 0
                continue
            if moved <= 0:
                raise TransferError(self._fault(op, moved, offset + done, asked))
            if moved < asked:
                self.meter.count("short_transfers")
                moved -= (
                    moved % SECTOR_BYTES
                )  # O_DIRECT wants the rest aligned: a part of a sector is moved again
                tries += moved == 0
                if tries > TRIES_MAX:
                    self.meter.count("errors")
                    raise TransferError(self._record(checks.FAULT_SHORT, op, 0, offset + done, asked))
            done += moved

    def _fault(self, op: int, result: int, offset: int, length: int) -> checks.FaultRecord:
        self.meter.count("errors")
        code = -result
        kind = checks.FAULT_ERRNO
        if result == 0:
            kind, code = (checks.FAULT_NO_SPACE, errno.ENOSPC) if op else (checks.FAULT_SHORT, 0)
        elif code in _NO_SPACE:
            kind = checks.FAULT_NO_SPACE
        return self._record(kind, op, code, offset, length)

    def _record(self, kind: int, op: int, code: int, offset: int, length: int) -> checks.FaultRecord:
        return checks.FaultRecord(
            kind=kind, op=op, drive=self.index, error=code, offset=offset, length=length
        )

    def _request(self, op: int, views: list[memoryview], offset: int, file: int) -> int:
        """One request: bytes moved, or a negative errno."""
        asked = sum(view.nbytes for view in views)
        sent_ns = self.meter.sent(op, asked)
        moved = 0
        try:
            moved = self._call(op, views, offset, self.files[file].fd)
            if self._seam is not None:
                self._hold(self._seam, op, max(0, moved))
        except OSError as error:
            moved = -(error.errno or errno.EIO)
        finally:
            self.meter.ended(op, asked, moved, sent_ns)
        return moved

    def _call(self, op: int, views: list[memoryview], offset: int, fd: int) -> int:
        inject = self._counter.inject(op)
        if inject == "errno":
            return -self._counter.errno
        if inject == "zero":
            return 0
        if inject == "short":
            views = _half(views)
        if inject == "bitflip" and op == 1:
            views = _flipped(views)
        moved = os.pwritev(fd, views, offset) if op else os.preadv(fd, views, offset)
        if inject == "short" and moved <= SECTOR_BYTES:
            moved //= 2
        if inject == "bitflip" and op == 0:
            _flip(views[0])
        return moved

    def _hold(self, seam: Seam, op: int, moved: int) -> None:
        with self._lock:
            now = time.monotonic()
            pause = self._random.random() * seam.delay_us_max / 1e6
            if self._speeds[op] > 0:
                self._clock = max(self._clock, now) + moved / self._speeds[op]
                pause += self._clock - now
        if pause > 0:
            time.sleep(pause)


class RequestCounter:
    """Counts the requests of all drives and says which get the seam's fault."""

    def __init__(self, seam: Seam | None) -> None:
        self._fault = seam.fault if seam else None
        self._seen = [0, 0]
        self._lock = threading.Lock()
        self.errno = self._fault.errno if self._fault else 0

    def inject(self, op: int) -> str:
        """The kind of fault for the next request; empty for none."""
        fault = self._fault
        if fault is None:
            return ""
        with self._lock:
            nth = self._seen[op]
            self._seen[op] += 1
        if (fault.op == "write") != bool(op):
            return ""
        return fault.kind if nth == fault.nth or (fault.persistent and nth > fault.nth) else ""


def neighbours(first: Run, second: Run, op: int) -> bool:
    """Whether `second` follows `first` in the file of its drive, so that one request serves both."""
    one, two = first.place.ranges[op], second.place.ranges[op]
    return len(one) == 1 and len(two) == 1 and one[0][3] == two[0][3] and one[0][0] + one[0][2] == two[0][0]


def _view(run: Run, op: int) -> memoryview:
    """What moves of a slot with one range."""
    _, slot_at, size, _ = run.place.ranges[op][0]
    return run.place.memory()[slot_at : slot_at + size].data


def _groups(runs: Sequence[Run], op: int) -> list[list[Run]]:
    """The runs, neighbours together."""
    groups: list[list[Run]] = []
    for run in runs:
        if groups and neighbours(groups[-1][-1], run, op) and len(groups[-1]) < PARTS_MAX:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def _cut(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What the next request moves: from byte `done` on, at most BLOCK_BYTES."""
    part: list[memoryview] = []
    room = BLOCK_BYTES
    for view in views:
        if done >= view.nbytes:
            done -= view.nbytes
            continue
        part.append(view[done : done + room])
        room -= part[-1].nbytes
        done = 0
        if room == 0:
            break
    return part


def _half(views: Sequence[memoryview]) -> list[memoryview]:
    half = sum(view.nbytes for view in views) // 2
    half = max(SECTOR_BYTES, half - half % SECTOR_BYTES)  # O_DIRECT
    ends = itertools.accumulate(view.nbytes for view in views)
    return [
        view[: view.nbytes - max(0, end - half)]
        for view, end in zip(views, ends, strict=True)
        if end - view.nbytes < half
    ]


def _flip(view: memoryview) -> None:
    view[view.nbytes // 3] ^= 0x10


def _flipped(views: Sequence[memoryview]) -> list[memoryview]:
    """The same with a bit flipped. The slot itself stays right, as it does when a drive writes something else."""
    copy = memoryview(mmap.mmap(-1, views[0].nbytes))  # aligned for O_DIRECT
    copy[:] = views[0]
    _flip(copy)
    return [copy, *views[1:]]
