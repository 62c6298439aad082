"""The process's RAM budget: one ledger that all models of the process share.

A model reserves what its plan holds; the next model finds what is left. Ranks of a node divide what the machine (or
the cgroup) leaves.
"""

from __future__ import annotations

import os

from infinity.aio.memory_limits import memory_left_bytes
from infinity.sizes import format_size

RAM_SHARE = 0.5
"""The default budget: this share of the memory that the cgroup or the machine leaves."""


class RamLedger:
    """Bytes reserved for offloading in this process, by owner."""

    def __init__(self) -> None:
        self._reserved: dict[int, int] = {}

    def reserve(self, owner: int, size_bytes: int) -> None:
        """Record that `owner` holds `size_bytes` in total (replaces what it had)."""
        self._reserved[owner] = size_bytes

    def release(self, owner: int) -> None:
        """`owner` holds nothing any more."""
        self._reserved.pop(owner, None)

    def others_bytes(self, owner: int) -> int:
        """Bytes that owners other than `owner` hold."""
        return sum(size for key, size in self._reserved.items() if key != owner)


LEDGER = RamLedger()


def budget_bytes(ram: int | str | None, owner: int) -> int | None:
    """The bytes that `owner` may hold under the policy's `ram`; None means the least that works.

    An explicit size is the process's; what other models hold counts against it. The default is RAM_SHARE of what is
    left now, divided by the ranks of this node.
    """
    if ram == "min":
        return None
    if ram is None:
        return int(memory_left_bytes() * RAM_SHARE) // ranks_of_node()
    assert isinstance(ram, int)
    return max(ram - LEDGER.others_bytes(owner), 0)


def ranks_of_node() -> int:
    """Ranks that share this machine, as torchrun says."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def describe_budget(ram: int | str | None) -> str:
    """The policy's `ram` for people."""
    if ram is None:
        return f"default ({RAM_SHARE:.0%} of {format_size(memory_left_bytes())})"
    return ram if isinstance(ram, str) else format_size(ram)


__all__ = ["LEDGER", "RAM_SHARE", "RamLedger", "budget_bytes", "describe_budget", "memory_left_bytes", "ranks_of_node"]
