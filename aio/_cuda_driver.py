"""CUDA driver functions by address, for the executor's copies and for pinned memory.

The functions are in libcuda, which torch loads to use a GPU. libcuda's ABI is stable, and torch's
streams and events are valid driver handles. `library` may name a different shared object with the
same functions: tests use a simulated driver.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any, final

from infinity.errors import DeviceCopyError

LIBRARY = "libcuda.so.1"

#: Field of inf_device_api (native/executor/executor.cdef.h) -> the driver function in it.
FUNCTIONS = {
    "set_current": "cuCtxSetCurrent",
    "get_current": "cuCtxGetCurrent",
    "stream_create": "cuStreamCreate",
    "stream_destroy": "cuStreamDestroy_v2",
    "stream_wait": "cuStreamSynchronize",
    "stream_wait_event": "cuStreamWaitEvent",
    "event_create": "cuEventCreate",
    "event_destroy": "cuEventDestroy_v2",
    "event_record": "cuEventRecord",
    "event_query": "cuEventQuery",
    "event_wait": "cuEventSynchronize",
    "to_device": "cuMemcpyHtoDAsync_v2",
    "from_device": "cuMemcpyDtoHAsync_v2",
    "host_register": "cuMemHostRegister_v2",
    "host_unregister": "cuMemHostUnregister",
    "capture_mode": "cuThreadExchangeStreamCaptureMode",
}

_HOST_POINTERS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_REGISTER = 1 | 2  # portable, and mapped: kernels may read it


def relax_capture_mode(library: str = LIBRARY) -> None:
    """Let this thread query events and streams while another thread captures a CUDA graph. In the
    default capture mode, such a query invalidates the capture.

    Raises: DeviceCopyError when the library cannot be loaded, or its call fails.
    """
    mode = ctypes.c_int(_RELAXED)
    try:
        code = ctypes.CDLL(library).cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    except (OSError, AttributeError) as error:
        raise DeviceCopyError(f"the device's driver cannot be used: {error}") from error
    if code:
        raise DeviceCopyError(f"the device's driver refuses the capture mode ({code})", errno=code)


@final
class DeviceDriver:
    """Driver of one device. Keep it until every executor with this driver attached is closed.

    ordinal: the device's index in torch (after CUDA_VISIBLE_DEVICES).
    Raises: DeviceCopyError when the library, a function of it or the device is not available.
    """

    def __init__(self, ordinal: int, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
            # Addresses, because native threads call the functions without the GIL.
            self.functions = {field: self._address(name) for field, name in FUNCTIONS.items()}
        except (OSError, AttributeError) as error:
            raise DeviceCopyError(f"the device's driver cannot be used: {error}") from error
        # No effect if torch has initialized the driver.
        self._call("cuInit", ctypes.c_uint(0))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        # torch also uses the device's primary context, so its streams are valid here.
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.context = int(context.value or 0)
        host_pointers = ctypes.c_int()
        self._call(
            "cuDeviceGetAttribute",
            ctypes.byref(host_pointers),
            ctypes.c_int(_HOST_POINTERS),
            device,
        )
        #: Whether kernels read memory that `pin` has pinned at its address on the host.
        self.host_pointers = bool(host_pointers.value)
        self._pinned: dict[int, int] = {}

    def _address(self, name: str) -> int:
        return int(ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise DeviceCopyError(
                f"{name}: the device's driver says {self.name_of(code)} ({code})", errno=code
            )

    def name_of(self, code: int) -> str:
        """Return the driver's name of an error code."""
        text = ctypes.c_char_p()
        if self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text)) or not text.value:
            return "an error without a name"
        return text.value.decode(errors="replace")

    def pin(self, address: int, size_bytes: int) -> None:
        """Pin a range of host memory, so that its copies run at full bandwidth and concurrently
        with kernels. Blocks.

        Raises: DeviceCopyError, for instance when the machine lacks pinnable memory.
        """
        with self._current():
            self._call(
                "cuMemHostRegister_v2",
                ctypes.c_void_p(address),
                ctypes.c_size_t(size_bytes),
                ctypes.c_uint(_REGISTER),
            )
        # After the call: `unpin` must not pass the driver a range that is not pinned.
        self._pinned[address] = size_bytes

    def unpin(self, address: int) -> None:
        """Unpin the range that begins at `address`, if it is pinned. No copy may be under way."""
        if self._pinned.pop(address, None) is None:
            return
        # After a device error the driver has dropped the range, and the call fails.
        with contextlib.suppress(DeviceCopyError), self._current():
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make the device's context current on this thread inside the block, then restore the
        user's context.
        """
        before = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(before))
        self._call("cuCtxSetCurrent", ctypes.c_void_p(self.context))
        try:
            yield
        finally:
            self._call("cuCtxSetCurrent", before)

    def close(self) -> None:
        """Unpin everything. No copy may be under way."""
        # A copy: `unpin` removes entries.
        for address in list(self._pinned):
            self.unpin(address)
