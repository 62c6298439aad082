"""Memory that this process may still take: the machine's, and what its cgroups (version 1 or 2)
allow.

The kernel ends a process that exceeds its cgroup with SIGKILL, in silence. So a slab is checked
before it is touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from infinity._src.base.sizes import format_size

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
_UNLIMITED_BYTES = 1 << 60
"""Version 1 writes "no limit" as a number near 2^63."""


@dataclass(frozen=True)
class CgroupLimit:
    """A memory limit that binds this process. `reclaimable_bytes`: page cache in `used_bytes`,
    which yields to need.
    """

    path: str
    limit_bytes: int
    used_bytes: int
    reclaimable_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        """Bytes that may be taken before the kernel has to end a process."""
        # The page cache counts as used, and the kernel drops it before it ends a process.
        return max(self.limit_bytes - max(self.used_bytes - self.reclaimable_bytes, 0), 0)


def cgroup_limits(*, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> list[CgroupLimit]:
    """Read the limits of the cgroups from this process's up to the root, where one is set. The
    roots may be copies (tests).
    """
    found = []
    try:
        lines = (
            (proc / "self" / "cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
        )
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # An empty list of controllers marks the line of version 2.
        if controllers == "":
            # Beside version 1 the unified hierarchy lies in a folder of its own, if anywhere.
            unified = cgroups / "unified"
            root = unified if (unified / "cgroup.controllers").exists() else cgroups
            # Page cache is what memory.stat counts as file pages, active or not.
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
        # A limit of any ancestor binds too. In a container the path may be the host's, and missing
        # here.
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            limit, used = _number(place / names[0]), _number(place / names[1])
            # "max" (version 2) is no number, and _UNLIMITED_BYTES stands for none in version 1.
            if limit is not None and used is not None and limit < _UNLIMITED_BYTES:
                found.append(
                    CgroupLimit(str(place), limit, used, _sum_of(place / "memory.stat", names[2]))
                )
            # Above the mount point there are no limits of this hierarchy.
            if place == root:
                break
    return found


def cgroup_limit_bytes() -> int | None:
    """Return the tightest memory limit of this process's cgroups; None without one."""
    return min((limit.limit_bytes for limit in cgroup_limits()), default=None)


def memory_left_bytes() -> int:
    """Memory that the machine and this process's cgroups leave."""
    return _left()[0]


def check_slab(size_bytes: int) -> None:
    """Raise MemoryError when `size_bytes` more of touched memory would exceed what is left.

    The error names the limit that leaves too little.
    """
    left, of = _left()
    # Before the pages are touched: past a cgroup's limit the kernel sends SIGKILL, not an error.
    if size_bytes > left:
        raise MemoryError(
            f"a slab of {format_size(size_bytes)} does not fit into memory: {of} leaves "
            f"{format_size(left)}, and the kernel would end the process; "
            f"{format_size(size_bytes - left)} are missing. Choose a smaller Policy.ram"
        )


def _left() -> tuple[int, str]:
    # `available`, not `free`: it counts page cache that the kernel would give.
    left, of = int(psutil.virtual_memory().available), "the machine"
    for limit in cgroup_limits():
        # Every limit binds, so the tightest decides, and it is the one that the error names.
        if limit.left_bytes < left:
            left, of = (
                limit.left_bytes,
                f"the limit of cgroup {limit.path} ({format_size(limit.limit_bytes)})",
            )
    return left, of


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    # "max" is no number: no limit.
    return int(text) if text.isdigit() else None


def _sum_of(path: Path, names: tuple[str, ...]) -> int:
    """The sum of the named lines of a cgroup's memory.stat, 0 where it cannot be read."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    pairs = (line.split() for line in lines)
    return sum(
        int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in names and pair[1].isdigit()
    )
