"""Loads the compiled extension `infinity._native`: its `ffi` and `lib`, and the instruction set of
its kernels.

Importing this module never fails and never imports torch, so that plans, documentation and
`infinity doctor` work without the extension. Using the missing extension raises an ImportError with
the command that builds it.

Environment: INFINITY_ISA=portable|avx2|avx512 forces the kernels' instruction set (ValueError if
the machine lacks it).
"""

from __future__ import annotations

import os
from typing import Any

ISA_NAMES = ("portable", "avx2", "avx512")

# Set below if the extension loads; else `__getattr__` raises for both.
ffi: Any
lib: Any
_reason = ""

try:
    import infinity._native as _native
except ImportError as error:
    from infinity._src.cabi.installation import hidden_package, install_line

    _hidden = hidden_package()
    _reason = f"infinity's C extension is missing or does not load ({error}): " + (
        f"build it by `{install_line('', '--force-reinstall', '--no-deps')}`"
        if _hidden is None
        else f"this source tree hides the installed package, {_hidden}; start from another "
        "directory, or call `infinity` without `python -m`"
    )
else:
    ffi, lib = _native.ffi, _native.lib


def __getattr__(name: str) -> Any:
    # Called only for missing names, so without cost if the extension is loaded.
    if name in ("ffi", "lib"):
        raise ImportError(_reason)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load() -> tuple[Any, Any]:
    """Return (ffi, lib) of the extension. Raises ImportError with the command that builds it."""
    if _reason:
        raise ImportError(_reason)
    return ffi, lib


def available() -> bool:
    """Return whether the extension is loaded."""
    return not _reason


def reason() -> str:
    """Return why the extension is not loaded, and the fix; "" if it is loaded."""
    return _reason


def isa() -> str:
    """Return the name of the kernels' instruction set; "none" without the extension."""
    return str(ffi.string(lib.inf_isa()).decode()) if available() else "none"


def select_isa(name: str) -> None:
    """Switch the kernels of this process to instruction set `name`. No kernel may be running.

    Raises: ValueError when this machine or this build lacks it, ImportError without the extension.
    """
    if name not in ISA_NAMES:
        raise ValueError(f"INFINITY_ISA={name!r}: unknown; one of {', '.join(ISA_NAMES)}")
    load()
    if not lib.inf_isa_select(name.encode()):
        raise ValueError(
            f"INFINITY_ISA={name!r}: this CPU or build lacks it; unset it to use {isa()}"
        )


def isas() -> tuple[str, ...]:
    """List the instruction sets that this machine can run, in the order of ISA_NAMES."""
    if not available():
        return ()
    # Try to select each, and restore the current one afterwards.
    before = isa()
    found = tuple(name for name in ISA_NAMES if lib.inf_isa_select(name.encode()))
    select_isa(before)
    return found


def crc32c(data: Any, seed: int = 0) -> int:
    """Compute CRC-32C of a contiguous buffer, chained like zlib.crc32. Releases the GIL."""
    load()
    view = ffi.from_buffer(data)
    return int(lib.inf_crc32c(seed, view, len(view)))


def crc32c_name() -> str:
    """Return the name of the checksum implementation in use; "none" without the extension."""
    return str(ffi.string(lib.inf_crc32c_name(-1)).decode()) if available() else "none"


if os.environ.get("INFINITY_ISA") and available():
    select_isa(os.environ["INFINITY_ISA"])
