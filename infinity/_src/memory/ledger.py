"""The process's RAM budget: one ledger that all models of the process share.

A model reserves what its plan holds; the next model finds what is left of its own policy's `ram`. A model takes what it
can use, and keeps it: nothing is planned anew when another one comes. So models that share a process are offloaded with
a `ram` that grows (the first may hold 8 GiB, with the second the process may hold 16), or with `resident` or "min", which
bound what a model takes. An explicit `ram` is of one process, so of one rank; without it the ranks of a machine divide what
it (or the cgroup) leaves.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from infinity._src.sizes import format_size
from infinity.aio._memory_limits import cgroup_limits, memory_left_bytes

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


def budget_bytes(ram: int | str | None, owner: int, default_bytes: int) -> int | None:
    """The bytes that `owner` may hold under the policy's `ram`; None means the least that works.

    An explicit size is the process's; what other models hold counts against it. default_bytes: what `ram=None` stands for,
    RAM_SHARE of `fair_share`, which was left before this model took some.
    """
    if ram == "min":
        return None
    if ram is None:
        return default_bytes
    assert isinstance(ram, int)
    return max(ram - LEDGER.others_bytes(owner), 0)


def ranks_of_node() -> int:
    """Ranks that share this machine, as torchrun says."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


@functools.lru_cache(maxsize=1)
def machine() -> str:
    """What all processes of this machine, and no others, call it: its kernel's boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def memory_seen() -> dict[str, int]:
    """Bytes that each limit on this process leaves: the machine's memory, and each of its cgroups with a limit.

    The names are the same in all processes under the same limit. A path of a cgroup means something in its namespace only.
    """
    found = {f"{machine()} the machine": int(psutil.virtual_memory().available)}
    for limit in cgroup_limits():
        try:
            space = str(Path("/proc/self/ns/cgroup").readlink())
        except OSError:
            space = ""
        found[f"{machine()}{space} the limit of cgroup {limit.path}"] = limit.left_bytes
    return found


def fair_share(mine: Mapping[str, int], everyone: Sequence[Mapping[str, int]]) -> int:
    """A rank's part of what is left, in bytes: of each limit on it, as the least that a rank saw, divided by the ranks under it.

    `everyone`: what all ranks have seen before any took memory. Ranks that torchrun knows count, also where they do not meet.
    """
    parts = []
    for limit in mine:
        seen = [row[limit] for row in everyone if limit in row]
        parts.append(min(seen) // max(len(seen), ranks_of_node()))
    return min(parts)


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
    "fair_share",
    "machine",
    "memory_left_bytes",
    "memory_seen",
    "ranks_of_node",
]
