"""Parsing and formatting of sizes in bytes."""

from __future__ import annotations

import math
import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_FACTORS = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 1000,
    "m": MIB, "mib": MIB, "mb": 1000**2,
    "g": GIB, "gib": GIB, "gb": 1000**3,
    "t": 1 << 40, "tib": 1 << 40, "tb": 1000**4,
}  # fmt: skip
_PATTERN = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([A-Za-z]*)\s*$")


def parse_size(value: float | str) -> int:
    """Return the bytes of a number, or of text such as "64GiB", "512M" (binary) or "10 GB"
    (decimal).

    Raises: ValueError naming a value that is invalid or negative.
    """
    if isinstance(value, bool):
        raise ValueError(
            f"{value!r} is not a size; write an integer of bytes or text such as '64GiB'"
        )
    if isinstance(value, (int, float)):
        if value < 0 or value != value or value == float("inf"):
            raise ValueError(f"a size cannot be {value!r}")
        return int(value)
    match = _PATTERN.match(value) if isinstance(value, str) else None
    if match is None or match.group(2).lower() not in _FACTORS:
        raise ValueError(
            f"{value!r} is not a size; write an integer of bytes or text such as '64GiB' or '500MB'"
        )
    return int(float(match.group(1)) * _FACTORS[match.group(2).lower()])


def format_size(size_bytes: float) -> str:
    """Format a size in binary units with at most one decimal: "1.5 GiB"."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return (
                f"{size:.0f} {unit}" if unit == "B" or size == int(size) else f"{size:.1f} {unit}"
            )
        size /= 1024
    return f"{size:.1f} TiB"


def round_size(size_bytes: float) -> str:
    """Format as `format_size`, but rounded up."""
    size_bytes = math.ceil(size_bytes)
    for unit, factor in (("B", 1), ("KiB", KIB), ("MiB", MIB), ("GiB", GIB), ("TiB", 1 << 40)):
        tenths = -(-size_bytes * 10 // factor)
        if tenths < 10240 or unit == "TiB":
            break
    return f"{tenths // 10} {unit}" if tenths % 10 == 0 else f"{tenths // 10}.{tenths % 10} {unit}"


def round_up(value: int, multiple: int) -> int:
    """Round `value` up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple
