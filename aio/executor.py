"""What an executor is: the words, records and protocol that every backend of `infinity.aio` keeps.

An executor moves chunks between a drive, a slot of its own slab, and the caller's memory, and updates them on the way. The
caller describes the work of a whole unit as arrays (`infinity.aio.plan`: CHUNK, JOB, SEG, HYPER), submits them in one
call, and gets a `Ticket`. Nothing blocks but `Ticket.wait`, `drain` and `close`.

    define(chunks) -> ids          submit(jobs, segs, hypers, priority=, gate=) -> Ticket          drop(ids)

        FETCH   read --> verify --> copy to ptr
        STORE   copy from ptr --> checksum --> write
        UPDATE  read --> verify, update, checksum (one pass) --> copy section 0 to ptr[0] --> write
        COPY    copy ptr[2] bytes from ptr[1] to ptr[0], of which one is on the device (MASK_DEVICE); no chunk

An UPDATE reads all sections but one that it is given (MASK_GIVEN), and writes all but spilled gradients (`grad`), which it
reads only if a segment has its gradient there.

Promises, the same in every backend:

- Jobs on one chunk run in the order they were submitted; jobs on different chunks run concurrently.
- A job takes one slot (small if its non-resident bytes fit, else large; none if wholly resident), by priority, then in
  order of arrival; one turn in eight goes to the job that has waited longest, so that write-back progresses beside endless
  demands. No drive may hold so many slots that another finds none.
- Slots that are idle read ahead, for UPDATEs at closed gates (oldest gate first) and for chunks named in `preread`: with the
  least priority, and a quarter of each pool is left free. A job that finds no slot gets one of these: the youngest is given
  up, and read again later. Such a read is never seen but in `stats`: one that fails, or is overtaken by a write of its
  chunk, is done again by the UPDATE.
- Every transfer's result is checked, short ones are resumed, EAGAIN and EINTR retried, what is read is verified. What
  still fails is a typed `AioError`, raised by `Ticket.wait` every time it is called.
- A write that fails keeps its slot, the only copy: the chunk's sections in it are *kept*, and a FETCH reads them there. It
  also *marks* its drive: later STORE and UPDATE jobs on that drive are refused with the same fault, until `recover`.
- A chunk whose STORE or UPDATE failed otherwise, or was refused, is *invalid*: what it should hold exists nowhere. Later
  FETCH and UPDATE jobs on it fail with the same fault until its sections are STOREd again.
- A *versioned* chunk has two places. After `commit` a STORE or UPDATE reads what it needs at the live place and writes the other
  one, whole, which then is the live one; later ones work there in place. `rollback` goes back to what was committed. So the
  committed place is never written, and whatever fails in between can be undone. Spilled gradients have one place.
- Where ptr is on the device (MASK_DEVICE), a copy comes behind the kernels that the compute stream had when the job was
  submitted, or its gate opened, and `filled` says that it has ended on the device: kernels submitted after that see it.
- Requests in flight are bounded per drive by depth and block size; of the depth, writes have half whenever they want it and
  demands a quarter of the reads' share, so neither starves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from infinity.aio.device import DeviceDriver
from infinity.aio.stats import ExecutorStats
from infinity.aio.swap_file import SwapFile
from infinity.errors import AioError

#: One span of work of an executor, as `take_spans` returns them. `track` is one of TRACK_*; times are CLOCK_MONOTONIC
#: nanoseconds (`time.monotonic_ns`); `drive` is -1 for work without I/O; `chunk` is the id that `define` returned;
#: `priority` is a Priority, or 3 for a read ahead.
SPAN = np.dtype(
    [
        ("track", np.int32),
        ("drive", np.int32),
        ("chunk", np.int32),
        ("priority", np.int32),
        ("start_ns", np.int64),
        ("end_ns", np.int64),
        ("bytes", np.int64),
    ],
    align=True,
)
TRACK_READ, TRACK_WRITE, TRACK_UPDATE, TRACK_COPY, TRACK_TO_DEVICE, TRACK_FROM_DEVICE = 0, 1, 2, 3, 4, 5

#: In a job's mask: move the slot as it is, without copy and checksum. For measuring drives (`infinity.bench`).
MASK_MOVE_ONLY = 0x8000_0000
#: In an UPDATE's mask: section 0 is not read but taken from ptr[1] (the chunk's part of it, whole, in the caller's memory until
#: the ticket is `filled`), and not verified; it is written with the rest. ptr[0] may be the same memory. Without effect
#: where section 0 is resident: what is resident is what would be given.
MASK_GIVEN = 0x4000_0000
#: In a job's mask: ptr[] are addresses on the attached device (`Executor.attach_device`).
MASK_DEVICE = 0x2000_0000
#: In the mask of a COPY, beside MASK_DEVICE: ptr[0] is on the device. Else ptr[1] is.
MASK_COPY_OUT = 1


class Priority(IntEnum):
    """Which work goes first. Writes of any priority always get their share of the drive."""

    DEMAND = 0
    PREFETCH = 1
    WRITEBACK = 2


@dataclass(frozen=True)
class PoolSpec:
    """A pool of `count` slots of `bytes` each (a multiple of 4096) in the executor's slab."""

    count: int
    bytes: int

    def __post_init__(self) -> None:
        if self.count < 0 or self.bytes < 0 or self.bytes % 4096:
            raise ValueError(
                f"PoolSpec(count={self.count}, bytes={self.bytes}): count must be >= 0 and bytes a multiple of 4096"
            )


