"""Python owners of native objects (executor, tickets, gates), and their lifetime at close, fork and
exit.

Waits release the GIL and return to Python every 100 ms, so that Ctrl-C works. Calls that only
submit work keep the GIL (`QuickCalls`, below).

Lifetime: a `Core` owns the C object. The executor, its tickets and its gates keep the `Core` alive.
Closing ends the threads; the last ticket or gate frees the C object. A forked child has none of
these threads, so calls raise there.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from infinity._src.base.alarm import Alarm
from infinity._src.cabi import native
from infinity.aio import _validate
from infinity.aio._swap_file import SwapFile
from infinity.errors import AioClosedError, AioError, DeviceCopyError

log = logging.getLogger("infinity.aio")

SLICE_S = 0.1
"""Seconds of one wait in C. Python handles Ctrl-C between two waits."""
CANCEL_S = 30.0
"""Seconds that `close(wait=False)` waits for a drive's requests before it leaks their memory."""


class Core:
    """Owner of the C executor and of the objects that C uses. `address`: for the quick calls.

    check_waits: called every 100 ms in waits of tickets, in `wait_all` and in `close`; an exception
    that it raises ends the wait. examine: maps a job's error to the error to raise.
    alarm: sounded whenever a ticket fails.
    """

    def __init__(
        self,
        ffi: Any,
        lib: Any,
        pointer: Any,
        drives: Sequence[SwapFile],
        *,
        check_waits: Callable[[], None] | None = None,
        examine: Callable[[AioError], AioError] | None = None,
        alarm: Alarm | None = None,
    ) -> None:
        self.check_waits = check_waits
        self.examine = examine
        self.ffi = ffi
        self.lib = lib
        self.pointer = pointer
        self.address = int(ffi.cast("uintptr_t", pointer))
        self.quick = load_quick()
        self.drives = tuple(drives)
        # The attached DeviceDriver: referenced, because C calls its functions.
        self.driver: Any = None
        # Files of `Executor.add_file`, by drive and index.
        self.files: dict[tuple[int, int], SwapFile] = {}
        # For errors, also after close.
        self.paths = [drive.path for drive in drives]
        # Reentrant: a signal handler may call `close` on the thread that is closing.
        self._stopping = threading.RLock()
        self.stopped = False
        self.leaked = False
        self.forked = False
        if alarm is not None:
            # Referenced, because native threads write to its word.
            self._alarm = alarm
            lib.inf_executor_alarm(pointer, ffi.cast("uint32_t *", alarm.address))
        # For exit and fork. Weak references, so that unreferenced executors are freed.
        _CORES.add(self)

    def check(self) -> None:
        """Raise AioClosedError after close and in a forked child."""
        if self.forked:
            raise AioClosedError(
                "the executor belongs to the parent of this process; open one after the fork"
            )
        if self.stopped:
            raise AioClosedError("the executor is closed")

    def wait_idle(self, timeout: float | None, *, check: Callable[[], None] | None = None) -> bool:
        """Block until no job is pending, at most `timeout` seconds. Returns False at the timeout.

        check: called every 100 ms; an exception that it raises ends the wait.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        # Short waits with the GIL released, so that signal handlers run in between.
        while True:
            left = (
                SLICE_S if deadline is None else min(SLICE_S, max(0.0, deadline - time.monotonic()))
            )
            if self.lib.inf_executor_wait_idle(self.pointer, int(left * 1e9)):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            if check is not None:
                check()

    def stop(self, *, wait: bool) -> None:
        """Refuse new jobs, wait for pending ones, join the threads, free the pools."""
        if self.forked:  # a thread of the parent may hold the lock
            return
        with self._stopping:  # a concurrent close waits for the first one
            if not (self.stopped or self.leaked):
                self._stop(wait=wait)

    def _stop(self, *, wait: bool) -> None:
        # C refuses further submissions; without `wait` it also cancels jobs that have not started.
        self.lib.inf_executor_shut(self.pointer, not wait)
        why = f"a drive does not answer after {CANCEL_S:.0f} s"
        try:
            idle = self.wait_idle(None if wait else CANCEL_S, check=self.check_waits)
        except Exception as error:  # noqa: BLE001 - logged below; the pending jobs never end
            idle, why = False, str(error)
        if not idle:
            # Leak the slab: the drive has requests in flight that may still write to it.
            self.leaked = True
            # Remove the alarm: the native threads live longer than its memory.
            self.lib.inf_executor_alarm(self.pointer, self.ffi.NULL)
            for drive in self.drives:
                drive.keep_open()  # otherwise requests in flight could reach a different file
            log.error("closing: %s; its buffers are not freed", why)
            return
        # Before the slots are freed: kept chunks have their only copy in a slot.
        counters = self.ffi.new("inf_exec_stats *")
        self.lib.inf_executor_stats(
            self.pointer, counters, self.ffi.new("inf_drive_stats[]", max(1, len(self.drives)))
        )
        if counters.kept_chunks:
            log.error(
                "closing: %d chunks whose write failed were in memory only, and are lost",
                counters.kept_chunks,
            )
        self.lib.inf_executor_stop(self.pointer)
        self.stopped = True

    def fault_record(self, record: Any) -> _validate.FaultRecord:
        """Return an inf_fault as a FaultRecord."""
        return _validate.FaultRecord(
            kind=record.kind,
            op=record.op,
            drive=record.drive,
            error=record.error,
            offset=record.offset,
            length=record.length,
            key=record.key,
            chunk=record.chunk,
            earlier=record.earlier,
            section=record.section,
            piece=record.piece,
        )

    def fault(self, record: Any) -> AioError:
        """Return an inf_fault as its typed error."""
        return self.fault_record(record).to_error(self.paths)

    def __del__(self) -> None:
        if self.forked:
            return
        # Without waiting: pending jobs must not block the garbage collector.
        self.stop(wait=False)
        # A leaked executor is never freed: the drive may still write to its slab.
        if self.stopped:
            self.lib.inf_executor_free(self.pointer)


_CORES: weakref.WeakSet[Core] = weakref.WeakSet()


def _close_all() -> None:
    # A copy: `stop` may drop the last reference to a core, which changes the set.
    for core in list(_CORES):
        core.stop(wait=False)


def _mark_forked() -> None:
    # No C call: it could wait for a lock that a thread of the parent held at the fork.
    for core in _CORES:
        core.forked = True


# The native threads must end before the interpreter unmaps the extension.
atexit.register(_close_all)
os.register_at_fork(after_in_child=_mark_forked)


@runtime_checkable
class Ticket(Protocol):
    """A submission in flight. Dropping a ticket does not cancel its jobs."""

    @property
    def done(self) -> bool:
        """True once every job has ended, with or without a fault. Reads one word; never blocks."""
        ...

    @property
    def filled(self) -> bool:
        """True once no job will read or write the caller's memory any more. Set before `done`."""
        ...

    @property
    def failed(self) -> bool:
        """True once a job has failed. `wait` raises its error."""
        ...

    def wait(
        self, timeout: float | None = None, *, check: Callable[[], None] | None = None
    ) -> None:
        """Block until done. Makes its gates escape, and raises its jobs to priority DEMAND.

        Releases the GIL; Ctrl-C works. check: called every 100 ms, in addition to the executor's
        `check`; an exception that it raises ends the wait, and the jobs continue. Raises the typed
        AioError of the first failed job, at every call; TimeoutError after `timeout` seconds.
        """
        ...

    def wait_filled(
        self, timeout: float | None = None, *, check: Callable[[], None] | None = None
    ) -> None:
        """Block until `filled`: targets have their data, sources and gradients may be reused.

        The write-back may still be in flight, and fail later. Errors and check: as in `wait`.
        """
        ...

    def cancel(self) -> None:
        """Cancel the fetches that no drive has begun: they fail with AioCancelledError and write to
        no target.

        Has no effect on a submission with stores or updates: cancelling these would lose half of a
        step, and the ticket must report their faults. Never blocks; the ticket is done when the
        remaining jobs have ended.
        """
        ...


