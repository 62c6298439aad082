"""The compiled extension, or why there is none.

`lib` and `ffi` are those of `infinity._native` when it was built for this machine, else None; callers ask `available()`
and take their fall-back. Imports no torch.

Environment: INFINITY_NO_NATIVE=1 acts as if it had not been built; INFINITY_ISA=portable|avx2|avx512 forces the
kernels' instruction set (a ValueError where the machine lacks it).
"""

from __future__ import annotations

import os
from typing import Any

ISA_NAMES = ("portable", "avx2", "avx512")


def _load() -> tuple[Any, Any, str]:
    """(lib, ffi, "") or (None, None, reason)."""
    if os.environ.get("INFINITY_NO_NATIVE") == "1":
        return None, None, "INFINITY_NO_NATIVE=1"
    try:
        from infinity import _native
    except ImportError as error:
        return None, None, f"infinity._native is not built or does not load: {error}"
    return _native.lib, _native.ffi, ""


lib: Any
ffi: Any
lib, ffi, _reason = _load()


def available() -> bool:
    """Whether the compiled extension is in use."""
    return lib is not None


def reason() -> str:
    """Why the extension is not in use; empty when it is."""
    return _reason


def isa() -> str:
    """The instruction set of the kernels in use; "none" without the extension."""
    return str(ffi.string(lib.inf_isa()).decode()) if available() else "none"


def select_isa(name: str) -> None:
    """Use the kernels of instruction set `name` in this process from now on. Not while a kernel runs.

    Raises: ValueError when this machine or this build lacks it.
    """
    if name not in ISA_NAMES:
        raise ValueError(f"INFINITY_ISA={name!r}: unknown; one of {', '.join(ISA_NAMES)}")
    if not available():
        raise ValueError(f"INFINITY_ISA={name!r}: there are no native kernels ({_reason})")
    if not lib.inf_isa_select(name.encode()):
        raise ValueError(f"INFINITY_ISA={name!r}: this CPU or build lacks it; unset it to use {isa()}")


def isas() -> tuple[str, ...]:
    """The instruction sets that this machine can run, plainest first."""
    if not available():
        return ()
    before = isa()
    found = tuple(name for name in ISA_NAMES if lib.inf_isa_select(name.encode()))
    select_isa(before)
    return found


def crc32c(data: Any, seed: int = 0) -> int:
    """CRC-32C of a contiguous buffer, chained like zlib.crc32. Needs the extension; releases the GIL."""
    view = ffi.from_buffer(data)
    return int(lib.inf_crc32c(seed, view, len(view)))


def crc32c_name() -> str:
    """The checksum implementation in use; "none" without the extension."""
    return str(ffi.string(lib.inf_crc32c_name(-1)).decode()) if available() else "none"


if os.environ.get("INFINITY_ISA") and available():
    select_isa(os.environ["INFINITY_ISA"])