@dataclass(frozen=True)
class Fault:
    """One injected fault (tests): the `nth` request (from 0) of `op` on any drive, and all later ones if `persistent`.

    kind: "errno" (the request fails with `errno` and nothing is transferred), "short" (half of it is transferred),
    "zero" (the request returns 0), "bitflip" (one bit of what was read, or of what is written, is flipped).
    """

    op: str
    nth: int
    kind: str = "errno"
    errno: int = 5
    persistent: bool = False

    def __post_init__(self) -> None:
        if self.op not in ("read", "write"):
            raise ValueError(f"Fault(op={self.op!r}): must be 'read' or 'write'")
        if self.kind not in ("errno", "short", "zero", "bitflip"):
            raise ValueError(f"Fault(kind={self.kind!r}): must be 'errno', 'short', 'zero' or 'bitflip'")
        if self.nth < 0:
            raise ValueError(f"Fault(nth={self.nth}): requests are counted from 0")


@dataclass(frozen=True)
class Seam:
    """Where tests and simulations reach into an executor: delays, reordering, faults, a slower drive.

    `delay_us_max`: every completion is held back by a random time up to this (so they also come out of order), from `seed`.
    `read_bytes_per_s`, `write_bytes_per_s`: speed of each drive, one number for all or a tuple with one for each; reads and
    writes share a drive's time (0: as it is).
    """

    delay_us_max: int = 0
    seed: int = 0
    fault: Fault | None = None
    read_bytes_per_s: float | tuple[float, ...] = 0.0
    write_bytes_per_s: float | tuple[float, ...] = 0.0

    def throttle(self, drive: int) -> tuple[float, float]:
        """(read, write) bytes per second of one drive, 0 for as it is."""
        pair = (self.read_bytes_per_s, self.write_bytes_per_s)
        read, write = (value[drive] if isinstance(value, tuple) else value for value in pair)
        return read, write


@runtime_checkable
class Ticket(Protocol):
    """A submission in flight. Dropping a ticket does not cancel its jobs."""

    @property
    def done(self) -> bool:
        """Whether every job has ended, well or not. Reads one word: never blocks, never calls into the executor."""
        ...

    @property
    def filled(self) -> bool:
        """Whether every copy from or to a caller's memory has been made (or will never be). Comes before `done`."""
        ...

    @property
    def failed(self) -> bool:
        """Whether a job has failed already. `wait` raises its error."""
        ...

    def wait(self, timeout: float | None = None) -> None:
        """Block until done; makes the gates that it depends on escape, and its jobs demands.

        Blocks with the GIL released; Ctrl-C works. Raises the typed AioError of the first failed job, every time;
        TimeoutError after `timeout` seconds.
        """
        ...

    def wait_filled(self, timeout: float | None = None) -> None:
        """As `wait`, but only until `filled`: targets hold their data, sources and gradients may be reused.

        The write-back may still be in flight, and may still fail.
        """
        ...

    def cancel(self) -> None:
        """Give up its fetches that the drive has not begun: they end with AioCancelledError and fill nothing.

        Stores and updates are never given up: half of a step would be lost. Never blocks; the ticket is done when the rest is.
        """
        ...


@runtime_checkable
class Gate(Protocol):
    """Holds a submission back until its targets exist, or until it escapes."""

    @property
    def escaped(self) -> bool:
        """Whether the gate's work has gone ahead, or will, without targets."""
        ...

    def open(self, bases: Sequence[int]) -> bool:
        """Let the gated work run with ptr[0] += bases[job.base]. Never blocks.

        True: it will fill the targets. False: it had escaped (updates ran without the copy, fetches were skipped), so
        fetch again without a gate. Raises ValueError if it was opened before or a job's base is out of range.
        """
        ...