class JobTicket:
    """The `Ticket` of one submission. Reads three words that native threads set."""

    __slots__ = ("_address", "_core", "_words")

    def __init__(self, core: Core, address: int) -> None:
        self._core = core
        self._address = address
        # A pointer, so that `done` reads memory without a C call.
        self._words = core.ffi.cast("uint32_t *", core.quick.ticket_words(address))

    @property
    def done(self) -> bool:
        return bool(self._words[0])

    @property
    def filled(self) -> bool:
        return bool(self._words[1])

    @property
    def failed(self) -> bool:
        return bool(self._words[2])

    def wait(
        self, timeout: float | None = None, *, check: Callable[[], None] | None = None
    ) -> None:
        self._wait(0, timeout, check)

    def wait_filled(
        self, timeout: float | None = None, *, check: Callable[[], None] | None = None
    ) -> None:
        self._wait(1, timeout, check)

    @property
    def follows_update(self) -> bool:
        """True while a job waits for an update of its chunk that has not begun to compute. If the
        gate of a fetch is open when the update ends, the fetch reads nothing. Never blocks.
        """
        core = self._core
        return bool(core.quick.ticket_follows_update(core.address, self._address))

    def wait_turn(self) -> None:
        """Block until done, like `wait`, but without making gates escape or raising priorities: the
        jobs run in their turn.
        """
        self._wait(0, None, None, escape=False)

    def cancel(self) -> None:
        core = self._core
        # A ticket that is done has no job to cancel, and `cancel` is then valid after close, too.
        if not self._words[0]:
            core.check()
            core.quick.ticket_cancel(core.address, self._address)

    @property
    def _pointer(self) -> Any:
        return self._core.ffi.cast("inf_ticket *", self._address)

    def _wait(
        self,
        word: int,
        timeout: float | None,
        check: Callable[[], None] | None,
        *,
        escape: bool = True,
    ) -> None:
        self._block(word, timeout, check, escape)
        # Read after the wait: C sets `failed` before `done`.
        if self._words[2]:
            record = self._core.ffi.new("inf_fault *")
            self._core.lib.inf_ticket_fault(self._core.pointer, self._pointer, record)
            fault = self._core.fault(record)
            raise fault if self._core.examine is None else self._core.examine(fault)

    def _block(
        self, word: int, timeout: float | None, check: Callable[[], None] | None, escape: bool
    ) -> None:
        core = self._core
        # C reads the word with acquire order: data copied before the word was set is then visible.
        if core.quick.ticket_set(self._address, word):
            return
        core.check()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = (
                SLICE_S if deadline is None else min(SLICE_S, max(0.0, deadline - time.monotonic()))
            )
            if core.lib.inf_ticket_wait(
                core.pointer, self._pointer, word, int(left * 1e9), int(escape)
            ):
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"the ticket is not {'filled' if word else 'done'} after {timeout} s"
                )
            # The checks raise if a device copy waits for a collective with a dead rank.
            for each in (check, core.check_waits):
                if each is not None:
                    each()

    def __del__(self) -> None:
        if not self._core.forked:
            self._core.quick.ticket_release(self._core.address, self._address)


