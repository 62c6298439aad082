"""Which file system a path lies on."""

from __future__ import annotations

import os
from pathlib import Path

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})


def file_system_type(path: str | os.PathLike[str]) -> str:
    """Type of the file system that holds `path` ("ext4", "tmpfs" ...), "" when /proc does not tell."""
    device = Path(path).stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    kind = ""
    try:
        with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                before, _, after = line.partition(" - ")
                if before.split()[2] == wanted and after:
                    kind = after.split()[0]
    except OSError:
        return ""
    return kind