class Executor(Protocol):
    """Runs jobs on chunks; see the module's promises. Safe to call from any thread of the process that made it."""

    @property
    def backend(self) -> str:
        """Either "io_uring" or "threads"."""
        ...

    @property
    def backend_reason(self) -> str:
        """Why this is not io_uring, the best backend; "" if it is."""
        ...

    @property
    def pool_bytes(self) -> int:
        """Bytes of the slab that holds the slots."""
        ...

    def define(self, chunks: npt.NDArray[np.void]) -> npt.NDArray[np.int32]:
        """Make chunks known (plan.CHUNK) and return their ids.

        Memory that they point to (resident sections, sums) stays the caller's and must live until `drop`.
        Raises ValueError for misaligned or overlapping sections, unknown drives, runs larger than the slots.
        """
        ...

    def drop(self, ids: npt.NDArray[np.int32]) -> None:
        """Forget chunks; ids may be reused. Raises ValueError if jobs on them are pending."""
        ...

    def submit(
        self,
        jobs: npt.NDArray[np.void],
        segs: npt.NDArray[np.void] | None = None,
        hypers: npt.NDArray[np.void] | None = None,
        *,
        priority: Priority,
        gate: Gate | None = None,
    ) -> Ticket:
        """Queue the jobs (plan.JOB) of one unit; the arrays are copied. Never blocks on I/O.

        Memory behind ptr and grad must live until the ticket is done. Raises ValueError for a plan that cannot run,
        AioClosedError after close or in a forked child.
        """
        ...

    def gate(self) -> Gate:
        """A new closed gate, to be given to `submit`."""
        ...

    def attach_device(self, driver: DeviceDriver) -> None:
        """Make the device known whose memory MASK_DEVICE is about, once, and pin the slab. Blocks.

        Raises: DeviceCopyError when the driver refuses; ValueError where this executor cannot copy to devices.
        """
        ...

    def compute_stream(self, stream: int) -> None:
        """The stream (0: the default one) whose kernels later copies come behind. Never blocks."""
        ...

    def hold_gates(self, held: bool) -> None:
        """While held, no gate escapes for being idle: a forward runs, and will open them. Waiting for one still does."""
        ...

    def release_gates(self) -> None:
        """Make all closed gates escape now."""
        ...

    def preread(self, ids: npt.NDArray[np.int32], *, given: bool = False) -> int:
        """Read chunks into idle slots, ahead of UPDATEs that are not submitted yet. Returns how many, from the first on.

        `given`: these UPDATEs will have MASK_GIVEN, so section 0 is not read; nor are spilled gradients ever. Never blocks. What
        is accepted is read as soon as slots are idle, even after it had to make room; it is forgotten when the chunk's
        sections are STOREd. A read that fails is as if it had never been. Raises ValueError for an unknown id only.
        """
        ...

    def invalid(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.uint32]:
        """For each chunk the mask of its invalid sections (0: valid)."""
        ...

    def commit(self, ids: npt.NDArray[np.int32]) -> None:
        """What these versioned chunks hold now is committed: the next write goes to their other places. Never blocks.

        Raises ValueError if jobs that write states of one are pending, or one is not defined; then nothing is committed. Others
        are left alone.
        """
        ...

    def rollback(self, ids: npt.NDArray[np.int32]) -> None:
        """These versioned chunks hold again what was committed last, however often and however well they were written since.

        What failed writes kept for them, and what was read ahead, is forgotten. Chunks of which nothing was committed are left
        alone. Never blocks. Raises ValueError if jobs on one are pending, or one is not defined, and if a resident
        section without another version was changed.
        """
        ...

    def add_file(self, drive: int, file: SwapFile) -> int:
        """Give a drive another file, in which chunks may have places (CHUNK["file"]). Returns its index, from 1 on.

        The file stays the caller's, open until `remove_file` or the end. Raises ValueError when there are too many.
        """
        ...

    def remove_file(self, drive: int, index: int) -> None:
        """Take a file back. Raises ValueError while a chunk has a place in it."""
        ...

    def relocate(
        self, ids: npt.NDArray[np.int32], files: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]
    ) -> None:
        """Give versioned chunks other second places on their drives. What lies at the old ones is nobody's any more.

        Raises ValueError as `commit`, for a file that is not known, and where the second place is the committed one.
        """
        ...

    def look(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.void]:
        """The chunks as they are now (plan.CHUNK): which place is live, and its generation."""
        ...

    def recover(self) -> Ticket:
        """Take the marks off all drives and write what failed writes kept, once their cause is mended. Does not block.

        The ticket fails, and the drive is marked again, if it is not; nothing that was kept is lost by that.
        """
        ...

    def fault(self) -> AioError | None:
        """The first fault of any job since the executor was opened, also one whose ticket nobody waited for."""
        ...

    def stats(self) -> ExecutorStats:
        """Counters so far."""
        ...

    def spans(self, enable: bool) -> None:
        """Start or stop recording spans."""
        ...

    def take_spans(self) -> npt.NDArray[np.void]:
        """The spans recorded since the last call (SPAN); at most the newest 65,536 are kept."""
        ...

    def drain(self, timeout: float | None = None) -> None:
        """Make all gates escape and block until no job is pending. Raises TimeoutError; faults stay on their tickets."""
        ...

    def close(self, *, drain: bool = True) -> None:
        """End the executor: run what is pending (or cancel what has not started), join its threads, free its pools.

        Cancelled jobs fail their tickets with AioClosedError. Idempotent.
        """
        ...


def spans_empty() -> npt.NDArray[np.void]:
    """No spans, of the right dtype."""
    empty: npt.NDArray[Any] = np.zeros(0, dtype=SPAN)
    return empty
