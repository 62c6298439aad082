"""Available memory of this process, limited by the machine and by its cgroups (version 1 or 2).

The kernel sends SIGKILL, without a message, to a process that exceeds its cgroup's limit. So a
slab's size is checked before its pages are touched.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from infinity._src.base.sizes import format_size

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
_UNLIMITED_BYTES = 1 << 60
"""Version 1 represents "no limit" as a number near 2^63."""


@dataclass(frozen=True)
class CgroupLimit:
    """A memory limit of this process. `reclaimable_bytes`: page cache in `used_bytes`, which the
    kernel drops under pressure.
    """

    path: str
    limit_bytes: int
    used_bytes: int
    reclaimable_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        """Bytes that can be allocated before the kernel kills a process of the cgroup."""
        # The page cache counts as used, but the kernel drops it before it kills a process.
        return max(self.limit_bytes - max(self.used_bytes - self.reclaimable_bytes, 0), 0)


def cgroup_limits(*, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> list[CgroupLimit]:
    """Return the limits set on this process's cgroup and its ancestors. Tests pass other roots."""
    found = []
    for line in _text(f"{proc}/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        # The line of version 2 has no controllers.
        if controllers == "":
            # If version 1 is mounted, too, version 2 is in `unified`.
            unified = cgroups / "unified"
            root = unified if (unified / "cgroup.controllers").exists() else cgroups
            # Page cache: the active and inactive file pages of memory.stat.
            names = ("memory.max", "memory.current", ("inactive_file", "active_file"))
        elif "memory" in controllers.split(","):
            # Version 1 has a tree for each controller.
            root = cgroups / "memory"
            names = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                ("total_inactive_file", "total_active_file"),
            )
        else:
            continue
        # The limits of ancestors apply, too. In a container the path may be the host's path, which
        # does not exist here.
        folder = root / path.lstrip("/")
        for place in map(str, (folder, *folder.parents)):
            # No limit: "max" (version 2), or at least _UNLIMITED_BYTES (version 1).
            limit = _number(f"{place}/{names[0]}")
            if limit is not None and limit < _UNLIMITED_BYTES:
                used = _number(f"{place}/{names[1]}")
                if used is not None:
                    cached = _sum_of(f"{place}/memory.stat", names[2])
                    found.append(CgroupLimit(place, limit, used, cached))
            # Stop at the mount point.
            if place == str(root):
                break
    return found


def cgroup_limit_bytes() -> int | None:
    """Return the tightest memory limit of this process's cgroups; None without one."""
    return min((limit.limit_bytes for limit in cgroup_limits()), default=None)


def memory_left_bytes() -> int:
    """Available memory in bytes, limited by the machine and this process's cgroups."""
    return _left()[0]


def check_slab(size_bytes: int) -> None:
    """Raise MemoryError if touching `size_bytes` more would exceed the available memory.

    The error names the limit.
    """
    left, of = _left()
    # Before the pages are touched: beyond a cgroup's limit the kernel sends SIGKILL.
    if size_bytes > left:
        raise MemoryError(
            f"a slab of {format_size(size_bytes)} does not fit into memory: {of} leaves "
            f"{format_size(left)}, and the kernel would end the process; "
            f"{format_size(size_bytes - left)} are missing. Choose a smaller Policy.ram"
        )


def _left() -> tuple[int, str]:
    # `available`, not `free`: it includes reclaimable page cache.
    left, of = int(psutil.virtual_memory().available), "the machine"
    for limit in cgroup_limits():
        # The tightest limit decides, and the error names it.
        if limit.left_bytes < left:
            left, of = (
                limit.left_bytes,
                f"the limit of cgroup {limit.path} ({format_size(limit.limit_bytes)})",
            )
    return left, of


def _text(path: str) -> str:
    """Read a small file of the kernel; "" if it cannot be read. By os.read, several times as fast
    as pathlib: set-up reads dozens of such files."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(file, 1 << 16).decode("utf-8", errors="replace")
    except OSError:
        return ""
    finally:
        os.close(file)


def _number(path: str) -> int | None:
    text = _text(path).strip()
    # "max": no limit.
    return int(text) if text.isdecimal() else None


def _sum_of(path: str, names: tuple[str, ...]) -> int:
    """Sum the named lines of a cgroup's memory.stat; 0 if it cannot be read."""
    pairs = (line.split() for line in _text(path).splitlines())
    return sum(
        int(pair[1])
        for pair in pairs
        if len(pair) == 2 and pair[0] in names and pair[1].isdecimal()
    )
