"""Values quantized in groups: the record that `quantize` returns, and sizes."""

from __future__ import annotations

import dataclasses

import torch

GROUP_NUMEL_LEAST, GROUP_NUMEL_MOST = 64, 1024
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VALUE_MOST = float.fromhex("0x1.fep127")
"""The largest bf16, which bounds dequantized values."""
ALIGN_BYTES = 64
"""Codes and scales are padded to multiples of this."""


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Values quantized in groups.

    codes: [numel] int8 (symmetric) or uint8; int4: uint8 [ceil(numel / 2)], even elements in the
    low half, as two's complement when symmetric. scales: bf16 [groups]. zeros: uint8 [groups] zero
    points, or None when symmetric. shape, dtype: of the original values. group_numel: elements per
    group.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    bits: int
    group_numel: int

    @property
    def symmetric(self) -> bool:
        """True if code 0 represents zero in every group (no zero points)."""
        return self.zeros is None

    @property
    def numel(self) -> int:
        """Number of values."""
        return self.shape.numel()

    @property
    def size_bytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        tensors = [self.codes, self.scales] + ([] if self.zeros is None else [self.zeros])
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_groups(bits: int, group_numel: int) -> None:
    """Raise ValueError for unsupported bits or group sizes."""
    if bits not in (4, 8):
        raise ValueError(f"bits={bits} is not known: use 8 or 4")
    if not GROUP_NUMEL_LEAST <= group_numel <= GROUP_NUMEL_MOST or group_numel & (group_numel - 1):
        raise ValueError(
            f"group_numel={group_numel}: use a power of two from {GROUP_NUMEL_LEAST} to "
            f"{GROUP_NUMEL_MOST}"
        )


def wire_bytes(numel: int, bits: int, group_numel: int) -> int:
    """Return the bytes of the encoding of `numel` values by `comm_codec`.

    Raises: ValueError for unsupported bits or group sizes, or a negative `numel`.
    """
    check_groups(bits, group_numel)
    if numel < 0:
        raise ValueError(f"numel={numel}: a number of values is not negative")
    return codes_bytes(numel, bits) + _aligned(-(-numel // group_numel) * 2)


def codes_bytes(numel: int, bits: int) -> int:
    """Return the bytes of the padded codes, which are the offset of the scales in an encoded buffer
    (a wire, see comm_codec.py)."""
    return _aligned(numel if bits == 8 else -(-numel // 2))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
