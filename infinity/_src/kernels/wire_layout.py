"""Bytes of a wire, the buffer of codes and scales that a collective carries
(infinity/_src/kernels/comm_codec.py draws it)."""

from __future__ import annotations

from infinity._src.kernels.quantized import check_groups

ALIGN_BYTES = 64
"""Codes and scales are padded to whole multiples of it."""


def wire_bytes(numel: int, bits: int, group_numel: int) -> int:
    """Bytes of a wire of `numel` values.

    Raises: ValueError for bits or groups that are not known.
    """
    check_groups(bits, group_numel)
    if numel < 0:
        raise ValueError(f"numel={numel}: a number of values is not negative")
    return codes_bytes(numel, bits) + _aligned(-(-numel // group_numel) * 2)


def codes_bytes(numel: int, bits: int) -> int:
    """Bytes of the codes with their padding: the offset of the scales."""
    return _aligned(numel if bits == 8 else -(-numel // 2))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