class Gate:
    """Holds a submission back until the caller opens the gate with target addresses, or until the
    gate escapes. A fetch at a gate made with escapes=False (`Executor.gate`) does not hold back
    other fetches of its chunk.
    """

    __slots__ = ("_address", "_core")

    def __init__(self, core: Core, address: int) -> None:
        self._core = core
        self._address = address

    @property
    def escaped(self) -> bool:
        """True once the gate's jobs have run, or will run, without targets."""
        return bool(
            self._core.forked
            or not self._address
            or self._core.quick.gate_escaped(self._core.address, self._address)
        )

    def open(self, bases: Sequence[int]) -> bool:
        """Release the gate's jobs, with bases[job.base] added to ptr[0] of an update, and to the
        ptr of each section of a fetch. Never blocks on I/O.

        Returns True if the jobs will fill the targets, and False if the gate had escaped: its
        updates ran without the copy and its fetches were skipped, so fetch again without a gate.
        Raises ValueError if the gate was opened before, or a job's base is out of range.
        """
        core = self._core
        core.check()
        if not self._address:
            return False
        # ctypes, not cffi: this call of every forward keeps the GIL.
        array = (ctypes.c_uint64 * len(bases))(*bases)
        result = core.quick.gate_open(core.address, self._address, array, len(bases))
        if result == 1:
            return True
        if result == 0:
            return False
        if result == -errno.EALREADY:
            raise ValueError("the gate was opened before; a gate opens once")
        if result == -errno.EREMOTEIO:
            raise DeviceCopyError("the device's driver refuses an event")
        if result == -errno.ERANGE:
            raise ValueError(f"the gate's jobs need more than the {len(bases)} bases given")
        raise MemoryError("no memory to open a gate")

    def release(self) -> None:
        """Let the gate escape, unless it was opened. A released gate cannot be opened."""
        address, self._address = self._address, 0
        if address and not self._core.forked:
            # C lets a closed gate escape on release.
            self._core.quick.gate_release(self._core.address, address)

    def __del__(self) -> None:
        self.release()


