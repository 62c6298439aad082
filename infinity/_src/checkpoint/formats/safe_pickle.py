"""Reads pickles without running them, and encodes the user's small state as bytes.

A pickle is a program that imports and calls functions by name. This module imports no name from a
file: it replaces each name of a fixed list with an inert record class, and refuses all other names.
Every read makes new record classes, so a hostile file cannot change what other reads return.

torch.save writes the user's small state (`handle.extra`, `inf.save(extra=)`), and
torch.load(weights_only=True) reads it. States of random generators contain arrays and scalars of
numpy, which this module writes as tensors.
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
    """Stand-in for an object in a pickle, with the arguments and the state that unpickling would
    pass to the object's class.
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
    # Make a new class for each read: a file may set attributes on the class.
    return type("Record", (Record,), {"kind": name})


class KnownNames:
    """Names that a pickle may contain.

    records: names to replace with record classes. prefix: beginning of further such names. values:
    harmless objects by name.
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
        # `_known` is an allow-list: refuse all other names.
        if full not in self._known:
            raise pickle.UnpicklingError(
                f"it names {full}, which such a file does not need; it was not imported"
            )
        return self._known[full]


# This subclasses the unpickler in Python, because the one in C allocates memory for the number of
# objects that a pickle declares: six bytes can take 64 GiB.
class InertUnpickler(pickle._Unpickler):  # type: ignore[misc, name-defined, unused-ignore]
    """Unpickler that replaces names in a pickle as `KnownNames` does, and refuses other names.

    Raises: pickle.UnpicklingError naming the refused name or object.
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
        # Python would allocate the number of bytes that the pickle declares.
        raise pickle.UnpicklingError("it has a bytearray, which such a file does not need")

    dispatch: ClassVar[Any] = {
        **pickle._Unpickler.dispatch,
        pickle.BYTEARRAY8[0]: _refuse_bytearray,
    }


def load_tensors(source: io.BufferedReader) -> Any:
    """Read a whole file of `torch.save` to the CPU, by torch.load(weights_only=True), which refuses
    names that torch does not list as harmless. Blocks.

    Raises: OSError; ValueError if the file is damaged, or naming the refused name.
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
    """Encode the user's small state. Raises: ValueError if `read_extra` could not decode the bytes.
    """
    if extra is None:
        return None
    out = io.BytesIO()
    try:
        torch.save(
            extra, out, pickle_module=types.SimpleNamespace(__name__="pickle", Pickler=_Pickler)
        )
        # Decode the bytes now: an error after a crash would be too late.
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
    # Allow the two functions that `_Pickler` writes; torch refuses names that it does not know.
    with torch.serialization.safe_globals([_array, _scalar]):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _array(values: torch.Tensor) -> Any:
    return values.numpy()


def _scalar(value: torch.Tensor) -> Any:
    return value.numpy()[()]


class _Pickler(pickle.Pickler):
    """Pickler that writes numpy's arrays and scalars as calls of `_array` and `_scalar`, the only
    names that `_loaded` allows in addition to torch's."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray or isinstance(value, np.generic):
            # Leave arrays whose dtype or byte order tensors lack unchanged; `_loaded` refuses them.
            with contextlib.suppress(TypeError, ValueError):
                return (_array if type(value) is np.ndarray else _scalar), (
                    torch.from_numpy(np.array(value)),
                )
        return NotImplemented
