"""Values in quantized groups: what there is of them, and the record (`quantize` makes it)."""

from __future__ import annotations

import dataclasses

import torch

GROUP_NUMEL_LEAST, GROUP_NUMEL_MOST = 64, 1024
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
VALUE_MOST = float.fromhex("0x1.fep127")
"""The largest bf16: no dequantized value is larger."""
ALIGN_BYTES = 64
"""Codes and scales are padded to whole multiples of it."""


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Values in groups.

    codes: [numel] int8 (symmetric) or uint8; int4: uint8 [ceil(numel / 2)], the element with the
    even number in the low half, as two's complement when symmetric. scales: bf16 [groups]. zeros:
    uint8 [groups], or None when symmetric. shape, dtype: of the values before. group_numel:
    elements per group.
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
        """True where zero is the code 0 of every group."""
        return self.zeros is None

    @property
    def numel(self) -> int:
        """Elements."""
        return self.shape.numel()

    @property
    def size_bytes(self) -> int:
        """Bytes of codes, scales and zeros, which travel together."""
        tensors = [self.codes, self.scales] + ([] if self.zeros is None else [self.zeros])
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_groups(bits: int, group_numel: int) -> None:
    """Raise ValueError for bits or groups that are not known."""
    if bits not in (4, 8):
        raise ValueError(f"bits={bits} is not known: use 8 or 4")
    if not GROUP_NUMEL_LEAST <= group_numel <= GROUP_NUMEL_MOST or group_numel & (group_numel - 1):
        raise ValueError(
            f"group_numel={group_numel}: use a power of two from {GROUP_NUMEL_LEAST} to "
            f"{GROUP_NUMEL_MOST}"
        )


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
