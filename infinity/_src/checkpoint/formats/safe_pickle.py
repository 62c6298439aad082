"""Reading pickles without running them, and encoding the user's small state as bytes.

A pickle is a program that calls the names in it. This module replaces each name in a fixed list by
an inert record class. Every read makes new classes, so a hostile file affects only its own values.
No name in a file is imported.

The user's small state (`handle.extra`, `inf.save(extra=)`) is written by torch.save and read by
torch.load(weights_only=True). Arrays and scalars of numpy, which random generators' states contain,
are written as tensors.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import types
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch


class Record:
    """Stand-in for an object in a pickle: the arguments and the state from which unpickling would
    make it.
    """

    kind = ""  # the name in the pickle
    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any, **_: Any) -> Any:
        record = object.__new__(cls)
        record.args = args
        return record

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


def record_class(name: str) -> Any:
    """Make a record class that stands for `name`."""
    # A new class for each read: a file may set attributes on it.
    return type("Record", (Record,), {"kind": name})


class KnownNames:
    """Names that a pickle may contain. `records`, and names that begin with `prefix`, become
    records; `values` maps names to harmless objects.
    """

    def __init__(
        self, records: Collection[str], values: Mapping[str, Any], *, prefix: str = ""
    ) -> None:
        self._known = {**{name: record_class(name) for name in records}, **values}
        self._prefix = prefix

    def find(self, module: str, name: str) -> Any:
        """Return the stand-in for a name. Raises: pickle.UnpicklingError for an unknown name."""
        full = f"{module}.{name}"
        if self._prefix and full.startswith(self._prefix) and full not in self._known:
            self._known[full] = record_class(full)
        # An allow-list: unknown names are refused.
        if full not in self._known:
            raise pickle.UnpicklingError(
                f"it names {full}, which such a file does not need; it was not imported"
            )
        return self._known[full]


# The unpickler in C allocates for as many objects as a pickle declares: 64 GiB for six bytes.
class InertUnpickler(pickle._Unpickler):  # type: ignore[misc, name-defined, unused-ignore]
    """Unpickler for which the names in `records` become records, and the names in `values` the
    given harmless objects; any other name is refused.

    Raises: pickle.UnpicklingError naming what was refused.
    """

    def __init__(
        self,
        data: bytes,
        *,
        records: Collection[str],
        values: Mapping[str, Any],
        prefix: str = "",
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._names = KnownNames(records, values, prefix=prefix)

    def find_class(self, module: str, name: str, /) -> Any:
        return self._names.find(module, name)

    def persistent_load(self, pid: Any, /) -> Any:  # noqa: ARG002 - whatever it is
        raise pickle.UnpicklingError("it refers to objects outside of itself")

    def get_extension(self, code: int) -> NoReturn:
        raise pickle.UnpicklingError(f"it names the extension {code} of pickle")

    def _refuse_bytearray(self: Any) -> None:
        # Python would allocate as many bytes as the pickle declares.
        raise pickle.UnpicklingError("it has a bytearray, which such a file does not need")

    dispatch: ClassVar[Any] = {
        **pickle._Unpickler.dispatch,
        pickle.BYTEARRAY8[0]: _refuse_bytearray,
    }


def load_tensors(source: io.BufferedReader) -> Any:
    """Read a whole file of `torch.save` to the CPU, by torch.load(weights_only=True).

    torch refuses names that it does not list as harmless. Blocks. Raises: OSError; ValueError for
    damage, or naming what is refused.
    """
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except OSError:
        raise
    # Damaged bytes make torch raise errors of zip, pickle, struct and others.
    except Exception as error:
        raise ValueError(reason_of(str(error))) from error


def reason_of(message: str) -> str:
    """Return the reason in torch.load's message, without its advice to load the file unsafely."""
    named = re.search(r"GLOBAL ([\w.]+)", message)
    if named:
        return f"it names {named[1]}, which may be harmful; it was not called"
    return message.rpartition("WeightsUnpickler error: ")[2].strip().split("\n")[0]


# -- the user's small state ------------------------------------------------------------------------


def extra_bytes(extra: object) -> bytes | None:
    """Encode the user's small state. Raises: ValueError when it could not be read back without
    running code.
    """
    if extra is None:
        return None
    out = io.BytesIO()
    try:
        torch.save(
            extra, out, pickle_module=types.SimpleNamespace(__name__="pickle", Pickler=_Pickler)
        )
        # Read back at once, so that a failure to read is found now and not after a crash.
        _loaded(out.getvalue())
    except Exception as error:
        refused = isinstance(error, pickle.UnpicklingError)
        what = (
            reason_of(str(error))
            if refused
            else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        )
        raise ValueError(
            f"extra= cannot be saved: {what}. Supported: numbers, text, tensors, numpy's arrays of "
            "numbers, and lists, tuples, dicts and state_dict()s of them"
        ) from error
    return out.getvalue()


def read_extra(data: bytes) -> Any:
    """Decode the bytes of `extra_bytes` without running code in them. Raises: ValueError for bytes
    that no engine wrote.
    """
    try:
        return _loaded(data)
    # Bytes that no engine wrote make torch raise errors of zip, pickle, struct and others.
    except Exception as error:
        raise ValueError(
            f"the small state of a checkpoint is refused: {reason_of(str(error)) or repr(error)}"
        ) from error


def _loaded(data: bytes) -> Any:
    # The two functions that `_Pickler` writes; torch refuses every other name.
    with torch.serialization.safe_globals([_array, _scalar]):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _array(values: torch.Tensor) -> Any:
    return values.numpy()


def _scalar(value: torch.Tensor) -> Any:
    return value.numpy()[()]


class _Pickler(pickle.Pickler):
    """Pickler that writes arrays and scalars of numpy as calls of `_array` and `_scalar`, the only
    names that reading allows in addition to torch's."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray or isinstance(value, np.generic):
            # Reading refuses arrays of a dtype or byte order that tensors do not have.
            with contextlib.suppress(TypeError, ValueError):
                return (_array if type(value) is np.ndarray else _scalar), (
                    torch.from_numpy(np.array(value)),
                )
        return NotImplemented
