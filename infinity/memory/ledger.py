"""The process's RAM budget: one ledger that all models of the process share.

A model reserves what its plan holds; the next model finds what is left of its own policy's `ram`. A model takes what it
can use, and keeps it: nothing is planned anew when another one comes. So models that share a process are offloaded with
a `ram` that grows (the first may hold 8 GiB, with the second the process may hold 16), or with `resident` or "min", which
bound what a model takes. Ranks of a node divide what the machine (or the cgroup) leaves.
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
        self._reserved: dict[int, tuple[int, int]] = {}

    def reserve(self, owner: int, size_bytes: int, least_bytes: int | None = None) -> None:
        """Record that `owner` holds `size_bytes` in total (replaces what it had), and could do with `least_bytes`."""
        self._reserved[owner] = (size_bytes, size_bytes if least_bytes is None else min(least_bytes, size_bytes))

    def release(self, owner: int) -> None:
        """`owner` holds nothing any more."""
        self._reserved.pop(owner, None)

    def others_bytes(self, owner: int) -> int:
        """Bytes that owners other than `owner` hold."""
        return sum(size for key, (size, _) in self._reserved.items() if key != owner)

    def others_spare_bytes(self, owner: int) -> int:
        """Bytes that they hold beyond the least that they need."""
        return sum(size - least for key, (size, least) in self._reserved.items() if key != owner)


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


def describe_others(ram: int | str | None, owner: int) -> str:
    """What other models of the process hold of an explicit budget, and what to do about it; empty if nothing."""
    held, spare = LEDGER.others_bytes(owner), LEDGER.others_spare_bytes(owner)
    if not isinstance(ram, int) or not held:
        return ""
    told = f", and other models of this process hold {format_size(held)} of it"
    if spare:
        told += f", {format_size(spare)} of that to spare their drives (a smaller ram or resident= of theirs gives that back)"
    return f"{told}; close those that are done with (inf.handle(model).close())"


__all__ = [
    "LEDGER",
    "RAM_SHARE",
    "RamLedger",
    "budget_bytes",
    "describe_budget",
    "describe_others",
    "memory_left_bytes",
    "ranks_of_node",
]
