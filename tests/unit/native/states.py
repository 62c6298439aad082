"""Optimizer states as numpy arrays, the ways to update them, and how bits are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from infinity._src.cabi.native import ffi, lib
from infinity._src.cabi.records import Format, GradDtype, LogKind
from tests.oracle import Hyper, update_sections

Array = npt.NDArray[Any]

HYPER_PLAIN = Hyper(lr=1e-3, step=1, weight_decay=0.01)
HYPER_LATE = Hyper(lr=3e-5, step=4321, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
HYPER_LOGGED = Hyper(
    lr=1e-4,
    step=17,
    log=((LogKind.DIV, 65536.0), ("mul", 0.3333), (LogKind.MUL, 1.7), ("div", 3.1)),
)
HYPER_CLAMPED = Hyper(
    lr=1e-3,
    step=17,
    log=(("mul", 0.7), ("clamp_min", -0.3), (LogKind.CLAMP_MAX, 0.2), ("div", 3.1)),
)
HYPERS = {
    "plain": HYPER_PLAIN,
    "late": HYPER_LATE,
    "logged": HYPER_LOGGED,
    "clamped": HYPER_CLAMPED,
}

SPECIAL_BITS = np.array(
    [
        0x00000000,
        0x80000000,
        0x00000001,
        0x80000001,
        0x007FFFFF,
        0x00800000,
        0x807FFFFF,
        0x3F800000,
        0x3F808000,
        0x3F807FFF,
        0x3F818000,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0xFFC00000,
        0x7FFFFFFF,
        0xFFFFFFFF,
        0x7F800001,
        0x7F7F8000,
        0x00008000,
        0x80008000,
        0x1E3CE508,
        0x20000000,
    ],
    dtype=np.uint32,
)
"""Zeros, denormals, edges of binades and of bf16 rounding, the largest, infinities, NaNs of several
payloads."""


def pointer(array: Array) -> Any:
    """The array's memory as a void pointer. The caller keeps the array alive."""
    return ffi.cast("void *", array.ctypes.data)


def hyper_pointer(hyper: Any) -> Any:
    """A HYPER record as the kernels want it."""
    return ffi.cast("inf_hyper *", hyper.ctypes.data)


def grad_dtype(grad: Array) -> GradDtype:
    """uint16 holds the bits of bf16."""
    kinds = {np.uint16: GradDtype.BF16, np.float16: GradDtype.FP16, np.float32: GradDtype.FP32}
    return kinds[grad.dtype.type]


def native_update(
    state_format: Format, sections: list[Array], grad: Array, hyper: Any, element: int = 0
) -> None:
    """The kernel in use, called directly."""
    assert lib.inf_update_valid(int(state_format), hyper_pointer(hyper))
    addresses = [ffi.cast("uint8_t *", section.ctypes.data) for section in sections]
    addresses += [ffi.NULL] * (6 - len(addresses))
    lib.inf_update(
        int(state_format),
        ffi.new("uint8_t *[6]", addresses),
        pointer(grad),
        int(grad_dtype(grad)),
        grad.size,
        element,
        hyper_pointer(hyper),
    )


def torch_update(
    state_format: Format, sections: list[Array], grad: Array, hyper: Any, element: int = 0
) -> None:
    """The reference on the same memory."""
    update_sections(state_format, sections, grad, hyper, element)


def random_bits(rng: np.random.Generator, numel: int, spread: float) -> Array:
    """fp32 values as uint32: normal numbers over many magnitudes, a share of special values."""
    magnitude = np.exp2(rng.uniform(-spread, spread / 4, numel))
    bits = (rng.standard_normal(numel) * magnitude).astype(np.float32).view(np.uint32)
    special = rng.random(numel) < 0.1
    bits[special] = rng.choice(SPECIAL_BITS, int(special.sum()))
    return bits


def random_states(
    state_format: Format, numel: int, seed: int, *, offset: int = 0, bf16_grad: bool = True
) -> tuple[list[Array], Array]:
    """Sections and a gradient, each `offset` elements past an aligned start."""
    rng = np.random.default_rng(seed)
    total = numel + offset
    master, exp_avg = random_bits(rng, total, 60), random_bits(rng, total, 90)
    exp_avg_sq, grad = random_bits(rng, total, 120), random_bits(rng, total, 80)
    if seed % 2:
        # otherwise square roots of negative numbers are met too
        exp_avg_sq &= np.uint32(0x7FFFFFFF)
    moments = [exp_avg.view(np.float32)[offset:], exp_avg_sq.view(np.float32)[offset:]]
    gradient = (grad >> 16).astype(np.uint16) if bf16_grad else grad.view(np.float32)
    if state_format is Format.FP32:
        return [master.view(np.float32)[offset:], *moments], gradient[offset:]
    hi, lo = np.empty(total, np.uint16), np.empty(total, np.int16)
    lib.inf_split_master(
        *(ffi.cast(kind, array.ctypes.data) for kind, array in
          (("float *", master), ("uint16_t *", hi), ("int16_t *", lo))), total
    )  # fmt: skip
    return [hi[offset:], lo[offset:], *moments], gradient[offset:]


def assert_same_bits(actual: list[Array], expected: list[Array]) -> None:
    """Equal bit for bit, except that any NaN equals any NaN in fp32 sections (its payload has no
    meaning)."""
    for section, (left, right) in enumerate(zip(actual, expected, strict=True)):
        differs = left.view(f"u{left.itemsize}") != right.view(f"u{right.itemsize}")
        if left.dtype == np.float32:
            differs &= ~(np.isnan(left) & np.isnan(right))
        index = np.flatnonzero(differs)
        assert index.size == 0, (
            f"section {section}: {index.size} of {left.size} differ, first at {index[0]}: "
            f"{left[index[0]]!r} != {right[index[0]]!r}"
        )
