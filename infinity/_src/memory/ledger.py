"""RAM budget of the process: one ledger that all its models share.

A model reserves the bytes of its plan, as much as it can use. A later model gets the bytes of its
policy's `ram` that earlier models leave, and does not change their plans. So give each further
model of a process a larger `ram` (the first model may hold 8 GiB, both together 16), or bound each
model by `resident` or ram="min".

An explicit `ram` is for one process, so for one rank. Without it the ranks of a machine divide the
memory that the machine (or the cgroup) leaves.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from infinity._src.base.sizes import format_size
from infinity.aio._memory_limits import cgroup_limits, memory_left_bytes

RAM_SHARE = 0.5
"""The default budget: this share of the memory that the cgroup or the machine leaves."""


class RamLedger:
    """Ledger of the bytes reserved for offloading in this process, by owner."""

    def __init__(self) -> None:
        self._reserved: dict[int, tuple[int, int]] = {}

    def reserve(self, owner: int, size_bytes: int, least_bytes: int | None = None) -> None:
        """Record that `owner` holds `size_bytes` in total, and needs at least `least_bytes`. This
        replaces the owner's former entry."""
        self._reserved[owner] = (
            size_bytes,
            size_bytes if least_bytes is None else min(least_bytes, size_bytes),
        )

    def release(self, owner: int) -> None:
        self._reserved.pop(owner, None)

    def others_bytes(self, owner: int) -> int:
        return sum(size for key, (size, _) in self._reserved.items() if key != owner)

    def others_spare_bytes(self, owner: int) -> int:
        """Add up the bytes that other owners hold beyond the least that they need."""
        return sum(size - least for key, (size, least) in self._reserved.items() if key != owner)


LEDGER = RamLedger()


def budget_bytes(ram: int | str | None, owner: int, default_bytes: int) -> int | None:
    """Derive the bytes that `owner` may hold under the policy's `ram`; None: as few as possible.

    Bytes of other models count against an explicit size, which is for the whole process.
    default_bytes: the size for `ram=None`: RAM_SHARE of the `fair_share` from before this model
    allocated memory.
    """
    if ram == "min":
        return None
    if ram is None:
        return default_bytes
    assert isinstance(ram, int)
    # Other models may hold more than a smaller `ram` that is given later.
    return max(ram - LEDGER.others_bytes(owner), 0)


def ranks_of_node() -> int:
    """Count the ranks of this machine, as torchrun says."""
    # LOCAL_WORLD_SIZE includes ranks that train no model with this one; they need memory, too.
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


@functools.lru_cache(maxsize=1)
def machine() -> str:
    """Return the boot id of the kernel, a name that only processes of this machine share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def memory_seen() -> dict[str, int]:
    """Read the bytes that each limit on this process leaves: the machine's limit, and the limit of
    each cgroup. All processes under one limit have the same key for it."""
    # Keyed by boot id: two "nodes" of a mesh on one machine have one memory.
    found = {f"{machine()} the machine": int(psutil.virtual_memory().available)}
    for limit in cgroup_limits():
        # The path of a cgroup is relative to a namespace.
        try:
            space = str(Path("/proc/self/ns/cgroup").readlink())
        except OSError:
            space = ""
        found[f"{machine()}{space} the limit of cgroup {limit.path}"] = limit.left_bytes
    return found


def describe_limit(name: str) -> str:
    """Describe one of the limits of `memory_seen`, with the size if this process knows it."""
    words = name.partition(" ")[2]
    sizes = {f"the limit of cgroup {each.path}": each.limit_bytes for each in cgroup_limits()}
    sizes["the machine"] = int(psutil.virtual_memory().total)
    return f"{words} ({format_size(sizes[words])})" if words in sizes else words


def fair_share(mine: Mapping[str, int], everyone: Sequence[Mapping[str, int]]) -> int:
    """Divide the bytes that each limit leaves by the ranks under it, and return the smallest part.

    mine, everyone: `memory_seen` of this rank, and of all ranks, from before any rank allocated.
    """
    parts = []
    for limit in mine:
        # Ranks read a limit at different times: the smallest value counts.
        seen = [row[limit] for row in everyone if limit in row]
        # torchrun's count includes ranks that train no model with this one, but use memory here.
        parts.append(min(seen) // max(len(seen), ranks_of_node()))
    return min(parts)


def describe_budget(ram: int | str | None) -> str:
    """Name the policy's `ram` for messages."""
    if ram is None:
        return f"default ({RAM_SHARE:.0%} of {format_size(memory_left_bytes())})"
    return ram if isinstance(ram, str) else format_size(ram)


def describe_others(ram: int | str | None, owner: int) -> str:
    """Describe the part of an explicit budget that other models hold, and how to free it; empty if
    they hold none."""
    held, spare = LEDGER.others_bytes(owner), LEDGER.others_spare_bytes(owner)
    if not isinstance(ram, int) or not held:
        return ""
    text = f", and other models of this process hold {format_size(held)} of it"
    if spare:
        text += (
            f", {format_size(spare)} of that to spare their drives "
            "(a smaller ram= or resident= of those models frees it)"
        )
    return f"{text}; close those that are done with (inf.handle(model).close())"


__all__ = [
    "LEDGER",
    "RAM_SHARE",
    "RamLedger",
    "budget_bytes",
    "describe_budget",
    "describe_limit",
    "describe_others",
    "fair_share",
    "machine",
    "memory_left_bytes",
    "memory_seen",
    "ranks_of_node",
]
