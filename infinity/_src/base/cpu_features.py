"""Instructions of this machine's CPU that decide how torch computes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

CPUINFO: Final = Path("/proc/cpuinfo")

BF16_INSTRUCTIONS: Final = ("avx512_bf16", "amx_bf16", "bf16")
"""Flags of CPUs that multiply bf16: two of x86, one of ARM. On other CPUs torch emulates the
products, or computes some of them in a plain loop.
"""


@functools.cache
def bf16_instructions() -> tuple[str, ...]:
    """Return the flags of this CPU for instructions that multiply bf16; () if there is none, or if
    the system does not list them.
    """
    try:
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        # x86 has the first key, ARM the second. All processors of a machine have the same flags.
        if key.strip() in {"flags", "Features"}:
            flags = frozenset(value.split())
            return tuple(name for name in BF16_INSTRUCTIONS if name in flags)
    return ()
