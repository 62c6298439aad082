"""Random bits of infinity/_src/kernels/random_bits.py inside Triton kernels, and floats rounded on
their bits.

Integer arithmetic only, with the same bits on every device, in the interpreter and in the C
kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

NAN_BITS = tl.constexpr(0x7FC00000)
INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def mix64(word: tl.tensor) -> tl.tensor:
    """`random_bits.mix64` of a uint64 scalar."""
    # The constants of splitmix64; native/kernels/float_bits.h and random_bits.py have the same.
    word = word + tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    word = (word ^ (word >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    word = (word ^ (word >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return word ^ (word >> 31)


@triton.jit
def random_bits(key: tl.tensor, first: tl.tensor, index: tl.tensor) -> tl.tensor:
    """uint32 like `index`: the bits of the elements first + index.

    key: uint64 scalar; first: int64 scalar, not negative; index: int32, 0 to 2^31.
    """
    high = (first >> 32).to(tl.uint64)
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    mixed = mix64(key ^ (high * golden))
    # The upper half of an element's number is mixed into the key. It changes at most once within a
    # block, so each element uses one of two keys.
    mixed_next = mix64(key ^ ((high + 1) * golden))
    low = first.to(tl.uint32) + index.to(tl.uint32)
    over = low < first.to(tl.uint32)  # it wrapped: the element is past the multiple of 2^32
    h = low + tl.where(over, mixed_next.to(tl.uint32), mixed.to(tl.uint32))
    h = h ^ (h >> 16)
    h = h * tl.full((), 0x7FEB352D, tl.uint32)
    h = h ^ (h >> 15)
    h = h ^ tl.where(over, (mixed_next >> 32).to(tl.uint32), (mixed >> 32).to(tl.uint32))
    h = h * tl.full((), 0x846CA68B, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def bits_of(value: tl.tensor) -> tl.tensor:
    """uint32: the bits of fp32."""
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def float_of(bits: tl.tensor) -> tl.tensor:
    """fp32 with these 32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def canonical_bits(value: tl.tensor) -> tl.tensor:
    """uint32: the bits of fp32, every NaN as 0x7FC00000."""
    bits = bits_of(value)
    # NaN payloads differ between devices: one pattern for all.
    return tl.where((bits & 0x7FFFFFFF) > INFINITY_BITS, NAN_BITS, bits).to(tl.uint32)


@triton.jit
def bf16_bits(value: tl.tensor) -> tl.tensor:
    """int16 with the bits of fp32 rounded to bf16, to nearest, ties to even; NaN is 0x7FC0."""
    bits = canonical_bits(value)
    # Add just under half of the last kept bit, plus that bit: to nearest, ties to even.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def float_of_bf16(bits: tl.tensor) -> tl.tensor:
    """fp32 from int16 with the bits of bf16."""
    return float_of(bits.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def load_float(pointer: tl.tensor, mask: tl.tensor, BF16: tl.constexpr) -> tl.tensor:
    """Load fp32 from fp32, fp16, or int16 with bits of bf16 (BF16); zero outside of `mask`."""
    raw = tl.load(pointer, mask=mask, other=0)
    if BF16:
        value = float_of_bf16(raw)
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def store_float(pointer: tl.tensor, value: tl.tensor, mask: tl.tensor, BF16: tl.constexpr) -> None:
    """Store fp32 as the pointer's dtype, to nearest, ties to even.

    A value too large for fp16 becomes infinity, as in torch.
    """
    if BF16:
        tl.store(pointer, bf16_bits(value), mask=mask)
    else:
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask=mask)
