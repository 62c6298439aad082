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

Kernel = Callable[[int, list[npt.NDArray[Any]], npt.NDArray[Any], Any], None]
"""(format, sections, grad, hyper): update the sections in place. SPLIT: uint16, int16, float32, float32; FP32: three
float32; all [numel]. grad [numel]: float32, or uint16 with the bits of bfloat16. hyper: one plan.HYPER record."""

_SECTION_DTYPES = {
    int(plan.Format.SPLIT): (np.uint16, np.int16, np.float32, np.float32),
    int(plan.Format.FP32): (np.float32, np.float32, np.float32),
}


def memory_at(address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """The caller's memory as bytes. It must live as long as the array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


def _sum(data: memoryview, seed: int) -> int:
    if xxhash is not None:
        return int(xxhash.xxh3_64_intdigest(data, seed)) & 0xFFFFFFFF
    return zlib.crc32(data, seed)


class Sections:
    """The sections of a chunk where they lie now: resident, or one of `lodged`. Bytes, one array each; None: not in memory."""

    def __init__(self, chunk: Any, lodged: Sequence[npt.NDArray[np.uint8] | None]) -> None:
        self.chunk = chunk
        self.numel = int(chunk["numel"])
        self.count = int(chunk["section_count"])
        self.itemsizes = [int(size) for size in chunk["itemsize"]]
        self.arrays: list[npt.NDArray[np.uint8] | None] = []
        for section in range(self.count):
            size = self.numel * self.itemsizes[section]
            memory = lodged[section]
            if chunk["section_at"][section] < 0:
                self.arrays.append(memory_at(int(chunk["section_ptr"][section]), size))
            else:
                self.arrays.append(None if memory is None else memory[:size])
        self.pieces = plan.piece_count(self.numel, int(chunk["piece_numel"]))
        self.sums: npt.NDArray[np.uint32] | None = None
        if chunk["sums_ptr"]:
            words = memory_at(int(chunk["sums_ptr"]), 4 * self.count * self.pieces).view(np.uint32)
            self.sums = words.reshape(self.count, self.pieces)

    def _piece_sum(self, section: int, piece: int) -> int:
        array = self.arrays[section]
        assert array is not None
        step = int(self.chunk["piece_numel"]) * self.itemsizes[section]
        seed = plan.sum_seed(int(self.chunk["generation"]), int(self.chunk["key"]), section, piece)
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
        for seg in segs:
            start, numel = int(seg["start"]), int(seg["numel"])
            if start < 0 or numel < 0 or start + numel > self.numel or not 0 <= seg["hyper"] < len(hypers):
                return False
        dtypes = _SECTION_DTYPES[int(self.chunk["format"])]
        typed = []
        for array, dtype in zip(self.arrays, dtypes, strict=True):
            assert array is not None, "an update has all sections in memory"
            typed.append(array.view(dtype))
        for seg in segs:
            start, numel = int(seg["start"]), int(seg["numel"])
            bf16 = seg["grad_dtype"] == plan.GradDtype.BF16
            grad = memory_at(int(seg["grad"]), numel * (2 if bf16 else 4)).view(
                np.uint16 if bf16 else np.float32
            )
            kernel(
                int(self.chunk["format"]),
                [section[start : start + numel] for section in typed],
                grad,
                hypers[int(seg["hyper"])],
            )
        return True
