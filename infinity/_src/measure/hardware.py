"""Hardware of a measurement: the machine, its drives, and directories to measure in."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from infinity._src.base.paths import absolute
from infinity.aio._file_system import file_system_type

# Swap files on these file systems would take memory instead of saving it.
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})


def machine() -> dict[str, Any]:
    """Return name, CPU, cores, memory, kernel and Python of this machine, ready for JSON."""
    huge_pages = _read(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    return {
        "host": platform.node(),
        "cpu": cpu_model(),
        # Cores of this process: a container may have fewer than the machine.
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        # The kernel lists all choices, with the current one in brackets.
        "huge_pages": huge_pages.partition("[")[2].partition("]")[0],
    }


def cpu_model() -> str:
    """Return the CPU's name from /proc/cpuinfo, else the architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.machine()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        # x86 has "model name", some ARM boards "Model", other machines neither.
        if key.strip() in {"model name", "Model"}:
            return value.strip()
    return platform.machine()


def drive(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe the file system and block device under `directory`. Fields that sysfs lacks are ""
    or None.
    """
    device = Path(directory).stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    # A partition has no `queue` directory: its parent directory is the drive.
    folders = [block.resolve(), block.resolve().parent] if block.exists() else []
    whole = next((folder for folder in folders if (folder / "queue").is_dir()), None)
    model, rotational, scheduler = "", None, ""
    nr_requests, max_sectors_kb = None, None
    if whole is not None:
        model = _read(whole / "device" / "model")
        spins = _read(whole / "queue" / "rotational")
        rotational = spins == "1" if spins else None
        scheduler = _read(whole / "queue" / "scheduler").partition("[")[2].partition("]")[0]
        nr_requests = _number(whole / "queue" / "nr_requests")
        max_sectors_kb = _number(whole / "queue" / "max_sectors_kb")
    return {
        "path": os.fspath(directory),
        "file_system": file_system_type(directory),
        "device": whole.name if whole is not None else "",
        "model": model,
        "rotational": rotational,
        "scheduler": scheduler,
        "nr_requests": nr_requests,
        "max_sectors_kb": max_sectors_kb,
        "free_bytes": shutil.disk_usage(directory).free,
    }


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdigit() else None


def default_directories(free_bytes_min: int = 1 << 28) -> list[Path]:
    """Choose directories when none is named: $INFINITY_NVME_DIR (several, separated by ':'), else
    the first of the user's cache directory, the current directory and /var/tmp that is on a drive,
    writable, and has `free_bytes_min` bytes free.

    Raises: ValueError if there is none.
    """
    named = os.environ.get("INFINITY_NVME_DIR")
    if named:
        return [absolute(part, "$INFINITY_NVME_DIR") for part in named.split(os.pathsep) if part]
    # An empty variable counts as unset, by the XDG specification.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    temporary = Path("/var/tmp")  # noqa: S108 - swap files there are nameless and private
    candidates = [cache, absolute(".", "directory"), temporary]
    for candidate in candidates:
        if _suitable(candidate, free_bytes_min):
            return [candidate]
    tried = ", ".join(str(candidate) for candidate in candidates)
    raise ValueError(
        f"no directory on a drive with enough free space among {tried}; name one with --dir"
    )


def _suitable(path: Path, free_bytes_min: int) -> bool:
    return (
        path.is_dir()
        and os.access(path, os.W_OK | os.X_OK)
        and file_system_type(path) not in _IN_MEMORY
        and shutil.disk_usage(path).free >= free_bytes_min
    )


def describe(drives: Sequence[dict[str, Any]]) -> str:
    """Format drives in one line: "/mnt/nvme0 (ext4 on nvme0n1, Samsung ...)"."""
    parts = []
    for found in drives:
        device = " ".join(part for part in (found["device"], found["model"]) if part)
        parts.append(
            f"{found['path']} "
            f"({found['file_system'] or 'unknown file system'}{' on ' + device if device else ''})"
        )
    return ", ".join(parts)
