"""Handles of native objects: the C executor, tickets and gates, through closing, fork and exit.

Waits release the GIL and return to Python every 100 ms, so that Ctrl-C works. Calls that only hand
work over keep the GIL (`QuickCalls`, below).

Lifetime: a `Core` owns the C object. The executor, its tickets and its gates keep the `Core` alive.
Closing ends the threads; the last ticket frees the C object. A forked child has no such threads, so
everything raises there.
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
"""Seconds that a wait stays in C; Ctrl-C is seen in between."""
CANCEL_S = 30.0
"""Seconds that `close` waits for a drive's requests before it abandons their memory for good."""


class Core:
    """Owner of the C executor and of all that must live as long. `address`: for the quick calls.

    check_waits: called every 100 ms in waits of tickets, in `wait_all` and in `close`; what it
    raises ends them. examine: gets the error of a job, and returns the one to raise.
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
        # The DeviceDriver of the attached device: C calls its functions.
        self.driver: Any = None
        # Files of `Executor.add_file`, by drive and index.
        self.files: dict[tuple[int, int], SwapFile] = {}
        # Errors name paths after close, too.
        self.paths = [drive.path for drive in drives]
        # Reentrant: a signal handler may close again on the thread that closes.
        self._stopping = threading.RLock()
        self.stopped = False
        self.leaked = False
        self.forked = False
        if alarm is not None:
            # Kept: native threads write to its word.
            self._alarm = alarm
            lib.inf_executor_alarm(pointer, ffi.cast("uint32_t *", alarm.address))
        # Weak: an executor without a reference is freed, and exit and fork find the others.
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
        """Block until no job is pending, at most `timeout` seconds. Returns whether none is.

        check: called every 100 ms; what it raises ends the wait.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        # Waits in slices with the GIL released, so that signal handlers run in between.
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
        """End intake, wait, join the threads, free the pools."""
        if self.forked:  # the lock may be held by a thread that only the parent has
            return
        with self._stopping:  # a second close returns when the first one has ended
            if not (self.stopped or self.leaked):
                self._stop(wait=wait)

    def _stop(self, *, wait: bool) -> None:
        # From here on C refuses submissions; with `not wait` it also cancels jobs that have not
        # started.
        self.lib.inf_executor_shut(self.pointer, not wait)
        why = f"a drive does not answer after {CANCEL_S:.0f} s"
        try:
            idle = self.wait_idle(None if wait else CANCEL_S, check=self.check_waits)
        except Exception as error:  # noqa: BLE001 - told below: what was waited for never ends
            idle, why = False, str(error)
        if not idle:
            # The drive still holds requests that point into the slab: freeing it would let them
            # write anywhere.
            self.leaked = True
            # Its threads outlive this object, and so the alarm.
            self.lib.inf_executor_alarm(self.pointer, self.ffi.NULL)
            for drive in self.drives:
                drive.keep_open()  # their descriptors' numbers must not become other files either
            log.error("closing: %s; its buffers are left alone", why)
            return
        # Asked before the slots go: these chunks have their only copy in one.
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
        """Convert an inf_fault to a FaultRecord."""
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
        """Convert an inf_fault to its typed error."""
        return self.fault_record(record).to_error(self.paths)

    def __del__(self) -> None:
        if self.forked:
            return
        # An executor that was never closed must not block the garbage collector on pending work.
        self.stop(wait=False)
        # A leaked executor is never freed: the drive may still write into its slab.
        if self.stopped:
            self.lib.inf_executor_free(self.pointer)


_CORES: weakref.WeakSet[Core] = weakref.WeakSet()


def _close_all() -> None:
    # A copy: stopping may drop the last reference to a core and change the set.
    for core in list(_CORES):
        core.stop(wait=False)


def _mark_forked() -> None:
    # Only a mark: a call into C could wait for a lock that a thread of the parent held.
    for core in _CORES:
        core.forked = True


# Threads must end before the interpreter unmaps the extension.
atexit.register(_close_all)
os.register_at_fork(after_in_child=_mark_forked)


