"""Peak of this process's resident memory, from /proc."""

from __future__ import annotations

from pathlib import Path


def peak_rss_bytes() -> int:
    """Return the peak of resident memory, in bytes, since the process began or `reset_peak_rss`.
    Raises: OSError if the kernel does not report it.
    """
    for line in Path("/proc/self/status").read_text("ascii", "replace").splitlines():
        if line.startswith("VmHWM:"):
            # "kB" of proc(5) is 1024 bytes.
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no line VmHWM")


def reset_peak_rss() -> bool:
    """Reset the peak to the current resident memory. Returns False if the kernel forbids it."""
    try:
        # Writing 5 resets the peak and nothing else (proc(5)).
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True
