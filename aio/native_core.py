"""The native executor's handles: the C object, tickets and gates, and what closing, forking and exit mean for them.

Waits let go of the GIL and come back every 100 ms so that Ctrl-C works; what only hands work over keeps it (native_quick.py).

Lifetime: a `Core` owns the C object and is kept by the executor and by its tickets and gates. Closing ends the threads;
the C object itself goes with the last ticket. In a forked child the threads do not exist: everything raises.
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
from collections.abc import Sequence
from typing import Any

from infinity.aio import checks
from infinity.aio.native_quick import load_quick
from infinity.aio.swap_file import SwapFile
from infinity.errors import AioClosedError, AioError, DeviceCopyError

log = logging.getLogger("infinity.aio")

SLICE_S = 0.1
"""How long a wait stays in C: Ctrl-C is seen between two."""
CANCEL_S = 30.0
"""How long `close` waits for requests that the drive has before it leaves their memory alone for ever."""


class Core:
    """The C executor and what must not outlive or precede it. `address`: of the C object, for the quick calls."""

    def __init__(self, ffi: Any, lib: Any, pointer: Any, drives: Sequence[SwapFile]) -> None:
        self.ffi = ffi
        self.lib = lib
        self.pointer = pointer
        self.address = int(ffi.cast("uintptr_t", pointer))
        self.quick = load_quick()
        self.drives = tuple(drives)
        self.driver: Any = None  # of the attached device
        self.files: dict[tuple[int, int], SwapFile] = {}  # those that came later, by drive and index
        self.paths = [drive.path for drive in drives]
        self._stopping = threading.RLock()
        self.stopped = False
        self.leaked = False
        self.forked = False
        _CORES.add(self)

    def check(self) -> None:
        """Raises AioClosedError after close and in a forked child."""
        if self.forked:
            raise AioClosedError(
                "the executor belongs to the parent of this process; open one after the fork"
            )
        if self.stopped:
            raise AioClosedError("the executor is closed")

    def wait_idle(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = SLICE_S if deadline is None else min(SLICE_S, max(0.0, deadline - time.monotonic()))
            if self.lib.inf_executor_wait_idle(self.pointer, int(left * 1e9)):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    def stop(self, *, drain: bool) -> None:
        """End intake, wait, join the threads, free the pools."""
        if self.forked:  # the lock may be held by a thread that only the parent has
            return
        with self._stopping:  # a second close returns when the first one has ended
            if not (self.stopped or self.leaked):
                self._stop(drain=drain)

    def _stop(self, *, drain: bool) -> None:
        self.lib.inf_executor_shut(self.pointer, not drain)
        if not self.wait_idle(None if drain else CANCEL_S):
            # The drive still holds requests that point into the slab: freeing it would let them write anywhere.
            self.leaked = True
            for drive in self.drives:
                drive.keep_open()  # their descriptors' numbers must not become other files either
            log.error("closing: a drive does not answer after %.0f s; its buffers are left alone", CANCEL_S)
            return
        counters = self.ffi.new("inf_exec_stats *")
        self.lib.inf_executor_stats(self.pointer, counters, self.ffi.new("inf_drive_stats[]", max(1, len(self.drives))))
        if counters.kept_chunks:
            log.error("closing: %d chunks whose write failed were in memory only, and are lost", counters.kept_chunks)
        self.lib.inf_executor_stop(self.pointer)
        self.stopped = True

    def fault_record(self, record: Any) -> checks.FaultRecord:
        """An inf_fault as a record."""
        return checks.FaultRecord(
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
        """The error for an inf_fault."""
        return self.fault_record(record).to_error(self.paths)

    def __del__(self) -> None:
        if self.forked:
            return
        self.stop(drain=False)
        if self.stopped:
            self.lib.inf_executor_free(self.pointer)


_CORES: weakref.WeakSet[Core] = weakref.WeakSet()


def _close_all() -> None:
    for core in list(_CORES):
        core.stop(drain=False)


def _mark_forked() -> None:
    for core in _CORES:
        core.forked = True


atexit.register(_close_all)
os.register_at_fork(after_in_child=_mark_forked)


class NativeTicket:
    """`executor.Ticket` over words that the native threads set."""

    __slots__ = ("_address", "_core", "_words")

    def __init__(self, core: Core, address: int) -> None:
        self._core = core
        self._address = address
        self._words = core.ffi.cast("uint32_t *", core.quick.ticket_words(address))

    @property
    def done(self) -> bool:
        """See `Ticket.done`."""
        return bool(self._words[0])

    @property
    def filled(self) -> bool:
        """See `Ticket.filled`."""
        return bool(self._words[1])

    @property
    def failed(self) -> bool:
        """See `Ticket.failed`."""
        return bool(self._words[2])

    def wait(self, timeout: float | None = None) -> None:
        """See `Ticket.wait`."""
        self._wait(0, timeout)

    def wait_filled(self, timeout: float | None = None) -> None:
        """See `Ticket.wait_filled`."""
        self._wait(1, timeout)

    def cancel(self) -> None:
        """See `Ticket.cancel`."""
        core = self._core
        if not self._words[0]:
            core.check()
            core.quick.ticket_cancel(core.address, self._address)

    @property
    def _pointer(self) -> Any:
        return self._core.ffi.cast("inf_ticket *", self._address)

    def _wait(self, word: int, timeout: float | None) -> None:
        self._block(word, timeout)
        if self._words[2]:
            record = self._core.ffi.new("inf_fault *")
            self._core.lib.inf_ticket_fault(self._core.pointer, self._pointer, record)
            raise self._core.fault(record)

    def _block(self, word: int, timeout: float | None) -> None:
        core = self._core
        # C reads the word, so that what was copied before it was set is seen.
        if core.quick.ticket_set(self._address, word):
            return
        core.check()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = SLICE_S if deadline is None else min(SLICE_S, max(0.0, deadline - time.monotonic()))
            if core.lib.inf_ticket_wait(core.pointer, self._pointer, word, int(left * 1e9), 1):
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"the ticket is not {'filled' if word else 'done'} after {timeout} s")

    def __del__(self) -> None:
        if not self._core.forked:
            self._core.quick.ticket_release(self._core.address, self._address)


class NativeGate:
    """`executor.Gate` of the native executor."""

    __slots__ = ("_address", "_core")

    def __init__(self, core: Core, address: int) -> None:
        self._core = core
        self._address = address

    @property
    def escaped(self) -> bool:
        """See `Gate.escaped`."""
        return bool(self._core.forked or self._core.quick.gate_escaped(self._core.address, self._address))

    def open(self, bases: Sequence[int]) -> bool:
        """See `Gate.open`."""
        core = self._core
        core.check()
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

    def __del__(self) -> None:
        if not self._core.forked:
            self._core.quick.gate_release(self._core.address, self._address)


def load_uring(ffi: Any, lib: Any) -> None:
    """Load liburing from the PyPI wheel. Raises OSError with the reason when it cannot be."""
    try:
        from liburing import liburing as carrier
    except ImportError as missing:
        raise OSError(f"the package liburing is not usable here: {missing}") from missing
    why = ffi.new("char[512]")
    if lib.inf_uring_load(os.fsencode(carrier.__file__), why, 512):
        raise OSError(ffi.string(why).decode(errors="replace"))
