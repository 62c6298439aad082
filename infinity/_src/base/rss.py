"""Peak of this process's resident memory, from /proc."""

from __future__ import annotations

from pathlib import Path


def peak_rss_bytes() -> int:
    """Return the peak of resident memory, in bytes, since the process began, or since
    `reset_peak_rss`. Raises: OSError where the kernel does not count it.
    """
    for line in Path("/proc/self/status").read_text("ascii", "replace").splitlines():
        if line.startswith("VmHWM:"):
            # proc(5) gives kB, and means 1024 bytes.
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no line VmHWM")


def reset_peak_rss() -> bool:
    """Reset the peak to the memory that is resident now; False where the kernel does not allow it.
    """
    try:
        # proc(5): 5 resets the peak, and touches no page.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True
