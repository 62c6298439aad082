"""CRC-32C: known vectors, and every implementation against the portable one."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.cabi import native
from infinity._src.cabi.native import ffi, lib
from native.build_native import compiler_command

NAMES = ["portable", "streams", "clmul", "vpclmul256", "vpclmul"]

# RFC 3720 appendix B.4, and the check value of the CRC catalogue.
VECTORS = [
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(reversed(range(32))), 0x113FDB5C),
]


def crc_with(variant: int, data: bytes | memoryview | np.ndarray, seed: int = 0) -> int | None:
    """The checksum by one implementation; None where the machine lacks it."""
    ok = ffi.new("int32_t *")
    view = ffi.from_buffer(data)
    value = lib.inf_crc32c_with(variant, seed, view, len(view), ok)
    return int(value) if ok[0] else None


@pytest.mark.parametrize("variant", range(len(NAMES)), ids=NAMES)
@pytest.mark.parametrize(("data", "expected"), VECTORS)
def test_known_vectors(variant: int, data: bytes, expected: int) -> None:
    value = crc_with(variant, data)
    if value is None:
        pytest.skip(f"this machine has no {NAMES[variant]}")
    assert value == expected
    assert native.crc32c(data) == expected


POOL = np.random.default_rng(7).integers(0, 256, 1 << 17, dtype=np.uint8)
# Around every place where an implementation changes its step: words, short and long blocks, pieces.
LENGTHS = st.one_of(
    st.integers(0, 600),
    st.sampled_from(
        [768, 1632, 4096, 8096, 8160, 8184, 16_192, 16_320, 16_368, 24_288, 32_640, 32_768, 98_304]
    ).flatmap(lambda n: st.integers(n - 70, n + 70)),
    st.integers(0, 1 << 16),
)


@settings(max_examples=300, deadline=None)
@given(LENGTHS, st.integers(0, 80), st.integers(0, 2**32 - 1))
def test_all_implementations_agree_at_any_length_offset_and_seed(
    length: int, offset: int, seed: int
) -> None:
    data = POOL[offset : offset + length]
    expected = crc_with(0, data, seed)
    assert native.crc32c(data, seed) == expected
    for variant in range(1, len(NAMES)):
        assert crc_with(variant, data, seed) in (None, expected), NAMES[variant]


@settings(max_examples=100, deadline=None)
@given(LENGTHS, LENGTHS)
def test_checksums_chain(first: int, second: int) -> None:
    data = POOL[: first + second] if first + second <= POOL.size else POOL
    first = min(first, data.size)
    assert native.crc32c(data[first:], native.crc32c(data[:first])) == native.crc32c(data)


def test_wide_folding_agrees_where_the_instruction_is_emulated(tmp_path: Path) -> None:
    """The arithmetic of the wide versions, on machines that have AVX2 but not VPCLMULQDQ."""
    if "avx2" not in native.isas():
        pytest.skip("needs AVX2")
    wide = [3, 4] if "avx512" in native.isas() else [3]
    source = Path(__file__).parents[3] / "native" / "kernels" / "crc32c.c"
    library = tmp_path / "crc32c_emulated.so"
    subprocess.run(
        [
            *compiler_command(),
            "-O2",
            "-std=gnu11",
            "-shared",
            "-fPIC",
            "-DINF_EMULATE_VPCLMUL",
            f"-I{source.parent.parent}",
            str(source),
            "-o",
            str(library),
        ],
        check=True,
    )
    function = ctypes.CDLL(str(library)).inf_crc32c_with
    function.restype = ctypes.c_uint32
    function.argtypes = [
        ctypes.c_int32,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_int32),
    ]
    ok = ctypes.c_int32()
    for length in [*range(50, 700), 8096, 8184, 16_384, 32_768, 32_769, 70_001]:
        expected = crc_with(0, POOL[length % 31 : length % 31 + length], 99)
        for variant in wide:
            value = function(variant, 99, POOL.ctypes.data + length % 31, length, ctypes.byref(ok))
            assert ok.value == 1
            assert value == expected, (NAMES[variant], length)


def test_the_best_implementation_that_the_machine_has_is_in_use() -> None:
    present = [name for variant, name in enumerate(NAMES) if crc_with(variant, b"x") is not None]
    assert native.crc32c_name() == present[-1]