@runtime_checkable
class Ticket(Protocol):
    """A submission in flight. Dropping a ticket does not cancel its jobs."""

    @property
    def done(self) -> bool:
        """True once every job has ended, well or not. Reads one word and never blocks."""
        ...

    @property
    def filled(self) -> bool:
        """True once every copy from or to a caller's memory is made, or never will be. Before
        `done`.
        """
        ...

    @property
    def failed(self) -> bool:
        """True once a job has failed. `wait` raises its error."""
        ...

    def wait(
        self, timeout: float | None = None, *, check: Callable[[], None] | None = None
    ) -> None:
        """Block until done; makes the gates that it depends on escape, and its jobs demands.

        Blocks with the GIL released; Ctrl-C works. check: called every 100 ms, beside the one of
        the executor; what it raises ends the wait, and not the work. Raises the typed AioError of
        the first failed job, every time; TimeoutError after `timeout` seconds.
        """
        ...

    def wait_filled(
        self, timeout: float | None = None, *, check: Callable[[], None] | None = None
    ) -> None:
        """Block until `filled`: targets hold their data, sources and gradients may be reused.

        The write-back may still be in flight, and may still fail. check: as in `wait`.
        """
        ...

    def cancel(self) -> None:
        """Give up its fetches that the drive has not begun: they end with AioCancelledError and
        fill nothing.

        Stores and updates are never given up: half of a step would be lost. Never blocks; the
        ticket is done when the rest is.
        """
        ...


class JobTicket:
    """The `Ticket` of one submission: reads three words that the native threads set."""

    __slots__ = ("_address", "_core", "_words")

    def __init__(self, core: Core, address: int) -> None:
        self._core = core
        self._address = address
        # Kept as a pointer, so that `done` reads memory and calls nothing.
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

    def cancel(self) -> None:
        core = self._core
        # A ticket that is done has nothing to cancel, also after close.
        if not self._words[0]:
            core.check()
            core.quick.ticket_cancel(core.address, self._address)

    @property
    def _pointer(self) -> Any:
        return self._core.ffi.cast("inf_ticket *", self._address)

    def _wait(self, word: int, timeout: float | None, check: Callable[[], None] | None) -> None:
        self._block(word, timeout, check)
        # After the wait: C sets the word of a failed job before that of `done`.
        if self._words[2]:
            record = self._core.ffi.new("inf_fault *")
            self._core.lib.inf_ticket_fault(self._core.pointer, self._pointer, record)
            fault = self._core.fault(record)
            raise fault if self._core.examine is None else self._core.examine(fault)

    def _block(self, word: int, timeout: float | None, check: Callable[[], None] | None) -> None:
        core = self._core
        # C reads the word, so that what was copied before it was set is seen.
        if core.quick.ticket_set(self._address, word):
            return
        core.check()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = (
                SLICE_S if deadline is None else min(SLICE_S, max(0.0, deadline - time.monotonic()))
            )
            if core.lib.inf_ticket_wait(core.pointer, self._pointer, word, int(left * 1e9), 1):
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"the ticket is not {'filled' if word else 'done'} after {timeout} s"
                )
            # A copy of a device may wait there for another rank, which may have died.
            for each in (check, core.check_waits):
                if each is not None:
                    each()

    def __del__(self) -> None:
        if not self._core.forked:
            self._core.quick.ticket_release(self._core.address, self._address)