def load_uring(ffi: Any, lib: Any) -> None:
    """Load liburing from the PyPI wheel. Raises OSError with the reason if that fails."""
    try:
        # Imported here, since only io_uring needs it. Its shared object exports the C library.
        from liburing import liburing as carrier
    except ImportError as missing:
        raise OSError(f"the package liburing is not usable here: {missing}") from missing
    why = ffi.new("char[512]")
    if lib.inf_uring_load(os.fsencode(carrier.__file__), why, 512):
        raise OSError(ffi.string(why).decode(errors="replace"))


# ---- calls with the GIL held ----
# For C calls that neither wait nor compute.
# cffi releases the GIL around every call. While another Python thread is busy, regaining the GIL
# takes the interpreter's switch interval: 5 ms for a call of microseconds, several times per
# submission. A quick call only acquires the executor's lock, which no thread holds while it waits,
# and native threads never acquire the GIL.
# With a device, `executor_submit` and `gate_open` also record an event on the compute stream, which
# blocks while that stream's launch queue is full. These two keep the GIL all the same: this
# thread's next kernel launch would block as long, so only other Python threads are delayed. A
# deadlock with a thread that waits for the GIL is impossible: all ranks launch collectives in one
# order, so every operation for which the stream waits has been launched.

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

#: name in C without "inf_" -> (result, arguments)
_CALLS: dict[str, tuple[Any, list[Any]]] = {
    "executor_submit": (
        _POINTER,
        [_POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _INT, _POINTER, _POINTER],
    ),
    "executor_hold_gates": (None, [_POINTER, _INT]),
    "executor_compute_stream": (None, [_POINTER, ctypes.c_uint64]),
    "executor_prefetch": (_INT, [_POINTER, _POINTER, _INT, _POINTER]),
    "ticket_words": (_POINTER, [_POINTER]),
    "ticket_set": (_INT, [_POINTER, _INT]),
    "ticket_follows_update": (_INT, [_POINTER, _POINTER]),
    "ticket_cancel": (None, [_POINTER, _POINTER]),
    "ticket_release": (None, [_POINTER, _POINTER]),
    "gate_new": (_POINTER, [_POINTER, _INT]),
    "gate_open": (_INT, [_POINTER, _POINTER, _POINTER, _INT]),
    "gate_escaped": (_INT, [_POINTER, _POINTER]),
    "gate_release": (None, [_POINTER, _POINTER]),
}


class QuickCalls:
    """C functions of `_CALLS` as attributes; calls keep the GIL. Pointers are integers."""

    def __init__(self, path: str) -> None:
        # PyDLL keeps the GIL, unlike CDLL and cffi. The library is the loaded extension.
        library = ctypes.PyDLL(path)
        for name, (result, arguments) in _CALLS.items():
            function = getattr(library, f"inf_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        # Declared for mypy. Python calls this only for misspelled names.
        raise AttributeError(f"inf_{name} is not among the quick calls")


@lru_cache(maxsize=1)
def load_quick() -> QuickCalls:
    """Load the quick calls. Raises ImportError when the extension is missing."""
    native.load()
    import infinity._native as _native

    return QuickCalls(_native.__file__)
