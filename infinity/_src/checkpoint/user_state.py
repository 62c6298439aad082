"""The user's small state (`handle.extra`, `inf.save(extra=)`) as bytes, and back without running anything that lies in them.

As torch.save writes it and torch.load(weights_only=True) reads it; and numpy's arrays and scalars, which generators of random
numbers are made of, as tensors.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import types
from typing import Any

import numpy as np
import torch

from infinity._src.checkpoint.safe_pickle import reason_of


def extra_bytes(extra: object) -> bytes | None:
    """The user's small state as bytes. Raises: ValueError when it could not be read back without running code."""
    if extra is None:
        return None
    out = io.BytesIO()
    try:
        torch.save(extra, out, pickle_module=types.SimpleNamespace(__name__="pickle", Pickler=_Pickler))
        read_extra(out.getvalue())
    except Exception as error:
        refused = isinstance(error, pickle.UnpicklingError)
        what = reason_of(str(error)) if refused else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ValueError(
            f"extra= cannot be kept: {what}. Numbers, text, tensors, numpy's arrays of numbers, and lists, tuples and dicts of "
            "them can, and state_dict()s that are made of these"
        ) from error
    return out.getvalue()


def read_extra(data: bytes) -> Any:
    """What `extra_bytes` was given; nothing in it is run."""
    with torch.serialization.safe_globals([_array, _scalar]):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _array(values: torch.Tensor) -> Any:
    return values.numpy()


def _scalar(value: torch.Tensor) -> Any:
    return value.numpy()[()]


class _Pickler(pickle.Pickler):
    """Writes arrays as calls of `_array`, the one thing beside torch's own that reading allows."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray or isinstance(value, np.generic):
            with contextlib.suppress(TypeError, ValueError):  # of a dtype or byte order that tensors have not
                return (_array if type(value) is np.ndarray else _scalar), (torch.from_numpy(np.array(value)),)
        return NotImplemented
