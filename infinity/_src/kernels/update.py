"""Any algorithm on any state format, in numpy and torch: the reference of native/update.c, and what runs without it.

States are decoded to fp32, updated, and encoded again (infinity/_src/kernels/codec.py). The update itself uses the fp32 moments,
before they are rounded to what rests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infinity._src.kernels.adamw import adamw_fp32_, adamw_split_
from infinity._src.kernels.codec import decode_sections, encode_sections
from infinity._src.kernels.hyper import replay_log
from infinity._src.kernels.lion import lion_
from infinity._src.kernels.sgd import sgd_
from infinity.aio.plan import QUANT_GROUP, Algorithm, Format, Moments

_MOMENT_COUNTS = {Algorithm.ADAMW: (2,), Algorithm.SGD: (0, 1), Algorithm.LION: (1,)}


def check_update(state_format: Format, row: Any) -> None:
    """Raises ValueError unless the kernels know the format (without `grad`) with the row's algorithm."""
    algorithm = Algorithm(int(row["algorithm"]))
    if state_format is Format.RAW or state_format.grad:
        raise ValueError(f"{state_format} has no optimizer states to update")
    bare_momentum = algorithm is Algorithm.SGD and state_format.count == 0 and row["beta1"] != 0
    if state_format.count not in _MOMENT_COUNTS[algorithm] or bare_momentum:
        raise ValueError(f"{algorithm.name} does not update {state_format}: it has another number of moments")


def update_numpy_sections(
    state_format: Format,
    sections: Sequence[npt.NDArray[Any]],
    grad: npt.NDArray[Any],
    hyper: Any,
    element: int = 0,
) -> None:
    """The update on numpy memory, in place: the kernel of an executor that has no native code.

    sections: one writable contiguous 1-D array per section of the format, which has no `grad`, for [numel] elements (any
    dtype of the section's itemsize, or bytes; the scales of all groups that begin). grad [numel]: fp32, fp16, or uint16 with
    the bits of bf16. hyper: a HYPER record. element: the parameter's, at the first; in 8-bit formats a multiple of
    QUANT_GROUP. Raises: ValueError for what the kernels do not know.
    """
    kind = Format.of(state_format)
    check_update(kind, hyper)
    if kind.moments is Moments.Q8 and element % QUANT_GROUP:
        raise ValueError(f"element {element} does not start a group of {QUANT_GROUP}")
    algorithm = Algorithm(int(hyper["algorithm"]))
    if algorithm is Algorithm.ADAMW and kind is Format.SPLIT and grad.dtype != np.float16:
        half = grad.dtype == np.uint16  # bits of bf16, which numpy has not
        gradient = (
            torch.from_numpy(grad.view(np.int16)).view(torch.bfloat16) if half else torch.from_numpy(grad)
        )
        hi, lo, *moments = (
            torch.from_numpy(section.view(dtype))
            for section, dtype in zip(sections, (np.int16, np.int16, np.float32, np.float32), strict=True)
        )
        adamw_split_(hi, lo, moments[0], moments[1], gradient, hyper)
        return
    _update_any(kind, sections, grad, hyper, element)


def _update_any(
    kind: Format, sections: Sequence[npt.NDArray[Any]], grad: npt.NDArray[Any], hyper: Any, element: int
) -> None:
    """Decode, update, encode."""
    master, moments = decode_sections(kind, sections)
    with np.errstate(all="ignore"):
        gradient = replay_log(grad, hyper)
        algorithm = Algorithm(int(hyper["algorithm"]))
        if algorithm is Algorithm.ADAMW:
            done = hyper.copy()
            done["log_count"] = 0
            states = [torch.from_numpy(array) for array in (master, *moments)]
            adamw_fp32_(states[0], states[1], states[2], torch.from_numpy(gradient), done)
        elif algorithm is Algorithm.SGD:
            sgd_(master, moments, gradient, hyper)
        else:
            lion_(master, moments, gradient, hyper)
    encoded = encode_sections(kind, master, moments, key=int(hyper["key"]), element=element)
    for target, source in zip(sections, encoded, strict=True):
        target.view(np.uint8)[:] = source.view(np.uint8)
