"""A simulated device: tests/sim_driver.c, compiled, as a `DeviceDriver`, with functions for tests.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from infinity.aio import DeviceDriver

_KEPT: list[tempfile.TemporaryDirectory[str]] = []

SOURCE = Path(__file__).with_name("sim_driver.c")


@functools.cache
def library() -> str:
    """Path of the compiled driver."""
    # Here: it needs setuptools, which a machine with a real device may not have.
    from native.build_native import compiler_command

    place = tempfile.TemporaryDirectory(prefix="infinity-sim-")  # goes with the process
    _KEPT.append(place)
    path = Path(place.name) / "sim_driver.so"
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*compiler_command(), *flags, str(SOURCE), "-o", str(path)], check=True)
    return str(path)


class Calls(NamedTuple):
    """Calls of the driver. sleeps: until an event has come."""

    copies: int
    records: int
    waits: int
    queries: int
    sleeps: int


class Simulated:
    """The device. Memory is ordinary; copies are delayed by up to `delay_us`; races are found
    independently of timing. tests/sim_driver.c describes the model."""

    def __init__(self, *, seed: int = 0, delay_us: int = 500) -> None:
        self._sim = ctypes.CDLL(library())
        for name in ("copied", "torch_copied", "live", "pinned", "calls", "in_flight_max"):
            getattr(self._sim, f"sim_{name}").restype = ctypes.c_uint64
        self._sim.sim_seen_ns.restype = ctypes.c_int64
        self._sim.sim_race.restype = ctypes.c_char_p
        self._sim.sim_reset(ctypes.c_uint64(seed), ctypes.c_int(delay_us))
        self._before = self._living()

    def driver(self, ordinal: int = 0) -> DeviceDriver:
        """The driver of a device (0 or 1), for an executor."""
        return DeviceDriver(ordinal, library())

    def contexts(self) -> set[int]:
        """The contexts in which streams and events were made, or memory pinned."""
        bits = int(self._sim.sim_made_in())
        return {context for context in range(3) if bits >> context & 1}

    def stream(self) -> int:
        """Handle of one more stream for kernels, until `drop`."""
        made = ctypes.c_void_p()
        assert self._sim.cuStreamCreate(ctypes.byref(made), 0) == 0
        return int(made.value or 0)

    def wait(self, stream: int) -> None:
        """Wait until a stream is done."""
        assert self._sim.cuStreamSynchronize(ctypes.c_void_p(stream)) == 0

    def drop(self, stream: int) -> None:
        """End a stream that `stream` has made."""
        assert self._sim.cuStreamDestroy_v2(ctypes.c_void_p(stream)) == 0

    def current(self, context: int | None = None) -> int:
        """The context that is current on this thread (device 0 has 1, device 1 has 2); `context`:
        after it was made that."""
        if context is not None:
            self._sim.cuCtxSetCurrent(ctypes.c_void_p(context))
        found = ctypes.c_void_p()
        self._sim.cuCtxGetCurrent(ctypes.byref(found))
        return int(found.value or 0)

    def kernel(
        self, address: int, size_bytes: int, *, writes: bool, what: str, stream: int = 0
    ) -> None:
        """A kernel is submitted to a stream (0: the compute stream) that reads, or writes, this
        memory."""
        self._touch("sim_kernel", address, size_bytes, writes, what, ctypes.c_void_p(stream))

    def host(self, address: int, size_bytes: int, *, writes: bool, what: str) -> None:
        """The host itself reads or writes this memory."""
        self._touch("sim_host", address, size_bytes, writes, what)

    def _touch(
        self, call: str, address: int, size_bytes: int, writes: bool, what: str, *first: Any
    ) -> None:
        word = _WORDS.setdefault(what, what.encode())
        getattr(self._sim, call)(
            *first,
            ctypes.c_uint64(address),
            ctypes.c_size_t(size_bytes),
            ctypes.c_int(writes),
            ctypes.c_char_p(word),
        )

    def late(self, us: int) -> None:
        """Set the duration of late kernels on the compute stream."""
        self._sim.sim_late(ctypes.c_int(us))

    def late_write(self, address: int, size_bytes: int, *, what: str) -> None:
        """Submit a late kernel that writes the present bytes at `address`. Until it has run, they
        are 0xA5."""
        word = _WORDS.setdefault(what, what.encode())
        self._sim.sim_late_write(
            ctypes.c_uint64(address), ctypes.c_size_t(size_bytes), ctypes.c_char_p(word)
        )

    def late_copy(self, to: int, source: int, size_bytes: int, *, what: str) -> None:
        """Submit a late kernel that reads `source` when it runs, and writes it to `to`."""
        word = _WORDS.setdefault(what, what.encode())
        self._sim.sim_late_copy(
            ctypes.c_uint64(to),
            ctypes.c_uint64(source),
            ctypes.c_size_t(size_bytes),
            ctypes.c_char_p(word),
        )

    def synchronise(self) -> None:
        """Wait for the compute stream."""
        self._sim.cuStreamSynchronize(ctypes.c_void_p())

    def timing(
        self, *, call_us: float = 5.0, wake_us: float = 100.0, bytes_per_s: float = 55e9
    ) -> None:
        """Make time virtual, and begin it: a call takes `call_us` of its thread, waking from a
        sleep `wake_us` more, and bytes take time on the bus. No bytes are copied any more. Counts
        of calls begin at 0."""
        self._sim.sim_timing(
            ctypes.c_int64(int(call_us * 1e3)),
            ctypes.c_int64(int(wake_us * 1e3)),
            ctypes.c_double(bytes_per_s),
        )

    def busy(self, us: float) -> None:
        """Submit a kernel that takes `us` of virtual time."""
        self._sim.sim_busy(ctypes.c_int64(int(us * 1e3)))

    def seen_s(self) -> float:
        """Virtual seconds until a thread last saw that an event had come."""
        return int(self._sim.sim_seen_ns()) / 1e9

    def calls(self) -> Calls:
        """Counts of submissions and queries, by kind."""
        return Calls(*(int(self._sim.sim_calls(kind)) for kind in range(len(Calls._fields))))

    def hold(self) -> None:
        """Block threads in calls that submit work to streams, until `let_go`."""
        self._sim.sim_hold(1)

    def holding(self) -> int:
        """Threads that are kept."""
        return int(self._sim.sim_holding())

    def let_go(self) -> None:
        """End `hold`."""
        self._sim.sim_hold(0)

    def hold_kernels(self, hold: bool) -> None:
        """Late kernels do not begin while they are held."""
        self._sim.sim_hold_kernels(ctypes.c_int(hold))

    def in_flight_max(self) -> tuple[int, int]:
        """The most bytes submitted to a stream and not yet seen as copied, to the device and from
        it."""
        return int(self._sim.sim_in_flight_max(0)), int(self._sim.sim_in_flight_max(1))

    def capture(self, on: bool) -> None:
        """Begin or end a graph capture."""
        self._sim.sim_capture(ctypes.c_int(on))

    def capture_broken(self) -> bool:
        """Return whether a thread has broken the capture since it began."""
        return bool(self._sim.sim_capture_broken())

    def host_pointers(self, can: bool) -> None:
        """Say whether kernels may use the host's addresses of pinned memory."""
        self._sim.sim_host_pointers(ctypes.c_int(can))

    def pinned(self, address: int, size_bytes: int) -> bool:
        """Return whether this range is pinned."""
        return bool(self._sim.sim_is_pinned(ctypes.c_uint64(address), ctypes.c_size_t(size_bytes)))

    def torch_copy(self, to: int, source: int, size_bytes: int, *, out: bool, blocks: bool) -> None:
        """Announce a copy between host and device (`out`: to the device) that torch has made."""
        self._sim.sim_torch_copy(
            ctypes.c_uint64(to),
            ctypes.c_uint64(source),
            ctypes.c_size_t(size_bytes),
            ctypes.c_int(not out),
            ctypes.c_int(blocks),
        )

    def torch_copied(self) -> tuple[int, int]:
        """Bytes that torch copied to the device, and from it."""
        return int(self._sim.sim_torch_copied(0)), int(self._sim.sim_torch_copied(1))

    def fail(self, nth: int, what: str = "copies") -> None:
        """The n-th call from now on (1: the next) fails as an illegal address does. what: a field
        of `Calls`."""
        self._sim.sim_fail(ctypes.c_int(Calls._fields.index(what)), ctypes.c_int(nth))

    def races(self) -> list[str]:
        """Return descriptions of at most 64 races: unordered accesses."""
        return [
            self._sim.sim_race(index).decode() for index in range(min(self._sim.sim_races(), 64))
        ]

    def copied(self) -> tuple[int, int]:
        """Bytes copied to the device, and from it."""
        return int(self._sim.sim_copied(0)), int(self._sim.sim_copied(1))

    def live(self) -> tuple[int, int, int]:
        """Count existing streams, events and pinned bytes made since this object's creation."""
        streams, events, pinned_bytes = (
            max(0, now - before) for now, before in zip(self._living(), self._before, strict=True)
        )
        return streams, events, pinned_bytes

    def _living(self) -> tuple[int, int, int]:
        return int(self._sim.sim_live(0)), int(self._sim.sim_live(1)), int(self._sim.sim_pinned())


_WORDS: dict[str, bytes] = {}  # the library keeps pointers to them