class Gate:
    """Holds a submission back until its targets exist, or until it escapes."""

    __slots__ = ("_address", "_core")

    def __init__(self, core: Core, address: int) -> None:
        self._core = core
        self._address = address

    @property
    def escaped(self) -> bool:
        """True once the gate's work has run, or will run, without targets."""
        return bool(
            self._core.forked or self._core.quick.gate_escaped(self._core.address, self._address)
        )

    def open(self, bases: Sequence[int]) -> bool:
        """Let the gated work run with ptr[0] += bases[job.base]. Never blocks.

        True: it will fill the targets. False: it had escaped (updates ran without the copy, fetches
        were skipped), so fetch again without a gate. Raises ValueError if it was opened before or a
        job's base is out of range.
        """
        core = self._core
        core.check()
        # ctypes and not cffi: this call runs in every forward, with the GIL held.
        array = (ctypes.c_uint64 * len(bases))(*bases)
        result = core.quick.gate_open(core.address, self._address, array, len(bases))
        if result == 1:
            return True
        # The gate escaped: updates ran without this copy, and fetches were skipped.
        if result == 0:
            return False
        if result == -errno.EALREADY:
            raise ValueError("the gate was opened before; a gate opens once")
        if result == -errno.EREMOTEIO:
            raise DeviceCopyError("the device's driver refuses an event")
        if result == -errno.ERANGE:
            raise ValueError(f"the gate's jobs need more than the {len(bases)} bases given")
        raise MemoryError("no memory to open a gate")

    def __del__(self) -> None:
        if not self._core.forked:
            # A closed gate escapes then: it can no longer be opened.
            self._core.quick.gate_release(self._core.address, self._address)


def load_uring(ffi: Any, lib: Any) -> None:
    """Load liburing from the PyPI wheel. Raises OSError with the reason when it cannot be."""
    try:
        # Imported here, since only the io_uring backend needs it. Its shared object exports the
        # whole C library.
        from liburing import liburing as carrier
    except ImportError as missing:
        raise OSError(f"the package liburing is not usable here: {missing}") from missing
    why = ffi.new("char[512]")
    if lib.inf_uring_load(os.fsencode(carrier.__file__), why, 512):
        raise OSError(ffi.string(why).decode(errors="replace"))


# ---- calls with the GIL held ----
#
# For calls into C that neither wait nor compute.
#
# cffi lets go of the GIL around every call, and whoever lets go of it beside a busy Python thread
# gets it back after the interpreter's switch interval: 5 ms for a call that takes microseconds,
# several times in each submission. These calls only take the executor's lock, which no thread holds
# while waiting for anything, and no native thread ever wants the GIL.
#
# With a device, `executor_submit` and `gate_open` also record an event on the compute stream, which
# blocks while that stream has no room for another launch. The GIL is kept all the same: the next
# kernel of this thread would block as long, so nothing is lost but turns of other threads, and
# letting go would cost every submission what is said above. No launch waits for a thread that the
# GIL keeps out: collectives are launched in one order by all ranks, so what the stream waits for
# has been launched.

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

#: name in C without "inf_" -> (result, arguments)
_CALLS: dict[str, tuple[Any, list[Any]]] = {
    "executor_submit": (
        _POINTER,
        [_POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _INT, _POINTER, _POINTER],
    ),
    "executor_hold_gates": (None, [_POINTER, _INT]),
    "executor_compute_stream": (None, [_POINTER, ctypes.c_uint64]),
    "executor_prefetch": (_INT, [_POINTER, _POINTER, _INT, _INT]),
    "ticket_words": (_POINTER, [_POINTER]),
    "ticket_set": (_INT, [_POINTER, _INT]),
    "ticket_cancel": (None, [_POINTER, _POINTER]),
    "ticket_release": (None, [_POINTER, _POINTER]),
    "gate_new": (_POINTER, [_POINTER]),
    "gate_open": (_INT, [_POINTER, _POINTER, _POINTER, _INT]),
    "gate_escaped": (_INT, [_POINTER, _POINTER]),
    "gate_release": (None, [_POINTER, _POINTER]),
}


class QuickCalls:
    """C functions of `_CALLS` as attributes, called with the GIL held. Pointers are integers, 0 for
    NULL.
    """

    def __init__(self, path: str) -> None:
        # PyDLL, unlike CDLL and cffi, does not release the GIL.
        library = ctypes.PyDLL(path)  # the extension is loaded already: this gives the same one
        for name, (result, arguments) in _CALLS.items():
            function = getattr(library, f"inf_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        # mypy cannot see attributes set by name; a typing mistake ends here.
        raise AttributeError(f"inf_{name} is not among the quick calls")


@lru_cache(maxsize=1)
def load_quick() -> QuickCalls:
    """Load the quick calls. Raises ImportError when the extension is missing."""
    native.load()
    import infinity._native as _native

    return QuickCalls(_native.__file__)
