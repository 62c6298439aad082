"""Every instruction set gives the bits of infinity/_src/kernels/comm_codec.py, writes what it
should, and nothing beside it."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from infinity._src.cabi import native
from infinity._src.kernels import comm_codec as wire
from infinity._src.kernels.comm_codec import decode_sum, encode, sum_in_order
from infinity._src.kernels.quantize import DTYPES
from infinity._src.kernels.quantized import wire_bytes
from infinity._src.kernels.random_bits import rounding_key
from tests.unit.native.states import random_bits as odd_bits

KEY = rounding_key(1, 2, "weight")
NUMELS = (1, 31, 64, 65, 1023, 1024, 1025, 5000)
GUARD = 64
"""Bytes before and after what a kernel may write."""


def values_of(numel: int, dtype: torch.dtype, seed: int, *, spread: float = 40) -> torch.Tensor:
    """[numel] with special values in the first half, so that most groups of the second are
    finite."""
    bits = odd_bits(np.random.default_rng(seed), numel, spread)
    plain = np.random.default_rng(seed + 1).standard_normal(numel).astype(np.float32)
    x = np.where(np.arange(numel) < numel // 2, bits.view(np.float32), plain)
    return torch.from_numpy(x).to(dtype)


def guarded(numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[numel] that begins a cache line, and all of the bytes around it."""
    size_bytes = numel * torch.empty(0, dtype=dtype).element_size()
    room = torch.full((size_bytes + 2 * GUARD,), 0xA5, dtype=torch.uint8)
    return room[GUARD : GUARD + size_bytes].view(dtype), room


def assert_guards_hold(room: torch.Tensor) -> None:
    assert bool((room[:GUARD] == 0xA5).all())
    assert bool((room[-GUARD:] == 0xA5).all())


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("key", [None, KEY])
def test_encoding(isa: str, dtype: torch.dtype, bits: int, key: int | None) -> None:
    for numel in NUMELS:
        for group_numel, error_dtype in ((64, None), (256, torch.bfloat16), (1024, torch.float32)):
            values = values_of(numel, dtype, numel)
            error = (
                None if error_dtype is None else values_of(numel, error_dtype, numel + 7, spread=60)
            )
            ours, room = guarded(wire_bytes(numel, bits, group_numel), torch.uint8)
            left, left_room = guarded(numel, error_dtype or torch.float32)
            if error is not None:
                left.copy_(error)
            encode(
                values, ours, bits=bits, group_numel=group_numel, key=key, element=2**32 - 700,
                error=None if error is None else left,
            )  # fmt: skip
            expected = torch.empty_like(ours)
            wire.encode_torch(values, expected, bits, group_numel, key, 2**32 - 700, error)
            assert same(ours, expected)
            assert error is None or same(left, error)
            assert_guards_hold(room)
            assert_guards_hold(left_room)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_sums_of_wires(isa: str, dtype: torch.dtype, bits: int) -> None:
    for numel in NUMELS:
        for group_numel, count, divisor in ((64, 1, 1), (128, 2, 2), (256, 3, 3), (1024, 7, 1)):
            size_bytes = wire_bytes(numel, bits, group_numel)
            generator = torch.Generator().manual_seed(numel)
            wires = [torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)]
            for seed in range(count - 1):
                wires.append(torch.empty(size_bytes, dtype=torch.uint8))
                encode(values_of(numel, dtype, seed), wires[-1], bits=bits, group_numel=group_numel)
            out, room = guarded(numel, dtype)
            decode_sum(wires, out, bits=bits, group_numel=group_numel, divisor=divisor)
            expected = torch.empty_like(out)
            wire.decode_sum_torch(wires, expected, bits, group_numel, divisor)
            assert same(out, expected)
            assert_guards_hold(room)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_sums_of_pieces(isa: str, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for numel in NUMELS:
        for count, divisor in ((1, 1), (2, 2), (3, 3), (8, 2**24)):
            # An odd start: pieces of a receive buffer begin anywhere.
            pieces = [values_of(numel + 1, dtype, seed)[1:] for seed in range(count)]
            out, room = guarded(numel, out_dtype)
            sum_in_order(pieces, out, divisor=divisor)
            expected = torch.empty_like(out)
            wire.sum_in_order_torch(pieces, expected, divisor)
            assert same(out, expected)
            assert_guards_hold(room)


def test_empty_tensors_have_no_address(isa: str) -> None:
    """No byte is read or written; otherwise the sanitizers of `make asan` report it."""
    nothing, buffer = torch.zeros(0), torch.zeros(0, dtype=torch.uint8)
    assert nothing.data_ptr() == buffer.data_ptr() == 0
    encode(nothing, buffer, bits=4, group_numel=64, key=KEY, error=nothing.clone())
    decode_sum([buffer, buffer], nothing, bits=4, group_numel=64, divisor=2)
    sum_in_order([nothing, nothing], nothing, divisor=2)


def test_denormals_are_kept_in_a_thread_that_flushes_them(isa: str) -> None:
    pieces = [torch.full((100,), 2.0**-140), torch.full((100,), 2.0**-141)]
    tiny = torch.full((100,), 2.0**-130)
    out, left, encoded = (
        torch.empty(100),
        tiny.clone(),
        torch.empty(wire_bytes(100, 8, 64), dtype=torch.uint8),
    )

    def flushing() -> None:
        assert torch.set_flush_denormal(True)  # of this thread, which ends with it
        sum_in_order(pieces, out, divisor=2)
        encode(tiny, encoded, bits=8, group_numel=64, error=left)

    thread = threading.Thread(target=flushing)
    thread.start()
    thread.join()
    assert out.tolist() == [2.0**-141 + 2.0**-142] * 100
    assert (
        left.tolist() == [2.0**-129] * 100
    )  # a quarter of the least scale: the code is zero, and all of it is left


def test_the_kernels_are_those_of_the_instruction_set_that_is_chosen(isa: str) -> None:
    assert native.ISA_NAMES[native.lib.inf_isa_index()] == isa == native.isa()
