"""The sections of one chunk in memory, for the Python executor: checksums of their pieces, and the update kernel on them."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from infinity.aio import checks, plan

try:
    import xxhash
except ImportError:  # checksums live in RAM only, so which one it is does not matter to anyone
    xxhash = None  # type: ignore[assignment, unused-ignore]

Kernel = Callable[[plan.Format, list[npt.NDArray[Any]], npt.NDArray[Any], Any, int], None]
"""(format, sections, grad, hyper, element): update a segment of the sections in place.

format: without `grad`. sections: one array per section, [items] of its `_dtype`. grad [numel]: float32, float16, or uint16
with the bits of bfloat16. hyper: one plan.HYPER record. element: the parameter's, at the first.
"""

_DTYPES = {"lo": {1: "<i1", 2: "<i2"}, "param": {2: "<u2", 4: "<f4"}, "master": {4: "<f4"}}
_MOMENT_DTYPES = {1: "u1", 2: "<u2", 4: "<f4"}
_GRAD_DTYPES: dict[int, tuple[str, int]] = {
    plan.GradDtype.BF16: ("<u2", 2),
    plan.GradDtype.FP32: ("<f4", 4),
    plan.GradDtype.FP16: ("<f2", 2),
}
_SECTION_GRADS = {
    plan.GradSection.BF16: plan.GradDtype.BF16,
    plan.GradSection.FP32: plan.GradDtype.FP32,
    plan.GradSection.FP16: plan.GradDtype.FP16,
}


def _dtype(section: plan.Section) -> str:
    """What an item of a section is to numpy: floats and lo as they are, the bits of others."""
    if section.name.startswith("moment"):
        return _MOMENT_DTYPES[section.itemsize]
    return _DTYPES.get(section.name, {}).get(section.itemsize, f"<u{section.itemsize}")


def memory_at(address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """The caller's memory as bytes. It must live as long as the array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


def _sum(data: memoryview, seed: int) -> int:
    if xxhash is not None:
        return int(xxhash.xxh3_64_intdigest(data, seed)) & 0xFFFFFFFF
    return zlib.crc32(data, seed)


def sums_of(chunk: Any) -> npt.NDArray[np.uint32] | None:
    """The checksums of a CHUNK record, [sections, pieces]; None: it has none."""
    if not chunk["sums_ptr"]:
        return None
    count, pieces = int(chunk["section_count"]), plan.piece_count(int(chunk["numel"]), int(chunk["piece_numel"]))
    words: npt.NDArray[np.uint32] = memory_at(int(chunk["sums_ptr"]), 4 * count * pieces).view(np.uint32)
    return words.reshape(count, pieces)


class Sections:
    """The sections of a chunk where they lie now: resident, or one of `lodged`. Bytes, one array each; None: not in memory."""

    def __init__(self, chunk: Any, lodged: Sequence[npt.NDArray[np.uint8] | None]) -> None:
        self.chunk = chunk
        self.numel = int(chunk["numel"])
        self.count = int(chunk["section_count"])
        self.arrays: list[npt.NDArray[np.uint8] | None] = []
        for section in range(self.count):
            size = checks.section_bytes(chunk, section)
            memory = lodged[section]
            if chunk["section_at"][section] < 0:
                self.arrays.append(memory_at(int(chunk["section_ptr"][section]), size))
            else:
                self.arrays.append(None if memory is None else memory[:size])
        self.pieces = plan.piece_count(self.numel, int(chunk["piece_numel"]))
        self.sums = sums_of(chunk)

    def _piece_sum(self, section: int, piece: int) -> int:
        array = self.arrays[section]
        assert array is not None
        step = checks.section_bytes(self.chunk, section, int(self.chunk["piece_numel"]))
        # Gradients outlive versions of the states.
        generation = 0 if section == checks.grad_section(self.chunk) else int(self.chunk["generation"])
        seed = plan.sum_seed(generation, int(self.chunk["key"]), section, piece)
        return _sum(array[piece * step : (piece + 1) * step].data, seed)

    def verify(self, section: int, phase: int | None) -> int:
        """The first piece that is not what was written, or -1. Resident sections are not verified.

        `phase` None: all pieces; else a sample of them, which moves on with the phase.
        """
        if self.sums is None or self.chunk["section_at"][section] < 0:
            return -1
        stride = 1 if phase is None else min(checks.VERIFY_STRIDE, self.pieces)
        for piece in range((phase or 0) % stride, self.pieces, stride):
            if self._piece_sum(section, piece) != self.sums[section, piece]:
                return piece
        return -1

    def seal(self, section: int) -> None:
        """Set the section's checksums to what it holds now."""
        if self.sums is not None:
            for piece in range(self.pieces):
                self.sums[section, piece] = self._piece_sum(section, piece)

    def update(self, kernel: Kernel, segs: npt.NDArray[np.void], hypers: npt.NDArray[np.void]) -> bool:
        """Run the kernel on every segment; False (and nothing touched) when a segment is out of range."""
        fmt = plan.Format.of(self.chunk["format"])
        align = plan.QUANT_GROUP if fmt.moments is plan.Moments.Q8 else 1
        for seg in segs:
            start, numel = int(seg["start"]), int(seg["numel"])
            if start < 0 or numel < 0 or start + numel > self.numel or not 0 <= seg["hyper"] < len(hypers):
                return False
            if start % align or seg["element"] % align or seg["element"] < 0 or self._grad_dtype(fmt, seg) is None:
                return False
        typed = []
        for array, section in zip(self.arrays, fmt.sections, strict=True):
            assert array is not None, "an update has all sections in memory"
            typed.append(array.view(_dtype(section)))
        for seg in segs:
            start, numel = int(seg["start"]), int(seg["numel"])
            kernel(
                fmt.with_grad(plan.GradSection.NONE),
                [
                    array[start // kind.group_numel : -(-(start + numel) // kind.group_numel)]
                    for array, kind in zip(typed[: fmt.written_count], fmt.sections, strict=False)
                ],
                self._gradient(fmt, seg),
                hypers[int(seg["hyper"])],
                int(seg["element"]),
            )
        return True

    @staticmethod
    def _grad_dtype(fmt: plan.Format, seg: Any) -> int | None:
        """The GradDtype of the elements; None: the segment has none that can be."""
        kind = int(seg["grad_dtype"])
        if kind == plan.GradDtype.SECTION:
            return _SECTION_GRADS.get(fmt.grad)
        return kind if kind in _GRAD_DTYPES and seg["grad"] else None

    def _gradient(self, fmt: plan.Format, seg: Any) -> npt.NDArray[Any]:
        kind = self._grad_dtype(fmt, seg)
        assert kind is not None
        start, numel = int(seg["start"]), int(seg["numel"])
        dtype, itemsize = _GRAD_DTYPES[kind]
        if seg["grad_dtype"] == plan.GradDtype.SECTION:
            array = self.arrays[-1]
            assert array is not None
            return array[start * itemsize : (start + numel) * itemsize].view(dtype)
        return memory_at(int(seg["grad"]), numel * itemsize).view(dtype)
