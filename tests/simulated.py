"""A device for machines without one: tests/sim_driver.c, compiled, as a `DeviceDriver` and what
tests ask of it."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from infinity.aio import DeviceDriver
from native.build_native import compiler_command

_KEPT: list[tempfile.TemporaryDirectory[str]] = []

SOURCE = Path(__file__).with_name("sim_driver.c")


@functools.cache
def library() -> str:
    """Path of the compiled driver."""
    place = tempfile.TemporaryDirectory(prefix="infinity-sim-")  # goes with the process
    _KEPT.append(place)
    path = Path(place.name) / "sim_driver.so"
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([*compiler_command(), *flags, str(SOURCE), "-o", str(path)], check=True)
    return str(path)


class Simulated:
    """The device. Memory is ordinary; copies come late, by up to `delay_us`; races are found
    whatever the timing."""

    def __init__(self, *, seed: int = 0, delay_us: int = 500) -> None:
        self._sim = ctypes.CDLL(library())
        for name in ("sim_copied", "sim_live", "sim_pinned"):
            getattr(self._sim, name).restype = ctypes.c_uint64
        self._sim.sim_race.restype = ctypes.c_char_p
        self._sim.sim_reset(ctypes.c_uint64(seed), ctypes.c_int(delay_us))

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

    def fail(self, nth: int) -> None:
        """The n-th copy from now on (1: the next) fails as an illegal address does."""
        self._sim.sim_fail(ctypes.c_int(nth))

    def races(self) -> list[str]:
        """Return the descriptions of the races found, at most 64: accesses that nothing orders."""
        return [
            self._sim.sim_race(index).decode() for index in range(min(self._sim.sim_races(), 64))
        ]

    def copied(self) -> tuple[int, int]:
        """Bytes copied to the device, and from it."""
        return int(self._sim.sim_copied(0)), int(self._sim.sim_copied(1))

    def live(self) -> tuple[int, int, int]:
        """Streams, events and bytes pinned that exist."""
        return int(self._sim.sim_live(0)), int(self._sim.sim_live(1)), int(self._sim.sim_pinned())


_WORDS: dict[str, bytes] = {}  # the library keeps pointers to them
