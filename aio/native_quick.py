"""Calls into C that neither wait nor compute, with the GIL held.

cffi lets go of the GIL around every call, and whoever lets go of it beside a busy Python thread gets it back after the
interpreter's switch interval: 5 ms for a call that takes microseconds, several times in each submission. These calls only
take the executor's lock, which nobody holds while waiting for anything, and no native thread ever wants the GIL.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from infinity._src import native

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

#: name in C without "inf_" -> (result, arguments)
_CALLS: dict[str, tuple[Any, list[Any]]] = {
    "executor_submit": (
        _POINTER,
        [_POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER, _INT, _INT, _POINTER, _POINTER],
    ),
    "executor_hold_gates": (None, [_POINTER, _INT]),
    "executor_compute_stream": (None, [_POINTER, ctypes.c_uint64]),
    "executor_preread": (_INT, [_POINTER, _POINTER, _INT, _INT]),
    "ticket_words": (_POINTER, [_POINTER]),
    "ticket_set": (_INT, [_POINTER, _INT]),
    "ticket_cancel": (None, [_POINTER, _POINTER]),
    "ticket_release": (None, [_POINTER, _POINTER]),
    "gate_new": (_POINTER, [_POINTER]),
    "gate_open": (_INT, [_POINTER, _POINTER, _POINTER, _INT]),
    "gate_escaped": (_INT, [_POINTER, _POINTER]),
    "gate_release": (None, [_POINTER, _POINTER]),
}


class Quick:
    """The functions of `_CALLS` as attributes. Pointers are integers, 0 for NULL."""

    def __init__(self, path: str) -> None:
        library = ctypes.PyDLL(path)  # the extension is loaded already: this gives the same one
        for name, (result, arguments) in _CALLS.items():
            function = getattr(library, f"inf_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"inf_{name} is not among the quick calls")


@lru_cache(maxsize=1)
def load_quick() -> Quick:
    """The calls of the compiled extension. Raises ImportError when it is missing."""
    native.load()
    from infinity import _native

    return Quick(_native.__file__)
